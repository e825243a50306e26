"""Open files of this process: few at a time, reopened when they are needed again, never shared by accident.

Reads name their position, so threads and forked processes could share descriptors. They do not: after a fork the child
closes its copies and reopens files when it needs them, and a pickled table of files arrives with none open. What is
opened again is compared with what it was.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.identity import Identity
from slipstream.datasets.opening import open_hdf5
from slipstream.errors import DatasetError
from slipstream.store.local import open_descriptor
from slipstream.threads import parallel_each

T = TypeVar("T")

MAX_OPEN = 64
_MAX_OPEN_HDF5 = 4

_tables: weakref.WeakSet[Files] = weakref.WeakSet()
_orphans: list[
    Any
] = []  # HDF5 files of a parent process: closing them here could wait for a lock nobody holds any more


class Files:
    """A table of files, read by number.

    May be used by several threads, and after a fork or pickling.

    Args:
        max_open: How many descriptors are kept open; more only while more are being read from at once.
    """

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self.max_open = max_open
        self.paths: list[Path] = []
        self._identities: list[Identity] = []
        self.closed = False
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self.hdf5_lock = threading.RLock()
        self._open: OrderedDict[int, list[int]] = OrderedDict()  # number -> [descriptor, users]
        self._hdf5: OrderedDict[int, h5py.File] = OrderedDict()
        _tables.add(self)

    def add(self, path: Path, identity: Identity) -> int:
        """Add a file and return its number; it is not opened yet."""
        self.paths.append(path.absolute())
        self._identities.append(identity)
        return len(self.paths) - 1

    @property
    def num_open(self) -> int:
        """How many files are open in this process."""
        return len(self._open) + len(self._hdf5)

    @contextlib.contextmanager
    def borrow(self, number: int) -> Iterator[int]:
        """Hold a file open; yields its descriptor.

        Raises:
            DatasetError: If the table is closed, or the file changed since it was added.
            FileNotFoundError: If it was deleted.
        """
        entry = self._take(number)
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1
                unused = entry[1] == 0 and self._open.get(number) is not entry
            if unused:  # closed or evicted meanwhile
                os.close(entry[0])

    def _take(self, number: int) -> list[int]:
        with self._lock:
            if self.closed:
                raise DatasetError("the dataset is closed, and nothing can be read from it any more")
            entry = self._open.get(number)
            if entry is None:
                self._evict()
                path = self.paths[number]
                descriptor = open_descriptor(path)
                try:
                    self._identities[number].check(path, descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                entry = self._open[number] = [descriptor, 0]
            self._open.move_to_end(number)
            entry[1] += 1
            return entry

    def _evict(self) -> None:
        """Close what was not used for longest, if there are as many open files as there may be."""
        idle = [number for number, entry in self._open.items() if entry[1] == 0]
        for number in idle[: max(0, len(self._open) - self.max_open + 1)]:
            os.close(self._open.pop(number)[0])

    def check(self, number: int) -> None:
        """Look at a file by its name: what is open would stay as it is if another file took its place.

        Raises:
            DatasetError: If it changed or was replaced since it was added.
            FileNotFoundError: If it was deleted.
        """
        self._identities[number] = self._identities[number].check(self.paths[number])

    @contextlib.contextmanager
    def hdf5(self, number: int) -> Iterator[h5py.File]:
        """Hold HDF5's lock, and a file open by means of HDF5; for what cannot be read otherwise."""
        with self.hdf5_lock:
            if self.closed:
                raise DatasetError("the dataset is closed, and nothing can be read from it any more")
            file = self._hdf5.get(number)
            if file is None:
                self._identities[number] = self._identities[number].check(self.paths[number])
                while len(self._hdf5) >= _MAX_OPEN_HDF5:
                    self._hdf5.popitem(last=False)[1].close()
                file = self._hdf5[number] = open_hdf5(self.paths[number])
            self._hdf5.move_to_end(number)
            yield file

    def close(self) -> None:
        """Close all files; what is being read is closed when that is done."""
        with self._lock:
            self.closed = True
            idle = [entry[0] for entry in self._open.values() if entry[1] == 0]
            self._open.clear()
        for descriptor in idle:
            os.close(descriptor)
        with self.hdf5_lock:
            while self._hdf5:
                self._hdf5.popitem()[1].close()

    def forget(self) -> None:
        """Start with nothing open, as a child process does; locks may be held by threads that are not here."""
        inherited, hdf5 = list(self._open.values()), list(self._hdf5.values())
        self._start()
        _orphans.extend(hdf5)
        for descriptor, _ in inherited:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "max_open": self.max_open, "paths": list(self.paths), "_identities": list(self._identities),
            "closed": self.closed,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and (self._open or self._hdf5):
            self.close()


def pread_into(descriptor: int, target: NDArray[np.uint8], offset: int) -> bool:
    """Fill memory from a position of a file; returns whether there was enough."""
    count = os.preadv(descriptor, [target.data], offset)
    if count == target.nbytes:
        return True
    view, done = target.reshape(-1).data, count
    while count and done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        done += count
    return done == len(view)


class _Decoding(threading.local):
    """A lock for each thread, which it holds while frames are decoded for it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        with _fork_lock:
            _decoding_locks.add(self.lock)


_fork_lock = threading.RLock()  # held while the process forks: one thread does so at a time, and no lock is added
_decoding_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()
_decoding = _Decoding()
_held: list[threading.RLock] = []  # by the thread that forks


def decode_each(function: Callable[[T], object], items: Sequence[T], threads: int | None = None) -> None:
    """Call a function that uses OpenCV for every item, in parallel; no process is forked meanwhile.

    OpenCV takes a lock when a thread calls it for the first time, and when such a thread ends. A child that is forked
    while a thread holds this lock would wait for it forever, in its own first call and with Python's own lock held.
    So OpenCV is called only by threads that have ended when this returns, and by the main thread, which never does.

    Args:
        function: Called once per item.
        items: The arguments.
        threads: Number of threads; `slipstream.threads.default_threads` if None.

    Raises:
        BaseException: The first exception of `function`, in the order of the items.
    """
    with _decoding.lock:
        parallel_each(function, items, threads, tidy=True)


def _before_fork() -> None:
    """Wait for decoding and for reads by HDF5: a child that is born in the middle would find both locked forever."""
    _fork_lock.acquire()
    # In the order in which a read takes them.
    for lock in [*_decoding_locks, *(table.hdf5_lock for table in list(_tables))]:
        lock.acquire()
        _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop().release()
    _fork_lock.release()


def _after_fork_in_child() -> None:
    _after_fork()
    for table in list(_tables):
        table.forget()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
