"""Locks on files: real processes that wait, die and fork while they hold one."""

import contextlib
import errno
import fcntl
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from slipstream.errors import LockedError
from slipstream.store.local import sweep
from slipstream.store.lock import FileLock, is_still_at


@pytest.fixture
def start():
    """Start Python processes that talk to the test through pipes; all of them are gone at the end."""
    with contextlib.ExitStack() as stack:

        def start(script: str, *arguments: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            return process

        yield start


HOLD = """
    import sys
    from slipstream.store.lock import FileLock
    with FileLock(sys.argv[1]):
        print("locked", flush=True)
        sys.stdin.readline()
    print("released", flush=True)
    sys.stdin.readline()
"""


def test_a_lock_excludes_other_processes_and_says_who_holds_it(tmp_path, start):
    holder = start(HOLD, tmp_path / ".lock")
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(LockedError) as caught:
        FileLock(tmp_path / ".lock").acquire()
    assert str(caught.value) == f"{tmp_path}/.lock is locked by process {holder.pid} on {os.uname().nodename}"
    assert isinstance(caught.value, TimeoutError)


def test_waiting_ends_with_an_error_that_names_the_holder(tmp_path, start):
    holder = start(HOLD, tmp_path / ".lock")
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(LockedError, match=rf"is locked by process {holder.pid} on .* after waiting 0\.1 s$"):
        FileLock(tmp_path / ".lock", timeout_s=0.1).acquire()


def test_waiting_ends_when_the_holder_releases_the_lock(tmp_path, start):
    holder = start(HOLD, tmp_path / ".lock")
    assert holder.stdout.readline() == "locked\n"
    waiter = start(HOLD.replace("sys.argv[1])", "sys.argv[1], timeout_s=60)"), tmp_path / ".lock")
    print("release", file=holder.stdin, flush=True)
    assert waiter.stdout.readline() == "locked\n"


def test_a_killed_process_holds_no_lock(tmp_path, start):
    holder = start(HOLD, tmp_path / ".lock")
    assert holder.stdout.readline() == "locked\n"
    holder.kill()
    holder.wait()
    with FileLock(tmp_path / ".lock") as lock:
        assert lock.held


@pytest.mark.parametrize(
    "note", [b"", b"garbage", os.urandom(5000), b"pid x on y\n", b"pid " + b"9" * 900 + b" on h\n", b"pid 1 on \xff\n"]
)
def test_garbage_in_a_lock_file_does_not_matter(tmp_path, note):
    path = tmp_path / ".lock"
    path.write_bytes(note)
    with FileLock(path):
        path.write_bytes(note)
        with pytest.raises(LockedError, match=f"^{re.escape(str(path))} is locked by another process$"):
            FileLock(path).acquire()
    with FileLock(path), pytest.raises(LockedError, match=rf"by this process \(pid {os.getpid()}\)$"):
        FileLock(path).acquire()


def test_threads_exclude_each_other(tmp_path):
    inside: list[int] = []
    overlaps: list[int] = []

    def work() -> None:
        for _ in range(10):
            with FileLock(tmp_path / ".lock", timeout_s=60):
                inside.append(1)
                overlaps.append(len(inside))
                inside.pop()

    crew = [threading.Thread(target=work) for _ in range(4)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert overlaps == [1] * 40


def test_releasing_twice_is_fine_and_acquiring_twice_is_not(tmp_path):
    lock = FileLock(tmp_path / ".lock")
    lock.acquire()
    with pytest.raises(LockedError, match="by the same FileLock object"):
        lock.acquire()
    lock.release()
    lock.release()
    assert not lock.held
    with lock:
        assert lock.held


def test_a_lock_object_that_is_dropped_releases_the_lock(tmp_path):
    lock = FileLock(tmp_path / ".lock")
    lock.acquire()
    del lock
    FileLock(tmp_path / ".lock").acquire()


def test_a_lock_file_deleted_before_it_was_locked_is_created_again(tmp_path, monkeypatch):
    path = tmp_path / ".lock"
    path.touch()
    deleted: list[Path] = []
    flock = fcntl.flock

    def delete_first(file: int, operation: int) -> None:
        if not deleted:
            deleted.append(path)
            path.unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with FileLock(path, timeout_s=60):
        assert deleted
        with pytest.raises(LockedError):
            FileLock(path).acquire()


def test_without_locks_in_the_file_system_acquiring_succeeds_and_nothing_is_swept(tmp_path, monkeypatch):
    (tmp_path / ".slipstream-0123456789abcdef.tmp").write_bytes(b"perhaps litter")

    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FileLock(tmp_path / ".lock"), FileLock(tmp_path / ".lock"):
        assert sweep(tmp_path) == []


def test_a_lock_file_that_cannot_be_opened_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        FileLock(tmp_path / "absent" / ".lock").acquire()


def test_a_file_is_at_its_path_until_it_is_replaced(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    with (tmp_path / "a").open("rb", buffering=0) as file:
        assert is_still_at(file, tmp_path / "a")
        (tmp_path / "b").write_bytes(b"")
        (tmp_path / "b").replace(tmp_path / "a")
        assert not is_still_at(file, tmp_path / "a")


# From here on, processes that fork while they hold a lock. The child lives on: it keeps nothing of its parent's.


FORK = """
    import os, sys
    def say(line):
        "Write a line as a whole: parent and child share the pipe."
        os.write(1, f"{line}\\n".encode())
    def fork():
        "Fork a child that says its pid and then waits until it is killed."
        child = os.fork()
        if child == 0:
            say(os.getpid())
            sys.stdin.close()
            __import__("signal").pause()
        return child
"""


@pytest.fixture
def children():
    """Kill what was forked: it outlives its parent."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def test_a_child_of_a_killed_holder_does_not_hold_the_lock(tmp_path, start, children):
    script = f"""{FORK}
    from slipstream.store.lock import FileLock
    lock = FileLock(sys.argv[1])
    lock.acquire()
    fork()
    sys.stdin.readline()
    """
    holder = start(script, tmp_path / ".lock")
    children.append(int(holder.stdout.readline()))
    with pytest.raises(LockedError, match=f"by process {holder.pid} "):
        FileLock(tmp_path / ".lock").acquire()
    holder.kill()
    holder.wait()
    with FileLock(tmp_path / ".lock"):
        os.kill(children[0], 0)  # the child is alive


def test_a_lock_released_by_the_parent_is_free_although_the_child_lives(tmp_path, start, children):
    script = f"""{FORK}
    from slipstream.store.lock import FileLock
    with FileLock(sys.argv[1]):
        fork()
    say("released")
    sys.stdin.readline()
    """
    holder = start(script, tmp_path / ".lock")
    lines = {holder.stdout.readline(), holder.stdout.readline()}
    assert "released\n" in lines
    children.extend(int(line) for line in lines - {"released\n"})
    with FileLock(tmp_path / ".lock"):
        os.kill(children[0], 0)


def test_a_child_cannot_release_or_hold_the_lock_of_its_parent(tmp_path, start):
    script = """
    import os, sys
    from slipstream.errors import LockedError
    from slipstream.store.lock import FileLock
    lock = FileLock(sys.argv[1])
    lock.acquire()
    if os.fork() == 0:
        print(lock.held)
        lock.release()
        try:
            lock.acquire()
        except LockedError as error:
            print("locked by my parent" if f"process {os.getppid()} on" in str(error) else error, flush=True)
        os._exit(0)
    os.wait()
    print(lock.held)
    """
    output, _ = start(script, tmp_path / ".lock").communicate(timeout=60)
    assert output.splitlines() == ["False", "locked by my parent", "True"]


def test_litter_of_a_killed_writer_is_swept_although_its_child_lives(tmp_path, start, children):
    script = f"""{FORK}
    from slipstream.store.local import atomic_write
    with atomic_write(sys.argv[1]) as file:
        file.write(b"unfinished")
        fork()
        sys.stdin.readline()
    """
    writer = start(script, tmp_path / "file")
    children.append(int(writer.stdout.readline()))
    assert sweep(tmp_path) == []
    writer.kill()
    writer.wait()
    assert len(sweep(tmp_path)) == 1
    os.kill(children[0], 0)


def test_a_child_forked_by_another_thread_in_the_middle_of_opening_does_not_keep_the_lock(tmp_path, start, children):
    """The instant between opening a file and registering it, made long."""
    script = f"""{FORK}
    import threading
    from pathlib import Path
    from slipstream.store.lock import LockableFile, open_private, try_lock
    opened, forked, locked = threading.Event(), threading.Event(), threading.Event()

    def make_file(descriptor):
        opened.set()
        forked.wait()
        return LockableFile(descriptor)

    def work():
        file = open_private(Path(sys.argv[1]), os.O_RDWR | os.O_CREAT, make_file)
        assert try_lock(file)
        locked.set()
        threading.Event().wait()

    threading.Thread(target=work, daemon=True).start()
    opened.wait()
    fork()
    forked.set()
    locked.wait()
    say("locked")
    sys.stdin.readline()
    """
    writer = start(script, tmp_path / ".slipstream-0123456789abcdef.tmp")
    lines = {writer.stdout.readline(), writer.stdout.readline()}
    assert "locked\n" in lines
    children.extend(int(line) for line in lines - {"locked\n"})
    assert sweep(tmp_path) == []
    writer.kill()
    writer.wait()
    assert len(sweep(tmp_path)) == 1
    os.kill(children[0], 0)


def test_a_child_cannot_write_into_the_file_of_its_parent(tmp_path, start):
    script = """
    import os, sys
    from slipstream.store.local import atomic_write
    with atomic_write(sys.argv[1]) as file:
        file.write(b"parent")
        if os.fork() == 0:
            try:
                file.write(b"child")
            except ValueError:
                print("refused", flush=True)
            os._exit(0)
        os.wait()
    """
    output, _ = start(script, tmp_path / "file").communicate(timeout=60)
    assert output == "refused\n"
    assert (tmp_path / "file").read_bytes() == b"parent"
