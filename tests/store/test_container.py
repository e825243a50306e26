"""Containers: what goes in comes out, one entry or a few rows at a time."""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slipstream.codecs import Difference, Lz4, Planes, Raw, Timewise, Zstd
from slipstream.errors import CodecError, CorruptFileError, MissingEntryError, UnsupportedDtypeError, WriteError
from slipstream.store.container import Container
from slipstream.store.writer import write_container

DATA = Path(__file__).parent.parent / "data"


def numbers(*shape: int, dtype: str = "f4") -> np.ndarray[Any, Any]:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def write(path: Path, arrays: dict[str, np.ndarray[Any, Any]], **options: Any) -> Path:
    with write_container(path, **options) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
    return path


def test_arrays_and_values_come_back_by_name(tmp_path):
    arrays = {
        "policy/actor.weight": numbers(40, 30),
        "mask": np.array([True, False]),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 7), np.int16),
        "complex": numbers(3, dtype="c16") * 1j,
        "big endian": numbers(5, dtype=">f8"),
        "": numbers(1),
        "名前 \x00 \n": numbers(2),
    }
    values = {"step": 12, "metrics": {"reward": -1.5, "tags": ["a", None, True]}, "text": "é\x00"}
    with write_container(tmp_path / "a.slip", kind="checkpoint") as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        for name, value in values.items():
            writer.set(name, value)
    with Container(tmp_path / "a.slip") as container:
        assert list(container.entries) == list(arrays)
        assert container.values == values
        assert container.kind == "checkpoint"
        assert container.written_by.startswith("slipstream ")
        for name, array in arrays.items():
            back = container.read(name)
            assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


@settings(max_examples=60, deadline=None)
@given(
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=8),
    chunk_bytes=st.integers(1, 600),
    codec=st.sampled_from([None, Raw(), Zstd(), Lz4(), Planes(), Timewise(), Difference()]),
    data=st.data(),
)
def test_any_rows_of_any_shape_in_chunks_of_any_size_come_back(tmp_path_factory, shape, chunk_bytes, codec, data):
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    reference = array + 1 if isinstance(codec, Difference) else None
    path = tmp_path_factory.mktemp("rows") / "a.slip"
    with write_container(path, chunk_bytes=chunk_bytes) as writer:
        writer.add("before", numbers(3))
        entry = writer.add("array", array, codec, reference)
        writer.add("after", numbers(3))
    assert all(np.prod(entry.grid.part(n)[1]) * 4 <= max(4, chunk_bytes) for n in range(len(entry.chunks)))
    with Container(path) as container:
        assert container.read("array", reference=reference).tobytes() == array.tobytes()
        if shape:
            start, stop = data.draw(st.integers(-9, 9)), data.draw(st.none() | st.integers(-9, 9))
            rows = container.read("array", slice(start, stop), reference=reference)
            assert rows.shape == array[start:stop].shape
            assert rows.tobytes() == array[start:stop].tobytes()


def test_reading_some_rows_reads_only_the_chunks_that_hold_them(tmp_path, monkeypatch):
    path = write(tmp_path / "a.slip", {"x": numbers(1000, 64), "y": numbers(1000, 64)}, chunk_bytes=64 * 4 * 10)
    read: list[int] = []
    preadv = os.preadv

    def record(descriptor: int, buffers: Any, offset: int) -> int:
        read.append(count := preadv(descriptor, buffers, offset))
        return count

    with Container(path) as container:
        monkeypatch.setattr(os, "preadv", record)
        assert (container.read("y", slice(15, 35)) == numbers(1000, 64)[15:35]).all()
        chunks = container.entries["y"].chunks[1:4]
        assert sorted(read) == sorted(chunk.length for chunk in chunks)


def test_rows_that_make_no_sense_are_refused(tmp_path):
    path = write(tmp_path / "a.slip", {"x": numbers(5), "scalar": np.array(1.0)})
    with Container(path) as container:
        with pytest.raises(ValueError, match=r"cannot read slice\(0, 4, 2\) of entry 'x'"):
            container.read("x", slice(0, 4, 2))
        with pytest.raises(ValueError, match="of entry 'scalar'"):
            container.read("scalar", slice(0, 1))


def test_reading_into_given_memory(tmp_path):
    path = write(tmp_path / "a.slip", {"x": numbers(50, 3)})
    out = np.empty((50, 3), np.float32)
    with Container(path) as container:
        assert container.read("x", out=out) is out
        with pytest.raises(CodecError, match=r"out is float32\[50, 3\], expected a contiguous, writable array"):
            container.read("x", slice(0, 2), out=out)
    assert (out == numbers(50, 3)).all()


def test_a_difference_needs_its_reference_to_be_read(tmp_path):
    old, new = numbers(300, 10), numbers(300, 10) + 1
    with write_container(tmp_path / "a.slip", chunk_bytes=1000) as writer:
        entry = writer.add("weights", new, reference=old)
    assert isinstance(entry.codec, Difference)
    with Container(tmp_path / "a.slip") as container:
        assert (container.read("weights", reference=old) == new).all()
        with pytest.raises(CodecError, match="needs a reference array"):
            container.read("weights")
        assert list(container.find_damage()) == [None] * len(entry.chunks)


def test_a_reference_may_be_made_part_by_part(tmp_path):
    new, old = numbers(300, 70), numbers(300, 70)[::-1]
    flat = np.ascontiguousarray(old).reshape(-1)
    asked = []

    def part(start: int, stop: int) -> np.ndarray[Any, Any]:
        asked.append(stop - start)
        return flat[start:stop]

    with write_container(tmp_path / "whole", chunk_bytes=4096) as writer:
        writer.add("a", new, Difference(), old)
    with write_container(tmp_path / "parts", chunk_bytes=4096) as writer:
        writer.add("a", new, Difference(), part)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()
    assert sum(asked) == new.size
    assert max(asked) <= 1024
    with Container(tmp_path / "parts") as container:
        assert np.array_equal(container.read("a", reference=part), new)
        assert np.array_equal(container.read("a", slice(7, 9), reference=part), new[7:9])
        assert np.array_equal(container.read_many(["a"], {"a": part})["a"], new)


def test_many_arrays_are_read_at_once(tmp_path):
    arrays = {"large": numbers(300, 70), "empty": numbers(0, 3), "small": numbers(2), "scalar": numbers()}
    with Container(write(tmp_path / "a", arrays, chunk_bytes=4096)) as container:
        found = container.read_many(["small", "large", "empty", "scalar"])
        assert list(found) == ["small", "large", "empty", "scalar"]
        assert all(
            np.array_equal(found[name], array) and found[name].shape == array.shape for name, array in arrays.items()
        )
        with pytest.raises(MissingEntryError, match="no entry 'medium'"):
            container.read_many(["small", "medium"])


def test_a_missing_entry_is_named_with_its_nearest_neighbours(tmp_path):
    path = write(tmp_path / "a.slip", {"actor.weight": numbers(2), "actor.bias": numbers(2)})
    with Container(path) as container, pytest.raises(MissingEntryError) as caught:
        container.read("actor.wieght")
    assert str(caught.value) == f"{path}: no entry 'actor.wieght' among 2; it has 'actor.weight', 'actor.bias'"
    assert isinstance(caught.value, KeyError)


def test_a_name_can_be_used_once(tmp_path):
    with pytest.raises(ValueError, match="entry 'x' already"), write_container(tmp_path / "a.slip") as writer:
        writer.add("x", numbers(2))
        writer.add("x", numbers(2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"bytes", object()])
def test_values_that_json_cannot_hold_leave_no_file(tmp_path, value):
    with pytest.raises((ValueError, TypeError)), write_container(tmp_path / "a.slip") as writer:
        writer.set("bad", value)
    assert list(tmp_path.iterdir()) == []


def test_objects_are_refused_and_leave_no_file(tmp_path):
    with pytest.raises(UnsupportedDtypeError), write_container(tmp_path / "a.slip") as writer:
        writer.add("bad", np.array([{}], dtype=object))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chunk_bytes", [0, -1, 2**40])
def test_a_chunk_size_out_of_range_is_refused(tmp_path, chunk_bytes):
    with (
        pytest.raises(ValueError, match="chunk_bytes is"),
        write_container(tmp_path / "a.slip", chunk_bytes=chunk_bytes),
    ):
        pytest.fail("the block must not run")


def test_the_same_arrays_give_the_same_file_whatever_the_threads(tmp_path):
    array = np.random.default_rng(0).normal(size=(900, 1000)).astype(np.float32)
    files = []
    for threads in (1, 2, 7):
        with write_container(tmp_path / f"{threads}.slip", threads=threads) as writer:
            writer.add("x", array)
        files.append((tmp_path / f"{threads}.slip").read_bytes())
    assert files[0] == files[1] == files[2]


def test_a_file_replaced_while_open_is_read_to_its_end(tmp_path):
    path = write(tmp_path / "a.slip", {"x": numbers(1000)})
    with Container(path) as container:
        write(path, {"x": numbers(1000) + 1})
        assert (container.read("x") == numbers(1000)).all()
    with Container(path) as container:
        assert (container.read("x") == numbers(1000) + 1).all()


def test_a_file_cut_short_while_open_is_an_error(tmp_path):
    path = write(tmp_path / "a.slip", {"x": np.random.default_rng(0).normal(size=9999)})
    with Container(path) as container:
        os.truncate(path, 1000)
        with pytest.raises(CorruptFileError, match="was truncated after it was opened"):
            container.read("x")


def test_reading_after_close_is_an_error_and_closing_twice_is_not(tmp_path):
    container = Container(write(tmp_path / "a.slip", {"x": numbers(3)}))
    container.close()
    container.close()
    with pytest.raises(ValueError, match="is closed"):
        container.read("x")


def test_a_container_that_is_dropped_closes_its_file(tmp_path):
    path = write(tmp_path / "a.slip", {"x": numbers(3)})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        Container(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_may_share_a_container(tmp_path):
    arrays = {f"x{i}": np.random.default_rng(i).normal(size=(50, 4000)) for i in range(8)}
    path = write(tmp_path / "a.slip", arrays, chunk_bytes=1 << 16)
    wrong: list[str] = []
    with Container(path) as container:

        def check(name: str) -> None:
            for start in range(0, 40, 7):
                if not (container.read(name, slice(start, start + 9)) == arrays[name][start : start + 9]).all():
                    wrong.append(name)

        crew = [threading.Thread(target=check, args=(name,)) for name in arrays]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
    assert wrong == []


def _sum_of(container: Container, queue: Any) -> None:
    queue.put(float(container.read("x").sum()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_may_share_a_container(tmp_path, method):
    path = write(tmp_path / "a.slip", {"x": numbers(1000)})
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with Container(path) as container:
        process = context.Process(target=_sum_of, args=(container, queue))
        process.start()
        assert queue.get(timeout=60) == numbers(1000).sum()
        process.join()


def test_children_forked_while_other_threads_read_can_read(tmp_path):
    """A lock that a reading thread held at that moment would stay locked in the child for ever."""
    path = write(tmp_path / "a.slip", {"x": numbers(1000)})
    script = """
        import os, sys, threading
        from slipstream import Container
        container = Container(sys.argv[1])
        done = threading.Event()

        def hammer():
            while not done.is_set():
                container.read("x", threads=1)

        crew = [threading.Thread(target=hammer) for _ in range(3)]
        for thread in crew:
            thread.start()
        for _ in range(40):
            child = os.fork()
            if child == 0:
                os._exit(int(container.read("x", threads=1).sum() != 499500))
            assert os.waitpid(child, 0)[1] == 0
        done.set()
        print("all children could read")
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "all children could read\n"


def test_a_pickled_container_opens_the_file_again(tmp_path):
    path = write(tmp_path / "a.slip", {"x": numbers(10)})
    container = Container(path)
    copy = pickle.loads(pickle.dumps(container))
    container.close()
    assert (copy.read("x") == numbers(10)).all()
    copy.close()


def test_an_entry_larger_than_the_limit_is_refused_before_memory_is_taken(tmp_path):
    path = write(tmp_path / "a.slip", {"x": numbers(1000)})
    with Container(path, max_entry_bytes=3999) as container:
        with pytest.raises(CorruptFileError, match="claims 4000 bytes, more than the limit of 3999"):
            container.read("x")
        assert container.read("x", slice(0, 10)).size == 10


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path):
    path = write(tmp_path / "a.slip", {"x": numbers(10)})
    with pytest.raises(WriteError), write_container(path / "impossible"):
        pytest.fail("the block must not run")
    with pytest.raises(RuntimeError, match="changed my mind"), write_container(path) as writer:
        writer.add("y", numbers(10))
        raise RuntimeError("changed my mind")
    with Container(path) as container:
        assert list(container.entries) == ["x"]


@pytest.mark.parametrize("path", sorted(DATA.glob("container_v1_*.slip")), ids=lambda path: path.stem)
def test_files_of_version_1_load_for_ever(path):
    expected = json.loads(path.with_suffix(".json").read_text())
    with Container(path) as container:
        assert container.values == expected["values"]
        assert list(container.entries) == list(expected["entries"])
        for name, entry in expected["entries"].items():
            reference = container.read(entry["reference"]) if entry["reference"] else None
            array = container.read(name, reference=reference)
            assert container.entries[name].codec.to_header() == entry["codec"]
            assert (array.dtype.str, list(array.shape)) == (entry["dtype"], entry["shape"])
            assert array.tobytes().hex() == entry["bytes"]


def test_there_are_golden_files():
    assert len(list(DATA.glob("container_v1_*.slip"))) == 1


def test_an_entry_that_failed_leaves_no_trace_and_the_writer_goes_on(tmp_path, monkeypatch):
    array = np.random.default_rng(0).normal(size=200_000)
    encode = Planes.encode
    calls = 0

    def fail_late(self: Planes, *arguments: Any) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no more")
        return encode(self, *arguments)

    with write_container(tmp_path / "a.slip", chunk_bytes=1 << 18, threads=1) as writer:
        monkeypatch.setattr(Planes, "encode", fail_late)
        with pytest.raises(MemoryError):
            writer.add("x", array, Planes())
        writer.add("x", array[:10], Planes())
    with Container(tmp_path / "a.slip") as container:
        assert (container.read("x") == array[:10]).all()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda writer: writer.add(5, numbers(3)),
        lambda writer: writer.set(5, 1),
        lambda writer: writer.set("m", {1: "a", "1": "b"}),
        lambda writer: writer.set("m", np.float32(1)),
        lambda writer: writer.set("m", [{"deep": {2: 3}}]),
    ],
)
def test_what_could_not_be_read_again_is_refused_when_it_is_added(tmp_path, misuse):
    with write_container(tmp_path / "a.slip") as writer:
        with pytest.raises(TypeError, match="expected"):
            misuse(writer)
        writer.add("x", numbers(3))
    with Container(tmp_path / "a.slip") as container:
        assert list(container.entries) == ["x"]


def test_too_many_axes_and_a_kind_that_is_no_string_are_refused(tmp_path):
    with write_container(tmp_path / "a.slip") as writer, pytest.raises(ValueError, match="33 axes, at most 32"):
        writer.add("x", np.zeros((1,) * 33))
    with pytest.raises(TypeError, match="kind is None"), write_container(tmp_path / "b.slip", kind=None):  # type: ignore[arg-type]
        pytest.fail("the block must not run")


def test_a_value_is_copied_when_it_is_set(tmp_path):
    history = [1]
    with write_container(tmp_path / "a.slip") as writer:
        writer.set("history", history)
        history.append(2)
    with Container(tmp_path / "a.slip") as container:
        assert container.values == {"history": [1]}


@pytest.mark.parametrize("reference", [numbers(4, 3), numbers(100), numbers(3, 4, dtype="f8"), [[1.0]]])
def test_a_reference_that_does_not_fit_is_refused_on_writing_and_on_reading(tmp_path, reference):
    array = numbers(3, 4)
    with write_container(tmp_path / "a.slip") as writer:
        with pytest.raises(CodecError, match="they must match"):
            writer.add("bad", array, Difference(), reference)
        writer.add("good", array, Difference(), array + 1)
    with Container(tmp_path / "a.slip") as container, pytest.raises(CodecError, match="they must match"):
        container.read("good", reference=reference)


def test_a_difference_may_be_read_over_its_own_reference(tmp_path):
    old = np.random.default_rng(0).normal(size=(300, 1000)).astype(np.float32)
    new = old * np.float32(1.01)
    with write_container(tmp_path / "a.slip", chunk_bytes=1 << 16) as writer:
        writer.add("x", new, Difference(), old)
    with Container(tmp_path / "a.slip") as container:
        assert (container.read("x", reference=old, out=old) == new).all()


def test_closing_while_another_thread_reads_lets_the_read_finish(tmp_path):
    path = write(tmp_path / "a.slip", {"x": np.random.default_rng(0).normal(size=(50, 4000))}, chunk_bytes=1 << 14)
    problems: list[BaseException] = []

    def read(container: Container) -> None:
        try:
            container.read("x", threads=1)
        except ValueError as error:
            if isinstance(error, CorruptFileError) or "is closed" not in str(error):
                problems.append(error)
        except OSError as error:
            problems.append(error)

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(60):
        container = Container(path)
        thread = threading.Thread(target=read, args=(container,))
        thread.start()
        container.close()
        with path.open("rb"):  # takes the descriptor's number if it was freed too soon
            thread.join()
    assert problems == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pickled_container_finds_its_file_from_another_folder(tmp_path, monkeypatch):
    write(tmp_path / "a.slip", {"x": numbers(3)})
    monkeypatch.chdir(tmp_path)
    with Container("a.slip") as container:
        content = pickle.dumps(container)
    monkeypatch.chdir("/")
    with pickle.loads(content) as copy:
        assert copy.read("x").size == 3


def test_a_writer_knows_what_a_reader_says_of_the_file(tmp_path):
    with write_container(tmp_path / "a.slip") as writer:
        writer.add("x", np.arange(1000))
        writer.set("step", 3)
    with Container(tmp_path / "a.slip") as container:
        assert (writer.identity, writer.file_bytes) == (container.identity, container.file_bytes)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    chunk_bytes=st.sampled_from([1, 8, 40, 200, 10_000]),
    data=st.data(),
)
def test_visiting_hands_over_each_chunk_of_some_rows_once(tmp_path_factory, shape, chunk_bytes, data):
    array = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape)
    first, last = sorted(data.draw(st.tuples(st.integers(0, shape[0]), st.integers(0, shape[0]))))
    path = tmp_path_factory.mktemp("container") / "a.slip"
    with write_container(path, chunk_bytes=chunk_bytes) as writer:
        writer.add("a", array, Planes())
    counts = np.zeros(shape, np.int64)

    def receive(name, part, index):
        assert name == "a"
        assert np.array_equal(part, array[index])
        counts[index] += 1

    with Container(path) as container:
        container.visit(["a"], receive, slice(first, last))
        assert (counts <= 1).all()
        assert (counts[first:last] == 1).all()
        counts[:] = 0
        container.visit(["a"], receive)
        assert (counts == 1).all()


def test_visiting_a_difference_is_refused(tmp_path):
    reference = np.arange(100.0)
    with write_container(tmp_path / "a.slip") as writer:
        writer.add("a", reference + 1, Difference(), reference)
    with Container(tmp_path / "a.slip") as container, pytest.raises(CodecError, match="is a difference"):
        container.visit(["a"], lambda *_: None)
