"""Replay buffers against each other: memory, how fast steps are added, and what a batch of 256 costs.

    python bench/replay.py                              # print the tables; about eight minutes on two idle cores, 10 GB
    python bench/replay.py --quick                      # few steps, few batches; three minutes
    python bench/replay.py --write docs/benchmarks.md   # and put them into the page, between its markers

`replay_data.py` says what is stored: LiDAR, Atari games, MuJoCo robots and cameras; a short recording is repeated until
there are enough steps. `replay_buffers.py` has the buffers. Slow ones get fewer steps, as the tables say; peers and
games that are not installed are left out, and named at the end.

Every buffer has a separate process. Memory is what the process holds beyond what it held before, per step. Steps
are added at a rate per CPU second of all threads; *caller* compares the CPU time of the thread that adds. A batch is
256 steps drawn at random, with the observations after them, as contiguous tensors: CPU time on all threads and time by
the clock. Buffers sample in turns, some batches each, because a shared machine is now fast and now slow: a ratio is the
median of the ratios of all turns. *Prefetch* is the time by the clock of one iteration of a small learner that takes
batches which other threads prepare. All ratios are to `LazyTensorStorage`. The *floor* copies raw rows, a step and its
next in one piece, without a buffer around it. What our buffer returns is compared with what was put in.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from page import machine, write_section
from replay_buffers import BATCH, CONTENDERS, FLOOR, LAZY, OURS, STACKS_ONLY, Filled, Sample, flat_of
from replay_data import (
    GAMES,
    ROBOTS,
    Workload,
    chunks_of,
    filling,
    game_chunks,
    image_chunks,
    lidar_chunks,
    noise_bits,
    robot_chunks,
    step_bytes,
)
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer

from slipstream import EpisodeSliceSampler, PackedEpisodeStorage

PACKAGES = (
    *("tensordict", "torchrl", "cpprb", "stable-baselines3", "sb3-extra-buffers", "ale-py", "mujoco", "gymnasium"),
    "lz4",
    "zstandard",
)
PRELOADED = ("torchrl.data", "slipstream.replay.storage", "stable_baselines3.common.buffers")
TURNS = 6
GROWTH = (100, 10, 1)
LEARNER_STEPS = 20


@dataclass(frozen=True)
class Sizes:
    """How much to measure: steps of each kind of data, and batches."""

    lidar: int = 1_000_000
    stacks: int = 30_000
    frames: int = 4_000
    games: int = 20_000
    robots: int = 200_000
    recorded: int = 3_000
    batches: int = 60


QUICK = Sizes(lidar=65_536, stacks=2_000, frames=400, games=2_000, robots=20_000, recorded=1_000, batches=18)


@dataclass
class Result:
    """What was measured of one buffer.

    Attributes:
        total: How many steps it holds.
        held: Its memory per step.
        rate: Steps added per CPU second.
        thread_s: CPU time of the adding thread per step.
        cpu: CPU time of a batch in ms, for each turn.
        wall: Time of a batch by the clock in ms, for each turn.
        ahead: Time of a learner's iteration by the clock in ms, for each turn; none if it cannot prefetch.
    """

    total: int
    held: float
    rate: float
    thread_s: float
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)


# In the process of a buffer


def held_bytes() -> int:
    """Return the memory that this process holds, after what was freed went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem", "RssFile")))


def measure(name: str, workload: Workload, connection: Connection) -> None:
    """Fill one buffer, and sample from it whenever it is asked to; runs in a separate process."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    fill, share = CONTENDERS[name]
    tempfile.tempdir = str(workload.path.parent)  # which is deleted at the end
    try:
        # Once before, so that the allocator and the libraries have taken what they take once.
        few = 4 * max(BATCH, chunks_of(workload.path)[0].shape[0])
        fill(workload, few).sample()
        limit = max(4 * BATCH, int(workload.num_steps * share))
        before = held_bytes()
        filled = fill(workload, limit)
        memory = held_bytes() - before
        if name.startswith("slipstream"):
            check(workload, filled.keeper[0])
    except ImportError as error:
        connection.send(f"{name} ({error})")
        return
    total = filled.total
    connection.send(Result(total, memory / total, total / filled.cpu_s, filled.thread_s / total))
    learner = Learner()
    count = max(1, workload.num_batches // TURNS)
    while (command := connection.recv()) != "stop":
        if command == "sample":
            connection.send(time_batches(filled.sample, count))
        else:
            connection.send(time_learner(filled, learner))


def time_batches(sample: Sample, count: int) -> tuple[float, float]:
    """Return the CPU time and the time by the clock of a batch, in ms."""
    sample()
    times = []
    before = time.process_time()
    for _ in range(count):
        start = time.perf_counter()
        sample()
        times.append(time.perf_counter() - start)
    return 1e3 * (time.process_time() - before) / count, 1e3 * float(np.median(times))


class Learner:
    """A critic of some hundred units, whose update takes some milliseconds on one core."""

    def __init__(self) -> None:
        sizes = (256, 256, 256, 1)
        layers: list[torch.nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        self._model = torch.nn.Sequential(*layers)
        self._inputs = torch.randn(BATCH, sizes[0])

    def update(self) -> None:
        """Compute gradients, always of the same inputs: buffers differ, learners should not."""
        for _ in range(4):
            self._model.zero_grad()
            self._model(self._inputs).square().mean().backward()


def time_learner(filled: Filled, learner: Learner) -> float | None:
    """Return the time by the clock of an iteration with prefetched batches, in ms."""
    if filled.prefetch is None:
        return None
    threads = torch.get_num_threads()
    # The learner has one core, the threads that prepare batches have the others.
    torch.set_num_threads(1)
    times = []
    for _ in range(LEARNER_STEPS):
        start = time.perf_counter()
        filled.prefetch()
        learner.update()
        times.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 1e3 * float(np.median(times[2:]))


def check(workload: Workload, buffer: ReplayBuffer) -> None:
    """Compare what a buffer holds with what was put in."""
    first = next(filling(workload, 1))
    length = min(8, first.shape[-1])
    if first.ndim == 2:
        first = first.transpose(0, 1)
    found = buffer.storage.get(slice(0, length))
    for key, tensor in first[:length].items(include_nested=True, leaves_only=True):
        if not torch.equal(tensor, found[key]):
            raise ValueError(f"{key} came back changed")


# Tables


def compare(
    runs: Iterable[tuple[str, Workload]], left_out: list[str], *, prefetch: bool
) -> dict[tuple[str, int], Result]:
    """Measure buffers: they are filled one after another, and sample in turns. By name and number of steps."""
    results: dict[tuple[str, int], Result] = {}
    pipes: dict[tuple[str, int], Connection] = {}
    for name, workload in runs:
        found, pipe = start(name, workload)
        if isinstance(found, str):
            left_out.append(found)
            continue
        results[name, workload.num_steps] = found
        pipes[name, workload.num_steps] = pipe
    for _ in range(TURNS):
        for key, pipe in pipes.items():
            pipe.send("sample")
            cpu, wall = pipe.recv()
            results[key].cpu.append(cpu)
            results[key].wall.append(wall)
    if prefetch:
        take_turns_ahead(results, pipes)
    for pipe in pipes.values():
        pipe.send("stop")
    for process in multiprocessing.active_children():
        process.join()
    return results


def start(name: str, workload: Workload) -> tuple[Result | str, Connection]:
    """Fill a buffer in a new process; returns what was measured, or why nothing was, and the process's pipe."""
    # Processes are copies of a server that has only imported the libraries, which takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    mine, theirs = context.Pipe()
    context.Process(target=measure, args=(name, workload, theirs), daemon=True).start()
    theirs.close()
    try:
        found: Result | str = mine.recv()
    except EOFError:
        found = f"{name} (died)"
    return found, mine


def take_turns_ahead(results: dict[tuple[str, int], Result], pipes: dict[tuple[str, int], Connection]) -> None:
    """Measure prefetching, in turns."""
    for _ in range(TURNS):
        for key, pipe in pipes.items():
            pipe.send("prefetch")
            ahead = pipe.recv()
            if ahead is not None:
                results[key].ahead.append(ahead)


def ratio(mine: list[float], other: list[float]) -> float:
    """Return the median of the ratios of all turns."""
    return float(np.median(np.array(mine) / np.array(other)))


def table(workload: Workload, left_out: list[str]) -> str:
    """Compare all buffers on one workload."""
    names = [name for name in CONTENDERS if workload.has_stacks or name not in STACKS_ONLY]
    found = compare([(name, workload) for name in names], left_out, prefetch=True)
    results = {name: result for (name, _), result in found.items()}
    lazy = results[LAZY]
    lines = [
        f"**{workload.title}** ({step_bytes(workload)} bytes a step, its next observation included)",
        "",
        "| buffer | steps | bytes a step | of Lazy | added per CPU s | of Lazy | caller | CPU ms | of Lazy | batch ms "
        "| of Lazy | prefetch ms | of Lazy |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, result in results.items():
        cells = [
            name,
            str(result.total),
            f"{result.held:.0f}",
            f"{result.held / lazy.held:.3f}",
            f"{result.rate:.0f}",
            f"{result.rate / lazy.rate:.2f}",
            f"{lazy.thread_s / result.thread_s:.2f}",
            f"{np.median(result.cpu):.2f}",
            f"{ratio(result.cpu, lazy.cpu):.2f}",
            f"{np.median(result.wall):.2f}",
            f"{ratio(result.wall, lazy.wall):.2f}",
        ]
        if result.ahead:
            cells += [f"{np.median(result.ahead):.2f}", f"{ratio(result.ahead, lazy.ahead):.2f}"]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    if OURS in results and FLOOR in results:
        ours = results[OURS]
        lines += [
            "",
            f"Packed, a batch takes {ratio(ours.cpu, lazy.cpu):.2f} times the CPU time of LazyTensorStorage, "
            f"{ratio(ours.cpu, results[FLOOR].cpu):.1f} times that of copying raw rows.",
        ]
    return "\n".join(lines)


def growth(workload: Workload, left_out: list[str]) -> str:
    """Compare our buffer with LazyTensorStorage at several sizes."""
    sizes = [max(4 * BATCH, workload.num_steps // divisor) for divisor in GROWTH]
    runs = []
    for size in sizes:
        runs += [(name, replace(workload, num_steps=size)) for name in (OURS, LAZY)]
    found = compare(runs, left_out, prefetch=False)
    lines = [
        f"**{workload.title}: what grows** (CPU time; *of the smallest*: compared with the same buffer's first row)",
        "",
        "| steps | bytes a step | of Lazy | batch CPU ms | of the smallest | Lazy's ms | of the smallest | of Lazy |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    smallest = sizes[0]
    for size in sizes:
        ours = found[OURS, size]
        lazy = found[LAZY, size]
        cells = [
            str(ours.total),
            f"{ours.held:.0f}",
            f"{ours.held / lazy.held:.3f}",
            f"{np.median(ours.cpu):.2f}",
            f"{ratio(ours.cpu, found[OURS, smallest].cpu):.2f}",
            f"{np.median(lazy.cpu):.2f}",
            f"{ratio(lazy.cpu, found[LAZY, smallest].cpu):.2f}",
            f"{ratio(ours.cpu, lazy.cpu):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def slices(workload: Workload) -> str:
    """Measure what drawing slices costs right after a write, without reading them."""
    rows = []
    end = ("next", "done")
    given = [flat_of(chunk).select(end) for chunk in filling(workload, workload.num_steps)]
    total = sum(map(len, given))
    for name, storage, sampler in (
        ("slipstream EpisodeSliceSampler", PackedEpisodeStorage(total), EpisodeSliceSampler(slice_len=16)),
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


def recorded(
    make: Callable[[Path, str, int], Path], name: str, folder: Path, count: int, left_out: list[str]
) -> Path | None:
    """Record chunks; returns None, and notes why, if what makes them is not installed."""
    try:
        return make(folder, name, count)
    except ImportError as error:
        left_out.append(f"{name} ({error})")
        return None


def workloads(folder: Path, sizes: Sizes, left_out: list[str]) -> list[Workload]:
    """Record everything that buffers are filled with."""
    lidar_chunks(folder, 2)
    found = [
        Workload("lidar", "LiDAR of the embedded simulator", folder / "lidar", sizes.lidar, sizes.batches),
        Workload("only", "Only the LiDAR and its next", folder / "only", sizes.lidar, sizes.batches),
    ]
    few = max(TURNS, sizes.batches // 4)
    path = image_chunks(folder, "stacks", min(10, -(-sizes.stacks // 100)))
    title = "Noisy camera, stacks of four grey frames of 84 x 84"
    found.append(Workload("stacks", title, path, sizes.stacks, few, has_stacks=True))
    path = image_chunks(folder, "frames", min(4, -(-sizes.frames // 100)))
    found.append(Workload("frames", "Noisy camera, colour frames of 224 x 224", path, sizes.frames, few))
    count = max(1, sizes.recorded // 500)
    for game in GAMES:
        recording = recorded(game_chunks, game, folder, count, left_out)
        if recording is not None:
            title = f"Atari, {game}, four grey frames of 84 x 84"
            found.append(Workload(game, title, recording, sizes.games, few, has_stacks=True))
    for robot in ROBOTS:
        recording = recorded(robot_chunks, robot, folder, count, left_out)
        if recording is not None:
            found.append(Workload(robot, f"MuJoCo, {robot}", recording, sizes.robots, sizes.batches))
    return found


def run(sizes: Sizes, chosen: list[str]) -> str:
    """Measure everything and return the report."""
    left_out: list[str] = []
    parts = [machine(("numpy", "torch", *PACKAGES))]
    with tempfile.TemporaryDirectory() as name:
        for workload in workloads(Path(name), sizes, left_out):
            if chosen and workload.name not in chosen:
                continue
            parts.append(table(workload, left_out))
            if workload.name in ("lidar", "only", "stacks"):
                parts.append(growth(workload, left_out))
            if workload.name == "lidar":
                parts.append(slices(workload))
    bits = noise_bits()
    parts.append(
        f"The camera's noise alone has {bits:.2f} bits a pixel, so that no lossless codec packs its frames more than "
        f"{8 / bits:.2f} times, or a buffer that keeps each frame once more than {16 / bits:.1f} times as small as one "
        f"that keeps each twice, or {64 / bits:.0f} times in stacks of four, which hold each frame eight times."
    )
    if left_out:
        parts.append(f"Left out: {', '.join(sorted(set(left_out)))}.")
    return "\n\n".join(parts)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, few batches; about three minutes")
    parser.add_argument("--lidar", type=int, metavar="STEPS", help="LiDAR steps; one million by default")
    parser.add_argument("--stacks", type=int, metavar="STEPS", help="camera stacks; 30,000 by default")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="kinds of data, such as lidar or Pong")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the report into a page, between its markers")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else Sizes()
    sizes = replace(sizes, lidar=arguments.lidar or sizes.lidar, stacks=arguments.stacks or sizes.stacks)
    report = run(sizes, arguments.only)
    print(report)
    if arguments.write:
        write_section(arguments.write, "replay", report)


if __name__ == "__main__":
    main()
