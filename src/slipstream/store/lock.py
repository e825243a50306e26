"""Locks on files that keep processes apart, and that a forked child never holds.

The kernel releases a lock when its process ends, however it ends, so a lock tells a living process from a dead one.
A process id does not: ids are reused, and mean nothing to another container on the same volume.

``flock`` locks belong to the *open file description*, which a forked child shares with its parent: as long as the child
keeps its copy of the descriptor, the lock stays, even if the parent is long dead. Open-file-description locks
(``F_OFD_SETLK``) behave the same way. So a child closes its copies at once, before any other code runs in it
(`_close_inherited`), and releasing a lock unlocks the description explicitly instead of relying on the close.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from slipstream.errors import LockedError

_POLL_S = 0.02
_MAX_NOTE_BYTES = 512
_NOTE = re.compile(rb"pid (\d{1,20}) on ([\w.-]{1,255})\n")

_File = TypeVar("_File", bound=io.FileIO)

# Open files that a forked child must not keep, and the paths of those that are being opened right now. Both are changed
# by single operations without a lock: a fork must never wait for a thread that is stuck in the file system, nor must a
# signal handler that interrupts one.
_private: weakref.WeakSet[io.FileIO] = weakref.WeakSet()
_opening: dict[object, Path] = {}


class LockableFile(io.FileIO):
    """An unbuffered file for reading and writing, made from an open descriptor."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "r+b")


def open_private(path: Path, flags: int, make_file: Callable[[int], _File]) -> _File:
    """Open a file whose descriptor a forked child does not keep.

    In the child the file object is closed, so using it there raises `ValueError`.

    Args:
        path: The file.
        flags: Flags of ``os.open``.
        make_file: Makes the file object of a descriptor.

    Raises:
        OSError: As ``os.open`` does.
    """
    token = object()
    _opening[token] = path
    try:
        file = make_file(os.open(path, flags | os.O_CLOEXEC, 0o666))
        _private.add(file)
    finally:
        del _opening[token]
    return file


def try_lock(file: io.FileIO) -> bool:
    """Lock an open file without waiting; returns False if another process holds the lock.

    Raises:
        OSError: If the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_still_at(file: io.FileIO, path: Path) -> bool:
    """Return whether `path` still names an open file: it may have been deleted, renamed or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class FileLock:
    """An exclusive lock that at most one holder has, among all threads and processes that use the same file.

    It is released by `release`, at the end of a ``with`` block, and by the kernel when the process ends, ``kill -9``
    included. A forked child does not hold the locks of its parent. The lock file stays and says who held it last. On a
    file system without locks every acquisition succeeds. Not reentrant; one object is for one thread at a time.

    Args:
        path: The lock file; created if it is missing, in a folder that must exist.
        timeout_s: How long `acquire` waits for another holder; 0 does not wait.

    Example:
        >>> Path("/tmp/slipstream-doc").mkdir(exist_ok=True)
        >>> with FileLock("/tmp/slipstream-doc/.lock"):
        ...     FileLock("/tmp/slipstream-doc/.lock").acquire()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        slipstream.errors.LockedError: /tmp/slipstream-doc/.lock is locked by this process (pid ...)
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout_s: float = 0.0) -> None:
        self.path = Path(path)
        self.timeout_s = timeout_s
        self._file: io.FileIO | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock, in this process."""
        return self._file is not None and not self._file.closed

    def acquire(self) -> None:
        """Take the lock; waits up to `timeout_s` for another holder.

        Raises:
            LockedError: If another holder keeps it; the message says which process, if the lock file does.
            OSError: If the lock file cannot be opened.
        """
        if self.held:
            raise LockedError(f"{self.path} is locked already, by the same FileLock object")
        deadline = time.monotonic() + self.timeout_s
        while not self._try_acquire():
            if time.monotonic() >= deadline:
                waited = f" after waiting {self.timeout_s:g} s" if self.timeout_s else ""
                raise LockedError(f"{self.path} is locked by {self._holder()}{waited}")
            time.sleep(_POLL_S)

    def _try_acquire(self) -> bool:
        """Lock the file unless another process has; leaves a note for those who wait."""
        file = open_private(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, LockableFile)
        acquired = False
        try:
            # A file that was deleted before it was locked protects nothing: the next process creates another one.
            acquired = _lock_if_supported(file) and is_still_at(file, self.path)
            if acquired:
                _leave_note(file)
                self._file = file
        finally:
            if not acquired:
                file.close()
        return acquired

    def release(self) -> None:
        """Release the lock. Idempotent; does nothing in a forked child, whose parent holds the lock."""
        file = self._file
        self._file = None
        if file is None or file.closed:
            return
        # A child forked by C code, past Python's hooks, may still have the descriptor. Then closing alone does not
        # unlock the file.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()

    def _holder(self) -> str:
        """Return who holds the lock, as far as the lock file tells; it may contain anything."""
        note = b""
        with contextlib.suppress(OSError), open_private(self.path, os.O_RDONLY | os.O_NONBLOCK, io.FileIO) as file:
            note = file.read(_MAX_NOTE_BYTES) or b""
        match = _NOTE.fullmatch(note)
        if match is None:
            return "another process"
        pid = int(match[1])
        host = match[2].decode()
        if (pid, host) == (os.getpid(), os.uname().nodename):
            return f"this process (pid {pid})"
        return f"process {pid} on {host}"

    def __del__(self) -> None:
        # The constructor may have failed before there was a file.
        if getattr(self, "_file", None) is not None:
            self.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _lock_if_supported(file: io.FileIO) -> bool:
    """Lock a file; returns True without a lock where the file system has none, as some network file systems do."""
    try:
        return try_lock(file)
    except OSError:
        return True


def _leave_note(file: io.FileIO) -> None:
    """Write who holds the lock into the lock file."""
    # The lock itself needs no space, so a full disk does not matter.
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {os.uname().nodename}\n".encode())


def _close_inherited() -> None:
    """Close, in a child that was just forked, the files that belong to its parent."""
    for file in list(_private):
        with contextlib.suppress(OSError):
            file.close()
    # Another thread of the parent may have been between opening a file and registering it. No object in the child owns
    # such a descriptor, so it is found by what it refers to. Nearly always there is none.
    for path in list(_opening.values()):
        _close_descriptors_of(path)
    _opening.clear()


def _close_descriptors_of(path: Path) -> None:
    """Close every descriptor of this process that refers to the file at `path`."""
    with contextlib.suppress(OSError):
        target = path.stat()
        for entry in list(Path("/dev/fd").iterdir()):
            descriptor = int(entry.name)
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), target):
                    os.close(descriptor)


os.register_at_fork(after_in_child=_close_inherited)
