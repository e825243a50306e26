"""Store an observation and its ``next`` once: the only module that knows ``next[t] == root[t + 1]``.

TorchRL keeps every observation twice: at the root as what step ``t`` saw, and under ``next`` as what step ``t - 1`` led
to. The two are equal, bit for bit, except where one episode ended and another began. Such a step is called a *break*.

A rollout uses `SharedNext`: one array of ``T + 1`` steps, a mask of the breaks, and the values of ``next`` there::

    root        a0 a1 a2 | b0 b1         whole       a0 a1 a2 b0 b1 b2
    next        a1 a2 a3 | b1 b2         breaks       0  0  1  0
                         ^ break         exceptions  a3

A replay buffer uses `frame_positions`: all observations in one sequence, in which the ``next`` of position ``p`` is at
``p + 1``. At a break an extra position holds the exception::

    sequence    a0 a1 a2 a3 b0 b1 b2

Equality is always tested on bits, so NaN equals the same NaN and ``-0.0`` differs from ``0.0``. Arrays have the shape
``[environments, steps, ...]``. Dtypes that NumPy lacks are carried by unsigned integers of the same size. Nothing here
imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

NEXT = "next"
"""The key under which TorchRL keeps what a step led to."""

MAX_BREAK_SHARE = 0.25
"""Sharing pays up to this share of breaks; beyond it `SharedNext.of` returns None."""

# Steps of at most this many words are compared word by word.
_NARROW_STEP = 8


def find_breaks(root: NDArray[Any], after: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where ``after[:, t]`` differs from ``root[:, t + 1]`` in any bit, as ``[environments, steps - 1]``.

    Args:
        root: Observations ``[environments, steps, ...]``.
        after: What each step led to; same dtype and shape as `root`.
    """
    return _differing_steps(root[:, 1:], after[:, :-1])


def is_transposed(root: NDArray[Any], after: NDArray[Any]) -> bool:
    """Return whether ``next`` follows along the first axis, which means that time comes before environments.

    False if `root` hardly changes along that axis: then it seems to follow along any axis.
    """
    if len(root) < 2 or not root.size:
        return False
    if not _is_rare(find_breaks(root.swapaxes(0, 1), after.swapaxes(0, 1))):
        return False
    return not _is_rare(_differing_steps(root[1:], root[:-1]))


@dataclass(frozen=True)
class SharedNext:
    """An observation and its ``next``, stored once.

    A slice of the environments is a `SharedNext` too; `exception_rows` returns the exceptions that belong to it.

    Attributes:
        whole: ``[environments, steps + 1, ...]``: all steps of the root, then the last step of ``next``.
        breaks: ``[environments, steps - 1]``: where ``next`` differs from the following step.
        exceptions: ``[number of breaks, ...]``: the values of ``next`` at the breaks, in the order of `breaks`.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> import numpy as np
        >>> root = np.array([[1, 2, 7, 8, 9]])
        >>> after = np.array([[2, 3, 8, 9, 10]])
        >>> shared = SharedNext.of(root, after)
        >>> shared.whole, shared.exceptions
        (array([[ 1,  2,  7,  8,  9, 10]]), array([3]))
        >>> shared.next()
        array([[ 2,  3,  8,  9, 10]])
    """

    whole: NDArray[Any]
    breaks: NDArray[np.bool_]
    exceptions: NDArray[Any]

    def __post_init__(self) -> None:
        if self.whole.ndim < 2 or not self.whole.shape[1]:
            raise ValueError(f"observations have shape {list(self.whole.shape)}, expected [environments, steps + 1]")
        num_envs = len(self.whole)
        num_breakable = max(0, self.num_steps - 1)
        if self.breaks.dtype != np.bool_ or self.breaks.shape != (num_envs, num_breakable):
            raise ValueError(
                f"the mask of exceptions is {self.breaks.dtype}{list(self.breaks.shape)}, "
                f"expected bool{[num_envs, num_breakable]}"
            )
        expected = (int(np.count_nonzero(self.breaks)), *self.whole.shape[2:])
        if self.exceptions.dtype != self.whole.dtype or self.exceptions.shape != expected:
            raise ValueError(
                f"the mask marks {expected[0]} exceptions, but their values are "
                f"{self.exceptions.dtype}{list(self.exceptions.shape)}, expected {self.whole.dtype}{list(expected)}"
            )

    @classmethod
    def of(cls, root: NDArray[Any], after: NDArray[Any]) -> Self | None:
        """Copy an observation and its ``next`` into shared storage.

        Args:
            root: Observations ``[environments, steps, ...]``.
            after: What each step led to.

        Returns:
            The shared storage, in new memory; or None if sharing does not pay: the two differ in shape or dtype, hold
            no elements, or break more often than `MAX_BREAK_SHARE`.
        """
        if root.dtype != after.dtype or root.shape != after.shape or not root.size:
            return None
        breaks = find_breaks(root, after)
        if not _is_rare(breaks):
            return None
        num_envs, num_steps = root.shape[:2]
        whole = np.empty((num_envs, num_steps + 1, *root.shape[2:]), root.dtype)
        whole[:, :-1] = root
        whole[:, -1] = after[:, -1]
        return cls(whole, breaks, after[:, :-1][breaks])

    @property
    def num_steps(self) -> int:
        """Number of steps of the root, and of ``next``."""
        num_whole: int = self.whole.shape[1]
        return num_whole - 1

    def next(self, steps: slice = slice(None)) -> NDArray[Any]:
        """Return what some consecutive steps led to, in new memory."""
        start, stop, _ = steps.indices(self.num_steps)
        values = self.whole[:, start + 1 : max(start, stop) + 1].copy()
        put_exceptions(values, self.breaks, self.exceptions, slice(start, stop))
        return values


def put_exceptions(values: NDArray[Any], breaks: NDArray[np.bool_], exceptions: NDArray[Any], steps: slice) -> None:
    """Replace what consecutive steps seem to have led to where it is an exception.

    Args:
        values: ``[environment, step, ...]``: for each step the following one, of all environments of `breaks`.
        breaks: As in `SharedNext`.
        exceptions: As in `SharedNext`.
        steps: Which steps `values` has.
    """
    envs, places = np.nonzero(breaks)
    is_inside = (steps.start <= places) & (places < steps.stop)
    values[envs[is_inside], places[is_inside] - steps.start] = exceptions[is_inside]


def exception_rows(breaks: NDArray[np.bool_], envs: slice) -> slice:
    """Return which rows of `SharedNext.exceptions` belong to some consecutive environments."""
    start, stop, _ = envs.indices(len(breaks))
    num_before = int(np.count_nonzero(breaks[:start]))
    num_inside = int(np.count_nonzero(breaks[start:stop]))
    return slice(num_before, num_before + num_inside)


def exception_numbers(breaks: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the row of `SharedNext.exceptions` for each step, or -1, as ``[environments, steps]``."""
    num_envs, num_breakable = breaks.shape
    # The last step is never a break: `whole` holds what it led to.
    numbers = np.full((num_envs, num_breakable + 1), -1, np.int32)
    numbers[:, :-1][breaks] = np.arange(np.count_nonzero(breaks), dtype=np.int32)
    return numbers


def gather_steps(whole: NDArray[Any], envs: NDArray[np.intp], steps: NDArray[np.intp]) -> NDArray[Any]:
    """Return scattered steps of contiguous ``[environments, steps, ...]``; faster than ``whole[envs, steps]``."""
    num_envs, num_steps, *row_shape = whole.shape
    flat = whole.reshape(num_envs * num_steps, *row_shape)
    rows: NDArray[Any] = flat.take(envs * num_steps + steps, axis=0)
    return rows


def gather_next(
    whole: NDArray[Any],
    numbers: NDArray[np.int32],
    exceptions: NDArray[Any],
    envs: NDArray[np.intp],
    steps: NDArray[np.intp],
) -> NDArray[Any]:
    """Return what scattered steps led to; `SharedNext.next` does the same for consecutive ones.

    Args:
        whole: As in `SharedNext`, of all environments or of some.
        numbers: What `exception_numbers` returned, for the environments of `whole`.
        exceptions: As in `SharedNext`, of all environments.
        envs: The environment of each step, as an index into `whole`.
        steps: The number of each step.
    """
    values = gather_steps(whole, envs, steps + 1)
    rows = numbers[envs, steps]
    # Most minibatches touch few exceptions, or none.
    places = np.flatnonzero(rows >= 0)
    if places.size:
        values[places] = exceptions[rows[places]]
    return values


def copy_next(whole: NDArray[Any], numbers: NDArray[np.int32], exceptions: NDArray[Any], out: NDArray[Any]) -> None:
    """Copy what all steps of some environments led to into `out`; takes half the time of `gather_next`.

    Args:
        whole: As in `SharedNext`, of all environments or of some.
        numbers: What `exception_numbers` returned, for the environments of `whole`.
        exceptions: As in `SharedNext`, of all environments.
        out: ``[environments, steps, ...]``: where the values go.
    """
    out[:] = whole[:, 1:]
    envs, steps = np.nonzero(numbers >= 0)
    out[envs, steps] = exceptions[numbers[envs, steps]]


@dataclass(frozen=True)
class FramePositions:
    """Where observations lie in a sequence in which the ``next`` of position ``p`` is position ``p + 1``.

    Attributes:
        steps: ``[streams, steps]``: the position of each step.
        extras: The positions inserted for the exceptions, in the order of the breaks.
        counts: ``[streams]``: the number of positions of each stream.
    """

    steps: NDArray[np.int64]
    extras: NDArray[np.int64]
    counts: NDArray[np.int64]


def frame_positions(breaks: NDArray[np.bool_]) -> FramePositions:
    """Return positions for steps whose streams follow each other, with one more position after each break.

    Args:
        breaks: ``[streams, steps]``: where the following step is not what a step led to. This includes the last step of
            each stream, because nothing of that stream follows it.
    """
    flat = breaks.reshape(-1)
    # Every break inserts a position after its step, so it moves all later steps by one, but not its own.
    num_breaks_before: NDArray[np.int64] = np.cumsum(flat) - flat
    positions = np.arange(flat.size) + num_breaks_before
    extras = positions[flat] + 1
    counts = breaks.shape[1] + np.count_nonzero(breaks, axis=1)
    return FramePositions(positions.reshape(breaks.shape), extras, counts)


def _is_rare(breaks: NDArray[np.bool_]) -> bool:
    return int(np.count_nonzero(breaks)) <= MAX_BREAK_SHARE * breaks.size


def _differing_steps(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.bool_]:
    """Compare arrays ``[environments, steps, ...]`` bit by bit; returns ``[environments, steps]``."""
    unequal = _as_words(one) != _as_words(other)
    num_words = unequal.shape[2]
    if num_words > _NARROW_STEP:
        differing: NDArray[np.bool_] = unequal.any(axis=2)
        return differing
    # NumPy's reduction costs more per step than comparing a few words: for [512, 32, 8] floats this loop takes a
    # third of the time.
    differing = np.zeros(unequal.shape[:2], np.bool_)
    for word in range(num_words):
        differing |= unequal[:, :, word]
    return differing


def _as_words(array: NDArray[Any]) -> NDArray[Any]:
    """View each step as the widest unsigned words that divide it; copies only steps that are not contiguous."""
    num_items = math.prod(array.shape[2:])
    step_bytes = num_items * array.dtype.itemsize
    flat = array.reshape(*array.shape[:2], num_items)
    # NumPy changes the width of words only along a contiguous last axis.
    if flat.strides[2] != array.dtype.itemsize:
        flat = flat.copy()
    for width in (8, 4, 2):
        if step_bytes % width == 0:
            return flat.view(f"u{width}")
    return flat.view(np.uint8)
