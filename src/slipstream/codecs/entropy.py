"""Entropy coding of one plane of bytes: stored, constant, packed bits or a zstd frame, decided on a sample.

Some planes use only a few bits of each byte: flags, small numbers, the lowest bytes of shifted words. Those bits can be
packed. That is smaller than Huffman coding, which spends at least one bit per symbol, and many times as fast. Adjacent
bits are packed in groups of 4, 2 and 1. Unpacking takes a few whole-array operations.

Otherwise two zstd settings compete. Match finding (an ordinary level) wins on planes with repeats, as in time series.
On the exponent plane of weights it loses to plain Huffman coding by 20 %: short accidental matches cost more than the
literals they replace. There, match finding is all but switched off. Both settings write ordinary zstd frames.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from slipstream.errors import CodecError
from slipstream.memory import scratch

# Kinds of planes, as files name them.
STORED = 0
ZSTD_FRAME = 1
CONSTANT = 2
SINGLE_BITS = 3
BIT_GROUPS = 4

SAMPLE_BYTES = 4 << 10
"""How much of a plane is compressed to decide its kind."""

# The level of `compress_zstd` that stands for Huffman coding almost without matches.
HUFFMAN_LEVEL = 0

# A plane that shrinks by less than this is stored: decoding it would take longer than reading the saved bytes.
_WORTHWHILE = 0.985
# A frame below this share of its content owes that to repeats: a Huffman code takes at least one bit per byte.
_MATCHED = 0.125

Bytes = NDArray[np.uint8]


class _Contexts(threading.local):
    """The zstd contexts of one thread: they are expensive to create and must not be shared between threads."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor: zstandard.ZstdDecompressor | None = None


_contexts = _Contexts()


def check_level(level: int) -> None:
    """Raise `CodecError` unless `level` is a zstd level."""
    if not isinstance(level, int) or isinstance(level, bool) or not 1 <= level <= zstandard.MAX_COMPRESSION_LEVEL:
        raise CodecError(
            f"zstd level is {level!r}, expected a whole number from 1 to {zstandard.MAX_COMPRESSION_LEVEL}"
        )


def compress_zstd(data: Bytes, level: int) -> bytes:
    """Compress bytes into one zstd frame that records its content size; `HUFFMAN_LEVEL` finds almost no matches."""
    return _compressor(level).compress(data.data)


def decompress_zstd(frame: memoryview, size: int) -> bytes:
    """Decompress one zstd frame of exactly `size` bytes. Allocates no more than that, whatever the frame claims.

    Raises:
        CodecError: If the frame is damaged, has another size, or is followed by other data.
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
    """Decompress many small zstd frames, one after another, into `out`.

    The same as `decompress_zstd` for each of them, in a tight loop.

    Args:
        out: Memory for the content of all frames.
        frames: One zstd frame each.
        size: Content size of each frame.
        skip: Number of bytes before each frame.

    Raises:
        CodecError: If a frame is damaged, has another size, or is followed by other data.
    """
    # Bind the functions once: looking them up per frame takes a tenth of the time.
    unpack = decompressor().decompress
    claimed = zstandard.frame_content_size
    place = 0
    for frame in frames:
        body = memoryview(frame)[skip:]
        try:
            claimed_bytes = claimed(body)
            if claimed_bytes == size:
                # Raises ValueError if the frame holds less than it claims.
                out[place : place + size] = unpack(body, size, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as error:
            raise CodecError(f"zstd frame is damaged ({error})") from error
        if claimed_bytes != size:
            raise CodecError(f"zstd frame claims {claimed_bytes} bytes of content, expected {size}")
        place += size


def decompressor() -> zstandard.ZstdDecompressor:
    """Return this thread's decompressor."""
    if _contexts.decompressor is None:
        _contexts.decompressor = zstandard.ZstdDecompressor()
    return _contexts.decompressor


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """Return this thread's compressor for a level."""
    if level not in _contexts.compressors:
        _contexts.compressors[level] = _new_compressor(level)
    return _contexts.compressors[level]


def _new_compressor(level: int) -> zstandard.ZstdCompressor:
    if level != HUFFMAN_LEVEL:
        return zstandard.ZstdCompressor(level=level)
    # Long minimum matches and a tiny hash table: next to nothing is found, and literals are Huffman-coded.
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=18, target_length=0
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def encode_plane(plane: Bytes, level: int) -> tuple[int, bytes]:
    """Encode one plane in the way that a sample from its middle suggests.

    Returns:
        The kind (`STORED`, `ZSTD_FRAME`, `CONSTANT`, `SINGLE_BITS` or `BIT_GROUPS`) and the payload.
    """
    size = plane.size
    if not size:
        return STORED, b""
    if plane.min() == plane.max():
        return CONSTANT, plane[:1].tobytes()

    start = max(0, (size - SAMPLE_BYTES) // 2)
    sample = plane[start : start + SAMPLE_BYTES]
    trial, best_level = _compress_sample(sample, level)

    # Pack bits unless zstd makes the sample smaller than the packed bits would be.
    used = int(np.bitwise_or.reduce(plane))
    num_used = used.bit_count()
    if num_used < 8 and len(trial) >= sample.size * num_used / 8 * _WORTHWHILE:
        if _is_run(used):
            return BIT_GROUPS, _pack_groups(plane, used)
        return SINGLE_BITS, _pack_bits(plane, used)

    if len(trial) < sample.size * _WORTHWHILE:
        # A small plane is its sample: compressed already.
        frame = trial if sample.size == size else compress_zstd(plane, best_level)
        # The sample may have been more compressible than the rest.
        if len(frame) < size:
            return ZSTD_FRAME, frame
    return STORED, plane.tobytes()


def decode_plane(kind: int, payload: memoryview, size: int) -> Bytes:
    """Undo `encode_plane`. Returns the bytes, or a single byte that stands for all of them if the plane is constant.

    Raises:
        CodecError: If the payload is damaged or belongs to a plane of another size.
    """
    if kind == STORED:
        if len(payload) != size:
            raise CodecError(f"stored plane has {len(payload)} bytes, expected {size}")
        return np.frombuffer(payload, np.uint8)
    if kind == ZSTD_FRAME:
        return np.frombuffer(decompress_zstd(payload, size), np.uint8)
    if kind == CONSTANT and len(payload) == 1:
        return np.frombuffer(payload, np.uint8)
    # Packed bits start with a byte that says which bits are in use. Each of them takes one bit per byte of the plane.
    if payload and len(payload) == 1 + payload[0].bit_count() * _packed_bytes(size):
        if kind == SINGLE_BITS:
            return _unpack_bits(payload, size)
        if kind == BIT_GROUPS and _is_run(payload[0]):
            return _unpack_groups(payload, size)
    raise CodecError(f"plane of kind {kind} with {len(payload)} bytes is invalid for {size} bytes of content")


def is_noise(sample: Bytes, level: int) -> bool:
    """Return whether a sample of bytes is incompressible."""
    frame, _ = _compress_sample(sample, level)
    return len(frame) >= sample.size * _WORTHWHILE


def _compress_sample(sample: Bytes, level: int) -> tuple[bytes, int]:
    """Compress a sample with and without match finding; returns the smaller frame and its level."""
    frame = compress_zstd(sample, level)
    # Huffman coding cannot win against repeats.
    if len(frame) <= sample.size * _MATCHED:
        return frame, level
    huffman = compress_zstd(sample, HUFFMAN_LEVEL)
    if len(huffman) < len(frame):
        return huffman, HUFFMAN_LEVEL
    return frame, level


def _packed_bytes(size: int) -> int:
    """Return the number of bytes that one bit of each of `size` bytes takes."""
    return -(-size // 8)


def _pack_bits(plane: Bytes, used: int) -> bytes:
    """Return the bits in use, then each of them for all bytes, the lowest first."""
    one_bit = np.empty_like(plane)
    parts = [bytes([used])]
    for bit in _bits_of(used):
        np.bitwise_and(plane, bit, out=one_bit)
        parts.append(np.packbits(one_bit).tobytes())
    return b"".join(parts)


def _unpack_bits(payload: memoryview, size: int) -> Bytes:
    """Undo `_pack_bits`."""
    plane = np.zeros(size, np.uint8)
    rows = np.frombuffer(payload, np.uint8)[1:].reshape(-1, _packed_bytes(size))
    for bit, row in zip(_bits_of(payload[0]), rows, strict=True):
        ones = np.unpackbits(row, count=size)
        np.multiply(ones, np.uint8(bit), out=ones)
        np.bitwise_or(plane, ones, out=plane)
    return plane


def _bits_of(used: int) -> list[int]:
    """Return the masks of the bits in use, the lowest first."""
    masks = [1 << place for place in range(8)]
    return [mask for mask in masks if used & mask]


def _pack_groups(plane: Bytes, used: int) -> bytes:
    """Return the bits in use, then groups of four, two and one of them, the lowest bits first.

    The plane is padded to a multiple of eight bytes and cut into as many rows as groups fit into a byte. A packed byte
    holds the groups of one column: packing and unpacking are operations on whole rows.
    """
    parts = [bytes([used])]
    place = _lowest_place(used)
    group = scratch("part", 8 * _packed_bytes(plane.size), plane.dtype)
    for num_bits in _groups_of(used):
        np.right_shift(plane, place, out=group[: plane.size])
        group[plane.size :] = 0
        np.bitwise_and(group, (1 << num_bits) - 1, out=group)
        rows = group.reshape(8 // num_bits, -1)
        np.multiply(rows, np.uint8(1) << _row_places(num_bits), out=rows)
        parts.append(np.bitwise_or.reduce(rows, axis=0).tobytes())
        place += num_bits
    return b"".join(parts)


def _unpack_groups(payload: memoryview, size: int) -> Bytes:
    """Undo `_pack_groups`."""
    used = payload[0]
    place = _lowest_place(used)
    plane = np.empty(8 * _packed_bytes(size), np.uint8)
    group = scratch("part", plane.size, plane.dtype)
    packed = np.frombuffer(payload, np.uint8)[1:]
    # The first group is unpacked in place, the others are added to it.
    target = plane
    for num_bits in _groups_of(used):
        rows = target.reshape(8 // num_bits, -1)
        row_bytes = rows.shape[1]
        np.right_shift(packed[:row_bytes], _row_places(num_bits), out=rows)
        np.bitwise_and(target, (1 << num_bits) - 1, out=target)
        # Ten times as fast as shifting bytes to the left.
        np.multiply(target, 1 << place, out=target)
        if target is not plane:
            np.bitwise_or(plane, target, out=plane)
        packed = packed[row_bytes:]
        place += num_bits
        target = group
    return plane[:size]


def _groups_of(used: int) -> list[int]:
    """Return the sizes of the groups that a run of bits is packed in."""
    return [num_bits for num_bits in (4, 2, 1) if used.bit_count() & num_bits]


def _row_places(num_bits: int) -> Bytes:
    """Return where in a byte the groups of each row are placed, as a column."""
    return np.arange(0, 8, num_bits, dtype=np.uint8)[:, None]


def _is_run(used: int) -> bool:
    """Return whether two to seven adjacent bits are in use."""
    return 1 < used.bit_count() < 8 and used == (1 << used.bit_length()) - (1 << _lowest_place(used))


def _lowest_place(used: int) -> int:
    """Return the number of the lowest bit in use."""
    return (used & -used).bit_length() - 1
