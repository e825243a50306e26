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

from slipstream.checks import require_count

# `numpy.random` is imported by name, here: NumPy would import it on first use, perhaps in a thread, and a process that
# is forked meanwhile would wait for that import for ever.


class Randomness:
    """A stream of random numbers that is another one in every process.

    A worker that starts with a copy of its parent's generator would draw what all others draw. Here the stream of a
    process follows from the seed and from its place in the tree of processes, which is the same whenever the same
    program runs again.

    Args:
        seed: What all streams follow from; drawn from the system if None.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None:
            require_count("seed", seed, 0)
        self.seed = int(SeedSequence().entropy if seed is None else seed)  # type: ignore[arg-type]
        self._owner: tuple[int, tuple[int, ...]] | None = None
        self._generator: Generator | None = None
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        _streams.add(self)

    def draw(self, stop: int, count: int) -> NDArray[np.int64]:
        """Return so many numbers from 0 to `stop` - 1; several threads may ask."""
        with self._lock:
            return self.generator().integers(0, stop, count)

    def generator(self) -> Generator:
        """Return the generator of this process."""
        place = _place()
        owner = (os.getpid(), place)
        if self._generator is None or self._owner != owner:
            # A plain fork has its parent's place: then only the process id can tell the two apart.
            forked = self._owner is not None and self._owner[1] == place and self._owner[0] != owner[0]
            key = (*place, os.getpid()) if forked else place
            self._generator = default_rng(SeedSequence(self.seed, spawn_key=key))
            self._owner = owner
        return self._generator

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
