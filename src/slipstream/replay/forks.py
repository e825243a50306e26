"""Locks across `os.fork`.

A child that is forked while another thread holds a lock would wait for it forever. So tables are locked while the
process forks, which makes them complete in the child, and the child gets new locks.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Forkable(Protocol):
    """An object with tables that a lock guards."""

    lock: threading.RLock

    def renew_locks(self) -> None:
        """Make new locks."""


_all: weakref.WeakSet[Forkable] = weakref.WeakSet()
_locked: list[Forkable] = []
# Held while the process forks, so that no tables are registered meanwhile.
_guard = threading.Lock()


def register(tables: Forkable) -> None:
    """Lock these tables whenever the process forks, as long as they exist."""
    with _guard:
        _all.add(tables)


def _lock_all() -> None:
    _guard.acquire()
    _locked[:] = list(_all)
    for tables in _locked:
        tables.lock.acquire()


def _unlock_all() -> None:
    for tables in _locked:
        tables.lock.release()
    _locked.clear()
    _guard.release()


def _renew_all() -> None:
    for tables in _locked:
        tables.renew_locks()
    _locked.clear()
    _guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock_all, after_in_parent=_unlock_all, after_in_child=_renew_all)
