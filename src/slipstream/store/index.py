"""The index of a container file: what is stored where. Parsing trusts nothing.

An index that parses has unique names, known dtypes and codecs, plausible sizes, and chunks that tile the data section
of the file exactly: no overlap, no gap, nothing outside. Code that follows it reads only what was written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slipstream.codecs import Codec, codec_from_header
from slipstream.errors import CorruptFileError, FormatVersionError, SlipstreamError, naming
from slipstream.floats import ieee_arithmetic

MAX_INDEX_BYTES = 64 << 20
MAX_CHUNK_BYTES = 64 << 20
MAX_AXES = 32
MAX_DEPTH = 500
"""How deeply JSON may be nested; the parser recurses, and deeper nesting could exhaust the stack."""
MAX_CONTAINERS = 3 << 20
"""How many JSON lists and objects an index may have: more than the chunks that fit into `MAX_INDEX_BYTES`."""
MAX_NODES = 4 * MAX_CONTAINERS
"""How many values an index may have; a chunk is a list of three."""

_MAX_ARRAY_BYTES = 1 << 48
# A codec may add a little to what it cannot compress.
_OVERHEAD_BYTES = 64 << 10
# How much of an index is examined at a time, so that it takes little memory.
SCAN_BYTES = 1 << 20
# Python writes a float in at most 24 characters.
_MAX_FLOAT_CHARACTERS = 64
_CHECKSUM = re.compile("[0-9a-f]{16}")

DTYPES = frozenset(
    np.dtype(f"{order}{kind}").str
    for order in "<>"
    for kind in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
)
"""The dtypes that an index may contain. No other string reaches ``np.dtype``, which would import modules by name."""


class Chunk(NamedTuple):
    """Where one encoded part of an array lies in the file."""

    offset: int
    length: int
    checksum: int


@dataclass(frozen=True)
class Grid:
    """How an array is split into chunks that are contiguous in C order; see `part_shape`.

    All axes but one are trivial: a chunk spans a single index of each axis before `axis`, and all of each after it.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @property
    def axis(self) -> int:
        """The axis that is split, or the last one if every chunk is a single element."""
        for axis, length in enumerate(self.chunk_shape):
            if length != 1:
                return axis
        return len(self.shape) - 1

    @property
    def chunks_per_line(self) -> int:
        """How many chunks lie along the axis that is split."""
        return -(-self.shape[self.axis] // self.chunk_shape[self.axis])

    @property
    def inner_size(self) -> int:
        """How many elements there are for each index of the axis that is split."""
        return math.prod(self.shape[self.axis + 1 :])

    def count(self) -> int:
        """Return the number of chunks: one for a scalar, none for an empty array."""
        size = math.prod(self.shape)
        if not self.shape or not size:
            return size
        return math.prod(self.shape[: self.axis]) * self.chunks_per_line

    def part(self, number: int) -> tuple[int, tuple[int, ...]]:
        """Return the position of a chunk's first element in the flat array, and the chunk's shape."""
        if not self.shape:
            return 0, ()
        axis = self.axis
        # Position along the axis that is split; the last chunk of a line may be shorter.
        line, column = divmod(number, self.chunks_per_line)
        first = column * self.chunk_shape[axis]
        length = min(self.chunk_shape[axis], self.shape[axis] - first)
        start = (line * self.shape[axis] + first) * self.inner_size
        return start, (*self.chunk_shape[:axis], length, *self.shape[axis + 1 :])

    def index(self, number: int) -> tuple[slice, ...]:
        """Return the index that selects a chunk from the array."""
        start, shape = self.part(number)
        index = []
        # From the last axis to the first, as in splitting a number into digits.
        for length, size in zip(reversed(shape), reversed(self.shape), strict=True):
            start, place = divmod(start, size)
            index.append(slice(place, place + length))
        return tuple(reversed(index))

    def numbers(self, first: int, size: int) -> range:
        """Return the chunks that contain some consecutive elements of the flat array."""
        if not size:
            return range(0)
        return range(self.number_of(first), self.number_of(first + size - 1) + 1)

    def number_of(self, element: int) -> int:
        """Return the number of the chunk that contains an element of the flat array."""
        if not self.shape:
            return 0
        line, position = divmod(element // self.inner_size, self.shape[self.axis])
        return line * self.chunks_per_line + position // self.chunk_shape[self.axis]


@dataclass(frozen=True)
class Entry:
    """One named array in a container; chunk number i is part number i of its grid."""

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

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a JSON object."""
        return {
            "name": self.name,
            "dtype": self.dtype.str,
            "shape": self.shape,
            "codec": self.codec.to_header(),
            "chunk_shape": self.grid.chunk_shape,
            "chunks": [[chunk.offset, chunk.length, f"{chunk.checksum:016x}"] for chunk in self.chunks],
        }


@dataclass(frozen=True)
class Index:
    """The table of contents of a container: arrays by name, and small JSON values by name."""

    kind: str
    written_by: str
    entries: Mapping[str, Entry]
    values: Mapping[str, Any]

    def to_json(self) -> bytes:
        """Return the index as compact JSON.

        Raises:
            TypeError: If a value is not plain JSON.
            ValueError: If a value is NaN or infinite.
        """
        encoded = {name: encode_json(value, name) for name, value in self.values.items()}
        return join_index(self.kind, self.written_by, self.entries, encoded)

    @classmethod
    def parse(cls, text: bytes, data_start: int, data_stop: int) -> Index:
        """Validate and parse an index whose chunks must tile the bytes from `data_start` to `data_stop`.

        Time is linear in the length of the text, and memory is bounded before anything is allocated.

        Raises:
            CorruptFileError: With the reason, if anything in it is invalid.
            FormatVersionError: If it names a codec of a newer release.
        """
        document = load_json(text)
        entries: dict[str, Entry] = {}
        for item in _field(document, "entries", list):
            entry = _parse_entry(item)
            if entry.name in entries:
                raise CorruptFileError(f"index lists the entry {entry.name[:200]!r} twice")
            entries[entry.name] = entry
        _check_tiling(entries.values(), data_start, data_stop)
        return cls(
            _field(document, "kind", str),
            _field(document, "written_by", str),
            entries,
            _field(document, "values", dict),
        )


def encode_json(value: Any, name: str) -> str:
    """Return a value as compact JSON, which reading returns unchanged.

    Args:
        value: Numbers, strings, lists, and dicts with string keys.
        name: Name of the value, for messages.

    Raises:
        TypeError: If the value is not plain JSON.
        ValueError: If it contains NaN or an infinite number.
    """
    _check_json(value, name)
    return dump_json(value)


def dump_json(value: Any) -> str:
    """Return a value that is known to be plain JSON as compact text. Floats keep every bit."""
    with ieee_arithmetic():
        return json.dumps(value, allow_nan=False, separators=(",", ":"))


def join_index(kind: str, written_by: str, entries: Mapping[str, Entry], values: Mapping[str, str]) -> bytes:
    """Return the text of an index whose values are JSON already. Encoding them once is most of its cost."""
    items = list(map(Entry.to_json, entries.values()))
    head = dump_json({"kind": kind, "written_by": written_by, "entries": items})
    members = []
    for name, text in values.items():
        members.append(f"{json.dumps(name)}:{text}")
    # Everything but the closing brace, then the values.
    return f'{head[:-1]},"values":{{{",".join(members)}}}}}'.encode()


def check_limits(text: bytes) -> None:
    """Raise `ValueError` if an index exceeds what readers accept. Everything else holds by construction."""
    if len(text) > MAX_INDEX_BYTES:
        raise ValueError(f"the container's index has {len(text)} bytes, at most {MAX_INDEX_BYTES} are allowed")
    _check_structure(text)


def load_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object that may come from anyone; time and memory are bounded.

    Raises:
        CorruptFileError: If it is something else, or nested too deeply.
    """
    _check_structure(text)
    return _load_json(text)


def _check_json(value: Any, name: str) -> None:
    """Raise `TypeError` for anything that JSON would not return unchanged, such as a key that is not a string."""
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise TypeError(f"value {name!r} has the key {key!r}, expected strings")
            _check_json(member, name)
    elif isinstance(value, (list, tuple)):
        for member in value:
            _check_json(member, name)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(f"value {name!r} contains a {type(value).__qualname__}, expected plain JSON")


def _check_structure(text: bytes) -> None:
    """Raise `CorruptFileError` if JSON is nested too deeply or has too many values, without parsing it.

    Parsing first would be too late: 21 MB of empty lists become 7 million objects and more than a gigabyte. One
    pass over the bytes finds the brackets and commas outside strings. Where the text is not valid JSON the count may be
    wrong, but the parser stops at that point.
    """
    # Most files are small. This few brackets, wherever they are, cannot exceed a limit.
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH and len(text) <= MAX_CONTAINERS:
        return
    # An escaped quote does not end a string. Escaped backslashes go first: the quote in \\" is not escaped.
    if b"\\" in text:
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    depth = 0
    num_containers = 0
    num_nodes = 0
    in_string = False
    for start in range(0, len(text), SCAN_BYTES):
        piece = np.frombuffer(text[start : start + SCAN_BYTES], np.uint8)
        # Every quote switches between inside and outside of a string.
        inside = np.logical_xor.accumulate(piece == ord('"')) ^ in_string
        in_string = bool(inside[-1])
        outside = ~inside
        opening = ((piece == ord("[")) | (piece == ord("{"))) & outside
        closing = ((piece == ord("]")) | (piece == ord("}"))) & outside
        levels = depth + np.cumsum(opening.astype(np.int32) - closing)
        depth = int(levels[-1])
        num_opened = int(np.count_nonzero(opening))
        num_containers += num_opened
        num_nodes += num_opened + int(np.count_nonzero((piece == ord(",")) & outside))
        if int(levels.max()) > MAX_DEPTH:
            raise CorruptFileError(f"index is nested too deeply, expected at most {MAX_DEPTH} levels")
        if num_containers > MAX_CONTAINERS or num_nodes > MAX_NODES:
            raise CorruptFileError(
                f"index has too many values, expected at most {MAX_NODES}, {MAX_CONTAINERS} of them lists or objects"
            )


def _load_json(text: bytes) -> dict[str, Any]:
    try:
        with ieee_arithmetic():
            # Decode explicitly: given bytes, json would also accept UTF-16, which the checks above do not see through.
            document = json.loads(
                text.decode(),
                object_pairs_hook=_unique_keys,
                parse_constant=_finite_number,
                parse_float=_finite_number,
            )
    except CorruptFileError:
        raise
    except RecursionError:
        raise CorruptFileError("index is nested too deeply to be parsed here") from None
    except ValueError as error:
        raise CorruptFileError(f"index is not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise CorruptFileError("index is not a JSON object")
    return document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise CorruptFileError("index has an object with duplicate keys")
    return members


def _finite_number(literal: str) -> float:
    if len(literal) > _MAX_FLOAT_CHARACTERS:
        raise CorruptFileError(f"index has a number of {len(literal)} characters")
    number = float(literal)
    if not math.isfinite(number):
        raise CorruptFileError(f"index has the number {literal}, which is not finite")
    return number


def _field(item: Any, key: str, kind: type) -> Any:
    """Return a member of a JSON object, which must be of the given type."""
    value = None
    if isinstance(item, dict):
        value = item.get(key)
    if not isinstance(value, kind):
        raise CorruptFileError(f"index lacks {key!r}, or it is not a {kind.__name__}")
    return value


def _parse_entry(item: Any) -> Entry:
    name = _field(item, "name", str)
    with naming(f"entry {name[:200]!r}"):
        grid = Grid(_parse_sizes(item, "shape"), _parse_sizes(item, "chunk_shape"))
        chunks = tuple(map(_parse_chunk, _field(item, "chunks", list)))
        entry = Entry(name, _parse_dtype(item), grid, _parse_codec(item), chunks)
        _check_geometry(entry)
    return entry


def _parse_sizes(item: Any, key: str) -> tuple[int, ...]:
    sizes = _field(item, key, list)
    # A bool is an int in Python, but not in an index.
    if len(sizes) > MAX_AXES or not all(type(size) is int and 0 <= size <= _MAX_ARRAY_BYTES for size in sizes):
        raise CorruptFileError(f"index has an invalid {key!r}, expected a list of at most {MAX_AXES} sizes")
    return tuple(sizes)


def _parse_dtype(item: Any) -> np.dtype[Any]:
    dtype: str = _field(item, "dtype", str)
    if dtype not in DTYPES:
        raise CorruptFileError(f"index has the unknown dtype {dtype[:40]!r}")
    return np.dtype(dtype)


def _parse_codec(item: Any) -> Codec:
    try:
        return codec_from_header(_field(item, "codec", dict))
    except FormatVersionError:
        raise
    except SlipstreamError as error:
        # A hostile header may be long, and so is the message that shows it.
        raise CorruptFileError(str(error)[:500]) from error


def _parse_chunk(row: Any) -> Chunk:
    """Parse ``[offset, length, checksum]``. Called for every chunk, so the common case takes few steps."""
    if type(row) is list and len(row) == 3:
        offset, length, checksum = row
        # Exact types: a bool or a float would compare like an integer.
        if type(offset) is int and type(length) is int and type(checksum) is str:
            if offset >= 0 and length >= 1 and _CHECKSUM.fullmatch(checksum):
                return Chunk(offset, length, int(checksum, 16))
            raise CorruptFileError(f"index has the invalid chunk {str(row)[:80]}")
    raise CorruptFileError("index has a chunk that is not [offset, length, checksum]")


def _check_geometry(entry: Entry) -> None:
    """Check that the chunks are what `part_shape` makes of the array, and that their number and sizes are plausible."""
    shape = entry.shape
    chunk_shape = entry.grid.chunk_shape
    mismatch = f"index has chunks of shape {list(chunk_shape)} in an array of shape {list(shape)}"
    # An empty array may claim any other lengths, and their product must stay bounded, too.
    nonzero_lengths = [max(1, length) for length in shape]
    if math.prod(nonzero_lengths) * entry.dtype.itemsize > _MAX_ARRAY_BYTES:
        raise CorruptFileError(f"index claims an array of shape {list(shape)}")
    if len(chunk_shape) != len(shape):
        raise CorruptFileError(mismatch)
    if entry.nbytes:
        fits = all(0 < step <= length for step, length in zip(chunk_shape, shape, strict=True))
        inner = entry.grid.axis + 1
        if not fits or chunk_shape[inner:] != shape[inner:]:
            raise CorruptFileError(mismatch)
        _check_chunk_sizes(entry, math.prod(chunk_shape) * entry.dtype.itemsize)
    expected = entry.grid.count()
    if len(entry.chunks) != expected:
        raise CorruptFileError(f"index lists {len(entry.chunks)} chunks, expected {expected}")


def _check_chunk_sizes(entry: Entry, decoded_bytes: int) -> None:
    if decoded_bytes > MAX_CHUNK_BYTES:
        raise CorruptFileError(
            f"index has chunks of shape {list(entry.grid.chunk_shape)}, larger than {MAX_CHUNK_BYTES} bytes"
        )
    longest = max((chunk.length for chunk in entry.chunks), default=0)
    # No codec expands an array by more than that, so a longer chunk is damaged or forged.
    if longest > decoded_bytes + decoded_bytes // 64 + _OVERHEAD_BYTES:
        raise CorruptFileError(f"index has a chunk of {longest} bytes for {decoded_bytes} bytes of content")


def _check_tiling(entries: Iterable[Entry], start: int, stop: int) -> None:
    """Check that the chunks of all entries follow each other from `start` to `stop`, without overlap or gap."""
    chunks: list[Chunk] = []
    for entry in entries:
        chunks.extend(entry.chunks)
    # By offset, which is the first field of a chunk.
    chunks.sort()
    position = start
    for chunk in chunks:
        if chunk.offset != position:
            raise CorruptFileError(f"index has a chunk at byte {chunk.offset}, expected the next at {position}")
        position += chunk.length
    if position != stop:
        raise CorruptFileError(f"index ends its chunks at byte {position}, expected {stop}")
