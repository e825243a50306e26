"""The background thread of the process and its queue of jobs.

All workers share one thread, so that background work takes at most one core from training, plus the threads that codecs
use at the same low priority.

No call that the main thread makes holds a lock that the background thread needs. Ctrl-C can interrupt the main thread
between any two lines, and a lock that it leaves behind would stop the background forever. The shared state is therefore
made of operations that are atomic in CPython (``append``, ``popleft``, ``remove`` and ``copy`` of a deque, acquiring a
lock without blocking) and of values that are derived instead of counted. (``tuple(deque)`` is not atomic: it may run
the garbage collector while it iterates.)
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Protocol

from slipstream.errors import BackgroundError
from slipstream.store import lifetime, signals
from slipstream.store.handle import Outcome, changed

logger = logging.getLogger(__name__)

# Nice, not the idle scheduling class: a thread that is starved while it holds the GIL starves training too.
NICENESS = 10


class Owner(Protocol):
    """Who submitted a job: a `Worker`."""

    name: str

    def add_failure(self, outcome: Outcome) -> None:
        """Remember that a job failed."""


class Job:
    """A place in the queue of a worker, from the reservation until the function has run."""

    def __init__(self, owner: Owner, label: str) -> None:
        self.owner = owner
        self.label = label
        self.outcome = Outcome()
        self.function: Callable[[], Any] | None = None
        self.process = os.getpid()
        self.thread = threading.get_ident()
        # The outcome is done, and its callbacks have run. `flush` waits for this, a handle only for the outcome.
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

    def disown(self) -> None:
        """In a forked child: fail the handle. The job stays in the parent."""
        self.function = None
        self.outcome.claim()
        self.outcome.is_noticed = True
        self.outcome.resolve(error=BackgroundError(f"{self.owner.name}: this job belongs to the parent process"))

    def run(self) -> None:
        """Run the function unless the job was cancelled or skipped."""
        self._is_started = True
        if self.outcome.claim():
            self._run_claimed()
        elif not self.outcome.is_done:
            # The call that cancels or skips this job has not resolved the outcome yet, or Ctrl-C interrupted it.
            # Resolving twice does no harm, because both use the same error.
            self.outcome.is_noticed = True
            self.outcome.resolve(error=self.outcome.claim_error or CancelledError())
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
            self.owner.add_failure(self.outcome)
            background.add_failure(self.outcome)
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


class Background:
    """The background thread and its queue. There is one per process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start with nothing: also in a forked child, because the thread and its locks exist only in the parent."""
        self.is_dying = False
        self._has_ended = False
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._inline: deque[tuple[int, Job]] = deque()
        self._failed: deque[Outcome] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Reentrant: the garbage collector may run a finalizer that submits a job while this thread holds it.
        self._starting = threading.RLock()
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

    def unfinished(self) -> list[Job]:
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
        return [f"{job.owner.name}: {job.label or 'a job'}" for job in jobs]

    def accept(self, job: Job) -> None:
        """Queue a job, or run it now if the background would not."""
        self.wait_if_dying()
        signals.protect(self)
        if self.runs_inline():
            self._run_inline(job)
            return
        self._queue.append(job)
        self._wake.put(None)
        # Look again: the process may have begun to end between the check and the append. Then the final drain may have
        # missed this job. Either that drain sees the job, or this thread sees the flag.
        self.wait_if_dying()
        if self._has_ended:
            if self._take(job):
                self._run_inline(job)
            self.wait_for([job], None)

    def wait_for(self, jobs: Sequence[Job], timeout: float | None) -> bool:
        """Block until these jobs are done; return whether they are."""
        # Ctrl-C may have interrupted a submit after it queued the job and before it woke the background.
        self._wake.put(None)
        return changed.wait_until(lambda: all(job.is_over for job in jobs), timeout)

    def drain(self, timeout: float | None) -> bool:
        """Block until every job accepted so far is done; return whether it is."""
        # The process waits for the background now, so it gets the normal priority.
        set_niceness(self._native_id, 0)
        return self.wait_for(self.unfinished(), timeout)

    def drain_at_exit(self) -> None:
        """Block until the queue is empty, then let later jobs run inline. Runs when the main thread has ended."""
        self.drain(None)
        self._has_ended = True
        # Once more, for jobs that were queued before the flag was set. Later ones are not waited for here: they run in
        # their own threads, and daemon threads may submit forever.
        self.drain(None)
        self._log_failures()

    def refuse_jobs(self) -> None:
        """Block every later submit: a signal is about to end the process, and a new job would be lost."""
        self.is_dying = True

    def add_failure(self, outcome: Outcome) -> None:
        """Remember a failure for the log at exit."""
        for other in self._failed.copy():
            if other.is_noticed:
                with contextlib.suppress(ValueError):
                    self._failed.remove(other)
        self._failed.append(outcome)
        if self._has_ended:
            self._log_failures()

    def wait_if_dying(self) -> None:
        """Block forever if a signal is about to end the process, unless the caller is a job."""
        if self.is_dying and not self.is_current_thread():
            changed.wait_until(lambda: False)

    def _run_inline(self, job: Job) -> None:
        # Jobs that are already queued come first.
        if not self.is_current_thread():
            self.drain(None)
        entry = (threading.get_ident(), job)
        self._inline.append(entry)
        try:
            signals.watch()
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
            changed.wait_until(self._is_running.locked)
        return True

    def _loop(self) -> None:
        if not self._is_running.acquire(blocking=False):
            return  # an interrupted start has left another thread, which was faster
        self._thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        changed.notify_all()
        # A child that a job forks must not continue as a background thread.
        process = os.getpid()
        while process == os.getpid():
            self._wake.get()
            # Every time, because a drain raises the priority.
            set_niceness(self._native_id, NICENESS)
            while self._queue and process == os.getpid():
                self._run_next()

    def _run_next(self) -> None:
        try:
            job = self._queue[0]
        except IndexError:
            return  # at exit, the thread that submitted the last job may have taken it back
        # Before it leaves the queue, so that `unfinished` always sees it.
        self._running = job
        if self._take(job):
            signals.watch()
            job.run()
        self._running = None
        changed.notify_all()

    def _take(self, job: Job) -> bool:
        """Take a job out of the queue; return whether no other thread did."""
        try:
            self._queue.remove(job)
        except ValueError:
            return False
        return True

    def _log_failures(self) -> None:
        """Log the failures that were not noticed."""
        while self._failed:
            outcome = self._failed.popleft()
            if not outcome.is_noticed:
                outcome.is_noticed = True
                logger.error("a background job failed and nobody asked for its result", exc_info=outcome.error)


def set_niceness(thread_id: int, niceness: int) -> None:
    """Set the scheduling priority of a thread; threads that it starts later inherit it."""
    if thread_id == 0:
        return
    # Only Linux has priorities per thread, and not everyone may raise one again.
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, thread_id, niceness)


background = Background()
"""The background of this process."""


def _reset_after_fork() -> None:
    """Start the child with an empty queue, and fail the handles of the parent's jobs."""
    jobs = background.unfinished()
    background.reset()
    for job in jobs:
        job.disown()


os.register_at_fork(after_in_child=_reset_after_fork)
