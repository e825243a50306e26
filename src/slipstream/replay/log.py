"""`RowLog`: numbered rows of one column in immutable segments, each with a count of the slots that show its rows.

A *segment* is what was packed at once: rows with consecutive numbers, cut into *units* that are decoded on their own
(see `packing`). Numbers are never used twice. A segment is dropped as soon as no slot shows a row of it; one with few
such rows is named by `sparse_rows`, so that its owner can pack them again.

A log has no lock. Its owner appends, releases and locates under a lock, and packs and decodes outside of it: `Located`
holds on to the bytes that it needs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CodecError, OutOfRangeError
from slipstream.replay.packing import ImageRows, PackedColumn, RowPacker, Rows, VectorRows, Where
from slipstream.replay.stacks import frames_of_stack
from slipstream.threads import default_threads, parallel_map

RowNumbers = NDArray[np.int64]

UNIT_OVERHEAD_BYTES = 64
"""What a unit takes besides its bytes: the object's header and rounding, and its entries in two tables."""

_PARALLEL_BYTES = 8 << 20
_BLOCK_UNITS = 128
_LEAST = 16
# A segment is sparse if at most this share of its rows is shown. Every second row may be an extra one, so more than
# half of them is normal.
_SPARSE_SHARE = 0.25


class UnitCache:
    """The units that were decoded last, up to a number of bytes; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._units: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, log: int, numbers: Sequence[int], *, look: bool) -> list[bytes | None]:
        """Return the units that are here; None for the others, and for all without looking."""
        with self._lock:
            found: list[bytes | None] = [None] * len(numbers)
            if look:
                found = [self._units.get((log, number)) for number in numbers]
            missing = found.count(None)
            self.misses += missing
            self.hits += len(found) - missing
        return found

    def put(self, log: int, numbers: Sequence[int], units: Sequence[bytes]) -> None:
        """Keep units; the oldest ones are forgotten if there are too many bytes."""
        if not self.max_bytes:
            return
        with self._lock:
            for number, unit in zip(numbers, units, strict=True):
                if (log, number) not in self._units:
                    self._units[log, number] = unit
                    self.nbytes += len(unit)
            while self.nbytes > self.max_bytes:
                self.nbytes -= len(self._units.popitem(last=False)[1])

    def renew_lock(self) -> None:
        """Replace the lock, which a thread of the parent may hold for ever in a forked child."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitCache, (self.max_bytes,)


@dataclass(frozen=True)
class Segment:
    """Rows that were packed at once: the number of the first, the rows of each unit, and the bytes of each unit.

    The bytes of a unit that was lost are None.
    """

    first: int
    sizes: NDArray[np.int64]
    payloads: Sequence[bytes | None]

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return int(self.sizes.sum())

    @property
    def nbytes(self) -> int:
        """The bytes of its units."""
        return sum(len(payload or b"") for payload in self.payloads)


@dataclass(frozen=True)
class Located:
    """Rows that were found: the units that hold them, and where in those they are."""

    packer: RowPacker
    numbers: list[int]
    sizes: NDArray[np.int64]
    payloads: list[bytes]
    where: Where

    @property
    def stacked(self) -> bool:
        """Whether some share frames with those before and after them, so that reading both at once pays."""
        return any(map(frames_of_stack, self.payloads))


class RowLog:
    """The rows of one column; see the module.

    Args:
        packer: How rows are packed.
        cache: Where decoded vectors are kept.
        number: Distinguishes this log from others with the same cache.
        threads: How many threads pack and unpack; by default one per core.
    """

    def __init__(self, packer: RowPacker, cache: UnitCache, number: int, threads: int | None = None) -> None:
        self.packer = packer
        self.end = 0
        """The number that the next row will have."""
        self.packed_bytes = 0
        """The bytes of all units."""
        self.num_rows = 0
        """How many rows there are, whether a slot shows them or not."""
        self._cache = cache
        self._number = number
        self._threads = threads or default_threads()
        # One entry per unit, in order: its first row, its rows, its bytes. Dropped units stay until most are dropped.
        self._starts = np.zeros(_LEAST, np.int64)
        self._sizes = np.zeros(_LEAST, np.int64)
        self._payloads: list[bytes | None] = []
        self._num_dropped = 0
        # One entry per segment, in order: its first row, its rows, its first unit, and how many slots show its rows.
        self._segments = np.zeros((_LEAST, 4), np.int64)
        self._num_segments = 0

    @property
    def held_bytes(self) -> int:
        """The memory that it takes, tables and objects included."""
        return self.packed_bytes + UNIT_OVERHEAD_BYTES * (len(self._payloads) - self._num_dropped)

    def pack(self, rows: Rows, runs: NDArray[np.int64]) -> PackedColumn:
        """Pack rows without adding them; needs no lock.

        Args:
            rows: ``[rows, bytes of a row]``.
            runs: How many rows follow each other in time before the next run starts; they add up to all.
        """
        return self.packer.pack(rows, runs, self._threads)

    def append(self, packed: PackedColumn, num_shown: int) -> int:
        """Add rows that `pack` packed, `num_shown` of which slots will show; returns the number of the first."""
        sizes, payloads = packed
        segment = Segment(self.end, np.asarray(sizes, np.int64), payloads)
        self._add(segment, num_shown)
        return segment.first

    def _add(self, segment: Segment, num_shown: int) -> None:
        unit = len(self._payloads)
        count = len(segment.sizes)
        self._starts = _with_room(self._starts, unit + count)
        self._sizes = _with_room(self._sizes, unit + count)
        ends = segment.first + np.cumsum(segment.sizes)
        self._starts[unit : unit + count] = ends - segment.sizes
        self._sizes[unit : unit + count] = segment.sizes
        self._payloads += segment.payloads
        self._segments = _with_room(self._segments, self._num_segments + 1)
        self._segments[self._num_segments] = (segment.first, segment.num_rows, unit, num_shown)
        self._num_segments += 1
        self.packed_bytes += segment.nbytes
        self.num_rows += segment.num_rows
        self.end = segment.first + segment.num_rows

    def release(self, rows: RowNumbers) -> None:
        """Note that slots no longer show these rows; a segment that no slot shows is dropped."""
        if not len(rows):
            return
        segment = self._segment_of(rows)
        np.subtract.at(self._segments[:, 3], segment, 1)
        touched = np.unique(segment)
        for number in touched[self._segments[touched, 3] <= 0].tolist():
            self._drop(number)
        if 2 * self._num_dropped > len(self._payloads) > _LEAST:
            self._forget_dropped()

    def _segment_of(self, rows: RowNumbers) -> NDArray[np.int64]:
        firsts = self._segments[: self._num_segments, 0]
        return np.searchsorted(firsts, rows, side="right") - 1

    def _units_of(self, segment: int) -> slice:
        stop = len(self._payloads)
        if segment + 1 < self._num_segments:
            stop = int(self._segments[segment + 1, 2])
        return slice(int(self._segments[segment, 2]), stop)

    def _drop(self, segment: int) -> None:
        if self._segments[segment, 3] < 0:
            return
        units = self._units_of(segment)
        for unit in range(units.start, units.stop):
            self.packed_bytes -= len(self._payloads[unit] or b"")
            self._payloads[unit] = None
        self.num_rows -= int(self._segments[segment, 1])
        self._num_dropped += units.stop - units.start
        self._segments[segment, 1] = 0
        self._segments[segment, 3] = -1

    def _forget_dropped(self) -> None:
        """Remove the entries of dropped segments; amortised, as each of them was paid for when it was added."""
        kept = self.segments()
        shown = self._segments[: self._num_segments, 3]
        shown = shown[shown >= 0].copy()
        end = self.end
        self.clear()
        for segment, count in zip(kept, shown.tolist(), strict=True):
            self._add(segment, count)
        self.end = end

    def clear(self) -> None:
        """Drop all rows; numbers go on."""
        self._payloads = []
        self._num_segments = 0
        self._num_dropped = 0
        self.packed_bytes = 0
        self.num_rows = 0

    def segments(self) -> list[Segment]:
        """Return all segments; they share the packed bytes with the log."""
        found = []
        for number in range(self._num_segments):
            if self._segments[number, 3] < 0:
                continue
            units = self._units_of(number)
            sizes = self._sizes[units].copy()
            found.append(Segment(int(self._segments[number, 0]), sizes, self._payloads[units]))
        return found

    def restore(self, segments: Sequence[Segment], end: int) -> None:
        """Become a log of these segments, which are kept until `count_shown` drops some.

        Raises:
            CodecError: If a unit claims to be larger than it can be, or segments overlap.
        """
        self.clear()
        self.end = 0
        for segment in sorted(segments, key=_first_of):
            if segment.first < self.end:
                raise CodecError(f"rows {segment.first} to {self.end - 1} are stored twice")
            if isinstance(self.packer, VectorRows):
                self.packer.check([payload or b"" for payload in segment.payloads], segment.sizes.tolist())
            self._add(segment, 0)
        self.end = max(end, self.end)

    def count_shown(self, rows: RowNumbers) -> None:
        """Count which rows slots show after `restore`, and drop the other segments."""
        shown = np.bincount(self._segment_of(rows), minlength=self._num_segments)
        self._segments[: self._num_segments, 3] = shown
        for number in np.flatnonzero(shown == 0).tolist():
            self._drop(number)

    def has(self, rows: RowNumbers) -> NDArray[np.bool_]:
        """Return which rows can be read."""
        if not self._num_segments:
            return np.zeros(len(rows), np.bool_)
        unit = np.maximum(np.searchsorted(self._starts[: len(self._payloads)], rows, side="right") - 1, 0)
        inside = (rows >= self._starts[unit]) & (rows < self._starts[unit] + self._sizes[unit])
        is_lost = np.array([payload is None for payload in self._payloads], np.bool_)
        found: NDArray[np.bool_] = inside & ~is_lost[unit]
        return found

    def sparse_rows(self) -> tuple[int, NDArray[np.int64]]:
        """Return how many rows sparse segments have, and the first row and the end of each such segment."""
        table = self._segments[: self._num_segments]
        is_sparse = (table[:, 3] >= 0) & (table[:, 3] <= _SPARSE_SHARE * table[:, 1])
        sparse = table[is_sparse]
        return int(sparse[:, 1].sum()), np.stack([sparse[:, 0], sparse[:, 0] + sparse[:, 1]], axis=1)

    def locate(self, rows: RowNumbers) -> Located:
        """Find rows and hold on to them, so that they can be fetched whatever is dropped meanwhile.

        Raises:
            OutOfRangeError: If a row was dropped, or does not exist.
        """
        starts = self._starts[: len(self._payloads)]
        unit = np.searchsorted(starts, rows, side="right") - 1
        distinct, inverse = np.unique(unit, return_inverse=True)
        payloads: list[bytes] = []
        for number in distinct.tolist():
            payload = self._payloads[number] if number >= 0 else None
            if payload is None:
                raise OutOfRangeError(f"rows {int(rows.min())} to {int(rows.max())} are not all in the log")
            payloads.append(payload)
        offset = rows - starts[unit]
        sizes = self._sizes[distinct]
        if (offset >= self._sizes[unit]).any():
            raise OutOfRangeError(f"rows {int(rows.min())} to {int(rows.max())} are not all in the log")
        return Located(self.packer, starts[distinct].tolist(), sizes, payloads, Where(inverse.reshape(-1), offset))

    def fetch(self, located: Located, *outs: Rows) -> Rows:
        """Decode what was located, without a lock; returns the first of `outs`.

        Args:
            located: From `locate`.
            outs: Memory of ``[rows, bytes of a row]`` to read into: one array for vectors, any number of them for
                images, one after another; by default one new array.

        Raises:
            CodecError: If what is stored is damaged.
        """
        packer = located.packer
        count = len(located.where.row)
        outs = outs or (np.empty((count, packer.row_bytes), np.uint8),)
        if not count:
            return outs[0]
        if isinstance(packer, ImageRows):
            packer.gather(located.payloads, located.where, outs)
        else:
            packer.gather(self._decode(packer, located), located.sizes, located.where, *outs)
        return outs[0]

    def _decode(self, packer: VectorRows, located: Located) -> list[bytes]:
        """Decode units, except for those in the cache; on several threads if there is much to do."""
        nbytes = int(located.sizes.sum()) * packer.row_bytes
        # A batch from everywhere would only push everything out.
        fits = nbytes <= self._cache.max_bytes
        found = self._cache.find(self._number, located.numbers, look=fits)
        missing = [place for place, unit in enumerate(found) if unit is None]
        lengths = located.sizes.tolist()

        def run(first: int) -> list[bytes]:
            places = missing[first : first + _BLOCK_UNITS]
            return packer.decode([located.payloads[place] for place in places], [lengths[place] for place in places])

        threads = 1
        if nbytes >= _PARALLEL_BYTES:
            threads = self._threads
        decoded: list[bytes] = []
        for block in parallel_map(run, range(0, len(missing), _BLOCK_UNITS), threads):
            decoded += block
        for place, unit in zip(missing, decoded, strict=True):
            found[place] = unit
        if fits:
            self._cache.put(self._number, [located.numbers[place] for place in missing], decoded)
        return [unit for unit in found if unit is not None]


def _first_of(segment: Segment) -> int:
    return segment.first


def _with_room(table: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return a table with at least `count` entries; doubling keeps appending O(1) amortised."""
    if count <= len(table):
        return table
    larger = np.zeros((2 * count, *table.shape[1:]), np.int64)
    larger[: len(table)] = table
    return larger
