"""Rollouts like those that a TorchRL collector yields."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict


def rollout(num_envs: int = 6, num_steps: int = 8, seed: int = 0, ends: float = 0.1) -> TensorDict:
    """Return a batch whose `next` holds what the next step holds, except where an episode ended."""
    generator = torch.Generator().manual_seed(seed)
    done = torch.rand(num_envs, num_steps, 1, generator=generator) < ends
    state = torch.randn(num_envs, num_steps + 1, 3, generator=generator).cumsum(1)
    lidar = (4 - 6 * torch.rand(num_envs, num_steps + 1, 1, 12, generator=generator)).clamp(0, 4)
    after = TensorDict(
        {"agents": {"observation": {"state": state[:, 1:].clone(), "lidar": lidar[:, 1:].clone()}}},
        batch_size=[num_envs, num_steps],
    )
    ended = done.squeeze(-1)
    after["agents", "observation", "state"][ended] += 100.0
    after["agents", "observation", "lidar"][ended] = float("nan")
    after["done"], after["reward"] = done, torch.randn(num_envs, num_steps, 1, generator=generator)
    return TensorDict(
        {
            "agents": {"observation": {"state": state[:, :-1], "lidar": lidar[:, :-1]}},
            "action": torch.rand(num_envs, num_steps, 3, generator=generator),
            "next": after,
            "done": torch.zeros(num_envs, num_steps, 1, dtype=torch.bool),
        },
        batch_size=[num_envs, num_steps],
        names=[None, "time"],
    )


def assert_equal(one: Any, other: Any) -> None:
    """Compare two TensorDicts: keys and their order, batch sizes, names, dtypes, shapes, and every bit."""
    assert list(one.keys(True)) == list(other.keys(True))
    assert one.batch_size == other.batch_size
    assert one.names == other.names
    for key in one.keys(True):
        mine, theirs = one[key], other[key]
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), key
            assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), key
        else:
            assert mine.batch_size == theirs.batch_size, key


@pytest.fixture
def make_rollout() -> Callable[..., TensorDict]:
    return rollout


@pytest.fixture
def same() -> Callable[[Any, Any], None]:
    return assert_equal
