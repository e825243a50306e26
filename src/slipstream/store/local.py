"""Files in local folders: opened safely, written whole and durably, cleaned up after a crash.

A file is written under a temporary name in its folder, flushed to the disk, and then renamed or linked to its own name;
after that the folder is flushed as well. The writer holds a lock on the temporary file. The kernel drops it when the
process dies, so a process that can take the lock knows that the file is litter and deletes it (`sweep`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import io
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from slipstream.errors import CorruptFileError, DiskFullError, LockedError, WriteError
from slipstream.store.lock import FileLock, LockableFile, is_still_at, open_private, try_lock

RESERVED_PREFIX = ".slipstream-"
"""Names that begin with this are temporary and lock files."""
_SUFFIX = ".tmp"
# Taken while a new file is renamed on a file system without hard links.
PUBLISH_LOCK = f"{RESERVED_PREFIX}publish.lock"
PUBLISH_TIMEOUT_S = 60.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors of `os.link` which mean that this file cannot be linked there, but can be copied or renamed.
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
_FILE_TYPES = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")

# Smaller files are written faster than space is reserved for them.
_MIN_RESERVED_BYTES = 1 << 20


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Return the system call that reserves disk space, if there is one.

    Not `os.posix_fallocate`: on file systems that cannot reserve space, it writes to every block instead.
    """
    function = getattr(ctypes.CDLL(None), "fallocate", None)
    if function is None or sys.maxsize < 1 << 32:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return cast("Callable[[int, int, int, int], int]", function)


_fallocate = _find_fallocate()

# Folders that this process has swept. A crash leaves a file or two, so once per process is enough.
_swept: set[str] = set()


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; anything else is refused immediately, without blocking.

    Symbolic links are followed.

    Args:
        path: The file.

    Returns:
        A buffered binary file, positioned at its start.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is a folder, FIFO, socket or device.

    Example:
        >>> open_regular("/dev/zero")
        Traceback (most recent call last):
        ...
        slipstream.errors.CorruptFileError: /dev/zero: is a character device, expected a file
    """
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading as `open_regular` does, and return its descriptor; the caller closes it."""
    # Look first: opening some devices has side effects, such as rewinding a tape.
    check_regular(path)
    # Another file may take its place in between. With O_NONBLOCK, opening a FIFO does not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise as `open_regular` does, without opening the file; for paths that another library will open."""
    _require_regular(path, Path(path).stat())


def _require_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _FILE_TYPES.get(stat.S_IFMT(status.st_mode), "special file")
        raise CorruptFileError(f"{os.fspath(path)}: is a {kind}, expected a file")


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], *, expected_bytes: int = 0) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under `path`, complete and durable, when the block ends without an error.

    If the block raises, or the process is killed, an older file at `path` is unchanged. Missing parent folders are
    created. A symbolic link is followed; a replaced file keeps its permissions and, if allowed, its owner. Blocks until
    the data is on disk. Threads and processes may write the same path; the last one wins. A child that is forked inside
    the block leaves the file to its parent: the file object is closed in the child.

    Args:
        path: The file to create or replace.
        expected_bytes: About how large the file will be. Disk space is reserved in one piece, which takes a third of
            the CPU time off writing a large file. The file may become larger or smaller.

    Yields:
        An unbuffered binary file, positioned at its start; ``write`` writes everything or raises.

    Raises:
        DiskFullError: If the disk, a quota or a file-size limit is exhausted.
        WriteError: If the file cannot be written for another reason, such as permissions.

    Example:
        >>> with atomic_write("/tmp/slipstream-doc/greeting.txt") as file:
        ...     _ = file.write(b"hello")
        >>> Path("/tmp/slipstream-doc/greeting.txt").read_bytes()
        b'hello'
    """
    refuse_url(path)
    target = Path(os.path.realpath(path))
    with translate_errors(target):
        require_replaceable(target)
    with _write_then(_replace, target) as file:
        reserved_bytes = _reserve(file.fileno(), expected_bytes)
        yield file
        # A forked child has closed the file.
        if not file.closed and file.tell() < reserved_bytes:
            with translate_errors(target):
                file.truncate()


@contextlib.contextmanager
def write_new(target: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears as `target` when the block ends, unless that name exists by then.

    Gives the guarantees of `atomic_write`, but never replaces a file: of several writers exactly one succeeds.

    Args:
        target: The file to create.

    Yields:
        An unbuffered binary file, positioned at its start; ``write`` writes everything or raises.

    Raises:
        FileExistsError: If the name exists; the existing file is unchanged.
        WriteError: If the file cannot be written, `DiskFullError` among them.
    """
    # Saves the work if the name is taken already. If another writer takes it later, publishing finds that out.
    if os.path.lexists(target):
        raise _exists(target)
    with _write_then(_publish_new, target) as file:
        yield file


@contextlib.contextmanager
def _write_then(publish: Callable[[Path, Path], None], target: Path) -> Iterator[BinaryIO]:
    """Write a temporary file, flush it, call `publish(temporary, target)`, and flush the folder."""
    owner = os.getpid()
    with contextlib.ExitStack() as cleanup:
        with translate_errors(target):
            make_folder(target.parent)
            _sweep_once(target.parent)
            # Opened now, while a failure costs nothing; after publishing it would be too late.
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            cleanup.callback(os.close, folder)
            temporary, file = _create_locked(target)
        # Callbacks run in reverse order: the file is closed, then deleted if it still has its temporary name. It stays
        # open until it is published, because its lock keeps other processes from sweeping it.
        cleanup.callback(_delete, temporary, owner)
        cleanup.callback(file.close)

        yield cast("BinaryIO", file)

        # A child that was forked inside the block ends up here, too.
        if os.getpid() != owner:
            return
        with translate_errors(target):
            _copy_permissions(target, file.fileno())
            os.fsync(file.fileno())
        publish(temporary, target)
        _flush_published(target, folder)


def _reserve(descriptor: int, nbytes: int) -> int:
    """Reserve disk space for a file, and return its size from now on.

    Never fails: only writing can tell whether the disk is full.
    """
    if nbytes < _MIN_RESERVED_BYTES or _fallocate is None:
        return 0
    with contextlib.suppress(OSError):
        free = os.fstatvfs(descriptor)
        # On a disk that is nearly full, other programs should not have to do without what turns out not to be needed.
        if free.f_bavail * free.f_frsize >= 2 * nbytes:
            _fallocate(descriptor, 0, 0, nbytes)
    return os.fstat(descriptor).st_size


def _replace(temporary: Path, target: Path) -> None:
    with translate_errors(target):
        temporary.replace(target)


def _publish_new(temporary: Path, target: Path) -> None:
    """Give a complete file its name, which must not exist yet."""
    if not link_new(temporary, target):
        _rename_new(temporary, target)


def link_new(source: Path, target: Path) -> bool:
    """Give a file a second name that must not exist yet. Unlike a rename, a link never replaces a file.

    Returns:
        Whether it was linked; not if the file system has no hard links, or if the names are on different ones.

    Raises:
        FileExistsError: If `target` exists.
        WriteError: If it cannot be linked for another reason.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise _exists(target) from None
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise write_error(target, error) from error
    return True


def _rename_new(temporary: Path, target: Path) -> None:
    """Rename a file to an unused name on a file system without hard links. A lock stands in for atomicity."""
    with translate_errors(target), FileLock(target.parent / PUBLISH_LOCK, timeout_s=PUBLISH_TIMEOUT_S):
        is_taken = os.path.lexists(target)
        if not is_taken:
            temporary.rename(target)
    if is_taken:
        raise _exists(target)


def _exists(target: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "the name is taken, and files are never replaced here", str(target))


def _flush_published(target: Path, folder: int) -> None:
    try:
        _sync_descriptor(folder)
    except OSError as error:
        reason = f"wrote {target}, but a power cut may undo it: its folder cannot be flushed ({error.strerror})"
        raise WriteError(error.errno, reason) from error


def _delete(temporary: Path, owner: int) -> None:
    """Delete a temporary file if there still is one, and if it belongs to this process and not to its parent."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            temporary.unlink()


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Raise `ValueError` for a URL: as a path, it would be a folder ``s3:`` on this machine."""
    scheme = _URL.match(os.fspath(path))
    if scheme is not None:
        raise ValueError(
            f"path is a URL ({scheme[0]}...), expected a file on this machine; CheckpointManager and RolloutStorage "
            "take URLs"
        )


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents so that they survive a power cut. Idempotent."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for child in reversed(missing):
        child.mkdir(exist_ok=True)
        sync_folder(child.parent)


def sync_folder(folder: Path) -> None:
    """Flush the entries of `folder` to the disk. Without it, a power cut may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def _sync_descriptor(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        # Some network file systems cannot flush a folder.
        if error.errno != errno.EINVAL:
            raise


def sweep(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete temporary files in `folder` whose writers are dead; files that are being written are left alone.

    `atomic_write` calls it for the first file that a process writes into a folder. Thread-safe and process-safe.

    Returns:
        The files that were deleted.
    """
    swept = []
    for path in Path(folder).glob(f"{RESERVED_PREFIX}*{_SUFFIX}"):
        # Any error means: not ours to delete, deleted meanwhile, or on a file system without locks.
        with (
            contextlib.suppress(OSError),
            open_private(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, LockableFile) as file,
        ):
            if try_lock(file):
                path.unlink()
                swept.append(path)
    return swept


def _sweep_once(folder: Path) -> None:
    if str(folder) not in _swept:
        sweep(folder)
        _swept.add(str(folder))


class _WholeFile(io.FileIO):
    """A file whose writes are never partial, and whose errors name the file that is being written.

    It has no buffer, because a forked child would flush its copy of the buffer into the parent's file.
    """

    def __init__(self, descriptor: int, target: Path) -> None:
        super().__init__(descriptor, "wb")
        self._target = target

    def write(self, data: Any) -> int:
        view = memoryview(data)
        # A view of zero bytes cannot be cast.
        if not view.nbytes:
            return 0
        view = view.cast("B")
        written = 0
        with translate_errors(self._target):
            while written < len(view):
                written += super().write(view[written:]) or 0
        return written


def _create_locked(target: Path) -> tuple[Path, _WholeFile]:
    """Create a temporary file in the target's folder and lock it."""
    make_file = functools.partial(_WholeFile, target=target)
    while True:
        path = target.parent / f"{RESERVED_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        file = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, make_file)
        kept = False
        try:
            kept = _lock_unless_swept(file, path)
        finally:
            if not kept:
                file.close()
                path.unlink(missing_ok=True)
        if kept:
            return path, file


def _lock_unless_swept(file: io.FileIO, path: Path) -> bool:
    """Lock a new temporary file. Returns False if a sweep took it for litter before it was locked."""
    try:
        locked = try_lock(file)
    except OSError:
        # A file system without locks only loses the sweeping.
        locked = True
    return locked and is_still_at(file, path)


def require_replaceable(target: Path) -> None:
    """Raise `OSError` if a path is a folder, a FIFO or a device: replacing one by a file would destroy it."""
    with contextlib.suppress(FileNotFoundError):
        mode = target.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it exists and is not a regular file")


def _copy_permissions(target: Path, descriptor: int) -> None:
    """Give a new file the owner and the permissions of the file that it is about to replace, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        old = target.stat()
        new = os.fstat(descriptor)
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            # Only root may change the owner of a file.
            with contextlib.suppress(OSError):
                os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


@contextlib.contextmanager
def translate_errors(target: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `WriteError` that names the file being written."""
    try:
        yield
    except (WriteError, LockedError):
        raise
    except OSError as error:
        raise write_error(target, error) from error


def write_error(target: Path, error: OSError, hint: str = "") -> WriteError:
    """Return a `WriteError`, or `DiskFullError`, that says which file could not be written and why.

    Args:
        target: The file that was being written.
        error: The error of the operating system.
        hint: Appended to the message, such as ``; try again``.
    """
    kind = WriteError
    if error.errno in _NO_SPACE:
        kind = DiskFullError
    return kind(error.errno, f"cannot write {target}: {error.strerror or error}{hint}")
