"""`Column`: leaves that are packed together, and which row of their log every slot shows.

The newest steps stay in an *open* segment, not packed, until there are enough of them. Slots number its rows from
`OPEN` downwards; rows of the log from 0 upwards; a slot without a row has `NONE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.replay.log import Located, RowLog, Segment, overhead_bytes
from slipstream.replay.packing import ImageRows, Rows, Units
from slipstream.replay.roles import Key
from slipstream.replay.schema import FRAME, Block, Leaf, frame_key
from slipstream.replay.tail import Tail
from slipstream.trajectory import NEXT, find_breaks, frame_positions

Slots = NDArray[np.int64]

NONE = -1
OPEN = -2

ENOUGH_STEPS = 16
"""Fewer steps than this at once go into the open segment."""
_OPEN_STEPS = 64
_OPEN_BYTES = 8 << 20


@dataclass(frozen=True)
class PackedSteps:
    """Steps that were packed and are not in the log yet.

    Attributes:
        units: What the log appends.
        position: ``[streams, steps]``: the row of each step, counted from the first.
        num_rows: How many rows there are, extra ones included.
    """

    units: Units
    position: NDArray[np.int64]
    num_rows: int

    @property
    def held_bytes(self) -> int:
        """The memory that they will take in the log."""
        return len(self.units.content) + overhead_bytes(len(self.units.sizes), 1)


class Column:
    """The leaves of one column; see the module. It has no lock: see `steps` for who holds one when.

    Args:
        leaves: Those that it packs, and the ``next`` of its frames.
        log: Where packed rows go; None until it is known which leaves repeat.
        num_slots: The length of the table of slots.
    """

    def __init__(self, leaves: Sequence[Leaf], log: RowLog | None, num_slots: int) -> None:
        self.leaves = list(leaves)
        self.keys = {leaf.key for leaf in leaves}
        self.row_of: Slots = np.full(num_slots, NONE, np.int64)
        self._log = log
        self._tail = Tail()
        self._tail_slots: list[Slots] = []
        self._nexts = {frame_key(leaf.key): leaf.key for leaf in leaves if leaf.kind == NEXT}

    @property
    def log(self) -> RowLog:
        """The log of its rows."""
        if self._log is None:
            raise RuntimeError("the column has no log yet")
        return self._log

    @property
    def has_next(self) -> bool:
        """Whether reading a step takes the row after it, too."""
        return bool(self._nexts)

    # The open segment

    @property
    def open_bytes(self) -> int:
        """The memory of the open segment."""
        return self._tail.nbytes

    @property
    def open_width(self) -> int:
        """How many streams the open segment has; 0 if it is empty."""
        if not self._tail_slots:
            return 0
        return int(self._tail_slots[0].shape[1])

    @property
    def is_open_full(self) -> bool:
        """Whether there are enough steps in the open segment to pack it."""
        length = self._tail.length
        return length >= _OPEN_STEPS or (length >= ENOUGH_STEPS and self._tail.nbytes >= _OPEN_BYTES)

    def keep_open(self, values: Block, slots: Slots, index: Slots) -> None:
        """Copy steps into the open segment; `index` are the places of the slots ``[time, streams]`` in the table."""
        start = self._tail.length * slots.shape[1]
        rows = OPEN - np.arange(start, start + slots.size).reshape(slots.shape)
        self._tail.append({leaf.key: values[leaf.key].swapaxes(0, 1) for leaf in self.leaves})
        self._tail_slots.append(slots)
        # Of several steps for one slot, the last counts; what the slot showed before is released once.
        flat = index.reshape(-1)
        distinct, from_end = np.unique(flat[::-1], return_index=True)
        self.show(distinct, rows.reshape(-1)[len(flat) - 1 - from_end])

    def open_steps(self) -> tuple[Block, Slots]:
        """Return the steps of the open segment as ``[streams, time, ...]``, and their slots ``[time, streams]``."""
        values = {key: array.swapaxes(0, 1) for key, array in self._tail.values().items()}
        return values, np.concatenate(self._tail_slots)

    def still_open(self, slots: Slots, index: Slots) -> NDArray[np.bool_]:
        """Return which slots of the open segment have not been overwritten since."""
        rows = OPEN - np.arange(slots.size).reshape(slots.shape)
        return np.asarray(self.row_of[index] == rows)

    def close_open(self, index: Slots, rows: Slots) -> None:
        """Let slots show packed rows instead of open ones, and empty the open segment."""
        self.row_of[index] = rows
        self._tail.clear()
        self._tail_slots = []

    def take_open(self, other: Column) -> None:
        """Take over the leaves of this column from the open segment of another one, and what its slots show."""
        self.row_of = other.row_of.copy()
        values = other._tail.values()
        if values:
            self._tail.append({leaf.key: values[leaf.key] for leaf in self.leaves})
        self._tail_slots = list(other._tail_slots)

    def restore_open(self, values: Block, slots: Slots) -> None:
        """Put steps ``[time, streams, ...]`` into the open segment, without changing what slots show."""
        if len(slots):
            self._tail.append({leaf.key: values[leaf.key] for leaf in self.leaves})
            self._tail_slots = [slots]

    # Packed rows

    def pack(self, values: Block, breaks: NDArray[np.bool_] | None = None) -> PackedSteps:
        """Pack steps, each observation once; needs no lock.

        Args:
            values: Arrays ``[streams, steps, ...]`` of all leaves.
            breaks: Where the step after is not what a step led to, ``[streams, steps]``; found by default.
        """
        streams, steps = values[self.leaves[0].key].shape[:2]
        if breaks is None:
            breaks = np.zeros((streams, steps), np.bool_)
            for frame, after in self._nexts.items():
                breaks[:, :-1] |= find_breaks(values[frame], values[after])
                # No step of this block follows the last one, so an extra row holds what it led to.
                breaks[:, -1] = True
        positions = frame_positions(breaks)
        num_rows = breaks.size + len(positions.extras)
        rows = np.empty((num_rows, self.log.packer.row_bytes), np.uint8)
        place = positions.steps.reshape(-1)
        is_break = breaks.reshape(-1)
        for leaf in self.leaves:
            if leaf.kind == NEXT:
                continue
            flat = values[leaf.key].reshape(breaks.size, *leaf.shape)
            leaf.write(rows, flat, place)
            extra = flat
            # Extra rows of other leaves are never read. Repeating the step compresses best.
            if leaf.kind == FRAME:
                extra = values[self._nexts[leaf.key]].reshape(breaks.size, *leaf.shape)
            leaf.write(rows, extra[is_break], positions.extras)
        return PackedSteps(self.log.pack(rows, positions.counts), positions.steps, num_rows)

    def show(self, index: Slots, rows: Slots) -> None:
        """Let slots show rows, and release what they showed before."""
        before = self.row_of[index]
        self.row_of[index] = rows
        if self._log is not None:
            self._log.release(before[before >= 0])

    def sparse_slots(self) -> Slots:
        """Return the places of slots whose rows should be packed again; none if that would not free much."""
        if self._log is None:
            return np.empty(0, np.int64)
        if self._log.num_sparse_rows <= max(_OPEN_STEPS, self._log.num_rows // 2):
            return np.empty(0, np.int64)
        ranges = self._log.sparse_ranges()
        part = np.searchsorted(ranges[:, 0], self.row_of, side="right") - 1
        return np.flatnonzero((part >= 0) & (self.row_of < ranges[part, 1]))

    def is_lost(self, rows: Slots) -> NDArray[np.bool_]:
        """Return which of these rows, or what they led to, cannot be read any more."""
        lost = np.zeros(len(rows), np.bool_)
        packed = np.flatnonzero(rows >= 0)
        is_sound = self.log.has(rows[packed])
        if self.has_next:
            is_sound &= self.log.has(rows[packed] + 1)
        lost[packed[~is_sound]] = True
        return lost

    def find(self, index: Slots) -> FoundRows:
        """Locate steps by the places of their slots."""
        return FoundRows(self, self.row_of[index])

    def find_rows(self, rows: Slots, *, with_next: bool = True) -> FoundRows:
        """Locate steps by their rows; without their ``next``, if that is not wanted."""
        return FoundRows(self, rows, with_next=with_next)

    def take_open_rows(self, rows: Slots) -> dict[Key, NDArray[Any]]:
        """Copy rows out of the open segment."""
        place = OPEN - rows
        copies = {}
        for key, values in self._tail.values().items():
            copies[key] = values.reshape(values.shape[0] * values.shape[1], *values.shape[2:])[place]
        return copies

    def segments(self) -> list[Segment]:
        """Return the packed segments."""
        return self.log.segments()


class FoundRows:
    """Steps of one column that were located. Reading them later is safe, whatever is written meanwhile."""

    def __init__(self, column: Column, rows: Slots, *, with_next: bool = True) -> None:
        self._leaves = column.leaves
        self._count = len(rows)
        self._is_packed = rows >= 0
        self._is_open = rows <= OPEN
        self._open: Mapping[Key, NDArray[Any]] = {}
        if self._is_open.any():
            self._open = column.take_open_rows(rows[self._is_open])
        self._log: RowLog | None = None
        # By whether the row after is wanted. Both are located together where they are mostly in the same units.
        self._apart: dict[bool, Located] = {}
        self._together: Located | None = None
        self._halves: list[Rows] = []
        if self._is_packed.any():
            self._log = column.log
            self._locate(column, rows[self._is_packed], with_next=with_next and column.has_next)

    def _locate(self, column: Column, rows: Slots, *, with_next: bool) -> None:
        is_image = isinstance(column.log.packer, ImageRows)
        if not is_image or (with_next and column.log.locate(rows[:1]).stacked):
            wanted = rows
            if with_next:
                wanted = np.concatenate([rows, rows + 1])
            self._together = column.log.locate(wanted)
            return
        self._apart[False] = column.log.locate(rows)
        if with_next:
            self._apart[True] = column.log.locate(rows + 1)

    def array(self, leaf: Leaf) -> NDArray[Any]:
        """Return the values of a leaf, ``[steps, ...]``; zeros for slots that show nothing."""
        if self._is_packed.all() and self._count:
            return self._packed(leaf)
        values = np.zeros((self._count, *leaf.shape), leaf.carrier)
        if self._is_packed.any():
            values[self._is_packed] = self._packed(leaf)
        if self._is_open.any():
            values[self._is_open] = self._open[leaf.key]
        return values

    def read(self, outs: Mapping[Key, NDArray[Any]]) -> None:
        """Read all leaves of the column into memory that exists."""
        is_image = self._log is not None and isinstance(self._log.packer, ImageRows)
        if not is_image or not self._is_packed.all():
            for leaf in self._leaves:
                outs[leaf.key][...] = self.array(leaf)
            return
        assert self._log is not None  # noqa: S101 - there are packed rows
        flat = {leaf.kind == NEXT: outs[leaf.key].reshape(self._count, -1) for leaf in self._leaves}
        if self._together is not None:
            self._log.fetch(self._together, flat[False], flat[True])
            return
        for after, located in self._apart.items():
            self._log.fetch(located, flat[after])

    def _packed(self, leaf: Leaf) -> NDArray[Any]:
        assert self._log is not None  # noqa: S101 - there are packed rows
        after = leaf.kind == NEXT
        # An image is alone in its column, and is not asked for twice.
        if self._together is None:
            return leaf.read(self._log.fetch(self._apart[after]))
        # Two threads may both decode this. That is correct, and a lock could be held forever in a forked child.
        halves = self._halves or self._read_together(self._together, self._log)
        self._halves = halves
        return leaf.read(halves[after])

    def _read_together(self, located: Located, log: RowLog) -> list[Rows]:
        """Decode rows and the rows after them, most of which are in the same units."""
        count = int(np.count_nonzero(self._is_packed))
        if not isinstance(log.packer, ImageRows):
            rows = log.fetch(located)
            return [rows[:count], rows[count:]]
        halves = [np.empty((count, log.packer.row_bytes), np.uint8) for _ in range(2)]
        log.fetch(located, *halves)
        return halves
