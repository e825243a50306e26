"""Header and footer of a container file, byte by byte as in ``docs/formats/container.md``.

The header says what the file is. The footer says where the index is, and has a checksum over itself and the header, so
that every byte of the file is covered by a checksum or compared with a constant.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.store.index import MAX_INDEX_BYTES

MAGIC = b"\x89SLIP\r\n\x1a"
END_MAGIC = b"\x1a\n\rPILS\x89"
VERSION = 1

# Magic, version, reserved.
HEADER = struct.Struct("<8sII")
# Offset, length and checksum of the index; checksum of header and footer; magic.
FOOTER = struct.Struct("<QQQQ8s")
_FOOTER_FIELDS = struct.Struct("<QQQ")


class Footer(NamedTuple):
    """Where the index of a container is, and the checksum of its text."""

    index_offset: int
    index_length: int
    index_checksum: int

    @property
    def identity(self) -> str:
        """A fingerprint of the whole file: the index contains the checksums of all chunks."""
        return f"{self.index_checksum:016x}"

    @classmethod
    def of(cls, index_offset: int, index: bytes) -> Footer:
        """Describe an index that is written at an offset."""
        return cls(index_offset, len(index), xxhash.xxh3_64_intdigest(index))

    def pack(self, header: bytes) -> bytes:
        """Return the bytes of the footer in a file with this header."""
        return FOOTER.pack(*self, _checksum(header, _FOOTER_FIELDS.pack(*self)), END_MAGIC)


def pack_header() -> bytes:
    """Return the bytes of a header."""
    return HEADER.pack(MAGIC, VERSION, 0)


def check_header(header: bytes, file_bytes: int) -> None:
    """Check the first bytes of a file, fewer than a header if the file is shorter.

    Raises:
        CorruptFileError: If it is not a container, or too short for one.
        FormatVersionError: If it has another version.
    """
    if not header:
        raise CorruptFileError("is empty")
    if header[: len(MAGIC)] != MAGIC:
        raise CorruptFileError("is not a Slipstream container")
    if file_bytes < HEADER.size + FOOTER.size:
        raise CorruptFileError(f"is truncated: it has {file_bytes} bytes")
    _, version, _ = HEADER.unpack(header)
    if version != VERSION:
        raise FormatVersionError(f"has format version {version}, this release reads version {VERSION}")


def parse_footer(header: bytes, footer: bytes, file_bytes: int) -> Footer:
    """Check the last bytes of a file and return where its index is.

    Raises:
        CorruptFileError: If the file is truncated, extended or damaged.
    """
    *fields, checksum, magic = FOOTER.unpack(footer)
    if magic != END_MAGIC:
        raise CorruptFileError("is truncated or was appended to: its footer is not at its end")
    # The reserved field of the header is zero in this version.
    _, _, reserved = HEADER.unpack(header)
    if reserved or checksum != _checksum(header, footer[: _FOOTER_FIELDS.size]):
        raise CorruptFileError("header or footer do not match their checksum")
    found = Footer(*fields)
    index_stop = file_bytes - FOOTER.size
    # Python's integers do not overflow, so the sum is safe whatever the fields claim.
    if found.index_offset < HEADER.size or found.index_offset + found.index_length != index_stop:
        raise CorruptFileError("the footer does not fit the file")
    if found.index_length > MAX_INDEX_BYTES:
        raise CorruptFileError(f"the index has {found.index_length} bytes, expected at most {MAX_INDEX_BYTES}")
    return found


def _checksum(header: bytes, footer_fields: bytes) -> int:
    return xxhash.xxh3_64_intdigest(header + footer_fields)
