"""Draw starts of slices at random, all with the same chance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ReplayError
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


def draw_slices(lengths: PrefixSum, count: int, length: int, generator: np.random.Generator) -> Starts:
    """Draw slices of consecutive steps from sequences, all that there are with the same chance.

    Args:
        lengths: How many steps each sequence has.
        count: How many slices.
        length: How many steps a slice has.
        generator: What to draw from.

    Raises:
        ReplayError: If no sequence is as long.
    """
    if not lengths.total:
        raise ReplayError("there is nothing to sample: the store has no finished episode yet")

    def draw(high: int, count: int) -> NDArray[np.int64]:
        return generator.integers(0, high, count)

    def propose(missing: int) -> Starts:
        index = draw(lengths.total, 2 * missing)
        sequence = lengths.get_range_idx(index)
        start = lengths.get_range_relative_idx(index, sequence)
        fits = start + length <= lengths.lengths_of(sequence)
        return sequence[fits][:missing], start[fits][:missing]

    def enumerate_rest(missing: int) -> Starts:
        windows = np.maximum(0, lengths.lengths - length + 1)
        if not windows.any():
            raise ReplayError(f"no episode has {length} steps, the longest has {int(lengths.lengths.max())}")
        return draw_from(windows, missing, draw)

    return draw_starts(count, propose, enumerate_rest)
