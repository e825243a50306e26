"""What every `Store` must do. A test class per implementation inherits `StoreContract` and supplies `new_store`."""

import pickle
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from slipstream.errors import OutOfRangeError
from slipstream.store.base import FileInfo, Range, Store

NewStore = Callable[[], Store]

INVALID_NAMES = [
    "",
    "/",
    "/absolute",
    "a/",
    "a//b",
    ".",
    "..",
    "./a",
    "../a",
    "a/../b",
    "a/..",
    "nul\0",
    "\ud800",
    "n" * 256,
    "a/" * 512 + "a",
    ".slipstream-0123456789abcdef.tmp",
    "a/.slipstream-lock/b",
]
UNUSUAL_NAMES = [
    "a b",
    "...",
    "..a",
    "-rf",
    "~",
    "*?[]",
    "back\\slash",
    "new\nline",
    "名前/é",
    "e\u0301",
    ".hidden",
    "C:",
    "%2e%2e",
    "n" * 255,
    "/".join(["deep"] * 40),
]


class StoreContract:
    """Tests that every implementation inherits.

    Attributes:
        between_processes: Whether a store that is pickled and loaded in another process is the same store.
        num_examples: How many random sequences of operations to try.
    """

    between_processes = True
    num_examples = 40

    @pytest.fixture
    def new_store(self, tmp_path_factory: pytest.TempPathFactory) -> NewStore:
        """Return a function that makes an empty store."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, new_store: NewStore) -> Store:
        return new_store()

    def test_an_object_comes_back_as_it_was_put(self, store):
        store.put_new("runs/7/model.slip", b"weights")
        assert store.get("runs/7/model.slip") == b"weights"
        assert store.list() == [FileInfo("runs/7/model.slip", 7)]

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_buffer_can_be_put_and_is_copied(self, store, kind):
        data = bytearray(b"content")
        store.put_new("a", kind(data))
        data[:] = b"changed"
        assert store.get("a") == b"content"

    def test_an_empty_object_is_an_object(self, store):
        store.put_new("empty", b"")
        assert store.get("empty") == b""
        assert store.list() == [FileInfo("empty", 0)]
        assert store.get_ranges("empty", [Range(0, 0)]) == [b""]
        with pytest.raises(FileExistsError):
            store.put_new("empty", b"")

    def test_a_large_object_comes_back(self, store):
        content = bytes(range(256)) * 40_000
        store.put_new("large", content)
        assert store.get("large") == content
        assert store.size_bytes("large") == len(content)
        assert store.get_ranges("large", [Range(9_999_999, 2)]) == [content[9_999_999:10_000_001]]

    def test_an_object_is_never_replaced(self, store):
        store.put_new("a", b"first")
        with pytest.raises(FileExistsError, match="a"):
            store.put_new("a", b"second")
        assert store.get("a") == b"first"

    def test_a_missing_object_is_a_file_not_found_error_that_names_it(self, store):
        store.put_new("folder/a", b"")
        for name in ("absent", "folder", "folder/b", "folder/a/b"):
            with pytest.raises(FileNotFoundError, match=name):
                store.get(name)
            with pytest.raises(FileNotFoundError, match=name):
                store.size_bytes(name)
            with pytest.raises(FileNotFoundError, match=name):
                store.get_ranges(name, [])

    def test_deleting_is_idempotent_and_frees_the_name(self, store):
        store.delete("folder/a")
        store.put_new("folder/a", b"first")
        for name in ("folder", "folder/a/b", "folder/a", "folder/a"):
            store.delete(name)
        assert store.list() == []
        store.put_new("folder/a", b"second")
        assert store.get("folder/a") == b"second"

    def test_ranges_come_back_in_their_order_and_may_overlap(self, store):
        store.put_new("a", b"0123456789")
        ranges = [Range(4, 3), Range(0, 10), Range(10, 0), Range(5, 1), Range(4, 3)]
        assert store.get_ranges("a", ranges) == [b"456", b"0123456789", b"", b"5", b"456"]
        assert store.get_ranges("a", []) == []

    @pytest.mark.parametrize(
        "bad", [Range(0, 11), Range(10, 1), Range(11, 0), Range(-1, 1), Range(3, -1), Range(2**63, 1)]
    )
    def test_a_range_out_of_bounds_is_refused(self, store, bad):
        store.put_new("a", b"0123456789")
        with pytest.raises(OutOfRangeError, match="it has 10 bytes"):
            store.get_ranges("a", [Range(0, 1), bad])

    def test_listing_is_sorted_and_filtered_by_prefix(self, store):
        names = ["b", "a/2", "a/10", "a/1", "ab/c", "B", "é", "a-b"]
        for name in names:
            store.put_new(name, name.encode())
        assert [info.name for info in store.list()] == sorted(names)
        assert [info.name for info in store.list("a/")] == ["a/1", "a/10", "a/2"]
        assert [info.name for info in store.list("a/1")] == ["a/1", "a/10"]
        assert [info.name for info in store.list("a")] == ["a-b", "a/1", "a/10", "a/2", "ab/c"]
        assert store.list("a/1/x") == []
        assert store.list("absent/") == []

    def test_a_listing_says_when_objects_were_created(self, store):
        store.put_new("first", b"")
        store.put_new("second", b"")
        first, second = store.list()
        # All stores of the tests use the clock of this machine; some have whole seconds only.
        assert first.modified_s <= second.modified_s <= time.time()
        assert first.modified_s > time.time() - 3600

    @pytest.mark.parametrize("prefix", ["../", "a/../", "//"])
    def test_a_prefix_that_no_name_begins_with_is_refused(self, store, prefix):
        with pytest.raises(ValueError, match="store name"):
            store.list(prefix)

    @pytest.mark.parametrize("name", INVALID_NAMES, ids=repr)
    def test_an_invalid_name_is_refused_by_every_method(self, store, tmp_path, name):
        (tmp_path / "file").write_bytes(b"content")
        for use in (
            lambda: store.put_new(name, b""),
            lambda: store.put_file(name, tmp_path / "file"),
            lambda: store.get(name),
            lambda: store.get_ranges(name, []),
            lambda: store.size_bytes(name),
            lambda: store.delete(name),
        ):
            with pytest.raises(ValueError, match="store name"):
                use()
        assert store.list() == []

    def test_a_name_that_is_no_string_is_refused(self, store):
        with pytest.raises(TypeError, match="expected a string"):
            store.put_new(7, b"")

    @pytest.mark.parametrize("name", UNUSUAL_NAMES, ids=repr)
    def test_an_unusual_name_is_a_name_like_any_other(self, store, name):
        store.put_new(name, b"content")
        assert store.get(name) == b"content"
        assert [info.name for info in store.list()] == [name]
        store.delete(name)
        assert store.list() == []

    def test_a_local_file_is_put_without_changing_it(self, store, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(b"content" * 500_000)
        store.put_file("folder/a", path)
        assert store.get("folder/a") == path.read_bytes()
        with pytest.raises(FileExistsError):
            store.put_file("folder/a", path)
        store.delete("folder/a")
        assert path.read_bytes() == b"content" * 500_000

    def test_a_local_file_may_be_deleted_after_it_was_put(self, store, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(b"content")
        store.put_file("a", path)
        path.unlink()
        assert store.get("a") == b"content"

    def test_a_missing_local_file_leaves_no_object(self, store, tmp_path):
        with pytest.raises(FileNotFoundError, match="absent"):
            store.put_file("a", tmp_path / "absent")
        assert store.list() == []

    def test_of_many_threads_that_put_one_name_exactly_one_succeeds(self, store):
        sizes = [100_000 + number for number in range(12)]
        winners: list[int] = []
        torn: list[bytes] = []
        done = threading.Event()
        start = threading.Barrier(len(sizes))

        def put(number: int) -> None:
            start.wait()
            try:
                store.put_new("contested", bytes([number]) * sizes[number])
            except FileExistsError:
                return
            winners.append(number)

        def watch() -> None:
            # Whenever the object exists, it is complete.
            while not done.is_set():
                try:
                    content = store.get("contested")
                except FileNotFoundError:
                    continue
                if content != content[:1] * sizes[content[0]]:
                    torn.append(content)

        watcher = threading.Thread(target=watch)
        watcher.start()
        crew = [threading.Thread(target=put, args=(number,)) for number in range(len(sizes))]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        done.set()
        watcher.join()
        assert len(winners) == 1
        assert store.get("contested") == bytes(winners) * sizes[winners[0]]
        assert torn == []

    def test_of_many_processes_that_put_one_name_exactly_one_succeeds(self, store):
        if not self.between_processes:
            pytest.skip("the store is in the memory of one process")
        script = """
            import pickle, sys
            store = pickle.loads(bytes.fromhex(sys.argv[1]))
            number = int(sys.argv[2])
            print("ready", flush=True)
            sys.stdin.readline()
            for turn in range(20):
                try:
                    store.put_new(f"{turn}", bytes([number]) * (50_000 + number))
                except FileExistsError:
                    continue
                print(turn)
        """
        command = [sys.executable, "-c", textwrap.dedent(script), pickle.dumps(store).hex()]
        crew = [
            subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for number in range(4)
        ]
        for process in crew:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        outputs = _let_go(crew)
        wins = [set(output.split()) for output in outputs]
        assert sorted(turn for won in wins for turn in won) == sorted(str(turn) for turn in range(20))
        for number, won in enumerate(wins):
            for turn in won:
                assert store.get(turn) == bytes([number]) * (50_000 + number)

    def test_any_sequence_of_operations_gives_what_a_dict_gives(self, new_store, tmp_path):
        class Machine(StoreMachine):
            make_store = staticmethod(new_store)
            source = tmp_path / "source"

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=self.num_examples,
                stateful_step_count=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    def test_any_ranges_are_slices_of_the_content(self, store):
        content = bytes(range(50))
        store.put_new("a", content)

        @settings(max_examples=2 * self.num_examples, deadline=None)
        @given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=6))
        def check(pairs: list[tuple[int, int]]) -> None:
            ranges = [Range(min(pair), max(pair) - min(pair)) for pair in pairs]
            expected = [content[part.offset : part.offset + part.length] for part in ranges]
            assert store.get_ranges("a", ranges) == expected

        check()


def _let_go(crew: list[subprocess.Popen[str]]) -> list[str]:
    """Start all processes at once, wait for them, and return what they printed."""
    for process in crew:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = []
    for process in crew:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        outputs.append(output)
    return outputs


# No name is the folder of another: a local folder cannot store that.
names = st.sampled_from(["a", "b", "folder/a", "folder/b", "folder/deep/a", "名"])
contents = st.binary(max_size=20)


class StoreMachine(RuleBasedStateMachine):
    """Puts, reads and deletes objects at random, and compares the store with a dict."""

    make_store: Callable[[], Store]
    source: Path

    @initialize()
    def start(self) -> None:
        self.store: Any = self.make_store()
        self.model: dict[str, bytes] = {}

    @rule(name=names, content=contents)
    def put_new(self, name: str, content: bytes) -> None:
        self._put(name, content, lambda: self.store.put_new(name, content))

    @rule(name=names, content=contents)
    def put_file(self, name: str, content: bytes) -> None:
        self.source.unlink(missing_ok=True)
        self.source.write_bytes(content)
        self._put(name, content, lambda: self.store.put_file(name, self.source))

    def _put(self, name: str, content: bytes, put: Callable[[], None]) -> None:
        if name in self.model:
            with pytest.raises(FileExistsError):
                put()
        else:
            put()
            self.model[name] = content

    @rule(name=names)
    def get(self, name: str) -> None:
        if name in self.model:
            assert self.store.get(name) == self.model[name]
        else:
            with pytest.raises(FileNotFoundError):
                self.store.get(name)

    @rule(name=names, offset=st.integers(-1, 21), length=st.integers(-1, 21))
    def get_ranges(self, name: str, offset: int, length: int) -> None:
        content = self.model.get(name)
        if content is None:
            with pytest.raises(FileNotFoundError):
                self.store.get_ranges(name, [Range(offset, length)])
        elif offset < 0 or length < 0 or offset + length > len(content):
            with pytest.raises(OutOfRangeError):
                self.store.get_ranges(name, [Range(offset, length)])
        else:
            assert self.store.get_ranges(name, [Range(offset, length)]) == [content[offset : offset + length]]

    @rule(name=names)
    def delete(self, name: str) -> None:
        self.store.delete(name)
        self.model.pop(name, None)

    @rule(prefix=st.sampled_from(["a", "f", "folder/", "folder/d", "x/"]))
    def list_prefix(self, prefix: str) -> None:
        expected = [name for name in sorted(self.model) if name.startswith(prefix)]
        assert [info.name for info in self.store.list(prefix)] == expected

    @invariant()
    def lists_what_the_dict_contains(self) -> None:
        expected = [FileInfo(name, len(content)) for name, content in sorted(self.model.items())]
        assert self.store.list() == expected
