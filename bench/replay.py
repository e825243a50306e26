"""Replay buffers against each other: memory, how fast steps are added, and what a batch of 256 costs.

    python bench/replay.py                              # print the tables
    python bench/replay.py --quick                      # few steps, few batches
    python bench/replay.py --write docs/benchmarks.md   # and put them into the page, between its markers

LiDAR steps are those of the embedded simulator (1024 drones, a policy that wanders), repeated until there are enough;
images are textured scenes that move, with sensor noise of two grey levels: stacks of four grey frames of 84 x 84, and
colour frames of 224 x 224. Every contender runs in a process of its own. Memory is what the process holds beyond what
it held before, per step; rates are steps per CPU second; a batch is 256 steps drawn at random, with the observations
after them, as contiguous tensors: the median of wall-clock times, and CPU time on all threads. Contenders sample in
turns, some batches each, because a shared machine is now fast and now slow; how they compare is the median over the
turns. What a buffer returns is compared with what was put in. Slow contenders get fewer steps, as the tables say.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from numpy.typing import NDArray
from page import machine, write_section
from tensordict import TensorDict
from torchrl.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)

from slipstream import EpisodeSliceSampler, NavigationConfig, NavigationEnv, PackedEpisodeStorage

PEERS = ("tensordict", "torchrl", "cpprb", "zstandard")
BATCH = 256
NOISE = 2.0
TURNS = 6
Sample = Callable[[], Any]


@dataclass(frozen=True)
class Workload:
    """A kind of data: where its chunks are, and how many steps to keep."""

    name: str
    path: Path
    num_steps: int
    num_batches: int


# Data


def lidar_chunks(folder: Path, count: int) -> Path:
    """Fly, and write rollouts ``[environments, time]`` with what an off-policy learner needs."""
    env = NavigationEnv(NavigationConfig(dynamics="lag", dt_s=0.1, max_episode_length=400, random_clocks=True, seed=1))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(1024, 3, generator=generator)

    data = env.reset()
    for number in range(-2, count):  # two rollouts to spread out
        steps = []
        for _ in range(32):
            direction = 0.95 * direction + 0.3 * torch.randn(1024, 3, generator=generator)
            data["agents", "action"] = direction.clamp(-2, 2) + torch.tensor([1.5, 0.0, 0.0])
            step, data = env.step_and_maybe_reset(data)
            after = step["next"].select("agents", "done", "terminated")
            steps.append(TensorDict({"agents": step["agents"], "next": after}, batch_size=step.batch_size))
        if number >= 0:
            stacked: TensorDict = TensorDict.stack(steps, 1)
            torch.save(stacked.to_dict(), folder / f"lidar_{number}.pt")
    return folder / "lidar"


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


@functools.cache
def chunks_of(path: Path) -> list[TensorDict]:
    """Read the chunks of a workload, once: before memory is measured."""
    found = sorted(path.parent.glob(f"{path.name}_*.pt"), key=lambda file: int(file.stem.rpartition("_")[2]))
    loaded = [torch.load(file) for file in found]
    return [TensorDict(data, batch_size=(1024, 32) if "agents" in data else (100,)) for data in loaded]


def _flat(data: TensorDict) -> TensorDict:
    return data.reshape(-1)


# Contenders: each fills a buffer and returns how to sample from it


def filling(workload: Workload, limit: int) -> Iterator[TensorDict]:
    """Yield chunks until there are enough steps."""
    chunks = chunks_of(workload.path)
    done = number = 0
    while done < limit:
        chunk = chunks[number % len(chunks)]
        yield chunk
        done += chunk.numel()
        number += 1


def torchrl_buffer(storage: Callable[[int, int], Any], *, axes: bool) -> Callable[..., tuple[int, float, Sample, Any]]:
    """Return a contender that is a storage of TorchRL's."""

    def fill(workload: Workload, limit: int) -> tuple[int, float, Sample, Any]:
        given = list(filling(workload, limit))  # the same few chunks, again and again
        ndim = 2 if axes and given[0].ndim == 2 else 1
        total = sum(chunk.numel() for chunk in given)
        buffer = ReplayBuffer(storage=storage(total, ndim), batch_size=BATCH)
        spent = 0.0
        for chunk in given:
            data = chunk if ndim == 2 else _flat(chunk)
            start = time.process_time()
            buffer.extend(data)
            spent += time.process_time() - start
        return total, spent, buffer.sample, buffer

    return fill


def compressed_list(workload: Workload, limit: int) -> tuple[int, float, Sample, Any]:
    """Fill a `CompressedListStorage`, with flat keys: it leaves nested ones as they are."""
    buffer = ReplayBuffer(storage=CompressedListStorage(limit), batch_size=BATCH)
    start, total = time.process_time(), 0
    for chunk in filling(workload, limit):
        part = _flat(chunk)[: limit - total].flatten_keys(".")
        buffer.extend(part)
        total += len(part)
    return total, time.process_time() - start, lambda: buffer.sample().contiguous(), buffer


def cpprb_buffer(workload: Workload, limit: int, *, stacks: bool = False) -> tuple[int, float, Sample, Any]:
    """Fill a cpprb buffer that shares observations with their next ones, and frames of stacks, which it wants last."""
    import cpprb  # noqa: PLC0415 - a peer that may be absent

    def arrays(chunk: TensorDict) -> dict[str, NDArray[Any]]:
        flat = _flat(chunk)
        names = {
            ".".join(key) if isinstance(key, tuple) else key: key
            for key in flat.keys(include_nested=True, leaves_only=True)
        }
        found = {name.replace("next.", "next_"): flat[key].numpy() for name, key in names.items()}
        for name in ("pixels", "next_pixels") if stacks else ():
            found[name] = np.ascontiguousarray(np.moveaxis(found[name], 1, -1))
        return found

    given = list(filling(workload, limit))
    first = arrays(given[0])
    shared = [name for name in first if f"next_{name}" in first]
    described = {
        name: {"shape": values.shape[1:], "dtype": values.dtype}
        for name, values in first.items()
        if name.removeprefix("next_") not in shared or name in shared
    }
    total = sum(chunk.numel() for chunk in given)
    shares = {"stack_compress": ("pixels",)} if stacks else {}
    buffer = cpprb.ReplayBuffer(total, described, next_of=tuple(shared), **shares)
    spent = 0.0
    streams = given[0].shape[0] if given[0].ndim == 2 else 1
    for chunk in given:
        values = arrays(chunk)
        start = time.process_time()
        for stream in np.split(np.arange(chunk.numel()), streams):  # an episode at a time: its frames are shared
            buffer.add(**{name: rows[stream] for name, rows in values.items()})
            buffer.on_episode_end()
        spent += time.process_time() - start
    return total, spent, lambda: buffer.sample(BATCH), buffer


def packed(size: int, ndim: int, **options: Any) -> PackedEpisodeStorage:
    """Make ours."""
    return PackedEpisodeStorage(size, ndim=ndim, **options)


def memmap(size: int, ndim: int) -> LazyMemmapStorage:
    """Make TorchRL's storage on disk, in the folder for temporary files."""
    return LazyMemmapStorage(size, ndim=ndim, scratch_dir=tempfile.mkdtemp())


CONTENDERS: dict[str, tuple[Callable[..., tuple[int, float, Sample, Any]], float]] = {
    "slipstream PackedEpisodeStorage": (torchrl_buffer(packed, axes=True), 1.0),
    "slipstream, pack_images=False": (torchrl_buffer(functools.partial(packed, pack_images=False), axes=True), 1.0),
    "LazyTensorStorage": (torchrl_buffer(lambda n, d: LazyTensorStorage(n, ndim=d), axes=True), 1.0),
    "LazyMemmapStorage (pages of files)": (torchrl_buffer(memmap, axes=True), 0.5),
    "CompressedListStorage": (compressed_list, 0.05),
    "cpprb, next shared": (cpprb_buffer, 1.0),
    "cpprb, next and frames shared": (functools.partial(cpprb_buffer, stacks=True), 1.0),
}
STACKS_ONLY = ("slipstream, pack_images=False", "cpprb, next and frames shared")


# Measuring


def held_bytes() -> int:
    """Return the memory that this process holds, after what was freed went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem", "RssFile")))


def measure(name: str, workload: Workload, connection: Connection) -> None:
    """Fill one contender, and sample from it whenever it is asked to; runs in a process of its own."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    fill, share = CONTENDERS[name]
    tempfile.tempdir = str(workload.path.parent)  # which is deleted at the end
    try:
        warm_up(workload)
        limit = max(4 * BATCH, int(workload.num_steps * share))
        before = held_bytes()
        total, add_s, sample, keeper = fill(workload, limit)
        memory = held_bytes() - before
        if isinstance(getattr(keeper, "storage", None), PackedEpisodeStorage):
            check(workload, keeper)
    except ImportError as error:
        connection.send(f"{name} ({error})")
        return
    connection.send((total, memory / total, total / add_s))
    count = max(1, workload.num_batches // TURNS)
    while connection.recv() == "sample":
        sample()
        times, cpu = [], time.process_time()
        for _ in range(count):
            start = time.perf_counter()
            sample()
            times.append(time.perf_counter() - start)
        connection.send((1e3 * float(np.median(times)), 1e3 * (time.process_time() - cpu) / count))


def warm_up(workload: Workload) -> None:
    """Let the allocator and the libraries take what they take once."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(BATCH), batch_size=8)
    buffer.extend(_flat(chunks_of(workload.path)[0])[:BATCH])
    buffer.sample()


def check(workload: Workload, buffer: Any) -> None:
    """Compare what a buffer holds with what was put in."""
    first = next(filling(workload, 1))
    some = buffer[: first.shape[-1]] if first.ndim == 1 else None
    if some is None:
        time_first = first.transpose(0, 1)[:8]
        some, first = buffer.storage.get(slice(0, 8)), time_first
    for key in first.keys(include_nested=True, leaves_only=True):
        if not torch.equal(first[key], some[key]):
            raise ValueError(f"{key} came back changed")


def table(title: str, workload: Workload, raw: int, left_out: list[str]) -> str:
    """Measure all contenders on one workload: they are filled one after another, and sample in turns."""
    filled: dict[str, tuple[int, float, float]] = {}
    pipes: dict[str, Connection] = {}
    context = multiprocessing.get_context("spawn")
    for name in CONTENDERS:
        if name in STACKS_ONLY and workload.name != "stacks":
            continue
        mine, theirs = context.Pipe()
        context.Process(target=measure, args=(name, workload, theirs), daemon=True).start()
        theirs.close()
        try:
            result = mine.recv()
        except EOFError:
            result = f"{name} (died)"
        if isinstance(result, str):
            left_out.append(result)
        else:
            filled[name], pipes[name] = result, mine
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in filled}
    for _ in range(TURNS):
        for name, pipe in pipes.items():
            pipe.send("sample")
            turns[name].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send("stop")
    for process in multiprocessing.active_children():
        process.join()
    walls = {name: np.array([wall for wall, _ in mine]) for name, mine in turns.items()}
    lazy = "LazyTensorStorage"
    lines = [
        f"**{title}** ({raw} bytes a step, its next observation included; *of Lazy*: of LazyTensorStorage)",
        "",
        "| buffer | steps | bytes a step | of Lazy | added per CPU s | batch ms | of Lazy | CPU ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (total, held, rate) in filled.items():
        cpu = float(np.median([cpu for _, cpu in turns[name]]))
        lines.append(
            f"| {name} | {total} | {held:.0f} | {held / filled[lazy][1]:.3f} | {rate:.0f} "
            f"| {np.median(walls[name]):.2f} | {np.median(walls[name] / walls[lazy]):.2f} | {cpu:.2f} |"
        )
    ours, compressed = walls["slipstream PackedEpisodeStorage"], walls["CompressedListStorage"]
    lines += [
        "",
        f"Packed, a batch takes {np.median(ours / walls[lazy]):.1f} times as long as from LazyTensorStorage (at most 4 "
        f"is the aim), and from CompressedListStorage {np.median(compressed / ours):.1f} times as long as packed (at "
        "least 5 is the aim).",
    ]
    return "\n".join(lines)


def slices(workload: Workload) -> str:
    """Measure what drawing slices costs right after a write, without reading them."""
    rows = []
    given = [_flat(chunk).select(("next", "done")) for chunk in filling(workload, workload.num_steps)]
    total, end = sum(map(len, given)), ("next", "done")
    for name, storage, sampler in (
        ("slipstream EpisodeSliceSampler", packed(total, 1), EpisodeSliceSampler(slice_len=16)),
        ("SliceSampler", LazyTensorStorage(total), SliceSampler(slice_len=16, end_key=end)),
        (
            "SliceSampler, cache_values",
            LazyTensorStorage(total),
            SliceSampler(slice_len=16, end_key=end, cache_values=True),
        ),
    ):
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)
        for chunk in given:
            chunk["next", "done"][-1] = True
            buffer.extend(chunk)
        times = []
        for _ in range(20):
            buffer.extend(given[0][:64])
            start = time.perf_counter()
            sampler.sample(storage, BATCH)
            times.append(time.perf_counter() - start)
        rows.append(f"| {name} | {1e3 * float(np.median(times)):.3f} |")
    title = f"**Slices of 16 steps, right after a write** ({total} steps, indices only)"
    return "\n".join([title, "", "| sampler | ms |", "|---|---:|", *rows])


def noise_bits() -> float:
    """Return the entropy of the sensor noise: what no lossless codec gets below, in bits a pixel."""
    edges = np.arange(-40, 42) - 0.5
    draws = np.random.default_rng(0).normal(0, NOISE, 4_000_000)
    share = np.histogram(draws, edges)[0] / len(draws)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def run(steps: int, stacks: int, frames: int, batches: int) -> str:
    """Measure everything and return the report."""
    left_out: list[str] = []
    parts = [machine(("numpy", "torch", *PEERS))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lidar = Workload("lidar", lidar_chunks(folder, min(4, -(-steps // 32768))), steps, batches)
        parts.append(table("LiDAR of the embedded simulator", lidar, _step_bytes(lidar), left_out))
        parts.append(slices(lidar))
        for kind, count, title in (
            ("stacks", stacks, "Noisy camera, stacks of four grey frames of 84 x 84"),
            ("frames", frames, "Noisy camera, colour frames of 224 x 224"),
        ):
            path = image_chunks(folder, kind, min(20, -(-count // 100)))
            workload = Workload(kind, path, count, max(5, batches // 4))
            parts.append(table(title, workload, _step_bytes(workload), left_out))
    bits = noise_bits()
    parts.append(
        f"The noise alone has {bits:.2f} bits a pixel, so that no lossless codec packs these frames more than "
        f"{8 / bits:.2f} times, or a buffer that keeps each frame once more than {16 / bits:.1f} times as small as one "
        f"that keeps each twice, or {64 / bits:.0f} times in stacks of four, which hold each frame eight times."
    )
    if left_out:
        parts.append(f"Left out: {', '.join(sorted(set(left_out)))}.")
    return "\n\n".join(parts)


def _step_bytes(workload: Workload) -> int:
    chunk = chunks_of(workload.path)[0]
    return int(sum(tensor.nbytes for tensor in chunk.values(include_nested=True, leaves_only=True)) // chunk.numel())


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, few batches")
    parser.add_argument("--steps", type=int, default=1_000_000, help="LiDAR steps")
    parser.add_argument("--stacks", type=int, default=100_000, help="stacks of 84 x 84 frames")
    parser.add_argument("--frames", type=int, default=16_000, help="frames of 224 x 224")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the report into a page, between its markers")
    arguments = parser.parse_args()
    sizes = (65_536, 2_000, 600, 20) if arguments.quick else (arguments.steps, arguments.stacks, arguments.frames, 100)
    report = run(*sizes)
    print(report)
    if arguments.write:
        write_section(arguments.write, "replay", report)


if __name__ == "__main__":
    main()
