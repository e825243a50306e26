"""Codecs that see plain bytes: `raw`, `zstd` and `lz4`; and parallel coding of standard LZ4 frames.

LZ4 data is split into several LZ4 frames, each with its size and a checksum. Any LZ4 tool reads the result as one
stream. This module also finds the frame boundaries, so that decoding is parallel too.

LZ4 expands data up to 255 times, so a small file can ask for a lot of memory. Reading therefore has two steps:
`find_frames` measures the content in bounded memory and compares it with a limit, `decompress_frames` fills memory that
the caller allocated. For data of unknown origin the limit is `content_limit`: 1 GiB, or 32 times the compressed size if
that is more. Writers add `ratio_padding` to data that is above it, so that whatever we write can be read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import lz4.frame
import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.base import Buffer, Layout, WordCodec, Words, as_bytes
from slipstream.codecs.entropy import check_level, compress_zstd, decompress_zstd
from slipstream.errors import CodecError
from slipstream.threads import parallel_each, parallel_map

FRAME_BYTES = 4 << 20
MAX_LZ4_LEVEL: int = lz4.frame.COMPRESSIONLEVEL_MAX

UNCHECKED_BYTES = 1 << 30
"""Content of up to this size is read whatever its compression ratio."""
MAX_RATIO = 32
"""Highest ratio of content to LZ4 data above that size. Floats do not come near it; long runs of zeros exceed it."""

_MAGIC = 0x184D2204
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
# Header, one block with one byte, end mark: a shorter frame has no content.
_SMALLEST_FRAME = 16
# No LZ4 block expands more than this, so a frame that claims to is lying.
_BEST_RATIO = 255
# Bounds the memory for a list of frames: beyond the first thousand they must have this size on average.
_AVERAGE_FRAME = 1 << 10
_MAX_SMALL_FRAMES = 1 << 10


@dataclass(frozen=True)
class Raw(WordCodec):
    """The bytes as they are."""

    name: ClassVar[str] = "raw"

    def _encode(self, words: Words, layout: Layout) -> bytes:
        return words.tobytes()

    def _decode(self, payload: memoryview, out: Words, layout: Layout) -> None:
        if len(payload) != out.nbytes:
            raise CodecError(f"raw payload has {len(payload)} bytes, expected {out.nbytes}")
        out.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)


@dataclass(frozen=True)
class Zstd(WordCodec):
    """One zstd frame around the bytes: for images, text-like integers and anything with long repeats.

    Args:
        level: zstd level, 1 to 22.
    """

    name: ClassVar[str] = "zstd"
    level: int = 3

    def __post_init__(self) -> None:
        check_level(self.level)

    def _encode(self, words: Words, layout: Layout) -> bytes:
        return compress_zstd(words.view(np.uint8), self.level)

    def _decode(self, payload: memoryview, out: Words, layout: Layout) -> None:
        out.view(np.uint8)[:] = np.frombuffer(decompress_zstd(payload, out.nbytes), np.uint8)


@dataclass(frozen=True)
class Lz4(WordCodec):
    """Standard LZ4 frames, readable by every LZ4 tool. Fast to decode; floats hardly shrink.

    Args:
        level: 0 is the fast mode, 3 to 12 the slow one (see the ``lz4`` command).
    """

    name: ClassVar[str] = "lz4"
    level: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.level, int) or isinstance(self.level, bool) or not 0 <= self.level <= MAX_LZ4_LEVEL:
            raise CodecError(f"lz4 level is {self.level!r}, expected a whole number from 0 to {MAX_LZ4_LEVEL}")

    def _encode(self, words: Words, layout: Layout) -> bytes:
        return b"".join(compress_frames(words, self.level))

    def _decode(self, payload: memoryview, out: Words, layout: Layout) -> None:
        frames = find_frames(payload, max_bytes=out.nbytes)
        if content_bytes(frames) != out.nbytes:
            raise CodecError(f"lz4 frames hold {content_bytes(frames)} bytes, expected {out.nbytes}")
        decompress_frames(payload, frames, out)


@dataclass(frozen=True, slots=True)
class Frame:
    """Where an LZ4 frame lies in a buffer, and the size of its content."""

    start: int
    stop: int
    content_bytes: int


def content_limit(compressed_bytes: int) -> int:
    """Return how much content to accept from LZ4 data of unknown origin."""
    return max(UNCHECKED_BYTES, MAX_RATIO * compressed_bytes)


def content_bytes(frames: list[Frame]) -> int:
    """Return the size of the content of all frames."""
    return sum(frame.content_bytes for frame in frames)


def compress_frames(data: Buffer, level: int = 0, threads: int | None = None) -> Iterator[bytes]:
    """Yield LZ4 frames of up to 4 MiB of `data` each, compressed in parallel; empty data is one empty frame."""
    view = as_bytes(data)

    def compress(start: int) -> bytes:
        frame: bytes = lz4.frame.compress(
            view[start : start + FRAME_BYTES],
            compression_level=level,
            block_size=lz4.frame.BLOCKSIZE_MAX4MB,
            block_linked=False,
            content_checksum=True,
            store_size=True,
        )
        return frame

    return parallel_map(compress, range(0, len(view) or 1, FRAME_BYTES), threads)


def ratio_padding(num_content_bytes: int, compressed_bytes: int) -> Iterator[bytes]:
    """Yield skippable frames that make LZ4 data large enough for `content_limit` to accept it; usually none.

    LZ4 tools ignore them. Only content of more than 1 GiB that is almost constant needs any.
    """
    if num_content_bytes <= UNCHECKED_BYTES:
        return
    missing = -(-num_content_bytes // MAX_RATIO) - compressed_bytes
    while missing > 0:
        size = min(missing, FRAME_BYTES)
        yield struct.pack("<II", _SKIPPABLE[0], size) + bytes(size)
        missing -= size


def find_frames(data: Buffer, max_bytes: int) -> list[Frame]:
    """Find the LZ4 frames in `data` and measure their content, in memory that does not depend on the content.

    Frames of other tools may not record their size: these are decompressed once, piece by piece, to count.

    Args:
        data: One or more standard LZ4 frames. Skippable frames are skipped.
        max_bytes: The largest allowed content of all frames together.

    Raises:
        CodecError: If there is anything other than frames, if the last one is cut off, or the content is too large.
    """
    view = as_bytes(data)
    frames: list[Frame] = []
    left = max_bytes
    position = 0
    while position < len(view):
        magic = _u32(view, position)
        if magic in _SKIPPABLE:
            position = _skip(view, position)
            continue
        if magic != _MAGIC:
            raise CodecError(f"no lz4 frame at byte {position}")
        frame = _measure_frame(view, position, left)
        frames.append(frame)
        if len(frames) > _MAX_SMALL_FRAMES + frame.stop // _AVERAGE_FRAME:
            raise CodecError(f"more than {len(frames) - 1} lz4 frames in {frame.stop} bytes, which is not plausible")
        left -= frame.content_bytes
        position = frame.stop
    return frames


def decompress_frames(data: Buffer, frames: list[Frame], out: Any, threads: int | None = None) -> None:
    """Fill `out` with the content of the frames that `find_frames` found, decompressed in parallel.

    Besides `out`, memory holds at most one block and one piece of 4 MiB per thread.

    Args:
        data: What the frames were found in.
        frames: The frames.
        out: A contiguous, writable buffer of the size of their content.
        threads: Number of threads; one per core if None.

    Raises:
        CodecError: If a frame is damaged.
    """
    view = as_bytes(data)
    target = np.frombuffer(out, np.uint8)
    jobs: list[tuple[Frame, NDArray[np.uint8]]] = []
    start = 0
    for frame in frames:
        stop = start + frame.content_bytes
        jobs.append((frame, target[start:stop]))
        start = stop

    def decompress(job: tuple[Frame, NDArray[np.uint8]]) -> None:
        frame, part = job
        place = 0
        for piece in _pieces(view[frame.start : frame.stop], part.size):
            part[place : place + len(piece)] = np.frombuffer(piece, np.uint8)
            place += len(piece)
        if place != part.size:
            raise CodecError(f"lz4 frame holds {place} bytes, expected {part.size}")

    parallel_each(decompress, jobs, threads)


def _pieces(frame: memoryview, limit: int) -> Iterator[bytes]:
    """Decompress one LZ4 frame in pieces of at most 4 MiB; raise `CodecError` if it is damaged or exceeds `limit`."""
    context = lz4.frame.create_decompression_context()
    # One byte more than allowed, so that content that is too large shows.
    left = limit + 1
    done = False
    while not done:
        try:
            piece, num_used, done = lz4.frame.decompress_chunk(context, frame, max_length=min(left, FRAME_BYTES))
        except RuntimeError as error:
            raise CodecError(f"lz4 frame is damaged ({error})") from error
        left -= len(piece)
        if left <= 0:
            raise CodecError(f"lz4 content exceeds the limit of {limit} bytes")
        if not done and not piece and not num_used:
            raise CodecError("lz4 frame is cut off")
        # Continue behind the input that the decompressor has consumed.
        frame = frame[num_used:]
        if piece:
            yield piece


def _measure_frame(view: memoryview, start: int, limit: int) -> Frame:
    """Find the end of the frame at `start`, and the size of its content, which must not exceed `limit`."""
    stop, size = _walk_blocks(view, start)
    # A file full of empty frames would take long to read, and no encoder writes such a file.
    if stop - start < _SMALLEST_FRAME and (start or stop < len(view)):
        raise CodecError(f"lz4 frame at byte {start} is empty, which is allowed only if it is the only one")
    if size is None:
        size = sum(map(len, _pieces(view[start:stop], limit)))
    if size > _BEST_RATIO * (stop - start):
        raise CodecError(f"lz4 frame of {stop - start} bytes claims {size} bytes of content, which is impossible")
    if size > limit:
        raise CodecError(f"lz4 content exceeds the limit: a frame claims {size} bytes, {limit} are left")
    return Frame(start, stop, size)


def _walk_blocks(view: memoryview, start: int) -> tuple[int, int | None]:
    """Return where a frame ends, and its content size if it records one; nothing is decompressed."""
    flags = _u32(view, start + 4) & 0xFF
    if flags >> 6 != 1:
        raise CodecError(f"lz4 frame at byte {start} has version {flags >> 6}, expected 1")
    has_block_checksums = bool(flags & 16)
    has_size = bool(flags & 8)
    has_checksum = bool(flags & 4)
    has_dictionary = bool(flags & 1)

    # Magic, flags and block size, then optional fields, then a checksum of the header.
    position = start + 6
    size = None
    if has_size:
        size = _u32(view, position) | _u32(view, position + 4) << 32
        position += 8
    position += 4 * has_dictionary + 1

    # A block of size zero ends the frame. The top bit marks blocks that are not compressed.
    while block := _u32(view, position) & 0x7FFFFFFF:
        position += 4 + block + 4 * has_block_checksums
    position += 4 + 4 * has_checksum
    if position > len(view):
        raise CodecError("lz4 data ends inside a frame")
    return position, size


def _skip(view: memoryview, position: int) -> int:
    """Return where a skippable frame ends."""
    stop = position + 8 + _u32(view, position + 4)
    if stop > len(view):
        raise CodecError("lz4 data ends inside a skippable frame")
    return stop


def _u32(view: memoryview, position: int) -> int:
    try:
        (value,) = struct.unpack_from("<I", view, position)
    except struct.error:
        raise CodecError("lz4 data ends inside a frame") from None
    return int(value)
