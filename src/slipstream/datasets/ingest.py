"""Resize the frames of a file once, into a cache from which they are read at the speed of a copy.

It can be interrupted at any instant, by an error or by ``kill -9``, and the next call continues. Frames are appended to
a file of another name, each with its checksum. From time to time the file is flushed, and a mark in it moves forward.
The next call checks the frames after the mark and keeps those before the first damaged one. The complete file gets
its final name.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.datasets.cache import (
    CachedDataset,
    CacheHeader,
    FrameCache,
    FrameCodec,
    cache_path,
    describe_pixels,
    is_fresh,
)
from slipstream.datasets.cache_writer import CacheWriter
from slipstream.datasets.cached import RegisteredCache
from slipstream.datasets.describe import describe
from slipstream.datasets.description import Description, Fields, Images
from slipstream.datasets.files import Files
from slipstream.datasets.frames import DatasetSource, FrameReader, Request, warn_if_slow
from slipstream.datasets.source import Source
from slipstream.errors import CorruptFileError, DatasetError, MissingEntryError, SlipstreamError
from slipstream.memory import aligned
from slipstream.store.local import make_folder, sync_folder, write_error
from slipstream.store.lock import LockableFile, is_still_at, open_private, try_lock

logger = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 20

Progress = Callable[[int, int], None]
"""Called with the number of frames that are done, and of all."""


@dataclass(frozen=True)
class Ingested:
    """The result of ingesting a file.

    Attributes:
        path: The cache.
        num_frames: Frames in it.
        new_frames: Frames that this call resized; 0 if the cache was fresh already.
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
    verify: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Ingested:
    """Store the resized frames of a file once; every program that loads the file afterwards reads those instead.

    Blocks until the cache is complete and durable, or returns at once if there is a fresh one. Continues after an
    earlier call that was interrupted. Cameras that a fresh cache has already are kept, so a camera can be added later.
    A copy of the file and its cache is as good as the original: whether a cache is fresh is decided by the contents of
    the file, all of which are read once for that. Memory holds some megabytes of frames. The source is not changed.

    Args:
        path: The recorded file.
        image_size: Height and width of the stored frames.
        fields: Which datasets are what; see `Fields`.
        cameras: Which cameras; all by default.
        folder: Where the cache goes; by default beside the file.
        compress: Pack frames with zstd, losslessly: smaller, and a few times slower to read.
        overwrite: Make the frames of these cameras again, even if the cache is fresh.
        verify: Compare the contents of the file with what the cache was made of, though nothing suggests a change, and
            every frame in the cache with its checksum. A cache that does not match is made again.
        progress: Called with the number of frames that are done, and of all.
        threads: How many threads resize; by default one per core.

    Raises:
        DatasetError: If the file has no images, changes in the meantime, or is being ingested by another process.
        WriteError: If the cache cannot be written; what is written stays, and the next call continues there.

    Example:
        >>> import h5py, numpy
        >>> with h5py.File("/tmp/slipstream-doc-ingest.hdf5", "w") as file:
        ...     file["observations/left_image"] = numpy.zeros((11, 64, 64, 3), "uint8")
        ...     file["actions"] = numpy.zeros((10, 7))
        >>> ingest("/tmp/slipstream-doc-ingest.hdf5", image_size=32, overwrite=True).num_frames
        11
    """
    require_count("image_size", image_size, 1, 8192)
    description = describe(path, fields, cameras=cameras)
    source = Source(description.path)
    description.identity.check(source.path)
    target = cache_path(source.path, image_size, folder)
    codec: FrameCodec = "zstd" if compress else "raw"
    existing = _find_existing(target, source, verify=verify, threads=threads)
    with contextlib.closing(Files()) as files:
        frames = _Frames(description, files, existing, reuse=not overwrite)
        for name in _choose_cameras(description, cameras):
            frames.add_camera(name, codec)
        header = CacheHeader.of(source, image_size, codec, frames.datasets)
        raw_bytes = 0
        for data in header.datasets:
            raw_bytes += data.num_rows * header.frame_bytes(data)
        num_new = 0
        if existing is None or overwrite or not _holds(existing.header, header):
            num_new = _write(target, source, header, frames, restart=overwrite, progress=progress, threads=threads)
        elif progress is not None:
            progress(header.num_frames, header.num_frames)
    return Ingested(target, header.num_frames, num_new, target.stat().st_size, raw_bytes)


def _choose_cameras(description: Description, cameras: Sequence[str] | None) -> list[str]:
    """Return the names of cameras, all of them by default, and raise if one is missing or there is none."""
    known = description.roles.cameras
    names = list(known) if cameras is None else list(cameras)
    missing = [name for name in names if name not in known]
    if missing:
        found = ", ".join(known) or "none"
        raise MissingEntryError(f"{description.path}: there is no camera {', '.join(missing)}; those found are {found}")
    if not names:
        raise DatasetError(f"{description.path}: has no images, so there is nothing to ingest")
    return names


def _find_existing(target: Path, source: Source, *, verify: bool, threads: int | None) -> FrameCache | None:
    """Return the cache if there is one, it is fresh and, if that is to be verified, intact."""
    try:
        cache = FrameCache(target)
    except (SlipstreamError, OSError):
        return None
    if not is_fresh(cache, source, compare=verify):
        return None
    if verify:
        try:
            _check_frames(cache, threads)
        except CorruptFileError as error:
            logger.warning("%s", error)
            return None
    return cache


def _check_frames(cache: FrameCache, threads: int | None) -> None:
    """Raise `CorruptFileError` if a frame of a cache does not match its checksum."""
    with contextlib.closing(Files()) as files:
        # There is no recorded file: the cache is the only one, number 0.
        registered = RegisteredCache(cache, files, recorded=0)
        reader = FrameReader(files)
        for data in cache.header.datasets:
            reader.add(registered.source_of(data))
        for _ in _batches(reader, cache.header, 0, threads):
            pass


class _Frames:
    """The datasets whose frames a cache is to have, and where each is read from: the recorded file, or an older cache.

    Args:
        description: The recorded file.
        files: A table of files, to which those that are read are added.
        existing: A fresh cache, whose datasets come first.
        reuse: Whether frames of cameras that are added are taken from it as well.
    """

    def __init__(self, description: Description, files: Files, existing: FrameCache | None, *, reuse: bool) -> None:
        self.reader = FrameReader(files)
        self._description = description
        self._file = files.add(description.path, description.identity)
        self._reuse = reuse
        self._datasets: dict[str, CachedDataset] = {}
        self._kept: set[str] = set()
        self._cached: RegisteredCache | None = None
        if existing is not None:
            self._cached = RegisteredCache(existing, files, self._file)
            for data in existing.header.datasets:
                self._datasets[data.path] = data
                self._kept.add(data.path)
                self.reader.add(self._cached.source_of(data))

    @property
    def datasets(self) -> list[CachedDataset]:
        """The datasets, in the order of the reader's sources."""
        return list(self._datasets.values())

    @property
    def num_kept(self) -> int:
        """Frames that are only copied."""
        return sum(self._datasets[path].num_rows for path in self._kept)

    def add_camera(self, name: str, codec: FrameCodec) -> None:
        """Add the datasets of a camera, or replace those that are there if their frames are not to be reused."""
        roles = self._description.roles
        warn_if_slow(self._description.path, name, self._description.stretches[0].cameras[name].kind)
        for stretch in self._description.stretches:
            self._add(stretch.group, roles.cameras[name], stretch.cameras[name], codec)
            if stretch.final == "next":
                self._add(stretch.group, roles.next_cameras[name], stretch.next_cameras[name], codec)

    def _add(self, group: str, path: str, images: Images, codec: FrameCodec) -> None:
        where = f"{group.strip('/')}/{path}".lstrip("/")
        recorded = DatasetSource(self._file, where, images.kind, images.offset)
        data = CachedDataset(where, images.num_rows, images.kind.channels, describe_pixels(images.kind))
        if where not in self._datasets:
            self._datasets[where] = data
            self.reader.add(recorded)
            return
        number = list(self._datasets).index(where)
        cached = None
        if self._cached is not None and self._reuse and self._cached.codec == codec:
            cached = self._cached.source(where, images, recorded)
        self._datasets[where] = data
        if cached is None:
            self._kept.discard(where)
            self.reader.sources[number] = recorded
        else:
            self.reader.sources[number] = cached


def _holds(found: CacheHeader, wanted: CacheHeader) -> bool:
    """Return whether a cache has all that is wanted."""
    same = (found.image_size, found.codec) == (wanted.image_size, wanted.codec)
    return same and set(wanted.datasets) <= set(found.datasets)


def _write(
    target: Path, source: Source, header: CacheHeader, frames: _Frames, *, restart: bool, progress: Progress | None,
    threads: int | None,
) -> int:  # fmt: skip
    """Write a cache, or continue to; returns how many of its frames are new."""
    with _naming(target, source.path):
        make_folder(target.parent)
        with _partial(target, restart=restart) as file:
            writer = CacheWriter(file, header, target)
            done = writer.resume()
            for first, batch in _batches(frames.reader, header, done, threads):
                writer.append(first, batch)
                if progress is not None:
                    progress(first + len(batch), header.num_frames)
            source.settle()
            if not source.is_unchanged():
                raise DatasetError(f"{source.path}: changed while it was ingested; ingest it again")
            writer.finish(source.stamp)
            _part_path(target).replace(target)
            sync_folder(target.parent)
    return header.num_frames - max(done, frames.num_kept)


def _part_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


@contextlib.contextmanager
def _partial(target: Path, *, restart: bool) -> Iterator[BinaryIO]:
    """Open the unfinished file, alone; it stays if something goes wrong."""
    path = _part_path(target)
    while True:
        with open_private(path, os.O_RDWR | os.O_CREAT, LockableFile) as file:
            if not try_lock(file):
                raise DatasetError(f"{target}: another process is writing it")
            # Another process may have finished and renamed the file between opening and locking.
            if not is_still_at(file, path):
                continue
            if restart:
                file.truncate(0)
            yield cast("BinaryIO", file)
            return


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
