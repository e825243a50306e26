"""Stacks of frames, each frame kept once.

An observation of the last four camera frames repeats three of them in the next step. A segment of such stacks holds the
distinct frames, each packed alone, and for each stack the first of those it consists of. The layout is in
``docs/formats/replay.md``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CodecError

STACK = 4
"""The flag that a segment of stacks starts with."""
STACK_ROWS = 32
"""Stacks in a segment: only those frames of it are unpacked that are wanted."""

_HEAD = struct.Struct("<BBHH")
_LEAST_BYTES = 1024
_MOST_FRAMES = 64
_SAMPLES = 8


@dataclass(frozen=True)
class Pieces:
    """Packed images, each once, and which of them every row consists of."""

    images: Sequence[bytes | memoryview]
    index: NDArray[np.int64]  # [rows, images of a row]


def find_step(rows: NDArray[np.uint8], follows: NDArray[np.bool_], shape: Sequence[int]) -> int:
    """Tell by a few rows how many planes of the first axis are new in each; 0 if most do not repeat the one before.

    Args:
        rows: ``[rows, bytes of a row]``.
        follows: Whether a row comes after the one before it, in the same run.
        shape: Of one row.
    """
    pairs = np.flatnonzero(follows)
    planes = shape[0] if len(shape) > 2 else 0
    if not 1 < planes <= _MOST_FRAMES or not len(pairs):
        return 0
    pairs = pairs[np.linspace(0, len(pairs) - 1, min(len(pairs), _SAMPLES)).astype(np.int64)]
    for step in (number for number in range(1, planes) if planes % number == 0):
        nbytes = rows.shape[1] // planes * step
        if nbytes >= _LEAST_BYTES and 2 * int(_repeats(rows, pairs, nbytes).sum()) >= len(pairs):
            return step
    return 0


def _repeats(rows: NDArray[np.uint8], pairs: NDArray[np.int64], new: int) -> NDArray[np.bool_]:
    """Tell whether rows repeat the ones before them, moved on by `new` bytes."""
    return np.array([np.array_equal(rows[row, :-new], rows[row - 1, new:]) for row in pairs.tolist()], np.bool_)


def distinct_frames(
    rows: NDArray[np.uint8], follows: NDArray[np.bool_], count: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the distinct frames of stacks, in order, and how many each stack brings: one, or all of them.

    Args:
        rows: ``[stacks, bytes]``.
        follows: Whether a stack comes after the one before it, in the same segment.
        count: How many frames are in a stack.
    """
    size = rows.shape[1] // count
    same = np.zeros(len(rows), np.bool_)
    pairs = np.flatnonzero(follows)
    same[pairs] = _repeats(rows, pairs, size)
    wanted = np.ones((len(rows), count), np.bool_)
    wanted[same, :-1] = False
    return rows.reshape(len(rows), count, size)[wanted], wanted.sum(axis=1)


def join_stacks(images: Sequence[bytes], new: NDArray[np.int64], sizes: NDArray[np.int64], count: int) -> list[bytes]:
    """Make segments of packed frames.

    Args:
        images: All of them, in order.
        new: How many of them each stack brings.
        sizes: How many stacks each segment has.
        count: How many frames are in a stack.
    """
    payloads = []
    image = stack = 0
    for size in sizes.tolist():
        ends = np.cumsum(new[stack : stack + size])
        own = images[image : image + int(ends[-1])]
        start = _HEAD.size + 2 * size + 4 * len(own)
        places = start + np.cumsum([len(packed) for packed in own])
        if places[-1] >= 1 << 32:
            raise CodecError(f"{size} stacks take {places[-1]} bytes, which is more than a segment can hold")
        head = _HEAD.pack(STACK, count, size, len(own))
        payloads.append(b"".join([head, (ends - count).astype("<u2").tobytes(), places.astype("<u4").tobytes(), *own]))
        image, stack = image + len(own), stack + size
    return payloads


def frames_of_stack(segment: bytes | memoryview) -> int:
    """Return how many frames are in a stack of a segment; 0 if it holds no stacks."""
    return segment[1] if len(segment) > 1 and segment[0] == STACK else 0


def split_stacks(payloads: Sequence[bytes | memoryview], segment: NDArray[np.int64], row: NDArray[np.int64]) -> Pieces:
    """Find the packed frames of some stacks: those that several of them have in common are listed once.

    Args:
        payloads: Segments, all of stacks of as many frames.
        segment: In which of them each wanted stack is.
        row: ... and where in it.

    Raises:
        CodecError: If a segment is damaged.
    """
    try:
        heads = np.array([_HEAD.unpack_from(payload) for payload in payloads])
    except struct.error as error:
        raise CodecError(f"a segment of stacks is damaged ({error})") from error
    flags, counts, stacks, frames = heads.T
    count, lengths = int(counts[0]), _HEAD.size + 2 * stacks + 4 * frames
    # All heads as one array of 16-bit words: a call for each of them would take as long as unpacking.
    joined = b"".join([payload[:length] for payload, length in zip(payloads, lengths.tolist(), strict=True)])
    if (flags != STACK).any() or not count or (counts != count).any() or len(joined) != int(lengths.sum()):
        raise CodecError("a segment of stacks is cut off, or holds other stacks than it should")
    words = np.frombuffer(joined, "<u2").astype(np.int64)
    table = (np.cumsum(lengths) - lengths + _HEAD.size) // 2
    if (row >= stacks[segment]).any():
        raise CodecError("a segment holds fewer stacks than it should")
    first = words[table[segment] + row]
    if (first + count > frames[segment]).any():
        raise CodecError("a stack lies outside of its segment")

    def end_of(owner: NDArray[np.int64], frame: NDArray[np.int64]) -> NDArray[np.int64]:
        at = table[owner] + stacks[owner] + 2 * frame
        ends: NDArray[np.int64] = words[at] | words[at + 1] << 16
        return ends

    used = np.unique(segment)
    if (end_of(used, frames[used] - 1) != np.array([len(payloads[number]) for number in used.tolist()])).any():
        raise CodecError("a segment of stacks is cut off, or continues after its end")
    before = np.cumsum(frames) - frames
    distinct, index = np.unique((before[segment] + first)[:, None] + np.arange(count), return_inverse=True)
    owner = np.searchsorted(before, distinct, "right") - 1
    frame = distinct - before[owner]
    begin = np.where(frame > 0, end_of(owner, np.maximum(frame - 1, 0)), lengths[owner])
    views = [memoryview(payload) for payload in payloads]
    places = zip(owner.tolist(), begin.tolist(), end_of(owner, frame).tolist(), strict=True)
    return Pieces([views[number][low:high] for number, low, high in places], index.reshape(len(row), count))
