"""Draw starts of slices at random, all with the same chance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slipstream.replay.prefix_sum import PrefixSum

Starts = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Which sequence a slice is in, and where in it it starts."""
Draw = Callable[[int, int], NDArray[np.int64]]
"""``draw(high, count)`` returns `count` random numbers from 0 to `high`, exclusive."""

_TRIES = 8


def draw_starts(count: int, propose: Callable[[int], Starts], enumerate_rest: Callable[[int], Starts]) -> Starts:
    """Draw starts of slices.

    Any place is proposed, and those from which no slice of full length starts are dropped. That is O(1) per slice
    unless hardly any place is suitable; only then are all of them enumerated.

    Args:
        count: How many.
        propose: Returns at most that many suitable starts, drawn at random.
        enumerate_rest: Returns exactly that many, drawn from all suitable ones.
    """
    sequences = [np.empty(0, np.int64)]
    starts = [np.empty(0, np.int64)]
    missing = count
    for _ in range(_TRIES):
        sequence, start = propose(missing)
        sequences.append(sequence)
        starts.append(start)
        missing -= len(start)
        if not missing:
            break
    else:
        sequence, start = enumerate_rest(missing)
        sequences.append(sequence)
        starts.append(start)
    return np.concatenate(sequences), np.concatenate(starts)


def draw_from(counts: NDArray[np.int64], count: int, draw: Draw) -> Starts:
    """Draw from several groups with as many members as `counts` says; returns group and member."""
    choices = PrefixSum()
    choices.extend(counts)
    drawn = draw(choices.total, count)
    group = choices.get_range_idx(drawn)
    return group, choices.get_range_relative_idx(drawn, group)
