"""Codecs that see plain bytes: `raw`, `zstd` and `lz4`; and parallel coding of standard LZ4 frames.

LZ4 data is split into several frames, each with its size and a checksum. Any LZ4 tool reads the result as one stream.
This module also finds the frame boundaries, so that decoding is parallel too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import lz4.frame
import numpy as np

from slipstream.codecs.base import Buffer, Layout, WordCodec, Words, as_bytes
from slipstream.codecs.entropy import check_level, compress_zstd, decompress_zstd
from slipstream.errors import CodecError
from slipstream.threads import parallel_map

FRAME_BYTES = 4 << 20
MAX_LZ4_LEVEL: int = lz4.frame.COMPRESSIONLEVEL_MAX

_MAGIC = 0x184D2204
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_SMALLEST_FRAME = 16
_BEST_RATIO = 255
"""No LZ4 block expands more than this, so a frame that claims to is lying."""


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
class Frame:
    """Where one frame lies in a buffer, and how large its content is (None: it does not say)."""

    start: int
    stop: int
    content_bytes: int | None


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
        target = out.view(np.uint8)
        position = 0
        for content in decompress_frames(payload, max_bytes=target.size):
            target[position : position + len(content)] = np.frombuffer(content, np.uint8)
            position += len(content)
        if position != target.size:
            raise CodecError(f"lz4 frames hold {position} bytes, expected {target.size}")


def compress_frames(data: Buffer, level: int = 0, threads: int | None = None) -> Iterator[bytes]:
    """Yield LZ4 frames of up to 4 MiB of `data` each, compressed in parallel; empty data is one empty frame."""
    view = as_bytes(data)
    starts = range(0, len(view) or 1, FRAME_BYTES)
    return parallel_map(lambda start: _compress(view[start : start + FRAME_BYTES], level), starts, threads)


def _compress(data: memoryview, level: int) -> bytes:
    frame: bytes = lz4.frame.compress(
        data,
        compression_level=level,
        block_size=lz4.frame.BLOCKSIZE_MAX4MB,
        block_linked=False,
        content_checksum=True,
        store_size=True,
    )
    return frame


def decompress_frames(data: Buffer, max_bytes: int, threads: int | None = None) -> Iterator[bytes]:
    """Yield the content of each frame in `data`, in order, decompressed in parallel.

    Args:
        data: One or more standard frames; skippable frames are skipped.
        max_bytes: The most that all content together may hold; more is an error, found before it is allocated.
        threads: How many threads; by default one per core.

    Raises:
        CodecError: If a frame is damaged, cut off, not LZ4, or larger than allowed.
    """
    view = as_bytes(data)
    frames = list(find_frames(view))
    claimed = sum(frame.content_bytes or 0 for frame in frames)
    if claimed > max_bytes:
        raise CodecError(f"lz4 frames claim {claimed} bytes of content, at most {max_bytes} expected")
    if all(frame.content_bytes is not None for frame in frames):
        yield from parallel_map(lambda frame: _decompress(view, frame, frame.content_bytes or 0), frames, threads)
        return
    spare = max_bytes - claimed
    for frame in frames:  # foreign frames of unknown size share what is left of the budget, one after another
        content = _decompress(view, frame, spare if frame.content_bytes is None else frame.content_bytes)
        spare -= len(content) if frame.content_bytes is None else 0
        yield content


def _decompress(view: memoryview, frame: Frame, limit: int) -> bytes:
    decompressor = lz4.frame.LZ4FrameDecompressor()
    try:
        # One byte more than allowed, so that content which is too large shows.
        content: bytes = decompressor.decompress(view[frame.start : frame.stop], max_length=limit + 1)
    except (RuntimeError, EOFError) as error:
        raise CodecError(f"lz4 frame is damaged ({error})") from error
    if len(content) > limit or frame.content_bytes not in (None, len(content)):
        raise CodecError(f"lz4 frame holds {len(content)} bytes or more, expected {limit}")
    if not decompressor.eof:
        raise CodecError("lz4 frame is cut off")
    return content


def find_frames(view: memoryview) -> Iterator[Frame]:
    """Yield where each frame lies, by walking headers and block sizes; nothing is decompressed.

    Raises:
        CodecError: If there is something else than frames, or the last one is cut off.
    """
    position = 0
    while position < len(view):
        magic = _u32(view, position)
        if magic in _SKIPPABLE:
            position += 8 + _u32(view, position + 4)
            if position > len(view):
                raise CodecError("lz4 data ends inside a skippable frame")
            continue
        if magic != _MAGIC:
            raise CodecError(f"no lz4 frame at byte {position}")
        stop, content_bytes = _walk(view, position)
        if stop - position < _SMALLEST_FRAME and (position or stop < len(view)):
            raise CodecError(f"an empty lz4 frame at byte {position} among others")
        if content_bytes is not None and content_bytes > _BEST_RATIO * (stop - position):
            raise CodecError(f"lz4 frame of {stop - position} bytes claims {content_bytes} bytes of content")
        yield Frame(position, stop, content_bytes)
        position = stop


def _walk(view: memoryview, start: int) -> tuple[int, int | None]:
    """Return where a frame ends, and its content size if it says."""
    flags = _u32(view, start + 4) & 0xFF
    if flags >> 6 != 1:
        raise CodecError(f"lz4 frame at byte {start} is of version {flags >> 6}, expected 1")
    has_block_checksums, has_size, has_checksum, has_dictionary = (bool(flags & bit) for bit in (16, 8, 4, 1))
    size = None
    position = start + 6
    if has_size:
        size = _u32(view, position) | _u32(view, position + 4) << 32
        position += 8
    position += 4 * has_dictionary + 1
    while block := _u32(view, position) & 0x7FFFFFFF:
        position += 4 + block + 4 * has_block_checksums
    position += 4 + 4 * has_checksum
    if position > len(view):
        raise CodecError("lz4 data ends inside a frame")
    return position, size


def _u32(view: memoryview, position: int) -> int:
    try:
        (value,) = struct.unpack_from("<I", view, position)
    except struct.error:
        raise CodecError("lz4 data ends inside a frame") from None
    return int(value)
