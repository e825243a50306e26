"""Write a cache of frames from the first to the last, and continue where an earlier process stopped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from slipstream.datasets.cache import (
    CHECKSUM,
    END_MAGIC,
    FOOTER,
    MARK,
    MARK_OFFSET,
    STAMP_OFFSET,
    CachedDataset,
    CacheHeader,
    read_header,
)
from slipstream.datasets.source import Stamp
from slipstream.errors import SlipstreamError
from slipstream.threads import parallel_map

_MARK_BYTES = 256 << 20
_ZSTD_LEVEL = 3
_LENGTH_BYTES = 8


class CacheWriter:
    """Appends frames to an unfinished cache."""

    def __init__(self, file: BinaryIO, header: CacheHeader, target: Path) -> None:
        self._file, self._header, self._target = file, header, target
        self._begin = header.to_bytes()
        self._position = len(self._begin)
        self._marked = self._position
        self._done = 0
        self._offsets: list[int] = []

    def resume(self) -> int:
        """Return how many intact frames are there already; starts over if they are of another source."""
        begin = self._begin
        if self._matches():
            marked, checksum = MARK.unpack(os.pread(self._file.fileno(), MARK.size, MARK_OFFSET))
            trusted = marked if checksum == xxhash.xxh3_64_intdigest(CHECKSUM.pack(marked)) else 0
            for number, data in _frames(self._header):
                end = self._record_end(data, check=number >= trusted)
                if end is None:
                    break
                self._offsets.append(self._position)
                self._position, self._done = end, number + 1
            os.ftruncate(self._file.fileno(), self._position)
        else:
            os.ftruncate(self._file.fileno(), 0)
            _pwrite(self._file, begin, 0)
        self._marked = self._position
        return self._done

    def _matches(self) -> bool:
        try:
            header, offset = read_header(self._target, self._file)
        except (SlipstreamError, OSError):
            return False
        return header == self._header and offset == len(self._begin)

    def _record_end(self, data: CachedDataset, *, check: bool) -> int | None:
        """Return where the record at the current position ends, or None if it is not whole."""
        descriptor, nbytes = self._file.fileno(), self._header.frame_bytes(data)
        size = os.fstat(descriptor).st_size
        if self._header.codec == "raw":
            end = self._position + self._header.stride(data)
            pixels = os.pread(descriptor, nbytes, self._position) if check and end <= size else b""
        else:
            length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, self._position), "little")
            end = self._position + _LENGTH_BYTES + length + CHECKSUM.size
            if not 0 < length <= nbytes + 1024 or end > size:
                return None
            if check:
                packed = os.pread(descriptor, length, self._position + _LENGTH_BYTES)
                with contextlib.suppress(zstandard.ZstdError):
                    packed = zstandard.ZstdDecompressor().decompress(packed, max_output_size=nbytes)
                pixels = packed
        if end > size:
            return None
        if not check:
            return end
        stored = int.from_bytes(os.pread(descriptor, CHECKSUM.size, end - CHECKSUM.size), "little")
        return end if stored == xxhash.xxh3_64_intdigest(pixels) else None

    def append(self, first: int, frames: NDArray[np.uint8]) -> None:
        """Write frames that follow those that are there."""
        if first != self._done:
            raise ValueError(f"frame {first} does not follow frame {self._done - 1}")
        records = list(parallel_map(self._record, list(frames)))
        start = self._position
        for record in records:
            self._offsets.append(self._position)
            self._position += len(record)
        # In one piece: Linux then caches the file in large pages, from which frames are read up to a third faster.
        _pwrite(self._file, b"".join(records), start)
        self._done += len(frames)
        if self._position - self._marked >= _MARK_BYTES:
            self._mark()

    def _record(self, frame: NDArray[np.uint8]) -> bytes:
        pixels = frame.tobytes()
        checksum = CHECKSUM.pack(xxhash.xxh3_64_intdigest(pixels))
        if self._header.codec == "raw":
            data = CachedDataset("", 1, frame.shape[0])
            return pixels + bytes(self._header.stride(data) - len(pixels) - len(checksum)) + checksum
        packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(pixels)
        return len(packed).to_bytes(_LENGTH_BYTES, "little") + packed + checksum

    def _mark(self) -> None:
        """Flush what is written, and only then say that it is there."""
        os.fdatasync(self._file.fileno())
        count = CHECKSUM.pack(self._done)
        _pwrite(self._file, MARK.pack(self._done, xxhash.xxh3_64_intdigest(count)), MARK_OFFSET)
        self._marked = self._position

    def finish(self, stamp: Stamp) -> None:
        """Write what comes after the last frame and which file it was, and flush everything."""
        if stamp.is_settled:
            _pwrite(self._file, stamp.to_bytes(), STAMP_OFFSET)
        table = b"" if self._header.codec == "raw" else np.array(self._offsets, "<u8").tobytes()
        head = CHECKSUM.pack(self._position) + CHECKSUM.pack(self._done)
        footer = FOOTER.pack(self._position, self._done, xxhash.xxh3_64_intdigest(head), END_MAGIC)
        _pwrite(self._file, table + footer, self._position)
        self._mark()
        os.fsync(self._file.fileno())


def _frames(header: CacheHeader) -> Iterator[tuple[int, CachedDataset]]:
    number = 0
    for data in header.datasets:
        for _ in range(data.num_rows):
            yield number, data
            number += 1


def _pwrite(file: BinaryIO, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file.fileno(), view, offset)
        view, offset = view[count:], offset + count
