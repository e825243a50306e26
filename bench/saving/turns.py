"""What a contender does when it is its turn: train, save, wait until the file is durable, load."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import resource
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.saving.contenders import CONTENDERS, Contender, Nothing
from bench.saving.training import THREADS, Size, Training, flat, touch_pages

# Shorter gaps between two readings of the clock are the usual noise of a loop in Python.
_GAP_S = 0.0002
# A step with Adam, once, before the first save: so that the state has its final structure.
_WARM_UP_ITERATIONS = 3


@dataclass
class Saved:
    """One save, and the iterations until it was durable. All times are in seconds."""

    stall_s: float
    lost_s: float
    complete_s: float
    durable_s: float
    stored_bytes: int


@dataclass
class Alone:
    """One save and one load, with nothing else running in the process. All times are in seconds."""

    call_s: float
    save_cpu_s: float
    load_s: float
    load_cpu_s: float


@dataclass
class Gaps:
    """How long other Python threads waited for the GIL during one save.

    Attributes:
        longest_s: The longest wait.
        total_s: The sum of all waits longer than 0.2 ms.
        preempted_s: The longest time that the operating system kept the thread from running.
        durable_s: How long the save took beside the thread.
    """

    longest_s: float = 0.0
    total_s: float = 0.0
    preempted_s: float = 0.0
    durable_s: float = 0.0


@dataclass
class Turn:
    """What was measured in one turn of a contender."""

    saves: list[Saved] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    alone: list[Alone] = field(default_factory=list)
    gaps: list[Gaps] = field(default_factory=list)


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint that is a file or a folder."""
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file()]


def flush_to_disk(path: Path) -> None:
    """Make sure that the content of a checkpoint is on the disk."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def discard(path: Path) -> None:
    """Delete a checkpoint."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def forget_memory() -> None:
    """Return free memory to the system, so that a load gets pages that were never touched."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Watch:
    """Waits in a thread until a checkpoint is complete, flushes it, and records both times.

    Args:
        contender: What saves.
        path: Where to.
        start: When the save was called.
        call_s: How long the call took.
    """

    def __init__(self, contender: Contender, path: Path, start: float, call_s: float) -> None:
        self.path = path
        self.call_s = call_s
        self.complete_s = 0.0
        self.durable_s = 0.0
        self._contender = contender
        self._start = start
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
        """Return whether the checkpoint is on the disk; raises what the saver raised."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True


class Player:
    """A contender with its training, which takes turns with others.

    The first save has to return the state at the moment of the call, bit by bit, although training continued.

    Args:
        name: The contender's, in `CONTENDERS`.
        size: Which network, and how often to measure.
        start: A checkpoint of `torch.save` to start from.
        folder: Where to save.

    Raises:
        RuntimeError: If the contender does not return what it saved.
    """

    def __init__(self, name: str, size: Size, start: Path, folder: Path) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(THREADS)
        folder.mkdir(parents=True)
        self._size = size
        self._folder = folder
        self._numbers = itertools.count()
        self._num_turns = 0
        self._training = Training.of(size)
        self._training.load_state(torch.load(start, weights_only=True))
        self._contender = CONTENDERS[name](self._training, folder)
        for _ in range(_WARM_UP_ITERATIONS):
            self._iterate()
        self._check()
        # Everything so far stays, so collecting garbage before each load need not look at it.
        gc.freeze()

    def take_turn(self) -> Turn:
        """Measure saves while training, then saves and loads alone."""
        turn = Turn()
        # Other processes ran meanwhile: what they evicted from the caches must not be blamed on the saver. The loads of
        # the last turn returned free memory to the system, and a program that saves regularly has such memory.
        self._discard(save_to(self._contender, self._folder / str(next(self._numbers))))
        self._iterate()
        quiet = self._quiet()
        turn.iteration_s += quiet
        for _ in range(self._size.saves):
            quiet = self._save_while_training(turn, quiet)
        # A save takes seconds beside a thread that never sleeps, so every second turn has to do.
        self._num_turns += 1
        if self._size.probes_gil and self._contender.probes_gil and self._num_turns % 2:
            turn.gaps.append(self._probe_gil())
        if not isinstance(self._contender, Nothing):
            for _ in range(self._size.cpu_saves):
                turn.alone.append(self._save_and_load())
        return turn

    def close(self) -> None:
        """Stop the contender."""
        self._contender.close()

    def _check(self) -> None:
        """Raise unless the contender returns the state of the call."""
        expected = {key: tensor.detach().clone() for key, tensor in flat(self._training.state()).items()}
        watch = self._start_save()
        while not watch.finished():
            self._iterate()
        if not isinstance(self._contender, Nothing):
            compare(flat(self._contender.load(watch.path)), expected)
        self._discard(watch.path)

    def _start_save(self) -> Watch:
        path = self._folder / str(next(self._numbers))
        start = time.perf_counter()
        self._contender.save(path)
        call_s = time.perf_counter() - start
        return Watch(self._contender, path, start, call_s)

    def _save_while_training(self, turn: Turn, before: list[float]) -> list[float]:
        """Save, and train until the file is durable. Returns the iterations after that, which are the next `before`."""
        waited_s = self._contender.barrier_s()
        watch = self._start_save()
        iterations = []
        while True:
            iterations.append(self._iterate())
            if watch.finished():
                break
        barrier_s = self._contender.barrier_s() - waited_s
        stored = sum(file.stat().st_size for file in files_of(watch.path))
        self._discard(watch.path)
        after = self._quiet()
        turn.iteration_s += after
        # Not the median: what it is compared with is a sum.
        usual_s = statistics.fmean(before + after)
        lost_s = watch.call_s + sum(iterations) - len(iterations) * usual_s
        turn.saves.append(Saved(watch.call_s + barrier_s, lost_s, watch.complete_s, watch.durable_s, stored))
        return after

    def _save_and_load(self) -> Alone:
        """Measure a save and a load without training."""
        self._discard(save_to(self._contender, self._folder / str(next(self._numbers))))
        self._training.step(self._contender.lock)
        alone, path = save_and_load(self._contender, self._folder / str(next(self._numbers)))
        self._discard(path)
        return alone

    def _probe_gil(self) -> Gaps:
        """Run a loop in this thread during a save, and measure when it could not run."""
        watch = self._start_save()
        gaps = spin(watch.finished)
        gaps.durable_s = watch.durable_s
        self._discard(watch.path)
        return gaps

    def _quiet(self) -> list[float]:
        """Train without a save."""
        return [self._iterate() for _ in range(self._size.quiet)]

    def _iterate(self) -> float:
        return self._training.iterate(self._contender.lock)

    def _discard(self, path: Path) -> None:
        if not self._contender.keeps_files:
            discard(path)


def save_to(contender: Contender, path: Path) -> Path:
    """Save, and wait until the checkpoint is complete. Returns where it is."""
    contender.save(path)
    return contender.wait(path)


def save_and_load(contender: Contender, path: Path) -> tuple[Alone, Path]:
    """Measure a save and a load without training; returns the path of the checkpoint, too."""
    start = time.perf_counter()
    cpu_s = time.process_time()
    contender.save(path)
    call_s = time.perf_counter() - start
    path = contender.wait(path)
    # Everybody flushes, so that the CPU time of that is not ours alone.
    flush_to_disk(path)
    save_cpu_s = time.process_time() - cpu_s
    forget_memory()
    start = time.perf_counter()
    cpu_s = time.process_time()
    loaded = contender.load(path)
    touch_pages(loaded)
    load_cpu_s = time.process_time() - cpu_s
    load_s = time.perf_counter() - start
    return Alone(call_s, save_cpu_s, load_s, load_cpu_s), path


def compare(loaded: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise RuntimeError unless a checkpoint has the expected tensors, bit by bit."""
    for key, tensor in expected.items():
        if key not in loaded:
            raise RuntimeError(f"did not return {key}")
        if not torch.equal(loaded[key].detach(), tensor):
            raise RuntimeError(f"returned a {key} that is not the state at the moment of the call")


def spin(finished: Callable[[], bool]) -> Gaps:
    """Read the clock in a loop until something has finished, and return how long this thread could not run.

    A thread that waits for the GIL gives up its core by itself; one that the operating system preempts does not. The
    kernel counts both, so the two kinds of gaps can be told apart.
    """
    gaps = Gaps()
    switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    last = time.perf_counter()
    while not finished():
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        now = time.perf_counter()
        gap_s = now - last
        if gap_s > _GAP_S and usage.ru_nvcsw != switches:
            gaps.longest_s = max(gaps.longest_s, gap_s)
            gaps.total_s += gap_s
        elif gap_s > _GAP_S:
            gaps.preempted_s = max(gaps.preempted_s, gap_s)
        switches = usage.ru_nvcsw
        last = now
    return gaps
