"""The background: bounded queues of jobs, run one at a time on a single low-priority thread of the process.

Whatever Slipstream writes behind training's back goes through here. Each owner (a checkpoint saver, a rollout storage)
has a `Worker` with a bound and a policy of its own; all of them share one thread, so that the background never takes
more than one core from training, plus what codecs use at idle priority.

Nothing queued is lost without a word:

* *Normal exit, ``sys.exit``, an unhandled exception, Ctrl-C*: a watching thread sees the main thread end and drains
  all queues before the interpreter goes away.
* *SIGTERM, SIGHUP, and SIGINT if it would kill*: a handler drains all queues, then passes the signal on: to the handler
  that was there before, or to the system's default, so that the process still dies of that signal. A second signal
  while draining is passed on at once. Signals that are ignored stay ignored.
* *Failure of a job*: kept, with its traceback, until its handle is asked, or else raised by the next call or by
  `close`, or else logged at exit.
* *Fork*: the child starts with empty queues; the jobs stay with the parent.

Locks are reentrant throughout, because a signal handler may interrupt the main thread while it holds one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from types import FrameType, TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, get_args

from slipstream.errors import BackgroundError, JobSkippedError, QueueFullError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Policy = Literal["block", "skip_oldest", "raise"]

_DRAIN_ON_SIGNAL_S = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Handle(Future[T], Generic[T]):
    """The promise of a job's result: a `concurrent.futures.Future` that can also be waited for.

    Asking for the result (or exception) of a failed job counts as having heard of the failure.
    """

    _heard = False

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the job is done; returns False if that took longer than `timeout` seconds.

        Raises:
            BaseException: What the job raised, if it failed.
        """
        if not wait_for_futures([self], timeout).done:
            return False
        self.result()
        return True

    def result(self, timeout: float | None = None) -> T:
        """Block until the job is done, and return what it returned or raise what it raised."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the job is done, and return what it raised, or None."""
        error = super().exception(timeout)
        self._heard = True
        return error

    def _fail(self, error: BaseException) -> None:
        """Give up a job that has not begun, for a reason its owner knows of."""
        if self.set_running_or_notify_cancel():
            self._heard = True
            self.set_exception(error)


class Worker:
    """A bounded queue of jobs that run in the background, in order.

    Args:
        max_queue_size: How many jobs may be waiting or running at once; with what they hold on to, this bounds memory.
        policy: What `submit` does when the queue is full: ``block`` until there is room; ``skip_oldest`` drops the
            oldest job that has not begun (and blocks if there is none); ``raise`` a `QueueFullError`.
        name: For messages.
        on_full: Called, with no lock held, each time `submit` finds the queue full.

    Example:
        >>> with Worker(max_queue_size=2) as worker:
        ...     handle = worker.submit(sum, [1, 2, 3])
        >>> handle.result()
        6
    """

    def __init__(
        self,
        max_queue_size: int = 3,
        policy: Policy = "block",
        name: str = "slipstream",
        on_full: Callable[[], None] | None = None,
    ) -> None:
        if max_queue_size < 1:
            raise ValueError(f"max_queue_size is {max_queue_size}, expected at least 1")
        if policy not in get_args(Policy):
            raise ValueError(f"policy is {policy!r}, expected one of {', '.join(get_args(Policy))}")
        self.max_queue_size = max_queue_size
        self.policy = policy
        self.name = name
        self.num_skipped = 0
        self._on_full = on_full
        self._closed = False
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._reserved = 0
        self._failed: list[Handle[Any]] = []
        with _background.changed:
            _background.workers.add(self)

    @property
    def queue_size(self) -> int:
        """How many jobs are waiting or running."""
        return len(self._waiting) + (self._running is not None) + self._reserved

    def submit(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Handle[T]:
        """Queue ``function(*args, **kwargs)``; returns at once unless the queue is full and the policy is to wait.

        Called from inside a job, or after the main thread has ended, it runs the job before it returns.

        Raises:
            BackgroundError: If an earlier job failed and nobody has heard of it. The new job is not queued; the same
                call again is accepted.
            QueueFullError: If the queue is full and the policy is ``raise``.
            RuntimeError: If the worker is closed.
        """
        with self.room() as put:
            return put(function, *args, **kwargs)

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[..., Handle[Any]]]:
        """Wait for room in the queue, as `submit` does, and hold it: yields the function that fills it.

        For jobs that need memory which should not be taken before there is room. Leaving the block without having
        filled the room gives it back. Raises what `submit` raises.
        """
        self._raise_failure()
        if self._closed:
            raise RuntimeError(f"{self.name}: the worker is closed and takes no more jobs")
        inline = _background.must_run_inline()
        if not inline:
            self._reserve()
        held = not inline

        def put(function: Callable[..., T], *args: Any, **kwargs: Any) -> Handle[T]:
            nonlocal held
            # A partial, not a lambda: a frame keeps its function alive, so that the traceback of a failure would
            # keep what a lambda captures.
            job = _Job(self, Handle(), functools.partial(function, *args, **kwargs))
            if inline:
                job.run()
            else:
                held = False
                _background.put(job)
            return job.handle

        try:
            yield put
        finally:
            if held:
                with _background.changed:
                    self._reserved -= 1
                    _background.changed.notify_all()

    def flush(self, timeout: float | None = None) -> None:
        """Block until every job queued so far is done.

        Raises:
            TimeoutError: If that takes longer than `timeout` seconds; the jobs go on.
            BackgroundError: If a job failed and nobody has heard of it.
        """
        if not _background.wait_for(lambda: not self.queue_size, timeout):
            raise TimeoutError(f"{self.name}: {self.queue_size} jobs are not done after {timeout} s; they go on")
        self._raise_failure()

    def close(self, timeout: float | None = 60.0) -> None:
        """Take no more jobs, and block until those queued are done; see `flush` for what it raises. May be repeated."""
        self._closed = True
        self.flush(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(timeout=None)
        except BackgroundError:
            if error is None:
                raise
            logger.exception("%s: failed in the background while another error was on its way", self.name)

    def _reserve(self) -> None:
        """Take a place in the queue, or wait for one, or fail, as the policy says; never exceeds the bound."""
        skipped: list[_Job] = []
        if self._on_full is not None and self.queue_size >= self.max_queue_size:
            self._on_full()
        with _background.changed:
            while self.queue_size >= self.max_queue_size:
                if self.policy == "raise":
                    raise QueueFullError(f"{self.name}: the queue is full with {self.max_queue_size} jobs")
                if self.policy == "skip_oldest" and self._waiting:
                    skipped.append(self._waiting.popleft())
                else:
                    _background.changed.wait()
            self._reserved += 1
            self.num_skipped += len(skipped)
        for job in skipped:
            job.handle._fail(JobSkippedError(f"{self.name}: a newer job took this one's place"))

    def _raise_failure(self) -> None:
        with _background.changed:
            unheard = [handle for handle in self._failed if not handle._heard]
            self._failed.clear()
        if not unheard:
            return
        cause, *_ = [handle.exception() for handle in unheard]
        others = f" (and {len(unheard) - 1} more)" if len(unheard) > 1 else ""
        raise BackgroundError(f"{self.name}: an earlier job failed{others}: {cause}") from cause


class _Job:
    """A function to run, whose outcome goes to a handle."""

    def __init__(self, worker: Worker, handle: Handle[Any], function: Callable[[], Any]) -> None:
        self.worker = worker
        self.handle = handle
        self.function: Callable[[], Any] | None = function

    def run(self) -> None:
        """Run the function; never raises. Drops the function, and what it holds on to, before anyone is told."""
        function, self.function = self.function, None
        if function is None or not self.handle.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - kept for whoever asks
            del function
            traceback.clear_frames(error.__traceback__)  # the lines stay, the locals (perhaps gigabytes) go
            self.handle.set_exception(error)
            with _background.changed:
                self.worker._failed.append(self.handle)
                _background.failed = [handle for handle in (*_background.failed, self.handle) if not handle._heard]
        else:
            del function
            self.handle.set_result(result)


class _Background:
    """The one thread, and what is queued for it. There is one of these in a process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, locks included: they may be held by threads that a fork left behind."""
        self.changed = threading.Condition(threading.RLock())
        self.workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self.turns: deque[Worker] = deque()
        self.failed: list[Handle[Any]] = []
        self.thread: threading.Thread | None = None
        self.exiting = False
        self.draining_for_signal = False

    def must_run_inline(self) -> bool:
        """Tell whether queueing would wait for a thread that is busy (with the caller) or about to go away."""
        return self.exiting or threading.current_thread() is self.thread

    def put(self, job: _Job) -> None:
        """Queue a job, or run it here and now if there is no thread to be had any more."""
        _install_signal_handlers()
        with self.changed:
            if self._is_running():
                job.worker._reserved -= 1
                job.worker._waiting.append(job)
                self.turns.append(job.worker)
                self.changed.notify_all()
                return
            job.worker._reserved -= 1
        job.run()

    def _is_running(self) -> bool:
        """Tell whether the thread will take jobs; starts it, and the one that watches for the end, if need be."""
        if self.thread is None and not self.exiting:
            thread = threading.Thread(target=self._loop, name="slipstream-background", daemon=True)
            watcher = threading.Thread(target=self._drain_when_main_ends, name="slipstream-exit", daemon=False)
            try:
                watcher.start()
                thread.start()
            except RuntimeError:  # the interpreter is on its way out
                return False
            self.thread = thread
        return not self.exiting

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Block until `condition` holds; returns whether it does."""
        if threading.current_thread() is self.thread:
            return condition()
        with self.changed:
            return self.changed.wait_for(condition, timeout)

    def drain(self, timeout: float | None) -> bool:
        """Block until nothing is queued or running anywhere."""
        return self.wait_for(lambda: not any(worker.queue_size for worker in list(self.workers)), timeout)

    def _loop(self) -> None:
        _lower_priority()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.turns)
                worker = self.turns.popleft()
                if not worker._waiting:  # its job was skipped
                    continue
                job = worker._running = worker._waiting.popleft()
            job.run()
            with self.changed:
                worker._running = None
                self.changed.notify_all()
            del job, worker

    def _drain_when_main_ends(self) -> None:
        threading.main_thread().join()
        with self.changed:
            self.exiting = True
        self.drain(None)
        for handle in self.failed:
            if not handle._heard and (error := handle.exception()) is not None:
                logger.error("a background job failed and nobody asked for its result", exc_info=error)


def _lower_priority() -> None:
    """Let everyone else on the machine go first; threads started from this one inherit it."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


_background = _Background()


def _before_fork() -> None:
    _background.changed.acquire()  # so that the child gets a copy that nobody is in the middle of changing


def _after_fork_in_parent() -> None:
    _background.changed.release()


def _after_fork_in_child() -> None:
    """Start with nothing queued: the thread and the jobs stayed in the parent."""
    workers = list(_background.workers)
    _background.reset()
    for worker in workers:
        _background.workers.add(worker)
        orphans = [*worker._waiting, *([worker._running] if worker._running else [])]
        worker._waiting, worker._running, worker._reserved, worker._failed = deque(), None, 0, []
        for job in orphans:
            job.function = None
            Future.__init__(job.handle)  # its lock may have been held by a thread that is not here
            job.handle._fail(BackgroundError(f"{worker.name}: this job belongs to the parent process"))
    for number, previous in _previous_handlers.items():
        if signal.getsignal(number) is _drain_and_pass_on:
            signal.signal(number, previous)
    _previous_handlers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


_previous_handlers: dict[int, Callable[[int, FrameType | None], Any] | signal.Handlers] = {}


def _install_signal_handlers() -> None:
    """Take over the signals that would end the process before the queues are drained; main thread only."""
    if _previous_handlers or threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        previous = signal.getsignal(number)
        # Not ours to touch: an ignored signal, a handler set from C, and Python's own Ctrl-C, which ends in a
        # normal exit.
        if previous not in (None, signal.SIG_IGN, signal.default_int_handler):
            _previous_handlers[number] = previous  # type: ignore[assignment]
            signal.signal(number, _drain_and_pass_on)


def _drain_and_pass_on(number: int, frame: FrameType | None) -> None:
    if not _background.draining_for_signal:
        _background.draining_for_signal = True
        try:
            if not _background.drain(_DRAIN_ON_SIGNAL_S):
                logger.error("background jobs are not done %s s after signal %s", _DRAIN_ON_SIGNAL_S, number)
        finally:
            _background.draining_for_signal = False
    previous = _previous_handlers[number]
    if callable(previous):
        previous(number, frame)
    else:
        signal.signal(number, previous)
        os.kill(os.getpid(), number)
        time.sleep(1)  # the signal ends the process before this does
