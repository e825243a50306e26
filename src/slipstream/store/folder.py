"""`LocalStore`: a folder as a store of immutable objects."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from slipstream.errors import OutOfRangeError
from slipstream.store.base import Buffer, FileInfo, Range, check_name, check_prefix, check_ranges
from slipstream.store.local import link_new, make_folder, open_regular, sync_folder, translate_errors, write_new

_COPY_BYTES = 1 << 20


class LocalStore:
    """A folder as a `Store`: each object is a file. Thread-safe and process-safe.

    The folder is created with the first object. Names cannot lead out of it, neither by ``..`` nor through symbolic
    links. Other files in the folder appear as objects if their names are valid.

    Args:
        folder: The folder; need not exist yet.

    Example:
        >>> import tempfile
        >>> store = LocalStore(tempfile.mkdtemp())
        >>> store.put_new("runs/7/model.slip", b"weights")
        >>> store.get("runs/7/model.slip")
        b'weights'
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def put_new(self, name: str, data: Buffer) -> None:
        """Create an object; see `Store.put_new`."""
        target = self._inside(name)
        with write_new(target) as file:
            file.write(data)

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """Create an object from a local file; see `Store.put_file`. Links it if possible, and copies it otherwise."""
        target = self._inside(name)
        with open_regular(path) as source:
            with translate_errors(target):
                make_folder(target.parent)
                # The data must be on disk before the name is: after a crash the name may not stand for half a file.
                os.fsync(source.fileno())
            if link_new(Path(os.path.realpath(path)), target):
                with translate_errors(target):
                    sync_folder(target.parent)
                return
            # Another file system, or one without hard links.
            with write_new(target) as file:
                shutil.copyfileobj(source, file, _COPY_BYTES)

    def get(self, name: str) -> bytes:
        """Return the content of an object; see `Store.get`."""
        with self._open(name) as file:
            return file.read()

    def get_ranges(self, name: str, ranges: Sequence[Range]) -> list[bytes]:
        """Return parts of an object; see `Store.get_ranges`."""
        with self._open(name) as file:
            check_ranges(name, ranges, os.fstat(file.fileno()).st_size)
            parts = []
            for part in ranges:
                file.seek(part.offset)
                content = file.read(part.length)
                if len(content) != part.length:
                    raise OutOfRangeError(f"{name}: was truncated while it was read")
                parts.append(content)
        return parts

    def size_bytes(self, name: str) -> int:
        """Return the size of an object; see `Store.size_bytes`."""
        with self._open(name) as file:
            return os.fstat(file.fileno()).st_size

    def list(self, prefix: str = "") -> builtins.list[FileInfo]:
        """Return the objects whose names begin with `prefix`; see `Store.list`."""
        parent = check_prefix(prefix)
        # Only for the check: raises if a link in the prefix leads out of the folder.
        if parent:
            self._inside(parent, follow=True)
        return sorted(self._walk(parent, prefix), key=_name_of)

    def delete(self, name: str) -> None:
        """Delete an object; see `Store.delete`. Folders stay, even if they are empty."""
        path = self._inside(name)
        # A folder of that name is not an object, and neither is what cannot be there because its folder is a file.
        if path.is_dir() and not path.is_symlink():
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            sync_folder(path.parent)

    def __repr__(self) -> str:
        return f"LocalStore({str(self.folder)!r})"

    def _inside(self, name: str, *, follow: bool = False) -> Path:
        """Return the path of an object, after making sure that it lies inside the folder.

        Args:
            name: Name of the object.
            follow: Whether the last segment may be a symbolic link that is followed, as reading does.
        """
        check_name(name)
        root = os.path.realpath(self.folder)
        path = Path(root, name)
        real = os.path.realpath(path.parent)
        if follow:
            real = os.path.realpath(path)
        if os.path.commonpath([root, real]) != root:
            raise ValueError(f"store name {name!r} leads out of {self.folder} through a symbolic link")
        return path

    def _open(self, name: str) -> BinaryIO:
        path = self._inside(name, follow=True)
        missing = FileNotFoundError(errno.ENOENT, f"no such object in {self.folder}", name)
        # Neither a folder nor a path through a file is an object.
        if path.is_dir():
            raise missing
        try:
            return open_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            raise missing from None

    def _walk(self, parent: str, prefix: str) -> Iterator[FileInfo]:
        """Yield the objects below a folder inside the store whose names begin with `prefix`."""
        root = Path(os.path.realpath(self.folder))
        for folder, _, file_names in os.walk(root / parent, onerror=_raise_unless_deleted):
            for file_name in file_names:
                name = Path(folder, file_name).relative_to(root).as_posix()
                # Skip what is not an object: temporary files, names that are not Unicode, links that lead out of the
                # folder (all ValueError), and files that were deleted meanwhile (OSError).
                with contextlib.suppress(ValueError, OSError):
                    status = self._inside(name, follow=True).stat()
                    if name.startswith(prefix) and stat.S_ISREG(status.st_mode):
                        yield FileInfo(name, status.st_size, status.st_mtime)


def _name_of(info: FileInfo) -> str:
    return info.name


def _raise_unless_deleted(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error
