"""`Prefetcher`: produce results on a background thread, in order, before they are needed.

A consumer orders results and takes them; one thread produces one result per order. It serves collectors and samplers,
which differ in what they produce.

**There are no shared locks.** Ctrl-C raises `KeyboardInterrupt` in the main thread after almost any call, and the
garbage collector may call `stop` in the middle of any method. A lock that is held at that moment would stay locked, or
make its holder wait for itself. So state changes in sections marked *atomic*: only their last statement may be a call,
and they create no containers. CPython (with the GIL) switches threads, runs signal handlers and collects garbage only
at calls, at the end of loop bodies and when it creates a container, so nothing can interrupt such a section. Threads
that have to wait use `Notifier`.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from slipstream.threads import Notifier

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Result = TypeVar("Result")

_EXIT_WAIT_S = 60.0
_JOIN_WAIT_S = 5.0


class NothingOrderedError(RuntimeError):
    """`Prefetcher.take` would wait forever, because every ordered result has been taken."""


class Prefetcher(Generic[Request, Result]):
    """Call ``produce(request)`` on a background thread for every order, one at a time and in order.

    * *Memory*: at most one result per order exists. An idle thread keeps no result alive.
    * *Threads*: all methods are thread-safe. The first order or take starts the thread. It ends with `stop`, when
      `owner` is garbage-collected, at interpreter exit, and when `produce` raises. If no thread can be started, `take`
      calls `produce` itself.
    * *Errors*: an exception of `produce`, including `StopIteration`, reaches `take` after the results before it, and
      every later `take`. Nothing is produced after it.
    * *Interrupts*: a `KeyboardInterrupt` in any method loses no result of the thread and never blocks a later call.
    * *Fork*: the child has a copy of orders and results and starts another thread when it needs one. If a result was
      in progress during the fork, `take` raises `RuntimeError` in the child in place of it.

    Args:
        produce: Produces one result. If it refers to `owner`, then `owner` is never garbage-collected.
        owner: The object whose lifetime limits the lifetime of the thread.
        name: Name of the thread.
        context: Returns a context manager. The thread enters it when it starts, and leaves it when it ends.
        drop_wait_s: How long the garbage collection of `owner` waits for the result in progress.

    Example:
        >>> class Squares:
        ...     def __init__(self):
        ...         self.prefetcher = Prefetcher(lambda number: number**2, owner=self)
        >>> squares = Squares()
        >>> squares.prefetcher.order(3)
        >>> squares.prefetcher.order(4)
        >>> squares.prefetcher.take(), squares.prefetcher.take()
        (9, 16)
        >>> squares.prefetcher.stop()
        True
    """

    def __init__(
        self,
        produce: Callable[[Request], Result],
        owner: object,
        *,
        name: str = "slipstream-prefetch",
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        drop_wait_s: float = 0.0,
    ) -> None:
        self._produce = produce
        self._name = name
        self._context = context
        self._orders: deque[Request] = deque()  # while `_busy`, the first one is in progress
        self._results: deque[Result] = deque()
        self._num_ahead = 0
        self._busy = False
        self._failure: _Failure | None = None
        self._pausers: list[int] = []  # the thread of every pause
        self._run: _Run | None = None  # None while no thread produces
        self._changed = Notifier()
        self._has_warned = False
        _prefetchers[id(self)] = self
        # At exit, `_stop_all` waits for the result in progress, whatever `drop_wait_s` is.
        weakref.finalize(owner, self.stop, drop_wait_s).atexit = False

    @property
    def num_ahead(self) -> int:
        """Number of results that are ordered, in progress or ready, and not taken."""
        return self._num_ahead

    @property
    def num_ready(self) -> int:
        """Number of results that can be taken without waiting."""
        return len(self._results)

    @property
    def has_ended(self) -> bool:
        """Whether `produce` has raised, so that nothing more is produced. Results may still be ready."""
        return self._failure is not None

    @property
    def orders(self) -> list[Request]:
        """The unfinished orders. Read this while paused or stopped."""
        return list(self._orders)

    @property
    def results(self) -> list[Result]:
        """The results that are ready. Read this while paused or stopped."""
        return list(self._results)

    def order(self, request: Request) -> None:
        """Order one more result. Does not block. Does nothing after `produce` has raised."""
        # Atomic.
        if self._failure is None:
            self._num_ahead += 1
            self._orders.append(request)
        if self._failure is None and not self._pausers:
            self._start()
        self._changed.notify_all()

    def take(self, timeout_s: float | None = None) -> Result:
        """Return the next result; blocks until it is ready.

        Args:
            timeout_s: How long to wait at most. Has no effect if this has to call `produce` itself.

        Raises:
            TimeoutError: If the result is not ready in time. Call again to continue waiting.
            NothingOrderedError: If no result is ordered, or other threads have taken all of them.
            RuntimeError: If the result is not ready and this thread has paused production, or is calling `produce`.
            BaseException: The exception of `produce`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # `order` may have been interrupted after it changed the state and before it woke the thread.
        self._changed.notify_all()
        while True:
            # Read the failure before the results: if there are no results after that, none precedes the failure.
            failure = self._failure
            # Atomic.
            if self._results:
                result = self._results[0]
                del self._results[0]
                self._num_ahead -= 1
                return result
            if failure is not None:
                raise failure.error.with_traceback(failure.traceback)
            self._check_can_wait()
            if not self._start():
                self._produce_here()
            elif not self._changed.wait_until(self._has_news, _seconds_until(deadline)):
                raise TimeoutError(f"no result within {timeout_s} s")

    def finish(self) -> None:
        """Block until all orders are finished or `produce` has raised. Raises what `take` raises if it cannot wait."""
        self._changed.notify_all()
        while self._orders and self._failure is None:
            self._check_can_wait()
            if not self._start():
                self._produce_here()
            else:
                self._changed.wait_until(self._has_finished_or_stopped)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the result in progress, then produce nothing inside the block. Can be nested.

        Raises:
            RuntimeError: If this thread is calling `produce`.
        """
        self._check_not_producing()
        this_thread = threading.get_ident()
        try:
            self._pausers.append(this_thread)
            self._changed.wait_until(self._is_idle)
            yield
        finally:
            self._pausers.remove(this_thread)
            self._changed.notify_all()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread; blocks until the result in progress is done. Idempotent.

        Orders and results stay. The next `order` or `take` starts another thread, and so does a `take` that is waiting
        on another thread. If `produce` calls this, then it returns immediately, and the thread ends after `produce`.

        Args:
            timeout_s: How long to wait at most.

        Returns:
            False if the result in progress takes longer. The thread ends when it is done.
        """
        run = self._run
        if run is None:
            return True
        run.is_stopping = True
        self._changed.notify_all()
        # `produce` may call this, and so may the garbage collector on that thread. Waiting would never end there.
        if run.thread_id == threading.get_ident():
            return True
        if not self._changed.wait_until(run.has_ended, timeout_s):
            return False
        # The thread has left our code, and all that remains is its entry in `threading`. Limit the wait for that: if
        # the garbage collector calls this inside `threading.enumerate`, then this thread holds a lock that it needs.
        if run.thread is not None:
            run.thread.join(_JOIN_WAIT_S)
        return True

    def abandon(self, error: BaseException) -> None:
        """Drop all orders and results, and make every later `take` raise `error`.

        Does not block and does not end the thread: call `stop` afterwards.
        """
        self._failure = _Failure(error)
        self._orders.clear()
        self._results.clear()
        self._num_ahead = 0
        self._changed.notify_all()

    def reset(self, orders: Iterable[Request] = (), results: Iterable[Result] = ()) -> None:
        """Replace all orders and results, and forget an exception of `produce`. Call this while paused or stopped.

        Raises:
            RuntimeError: If the thread is neither paused nor stopped.
        """
        if self._run is not None and not self._pausers:
            raise RuntimeError("the prefetcher is running: call reset() after stop() or inside paused()")
        self._orders.clear()
        self._orders.extend(orders)
        self._results.clear()
        self._results.extend(results)
        self._num_ahead = len(self._orders) + len(self._results)
        self._failure = None

    def _check_can_wait(self) -> None:
        """Raise if nothing can become ready while this thread waits."""
        self._check_not_producing()
        if threading.get_ident() in self._pausers:
            raise RuntimeError("production is paused and no result is ready: wait for results after the pause")
        if not self._num_ahead and self._failure is None:
            raise NothingOrderedError("no result is ordered: call order() before take()")

    def _check_not_producing(self) -> None:
        run = self._run
        if run is not None and run.thread_id == threading.get_ident():
            raise RuntimeError("produce cannot wait for the prefetcher that calls it")

    # Conditions to wait for. Each one includes what makes further waiting pointless.

    def _has_news(self) -> bool:
        return bool(self._results) or self._failure is not None or self._run is None or not self._num_ahead

    def _has_finished_or_stopped(self) -> bool:
        return not self._orders or self._failure is not None or self._run is None

    def _is_idle(self) -> bool:
        return not self._busy

    def _is_resumed(self) -> bool:
        return not self._pausers

    def _has_work(self, run: _Run) -> bool:
        return run.is_stopping or self._failure is not None or bool(self._orders and not self._pausers)

    # The producing thread.

    def _start(self) -> bool:
        """Start a thread unless there is one; returns False if that is impossible."""
        if self._run is not None:
            return True
        if _exit.has_begun:
            return False
        run = _Run()
        launch = functools.partial(self._launch, run)
        # Atomic: two consumers never start two threads, and an interrupt never leaves a run without a thread.
        if self._run is None:
            self._run = run
            try:
                _thread.start_new_thread(launch, ())
            except RuntimeError as error:
                self._run = None
                self._warn(error)
                return False
        return True

    def _launch(self, run: _Run) -> None:
        """Start the producing thread, from a helper thread.

        `Thread.start` waits for the new thread on a lock of `threading`, which `KeyboardInterrupt` could leave locked.
        Only the main thread receives signals, so the helper is never interrupted.
        """
        run.thread = threading.Thread(target=self._work, args=(run,), name=self._name, daemon=True)
        try:
            run.thread.start()
        except RuntimeError:
            # The helper was the last thread that the system allows.
            run.thread = None
            self._work(run)

    def _warn(self, error: RuntimeError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s: no thread (%s); results are produced when they are taken, not ahead", self._name, error)

    def _work(self, run: _Run) -> None:
        """Produce until asked to stop, or until `produce` raises."""
        run.thread_id = threading.get_ident()
        try:
            with self._context():
                while self._begin(run):
                    self._produce_next(BaseException)
        except BaseException as error:  # noqa: BLE001 - the context failed, and `take` raises that
            self._fail(error)
        finally:
            # Atomic.
            run.is_over = True
            self._run = None
            self._changed.notify_all()

    def _begin(self, run: _Run) -> bool:
        """Wait for an order and begin it; returns False if the thread has to end."""
        has_work = functools.partial(self._has_work, run)
        while True:
            # Atomic: a pause either prevents this order or sees that it is in progress.
            if run.is_stopping or self._failure is not None:
                return False
            if self._orders and not self._pausers:
                self._busy = True
                return True
            self._changed.wait_until(has_work)

    def _produce_next(self, caught: type[BaseException]) -> None:
        """Produce the first order. Returns nothing, so that the thread keeps no result alive while it waits."""
        try:
            result = self._produce(self._orders[0])
        except caught as error:
            self._fail(error)
            return
        # Atomic: others see the order or its result, never both or neither.
        self._busy = False
        if self._failure is None:  # otherwise it was abandoned
            del self._orders[0]
            self._results.append(result)
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Let `take` raise an exception."""
        failure = _Failure(error)
        # Atomic.
        was_busy = self._busy
        self._busy = False
        if self._failure is None:  # otherwise it was abandoned
            self._failure = failure
            if was_busy:
                del self._orders[0]
                self._num_ahead -= 1
        self._changed.notify_all()

    def _produce_here(self) -> None:
        """Produce one order on this thread, because no other thread can be started."""
        self._changed.wait_until(self._is_resumed)
        run = _Run()
        run.thread_id = threading.get_ident()
        # Atomic.
        if self._run is not None:
            return
        self._run = run
        try:
            with self._context():
                # Atomic.
                if self._orders and not self._pausers and self._failure is None:
                    self._busy = True
                    # A KeyboardInterrupt is not an error of `produce`: it goes to the caller, and the order stays.
                    self._produce_next(Exception)
        finally:
            # Atomic.
            self._busy = False
            run.is_over = True
            self._run = None
            self._changed.notify_all()

    def forget_threads(self) -> None:
        """Forget the threads that do not exist in a forked child. Called there by `os.fork` itself."""
        this_thread = threading.get_ident()
        self._changed = Notifier()
        self._pausers = [thread for thread in self._pausers if thread == this_thread]
        run = self._run
        # If `produce` has forked the process, then the child continues inside `produce`.
        if run is None or run.thread_id == this_thread:
            return
        self._run = None
        if self._busy:
            message = "a result was in progress when the process was forked: create a new object in the child process"
            self._fail(RuntimeError(message))


class _Run:
    """One life of the producing thread, from the decision to start it to its end."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.thread_id: int | None = None  # None until the thread runs
        self.is_stopping = False
        self.is_over = False

    def has_ended(self) -> bool:
        return self.is_over


class _Failure:
    """An exception, with its traceback as it was before `take` raised it. Every raise adds frames to that."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.traceback: TracebackType | None = error.__traceback__


class _Exit:
    """Whether the interpreter is shutting down. Threads that start now would be killed while they work."""

    has_begun = False


_exit = _Exit()
_prefetchers: weakref.WeakValueDictionary[int, Prefetcher[Any, Any]] = weakref.WeakValueDictionary()


def _seconds_until(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    return max(0.0, deadline - time.monotonic())


def _list_prefetchers() -> list[Prefetcher[Any, Any]]:
    found = []
    # `valuerefs` makes its list in one step; iterating over the dictionary fails if another thread adds to it.
    for reference in _prefetchers.valuerefs():
        prefetcher = reference()
        if prefetcher is not None:
            found.append(prefetcher)
    return found


@atexit.register
def _stop_all() -> None:
    """Wait for results in progress, because they may need modules that the interpreter is about to clear."""
    _exit.has_begun = True
    prefetchers = _list_prefetchers()
    # Ask all of them before waiting for the first.
    for prefetcher in prefetchers:
        prefetcher.stop(timeout_s=0.0)
    for prefetcher in prefetchers:
        prefetcher.stop(_EXIT_WAIT_S)


def _reset_child() -> None:
    for prefetcher in _list_prefetchers():
        prefetcher.forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_child)
