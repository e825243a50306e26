"""Episodes that are not finished: blocks that are packed already, and the newest rows, which are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ReplayError
from slipstream.replay.arrays import Arrays, next_name, step_block
from slipstream.replay.columns import PackedSteps, Slots
from slipstream.replay.prefix_sum import PrefixSum
from slipstream.replay.schema import Leaf
from slipstream.replay.steps import FoundSteps, Steps
from slipstream.replay.tail import Tail

STEP_BYTES = 16
"""What a packed step takes in the table of slots of each column, which may be twice as long as it needs to be."""
OPEN_BYTES = 1536
"""What an unfinished episode takes besides its rows: a few objects."""

_BLOCK_STEPS = 64


@dataclass(frozen=True)
class Growth:
    """What appending rows to an episode would change.

    Attributes:
        blocks: Blocks of steps that are packed now, each for all columns.
        rows: What goes into the tail: the new rows, or all rows that are left if blocks were packed.
        length: How many rows the episode has then.
        nbytes: ... and how much memory it takes.
    """

    blocks: Sequence[Sequence[PackedSteps]]
    rows: Arrays
    length: int
    nbytes: int


@dataclass
class OpenEpisode:
    """An unfinished episode.

    Attributes:
        rows: For each packed block, the rows of its steps in each column.
        num_packed: How many steps are packed.
        packed_bytes: The memory that they take.
        tail: The rows after them.
    """

    rows: list[Sequence[Slots]] = field(default_factory=list)
    num_packed: int = 0
    packed_bytes: int = 0
    tail: Tail = field(default_factory=Tail)

    @property
    def length(self) -> int:
        """How many rows it has."""
        return self.num_packed + self.tail.length

    @property
    def num_steps(self) -> int:
        """How many steps can be sampled: all but the last, which has no next frame yet."""
        return max(0, self.length - 1)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return OPEN_BYTES + self.packed_bytes + self.tail.nbytes

    def plan(self, arrays: Arrays, frames: frozenset[str], steps: Steps) -> Growth:
        """Pack what more rows complete, without changing anything."""
        count = len(next(iter(arrays.values())))
        length = self.length + count
        # Before the first episode has ended, it is not known what to pack.
        if not steps.leaves or self.tail.length + count <= _BLOCK_STEPS:
            return Growth([], arrays, length, OPEN_BYTES + self.packed_bytes + self.tail.nbytes_with(arrays))
        rows = dict(arrays)
        for name, before in self.tail.values().items():
            rows[name] = np.concatenate([before, arrays[name]])
        num_blocks = (self.tail.length + count - 1) // _BLOCK_STEPS
        blocks = []
        for number in range(num_blocks):
            first = number * _BLOCK_STEPS
            # One row more than steps: what the last of them led to.
            part = {name: array[first : first + _BLOCK_STEPS + 1] for name, array in rows.items()}
            blocks.append(steps.pack_run(step_block(part, frames, _BLOCK_STEPS), _BLOCK_STEPS))
        left = {name: array[num_blocks * _BLOCK_STEPS :] for name, array in rows.items()}
        nbytes = OPEN_BYTES + self.packed_bytes + sum(map(held_bytes, blocks)) + Tail().nbytes_with(left)
        return Growth(blocks, left, length, nbytes)

    def commit(self, growth: Growth, steps: Steps) -> None:
        """Take over what `plan` returned. The caller holds the lock of `steps`."""
        for block in growth.blocks:
            self.rows.append(steps.append_run(block))
            self.num_packed += _BLOCK_STEPS
            self.packed_bytes += held_bytes(block)
        if growth.blocks:
            self.tail = Tail()
        self.tail.append(growth.rows)

    def release(self, steps: Steps) -> None:
        """Drop what is packed. The caller holds the lock of `steps`."""
        for rows in self.rows:
            steps.release(rows)

    def all_rows(self) -> list[Slots]:
        """Return the rows of all packed steps in each column; nothing if none is packed."""
        return [np.concatenate(parts) for parts in zip(*self.rows, strict=True)]

    def copy(self) -> OpenEpisode:
        """Return a copy that can grow on its own."""
        twin = OpenEpisode(list(self.rows), self.num_packed, self.packed_bytes)
        if self.tail.length:
            twin.tail.append(self.tail.values())
        return twin


def held_bytes(packed: Sequence[PackedSteps]) -> int:
    """Return the memory of packed steps in all columns, objects and tables included."""
    total = 0
    for steps in packed:
        total += steps.held_bytes + STEP_BYTES * steps.position.size
    return total


@dataclass(frozen=True)
class FoundBatch:
    """Steps that were located: packed ones, and copies of those that are not packed."""

    leaves: Sequence[Leaf]
    is_packed: NDArray[np.bool_]
    found: FoundSteps
    raw: Mapping[str, NDArray[Any]]

    def read(self, out: dict[str, NDArray[Any]] | None) -> dict[str, NDArray[Any]]:
        """Read the steps, into `out` if it is given.

        Raises:
            ReplayError: If `out` does not fit.
        """
        batch = {leaf.key[0]: _memory(leaf, len(self.is_packed), out) for leaf in self.leaves}
        if not len(self.is_packed):
            return batch
        if self.is_packed.all():
            self.found.read({leaf.key: batch[leaf.key[0]] for leaf in self.leaves})
            return batch
        for leaf in self.leaves:
            values = batch[leaf.key[0]]
            if self.is_packed.any():
                values[self.is_packed] = self.found.array(leaf)
            values[~self.is_packed] = self.raw[leaf.key[0]]
        return batch


def _memory(leaf: Leaf, count: int, out: dict[str, NDArray[Any]] | None) -> NDArray[Any]:
    shape = (count, *leaf.shape)
    if out is None:
        return np.empty(shape, leaf.carrier)
    name = leaf.key[0]
    memory = out.get(name)
    if memory is None or memory.shape != shape or memory.dtype != leaf.carrier:
        raise ReplayError(f"out has no {name!r} of {leaf.carrier}{list(shape)}")
    if not memory.flags.c_contiguous or not memory.flags.writeable:
        raise ReplayError(f"{name!r} in out is not contiguous and writable")
    return memory


def find_open(
    leaves: Sequence[Leaf],
    steps: Steps,
    episodes: Iterable[OpenEpisode],
    finished_rows: Sequence[Slots],
    is_finished: NDArray[np.bool_],
    index: NDArray[np.int64],
) -> FoundBatch:
    """Locate a batch in which some steps are of unfinished episodes.

    Args:
        leaves: What a batch has.
        steps: Where packed rows are.
        episodes: The unfinished ones, in order.
        finished_rows: For each column, the rows of the steps that are finished.
        is_finished: Which those are.
        index: The other steps count from 0, through all unfinished episodes.
    """
    some = [episode for episode in episodes if episode.num_steps]
    lengths = PrefixSum()
    lengths.extend([episode.num_steps for episode in some])
    which = np.full(len(index), -1)
    place = np.zeros(len(index), np.int64)
    which[~is_finished] = lengths.get_range_idx(index[~is_finished])
    place[~is_finished] = lengths.get_range_relative_idx(index[~is_finished], which[~is_finished])
    is_packed = is_finished.copy()
    rows = [np.zeros(len(index), np.int64) for _ in finished_rows]
    for column, numbers in zip(rows, finished_rows, strict=True):
        column[is_finished] = numbers
    raw = {leaf.key[0]: np.zeros((len(index), *leaf.shape), leaf.carrier) for leaf in leaves}
    for number, episode in enumerate(some):
        mine = np.flatnonzero(which == number)
        packed = mine[place[mine] < episode.num_packed]
        is_packed[packed] = True
        for column, numbers in zip(rows, episode.all_rows(), strict=False):
            column[packed] = numbers[place[packed]]
        newest = mine[place[mine] >= episode.num_packed]
        _copy_newest(episode, newest, place[newest] - episode.num_packed, raw)
    found = steps.find_rows([column[is_packed] for column in rows])
    return FoundBatch(leaves, is_packed, found, {name: values[~is_packed] for name, values in raw.items()})


def _copy_newest(
    episode: OpenEpisode, where: NDArray[np.int64], rows: NDArray[np.int64], raw: Mapping[str, NDArray[Any]]
) -> None:
    for name, array in episode.tail.values().items():
        raw[name][where] = array[rows]
        if next_name(name) in raw:
            raw[next_name(name)][where] = array[rows + 1]
