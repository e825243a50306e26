"""`Waiters`: let threads wait for a condition without sharing a lock.

`threading.Condition` is a Python class around a lock. A `KeyboardInterrupt` inside it can leave that lock locked, and
then every other thread waits forever. Here each waiting thread blocks on a lock that nobody else acquires.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable


def deadline_after(timeout_s: float | None) -> float | None:
    """Return the time (of ``time.monotonic``) at which a timeout ends; None if there is no timeout."""
    if timeout_s is None:
        return None
    return time.monotonic() + timeout_s


class Waiters:
    """The threads that wait for a change of some state.

    Thread-safe, and safe against exceptions of signal handlers and calls by the garbage collector at any point.

    Example:
        >>> waiters, items = Waiters(), []
        >>> waiters.wait_for(lambda: bool(items), deadline_after(0.01))
        False
        >>> def put():
        ...     items.append(1)
        ...     waiters.wake_all()
        >>> threading.Thread(target=put).start()
        >>> waiters.wait_for(lambda: bool(items))
        True
    """

    def __init__(self) -> None:
        self._locks: deque[threading.Lock] = deque()

    def wait_for(self, condition: Callable[[], bool], deadline: float | None = None) -> bool:
        """Block until ``condition()`` is true.

        Args:
            condition: Called first, and whenever another thread calls `wake_all`.
            deadline: When to give up, see `deadline_after`.

        Returns:
            False if the condition is still false at the deadline.
        """
        while not condition():
            lock = threading.Lock()
            lock.acquire()
            self._locks.append(lock)
            try:
                # Check again: the state may have changed before this lock was in the queue.
                if condition():
                    return True
                # Blocks, because the lock is locked already: `wake_all` releases it.
                if not lock.acquire(timeout=_seconds_until(deadline)):
                    return condition()
            finally:
                # `wake_all` removes the lock, but does not run before a timeout or an interrupt.
                with contextlib.suppress(ValueError):
                    self._locks.remove(lock)
        return True

    def wake_all(self) -> None:
        """Let all waiting threads check their conditions. Call this after every change of the state. Never blocks."""
        while self._locks:
            # Nothing can come between removing a lock and releasing it, because CPython switches threads and runs
            # signal handlers only after a call. So no thread stays asleep, and no lock is released twice.
            lock = self._locks[0]
            del self._locks[0]
            lock.release()


def _seconds_until(deadline: float | None) -> float:
    """Return a timeout for ``Lock.acquire``, for which -1 means to wait forever."""
    if deadline is None:
        return -1.0
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
