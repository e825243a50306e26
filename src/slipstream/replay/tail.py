"""The unfinished end of an episode: raw rows that grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 16


class Tail:
    """Arrays of one length that are appended to; doubling keeps that O(1) amortised per row."""

    def __init__(self) -> None:
        self.length = 0
        self._room = 0
        self._arrays: dict[Any, NDArray[Any]] = {}

    @property
    def nbytes(self) -> int:
        """The memory it takes, room to grow included."""
        return sum(array.nbytes for array in self._arrays.values())

    def nbytes_with(self, values: Mapping[Any, NDArray[Any]]) -> int:
        """Return the memory that it would take once these rows are appended."""
        count = len(next(iter(values.values())))
        return sum(self._room_for(count) * (rows.nbytes // count) for rows in values.values())

    def append(self, values: Mapping[Any, NDArray[Any]]) -> None:
        """Copy rows to the end; all arrays have as many, and the same dtypes and shapes as before."""
        count = len(next(iter(values.values())))
        room = self._room_for(count)
        for name, rows in values.items():
            array = self._arrays.get(name)
            if array is None or room > len(array):
                larger = np.zeros((room, *rows.shape[1:]), rows.dtype)
                if array is not None:
                    larger[: self.length] = array[: self.length]
                array = self._arrays[name] = larger
            array[self.length : self.length + count] = rows
        self.length += count
        self._room = room

    def _room_for(self, count: int) -> int:
        needed = self.length + count
        return self._room if needed <= self._room else max(_LEAST, 2 * needed)

    def values(self) -> dict[Any, NDArray[Any]]:
        """Return the rows there are, as views."""
        return {name: array[: self.length] for name, array in self._arrays.items()}

    def clear(self) -> None:
        """Forget the rows and the memory."""
        self.length = self._room = 0
        self._arrays = {}
