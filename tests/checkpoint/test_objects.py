"""Checkpoints in object stores: committed whole, uploaded in the background, read by ranges."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import AsyncCheckpointSaver, CheckpointManager, Thin, load_checkpoint, write_container
from slipstream.checkpoint import commits, finding
from slipstream.checkpoint.commits import CommittedRun
from slipstream.checkpoint.inspect import inspect_checkpoint, inspect_folder
from slipstream.checkpoint.retention import RetentionPolicy
from slipstream.checkpoint.verify import verify_checkpoint, verify_folder
from slipstream.errors import (
    ConfigurationError,
    CorruptFileError,
    FormatVersionError,
    StoreError,
    WriterConflictError,
)
from slipstream.store.base import FileInfo, MemoryStore, Store
from slipstream.store.urls import as_path, open_store
from tests.proxy import serving_proxy
from tests.s3 import SECRET

WAIT_S = 60


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    name = re.sub(r"\W+", "-", request.node.name)
    return f"memory://{name}/run"


def state(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "policy": torch.randn(100, 30, generator=generator),
        "optimizer": {"step": number, "moments": torch.randn(200, 30, generator=generator)},
    }


def assert_same(found: Any, number: int) -> None:
    expected = state(number)
    assert torch.equal(found["policy"], expected["policy"])
    assert found["optimizer"]["step"] == number
    assert torch.equal(found["optimizer"]["moments"], expected["optimizer"]["moments"])


def save(url: str, folder: Path, *numbers: int, **settings: Any) -> None:
    """Save checkpoints, each uploaded before the next."""
    with CheckpointManager(folder, checkpoint_url=url, **settings) as manager:
        for number in numbers:
            manager.save(number, state(number), {"reward": float(number)}).result()
            assert manager.wait_uploaded(WAIT_S)


def names(store: Store, prefix: str) -> list[str]:
    return [info.name for info in store.list(prefix)]


@pytest.mark.parametrize("scheme", ["memory", "file", "s3"])
def test_a_run_is_uploaded_and_restored_from_its_url(scheme, tmp_path, request, url):
    if scheme == "file":
        url = f"file://{tmp_path}/store/run"
    if scheme == "s3":
        url = f"{request.getfixturevalue('s3')}/runs/{os.getpid()}"
    save(url, tmp_path / "run", 1, 2, 3, keep_last=2)
    with CheckpointManager(url) as elsewhere:
        assert elsewhere.steps() == [2, 3]
        assert elsewhere.latest() == 3
        restored = elsewhere.restore()
    assert (restored.step, restored.metrics) == (3, {"reward": 3.0})
    assert_same(restored.state, 3)
    assert_same(load_checkpoint(url), 3)
    assert_same(load_checkpoint(f"{url}/checkpoint_iter_2.slip"), 2)
    assert torch.equal(load_checkpoint(url, keys="policy")["policy"], state(3)["policy"])
    with pytest.raises(FileNotFoundError, match="no such object"):
        load_checkpoint(f"{url}/checkpoint_iter_1.slip")
    with pytest.raises(FileNotFoundError, match="no checkpoint at this URL"):
        load_checkpoint(f"{url}/elsewhere")
    assert [str(listing.path) for listing in inspect_folder(url).checkpoints] == [
        f"{url}/checkpoint_iter_2.slip",
        f"{url}/checkpoint_iter_3.slip",
    ]
    assert {tensor.name for tensor in inspect_checkpoint(f"{url}/checkpoint_iter_3.slip").tensors} == {
        "policy",
        "optimizer/moments",
    }
    assert verify_checkpoint(f"{url}/checkpoint_iter_3.slip").is_sound
    assert all(result.is_sound for result in verify_folder(url))


def test_a_manager_of_a_url_keeps_on_disk_only_what_is_not_uploaded(url):
    with CheckpointManager(url, keep_last=2) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number)).result()
            assert manager.wait_uploaded(WAIT_S)
        assert list(manager.folder.glob("*.slip")) == []
        assert manager.steps() == [2, 3]
        assert_same(manager.restore(2).state, 2)
        # Numbers continue above those in the store, so a step that is saved again is the newest.
        manager.save(1, state(7)).result()
        assert manager.wait_uploaded(WAIT_S)
        assert manager.latest() == 1
        assert_same(manager.restore().state, 7)


def test_what_one_machine_uploaded_another_one_continues(url, tmp_path):
    save(url, tmp_path / "first", 1, 2)
    with CheckpointManager(tmp_path / "second", checkpoint_url=url) as manager:
        assert_same(manager.restore().state, 2)
        manager.save(3, state(3)).result()
        assert manager.wait_uploaded(WAIT_S)
    assert CheckpointManager(url).steps() == [1, 2, 3]
    assert names(open_store(url), "commits/")[-1] == "commits/00000000000000000003.json"


def test_a_checkpoint_larger_than_a_piece_is_uploaded_in_pieces_and_read_across_them(url, tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "PIECE_BYTES", 5000)
    save(url, tmp_path / "run", 1)
    assert max(info.size_bytes for info in open_store(url).list("data/")) == 5000
    assert_same(load_checkpoint(url), 1)
    assert_same(pickle.loads(pickle.dumps(CheckpointManager(url).restore().state)), 1)
    assert all(result.is_sound for result in verify_folder(url))


def test_the_policy_holds_in_the_store_and_data_goes_after_a_day(url, tmp_path, monkeypatch):
    objects: dict[str, tuple[bytes, float]] = {}
    store = MemoryStore(objects)
    for module in (commits, finding):
        monkeypatch.setattr(module, "open_store", lambda url: store)
    save(url, tmp_path / "run", 1, 2, 3, 4, 5, keep_last=2, keep_best=("reward", "min"))
    assert CheckpointManager(url).steps() == [1, 4, 5]
    # Data of deleted checkpoints stays for a day: nobody knows whether an upload is about to refer to it.
    assert len(names(store, "data/")) == 5
    for name, (content, modified_s) in list(objects.items()):
        if name.startswith("data/"):
            objects[name] = (content, modified_s - 2 * 24 * 3600)
    save(url, tmp_path / "run", 6, keep_last=2, keep_best=("reward", "min"))
    assert CheckpointManager(url).steps() == [1, 5, 6]
    assert len(names(store, "data/")) == 3
    assert all(result.is_sound for result in verify_folder(url))


def test_the_commit_goes_before_its_data(url, tmp_path):
    events = []

    class Recording(MemoryStore):
        def delete(self, name: str) -> None:
            events.append(name.partition("/")[0])
            super().delete(name)

    save(url, tmp_path / "run", 1, 2, 3)
    objects = {}
    for info in open_store(url).list():
        objects[info.name] = (open_store(url).get(info.name), 0.0 if info.name.startswith("data/") else 1e9)
    run = CommittedRun(as_path(url), Recording(objects))
    assert run.prune(RetentionPolicy(keep_last=1)) == [1, 2]
    assert events == ["commits", "commits", "data", "data"]
    assert len(objects) == 2


def test_nothing_is_collected_while_a_commit_cannot_be_read(url, tmp_path):
    save(url, tmp_path / "run", 1)
    objects = {}
    for info in open_store(url).list():
        objects[info.name] = (open_store(url).get(info.name), 0.0)
    objects["commits/00000000000000000009.json"] = (b'{"version": 2}', 1e9)
    objects["data/" + "0" * 32] = (b"of the newer version", 0.0)
    run = CommittedRun(as_path(url), MemoryStore(objects))
    assert run.prune(RetentionPolicy(keep_last=1)) == []
    assert "data/" + "0" * 32 in objects


def test_another_checkpoint_of_the_same_number_is_a_conflict_and_not_taken_for_an_upload(url, tmp_path):
    save(url, tmp_path / "one", 1)
    with CheckpointManager(tmp_path / "two") as manager:
        manager.save(100, state(100)).result()
    manager = CheckpointManager(tmp_path / "two", checkpoint_url=url)
    with pytest.raises(WriterConflictError, match="another process is writing to this run"):
        manager.wait_uploaded(WAIT_S)
    manager.close()
    assert_same(CheckpointManager(tmp_path / "two").restore().state, 100)
    assert_same(load_checkpoint(url), 1)


def test_data_of_an_interrupted_upload_is_compared_before_it_is_used(url, tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        path = manager.save(1, state(1)).result().path
    whole: dict[str, tuple[bytes, float]] = {}
    committed, _ = CommittedRun(as_path(url), MemoryStore(whole)).upload(Path(path))
    damaged = {}
    for piece in committed.pieces:
        damaged[piece.name] = (bytes(piece.size_bytes), 0.0)
    CommittedRun(as_path(url), MemoryStore(damaged)).upload(Path(path))
    assert {name: content for name, (content, _) in damaged.items()} == {
        name: content for name, (content, _) in whole.items()
    }


UPLOADER = """
    import os, signal, sys, torch
    from slipstream import CheckpointManager
    from slipstream.checkpoint import commits, finding
    from slipstream.checkpoint.commits import CommittedRun

    def die(self, *arguments):
        if sys.argv[3] == "after":
            commit(self, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    commit = CommittedRun._commit
    CommittedRun._commit = die
    manager = CheckpointManager(sys.argv[1], checkpoint_url=sys.argv[2])
    manager.save(1, {"policy": torch.arange(1000.0)}).result()
    manager.wait_uploaded(60)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_uploader_that_is_killed_leaves_nothing_half_and_the_next_one_continues(when, tmp_path, s3):
    url = f"{s3}/killed-{when}-{os.getpid()}"
    store = open_store(url)
    command = [sys.executable, "-c", textwrap.dedent(UPLOADER), str(tmp_path / "run"), url, when]
    assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL
    (data,) = store.list("data/")
    assert len(names(store, "commits/")) == (when == "after")
    if when == "before":
        with pytest.raises(FileNotFoundError, match="no checkpoint at this URL"):
            load_checkpoint(url)
    with CheckpointManager(tmp_path / "run", checkpoint_url=url) as manager:
        assert manager.wait_uploaded(WAIT_S)
    assert torch.equal(load_checkpoint(url)["policy"], torch.arange(1000.0))
    assert store.list("data/") == [data]
    assert names(store, "commits/") == ["commits/00000000000000000001.json"]


def test_a_commit_whose_reply_is_lost_is_not_taken_for_that_of_another_writer(tmp_path, s3, monkeypatch):
    with serving_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        url = f"{s3}/lost-{os.getpid()}"
        with CheckpointManager(tmp_path / "run", checkpoint_url=url) as manager:
            # More than the store repeats by itself: the whole upload is repeated.
            proxy.drop_replies(6, method="PUT", part="commits/")
            manager.save(1, state(1)).result()
            while not manager.wait_uploaded(WAIT_S):
                assert manager.get_stats()["upload_failed_count"]
            assert proxy.num_dropped == 6
        assert_same(load_checkpoint(url), 1)


def test_of_two_writers_one_fails_and_the_checkpoints_of_the_other_stay(url, tmp_path):
    first = CheckpointManager(tmp_path / "first", checkpoint_url=url)
    second = CheckpointManager(tmp_path / "second", checkpoint_url=url)
    # Both have looked into the empty store before either of them commits.
    assert first.steps() == second.steps() == []
    for manager in (first, second):
        manager.save(1, state(len(str(manager.folder)))).result()
    loser = None
    for manager in (first, second):
        try:
            assert manager.wait_uploaded(WAIT_S)
        except WriterConflictError as error:
            assert "another process is writing to this run" in str(error)
            assert url in str(error)
            loser = manager
    assert loser is not None
    with pytest.raises(WriterConflictError, match="another process is writing to this run"):
        loser.save(2, state(2))
    # What it saved is on its disk.
    assert loser.path(1).exists()
    assert len(CheckpointManager(url).steps()) == 1
    first.close()
    second.close()


class Broken:
    """A store that is not available until it is repaired."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_broken = True

    def __getattr__(self, name: str) -> Any:
        if self.is_broken:
            raise StoreError("memory://run: cannot be read (503 Service Unavailable)")
        return getattr(self.store, name)


def test_an_unavailable_store_delays_and_fails_nothing_and_gets_everything_when_it_is_back(
    url, tmp_path, monkeypatch, caplog
):
    broken = Broken(open_store(url))
    monkeypatch.setattr(commits, "open_store", lambda url: broken)
    with CheckpointManager(tmp_path / "run", keep_last=2, checkpoint_url=url) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number)).result()
        assert not manager.wait_uploaded(WAIT_S)
        assert manager.steps() == [2, 3]
        assert_same(manager.restore().state, 3)
        assert "not available" in manager.describe_uploads()
        assert manager.get_stats()["upload_failed_count"] >= 1
        broken.is_broken = False
        manager.save(4, state(4)).result()
        while not manager.wait_uploaded(WAIT_S):
            pass
        assert manager.get_stats()["upload_count"] == 2
        assert manager.get_stats()["upload_pending"] == 0
    monkeypatch.undo()
    assert CheckpointManager(url).steps() == [3, 4]
    outages = [record for record in caplog.records if "503 Service Unavailable" in record.getMessage()]
    uploads = [record for record in outages if record.name == "slipstream.store.upload"]
    assert len(uploads) == 1, "an outage is logged once"


def test_at_the_end_what_was_not_uploaded_is_reported_and_the_next_start_uploads_it(url, tmp_path, monkeypatch, caplog):
    broken = Broken(open_store(url))
    monkeypatch.setattr(commits, "open_store", lambda url: broken)
    with CheckpointManager(tmp_path / "run", checkpoint_url=url) as manager:
        manager.save(1, state(1)).result()
        assert not manager.wait_uploaded(WAIT_S)
    assert "1 file not uploaded: checkpoint_iter_1.slip; the next start uploads them" in caplog.text
    broken.is_broken = False
    with CheckpointManager(tmp_path / "run", checkpoint_url=url) as manager:
        assert manager.wait_uploaded(WAIT_S)
    assert CheckpointManager(url).steps() == [1]


def test_a_store_that_cannot_be_read_is_not_taken_for_an_empty_one(url, tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "open_store", lambda url: Broken(open_store(url)))
    with CheckpointManager(tmp_path / "run", checkpoint_url=url) as manager, pytest.raises(StoreError, match="503"):
        manager.restore()


def test_a_process_that_ends_without_closing_uploads_first(tmp_path):
    script = """
        import sys, torch
        from slipstream import CheckpointManager
        manager = CheckpointManager(sys.argv[1], checkpoint_url=sys.argv[2])
        for step in range(3):
            manager.save(step, {"policy": torch.full((10,), step)})
    """
    url = f"file://{tmp_path}/store"
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run"), url], check=True, timeout=120)
    assert CheckpointManager(url).steps() == [0, 1, 2]


def test_thinning_is_for_the_folder_and_the_store_keeps_complete_checkpoints(url, tmp_path):
    save(url, tmp_path / "run", 1, 2, 3, thin=Thin(keep_full=1))
    restored = CheckpointManager(url).restore(1)
    assert restored.thinned == ()
    assert_same(restored.state, 1)


def test_a_damaged_file_is_restored_from_the_store(url, tmp_path):
    save(url, tmp_path / "run", 1, 2)
    path = tmp_path / "run" / "checkpoint_iter_2.slip"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with CheckpointManager(tmp_path / "run", checkpoint_url=url) as manager:
        assert_same(manager.restore().state, 2)


def damage(store: MemoryStore, prefix: str, content: bytes | None) -> str:
    """Replace the last object of a prefix, or delete it."""
    name = names(store, prefix)[-1]
    store.delete(name)
    if content is not None:
        store.put_new(name, content)
    return name


@pytest.mark.parametrize(
    ("content", "error", "problem"),
    [
        (b"garbage", CorruptFileError, "is not a commit"),
        (b"[]", CorruptFileError, "is not a commit"),
        (b"[" * 100_000, CorruptFileError, "is not a commit"),
        (b"{}", FormatVersionError, "has commit version None"),
        (b'{"version": 2}', FormatVersionError, "has commit version 2, this release reads 1"),
        (b'{"version": 1, "sequence": 9}', CorruptFileError, "says that its number is 9"),
        (b" " * (17 << 20), CorruptFileError, "expected at most"),
    ],
    ids=["garbage", "list", "deep", "empty", "version", "number", "huge"],
)
def test_a_commit_that_cannot_be_read_is_one_sentence_and_the_older_checkpoint_is_restored(
    content, error, problem, url, tmp_path, caplog
):
    save(url, tmp_path / "run", 1, 2)
    name = damage(open_store(url), "commits/", content)  # type: ignore[arg-type]
    run = CommittedRun(as_path(url))
    assert len(run.scan()) == 1
    (found,) = run.unreadable().values()
    assert isinstance(found, error)
    assert str(found).startswith(f"{url}/{name}: ")
    assert problem in str(found)
    assert "\n" not in str(found)
    assert len(str(found)) < 500
    assert_same(CheckpointManager(url).restore().state, 1)
    assert_same(load_checkpoint(url), 1)
    assert problem in caplog.text
    assert [result.is_sound for result in verify_folder(url)] == [False, True]
    assert list(inspect_folder(url).unreadable) == [as_path(f"{url}/{name}")]


@pytest.mark.parametrize(
    "change",
    [
        {"pieces": [["../../secret", 5]]},
        {"pieces": [["data/" + "0" * 32, -1]]},
        {"pieces": [["data/" + "0" * 32, 2**62]]},
        {"pieces": [["data/" + "0" * 32, True]]},
        {"pieces": []},
        {"pieces": "data"},
        {"metadata": None},
        {"metadata": {"step": "x", "metrics": {}, "time": 0.0}},
        {"metadata": {"step": 10**30, "metrics": {}, "time": 0.0}},
        {"identity": 5},
        {"thinned": [5]},
        {"sequence": True},
    ],
    ids=str,
)
def test_a_forged_commit_is_refused(change, url, tmp_path):
    save(url, tmp_path / "run", 1)
    store = open_store(url)
    document = json.loads(store.get("commits/00000000000000000001.json")) | change
    damage(store, "commits/", json.dumps(document).encode())  # type: ignore[arg-type]
    with pytest.raises(CorruptFileError, match=f"{url}: none of its 1 checkpoints is intact"):
        load_checkpoint(url)
    with pytest.raises(CorruptFileError):
        CheckpointManager(url).restore()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: None, "refers to data/[0-9a-f]+, which is missing"),
        (lambda content: content[:-1000], "is truncated: data/.*"),
        (lambda content: b"", "is truncated: data/.*"),
        (lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:], "checksum|not valid JSON"),
        (lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:], "do not match their checksum"),
    ],
    ids=["missing", "truncated", "empty", "damaged index", "damaged chunk"],
)
def test_damaged_data_is_found_and_the_older_checkpoint_is_restored(change, problem, url, tmp_path, caplog):
    save(url, tmp_path / "run", 1, 2)
    store = open_store(url)
    (piece,) = CommittedRun(as_path(url)).scan()[-1].pieces
    changed = change(store.get(piece.name))
    store.delete(piece.name)
    if changed is not None:
        store.put_new(piece.name, changed)
    with pytest.raises(CorruptFileError, match=rf"^{url}/checkpoint_iter_2.slip: .*({problem})"):
        load_checkpoint(f"{url}/checkpoint_iter_2.slip")
    assert_same(CheckpointManager(url).restore().state, 1)
    assert "restored step 1" in caplog.text
    results = {result.path.name: result for result in verify_folder(url)}
    assert not results["checkpoint_iter_2.slip"].is_sound
    assert results["checkpoint_iter_1.slip"].is_sound


def test_an_upload_repairs_data_of_the_wrong_size(url, tmp_path):
    save(url, tmp_path / "run", 1)
    store = open_store(url)
    (piece,) = store.list("data/")
    store.delete(piece.name)
    store.put_new(piece.name, b"truncated")
    damage(store, "commits/", None)  # type: ignore[arg-type]
    with CheckpointManager(tmp_path / "run", checkpoint_url=url) as manager:
        assert manager.wait_uploaded(WAIT_S)
    assert_same(load_checkpoint(url), 1)


def test_a_key_fetches_only_what_it_needs(s3, tmp_path, monkeypatch):
    large = {"policy": torch.randn(50_000), "critic": torch.randn(2_000_000), "encoder": torch.randn(2_000_000)}
    with serving_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        url = f"{s3}/ranges-{os.getpid()}"
        with CheckpointManager(tmp_path / "run", checkpoint_url=url) as manager:
            manager.save(1, large).result()
            assert manager.wait_uploaded(WAIT_S)
        # One piece and one commit; what is there already is listed.
        assert proxy.methods["PUT"] == 2
        size = (tmp_path / "run" / "checkpoint_iter_1.slip").stat().st_size
        assert size <= proxy.bytes_sent <= size + 5000
        proxy.reset()
        assert torch.equal(load_checkpoint(url, keys="policy")["policy"], large["policy"])
        assert proxy.bytes_received < 400_000 < size / 20
        assert proxy.num_requests <= 6
        proxy.reset()
        assert torch.equal(load_checkpoint(url)["encoder"], large["encoder"])
        assert size <= proxy.bytes_received <= size + 200_000


def test_credentials_are_in_no_file_message_or_object(s3, tmp_path, caplog, capfd):
    url = f"{s3}/secrets-{os.getpid()}"
    save(url, tmp_path / "run", 1)
    monkeyed = dict(os.environ)
    assert monkeyed["AWS_SECRET_ACCESS_KEY"] == SECRET
    with pytest.raises(ConfigurationError) as refused:
        CheckpointManager(f"s3://test:{SECRET}@bucket/run")
    with CheckpointManager(tmp_path / "other", checkpoint_url="s3://no-such-bucket/run") as manager:
        manager.save(1, state(1)).result()
        assert not manager.wait_uploaded(WAIT_S)
        shown = f"{manager.describe_uploads()} {manager.get_stats()}"
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    stored = b"".join(open_store(url).get(info.name) for info in open_store(url).list())
    captured = capfd.readouterr()
    everything = f"{caplog.text}{captured.out}{captured.err}{shown}{refused.value}{written!r}{stored!r}"
    assert SECRET not in everything
    assert "NoSuchBucket" in caplog.text


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"checkpoint_url": "memory://a/run", "differential": True}, "differential=True does not work with an object"),
        ({"checkpoint_url": "runs/a"}, "checkpoint_url is 'runs/a', expected a URL"),
        ({"checkpoint_url": "https://example.org/run"}, "https:// is not supported"),
        ({"folder": "memory://a/run", "checkpoint_url": "memory://b/run"}, "folder and checkpoint_url are both URLs"),
    ],
)
def test_settings_that_do_not_work_are_refused(settings, problem, tmp_path):
    with pytest.raises(ConfigurationError, match=problem):
        CheckpointManager(**{"folder": tmp_path, **settings})


def test_a_delta_in_a_folder_is_not_uploaded_and_a_copied_delta_is_refused(url, tmp_path):
    frozen = {"encoder": torch.randn(100_000), "step": 0}
    with CheckpointManager(tmp_path / "run", differential=True) as manager:
        for step in range(3):
            manager.save(step, {**frozen, "step": step}).result()
    with CheckpointManager(tmp_path / "run", checkpoint_url=url) as manager:
        assert manager.wait_uploaded(WAIT_S)
        assert manager.steps() == [0, 1, 2]
    stored = CheckpointManager(url).steps()
    assert 0 in stored
    assert stored != [0, 1, 2]
    open_store(url).put_file("copy.slip", tmp_path / "run" / "checkpoint_iter_2.slip")
    with pytest.raises(CorruptFileError, match="object stores do not support"):
        load_checkpoint(f"{url}/copy.slip")


def test_a_manager_with_another_policy_that_only_reads_deletes_nothing(tmp_path):
    url = f"file://{tmp_path}/store"
    with CheckpointManager(url, keep_last=None) as manager:
        for number in range(7):
            manager.save(number, state(number)).result()
    with CheckpointManager(url, keep_last=1) as reader:
        assert_same(reader.restore().state, 6)
    # An earlier process was killed before it uploaded this.
    save(f"file://{tmp_path}/other", tmp_path / "other-run", *range(20, 28), keep_last=1)
    left = next((tmp_path / "other-run").glob("*.slip"))
    left.rename(manager.folder / left.name)
    with CheckpointManager(url, keep_last=1) as reader:
        assert reader.wait_uploaded(WAIT_S)
    assert CheckpointManager(url).steps() == [*range(7), 27]


def test_a_pickled_manager_uploads_what_it_saves(url, tmp_path):
    for folder in (url, str(tmp_path / "run")):
        target = None if folder == url else f"{url}-of-a-folder"
        with CheckpointManager(folder, checkpoint_url=target) as manager:
            manager.save(1, state(1)).result()
            with pickle.loads(pickle.dumps(manager)) as copy:
                copy.save(2, state(2)).result()
                assert copy.wait_uploaded(WAIT_S)
        assert CheckpointManager(target or url).steps() == [1, 2]


def test_what_writes_files_refuses_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with AsyncCheckpointSaver() as saver, pytest.raises(ValueError, match=r"path is a URL \(s3://...\)"):
        saver.save_async(state(1), "s3://bucket/model.pt")
    with pytest.raises(ValueError, match=r"path is a URL \(s3://...\)"), write_container("s3://bucket/a.slip"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_plain_object_is_loaded_like_a_file(url, tmp_path):
    save(url, tmp_path / "run", 1)
    open_store(url).put_file("models/best.slip", tmp_path / "run" / "checkpoint_iter_1.slip")
    assert_same(load_checkpoint(f"{url}/models/best.slip"), 1)
    open_store(url).put_new("models/text.slip", b"something else, of more than a few bytes")
    with pytest.raises(CorruptFileError, match=f"{url}/models/text.slip: is not a Slipstream container"):
        load_checkpoint(f"{url}/models/text.slip")
    with pytest.raises(FileNotFoundError, match="absent.slip"):
        load_checkpoint(f"{url}/models/absent.slip")


def test_objects_of_others_beside_the_commits_are_ignored(url, tmp_path):
    save(url, tmp_path / "run", 1)
    store = open_store(url)
    for name in ("commits/notes.txt", "commits/1.json", "commits/99999999999999999999.json", "data/notes.txt"):
        store.put_new(name, b"notes")
    assert CheckpointManager(url).steps() == [1]
    run = CommittedRun(as_path(url))
    assert len(run.scan()) == 1
    assert run.unreadable() == {}
    assert set(run.identities()) == {1}


def test_the_modified_times_of_a_listing_do_not_matter_for_equality():
    assert FileInfo("a", 1, 5.0) == FileInfo("a", 1, time.time())
