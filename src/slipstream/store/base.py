"""`Store`: what a local folder, memory and an object store can all do, and `MemoryStore`, the simplest one.

The interface is small on purpose. Everything in it is atomic in every implementation, so code that uses it needs no
special cases: there is no rename, no append and no compare-and-swap. An object is created once, read, and deleted.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from slipstream.errors import OutOfRangeError
from slipstream.store.local import RESERVED_PREFIX, open_regular

if TYPE_CHECKING:
    import os

Buffer = bytes | bytearray | memoryview
"""Content of an object, in contiguous memory."""

# What all file systems and object stores accept: NAME_MAX of Linux and macOS, and the longest key of S3 and GCS.
_MAX_SEGMENT_BYTES = 255
_MAX_NAME_BYTES = 1024


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One object of a store, as `Store.list` returns it.

    Attributes:
        name: Its name.
        size_bytes: Its size.
        modified_s: When it was created, in seconds since 1970 by the clock of the store. Objects that were put from a
            local file may have the time of that file.
    """

    name: str
    size_bytes: int
    modified_s: float = field(default=0.0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Range:
    """The bytes from `offset` to `offset + length` of an object."""

    offset: int
    length: int


class Store(Protocol):
    """Named, immutable objects. Thread-safe; implementations that others can reach are process-safe, too.

    A name is a relative path with forward slashes, such as ``runs/7/model.slip``; `check_name` has the rules. A name
    must not be both an object and the folder of another object: a local folder cannot store that.
    """

    def put_new(self, name: str, data: Buffer) -> None:
        """Create an object; it is durable when the call returns.

        Atomic: readers see no object or the complete one. Of several writers of one name exactly one succeeds.

        Raises:
            FileExistsError: If the name exists; its object is unchanged.
            WriteError: If the object cannot be written.
        """

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """Create an object from a complete local file, with the guarantees of `put_new`.

        The file must not be changed during the call or afterwards: a local store keeps a hard link to it, not a copy.

        Raises:
            FileNotFoundError: If there is no file at `path`.
            FileExistsError: If the name exists; its object is unchanged.
            WriteError: If the object cannot be written.
        """

    def get(self, name: str) -> bytes:
        """Return the content of an object.

        Raises:
            FileNotFoundError: If there is no such object.
        """

    def get_ranges(self, name: str, ranges: Sequence[Range]) -> list[bytes]:
        """Return parts of an object, in the order of `ranges`; they may overlap or be empty.

        Raises:
            FileNotFoundError: If there is no such object.
            OutOfRangeError: If a range is negative or ends beyond the object; nothing is returned then.
        """

    def size_bytes(self, name: str) -> int:
        """Return the size of an object.

        Raises:
            FileNotFoundError: If there is no such object.
        """

    def list(self, prefix: str = "") -> list[FileInfo]:
        """Return the objects whose names begin with `prefix`, sorted by name.

        The prefix is a plain string: ``runs/1`` also matches ``runs/10/model.slip``. Objects that are created or
        deleted during the call may be missing or included.
        """

    def delete(self, name: str) -> None:
        """Delete an object. Idempotent: deleting a name that does not exist does nothing."""


class MemoryStore:
    """A store in the memory of this process, for tests and for trying things out. Thread-safe; nothing survives.

    Args:
        objects: Content and time by name, to share with other stores.
        folder: Where in `objects` the names of this store begin; everything by default.

    Example:
        >>> store = MemoryStore()
        >>> store.put_new("runs/7/model.slip", b"weights")
        >>> store.get_ranges("runs/7/model.slip", [Range(0, 3)])
        [b'wei']
        >>> store.list("runs/")
        [FileInfo(name='runs/7/model.slip', size_bytes=7)]
    """

    def __init__(self, objects: dict[str, tuple[bytes, float]] | None = None, folder: str = "") -> None:
        # Each method uses one atomic operation of the dict. A lock could be left locked in a forked child.
        self._objects: dict[str, tuple[bytes, float]] = {}
        if objects is not None:
            self._objects = objects
        self._prefix = ""
        if folder:
            self._prefix = f"{folder}/"

    def put_new(self, name: str, data: Buffer) -> None:
        """Create an object; see `Store.put_new`."""
        check_name(name)
        # A new tuple tells whether ours was inserted: identical bytes may be there already.
        entry = (memoryview(data).tobytes(), time.time())
        if self._objects.setdefault(self._prefix + name, entry) is not entry:
            raise already_exists(name)

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """Create an object from a local file; see `Store.put_file`. The file is copied."""
        with open_regular(path) as file:
            self.put_new(name, file.read())

    def get(self, name: str) -> bytes:
        """Return the content of an object; see `Store.get`."""
        check_name(name)
        entry = self._objects.get(self._prefix + name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", name)
        return entry[0]

    def get_ranges(self, name: str, ranges: Sequence[Range]) -> list[bytes]:
        """Return parts of an object; see `Store.get_ranges`."""
        content = self.get(name)
        check_ranges(name, ranges, len(content))
        return [content[part.offset : part.offset + part.length] for part in ranges]

    def size_bytes(self, name: str) -> int:
        """Return the size of an object; see `Store.size_bytes`."""
        return len(self.get(name))

    def list(self, prefix: str = "") -> list[FileInfo]:
        """Return the objects whose names begin with `prefix`; see `Store.list`."""
        check_prefix(prefix)
        found = []
        for key, (content, modified_s) in sorted(self._objects.copy().items()):
            if key.startswith(self._prefix + prefix):
                found.append(FileInfo(key.removeprefix(self._prefix), len(content), modified_s))
        return found

    def delete(self, name: str) -> None:
        """Delete an object; see `Store.delete`."""
        check_name(name)
        self._objects.pop(self._prefix + name, None)


def already_exists(name: str) -> FileExistsError:
    """Return the error for a name that is taken."""
    return FileExistsError(errno.EEXIST, "the name is taken, and objects are never replaced", name)


def check_name(name: str) -> None:
    """Raise `ValueError` unless a name is valid in every store.

    A name is a relative path: segments of 1 to 255 bytes of UTF-8, joined by slashes, 1024 bytes in all. The segments
    ``.`` and ``..``, NUL, and segments that begin with ``.slipstream-`` are not allowed.

    Raises:
        ValueError: With the reason.
        TypeError: If the name is not a string.
    """
    problem = _problem_of(name)
    if problem:
        raise ValueError(f"store name {name!r} {problem}")


def _problem_of(name: str) -> str | None:
    """Return what is wrong with a name, or None."""
    if not isinstance(name, str):
        raise TypeError(f"store name {name!r} is a {type(name).__qualname__}, expected a string")
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if len(encoded) > _MAX_NAME_BYTES:
        return f"has {len(encoded)} bytes, expected at most {_MAX_NAME_BYTES}"
    if b"\0" in encoded:
        return "contains NUL"
    for segment in encoded.split(b"/"):
        if segment in (b"", b".", b".."):
            return "is not a relative path with non-empty segments, without . and .."
        if len(segment) > _MAX_SEGMENT_BYTES:
            return f"has a segment of {len(segment)} bytes, expected at most {_MAX_SEGMENT_BYTES}"
        if segment.startswith(RESERVED_PREFIX.encode()):
            return f"has a segment that begins with {RESERVED_PREFIX}, which is reserved for temporary files"
    return None


def check_prefix(prefix: str) -> str:
    """Raise unless `prefix` is the beginning of a valid name; returns the folder that it is in, possibly empty."""
    folder = prefix.rpartition("/")[0]
    if folder:
        check_name(folder)
    return folder


def check_ranges(name: str, ranges: Sequence[Range], size_bytes: int) -> None:
    """Raise `OutOfRangeError` unless all ranges lie within an object of that size."""
    for part in ranges:
        if part.offset < 0 or part.length < 0 or part.offset + part.length > size_bytes:
            raise OutOfRangeError(
                f"{name}: has no bytes {part.offset} to {part.offset + part.length}, it has {size_bytes} bytes"
            )
