"""LZ4 files: compress what is written to a file, and decompress a file in bounded memory."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

import lz4.frame

from slipstream.codecs.bytes import (
    FRAME_BYTES,
    compress_frames,
    content_bytes,
    content_limit,
    decompress_frames,
    find_frames,
    ratio_padding,
)
from slipstream.errors import CodecError, CorruptFileError
from slipstream.memory import machine_bytes

_SAMPLE_BYTES = 64 << 10
_WORTHWHILE = 0.98


class FrameWriter(io.RawIOBase):
    """A file that packs what is written to it into LZ4 frames, and counts the bytes before packing.

    Args:
        file: Where the frames go.
        level: LZ4 level, 0 to 12.
        threads: How many threads compress; one per core if None.
    """

    def __init__(self, file: BinaryIO, level: int, threads: int | None) -> None:
        self._file = file
        self._level = level
        self._threads = threads
        self._pending = bytearray()
        self._packed_bytes = 0
        self.raw_bytes = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Take some content; whole frames are written as soon as there is work for several threads."""
        view = memoryview(data).cast("B")
        self.raw_bytes += len(view)
        self._pending += view
        if len(self._pending) >= 4 * FRAME_BYTES:
            self._pack(len(self._pending) // FRAME_BYTES * FRAME_BYTES)
        return len(view)

    def finish(self) -> None:
        """Write what is left."""
        self._pack(len(self._pending))
        for padding in ratio_padding(self.raw_bytes, self._packed_bytes):
            self._file.write(padding)

    def _pack(self, count: int) -> None:
        # A copy: the threads that compress must not see the buffer grow.
        block = bytes(self._pending[:count])
        del self._pending[:count]
        for frame in compress_frames(block, self._useful_level(block), self._threads):
            self._file.write(frame)
            self._packed_bytes += len(frame)

    def _useful_level(self, block: bytes) -> int:
        """Return the level that was asked for, or 0 if the slow search would find nothing, as in most floats."""
        # A sample from the middle, because the beginning of a checkpoint is its pickle.
        sample = block[len(block) // 2 :][:_SAMPLE_BYTES]
        packed = lz4.frame.compress(sample, compression_level=self._level)
        if len(packed) < _WORTHWHILE * len(sample):
            return self._level
        return 0


def decompress(packed: bytes) -> io.BytesIO:
    """Return the content of LZ4 frames.

    A small file that claims a lot of content is refused before memory is allocated: see `content_limit`.

    Raises:
        CorruptFileError: If the frames are damaged, or have too much content.
    """
    limit = content_limit(len(packed))
    try:
        # Counting takes no memory, so count everything that could fit: the error can then say how much there is.
        frames = find_frames(packed, max_bytes=machine_bytes())
        size = content_bytes(frames)
        if size > limit:
            raise CorruptFileError(
                f"{len(packed)} bytes of LZ4 data hold {size} bytes, more than the limit of {limit}; "
                "if you trust the file, decompress it with `lz4 -d` and load the result"
            )
        # Decompress into the memory of the stream itself: joining pieces would take the size twice.
        content = io.BytesIO(bytes(size))
        decompress_frames(packed, frames, content.getbuffer())
    except CodecError as error:
        raise CorruptFileError(str(error)) from error
    return content
