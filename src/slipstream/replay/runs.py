"""Which slots of a ring follow each other in one episode: numbers that are equal for slots of the same run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UNUSED = -1
"""The run of a slot that was never written, or whose step is lost."""


class Runs:
    """Numbers for the slots ``[time, streams]`` of a ring.

    A run ends where an episode ends, where its id changes, and where a slot was not written right after the slot before
    it. The last is remembered for each slot, so that runs can be found again after flags were changed.

    Args:
        num_times: The length of the ring.
        num_streams: How many streams are written side by side.
    """

    def __init__(self, num_times: int, num_streams: int) -> None:
        self.of = np.full((num_times, num_streams), UNUSED, np.int64)
        self.follows = np.zeros((num_times, num_streams), np.bool_)
        """Whether the step in a slot was written right after that in the slot before it."""
        self.is_stale = False
        """Whether flags have changed since the runs were found."""
        self.has_holes = False
        """Whether some slots among those that count have no step: lost, or left out by the writer."""
        self._next = 0

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return self.of.nbytes + self.follows.nbytes

    def write(self, times: NDArray[np.int64], newest: int) -> bool:
        """Note that whole slots along time were written with new steps; `newest` was the last one before.

        Returns:
            Whether they continue where the last write ended, so that `extend` can number them.
        """
        length = len(self.of)
        position = np.arange(len(times))
        before = np.concatenate([[newest], times[:-1]])
        slot_before = (times - 1) % length
        # A step follows if it was written right after the one that the slot before it shows in the end.
        distinct, from_end = np.unique(times[::-1], return_index=True)
        place = np.minimum(np.searchsorted(distinct, slot_before), len(distinct) - 1)
        last_written = np.where(distinct[place] == slot_before, len(times) - 1 - from_end[place], -1)
        follows = (before == slot_before) & (last_written == position - 1)
        self.follows[(times + 1) % length] = False
        self.follows[times] = follows[:, None]
        self.of[times] = np.maximum(self.of[times], 0)
        in_order = not self.is_stale and bool(follows[1:].all()) and (newest < 0 or bool(before[0] == slot_before[0]))
        self.is_stale = not in_order
        return in_order

    def extend(self, times: NDArray[np.int64], ended: NDArray[np.bool_] | None, ids: NDArray[np.int64] | None) -> None:
        """Number slots that were just written in order.

        Args:
            times: Where along the ring.
            ended: ``[1 + times, streams]``: as for `number`, with the slot before the first one in front.
            ids: The same for ids.
        """
        starts = ~self.follows[times]
        if ended is not None:
            starts |= ended[:-1]
        if ids is not None:
            starts |= ids[1:] != ids[:-1]
        before = self.of[(times[0] - 1) % len(self.of)]
        starts[0] |= before == UNUSED
        count = np.cumsum(starts, axis=0)
        total = count[-1]
        offset = self._next + np.cumsum(total) - total
        self.of[times] = np.where(count == 0, before, offset + count - 1)
        self._next += int(total.sum())

    def write_scattered(self, slots: NDArray[np.int64]) -> None:
        """Note that single slots were written with new steps, which follow nothing."""
        length, width = self.of.shape
        time = slots // width
        stream = slots % width
        self.follows[time, stream] = False
        self.follows[(time + 1) % length, stream] = False
        self.of[time, stream] = np.maximum(self.of[time, stream], 0)
        self.is_stale = True

    def fill(self, slots: NDArray[np.int64]) -> None:
        """Note that whole steps were put into some slots as changes: holes among them have a step now."""
        flat = self.of.reshape(-1)
        self.write_scattered(slots[flat[slots] == UNUSED])

    def lose(self, slots: NDArray[np.int64]) -> None:
        """Note that the steps of some slots are lost."""
        self.write_scattered(slots)
        self.of.reshape(-1)[slots] = UNUSED
        self.has_holes = True

    def find_holes(self, num_times: int) -> None:
        """Find out whether one of the first slots along time has no step."""
        self.has_holes = bool((self.of[:num_times] == UNUSED).any())

    def number(self, ended: NDArray[np.bool_] | None, ids: NDArray[np.int64] | None) -> None:
        """Find the runs.

        Args:
            ended: ``[time, streams]``, whether an episode ended with that step; None if there is no such flag.
            ids: ``[time, streams]``, numbers of episodes; None if there are none.
        """
        starts = ~self.follows
        if ended is not None:
            starts |= np.roll(ended, 1, axis=0)
        if ids is not None:
            starts |= ids != np.roll(ids, 1, axis=0)
        is_used = self.of != UNUSED
        starts |= ~np.roll(is_used, 1, axis=0)
        count = np.cumsum(starts, axis=0)
        # Before its first start, a stream continues the run at the end of the ring.
        count = np.where(count == 0, count[-1], count)
        offset = self._next + np.cumsum(count[-1] + 1)
        self.of = np.where(is_used, count + offset, UNUSED)
        self._next = int(self.of.max(initial=0)) + 1
        self.is_stale = False
