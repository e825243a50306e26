"""`RowLog`: numbered rows of one column in immutable segments, each with a count of the slots that show its rows.

A *segment* is what was packed at once: rows with consecutive numbers, cut into *units* that are decoded on their own
(see `packing`), whose bytes are one object. Numbers are never used twice. A segment is dropped as soon as no slot shows
a row of it; one with few such rows is named by `sparse_ranges`, so that its owner can pack them again.

A log has no lock. Its owner appends, releases and locates under a lock, and packs and decodes outside of it: `Located`
holds on to the bytes that it needs.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CodecError, OutOfRangeError
from slipstream.replay.packing import ImageRows, RowPacker, Rows, Units, VectorRows, Where
from slipstream.replay.stacks import frames_of_stack
from slipstream.threads import default_threads, parallel_each

RowNumbers = NDArray[np.int64]

_UNIT_OVERHEAD_BYTES = 16
"""What a unit takes besides its bytes: its entries in two tables."""
_SEGMENT_OVERHEAD_BYTES = 128
"""What a segment takes besides its units: the object's header and rounding, and its entries in all tables."""

_PARALLEL_BYTES = 8 << 20
_BLOCK_BYTES = 1 << 20
_LEAST = 16
# Reads of more units than this do not use the cache: looking there would take as long as decoding them.
_CACHED_UNITS = 32
# A segment is sparse if at most this share of its rows is shown. Every second row may be an extra one, so more than
# half of them is normal.
_SPARSE_SHARE = 0.25


def overhead_bytes(num_units: int, num_segments: int) -> int:
    """Return the memory that units and segments take besides their bytes."""
    return _UNIT_OVERHEAD_BYTES * num_units + _SEGMENT_OVERHEAD_BYTES * num_segments


class UnitCache:
    """The units that were decoded last, up to a number of bytes; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._num_logs = 0
        self._units: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def new_log(self) -> int:
        """Return a number for a log that no other log of this cache had, not even one that is gone."""
        self._num_logs += 1
        return self._num_logs - 1

    def find(self, log: int, numbers: Sequence[int]) -> list[bytes | None]:
        """Return the units that are here, None for the others."""
        with self._lock:
            found = [self._units.get((log, number)) for number in numbers]
            missing = found.count(None)
            self.misses += missing
            self.hits += len(found) - missing
        return found

    def pass_by(self, count: int) -> None:
        """Count units that were not looked for."""
        with self._lock:
            self.misses += count

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
        """Replace the lock, which a thread of the parent may hold forever in a forked child."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitCache, (self.max_bytes,)


@dataclass(frozen=True)
class Segment:
    """Rows that were packed at once: the number of the first, and the units they are in. A lost unit has no bytes."""

    first: int
    units: Units

    @classmethod
    def join(cls, first: int, sizes: NDArray[np.int64], payloads: Sequence[bytes | None]) -> Segment:
        """Make a segment of units, of which those that were lost are None."""
        return cls(first, Units.join(sizes, [payload or b"" for payload in payloads]))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many rows each unit has."""
        return self.units.sizes

    @property
    def payloads(self) -> list[bytes | None]:
        """The bytes of each unit; None if they were lost."""
        return [payload or None for payload in self.units.payloads]

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return int(self.units.sizes.sum())

    @property
    def nbytes(self) -> int:
        """The bytes of its units."""
        return len(self.units.content)


@dataclass(frozen=True)
class Located:
    """Rows that were found: the units that hold them, and where in those they are.

    Attributes:
        packer: How they are packed.
        numbers: The first row of each unit.
        sizes: How many rows each unit has.
        contents: The bytes of the segment that each unit is in.
        begins: Where the bytes of each unit begin.
        ends: Where they end.
        where: The unit of each row, and its place there.
    """

    packer: RowPacker
    numbers: NDArray[np.int64]
    sizes: NDArray[np.int64]
    contents: list[bytes]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    where: Where

    def payloads(self, units: slice = slice(None)) -> list[bytes]:
        """Return the bytes of some units, copied: slices of bytes are made faster than views of them."""
        parts = map(slice, self.begins[units].tolist(), self.ends[units].tolist())
        return list(map(operator.getitem, self.contents[units], parts))  # type: ignore[arg-type]

    def views(self) -> list[memoryview]:
        """Return the bytes of all units, not copied: images are large."""
        parts = zip(self.contents, self.begins.tolist(), self.ends.tolist(), strict=True)
        return [memoryview(content)[begin:end] for content, begin, end in parts]

    @property
    def stacked(self) -> bool:
        """Whether some share frames with those before and after them, so that reading both at once pays."""
        return any(map(frames_of_stack, self.views()))


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
        self.num_sparse_rows = 0
        """How many of them are in sparse segments. Counted on the way, so that looking costs nothing."""
        self._cache = cache
        self._number = number
        self._threads = threads or default_threads()
        # One entry per unit, in order: its first row, and where its bytes begin in its segment. After the units of each
        # segment comes one more entry, which says where the last of them ends. Entries of dropped segments stay until
        # they are the most.
        self._starts = np.zeros(_LEAST, np.int64)
        self._begins = np.zeros(_LEAST, np.int64)
        self._num_entries = 0
        self._num_dropped = 0
        # One entry per segment, in order: its first row, its rows (0 if it was dropped), its first unit, how many slots
        # show its rows (-1 if it was dropped), and its bytes.
        self._first_rows = np.zeros(_LEAST, np.int64)
        self._rows = np.zeros(_LEAST, np.int64)
        self._first_units = np.zeros(_LEAST, np.int64)
        self._shown = np.zeros(_LEAST, np.int64)
        self._contents: list[bytes | None] = []
        self._num_segments = 0

    @property
    def held_bytes(self) -> int:
        """The memory that it takes, tables and objects included."""
        return self.packed_bytes + overhead_bytes(self._num_entries - self._num_dropped, self._num_segments)

    def pack(self, rows: Rows, runs: NDArray[np.int64]) -> Units:
        """Pack rows without adding them; needs no lock.

        Args:
            rows: ``[rows, bytes of a row]``, contiguous.
            runs: How many rows follow each other in time before the next run starts; they add up to all.
        """
        return self.packer.pack(rows, runs, self._threads)

    def append(self, packed: Units, num_shown: int) -> int:
        """Add rows that `pack` packed, `num_shown` of which slots will show; returns the number of the first."""
        segment = Segment(self.end, packed)
        self._add(segment, num_shown)
        return segment.first

    def _add(self, segment: Segment, num_shown: int) -> None:
        units = segment.units
        first = self._num_entries
        last = first + len(units.sizes)
        self._starts = _with_room(self._starts, last + 1)
        self._begins = _with_room(self._begins, last + 1)
        self._starts[first] = segment.first
        self._starts[first + 1 : last + 1] = segment.first + np.cumsum(units.sizes)
        self._begins[first] = 0
        self._begins[first + 1 : last + 1] = np.cumsum(units.lengths)
        self._num_entries = last + 1
        place = len(self._contents)
        self._first_rows = _with_room(self._first_rows, place + 1)
        self._rows = _with_room(self._rows, place + 1)
        self._first_units = _with_room(self._first_units, place + 1)
        self._shown = _with_room(self._shown, place + 1)
        self._first_rows[place] = segment.first
        self._rows[place] = segment.num_rows
        self._first_units[place] = first
        self._shown[place] = num_shown
        self.num_sparse_rows += self._sparse_rows_of(slice(place, place + 1))
        self._contents.append(units.content)
        self._num_segments += 1
        self.packed_bytes += segment.nbytes
        self.num_rows += segment.num_rows
        self.end = segment.first + segment.num_rows

    def release(self, rows: RowNumbers) -> None:
        """Note that slots no longer show these rows; a segment that no slot shows is dropped."""
        if not len(rows):
            return
        segment = self._segment_of(rows)
        touched = np.unique(segment)
        self.num_sparse_rows -= self._sparse_rows_of(touched)
        np.subtract.at(self._shown, segment, 1)
        self.num_sparse_rows += self._sparse_rows_of(touched)
        for number in touched[self._shown[touched] <= 0].tolist():
            self._drop(number)
        if 2 * self._num_dropped > self._num_entries > _LEAST:
            self._forget_dropped()

    def _segment_of(self, rows: RowNumbers) -> NDArray[np.int64]:
        firsts = self._first_rows[: len(self._contents)]
        return np.searchsorted(firsts, rows, side="right") - 1

    def _units_of(self, segment: int) -> slice:
        """Return the entries of the units of a segment, without the one after them."""
        stop = self._num_entries
        if segment + 1 < len(self._contents):
            stop = int(self._first_units[segment + 1])
        return slice(int(self._first_units[segment]), stop - 1)

    def _drop(self, segment: int) -> None:
        content = self._contents[segment]
        if content is None:
            return
        units = self._units_of(segment)
        self.num_sparse_rows -= self._sparse_rows_of(slice(segment, segment + 1))
        self._contents[segment] = None
        self._num_segments -= 1
        self.packed_bytes -= len(content)
        self.num_rows -= int(self._rows[segment])
        self._num_dropped += units.stop + 1 - units.start
        self._rows[segment] = 0
        self._shown[segment] = -1

    def _forget_dropped(self) -> None:
        """Remove the entries of dropped segments; amortised, as each of them was paid for when it was added."""
        kept = self.segments()
        shown = self._shown[: len(self._contents)]
        shown = shown[shown >= 0].copy()
        end = self.end
        self.clear()
        for segment, count in zip(kept, shown.tolist(), strict=True):
            self._add(segment, count)
        self.end = end

    def clear(self) -> None:
        """Drop all rows; numbers go on."""
        self._contents = []
        self._num_segments = 0
        self._num_entries = 0
        self._num_dropped = 0
        self.packed_bytes = 0
        self.num_rows = 0
        self.num_sparse_rows = 0

    def segments(self) -> list[Segment]:
        """Return all segments; they share the packed bytes with the log."""
        found = []
        for number, content in enumerate(self._contents):
            if content is None:
                continue
            units = self._units_of(number)
            bounds = slice(units.start, units.stop + 1)
            sizes = np.diff(self._starts[bounds])
            lengths = np.diff(self._begins[bounds])
            found.append(Segment(int(self._first_rows[number]), Units(sizes, lengths, content)))
        return found

    def restore(self, segments: Sequence[Segment], end: int) -> None:
        """Become a log of these segments, which are kept until `count_shown` drops some.

        Raises:
            CodecError: If a unit is larger than it can be, or segments overlap.
        """
        self.clear()
        self.end = 0
        for segment in sorted(segments, key=_first_of):
            if segment.first < self.end:
                raise CodecError(f"rows {segment.first} to {self.end - 1} are stored twice")
            if isinstance(self.packer, VectorRows):
                self.packer.check(segment.units.lengths, segment.units.sizes)
            self._add(segment, 0)
        self.end = max(end, self.end)

    def count_shown(self, rows: RowNumbers) -> None:
        """Count which rows slots show after `restore`, and drop the other segments."""
        shown = np.bincount(self._segment_of(rows), minlength=len(self._contents))
        self._shown[: len(self._contents)] = shown
        self.num_sparse_rows = self._sparse_rows_of(slice(len(self._contents)))
        for number in np.flatnonzero(shown == 0).tolist():
            self._drop(number)

    def has(self, rows: RowNumbers) -> NDArray[np.bool_]:
        """Return which rows can be read."""
        if not self._contents:
            return np.zeros(len(rows), np.bool_)
        segment = np.maximum(self._segment_of(rows), 0)
        place = rows - self._first_rows[segment]
        found: NDArray[np.bool_] = (place >= 0) & (place < self._rows[segment])
        unit = np.searchsorted(self._starts[: self._num_entries], rows[found], side="right") - 1
        found[found] = self._has_bytes(unit)
        return found

    def _has_bytes(self, unit: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which units were not lost. Only rows without bytes are in units without bytes."""
        return np.asarray((self._begins[unit + 1] > self._begins[unit]) | (self.packer.row_bytes == 0))

    def sparse_ranges(self) -> NDArray[np.int64]:
        """Return the first row and the end of each sparse segment."""
        every = slice(len(self._contents))
        is_sparse = self._is_sparse(every)
        firsts = self._first_rows[every][is_sparse]
        return np.stack([firsts, firsts + self._rows[every][is_sparse]], axis=1)

    def _sparse_rows_of(self, segments: slice | NDArray[np.int64]) -> int:
        """Return how many rows those of some segments have that are sparse."""
        return int(self._rows[segments][self._is_sparse(segments)].sum())

    def _is_sparse(self, segments: slice | NDArray[np.int64]) -> NDArray[np.bool_]:
        shown = self._shown[segments]
        # A number below 0 stands for a dropped segment.
        return np.asarray((shown >= 0) & (shown <= _SPARSE_SHARE * self._rows[segments]))

    def locate(self, rows: RowNumbers) -> Located:
        """Find rows and hold on to them, so that they can be fetched whatever is dropped meanwhile.

        Raises:
            OutOfRangeError: If a row was dropped, or does not exist.
        """
        # Searching for rows in order takes half the time, and puts those of one unit next to each other.
        order = np.argsort(rows)
        ordered = rows[order]
        entry = np.searchsorted(self._starts[: self._num_entries], ordered, side="right") - 1
        is_first = np.ones(len(rows), np.bool_)
        np.not_equal(entry[1:], entry[:-1], out=is_first[1:])
        unit = entry[is_first]
        # One row of each unit is enough to check: those between segments seem to be in one unit, too.
        checked = ordered[is_first]
        segment = self._segment_of(checked)
        is_there = (segment >= 0) & (checked < self._first_rows[segment] + self._rows[segment])
        if not is_there.all() or not self._has_bytes(unit).all():
            raise OutOfRangeError(f"rows {int(rows.min())} to {int(rows.max())} are not all in the log")
        starts = self._starts[unit]
        of_row = np.empty(len(rows), np.int64)
        of_row[order] = np.cumsum(is_first) - 1
        # None stands for a dropped segment, which has no rows, so `is_there` was false for it.
        contents = [self._contents[number] or b"" for number in segment.tolist()]
        where = Where(of_row, rows - starts[of_row])
        sizes = self._starts[unit + 1] - starts
        return Located(self.packer, starts, sizes, contents, self._begins[unit], self._begins[unit + 1], where)

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
            packer.gather(located.views(), located.where, outs)
        else:
            self._fetch_vectors(packer, located, *outs)
        return outs[0]

    def _fetch_vectors(self, packer: VectorRows, located: Located, out: Rows) -> None:
        """Decode units and copy rows out of them; on several threads if there is much to do."""
        count = len(located.sizes)
        where = located.where
        if self._cache.max_bytes and count <= _CACHED_UNITS:
            packer.gather(self._decode_cached(packer, located), located.sizes, where, out)
            return
        self._cache.pass_by(count)
        nbytes = int(located.sizes.sum()) * packer.row_bytes
        num_blocks = -(-nbytes // _BLOCK_BYTES)
        if num_blocks <= 1:
            packer.gather(packer.decode(located.payloads(), located.sizes), located.sizes, where, out)
            return

        # Decoding everything at once would take new memory from the system for each batch, and that costs more than
        # decoding. A few blocks reuse what the one before had, and stay in the processor's cache.
        step = -(-count // num_blocks)
        order = np.argsort(where.segment, kind="stable")
        ordered = Where(where.segment[order], where.row[order])

        def run(first: int) -> None:
            units = slice(first, first + step)
            rows = slice(*np.searchsorted(ordered.segment, (first, first + step)).tolist())
            part = Where(ordered.segment[rows] - first, ordered.row[rows])
            found = np.empty((len(part.row), packer.row_bytes), np.uint8)
            sizes = located.sizes[units]
            packer.gather(packer.decode(located.payloads(units), sizes), sizes, part, found)
            out[order[rows]] = found

        threads = self._threads if nbytes >= _PARALLEL_BYTES else 1
        parallel_each(run, range(0, count, step), threads)

    def _decode_cached(self, packer: VectorRows, located: Located) -> bytes:
        """Decode units that are not in the cache, and put them there."""
        numbers = located.numbers.tolist()
        units = self._cache.find(self._number, numbers)
        payloads = located.payloads()
        for place, unit in enumerate(units):
            if unit is None:
                units[place] = packer.decode([payloads[place]], located.sizes[place : place + 1])
        decoded = [unit for unit in units if unit is not None]
        self._cache.put(self._number, numbers, decoded)
        return b"".join(decoded)


def _first_of(segment: Segment) -> int:
    return segment.first


def _with_room(table: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return a table with at least `count` entries; doubling keeps appending O(1) amortised."""
    if count <= len(table):
        return table
    larger = np.zeros((2 * count, *table.shape[1:]), np.int64)
    larger[: len(table)] = table
    return larger
