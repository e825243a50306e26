"""Random numbers that a seed repeats, and that differ between the processes of one run."""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from typing import Any

import numpy as np
from numpy.random import Generator, SeedSequence, default_rng
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from slipstream.checks import require_count
from slipstream.datasets.epochs import EpochCounter
from slipstream.datasets.ranks import find_ranks

# `numpy.random` is imported by name, here: NumPy would import it on first use, perhaps in a thread, and a process that
# is forked meanwhile would wait for that import forever.


class Randomness:
    """A stream of random numbers that differs between processes.

    A worker that starts with a copy of its parent's generator would draw what all others draw. Here the stream depends
    on the seed, the rank, the number of the `DataLoader` worker, and the epoch, if the workers are started again for
    each. So a seed gives the same numbers however workers are started, and whatever other processes were started
    before. The stream of a process that `multiprocessing` started for another purpose depends on its place among those.

    Args:
        seed: Seed of all streams. Random if None.
        rank: Number of this process among those that train together; see `find_ranks`.
        world_size: Number of these processes.

    Attributes:
        seed: The seed.
        rank: The rank.
        world_size: The number of processes.
    """

    def __init__(self, seed: int | None = None, rank: int | None = None, world_size: int | None = None) -> None:
        if seed is not None:
            require_count("seed", seed, 0)
        self.seed = int(SeedSequence().entropy if seed is None else seed)  # type: ignore[arg-type]
        self.rank, self.world_size = find_ranks(rank, world_size)
        self._epochs = EpochCounter()
        self._owner: tuple[int, tuple[int, ...]] | None = None
        self._generator: Generator | None = None
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        _streams.add(self)

    def draw(self, stop: int, count: int) -> NDArray[np.int64]:
        """Return `count` numbers from 0 to `stop` - 1. Thread-safe."""
        with self._lock:
            return self.generator().integers(0, stop, count)

    def generator(self) -> Generator:
        """Return the generator of this process."""
        place = _place()
        owner = (os.getpid(), place)
        if self._generator is None or self._owner != owner:
            self._generator = default_rng(SeedSequence(self.seed, spawn_key=self._key(owner)))
            self._owner = owner
        return self._generator

    def _key(self, owner: tuple[int, tuple[int, ...]]) -> tuple[int, ...]:
        """Return what tells the stream of this process from others of the same seed."""
        process, place = owner
        worker = get_worker_info()
        if worker is not None:
            # The last part of its place counts all processes that its parent started, and so depends on the program.
            return (self.rank, 1 + worker.id, self._epochs.begin(), *place[:-1])
        # A plain fork has its parent's place: then only the process id can tell the two apart.
        if self._owner is not None and self._owner[1] == place and self._owner[0] != process:
            return (self.rank, 0, 0, *place, process)
        return (self.rank, 0, 0, *place)

    def _begin_in_child(self) -> None:
        """Make a new lock: the old one may be held by a thread that is not here."""
        self._start()
        # Nothing was drawn yet: note whose child this is, or it would draw what its parent will.
        self._owner = self._owner or (os.getppid(), _place())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


_streams: weakref.WeakSet[Randomness] = weakref.WeakSet()


def _place() -> tuple[int, ...]:
    """Return the place of this process among those that `multiprocessing` started."""
    return tuple(getattr(multiprocessing.current_process(), "_identity", ()))


def _after_fork_in_child() -> None:
    for stream in list(_streams):
        stream._begin_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
