"""The end of a process: exit, signals and forks lose nothing that was accepted.

Only another process can see how a process ends, so every test starts one.
"""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PREAMBLE = """
import os, signal, sys, threading, time
from pathlib import Path
from slipstream.store.worker import Worker

# A shell starts background jobs with SIGINT ignored, and nohup with SIGHUP ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
folder = Path(sys.argv[1])
worker = Worker(max_queue_size=10, name="saver")

def slow(name):
    time.sleep(0.15)
    (folder / name).write_text("saved")

def save_some():
    for name in "abc":
        worker.submit(slow, name)
"""


PATIENT = {**os.environ, "SLIPSTREAM_GRACE_S": "600"}


def run(script: str, folder: Path, preamble: str = PREAMBLE, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", preamble + textwrap.dedent(script), str(folder)]
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
    assert run(script, tmp_path, env=PATIENT).returncode == -signal.SIGTERM
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
        called = threading.Semaphore(0)
        signal.signal(signal.SIGTERM, lambda *_: (print("not yet"), called.release()))
        for names in ("abc", "def"):
            for name in names:
                worker.submit(slow, name)
            os.kill(os.getpid(), signal.SIGTERM)
            called.acquire()
            print("".join(sorted(path.name for path in folder.iterdir())))
        print("done")
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == ("not yet\nabc\nnot yet\nabcdef\ndone\n", 0), result.stderr


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
        worker.submit(time.sleep, 600)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    """
    # With such a grace period, only the second signal can end the process in time.
    assert run(script, tmp_path, env=PATIENT).returncode == -signal.SIGTERM


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
        from slipstream.store.writer import write_container
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


def test_a_signal_calls_a_handler_once_even_if_another_library_listens_to_signals(tmp_path):
    script = """
        import asyncio
        async def main():
            ended = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
            save_some()
            os.kill(os.getpid(), signal.SIGTERM)
            await ended.wait()
            print("asyncio was notified")
        asyncio.run(main())
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == ("asyncio was notified\n", 0), result.stderr
    assert saved(tmp_path) == "abc"


# Exit: draining does not depend on who created the worker, and when.

WITHOUT_WORKER = PREAMBLE.replace('worker = Worker(max_queue_size=10, name="saver")', "")


def run_without_worker(script: str, folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return run(script, folder, preamble=WITHOUT_WORKER, **options)


def test_the_first_job_of_a_process_may_come_from_an_atexit_handler(tmp_path):
    script = """
        import atexit
        def at_exit():
            global worker
            worker = Worker()
            save_some()
        atexit.register(at_exit)
    """
    result = run_without_worker(script, tmp_path)
    assert (saved(tmp_path), result.returncode) == ("abc", 0), result.stderr


def test_the_first_job_of_a_process_may_come_from_a_finalizer_at_shutdown(tmp_path):
    script = """
        class Run:
            def __del__(self):
                self.worker.submit(slow, "last")
        run = Run()
        run.worker = Worker()
    """
    result = run_without_worker(script, tmp_path)
    assert (saved(tmp_path), result.returncode) == ("last", 0), result.stderr


def test_jobs_from_an_atexit_handler_come_after_those_that_were_queued(tmp_path):
    script = """
        import atexit
        order = []
        def note(number):
            order.append(number)
            (folder / "order").write_text(str(order))
        atexit.register(lambda: [worker.submit(note, number) for number in (3, 4)])
        worker.submit(slow, "a")
        for number in range(3):
            worker.submit(note, number)
    """
    assert run(script, tmp_path).returncode == 0
    assert (tmp_path / "order").read_text() == "[0, 1, 2, 3, 4]"


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"])
def test_a_worker_that_a_thread_created_is_drained(tmp_path, ending):
    script = """
        def work():
            global worker
            worker = Worker()
            save_some()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    result = run_without_worker(textwrap.dedent(script) + ending, tmp_path)
    assert saved(tmp_path) == "abc", result.stderr


def test_a_main_thread_that_is_blocked_before_handlers_are_installed_is_warned_about(tmp_path):
    script = """
        import logging
        from slipstream.store import signals
        signals._BLOCKED_AFTER_S = 0.2
        warned = threading.Event()
        class Note(logging.Handler):
            def emit(self, record):
                print(record.getMessage(), flush=True)
                warned.set()
        logging.getLogger("slipstream").addHandler(Note())
        import _thread
        lock = _thread.allocate_lock()
        lock.acquire()
        main = threading.get_ident()
        def work():
            while sys._current_frames()[main].f_code.co_name != "block":
                time.sleep(0.01)
            time.sleep(0.1)  # until the call in C has begun
            worker = Worker()
            worker.submit(warned.wait, 60).result()
            lock.release()
        def block():
            lock.acquire()
        _thread.start_new_thread(work, ())
        block()
    """
    result = run_without_worker(script, tmp_path)
    assert result.stdout.startswith("SIGTERM will not wait for background jobs"), result.stderr


# Signals: the main thread is not needed, and never blocked.


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "lambda *_: os._exit(9)"])
def test_a_handler_that_replaced_ours_after_the_last_job_is_wrapped_while_jobs_are_left(tmp_path, handler):
    script = f"""
        gate = threading.Event()
        worker.submit(gate.wait, 60)
        save_some()
        mine = {handler}
        signal.signal(signal.SIGTERM, mine)
        while signal.getsignal(signal.SIGTERM) == mine:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        gate.set()
        time.sleep(30)
    """
    result = run(script, tmp_path)
    assert saved(tmp_path) == "abc", result.stderr
    assert result.returncode == (9 if "exit" in handler else -signal.SIGTERM)


@pytest.mark.parametrize("handler", [True, False])
def test_a_signal_while_the_main_thread_holds_the_lock_of_a_log_handler_loses_nothing(tmp_path, handler):
    install = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))" if handler else ""
    script = f"""
        import logging
        stream = logging.StreamHandler()
        logging.getLogger().addHandler(stream)
        {install}
        def logged(name):
            slow(name)
            logging.warning("saved %s", name)
        stream.acquire()
        for name in "abc":
            worker.submit(logged, name)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(20):
            time.sleep(0.01)
        stream.release()
        time.sleep(30)
    """
    result = run(script, tmp_path, env=PATIENT)
    assert (saved(tmp_path), result.returncode) == ("abc", 7 if handler else -signal.SIGTERM), result.stderr


def test_a_signal_ends_a_process_whose_main_thread_is_stuck_in_c_after_draining(tmp_path):
    script = """
        import hashlib
        save_some()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)
    """
    result = run(script, tmp_path)
    assert (saved(tmp_path), result.returncode) == ("abc", -signal.SIGTERM), result.stderr


def test_what_is_not_written_within_the_grace_period_is_reported_by_name(tmp_path):
    script = """
        with worker.room("checkpoint_iter_7.slip") as put:
            put(time.sleep, 600)
        worker.submit(slow, "a")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    """
    result = run(script, tmp_path, env={**os.environ, "SLIPSTREAM_GRACE_S": "0.5"})
    assert result.returncode == -signal.SIGTERM
    assert "not done 0.5 s after SIGTERM" in result.stderr
    assert "saver: checkpoint_iter_7.slip" in result.stderr


def test_a_handler_is_called_after_the_grace_period_even_if_jobs_are_left(tmp_path):
    script = """
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        worker.submit(time.sleep, 600)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    """
    result = run(script, tmp_path, env={**os.environ, "SLIPSTREAM_GRACE_S": "0.5"})
    assert result.returncode == 7
    assert "not done 0.5 s after SIGTERM" in result.stderr


# Ctrl-C


@pytest.mark.parametrize("policy", ["block", "skip_oldest", "raise"])
def test_thousands_of_interrupts_of_a_full_queue_leave_it_working(tmp_path, policy):
    script = f"""
        from slipstream.errors import JobSkippedError, QueueFullError
        worker = Worker(max_queue_size=2, policy={policy!r})
        ran = set()
        accepted = []
        wants_interrupt = False
        def storm():
            # One interrupt at a time, after a pause of up to a millisecond: the next one must not hit the `except`.
            global wants_interrupt
            for number in range(2000):
                while not wants_interrupt:
                    time.sleep(0)
                wants_interrupt = False
                time.sleep(number % 100 * 1e-5)
                os.kill(os.getpid(), signal.SIGINT)
        def job(number):
            time.sleep(0.0005)
            ran.add(number)
        def submit_until_interrupted():
            global wants_interrupt
            number = len(accepted) * 1000
            wants_interrupt = True
            while True:
                number += 1
                try:
                    handle = worker.submit(job, number)
                    accepted.append((number, handle))
                    if number % 5 == 0:
                        handle.wait()
                except (QueueFullError, JobSkippedError):
                    continue
        import _thread
        _thread.start_new_thread(storm, ())
        interrupts = 0
        while interrupts < 2000:
            try:
                submit_until_interrupted()
            except KeyboardInterrupt:
                interrupts += 1
        worker.close(timeout=None)
        lost = [number for number, handle in accepted if number not in ran and handle.exception() is None]
        print(lost, worker.queue_size, len(accepted) > 100)
    """
    result = run(script, tmp_path)
    assert result.stdout == "[] 0 True\n", result.stdout + result.stderr


# Fork


def test_a_child_forked_in_the_middle_of_a_write_blocks_neither_itself_nor_the_parent(tmp_path):
    script = """
        import numpy as np
        from slipstream.store.writer import write_container
        array = np.random.default_rng(0).normal(size=(1500, 1000)).astype(np.float32)
        def write(name):
            with write_container(folder / name) as writer:
                writer.add("x", array)
        children = []
        for number in range(12):
            worker.submit(write, f"parent{number}.slip")
            time.sleep(0.003 * number)
            child = os.fork()
            if child == 0:
                worker.submit(write, f"child{number}.slip").result(60)
                os._exit(0)
            children.append(child)
        codes = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
        worker.close()
        print(codes, flush=True)
    """
    result = run(script, tmp_path)
    assert result.stdout == "{0}\n", result.stderr
    names = [path.name for path in tmp_path.iterdir()]
    assert sorted(names) == sorted(f"{who}{number}.slip" for who in ("parent", "child") for number in range(12))


def test_a_signal_to_a_forked_child_does_not_reach_the_parent(tmp_path):
    script = """
        save_some()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
            print("ready", flush=True)
            time.sleep(30)
            os._exit(4)
        time.sleep(0.5)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        worker.submit(slow, "d").result()
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == ("ready\n3\n", 0), result.stderr
    assert saved(tmp_path) == "abcd"


# Threads that cannot be started


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"])
def test_jobs_run_in_the_calling_thread_where_no_thread_can_be_started(tmp_path, ending):
    script = """
        threading.stack_size(1 << 46)  # more than there is: pthread_create fails
        worker = Worker(max_queue_size=1)
        save_some()
        print(threading.active_count(), worker.submit(threading.get_ident).result() == threading.get_ident())
        try:
            worker.submit(lambda: 1 / 0).result()
        except ZeroDivisionError as error:
            print(error)
        print(worker.submit(lambda: worker.submit(lambda: "inner").result()).result())
        print(worker.submit(worker.flush).exception())
        worker.close()
        print("closed", flush=True)
    """
    result = run_without_worker(textwrap.dedent(script) + ending, tmp_path)
    expected = [
        "1 True",
        "division by zero",
        "inner",
        "slipstream: a background job cannot wait for jobs that run after it",
        "closed",
    ]
    assert result.stdout.splitlines() == expected, result.stderr
    assert saved(tmp_path) == "abc"


# Signal handlers that the program changes, and other users of signals.


@pytest.mark.parametrize(
    "change",
    [
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)",
        "signal.signal(signal.SIGTERM, before)",
    ],
)
def test_a_handler_that_the_program_has_removed_is_not_called(tmp_path, change):
    script = f"""
        def handler(number, frame):
            print("called")
        before = signal.signal(signal.SIGTERM, handler)
        worker.submit(slow, "a").wait()
        {change}
        worker.submit(slow, "b").wait()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == ("", -signal.SIGTERM), result.stderr


def test_a_handler_that_the_program_has_restored_is_called(tmp_path):
    script = """
        called = threading.Event()
        def first(number, frame):
            print("first")
            called.set()
        def second(number, frame):
            print("second")
            called.set()
        for handler in (first, second, first):
            signal.signal(signal.SIGTERM, handler)
            worker.submit(slow, "a").wait()
        os.kill(os.getpid(), signal.SIGTERM)
        any(called.wait(0.1) for _ in range(300))
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == ("first\n", 0), result.stderr


def test_sigterm_ends_a_process_whose_event_loop_has_handled_it_before(tmp_path):
    script = """
        import asyncio
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print, "called")
            worker.submit(slow, "a").wait()
        asyncio.run(main())
        worker.submit(slow, "b")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == ("", -signal.SIGTERM), result.stderr
    assert saved(tmp_path) == "ab"


def test_a_signal_to_a_child_forked_after_an_event_loop_has_closed_does_not_reach_the_parent(tmp_path):
    script = """
        import asyncio
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print, "called")
            worker.submit(slow, "a").wait()
        asyncio.run(main())
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(7)
        os.kill(child, signal.SIGHUP)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.stderr, result.returncode) == (f"{-signal.SIGHUP}\n", "", 0)


def test_a_child_whose_handler_calls_ours_ends(tmp_path):
    script = """
        def handler(number, frame):
            before(number, frame)
        before = signal.signal(signal.SIGTERM, handler)
        worker.submit(slow, "a").wait()
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(7)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == (f"{-signal.SIGTERM}\n", 0), result.stderr


def test_another_signal_that_arrives_while_one_is_drained_ends_the_process(tmp_path):
    script = """
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        may_end = threading.Event()
        worker.submit(may_end.wait)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.5)
        may_end.set()
        time.sleep(30)
    """
    result = run(script, tmp_path, env=PATIENT)
    assert result.returncode == -signal.SIGHUP, result.stderr


def test_signals_of_other_libraries_arrive_while_one_is_drained(tmp_path):
    script = """
        import asyncio
        async def main():
            loop = asyncio.get_running_loop()
            may_end = threading.Event()
            has_ended = asyncio.Event()
            loop.add_signal_handler(signal.SIGTERM, has_ended.set)
            loop.add_signal_handler(signal.SIGUSR1, may_end.set)
            worker.submit(may_end.wait)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.5)
            os.kill(os.getpid(), signal.SIGUSR1)
            await has_ended.wait()
            print("both arrived")
        asyncio.run(main())
    """
    result = run(script, tmp_path, env={**os.environ, "SLIPSTREAM_GRACE_S": "60"})
    assert (result.stdout, result.stderr, result.returncode) == ("both arrived\n", "", 0)


def test_a_handler_that_is_installed_while_a_signal_is_drained_is_called(tmp_path):
    script = """
        called = threading.Event()
        may_end = threading.Event()
        signal.signal(signal.SIGTERM, lambda number, frame: called.set())
        worker.submit(may_end.wait)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: called.set())
        may_end.set()
        # In short waits: Python does not notice a signal that arrives just before a wait begins until the wait is over.
        print(any(called.wait(0.1) for _ in range(300)))
    """
    assert run(script, tmp_path).stdout == "True\n"


@pytest.mark.parametrize(
    "break_stderr",
    [
        "os.close(2)",
        # A pipe that nobody reads.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, bytes(4096))
        except BlockingIOError:
            os.set_blocking(writer, True)
        os.dup2(writer, 2)
        """,
    ],
)
def test_sigterm_ends_a_process_that_cannot_report_what_is_lost(tmp_path, break_stderr):
    script = """
        worker.submit(time.sleep, 60)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        os._exit(9)
    """
    script = textwrap.dedent(break_stderr) + textwrap.dedent(script)
    result = run(script, tmp_path, env={**os.environ, "SLIPSTREAM_GRACE_S": "0.2"})
    assert result.returncode == -signal.SIGTERM


@pytest.mark.parametrize("grace", ["nan", "30s", ""])
def test_a_grace_period_that_is_not_a_number_is_the_default_one(tmp_path, grace):
    script = "save_some()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(30)"
    result = run(script, tmp_path, env={**os.environ, "SLIPSTREAM_GRACE_S": grace})
    assert (saved(tmp_path), result.returncode) == ("abc", -signal.SIGTERM), result.stderr


def test_a_signal_is_drained_in_a_process_with_thousands_of_open_files(tmp_path):
    script = """
        import resource
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 4096), limit))
        opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        worker = Worker(max_queue_size=10)
        save_some()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    result = run_without_worker(script, tmp_path)
    assert (saved(tmp_path), result.returncode) == ("abc", -signal.SIGTERM), result.stderr


def test_a_handler_that_c_code_has_installed_stays(tmp_path):
    script = """
        import faulthandler
        # Only this thread: faulthandler reads the stacks of running threads without the GIL, which can crash.
        faulthandler.register(signal.SIGTERM, all_threads=False)
        worker = Worker(max_queue_size=10)
        save_some()
        signal.raise_signal(signal.SIGTERM)
        print("faulthandler does not end the process")
    """
    result = run_without_worker(script, tmp_path)
    assert (result.stdout, result.returncode) == ("faulthandler does not end the process\n", 0)
    assert "most recent call first" in result.stderr


def test_daemon_threads_that_submit_forever_do_not_keep_the_process_alive(tmp_path):
    script = """
        worker = Worker(max_queue_size=2)
        def submit_forever():
            while True:
                worker.submit(time.sleep, 0.05)
        for _ in range(6):
            threading.Thread(target=submit_forever, daemon=True).start()
        worker.submit(slow, "a")
    """
    result = run(script, tmp_path)
    assert (saved(tmp_path), result.returncode) == ("a", 0), result.stderr


@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_signal_to_a_child_that_is_just_being_forked_ends_the_child_and_not_the_parent(tmp_path, thread):
    script = f"""
        import multiprocessing
        def fork_and_terminate():
            for _ in range(30):
                child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
                child.start()
                child.terminate()
                child.join()
                codes.add(child.exitcode)
        codes = set()
        worker.submit(slow, "a").wait()
        if "{thread}" == "main":
            fork_and_terminate()
        else:
            forking = threading.Thread(target=fork_and_terminate)
            forking.start()
            forking.join()
        print(codes, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.returncode) == (f"{{{-signal.SIGTERM}}} set()\n", 0), result.stderr
