"""Errors in the middle of a write, full disks, foreign files, forged heads, many threads, odd tensors."""

import contextlib
import copy
import gc
import itertools
import os
import pickle
import resource
import shutil
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from slipstream import (
    CorruptFileError,
    DiskFullError,
    EpisodeSliceSampler,
    EpisodeStore,
    PackedEpisodeStorage,
    ReplayError,
    SlipstreamError,
    StateMismatchError,
    replay,
    threads,
)
from slipstream.replay.columns import Column
from slipstream.store.container import Container
from slipstream.store.writer import write_container
from tests import interrupts
from tests.replay.samples import assert_same, episode


def steps(start, count):
    frames = torch.arange(float(start), start + count + 1)[:, None].expand(count + 1, 8)
    done = torch.zeros(count, 1, dtype=torch.bool)
    content = {"number": torch.arange(start, start + count), "o": frames[:-1], "next": {"o": frames[1:], "done": done}}
    return TensorDict(content, [count])


def one_by_one(storage, start, count):
    for number in range(start, start + count):
        storage.set(number, steps(number, 1)[0])


def fill(storage):
    storage.set(range(100), steps(0, 100))


def fill_slowly(storage):
    storage.set(range(20), steps(0, 20))
    one_by_one(storage, 20, 64)


WRITES = {
    "many steps": (fill, lambda storage: storage.set(range(100, 300), steps(100, 200))),
    "a change": (fill, lambda storage: storage.write("o", 3.0)),
    "a new key": (fill, lambda storage: storage.write(("more", "late"), torch.arange(100.0)[:, None])),
    "steps with a new key": (
        fill,
        lambda storage: storage.set(range(100, 150), steps(100, 50).set("late", torch.ones(50, 2))),
    ),
    "a change of steps that are not packed": (
        lambda storage: one_by_one(storage, 0, 40),
        lambda storage: storage.write("o", 3.0),
    ),
    "the step after which there are enough": (fill_slowly, lambda storage: one_by_one(storage, 84, 1)),
    "the first steps": (lambda storage: None, fill),
}


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", WRITES)
def test_an_error_while_steps_are_packed_changes_nothing_and_holds_no_lock(monkeypatch, kind, name):
    prepare, write = WRITES[name]
    expected = PackedEpisodeStorage(300)
    prepare(expected)
    write(expected)
    num_raised = 0
    # The first call of the packer fails, then the second one, until none does.
    for failing in range(1, 9):
        storage = PackedEpisodeStorage(300)
        prepare(storage)
        before = storage.get(slice(None)) if storage.initialized else None
        calls = 0

        def pack(self, *args, failing=failing, original=Column.pack):
            nonlocal calls
            calls += 1
            if calls == failing:
                raise kind
            return original(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Column, "pack", pack)
            try:
                write(storage)
            except kind:
                num_raised += 1
            else:
                break
        if before is None:
            assert not storage.initialized
            assert len(storage) == 0
        else:
            assert_same(storage.get(slice(None)), before)
            assert len(storage) == len(before)
        # Another thread can write, so no lock is held.
        thread = threading.Thread(target=write, args=(storage,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert_same(storage.get(slice(None)), expected.get(slice(None)))
    assert num_raised == failing - 1 > 0


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_on_the_way_into_or_out_of_a_block_holds_no_lock(monkeypatch):
    monkeypatch.setattr(interrupts, "INTERRUPTED_FILES", {contextlib.__file__})
    storage = PackedEpisodeStorage(300)
    storage.set(range(100), steps(0, 100))
    for point in itertools.count(1):
        error = None
        try:
            with interrupts.interrupted_at(point):
                one_by_one(storage, 100, 1)
        except KeyboardInterrupt as caught:
            error = caught
        if error is None:
            break
        # The error is kept as a notebook keeps it, and with it everything that its traceback refers to.
        thread = threading.Thread(target=fill, args=(storage,), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), error.__traceback__
    assert point > 1


@pytest.fixture
def no_collection():
    """Free no cycles meanwhile: Python ignores what is raised while it does, and so would an interruption be."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


INTERRUPTED = {
    "a short overwrite": (fill, lambda storage: storage.set(range(20, 25), steps(500, 5))),
    "a long overwrite": (fill, lambda storage: storage.set(range(20, 60), steps(500, 40))),
    "a step that packs those before it": (fill_slowly, lambda storage: storage.set(84, steps(84, 1)[0])),
    "new steps": (fill, lambda storage: storage.set(range(100, 140), steps(100, 40))),
    "forgetting": (fill, lambda storage: storage._empty()),
}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_at_any_point_of_a_write_leaves_whole_steps(monkeypatch, name):
    prepare, write = INTERRUPTED[name]
    files = [str(file) for file in Path(replay.__path__[0]).glob("*.py")]
    monkeypatch.setattr(interrupts, "INTERRUPTED_FILES", {*files, threads.__file__})
    prepared = PackedEpisodeStorage(140)
    prepare(prepared)
    saved = pickle.dumps(prepared)
    for point in itertools.count(1, 11):
        storage = pickle.loads(saved)
        try:
            with interrupts.interrupted_at(point):
                write(storage)
        except KeyboardInterrupt:
            require_whole_steps(storage)
            write(storage)
            require_whole_steps(storage)
        else:
            break
    assert point > 50


def require_whole_steps(storage):
    if not len(storage):
        return
    found = storage.get(slice(None))
    number = found["number"].float()
    assert torch.equal(found["o"][:, 0], number)
    following = found["next", "o"][:, 0]
    # A slot that was written twice counts twice, as in a LazyTensorStorage, so there may be an empty one at the end.
    is_empty = (number == 0) & (following == 0)
    assert torch.equal(following[~is_empty], number[~is_empty] + 1)
    assert is_empty.sum() <= 40


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("operation", ["add", "append", "finish"])
def test_an_error_while_an_episode_is_packed_changes_nothing(monkeypatch, kind, operation):
    store = EpisodeStore(seed=0)
    store.add(episode(10, 0))
    one = episode(200, 1)
    store.append({name: values[:50] for name, values in one.items()})
    before = store.get(np.arange(len(store)))

    def write():
        if operation == "add":
            store.add(episode(20, 2))
        elif operation == "append":
            store.append({name: values[50:180] for name, values in one.items()})
        else:
            store.finish({"position": one["position"][50]})

    def pack(self, *args):
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(Column, "pack", pack)
        with pytest.raises(kind):
            write()
    assert_same(store.get(np.arange(len(store))), before)
    write()
    assert len(store) > len(before["action"])


def test_a_disk_that_becomes_full_leaves_what_was_saved_before(tmp_path):
    storage = PackedEpisodeStorage(3000)
    storage.set(range(1000), steps(0, 1000))
    storage.dumps(tmp_path)
    expected = storage.get(slice(None))
    noise = steps(1000, 2000)
    noise["o"] = torch.randn(2000, 8)
    storage.set(range(1000, 3000), noise)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(DiskFullError):
            storage.dumps(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    twin = PackedEpisodeStorage(3000)
    twin.loads(tmp_path)
    assert_same(twin.get(slice(None)), expected)
    assert len(list(tmp_path.iterdir())) == 2
    storage.dumps(tmp_path)
    twin.loads(tmp_path)
    assert_same(twin.get(slice(None)), storage.get(slice(None)))


def test_foreign_files_and_what_links_lead_to_are_left_alone(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("keep")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep")
    (folder / "rows-000009-aaaaaaaa.slip").symlink_to(elsewhere / "precious")
    (folder / "rows-000008-aaaaaaaa.slip").mkdir()
    os.mkfifo(folder / "rows-000007-aaaaaaaa.slip")
    with pytest.raises(CorruptFileError):
        EpisodeStore().restore(folder)
    storage = PackedEpisodeStorage(100)
    storage.set(range(50), steps(0, 50))
    storage.dumps(folder)
    twin = PackedEpisodeStorage(100)
    twin.loads(folder)
    assert_same(twin.get(slice(None)), storage.get(slice(None)))
    assert (elsewhere / "precious").read_text() == "keep"
    assert (folder / "notes.txt").read_text() == "keep"
    assert (folder / "rows-000008-aaaaaaaa.slip").is_dir()


def test_two_stores_that_save_into_one_folder_leave_one_of_them(tmp_path):
    stores = [EpisodeStore(seed=0), EpisodeStore(seed=1)]
    errors = []

    def work(number):
        try:
            for count in range(25):
                stores[number].add(episode(20, 100 * number + count))
                stores[number].save(tmp_path)
        except SlipstreamError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # What one of them deletes may be missing for the other; the next save repairs that.
    stores[0].save(tmp_path)
    twin = EpisodeStore()
    assert twin.restore(tmp_path).lost == ()
    assert_same(twin.get(np.arange(len(twin))), stores[0].get(np.arange(len(stores[0]))))
    assert not errors


def set_in(path, value):
    """Return a function that changes one value of a head."""

    def change(values, arrays):
        inner = values["plain"]
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value

    return change


def set_array(name, function):
    def change(values, arrays):
        arrays[name] = function(arrays[name])

    return change


def put_over_another(values, arrays):
    """Move a tensor to bytes of a row that belong to another one as well."""
    for leaf in values["plain"]["schema"]["leaves"]:
        if leaf["kind"] in ("frame", "next"):
            leaf["start"] += 8


STORAGE_LIES = {
    "slots": set_in(["num_slots"], 10**12),
    "streams": set_in(["storage", "streams"], [10**9]),
    "no streams": set_in(["storage", "streams"], [0]),
    "length": set_in(["storage", "len"], 10**9),
    "size": set_in(["storage", "max_size"], 10**12),
    "newest": set_in(["storage", "newest"], 10**12),
    "first slot": set_in(["base"], 10**18),
    "first slot below zero": set_in(["base"], -(10**18)),
    "shape": set_in(["schema", "leaves", 0, "shape"], [10**12]),
    "shape below zero": set_in(["schema", "leaves", 1, "shape"], [-8]),
    "bytes of a row": set_in(["schema", "columns", 0, "row_bytes"], 10**12),
    "one tensor over another": put_over_another,
    "no columns": set_in(["schema", "columns"], []),
    "dtype of pixels": set_in(["schema", "columns", 0], {"kind": "images", "dtype": "|O"}),
    "rows": set_array("rows/0", lambda rows: rows + 2**62),
    "open rows": set_array("rows/0", lambda rows: rows * 0 - 10**9),
    "raw values": set_array("raw/0", lambda values: values.astype(np.int8)),
}
STORE_LIES = {
    "first slot": set_in(["store", "first_slot"], 10**15),
    "counts": set_in(["store", "counts", "episodes_added"], 10**30),
    "blocks": set_in(["store", "open", 0, 2], [10**12]),
    "bytes of blocks": set_in(["store", "open", 0, 3], -(10**12)),
    "names": set_in(["store", "open", 0, 1], ["position"]),
    "other names": set_in(["store", "open", 0, 1], ["x", "y", "z"]),
    "lengths": set_array("lengths", lambda lengths: lengths * 0 + 2**62),
    "empty episodes": set_array("lengths", lambda lengths: lengths * 0),
    "rows of blocks": set_array("held/0/0", lambda rows: rows[:5]),
    "rows below zero": set_array("held/0/0", lambda rows: rows * 0 - 1),
    "ragged rows": set_array("tail/0/0", lambda rows: rows[:3]),
}


def forge(folder, change):
    """Write a head with right checksums and wrong content."""
    with Container(folder / "head.slip") as container:
        values = copy.deepcopy(dict(container.values))
        arrays = container.read_many(container.entries)
        kind = container.kind
    change(values, arrays)
    with write_container(folder / "head.slip", kind=kind) as writer:
        for name, value in values.items():
            writer.set(name, value)
        for name, array in arrays.items():
            writer.add(name, array)


def test_a_forged_head_of_a_storage_is_an_error_of_one_sentence_in_little_memory(tmp_path):
    storage = PackedEpisodeStorage(100)
    data = steps(0, 95).set("action", torch.ones(95, 2))
    storage.set(range(90), data[:90])
    for number in range(90, 95):
        storage.set(number, data[number])
    storage.dumps(tmp_path / "good")
    for name, change in STORAGE_LIES.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        forge(folder, change)
        twin = PackedEpisodeStorage(100)
        tracemalloc.start()
        try:
            with pytest.raises((CorruptFileError, StateMismatchError)) as caught:
                twin.loads(folder)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert "\n" not in str(caught.value), name
        assert peak < 10_000_000, name
        assert not twin.initialized, name


def test_episodes_are_restored_without_a_head_that_is_forged(tmp_path):
    store = EpisodeStore(seed=0)
    for number in range(4):
        store.add(episode(30, number))
    store.append({name: values[:90] for name, values in episode(100, 9).items()})
    store.save(tmp_path / "good")
    for name, change in STORE_LIES.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        forge(folder, change)
        twin = EpisodeStore(seed=0)
        tracemalloc.start()
        try:
            restored = twin.restore(folder)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 10_000_000, name
        assert restored.num_episodes == 4, name
        assert len(twin) == 120, name
        for number in range(4):
            assert_same(twin.episode(number), episode(30, number))
        twin.append({name: values[:9] for name, values in episode(10, 8).items()})


def write_at_random(storage, seed):
    draw = np.random.default_rng(seed)
    for _ in range(60):
        first = int(draw.integers(0, 900))
        count = int(draw.integers(1, 100))
        new = steps(int(draw.integers(0, 10**6)), count)
        storage.set(range(first, first + count), new, set_cursor=bool(draw.integers(2)))


def read_at_random(storage, seed, stop):
    draw = torch.Generator().manual_seed(seed)
    sampler = EpisodeSliceSampler(slice_len=3)
    while not stop.is_set():
        batch = storage.get(torch.randint(0, 1000, (64,), generator=draw))
        assert bool((batch["next", "o"] == batch["o"] + 1).all())
        sampler.sample(storage, 300)
        if seed == 0:
            twin = PackedEpisodeStorage(1000)
            twin.load_state_dict(storage.state_dict())


def test_several_threads_write_and_read_a_storage():
    storage = PackedEpisodeStorage(1000)
    storage.set(range(1000), steps(0, 1000))
    stop = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read_at_random, storage, seed, stop) for seed in range(4)]
        writers = [pool.submit(write_at_random, storage, seed) for seed in range(4)]
        try:
            for writer in writers:
                writer.result()
        finally:
            stop.set()
        for reader in readers:
            reader.result()


def test_odd_tensors_come_back():
    with torch.inference_mode():
        inference = torch.randn(40, 2)
    numbers = torch.randn(40, 3, dtype=torch.complex64)
    data = TensorDict(
        {
            "transposed": torch.randn(4, 40).t(),
            "expanded": torch.ones(1, 3).expand(40, 3),
            "strided": torch.randn(80, 2)[::2],
            "learned": torch.randn(40, 3, requires_grad=True) * 1,
            "inference": inference,
            "conjugate": numbers.conj(),
            "negative": numbers.conj().imag,
            "many axes": torch.randn(40, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2),
        },
        [40],
    )
    storage = PackedEpisodeStorage(50)
    storage.set(range(40), data)
    back = storage.get(slice(None))
    for key, tensor in data.items():
        assert torch.equal(back[key], tensor), key
        assert not back[key].requires_grad


def test_tensors_without_values_are_refused():
    storage = PackedEpisodeStorage(50)
    with pytest.raises(ReplayError, match="device 'meta'"):
        storage.set(range(40), TensorDict({"x": torch.zeros(40, 3, device="meta")}, [40]))
    assert not storage.initialized
    storage.set(range(4), steps(0, 4))


def test_a_storage_of_one_step():
    theirs = ReplayBuffer(storage=LazyTensorStorage(1), batch_size=3)
    ours = ReplayBuffer(storage=PackedEpisodeStorage(1), batch_size=3)
    for number in range(100):
        for buffer in (theirs, ours):
            buffer.add(steps(number, 1)[0])
        assert_same(ours.sample(), theirs.sample())
    ours.extend(steps(0, 50))
    assert ours.sample()["number"].tolist() == [49, 49, 49]
    assert ours.storage.get_stats()["held_bytes"] < 20_000


def test_memory_is_free_after_emptying():
    storage = PackedEpisodeStorage(3000, cache_bytes=0)
    noise = torch.randn(2000, 600)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        storage.set(range(2000), TensorDict({"x": noise}, [2000]))
        rows = storage[:]
        full = tracemalloc.get_traced_memory()[0] - before
        ReplayBuffer(storage=storage, batch_size=2).empty()
        del rows
        gc.collect()
        empty = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert full > 4_000_000
    assert empty < 200_000
