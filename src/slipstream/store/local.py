"""Durable, atomic file writes: the whole new file or none of it, whatever happens in between.

A file is written under a temporary name in its own folder, flushed to the disk, renamed over the target, and the folder
flushed as well. A writer holds a lock on its temporary file; the kernel drops it when the process dies, however that
comes about, so anyone who can take the lock knows that the file is litter. Process ids would not do: they are reused,
and mean nothing to another container on the same volume.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from slipstream.errors import DiskFullError, WriteError

_PREFIX, _SUFFIX = ".slipstream-", ".tmp"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_swept: set[str] = set()


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under `path`, complete and durable, when the block ends without an error.

    On any error, and on `kill -9`, an older file at `path` stays as it was. Missing parent folders are created. A
    symbolic link is followed; permissions, and if we may the owner, of a replaced file are kept. Blocks until the data
    is on disk. A child that is forked inside the block leaves the file to its parent.

    Args:
        path: The file to create or replace.

    Yields:
        A binary file without a buffer, positioned at its start; ``write`` writes everything or raises.

    Raises:
        DiskFullError: If the disk, a quota or a file-size limit is exhausted.
        WriteError: If the file cannot be written for another reason, such as permissions.

    Example:
        >>> with atomic_write("/tmp/slipstream-doc/greeting.txt") as file:
        ...     _ = file.write(b"hello")
        >>> Path("/tmp/slipstream-doc/greeting.txt").read_bytes()
        b'hello'
    """
    target = Path(os.path.realpath(path))
    owner = os.getpid()
    with _naming(target), contextlib.ExitStack() as cleanup:
        _check_target(target)
        make_folder(target.parent)
        if str(target.parent) not in _swept:
            sweep(target.parent)
            _swept.add(str(target.parent))
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)  # now, while failing costs nothing
        cleanup.callback(os.close, folder)
        temporary, descriptor = _create_locked(target.parent)
        cleanup.pop_all()
    try:
        file = _WholeFile(descriptor, target)
        try:
            yield cast("BinaryIO", file)
            if os.getpid() == owner:
                with _naming(target):
                    _inherit(target, descriptor)
                    os.fsync(descriptor)
                    temporary.replace(target)
        finally:
            file.close()
    except BaseException:
        os.close(folder)
        if os.getpid() == owner:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise
    try:
        if os.getpid() == owner:
            _sync_descriptor(folder)
    except OSError as error:
        reason = f"wrote {target}, which a power cut may still undo: its folder cannot be flushed ({error.strerror})"
        raise WriteError(error.errno, reason) from error
    finally:
        os.close(folder)


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents so that they survive a power cut."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for child in reversed(missing):
        child.mkdir(exist_ok=True)
        sync_folder(child.parent)


def sync_folder(folder: Path) -> None:
    """Flush the entries of `folder` to the disk: without it a rename may be undone by a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sweep(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete temporary files in `folder` whose writers are dead; files still being written are left alone.

    Called by `atomic_write` for the first file that a process writes into a folder.

    Returns:
        The files that were deleted.
    """
    swept = []
    for path in Path(folder).glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # not ours to delete, or gone meanwhile
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            swept.append(path)
        except OSError:  # its writer is alive
            continue
        finally:
            os.close(descriptor)
    return swept


class _WholeFile(io.FileIO):
    """A file whose writes are never partial, and whose errors say which file could not be written.

    It has no buffer: a forked child would flush its copy of one into the parent's file.
    """

    def __init__(self, descriptor: int, target: Path) -> None:
        super().__init__(descriptor, "wb")
        self._target = target

    def write(self, data: Any) -> int:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        done = 0
        with _naming(self._target):
            while done < len(view):
                done += super().write(view[done:]) or 0
        return done


def _check_target(target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        mode = target.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it exists and is not a regular file")


def _inherit(target: Path, descriptor: int) -> None:
    """Take over the owner and the permissions of the file that is about to be replaced."""
    with contextlib.suppress(FileNotFoundError):
        status = target.stat()
        mine = os.fstat(descriptor)
        if (status.st_uid, status.st_gid) != (mine.st_uid, mine.st_gid):
            with contextlib.suppress(OSError):  # only root may give files away
                os.fchown(descriptor, status.st_uid, status.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode))


def _sync_descriptor(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise


def _create_locked(folder: Path) -> tuple[Path, int]:
    """Create a temporary file and lock it; tries again if a sweep took it for litter before it was locked."""
    while True:
        path = folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with contextlib.suppress(OSError):  # a file system without locks only loses the sweeping
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        os.close(descriptor)


@contextlib.contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that says which file could not be written."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        kind = DiskFullError if error.errno in _NO_SPACE else WriteError
        raise kind(error.errno, f"cannot write {target}: {error.strerror or error}") from error
