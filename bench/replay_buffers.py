"""The buffers that `replay.py` compares: each is filled with a workload, and then asked for batches of 256."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from replay_data import Workload, filling, step_bytes
from tensordict import TensorDict
from torchrl.data import CompressedListStorage, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

from slipstream import PackedEpisodeStorage

BATCH = 256
PREFETCH = 2
OURS = "slipstream PackedEpisodeStorage"
LAZY = "LazyTensorStorage"
FLOOR = "floor: copies of raw rows"
Sample = Callable[[], Any]
Arrays = dict[str, NDArray[Any]]


@dataclass
class Filled:
    """A buffer that was filled.

    Attributes:
        total: How many steps it holds.
        cpu_s: The CPU time of adding them, on all threads.
        thread_s: The CPU time of adding them on the thread that adds.
        sample: Draws a batch.
        prefetch: Draws a batch that another thread has prepared, if the buffer can do that.
        keeper: Keeps the buffer alive.
    """

    total: int
    cpu_s: float
    thread_s: float
    sample: Sample
    prefetch: Sample | None
    keeper: Any


class Clock:
    """Adds up the CPU time that is spent inside of it."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.thread_s = 0.0
        self._started = (0.0, 0.0)

    def __enter__(self) -> Self:
        self._started = (time.process_time(), time.thread_time())
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_s += time.process_time() - self._started[0]
        self.thread_s += time.thread_time() - self._started[1]


Contender = Callable[[Workload, int], Filled]


def flat_of(chunk: TensorDict) -> TensorDict:
    """Return the steps of all environments one after another."""
    return chunk.reshape(-1)


def fill_torchrl(make_storage: Callable[[int, int], Any], workload: Workload, limit: int) -> Filled:
    """Fill a storage of TorchRL's."""
    given = list(filling(workload, limit))
    ndim = given[0].ndim
    total = sum(chunk.numel() for chunk in given)
    storage = make_storage(total, ndim)
    buffer = ReplayBuffer(storage=storage, batch_size=BATCH)
    clock = Clock()
    for chunk in given:
        with clock:
            buffer.extend(chunk)
    ahead = ReplayBuffer(storage=storage, batch_size=BATCH, prefetch=PREFETCH)
    return Filled(total, clock.cpu_s, clock.thread_s, buffer.sample, ahead.sample, [buffer, ahead])


def fill_compressed_list(workload: Workload, limit: int) -> Filled:
    """Fill a `CompressedListStorage`, with flat keys: it leaves nested ones as they are."""
    buffer = ReplayBuffer(storage=CompressedListStorage(limit), batch_size=BATCH)
    clock = Clock()
    total = 0
    for chunk in filling(workload, limit):
        part = flat_of(chunk)[: limit - total].flatten_keys(".")
        with clock:
            buffer.extend(part)
        total += len(part)

    def sample() -> Any:
        return buffer.sample().contiguous()

    return Filled(total, clock.cpu_s, clock.thread_s, sample, None, buffer)


def fill_cpprb(workload: Workload, limit: int, *, share_frames: bool) -> Filled:
    """Fill a cpprb buffer that shares observations with their next ones, and frames of stacks, which it wants last."""
    import cpprb  # noqa: PLC0415 - a peer that may be absent

    given = list(filling(workload, limit))
    first = _cpprb_arrays(given[0], share_frames)
    shared = [name for name in first if f"next_{name}" in first]
    described = {}
    for name, values in first.items():
        if name.removeprefix("next_") not in shared or name in shared:
            described[name] = {"shape": values.shape[1:], "dtype": values.dtype}
    options: dict[str, Any] = {}
    if share_frames:
        options["stack_compress"] = ("pixels",)
    total = sum(chunk.numel() for chunk in given)
    buffer = cpprb.ReplayBuffer(total, described, next_of=tuple(shared), **options)
    clock = Clock()
    for chunk in given:
        arrays = _cpprb_arrays(chunk, share_frames)
        num_streams = chunk.shape[0] if chunk.ndim == 2 else 1
        with clock:
            # An episode at a time: its frames are shared.
            for stream in np.split(np.arange(chunk.numel()), num_streams):
                buffer.add(**{name: rows[stream] for name, rows in arrays.items()})
                buffer.on_episode_end()

    def sample() -> Any:
        return buffer.sample(BATCH)

    return Filled(total, clock.cpu_s, clock.thread_s, sample, None, buffer)


def _cpprb_arrays(chunk: TensorDict, frames_last: bool) -> Arrays:
    arrays = {}
    for key, tensor in flat_of(chunk).items(include_nested=True, leaves_only=True):
        name = ".".join(key) if isinstance(key, tuple) else key
        values = tensor.numpy()
        if frames_last and name.endswith("pixels"):
            values = np.ascontiguousarray(np.moveaxis(values, 1, -1))
        arrays[name.replace("next.", "next_")] = values
    return arrays


def fill_sb3(kind: str, workload: Workload, limit: int) -> Filled:
    """Fill a buffer of stable-baselines3 or sb3-extra-buffers, all of a step's observations as one vector or image."""
    import gymnasium  # noqa: PLC0415 - peers that may be absent
    from stable_baselines3.common.buffers import ReplayBuffer as Sb3Buffer  # noqa: PLC0415

    given = list(filling(workload, limit))
    observations, _, actions, _, _ = _sb3_arrays(given[0])
    num_streams = observations.shape[1]
    space: Any = gymnasium.spaces.Box(-np.inf, np.inf, observations.shape[2:], np.float32)
    if observations.dtype == np.uint8:
        space = gymnasium.spaces.Box(0, 255, observations.shape[2:], np.uint8)
    action_space = gymnasium.spaces.Box(-1, 1, actions.shape[2:], np.float32)
    total = sum(chunk.numel() for chunk in given)
    options: dict[str, Any] = {"n_envs": num_streams, "device": "cpu"}
    if kind == "optimized":
        options |= {"optimize_memory_usage": True, "handle_timeout_termination": False}
    if kind == "extra":
        from sb3_extra_buffers.compressed import CompressedReplayBuffer, find_buffer_dtypes  # noqa: PLC0415

        method = "lz4-frame"
        dtypes = find_buffer_dtypes(space.shape, space.dtype.type, method)
        buffer = CompressedReplayBuffer(total, space, action_space, dtypes=dtypes, compression_method=method, **options)
    else:
        buffer = Sb3Buffer(total, space, action_space, **options)
    infos: list[dict[str, Any]] = [{} for _ in range(num_streams)]
    clock = Clock()
    for chunk in given:
        steps = list(zip(*_sb3_arrays(chunk), strict=True))
        with clock:
            for now, after, action, reward, done in steps:
                buffer.add(now, after, action, reward, done, infos)

    def sample() -> Any:
        return buffer.sample(BATCH)

    return Filled(total, clock.cpu_s, clock.thread_s, sample, None, buffer)


def _sb3_arrays(chunk: TensorDict) -> tuple[NDArray[Any], ...]:
    """Return observations, next observations, actions, rewards and ends as ``[time, environments, ...]``."""
    data = chunk if chunk.ndim == 2 else chunk[None]
    inner = data.get("agents", data)
    inner_next = data["next"].get("agents", data["next"])
    shape = (data.shape[1], data.shape[0])
    zeros = torch.zeros(*data.shape, 1)
    action = inner.get("action", zeros).float()
    reward = inner_next.get("reward", zeros)
    done = data["next"].get("done", zeros)
    return (
        _time_first(_observation(inner.get("observation", inner)), shape),
        _time_first(_observation(inner_next.get("observation", inner_next)), shape),
        _time_first(action, shape),
        _time_first(reward, shape).reshape(shape),
        _time_first(done, shape).reshape(shape),
    )


def _observation(values: Any) -> torch.Tensor:
    """Return an image, or all vectors joined."""
    if isinstance(values, torch.Tensor):
        return values
    if "pixels" in values.keys():  # noqa: SIM118 - a TensorDict has no `in`
        pixels: torch.Tensor = values["pixels"]
        return pixels
    observations = values.exclude("action", "reward", "done", "next")
    return torch.cat([part.flatten(2) for part in observations.values()], -1)


def _time_first(tensor: torch.Tensor, shape: tuple[int, int]) -> NDArray[Any]:
    turned = tensor.transpose(0, 1)
    return turned.reshape(*shape, *tensor.shape[2:]).contiguous().numpy()


def fill_floor(workload: Workload, limit: int) -> Filled:
    """Fill an array of raw rows, a step with its next each; a batch is one gather, adding is one copy."""
    rows = np.zeros((limit, step_bytes(workload)), np.uint8)
    generator = np.random.default_rng(0)
    clock = Clock()
    total = 0
    for chunk in filling(workload, limit):
        part = [tensor.reshape(chunk.numel(), -1) for tensor in chunk.values(include_nested=True, leaves_only=True)]
        row = np.concatenate([tensor.contiguous().view(torch.uint8).numpy() for tensor in part], 1)
        with clock:
            rows[total : total + len(row)] = row[: limit - total]
        total = min(limit, total + len(row))

    def sample() -> Any:
        return rows.take(generator.integers(0, total, BATCH), axis=0)

    return Filled(total, clock.cpu_s, clock.thread_s, sample, None, rows)


def _packed(size: int, ndim: int) -> PackedEpisodeStorage:
    return PackedEpisodeStorage(size, ndim=ndim)


def _packed_plain(size: int, ndim: int) -> PackedEpisodeStorage:
    return PackedEpisodeStorage(size, ndim=ndim, pack_images=False)


def _lazy(size: int, ndim: int) -> LazyTensorStorage:
    return LazyTensorStorage(size, ndim=ndim)


def _memmap(size: int, ndim: int) -> LazyMemmapStorage:
    return LazyMemmapStorage(size, ndim=ndim, scratch_dir=tempfile.mkdtemp())


CONTENDERS: dict[str, tuple[Contender, float]] = {
    OURS: (functools.partial(fill_torchrl, _packed), 1.0),
    "slipstream, pack_images=False": (functools.partial(fill_torchrl, _packed_plain), 1.0),
    LAZY: (functools.partial(fill_torchrl, _lazy), 1.0),
    "LazyMemmapStorage (pages of files)": (functools.partial(fill_torchrl, _memmap), 0.3),
    "CompressedListStorage": (fill_compressed_list, 0.02),
    "cpprb, next shared": (functools.partial(fill_cpprb, share_frames=False), 1.0),
    "cpprb, next and frames shared": (functools.partial(fill_cpprb, share_frames=True), 1.0),
    "stable-baselines3": (functools.partial(fill_sb3, "plain"), 0.3),
    "stable-baselines3, optimize_memory_usage": (functools.partial(fill_sb3, "optimized"), 0.3),
    "sb3-extra-buffers, lz4-frame": (functools.partial(fill_sb3, "extra"), 0.05),
    FLOOR: (fill_floor, 0.5),
}
"""How each is filled, and with which share of the steps: slow ones get fewer."""

STACKS_ONLY: Sequence[str] = ("slipstream, pack_images=False", "cpprb, next and frames shared")
