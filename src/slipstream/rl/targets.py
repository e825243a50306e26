"""What an update aims at: advantages and returns of a rollout, and their statistics over all shards of a run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from slipstream.errors import RolloutError
from slipstream.rl.gradients import in_chunks
from slipstream.rl.network import VALUE, NavRLPolicy


class Targets(NamedTuple):
    """Advantages and returns of a rollout in units of the reward, ``[environment, time, 1]`` each.

    Attributes:
        reward: What the environment paid.
        value: What the policy expected when it acted.
        advantage: How much better than expected each step was.
        target: What the value should have been: the return.
    """

    reward: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    target: torch.Tensor

    def named(self) -> dict[str, torch.Tensor]:
        """Return all four by the names that error messages use."""
        return {"reward": self.reward, "value": self.value, "advantage": self.advantage, "return": self.target}


@torch.no_grad()
def estimate_targets(policy: NavRLPolicy, batch: Any, *, navrl_compat: bool = False) -> Targets:
    """Return advantages, not normalised, and returns of a rollout.

    Args:
        policy: Whose values count.
        batch: Rollout ``[environment, time]``, as for `PPO`.
        navrl_compat: Whether advantages leak across truncation, as in the original.

    Raises:
        RolloutError: If the batch has another shape.
    """
    if len(batch.batch_size) != 2:
        raise RolloutError(f"the batch has the shape {list(batch.batch_size)}, expected [environment, time]")
    reward = batch["next", "agents", "reward"]
    terminated, done = batch["next", "terminated"], batch["next", "done"]
    value = batch[VALUE]
    next_value = policy.value_norm.denormalize(next_values(policy, batch))
    value = policy.value_norm.denormalize(value)
    end = terminated if navrl_compat else done
    advantage, target = policy.gae(reward, terminated, end, value, next_value)
    return Targets(reward, value, advantage, target)


@torch.no_grad()
def next_values(policy: NavRLPolicy, batch: Any) -> torch.Tensor:
    """Return normalised values of next observations, ``[environment, time, 1]``; ignore those of terminated steps.

    They are computed only where the next observation is not that of the next step; elsewhere, the rollout has them.

    Args:
        policy: Whose values.
        batch: Rollout ``[environment, time]``.
    """
    value: torch.Tensor = batch[VALUE]
    terminated, done = batch["next", "terminated"], batch["next", "done"]
    seen, seen_next = (batch[(*prefix, "agents", "observation", "state")] for prefix in ((), ("next",)))
    is_new = torch.ones_like(done[..., 0])
    is_new[:, :-1] = done[:, :-1, 0] | (seen[:, 1:] != seen_next[:, :-1]).any(-1)
    is_new &= ~terminated[..., 0]
    values = value.roll(-1, 1)
    flat, flat_values = batch.reshape(-1), values.view(-1, 1)
    for index in in_chunks(is_new.reshape(-1).nonzero().squeeze(1)):
        flat_values[index] = policy.evaluate(flat[index]["next"])[1]
    return values


class Moments:
    """Means and variances over the samples of all shards.

    Sums are float64. They are the same for any number of processes, because `row` depends on one shard only and rows
    are added by `ShardGroup.sum`.

    Args:
        total: Sum of the rows of all shards.
    """

    def __init__(self, total: torch.Tensor) -> None:
        self._total = total

    @staticmethod
    def row(targets: Targets) -> torch.Tensor:
        """Return the sums of one shard."""
        parts = [torch.tensor([targets.target.numel()], dtype=torch.float64, device=targets.target.device)]
        error = targets.target.double() - targets.value.double()
        for values in (targets.advantage.double(), targets.target.double(), error):
            parts.append(values.sum().reshape(1))
            parts.append(values.square().sum().reshape(1))
        return torch.cat(parts)

    def are_finite(self) -> bool:
        """Return whether every sample of every shard is finite."""
        return bool(self._total.isfinite().all())

    @property
    def count(self) -> torch.Tensor:
        """The number of samples."""
        return self._total[0]

    def advantage(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of advantages, the latter without bias."""
        mean = self._total[1] / self.count
        squares = self._total[2] - self.count * mean.square()
        deviation = (squares / (self.count - 1)).clamp(min=0).sqrt()
        return mean.float(), deviation.float()

    def target(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean of returns, and of their squares."""
        return (self._total[3] / self.count).float(), (self._total[4] / self.count).float()

    def explained_variance(self) -> float:
        """Return the explained variance of values: 1 is perfect, 0 no better than the mean, negative is worse."""
        of_target = self._variance(3)
        return float(1 - self._variance(5) / of_target.clamp(min=1e-8))

    def _variance(self, place: int) -> torch.Tensor:
        mean = self._total[place] / self.count
        return (self._total[place + 1] / self.count - mean.square()).clamp(min=0)
