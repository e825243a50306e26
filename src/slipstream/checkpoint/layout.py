"""What a native checkpoint contains besides its arrays, byte by byte as in ``docs/formats/checkpoint.md``.

The memory of a state is a list of *regions*: distinct pieces that tensors and arrays see. An *entry* of the container
holds one large region, or many small ones of the same dtype. The table of regions says which bytes of which entry
belong to each region, and has a digest of them. So loading can verify what it decoded, whatever path the bytes took.

Nothing here imports torch, and parsing trusts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.schema.values import Json
from slipstream.store.index import Entry

KIND = "checkpoint"
VERSION = 1
TABLE = "regions"
"""Name of the container entry that holds the table."""
MAX_LINKS = 16
"""How many parents a checkpoint may have. Reading a delta decodes each of them."""

_MAX_SEQUENCE = (1 << 63) - 1
# Entry, start, number of bytes, and the digest in two halves.
_NUM_COLUMNS = 5
# Sums of two such sizes fit into a signed 64-bit integer.
_MAX_BYTES = 1 << 48


@dataclass(frozen=True)
class Ancestor:
    """A checkpoint that another one is stored against.

    Attributes:
        identity: What it is recognized by, whatever its file is called.
        file: The name of its file when the other one was saved. A hint, and for messages.
    """

    identity: str
    file: str


@dataclass(frozen=True)
class Header:
    """What a native checkpoint says about itself.

    Attributes:
        identity: The same for every copy of this checkpoint, and whether it is stored whole or as a delta.
        entries: The names of all entries of the state, including those that are only in the parent.
        same: The entries that are equal in the parent and therefore not in this file.
        parents: What it is stored against, nearest first. Empty for a whole checkpoint.
        sequence: Its number among the saves into its folder, or None if no manager wrote it.
        thinned: What was removed from it after it was saved, in words. Empty for a full checkpoint.
    """

    identity: str
    entries: tuple[str, ...]
    same: frozenset[str] = frozenset()
    parents: tuple[Ancestor, ...] = ()
    sequence: int | None = None
    thinned: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """Return it as a JSON object."""
        document: dict[str, Json] = {"version": VERSION, "identity": self.identity, "entries": list(self.entries)}
        # Most checkpoints are whole and full, and have nothing to say about the rest.
        if self.sequence is not None:
            document["sequence"] = self.sequence
        if self.thinned:
            document["thinned"] = list(self.thinned)
        if self.parents:
            document["parents"] = [[parent.identity, parent.file] for parent in self.parents]
            document["same"] = sorted(self.same)
        return document

    @classmethod
    def parse(cls, document: Json) -> Header:
        """Check and read what `to_json` returned.

        Raises:
            CorruptFileError: If anything in it is invalid.
            FormatVersionError: If another version of the format wrote it.
        """
        if not isinstance(document, dict):
            raise FormatVersionError("has no version, so a draft of the format before its first release wrote it")
        version = document.get("version")
        if version != VERSION or isinstance(version, bool):
            raise FormatVersionError(f"has checkpoint version {str(version)[:40]}, this release reads {VERSION}")
        sequence = document.get("sequence")
        if sequence is not None and (type(sequence) is not int or not 0 <= sequence <= _MAX_SEQUENCE):
            raise CorruptFileError(f"its sequence number is {str(sequence)[:40]!r}, expected a whole number")
        header = cls(
            identity=_parse_text(document.get("identity"), "identity"),
            entries=_parse_names(document.get("entries"), "entries"),
            same=frozenset(_parse_names(document.get("same", []), "same")),
            parents=_parse_parents(document.get("parents", [])),
            sequence=sequence,
            thinned=_parse_texts(document.get("thinned", []), "thinned"),
        )
        if not header.same <= set(header.entries) or (header.same and not header.parents):
            raise CorruptFileError("it refers to entries of a parent that it does not have")
        return header


def _parse_text(value: Json, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise CorruptFileError(f"its {name} is {str(value)[:40]!r}, expected text")
    return value


def _parse_texts(values: Json, name: str) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise CorruptFileError(f"its {name} are {str(values)[:40]!r}, expected a list")
    for value in values:
        _parse_text(value, name)
    return tuple(values)


def _parse_names(values: Json, name: str) -> tuple[str, ...]:
    names = _parse_texts(values, name)
    if len(set(names)) != len(names):
        raise CorruptFileError(f"its {name} contain a name twice")
    return names


def _parse_parents(values: Json) -> tuple[Ancestor, ...]:
    if not isinstance(values, list) or len(values) > MAX_LINKS:
        raise CorruptFileError(f"its parents are {str(values)[:40]!r}, expected a list of at most {MAX_LINKS}")
    parents = []
    for value in values:
        if not isinstance(value, list) or len(value) != 2:
            raise CorruptFileError(f"its parents contain {str(value)[:40]!r}, expected an identity and a file")
        parent = Ancestor(_parse_text(value[0], "parent"), _parse_text(value[1], "parent"))
        # A path could point anywhere. Parents are in the same folder.
        if "/" in parent.file or "\0" in parent.file:
            raise CorruptFileError(f"its parent is called {parent.file[:80]!r}, expected the name of a file")
        parents.append(parent)
    return tuple(parents)


@dataclass(frozen=True)
class RegionTable:
    """Where each region is, and the digest of its bytes. Row number = region number.

    Attributes:
        entries: The number of its entry, in `Header.entries`.
        starts: Where it begins in the entry, in bytes.
        sizes: Its number of bytes.
        digests: xxh3-128 of its bytes, as 16 bytes.
    """

    entries: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    digests: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.digests)

    def to_array(self) -> NDArray[np.uint64]:
        """Return the table as the array that the file contains."""
        rows = np.empty((len(self), _NUM_COLUMNS), "<u8")
        rows[:, 0] = self.entries
        rows[:, 1] = self.starts
        rows[:, 2] = self.sizes
        # The canonical form of the digest is big-endian: the high half first.
        rows[:, 3:] = np.frombuffer(b"".join(self.digests), ">u8").reshape(-1, 2)
        return rows

    @classmethod
    def parse(cls, rows: NDArray[Any], num_entries: int) -> RegionTable:
        """Check and read what `to_array` returned.

        Raises:
            CorruptFileError: If regions overlap, are empty, or are in entries that do not exist.
        """
        if rows.dtype != np.dtype("<u8") or rows.ndim != 2 or rows.shape[1] != _NUM_COLUMNS:
            raise CorruptFileError(f"its table of regions is {rows.dtype}{list(rows.shape)}, expected uint64[n, 5]")
        if rows.shape[0] and int(rows[:, :3].max()) > _MAX_BYTES:
            raise CorruptFileError("its table of regions has sizes that no file can have")
        entries, starts, sizes = rows[:, :3].T.astype(np.int64)
        # Ascending and disjoint, so that a small file cannot make a reader copy the same bytes many times.
        follows = (entries[1:] > entries[:-1]) | (
            (entries[1:] == entries[:-1]) & (starts[1:] >= starts[:-1] + sizes[:-1])
        )
        if not follows.all() or not (sizes > 0).all() or not (entries < num_entries).all():
            raise CorruptFileError("its table of regions is invalid: regions overlap, are empty or have no entry")
        packed = np.ascontiguousarray(rows[:, 3:]).astype(">u8").tobytes()
        digests = [packed[start : start + 16] for start in range(0, len(packed), 16)]
        return cls(entries, starts, sizes, digests)


def check_table_entry(entry: Entry, file_bytes: int) -> None:
    """Raise `CorruptFileError` if an entry cannot be the table of regions of a file, before it is decoded."""
    if entry.codec.needs_reference:
        raise CorruptFileError("its table of regions is stored as a difference, which a table cannot be")
    # A leaf takes more bytes in the index than a row in the table, and every region has a leaf.
    if entry.nbytes > file_bytes:
        raise CorruptFileError(f"its table of regions claims {entry.nbytes} bytes, more than the whole of {file_bytes}")


def digest_of(content: NDArray[np.uint8]) -> bytes:
    """Return the digest of the bytes of a region. Releases the GIL for all but small ones."""
    return xxhash.xxh3_128_digest(content.data)


def identify(table: NDArray[np.uint64], text: bytes) -> str:
    """Return the identity of a checkpoint: a digest of the digests of all regions, and of its metadata as JSON."""
    hasher = xxhash.xxh3_128(table.tobytes())
    hasher.update(text)
    return hasher.hexdigest()
