"""`PrefixSum`: which of many ranges an index falls into, while ranges come at one end and go at the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.errors import OutOfRangeError, ReplayError

_LEAST = 16
_MOST = (1 << 63) - 1


class PrefixSum:
    """Lengths laid end to end: adds at the right, evicts at the left, and finds the range of any index.

    Indices count from the first element of the oldest range that is left; ranges are numbered from it, too. Sums are
    kept in 64 bits. Adding and evicting cost O(1) amortised, a look-up O(log n), for one index or for an array of them.
    Takes 8 to 32 bytes per range. Not safe for threads that change it at once: its owner holds a lock.

    Args:
        max_len: How many ranges there may be; one more evicts the oldest. As many as memory allows by default.

    Raises:
        ConfigurationError: If `max_len` is not a whole number from 1 up.

    Example:
        >>> episodes = PrefixSum(max_len=3)
        >>> for length in (5, 2, 4):
        ...     _ = episodes.add(length)
        >>> episodes.get_range_idx(6), episodes.get_range_relative_idx(6, 1)
        (1, 1)
        >>> episodes.add(1), episodes.get_range_idx([0, 2]).tolist()
        (1, [0, 1])
    """

    def __init__(self, max_len: int | None = None) -> None:
        self.max_len = None if max_len is None else require_count("max_len", max_len)
        self._bounds = np.zeros(_LEAST, np.int64)  # ever-growing sums; those of the ranges there are lie in the middle
        self._first = 0  # where the start of the oldest range is
        self._last = 0  # where the end of the newest range is
        self.num_evicted = 0
        """How many ranges were evicted so far."""

    def __len__(self) -> int:
        """Return how many ranges there are."""
        return self._last - self._first

    @property
    def total(self) -> int:
        """The sum of all lengths: indices go from 0 up to this, exclusive."""
        return int(self._bounds[self._last] - self._bounds[self._first])

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each range starts, as a copy."""
        starts: NDArray[np.int64] = self._bounds[self._first : self._last] - self._bounds[self._first]
        return starts

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each range, as a copy."""
        return np.diff(self._bounds[self._first : self._last + 1])

    def lengths_of(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of some ranges, by their numbers; the caller makes sure that they exist."""
        first = self._first + ranges
        return self._bounds[first + 1] - self._bounds[first]

    def starts_of(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where some ranges start, by their numbers; the caller makes sure that they exist."""
        starts: NDArray[np.int64] = self._bounds[self._first + ranges] - self._bounds[self._first]
        return starts

    def add(self, length: int) -> int:
        """Append a range; returns how many had to go for it (0 or 1).

        Raises:
            ReplayError: If the length is not a whole number from 0 up, or the sum would exceed 64 bits.
        """
        return self.extend([length])

    def extend(self, lengths: Sequence[int] | NDArray[Any]) -> int:
        """Append many ranges at once; returns how many ranges had to go, some of them perhaps new.

        Raises:
            ReplayError: If a length is not a whole number from 0 up, or the sum would exceed 64 bits.
        """
        new = _whole(lengths)
        if new.size and int(new.min()) < 0:
            raise ReplayError(f"a length is {int(new.min())}, expected a whole number from 0 up")
        added = _exact_sum(new)
        surplus = 0
        if self.max_len is not None:
            surplus = max(0, len(self) + new.size - self.max_len)
        # Ranges that go for the new ones do not count.
        num_old = min(surplus, len(self))
        left = int(self._bounds[self._last] - self._bounds[self._first + num_old])
        if left + added > _MOST:
            raise ReplayError(f"the lengths would add up to {left + added}, expected at most 2**63 - 1")
        self.evict(num_old)
        if int(self._bounds[self._last]) + added > _MOST:
            # The sums include what was evicted. Without it, they fit.
            self._bounds -= self._bounds[self._first]
        last = int(self._bounds[self._last])
        self._reserve(new.size)
        np.cumsum(new, out=self._bounds[self._last + 1 : self._last + 1 + new.size])
        self._bounds[self._last + 1 : self._last + 1 + new.size] += last
        self._last += new.size
        self.evict(surplus - num_old)
        return surplus

    def evict(self, count: int = 1) -> int:
        """Remove the oldest ranges; returns the sum of their lengths.

        Raises:
            OutOfRangeError: If there are fewer.
        """
        if not 0 <= count <= len(self):
            raise OutOfRangeError(f"cannot evict {count} ranges, there are {len(self)}")
        start = int(self._bounds[self._first])
        self._first += count
        self.num_evicted += count
        return int(self._bounds[self._first]) - start

    def clear(self) -> None:
        """Remove all ranges."""
        self.evict(len(self))

    @overload
    def get_range_idx(self, i: int) -> int: ...
    @overload
    def get_range_idx(self, i: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]: ...
    def get_range_idx(self, i: Any) -> Any:
        """Return the number of the range that holds index `i`, or of each if `i` is an array; O(log n) each.

        Raises:
            OutOfRangeError: If an index is negative, or not below `total`.
        """
        index = self._check(i)
        found = np.searchsorted(
            self._bounds[self._first + 1 : self._last + 1], index + self._bounds[self._first], side="right"
        )
        return int(found) if index.ndim == 0 else found.astype(np.int64, copy=False)

    @overload
    def get_range_relative_idx(self, i: int, range_idx: int) -> int: ...
    @overload
    def get_range_relative_idx(
        self, i: Sequence[int] | NDArray[Any], range_idx: Sequence[int] | NDArray[Any]
    ) -> NDArray[np.int64]: ...
    def get_range_relative_idx(self, i: Any, range_idx: Any) -> Any:
        """Return where in range `range_idx` index `i` is, counted from the start of the range.

        Raises:
            OutOfRangeError: If there is no such index or range, or the index is not in that range.
        """
        index, number = self._check(i), _whole(range_idx)
        if number.size and not (int(number.min()) >= 0 and int(number.max()) < len(self)):
            raise OutOfRangeError(f"range {_worst(number)} is out of range, there are {len(self)} ranges")
        start = self._bounds[self._first + number] - self._bounds[self._first]
        relative = index - start
        length = self._bounds[self._first + number + 1] - self._bounds[self._first + number]
        if relative.size and bool(((relative < 0) | (relative >= length)).any()):
            raise OutOfRangeError("an index is not in the range that was named for it")
        return int(relative) if relative.ndim == 0 else relative

    def _check(self, i: Any) -> NDArray[np.int64]:
        index = _whole(i)
        if index.size and not (int(index.min()) >= 0 and int(index.max()) < self.total):
            raise OutOfRangeError(f"index {_worst(index)} is out of range, there are {self.total}")
        return index

    def _reserve(self, count: int) -> None:
        """Make room for `count` more: doubles, or moves what is left to the front if most was evicted."""
        needed = self._last + 1 + count
        if needed <= self._bounds.size:
            return
        live = self._bounds[self._first : self._last + 1]
        room = np.zeros(max(_LEAST, 2 * (live.size + count)), np.int64)
        room[: live.size] = live
        self._bounds, self._first, self._last = room, 0, live.size - 1


def _whole(values: Any) -> NDArray[np.int64]:
    array = np.asarray(values)
    is_whole = array.dtype.kind in "iu" or not array.size
    # Unsigned numbers from 2**63 up would become negative.
    if not is_whole or (array.dtype == np.uint64 and array.size and int(array.max()) > _MOST):
        raise ReplayError(f"{str(values)[:60]}: expected whole numbers below 2**63")
    return array.astype(np.int64, copy=False)


def _exact_sum(lengths: NDArray[np.int64]) -> int:
    """Add up numbers from 0 up without overflow."""
    if not lengths.size or int(lengths.max()) <= _MOST // lengths.size:
        return int(lengths.sum())
    return sum(lengths.tolist())


def _worst(index: NDArray[np.int64]) -> int:
    low = int(index.min())
    return low if low < 0 else int(index.max())
