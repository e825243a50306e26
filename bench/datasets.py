"""Recorded images against what people do to read them: time, images a second, and memory, for each way to store them.

    python bench/datasets.py                              # print the tables
    python bench/datasets.py --quick                      # few files, few repetitions
    python bench/datasets.py --write docs/benchmarks.md   # and put them into the page, between its markers

The task is a batch of 256 random transitions of three cameras: 1,536 different images of 256x256, resized to 224x224,
channels first, uint8. The files are made here: pictures with gradients, moving spots and sensor noise, in episodes of
50 steps. They are in the page cache, so that what is measured is not the disk. Each contender runs in a process of its
own; CPU milliseconds are those of all its threads, the least of a few repetitions. Anonymous memory is what a process
allocated, file memory what it mapped. Floors are measured in the process of the contender, in turns with it, and on as
many threads: two that share a core take more CPU time for the same work than one. How much more a contender takes than
its floor is the median over those turns, because this machine's cores are now fast and now slow. A peer that is not
installed is left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import cv2
import h5py
import hdf5plugin
import numpy as np
import torch
from numpy.typing import NDArray
from page import machine, write_section

from slipstream import MultimodalReplayBuffer, ingest
from slipstream.datasets.cache import FrameCache, cache_path
from slipstream.threads import default_threads

PEERS = ("h5py", "opencv-python-headless", "hdf5plugin", "deflate", "torchrl", "cpprb", "robomimic", "minari")
CAMERAS = ("left", "right", "global")
BATCH, SIZE, STORED, EPISODE = 256, 224, 256, 50
FRAME = (STORED, STORED, 3)
Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Setting:
    """How much is done."""

    folder: Path
    num_steps: int
    repetitions: int
    quick: bool

    def path(self, name: str) -> Path:
        """Where a file of the benchmark is."""
        return self.folder / f"{name}.hdf5"


def pictures(camera: int, first: int, count: int) -> Images:
    """Make pictures of a scene that moves, with noise as of a sensor."""
    generator = np.random.default_rng(1000 * camera)
    noise = generator.normal(0, 2, (8, *FRAME)).astype(np.float32)
    rows, columns = np.mgrid[:STORED, :STORED].astype(np.float32)
    scene = np.stack([rows / 2 + 40, columns / 2 + 60, 120 + 60 * np.sin(rows / 20) * np.cos(columns / 15)], -1)
    out = np.empty((count, *FRAME), np.uint8)
    for number in range(count):
        at = 2 * np.pi * (first + number) / EPISODE + camera
        x, y = STORED * (0.5 + 0.3 * np.cos(at)), STORED * (0.5 + 0.3 * np.sin(at))
        spot = 90 * np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / 300)
        out[number] = (scene + spot[..., None] + noise[(first + number) % 8]).clip(0, 255)
    return out


def numbers(steps: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Make what is not an image, of a stretch of steps."""
    generator = np.random.default_rng(seed)
    ends = np.arange(1, steps + 1) % EPISODE == 0
    return {
        "joint": generator.normal(size=(steps + 1, 16)).astype(np.float32),
        "actions": generator.normal(size=(steps, 7)).astype(np.float32),
        "rewards": generator.normal(size=steps).astype(np.float32),
        "terminals": ends,
    }


STORAGE: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip": {"compression": "gzip", "compression_opts": 4},
    "lzf": {"compression": "lzf"},
    "lz4": dict(hdf5plugin.LZ4()),
    "zstd": dict(hdf5plugin.Zstd(clevel=3)),
    "blosc": dict(hdf5plugin.Blosc(cname="lz4")),
}


def write_flat(path: Path, steps: int, *, chw: bool = False, jpeg: bool = False, **options: Any) -> None:
    """Write layout A: one dataset per camera."""
    with h5py.File(path, "w") as file:
        for number, camera in enumerate(CAMERAS):
            images = pictures(number, 0, steps + 1)
            if jpeg:
                packed = [cv2.imencode(".jpg", image[..., ::-1])[1].reshape(-1) for image in images]
                width = max(map(len, packed))
                file[f"observations/{camera}_image"] = np.stack([np.pad(one, (0, width - len(one))) for one in packed])
                continue
            images = np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if chw else images
            chunks = (1, *images.shape[1:]) if options else None
            file.create_dataset(f"observations/{camera}_image", data=images, chunks=chunks, **options)
        found = numbers(steps)
        file["observations/joint"] = found.pop("joint")
        for name, values in found.items():
            file[name] = values


def write_episodes(path: Path, steps: int, layout: str) -> None:
    """Write a group per episode, as robomimic and Minari do."""
    with h5py.File(path, "w") as file:
        for number in range(steps // EPISODE):
            robomimic = layout == "robomimic"
            group = file.create_group(f"data/demo_{number}" if robomimic else f"episode_{number}")
            group.attrs["num_samples" if robomimic else "total_steps"] = EPISODE
            found = numbers(EPISODE, number)
            rows = EPISODE if robomimic else EPISODE + 1
            for camera, name in enumerate(CAMERAS):
                images = pictures(camera, number * EPISODE, EPISODE + 1)
                group[f"{'obs' if robomimic else 'observations'}/{name}_image"] = images[:rows]
                if robomimic:
                    group[f"next_obs/{name}_image"] = images[1:]
            group[f"{'obs' if robomimic else 'observations'}/joint"] = found["joint"][:rows]
            if robomimic:
                group["next_obs/joint"] = found["joint"][1:]
            group["actions"], group["rewards"] = found["actions"], found["rewards"]
            group["dones" if robomimic else "terminations"] = found["terminals"]
            if not robomimic:
                group["truncations"] = np.zeros(EPISODE, bool)


def write_minari_metadata(folder: Path, steps: int) -> None:
    """Write what Minari wants to know besides."""
    image = {"type": "Box", "dtype": "uint8", "shape": list(FRAME)}
    image |= {"low": np.zeros(FRAME, int).tolist(), "high": np.full(FRAME, 255).tolist()}
    vector = {"type": "Box", "dtype": "float32"}
    spaces = {f"{name}_image": image for name in CAMERAS}
    spaces["joint"] = vector | {"shape": [16], "low": [-9.0] * 16, "high": [9.0] * 16}
    metadata = {
        "total_episodes": steps // EPISODE,
        "total_steps": steps,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": json.dumps({"type": "Dict", "subspaces": spaces}),
        "action_space": json.dumps(vector | {"shape": [7], "low": [-9.0] * 7, "high": [9.0] * 7}),
        "dataset_id": "bench-v0",
        "minari_version": "0.5.0",
        "dataset_size": 1.0,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata))


def make_files(setting: Setting) -> None:
    """Write all files that contenders read."""
    steps = setting.num_steps
    for name in ("contiguous", "gzip") if setting.quick else STORAGE:
        write_flat(setting.path(name), steps, **STORAGE[name])
    ingest(setting.path("contiguous"), SIZE)
    if setting.quick:
        return
    write_flat(setting.path("chw"), steps, chw=True)
    write_flat(setting.path("jpeg"), steps, jpeg=True)
    write_episodes(setting.path("robomimic"), steps, "robomimic")
    (setting.folder / "minari" / "data").mkdir(parents=True)
    write_episodes(setting.folder / "minari" / "data" / "main_data.hdf5", steps, "Minari")
    write_minari_metadata(setting.folder / "minari" / "data", steps)
    ingest(setting.path("lz4"), SIZE, compress=True)


Step = Callable[[], Any]


def ours(setting: Setting, name: str, *, cache: bool = False, **options: Any) -> Step:
    """Sample from our buffer."""
    buffer = MultimodalReplayBuffer(7, seed=0, **options)
    buffer.load_from_hdf5(setting.path(name), cache=cache)
    generator = np.random.default_rng(0)
    return lambda: buffer.sample(BATCH, draw(generator, setting.num_steps))


def draw(generator: np.random.Generator, steps: int) -> NDArray[np.int64]:
    """Draw transitions that share no frame, so that nobody gains from reading one once, and that end no episode."""
    found: NDArray[np.int64] = 2 * generator.permutation(steps // 2)[:BATCH]
    return found


def shrink(image: Images) -> Images:
    """Resize one image, channels first."""
    return cv2.resize(image, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR).transpose(2, 0, 1)  # type: ignore[return-value]


def naive(setting: Setting, name: str) -> Step:
    """Read image by image, resize, stack: what most loops do."""
    file, generator = h5py.File(setting.path(name)), np.random.default_rng(0)
    data = [file[f"observations/{camera}_image"] for camera in CAMERAS]

    def sample() -> list[torch.Tensor]:
        rows = draw(generator, setting.num_steps)
        return [torch.from_numpy(np.stack([shrink(one[r + n]) for r in rows])) for n in (0, 1) for one in data]

    return sample


def fancy(setting: Setting, name: str, count: int = BATCH) -> Step:
    """Read all images of a camera at once by sorted indices, then resize."""
    file, generator = h5py.File(setting.path(name)), np.random.default_rng(0)
    data = [file[f"observations/{camera}_image"] for camera in CAMERAS]

    def sample() -> list[torch.Tensor]:
        rows = np.sort(draw(generator, setting.num_steps)[:count])
        return [torch.from_numpy(np.stack([shrink(i) for i in one[rows + n]])) for n in (0, 1) for one in data]

    return sample


def robomimic(setting: Setting) -> Step:
    """Read by robomimic's SequenceDataset, without its cache of everything in memory; images resized after it."""
    observations: Any = importlib.import_module("robomimic.utils.obs_utils")
    module: Any = importlib.import_module("robomimic.utils.dataset")
    names = [f"{camera}_image" for camera in CAMERAS]
    observations.initialize_obs_utils_with_obs_specs([{"obs": {"rgb": names, "low_dim": ["joint"]}}])
    data = module.SequenceDataset(
        str(setting.path("robomimic")), [*names, "joint"], ["actions", "rewards", "dones"], load_next_obs=True,
        hdf5_use_swmr=False,
    )  # fmt: skip
    generator = np.random.default_rng(0)

    def sample() -> dict[str, torch.Tensor]:
        items = [data[int(row)] for row in draw(generator, setting.num_steps)]
        out = {}
        for when in ("obs", "next_obs"):
            for name in names:
                out[f"{when}/{name}"] = torch.from_numpy(np.stack([shrink(item[when][name][0]) for item in items]))
        return out

    return sample


def minari(setting: Setting) -> Step:
    """Minari gives whole episodes: one for each transition."""
    library: Any = importlib.import_module("minari")
    data = library.MinariDataset(setting.folder / "minari" / "data")
    generator = np.random.default_rng(0)

    def sample() -> list[torch.Tensor]:
        out = []
        for row in draw(generator, setting.num_steps).tolist():
            episode = data[row // EPISODE]
            step = row % EPISODE
            for when in (step, step + 1):
                out += [shrink(episode.observations[f"{camera}_image"][when]) for camera in CAMERAS]
        return [torch.from_numpy(np.stack(out))]

    return sample


def small(setting: Setting, count: int) -> list[Images]:
    """Return the first images of each camera, resized."""
    with h5py.File(setting.path("contiguous")) as file:
        return [np.stack([shrink(i) for i in file[f"observations/{camera}_image"][:count]]) for camera in CAMERAS]


def memmap(setting: Setting) -> Step:
    """TorchRL's LazyMemmapStorage with images that were resized before, both of each transition."""
    from tensordict import TensorDict  # noqa: PLC0415 - a peer
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer  # noqa: PLC0415 - a peer

    count = min(setting.num_steps, 600)
    images = [torch.from_numpy(one) for one in small(setting, count + 1)]
    names = [f"{when}{camera}" for when in ("", "next_") for camera in CAMERAS]
    shown = [one[n : n + count] for n in (0, 1) for one in images]
    storage = LazyMemmapStorage(count, scratch_dir=str(setting.folder / "memmap"))
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    for first in range(0, count, 100):
        part = {name: one[first : first + 100] for name, one in zip(names, shown, strict=True)}
        buffer.extend(TensorDict(part, batch_size=[len(part["left"])]))
    del images, shown
    sample: Step = buffer.sample
    return sample


def cpprb(setting: Setting) -> Step:
    """Sample from cpprb with everything in memory, images resized before, next ones not stored twice."""
    library: Any = importlib.import_module("cpprb")
    count = min(setting.num_steps, 600)
    images = small(setting, count + 1)
    fields = {camera: {"shape": (3, SIZE, SIZE), "dtype": np.uint8} for camera in CAMERAS}
    buffer = library.ReplayBuffer(count, fields, next_of=CAMERAS)
    for row in range(count):
        now = {camera: one[row] for camera, one in zip(CAMERAS, images, strict=True)}
        buffer.add(**now, **{f"next_{camera}": one[row + 1] for camera, one in zip(CAMERAS, images, strict=True)})
    del images
    return lambda: buffer.sample(BATCH)


def on_all_threads(work: Callable[[range], None]) -> Step:
    """Share the frames of a batch between as many threads as there are cores."""
    pool = ThreadPoolExecutor(default_threads())
    parts = [range(first, 6 * BATCH, default_threads()) for first in range(default_threads())]
    return lambda: list(pool.map(work, parts))


def resize_floor() -> Step:
    """Only resize, 64 images in turn into the same memory: what is read and written stays in the CPU's caches."""
    images = pictures(0, 0, 64)

    def resize(numbers: range) -> None:
        out = np.empty((SIZE, SIZE, 3), np.uint8)
        for number in numbers:
            cv2.resize(images[number % 64], (SIZE, SIZE), dst=out, interpolation=cv2.INTER_LINEAR)

    return on_all_threads(resize)


def resize_batch_floor() -> Step:
    """Only resize a batch: as many different images in memory as it has, into memory of its own for each."""
    images = np.resize(pictures(0, 0, 64), (6 * BATCH, *FRAME))
    batch = np.ones((6 * BATCH, SIZE, SIZE, 3), np.uint8)

    def resize(numbers: range) -> None:
        for number in numbers:
            cv2.resize(images[number], (SIZE, SIZE), dst=batch[number], interpolation=cv2.INTER_LINEAR)

    return on_all_threads(resize)


def copy_floor() -> Step:
    """Only copy a batch, from memory to memory, in one piece for each thread."""
    source, target = (np.ones((6 * BATCH, 3, SIZE, SIZE), np.uint8) for _ in range(2))

    def copy(numbers: range) -> None:
        part = slice(numbers.start * len(numbers), (numbers.start + 1) * len(numbers))
        np.copyto(target[part], source[part])

    return on_all_threads(copy)


def gather_floor() -> Step:
    """Only copy the frames of a batch, one by one, from random places of memory."""
    source, target = (np.ones((n * BATCH, 3, SIZE, SIZE), np.uint8) for n in (10, 6))
    rows = np.random.default_rng(0).permutation(len(source)).tolist()

    def gather(numbers: range) -> None:
        for place in numbers:
            target[place] = source[rows[place]]

    return on_all_threads(gather)


def read_floor(setting: Setting) -> Step:
    """Only read as many frames of a cache, at random places of the file, with one system call each."""
    path = setting.path("contiguous")
    cache = FrameCache(cache_path(path, SIZE))
    stride = cache.header.stride(cache.header.datasets[0])
    descriptor = os.open(cache.path, os.O_RDONLY)
    target = np.ones((6 * BATCH, 3, SIZE, SIZE), np.uint8)
    rows = np.random.default_rng(0).permutation(cache.header.num_frames)[: len(target)].tolist()

    def read(numbers: range) -> None:
        for place in numbers:
            os.preadv(descriptor, (target[place].data,), cache.data_offset + rows[place] * stride)

    return on_all_threads(read)


def contenders(setting: Setting) -> dict[str, tuple[str, Callable[[], Step], list[Callable[[], Step]]]]:
    """Return who takes part by name: what is stored, what samples, and the floor it is compared with."""
    found: dict[str, tuple[str, Callable[[], Step], list[Callable[[], Step]]]] = {
        "slipstream": ("contiguous", lambda: ours(setting, "contiguous"), [resize_floor, resize_batch_floor]),
        "slipstream, cache": (
            "resized cache",
            lambda: ours(setting, "contiguous", cache=True),
            [copy_floor, gather_floor, lambda: read_floor(setting)],
        ),
        "slipstream, gzip": ("gzip, a frame a chunk", lambda: ours(setting, "gzip"), []),
        "naive loop": ("contiguous", lambda: naive(setting, "contiguous"), []),
        "naive loop, gzip": ("gzip, a frame a chunk", lambda: naive(setting, "gzip"), []),
        "LazyMemmapStorage": ("resized before", lambda: memmap(setting), []),
        "cpprb": ("resized before, in memory", lambda: cpprb(setting), []),
    }
    if setting.quick:
        return found
    more: dict[str, tuple[str, Callable[[], Step], list[Callable[[], Step]]]] = {
        "slipstream, packed cache": ("resized cache, zstd", lambda: ours(setting, "lz4", cache=True), []),
        "slipstream, channels first": ("contiguous, channels first", lambda: ours(setting, "chw"), []),
        "slipstream, lzf": ("lzf, a frame a chunk", lambda: ours(setting, "lzf"), []),
        "slipstream, lz4": ("lz4, a frame a chunk", lambda: ours(setting, "lz4"), []),
        "slipstream, zstd": ("zstd, a frame a chunk", lambda: ours(setting, "zstd"), []),
        "slipstream, blosc": ("Blosc, a frame a chunk", lambda: ours(setting, "blosc"), []),
        "slipstream, JPEG": ("JPEG", lambda: ours(setting, "jpeg"), []),
        "slipstream, floats": ("contiguous", lambda: ours(setting, "contiguous", image_dtype=torch.float32), []),
        "slipstream, robomimic's": ("robomimic, contiguous", lambda: ours(setting, "robomimic"), []),
        "h5py, sorted indices": ("contiguous", lambda: fancy(setting, "contiguous"), []),
        "h5py, sorted indices, 16 transitions only": ("gzip, a frame a chunk", lambda: fancy(setting, "gzip", 16), []),
        "robomimic SequenceDataset": ("robomimic, contiguous", lambda: robomimic(setting), []),
        "Minari": ("Minari, contiguous", lambda: minari(setting), []),
    }
    return found | more


def memory_mb() -> tuple[float, float]:
    """Return how many megabytes are resident: allocated, and mapped from files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    anonymous, shared, mapped = (int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "RssFile"))
    return anonymous / 1024, (mapped + shared) / 1024


def run_alone(setting: Setting, name: str, answer: Connection) -> None:
    """Measure one contender; runs in a process of its own."""
    _, make, make_floors = contenders(setting)[name]
    before = memory_mb()
    try:
        sample = make()
        own = memory_mb()[0]
        floors = [make_floor() for make_floor in make_floors]
        of_floors = memory_mb()[0] - own
        cpu_s = wall_s = float("inf")
        floors_s: list[list[float]] = [[] for _ in floors]
        times_floor: list[list[float]] = [[] for _ in floors]
        slow = name.startswith(("h5py", "Minari", "robomimic", "naive loop, gzip"))
        for repetition in range(1 if slow else setting.repetitions * (4 if floors else 1) + 2):
            cpu, wall = time.process_time(), time.perf_counter()
            batch = sample()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            del batch
            if repetition >= 2 or slow:  # the first ones allocate
                cpu_s, wall_s = min(cpu_s, cpu), min(wall_s, wall)
            for number, floor in enumerate(floors):
                start = time.process_time()
                floor()
                floors_s[number].append(time.process_time() - start)
                if repetition >= 2:
                    times_floor[number].append(cpu / floors_s[number][-1])
    except ImportError as error:
        answer.send(f"{name} ({error})")
        return
    after = memory_mb()
    compared = [(min(one), float(np.median(times))) for one, times in zip(floors_s, times_floor, strict=True)]
    answer.send((cpu_s, wall_s, compared, after[0] - before[0] - of_floors, after[1] - before[1]))


def apart(function: Callable[..., None], *arguments: Any) -> Any:
    """Run a function in a process of its own and return what it sends."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(*arguments, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def speed_table(setting: Setting) -> tuple[str, str, list[str]]:
    """Measure everyone; returns the table, a sentence about the aims, and who was left out."""
    lines = [
        f"**A batch** ({BATCH} transitions, {6 * BATCH} images, {STORED}x{STORED} to {SIZE}x{SIZE}; "
        f"{setting.num_steps:,} steps in a file)",
        "",
        "| reader | stored | CPU ms | wall ms | images/s | of the naive loop | memory MB | of files MB |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    left_out, results = [], {}
    everyone = contenders(setting)
    for name in everyone:
        result = apart(run_alone, setting, name)
        if result is None or isinstance(result, str):
            left_out.append(result or f"{name} (failed)")
        else:
            results[name] = result
    base = results["naive loop"][0]
    for name, (cpu_s, wall_s, _, anonymous, mapped) in results.items():
        count = 16 if "16 transitions" in name else BATCH
        lines.append(
            f"| {name} | {everyone[name][0]} | {1e3 * cpu_s:,.0f} | {1e3 * wall_s:,.0f} | {6 * count / wall_s:,.0f} | "
            f"{cpu_s / base:.2f} | {anonymous:,.0f} | {mapped:,.0f} |"
        )
    plain, cached, gzip = (results[name] for name in ("slipstream", "slipstream, cache", "slipstream, gzip"))
    gain = results["naive loop, gzip"]
    (resize_s, resizing), (batch_s, resizing_batch) = plain[2]
    (copy_s, copying), (gather_s, gathering), (read_s, reading) = cached[2]
    aims = (
        f"Contiguous files take {resizing_batch:.2f} times the CPU time of resizing as many different images from "
        f"memory to memory ({1e3 * batch_s:.0f} ms; the aim is 1.15), and {resizing:.2f} times that of resizing images "
        f"that stay in the CPU's caches ({1e3 * resize_s:.0f} ms). Caches take {copying:.2f} times the CPU time of "
        f"copying the batch at once ({1e3 * copy_s:.0f} ms; the aim is 1.2), {gathering:.2f} times that of copying its "
        f"frames one by one from memory ({1e3 * gather_s:.0f} ms), and {reading:.2f} times that of the system calls "
        f"that read them ({1e3 * read_s:.0f} ms). gzip is {gain[0] / gzip[0]:.1f} times as fast as the naive loop by "
        f"CPU time and {gain[1] / gzip[1]:.1f} times by the clock (the aim is 2)."
    )
    return "\n".join(lines), aims, left_out


def write_million(path: Path, steps: int) -> None:
    """Write a file of a million steps whose images are holes: it is as large as said, and takes no space."""
    with h5py.File(path, "w") as file:
        for camera in CAMERAS:
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            group = file.require_group("observations")
            space = h5py.h5s.create_simple((steps + 1, *FRAME))
            h5py.h5d.create(group.id, f"{camera}_image".encode(), h5py.h5t.NATIVE_UINT8, space, plist)
        found = numbers(steps)
        file["observations/joint"] = found.pop("joint")
        for name, values in found.items():
            file[name] = values


def open_million(path: Path, answer: Connection) -> None:
    """Open it, and sample once."""
    warm = MultimodalReplayBuffer(7)  # what importing costs is not counted
    del warm
    before, start = memory_mb(), time.perf_counter()
    buffer = MultimodalReplayBuffer(7, seed=0)
    buffer.load_from_hdf5(path)
    seconds, after = time.perf_counter() - start, memory_mb()
    start = time.perf_counter()
    buffer.sample(32)
    answer.send((buffer.size, seconds, after[0] - before[0], time.perf_counter() - start, buffer.nbytes / 1e6))


def steady(setting: Setting, batches: int, answer: Connection) -> None:
    """Sample for a long time, and look at the memory."""
    buffer = MultimodalReplayBuffer(7, seed=0)
    buffer.load_from_hdf5(setting.path("contiguous"), cache=False)
    seen = []
    for number in range(batches):
        buffer.sample(32)
        if number >= batches // 10:
            seen.append(sum(memory_mb()))
    answer.send((min(seen), max(seen), seen[-1] - seen[0]))


def memory_table(setting: Setting) -> str:
    """Measure opening, and sampling for long."""
    steps = 100_000 if setting.quick else 1_000_000
    path = setting.folder / "million.hdf5"
    write_million(path, steps)
    size, seconds, grown, first_s, held = apart(open_million, path)
    apparent, taken = path.stat().st_size, path.stat().st_blocks * 512
    path.unlink()
    batches = 100 if setting.quick else 1000
    least, most, drift = apart(steady, setting, batches)
    return "\n".join(
        [
            "**Opening and running**",
            "",
            "| what | measured |",
            "|---|---:|",
            f"| opening {size:,} transitions, three cameras, {apparent / 1e9:,.0f} GB ({taken / 1e6:.0f} MB on disk) | "
            f"{seconds:.2f} s |",
            f"| memory that took (the numbers themselves are {held:.0f} MB) | {grown:.0f} MB |",
            f"| first batch of 32 after that | {1e3 * first_s:.0f} ms |",
            f"| resident memory over {batches:,} batches of 32: least, most | {least:.0f} MB, {most:.0f} MB |",
            f"| its change from first to last of them | {drift:+.1f} MB |",
        ]
    )


def run(*, quick: bool) -> str:
    """Measure everything and return the report."""
    with tempfile.TemporaryDirectory() as name:
        setting = Setting(Path(name), 600 if quick else 1200, 2 if quick else 6, quick)
        make_files(setting)
        table, aims, left_out = speed_table(setting)
        parts = [machine(("numpy", "torch", *PEERS)), table, aims, memory_table(setting)]
    if left_out:
        parts.append(f"Left out: {', '.join(left_out)}.")
    return "\n\n".join(parts)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few files, few repetitions")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the report into a page, between its markers")
    arguments = parser.parse_args()
    report = run(quick=arguments.quick)
    print(report)
    if arguments.write:
        write_section(arguments.write, "datasets", report)


if __name__ == "__main__":
    main()
