"""Stores behind URLs keep the contract; and what only a network can get wrong."""

import itertools
import json
import os
import pickle
import sys

import pytest

from slipstream.errors import ConfigurationError, StoreError, WriteError
from slipstream.store.base import Range, Store
from slipstream.store.urls import ObjectPath, as_path, open_store
from tests.contracts.store import NewStore, StoreContract
from tests.proxy import serving_proxy
from tests.s3 import SECRET

numbers = itertools.count()


class TestS3Store(StoreContract):
    num_examples = 3  # each request takes some milliseconds

    @pytest.fixture
    def new_store(self, s3: str, tmp_path: object) -> NewStore:
        def make() -> Store:
            return open_store(f"{s3}/contract/{os.getpid()}-{next(numbers)}")

        return make


class TestMemoryUrl(StoreContract):
    between_processes = False

    @pytest.fixture
    def new_store(self, tmp_path_factory: pytest.TempPathFactory) -> NewStore:
        return lambda: open_store(f"memory://contract/{next(numbers)}")


class TestFileUrl(StoreContract):
    num_examples = 10

    @pytest.fixture
    def new_store(self, tmp_path_factory: pytest.TempPathFactory) -> NewStore:
        return lambda: open_store(f"file://{tmp_path_factory.mktemp('store')}/folder")


@pytest.fixture
def store(s3: str) -> Store:
    return open_store(f"{s3}/{os.getpid()}-{next(numbers)}")


def test_a_put_whose_reply_is_lost_has_succeeded(s3, monkeypatch):
    with serving_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(f"{s3}/lost-reply-{os.getpid()}")
        proxy.drop_replies(1, method="PUT")
        store.put_new("a", b"content")
        assert proxy.num_dropped == 1
        assert store.get("a") == b"content"


def test_a_put_whose_reply_is_lost_still_fails_if_another_writer_was_first(s3, monkeypatch):
    with serving_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        direct = open_store(f"{s3}/lost-race-{os.getpid()}")
        direct.put_new("a", b"of the other")
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(f"{s3}/lost-race-{os.getpid()}")
        proxy.drop_replies(1, method="PUT")
        with pytest.raises(FileExistsError):
            store.put_new("a", b"content")
        assert direct.get("a") == b"of the other"


def test_lost_replies_to_reads_are_asked_for_again(s3, store, monkeypatch):
    store.put_new("a", b"0123456789")
    with serving_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        same = pickle.loads(pickle.dumps(store))
        for read in (
            lambda: same.get("a"),
            lambda: same.get_ranges("a", [Range(0, 10)])[0],
            lambda: b"0123456789"[: same.list()[0].size_bytes],
        ):
            proxy.drop_replies(2)
            assert read() == b"0123456789"


def test_ranges_that_are_close_are_fetched_by_one_request(s3, store, monkeypatch):
    store.put_new("a", bytes(3 << 20))
    with serving_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        same = pickle.loads(pickle.dumps(store))
        same.get_ranges("a", [Range(number * 2000, 1000) for number in range(50)])
        assert proxy.num_requests == 1
        same.get_ranges("a", [Range(0, 1000), Range(2 << 20, 1000)])
        assert proxy.num_requests == 3
        assert proxy.bytes_received < 300_000


def test_a_store_that_cannot_be_reached_is_an_error_that_names_the_url_and_no_credentials(s3, store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    unreachable = pickle.loads(pickle.dumps(store))
    with pytest.raises(StoreError, match=r"s3://bucket/.*/a: cannot be read \(.+\)") as caught:
        unreachable.get("a")
    with pytest.raises(WriteError, match=r"cannot write s3://bucket/.*/a \(.+\)") as written:
        unreachable.put_new("a", b"")
    shown = f"{caught.value}{caught.value.__cause__}{written.value}{unreachable!r}{pickle.dumps(unreachable)!r}"
    assert SECRET not in shown
    assert "\n" not in str(caught.value)


def test_a_bucket_that_does_not_exist_is_an_error_and_not_an_empty_store(s3):
    store = open_store("s3://no-such-bucket/run")
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/run: .*(NoSuchBucket|does not exist)"):
        store.list()
    with pytest.raises(StoreError, match="does not exist"):
        store.get("a")
    with pytest.raises(WriteError, match="NoSuchBucket"):
        store.put_new("a", b"")


def test_a_forked_child_is_told_to_spawn_instead_of_waiting_forever(store):
    store.put_new("a", b"content")
    child = os.fork()
    if not child:
        status = 1
        try:
            store.get("a")
        except StoreError as error:
            status = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_store_in_memory_is_the_same_everywhere_in_the_process():
    open_store("memory://shared/run").put_new("a", b"content")
    assert open_store("memory://shared").get("run/a") == b"content"
    assert open_store("memory://other").list() == []


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://key:very-secret@bucket/run", "user name or a password"),
        ("S3://key:very-secret@bucket/run", "user name or a password"),
        ("HTTPS://bucket.example/very-secret", "HTTPS:// is not supported"),
        ("s3://very-secret@bucket/run", "user name or a password"),
        ("s3:/key:very-secret@bucket/run", "user name or a password"),
        ("az://container/run?sig=very-secret", r"contains \? or #"),
        ("gs://bucket/#very-secret", r"contains \? or #"),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("s3://bucket/../run", "is not valid"),
        ("s3://bucket//run", "is not valid"),
        ("https://bucket.example/very-secret", "https:// is not supported"),
        ("file://very-secret/run", "names a host"),
    ],
)
def test_a_url_that_is_not_supported_or_contains_credentials_is_refused_and_not_shown(url, problem):
    with pytest.raises(ConfigurationError, match=problem) as caught:
        open_store(url)
    assert "very-secret" not in str(caught.value)


def test_a_key_that_cannot_be_parsed_is_not_shown(monkeypatch):
    pytest.importorskip("obstore")
    key = "-----BEGIN PRIVATE KEY-----VERYSECRET-----END PRIVATE KEY-----"
    account = {"type": "service_account", "private_key": key, "client_email": "a", "private_key_id": "b"}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    with pytest.raises(ConfigurationError, match="cannot be opened") as caught:
        open_store("gs://bucket/run")
    assert "VERYSECRET" not in str(caught.value)
    # Nor as a list of bytes.
    assert str(ord("V")) not in str(caught.value)


def test_paths_keep_the_slashes_of_urls_and_other_paths_are_paths(tmp_path):
    url = as_path("s3://bucket/runs/walker")
    assert isinstance(url, ObjectPath)
    assert str(url / "a.slip") == "s3://bucket/runs/walker/a.slip"
    assert str((url / "a.slip").parent) == "s3://bucket/runs/walker"
    assert f"{pickle.loads(pickle.dumps(url))}" == "s3://bucket/runs/walker"
    assert (url.scheme, url.bucket, url.key) == ("s3", "bucket", "runs/walker")
    # As a command line passes it on.
    assert as_path(type(tmp_path)("s3://bucket/runs/walker")) == url
    local = as_path(f"file://{tmp_path}/a")
    assert isinstance(local, ObjectPath)
    assert str(local) == f"file://{tmp_path}/a"
    assert as_path(str(local)) == as_path(type(tmp_path)(str(local))) == local
    assert local.local == tmp_path / "a"
    assert not isinstance(as_path("runs/s3"), ObjectPath)


def test_without_obstore_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ImportError, match=r"obstore, which is not installed: pip install .*\[cloud\]"):
        open_store("s3://bucket/run")


def test_azure_without_an_account_is_an_error_that_names_the_url(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigurationError, match="az://container/run: cannot be opened .*Account must be specified"):
        open_store("az://container/run")
