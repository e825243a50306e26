"""Slots of a ring: which of them a cursor or an index means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import OutOfRangeError


@dataclass(frozen=True)
class RingShape:
    """A ring of slots, numbered through ``[time, streams...]``.

    Args:
        num_times: The length of the ring.
        streams: The axes after time.
    """

    num_times: int
    streams: tuple[int, ...]

    @classmethod
    def of(cls, capacity: int, streams: tuple[int, ...]) -> RingShape:
        """Return the smallest ring that holds `capacity` steps."""
        return cls(-(-capacity // max(1, math.prod(streams))), streams)

    @property
    def width(self) -> int:
        """How many slots there are at one time."""
        return math.prod(self.streams)

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return self.num_times * self.width

    @property
    def shape(self) -> tuple[int, ...]:
        """All axes."""
        return (self.num_times, *self.streams)

    def table(self) -> NDArray[np.int64]:
        """Return the numbers of all slots as ``[time, streams...]``."""
        return np.arange(self.num_slots).reshape(self.shape)

    def at(self, index: Any, num_used: int) -> NDArray[np.int64]:
        """Return which of the first `num_used` slots along time an index means, as NumPy would.

        Raises:
            IndexError: If there is no such slot.
        """
        plain = plain_index(index)
        # Most reads are batches of whole numbers, for which a table of all slots would cost more than the batch.
        places = plain
        if not isinstance(plain, tuple):
            places = (plain,)
        if len(places) == len(self.shape) and all(map(_is_numbers, places)):
            return self._at_places(places, num_used)
        return np.asarray(self.table()[:num_used][plain])

    def _at_places(self, places: tuple[NDArray[Any], ...], num_used: int) -> NDArray[np.int64]:
        """Return the slots at some places along all axes."""
        try:
            parts = np.broadcast_arrays(*places)
        except ValueError as error:
            raise IndexError(str(error)) from error
        slots = np.zeros((), np.int64)
        for numbers, length in zip(parts, (num_used, *self.streams), strict=True):
            if numbers.size and not -length <= int(numbers.min()) <= int(numbers.max()) < length:
                raise IndexError(f"there are {length} steps along an axis")
            place = numbers.astype(np.int64)
            slots = slots * length + np.where(place < 0, place + length, place)
        return slots

    def slots(self, cursor: Any, count: int, num_used: int) -> NDArray[np.int64]:
        """Return which slots a cursor means.

        Args:
            cursor: What a writer passes: slots along time, or a tuple of places along all axes.
            count: How many steps along time are written.
            num_used: How many slots along time are in use; negative numbers count from there.

        Raises:
            OutOfRangeError: If there is no such slot.
        """
        if isinstance(cursor, tuple):
            parts = np.broadcast_arrays(*(np.asarray(_plain(part), np.int64) for part in cursor))
            try:
                flat: NDArray[np.int64] = np.ravel_multi_index(parts, self.shape)
            except ValueError as error:
                raise OutOfRangeError(f"slots {str(cursor)[:60]}, there are {list(self.shape)}") from error
            return flat.reshape(-1)
        if isinstance(cursor, slice):
            stop = cursor.indices(max(count, self.num_times))[1]
            if cursor.stop is None and count == self.num_times:
                stop = self.num_times
            time = np.arange(self.num_times)[slice(cursor.start, stop, cursor.step)][:count]
        else:
            time = np.asarray(_plain(cursor)).reshape(-1)
            if time.dtype == np.bool_:
                time = np.flatnonzero(time)
            time = time.astype(np.int64)
        time = np.where(time < 0, time + num_used, time)
        if time.size and not (int(time.min()) >= 0 and int(time.max()) < self.num_times):
            raise OutOfRangeError(f"slots {int(time.min())} to {int(time.max())}, there are {self.num_times}")
        return (time[:, None] * self.width + np.arange(self.width)).reshape(len(time), *self.streams)

    def ordered(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Arrange slots so that steps which follow each other are neighbours.

        Returns:
            The slots as ``[time, streams]``, and where each of them was in `slots`, flattened.
        """
        order = np.arange(slots.size)
        flat = slots.reshape(-1)
        if slots.ndim == len(self.shape) and slots.size:
            table = slots.reshape(len(slots), -1)
            times = table // max(1, self.width)
            if (times == times[:, :1]).all():
                return table, order.reshape(table.shape)
        # Of equal slots the last one counts, so the order among them stays.
        order = np.lexsort((order, flat // max(1, self.width), flat % max(1, self.width)))
        return flat[order][:, None], order[:, None]


def plain_index(index: Any) -> Any:
    """Return an index for NumPy that means the same."""
    if isinstance(index, tuple):
        return tuple(map(plain_index, index))
    if isinstance(index, range):
        return np.arange(index.start, index.stop, index.step)
    return _plain(index)


def _is_numbers(index: Any) -> bool:
    """Return whether an index is an array of whole numbers."""
    return isinstance(index, np.ndarray) and index.dtype.kind in "iu"


def _plain(index: Any) -> Any:
    if isinstance(index, torch.Tensor):
        return index.cpu().numpy()
    return index


def is_single(index: Any) -> bool:
    """Return whether an index is one number."""
    return isinstance(index, (int, np.integer)) or (isinstance(index, (torch.Tensor, np.ndarray)) and index.ndim == 0)


def is_sliced(index: Any) -> bool:
    """Return whether an index is made of slices only."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, slice) for part in parts)


def is_block(cursor: Any) -> bool:
    """Return whether a cursor is an index of several axes with slices in it, not places of single steps."""
    return isinstance(cursor, tuple) and any(isinstance(part, slice) or part is Ellipsis for part in cursor)
