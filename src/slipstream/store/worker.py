"""`Worker`: a bounded queue of background jobs with a back-pressure policy.

Everything that Slipstream writes in the background goes through here. Each owner (a checkpoint saver, a rollout
storage) has a `Worker`; one thread of the process works through the jobs of all of them
(`slipstream.store.background`).

Nothing that was accepted is lost silently. The queues are drained at exit and on signals
(`slipstream.store.lifetime`). An error is kept, with its traceback, until the handle is asked for it; otherwise the
next call or `close` raises it, or it is logged at exit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args

from slipstream.checks import require_choice, require_count
from slipstream.errors import BackgroundError, JobSkippedError, QueueFullError
from slipstream.store import signals
from slipstream.store.background import Job, background
from slipstream.store.handle import Handle, Outcome, changed

logger = logging.getLogger(__name__)

T = TypeVar("T")
Policy = Literal["block", "skip_oldest", "raise"]


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
        require_choice("policy", policy, get_args(Policy))
        self.max_queue_size = require_count("max_queue_size", max_queue_size)
        self.policy = policy
        self.name = name
        # One entry per skipped job: appending is atomic, adding to a number is not.
        self._skipped: deque[None] = deque()
        self._on_full = on_full
        self._closed = False
        # Jobs that take up room, in the order of their reservations. Weak: a reservation that Ctrl-C interrupted
        # disappears with the frame that made it. The callback is a C function, so nothing can interrupt it.
        self._jobs: deque[weakref.ref[Job]] = deque()
        self._failed: deque[tuple[int, Outcome]] = deque()
        signals.protect(background)

    @property
    def queue_size(self) -> int:
        """Number of jobs that are queued or running, and of places reserved with `room`."""
        # Those beyond the bound are still waiting for room.
        return min(len(self._reserved()), self.max_queue_size)

    @property
    def num_skipped(self) -> int:
        """Number of jobs that were dropped in favour of newer ones."""
        return len(self._skipped)

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
        job = Job(self, label)
        if self._closed:
            raise self._closed_error()

        def put(function: Callable[..., T], *args: Any, **kwargs: Any) -> Handle[T]:
            if job.function is not None or job.outcome.is_claimed or job.process != os.getpid():
                raise RuntimeError(f"{self.name}: the room is already used, or belongs to another process")
            # A partial instead of a closure: the frame of a closure would keep its variables alive in a traceback.
            job.function = functools.partial(function, *args, **kwargs)
            background.accept(job)
            return Handle(job.outcome)

        try:
            if not background.runs_inline():
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
        jobs = [job for job in background.unfinished() if job.owner is self]
        if jobs and background.is_current_thread():
            raise RuntimeError(f"{self.name}: a background job cannot wait for jobs that run after it")
        if not background.wait_for(jobs, timeout):
            left = sum(not job.is_over for job in jobs)
            raise TimeoutError(f"{self.name}: {left} jobs are not done after {timeout} s; they continue")
        self._raise_failure()

    def close(self, timeout: float | None = 60.0) -> None:
        """Accept no more jobs, and block until the queued ones are done. Idempotent; see `flush` for what it raises.

        Threads that have reserved a place with `room` may still submit; those that wait for one get an error.
        """
        self._closed = True
        changed.notify_all()
        # Without this, a job could be submitted after `flush` has looked at the queue.
        start = time.monotonic()
        if not changed.wait_until(functools.partial(self._has_no_reservations, threading.get_ident()), timeout):
            raise TimeoutError(f"{self.name}: a thread is still submitting a job after {timeout} s; it may continue")
        if timeout is not None:
            timeout = max(0.0, timeout - round(time.monotonic() - start, 1))
        self.flush(timeout)

    @property
    def is_closed(self) -> bool:
        """Whether the worker accepts no more jobs."""
        return self._closed

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

    def add_failure(self, outcome: Outcome) -> None:
        """Remember a failure until it is noticed. Called by the background."""
        self._failed.append((os.getpid(), outcome))

    def _reserved(self) -> list[Job]:
        """Return the jobs that take up room, and after them those that wait for room, oldest first."""
        jobs = []
        for reference in self._jobs.copy():
            job = reference()
            if job is not None and job.takes_room():
                jobs.append(job)
        return jobs

    def _reserve(self, job: Job) -> None:
        """Wait until `job` is among the first `max_queue_size`, or do what the policy says."""
        if self._on_full is not None and self.queue_size >= self.max_queue_size:
            self._on_full()
        # From here on the job has a place in line. If this raises, `room` gives the place back.
        self._jobs.append(weakref.ref(job, self._jobs.remove))
        while not self._is_admitted(job):
            background.wait_if_dying()
            if self._closed:
                raise self._closed_error()
            if self.policy == "raise":
                raise QueueFullError(f"{self.name}: the queue is full ({self.max_queue_size} jobs)")
            if self.policy == "skip_oldest" and self._skip_oldest():
                continue
            changed.wait_until(functools.partial(self._may_proceed, job))

    def _give_back(self, job: Job) -> None:
        """Free the room of a job that was not accepted."""
        # Only the queue knows: Ctrl-C may have interrupted the call that submits the job.
        if job not in background.unfinished():
            job.abandon()
        elif self._closed:
            changed.notify_all()

    def _has_no_reservations(self, closing_thread: int) -> bool:
        """Return whether no other thread is about to submit a job."""
        threads = {closing_thread}
        for job in set(self._reserved()).difference(background.unfinished()):
            threads.add(job.thread)
        return threads == {closing_thread}

    def _is_admitted(self, job: Job) -> bool:
        admitted = self._reserved()[: self.max_queue_size]
        return any(other is job for other in admitted) and not background.is_dying

    def _may_proceed(self, job: Job) -> bool:
        """Return whether a job that waits for room should look again."""
        can_skip = self.policy == "skip_oldest" and self._find_waiting() is not None
        return self._closed or can_skip or background.is_dying or self._is_admitted(job)

    def _find_waiting(self) -> Job | None:
        """Return the oldest queued job that has not started."""
        for job in background.unfinished():
            if job.owner is self and not job.outcome.is_claimed:
                return job
        return None

    def _skip_oldest(self) -> bool:
        """Drop the oldest queued job that has not started; return whether there was one."""
        job = self._find_waiting()
        if job is None:
            return False
        error = JobSkippedError(f"{self.name}: skipped in favour of a newer job")
        if job.outcome.claim(error):
            self._skipped.append(None)
            job.function = None
            job.outcome.is_noticed = True
            job.outcome.resolve(error=error)
        return True

    def _closed_error(self) -> RuntimeError:
        return RuntimeError(f"{self.name}: the worker is closed and accepts no more jobs")

    def _raise_failure(self) -> None:
        """Raise the first failure that was not noticed; log the others."""
        unnoticed = []
        for entry in self._failed.copy():
            process, outcome = entry
            if process == os.getpid() and not outcome.is_noticed:
                unnoticed.append(outcome)
                continue
            # One by one: the background may add a failure at any time. Another thread may have removed this one.
            with contextlib.suppress(ValueError):
                self._failed.remove(entry)
        if not unnoticed:
            return
        first, *others = unnoticed
        for other in others:
            other.is_noticed = True
            logger.error("%s: another background job failed as well", self.name, exc_info=other.error)
        more = f" (and {len(others)} more; see the log)" if others else ""
        error = BackgroundError(f"{self.name}: an earlier job failed{more}: {_describe(first.error)}")
        error.__cause__ = first.error
        # Last, so that an interrupt before this line does not lose the failure.
        first.is_noticed = True
        raise error


def _describe(error: BaseException | None) -> str:
    """Return the message of an error. The ``__str__`` of an error may fail as well."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an unreadable message must not hide the failure
        return type(error).__name__
