"""The `planes` codec: the bytes of words, one plane per place, each plane entropy-coded separately.

A float is sign, exponent and mantissa. The exponent compresses well, the mantissa is noise. Per block of 1 MiB:

1. *Drop zeros.* If a quarter of the words or more are zero, store a bit mask and encode only the others.
2. *Rotate* (floats). Move the sign to the bottom, so that the exponent starts at the top bit.
3. *Rebase.* Subtract the smallest exponent in use. Zeros and denormals keep exponent 0.
4. *Shift.* Shift out the leading zero bits that this leaves. The top byte then holds the few exponent bits in use and
   the leading mantissa bits, whose slight skew the entropy coder can use.
5. *Split* into byte planes, each stored, constant, packed or compressed; see `entropy`.

If the low half of each word is incompressible (typical for floats), it is stored verbatim, and steps 1 to 5 are applied
to the high halves: words half as wide, and much less to reassemble.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.base import Layout, WordCodec, Words, rotate_left, rotate_right
from slipstream.codecs.entropy import SAMPLE_BYTES, STORED, check_level, decode_plane, encode_plane, is_noise
from slipstream.errors import CodecError
from slipstream.memory import scratch

BLOCK_BYTES = 1 << 20

_BLOCK_HEADER = struct.Struct("<BBB")
# Kind of the plane in the top byte, size of its payload in the others.
_PLANE_HEADER = struct.Struct("<I")

_ROTATED = 1
_KEEPS_ZERO = 2
_SPARSE = 4
_HALVED = 8

# Share of zeros from which a mask pays.
_SPARSE_FROM = 0.25
# Share of mask bytes with both zeros and ones from which indices select faster than the mask.
_SCATTERED_FROM = 0.4
# Differences are split into halves if the largest has at least this many bits in its high half.
_ENOUGH_BITS = 5
_BYTES = np.dtype(np.uint8)


class WordKind(enum.Enum):
    """What words are, which decides the steps that suit them."""

    INTEGERS = enum.auto()
    """Only zeros are dropped: the bytes of an integer may have meanings that subtraction and shifts would blur."""
    DIFFERENCES = enum.auto()
    """Small unsigned numbers: rebased and shifted."""
    FLOATS = enum.auto()
    """Rotated, rebased and shifted."""


@dataclass
class _BlockHeader:
    """How to undo the steps that a block went through."""

    flags: int = 0
    base: int = 0
    shift: int = 0

    def pack(self) -> bytes:
        return _BLOCK_HEADER.pack(self.flags, self.base, self.shift)

    def is_valid(self, width: int) -> bool:
        """Return whether an encoder can have written this for words of `width` bytes."""
        if self.flags & _HALVED:
            # The other steps are in the header of the block of upper halves.
            return width > 1 and not self.flags & ~(_HALVED | _SPARSE) and not self.base and not self.shift
        return not self.flags & ~(_ROTATED | _KEEPS_ZERO | _SPARSE) and self.shift < 8 * width


@dataclass(frozen=True)
class PlaneCodec(WordCodec):
    """Base of the codecs that end in byte planes.

    Args:
        level: zstd level for planes with repeats, 1 to 22.
        floating: Whether words are floats; by default derived from the dtype. True for bfloat16 kept as uint16.
    """

    level: int = 1
    floating: bool | None = None

    def __post_init__(self) -> None:
        check_level(self.level)
        if self.floating not in (None, True, False):
            raise CodecError(f"floating is {self.floating!r}, expected true, false or null")

    def _is_floating(self, layout: Layout) -> bool:
        if self.floating is None:
            return layout.floating
        return self.floating


@dataclass(frozen=True)
class Planes(PlaneCodec):
    """Byte planes, each entropy-coded or stored: the codec for weights, optimizer state and other floats.

    Args:
        level: zstd level for planes with repeats, 1 to 22.
        floating: Whether words are floats; by default derived from the dtype. True for bfloat16 kept as uint16.
    """

    name: ClassVar[str] = "planes"

    def _encode(self, words: Words, layout: Layout) -> bytes:
        return b"".join(encode_words(words, word_kind(self._is_floating(layout)), self.level))

    def _decode(self, payload: memoryview, out: Words, layout: Layout) -> None:
        reader = BlockReader(payload)
        reader.read_words(out)
        reader.expect_end()


def word_kind(floating: bool) -> WordKind:
    """Return the kind of words that are values, not differences."""
    return WordKind.FLOATS if floating else WordKind.INTEGERS


def encode_words(words: Words, kind: WordKind, level: int) -> list[bytes]:
    """Encode words in blocks of 1 MiB; returns the parts of the payload."""
    block_words = BLOCK_BYTES // words.dtype.itemsize
    parts: list[bytes] = []
    for start in range(0, words.size, block_words):
        parts += _encode_block(words[start : start + block_words], kind, level)
    return parts


def _encode_block(words: Words, kind: WordKind, level: int) -> list[bytes]:
    """Encode up to 1 MiB of words as a header followed by byte planes."""
    # The header comes first in the payload but is complete last: each step below notes in it how to undo the step.
    header = _BlockHeader()
    parts: list[bytes] = []
    is_nonzero = _find_nonzero(words)
    if is_nonzero is not None:
        header.flags |= _SPARSE
        mask = np.packbits(is_nonzero)
        words = words[_selector(is_nonzero, mask)]
        parts += _plane_parts(*encode_plane(mask, level))
    if _low_half_is_noise(words, kind, level):
        header.flags |= _HALVED
        half = _half_memory(words)
        # Casting to a narrower type keeps the low half.
        np.copyto(half, words, casting="unsafe")
        parts += _plane_parts(STORED, half.tobytes())
        np.right_shift(words, 4 * words.dtype.itemsize, out=half, casting="unsafe")
        parts += _encode_block(half, kind, level)
    else:
        for plane in _byte_planes(_align(words, kind, header)):
            parts += _plane_parts(*encode_plane(plane, level))
    return [header.pack(), *parts]


def _find_nonzero(words: Words) -> NDArray[np.bool_] | None:
    """Return which words are not zero, or None if too few of them are zero for a mask to pay."""
    # Most floats have no zeros, and finding the minimum is twice as fast as counting them.
    if words.size and words.min():
        return None
    is_nonzero: NDArray[np.bool_] = words != 0
    if words.size - np.count_nonzero(is_nonzero) < _SPARSE_FROM * words.size:
        return None
    return is_nonzero


def _plane_parts(kind: int, payload: bytes) -> list[bytes]:
    return [_PLANE_HEADER.pack(kind << 24 | len(payload)), payload]


def _selector(is_nonzero: NDArray[np.bool_], mask: NDArray[np.uint8]) -> NDArray[Any]:
    """Return what selects the nonzero words: the mask itself, or indices, four times as fast if they are scattered."""
    # A mask byte of 0 or 255 is part of a run. Adding one maps these two to 1 and 0, all others above.
    num_mixed = np.count_nonzero((mask + np.uint8(1)) > 1)
    if num_mixed > _SCATTERED_FROM * mask.size:
        return np.flatnonzero(is_nonzero)
    return is_nonzero


def _low_half_is_noise(words: Words, kind: WordKind, level: int) -> bool:
    """Return whether the low halves of words are incompressible, and the high ones wide enough to be encoded alone."""
    width = words.dtype.itemsize
    # Too narrow to be split, or too few words to tell or to matter.
    if width < 4 or words.size < SAMPLE_BYTES:
        return False
    # The leading bits of differences are skewed: small numbers are more frequent. If only a few of these bits were in
    # the high half, the others would be stored verbatim with the low half.
    if kind is WordKind.DIFFERENCES and int(words.max()).bit_length() < 4 * width + _ENOUGH_BITS:
        return False
    start = (words.size - SAMPLE_BYTES) // 2
    sample = words[start : start + SAMPLE_BYTES].view(np.uint8).reshape(-1, width)
    # Try the highest place first: it is the most likely to be compressible, and then the others need no test.
    places = reversed(range(width // 2))
    return all(is_noise(np.ascontiguousarray(sample[:, place]), level) for place in places)


def _align(words: Words, kind: WordKind, header: _BlockHeader) -> Words:
    """Rotate, rebase and shift words into scratch memory; notes in the header how to undo it."""
    width = words.dtype.itemsize
    if width == 1 or kind is WordKind.INTEGERS or not words.size:
        return words
    work = scratch("work", words.size, words.dtype)
    if kind is WordKind.FLOATS:
        header.flags |= _ROTATED
        rotate_left(words, work)
    else:
        np.copyto(work, words)
    _rebase(work, header)
    # The leading zero bits that all words share. If all words are zero, that is every bit, and no shift is needed.
    header.shift = (8 * width - int(work.max()).bit_length()) % (8 * width)
    if header.shift:
        # A multiplication shifts to the left, and is faster than a shift.
        np.multiply(work, 1 << header.shift, out=work)
    return work


def _rebase(work: Words, header: _BlockHeader) -> None:
    """Subtract the smallest top byte in use, in place."""
    top_place = 8 * work.dtype.itemsize - 8
    base = int(work.min()) >> top_place
    if base:
        header.base = base
        np.subtract(work, base << top_place, out=work)
        return
    tops = scratch("plane", work.size, _BYTES)
    np.right_shift(work, top_place, out=tops, casting="unsafe")
    # Some top bytes are zero and stay so. The smallest of the others becomes 1, so that decoding can tell them apart.
    # Subtracting 1 wraps zeros around to 255, which removes them from the minimum. 255 then means: there are no others.
    np.subtract(tops, 1, out=tops)
    base = int(tops.min())
    if base in (0, 255):
        return
    header.base = base
    header.flags |= _KEEPS_ZERO
    np.subtract(work, _where_top(work, base), out=work)


def _undo_align(words: Words, header: _BlockHeader) -> None:
    """Undo shift, rebase and rotate in place."""
    if header.shift:
        np.right_shift(words, header.shift, out=words)
    if header.base and header.flags & _KEEPS_ZERO:
        np.add(words, _where_top(words, header.base), out=words)
    elif header.base:
        np.add(words, header.base << (8 * words.dtype.itemsize - 8), out=words)
    if header.flags & _ROTATED:
        rotate_right(words, words)


def _where_top(words: Words, base: int) -> Words:
    """Return `base` as the top byte wherever the top byte of a word is not zero, and zero elsewhere."""
    top_place = 8 * words.dtype.itemsize - 8
    has_top = scratch("plane", words.size, np.dtype(np.bool_))
    np.greater_equal(words, 1 << top_place, out=has_top)
    bases: Words = scratch("carry", words.size, words.dtype)
    np.multiply(has_top.view(np.uint8), base << top_place, out=bases, dtype=words.dtype)
    return bases


def _half_memory(words: Words) -> Words:
    """Return memory for half of each word."""
    width = words.dtype.itemsize
    return scratch(f"half {width}", words.size, np.dtype(f"u{width // 2}"))


def _byte_planes(words: Words) -> Iterator[NDArray[np.uint8]]:
    """Yield the byte planes of words, least significant first. Each is valid until the next one.

    Words are halved until they are bytes: converting to the next narrower type is twice as fast as directly to bytes.
    """
    width = words.dtype.itemsize
    if width == 1:
        yield words
        return
    half = _half_memory(words)
    np.copyto(half, words, casting="unsafe")
    yield from _byte_planes(half)
    shifted = scratch(f"upper {width}", words.size, words.dtype)
    np.right_shift(words, 4 * width, out=shifted)
    np.copyto(half, shifted, casting="unsafe")
    yield from _byte_planes(half)


def _join_planes(planes: list[NDArray[np.uint8]], out: Words) -> None:
    """Undo `_byte_planes`. A plane of one byte stands for as many equal bytes as there are words."""
    width = out.dtype.itemsize
    if width == 1:
        out[:] = planes[0]
        return
    # NumPy widens a few thousand words at a time while it shifts them, in the fastest cache: half as many passes over
    # memory as widening first. Both halves use the same memory, one after the other.
    high = _join_half(planes[width // 2 :], out)
    np.left_shift(high, 4 * width, out=out, dtype=out.dtype)
    low = _join_half(planes[: width // 2], out)
    np.bitwise_or(out, low, out=out)


def _join_half(planes: list[NDArray[np.uint8]], words: Words) -> Words:
    """Return the words, half as wide as `words`, that some planes make."""
    if len(planes) == 1:
        return planes[0]
    half = _half_memory(words)
    _join_planes(planes, half)
    return half


class BlockReader:
    """Decodes blocks from a payload, one after another, and never reads beyond its end.

    Args:
        payload: What `encode_words` returned, joined.
        start: Where the first block starts.
    """

    def __init__(self, payload: memoryview, start: int = 0) -> None:
        self._payload = payload
        self._position = start

    def read_words(self, out: Words) -> None:
        """Fill `out` from the next blocks.

        Raises:
            CodecError: If the payload is damaged or ends early.
        """
        block_words = BLOCK_BYTES // out.dtype.itemsize
        for start in range(0, out.size, block_words):
            self._read_block(out[start : start + block_words])

    def expect_end(self) -> None:
        """Raise `CodecError` unless the whole payload was read."""
        rest = len(self._payload) - self._position
        if rest:
            raise CodecError(f"payload has {len(self._payload)} bytes, {rest} more than its content needs")

    def _read_block(self, out: Words) -> None:
        """Undo `_encode_block`."""
        header = self._read_header(out.dtype.itemsize)
        words = out
        if header.flags & _SPARSE:
            mask_bytes = -(-out.size // 8)
            mask = self._read_plane(mask_bytes)
            # A constant mask is a single byte.
            whole_mask = np.broadcast_to(mask, mask_bytes)
            is_nonzero = np.unpackbits(whole_mask, count=out.size).view(np.bool_)
            # The block of high halves may use the same memory: nothing is written here before that block is decoded.
            words = scratch("work", int(np.count_nonzero(is_nonzero)), out.dtype)
        if header.flags & _HALVED:
            self._read_halves(words)
        else:
            planes = [self._read_plane(words.size) for _ in range(words.dtype.itemsize)]
            _join_planes(planes, words)
            _undo_align(words, header)
        if header.flags & _SPARSE:
            out.fill(0)
            out[_selector(is_nonzero, mask)] = words

    def _read_halves(self, out: Words) -> None:
        """Fill `out` from low halves that are stored and a block of high halves."""
        width = out.dtype.itemsize
        plane = self._read_plane(out.nbytes // 2)
        high = _half_memory(out)
        low = scratch(f"lower {width}", out.size, high.dtype)
        # The payload is not aligned: copying it first is faster than reading unaligned words.
        np.copyto(low.view(np.uint8), plane)
        self._read_block(high)
        np.left_shift(high, 4 * width, out=out, dtype=out.dtype)
        np.bitwise_or(out, low, out=out)

    def _read_header(self, width: int) -> _BlockHeader:
        header = _BlockHeader(*self._unpack(_BLOCK_HEADER))
        if not header.is_valid(width):
            raise CodecError(f"block header has flags {header.flags} and shift {header.shift}, which is invalid")
        return header

    def _read_plane(self, size: int) -> NDArray[np.uint8]:
        """Return the next plane: `size` bytes, or its only value if it is constant."""
        (tag,) = self._unpack(_PLANE_HEADER)
        start = self._position
        stop = start + (tag & 0xFFFFFF)
        if stop > len(self._payload):
            raise CodecError(f"payload of {len(self._payload)} bytes ends inside a plane")
        self._position = stop
        return decode_plane(tag >> 24, self._payload[start:stop], size)

    def _unpack(self, header: struct.Struct) -> tuple[int, ...]:
        """Read a fixed-size header."""
        start = self._position
        stop = start + header.size
        if stop > len(self._payload):
            raise CodecError(f"payload of {len(self._payload)} bytes ends inside a header")
        self._position = stop
        return header.unpack(self._payload[start:stop])
