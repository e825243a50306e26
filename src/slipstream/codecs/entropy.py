"""Entropy coding of one byte plane: stored, constant, bits, or a zstd frame, decided by trying a sample.

A plane whose bytes use some of their bits only (flags, small numbers, the lowest bytes of words that were shifted) may
be stored as those bits: smaller than Huffman codes, whose symbols take a whole bit at least, and many times as fast.
Bits side by side are taken four, two and one at a time, each from places far apart: to put them together again takes a
few operations on whole arrays.

Two zstd settings compete. Match finding (an ordinary level) wins on planes with repeats, as in time series. On the
exponent plane of weights it loses to plain Huffman coding by 20 %, because short accidental matches cost more than the
literals they replace: there the frame is made with match finding all but switched off. Both are ordinary frames.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from slipstream.errors import CodecError
from slipstream.memory import scratch

STORED, FRAME, CONSTANT, BITS, PARTS = 0, 1, 2, 3, 4

SAMPLE_BYTES = 4 << 10
"""How much of a plane is tried."""

_HUFFMAN_LEVEL = 0
# A plane that shrinks by less than this is stored: decoding it would cost more than reading the bytes.
_WORTHWHILE = 0.985
# One that shrinks to less than this does so by repeats: symbols take an eighth of a byte at least.
_MATCHED = 0.125

_contexts = threading.local()


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """Return this thread's compressor; contexts are costly to build and must not be shared between threads."""
    cache: dict[int, zstandard.ZstdCompressor] = _contexts.__dict__.setdefault("compressors", {})
    if level not in cache:
        if level == _HUFFMAN_LEVEL:
            parameters = zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=18, target_length=0
            )
            cache[level] = zstandard.ZstdCompressor(compression_params=parameters)
        else:
            cache[level] = zstandard.ZstdCompressor(level=level)
    return cache[level]


def check_level(level: int) -> None:
    """Raise `CodecError` unless `level` is one zstd has."""
    if not isinstance(level, int) or isinstance(level, bool) or not 1 <= level <= zstandard.MAX_COMPRESSION_LEVEL:
        raise CodecError(
            f"zstd level is {level!r}, expected a whole number from 1 to {zstandard.MAX_COMPRESSION_LEVEL}"
        )


def compress_zstd(data: NDArray[np.uint8], level: int) -> bytes:
    """Compress bytes into one zstd frame that records its content size."""
    return _compressor(level).compress(data.data)


def decompress_zstd(frame: memoryview, size: int) -> bytes:
    """Decompress one frame that must hold exactly `size` bytes; memory is bounded by `size` whatever the frame claims.

    Raises:
        CodecError: if the frame is damaged, of another size, or followed by anything else.
    """
    try:
        claimed = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd frame header is damaged ({error})") from error
    if claimed != size:
        raise CodecError(f"zstd frame claims {claimed} bytes of content, expected {size}")
    try:
        content = decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd frame is damaged ({error})") from error
    if len(content) != size:
        raise CodecError(f"zstd frame holds {len(content)} bytes, expected {size}")
    return content


def decompress_into(out: memoryview, frames: Sequence[bytes | memoryview], size: int, *, skip: int = 0) -> None:
    """Decompress many small frames, one after another into `out`: as `decompress_zstd`, in as tight a loop as can be.

    Args:
        out: Memory for all of them.
        frames: One zstd frame each.
        size: How many bytes each must hold.
        skip: How many bytes stand before each frame.

    Raises:
        CodecError: if a frame is damaged, of another size, or followed by anything else.
    """
    unpack, claimed = decompressor().decompress, zstandard.frame_content_size
    place = 0
    try:
        for frame in frames:
            body = memoryview(frame)[skip:]
            if claimed(body) != size:
                raise CodecError(f"zstd frame claims {claimed(body)} bytes of content, expected {size}")
            out[place : place + size] = unpack(body, size, allow_extra_data=False)
            place += size
    except (zstandard.ZstdError, ValueError) as error:
        raise CodecError(f"zstd frame is damaged ({error})") from error


def decompressor() -> zstandard.ZstdDecompressor:
    """Return this thread's decompressor."""
    context: zstandard.ZstdDecompressor | None = _contexts.__dict__.get("decompressor")
    if context is None:
        context = _contexts.decompressor = zstandard.ZstdDecompressor()
    return context


def pack_plane(plane: NDArray[np.uint8], level: int) -> tuple[int, bytes]:
    """Code one plane of bytes in whichever way is smallest, judged on a sample from its middle.

    Returns:
        The kind (`STORED`, `FRAME`, `CONSTANT`, `BITS` or `PARTS`) and the payload.
    """
    size = plane.size
    if size and plane.min() == plane.max():
        return CONSTANT, plane[:1].tobytes()
    start = max(0, (size - SAMPLE_BYTES) // 2)
    sample = plane[start : start + SAMPLE_BYTES]
    trial, best = _try(sample, level)
    used = int(np.bitwise_or.reduce(plane)) if size else 0
    if size and used.bit_count() < 8 and len(trial) >= sample.size * used.bit_count() / 8 * _WORTHWHILE:
        return (PARTS, _pack_parts(plane, used)) if _is_run(used) else (BITS, _pack_bits(plane, used))
    if len(trial) < sample.size * _WORTHWHILE:
        frame = trial if sample.size == size else compress_zstd(plane, best)
        if len(frame) < size:
            return FRAME, frame
    return STORED, plane.tobytes()


def is_noise(sample: NDArray[np.uint8], level: int) -> bool:
    """Tell whether a sample of bytes does not shrink."""
    return len(_try(sample, level)[0]) >= sample.size * _WORTHWHILE


def _try(sample: NDArray[np.uint8], level: int) -> tuple[bytes, int]:
    """Compress a sample; returns the smallest frame, and the level that made it."""
    frame = compress_zstd(sample, level)
    if len(frame) > sample.size * _MATCHED:
        huffman = compress_zstd(sample, _HUFFMAN_LEVEL)
        if len(huffman) < len(frame):
            return huffman, _HUFFMAN_LEVEL
    return frame, level


def unpack_plane(kind: int, payload: memoryview, size: int) -> NDArray[np.uint8]:
    """Undo `pack_plane`: the plane's bytes, or a single byte that stands for all of them if it is constant."""
    if kind == STORED:
        if len(payload) != size:
            raise CodecError(f"stored plane holds {len(payload)} bytes, expected {size}")
        return np.frombuffer(payload, np.uint8)
    if kind == FRAME:
        return np.frombuffer(decompress_zstd(payload, size), np.uint8)
    if kind == CONSTANT and len(payload) == 1:
        return np.frombuffer(payload, np.uint8)
    if kind == BITS and payload and len(payload) == 1 + payload[0].bit_count() * -(-size // 8):
        return _unpack_bits(payload, size)
    if kind == PARTS and payload and len(payload) == 1 + sum(_parts_of(payload[0])) * -(-size // 8):
        return _unpack_parts(payload, size)
    raise CodecError(f"plane of kind {kind} with {len(payload)} bytes is not one this codec writes")


def _pack_bits(plane: NDArray[np.uint8], used: int) -> bytes:
    """Return which bits are used, then each of them, the lowest first, for all bytes."""
    one = np.empty_like(plane)
    pieces = [bytes([used])]
    for bit in _bits_of(used):
        np.bitwise_and(plane, bit, out=one)
        pieces.append(np.packbits(one).tobytes())
    return b"".join(pieces)


def _unpack_bits(payload: memoryview, size: int) -> NDArray[np.uint8]:
    plane = np.zeros(size, np.uint8)
    packed = np.frombuffer(payload, np.uint8)[1:].reshape(-1, -(-size // 8))
    for bit, row in zip(_bits_of(payload[0]), packed, strict=True):
        ones = np.unpackbits(row, count=size)
        np.multiply(ones, np.uint8(bit), out=ones)
        np.bitwise_or(plane, ones, out=plane)
    return plane


def _pack_parts(plane: NDArray[np.uint8], used: int) -> bytes:
    """Return which bits are used, then four, two and one of them at a time, as many as there are, the lowest first."""
    pieces = [bytes([used])]
    place = _lowest(used)
    some = scratch("part", -(-plane.size // 8) * 8, plane.dtype)
    for bits in _parts_of(used):
        np.right_shift(plane, place, out=some[: plane.size])
        some[plane.size :] = 0
        np.bitwise_and(some, (1 << bits) - 1, out=some)
        rows = some.reshape(8 // bits, -1)
        np.multiply(rows, np.uint8(1) << _places(bits), out=rows)
        pieces.append(np.bitwise_or.reduce(rows, axis=0).tobytes())
        place += bits
    return b"".join(pieces)


def _unpack_parts(payload: memoryview, size: int) -> NDArray[np.uint8]:
    used = payload[0]
    place = _lowest(used)
    plane = np.empty(-(-size // 8) * 8, np.uint8)
    some = scratch("part", plane.size, plane.dtype)
    packed = np.frombuffer(payload, np.uint8)[1:]
    for number, bits in enumerate(_parts_of(used)):
        into = some if number else plane
        rows = into.reshape(8 // bits, -1)
        np.right_shift(packed[: rows.shape[1]], _places(bits), out=rows)
        np.bitwise_and(into, (1 << bits) - 1, out=into)
        np.multiply(into, 1 << place, out=into)  # ten times as fast as to shift bytes to the left
        if number:
            np.bitwise_or(plane, some, out=plane)
        packed = packed[rows.shape[1] :]
        place += bits
    return plane[:size]


def _parts_of(used: int) -> list[int]:
    """Return how many bits are taken at a time, one after another."""
    return [bits for bits in (4, 2, 1) if used.bit_count() & bits] if _is_run(used) else []


def _places(bits: int) -> NDArray[np.uint8]:
    """Return where in a byte numbers of so many bits lie, as a column."""
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]


def _is_run(used: int) -> bool:
    """Tell whether two bits to seven are used, side by side."""
    return 1 < used.bit_count() < 8 and used == (1 << used.bit_length()) - (1 << _lowest(used))


def _lowest(used: int) -> int:
    return (used & -used).bit_length() - 1


def _bits_of(used: int) -> list[int]:
    return [1 << number for number in range(8) if used >> number & 1]
