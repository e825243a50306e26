"""The background: bounded, in order, and never silent about what it lost."""

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from slipstream.errors import BackgroundError, JobSkippedError, QueueFullError
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
    with pytest.raises(JobSkippedError, match="saver: a newer job took this one's place"):
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
    with pytest.raises(QueueFullError, match="saver: the queue is full with 1 jobs"):
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
    while not failed.done():
        time.sleep(0.001)
    time.sleep(0.05)
    with pytest.raises(BackgroundError, match="saver: an earlier job failed: disk on fire") as caught:
        worker.submit(lambda: None)
    assert isinstance(caught.value.__cause__, OSError)
    assert worker.submit(lambda: "goes on").result(30) == "goes on"
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
    with pytest.raises(BackgroundError, match=r"an earlier job failed \(and 1 more, which are in the log\): one"):
        worker.close()


def test_an_error_on_its_way_is_not_hidden_by_a_failure_in_the_background(caplog):
    with pytest.raises(KeyError, match="mine"), caplog.at_level(logging.ERROR), Worker() as worker:
        worker.submit(fail)
        raise KeyError("mine")
    assert "failed in the background" in caplog.text


def test_a_closed_worker_takes_no_more_jobs():
    worker = Worker()
    worker.close()
    with pytest.raises(RuntimeError, match="is closed"):
        worker.submit(lambda: None)


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
    most = 0

    def submit() -> None:
        nonlocal most
        for _ in range(60):
            try:
                worker.submit(time.sleep, 0)
            except QueueFullError:
                continue
            most = max(most, worker.queue_size)

    crew = [threading.Thread(target=submit) for _ in range(8)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    worker.close()
    assert most <= 2
    assert not worker._waiting


def test_a_callback_that_raises_anything_does_not_stop_the_background(caplog):
    worker = Worker()
    gate = busy(worker)
    handle = worker.submit(lambda: None)
    handle.add_done_callback(lambda _: sys.exit(3))
    gate.opened.set()
    assert worker.submit(lambda: "still here").result(30) == "still here"
    worker.close()
    assert "a callback of a finished job failed" in caplog.text


def test_room_can_be_filled_once_and_is_given_back_if_it_is_not():
    worker = Worker(max_queue_size=1)
    with worker.room():
        assert worker.queue_size == 1
    assert worker.queue_size == 0
    with worker.room() as put:
        handle = put(lambda: 1)
        with pytest.raises(RuntimeError, match="filled already"):
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

    thread = threading.Thread(target=late)
    thread.start()
    time.sleep(0.05)
    with pytest.raises(TimeoutError):
        worker.close(timeout=0.01)
    gate.opened.set()
    thread.join()
    assert len(refused) == 1
    assert "is closed" in refused[0]
    worker.close()


def test_a_job_cannot_flush_the_queue_it_is_in():
    worker = Worker()
    with pytest.raises(RuntimeError, match="cannot wait for jobs that wait for it"):
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


# What happens at the end of a process can only be seen from another one.

PREAMBLE = """
import os, signal, sys, threading, time
from pathlib import Path
from slipstream.store.worker import Worker

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
folder = Path(sys.argv[1])
worker = Worker(max_queue_size=10, name="saver")

def slow(name):
    time.sleep(0.15)
    (folder / name).write_text("saved")

def save_some():
    for name in "abc":
        worker.submit(slow, name)
"""


def run(script: str, folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(script), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, **options)  # type: ignore[call-overload]


def saved(folder: Path) -> str:
    return "".join(sorted(path.name for path in folder.iterdir()))


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('training diverged')", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(30)", -signal.SIGHUP),
        ("worker.flush(); os._exit(4)", 4),
    ],
)
def test_nothing_queued_is_lost_at_the_end_of_the_process(tmp_path, ending, code):
    result = run(f"save_some()\n{ending}", tmp_path)
    assert saved(tmp_path) == "abc", result.stderr
    assert result.returncode == code


def test_sigterm_while_the_main_thread_is_blocked_on_a_full_queue_loses_nothing(tmp_path):
    script = """
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        worker = Worker(max_queue_size=1)
        for name in "abcdefgh":
            worker.submit(slow, name)
            Path(folder.parent / "count").write_text(name)
    """
    folder = tmp_path / "out"
    folder.mkdir()
    assert run(script, folder).returncode == -signal.SIGTERM
    assert saved(folder).endswith((tmp_path / "count").read_text())


def test_sigterm_ends_a_process_that_goes_on_submitting_and_loses_nothing_it_accepted(tmp_path):
    script = """
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        worker = Worker(max_queue_size=2)
        for number in range(300):
            worker.submit(slow, f"{number:03d}")
            Path(folder.parent / "count").write_text(f"{number:03d}")
    """
    folder = tmp_path / "out"
    folder.mkdir()
    assert run(script, folder).returncode == -signal.SIGTERM
    assert saved(folder).endswith((tmp_path / "count").read_text())
    assert len(list(folder.iterdir())) < 200


def test_a_handler_that_was_there_is_called_after_draining(tmp_path):
    script = """
        def mine(number, frame):
            print("handler", number, sorted(p.name for p in folder.iterdir()))
            sys.exit(7)
        signal.signal(signal.SIGTERM, mine)
        save_some()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    result = run(script, tmp_path)
    assert result.stdout == "handler 15 ['a', 'b', 'c']\n"
    assert result.returncode == 7


def test_a_handler_that_calls_the_one_before_it_still_ends_the_process(tmp_path):
    script = """
        save_some()
        before = signal.getsignal(signal.SIGTERM)
        def mine(number, frame):
            print("mine", flush=True)
            before(number, frame)
        signal.signal(signal.SIGTERM, mine)
        worker.submit(slow, "d")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == ("mine\n", -signal.SIGTERM)
    assert saved(tmp_path) == "abcd"


def test_sigterm_while_the_main_thread_holds_a_lock_that_a_job_needs_loses_nothing(tmp_path):
    script = """
        lock = threading.Lock()
        def locked(name):
            with lock:
                slow(name)
        with lock:
            worker.submit(locked, "a")
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(20):
                time.sleep(0.01)
        time.sleep(30)
    """
    assert run(script, tmp_path).returncode == -signal.SIGTERM
    assert saved(tmp_path) == "a"


def test_sigterm_inside_a_room_that_is_held_does_not_wait_for_it(tmp_path):
    script = """
        save_some()
        with worker.room():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
    """
    started = time.monotonic()
    assert run(script, tmp_path).returncode == -signal.SIGTERM
    assert time.monotonic() - started < 25
    assert saved(tmp_path) == "abc"


def test_sigterm_while_another_thread_keeps_submitting_ends_the_process(tmp_path):
    script = """
        def pump():
            while True:
                worker.submit(time.sleep, 0.001)
        save_some()
        threading.Thread(target=pump, daemon=True).start()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    assert run(script, tmp_path).returncode == -signal.SIGTERM
    assert saved(tmp_path) == "abc"


def test_sigterm_drains_what_only_other_threads_submitted(tmp_path):
    script = """
        thread = threading.Thread(target=save_some)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    assert run(script, tmp_path).returncode == -signal.SIGTERM
    assert saved(tmp_path) == "abc"


def test_jobs_stay_in_order_while_the_process_ends(tmp_path):
    script = """
        order = []
        def note(number):
            time.sleep(0.1)
            order.append(number)
            (folder / "order").write_text(str(order))
        for number in range(3):
            worker.submit(note, number)
        def late():
            time.sleep(0.05)
            worker.submit(note, 3)
        threading.Thread(target=late).start()
    """
    assert run(script, tmp_path).returncode == 0
    assert (tmp_path / "order").read_text() == "[0, 1, 2, 3]"


def test_a_handler_that_carries_on_carries_on(tmp_path):
    script = """
        signal.signal(signal.SIGTERM, lambda *_: print("not yet"))
        save_some()
        os.kill(os.getpid(), signal.SIGTERM)
        worker.submit(slow, "d")
        os.kill(os.getpid(), signal.SIGTERM)
        print("done")
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == ("not yet\nnot yet\ndone\n", 0)
    assert saved(tmp_path) == "abcd"


def test_an_ignored_signal_stays_ignored(tmp_path):
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        save_some()
        os.kill(os.getpid(), signal.SIGTERM)
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == ("True\n", 0)


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    script = """
        worker.submit(time.sleep, 60)
        time.sleep(0.2)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        os.kill(os.getpid(), signal.SIGTERM)
    """
    started = time.monotonic()
    assert run(script, tmp_path).returncode == -signal.SIGTERM
    assert time.monotonic() - started < 40


def test_a_worker_first_used_off_the_main_thread_drains_on_exit(tmp_path):
    script = """
        thread = threading.Thread(target=save_some, daemon=True)
        thread.start()
        thread.join()
    """
    assert run(script, tmp_path).returncode == 0
    assert saved(tmp_path) == "abc"


def test_jobs_submitted_after_the_main_thread_ended_are_done_too(tmp_path):
    script = """
        worker.submit(slow, "a")
        def late():
            time.sleep(0.6)
            worker.submit(slow, "z")
        threading.Thread(target=late).start()
    """
    assert run(script, tmp_path).returncode == 0
    assert saved(tmp_path) == "az"


def test_a_failure_nobody_asked_about_is_printed_at_exit(tmp_path):
    result = run("worker.submit(lambda: 1 / 0)", tmp_path)
    assert "a background job failed and nobody asked for its result" in result.stderr
    assert "ZeroDivisionError: division by zero" in result.stderr


def test_a_failure_that_was_heard_of_is_not_printed_again(tmp_path):
    result = run("worker.submit(lambda: 1 / 0).exception()", tmp_path)
    assert result.stderr == ""


def test_codecs_work_in_a_job_that_runs_while_the_interpreter_exits(tmp_path):
    script = """
        import numpy as np
        from slipstream.store.container import write_container
        array = np.zeros((3000, 1000), np.float32)
        def write():
            time.sleep(0.3)
            with write_container(folder / "x.slip", threads=4) as writer:
                writer.add("x", array)
        worker.submit(write)
    """
    result = run(script, tmp_path)
    assert (result.stderr, saved(tmp_path)) == ("", "x.slip")


def test_a_forked_child_starts_empty_and_the_parent_keeps_its_jobs(tmp_path):
    script = """
        (folder / "child").mkdir()
        (folder / "parent").mkdir()
        handle = worker.submit(slow, "parent/a")
        queued = worker.submit(slow, "parent/b")
        child = os.fork()
        if child == 0:
            print(worker.queue_size, type(queued.exception()).__name__, queued.exception(), flush=True)
            worker.submit(slow, "child/c")
            worker.submit(slow, "child/d")
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    result = run(script, tmp_path)
    assert result.stdout == "0 BackgroundError saver: this job belongs to the parent process\n5\n", result.stderr
    assert (saved(tmp_path / "parent"), saved(tmp_path / "child")) == ("ab", "cd")


def test_a_forked_child_dies_of_sigterm_as_if_we_were_not_there(tmp_path):
    script = """
        worker.submit(slow, "a")
        child = os.fork()
        if child == 0:
            print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
            time.sleep(30)
        time.sleep(0.5)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    assert run(script, tmp_path).stdout == f"True\n{-signal.SIGTERM}\n"


def test_forking_while_jobs_come_and_go_never_hangs_the_child(tmp_path):
    script = """
        def churn():
            while True:
                worker.submit(lambda: None)
        for _ in range(3):
            threading.Thread(target=churn, daemon=True).start()
        for _ in range(100):
            child = os.fork()
            if child == 0:
                worker.submit(lambda: None).result(20)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print("no child hung", flush=True)
        os._exit(0)
    """
    result = run(script, tmp_path)
    assert result.stdout == "no child hung\n", result.stderr
