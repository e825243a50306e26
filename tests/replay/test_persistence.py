"""Saved, killed, damaged, restored: nothing that was saved is lost without a word."""

import copy
import logging
import os
import pickle
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

from slipstream import (
    CheckpointManager,
    CorruptFileError,
    EpisodeSliceSampler,
    EpisodeStore,
    OutOfRangeError,
    PackedEpisodeStorage,
    ReplayBufferState,
    StateMismatchError,
    TrainingState,
    WriteError,
)
from slipstream.codecs import Codec, Difference, Raw
from slipstream.store.container import Container
from slipstream.store.writer import write_container
from tests.replay.samples import assert_same, episode, rollout


def filled(count=6, **options):
    store = EpisodeStore(seed=0, **options)
    for number in range(count):
        store.add(episode(20 + number, number, image=True))
    store.append({name: values[:7] for name, values in episode(30, 90, image=True).items()})
    return store


def files(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)


def same_store(one, other):
    assert (len(one), one.num_episodes) == (len(other), other.num_episodes)
    assert_same(one.get(np.arange(len(one))), other.get(np.arange(len(other))))
    mine, theirs = one.get_stats(), other.get_stats()
    for name in ("episodes_added", "frames_added", "frames_evicted", "packed_bytes", "num_frames"):
        assert mine[name] == theirs[name], name


def test_a_restored_store_is_the_store_and_draws_on_alike(tmp_path):
    store, twin, third = filled(), EpisodeStore(), EpisodeStore()
    store.sample(3)
    store.save(tmp_path)
    assert twin.restore(tmp_path).num_episodes == 6
    third.load_state_dict(store.state_dict())
    for other in (twin, third):
        same_store(store, other)
    expected = store.sample(32)
    for other in (twin, third):
        assert_same(other.sample(32), expected)
        other.append({name: values[7:30] for name, values in episode(30, 90, image=True).items()})
        last = {name: values[30] for name, values in episode(30, 90, image=True).items() if len(values) == 31}
        other.finish(last)
        assert_same(other.episode(-1), episode(30, 90, image=True))


def test_only_what_is_new_is_written(tmp_path):
    store = filled(max_frames=200)
    store.save(tmp_path)
    before = files(tmp_path)
    store.add(episode(30, 50, image=True))
    store.save(tmp_path)
    after = files(tmp_path)
    parts = [name for name in before if name.startswith("rows")]
    assert len(parts) == 1
    assert all(after[name] == before[name] for name in parts)
    assert len([name for name in after if name.startswith("rows")]) == 2
    for number in range(8):  # all that was saved first is evicted
        store.add(episode(30, 60 + number, image=True))
    store.save(tmp_path)
    assert not set(parts) & set(files(tmp_path))
    twin = EpisodeStore(max_frames=200)
    twin.restore(tmp_path)
    same_store(store, twin)


def test_many_small_saves_are_joined(tmp_path):
    store = EpisodeStore()
    for number in range(100):
        store.add(episode(2, number))
        store.save(tmp_path)
    assert len(files(tmp_path)) < 80
    twin = EpisodeStore()
    twin.restore(tmp_path)
    same_store(store, twin)


def test_a_restored_store_saves_on_into_the_same_folder(tmp_path):
    store = filled()
    store.save(tmp_path)
    twin = EpisodeStore()
    twin.restore(tmp_path)
    before = files(tmp_path)
    twin.add(episode(11, 70, image=True))
    twin.save(tmp_path)
    assert set(before) < set(files(tmp_path))
    third = EpisodeStore()
    third.restore(tmp_path)
    same_store(twin, third)
    store.save(tmp_path)  # the first writer comes back: what is in the folder is no longer its own
    third.restore(tmp_path)
    same_store(store, third)


def test_an_empty_store_and_an_unfinished_first_episode_survive(tmp_path):
    EpisodeStore().save(tmp_path / "a")
    store = EpisodeStore()
    assert store.restore(tmp_path / "a").num_episodes == 0
    store.append({name: values[:5] for name, values in episode(9).items()})
    store.save(tmp_path / "b")
    twin = EpisodeStore()
    twin.restore(tmp_path / "b")
    twin.finish({"position": np.full(3, 5, np.float32)})
    assert np.array_equal(twin.episode(0)["action"], episode(9)["action"][:5])


def test_every_flipped_byte_costs_at_most_some_episodes_and_they_are_named(tmp_path, caplog):
    store = filled(8)
    store.save(tmp_path)
    (part,) = tmp_path.glob("rows-*")
    whole = part.read_bytes()
    size = len(whole)
    named = 0
    for place in [*range(0, 40, 7), *range(40, size, size // 25)]:
        flip(part, place)
        twin = EpisodeStore()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            try:
                restored = twin.restore(tmp_path)
            except CorruptFileError:
                restored = None
        part.write_bytes(whole)
        if restored is None:
            continue
        assert restored.num_episodes + len(restored.lost) == 8
        kept = [number for number in range(8) if number not in restored.lost]
        for position, number in enumerate(kept):
            assert_same(twin.episode(position), episode(20 + number, number, image=True))
        if restored.lost:
            named += 1
            assert f"episodes {', '.join(map(str, restored.lost))} are lost" in caplog.text
    assert named


def test_damage_in_one_of_many_files_leaves_the_others(tmp_path):
    store = EpisodeStore()
    for number in range(5):
        store.add(episode(20, number, image=True))
        store.save(tmp_path)
    parts = sorted(tmp_path.glob("rows-*"))
    parts[1].unlink()
    flip(parts[3], 30)
    twin = EpisodeStore()
    restored = twin.restore(tmp_path)
    assert (restored.num_episodes, restored.lost) == (3, (1, 3))
    for position, number in enumerate((0, 2, 4)):
        assert_same(twin.episode(position), episode(20, number, image=True))
    twin.add(episode(20, 9, image=True))
    twin.save(tmp_path)
    third = EpisodeStore()
    assert third.restore(tmp_path).lost == ()
    same_store(twin, third)


@pytest.mark.parametrize("damage", ["missing", "cut off", "flipped"])
def test_without_its_head_a_folder_still_gives_its_episodes(tmp_path, damage):
    store = filled(3)
    store.save(tmp_path)
    store.add(episode(15, 3, image=True))
    store.save(tmp_path)
    head = tmp_path / "head.slip"
    if damage == "missing":
        head.unlink()
    elif damage == "cut off":
        head.write_bytes(head.read_bytes()[:-20])
    else:
        flip(head, 60)
    twin = EpisodeStore()
    assert twin.restore(tmp_path).num_episodes == 4
    assert_same(twin.episode(3), episode(15, 3, image=True))


def test_a_folder_with_nothing_sound_or_nothing_at_all_is_an_error_and_changes_nothing(tmp_path):
    store = filled(2)
    before = store.get(np.arange(len(store)))
    with pytest.raises(FileNotFoundError):
        store.restore(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        store.restore(tmp_path)
    (tmp_path / "head.slip").write_bytes(b"not a file of ours")
    with pytest.raises(CorruptFileError):
        store.restore(tmp_path)
    assert_same(store.get(np.arange(len(store))), before)


def test_a_folder_that_cannot_be_written_is_an_error_and_the_store_goes_on(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = filled(2)
    with pytest.raises((WriteError, OSError)):
        store.save(tmp_path / "file")
    store.save(tmp_path / "folder")


def test_states_of_something_else_are_refused_and_nothing_changes():
    store = filled(2)
    before = store.get(np.arange(len(store)))
    good = store.state_dict()
    bad = [
        {},
        {**good, "version": 9},
        {**good, "arrays": {}},
        {**good, "columns": good["columns"][:1]},
        {**good, "plain": {**good["plain"], "schema": [{"name": "x"}]}},
    ]
    for state in bad:
        with pytest.raises(StateMismatchError):
            store.load_state_dict(state)
    assert_same(store.get(np.arange(len(store))), before)
    with pytest.raises(StateMismatchError):
        PackedEpisodeStorage(50).load_state_dict(good)


def save_for_ever(folder, pipe):
    store = EpisodeStore(max_frames=400)
    for number in range(100_000):
        store.add(episode(20, number % 50, image=True))
        store.save(folder)
        os.write(pipe, b".")


@pytest.mark.parametrize("trial", range(8))
def test_a_kill_at_any_moment_leaves_a_folder_that_restores(tmp_path, trial):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            save_for_ever(tmp_path, writer)
        finally:
            os._exit(1)
    os.close(writer)
    saved = 0
    while saved < 3 * trial + 2:
        saved += len(os.read(reader, 1))
    time.sleep(0.0017 * trial)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as rest:
        saved += len(rest.read())
    store = EpisodeStore(max_frames=400)
    restored = store.restore(tmp_path)
    assert restored.lost == ()
    newest = int(store.get_stats()["episodes_added"]) - 1
    assert newest in (saved - 1, saved)
    assert_same(store.episode(-1), episode(20, newest % 50, image=True))
    store.add(episode(20, 1, image=True))
    store.save(tmp_path)
    assert len(list(tmp_path.glob(".slipstream-*"))) == 0
    assert len(list(tmp_path.glob("rows-*"))) <= 21


# TorchRL's buffers


def make_buffer(storage=PackedEpisodeStorage, ndim=1, **options):
    kind = TensorDictReplayBuffer if ndim == 1 else ReplayBuffer
    return kind(storage=storage(150, ndim=ndim), batch_size=16, **options)


def write(buffer, ndim, numbers):
    for number in numbers:
        data = rollout(3, 22, seed=number, image=True)
        buffer.extend(data if ndim == 2 else data.reshape(-1))


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("count", [1, 5])
def test_dumps_and_loads_restore_a_buffer(tmp_path, ndim, count):
    one = make_buffer(ndim=ndim, generator=torch.Generator().manual_seed(0))
    write(one, ndim, range(count))
    for step in rollout(3, 4, seed=50, image=True).unbind(1):  # some steps that are not packed yet
        one.extend(step.unsqueeze(1) if ndim == 2 else step)
    one.sample()
    one.dumps(tmp_path / "a")
    other = make_buffer(ndim=ndim, generator=torch.Generator())
    other.loads(tmp_path / "a")
    third = make_buffer(ndim=ndim, generator=torch.Generator())
    third.load_state_dict(one.state_dict())
    for twin in (other, third):
        assert (len(twin), twin.write_count) == (len(one), one.write_count)
        assert_same(one[:], twin[:])
    drawn = one.sample()
    for twin in (other, third):
        assert_same(drawn, twin.sample())
        write(twin, ndim, [70])
    write(one, ndim, [70])
    for twin in (other, third):
        assert_same(one[:], twin[:])
        assert_same(one.storage.get(slice(None)), twin.storage.get(slice(None)))


def test_dumps_again_writes_only_new_frames(tmp_path):
    one = make_buffer()
    write(one, 1, [0])
    one.dumps(tmp_path)
    (first,) = (tmp_path / "storage").glob("rows-*")
    stamp = first.stat().st_mtime_ns
    write(one, 1, [1])
    one.dumps(tmp_path)
    assert first.stat().st_mtime_ns == stamp
    assert len(list((tmp_path / "storage").glob("rows-*"))) == 2
    for number in range(2, 9):
        write(one, 1, [number])
    one.dumps(tmp_path)
    # Until the next call it is not known that this one was completed, so the moment before is kept.
    one.dumps(tmp_path)
    assert not first.exists()
    other = make_buffer()
    other.loads(tmp_path)
    assert_same(one[:], other[:])


def test_a_damaged_dump_keeps_the_sound_steps_and_names_the_lost(tmp_path, caplog):
    one = make_buffer()
    write(one, 1, [0])
    one.dumps(tmp_path)
    write(one, 1, [1])
    one.dumps(tmp_path)
    parts = sorted((tmp_path / "storage").glob("rows-*"))
    parts[0].unlink()
    other = make_buffer()
    with caplog.at_level(logging.WARNING):
        other.loads(tmp_path)
    assert len(other) == len(one) == 132
    assert other.storage.checkpointer.lost == list(range(66))
    assert "66 steps are lost" in caplog.text
    assert_same(one[66:132], other[66:132])
    # Lost steps are never drawn, and no slice crosses them.
    for _ in range(5):
        assert int(other.sample()["index"].min()) >= 66
    with pytest.raises(OutOfRangeError, match="lost with a damaged file"):
        other.storage.get(torch.tensor([3, 70]))
    other.dumps(tmp_path / "again")
    parts[1].unlink()
    with pytest.raises(CorruptFileError, match="every step in the folder is lost"):
        make_buffer().loads(tmp_path)


def test_a_head_that_cannot_have_been_written_is_damage_that_names_the_folder(tmp_path):
    one = make_buffer()
    write(one, 1, [0])
    one.dumps(tmp_path)
    head = tmp_path / "storage" / "head.slip"
    with Container(head) as container:
        values = container.values
        arrays = container.read_many(container.entries)

    def load_with(codec: Codec, parts: Any) -> None:
        with write_container(head, kind="replay storage") as writer:
            for name, array in arrays.items():
                writer.add(name, array, codec, array if codec.needs_reference else None)
            for name, value in {**values, "parts": parts}.items():
                writer.set(name, value)
        make_buffer().loads(tmp_path)

    load_with(Raw(), values["parts"])
    with pytest.raises(CorruptFileError, match=str(head.parent)):
        load_with(Difference(), values["parts"])
    with pytest.raises(CorruptFileError, match=str(head.parent)):
        load_with(Raw(), ["x"])


def test_a_dump_of_another_size_is_refused(tmp_path):
    one = make_buffer()
    write(one, 1, [0])
    one.dumps(tmp_path)
    with pytest.raises(StateMismatchError, match="max_size=150, the storage of ndim=1 and max_size=99"):
        PackedEpisodeStorage(99).loads(tmp_path / "storage")
    with pytest.raises(StateMismatchError, match="ndim"):
        PackedEpisodeStorage(150, ndim=2).loads(tmp_path / "storage")


@pytest.mark.usefixtures("priority_trees")
@pytest.mark.parametrize("kind", ["priorities", "without replacement", "slices", "random"])
def test_as_part_of_a_checkpoint_a_run_resumes_exactly(tmp_path, kind):
    def make():
        torch.manual_seed(3)
        options = {"batch_size": 24, "generator": torch.Generator().manual_seed(1)}
        if kind == "priorities":
            buffer = TensorDictPrioritizedReplayBuffer(
                storage=PackedEpisodeStorage(150), alpha=0.7, beta=0.5, **options
            )
        else:
            sampler = {
                "without replacement": SamplerWithoutReplacement,
                "slices": lambda: EpisodeSliceSampler(slice_len=3),
            }
            chosen = {"sampler": sampler[kind]()} if kind in sampler else {}
            buffer = TensorDictReplayBuffer(storage=PackedEpisodeStorage(150), **chosen, **options)
        model = torch.nn.Linear(5, 1)
        optimizer = torch.optim.Adam(model.parameters())
        return (
            buffer,
            model,
            TrainingState(replay=ReplayBufferState(buffer), model=model, optimizer=optimizer),
            optimizer,
        )

    def train(parts, numbers):
        buffer, model, _, optimizer = parts
        losses = []
        for number in numbers:
            write(buffer, 1, [number])
            for _ in range(3):
                batch = buffer.sample()
                error = model(batch["obs", "state"]) - batch["next", "reward"]
                loss = error.square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if kind == "priorities":
                    batch["td_error"] = error.detach().abs().flatten()
                    buffer.update_tensordict_priority(batch)
                losses.append(loss.item())
        return losses

    first = make()
    train(first, range(3))
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, first[2].state_dict(), {})
    expected = train(first, range(3, 6))
    second = make()
    train(second, [9])
    with CheckpointManager(tmp_path) as manager:
        second[2].load_state_dict(manager.restore().state)
    assert train(second, range(3, 6)) == expected


def test_what_was_prefetched_is_restored():
    one, other = (make_buffer(prefetch=2, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    write(one, 1, [0])
    one.sample()
    ReplayBufferState(other).load_state_dict(ReplayBufferState(one).state_dict())
    assert_same(one.sample(), other.sample())


def test_threads_add_and_sample_while_a_store_is_saved(tmp_path):
    store = EpisodeStore(max_frames=300, seed=0)
    store.add(episode(20, 0, image=True))
    stop = threading.Event()
    errors = []

    def keep_saving():
        try:
            while not stop.is_set():
                store.save(tmp_path)
        except Exception as error:  # noqa: BLE001 - the main thread shows it
            errors.append(error)

    threads = [threading.Thread(target=keep_saving) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1, 60):
        store.add(episode(20, number, image=True))
        store.sample(4)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    twin = EpisodeStore(max_frames=300)
    assert twin.restore(tmp_path).lost == ()
    newest = int(twin.get_stats()["episodes_added"]) - 1
    assert_same(twin.episode(-1), episode(20, newest, image=True))


@pytest.mark.usefixtures("priority_trees")
def test_a_state_of_another_sampler_is_refused():
    one = ReplayBuffer(storage=PackedEpisodeStorage(50), sampler=PrioritizedSampler(50, 0.7, 0.5))
    other = ReplayBuffer(storage=PackedEpisodeStorage(50))
    small = ReplayBuffer(storage=PackedEpisodeStorage(50), sampler=PrioritizedSampler(20, 0.7, 0.5))
    state = ReplayBufferState(one).state_dict()
    for buffer in (other, small):
        with pytest.raises(StateMismatchError, match="sampler"):
            ReplayBufferState(buffer).load_state_dict(state)
    with pytest.raises(StateMismatchError):
        ReplayBufferState(one).load_state_dict({})


def read_in_another_process(buffer, queue):
    batch = buffer.sample()
    whole = buffer[:]
    queue.put((float(batch["obs", "state"].sum()), float(whole["action"].sum()), len(buffer)))


def test_a_buffer_reaches_spawned_workers():
    buffer = make_buffer()
    write(buffer, 1, range(2))
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=read_in_another_process, args=(buffer, queue))
    process.start()
    _, actions, length = queue.get()
    process.join()
    assert process.exitcode == 0
    assert length == len(buffer)
    assert actions == pytest.approx(float(buffer[:]["action"].sum()), rel=1e-6)
    assert len(pickle.dumps(buffer.storage)) < 1.2 * buffer.storage.get_stats()["held_bytes"] + 10_000


def counted(number):
    steps = torch.arange(number * 40, number * 40 + 41).float()[:, None].repeat(1, 9)
    return TensorDict({"x": steps[:-1], "next": {"x": steps[1:]}}, batch_size=[40])


def test_threads_sample_from_a_buffer_while_one_writes():
    storage = PackedEpisodeStorage(500)
    reference = LazyTensorStorage(500)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=32)
    twin = TensorDictReplayBuffer(storage=reference, batch_size=32)

    buffer.extend(counted(0))
    errors, stop = [], threading.Event()

    def read(direct):
        try:
            while not stop.is_set():
                batch = storage.get(torch.randint(0, len(storage), (32,))) if direct else buffer.sample()
                assert bool((batch["next", "x"] == batch["x"] + 1).all())
                assert bool((batch["x"] == batch["x"][:, :1]).all())
        except Exception as error:  # noqa: BLE001 - the main thread shows it
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, 80):
        buffer.extend(counted(number))
    for step in counted(80).unbind(0):
        buffer.add(step)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    for one in [*map(counted, range(80)), *counted(80).split(1)]:
        twin.extend(one)
    assert_same(twin.storage.get(slice(None)), storage.get(slice(None)))


def packed_anew(storage):
    """Overwrite all steps but one, so that the rest of their segment is packed again."""
    for number in range(1, 4):
        storage.set(1 + torch.randperm(149), rollout(1, 149, seed=number, image=False)[0], set_cursor=False)


def emptied(storage):
    storage._empty()
    storage.set(range(150), rollout(1, 150, seed=2)[0])


def another(storage):
    other = PackedEpisodeStorage(150)
    other.set(range(150), rollout(1, 150, seed=3)[0])
    storage.load_state_dict(other.state_dict())


@pytest.mark.parametrize("change", [packed_anew, emptied, another])
def test_frames_saved_before_are_not_taken_for_others_of_the_same_number(tmp_path, change):
    storage = PackedEpisodeStorage(150)
    storage.set(range(150), rollout(1, 150)[0])
    storage.dumps(tmp_path)
    change(storage)
    storage.dumps(tmp_path)
    other = PackedEpisodeStorage(150)
    other.loads(tmp_path)
    assert_same(storage.get(slice(None)), other.get(slice(None)))


def test_a_store_that_became_another_saves_that_one(tmp_path):
    store, other = EpisodeStore(seed=0), EpisodeStore(seed=0)
    store.add(episode(10, 1))
    other.add(episode(10, 2))
    store.save(tmp_path / "a")
    other.save(tmp_path / "b")
    for become in (
        lambda: store.load_state_dict(other.state_dict()),
        lambda: store.restore(tmp_path / "b"),
    ):
        store.restore(tmp_path / "a")
        store.save(tmp_path / "c")
        become()
        store.save(tmp_path / "c")
        third = EpisodeStore()
        third.restore(tmp_path / "c")
        assert_same(third.episode(0), episode(10, 2))


def test_lost_steps_are_holes_until_they_are_overwritten(tmp_path):
    def write(storage, start, count, slot=None):
        frames = torch.arange(start, start + count + 1.0)[:, None].expand(-1, 8)
        done = torch.zeros(count, 1, dtype=torch.bool)
        after = {"o": frames[1:], "done": done}
        content = {"o": frames[:-1], "number": torch.arange(start, start + count), "next": after}
        first = start if slot is None else slot
        storage.set(range(first, first + count), TensorDict(content, batch_size=[count]))

    storage = PackedEpisodeStorage(200)
    for start, count in ((0, 64), (64, 64), (128, 10)):  # ten of them stay raw
        write(storage, start, count)
        storage.dumps(tmp_path)
    sorted(tmp_path.glob("rows-*"))[1].unlink()
    restored = PackedEpisodeStorage(200)
    buffer = ReplayBuffer(storage=restored, sampler=EpisodeSliceSampler(slice_len=8), batch_size=400)
    restored.loads(tmp_path)
    assert restored.checkpointer.lost == list(range(64, 128))
    drawn = buffer.sample()["number"].reshape(50, 8)
    assert bool((drawn.diff(dim=1) == 1).all())
    assert not bool(((drawn >= 64) & (drawn < 128)).any())
    # A change of one tensor does not bring a step back, a whole step does.
    restored.write("o", 1.0)
    with pytest.raises(OutOfRangeError):
        restored.get(70)
    restored[70] = restored.get(3)
    assert int(restored.get(70)["number"]) == 3
    assert 70 not in buffer.sample()["number"].tolist()
    write(restored, 0, 64)
    write(restored, 64, 64)
    assert restored.get(torch.arange(138))["number"].tolist() == list(range(138))
    assert bool((restored.get(torch.arange(128))["o"][:, 0] == torch.arange(128.0)).all())


def test_a_batch_is_of_one_store_though_it_becomes_another_meanwhile():
    stores = [EpisodeStore(seed=0), EpisodeStore(seed=0)]
    for number in range(10):
        stores[0].add(episode(40, number))
        stores[1].add(episode(40, number + 100))
    states = [store.state_dict() for store in stores]
    store, stop, mixed = stores[0], threading.Event(), []

    def read():
        while not stop.is_set():
            batch = store.sample(8)
            mixed.append(not np.array_equal(batch["position"][:, 0] + 1, batch["next_position"][:, 0]))
            mixed.append(not np.allclose(batch["position"][:, 0] / 7, batch["action"][:, 0]))
            mixed.append(len(set((batch["position"][:, 0] >= 100_000).tolist())) != 1)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(300):
        store.load_state_dict(states[number % 2])
    stop.set()
    for thread in threads:
        thread.join()
    assert mixed
    assert not any(mixed)


def test_streams_numbered_by_numpy_are_saved(tmp_path):
    store = EpisodeStore(seed=0)
    numbered: Any = np.int64(3)
    store.append({"o": np.zeros((3, 2))}, stream=numbered)
    store.save(tmp_path)
    restored = EpisodeStore()
    restored.restore(tmp_path)
    restored.append({"o": np.ones((1, 2))}, stream=3)
    assert restored.discard(3) == 4


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("replay episodes", {"log": ["a", []]}),
        ("replay episodes", {"plain": []}),
        ("replay episodes", {"plain": {"counts": {}}}),
        ("replay episodes", {"plain": {"generator": {"bit_generator": "other"}}}),
        ("replay storage", {"plain": {"storage": {"newest": None}}}),
        ("replay storage", {"plain": {"storage": {"len": -1}}}),
    ],
)
def test_a_head_that_no_writer_writes_is_an_error_of_one_sentence(tmp_path, kind, change):
    if kind == "replay episodes":
        one, other = filled(2), filled(3)
        one.save(tmp_path)
        read, length = other.restore, len(other)
    else:
        one, other = make_buffer().storage, make_buffer().storage
        one.set(range(66), rollout(3, 22).reshape(-1))
        one.dumps(tmp_path)
        read, length = other.loads, len(other)
    with Container(tmp_path / "head.slip") as container:
        values, arrays = dict(container.values), {name: container.read(name) for name in container.entries}
    for name, value in change.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) else value
    with write_container(tmp_path / "head.slip", kind=kind) as writer:
        for name, value in values.items():
            writer.set(name, value)
        for name, array in arrays.items():
            writer.add(name, array)
    try:
        read(tmp_path)
    except (CorruptFileError, StateMismatchError) as error:
        assert "\n" not in str(error)
        assert len(other) == length
    else:  # the parts told what there is
        assert other.num_episodes == 2


def changed(state, path, value):
    """Return a copy of a state with another value at a place."""
    state = copy.deepcopy(state)
    place = state
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return state


def unfinished_storage():
    storage = PackedEpisodeStorage(50)
    steps = rollout(1, 30).reshape(-1)
    storage.set(range(20), steps[:20])
    storage.set(range(20, 30), steps[20:])
    return storage


def unfinished_store():
    store = filled(2)
    for number in range(90):
        store.append({name: values[:1] for name, values in episode(2, number, image=True).items()}, stream=3)
    return store


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("plain", "base"), 7),
        (("plain", "num_slots"), 1 << 62),
        (("plain", "storage", "last_cursor"), "x"),
        (("plain", "storage", "last_cursor"), {}),
        (("plain", "storage", "layout", "bare"), True),
        (("plain", "schema", "leaves", 0, "shape"), [-1]),
        (("plain", "schema", "columns", 0, "row_bytes"), 1 << 40),
        (("arrays", "open_slots/0"), torch.full((10, 1), 50)),
        (("arrays", "open_slots/0"), torch.full((10, 1), -1)),
    ],
)
def test_a_state_of_a_storage_that_cannot_be_right_is_refused_before_anything_changes(path, value):
    storage = PackedEpisodeStorage(50)
    with pytest.raises(StateMismatchError) as caught:
        storage.load_state_dict(changed(unfinished_storage().state_dict(), path, value))
    assert "\n" not in str(caught.value)
    assert not storage.initialized
    storage.load_state_dict(unfinished_storage().state_dict())
    assert len(storage) == 30


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("plain", "num_slots"), 1 << 62),
        (("plain", "num_slots"), None),
        (("plain", "store", "generator", "bit_generator"), "other"),
        (("plain", "store", "generator", "state", "state"), -1),
        (("plain", "store", "generator", "has_uint32"), 1 << 40),
        (("plain", "store", "open", 0, 1, 0), "other"),
        (("plain", "store", "open", 1, 2, 0), 1 << 40),
        (("plain", "schema", "leaves", 0, "key"), ["other"]),
        (("plain", "schema", "columns", 0, "row_bytes"), 1 << 40),
        (("arrays", "held/1/0"), torch.arange(3)),
    ],
)
def test_a_state_of_a_store_that_cannot_be_right_is_refused_before_anything_changes(path, value):
    store = filled(3)
    before = store.get(np.arange(len(store)))
    with pytest.raises(StateMismatchError) as caught:
        store.load_state_dict(changed(unfinished_store().state_dict(), path, value))
    assert "\n" not in str(caught.value)
    assert_same(store.get(np.arange(len(store))), before)
    store.load_state_dict(unfinished_store().state_dict())
    assert store.num_episodes == 2
