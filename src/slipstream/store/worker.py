"""The background: bounded queues of jobs, run one at a time on a single low-priority thread of the process.

Whatever Slipstream writes behind training's back goes through here. Each owner (a checkpoint saver, a rollout storage)
has a `Worker` with a bound and a policy of its own; all of them share one thread, so that the background never takes
more than one core from training, plus what codecs use at low priority.

Nothing queued is lost without a word:

* *Normal exit, ``sys.exit``, an unhandled exception, Ctrl-C*: a watching thread sees the main thread end and drains
  all queues before the interpreter goes away.
* *SIGTERM, SIGHUP, and SIGINT if it would kill*: the queues are drained by a thread of their own, and then the process
  dies of that signal as it would have without us; whoever submits more meanwhile waits for that, because it would be
  lost; a second signal ends it at once. Where a handler was installed before, it is called after draining. Signals
  that are ignored stay ignored.
* *Failure of a job*: kept, with its traceback, until its handle is asked, or else raised by the next call or by
  `close`, or else logged at exit.
* *Fork*: the child starts with empty queues; the jobs stay with the parent.

Locks are reentrant, because a signal handler may interrupt the main thread while it holds one.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import logging
import os
import signal
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, get_args

from slipstream.errors import BackgroundError, JobSkippedError, QueueFullError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Policy = Literal["block", "skip_oldest", "raise"]

_DRAIN_ON_SIGNAL_S = 60.0
_NICENESS = 10
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
        try:
            self.exception(timeout)
        except TimeoutError:
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
        _install_signal_handlers()

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
        inline = _background.must_run_inline()
        held = not inline
        if held:
            self._reserve()
        elif self._closed:
            raise self._closed_error()
        process = os.getpid()

        def put(function: Callable[..., T], *args: Any, **kwargs: Any) -> Handle[T]:
            nonlocal held
            # A partial, not a lambda: a frame keeps its function alive, so that the traceback of a failure would
            # keep what a lambda captures.
            job = _Job(self, Handle(), functools.partial(function, *args, **kwargs))
            if inline:
                job.run()
                return job.handle
            if not held or os.getpid() != process:
                raise RuntimeError(f"{self.name}: the room was filled already, or belongs to another process")
            held = False
            _background.put(job)
            return job.handle

        try:
            yield put
        finally:
            if held and os.getpid() == process:
                with _background.changed:
                    self._reserved -= 1
                    _background.changed.notify_all()

    def flush(self, timeout: float | None = None) -> None:
        """Block until every job queued so far is done.

        Raises:
            TimeoutError: If that takes longer than `timeout` seconds; the jobs go on.
            BackgroundError: If a job failed and nobody has heard of it.
        """
        jobs = self._unfinished()
        if jobs and _background.is_current_thread():
            raise RuntimeError(f"{self.name}: a background job cannot wait for jobs that wait for it")
        if not _background.wait_for(jobs, timeout):
            left = sum(not job.finished for job in jobs)
            raise TimeoutError(f"{self.name}: {left} jobs are not done after {timeout} s; they go on")
        self._raise_failure()

    def close(self, timeout: float | None = 60.0) -> None:
        """Take no more jobs, and block until those queued are done; see `flush` for what it raises. May be repeated."""
        with _background.changed:
            self._closed = True
            _background.changed.notify_all()
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
        if self._on_full is not None and self.queue_size >= self.max_queue_size and not self._closed:
            self._on_full()
        with _background.changed:
            while not self._closed and (_background.dying or self.queue_size >= self.max_queue_size):
                if _background.dying:  # of a signal, once all that was accepted is done: no more of it
                    _background.changed.wait()
                    continue
                spare = next((job for job in self._waiting if job.handle.cancelled()), None)
                if spare is None and self.policy == "raise":
                    raise QueueFullError(f"{self.name}: the queue is full with {self.max_queue_size} jobs")
                if spare is None and self.policy == "skip_oldest" and self._waiting:
                    spare = self._waiting[0]
                    skipped.append(spare)
                if spare is None:
                    _background.changed.wait()
                else:
                    self._waiting.remove(spare)
                    _background.turns.remove(self)
                    spare.finished = True
            if self._closed:
                raise self._closed_error()
            self._reserved += 1
            self.num_skipped += len(skipped)
        for job in skipped:
            job.handle._fail(JobSkippedError(f"{self.name}: a newer job took this one's place"))

    def _closed_error(self) -> RuntimeError:
        return RuntimeError(f"{self.name}: the worker is closed and takes no more jobs")

    def _unfinished(self) -> list[_Job]:
        with _background.changed:
            return [*self._waiting, *([self._running] if self._running else [])]

    def _raise_failure(self) -> None:
        with _background.changed:
            unheard = [handle for handle in self._failed if not handle._heard]
            self._failed.clear()
        if not unheard:
            return
        cause, *others = [handle.exception() for handle in unheard]
        for other in others:
            logger.error("%s: another job failed as well", self.name, exc_info=other)
        more = f" (and {len(others)} more, which are in the log)" if others else ""
        raise BackgroundError(f"{self.name}: an earlier job failed{more}: {cause}") from cause


class _Job:
    """A function to run, whose outcome goes to a handle."""

    def __init__(self, worker: Worker, handle: Handle[Any], function: Callable[[], Any]) -> None:
        self.worker = worker
        self.handle = handle
        self.function: Callable[[], Any] | None = function
        self.finished = False

    def run(self) -> None:
        """Run the function and keep its outcome; drops the function, and what it holds, before anyone is told."""
        function, self.function = self.function, None
        if function is None or not self.handle.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - kept for whoever asks
            del function
            _forget_locals(error)
            self.handle.set_exception(error)
            with _background.changed:
                self.worker._failed.append(self.handle)
                _background.failed = [handle for handle in (*_background.failed, self.handle) if not handle._heard]
            if _background.drained:
                _background.log_failures()
        else:
            del function
            self.handle.set_result(result)


def _forget_locals(error: BaseException | None, seen: frozenset[int] = frozenset()) -> None:
    """Empty the frames of an error and of all that led to it: the lines stay, the locals (perhaps gigabytes) go."""
    while error is not None and id(error) not in seen:
        seen |= {id(error)}
        traceback.clear_frames(error.__traceback__)
        for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            _forget_locals(inner, seen)
        _forget_locals(error.__context__, seen)
        error = error.__cause__


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
        self.drained = False
        self.dying = False

    def is_current_thread(self) -> bool:
        """Tell whether the caller is a background job."""
        return threading.current_thread() is self.thread

    def must_run_inline(self) -> bool:
        """Tell whether queueing would wait for a thread that is busy with the caller, or that is no more."""
        return self.drained or self.is_current_thread()

    def put(self, job: _Job) -> None:
        """Queue a job for which there is room, or run it here and now if there is no thread to be had any more."""
        _install_signal_handlers()
        with self.changed:
            job.worker._reserved -= 1
            if self._is_running():
                job.worker._waiting.append(job)
                self.turns.append(job.worker)
                self.changed.notify_all()
                return
        job.run()

    def _is_running(self) -> bool:
        """Tell whether the thread will take jobs; starts it, and the one that watches for the end, if need be."""
        if self.thread is None and not self.drained:
            thread = threading.Thread(target=self._loop, name="slipstream-background", daemon=True)
            watcher = threading.Thread(target=self._drain_when_main_ends, name="slipstream-exit", daemon=False)
            try:
                watcher.start()
                thread.start()
            except RuntimeError:  # the interpreter is on its way out
                return False
            self.thread = thread
        return not self.drained

    def wait_for(self, jobs: list[_Job], timeout: float | None) -> bool:
        """Block until these jobs are finished; returns whether they are."""
        with self.changed:
            return self.changed.wait_for(lambda: all(job.finished for job in jobs), timeout)

    def drain(self, timeout: float | None) -> bool:
        """Block until everything that is queued or running now is finished."""
        with self.changed:
            jobs = [job for worker in list(self.workers) for job in worker._unfinished()]
        if jobs and self.thread is not None:
            _set_niceness(self.thread.native_id, 0)  # whoever drains is waiting
        return self.wait_for(jobs, timeout)

    def log_failures(self) -> None:
        """Log the failures that nobody has heard of."""
        failed, self.failed = self.failed, []
        for handle in failed:
            if not handle._heard and (error := handle.exception()) is not None:
                logger.error("a background job failed and nobody asked for its result", exc_info=error)

    def _loop(self) -> None:
        _set_niceness(threading.get_native_id(), _NICENESS)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.turns)
                worker = self.turns.popleft()
                job = worker._running = worker._waiting.popleft()
            try:
                job.run()
            except BaseException:  # a callback of the handle: not our error, and no reason to stop
                logger.exception("%s: a callback of a finished job failed", worker.name)
            finally:
                with self.changed:
                    worker._running = None
                    job.finished = True
                    self.changed.notify_all()
            del job, worker

    def _drain_when_main_ends(self) -> None:
        threading.main_thread().join()
        while not self.drained:
            self.drain(None)
            with self.changed:
                self.drained = not any(worker._unfinished() for worker in list(self.workers))
        self.log_failures()


def _set_niceness(thread_id: int | None, niceness: int) -> None:
    """Set how willingly a thread gives way to others; threads that it starts later inherit that.

    Nice values, not the idle scheduling class: a thread that is starved while it holds the interpreter's lock starves
    training with it.
    """
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed to be less nice again
        os.setpriority(os.PRIO_PROCESS, thread_id or 0, niceness)


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
        orphans = worker._unfinished()
        worker._waiting, worker._running, worker._reserved, worker._failed = deque(), None, 0, []
        for job in orphans:
            job.function, job.finished = None, True
            Future.__init__(job.handle)  # its lock may have been held by a thread that is not here
            job.handle._fail(BackgroundError(f"{worker.name}: this job belongs to the parent process"))
    for number, before in _handlers_before.items():
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, before[-1])
    _handlers_before.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# What handled each signal before us, innermost first: more than one if handlers are installed after us, which we wrap.
_handlers_before: dict[int, list[Callable[[int, FrameType | None], Any] | signal.Handlers]] = {}
_handling: dict[int, int] = {}


def _install_signal_handlers() -> None:
    """Take over the signals that would end the process before the queues are drained; main thread only."""
    if _background.dying or threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        current = signal.getsignal(number)
        # Not ours to touch: an ignored signal, a handler set from C, and Python's own Ctrl-C, which ends in a
        # normal exit.
        if current not in (None, signal.SIG_IGN, signal.default_int_handler, _on_signal):
            before = _handlers_before.setdefault(number, [])
            if current not in before:
                before.append(current)  # type: ignore[arg-type]
            signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Drain, then do what would have been done without us; a handler that calls us in turn gets the one before it."""
    depth = _handling.get(number, 0)
    before = _handlers_before.get(number, [])
    if depth >= len(before):
        return
    previous = before[-1 - depth]
    if not callable(previous):
        # Return at once, so that the main thread lets go of whatever lock it holds; a second signal finds the default.
        _background.dying = True
        signal.signal(number, previous)
        _thread.start_new_thread(_drain_and_die, (number,))
        return
    _handling[number] = depth + 1
    try:
        if not depth and not _background.drain(_DRAIN_ON_SIGNAL_S):
            logger.error("background jobs are not done %s s after signal %s", _DRAIN_ON_SIGNAL_S, number)
        previous(number, frame)
    finally:
        _handling[number] = depth


def _drain_and_die(number: int) -> None:
    drained = _background.drain(_DRAIN_ON_SIGNAL_S)
    if not drained:
        logger.error("background jobs are not done %s s after signal %s", _DRAIN_ON_SIGNAL_S, number)
    with _background.changed:  # so that nothing is accepted between the last look and the end
        _background.changed.wait_for(
            lambda: not any(worker._unfinished() for worker in list(_background.workers)),
            _DRAIN_ON_SIGNAL_S if drained else 0,
        )
        os.kill(os.getpid(), number)
