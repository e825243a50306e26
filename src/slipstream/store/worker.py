"""Background jobs: bounded queues that one low-priority thread of the process works through in order.

Everything that Slipstream writes in the background goes through here. Each owner (a checkpoint saver, a rollout
storage) has a `Worker` with a bound and a back-pressure policy. All workers share one thread, so that background work
takes at most one core from training, plus the threads that codecs use at the same low priority.

Nothing that was accepted is lost silently. `slipstream.store.lifetime` drains the queues at exit and on signals. An
error is kept, with its traceback, until the handle is asked for it; otherwise the next call or `close` raises it, or it
is logged at exit.

No call that the main thread makes holds a lock that the background thread needs. Ctrl-C can interrupt the main thread
between any two lines, and a lock that it leaves behind would stop the background forever. The shared state is therefore
made of operations that are atomic in CPython (``append``, ``popleft``, ``remove`` and ``copy`` of a deque, acquiring a
lock without blocking) and of values that are derived instead of counted: the size of a queue is the number of its
unfinished jobs that still exist. (``tuple(deque)`` is not atomic: it may run the garbage collector while it iterates.)
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import logging
import os
import queue
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, get_args

from slipstream.errors import BackgroundError, JobSkippedError, QueueFullError
from slipstream.store import lifetime
from slipstream.threads import Notifier

logger = logging.getLogger(__name__)

T = TypeVar("T")
Policy = Literal["block", "skip_oldest", "raise"]

# Nice, not the idle scheduling class: a thread that is starved while it holds the GIL starves training too.
_NICENESS = 10


class Handle(Generic[T]):
    """The result of a background job, once there is one. Has the methods of `concurrent.futures.Future`.

    Retrieving the result or the error of a failed job counts as having noticed the failure: it is not raised again.
    Thread-safe.
    """

    def __init__(self, outcome: _Outcome) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        """Return whether the job has finished, failed or was cancelled."""
        return self._outcome.is_done

    def running(self) -> bool:
        """Return whether the job is running now."""
        return self._outcome.is_claimed and not self._outcome.is_done

    def cancelled(self) -> bool:
        """Return whether the job was cancelled before it started."""
        return isinstance(self._outcome.error, CancelledError)

    def cancel(self) -> bool:
        """Cancel the job unless it has started; return whether it will not run."""
        if self._outcome.claim():
            self._outcome.is_noticed = True
            self._outcome.resolve(error=CancelledError())
        return self.cancelled()

    def failed(self) -> bool:
        """Return whether the job has failed. Unlike `exception`, this does not count as having noticed the failure."""
        return self._outcome.error is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the job is done; return False if that takes longer than `timeout` seconds.

        Raises:
            BaseException: The error of the job, if it failed.
        """
        try:
            self.result(timeout)
        except TimeoutError:
            # The job itself may have raised a TimeoutError.
            if self.done():
                raise
            return False
        return True

    def result(self, timeout: float | None = None) -> T:
        """Block until the job is done, then return its result or raise its error.

        Raises:
            TimeoutError: If the job is not done after `timeout` seconds.
            CancelledError: If the job was cancelled.
        """
        error = self._wait_for_error(timeout)
        if error is not None:
            try:
                raise error
            finally:
                # The traceback refers to this frame; without this, frame and error would keep each other alive.
                del error
        value: T = self._outcome.value
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the job is done, then return its error, or None if it succeeded.

        Raises:
            TimeoutError: If the job is not done after `timeout` seconds.
            CancelledError: If the job was cancelled.
        """
        error = self._wait_for_error(timeout)
        if isinstance(error, CancelledError):
            raise error
        return error

    def add_done_callback(self, callback: Callable[[Handle[T]], object]) -> None:
        """Call ``callback(handle)`` when the job is done, on the background thread; now if it is done already."""
        self._outcome.add_callback(functools.partial(callback, self))

    def _wait_for_error(self, timeout: float | None) -> BaseException | None:
        if not _background.changed.wait_until(self.done, timeout):
            raise TimeoutError(f"the background job is not done after {timeout} s")
        self._outcome.is_noticed = True
        return self._outcome.error


class _Outcome:
    """What a job returned or raised. Exactly one thread claims it, and with it the right to resolve it."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_noticed = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._claimed = _thread.allocate_lock()
        self._callbacks: deque[Callable[[], object]] = deque()

    @property
    def is_claimed(self) -> bool:
        """Whether the job has started, or was skipped or cancelled."""
        return self._claimed.locked()

    def claim(self) -> bool:
        """Return True to the first caller, and False to all others."""
        return self._claimed.acquire(blocking=False)

    def resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        """Store the result, wake everyone who waits for it, and run the callbacks."""
        self.value = value
        self.error = error
        self.is_done = True
        _background.changed.notify_all()
        self._run_callbacks()

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Run `callback` once the outcome is known."""
        self._callbacks.append(callback)
        if self.is_done:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return  # another thread ran the last one
            try:
                callback()
            except BaseException:
                # Not our error, and no reason to stop the background.
                logger.exception("a callback of a background job failed")


class _Job:
    """A place in the queue of a worker, from the reservation until the function has run."""

    def __init__(self, worker: Worker, label: str) -> None:
        self.worker = worker
        self.label = label
        self.outcome = _Outcome()
        self.function: Callable[[], Any] | None = None
        self.process = os.getpid()
        # Done, and its callbacks have run.
        self.is_over = False
        self._is_started = False

    def takes_room(self) -> bool:
        """Return whether the job counts towards the bound. Jobs of the process that forked this one do not."""
        if self.outcome.is_done or self.process != os.getpid():
            return False
        # Claimed but not started: it was cancelled or skipped, and Ctrl-C interrupted that call before the end.
        return self._is_started or not self.outcome.is_claimed

    def abandon(self) -> None:
        """Give the place back."""
        if self.outcome.claim():
            self.outcome.resolve()

    def run(self) -> None:
        """Run the function unless the job was cancelled or skipped."""
        self._is_started = True
        if self.outcome.claim():
            self._run_claimed()
        elif not self.outcome.is_done:
            # Ctrl-C interrupted the call that cancelled or skipped this job, before it could resolve the outcome.
            self.outcome.is_noticed = True
            self.outcome.resolve(error=CancelledError())
        self.is_over = True

    def _run_claimed(self) -> None:
        """Run the function and resolve the outcome. Never raises."""
        function = self.function
        self.function = None
        assert function is not None, "only filled jobs are queued"  # noqa: S101
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 - kept for the handle
            # Release what the function holds (perhaps gigabytes) before the handle resolves.
            del function
            _clear_frames(error)
            self.worker.add_failure(self.outcome)
            self.outcome.resolve(error=error)
        else:
            del function
            self.outcome.resolve(value)


def _clear_frames(error: BaseException) -> None:
    """Empty the frames of an error and of its causes: the lines stay in the traceback, the local variables go."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions


class Worker:
    """A bounded queue of jobs that run in the background, in order. Thread-safe.

    Args:
        max_queue_size: How many jobs may be queued or running; with the memory that each job holds, this bounds memory.
        policy: What `submit` does when the queue is full: ``block`` until there is room; ``skip_oldest`` drops the
            oldest job that has not started (and blocks if all have); ``raise`` raises `QueueFullError`.
        name: Used in messages.
        on_full: Called each time `submit` finds the queue full.

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
        self._counting = threading.Lock()
        self._on_full = on_full
        self._closed = False
        # Jobs that take up room, in the order of their reservations. Weak: a reservation that Ctrl-C interrupted
        # disappears with the frame that made it. The callback is a C function, so nothing can interrupt it.
        self._jobs: deque[weakref.ref[_Job]] = deque()
        self._failed: deque[tuple[int, _Outcome]] = deque()
        lifetime.protect(_background)

    @property
    def queue_size(self) -> int:
        """Number of jobs that are queued or running, and of places reserved with `room`."""
        return min(len(self._reserved()), self.max_queue_size)

    def submit(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Handle[T]:
        """Queue ``function(*args, **kwargs)``. Blocks only if the queue is full and the policy is to wait.

        Called from a background job, after the main thread has ended, or where no thread can be started, it runs the
        job before it returns.

        Raises:
            BackgroundError: If an earlier job failed and its error was not retrieved. The new job is not queued; call
                again to retry.
            QueueFullError: If the queue is full and the policy is ``raise``.
            RuntimeError: If the worker is closed.
        """
        with self.room() as put:
            return put(function, *args, **kwargs)

    @contextlib.contextmanager
    def room(self, label: str = "") -> Iterator[Callable[..., Handle[Any]]]:
        """Wait for room in the queue and reserve it. Yields the function that submits the job.

        For jobs whose memory should not be allocated before there is room. Leaving the block without submitting gives
        the room back. Raises what `submit` raises.

        Args:
            label: What the job does, such as the file it writes. Reported if the process is killed before it is done.
        """
        self._raise_failure()
        job = _Job(self, label)
        if self._closed:
            raise self._closed_error()

        def put(function: Callable[..., T], *args: Any, **kwargs: Any) -> Handle[T]:
            if job.function is not None or job.outcome.is_claimed or job.process != os.getpid():
                raise RuntimeError(f"{self.name}: the room is already used, or belongs to another process")
            # A partial instead of a closure: the frame of a closure would keep its variables alive in a traceback.
            job.function = functools.partial(function, *args, **kwargs)
            _background.accept(job)
            return Handle(job.outcome)

        try:
            if not _background.runs_inline():
                self._reserve(job)
            yield put
        finally:
            try:
                self._give_back(job)
            except BaseException:
                # Ctrl-C in the middle of giving the room back.
                self._give_back(job)
                raise

    def flush(self, timeout: float | None = None) -> None:
        """Block until every job queued so far is done.

        Raises:
            TimeoutError: If that takes longer than `timeout` seconds. The jobs continue.
            BackgroundError: If a job failed and its error was not retrieved.
        """
        jobs = [job for job in _background.unfinished() if job.worker is self]
        if jobs and _background.is_current_thread():
            raise RuntimeError(f"{self.name}: a background job cannot wait for jobs that run after it")
        if not _background.wait_for(jobs, timeout):
            left = sum(not job.is_over for job in jobs)
            raise TimeoutError(f"{self.name}: {left} jobs are not done after {timeout} s; they continue")
        self._raise_failure()

    def close(self, timeout: float | None = 60.0) -> None:
        """Accept no more jobs, and block until the queued ones are done. Idempotent; see `flush` for what it raises."""
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
            logger.exception("%s: a background job failed while another error was being raised", self.name)

    def add_failure(self, outcome: _Outcome) -> None:
        """Remember a failure until somebody notices it. Called by the background."""
        self._failed.append((os.getpid(), outcome))
        _background.add_failure(outcome)

    def _reserved(self) -> list[_Job]:
        """Return the jobs that take up room, and after them those that wait for room, oldest first."""
        jobs = []
        for reference in self._jobs.copy():
            job = reference()
            if job is not None and job.takes_room():
                jobs.append(job)
        return jobs

    def _reserve(self, job: _Job) -> None:
        """Wait until `job` is among the first `max_queue_size`, or do what the policy says."""
        if self._on_full is not None and self.queue_size >= self.max_queue_size:
            self._on_full()
        self._jobs.append(weakref.ref(job, self._jobs.remove))
        while not self._is_admitted(job):
            _background.wait_if_dying()
            if self._closed:
                raise self._closed_error()
            if self.policy == "raise":
                raise QueueFullError(f"{self.name}: the queue is full ({self.max_queue_size} jobs)")
            if self.policy == "skip_oldest" and self._skip_oldest():
                continue
            _background.changed.wait_until(functools.partial(self._may_proceed, job))

    def _give_back(self, job: _Job) -> None:
        """Free the room of a job that was not accepted."""
        # Only the queue knows: Ctrl-C may have interrupted the call that submits the job.
        if job not in _background.unfinished():
            job.abandon()

    def _is_admitted(self, job: _Job) -> bool:
        admitted = self._reserved()[: self.max_queue_size]
        return any(other is job for other in admitted) and not _background.is_dying

    def _may_proceed(self, job: _Job) -> bool:
        """Return whether a job that waits for room should look again."""
        can_skip = self.policy == "skip_oldest" and self._find_waiting() is not None
        return self._closed or can_skip or _background.is_dying or self._is_admitted(job)

    def _find_waiting(self) -> _Job | None:
        """Return the oldest queued job that has not started."""
        for job in _background.unfinished():
            if job.worker is self and not job.outcome.is_claimed:
                return job
        return None

    def _skip_oldest(self) -> bool:
        """Drop the oldest queued job that has not started; return whether there was one."""
        job = self._find_waiting()
        if job is None:
            return False
        if job.outcome.claim():
            with self._counting:
                self.num_skipped += 1
            job.function = None
            job.outcome.is_noticed = True
            job.outcome.resolve(error=JobSkippedError(f"{self.name}: skipped in favour of a newer job"))
        return True

    def _closed_error(self) -> RuntimeError:
        return RuntimeError(f"{self.name}: the worker is closed and accepts no more jobs")

    def _raise_failure(self) -> None:
        """Raise the first failure that nobody has noticed; log the others."""
        unnoticed = []
        for process, outcome in self._failed.copy():
            if process == os.getpid() and not outcome.is_noticed:
                unnoticed.append(outcome)
        if not unnoticed:
            self._failed.clear()
            return
        first, *others = unnoticed
        for other in others:
            other.is_noticed = True
            logger.error("%s: another background job failed as well", self.name, exc_info=other.error)
        more = f" (and {len(others)} more; see the log)" if others else ""
        error = BackgroundError(f"{self.name}: an earlier job failed{more}: {first.error}")
        error.__cause__ = first.error
        # Last, so that an interrupt before this line does not lose the failure.
        first.is_noticed = True
        raise error


class _Background:
    """The background thread and its queue. There is one per process."""

    def __init__(self) -> None:
        self.changed = Notifier()
        self.is_dying = False
        self._has_ended = False
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self._inline: deque[tuple[int, _Job]] = deque()
        self._failed: deque[_Outcome] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        # Held by the background thread while it exists. The thread acquires it itself: Ctrl-C may interrupt the
        # call that starts the thread before or after it starts.
        self._is_running = _thread.allocate_lock()
        self._thread_id = 0
        self._native_id = 0

    def is_current_thread(self) -> bool:
        """Return whether the caller is a job."""
        current = threading.get_ident()
        return current == self._thread_id or any(thread == current for thread, _ in self._inline.copy())

    def runs_inline(self) -> bool:
        """Return whether jobs run in the thread that submits them, because the background would never run them."""
        return self.is_current_thread() or self._has_ended or not self._start()

    def unfinished(self) -> list[_Job]:
        """Return the jobs that were accepted and are not over, oldest first."""
        # The background marks a job as running before it leaves the queue. Reading in the other order misses none.
        queued = self._queue.copy()
        running = self._running
        jobs = [job for _, job in self._inline.copy()]
        jobs += queued
        if running is not None and running not in queued:
            jobs.insert(0, running)
        return [job for job in jobs if not job.is_over]

    def labels(self) -> list[str]:
        """Return what would be lost if the process ended now."""
        jobs = [job for job in self.unfinished() if not job.outcome.is_done]
        return [f"{job.worker.name}: {job.label or 'a job'}" for job in jobs]

    def accept(self, job: _Job) -> None:
        """Queue a job, or run it now if the background would not."""
        self.wait_if_dying()
        if self.runs_inline():
            lifetime.protect(self)
            self._run_inline(job)
            return
        self._queue.append(job)
        self._wake.put(None)
        # After the append, so that the thread that watches the signal handlers sees that there is a job.
        lifetime.protect(self)
        # Look again: the process may have begun to end between the check and the append. Then the final drain may have
        # missed this job. Either that drain sees the job, or this thread sees the flag.
        self.wait_if_dying()
        if self._has_ended:
            if self._take(job):
                self._run_inline(job)
            self.wait_for([job], None)

    def wait_for(self, jobs: Sequence[_Job], timeout: float | None) -> bool:
        """Block until these jobs are done; return whether they are."""
        # Ctrl-C may have interrupted a submit after it queued the job and before it woke the background.
        self._wake.put(None)
        return self.changed.wait_until(lambda: all(job.is_over for job in jobs), timeout)

    def drain(self, timeout: float | None) -> bool:
        """Block until every job accepted so far is done; return whether it is."""
        # The process waits for the background now, so it should no longer give way.
        _set_niceness(self._native_id, 0)
        return self.wait_for(self.unfinished(), timeout)

    def drain_at_exit(self) -> None:
        """Block until the queue is empty, then let later jobs run inline. Runs when the main thread has ended."""
        while not self._has_ended or self.unfinished():
            self.drain(None)
            self._has_ended = True
        self._log_failures()

    def refuse_jobs(self) -> None:
        """Block every later submit: a signal is about to end the process, and a new job would be lost."""
        self.is_dying = True

    def add_failure(self, outcome: _Outcome) -> None:
        """Remember a failure for the log at exit."""
        for other in self._failed.copy():
            if other.is_noticed:
                with contextlib.suppress(ValueError):
                    self._failed.remove(other)
        self._failed.append(outcome)
        if self._has_ended:
            self._log_failures()

    def forget_parent(self) -> None:
        """In a forked child: fail the handles of the parent's jobs. The jobs stay in the parent."""
        for job in self.unfinished():
            job.function = None
            job.outcome.claim()
            job.outcome.is_noticed = True
            job.outcome.resolve(error=BackgroundError(f"{job.worker.name}: this job belongs to the parent process"))
            job.is_over = True

    def wait_if_dying(self) -> None:
        if self.is_dying and not self.is_current_thread():
            self.changed.wait_until(lambda: False)

    def _run_inline(self, job: _Job) -> None:
        # Jobs that are already queued come first.
        if not self.is_current_thread():
            self.drain(None)
        entry = (threading.get_ident(), job)
        self._inline.append(entry)
        try:
            job.run()
        finally:
            self._inline.remove(entry)
        # Ctrl-C in the middle of an inline job is meant for the program, not for the job.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and isinstance(job.outcome.error, KeyboardInterrupt):
            raise job.outcome.error

    def _start(self) -> bool:
        """Start the background thread unless it runs; return whether it runs."""
        if self._is_running.locked():
            return True
        with self._starting:
            # After the main thread has ended, the interpreter no longer waits for new threads.
            if self._is_running.locked() or lifetime.main_thread_has_ended():
                return self._is_running.locked()
            try:
                lifetime.start_exit_watcher(self)
                threading.Thread(target=self._loop, name="slipstream-background", daemon=True).start()
            except RuntimeError:
                return False  # the system has no more threads
            self.changed.wait_until(self._is_running.locked)
        return True

    def _loop(self) -> None:
        if not self._is_running.acquire(blocking=False):
            return  # a thread of an interrupted start is faster
        self._thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        self.changed.notify_all()
        _set_niceness(self._native_id, _NICENESS)
        # A child that a job forks must not continue as a background thread.
        process = os.getpid()
        while process == os.getpid():
            self._wake.get()
            while self._queue and process == os.getpid():
                self._run_next()

    def _run_next(self) -> None:
        job = self._queue[0]
        # Before it leaves the queue, so that `unfinished` always sees it.
        self._running = job
        if self._take(job):
            job.run()
        self._running = None
        self.changed.notify_all()

    def _take(self, job: _Job) -> bool:
        """Take a job out of the queue; return whether no other thread did."""
        try:
            self._queue.remove(job)
        except ValueError:
            return False
        return True

    def _log_failures(self) -> None:
        """Log the failures that nobody has noticed."""
        while self._failed:
            outcome = self._failed.popleft()
            if not outcome.is_noticed:
                outcome.is_noticed = True
                logger.error("a background job failed and nobody asked for its result", exc_info=outcome.error)


def _set_niceness(thread_id: int, niceness: int) -> None:
    """Set the scheduling priority of a thread; threads that it starts later inherit it."""
    if thread_id == 0:
        return
    # Only Linux has priorities per thread, and not everyone may raise one again.
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, thread_id, niceness)


_background = _Background()


def _reset_after_fork() -> None:
    """Start the child with an empty queue. Threads, and locks that they hold, exist only in the parent."""
    global _background  # noqa: PLW0603 - one per process
    parents = _background
    _background = _Background()
    parents.forget_parent()


os.register_at_fork(after_in_child=_reset_after_fork)
