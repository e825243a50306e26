"""Rollouts in object stores: one object each, uploaded in the background, read by ranges."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from slipstream import RolloutStorage, load_rollout
from slipstream.errors import CorruptFileError, StoreError
from slipstream.rollout import storage as storage_module
from slipstream.rollout import uploads
from slipstream.store.base import Store
from slipstream.store.urls import open_store
from tests.proxy import serving_proxy

WAIT_S = 60


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    name = re.sub(r"\W+", "-", request.node.name)
    return f"memory://{name}/rollouts"


def batch(number: int) -> TensorDict:
    generator = torch.Generator().manual_seed(number)
    return TensorDict({"observation": torch.randn(4, 8, 3, generator=generator)}, batch_size=[4, 8])


def is_same(found: Any, number: int) -> bool:
    return torch.equal(found["observation"], batch(number)["observation"])


@pytest.mark.parametrize("scheme", ["memory", "file", "s3"])
def test_rollouts_are_uploaded_and_loaded_from_their_url(scheme, url, tmp_path, request):
    if scheme == "file":
        url = f"file://{tmp_path}/store/rollouts"
    if scheme == "s3":
        url = f"{request.getfixturevalue('s3')}/rollouts/{os.getpid()}"
    with RolloutStorage(url) as storage:
        for number in (3, 1, 2):
            assert str(storage.save(batch(number), number)) == f"{url}/rollout_{number:06d}.slip"
            assert is_same(storage.load(number), number), "whether it is uploaded yet or not"
        assert storage.wait_uploaded(WAIT_S)
        assert storage.iterations() == [1, 2, 3]
        assert storage.get_stats()["upload_count"] == 3
    assert not list((tmp_path / "cache").rglob("*.slip"))
    elsewhere = RolloutStorage(url)
    assert [number for number, found in elsewhere if is_same(found, number)] == [1, 2, 3]
    assert is_same(load_rollout(f"{url}/rollout_000002.slip"), 2)
    part = load_rollout(f"{url}/rollout_000002.slip", steps=slice(2, 4))
    assert torch.equal(part["observation"], batch(2)["observation"][:, 2:4])
    with pytest.raises(FileNotFoundError, match=r"no rollout of iteration 9: there are 3, 1 to 3"):
        elsewhere.load(9)


def test_an_iteration_is_saved_once_unless_it_is_overwritten(url):
    with RolloutStorage(url) as storage:
        storage.save(batch(1), 1)
        assert storage.wait_uploaded(WAIT_S)
        with pytest.raises(FileExistsError, match=f"{url}/rollout_000001.slip"):
            storage.save(batch(2), 1)
        storage.save(batch(2), 1, overwrite=True)
        assert storage.wait_uploaded(WAIT_S)
    assert is_same(RolloutStorage(url).load(1), 2)


def test_the_oldest_are_deleted_from_the_store_by_age_and_not_by_iteration(url):
    with RolloutStorage(url, keep_last=2) as storage:
        for number in (7, 8, 3):
            storage.save(batch(number), number)
            assert storage.wait_uploaded(WAIT_S)
        assert storage.iterations() == [3, 8]
    size = open_store(url).list()[0].size_bytes
    with RolloutStorage(url, max_bytes=size + 10) as storage:
        storage.save(batch(9), 9)
        assert storage.wait_uploaded(WAIT_S)
        assert storage.iterations() == [9]


class Broken:
    """A store that is not available until it is repaired."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_broken = True

    def __getattr__(self, name: str) -> Any:
        if self.is_broken:
            raise StoreError("memory://run: cannot be read (503 Service Unavailable)")
        return getattr(self.store, name)


def test_an_unavailable_store_fails_no_save_and_the_next_start_uploads(tmp_path, monkeypatch, caplog):
    url = f"file://{tmp_path}/store"
    broken = Broken(open_store(url))
    monkeypatch.setattr(uploads, "open_store", lambda url: broken)
    with RolloutStorage(url) as storage:
        storage.save(batch(1), 1)
        assert not storage.wait_uploaded(WAIT_S)
        assert is_same(storage.load(1), 1)
        with pytest.raises(StoreError, match="503"):
            storage.iterations()
    assert "1 file not uploaded: rollout_000001.slip" in caplog.text
    broken.is_broken = False
    with RolloutStorage(url) as storage:
        assert storage.wait_uploaded(WAIT_S)
    assert is_same(load_rollout(f"{url}/rollout_000001.slip"), 1)


def test_a_store_that_stays_unavailable_does_not_fill_the_disk(tmp_path, monkeypatch, caplog):
    url = f"file://{tmp_path}/store"
    monkeypatch.setattr(storage_module, "MAX_WAITING", 2)
    monkeypatch.setattr(uploads, "open_store", lambda url: Broken(open_store(url)))
    with RolloutStorage(url) as storage:
        for number in (1, 2, 3):
            storage.save(batch(number), number)
        assert not storage.wait_uploaded(WAIT_S)
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*.slip")) == [
        "rollout_000002.slip",
        "rollout_000003.slip",
    ]
    assert "rollout_000001.slip: deleted before it was uploaded" in caplog.text


def test_a_rollout_of_another_writer_is_not_replaced(tmp_path, monkeypatch, caplog):
    url = f"file://{tmp_path}/store"
    with RolloutStorage(url) as storage:
        storage.save(batch(1), 1)
    # Another machine, which has not seen that.
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "other"))
    broken = Broken(open_store(url))
    monkeypatch.setattr(uploads, "open_store", lambda url: broken)
    with RolloutStorage(url) as storage:
        storage.save(batch(2), 1)
        assert not storage.wait_uploaded(WAIT_S)
    broken.is_broken = False
    with RolloutStorage(url) as storage:
        storage.wait_uploaded(WAIT_S)
    assert "exists with other content, and overwrite was not set" in caplog.text
    assert is_same(load_rollout(f"{url}/rollout_000001.slip"), 1)
    assert list((tmp_path / "other").rglob("rollout_000001.slip")), "what was not uploaded stays"


def test_a_part_of_a_rollout_fetches_only_what_it_needs(s3, tmp_path, monkeypatch):
    large = TensorDict(
        {"camera": torch.randint(0, 256, (64, 32, 1024), dtype=torch.uint8), "action": torch.randn(64, 32, 2)},
        batch_size=[64, 32],
    )
    with serving_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        url = f"{s3}/rollout-ranges-{os.getpid()}"
        with RolloutStorage(url) as storage:
            storage.save(large, 1)
            assert storage.wait_uploaded(WAIT_S)
        size = open_store(url).size_bytes("rollout_000001.slip")
        proxy.reset()
        found = load_rollout(f"{url}/rollout_000001.slip", keys=["action"])
        assert torch.equal(found["action"], large["action"])
        assert proxy.bytes_received < size / 10
        assert proxy.num_requests <= 5


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content[:-5], "is truncated or was appended to"),
        (lambda content: content[:20], "is truncated: it has 20 bytes"),
        (lambda content: b"", "is empty"),
        (lambda content: b"something else that is long enough", "is not a Slipstream container"),
        (lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:], "do not match their checksum"),
    ],
)
def test_a_damaged_object_is_one_sentence_that_names_the_url(change, problem, url):
    with RolloutStorage(url) as storage:
        storage.save(batch(1), 1)
        assert storage.wait_uploaded(WAIT_S)
    store = open_store(url)
    content = store.get("rollout_000001.slip")
    store.delete("rollout_000001.slip")
    store.put_new("rollout_000001.slip", change(content))
    with pytest.raises(CorruptFileError, match=rf"^{url}/rollout_000001.slip: .*{problem}"):
        load_rollout(f"{url}/rollout_000001.slip")
