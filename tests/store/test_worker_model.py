"""A `Worker` against a plain model of it, and interrupted wherever Ctrl-C can interrupt it."""

import contextlib
import itertools
import os
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.errors import BackgroundError, JobSkippedError, QueueFullError
from slipstream.store.handle import Handle
from slipstream.store.worker import Worker
from tests.interrupts import interrupted_at, interruptions


class Job:
    """A job that runs until it is released, and knows what is to become of it."""

    def __init__(self, number: int, fails: bool = False) -> None:
        self.number = number
        self.fails = fails
        self.started = threading.Event()
        self.released = threading.Event()
        self.handle: Handle[int] | None = None

    def __call__(self) -> int:
        self.started.set()
        assert self.released.wait(60)
        if self.fails:
            raise OSError(f"job {self.number} failed")
        return self.number


class WorkerMachine(RuleBasedStateMachine):
    """What a `Worker` should be: a list of jobs, of which the first one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.jobs: list[Job] = []
        self.over: list[tuple[Job, type[BaseException] | None]] = []
        self.unnoticed = 0
        self.num_skipped = 0
        self.is_closed = False

    @initialize(size=st.integers(1, 3), policy=st.sampled_from(["block", "skip_oldest", "raise"]))
    def create(self, size: int, policy: Any) -> None:
        self.size = size
        self.policy = policy
        self.worker = Worker(size, policy, name="model")

    def teardown(self) -> None:
        for job in self.jobs:
            job.released.set()
        if hasattr(self, "worker"):
            try:
                self.worker.close(timeout=60)
            except BackgroundError:
                assert self.unnoticed or any(job.fails for job in self.jobs)

    def wait_for_first(self) -> None:
        """Wait until the first job runs, so that the model and the worker agree about it."""
        if self.jobs:
            # An interrupted submit may not have woken the background; a flush does.
            with contextlib.suppress(TimeoutError):
                self.worker.flush(0)
            assert self.jobs[0].started.wait(60)

    def accept(self, job: Job) -> None:
        self.jobs.append(job)
        self.wait_for_first()

    def would_block(self) -> bool:
        if len(self.jobs) < self.size or self.policy == "raise":
            return False
        return self.policy == "block" or len(self.jobs) == 1

    @precondition(lambda self: not self.is_closed)
    @rule(fails=st.booleans())
    def submit(self, fails: bool) -> None:
        job = Job(next(self.numbers), fails)
        if self.unnoticed:
            with pytest.raises(BackgroundError):
                self.worker.submit(job)
            self.unnoticed = 0
        elif self.would_block():
            # Another thread waits for room, which the first job makes by ending.
            thread = threading.Thread(target=lambda: setattr(job, "handle", self.worker.submit(job)))
            thread.start()
            self.end_first()
            thread.join(60)
            assert not thread.is_alive()
            self.accept(job)
        elif len(self.jobs) == self.size and self.policy == "raise":
            with pytest.raises(QueueFullError):
                self.worker.submit(job)
        else:
            job.handle = self.worker.submit(job)
            if len(self.jobs) == self.size:
                self.over.append((self.jobs.pop(1), JobSkippedError))
                self.num_skipped += 1
            self.accept(job)

    @precondition(lambda self: not self.is_closed and not self.unnoticed and not self.jobs)
    @rule(point=st.integers(1, 150))
    def submit_and_be_interrupted(self, point: int) -> None:
        job = Job(next(self.numbers))
        job.released.set()
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(point):
            self.worker.submit(job)
        # Whether an interrupted call was carried out depends on chance. Either way nothing is left of it in the end.
        self.worker.flush(60)

    def end_first(self) -> None:
        job = self.jobs.pop(0)
        job.released.set()
        if job.handle is not None:
            done = threading.Event()
            job.handle.add_done_callback(lambda _: done.set())
            assert done.wait(60)
        if job.fails:
            self.unnoticed += 1
        self.over.append((job, OSError if job.fails else None))
        self.wait_for_first()

    @precondition(lambda self: self.jobs)
    @rule()
    def finish(self) -> None:
        self.end_first()

    @precondition(lambda self: len(self.jobs) > 1 and self.jobs[-1].handle is not None)
    @rule()
    def cancel_the_newest(self) -> None:
        job = self.jobs.pop()
        assert job.handle is not None
        assert job.handle.cancel()
        self.over.append((job, CancelledError))

    @precondition(lambda self: self.jobs and self.jobs[0].handle is not None)
    @rule()
    def a_running_job_cannot_be_cancelled(self) -> None:
        assert self.jobs[0].handle is not None
        assert not self.jobs[0].handle.cancel()
        assert self.jobs[0].handle.running()

    @precondition(lambda self: self.unnoticed)
    @rule()
    def notice_failures(self) -> None:
        for job, kind in self.over:
            if kind is OSError and job.handle is not None:
                assert isinstance(job.handle.exception(0), OSError)
        self.unnoticed = 0

    @precondition(lambda self: not self.jobs)
    @rule()
    def flush(self) -> None:
        if self.unnoticed:
            with pytest.raises(BackgroundError):
                self.worker.flush(60)
            self.unnoticed = 0
        else:
            self.worker.flush(60)

    @precondition(lambda self: self.jobs)
    @rule()
    def flush_in_vain(self) -> None:
        with pytest.raises(TimeoutError):
            self.worker.flush(0.001)

    @rule()
    def fork(self) -> None:
        handles = [job.handle for job in self.jobs if job.handle is not None]
        child = os.fork()
        if child == 0:
            os._exit(_check_child(self.worker, handles, self.is_closed))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    @precondition(lambda self: not self.is_closed)
    @rule()
    def close(self) -> None:
        self.is_closed = True
        if self.jobs:
            with pytest.raises(TimeoutError):
                self.worker.close(0.001)
        elif self.unnoticed:
            with pytest.raises(BackgroundError):
                self.worker.close(60)
            self.unnoticed = 0
        else:
            self.worker.close(60)

    @precondition(lambda self: self.is_closed)
    @rule()
    def submit_after_close(self) -> None:
        if not self.unnoticed:
            with pytest.raises(RuntimeError, match="is closed"):
                self.worker.submit(Job(-1))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "worker"):
            return
        assert self.worker.queue_size == len(self.jobs)
        assert self.worker.num_skipped == self.num_skipped
        for job in self.jobs[1:]:
            assert not job.started.is_set()
        for job, kind in self.over:
            if job.handle is not None and kind is not CancelledError:
                assert job.handle.done()
                assert kind is not None or job.handle.result(0) == job.number


def _check_child(worker: Worker, handles: list[Handle[Any]], is_closed: bool) -> int:
    """Return 0 if a forked child finds an empty worker that works."""
    try:
        assert worker.queue_size == 0
        for handle in handles:
            assert "belongs to the parent process" in str(handle.exception(0))
        if not is_closed:
            assert worker.submit(lambda: 5).result(60) == 5
    except BaseException as error:  # noqa: BLE001 - the parent only sees the code
        os.write(2, repr(error).encode())
        return 1
    return 0


TestWorkerAgainstTheModel = WorkerMachine.TestCase
TestWorkerAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("policy", ["block", "skip_oldest", "raise"])
def test_a_submit_that_is_interrupted_anywhere_leaves_the_worker_working(policy):
    worker = Worker(max_queue_size=2, policy=policy)
    ran: list[int] = []
    interrupted = 0
    for instruction in interruptions(lambda: worker.submit(ran.append, -1)):
        interrupted += 1
        worker.flush(60)
        assert worker.submit(ran.append, instruction).wait(60)
        assert ran[-1] == instruction
        assert worker.queue_size == 0
    assert interrupted > 20
    worker.close(60)


def test_a_submit_that_is_interrupted_gives_its_room_back_while_the_error_is_being_handled():
    worker = Worker(max_queue_size=1, policy="raise")
    for instruction in itertools.count(1):
        try:
            with interrupted_at(instruction):
                worker.submit(int)
        except KeyboardInterrupt:
            worker.flush(60)
            assert worker.submit(lambda: 7).result(60) == 7
            worker.flush(60)
        else:
            break
    worker.close(60)


@pytest.mark.parametrize("method", ["result", "wait", "exception", "cancel"])
def test_a_handle_that_is_interrupted_anywhere_still_gets_its_result(method):
    worker = Worker()
    job = Job(1)
    handle = worker.submit(job)
    assert job.started.wait(60)
    job.released.set()
    for _ in interruptions(getattr(handle, method)):
        assert handle.result(60) == 1
    assert handle.result(60) == 1
    worker.close(60)


def test_a_room_that_is_interrupted_anywhere_is_given_back():
    worker = Worker(max_queue_size=1, policy="raise")

    def reserve() -> None:
        with worker.room():
            pass

    for _ in interruptions(reserve):
        assert worker.submit(lambda: 7).result(60) == 7
        worker.flush(60)
    worker.close(60)


def test_cancelling_and_skipping_that_are_interrupted_anywhere_resolve_the_job_all_the_same():
    worker = Worker(max_queue_size=2, policy="skip_oldest")
    for instruction in range(1, 120):
        first = Job(0)
        worker.submit(first)
        assert first.started.wait(60)
        second = worker.submit(int)
        try:
            with interrupted_at(instruction):
                second.cancel()
        except KeyboardInterrupt:
            pass
        third = worker.submit(lambda: 3)
        first.released.set()
        assert third.result(60) == 3
        assert isinstance(_error_of(second), CancelledError | JobSkippedError | None)
        worker.flush(60)
    worker.close(60)


def _error_of(handle: Handle[Any]) -> BaseException | None:
    try:
        return handle.exception(60)
    except CancelledError as error:
        return error


def test_a_flush_and_a_close_that_are_interrupted_anywhere_can_be_repeated():
    for method in ("flush", "close"):
        worker = Worker()
        worker.submit(int)
        for _ in interruptions(getattr(worker, method)):
            pass
        getattr(worker, method)(60)
        assert worker.queue_size == 0
