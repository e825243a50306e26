"""The `planes` codec: byte planes of the element type, each coded on its own.

A float is sign, exponent and mantissa. Its exponent is nearly free, its mantissa is noise. Per block of 1 MiB:

1. *drop zeros*: where a quarter of the words or more are zero, a bit mask tells which, and only the others go on;
2. *rotate* (floats): the sign moves to the bottom, so that the exponent starts at the top bit;
3. *rebase*: the smallest exponent in use is subtracted from all; zeros and denormals keep exponent 0;
4. *shift*: the leading zero bits that leaves are shifted out, so that the top byte holds the few exponent bits in use
   **and** the leading mantissa bits, whose slight skew an entropy coder can then use;
5. *split* into byte planes, each stored, constant or entropy-coded.

Where the lower halves of words are noise, as those of floats are as a rule, they are stored as they are, and all of the
above is done to the upper halves alone: words half as wide, and hardly anything to put together again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.base import Layout, WordCodec, Words, rotate_left, rotate_right
from slipstream.codecs.entropy import SAMPLE_BYTES, STORED, check_level, is_noise, pack_plane, unpack_plane
from slipstream.errors import CodecError
from slipstream.memory import scratch

BLOCK_BYTES = 1 << 20

_BLOCK_HEADER = struct.Struct("<BBB")
_PLANE_HEADER = struct.Struct("<I")
_ROTATED, _KEEPS_ZERO, _SPARSE, _HALVED = 1, 2, 4, 8
_SPARSE_FROM = 0.25
_ENOUGH_BITS = 5
_BYTES = np.dtype(np.uint8)


@dataclass(frozen=True)
class PlaneSettings:
    """Settings shared by the codecs that end in byte planes.

    Args:
        level: zstd level for planes in which matches pay, 1 to 22.
        floating: Whether words are floats; by default told from the dtype. Set it for bfloat16 kept as uint16.
    """

    level: int = 1
    floating: bool | None = None

    def __post_init__(self) -> None:
        check_level(self.level)
        if self.floating not in (None, True, False):
            raise CodecError(f"floating is {self.floating!r}, expected true, false or null")


class PlaneCodec(PlaneSettings, WordCodec):
    """Base of the codecs that end in byte planes."""

    def _is_floating(self, layout: Layout) -> bool:
        return layout.floating if self.floating is None else self.floating


@dataclass(frozen=True)
class Planes(PlaneCodec):
    """Byte planes, each entropy-coded or stored: the codec for weights, optimizer state and other floats."""

    name: ClassVar[str] = "planes"

    def _encode(self, words: Words, layout: Layout) -> bytes:
        floating = self._is_floating(layout)
        return b"".join(pack_words(words, rotate=floating, squeeze=floating, level=self.level))

    def _decode(self, payload: memoryview, out: Words, layout: Layout) -> None:
        expect_end(payload, unpack_words(payload, out))


def expect_end(payload: memoryview, used: int) -> None:
    """Raise `CodecError` unless decoding used up the whole payload."""
    if used != len(payload):
        raise CodecError(f"payload holds {len(payload)} bytes, {len(payload) - used} more than its content needs")


def pack_words(words: Words, *, rotate: bool, squeeze: bool, level: int) -> list[bytes]:
    """Pack words block by block.

    Args:
        words: The words.
        rotate: Move the top bit to the bottom first.
        squeeze: Rebase and shift, which suits floats and differences; integers may carry meaning in their bytes.
        level: zstd level.

    Returns:
        Pieces to be joined.
    """
    step = BLOCK_BYTES // words.dtype.itemsize
    pieces: list[bytes] = []
    for start in range(0, words.size, step):
        _pack_block(words[start : start + step], rotate, squeeze, level, pieces)
    return pieces


def unpack_words(payload: memoryview, out: Words) -> int:
    """Fill `out` from the front of `payload`; returns how many bytes that took."""
    step = BLOCK_BYTES // out.dtype.itemsize
    position = 0
    for start in range(0, out.size, step):
        position = _unpack_block(payload, position, out[start : start + step])
    return position


def _pack_block(words: Words, rotate: bool, squeeze: bool, level: int, pieces: list[bytes]) -> None:
    width = words.dtype.itemsize
    flags = base = shift = 0
    mask = words != 0
    if words.size - np.count_nonzero(mask) >= _SPARSE_FROM * words.size:
        flags |= _SPARSE
        bits = np.packbits(mask)
        words = words[_index(mask, bits)]
    halved = _is_halved(words, rotate, squeeze, level)
    if halved:
        flags |= _HALVED
    elif width > 1 and (rotate or squeeze) and words.size:
        work = scratch("work", words.size, words.dtype)
        if rotate:
            flags |= _ROTATED
            rotate_left(words, work)
        else:
            np.copyto(work, words)
        if squeeze:
            base, keeps_zero = _rebase(work)
            flags |= _KEEPS_ZERO if keeps_zero else 0
            shift = (8 * width - int(work.max()).bit_length()) % (8 * width)
            if shift:
                np.multiply(work, 1 << shift, out=work)  # as a shift to the left, and faster
        words = work
    pieces.append(_BLOCK_HEADER.pack(flags, base, shift))
    if flags & _SPARSE:
        _add_plane(bits, level, pieces)
    if halved:
        half = _half(words)
        np.copyto(half, words, casting="unsafe")
        pieces += (_PLANE_HEADER.pack(STORED << 24 | half.nbytes), half.tobytes())
        np.right_shift(words, 4 * width, out=half, casting="unsafe")
        _pack_block(half, rotate, squeeze, level, pieces)
        return
    for plane in _split(words):
        _add_plane(plane, level, pieces)


def _is_halved(words: Words, rotate: bool, squeeze: bool, level: int) -> bool:
    """Tell whether the lower halves of words are noise, and the upper ones wide enough to be coded alone."""
    width = words.dtype.itemsize
    if width < 4 or words.size < SAMPLE_BYTES:
        return False  # too few to tell, or to matter
    if squeeze and not rotate and int(words.max()).bit_length() < 4 * width + _ENOUGH_BITS:
        return False  # the upper half alone would miss how unlike each other the leading bits are
    start = (words.size - SAMPLE_BYTES) // 2
    sample = words[start : start + SAMPLE_BYTES].view(np.uint8).reshape(-1, width)
    return all(is_noise(np.ascontiguousarray(sample[:, place]), level) for place in reversed(range(width // 2)))


def _half(words: Words) -> Words:
    """Return memory for half of each word."""
    width = words.dtype.itemsize
    return scratch(f"half {width}", words.size, np.dtype(f"u{width // 2}"))


def _split(words: Words) -> Iterator[NDArray[np.uint8]]:
    """Yield the byte planes of words, least significant first; each is good until the next.

    Words are halved until they are bytes: converting to the next narrower type is twice as fast as to bytes at once.
    """
    width = words.dtype.itemsize
    if width == 1:
        yield words
        return
    half = _half(words)
    np.copyto(half, words, casting="unsafe")
    yield from _split(half)
    shifted = scratch(f"upper {width}", words.size, words.dtype)
    np.right_shift(words, 4 * width, out=shifted)
    np.copyto(half, shifted, casting="unsafe")
    yield from _split(half)


def _join(planes: list[NDArray[np.uint8]], out: Words) -> None:
    """Undo `_split`; a plane of one byte stands for one of as many bytes as there are words.

    NumPy widens what it shifts and joins a few thousand words at a time, in the fastest cache: half as many passes over
    memory as widening first.
    """
    width = out.dtype.itemsize
    if width == 1:
        out[:] = planes[0]
        return

    def half_of(some: list[NDArray[np.uint8]]) -> Words:
        if width == 2:
            return some[0]
        half = _half(out)
        _join(some, half)
        return half

    np.left_shift(half_of(planes[width // 2 :]), 4 * width, out=out, dtype=out.dtype)
    np.bitwise_or(out, half_of(planes[: width // 2]), out=out)


def _add_plane(plane: NDArray[np.uint8], level: int, pieces: list[bytes]) -> None:
    kind, packed = pack_plane(plane, level)
    pieces += (_PLANE_HEADER.pack(kind << 24 | len(packed)), packed)


def _rebase(work: Words) -> tuple[int, bool]:
    """Subtract the smallest top byte in place; returns it, and whether words with a zero top byte were left alone."""
    top_shift = 8 * work.dtype.itemsize - 8
    tops = scratch("plane", work.size, _BYTES)
    np.right_shift(work, top_shift, out=tops, casting="unsafe")
    base = int(tops.min())
    if base:
        np.subtract(work, base << top_shift, out=work)
        return base, False
    np.subtract(tops, 1, out=tops)  # zero wraps round to 255, so that the minimum is over the others
    base = int(tops.min())
    if base in (0, 255):
        return 0, False
    np.subtract(work, _where_top(work, base), out=work)
    return base, True


def _where_top(words: Words, base: int) -> Words:
    """Return `base` in the top byte wherever a word has a top byte that is not zero, and zero elsewhere."""
    top_shift = 8 * words.dtype.itemsize - 8
    has_top = np.greater_equal(words, 1 << top_shift, out=scratch("plane", words.size, np.dtype(np.bool_)))
    given: Words = scratch("carry", words.size, words.dtype)
    np.multiply(has_top.view(np.uint8), base << top_shift, out=given, dtype=words.dtype)
    return given


def _unpack_block(payload: memoryview, position: int, out: Words) -> int:
    width = out.dtype.itemsize
    end = position + _BLOCK_HEADER.size
    if end > len(payload):
        raise CodecError(f"payload of {len(payload)} bytes ends inside a block header")
    flags, base, shift = _BLOCK_HEADER.unpack(payload[position:end])
    if flags & _HALVED and width > 1:
        known = not (flags & ~(_HALVED | _SPARSE) or base or shift)
    else:
        known = not flags & ~(_ROTATED | _KEEPS_ZERO | _SPARSE) and shift < 8 * width
    if not known:
        raise CodecError(f"block header has flags {flags} and shift {shift}, which this codec does not write")
    words = out
    if flags & _SPARSE:
        bits, end = _next_plane(payload, end, -(-out.size // 8))
        mask = np.unpackbits(np.broadcast_to(bits, -(-out.size // 8)), count=out.size).view(np.bool_)
        words = scratch("work", int(np.count_nonzero(mask)), out.dtype)
    if flags & _HALVED:
        end = _unpack_halves(payload, end, words)
    else:
        planes: list[NDArray[np.uint8]] = []
        for _ in range(width):
            plane, end = _next_plane(payload, end, words.size)
            planes.append(plane)
        _join(planes, words)
        _restore(words, flags, base, shift)
    if flags & _SPARSE:
        out.fill(0)
        out[_index(mask, bits)] = words
    return end


def _index(mask: NDArray[np.bool_], bits: NDArray[np.uint8]) -> NDArray[Any]:
    """Return what picks the words of a mask: itself, or their places, four times as fast where it has no runs."""
    mixed = np.count_nonzero((bits + np.uint8(1)) > 1)  # neither no bit of eight nor all
    return np.flatnonzero(mask) if mixed > 0.4 * bits.size else mask


def _unpack_halves(payload: memoryview, position: int, out: Words) -> int:
    plane, end = _next_plane(payload, position, out.nbytes // 2)
    half = _half(out)
    lower = scratch(f"lower {out.dtype.itemsize}", out.size, half.dtype)
    np.copyto(lower.view(np.uint8), plane)  # to where words may be read fast
    end = _unpack_block(payload, end, half)
    np.left_shift(half, 4 * out.dtype.itemsize, out=out, dtype=out.dtype)
    np.bitwise_or(out, lower, out=out)
    return end


def _next_plane(payload: memoryview, position: int, size: int) -> tuple[NDArray[np.uint8], int]:
    """Return the plane at `position`, or its only value if it is constant, and where the next one starts."""
    start = position + _PLANE_HEADER.size
    if start > len(payload):
        raise CodecError(f"payload of {len(payload)} bytes ends inside a plane header")
    (tag,) = _PLANE_HEADER.unpack(payload[position:start])
    end = start + (tag & 0xFFFFFF)
    if end > len(payload):
        raise CodecError(f"payload of {len(payload)} bytes ends inside a plane")
    return unpack_plane(tag >> 24, payload[start:end], size), end


def _restore(out: Words, flags: int, base: int, shift: int) -> None:
    """Undo shift, rebase and rotate in place."""
    top_shift = 8 * out.dtype.itemsize - 8
    if shift:
        np.right_shift(out, shift, out=out)
    if base and flags & _KEEPS_ZERO:
        np.add(out, _where_top(out, base), out=out)
    elif base:
        np.add(out, base << top_shift, out=out)
    if flags & _ROTATED:
        rotate_right(out, out)
