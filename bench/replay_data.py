"""What `replay.py` fills buffers with: chunks of real steps in files, as off-policy learners keep them.

- LiDAR: the embedded simulator, 1024 drones with a policy that wanders. Once with all keys of a step, and once with
  nothing but the LiDAR and its next.
- Atari: three games with a policy that repeats random actions, as four grey frames of 84 x 84.
- MuJoCo: two robots with random actions, as float32.
- Cameras: textured scenes that move, with sensor noise of two grey levels, as four grey frames of 84 x 84 and as colour
  frames of 224 x 224.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from slipstream import NavigationConfig, NavigationEnv

NOISE = 2.0
STREAMS = 1024
GAMES = ("Breakout", "MsPacman", "Pong")
ROBOTS = ("HalfCheetah", "Humanoid")
CHUNK_STEPS = 500


@dataclass(frozen=True)
class Workload:
    """A kind of data: where its chunks are, and how many steps to keep."""

    name: str
    title: str
    path: Path
    num_steps: int
    num_batches: int
    has_stacks: bool = False


def lidar_chunks(folder: Path, count: int) -> None:
    """Fly, and write rollouts ``[environments, time]``: with what an off-policy learner needs, and only the LiDAR."""
    env = NavigationEnv(NavigationConfig(dynamics="lag", dt_s=0.1, max_episode_length=400, random_clocks=True, seed=1))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(STREAMS, 3, generator=generator)

    data = env.reset()
    for number in range(-2, count):  # two rollouts to spread out
        steps = []
        for _ in range(32):
            direction = 0.95 * direction + 0.3 * torch.randn(STREAMS, 3, generator=generator)
            data["agents", "action"] = direction.clamp(-2, 2) + torch.tensor([1.5, 0.0, 0.0])
            step, data = env.step_and_maybe_reset(data)
            after = step["next"].select("agents", "done", "terminated")
            steps.append(TensorDict({"agents": step["agents"], "next": after}, batch_size=step.batch_size))
        if number >= 0:
            stacked: TensorDict = TensorDict.stack(steps, 1)
            torch.save(stacked.to_dict(), folder / f"lidar_{number}.pt")
            only = {"lidar": stacked["agents", "observation", "lidar"]}
            only["next"] = {"lidar": stacked["next", "agents", "observation", "lidar"]}
            torch.save(only, folder / f"only_{number}.pt")


def video(count: int, size: int, colours: int, seed: int) -> NDArray[np.uint8]:
    """Return frames of a textured scene that moves under a camera with sensor noise."""
    generator = np.random.default_rng(seed)
    extent = 3 * size
    scene = np.zeros((extent, extent, colours), np.float32)
    for octave in (64, 32, 16, 8, 4):
        coarse = generator.normal(size=(extent // octave + 2, extent // octave + 2, colours)).astype(np.float32)
        grid = np.linspace(0, len(coarse) - 1.001, extent)
        low = grid.astype(int)
        share = (grid - low)[:, None, None].astype(np.float32)
        tall = coarse[low] * (1 - share) + coarse[low + 1] * share
        share = share.transpose(1, 0, 2)
        scene += (tall[:, low] * (1 - share) + tall[:, low + 1] * share) * octave**0.7
    scene = (scene - scene.min()) / (scene.max() - scene.min()) * 235 + 10
    noise = generator.normal(0, NOISE, 4 << 20).astype(np.float32)
    frames = np.empty((count, size, size, colours), np.uint8)
    for number in range(count):
        y = size + 0.6 * size * np.sin(1.7 * number / size + seed)
        x = size + 0.6 * size * np.sin(2.2 * number / size + 2 * seed)
        top, left = int(y), int(x)
        part = scene[top : top + size + 1, left : left + size + 1]
        part = part[:-1] * (1 - (y - top)) + part[1:] * (y - top)
        part = part[:, :-1] * (1 - (x - left)) + part[:, 1:] * (x - left)
        offset = int(generator.integers(0, len(noise) - part.size))
        frames[number] = np.clip(np.rint(part + noise[offset : offset + part.size].reshape(part.shape)), 0, 255)
    return frames


def image_chunks(folder: Path, name: str, count: int) -> Path:
    """Write episodes of 100 steps: stacks of four grey frames, or colour frames, channels first."""
    for number in range(count):
        if name == "stacks":
            grey = video(104, 84, 1, number)[..., 0]
            pixels = np.stack([grey[place : place + 101] for place in range(4)], axis=1)
        else:
            pixels = np.ascontiguousarray(video(101, 224, 3, number).transpose(0, 3, 1, 2))
        frames = torch.from_numpy(pixels)
        data = {
            "pixels": frames[:-1].contiguous(),
            "action": torch.randn(100, 6),
            "next": {
                "pixels": frames[1:].contiguous(),
                "reward": torch.randn(100, 1),
                "done": (torch.arange(100) == 99)[:, None],
            },
        }
        torch.save(data, folder / f"{name}_{number}.pt")
    return folder / name


def game_chunks(folder: Path, game: str, count: int) -> Path:
    """Play an Atari game, and write chunks of consecutive steps.

    Raises:
        ImportError: If there is no emulator.
    """
    import ale_py  # noqa: PLC0415 - a part of the benchmark's extra
    import gymnasium as gym  # noqa: PLC0415
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation  # noqa: PLC0415

    gym.register_envs(ale_py)
    env: Any = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = FrameStackObservation(AtariPreprocessing(env, noop_max=30), 4)
    # Random actions, each held for a while: otherwise paddles and figures stay where they are.
    generator = np.random.default_rng(0)

    def policy(before: Any) -> Any:
        if before is None or generator.random() < 0.2:
            return generator.integers(env.action_space.n)
        return before

    return _play(env, policy, "pixels", folder / game, count)


def robot_chunks(folder: Path, robot: str, count: int) -> Path:
    """Move a MuJoCo robot at random, and write chunks of consecutive steps.

    Raises:
        ImportError: If there is no simulator.
    """
    import gymnasium as gym  # noqa: PLC0415 - a part of the benchmark's extra

    try:
        env = gym.make(f"{robot}-v5")
    except gym.error.DependencyNotInstalled as error:
        raise ImportError(str(error)) from error
    env.action_space.seed(0)

    def policy(_: Any) -> Any:
        return env.action_space.sample()

    return _play(env, policy, "observation", folder / robot, count)


def _play(env: Any, policy: Callable[[Any], Any], name: str, path: Path, count: int) -> Path:
    observation, _ = env.reset(seed=0)
    action = None
    for number in range(count):
        steps: dict[str, list[Any]] = {"now": [], "after": [], "action": [], "reward": [], "done": []}
        for _ in range(CHUNK_STEPS):
            action = policy(action)
            after, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            for key, value in zip(steps, (observation, after, action, reward, done), strict=True):
                steps[key].append(np.asarray(value))
            observation = after
            if done:
                observation, _ = env.reset()
                action = None
        arrays = {key: _tensor(values) for key, values in steps.items()}
        after_step = {name: arrays["after"], "reward": arrays["reward"][:, None], "done": arrays["done"][:, None]}
        data = {name: arrays["now"], "action": arrays["action"].reshape(CHUNK_STEPS, -1), "next": after_step}
        torch.save(data, path.parent / f"{path.name}_{number}.pt")
    env.close()
    return path


def _tensor(values: list[Any]) -> torch.Tensor:
    """Stack values as float32, which learners want; images and flags stay what they are."""
    stacked = np.stack(values)
    if stacked.dtype == np.float64:
        stacked = stacked.astype(np.float32)
    return torch.from_numpy(stacked)


@functools.cache
def chunks_of(path: Path) -> list[TensorDict]:
    """Read the chunks of a workload, once: before memory is measured."""
    found = sorted(path.parent.glob(f"{path.name}_*.pt"), key=_number_of)
    is_streams = path.name in ("lidar", "only")
    chunks = []
    for file in found:
        data = torch.load(file)
        batch_size = (STREAMS, 32) if is_streams else data["action"].shape[:1]
        chunks.append(TensorDict(data, batch_size=batch_size))
    return chunks


def _number_of(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])


def filling(workload: Workload, limit: int) -> Iterator[TensorDict]:
    """Yield chunks until there are enough steps: the same few, again and again."""
    chunks = chunks_of(workload.path)
    done = number = 0
    while done < limit:
        chunk = chunks[number % len(chunks)]
        # The last one is cut along time.
        rest = -(-(limit - done) // (chunk.numel() // chunk.shape[-1]))
        if rest < chunk.shape[-1]:
            chunk = chunk[..., :rest].clone()
        yield chunk
        done += chunk.numel()
        number += 1


def step_bytes(workload: Workload) -> int:
    """Return the bytes of one step with its next, not packed."""
    chunk = chunks_of(workload.path)[0]
    return int(sum(tensor.nbytes for tensor in chunk.values(include_nested=True, leaves_only=True)) // chunk.numel())


def noise_bits() -> float:
    """Return the entropy of the sensor noise: the least that a lossless codec can take, in bits a pixel."""
    edges = np.arange(-40, 42) - 0.5
    draws = np.random.default_rng(0).normal(0, NOISE, 4_000_000)
    share = np.histogram(draws, edges)[0] / len(draws)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())
