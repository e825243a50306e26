"""A file of frames that are resized already, beside the file they are from; see ``docs/formats/frame-cache.md``.

Frames lie one after another, each with a checksum, so that reading one is a single ``pread`` into the batch. A cache
says of which file it is; one of another file, or of the same file before it changed, is not used.
"""

from __future__ import annotations

import json
import logging
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from slipstream import __version__
from slipstream.datasets.handles import Files
from slipstream.datasets.identity import Identity, fingerprint
from slipstream.datasets.prepare import Interpolation
from slipstream.errors import CorruptFileError, FormatVersionError, SlipstreamError
from slipstream.memory import scratch
from slipstream.store.local import open_regular

logger = logging.getLogger(__name__)

MAGIC = b"\x89SLFC\r\n\x1a"
END_MAGIC = b"\x1a\n\rCFLS\x89"
VERSION = 1
HEAD = struct.Struct("<8sIIQ")
MARK = struct.Struct("<QQ")
MARK_OFFSET = HEAD.size
HEADER_OFFSET = 64
FOOTER = struct.Struct("<QQQ8s")
CHECKSUM = struct.Struct("<Q")
_PAGE, _LINE = 4096, 64
_MAX_HEADER_BYTES = 256 << 20

FrameCodec = Literal["raw", "zstd"]
CacheSetting = bool | str | os.PathLike[str]
"""Whether to look for caches beside the files, or the folder where they are."""


@dataclass(frozen=True)
class CachedDataset:
    """The frames of one dataset of the source."""

    path: str
    num_rows: int
    channels: int


@dataclass(frozen=True)
class CacheHeader:
    """What a cache holds, and of which file.

    Attributes:
        source: Path, size, time of change and fingerprint of the file the frames are from.
        image_size: Height and width of each frame.
        codec: ``raw``, or ``zstd``, which loses nothing either.
        datasets: The datasets of the source, in the order of their frames.
    """

    source: Mapping[str, Any]
    image_size: int
    codec: FrameCodec
    datasets: tuple[CachedDataset, ...]

    @classmethod
    def of(cls, source: Path, image_size: int, codec: FrameCodec, datasets: Sequence[CachedDataset]) -> CacheHeader:
        """Describe a cache of a file as it is now."""
        return cls(describe_source(source), image_size, codec, tuple(datasets))

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
        text = json.dumps(
            {
                "written_by": f"slipstream {__version__}",
                "source": dict(self.source),
                "image_size": self.image_size,
                "codec": self.codec,
                "datasets": [[data.path, data.num_rows, data.channels] for data in self.datasets],
            }
        ).encode()
        head = HEAD.pack(MAGIC, VERSION, len(text), xxhash.xxh3_64_intdigest(text))
        start = head.ljust(HEADER_OFFSET, b"\0") + text
        return start + bytes(-len(start) % _PAGE)

    @classmethod
    def parse(cls, text: bytes) -> CacheHeader:
        """Read the JSON of a header, trusting nothing.

        Raises:
            CorruptFileError: If it makes no sense.
        """
        try:
            node = json.loads(text)
            datasets = tuple(CachedDataset(str(path), rows, channels) for path, rows, channels in node["datasets"])
            header = cls(dict(node["source"]), node["image_size"], node["codec"], datasets)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptFileError(f"its header makes no sense ({error})") from error
        numbers = [header.image_size, *(n for data in datasets for n in (data.num_rows, data.channels))]
        sane = all(type(number) is int and 0 < number < 1 << 40 for number in numbers)
        if not sane or header.image_size > 1 << 16 or header.codec not in ("raw", "zstd"):
            raise CorruptFileError("its header makes no sense")
        return header


def describe_source(path: Path) -> dict[str, Any]:
    """Return what tells a file from others, and from itself before it changed."""
    identity = Identity.of(path)
    return {
        "path": os.path.realpath(path),
        "size_bytes": identity.size_bytes,
        "mtime_ns": identity.mtime_ns,
        "fingerprint": fingerprint(path),
    }


def cache_path(source: Path, image_size: int, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return where the cache of a file is: beside it, or in a folder, where its name tells files of one name apart."""
    if folder is None:
        return source.with_name(f"{source.name}.{image_size}px.frames")
    home = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(source)))
    return Path(folder) / f"{source.name}.{home}.{image_size}px.frames"


def find_cache(source: Path, image_size: int | None, setting: CacheSetting = True) -> FrameCache | None:
    """Return the cache of a file if there is one and it is fresh; says in the log why one that is there is not used."""
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
    if not is_fresh(cache.header, source):
        logger.warning("%s: is of %s as it was before it changed, and not used; ingest it again", path, source)
        return None
    return cache


def is_fresh(header: CacheHeader, source: Path) -> bool:
    """Tell whether a cache is of a file as it is now; where the file is does not matter, so that both can be moved."""
    now = describe_source(source)
    return all(header.source.get(key) == now[key] for key in ("size_bytes", "mtime_ns", "fingerprint"))


class FrameCache:
    """A complete cache; opening reads its header only.

    Raises:
        CorruptFileError: If it is damaged, cut off, or no cache.
        FormatVersionError: If a newer release wrote it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = Identity.of(path)
        with open_regular(path) as file:
            self.header, self.data_offset = read_header(path, file)
            file.seek(-min(FOOTER.size, self.identity.size_bytes), os.SEEK_END)
            footer = file.read()
        self.table_offset = self._check_footer(footer)

    def _check_footer(self, footer: bytes) -> int:
        header, size = self.header, self.identity.size_bytes
        if len(footer) != FOOTER.size or footer[-8:] != END_MAGIC:
            raise CorruptFileError(f"{self.path}: is cut off")
        table, frames, checksum, _ = FOOTER.unpack(footer)
        if checksum != xxhash.xxh3_64_intdigest(footer[:16]) or frames != header.num_frames:
            raise CorruptFileError(f"{self.path}: its footer does not fit its header")
        end = self.data_offset + sum(data.num_rows * header.stride(data) for data in header.datasets)
        expected = end if header.codec == "raw" else size - FOOTER.size - 8 * frames
        if table != expected or table < self.data_offset or (header.codec == "raw" and end + FOOTER.size != size):
            raise CorruptFileError(f"{self.path}: its size does not fit its header")
        return int(table)

    def register(self, files: Files) -> RegisteredCache:
        """Make its frames readable by way of a table of files."""
        return RegisteredCache(self, files.add(self.path, self.identity))


class RegisteredCache:
    """A cache in a table of files."""

    def __init__(self, cache: FrameCache, file: int) -> None:
        self._sources: dict[str, tuple[CachedDataset, CacheSource]] = {}
        offset, first = cache.data_offset, 0
        verified = np.zeros(cache.header.num_frames, bool)
        for data in cache.header.datasets:
            header = cache.header
            place = (offset, header.stride(data)) if header.codec == "raw" else (cache.table_offset, 0)
            self._sources[data.path] = (data, CacheSource(file, data, header, place, first, verified))
            offset += data.num_rows * header.stride(data)
            first += data.num_rows

    def source(self, path: str, num_rows: int) -> CacheSource | None:
        """Return where the frames of a dataset are, or None if they are not in the cache."""
        data, source = self._sources.get(path, (None, None))
        return source if data is not None and data.num_rows == num_rows else None


class CacheSource:
    """The frames of one dataset in a cache.

    A frame is compared with its checksum when this process reads it for the first time: what rots does so on the disk,
    and comparing every time would take half as long again as reading.
    """

    __slots__ = ("_first", "_place", "_shape", "_verified", "_zstd", "file", "path")
    rows_together = 0

    def __init__(
        self, file: int, data: CachedDataset, header: CacheHeader, place: tuple[int, int], first: int,
        verified: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        self.file, self.path = file, data.path
        self._shape = (data.channels, header.image_size, header.image_size)
        self._zstd = header.codec == "zstd"
        self._place, self._first, self._verified = place, first, verified

    def read(
        self,
        files: Files,
        rows: Sequence[int],
        targets: Sequence[NDArray[np.uint8]],
        interpolation: Interpolation = "linear",
    ) -> None:
        """Read frames, each into its target. They are resized already, so `interpolation` has no effect."""
        with files.borrow(self.file) as descriptor:
            for row, target in zip(rows, targets, strict=True):
                sound = (
                    self._read_packed(descriptor, row, target) if self._zstd else self._read(descriptor, row, target)
                )
                if not sound:
                    files.check(self.file)
                    raise CorruptFileError(
                        f"{files.paths[self.file]}: frame {row} of {self.path} does not match its checksum; "
                        "delete the cache, and ingest again"
                    )

    def _read(self, descriptor: int, row: int, target: NDArray[np.uint8]) -> bool:
        start, stride = self._place
        if self._verified[self._first + row]:
            return os.preadv(descriptor, [target.data], start + row * stride) == target.nbytes
        tail = scratch("tail", stride - target.nbytes, np.dtype(np.uint8))
        if os.preadv(descriptor, [target.data, tail.data], start + row * stride) != stride:
            return False
        return self._check(row, target, int.from_bytes(tail[-8:].tobytes(), "little"))

    def _read_packed(self, descriptor: int, row: int, target: NDArray[np.uint8]) -> bool:
        table = os.pread(descriptor, 8, self._place[0] + 8 * (self._first + row))
        if len(table) != 8:
            return False
        offset = int.from_bytes(table, "little")
        length = int.from_bytes(os.pread(descriptor, 8, offset), "little") if offset < self._place[0] else 0
        if not 0 < length <= target.nbytes + 1024:
            return False
        record = os.pread(descriptor, length + 8, offset + 8)
        try:
            pixels = zstandard.ZstdDecompressor().decompress(record[:length], max_output_size=target.nbytes)
        except zstandard.ZstdError:
            return False
        if len(pixels) != target.nbytes or len(record) != length + 8:
            return False
        target.reshape(-1)[:] = np.frombuffer(pixels, np.uint8)
        return self._check(row, target, int.from_bytes(record[length:], "little"))

    def _check(self, row: int, target: NDArray[np.uint8], checksum: int) -> bool:
        sound = xxhash.xxh3_64_intdigest(target.data) == checksum
        self._verified[self._first + row] = sound
        return sound

    def __getstate__(self) -> tuple[Any, ...]:
        return self.file, self.path, self._shape, self._zstd, self._place, self._first, self._verified

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.file, self.path, self._shape, self._zstd, self._place, self._first, self._verified = state


def read_header(path: Path, file: Any) -> tuple[CacheHeader, int]:
    """Read the header of a cache, complete or not; returns it, and where frames begin.

    Raises:
        CorruptFileError: If it is damaged, or no cache.
        FormatVersionError: If a newer release wrote it.
    """
    file.seek(0)
    head = file.read(HEAD.size)
    if head[: len(MAGIC)] != MAGIC or len(head) != HEAD.size:
        raise CorruptFileError(f"{path}: is not a cache of frames")
    _, version, length, checksum = HEAD.unpack(head)
    if version != VERSION:
        raise FormatVersionError(f"{path}: has format version {version}, this release reads version {VERSION}")
    file.seek(HEADER_OFFSET)
    text = file.read(min(length, _MAX_HEADER_BYTES))
    if len(text) != length or xxhash.xxh3_64_intdigest(text) != checksum:
        raise CorruptFileError(f"{path}: its header does not match its checksum")
    try:
        header = CacheHeader.parse(text)
    except CorruptFileError as error:
        raise CorruptFileError(f"{path}: {error}") from error
    return header, math.ceil((HEADER_OFFSET + length) / _PAGE) * _PAGE
