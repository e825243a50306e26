"""`StoredObservations`: packed observations that are indexed like the arrays of stable-baselines3's own buffers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Slots = NDArray[np.int64]


class StoredObservations:
    """One observation of all steps, ``[steps, environments, ...]``: indexing it unpacks the requested steps.

    Subclasses of SB3's buffers read ``self.observations[steps, environments]``; this lets them do so without knowing
    that the observations are packed. What indexing returns is a copy. Assignments raise `TypeError`.

    Args:
        shape: ``(steps, environments, ...)``.
        dtype: The dtype of the elements.
        read: Returns the observations in slots ``[slots]``, in new memory. The slot of a step is
            ``step * environments + environment``.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, read: Callable[[Slots], NDArray[Any]]) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._read = read

    @property
    def nbytes(self) -> int:
        """The memory that an array with all of them would take."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[Any]:
        parts = index
        if not isinstance(index, tuple):
            parts = (index,)
        rest = parts[2:]
        # An index that mixes steps with elements of an observation is left to NumPy. It is rare, so decode everything.
        if not all(map(_selects_steps, parts[:2])) or not all(map(_selects_elements, rest)):
            return np.asarray(np.asarray(self)[index])
        slots = self._slots_at(parts[:2])
        values = self._read(slots.reshape(-1)).reshape(*slots.shape, *self.shape[2:])
        found: NDArray[Any] = values[(*[slice(None)] * slots.ndim, *rest)]
        return found

    def _slots_at(self, parts: tuple[Any, ...]) -> Slots:
        """Return the slots that an index of steps and environments means, in the shape that NumPy gives them."""
        grid = self.shape[:2]
        # SB3 indexes with two arrays of numbers, for which no table of all slots is needed.
        if len(parts) == 2 and all(map(_is_numbers, parts)):
            try:
                return np.asarray(np.ravel_multi_index(parts, grid), np.int64)
            except ValueError:
                # Numbers that count from the end, or are out of range.
                pass
        return np.asarray(np.arange(math.prod(grid)).reshape(grid)[parts])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("packed observations cannot be read without a copy: use np.asarray(...)")
        values = self._read(np.arange(math.prod(self.shape[:2]))).reshape(self.shape)
        return values.astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype})"


def _selects_steps(part: Any) -> bool:
    """Return whether a part of an index selects along the axis at its place."""
    return part is not Ellipsis and part is not None


def _is_numbers(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype.kind in "iu"


def _selects_elements(part: Any) -> bool:
    """Return whether a part of an index selects the same elements of every observation."""
    return isinstance(part, int | slice)
