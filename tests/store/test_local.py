"""Durable, atomic writes: the whole new file or the old one, and no litter."""

import contextlib
import errno
import fcntl
import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from slipstream.errors import CorruptFileError, DiskFullError, WriteError
from slipstream.store.local import atomic_write, open_regular, sweep


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".slipstream-")]


@pytest.fixture
def start():
    """Start Python processes whose output can be read, and see them gone at the end."""
    with contextlib.ExitStack() as stack:

        def start(script: str, *arguments: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        yield start


def test_a_file_appears_whole_when_the_block_ends_and_not_before(tmp_path):
    path = tmp_path / "new"
    with atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        file.write(b" and half")
    assert path.read_bytes() == b"half and half"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_in_the_block_keeps_the_old_file_and_leaves_no_litter(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), atomic_write(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert leftovers(tmp_path) == []


def test_missing_folders_are_made(tmp_path):
    with atomic_write(tmp_path / "a" / "b" / "file") as file:
        file.write(b"x")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"x"


def test_a_link_is_followed_and_stays_a_link(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_the_permissions_of_a_replaced_file_are_kept(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with atomic_write(path) as file:
        file.write(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_file_gets_the_permissions_that_open_would_give(tmp_path):
    (tmp_path / "ordinary").write_bytes(b"")
    with atomic_write(tmp_path / "ours") as file:
        file.write(b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_a_name_of_the_greatest_length_can_be_written(tmp_path):
    with atomic_write(tmp_path / ("n" * 255)) as file:
        file.write(b"x")
    assert (tmp_path / ("n" * 255)).exists()


def test_a_folder_in_the_way_is_an_error_that_names_it(tmp_path):
    with pytest.raises(WriteError, match=f"^cannot write {tmp_path}: Is a directory$"), atomic_write(tmp_path):
        pytest.fail("the block must not run")


def test_a_file_where_a_folder_should_be_is_an_error_that_names_the_target(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(WriteError, match="cannot write .*/file/child"), atomic_write(tmp_path / "file" / "child"):
        pytest.fail("the block must not run")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "absent", "/nowhere"), TimeoutError("no batch"), ConnectionResetError("gone")]
)
def test_errors_of_whoever_produces_the_data_are_passed_on_unchanged(tmp_path, error):
    with pytest.raises(type(error)) as caught, atomic_write(tmp_path / "file"):
        raise error
    assert caught.value is error
    assert leftovers(tmp_path) == []


def test_a_missing_input_in_the_same_folder_is_not_taken_for_a_failed_write(tmp_path):
    with pytest.raises(FileNotFoundError, match="input"), atomic_write(tmp_path / "file"):
        (tmp_path / "input").read_bytes()


def test_a_path_through_a_file_is_an_error_that_names_the_target(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(WriteError, match="cannot write .*/file/a/b/c"),
        atomic_write(tmp_path / "file" / "a" / "b" / "c"),
    ):
        pytest.fail("the block must not run")


def test_pipes_and_devices_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WriteError, match="exists and is not a regular file"), atomic_write(tmp_path / "pipe"):
        pytest.fail("the block must not run")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_owner_of_a_replaced_file_is_kept(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    os.chown(path, 65534, 65534)
    path.chmod(0o600)
    with atomic_write(path) as file:
        file.write(b"new")
    assert (path.stat().st_uid, path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (65534, 65534, 0o600)


@pytest.mark.parametrize("ending", ["sys.exit(0)", "pass", "raise ValueError"])
def test_a_child_forked_inside_the_block_leaves_the_file_to_its_parent(tmp_path, start, ending):
    script = f"""
        import os, sys
        from slipstream.store.local import atomic_write
        child = None
        try:
            with atomic_write(sys.argv[1]) as file:
                file.write(b"first ")
                child = os.fork()
                if child == 0:
                    file.write(b"")
                    {ending}
                else:
                    os.waitpid(child, 0)
                    file.write(b"second")
        except ValueError:
            pass
        if child:
            print(open(sys.argv[1]).read())
    """
    output, _ = start(script, tmp_path / "file").communicate(timeout=60)
    assert output == "first second\n"
    assert leftovers(tmp_path) == []


def test_a_folder_that_cannot_be_flushed_is_noticed_before_anything_is_replaced(tmp_path, start):
    folder = tmp_path / "unreadable"
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    folder.chmod(0o333)
    for parent in (folder.parent, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    script = """
        import os, sys
        from slipstream.store.local import atomic_write
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            with atomic_write(sys.argv[1]) as file:
                file.write(b"new")
        except OSError as error:
            print(type(error).__name__, error)
    """
    output, _ = start(script, folder / "file").communicate(timeout=60)
    folder.chmod(0o755)
    assert output == f"WriteError cannot write {folder / 'file'}: Permission denied\n"
    assert (folder / "file").read_bytes() == b"old"


def test_a_file_size_limit_is_a_disk_full_error_and_the_old_file_stays(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with (
            pytest.raises(DiskFullError, match=f"^cannot write {path}: File too large$") as caught,
            atomic_write(path) as file,
        ):
            file.write(bytes(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small tmpfs needs root on Linux")
def test_a_full_disk_is_a_disk_full_error_and_the_old_file_stays(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=False, capture_output=True
    ).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        (disk / "file").write_bytes(b"old")
        with pytest.raises(DiskFullError, match="No space left on device"), atomic_write(disk / "file") as file:
            file.write(bytes(1_000_000))
        assert (disk / "file").read_bytes() == b"old"
        assert leftovers(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("nbytes", [0, 5, 3_000_000])
@pytest.mark.parametrize("expected_bytes", [0, 2_000_000, 1 << 60])
def test_a_file_has_the_size_of_its_content_whatever_was_expected(tmp_path, nbytes, expected_bytes):
    path = tmp_path / "file"
    content = os.urandom(nbytes)
    with atomic_write(path, expected_bytes=expected_bytes) as file:
        file.write(content)
    assert path.read_bytes() == content
    # No blocks are left beyond the end of the file.
    assert path.stat().st_blocks * 512 <= nbytes + 64 * 1024


def test_space_that_cannot_be_reserved_does_not_fail_a_write_that_fits(tmp_path):
    path = tmp_path / "file"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, limits[1]))
    try:
        with atomic_write(path, expected_bytes=2_000_000) as file:
            file.write(bytes(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == bytes(1_000_000)


def test_a_folder_without_write_permission_is_an_error_that_names_the_file(tmp_path, start):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    script = """
        import os, sys
        from slipstream.store.local import atomic_write
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            with atomic_write(sys.argv[1]): pass
        except PermissionError as error:
            print("PermissionError", error)
        except OSError as error:
            print(type(error).__name__, error)
    """
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    output, _ = start(script, folder / "file").communicate()
    assert output == f"WriteError cannot write {folder / 'file'}: Permission denied\n"


def test_litter_of_a_killed_process_is_swept_and_a_living_writer_is_left_alone(tmp_path, start):
    script = """
        import sys, time
        from slipstream.store.local import atomic_write
        with atomic_write(sys.argv[1]) as file:
            file.write(b"unfinished"); file.flush()
            print("writing", flush=True)
            time.sleep(60)
    """
    dead, living = start(script, tmp_path / "dead"), start(script, tmp_path / "living")
    for process in (dead, living):
        assert process.stdout.readline() == "writing\n"
    dead.kill()
    dead.wait()
    assert len(leftovers(tmp_path)) == 2
    assert len(sweep(tmp_path)) == 1
    assert len(leftovers(tmp_path)) == 1
    living.kill()
    living.wait()
    assert len(sweep(tmp_path)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == []


def test_the_first_write_of_a_process_into_a_folder_sweeps_it(tmp_path):
    (tmp_path / ".slipstream-0123456789abcdef.tmp").write_bytes(b"litter")
    (tmp_path / ".slipstream-notes.txt").write_bytes(b"not litter")
    with atomic_write(tmp_path / "file") as file:
        file.write(b"x")
    assert leftovers(tmp_path) == [".slipstream-notes.txt"]


def test_a_writer_whose_file_was_swept_before_it_was_locked_starts_again(tmp_path, monkeypatch):
    swept: list[Path] = []
    lock = fcntl.flock

    def sweep_first(descriptor: int, operation: int) -> None:
        if not swept:
            swept.extend(tmp_path.glob(".slipstream-*.tmp"))
            swept[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    with atomic_write(tmp_path / "file") as file:
        file.write(b"survived")
    assert swept
    assert (tmp_path / "file").read_bytes() == b"survived"


def test_data_is_flushed_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    events: list[str] = []
    sync, replace = os.fsync, Path.replace

    def record_sync(descriptor: int) -> None:
        events.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        sync(descriptor)

    def record_replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_replace)
    with atomic_write(tmp_path / "file") as file:
        file.write(b"x")
    assert events == ["sync file", "rename", "sync folder"]


def test_kill_9_at_any_instant_leaves_the_old_file_or_the_new_one(tmp_path, start):
    script = """
        import sys
        from slipstream.store.local import atomic_write
        for round in range(1_000_000):
            with atomic_write(sys.argv[1]) as file:
                file.write(bytes([round % 256]) * 300_000)
            print(round, flush=True)
    """
    path = tmp_path / "file"
    last_durable = -1
    for attempt in range(25):
        process = start(script, path)
        process.stdout.readline()
        time.sleep(0.002 * attempt)
        process.send_signal(signal.SIGKILL)
        rounds = process.stdout.read().split()
        process.wait()
        last_durable = int(rounds[-1]) if rounds else 0
        content = path.read_bytes()
        assert len(content) == 300_000
        assert content == content[:1] * 300_000
        assert content[0] in (last_durable % 256, (last_durable + 1) % 256)


def test_a_regular_file_is_opened_through_links(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"


def test_a_missing_file_is_told_apart_from_a_damaged_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        open_regular(tmp_path / "absent")
    (tmp_path / "dangling").symlink_to("absent")
    with pytest.raises(FileNotFoundError, match="dangling"):
        open_regular(tmp_path / "dangling")


def test_anything_but_a_regular_file_is_refused_immediately(tmp_path, start):
    """In a process that can be killed: opening a FIFO the usual way waits for a writer for ever."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    script = """
        import socket, sys
        from slipstream.errors import CorruptFileError
        from slipstream.store.local import open_regular
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("socket")
        for path in ("fifo", "link", "socket", "/dev/zero", "/dev/tty", "."):
            try:
                open_regular(path)
            except CorruptFileError as error:
                print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "fifo: is a FIFO, expected a file",
        "link: is a FIFO, expected a file",
        "socket: is a socket, expected a file",
        "/dev/zero: is a character device, expected a file",
        "/dev/tty: is a character device, expected a file",
        ".: is a folder, expected a file",
    ]


def test_a_file_replaced_by_a_pipe_just_before_it_is_opened_is_refused_without_waiting(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    os_open = os.open

    def replace_first(name: object, flags: int, *arguments: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return os_open(path, flags, *arguments)

    monkeypatch.setattr(os, "open", replace_first)
    with pytest.raises(CorruptFileError, match="is a FIFO"):
        open_regular(path)
