"""Read frames from a cache, and from the recorded file where the cache is damaged or gone."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from slipstream.datasets.cache import CachedDataset, CacheHeader, FrameCache, has_pixels_of
from slipstream.datasets.description import Images
from slipstream.datasets.files import Files
from slipstream.datasets.frames import DatasetSource
from slipstream.datasets.prepare import Interpolation
from slipstream.errors import CorruptFileError, SlipstreamError
from slipstream.memory import scratch

logger = logging.getLogger(__name__)

_BYTES = np.dtype(np.uint8)
_LENGTH_BYTES = 8
# The most that zstd adds to what it cannot compress.
_MAX_GROWTH_BYTES = 1024


class _State:
    """What this process knows about the frames of a cache; shared by the sources of all its datasets.

    Attributes:
        verified: One byte per frame: whether it has been compared with its checksum.
        is_gone: Whether the cache was deleted or replaced, and nothing is read from it any more.
    """

    def __init__(self, num_frames: int) -> None:
        self.verified = bytearray(num_frames)
        self.is_gone = False
        self._noted: dict[int, object] = {}

    def note(self, frame: int = -1) -> bool:
        """Return whether this is the first time that a frame, or with -1 the cache, is noted as damaged."""
        token = object()
        # Atomic: of several threads, one is the first.
        return self._noted.setdefault(frame, token) is token

    def is_noted(self, frame: int) -> bool:
        """Return whether a frame has been noted as damaged."""
        return frame in self._noted


class RegisteredCache:
    """A cache in a table of files.

    Args:
        cache: The cache.
        files: The table, to which the cache is added.
        recorded: Number of the recorded file in it.
    """

    def __init__(self, cache: FrameCache, files: Files, recorded: int) -> None:
        self._file = files.add(cache.path, cache.identity)
        self._recorded = recorded
        self._header = cache.header
        self.codec = cache.header.codec
        self._state = _State(cache.header.num_frames)
        self._places: dict[str, tuple[CachedDataset, int, int]] = {}
        offset = cache.data_offset
        first = 0
        for data in cache.header.datasets:
            start = offset if cache.header.codec == "raw" else cache.table_offset
            self._places[data.path] = (data, start, first)
            offset += data.num_rows * cache.header.stride(data)
            first += data.num_rows

    def source(self, path: str, images: Images, fallback: DatasetSource | None = None) -> CacheSource | None:
        """Return where the frames of a dataset are, or None if the cache does not have them as they are wanted.

        Args:
            path: The dataset.
            images: Its frames in the recorded file.
            fallback: Where to read frames that are damaged in the cache.
        """
        if path not in self._places:
            return None
        data, start, first = self._places[path]
        if data.num_rows != images.num_rows or data.channels != images.kind.channels:
            return None
        if not has_pixels_of(data, images.kind, self._header.image_size):
            return None
        return self._source(data, start, first, fallback)

    def source_of(self, data: CachedDataset) -> CacheSource:
        """Return where the frames of one of the cache's datasets are, whatever the recorded file has now."""
        return self._source(*self._places[data.path], None)

    def _source(self, data: CachedDataset, start: int, first: int, fallback: DatasetSource | None) -> CacheSource:
        return CacheSource(self._recorded, self._file, data, self._header, start, first, self._state, fallback)


class CacheSource:
    """The frames of one dataset in a cache.

    A process compares a frame with its checksum when it reads it for the first time: comparing every time would take
    1.5 times as long as reading. A frame that does not match, and all frames once the cache is gone or was replaced,
    are read from the recorded file instead, which is logged.
    """

    rows_together = 0

    def __init__(
        self, recorded: int, file: int, data: CachedDataset, header: CacheHeader, start: int, first: int,
        state: _State, fallback: DatasetSource | None,
    ) -> None:  # fmt: skip
        # Readers check this file for changes after each batch; the cache itself may come and go.
        self.file = recorded
        self.path = data.path
        self._file = file
        self._shape = (data.channels, header.image_size, header.image_size)
        self._stride = header.stride(data)
        self._is_packed = header.codec == "zstd"
        self._start = start
        self._first = first
        self._state = state
        self._fallback = fallback

    def read(
        self,
        files: Files,
        rows: Sequence[int],
        targets: Sequence[NDArray[np.uint8]],
        interpolation: Interpolation = "linear",
    ) -> None:
        """Read frames, each into its target. They are resized already: `interpolation` is for the fallback only.

        Raises:
            CorruptFileError: If a frame is damaged and there is no fallback.
        """
        damaged = list(range(len(rows)))
        if not self._state.is_gone:
            try:
                with files.borrow(self._file) as descriptor:
                    damaged = self._read_all(descriptor, rows, targets)
            except (SlipstreamError, OSError) as error:
                if files.closed or self._fallback is None:
                    raise
                self._state.is_gone = True
                if self._state.note():
                    logger.warning("%s; frames are read from %s instead", error, files.paths[self.file])
        for number in damaged:
            self._read_damaged(files, rows[number], targets[number], interpolation)

    def _read_all(self, descriptor: int, rows: Sequence[int], targets: Sequence[NDArray[np.uint8]]) -> list[int]:
        """Read frames, and return the numbers of those that are damaged."""
        damaged = []
        verified = self._state.verified
        for number, row in enumerate(rows):
            target = targets[number]
            # Nearly always a frame is read again, and its pixels are all that is needed.
            if verified[self._first + row] and not self._is_packed:
                if os.preadv(descriptor, (target.data,), self._start + row * self._stride) != target.nbytes:
                    damaged.append(number)
            elif self._state.is_noted(self._first + row) or not self._read_checked(descriptor, row, target):
                damaged.append(number)
        return damaged

    def _read_checked(self, descriptor: int, row: int, target: NDArray[np.uint8]) -> bool:
        """Read a frame and compare it with its checksum; returns whether it matches."""
        if self._is_packed:
            checksum = self._read_packed(descriptor, row, target)
        else:
            checksum = self._read_raw(descriptor, row, target)
        if checksum is None or checksum != xxhash.xxh3_64_digest(target.data)[::-1]:
            return False
        self._state.verified[self._first + row] = 1
        return True

    def _read_raw(self, descriptor: int, row: int, target: NDArray[np.uint8]) -> bytes | None:
        """Read a frame that is stored as pixels; returns its checksum."""
        rest = scratch("rest", self._stride - target.nbytes, _BYTES)
        if os.preadv(descriptor, (target.data, rest.data), self._start + row * self._stride) != self._stride:
            return None
        return rest[-8:].tobytes()

    def _read_packed(self, descriptor: int, row: int, target: NDArray[np.uint8]) -> bytes | None:
        """Read a frame that is packed; returns its checksum."""
        table = os.pread(descriptor, 8, self._start + 8 * (self._first + row))
        offset = int.from_bytes(table, "little")
        if len(table) != 8 or offset >= self._start:
            return None
        length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, offset), "little")
        if not 0 < length <= target.nbytes + _MAX_GROWTH_BYTES:
            return None
        record = os.pread(descriptor, length + 8, offset + _LENGTH_BYTES)
        if len(record) != length + 8:
            return None
        try:
            pixels = zstandard.ZstdDecompressor().decompress(record[:length], max_output_size=target.nbytes)
        except zstandard.ZstdError:
            return None
        if len(pixels) != target.nbytes:
            return None
        target.reshape(-1)[:] = np.frombuffer(pixels, np.uint8)
        return record[length:]

    def _read_damaged(self, files: Files, row: int, target: NDArray[np.uint8], interpolation: Interpolation) -> None:
        """Read a frame from the recorded file, which the cache does not have as it should be."""
        if self._fallback is None:
            raise CorruptFileError(
                f"{files.paths[self._file]}: frame {row} of {self.path} does not match its checksum; delete the cache, "
                "and ingest again"
            )
        if not self._state.is_gone and self._state.note(self._first + row):
            logger.warning(
                "%s: frame %d of %s does not match its checksum, and is read from %s instead; ingest again with "
                "verify=True (--verify)",
                files.paths[self._file], row, self.path, files.paths[self.file],
            )  # fmt: skip
        self._fallback.read(files, [row], [target], interpolation)
