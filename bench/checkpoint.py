"""Checkpoint savers against their peers, inside a training loop: what a save costs, and what it leaves on disk.

    python bench/checkpoint.py                              # print the tables
    python bench/checkpoint.py --write docs/benchmarks.md   # and put them into the page, between its markers

Every saver runs in a process of its own, one after the other, on the same trained network: rollouts (forward passes)
and optimizer steps alternate, and a save is asked for right after the last step of an iteration. The stall is the time
of the call, and of waiting before the next step. The time lost is the call, and what the iterations until the file is
durable take longer than those without a save do on average, before and after it in the same process. Each saver has to
give back, from its first save, the state at the moment of the call, though training went on; one that does not, or does
not run, is left out and named.

A load is that of a program that has just started: memory that was freed before is given back to the system, so that
everyone meets pages that were never touched. Where a program holds on to it, both torch.load and our files that are not
packed take about 40 ms for 190 MB.

Few peers flush what they write to the disk. So that all are measured alike, each file is flushed (fsync) here, in the
background, as soon as its saver says that it is complete; one that has done so itself loses nothing by it.

Torch's threads would spin while they wait for each other, so that whatever else runs for a moment, in this process or
in another, stops them all for many times as long, and the time lost would tell of the scheduler's mood. They run with
OMP_WAIT_POLICY=passive here; set the variable to ``active`` to see the difference.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import importlib
import importlib.metadata
import io
import itertools
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import lz4.frame
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from page import machine, write_section

from slipstream.checkpoint.load import load_checkpoint
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.native import write_native
from slipstream.checkpoint.saver import AsyncCheckpointSaver

THREADS = 2
TIMEOUT_S = 180
PEERS = (
    "lightning",
    "orbax-checkpoint",
    "torchsnapshot",
    "torch_checkpointing",
    "safetensors",
    "lz4",
    "zipnn",
    "pcodec",
)


@dataclass(frozen=True)
class Size:
    """How much to train and to measure."""

    widths: tuple[int, ...]
    passes: int  # forward passes per rollout
    batch: int  # rows per forward pass of a rollout
    trained: int  # optimizer steps before anything is measured
    saves: int
    quiet: int  # iterations without a save, before and after each save
    chains: tuple[int, ...]  # optimizer steps between the checkpoints of a chain


SMALL = (512, 960, 960, 960, 960, 256)
FULL = Size((1024, 2048, 2048, 2048, 2048, 512), 2, 128, 60, 9, 3, (1, 10, 100))
QUICK = Size(SMALL, 3, 512, 60, 2, 2, (1, 10))


class Training:
    """A network that learns to follow another one, with Adam: rollouts and optimizer steps to save in between."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for inputs, outputs in itertools.pairwise(size.widths):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ELU()]
        self.network = torch.nn.Sequential(*layers[:-1])
        ends = (size.widths[0], size.widths[-1])
        self.teacher = torch.nn.Sequential(
            torch.nn.Linear(ends[0], 128), torch.nn.Tanh(), torch.nn.Linear(128, ends[1])
        )
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=3e-4)
        self.inputs, self.passes, self.batch = ends[0], size.passes, size.batch
        self.iteration = 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: tensors of the living state, not copies."""
        return {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self, lock: contextlib.AbstractContextManager[Any]) -> None:
        """Learn from one batch; the lock is held while the state changes."""
        batch = torch.randn(64, self.inputs)
        with torch.no_grad():
            target = self.teacher(batch)
        loss = (self.network(batch) - target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        with lock:
            self.optimizer.step()

    def iterate(self, lock: Callable[[], contextlib.AbstractContextManager[Any]]) -> float:
        """Roll out, then take two optimizer steps; returns the seconds that took."""
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(self.passes):
                self.network(torch.randn(self.batch, self.inputs))
        for _ in range(2):
            self.step(lock())
        self.iteration += 1
        return time.perf_counter() - start


def flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a nested state by path."""
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    if isinstance(state, np.ndarray):
        return {prefix: torch.from_numpy(state)}
    pairs: Any = state.items() if isinstance(state, Mapping) else ()
    found: dict[str, torch.Tensor] = {}
    for key, value in pairs:
        found.update(flat(value, f"{prefix}/{key}" if prefix else str(key)))
    return found


def touch_pages(state: Any) -> None:
    """Read one number from every page of a state: a file that is only mapped has not been loaded yet."""
    for tensor in flat(state).values():
        tensor.detach().reshape(-1)[:: max(1, 4096 // tensor.itemsize)].sum()


def empty_like(state: Any) -> Any:
    """Return a nested state with the same structure and tensors of new memory, for peers that load in place."""
    if isinstance(state, torch.Tensor):
        return torch.empty_like(state)
    if isinstance(state, Mapping):
        return {key: empty_like(value) for key, value in state.items()}
    return copy.deepcopy(state)


class Contender:
    """Something that saves and loads the state of a training.

    Args:
        training: What to save.
        folder: Where to.
    """

    name: ClassVar[str]

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.setup()

    def setup(self) -> None:
        """Get ready, once."""

    def save(self, path: Path) -> None:
        """Save to a path; what this takes, the caller waits for."""
        raise NotImplementedError

    def wait(self, path: Path) -> Path:
        """Block until the checkpoint is complete, and return where it is."""
        return path

    def load(self, path: Path) -> Any:
        """Load a checkpoint."""
        return torch.load(path, weights_only=True)

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Return what has to be held while the state changes."""
        return contextlib.nullcontext()

    def barrier_s(self) -> float:
        """Return how long training has been waiting, so far, before it could change its state."""
        return 0.0

    def close(self) -> None:
        """Release what setup took."""


class Nothing(Contender):
    """Saves nothing: shows how far the time lost can be trusted on this machine."""

    name = "nothing at all (noise)"

    def save(self, path: Path) -> None:
        """Do nothing."""

    def wait(self, path: Path) -> Path:
        """Take a second."""
        time.sleep(1)
        path.touch()
        return path


class TorchSave(Contender):
    """What everybody does."""

    name = "torch.save"

    def save(self, path: Path) -> None:
        """Write, blocking."""
        torch.save(self.training.state(), path)


class TorchSaveLz4(Contender):
    """The same, compressed."""

    name = "torch.save + LZ4-9"

    def save(self, path: Path) -> None:
        """Compress and write, blocking."""
        content = io.BytesIO()
        torch.save(self.training.state(), content)
        path.write_bytes(lz4.frame.compress(content.getbuffer(), compression_level=9))

    def load(self, path: Path) -> Any:
        """Decompress, then load."""
        return torch.load(io.BytesIO(lz4.frame.decompress(path.read_bytes())), weights_only=True)


class ThreadSave(Contender):
    """The usual way to do it in the background."""

    name = "deep copy + torch.save in a thread"

    def setup(self) -> None:
        """Start the thread."""
        self.executor = ThreadPoolExecutor(1)
        self.future: Future[None]

    def save(self, path: Path) -> None:
        """Copy everything, and have it written."""
        self.future = self.executor.submit(torch.save, copy.deepcopy(self.training.state()), path)

    def wait(self, path: Path) -> Path:
        """Wait for the thread."""
        self.future.result()
        return path


class DistributedSave(Contender):
    """PyTorch's distributed checkpoints, in a single process."""

    name = "torch.distributed.checkpoint.save"

    def setup(self) -> None:
        """Import."""
        self.library: Any = importlib.import_module("torch.distributed.checkpoint")

    def save(self, path: Path) -> None:
        """Write, blocking."""
        self.library.save(flat(self.training.state()), checkpoint_id=path, no_dist=True)

    def load(self, path: Path) -> Any:
        """Load into new memory."""
        target = empty_like(flat(self.training.state()))
        self.library.load(target, checkpoint_id=path, no_dist=True)
        return target


class DistributedAsyncSave(DistributedSave):
    """The same in the background."""

    name = "torch.distributed.checkpoint.async_save"

    def save(self, path: Path) -> None:
        """Copy everything, and have it written."""
        self.future = self.library.async_save(flat(self.training.state()), checkpoint_id=path, no_dist=True)

    def wait(self, path: Path) -> Path:
        """Wait for the upload."""
        self.future.result()
        return path


class Safetensors(Contender):
    """Safetensors, with the state as a flat dict."""

    name = "safetensors save_file"

    def setup(self) -> None:
        """Import."""
        self.library: Any = importlib.import_module("safetensors.torch")

    def save(self, path: Path) -> None:
        """Write, blocking."""
        self.library.save_file(flat(self.training.state()), path)

    def load(self, path: Path) -> Any:
        """Load all tensors."""
        return self.library.load_file(path)


class Lightning(Contender):
    """Lightning's plugin for saving in the background."""

    name = "Lightning AsyncCheckpointIO"

    def setup(self) -> None:
        """Import, and wrap the plugin that a Trainer uses by default."""
        inner = importlib.import_module("lightning.fabric.plugins.io.torch_io").TorchCheckpointIO()
        self.plugin: Any = importlib.import_module("lightning.pytorch.plugins.io").AsyncCheckpointIO(inner)

    def save(self, path: Path) -> None:
        """Copy everything, and have it written."""
        self.plugin.save_checkpoint(self.training.state(), path)

    def wait(self, path: Path) -> Path:
        """Queue behind the save: its only thread writes one after the other, and there is no handle."""
        self.plugin._executor.submit(int).result()
        if self.plugin._error:
            raise self.plugin._error
        return path

    def load(self, path: Path) -> Any:
        """Load as a Trainer would."""
        return self.plugin.load_checkpoint(path, weights_only=True)

    def close(self) -> None:
        """Stop the thread."""
        self.plugin.teardown()


class Torchsnapshot(Contender):
    """Torchsnapshot, in the background."""

    name = "torchsnapshot async_take"

    def setup(self) -> None:
        """Import."""
        self.library: Any = importlib.import_module("torchsnapshot")

    def save(self, path: Path) -> None:
        """Stage everything, and have it written."""
        state = {"state": self.library.StateDict(**flat(self.training.state()))}
        self.pending = self.library.Snapshot.async_take(str(path), state)

    def wait(self, path: Path) -> Path:
        """Wait for the snapshot."""
        self.pending.wait()
        return path

    def load(self, path: Path) -> Any:
        """Load into new memory."""
        target = self.library.StateDict(**empty_like(flat(self.training.state())))
        self.library.Snapshot(str(path)).restore({"state": target})
        return dict(target)


class TorchCheckpointing(Contender):
    """Meta's torch_checkpointing: stages in a thread, writes in a process, and has a lock to step under."""

    name = "torch_checkpointing"

    def setup(self) -> None:
        """Import, and start its manager asynchronous as by default."""
        library: Any = importlib.import_module("torch_checkpointing")
        storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        buffered = storage.LocalFileSystemStorageConfig(use_direct_io=False)  # O_DIRECT fails on ext4, unaligned
        self.manager = library.CheckpointManager(library.CheckpointManager.Config(storage_config=buffered))
        self.waited_s = 0.0

    def save(self, path: Path) -> None:
        """Have it staged and written."""
        self.future = self.manager.save(str(path), self.training.state())

    def wait(self, path: Path) -> Path:
        """Wait for its process."""
        self.future.result()
        return path

    def load(self, path: Path) -> Any:
        """Load into new memory."""
        return self.manager.load(str(path), into=empty_like(self.training.state()))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the manager's lock, as its documentation asks for, and measure the wait for it."""
        start = time.perf_counter()
        with self.manager.lock():
            self.waited_s += time.perf_counter() - start
            yield

    def barrier_s(self) -> float:
        """Return what the lock took."""
        return self.waited_s

    def close(self) -> None:
        """Stop its process."""
        self.manager.close()


class Orbax(Contender):
    """Orbax, in the background, on NumPy arrays that see torch's memory."""

    name = "Orbax StandardCheckpointer (async)"

    def setup(self) -> None:
        """Import."""
        library: Any = importlib.import_module("orbax.checkpoint")
        self.checkpointer = library.StandardCheckpointer()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as flat arrays."""
        return {key: tensor.numpy() for key, tensor in flat(self.training.state()).items()}

    def save(self, path: Path) -> None:
        """Have it copied and written."""
        self.checkpointer.save(path, self.arrays())

    def wait(self, path: Path) -> Path:
        """Wait for its thread."""
        self.checkpointer.wait_until_finished()
        return path

    def load(self, path: Path) -> Any:
        """Load as arrays."""
        return self.checkpointer.restore(path, self.arrays())

    def close(self) -> None:
        """Stop its threads."""
        self.checkpointer.close()


class Native(Contender):
    """Our saver, in our format; the optimizer is guarded, so that the copy overlaps the rollout."""

    name = "slipstream native, guarded"
    guarded = True

    def setup(self) -> None:
        """Make the saver."""
        self.saver = AsyncCheckpointSaver()
        if self.guarded:
            self.saver.guard(self.training.optimizer)

    def save(self, path: Path) -> None:
        """Have it copied and written."""
        self.handle = self.saver.save_async(self.training.state(), path, format="native")

    def wait(self, path: Path) -> Path:
        """Wait for the handle."""
        return self.handle.result().path

    def load(self, path: Path) -> Any:
        """Load, checking checksums."""
        return load_checkpoint(path)

    def barrier_s(self) -> float:
        """Return what the hook before optimizer steps took."""
        return self.saver.get_stats()["total_barrier_s"]

    def close(self) -> None:
        """Stop the saver."""
        self.saver.shutdown()


class NativeRaw(Native):
    """The same without packing."""

    name = "slipstream native, not packed, guarded"

    def save(self, path: Path) -> None:
        """Have it copied and written."""
        self.handle = self.saver.save_async(self.training.state(), path, compress=False, format="native")


class NativeUnguarded(Native):
    """The same without a guard: the copy is made in the call."""

    name = "slipstream native, unguarded"
    guarded = False


class Portable(Native):
    """Our saver, writing what torch.load reads behind lz4."""

    name = "slipstream pt + LZ4-9, guarded"

    def save(self, path: Path) -> None:
        """Have it copied and written."""
        self.handle = self.saver.save_async(self.training.state(), path, compress=True, format="pt")


class Managed(Native):
    """Our manager, which stores what changed since the checkpoint before."""

    name = "slipstream CheckpointManager (deltas), guarded"

    def setup(self) -> None:
        """Make the manager."""
        self.manager = CheckpointManager(self.folder / "run", keep_last=None, full_every=10)
        self.saver = self.manager.saver
        self.manager.guard(self.training.optimizer)

    def save(self, path: Path) -> None:
        """Have it copied and written, as the next of the run."""
        self.handle = self.manager.save(self.training.iteration, self.training.state())


CONTENDERS: dict[str, type[Contender]] = {
    kind.__name__: kind
    for kind in (
        Nothing,
        Native,
        NativeRaw,
        NativeUnguarded,
        Managed,
        Portable,
        TorchSave,
        TorchSaveLz4,
        ThreadSave,
        Safetensors,
        DistributedSave,
        DistributedAsyncSave,
        Lightning,
        TorchCheckpointing,
        Torchsnapshot,
        Orbax,
    )
}


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint that is a file or a folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def flush_to_disk(path: Path) -> None:
    """Make sure that the content of a checkpoint is on the disk."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Watch:
    """Waits in a thread until a checkpoint is complete, flushes it, and notes both times."""

    def __init__(self, contender: Contender, path: Path, start: float) -> None:
        self.path, self.complete_s, self.durable_s = path, 0.0, 0.0
        self._contender, self._start = contender, start
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.path = self._contender.wait(self.path)
            self.complete_s = time.perf_counter() - self._start
            flush_to_disk(self.path)
            self.durable_s = time.perf_counter() - self._start
        except BaseException as error:  # noqa: BLE001 - raised by finished
            self._error = error

    def finished(self) -> bool:
        """Tell whether the checkpoint is on the disk; raises what the saver raised."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True


@dataclass
class Measured:
    """What saves of one contender cost: medians, in seconds and bytes."""

    stall: float
    lost: float
    lost_range: tuple[float, float]
    lost_error: float  # standard error of the mean
    complete: float
    durable: float
    stored: float
    load: float
    iteration: float


@dataclass
class Save:
    """One save, and the iterations until it was durable."""

    call_s: float
    barrier_s: float
    watch: Watch
    iterations: list[float] = field(default_factory=list)


def save_once(contender: Contender, training: Training, path: Path) -> Save:
    """Save, and train until the checkpoint is durable."""
    barrier_s = contender.barrier_s()
    start = time.perf_counter()
    contender.save(path)
    call_s = time.perf_counter() - start
    save = Save(call_s, 0.0, Watch(contender, path, start))
    while True:
        save.iterations.append(training.iterate(contender.lock))
        if save.watch.finished():
            save.barrier_s = contender.barrier_s() - barrier_s
            return save


def check(contender: Contender, path: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Raise unless the checkpoint holds the expected tensors, bit by bit."""
    loaded = flat(contender.load(path))
    for key, tensor in expected.items():
        if key not in loaded:
            raise RuntimeError(f"did not give back {key}")
        if not torch.equal(loaded[key].detach(), tensor):
            raise RuntimeError(f"gave back a {key} that is not the state at the moment of the call")


def discard(path: Path) -> None:
    """Delete a checkpoint."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def measure(kind: type[Contender], size: Size, start: Path, folder: Path) -> Measured:
    """Measure one contender; this is what its process does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    training = Training(size)
    training.load_state(torch.load(start, weights_only=True))
    contender = kind(training, folder)
    for _ in range(3):
        training.iterate(contender.lock)
    expected = {key: tensor.detach().clone() for key, tensor in flat(training.state()).items()}
    warm_up = save_once(contender, training, folder / "0").watch
    if kind is not Nothing:
        check(contender, warm_up.path, expected)
    expected.clear()
    gc.collect()
    quiet = [[training.iterate(contender.lock) for _ in range(size.quiet)]]
    saves: list[Save] = []
    previous = warm_up
    for number in range(1, size.saves + 1):
        saves.append(save_once(contender, training, folder / str(number)))
        if kind is not Managed:  # its checkpoints need each other
            discard(previous.path)
        previous = saves[-1].watch
        quiet.append([training.iterate(contender.lock) for _ in range(size.quiet)])
    lost = []
    for save, before, after in zip(saves, quiet, quiet[1:], strict=False):
        usual = statistics.fmean(before + after)  # not the median: what is compared with is a sum
        lost.append(save.call_s + sum(save.iterations) - len(save.iterations) * usual)
    stored = [
        sum(file.stat().st_size for file in files_of(save.watch.path)) for save in saves if save.watch.path.exists()
    ]
    loads = []
    for _ in range(5 if kind is not Nothing else 0):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        begin = time.perf_counter()
        touch_pages(contender.load(previous.path))
        loads.append(time.perf_counter() - begin)
    contender.close()
    return Measured(
        stall=statistics.median(save.call_s + save.barrier_s for save in saves),
        lost=statistics.median(lost),
        lost_range=(min(lost), max(lost)),
        lost_error=statistics.stdev(lost) / len(lost) ** 0.5,
        complete=statistics.median(save.watch.complete_s for save in saves),
        durable=statistics.median(save.watch.durable_s for save in saves),
        stored=statistics.median(stored),
        load=statistics.median(loads or [0.0]),
        iteration=statistics.median(itertools.chain.from_iterable(quiet)),
    )


def answer(name: str, size: Size, start: Path, folder: Path, sender: Connection) -> None:
    """Measure one contender and send what came of it: a Measured, or the reason why there is none."""
    silence = os.open(os.devnull, os.O_WRONLY)  # peers and their processes log
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        sender.send(measure(CONTENDERS[name], size, start, folder))
    except BaseException as error:  # noqa: BLE001 - whatever a peer fails with
        sender.send(f"{type(error).__name__}: {error}".splitlines()[0])


def measure_apart(name: str, size: Size, start: Path, folder: Path) -> Measured:
    """Measure one contender in a process of its own; raises RuntimeError with the reason if it fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "slipstream.checkpoint"])  # imported once, and nothing run yet
    folder.mkdir()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(name, size, start, folder, sender))
    process.start()
    sender.close()
    try:
        answered = receiver.recv() if receiver.poll(TIMEOUT_S) else f"took more than {TIMEOUT_S} s"
    except EOFError:
        answered = "its process died"
    process.join(5)
    process.kill()
    process.join()
    shutil.rmtree(folder, ignore_errors=True)
    if isinstance(answered, Measured):
        return answered
    raise RuntimeError(answered)


def savers_table(start: Path, folder: Path, raw_bytes: int, size: Size, only: list[str] | None) -> str:
    """Measure all savers and return a Markdown table; ours first, then by time lost."""
    rows: list[tuple[str, Measured]] = []
    left_out: list[str] = []
    noise: Measured | None = None
    for key, kind in CONTENDERS.items():
        if only is not None and key not in only:
            continue
        print(f"measuring {kind.name}", file=sys.stderr)
        try:
            measured = measure_apart(key, size, start, folder / key)
        except RuntimeError as error:
            left_out.append(f"{kind.name} is left out: {error}")
            print(left_out[-1], file=sys.stderr)
            continue
        if kind is Nothing:
            noise = measured
        else:
            rows.append((kind.name, measured))
    rows.sort(key=lambda row: (not row[0].startswith("slipstream"), row[1].lost))
    usual = statistics.median(measured.iteration for _, measured in rows)
    lines = [
        f"**Savers** ({raw_bytes / 1e6:.0f} MB of fp32 weights and Adam's moments, on the CPU, {THREADS} threads; an "
        f"iteration without a save takes {1000 * usual:.0f} ms; medians of {size.saves} saves after the first, "
        "and of five loads; ±: standard error)",
        "",
        "| saver | stall ms | training time lost ms | ± ms | complete s | durable s | MB | of raw | load ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {1000 * row.stall:.1f} | {1000 * row.lost:.0f} | {1000 * row.lost_error:.0f} | "
        f"{row.complete:.2f} | {row.durable:.2f} | "
        f"{row.stored / 1e6:.1f} | {row.stored / raw_bytes:.3f} | {1000 * row.load:.0f} |"
        for name, row in rows
    ]
    if noise is not None:
        low, high = (f"{1000 * value:.0f}" for value in noise.lost_range)
        lines += ["", f"Measured in the same way, saving nothing at all loses {low} to {high} ms: the noise."]
    lines += [f"\n{reason}" for reason in left_out]
    return "\n".join(lines) + "\n"


def zstd() -> Callable[[NDArray[Any]], int]:
    """Return what measures zstd."""
    compressor = zstandard.ZstdCompressor(level=3)
    return lambda array: len(compressor.compress(array.data))


def pcodec() -> Callable[[NDArray[Any]], int]:
    """Return what measures pcodec at its default level."""
    library: Any = importlib.import_module("pcodec")
    standalone: Any = importlib.import_module("pcodec.standalone")
    return lambda array: len(standalone.simple_compress(array, library.ChunkConfig()))


def zipnn() -> Callable[[NDArray[Any]], int]:
    """Return what measures ZipNN."""
    library = importlib.import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype="float32", threads=THREADS)
    return lambda array: len(library.compress(array.tobytes()))


def sizes_table(state: Mapping[str, Any], folder: Path) -> str:
    """Pack one full checkpoint with us and with peers, tensor by tensor, and return a Markdown table."""
    arrays = [tensor.detach().numpy().reshape(-1) for tensor in flat(state).values()]
    small = sum(array.nbytes for array in arrays if array.nbytes <= 128)  # step counters, left as they are
    raw = sum(array.nbytes for array in arrays)
    rows = [("slipstream native, the whole file", write_native(folder / "full.slip", state).stored_bytes)]
    left_out = []
    for title, maker in (("ZipNN", zipnn), ("pcodec", pcodec), ("zstd-3", zstd)):
        print(f"packing with {title}", file=sys.stderr)
        try:
            packed = maker()
            rows.append((title, small + sum(packed(array) for array in arrays if array.nbytes > 128)))
        except Exception as error:  # noqa: BLE001 - whatever a peer fails with
            left_out.append(f"{title} is left out: {error}")
    rows[1:] = sorted(rows[1:], key=lambda row: row[1])
    lines = [f"**One full checkpoint** ({raw / 1e6:.1f} MB raw; peers: the sum over all tensors)", ""]
    lines += ["| packed with | MB | of raw |", "|---|---:|---:|"]
    lines += [f"| {title} | {stored / 1e6:.1f} | {stored / raw:.4f} |" for title, stored in rows]
    lines += [f"\n{reason}" for reason in left_out]
    return "\n".join(lines) + "\n"


def chains_table(distances: tuple[int, ...], folder: Path) -> str:
    """Save chains of ten checkpoints, so many optimizer steps apart, and return a Markdown table."""
    training = Training(QUICK)
    nothing = contextlib.nullcontext()
    for _ in range(QUICK.trained):
        training.step(nothing)
    raw = sum(tensor.nbytes for tensor in flat(training.state()).values())
    lines = [
        f"**Ten checkpoints** ({raw / 1e6:.1f} MB each; the first is complete, the others hold what changed)",
        "",
        "| optimizer steps apart | all ten, of raw | the first | the others |",
        "|---:|---:|---:|---:|",
    ]
    for distance in distances:
        print(f"saving a chain, {distance} steps apart", file=sys.stderr)
        run = folder / f"chain-{distance}"
        with CheckpointManager(run, keep_last=None, full_every=10) as manager:
            manager.guard(training.optimizer)
            for number in range(10):
                for _ in range(distance):
                    training.step(nothing)
                manager.save(number, training.state()).result()
        sizes = [manager.path(number).stat().st_size for number in range(10)]  # .bases holds links to the same files
        total, others = sum(sizes) / (10 * raw), statistics.mean(sizes[1:]) / raw
        lines.append(f"| {distance} | {total:.4f} | {sizes[0] / raw:.4f} | {others:.4f} |")
        shutil.rmtree(run)
    return "\n".join(lines) + "\n"


def run(folder: Path, *, quick: bool, only: list[str] | None = None) -> str:
    """Measure everything, or only these savers, and return the section of the page."""
    size = QUICK if quick else FULL
    torch.set_num_threads(THREADS)
    training = Training(size)
    for _ in range(size.trained):
        training.step(contextlib.nullcontext())
    state = training.state()
    raw_bytes = sum(tensor.nbytes for tensor in flat(state).values())
    start = folder / "start.pt"
    torch.save(state, start)
    sections = [machine(("numpy", "torch", *PEERS)), "", savers_table(start, folder, raw_bytes, size, only)]
    if only is not None:
        return "\n".join(sections)
    sections.append(sizes_table(state, folder))
    sections.append(chains_table(size.chains, folder))
    return "\n".join(sections)


def main() -> None:
    """Parse the command line, measure, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--quick", action="store_true", help="less data and fewer repetitions: about a minute and a half"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page, between its markers")
    parser.add_argument("--folder", type=Path, help="where to save; by default the system's folder for temporary files")
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, metavar="SAVER", help=f"these savers only: {', '.join(CONTENDERS)}"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="slipstream-bench-") as folder:
        report = run(Path(folder), quick=arguments.quick, only=arguments.only)
    print(report)
    if arguments.write and not arguments.only:
        write_section(arguments.write, "checkpoint", report)


if __name__ == "__main__":
    main()
