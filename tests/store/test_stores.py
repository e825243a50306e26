"""`LocalStore` and `MemoryStore` keep the contract of every store; and what only a folder can get wrong."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from slipstream.errors import CorruptFileError, LockedError, WriteError
from slipstream.store import local
from slipstream.store.base import FileInfo, MemoryStore, Range, Store
from slipstream.store.folder import LocalStore
from slipstream.store.lock import FileLock
from tests.contracts.store import NewStore, StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    def new_store(self, tmp_path_factory: pytest.TempPathFactory) -> NewStore:
        def make() -> Store:
            # The folder itself is created by the store.
            return LocalStore(tmp_path_factory.mktemp("store") / "folder")

        return make


class TestLocalStoreWithoutHardLinks(StoreContract):
    """As on exFAT: a lock keeps writers apart."""

    between_processes = False  # the other processes have links

    @pytest.fixture
    def new_store(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> NewStore:
        def refuse(source: object, target: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        def make() -> Store:
            monkeypatch.setattr(os, "link", refuse)
            return LocalStore(tmp_path_factory.mktemp("store"))

        return make


class TestMemoryStore(StoreContract):
    between_processes = False

    @pytest.fixture
    def new_store(self, tmp_path_factory: pytest.TempPathFactory) -> NewStore:
        return MemoryStore


def test_without_hard_links_a_writer_waits_for_the_one_that_is_publishing(tmp_path, monkeypatch):
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(local, "PUBLISH_TIMEOUT_S", 0.05)
    store = LocalStore(tmp_path)
    with (
        FileLock(tmp_path / local.PUBLISH_LOCK),
        pytest.raises(LockedError, match=rf"pid {os.getpid()}\) after waiting"),
    ):
        store.put_new("a", b"")
    assert store.list() == []


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def everything_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_no_temporary_file_stays(store):
    store.put_new("folder/a", b"content")
    with pytest.raises(FileExistsError):
        store.put_new("folder/a", b"content")
    assert everything_in(store.folder) == ["folder", "folder/a"]


def test_temporary_files_are_not_objects(store):
    store.put_new("a", b"")
    (store.folder / ".slipstream-0123456789abcdef.tmp").write_bytes(b"unfinished")
    assert [info.name for info in store.list()] == ["a"]


def test_a_link_that_leads_out_of_the_folder_is_refused_and_not_listed(store, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_bytes(b"secret")
    store.put_new("a", b"")
    (store.folder / "out").symlink_to(tmp_path / "secret")
    (store.folder / "key").symlink_to(tmp_path / "secret" / "key")
    for use in (
        lambda: store.get("out/key"),
        lambda: store.get("key"),
        lambda: store.get_ranges("key", [Range(0, 1)]),
        lambda: store.put_new("out/new", b""),
        lambda: store.put_file("out/new", tmp_path / "secret" / "key"),
        lambda: store.delete("out/key"),
        lambda: store.list("out/"),
    ):
        with pytest.raises(ValueError, match="leads out of .* through a symbolic link"):
            use()
    assert [info.name for info in store.list()] == ["a"]
    assert everything_in(tmp_path / "secret") == ["key"]


def test_deleting_a_link_deletes_the_link_and_not_what_it_leads_to(store, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    store.put_new("a", b"")
    (store.folder / "key").symlink_to(tmp_path / "secret")
    store.delete("key")
    assert everything_in(store.folder) == ["a"]
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_a_link_inside_the_folder_is_an_object(store):
    store.put_new("a", b"content")
    (store.folder / "link").symlink_to("a")
    (store.folder / "dangling").symlink_to("absent")
    assert store.get("link") == b"content"
    assert store.list() == [FileInfo("a", 7), FileInfo("link", 7)]
    with pytest.raises(FileExistsError):
        store.put_new("dangling", b"")
    assert not (store.folder / "absent").exists()


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = LocalStore(tmp_path / "link")
    store.put_new("folder/a", b"content")
    assert store.get("folder/a") == b"content"
    assert [info.name for info in store.list("folder/")] == ["folder/a"]


def test_a_pipe_in_the_folder_is_not_an_object_and_nobody_waits_for_it(store):
    store.put_new("a", b"")
    os.mkfifo(store.folder / "pipe")
    assert [info.name for info in store.list()] == ["a"]
    with pytest.raises(CorruptFileError, match="is a FIFO"):
        store.get("pipe")


def test_an_object_where_a_folder_should_be_is_an_error_that_names_the_file(store):
    store.put_new("a", b"")
    with pytest.raises(WriteError, match="cannot write .*/store/a/b"):
        store.put_new("a/b", b"")
    store.put_new("folder/a", b"")
    with pytest.raises(FileExistsError, match="folder"):
        store.put_new("folder", b"")


def test_a_local_file_is_linked_and_not_copied_where_that_is_possible(store, tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    store.put_file("a", tmp_path / "file")
    assert (store.folder / "a").samefile(tmp_path / "file")


def test_a_link_to_a_local_file_is_followed(store, tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    store.put_file("a", tmp_path / "link")
    assert not (store.folder / "a").is_symlink()
    assert store.get("a") == b"content"


def test_the_data_of_a_new_object_is_on_disk_before_its_name_and_the_folder_after_it(store, tmp_path, monkeypatch):
    store.put_new("first", b"")
    (tmp_path / "file").write_bytes(b"content")
    events: list[str] = []
    sync = os.fsync
    link = os.link

    def record_sync(descriptor: int) -> None:
        events.append("sync folder" if Path(f"/dev/fd/{descriptor}").is_dir() else "sync file")
        sync(descriptor)

    def record_link(source: Path, target: Path) -> None:
        events.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "link", record_link)
    store.put_new("a", b"content")
    store.put_file("b", tmp_path / "file")
    assert events == ["sync file", "link", "sync folder"] * 2


def test_kill_9_at_any_instant_leaves_complete_objects_only(store):
    script = """
        import sys
        from slipstream.store.folder import LocalStore
from slipstream.store.lock import FileLock
        store = LocalStore(sys.argv[1])
        first = len(store.list())
        for number in range(first, 1_000_000):
            store.put_new(f"{number}", bytes([number % 256]) * 300_000)
            print(number, flush=True)
    """
    for _ in range(12):
        command = [sys.executable, "-c", textwrap.dedent(script), str(store.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.kill()
            rest = process.stdout.read().split()
        found = store.list()
        assert all(info.size_bytes == 300_000 for info in found)
        for info in found[-3:]:
            assert store.get(info.name) == bytes([int(info.name) % 256]) * 300_000
        # What the process reported is durable.
        assert {info.name for info in found} >= set(rest)
