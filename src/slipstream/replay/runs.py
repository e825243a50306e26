"""Which slots of a ring follow each other in one episode: numbers that are equal for slots of the same run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Runs:
    """Numbers for the slots ``[time, streams]`` of a ring, kept up to date as it is written in order."""

    def __init__(self, num_times: int, num_streams: int) -> None:
        self.of = np.full((num_times, num_streams), -1, np.int64)
        self.stale = False
        self._next = 0
        self._open: NDArray[np.int64] | None = None  # the run that each stream is in, if it goes on
        self._ended: NDArray[np.bool_] | None = None
        self._last_id: NDArray[Any] | None = None

    def write(self, times: NDArray[np.int64], ended: NDArray[np.bool_], ids: NDArray[Any] | None) -> None:
        """Number the slots that were just written, which follow those that were written last.

        Args:
            times: Where along the ring, in order of time.
            ended: ``[times, streams]``, whether an episode ended with that step.
            ids: ``[times, streams]``, numbers of episodes if there are any: another one is another run.
        """
        fresh = np.zeros(ended.shape, np.bool_)
        fresh[1:] = ended[:-1]
        if ids is not None:
            fresh[1:] |= ids[1:] != ids[:-1]
        if self._open is None or self._ended is None:
            fresh[0] = True
        else:
            fresh[0] = self._ended
            if ids is not None and self._last_id is not None:
                fresh[0] |= ids[0] != self._last_id
        count = np.cumsum(fresh, axis=0)
        offset = self._next + np.cumsum(count[-1]) - count[-1]
        before = self._open if self._open is not None else np.full(ended.shape[1], -1, np.int64)
        numbers = np.where(count == 0, before, offset + count - 1)
        self.of[times] = numbers
        self._next += int(count[-1].sum())
        self._open, self._ended = numbers[-1].copy(), ended[-1].copy()
        self._last_id = None if ids is None else ids[-1].copy()

    def valid(
        self, time: NDArray[np.int64], stream: NDArray[np.int64], length: int, num_times: int
    ) -> NDArray[np.bool_]:
        """Tell which slices of `length` steps from these slots on stay in one run."""
        last = (time + length - 1) % num_times
        same: NDArray[np.bool_] = (self.of[time, stream] == self.of[last, stream]) & (self.of[time, stream] >= 0)
        return same
