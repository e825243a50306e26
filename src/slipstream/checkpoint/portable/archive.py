"""Read the zip archives that ``torch.save`` writes, without trusting them.

This is not a general zip reader. It accepts what ``torch.save`` writes: members that are stored without compression and
lie inside the file. So the content is never larger than the file, and there are no zip bombs. The standard library's
`zipfile` is more general, and creates an object for every entry before it checks anything, which takes a lot of memory
if the directory is large.

Every member is compared with its CRC-32 checksum when it is read. ``torch.serialization.set_crc32_options(False)``
makes torch write zeros instead of checksums; such an archive is read without this check.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from slipstream.checkpoint.formats import ZIP_MAGIC
from slipstream.errors import CorruptFileError

# Bounds the memory for the list of members. Half a million tensors have a directory of this size.
MAX_DIRECTORY_BYTES = 48 << 20

_PIECE_BYTES = 1 << 20
# The records of a zip archive, from its end: what points to the directory, twice with 64-bit fields for large archives;
# an entry of the directory; and the header in front of every member. All numbers are little-endian.
_END = struct.Struct("<4s4H2LH")
_END_MAGIC = b"PK\x05\x06"
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_MAGIC = b"PK\x06\x07"
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_MAGIC = b"PK\x06\x06"
_ENTRY = struct.Struct("<4s6H3L5H2L")
_ENTRY_MAGIC = b"PK\x01\x02"
_HEADER = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 0xFFFF
# These values mean that the real one is in a 64-bit field.
_SATURATED_16 = 0xFFFF
_SATURATED_32 = 0xFFFFFFFF
_EXTRA_64_BIT = 1
# The attribute of a folder.
_IS_FOLDER = 1 << 4


@dataclass(frozen=True, slots=True)
class Member:
    """One file in the archive.

    Attributes:
        name: Its name, folder included.
        header: Where its local header begins.
        nbytes: Its size.
        crc: Its checksum.
    """

    name: bytes
    header: int
    nbytes: int
    crc: int


class Archive:
    """The members of a checkpoint of ``torch.save``, by their names inside its folder, such as ``data/0``.

    Args:
        file: A seekable binary file, which must stay open.

    Raises:
        CorruptFileError: If it is not an archive of ``torch.save``, or damaged.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes = file.seek(0, os.SEEK_END)
        members = list(_read_directory(file, self.nbytes))
        # Torch names the folder after the file that was saved. All members are in it.
        folder = b""
        if members:
            folder = members[0].name.split(b"/")[0] + b"/"
        self._members: dict[str, Member] = {}
        for member in members:
            name = member.name.removeprefix(folder).decode("utf-8", "replace")
            if name in self._members:
                raise CorruptFileError(f"is not an archive of torch.save: {name[:80]!r} is in it twice")
            self._members[name] = member
        self.has_checksums = any(member.crc for member in members)
        # Members that overlap would be read more than once, and could take any amount of memory.
        content_bytes = sum(member.nbytes for member in members)
        if content_bytes > self.nbytes:
            raise CorruptFileError(
                f"is not an archive of torch.save: its members claim {content_bytes} bytes, the file has {self.nbytes}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def size(self, name: str) -> int:
        """Return the size of a member."""
        return self._find(name).nbytes

    def read(self, name: str) -> bytes:
        """Return the content of a member."""
        member = self._find(name)
        content = _read_at(self._file, self._start_of(member), member.nbytes)
        self._check(name, member, zlib.crc32(content))
        return content

    def read_into(self, name: str, target: Any) -> None:
        """Read a member into a writable buffer of its size, and compare it with its checksum."""
        # Not the shape of an array: its bytes.
        view = memoryview(target).cast("B")
        member = self._find(name)
        self._file.seek(self._start_of(member))
        crc = 0
        # Piece by piece, so that the checksum finds the content in the cache of the CPU.
        for start in range(0, member.nbytes, _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            if _fill(self._file, piece) != len(piece):
                raise CorruptFileError(f"is cut off: {name!r} ends early")
            crc = zlib.crc32(piece, crc)
        self._check(name, member, crc)

    def verify(self) -> None:
        """Compare every member with its checksum."""
        if self.has_checksums:
            for name, member in self._members.items():
                self.read_into(name, bytearray(member.nbytes))

    def _check(self, name: str, member: Member, crc: int) -> None:
        if self.has_checksums and crc != member.crc:
            raise CorruptFileError(f"is damaged: {name!r} does not match its checksum")

    def _find(self, name: str) -> Member:
        if name not in self._members:
            raise CorruptFileError(f"is damaged, or not a checkpoint of torch.save: it has no member {name[:80]!r}")
        return self._members[name]

    def _start_of(self, member: Member) -> int:
        """Return where the content of a member begins: after its header, which has a variable size."""
        header = _read_at(self._file, member.header, _HEADER.size)
        magic, *_, name_bytes, extra_bytes = _HEADER.unpack(header)
        name = _read_at(self._file, member.header + _HEADER.size, name_bytes)
        # Both copies of the name must agree. Otherwise one flipped bit could exchange two tensors unnoticed.
        if magic != ZIP_MAGIC or name != member.name:
            raise CorruptFileError(f"is damaged: the header of {member.name[:80]!r} does not match the directory")
        start = member.header + _HEADER.size + name_bytes + extra_bytes
        if start + member.nbytes > self.nbytes:
            raise CorruptFileError(f"is damaged: {member.name[:80]!r} reaches beyond the end of the file")
        return int(start)


def _read_directory(file: BinaryIO, file_bytes: int) -> Iterator[Member]:
    """Yield the entries of the directory at the end of an archive."""
    count, start, nbytes = _find_directory(file, file_bytes)
    if nbytes > MAX_DIRECTORY_BYTES:
        raise CorruptFileError(
            f"its directory has {nbytes} bytes, at most {MAX_DIRECTORY_BYTES} are read; save fewer, larger tensors"
        )
    directory = _read_at(file, start, nbytes)
    position = 0
    for _ in range(count):
        member, position = _parse_entry(directory, position)
        yield member
    if position != len(directory):
        raise CorruptFileError(f"is damaged: its directory has {len(directory) - position} bytes too many")


def _find_directory(file: BinaryIO, file_bytes: int) -> tuple[int, int, int]:
    """Return the number of entries of the directory, where it begins, and its size."""
    # The last record of the file points to the directory. Only a comment may follow it.
    tail_bytes = min(file_bytes, _END.size + _MAX_COMMENT)
    tail = _read_at(file, file_bytes - tail_bytes, tail_bytes)
    at = tail.rfind(_END_MAGIC)
    if at < 0 or at + _END.size > len(tail):
        raise CorruptFileError("is damaged or cut off: the archive has no directory")
    _, _, _, _, count, nbytes, start, comment_bytes = _END.unpack_from(tail, at)
    if at + _END.size + comment_bytes != len(tail):
        raise CorruptFileError("is damaged or cut off: data follows the end of the archive")
    if count != _SATURATED_16 and _SATURATED_32 not in (nbytes, start):
        return count, start, nbytes
    return _find_large_directory(file, file_bytes - tail_bytes + at)


def _find_large_directory(file: BinaryIO, end: int) -> tuple[int, int, int]:
    """Return the same as `_find_directory` for an archive with 64-bit fields, whose last record begins at `end`."""
    magic, _, at, _ = _LOCATOR.unpack(_read_at(file, end - _LOCATOR.size, _LOCATOR.size))
    if magic != _LOCATOR_MAGIC:
        raise CorruptFileError("is damaged: the archive has no 64-bit directory")
    magic, *_, count, nbytes, start = _END64.unpack(_read_at(file, at, _END64.size))
    if magic != _END64_MAGIC:
        raise CorruptFileError("is damaged: the archive has no 64-bit directory")
    return count, start, nbytes


def _parse_entry(directory: bytes, position: int) -> tuple[Member, int]:
    """Return an entry of the directory, and where the next one begins."""
    if position + _ENTRY.size > len(directory):
        raise CorruptFileError("is damaged: its directory ends early")
    fields = _ENTRY.unpack_from(directory, position)
    magic, _, _, _, method, _, _, crc, packed_bytes, nbytes, name_bytes, extra_bytes, comment_bytes = fields[:13]
    attributes, header = fields[-2:]
    # The entry is followed by its name, its extra fields and its comment.
    name_at = position + _ENTRY.size
    extra_at = name_at + name_bytes
    next_at = extra_at + extra_bytes + comment_bytes
    if magic != _ENTRY_MAGIC or next_at > len(directory):
        raise CorruptFileError("is damaged: its directory is invalid")
    name = directory[name_at:extra_at]
    # Torch reads no content of a folder, and would return memory that it has not initialized.
    if attributes & _IS_FOLDER and nbytes:
        raise CorruptFileError(f"is damaged: {name[:80]!r} is a folder with content")
    # Compressed content could expand to any size.
    if method:
        raise CorruptFileError(
            f"is not an archive of torch.save: {name[:80]!r} is compressed; if it is a TorchScript archive, load it "
            "with torch.jit.load, otherwise extract it and pack it with `zip -0`"
        )
    if _SATURATED_32 in (nbytes, packed_bytes, header):
        extra = directory[extra_at : extra_at + extra_bytes]
        nbytes, packed_bytes, header = _read_64_bit(extra, [nbytes, packed_bytes, header])
    if nbytes != packed_bytes:
        raise CorruptFileError(f"is damaged: the sizes of {name[:80]!r} differ")
    return Member(name, header, nbytes, crc), next_at


def _read_64_bit(extra: bytes, values: list[int]) -> list[int]:
    """Replace the saturated ones of some values by those in the extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, position)
        content = extra[position + 4 : position + 4 + nbytes]
        position += 4 + nbytes
        if kind != _EXTRA_64_BIT:
            continue
        # The field has only those values that are saturated, in this order.
        wide = iter(struct.unpack_from(f"<{len(content) // 8}Q", content))
        replaced = []
        for value in values:
            if value == _SATURATED_32:
                value = next(wide, value)  # noqa: PLW2901 - the one to use
            replaced.append(value)
        return replaced
    return values


def _read_at(file: BinaryIO, start: int, nbytes: int) -> bytes:
    """Return a part of the file. Raises if it is not inside the file."""
    if start < 0 or start + nbytes > file.seek(0, os.SEEK_END):
        raise CorruptFileError("is damaged or cut off: a part of the archive lies outside the file")
    file.seek(start)
    return file.read(nbytes)


def _fill(file: BinaryIO, target: memoryview) -> int:
    """Read into all of `target` unless the file ends; return how many bytes were read."""
    # A read may return less than was asked for.
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
