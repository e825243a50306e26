"""The index of a container file: what is stored where. Parsing trusts nothing.

An index that parses has unique names, known dtypes and codecs, sane sizes, and chunks that tile the data section of the
file exactly: no overlap, no gap, nothing outside. Whoever reads by it cannot be led astray.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.codecs import Codec, codec_from_header
from slipstream.errors import CorruptFileError, FormatVersionError, SlipstreamError

MAX_INDEX_BYTES = 64 << 20
MAX_CHUNK_BYTES = 64 << 20
_MAX_ARRAY_BYTES = 1 << 48
MAX_AXES = 32
_OVERHEAD_BYTES = 64 << 10
DTYPES = frozenset(
    np.dtype(f"{order}{kind}").str
    for order in "<>"
    for kind in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
)
"""How an index spells the dtypes it may hold."""


@dataclass(frozen=True)
class Chunk:
    """Where one encoded part of an array lies in the file."""

    offset: int
    length: int
    checksum: int


@dataclass(frozen=True)
class Grid:
    """How an array is cut into chunks that are contiguous in C order; see `part_shape`.

    All but one axis are trivial: before `axis` a chunk spans one index, after it all of them.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @property
    def axis(self) -> int:
        """The axis that is cut, or the last one if every chunk is a single element."""
        return next((axis for axis, step in enumerate(self.chunk_shape) if step != 1), len(self.shape) - 1)

    @property
    def per_line(self) -> int:
        """How many chunks lie along the axis that is cut."""
        return -(-self.shape[self.axis] // self.chunk_shape[self.axis])

    def count(self) -> int:
        """Return how many chunks there are."""
        if not self.shape or not math.prod(self.shape):
            return math.prod(self.shape)
        return math.prod(self.shape[: self.axis]) * self.per_line

    def part(self, number: int) -> tuple[int, tuple[int, ...]]:
        """Return the position of a chunk's first element in the flat array, and the chunk's shape."""
        if not self.shape:
            return 0, ()
        axis, step = self.axis, self.chunk_shape[self.axis]
        outer, position = divmod(number, self.per_line)
        length = min(step, self.shape[axis] - position * step)
        start = (outer * self.shape[axis] + position * step) * math.prod(self.shape[axis + 1 :])
        return start, (*self.chunk_shape[:axis], length, *self.shape[axis + 1 :])

    def number_of(self, element: int) -> int:
        """Return which chunk holds an element of the flat array."""
        if not self.shape:
            return 0
        index, length = element // math.prod(self.shape[self.axis + 1 :]), self.shape[self.axis]
        return index // length * self.per_line + index % length // self.chunk_shape[self.axis]


@dataclass(frozen=True)
class Entry:
    """One named array in a container; chunk number i holds part number i of its grid."""

    name: str
    dtype: np.dtype[Any]
    grid: Grid
    codec: Codec
    chunks: tuple[Chunk, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.grid.shape

    @property
    def nbytes(self) -> int:
        """Size of the array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Size of the encoded chunks in the file."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True)
class Index:
    """Everything a container says of its content: arrays by name, and small JSON values by name."""

    kind: str
    written_by: str
    entries: Mapping[str, Entry]
    values: Mapping[str, Any]

    def to_json(self) -> bytes:
        """Return the index as compact JSON.

        Raises:
            TypeError: If a value is not plain JSON.
        """
        for name, value in self.values.items():
            _check_json(value, name)
        document = {
            "kind": self.kind,
            "written_by": self.written_by,
            "entries": [
                {
                    "name": entry.name,
                    "dtype": entry.dtype.str,
                    "shape": entry.shape,
                    "codec": entry.codec.to_header(),
                    "chunk_shape": entry.grid.chunk_shape,
                    "chunks": [[chunk.offset, chunk.length, f"{chunk.checksum:016x}"] for chunk in entry.chunks],
                }
                for entry in self.entries.values()
            ],
            "values": dict(self.values),
        }
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, text: bytes, data_start: int, data_stop: int) -> Index:
        """Check and read an index whose chunks must tile the bytes from `data_start` to `data_stop`.

        Raises:
            CorruptFileError: With the reason, if anything in it is not as a writer would have written it.
            FormatVersionError: If it names a codec of a newer release.
        """
        document = _load(text)
        entries: dict[str, Entry] = {}
        for item in _field(document, "entries", list):
            entry = _parse_entry(item)
            if entry.name in entries:
                raise CorruptFileError(f"index lists the entry {entry.name!r} twice")
            entries[entry.name] = entry
        _check_tiling([chunk for entry in entries.values() for chunk in entry.chunks], data_start, data_stop)
        return cls(
            _field(document, "kind", str),
            _field(document, "written_by", str),
            entries,
            _field(document, "values", dict),
        )


def _check_json(value: Any, name: str) -> None:
    """Raise `TypeError` for what JSON would change on the way, such as a key that is not a string."""
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise TypeError(f"value {name!r} has the key {key!r}, expected strings")
            _check_json(member, name)
    elif isinstance(value, (list, tuple)):
        for member in value:
            _check_json(member, name)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(f"value {name!r} holds a {type(value).__qualname__}, expected plain JSON")


def _load(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise CorruptFileError("index holds an object with the same key twice")
        return members

    def finite(literal: str) -> float:
        if not math.isfinite(number := float(literal)):
            raise CorruptFileError(f"index holds the number {literal[:40]}, which is not finite")
        return number

    try:
        document = json.loads(text, object_pairs_hook=unique, parse_constant=finite, parse_float=finite)
    except CorruptFileError:
        raise
    except RecursionError:
        raise CorruptFileError("index is nested too deeply") from None
    except ValueError as error:
        raise CorruptFileError(f"index is not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise CorruptFileError("index is not a JSON object")
    return document


def _field(item: Any, key: str, kind: type) -> Any:
    value = item.get(key) if isinstance(item, dict) else None
    if not isinstance(value, kind):
        raise CorruptFileError(f"index has no {kind.__name__} {key!r} where one belongs")
    return value


def _sizes(item: Any, key: str) -> tuple[int, ...]:
    sizes = _field(item, key, list)
    if len(sizes) > MAX_AXES or not all(type(size) is int and 0 <= size <= _MAX_ARRAY_BYTES for size in sizes):
        raise CorruptFileError(f"index has a {key!r} that is not a list of at most {MAX_AXES} sizes")
    return tuple(sizes)


def _parse_entry(item: Any) -> Entry:
    name = _field(item, "name", str)
    try:
        grid = Grid(_sizes(item, "shape"), _sizes(item, "chunk_shape"))
        chunks = tuple(_parse_chunk(chunk) for chunk in _field(item, "chunks", list))
        entry = Entry(name, _parse_dtype(item), grid, _parse_codec(item), chunks)
        _check_geometry(entry)
    except FormatVersionError as error:
        raise FormatVersionError(f"entry {name[:200]!r}: {error}") from error
    except CorruptFileError as error:
        raise CorruptFileError(f"entry {name[:200]!r}: {error}") from error
    return entry


def _parse_dtype(item: Any) -> np.dtype[Any]:
    dtype: str = _field(item, "dtype", str)
    if dtype not in DTYPES:
        raise CorruptFileError(f"index has the dtype {dtype[:40]!r}, which no writer uses")
    return np.dtype(dtype)


def _parse_codec(item: Any) -> Codec:
    try:
        return codec_from_header(_field(item, "codec", dict))
    except FormatVersionError:
        raise
    except SlipstreamError as error:
        raise CorruptFileError(str(error)) from error


def _parse_chunk(chunk: Any) -> Chunk:
    if not (isinstance(chunk, list) and [type(field) for field in chunk] == [int, int, str]):
        raise CorruptFileError("index has a chunk that is not [offset, length, checksum]")
    offset, length, checksum = chunk
    if offset < 0 or length < 1 or len(checksum) != 16 or not set(checksum) <= set("0123456789abcdef"):
        raise CorruptFileError(f"index has the chunk {str(chunk)[:80]}, which no writer writes")
    return Chunk(offset, length, int(checksum, 16))


def _check_geometry(entry: Entry) -> None:
    shape, part = entry.shape, entry.grid.chunk_shape
    if math.prod(length for length in shape if length) * entry.dtype.itemsize > _MAX_ARRAY_BYTES:
        raise CorruptFileError(f"index claims an array of shape {list(shape)}")
    if len(part) != len(shape):
        raise CorruptFileError(f"index has chunks of shape {list(part)} in an array of shape {list(shape)}")
    if entry.nbytes:
        fits = all(0 < step <= length for step, length in zip(part, shape, strict=True))
        if not fits or part[entry.grid.axis + 1 :] != shape[entry.grid.axis + 1 :]:
            raise CorruptFileError(f"index has chunks of shape {list(part)} in an array of shape {list(shape)}")
        decoded = math.prod(part) * entry.dtype.itemsize
        if decoded > MAX_CHUNK_BYTES:
            raise CorruptFileError(f"index has chunks of shape {list(part)}, larger than {MAX_CHUNK_BYTES} bytes")
        longest = max((chunk.length for chunk in entry.chunks), default=0)
        if longest > decoded + decoded // 64 + _OVERHEAD_BYTES:  # no codec makes anything larger than that
            raise CorruptFileError(f"index has a chunk of {longest} bytes for {decoded} bytes of content")
    expected = entry.grid.count()
    if len(entry.chunks) != expected:
        raise CorruptFileError(f"index lists {len(entry.chunks)} chunks, expected {expected}")


def _check_tiling(chunks: list[Chunk], start: int, stop: int) -> None:
    position = start
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        if chunk.offset != position:
            raise CorruptFileError(f"index has a chunk at byte {chunk.offset}, expected the next at {position}")
        position += chunk.length
    if position != stop:
        raise CorruptFileError(f"index ends its chunks at byte {position}, expected {stop}")
