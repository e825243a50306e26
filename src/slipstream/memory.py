"""Memory for batches: used again once nobody holds a batch any more, and aligned so that copies into it are fast.

A fresh quarter of a gigabyte costs page faults for longer than it takes to fill. Reading into memory that does not
begin at a cache line takes up to three times as long.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 4096
_FREE = 2  # references to memory that nobody has: that of its piece, and the argument of getrefcount
_MAX_KEPT = 64

_scratch = threading.local()


def aligned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return bytes that begin at a page; what is in them is undefined."""
    return _view(np.empty(math.prod(shape) + _ALIGNMENT, np.uint8), shape)


def _view(memory: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + math.prod(shape)].reshape(shape)


def scratch(name: str, shape: tuple[int, ...], *, skew: int = 0) -> NDArray[np.uint8]:
    """Return memory that is this thread's until it asks for the same again.

    Args:
        name: What for.
        shape: Its shape.
        skew: How many bytes after a page it begins: a processor that reads one page and writes another at the same
            distance from their beginnings takes the one for the other, and waits.
    """
    kept: dict[str, NDArray[np.uint8]] = _scratch.__dict__.setdefault("kept", {})
    found = kept.get(name)
    if found is None or found.shape != shape:
        found = kept[name] = aligned((math.prod(shape) + skew,))[skew:].reshape(shape)
    return found


class _Piece:
    """Memory, and when it was handed out last."""

    __slots__ = ("memory", "taken_at")

    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes, np.uint8)
        self.taken_at = 0

    def is_free(self) -> bool:
        return sys.getrefcount(self.memory) == _FREE


class Recycler:
    """Hands out memory, and hands it out again when all arrays and tensors that showed it are gone.

    Whoever still has a batch keeps it: memory is taken back only when the interpreter counts no reference to it, so
    that no batch ever changes under its owner. What nobody asked for in a while is given back to the system. Safe to
    be used by several threads.
    """

    def __init__(self) -> None:
        self._kept: deque[_Piece] = deque()
        self._taken = 0

    def take(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return an array of bytes; what is in it is undefined."""
        wanted = math.prod(shape) + _ALIGNMENT
        self._taken += 1
        found = None
        for _ in range(len(self._kept)):
            try:
                piece = self._kept.popleft()  # while it is out of the queue, no other thread can take it
            except IndexError:
                break
            free = piece.is_free()
            if free and len(piece.memory) == wanted:
                found = piece
                break
            if not free or self._taken - piece.taken_at < _MAX_KEPT:
                self._kept.append(piece)
        found = found or _Piece(wanted)
        found.taken_at = self._taken
        view = _view(found.memory, shape)
        if len(self._kept) < _MAX_KEPT:
            self._kept.append(found)
        return view

    def clear(self) -> None:
        """Keep nothing any more; what was handed out stays with its owners."""
        self._kept.clear()

    def __reduce__(self) -> tuple[type[Recycler], tuple[()]]:
        return Recycler, ()
