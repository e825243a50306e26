"""Generalised advantage estimation, with the two ways in which an episode ends kept apart."""

from __future__ import annotations

import torch
from torch import nn


class GAE(nn.Module):
    """Discount and decay of advantage estimation, kept in the ``state_dict`` as the original does.

    Args:
        gamma: Discount of a step.
        lmbda: Decay of what lies ahead.
    """

    gamma: torch.Tensor
    lmbda: torch.Tensor

    def __init__(self, gamma: float = 0.99, lmbda: float = 0.95) -> None:
        super().__init__()
        self.register_buffer("gamma", torch.tensor(float(gamma)))
        self.register_buffer("lmbda", torch.tensor(float(lmbda)))

    def set_to(self, gamma: float, lmbda: float) -> None:
        """Use another discount and decay from now on."""
        self.gamma.fill_(gamma)
        self.lmbda.fill_(lmbda)

    def forward(
        self,
        reward: torch.Tensor,
        terminated: torch.Tensor,
        done: torch.Tensor,
        value: torch.Tensor,
        next_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns; see `generalized_advantages`."""
        return generalized_advantages(reward, terminated, done, value, next_value, self.gamma, self.lmbda)


def generalized_advantages(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    value: torch.Tensor,
    next_value: torch.Tensor,
    gamma: float | torch.Tensor = 0.99,
    lmbda: float | torch.Tensor = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how much better than expected each step was, and what its value should have been.

    A terminated step has no future. A truncated one has: that of the observation it led to, so `next_value` has to be
    the value of that one, not of the reset that follows; but no advantage flows back to it from the episode that
    follows. Where `terminated`, `next_value` does not matter, not even if it is not finite.

    All tensors are ``[..., time, 1]``; a loop over time works on all environments at once, in memory of three such
    tensors.

    Args:
        reward: Of each step.
        terminated: Whether the step ended an episode for good.
        done: Whether the step ended an episode at all; given `terminated` itself, advantages leak across truncation as
            in the original.
        value: Of the observation that the step began with.
        next_value: Of the observation that it led to.
        gamma: Discount of a step.
        lmbda: Decay of what lies ahead.

    Returns:
        Advantages, not normalised, and returns.

    Example:
        >>> one, no = torch.ones(1, 2, 1), torch.zeros(1, 2, 1, dtype=torch.bool)
        >>> generalized_advantages(one, no, no, 0 * one, 0 * one, gamma=0.5, lmbda=1.0)[0].flatten()
        tensor([1.5000, 1.0000])
    """
    future = torch.where(terminated, 0.0, next_value)
    advantage = reward + gamma * future - value
    keep = gamma * lmbda * (~(done | terminated)).to(advantage.dtype)
    for step in range(advantage.shape[-2] - 2, -1, -1):
        advantage[..., step, :] += keep[..., step, :] * advantage[..., step + 1, :]
    return advantage, advantage + value
