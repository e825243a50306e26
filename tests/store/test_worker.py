"""The background: bounded, in order, and never silent about what it lost."""

import gc
import itertools
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import CancelledError
from typing import Any

import pytest

from slipstream.errors import BackgroundError, JobSkippedError, QueueFullError
from slipstream.store import worker as worker_module
from slipstream.store.handle import Handle
from slipstream.store.worker import Worker


class Gate:
    """A job that has begun and waits to be let through."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.opened.wait(30)
        return "through"


def busy(worker: Worker) -> Gate:
    """Occupy the background with a job, so that what follows stays queued."""
    gate = Gate()
    worker.submit(gate)
    assert gate.entered.wait(30)
    return gate


def wait_without_asking(handle: Handle[Any]) -> None:
    """Wait for a job without asking for its outcome, which would count as having noticed a failure."""
    done = threading.Event()
    handle.add_done_callback(lambda _: done.set())
    assert done.wait(30)


def fail(reason: str = "disk on fire") -> None:
    raise OSError(reason)


def test_jobs_run_in_order_and_hand_back_their_results():
    order: list[int] = []

    def square(number: int) -> int:
        order.append(number)
        return number * number

    with Worker(max_queue_size=50) as worker:
        handles = [worker.submit(square, i) for i in range(30)]
    assert order == list(range(30))
    assert [handle.result() for handle in handles] == [i * i for i in range(30)]
    assert all(handle.done() and handle.wait() for handle in handles)


def test_several_workers_share_one_thread_and_keep_their_own_order():
    names: set[str] = set()
    workers = [Worker(max_queue_size=20) for _ in range(3)]
    for _ in range(10):
        for worker in workers:
            worker.submit(lambda: names.add(threading.current_thread().name))
    for worker in workers:
        worker.close()
    assert names == {"slipstream-background"}


def test_arguments_are_passed_to_the_job():
    with Worker() as worker:
        assert worker.submit(int, "ff", base=16).result(30) == 255


def test_waiting_ends_when_the_time_is_up():
    with Worker() as worker:
        gate = busy(worker)
        handle = worker.submit(lambda: 3)
        assert handle.wait(timeout=0.01) is False
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.01)
        with pytest.raises(TimeoutError, match="2 jobs are not done after 0.01 s; they continue"):
            worker.flush(timeout=0.01)
        gate.opened.set()
        assert handle.wait(timeout=30) is True


def test_a_full_queue_blocks_until_there_is_room_and_says_so():
    told: list[str] = []
    worker = Worker(max_queue_size=2, on_full=lambda: told.append("full"))
    gate = busy(worker)
    worker.submit(lambda: None)
    assert (worker.queue_size, told) == (2, [])
    threading.Timer(0.05, gate.opened.set).start()
    assert worker.submit(lambda: "later").result(30) == "later"
    assert told == ["full"]
    worker.close()


def test_a_full_queue_may_skip_the_oldest_job_that_has_not_begun():
    worker = Worker(max_queue_size=3, policy="skip_oldest", name="saver")
    gate = busy(worker)
    first, second, third = (worker.submit(lambda i=i: i) for i in range(3))
    assert worker.queue_size == 3
    with pytest.raises(JobSkippedError, match="saver: skipped in favour of a newer job"):
        first.result(0)
    gate.opened.set()
    worker.close()
    assert (second.result(), third.result(), worker.num_skipped) == (1, 2, 1)


def test_skipping_never_skips_the_job_that_runs():
    worker = Worker(max_queue_size=1, policy="skip_oldest")
    gate = busy(worker)
    threading.Timer(0.05, gate.opened.set).start()
    assert worker.submit(lambda: "second").result(30) == "second"
    assert worker.num_skipped == 0
    worker.close()


def test_a_full_queue_may_raise():
    worker = Worker(max_queue_size=1, policy="raise", name="saver")
    gate = busy(worker)
    with pytest.raises(QueueFullError, match=r"saver: the queue is full \(1 jobs\)"):
        worker.submit(lambda: None)
    gate.opened.set()
    worker.close()


@pytest.mark.parametrize(("size", "policy"), [(0, "block"), (-1, "block"), (1, "panic")])
def test_settings_out_of_range_are_refused(size, policy):
    with pytest.raises(ValueError, match="expected"):
        Worker(size, policy)


def test_a_failure_reaches_the_handle_with_its_traceback():
    with Worker() as worker:
        handle = worker.submit(fail)
        with pytest.raises(OSError, match="disk on fire") as caught:
            handle.wait(30)
    assert "in fail" in "".join(traceback.format_exception(caught.value))


def test_a_failure_nobody_asked_about_is_raised_by_the_next_call_once():
    worker = Worker(name="saver")
    failed = worker.submit(fail)
    wait_without_asking(failed)
    with pytest.raises(BackgroundError, match="saver: an earlier job failed: disk on fire") as caught:
        worker.submit(lambda: None)
    assert isinstance(caught.value.__cause__, OSError)
    assert worker.submit(lambda: "accepted").result(30) == "accepted"
    worker.close()


def test_a_failure_nobody_asked_about_is_raised_by_flush_and_by_close():
    worker = Worker()
    worker.submit(fail, "one")
    with pytest.raises(BackgroundError, match="one"):
        worker.flush()
    worker.submit(fail, "two")
    with pytest.raises(BackgroundError, match="two"):
        worker.close()
    worker.close()


def test_several_failures_are_counted():
    worker = Worker()
    gate = busy(worker)
    worker.submit(fail, "one")
    worker.submit(fail, "two")
    gate.opened.set()
    with pytest.raises(BackgroundError, match=r"an earlier job failed \(and 1 more; see the log\): one"):
        worker.close()


def test_an_error_on_its_way_is_not_hidden_by_a_failure_in_the_background(caplog):
    with pytest.raises(KeyError, match="mine"), caplog.at_level(logging.ERROR), Worker() as worker:
        worker.submit(fail)
        raise KeyError("mine")
    assert "a background job failed while another error was being raised" in caplog.text


def test_a_closed_worker_takes_no_more_jobs():
    worker = Worker()
    worker.close()
    with pytest.raises(RuntimeError, match="is closed"):
        worker.submit(lambda: None)


def test_closing_does_not_wait_for_room_that_is_given_back_or_belongs_to_the_closing_thread():
    worker = Worker()
    with worker.room():
        worker.close()
    other = Worker()
    has_room = threading.Event()

    def change_its_mind() -> None:
        with other.room():
            has_room.set()

    thread = threading.Thread(target=change_its_mind)
    thread.start()
    assert has_room.wait(30)
    other.close()
    thread.join()


def test_closing_waits_for_a_thread_that_has_room_or_reports_that_it_does_not_submit_in_time():
    worker = Worker()
    has_room = threading.Event()
    may_submit = threading.Event()
    done: list[str] = []

    def submit_late() -> None:
        with worker.room() as put:
            has_room.set()
            assert may_submit.wait(30)
            put(done.append, "written")

    thread = threading.Thread(target=submit_late)
    thread.start()
    assert has_room.wait(30)
    with pytest.raises(TimeoutError, match="still submitting a job after 0.01 s"):
        worker.close(timeout=0.01)
    may_submit.set()
    worker.close()
    assert done == ["written"]
    thread.join()


def test_a_cancelled_job_does_not_run():
    ran: list[int] = []
    worker = Worker()
    gate = busy(worker)
    handle = worker.submit(ran.append, 1)
    assert handle.cancel()
    gate.opened.set()
    worker.close()
    assert ran == []
    with pytest.raises(CancelledError):
        handle.result()


def test_a_job_may_submit_another_and_wait_for_it():
    with Worker(max_queue_size=1) as worker:
        assert worker.submit(lambda: worker.submit(lambda: "inner").result()).result(30) == "inner"


def test_what_a_job_holds_on_to_is_freed_when_it_is_done_even_if_it_failed():
    class Snapshot:
        pass

    def use(snapshot: Snapshot, explode: bool) -> None:
        local = snapshot
        if explode:
            raise ValueError(type(local).__name__)

    for explode in (False, True):
        worker = Worker()
        snapshot = Snapshot()
        alive = weakref.ref(snapshot)
        handle = worker.submit(use, snapshot, explode)
        del snapshot
        assert (handle.exception(30) is not None) == explode
        worker.flush()
        gc.collect()
        assert alive() is None
        worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority per thread")
def test_the_background_and_the_threads_it_starts_run_at_low_priority():
    def niceness() -> list[int]:
        found = [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())]
        child = threading.Thread(
            target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        )
        child.start()
        child.join()
        return found

    with Worker() as worker:
        assert worker.submit(niceness).result(30) == [10, 10]
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0


def test_many_threads_may_submit_at_once():
    done: list[int] = []
    worker = Worker(max_queue_size=2)
    crew = [threading.Thread(target=lambda: [worker.submit(done.append, 1) for _ in range(50)]) for _ in range(6)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    worker.close()
    assert len(done) == 300
    assert worker.queue_size == 0


@pytest.mark.parametrize("policy", ["block", "skip_oldest", "raise"])
def test_the_bound_holds_however_many_threads_submit(policy):
    worker = Worker(max_queue_size=2, policy=policy)
    lock = threading.Lock()
    num_reserved = 0
    num_ended = 0
    most = 0

    def job() -> None:
        nonlocal num_ended
        with lock:
            num_ended += 1

    def submit() -> None:
        nonlocal most, num_reserved
        for _ in range(60):
            try:
                with worker.room() as put:
                    with lock:
                        num_reserved += 1
                        most = max(most, num_reserved - num_ended - worker.num_skipped)
                    put(job)
            except QueueFullError:
                continue

    crew = [threading.Thread(target=submit) for _ in range(8)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    worker.close()
    assert 0 < most <= 2
    assert num_reserved == num_ended + worker.num_skipped
    assert worker.queue_size == 0


def test_a_callback_that_raises_anything_does_not_stop_the_background(caplog):
    worker = Worker()
    gate = busy(worker)
    handle = worker.submit(lambda: None)
    handle.add_done_callback(lambda _: sys.exit(3))
    gate.opened.set()
    assert worker.submit(lambda: "still here").result(30) == "still here"
    worker.close()
    assert "a callback of a background job failed" in caplog.text


def test_room_can_be_filled_once_and_is_given_back_if_it_is_not():
    worker = Worker(max_queue_size=1)
    with worker.room():
        assert worker.queue_size == 1
    assert worker.queue_size == 0
    with worker.room() as put:
        handle = put(lambda: 1)
        with pytest.raises(RuntimeError, match="already used"):
            put(lambda: 2)
    assert handle.result(30) == 1
    worker.close()
    assert worker.queue_size == 0


def test_flush_waits_for_what_was_queued_and_not_for_what_others_add():
    worker = Worker(max_queue_size=4)
    stop = threading.Event()

    def pump() -> None:
        while not stop.is_set():
            worker.submit(time.sleep, 0.001)

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        mine = worker.submit(lambda: "mine")
        worker.flush(timeout=30)
        assert mine.done()
    finally:
        stop.set()
        thread.join()
    worker.close()


def test_a_submit_that_waits_for_room_is_refused_when_the_worker_closes():
    worker = Worker(max_queue_size=1)
    gate = busy(worker)
    refused: list[str] = []

    def late() -> None:
        try:
            worker.submit(lambda: None)
        except RuntimeError as error:
            refused.append(str(error))

    # The thread is refused whether it already waits for room or comes after `close`.
    thread = threading.Thread(target=late)
    thread.start()
    with pytest.raises(TimeoutError):
        worker.close(timeout=0.01)
    gate.opened.set()
    thread.join()
    assert len(refused) == 1
    assert "is closed" in refused[0]
    worker.close()


def test_a_job_cannot_flush_the_queue_it_is_in():
    worker = Worker()
    with pytest.raises(RuntimeError, match="cannot wait for jobs that run after it"):
        worker.submit(worker.flush).result(30)
    worker.close()


def test_a_cancelled_job_gives_its_place_to_the_next():
    worker = Worker(max_queue_size=2, policy="raise")
    gate = busy(worker)
    assert worker.submit(lambda: None).cancel()
    handle = worker.submit(lambda: "next")
    gate.opened.set()
    assert handle.result(30) == "next"
    worker.close()


def test_a_failure_with_a_cause_does_not_keep_what_its_frames_held():
    class Snapshot:
        pass

    def inner(snapshot: Snapshot) -> None:
        raise OSError(type(snapshot).__name__)

    def outer(snapshot: Snapshot) -> None:
        try:
            inner(snapshot)
        except OSError as error:
            raise ValueError("wrapped") from error

    worker = Worker()
    snapshot = Snapshot()
    alive = weakref.ref(snapshot)
    handle = worker.submit(outer, snapshot)
    del snapshot
    error = handle.exception(30)
    gc.collect()
    assert isinstance(error, ValueError)
    assert alive() is None
    worker.close()


def test_a_failure_at_any_moment_of_a_call_is_raised_once():
    for moment in itertools.count(1):
        worker = Worker(max_queue_size=5)
        opened = threading.Event()

        def fail_when_opened(opened=opened):
            assert opened.wait(30)
            fail()

        handle = worker.submit(fail_when_opened)
        passed = 0

        def let_it_fail(frame, event, _, moment=moment, opened=opened, handle=handle):
            nonlocal passed
            if frame.f_code.co_filename != worker_module.__file__:
                return None
            passed += event == "line"
            if passed == moment:
                opened.set()
                wait_without_asking(handle)
            return let_it_fail

        num_raised = 0
        before = sys.gettrace()
        sys.settrace(let_it_fail)
        try:
            worker.submit(int)
        except BackgroundError:
            num_raised += 1
        finally:
            sys.settrace(before)
        opened.set()
        try:
            worker.close()
        except BackgroundError:
            num_raised += 1
        assert num_raised == 1, f"the job failed at line {moment} of the call"
        if passed < moment:
            return


def test_a_failure_whose_message_cannot_be_read_is_raised_once():
    class UnreadableError(Exception):
        def __str__(self):
            raise ValueError("no message")

    def fail_unreadably():
        raise UnreadableError

    worker = Worker()
    wait_without_asking(worker.submit(fail_unreadably))
    with pytest.raises(BackgroundError, match="UnreadableError"):
        worker.flush()
    assert worker.submit(int).result() == 0


def test_a_skipped_job_says_so_although_the_background_gets_to_it_at_any_moment_of_the_call():
    for moment in itertools.count(1):
        worker = Worker(max_queue_size=2, policy="skip_oldest")
        gate = busy(worker)
        queued = worker.submit(int)
        passed = 0

        def let_the_background_continue(frame, event, _, moment=moment, gate=gate, queued=queued):
            nonlocal passed
            if frame.f_code.co_filename != worker_module.__file__:
                return None
            passed += event == "line"
            if passed == moment:
                gate.opened.set()
                # Jobs run in order, so the background has passed the queued one after this.
                assert Worker().submit(int).result(30) == 0
                assert not queued.cancelled()
            return let_the_background_continue

        before = sys.gettrace()
        sys.settrace(let_the_background_continue)
        try:
            worker.submit(int)
        finally:
            sys.settrace(before)
        gate.opened.set()
        worker.close()
        if worker.num_skipped:
            assert isinstance(queued.exception(), JobSkippedError), f"at line {moment} of the call"
        else:
            assert queued.result() == 0
        if passed < moment:
            assert worker.num_skipped == 1
            return


def test_a_job_that_raises_a_cancelled_error_has_failed_and_was_not_cancelled():
    def fail_cancelled():
        raise CancelledError("a future that the job waited for")

    handle = Worker().submit(fail_cancelled)
    wait_without_asking(handle)
    assert not handle.cancelled()
    assert not handle.cancel()
    assert isinstance(handle.exception(), CancelledError)
