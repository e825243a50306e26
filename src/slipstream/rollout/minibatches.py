"""Shuffle the steps of a packed rollout so that a minibatch decodes few groups of environments."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def grouped_indices(
    num_envs: int,
    num_steps: int,
    num_minibatches: int,
    group_envs: int,
    window: int = 4,
    generator: torch.Generator | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the numbers of all steps once, shuffled, in equal minibatches that each touch few groups of environments.

    Groups come in random order, and the steps of `window` consecutive groups are mixed. A window of all groups is an
    ordinary shuffle; a window of 1 decodes and mixes least. Steps that do not fill a minibatch are left out, as NavRL
    does.

    Args:
        num_envs: Number of environments.
        num_steps: Number of steps of each; step ``t`` of environment ``e`` has the number ``e * num_steps + t``.
        num_minibatches: Number of minibatches.
        group_envs: Number of environments that are packed together.
        window: Number of groups that are mixed.
        generator: Draws the order; torch's default generator if None.
    """
    size = num_envs * num_steps // num_minibatches if num_minibatches > 0 else 0
    if size < 1 or window < 1 or group_envs < 1:
        raise ValueError(
            f"cannot make {num_minibatches} minibatches of {num_envs} x {num_steps} steps with groups of {group_envs} "
            f"environments and a window of {window}"
        )
    # Always on the CPU: packed rollouts are there, whatever torch's default device is.
    order = torch.randperm(-(-num_envs // group_envs), generator=generator, device="cpu")
    windows = []
    for first in range(0, len(order), window):
        some = order[first : first + window].tolist()
        ends = [(group * group_envs, min(num_envs, (group + 1) * group_envs)) for group in some]
        envs = torch.cat([torch.arange(begin, end, device="cpu") for begin, end in ends])
        numbers = (envs[:, None] * num_steps + torch.arange(num_steps, device="cpu")).reshape(-1)
        windows.append(numbers[torch.randperm(len(numbers), generator=generator, device="cpu")])
    # A minibatch may span the border of two windows.
    mixed = torch.cat(windows)
    for start in range(0, size * num_minibatches, size):
        yield mixed[start : start + size]
