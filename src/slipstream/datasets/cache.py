"""A file of resized frames beside the file that they are from; see ``docs/formats/frame-cache.md``.

Frames lie one after another, each with a checksum, so that reading one is a single ``pread`` into the batch. A cache
is used only while the contents of its file are those that it was made of.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from slipstream import __version__
from slipstream.datasets.chunks import FrameKind
from slipstream.datasets.identity import Identity, fingerprint
from slipstream.datasets.source import STAMP_BYTES, Source, Stamp
from slipstream.errors import CorruptFileError, DatasetError, FormatVersionError, SlipstreamError
from slipstream.store.local import open_regular
from slipstream.text import format_bytes

logger = logging.getLogger(__name__)

MAGIC = b"\x89SLFC\r\n\x1a"
END_MAGIC = b"\x1a\n\rCFLS\x89"
VERSION = 2
HEAD = struct.Struct("<8sIIQ")
MARK = struct.Struct("<QQ")
MARK_OFFSET = HEAD.size
STAMP_OFFSET = MARK_OFFSET + MARK.size
FOOTER = struct.Struct("<QQQ8s")
CHECKSUM = struct.Struct("<Q")
_HEADER_OFFSETS = {1: 64, 2: 128}
_PAGE = 4096
_LINE = 64
_MAX_HEADER_BYTES = 256 << 20

FrameCodec = Literal["raw", "zstd"]
CacheSetting = bool | str | os.PathLike[str]
"""Whether to look for caches beside the files, or the folder where they are."""


@dataclass(frozen=True)
class CachedDataset:
    """The frames of one dataset of the source.

    Attributes:
        path: The dataset.
        num_rows: Its frames.
        channels: Channels of a frame.
        pixels: How stored values became pixels; see `describe_pixels`. Version 1 does not say.
    """

    path: str
    num_rows: int
    channels: int
    pixels: str = ""


@dataclass(frozen=True)
class CacheHeader:
    """What a cache holds, and of which file.

    Attributes:
        source: Path, size and digest of the file that the frames are from. In version 1: path, size, time of change and
            fingerprint.
        image_size: Height and width of each frame.
        codec: ``raw``, or ``zstd``, which is lossless too.
        datasets: The datasets of the source, in the order of their frames.
        version: Of the format.
    """

    source: Mapping[str, Any]
    image_size: int
    codec: FrameCodec
    datasets: tuple[CachedDataset, ...]
    version: int = VERSION

    @classmethod
    def of(cls, source: Source, image_size: int, codec: FrameCodec, datasets: Sequence[CachedDataset]) -> CacheHeader:
        """Describe a cache of a file as it is now."""
        path = os.path.realpath(source.path)
        described = {"path": path, "size_bytes": source.size_bytes, "digest": source.digest}
        return cls(described, image_size, codec, tuple(datasets))

    @property
    def num_frames(self) -> int:
        """Frames of all datasets."""
        return sum(data.num_rows for data in self.datasets)

    def frame_bytes(self, data: CachedDataset) -> int:
        """Size of a frame's pixels."""
        return data.channels * self.image_size**2

    def stride(self, data: CachedDataset) -> int:
        """Distance between raw frames: pixels and checksum, up to a whole number of cache lines."""
        return -(-(self.frame_bytes(data) + CHECKSUM.size) // _LINE) * _LINE

    def to_bytes(self) -> bytes:
        """Return the beginning of a file: everything before the first frame."""
        rows = [[data.path, data.num_rows, data.channels, data.pixels] for data in self.datasets]
        header = {
            "written_by": f"slipstream {__version__}",
            "source": dict(self.source),
            "image_size": self.image_size,
            "codec": self.codec,
            "datasets": rows,
        }
        text = json.dumps(header).encode()
        head = HEAD.pack(MAGIC, VERSION, len(text), xxhash.xxh3_64_intdigest(text))
        start = head.ljust(_HEADER_OFFSETS[VERSION], b"\0") + text
        return start + bytes(-len(start) % _PAGE)

    @classmethod
    def parse(cls, text: bytes, version: int) -> CacheHeader:
        """Read the JSON of a header without trusting it.

        Raises:
            CorruptFileError: If it is invalid.
        """
        try:
            node = json.loads(text)
            datasets = []
            for path, num_rows, channels, *pixels in node["datasets"]:
                datasets.append(CachedDataset(str(path), num_rows, channels, *map(str, pixels)))
            header = cls(dict(node["source"]), node["image_size"], node["codec"], tuple(datasets), version)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptFileError(f"invalid header ({error})") from error
        numbers = [header.image_size]
        for data in datasets:
            numbers += [data.num_rows, data.channels]
        valid = all(type(number) is int and 0 < number < 1 << 40 for number in numbers)
        if not valid or header.image_size > 1 << 16 or header.codec not in ("raw", "zstd"):
            raise CorruptFileError("invalid header: a size, a number of rows or the codec is out of range")
        return header


def describe_pixels(kind: FrameKind) -> str:
    """Return what the pixels of a frame depend on besides the stored bytes and the size of the frame."""
    return f"{kind.encoding}, linear"


def has_pixels_of(data: CachedDataset, kind: FrameKind, image_size: int) -> bool:
    """Return whether cached frames are those that reading and resizing the recorded ones would give."""
    if data.pixels:
        return data.pixels == describe_pixels(kind)
    # Version 1 does not say in which order compressed pictures were taken to have their channels. It averaged images
    # that shrink to half or less, where now all are interpolated linearly.
    is_averaged = min(kind.height, kind.width) >= 2 * image_size
    return kind.encoding == "raw" and not is_averaged


def cache_path(source: Path, image_size: int, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return where the cache of a file is: beside it, or in a folder, under a name that depends on the file's path."""
    if folder is None:
        return source.with_name(f"{source.name}.{image_size}px.frames")
    home = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(source)))
    return Path(folder) / f"{source.name}.{home}.{image_size}px.frames"


def find_cache(source: Path, image_size: int | None, setting: CacheSetting = True) -> FrameCache | None:
    """Return the cache of a file if there is one and it is fresh; logs why one that exists is not used."""
    if image_size is None or setting is False:
        return None
    path = cache_path(source, image_size, None if setting is True else setting)
    if not path.is_file():
        return None
    try:
        cache = FrameCache(path)
    except (SlipstreamError, OSError) as error:
        logger.warning("%s; frames are read from %s instead", error, source)
        return None
    if not is_fresh(cache, Source(source)):
        logger.warning("%s: %s has changed since this cache was made; it is not used; ingest again", path, source)
        return None
    return cache


def is_fresh(cache: FrameCache, source: Source, *, compare: bool = False) -> bool:
    """Return whether a cache was made of the contents that a file has now. Where the file is does not matter.

    Reads the whole file if its place or times are not those of the stamp in the cache, and replaces the stamp.

    Args:
        cache: The cache.
        source: The file.
        compare: Read the file in any case.
    """
    header = cache.header
    if header.source.get("size_bytes") != source.size_bytes:
        return False
    if header.version == 1:
        same_time = header.source.get("mtime_ns") == source.stamp.mtime_ns
        return same_time and header.source.get("fingerprint") == fingerprint(source.path)
    if cache.stamp == source.stamp and not compare:
        return True
    if not compare:
        logger.warning(
            "%s was copied, touched or changed: comparing all of it (%s) with what %s was made of",
            source.path, format_bytes(source.size_bytes), cache.path,
        )  # fmt: skip
    if header.source.get("digest") != source.digest or not source.is_unchanged():
        return False
    cache.remember(source.stamp)
    return True


def describe_state(cache: FrameCache, path: Path) -> str:
    """Say whether a cache is fresh, as far as that is known without reading the file."""
    source = Source(path)
    if cache.header.source.get("size_bytes") != source.size_bytes:
        return "stale"
    if cache.header.version == 1:
        return "fresh" if is_fresh(cache, source) else "stale"
    if cache.stamp == source.stamp:
        return "fresh"
    return "to be compared with the file when it is loaded"


class CacheIdentity(Identity):
    """A cache at some moment. Writing its stamp, which changes the file but no frame, does not count as a change."""

    def check(self, path: Path, descriptor: int | None = None) -> Identity:
        """Return the identity, and raise `DatasetError` if the cache was replaced."""
        status = path.stat() if descriptor is None else os.fstat(descriptor)
        now = self._from(path, status)
        if replace(now, ctime_ns=self.ctime_ns, sample=self.sample) != self:
            raise DatasetError(f"{path}: was replaced since it was opened")
        return self


class FrameCache:
    """A complete cache; opening reads its header only.

    Raises:
        CorruptFileError: If it is damaged, truncated, or not a cache.
        FormatVersionError: If a newer release wrote it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = CacheIdentity.of(path)
        with open_regular(path) as file:
            self.header, self.data_offset = read_header(path, file)
            file.seek(STAMP_OFFSET)
            stamp = file.read(STAMP_BYTES)
            file.seek(-min(FOOTER.size, self.identity.size_bytes), os.SEEK_END)
            footer = file.read()
        self.stamp = Stamp.parse(stamp) if self.header.version > 1 else None
        self.table_offset = self._check_footer(footer)

    def _check_footer(self, footer: bytes) -> int:
        header, size = self.header, self.identity.size_bytes
        if len(footer) != FOOTER.size or footer[-8:] != END_MAGIC:
            raise CorruptFileError(f"{self.path}: is truncated")
        table, frames, checksum, _ = FOOTER.unpack(footer)
        if checksum != xxhash.xxh3_64_intdigest(footer[:16]) or frames != header.num_frames:
            raise CorruptFileError(f"{self.path}: its footer does not fit its header")
        end = self.data_offset + sum(data.num_rows * header.stride(data) for data in header.datasets)
        expected = end if header.codec == "raw" else size - FOOTER.size - 8 * frames
        if table != expected or table < self.data_offset or (header.codec == "raw" and end + FOOTER.size != size):
            raise CorruptFileError(f"{self.path}: its size does not fit its header")
        return int(table)

    def remember(self, stamp: Stamp) -> None:
        """Write which file has been compared with the cache; without permission to write, nothing is remembered."""
        if not stamp.is_settled:
            return
        with contextlib.suppress(OSError):
            # Only the stamp changes: programs that read frames now must not mistake it for another cache.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                os.pwrite(descriptor, stamp.to_bytes(), STAMP_OFFSET)
                os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(descriptor)
            self.stamp = stamp


def read_header(path: Path, file: Any) -> tuple[CacheHeader, int]:
    """Read the header of a cache, complete or not; returns it, and where frames begin.

    Raises:
        CorruptFileError: If it is damaged, or not a cache.
        FormatVersionError: If a newer release wrote it.
    """
    file.seek(0)
    head = file.read(HEAD.size)
    if head[: len(MAGIC)] != MAGIC or len(head) != HEAD.size:
        raise CorruptFileError(f"{path}: is not a cache of frames")
    _, version, length, checksum = HEAD.unpack(head)
    if version not in _HEADER_OFFSETS:
        raise FormatVersionError(f"{path}: has format version {version}, this release reads versions 1 to {VERSION}")
    offset = _HEADER_OFFSETS[version]
    file.seek(offset)
    text = file.read(min(length, _MAX_HEADER_BYTES))
    if len(text) != length or xxhash.xxh3_64_intdigest(text) != checksum:
        raise CorruptFileError(f"{path}: its header does not match its checksum")
    try:
        header = CacheHeader.parse(text, version)
    except CorruptFileError as error:
        raise CorruptFileError(f"{path}: {error}") from error
    return header, math.ceil((offset + length) / _PAGE) * _PAGE
