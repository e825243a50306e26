"""Resize the frames of a file once, into a cache from which they are read at the speed of a copy.

It can be interrupted at any instant, by an error or by ``kill -9``, and the next call continues. Frames are appended to
a file of another name, each with its checksum. From time to time the file is flushed, and a mark in it moves forward.
The next call checks the frames after the mark and keeps those before the first damaged one. The complete file gets
its final name.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.datasets.cache import (
    CHECKSUM,
    END_MAGIC,
    FOOTER,
    MARK,
    MARK_OFFSET,
    CachedDataset,
    CacheHeader,
    FrameCache,
    cache_path,
    is_fresh,
    read_header,
)
from slipstream.datasets.describe import describe
from slipstream.datasets.description import Description, Fields
from slipstream.datasets.files import Files
from slipstream.datasets.frames import DatasetSource, FrameReader, Request, warn_if_slow
from slipstream.errors import DatasetError, MissingEntryError, SlipstreamError
from slipstream.memory import aligned
from slipstream.store.local import make_folder, sync_folder, write_error
from slipstream.store.lock import LockableFile, is_still_at, open_private, try_lock
from slipstream.threads import parallel_map

_BATCH_BYTES = 32 << 20
_MARK_BYTES = 256 << 20
_ZSTD_LEVEL = 3
_LENGTH_BYTES = 8

Progress = Callable[[int, int], None]
"""Called with the number of frames that are done, and of all."""


@dataclass(frozen=True)
class Ingested:
    """The result of ingesting a file.

    Attributes:
        path: The cache.
        num_frames: Frames in it.
        new_frames: Those that were made by this call: 0 if it was there and fresh already.
        stored_bytes: Size of the cache.
        raw_bytes: Size of its frames.
    """

    path: Path
    num_frames: int
    new_frames: int
    stored_bytes: int
    raw_bytes: int


def ingest(
    path: str | os.PathLike[str],
    image_size: int = 224,
    *,
    fields: Fields | None = None,
    cameras: Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    compress: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Ingested:
    """Store the resized frames of a file once; whatever loads the file afterwards reads those instead.

    Blocks until the cache is complete and durable, or returns at once if there is a fresh one. Continues after an
    earlier call that was interrupted. Memory holds some megabytes of frames. The source is not touched.

    Args:
        path: The recorded file.
        image_size: Height and width of the stored frames.
        fields: Which datasets are what; see `Fields`.
        cameras: Which cameras; all by default.
        folder: Where the cache goes; by default beside the file.
        compress: Pack frames with zstd, losslessly: smaller, and a few times slower to read.
        overwrite: Replace a cache that is still fresh.
        progress: Told how far it is.
        threads: How many threads resize; by default one per core.

    Raises:
        DatasetError: If the file has no images, changes meanwhile, or is being ingested by another process.
        WriteError: If the cache cannot be written; what is written is kept, and the next call goes on there.

    Example:
        >>> import h5py, numpy
        >>> with h5py.File("/tmp/slipstream-doc-ingest.hdf5", "w") as file:
        ...     file["observations/left_image"] = numpy.zeros((11, 64, 64, 3), "uint8")
        ...     file["actions"] = numpy.zeros((10, 7))
        >>> ingest("/tmp/slipstream-doc-ingest.hdf5", image_size=32, overwrite=True).num_frames
        11
    """
    require_count("image_size", image_size, 1, 8192)
    source = Path(path)
    description = describe(source, fields, cameras=cameras)
    reader, datasets = _sources(description, cameras)
    with contextlib.closing(reader.files):
        header = CacheHeader.of(source, image_size, "zstd" if compress else "raw", datasets)
        description.identity.check(source)
        target = cache_path(source, image_size, folder)
        raw_bytes = sum(data.num_rows * header.frame_bytes(data) for data in datasets)
        if not overwrite and _is_done(target, header, source):
            if progress is not None:
                progress(header.num_frames, header.num_frames)
            return Ingested(target, header.num_frames, 0, target.stat().st_size, raw_bytes)
        with _naming(target, source):
            make_folder(target.parent)
            with _partial(target, anew=overwrite) as file:
                writer = _Writer(file, header, target)
                done = writer.resume()
                for first, frames in _batches(reader, header, done, threads):
                    writer.append(first, frames)
                    if progress is not None:
                        progress(first + len(frames), header.num_frames)
                writer.finish()
                description.identity.check(source)
                _part_path(target).replace(target)
                sync_folder(target.parent)
    return Ingested(target, header.num_frames, header.num_frames - done, target.stat().st_size, raw_bytes)


def _sources(description: Description, cameras: Sequence[str] | None) -> tuple[FrameReader, list[CachedDataset]]:
    """Return a reader of all frames, and the datasets that they are in, in its order."""
    roles = description.roles
    names = list(roles.cameras) if cameras is None else list(cameras)
    for name in names:
        if name not in roles.cameras:
            found = ", ".join(roles.cameras) or "none"
            raise MissingEntryError(f"{description.path}: there is no camera {name}; those found are {found}")
    if not names:
        raise DatasetError(f"{description.path}: has no images, so there is nothing to ingest")
    reader = FrameReader(Files())
    file = reader.files.add(description.path, description.identity)
    datasets: dict[str, CachedDataset] = {}
    for name in names:
        for number, stretch in enumerate(description.stretches):
            both = [(roles.cameras[name], stretch.cameras[name])]
            if stretch.final == "next":
                both.append((roles.next_cameras[name], stretch.next_cameras[name]))
            for path, images in both:
                where = f"{stretch.group.strip('/')}/{path}".lstrip("/")
                if where not in datasets:
                    name_in_cache = images.kind.cached_as(where)
                    datasets[where] = CachedDataset(name_in_cache, images.num_rows, images.kind.channels)
                    reader.add(DatasetSource(file, where, images.kind, images.offset))
            if number == 0:
                warn_if_slow(description.path, name, both[0][1].kind)
    return reader, list(datasets.values())


def _is_done(target: Path, wanted: CacheHeader, source: Path) -> bool:
    try:
        header = FrameCache(target).header
    except (SlipstreamError, OSError):
        return False
    same = (header.image_size, header.codec, header.datasets) == (wanted.image_size, wanted.codec, wanted.datasets)
    return same and is_fresh(header, source)


def _part_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


@contextlib.contextmanager
def _partial(target: Path, *, anew: bool) -> Iterator[BinaryIO]:
    """Open the unfinished file, alone; it stays if something goes wrong."""
    path = _part_path(target)
    while True:
        with open_private(path, os.O_RDWR | os.O_CREAT, LockableFile) as file:
            if not try_lock(file):
                raise DatasetError(f"{target}: another process is writing it")
            # Another process may have finished and renamed the file between opening and locking.
            if not is_still_at(file, path):
                continue
            if anew:
                file.truncate(0)
            yield cast("BinaryIO", file)
            return


class _Writer:
    """Appends frames to an unfinished cache."""

    def __init__(self, file: BinaryIO, header: CacheHeader, target: Path) -> None:
        self._file, self._header, self._target = file, header, target
        self._begin = header.to_bytes()
        self._position = len(self._begin)
        self._marked = self._position
        self._done = 0
        self._offsets: list[int] = []

    def resume(self) -> int:
        """Return how many frames are there already and sound; begins anew if they are of another source."""
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
        for record in records:
            self._offsets.append(self._position)
            _pwrite(self._file, record, self._position)
            self._position += len(record)
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

    def finish(self) -> None:
        """Write what comes after the last frame, and flush everything."""
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


def _batches(
    reader: FrameReader, header: CacheHeader, done: int, threads: int | None
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield the frames from number `done` on, some at a time; each is overwritten by the next."""
    first = 0
    for number, data in enumerate(header.datasets):
        step = max(1, _BATCH_BYTES // header.frame_bytes(data))
        shape = (min(step, data.num_rows), data.channels, header.image_size, header.image_size)
        memory = aligned(math.prod(shape)).reshape(shape)
        for row in range(max(0, done - first), data.num_rows, step):
            rows = np.arange(row, min(row + step, data.num_rows))
            out = memory[: len(rows)]
            reader.read([Request(np.full(len(rows), number), rows, out)], threads)
            yield first + row, out
        first += data.num_rows


def _pwrite(file: BinaryIO, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file.fileno(), view, offset)
        view, offset = view[count:], offset + count


@contextlib.contextmanager
def _naming(target: Path, source: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that says which file could not be written."""
    try:
        yield
    except SlipstreamError:
        raise
    except OSError as error:
        if error.filename is not None and Path(error.filename).absolute() == source.absolute():
            raise
        raise write_error(target, error, "; run ingest again to continue where it stopped") from error
