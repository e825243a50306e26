"""Observations and rollouts made by hand."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from slipstream.rl import NavRLPolicy

SHAPES = {"lidar": (1, 36, 4), "state": (8,), "dynamic_obstacle": (1, 5, 10), "direction": (1, 3)}


def make_observations(*batch: int, seed: int = 0) -> TensorDict:
    """Return observations as an environment gives them, random."""
    generator = torch.Generator().manual_seed(seed)
    parts = {name: torch.rand(*batch, *shape, generator=generator) for name, shape in SHAPES.items()}
    return TensorDict({"agents": {"observation": parts}}, batch_size=list(batch))


def make_rollout(policy: NavRLPolicy, envs: int = 8, steps: int = 6, seed: int = 0) -> TensorDict:
    """Return what a collector gives: steps that follow each other, some episodes that end in either way."""
    seen = make_observations(envs, steps + 1, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    draw = torch.rand(envs, steps, 1, generator=generator)
    terminated, truncated = draw < 0.1, draw > 0.85
    torch.manual_seed(seed)
    rollout = policy.act(seen[:, :-1].clone())
    after = seen[:, 1:].clone()
    elsewhere = make_observations(envs, steps, seed=seed + 2)
    ended = (terminated | truncated)[..., 0]
    after[ended] = elsewhere[ended]
    reward = torch.randn(envs, steps, 1, generator=generator)
    after.update({"terminated": terminated, "truncated": truncated, "done": terminated | truncated})
    after.set(("agents", "reward"), reward)
    return rollout.set("next", after)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Batches here are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def observations() -> Callable[..., TensorDict]:
    return make_observations


@pytest.fixture
def rollout() -> Callable[..., TensorDict]:
    return make_rollout


@pytest.fixture
def policy() -> Callable[..., NavRLPolicy]:
    def make(seed: int = 0, spread: bool = True, **options: Any) -> NavRLPolicy:
        """Return a policy, the same for the same seed; with heads that tell observations apart if `spread`."""
        torch.manual_seed(seed)
        made = NavRLPolicy(**options)
        if spread:
            for name, parameter in made.named_parameters():
                if name.startswith(("actor", "critic")):
                    torch.nn.init.normal_(parameter, std=0.1)
        return made

    return make
