"""Running normalisation of values, so that the critic learns numbers around 0 whatever the scale of rewards."""

from __future__ import annotations

import torch
from torch import nn

_LEAST_DEBIASING = 1e-5
_LEAST_VARIANCE = 1e-2


class ValueNorm(nn.Module):
    """Normalises returns by exponentially averaged mean and variance, free of the bias towards the initial zeros.

    Before the first `update` the mean is 0 and the standard deviation 0.1, the least there is. No gradient reaches the
    statistics. Everything is float32; they are in the ``state_dict``.

    Args:
        size: Length of the last axis of what is normalised.
        beta: How much of the averages stays at each update.

    Example:
        >>> norm = ValueNorm(1)
        >>> norm.update(torch.tensor([[1.0], [3.0]]))
        >>> norm.normalize(torch.tensor([[3.0]])).round(decimals=3)
        tensor([[1.]])
    """

    running_mean: torch.Tensor
    running_mean_sq: torch.Tensor
    debiasing_term: torch.Tensor

    def __init__(self, size: int = 1, beta: float = 0.995) -> None:
        super().__init__()
        self.beta = beta
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_mean_sq", torch.zeros(size))
        self.register_buffer("debiasing_term", torch.zeros(()))

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation, each ``[size]``."""
        weight = self.debiasing_term.clamp(min=_LEAST_DEBIASING)
        mean = self.running_mean / weight
        variance = self.running_mean_sq / weight - mean.square()
        return mean, variance.clamp(min=_LEAST_VARIANCE).sqrt()

    @torch.no_grad()
    def update(self, values: torch.Tensor) -> None:
        """Take values ``[..., size]`` into the averages, as one step of them however many they are."""
        rows = values.detach().reshape(-1, values.shape[-1]).float()
        self.update_moments(rows.mean(0), rows.square().mean(0))

    @torch.no_grad()
    def update_moments(self, mean: torch.Tensor, mean_of_squares: torch.Tensor) -> None:
        """Take values into the averages of which only these two means are known, ``[size]`` each."""
        self.running_mean.lerp_(mean, 1 - self.beta)
        self.running_mean_sq.lerp_(mean_of_squares, 1 - self.beta)
        self.debiasing_term.mul_(self.beta).add_(1 - self.beta)

    def normalize(self, values: torch.Tensor) -> torch.Tensor:
        """Return values ``[..., size]`` in units of the critic."""
        mean, deviation = self.statistics()
        return (values - mean) / deviation

    def denormalize(self, values: torch.Tensor) -> torch.Tensor:
        """Return values ``[..., size]`` of the critic in units of the reward."""
        mean, deviation = self.statistics()
        return values * deviation + mean
