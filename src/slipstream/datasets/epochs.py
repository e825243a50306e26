"""`EpochCounter`: the number of the current epoch, the same in every worker of a `DataLoader`."""

from __future__ import annotations

import os
import zlib
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from slipstream.checks import require_count

_MAX_EPOCH = (1 << 31) - 2
_NUM_ENTRIES = 64
_NUM_WORKERS = 1024
_EPOCH_BITS = (1 << 32) - 1
_MAIN = 0  # token of iterations in the main process


class EpochCounter:
    """Counts epochs in shared memory, so that workers that live for one epoch only know of those before it.

    `begin` returns the same epoch in all workers of one iteration over a `DataLoader`, and the next one in the next
    iteration, however the workers are started and whether or not they persist.

    No locks are needed. An iteration is identified by the seed that its workers share. The first worker to begin
    computes the epoch from a copy of the entries in shared memory and adds an entry. A worker that copied the entries
    before that computes the same epoch and writes the same entry; one that copied them later finds the entry. Every
    entry is one aligned 8-byte word, which is read and written as a whole.

    Example:
        >>> counter = EpochCounter()
        >>> counter.begin(), counter.begin(), counter.next
        (0, 1, 2)
    """

    def __init__(self) -> None:
        cells = torch.zeros(1 + _NUM_ENTRIES + _NUM_WORKERS, dtype=torch.int64)
        self._cells: torch.Tensor = cast("Any", cells).share_memory_()
        # The process of the last iteration in a worker, and its entry.
        self._last: tuple[int, int] | None = None

    @property
    def next(self) -> int:
        """The epoch that the next iteration will have."""
        return _next_epoch(self._words[: 1 + _NUM_ENTRIES].copy())

    def set_next(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Call this between iterations.

        Raises:
            ConfigurationError: If it is not a whole number from 0.
        """
        epoch = require_count("epoch", epoch, 0, _MAX_EPOCH)
        words = self._words
        words[:] = 0
        words[0] = epoch

    def begin(self) -> int:
        """Begin an iteration in this process, and return its epoch."""
        words = self._words
        # One copy for all decisions: another worker may add an entry between two reads.
        seen = words[: 1 + _NUM_ENTRIES].copy()
        epoch = _next_epoch(seen)
        worker = get_worker_info()
        if worker is None:
            words[1 + epoch % _NUM_ENTRIES] = _pack(_MAIN, epoch)
            return epoch
        token = _token(worker.seed - worker.id)
        place = 1 + _NUM_ENTRIES + worker.id % _NUM_WORKERS
        last = int(words[place])
        found = _newest_epoch(seen[1:], token)
        if self._last == (os.getpid(), last):
            # This process persists, and so do the other workers: all have begun equally often.
            epoch = last & _EPOCH_BITS
        elif found is not None and last != _pack(token, found):
            # Another worker has begun this iteration. The same worker twice would be an iteration with an equal seed.
            epoch = found
        words[1 + epoch % _NUM_ENTRIES] = _pack(token, epoch)
        words[place] = _pack(token, epoch)
        self._last = (os.getpid(), _pack(token, epoch))
        return epoch

    @property
    def _words(self) -> NDArray[np.int64]:
        return self._cells.numpy()

    def __getstate__(self) -> dict[str, Any]:
        return {"cells": self._cells}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._cells = state["cells"]
        self._last = None
        # What multiprocessing sends is shared already; a copy, or what was pickled to a file, is not.
        cells: Any = self._cells
        if not cells.is_shared():
            cells.share_memory_()


def _pack(token: int, epoch: int) -> int:
    """Return an entry: 31 bits of the iteration's token and the epoch plus 1, so that no entry is 0."""
    return token << 32 | (epoch + 1)


def _epochs(entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the epochs of entries, -1 for an empty one."""
    return (entries & _EPOCH_BITS) - 1


def _next_epoch(words: NDArray[np.int64]) -> int:
    """Return the epoch after the newest entry; without entries, the first word says where to begin."""
    newest = int(_epochs(words[1:]).max())
    return max(newest + 1, int(words[0]))


def _newest_epoch(entries: NDArray[np.int64], token: int) -> int | None:
    """Return the newest epoch of an iteration."""
    found = entries[entries >> 32 == token]
    if not found.size:
        return None
    return int(_epochs(found).max())


def _token(seed: int) -> int:
    """Return 31 bits that identify an iteration, and never those of the main process."""
    digest = zlib.crc32(seed.to_bytes(16, "little", signed=True))
    return max(1, digest >> 1)
