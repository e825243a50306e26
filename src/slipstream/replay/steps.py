"""`Steps`: the engine of all replay buffers. A table of slots, each of which shows one step, packed.

A step is spread over a few columns (see `columns`) and raw leaves. Which slot a step gets is decided by the buffer: a
storage of TorchRL is a ring of slots, an `EpisodeStore` appends at one end and evicts at the other.

Two locks keep readers from waiting for the packer. `writing` is held for a whole write, so there is one writer at a
time. `lock` guards the tables: a writer plans and packs without it and takes it to publish, a reader takes it to locate
steps and decodes without it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, SlipstreamError, StateMismatchError
from slipstream.replay import forks
from slipstream.replay.columns import ENOUGH_STEPS, NONE, OPEN, Column, FoundRows, PackedSteps, Slots
from slipstream.replay.log import RowLog, Segment, UnitCache
from slipstream.replay.roles import Key
from slipstream.replay.schema import RAW, Block, Leaf, Packing, Schema, find_scaled, find_twins
from slipstream.threads import Uninterrupted

_LEAST_SLOTS = 64
_BLOCK_STEPS = 64
_SEGMENT_ROWS = 16 << 10
_SMALL_SEGMENT_ROWS = 2 << 10
_COMPACT_BYTES = 32 << 20


@dataclass(frozen=True)
class Snapshot:
    """Everything that `Steps` holds: plain values, arrays, and the packed segments of each column."""

    plain: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    segments: list[list[Segment]]


class FoundSteps:
    """Steps that were located. Reading them later is safe, whatever is written meanwhile."""

    def __init__(
        self, schema: Schema, columns: Sequence[FoundRows], raw: Mapping[Key, NDArray[Any]], opening: FoundRows | None
    ) -> None:
        self.schema = schema
        self._columns = columns
        self._raw = raw
        self._opening = opening

    def array(self, leaf: Leaf) -> NDArray[Any]:
        """Return the values of a leaf, ``[steps, ...]``, in new memory."""
        if leaf.kind == RAW:
            return self._raw[leaf.key]
        if self._opening is not None:
            return self._opening.array(leaf)
        return self._columns[leaf.column].array(leaf)

    def read(self, outs: Mapping[Key, NDArray[Any]]) -> None:
        """Read all packed leaves into memory that exists."""
        for column in self._columns:
            column.read(outs)


class Steps:
    """A table of slots; see the module.

    Args:
        num_slots: The length of the table; `make_room` makes it longer.
        packing: How images are packed.
        cache_bytes: How many bytes of decoded vectors to keep.
        threads: How many threads pack and unpack; by default one per core.
    """

    def __init__(
        self, num_slots: int, packing: Packing, *, cache_bytes: int = 1 << 20, threads: int | None = None
    ) -> None:
        self.num_slots = num_slots
        self.num_streams = 1
        """The slots of one stream are this far from each other; compaction packs them in this order."""
        self.schema = Schema()
        self.cache = UnitCache(cache_bytes)
        self._packing = packing
        self._threads = threads
        self._base = 0
        self._columns: list[Column] = []
        self._raw: dict[Key, NDArray[Any]] = {}
        # Holds all packed leaves until there are enough steps to find out which of them repeat.
        self._opening: Column | None = None
        self._num_writes = 0
        self.renew_locks()
        forks.register(self)

    def renew_locks(self) -> None:
        """Make new locks: threads of the parent may hold the old ones forever in a forked child."""
        self.lock = threading.RLock()
        self.changing = Uninterrupted(self.lock)
        self.writing = threading.RLock()
        self.saving = threading.Lock()
        self.cache.renew_lock()

    def settings(self) -> dict[str, Any]:
        """Return the arguments that it was made with, except for the number of slots."""
        return {"packing": self._packing, "cache_bytes": self.cache.max_bytes, "threads": self._threads}

    def reset(self, num_slots: int, num_streams: int = 1) -> None:
        """Forget everything, and what a step is made of."""
        with self.writing, self.changing:
            self.num_slots = num_slots
            self.num_streams = num_streams
            self.schema = Schema()
            self._base = 0
            self._columns = []
            self._raw = {}
            self._opening = None
            # Numbers of rows start again, so what was decoded must not be found any more.
            self.cache = UnitCache(self.cache.max_bytes)

    # What a step is made of

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves of a step, in the order in which they were declared."""
        return list(self.schema.leaves.values())

    def declare(self, leaves: Sequence[Leaf]) -> None:
        """Add leaves that may repeat each other; which of them do is found when there are enough steps."""
        checked = self.schema.with_leaves(leaves, self._packing)
        with self.writing, self.lock:
            if self.schema.leaves:
                self.find_repeats()
                self._settle_with(leaves)
                return
            # The places of packed leaves are not final: only their order counts.
            self.schema = Schema(list(checked.leaves.values()))
            self._add_raw(leaves)
            packed = [leaf for leaf in leaves if leaf.is_packed]
            if packed:
                self._opening = Column(packed, None, self.num_slots)

    def settle(self, leaves: Sequence[Leaf], block: Block | None = None) -> None:
        """Add leaves whose kinds are known; a block of steps tells which of them are images of numbers."""
        scaled: Collection[Key] = ()
        if block is not None:
            scaled = find_scaled(leaves, block)
        with self.writing, self.lock:
            self._settle_with(leaves, scaled)

    def _settle_with(self, leaves: Sequence[Leaf], scaled: Collection[Key] = ()) -> None:
        self.schema = self.schema.with_leaves(leaves, self._packing, scaled)
        self._add_raw(leaves)
        for number in range(len(self._columns), len(self.schema.packers)):
            log = RowLog(self.schema.packers[number], self.cache, self.cache.new_log(), self._threads)
            self._columns.append(Column(self.schema.of_column(number), log, self.num_slots))

    def _add_raw(self, leaves: Sequence[Leaf]) -> None:
        for leaf in leaves:
            if leaf.kind == RAW:
                self._raw[leaf.key] = np.zeros((self.num_slots, *leaf.shape), leaf.carrier)

    def find_repeats(self, block: Block | None = None) -> None:
        """Decide which leaves under ``next`` repeat the root, and which are images, by a block or the open segment."""
        opening = self._opening
        if opening is None:
            return
        if block is None and opening.open_width:
            block, _ = opening.open_steps()
        leaves = self.leaves
        scaled: set[Key] = set()
        if block is not None:
            leaves = find_twins(leaves, block)
            scaled = find_scaled(leaves, block)
        with self.changing:
            raw = dict(self._raw)
            self.schema = Schema()
            self._settle_with(leaves, scaled)
            self._raw = raw
            for column in self._columns:
                column.take_open(opening)
            self._opening = None

    @contextlib.contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Forget the leaves that were declared in the block if it raises before steps were written.

        The open segment may have been packed by then, which changes no step. The caller holds `writing`: if it were
        taken here, Ctrl-C on the way in or out would leave it locked for as long as the traceback is kept.
        """
        before = (self.schema, list(self._columns), dict(self._raw), self._opening)
        num_writes = self._num_writes
        try:
            yield
        except BaseException:
            if self._num_writes == num_writes:
                with self.changing:
                    self.schema, self._columns, self._raw, self._opening = before
            raise

    # Slots

    def make_room(self, first: int, end: int) -> None:
        """Make the table hold the slots from `first` to `end`; those before `first` are forgotten."""
        if end - self._base <= self.num_slots:
            return
        size = max(_LEAST_SLOTS, 2 * (end - first))
        kept = slice(first - self._base, self.num_slots)
        for column in self._columns:
            rows = np.full(size, NONE, np.int64)
            rows[: len(column.row_of[kept])] = column.row_of[kept]
            column.row_of = rows
        self._base = first
        self.num_slots = size

    def forget(self, first: int, stop: int) -> None:
        """Let the slots from `first` to `stop` show nothing."""
        index = np.arange(first, stop) - self._base
        for column in self._columns:
            column.show(index, np.full(len(index), NONE))

    def keep_only(self, slots: Slots) -> None:
        """Renumber slots: the first of `slots` becomes slot 0, and so on; all others are forgotten."""
        with self.writing, self.changing:
            index = slots - self._base
            others = np.setdiff1d(np.arange(self.num_slots), index)
            for column in self._columns:
                column.show(others, np.full(len(others), NONE))
                column.row_of = column.row_of[index]
            self.num_slots = len(slots)
            self._base = 0

    def raw(self, key: Key) -> NDArray[Any]:
        """Return the values of a raw leaf in all slots, not copied."""
        return self._raw[key]

    @property
    def raw_keys(self) -> list[Key]:
        """The keys of the raw leaves."""
        return list(self._raw)

    # Writing

    def write(self, slots: Slots, block: Block, publish: Callable[[], None]) -> None:
        """Put steps into slots. Leaves that are not in `block` keep their values, or are zero in new slots.

        Args:
            slots: ``[time, streams]``.
            block: Arrays ``[streams, time, ...]`` by key.
            publish: Called under the lock, together with the change.
        """
        with self.writing:
            # First, so that nothing can fail once the steps are there.
            self._tidy()
            self._leave_opening(slots, block)
            values = [(column, self._completed(column, slots, block)) for column in self._touched(block)]
            packed: list[tuple[Column, Slots, PackedSteps]] = []
            for column, steps in values:
                if len(slots) >= ENOUGH_STEPS or column.open_width not in (0, slots.shape[1]):
                    self._pack_open(column)
                if len(slots) >= ENOUGH_STEPS:
                    packed += self._pack(column, steps, slots)
            with self.changing:
                for column, part, units in packed:
                    self._show(column, part, units)
                if not packed:
                    for column, steps in values:
                        column.keep_open(steps, slots, slots - self._base)
                self._write_raw(slots, block)
                self._num_writes += 1
                publish()

    def _leave_opening(self, slots: Slots, block: Block) -> None:
        """Find out which leaves repeat if steps of a block do not go into the open segment, which is packed then."""
        opening = self._opening
        if opening is None:
            return
        if len(slots) >= ENOUGH_STEPS and opening.keys <= set(block):
            self.find_repeats(block)
        elif len(slots) >= ENOUGH_STEPS or opening.open_width not in (0, slots.shape[1]):
            # Changes of some leaves, or steps of another number of streams: the open steps tell.
            self.find_repeats()

    def _tidy(self) -> None:
        """Pack open segments that are full, and sparse segments again."""
        if self._opening is not None and self._opening.is_open_full:
            self.find_repeats()
        for column in self._columns:
            if column.is_open_full:
                self._pack_open(column)
            self._compact(column)

    def _touched(self, block: Block) -> list[Column]:
        """Return the columns that have a leaf in a block."""
        if self._opening is not None:
            return [self._opening]
        return [column for column in self._columns if column.keys & set(block)]

    def _completed(self, column: Column, slots: Slots, block: Block) -> Block:
        """Return all leaves of a column, those that are not in `block` as they are in the slots."""
        values = {leaf.key: block[leaf.key] for leaf in column.leaves if leaf.key in block}
        if len(values) == len(column.leaves):
            return values
        places = slots.T
        with self.lock:
            found = column.find(places.reshape(-1) - self._base)
        for leaf in column.leaves:
            if leaf.key not in values:
                values[leaf.key] = found.array(leaf).reshape(*places.shape, *leaf.shape)
        return values

    def _pack(self, column: Column, values: Block, slots: Slots) -> list[tuple[Column, Slots, PackedSteps]]:
        """Pack steps in segments: small enough that one which is mostly overwritten does not hold much memory."""
        num_rows = min(_SEGMENT_ROWS, max(_SMALL_SEGMENT_ROWS, self.num_slots // 4))
        step = max(_BLOCK_STEPS, num_rows // slots.shape[1])
        packed = []
        for first in range(0, len(slots), step):
            part = slice(first, first + step)
            some = {key: array[:, part] for key, array in values.items()}
            packed.append((column, slots[part], column.pack(some)))
        return packed

    def _show(self, column: Column, slots: Slots, packed: PackedSteps) -> None:
        """Let slots show what was packed for them; of several steps for one slot, the last."""
        flat = slots.reshape(-1)
        rows = packed.position.T.reshape(-1)
        distinct, from_end = np.unique(flat[::-1], return_index=True)
        last = len(flat) - 1 - from_end
        start = column.log.append(packed.units, len(distinct))
        column.show(distinct - self._base, start + rows[last])

    def _pack_open(self, column: Column) -> None:
        """Pack the open segment of a column; readers see it open until that is done."""
        if not column.open_width:
            return
        values, slots = column.open_steps()
        packed = column.pack(values)
        with self.changing:
            index = slots - self._base
            is_shown = column.still_open(slots, index)
            start = 0
            if is_shown.any():
                start = column.log.append(packed.units, int(np.count_nonzero(is_shown)))
            column.close_open(index[is_shown], start + packed.position.T[is_shown])

    def _write_raw(self, slots: Slots, block: Block) -> None:
        index = slots.T - self._base
        for key, values in self._raw.items():
            if key in block:
                values[index] = block[key]

    def _compact(self, column: Column) -> None:
        """Pack the steps of sparse segments again, so that overwriting does not grow the log without bound."""
        index = column.sparse_slots()
        if not len(index):
            return
        # Stream by stream, so that steps which follow each other are neighbours again.
        index = index[np.lexsort((index, index % self.num_streams))]
        step = max(_BLOCK_STEPS, _COMPACT_BYTES // max(1, column.log.packer.row_bytes))
        for first in range(0, len(index), step):
            part = index[first : first + step]
            with self.lock:
                found = column.find(part)
            packed = column.pack({leaf.key: found.array(leaf)[None] for leaf in column.leaves})
            with self.changing:
                start = column.log.append(packed.units, len(part))
                column.show(part, start + packed.position[0])

    # Rows that no slot shows yet

    def pack_run(self, values: Block, num_steps: int) -> list[PackedSteps]:
        """Pack consecutive steps ``[1, num_steps, ...]`` of one episode, for all columns; needs no lock."""
        breaks = np.zeros((1, num_steps), np.bool_)
        breaks[0, -1] = True
        return [column.pack(values, breaks) for column in self._columns]

    def append_run(self, packed: Sequence[PackedSteps]) -> list[Slots]:
        """Add what `pack_run` packed; returns the rows of the steps in each column. The caller holds the lock."""
        rows = []
        for column, units in zip(self._columns, packed, strict=True):
            start = column.log.append(units.units, units.position.size)
            rows.append(start + units.position.reshape(-1))
        return rows

    def show(self, slots: Slots, rows: Sequence[Slots]) -> None:
        """Let slots show the rows that `append_run` returned. The caller holds the lock."""
        for column, numbers in zip(self._columns, rows, strict=True):
            column.show(slots - self._base, numbers)

    def release(self, rows: Sequence[Slots]) -> None:
        """Drop rows that `append_run` returned and no slot shows. The caller holds the lock."""
        for column, numbers in zip(self._columns, rows, strict=True):
            column.log.release(numbers)

    # Reading

    def find(self, slots: Slots) -> FoundSteps:
        """Locate steps, to be decoded without the lock."""
        with self.lock:
            index = slots - self._base
            raw = {key: values[index] for key, values in self._raw.items()}
            opening = None
            if self._opening is not None:
                opening = self._opening.find(index)
            return FoundSteps(self.schema, [column.find(index) for column in self._columns], raw, opening)

    def find_rows(self, rows: Sequence[Slots]) -> FoundSteps:
        """Locate steps by their rows in each column, to be decoded without the lock."""
        columns = [column.find_rows(numbers) for column, numbers in zip(self._columns, rows, strict=True)]
        return FoundSteps(self.schema, columns, {}, None)

    def find_runs(self, slots: Slots) -> FoundSteps:
        """Locate the rows of consecutive steps ``[runs, steps]``, and the row after the last of each run.

        Arrays have ``runs * (steps + 1)`` rows then; those of step leaves are of no use in the last one.
        """
        columns = []
        with self.lock:
            for column, rows in zip(self._columns, self.rows_of(slots), strict=True):
                wanted = np.concatenate([rows, rows[:, -1:] + 1], axis=1).reshape(-1)
                columns.append(column.find_rows(wanted, with_next=False))
            return FoundSteps(self.schema, columns, {}, None)

    def rows_of(self, slots: Slots) -> list[Slots]:
        """Return the rows that slots show in each column."""
        return [column.row_of[slots - self._base] for column in self._columns]

    # Sizes

    @property
    def packed_bytes(self) -> int:
        """The bytes of everything that is packed."""
        return sum(column.log.packed_bytes for column in self._columns)

    @property
    def held_bytes(self) -> int:
        """The memory of everything that is packed, objects and tables of it included."""
        return sum(column.log.held_bytes for column in self._columns)

    @property
    def num_columns(self) -> int:
        """How many columns there are."""
        return len(self._columns)

    @property
    def open_bytes(self) -> int:
        """The memory of open segments."""
        columns = [*self._columns]
        if self._opening is not None:
            columns.append(self._opening)
        return sum(column.open_bytes for column in columns)

    @property
    def raw_bytes(self) -> int:
        """The memory of raw leaves."""
        return sum(values.nbytes for values in self._raw.values())

    @property
    def table_bytes(self) -> int:
        """The memory of the table of slots."""
        return sum(column.row_of.nbytes for column in self._columns)

    @property
    def num_rows(self) -> int:
        """How many rows the largest log has, extra ones included."""
        return max((column.log.num_rows for column in self._columns), default=0)

    # Keeping

    def snapshot(self) -> Snapshot:
        """Return everything, in new memory except for packed bytes, which never change."""
        with self.writing, self.lock:
            self.find_repeats()
            plain: dict[str, Any] = {
                "schema": self.schema.to_json(),
                "num_slots": self.num_slots,
                "num_streams": self.num_streams,
                "base": self._base,
                "ends": [column.log.end for column in self._columns],
            }
            arrays = {f"raw/{number}": values.copy() for number, values in enumerate(self._raw.values())}
            for number, column in enumerate(self._columns):
                arrays[f"rows/{number}"] = column.row_of.copy()
                if column.open_width:
                    values, slots = column.open_steps()
                    arrays[f"open_slots/{number}"] = slots
                    for place, leaf in enumerate(column.leaves):
                        arrays[f"open/{number}/{place}"] = values[leaf.key].swapaxes(0, 1).copy()
            return Snapshot(plain, arrays, [column.segments() for column in self._columns])

    def rebuild(
        self, snapshot: Snapshot, held: Sequence[Sequence[Slots]] = ()
    ) -> tuple[Steps, NDArray[np.int64], list[bool]]:
        """Build the object that a snapshot was taken of, with the settings of this one.

        Args:
            snapshot: From `snapshot`.
            held: Groups of rows that no slot shows and that are kept, too: for each group, its rows in each column.

        Returns:
            The object; the slots whose steps are lost, which show nothing; and for each group whether it is complete.

        Raises:
            StateMismatchError: If it is not a snapshot of such an object.
            CorruptFileError: If it is one, but its parts do not fit together.
        """
        twin = Steps(0, **self.settings())
        try:
            lost, complete = twin._build(snapshot, held)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            if isinstance(error, SlipstreamError):
                raise
            raise StateMismatchError(f"the state is not that of a replay buffer ({error})") from error
        return twin, lost, complete

    def become(self, other: Steps) -> None:
        """Take over everything that another object holds, which must not be used any more."""
        with self.writing, self.changing:
            self.num_slots = other.num_slots
            self.num_streams = other.num_streams
            self.schema = other.schema
            self.cache = other.cache
            self._base = other._base
            self._columns = other._columns
            self._raw = other._raw
            self._opening = other._opening

    def _build(self, snapshot: Snapshot, held: Sequence[Sequence[Slots]]) -> tuple[Slots, list[bool]]:
        plain = snapshot.plain
        arrays = snapshot.arrays
        self.num_slots = int(plain["num_slots"])
        self.num_streams = int(plain["num_streams"])
        self._base = int(plain["base"])
        schema = Schema.from_json(plain["schema"])
        if len(snapshot.segments) != len(schema.packers) or self.num_slots < 0 or self.num_streams < 1:
            raise StateMismatchError(f"the state has {len(snapshot.segments)} columns, expected {len(schema.packers)}")
        for number in range(len(schema.packers)):
            # Before tables of that length are made.
            if np.size(arrays[f"rows/{number}"]) != self.num_slots:
                raise StateMismatchError(f"column {number} is not a table of {self.num_slots} slots")
        self.schema = schema
        raw_leaves = [leaf for leaf in schema.leaves.values() if leaf.kind == RAW]
        for number, leaf in enumerate(raw_leaves):
            values = np.array(arrays[f"raw/{number}"])
            self._raw[leaf.key] = values.view(leaf.carrier).reshape(self.num_slots, *leaf.shape)
        damaged = [np.empty(0, np.int64)]
        for number, packer in enumerate(schema.packers):
            log = RowLog(packer, self.cache, self.cache.new_log(), self._threads)
            column = Column(schema.of_column(number), log, self.num_slots)
            column.row_of = np.array(arrays[f"rows/{number}"], np.int64).reshape(self.num_slots)
            self._columns.append(column)
            self._restore_open(column, number, arrays)
            log.restore(snapshot.segments[number], int(plain["ends"][number]))
            damaged.append(np.flatnonzero(column.is_lost(column.row_of)))
        lost = np.unique(np.concatenate(damaged))
        complete = [self._is_complete(rows) for rows in held]
        nothing = np.empty(0, np.int64)
        for number, column in enumerate(self._columns):
            column.row_of[lost] = NONE
            shown = [column.row_of[column.row_of >= 0]]
            for rows, is_complete in zip(held, complete, strict=True):
                shown.append(rows[number] if is_complete and rows else nothing)
            column.log.count_shown(np.concatenate(shown))
        return lost + self._base, complete

    def _is_complete(self, rows: Sequence[Slots]) -> bool:
        # An episode of which nothing is packed has no rows at all.
        pairs = zip(self._columns, rows, strict=False)
        return not any(column.is_lost(numbers).any() for column, numbers in pairs)

    def _restore_open(self, column: Column, number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        slots = np.array(arrays.get(f"open_slots/{number}", np.empty((0, 1))), np.int64)
        values = {}
        if len(slots):
            if slots.min() < self._base or slots.max() >= self._base + self.num_slots:
                raise CorruptFileError("open steps are in slots that do not exist")
            for place, leaf in enumerate(column.leaves):
                stored = np.array(arrays[f"open/{number}/{place}"]).view(leaf.carrier)
                values[leaf.key] = stored.reshape(*slots.shape, *leaf.shape)
        column.restore_open(values, slots)
        if int(column.row_of.min(initial=NONE)) < OPEN + 1 - slots.size:
            raise CorruptFileError("slots show open rows that do not exist")
