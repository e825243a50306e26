"""`RingOrder`: in which order slots were written, and which of them follow each other in an episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.replay.indexing import RingShape
from slipstream.replay.roles import Key, Roles
from slipstream.replay.runs import UNUSED, Runs
from slipstream.replay.steps import Steps


class RingOrder:
    """Keeps the order of a ring of slots.

    Args:
        shape: The ring.
        steps: The steps in its slots; their raw leaves tell where episodes end.
        roles: Which leaves do that.
        table: Which slots follow each other; by default none was written.
        newest: The slot along time that was written last; -1 for none.
    """

    def __init__(
        self, shape: RingShape, steps: Steps, roles: Roles, table: Runs | None = None, newest: int = -1
    ) -> None:
        self.shape = shape
        self.newest = newest
        self.table = table or Runs(shape.num_times, max(1, shape.width))
        self._steps = steps
        self._roles = roles

    def note_times(self, times: NDArray[np.int64]) -> None:
        """Note that whole slots along time were written with new steps, in this order."""
        if self.table.write(times, self.newest):
            self._extend(times)
        self.newest = int(times[-1])

    def note_scattered(self, slots: NDArray[np.int64]) -> None:
        """Note that single slots were written with new steps, which follow nothing."""
        self.table.write_scattered(slots.reshape(-1))

    def note_change(self, slots: NDArray[np.int64], *, is_whole: bool) -> None:
        """Note that flags of old steps may have changed; whole steps fill the holes among their slots."""
        if is_whole:
            self.table.fill(slots.reshape(-1))
        self.table.is_stale = True

    def _extend(self, times: NDArray[np.int64]) -> None:
        """Number the runs of slots that were just written in order, without looking at the others."""
        looked_at = np.concatenate([times[:1] - 1, times]) % self.shape.num_times
        slots = (looked_at[:, None] * self.shape.width + np.arange(self.shape.width)).reshape(-1)
        ended, ids = self._ends_and_ids(torch.from_numpy(slots))
        self.table.extend(times, ended, ids)

    def _ends_and_ids(self, slots: Any) -> tuple[NDArray[np.bool_] | None, NDArray[np.int64] | None]:
        """Return end flags and ids ``[time, streams]`` of whole slots along time."""
        flags = {key: self.raw(key)[slots] for key in self._steps.raw_keys if self._roles.are_played_by(key)}
        ended = self._roles.ends(flags, 1)
        if ended is not None:
            ended = ended.reshape(-1, self.shape.width)
        ids = self._roles.ids(flags, 1)
        if ids is not None:
            ids = ids.reshape(-1, self.shape.width)
        return ended, ids

    def runs(self) -> NDArray[np.int64]:
        """Return numbers ``[time, streams]`` that are equal for slots which follow each other in an episode."""
        with self._steps.lock:
            if self.table.is_stale:
                self.table.number(*self._ends_and_ids(slice(None)))
            return self.table.of

    def is_unused(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which slots were never written, or lost their step."""
        unused: NDArray[np.bool_] = self.table.of.reshape(-1)[slots] == UNUSED
        return unused

    def sound(self, num_times: int) -> NDArray[np.int64]:
        """Return the slots that hold a step, among those of the first `num_times`."""
        return np.flatnonzero(self.table.of[:num_times].reshape(-1) != UNUSED)

    def raw(self, key: Key) -> torch.Tensor:
        """Return a raw leaf of all slots, not copied."""
        return self._steps.schema.leaves[key].tensor(self._steps.raw(key))

    def flags(self, key: Key, index: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Return a raw leaf of some steps, by their places along time and streams; None if there is none."""
        if key not in self._steps.raw_keys:
            return None
        flat = np.ravel_multi_index([part.numpy() for part in index], self.shape.shape)
        return self.raw(key)[torch.from_numpy(flat)]
