"""`StoredObservations`: packed observations that are indexed like the arrays of stable-baselines3's own buffers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Slots = NDArray[np.int64]


class StoredObservations:
    """One observation of all steps, ``[steps, environments, ...]``: indexing it unpacks what is asked for.

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
        parts = index if isinstance(index, tuple) else (index,)
        rest = parts[2:]
        # An index that mixes steps with elements of an observation is left to NumPy. It is rare, so decode everything.
        if not all(map(_is_plain, parts[:2])) or not all(isinstance(part, int | slice) for part in rest):
            return np.asarray(np.asarray(self)[index])
        slots = self._slots_at(parts[:2])
        values = self._read(slots.reshape(-1)).reshape(*slots.shape, *self.shape[2:])
        # An element of one observation is a scalar, as in an array.
        found: NDArray[Any] = values[(*[slice(None)] * slots.ndim, *rest)]
        return found

    def _slots_at(self, parts: tuple[Any, ...]) -> Slots:
        """Return the slots that an index of steps and environments means, in the shape that NumPy gives them."""
        grid = self.shape[:2]
        arrays = [np.asarray(part) for part in parts if not isinstance(part, slice)]
        # SB3 indexes with two arrays of numbers, for which no table of all slots is needed.
        if len(arrays) == 2 and all(array.dtype.kind in "iu" and (array >= 0).all() for array in arrays):
            steps, envs = np.broadcast_arrays(*arrays)
            if (steps < grid[0]).all() and (envs < grid[1]).all():
                return np.asarray(steps.astype(np.int64) * grid[1] + envs)
        return np.asarray(np.arange(math.prod(grid)).reshape(grid)[parts])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("packed observations cannot be read without a copy: use np.asarray(...)")
        values = self._read(np.arange(math.prod(self.shape[:2]))).reshape(self.shape)
        return values.astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype})"


def _is_plain(part: Any) -> bool:
    """Return whether a part of an index selects along its own axis only."""
    return part is not Ellipsis and part is not None
