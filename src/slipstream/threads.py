"""How many threads to use, parallel loops on short-lived threads, and a way to wait that Ctrl-C cannot break.

`parallel_map` and `parallel_each` start their threads for one call and join them at the end. That costs about 0.1 ms
and has three advantages over a shared pool: the threads inherit the low scheduling priority of the background thread
that starts them, a forked child never inherits a pool without threads, and it works while the interpreter shuts down,
when ``concurrent.futures`` refuses new work.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_POLL_S = 1.0


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Return the default number of threads: one per usable core, at most 8."""
    return min(8, usable_cores())


def background_threads() -> int:
    """Return the number of threads for work beside training: a quarter of the default, at least one.

    More threads do not finish sooner while training keeps the cores busy, and they slow training down.
    """
    return max(1, default_threads() // 4)


def parallel_map(function: Callable[[T], R], items: Sequence[T], threads: int | None = None) -> Iterator[R]:
    """Yield ``function(item)`` for every item, in order, computed on up to `threads` threads.

    Memory is bounded: at most two results per thread are computed ahead of the consumer. If the system refuses to start
    threads, the caller's thread does the work. No thread outlives the iterator.

    Args:
        function: Called once per item. It should release the GIL most of the time.
        items: The arguments.
        threads: Number of threads; `default_threads` if None.

    Raises:
        BaseException: The first exception of `function`, in the order of the items, in place of its result. No further
            item is started.

    Example:
        >>> list(parallel_map(abs, [-1, -2, 3], threads=2))
        [1, 2, 3]
    """
    count = min(threads or default_threads(), len(items))
    if count <= 1:
        yield from _serial_map(function, items)
        return
    work = _Work(function, items, ahead=2 * count)
    crew = _Crew(work, count)
    if not crew.threads:
        yield from _serial_map(function, items)
        return
    try:
        for index in range(len(items)):
            yield work.result(index)
    finally:
        crew.dismiss()


def parallel_each(
    function: Callable[[T], object], items: Sequence[T], threads: int | None = None, *, tidy: bool = False
) -> None:
    """Call ``function(item)`` for every item on up to `threads` threads, one of which is the caller's.

    For work without results. Uses one thread less than `parallel_map`, and hands nothing from thread to thread.

    Args:
        function: Called once per item. It should release the GIL most of the time.
        items: The arguments. They are started in order.
        threads: Number of threads; `default_threads` if None.
        tidy: Wait until the system has ended the threads, and spare a caller's thread that may end later: any but the
            main thread. For libraries that keep data per thread and take a lock when such a thread ends.

    Raises:
        BaseException: The first exception of `function`, in the order of the items; Ctrl-C before all others. No
            further item is started.

    Example:
        >>> squares = {}
        >>> parallel_each(lambda item: squares.update({item: item**2}), [1, 2, 3], threads=2)
        >>> sorted(squares.values())
        [1, 4, 9]
    """
    indices = itertools.count()
    errors: dict[int, BaseException] = {}

    def run() -> None:
        for index in indices:
            if errors or index >= len(items):
                return
            try:
                function(items[index])
            except Exception as error:  # noqa: BLE001 - raised again below
                errors[index] = error
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors[-1] = error

    helpers: list[threading.Thread] = []
    takes_part = not tidy or threading.current_thread() is threading.main_thread()
    count = min(threads or default_threads(), len(items))
    try:
        _start_threads(helpers, run, count - takes_part)
        if takes_part or not helpers:
            run()
    except BaseException as error:  # noqa: BLE001 - Ctrl-C between two items, raised again below
        errors[-1] = error
    for helper in helpers:
        _join(helper, until_the_end=tidy)
    if errors:
        first = errors[min(errors)]
        try:
            raise first
        finally:
            # Otherwise the traceback and these frames keep each other, and the items, alive.
            errors.clear()
            del first


def _start_threads(started: list[threading.Thread], target: Callable[[], object], count: int) -> None:
    """Start daemon threads, and append them to a list; fewer if the system has no more."""
    for _ in range(count):
        thread = threading.Thread(target=target, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        started.append(thread)


def _join(thread: threading.Thread, *, until_the_end: bool) -> None:
    """Wait for a thread; if asked to, until the system has ended it.

    Before Python 3.13, `join` returns earlier: libraries may still be freeing what they kept for the thread.
    """
    thread.join()
    if not until_the_end or sys.version_info >= (3, 13):
        return
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        os.sched_yield()


def _serial_map(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    # Not `map`: a StopIteration of `function` would end that silently. Here Python turns it into a RuntimeError.
    for item in items:
        yield function(item)


@dataclass
class _Outcome(Generic[R]):
    """What a call returned or raised."""

    result: R | None = None
    error: BaseException | None = None


class _Work(Generic[T, R]):
    """Items to process in order, at most `ahead` of the consumer, and their results.

    The consumer is often the main thread, which Ctrl-C may interrupt anywhere. So nothing here is guarded by a lock:
    `next` of a counter and the assignment of one item or attribute are atomic.
    """

    def __init__(self, function: Callable[[T], R], items: Sequence[T], ahead: int) -> None:
        self._function = function
        self._items = items
        self._ahead = ahead
        self._changed = Notifier()
        self._outcomes: dict[int, _Outcome[R]] = {}
        self._indices = itertools.count()
        self._num_consumed = 0
        self._is_cancelled = False
        self._process_id = os.getpid()
        # A weak reference to the threads' owner, set before the first thread starts.
        self.crew: Callable[[], _Crew | None] = lambda: None

    def run(self) -> None:
        """Process items until none is left; runs on each thread."""
        for index in self._indices:
            if index >= len(self._items):
                return
            # Ctrl-C may interrupt the call that cancels, so look now and then whether the consumer still exists.
            may_continue = functools.partial(self._may_continue, index)
            while not self._changed.wait_until(may_continue, timeout_s=_POLL_S):
                continue
            if self._has_no_consumer():
                return
            self._process(index)

    def result(self, index: int) -> R:
        """Wait for a result; call it for every index in order."""
        # A forked child has the results so far, but no threads that compute the others.
        if os.getpid() != self._process_id and index not in self._outcomes:
            return self._function(self._items[index])
        self._changed.wait_until(lambda: index in self._outcomes)
        outcome = self._outcomes.pop(index)
        self._num_consumed = index + 1
        self._changed.notify_all()
        if outcome.error is not None:
            try:
                raise outcome.error
            finally:
                # Otherwise the traceback and this frame keep each other, and the item, alive.
                outcome.error = None
        return outcome.result  # type: ignore[return-value]

    def cancel(self) -> None:
        """Start no further item."""
        self._is_cancelled = True
        self._changed.notify_all()

    def _may_continue(self, index: int) -> bool:
        return self._has_no_consumer() or index < self._num_consumed + self._ahead

    def _has_no_consumer(self) -> bool:
        return self._is_cancelled or self.crew() is None

    def _process(self, index: int) -> None:
        """Compute one result and hand it to the consumer; keeps no reference to it."""
        outcome: _Outcome[R] = _Outcome()
        try:
            outcome.result = self._function(self._items[index])
        except BaseException as error:  # noqa: BLE001 - raised again where the result is consumed
            outcome.error = error
        self._outcomes[index] = outcome
        self._changed.notify_all()


class _Crew:
    """The threads of one call. They end when this object is dismissed, or when nobody refers to it any more.

    The second way is for Ctrl-C before the consumer gets to its ``try`` statement.
    """

    def __init__(self, work: _Work[Any, Any], count: int) -> None:
        self._work = work
        self._process_id = os.getpid()
        work.crew = weakref.ref(self)
        self.threads: list[threading.Thread] = []
        # If the system has no more threads, those that started do all the work.
        _start_threads(self.threads, work.run, count)

    def dismiss(self) -> None:
        """Start no further item, and wait for those in progress."""
        self._work.cancel()
        if os.getpid() != self._process_id:
            return
        for thread in self.threads:
            # The garbage collector may close the iterator on any thread, also on one of these.
            if thread is not threading.current_thread():
                thread.join()


class Notifier:
    """Wakes threads that wait for a condition. Ctrl-C may interrupt a waiting thread anywhere.

    `threading.Condition` is written in Python. A `KeyboardInterrupt` between two of its lines can leave its lock held,
    and then every other thread waits forever. Here each waiting thread blocks on a lock that belongs to it alone, so an
    interrupted thread leaves nothing behind that another thread needs. Conditions are read without a lock: they should
    depend on values that change in one step.

    Example:
        >>> notifier = Notifier()
        >>> notifier.wait_until(lambda: True)
        True
        >>> notifier.wait_until(lambda: False, timeout_s=0.01)
        False
    """

    def __init__(self) -> None:
        self._waiting: deque[_thread.LockType] = deque()

    def wait_until(self, is_ready: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Block until `is_ready()` is true or `timeout_s` seconds have passed; return whether it is true."""
        deadline = None
        if timeout_s is not None:
            deadline = time.monotonic() + timeout_s
        while not is_ready():
            turn = _thread.allocate_lock()
            turn.acquire()
            self._waiting.append(turn)
            # Look again: the condition may have become true before `turn` was in the queue, and then no notification
            # follows.
            if is_ready():
                self._forget(turn)
                return True
            if deadline is None:
                turn.acquire()
            elif not turn.acquire(timeout=_seconds_until(deadline)):
                self._forget(turn)
                return bool(is_ready())
        return True

    def notify_all(self) -> None:
        """Make every waiting thread look at its condition again. Never blocks."""
        for turn in self._waiting.copy():
            # Release before removing: interrupted in between, the next call still finds the thread.
            # A RuntimeError means that another thread has released it already.
            with contextlib.suppress(RuntimeError):
                turn.release()
            self._forget(turn)

    def _forget(self, turn: _thread.LockType) -> None:
        # A ValueError means that another thread has removed it already.
        with contextlib.suppress(ValueError):
            self._waiting.remove(turn)


def _seconds_until(deadline: float) -> float:
    """Return a timeout that a lock accepts: it refuses negative and very large ones."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


class Uninterrupted:
    """A lock under which Ctrl-C waits: what changes under it changes completely.

    Only Python's main thread is ever interrupted, so other threads just take the lock. The block should be short.

    Args:
        lock: What to take; it may be taken elsewhere, too.

    Example:
        >>> tables = threading.RLock()
        >>> with Uninterrupted(tables):
        ...     pass
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._depth = 0  # how often the main thread is inside
        self._handler: Any = None
        self._arrived: list[tuple[Any, ...]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            # A handler that is not a Python function ends the process, or does nothing.
            if not self._depth and callable(signal.getsignal(signal.SIGINT)):
                self._arrived.clear()
                self._handler = signal.signal(signal.SIGINT, self._remember)
            self._depth += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        handler = self._handler
        if self._depth or handler is None:
            return
        self._handler = None
        signal.signal(signal.SIGINT, handler)
        if self._arrived:
            handler(*self._arrived.pop())

    def _remember(self, *arguments: Any) -> None:
        self._arrived.append(arguments)
