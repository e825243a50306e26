"""Episodes and TorchRL batches whose every number tells where it belongs."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict


def episode(steps: int, number: int = 0, image: bool = False) -> dict[str, Any]:
    """Return an episode whose frame t of episode n holds n * 1000 + t."""
    frames = number * 1000 + np.arange(steps + 1)
    arrays: dict[str, Any] = {
        "position": np.repeat(frames[:, None].astype(np.float32), 3, axis=1),
        "action": (number * 1000 + np.arange(steps)).astype(np.float64)[:, None] / 7,
        "done": np.arange(steps) == steps - 1,
    }
    if image:
        generator = np.random.default_rng(number)
        arrays["camera"] = (
            generator.integers(0, 9, (steps + 1, 24, 20, 3)) + frames[:, None, None, None] % 200
        ).astype(np.uint8)
    return arrays


def rollout(num_envs: int = 3, num_steps: int = 40, seed: int = 0, start: int = 0, image: bool = False) -> TensorDict:
    """Return a batch ``[environments, time]`` as a collector yields it, with episodes that end here and there."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(num_envs, num_steps + 1, 5, generator=generator).cumsum(1)
    done = torch.rand(num_envs, num_steps, 1, generator=generator) < 0.1
    after: dict[str, Any] = {"obs": {"state": state[:, 1:].clone()}}
    after["obs"]["state"][done.squeeze(-1)] += 100
    content: dict[str, Any] = {
        "obs": {"state": state[:, :-1].clone()},
        "action": torch.randn(num_envs, num_steps, 2, generator=generator),
        "time": (start + torch.arange(num_steps)).expand(num_envs, num_steps).clone(),
        "env": torch.arange(num_envs)[:, None].expand(num_envs, num_steps).clone(),
    }
    if image:
        pixels = torch.randint(0, 255, (num_envs, num_steps + 1, 3, 20, 24), generator=generator, dtype=torch.uint8)
        content["pixels"], after["pixels"] = pixels[:, :-1], pixels[:, 1:]
    after |= {"reward": torch.randn(num_envs, num_steps, 1, generator=generator), "done": done}
    after |= {"terminated": done.clone()}
    return TensorDict(content | {"next": after}, batch_size=[num_envs, num_steps], names=[None, "time"])


def assert_same(one: Any, other: Any) -> None:
    """Compare two TensorDicts or dicts bit for bit."""
    keys = (lambda td: set(td.keys(True, True))) if hasattr(one, "batch_size") else set
    assert keys(one) == keys(other)
    if hasattr(one, "batch_size"):
        assert one.batch_size == other.batch_size
    for key in keys(one):
        mine, theirs = torch.as_tensor(one[key]), torch.as_tensor(other[key])
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), key
        assert mine.numpy(force=True).tobytes() == theirs.numpy(force=True).tobytes(), key
