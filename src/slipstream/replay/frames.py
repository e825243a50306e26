"""`FrameLog`: frames appended at one end and dropped at the other, packed, read in any order by many threads.

A frame is one row in each of a few *columns*: one column for all vectors of a step, one for each kind of image. Frames
have numbers that never change. A column keeps its rows in segments (see `packing`); a segment is freed as soon as
nothing in it is needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import OutOfRangeError, ReplayError
from slipstream.replay.packing import ImageRows, PackedColumn, RowPacker, Rows, VectorRows, Where
from slipstream.replay.prefix_sum import PrefixSum
from slipstream.replay.stacks import frames_of_stack
from slipstream.threads import default_threads, parallel_map

Frames = NDArray[np.int64]
_PARALLEL_BYTES = 8 << 20
_BLOCK_SEGMENTS = 128


class _Column:
    """The segments of one column: how many rows each has, and its bytes."""

    def __init__(self, packer: RowPacker) -> None:
        self.packer = packer
        self.sums = PrefixSum()
        self.payloads: list[bytes] = []
        self.head = 0  # payloads before this one are dropped and await being forgotten
        self.packed_bytes = 0

    def append(self, sizes: NDArray[np.int64], payloads: Sequence[bytes]) -> None:
        self.sums.extend(sizes)
        self.payloads += payloads
        self.packed_bytes += sum(map(len, payloads))

    def drop_rows(self, rows: int) -> None:
        """Free the segments that hold none but the first `rows` rows."""
        if not len(self.sums) or rows <= 0:
            return
        count = len(self.sums) if rows >= self.sums.total else self.sums.get_range_idx(rows)
        self.sums.evict(count)
        for number in range(self.head, self.head + count):
            self.packed_bytes -= len(self.payloads[number])
            self.payloads[number] = b""
        self.head += count
        if self.head > len(self.payloads) // 2:  # amortised: what is moved was paid for by as many that went
            del self.payloads[: self.head]
            self.head = 0

    def snapshot(self) -> _Column:
        """Return a column that shares the packed bytes, and goes its own way from here."""
        twin = _Column(self.packer)
        twin.append(self.sums.lengths, self.payloads[self.head :])
        twin.sums.num_evicted = self.sums.num_evicted
        return twin


@dataclass(frozen=True)
class Located:
    """Rows of a column that were found: the segments that hold them, and where in those they are."""

    column: int
    numbers: list[int]
    sizes: NDArray[np.int64]
    payloads: list[bytes]
    where: Where

    @property
    def stacked(self) -> bool:
        """Whether some have frames in common with those before and after them, so that reading both at once pays."""
        return any(map(frames_of_stack, self.payloads))


class SegmentCache:
    """The segments that were decoded last, up to a number of bytes; safe for threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = self.misses = self.nbytes = 0
        self._segments: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, column: int, numbers: Sequence[int], *, look: bool) -> list[bytes | None]:
        """Return those that are here; without looking, none is."""
        with self._lock:
            found = [self._segments.get((column, number)) if look else None for number in numbers]
            missing = found.count(None)
            self.misses += missing
            self.hits += len(found) - missing
        return found

    def put(self, column: int, numbers: Sequence[int], segments: Sequence[bytes]) -> None:
        """Keep segments; those that were put first go when there are too many bytes."""
        if not self.max_bytes:
            return
        with self._lock:
            for number, segment in zip(numbers, segments, strict=True):
                if (column, number) not in self._segments:
                    self._segments[column, number] = segment
                    self.nbytes += len(segment)
            while self.nbytes > self.max_bytes:
                self.nbytes -= len(self._segments.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._segments.clear()
            self.nbytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentCache, (self.max_bytes,)


class FrameLog:
    """Packed frames, numbered from 0 in the order they came.

    Any number of threads may read while one appends or drops. Reading decodes outside of the lock; what was located
    before it was dropped is still read in full. Appending packs on the caller's thread, and on others beside it.

    Args:
        packers: How each column is packed.
        cache_bytes: How many bytes of decoded vector segments to keep.
        threads: How many threads pack and unpack; by default one per core.
    """

    def __init__(self, packers: Sequence[RowPacker], *, cache_bytes: int = 1 << 20, threads: int | None = None) -> None:
        self._columns = [_Column(packer) for packer in packers]
        self._threads = threads or default_threads()
        self._lock = threading.Lock()
        self.cache = SegmentCache(cache_bytes)
        self.first = 0
        """The number of the oldest frame that can be read."""
        self.end = 0
        """The number that the next frame will have."""

    @property
    def packers(self) -> list[RowPacker]:
        """How each column is packed."""
        return [column.packer for column in self._columns]

    @property
    def packed_bytes(self) -> int:
        """The size of all packed segments."""
        return sum(column.packed_bytes for column in self._columns)

    def append(self, rows: Sequence[Rows], runs: NDArray[np.int64]) -> int:
        """Pack frames and add them; returns the number of the first.

        Args:
            rows: For each column ``[frames, bytes of a row]``.
            runs: How many frames follow each other in time before the next run starts; they add up to all.
        """
        packed = self.pack(rows, runs)
        return self.append_packed(packed, int(runs.sum()))

    def pack(self, rows: Sequence[Rows], runs: NDArray[np.int64]) -> list[PackedColumn]:
        """Pack frames without adding them: sizes and bytes of the segments of each column."""
        return [
            column.packer.pack(values, runs, self._threads) for column, values in zip(self._columns, rows, strict=True)
        ]

    def append_packed(self, packed: Sequence[PackedColumn], count: int) -> int:
        """Add `count` frames that are packed already; returns the number of the first."""
        for sizes, payloads in packed:
            if int(np.sum(sizes)) != count or len(sizes) != len(payloads):
                raise ReplayError(f"a column brings {int(np.sum(sizes))} rows for {count} frames")
        with self._lock:
            start = self.end
            for column, (sizes, payloads) in zip(self._columns, packed, strict=True):
                column.append(sizes, payloads)
            self.end += count
        return start

    def segments(self, start: int, stop: int) -> list[PackedColumn]:
        """Return, for each column, the packed segments that hold the frames from `start` to `stop`.

        The first may begin before `start`, the last end after `stop`.
        """
        parts = []
        with self._lock:
            for column in self._columns:
                base = self.end - column.sums.total
                low, high = column.sums.get_range_idx([start - base, stop - 1 - base]).tolist()
                sizes = column.sums.lengths_of(np.arange(low, high + 1))
                parts.append((sizes, column.payloads[column.head + low : column.head + high + 1]))
        return parts

    @classmethod
    def restore(
        cls, packers: Sequence[RowPacker], columns: Sequence[PackedColumn], first: int, end: int, **options: Any
    ) -> FrameLog:
        """Make a log of packed segments that end with frame ``end - 1``; frames before `first` are dropped.

        Raises:
            ReplayError: If a column has too few rows for that.
            CodecError: If a segment claims to be larger than it can be.
        """
        log = cls(packers, **options)
        if len(columns) != len(packers):
            raise ReplayError(f"there are {len(columns)} columns, expected {len(packers)}")
        for column, (sizes, payloads) in zip(log._columns, columns, strict=True):
            column.append(np.asarray(sizes, np.int64), payloads)
            if column.sums.total < end - first or len(sizes) != len(payloads):
                raise ReplayError(f"a column has {column.sums.total} rows, expected at least {end - first}")
            if isinstance(column.packer, VectorRows):
                column.packer.check(payloads, np.asarray(sizes).tolist())
        log.end = end
        log.drop_before(first)
        return log

    def drop_before(self, frame: int) -> None:
        """Drop the frames before `frame`; memory is freed by whole segments."""
        with self._lock:
            self.first = max(self.first, min(frame, self.end))
            for column in self._columns:
                column.drop_rows(self.first - (self.end - column.sums.total))

    def locate(self, column: int, frames: Frames) -> Located:
        """Find rows of a column and hold on to them, so that they can be fetched whatever is dropped meanwhile.

        Args:
            column: Which.
            frames: The numbers of the frames, in any order, repeated at will.

        Raises:
            OutOfRangeError: If a frame was dropped, or does not exist.
        """
        with self._lock:
            if len(frames) and not (self.first <= int(frames.min()) and int(frames.max()) < self.end):
                raise OutOfRangeError(
                    f"frames {int(frames.min())} to {int(frames.max())} were asked for, there are {self.first} to "
                    f"{self.end - 1}"
                )
            table = self._columns[column]
            index = frames - (self.end - table.sums.total)
            ranges = table.sums.get_range_idx(index)
            rows = table.sums.get_range_relative_idx(index, ranges)
            distinct, segment = np.unique(ranges, return_inverse=True)
            sizes = table.sums.lengths_of(distinct)
            payloads = [table.payloads[table.head + number] for number in distinct.tolist()]
            numbers = (distinct + table.sums.num_evicted).tolist()
        return Located(column, numbers, sizes, payloads, Where(segment.reshape(-1), rows))

    def fetch(self, located: Located, *outs: Rows) -> Rows:
        """Decode what was located, without holding the lock; returns the first of `outs`.

        Args:
            located: From `locate`.
            outs: Memory of ``[frames, bytes of a row]`` to read into: one array for vectors, any number of them for
                images, one after another; by default one in memory of its own.

        Raises:
            CodecError: If what is stored is damaged.
        """
        packer = self._columns[located.column].packer
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
        """Decode segments, but for those in the cache; on several threads if there is much to do."""
        nbytes = int(located.sizes.sum()) * packer.row_bytes
        fits = nbytes <= self.cache.max_bytes  # a batch from everywhere would only push everything out
        found = self.cache.find(located.column, located.numbers, look=fits)
        missing = [place for place, segment in enumerate(found) if segment is None]
        lengths = located.sizes.tolist()

        def run(first: int) -> list[bytes]:
            places = missing[first : first + _BLOCK_SEGMENTS]
            return packer.decode([located.payloads[place] for place in places], [lengths[place] for place in places])

        threads = self._threads if nbytes >= _PARALLEL_BYTES else 1
        blocks = parallel_map(run, range(0, len(missing), _BLOCK_SEGMENTS), threads)
        decoded = [segment for block in blocks for segment in block]
        for place, segment in zip(missing, decoded, strict=True):
            found[place] = segment
        if fits:
            self.cache.put(located.column, [located.numbers[place] for place in missing], decoded)
        return [segment for segment in found if segment is not None]

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {**self.__dict__, "_columns": [column.snapshot() for column in self._columns]}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
