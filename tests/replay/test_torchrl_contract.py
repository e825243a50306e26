"""What TorchRL's buffers, writers, sample units and compiled functions ask of a storage."""

import logging

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers import Sequence

from slipstream import EpisodeSliceSampler, PackedEpisodeStorage, ReplayError, StateMismatchError
from tests.replay.samples import assert_same, rollout


def test_a_max_value_writer_may_add_steps_and_batches_in_any_order():
    results = []
    for kind in (LazyTensorStorage, PackedEpisodeStorage):
        writer = TensorDictMaxValueWriter(rank_key="key")
        buffer = TensorDictReplayBuffer(storage=kind(6), writer=writer, batch_size=3)
        buffer.add(TensorDict({"key": torch.tensor([3.0]), "obs": torch.tensor(3)}, batch_size=[]))
        values = torch.tensor([1.0, 9.0, 4.0, 7.0, 2.0, 8.0, 6.0, 5.0])
        buffer.extend(TensorDict({"key": values[:, None], "obs": values.long()}, batch_size=[8]))
        results.append(buffer.storage.get(slice(None))["obs"].tolist())
    assert results[0] == results[1]


def test_steps_without_a_key_read_as_zeros_and_are_reported_once(caplog):
    storage = PackedEpisodeStorage(300)
    storage.set(range(100), rollout(1, 100)[0])
    more = rollout(1, 100, seed=1)[0].exclude("action")
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        storage.set(range(100, 200), more)
        storage.set(range(200, 300), more)
    assert [record.message.count("action") for record in caplog.records] == [1]
    back = storage.get(slice(None))
    assert torch.equal(back["action"][:100], rollout(1, 100)[0]["action"])
    assert not bool(back["action"][100:].any())
    assert torch.equal(back["obs", "state"][100:200], more["obs", "state"])


def test_the_flag_that_ends_episodes_may_not_be_missing():
    storage = PackedEpisodeStorage(100)
    storage.set(range(20), rollout(1, 20)[0])
    with pytest.raises(ReplayError, match="lacks.*done"):
        storage.set(range(20, 40), rollout(1, 20)[0].exclude(("next", "done")))
    assert len(storage) == 20


@pytest.mark.parametrize("ndim", [1, 2])
def test_targets_are_written_back(ndim):
    data = rollout(3, 40)
    contents = []
    for kind in (LazyTensorStorage, PackedEpisodeStorage):
        buffer = TensorDictReplayBuffer(storage=kind(120, ndim=ndim), batch_size=8)
        buffer.extend(data.clone() if ndim == 2 else data.reshape(-1).clone())
        content = buffer.read_all_in_order().clone()
        content["value_target"] = content["next", "reward"] * 2
        buffer.write_all(content)
        contents.append(buffer[:])
    assert_same(contents[0].exclude("index"), contents[1].exclude("index"))
    assert "value_target" in contents[1]


def test_one_step_with_a_new_key_may_be_assigned():
    for kind in (LazyTensorStorage, PackedEpisodeStorage):
        buffer = TensorDictReplayBuffer(storage=kind(10), batch_size=2)
        buffer.extend(TensorDict({"a": torch.arange(8)}, batch_size=[8]))
        buffer[3:4] = TensorDict({"a": torch.tensor([70]), "d": torch.ones(1)}, batch_size=[1])
        assert buffer[3]["d"] == 1
        assert buffer[:]["a"].tolist() == [0, 1, 2, 70, 4, 5, 6, 7]


def test_a_tensor_assigned_to_some_steps_of_a_view_stays_in_the_view():
    for kind in (LazyTensorStorage, PackedEpisodeStorage):
        storage = kind(40)
        storage.set(range(40), rollout(1, 40)[0])
        before = storage.get(slice(None)).clone()
        view = storage[5:15]
        # A transform assigns its results like this, and must not change what is stored.
        view["action"] = view["action"] * 2
        view["new"] = torch.ones(10)
        assert torch.equal(view["action"], before["action"][5:15] * 2)
        assert_same(storage.get(slice(None)), before)


@pytest.mark.parametrize("key", ["action", ("next", "reward"), ("next", "done"), "next"])
def test_a_storage_is_read_by_key(key):
    theirs, ours = LazyTensorStorage(100), PackedEpisodeStorage(100)
    for storage in (theirs, ours):
        storage.set(range(70), rollout(1, 70)[0])
    for read in (ours.get, ours.__getitem__):
        back, expected = read(key), theirs.get(slice(None))[key]
        if isinstance(back, torch.Tensor):
            assert torch.equal(back, expected)
        else:
            assert_same(back, expected)


@pytest.mark.parametrize("boundary", ["pad", "stop", "include_reset"])
def test_sequences_around_anchors_are_those_of_a_lazy_tensor_storage(boundary):
    batches = []
    for kind in (LazyTensorStorage, PackedEpisodeStorage):
        unit = Sequence(length=5, burn_in=2, episode_boundary=boundary)
        buffer = TensorDictReplayBuffer(storage=kind(200), batch_size=12, sample_unit=unit)
        buffer.extend(rollout(1, 150)[0])
        torch.manual_seed(3)
        batches.append(buffer.sample())
    assert_same(batches[0], batches[1])


def tracked(storage):
    """Return a buffer whose steps may be patched later."""
    writer = TensorDictRoundRobinWriter(track_generations=True)
    return TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=4)


def test_a_patch_with_another_dtype_or_shape_or_key_is_refused():
    buffer = tracked(PackedEpisodeStorage(40))
    index = buffer.extend(rollout(1, 40)[0])
    generation = buffer.writer.generations_of(index)
    before = buffer.storage.get(slice(None))
    for patch, error, message in [
        ({"action": torch.zeros(40, 2).double()}, ValueError, "dtype mismatch for patch key action"),
        ({"action": torch.zeros(40, 3)}, ValueError, "shape mismatch for patch key action"),
        ({"speed": torch.zeros(40)}, KeyError, "speed.*does not exist in the storage"),
    ]:
        with pytest.raises(error, match=message):
            buffer.update_if_present(index=index, generation=generation, patch=patch)
    assert_same(buffer.storage.get(slice(None)), before)


@pytest.mark.parametrize("ndim", [1, 2])
def test_patches_reach_the_steps_that_are_still_there(ndim):
    results = []
    for kind in (LazyTensorStorage, PackedEpisodeStorage):
        buffer = tracked(kind(60, ndim=ndim))
        index = buffer.extend(rollout(3, 20) if ndim == 2 else rollout(1, 60)[0])
        generation = buffer.writer.generations_of(index)
        buffer.extend(rollout(3, 7, seed=4) if ndim == 2 else rollout(1, 21, seed=4)[0])
        patch = {"action": torch.full((60, 2), 7.0), ("next", "reward"): torch.full((60, 1), 8.0)}
        result = buffer.update_if_present(index=index, generation=generation, patch=patch)
        results.append((result.updated_count, buffer.storage.get(slice(None)).exclude("index")))
    assert results[0][0] == results[1][0] == 39
    assert_same(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_states_of_torchrls_storages_are_packed(kind, tmp_path):
    options = {"scratch_dir": tmp_path} if kind is LazyMemmapStorage else {}
    theirs = kind(100, **options)
    data = rollout(1, 70)[0]
    theirs.set(range(70), list(data.unbind(0)) if kind is ListStorage else data)
    ours = PackedEpisodeStorage(100)
    ours.load_state_dict(theirs.state_dict())
    assert len(ours) == 70
    assert_same(ours.get(slice(None)), data)


def test_states_of_bare_tensors_and_of_empty_storages_are_taken():
    theirs, ours = LazyTensorStorage(10), PackedEpisodeStorage(10)
    theirs.set(range(6), torch.arange(6))
    ours.load_state_dict(theirs.state_dict())
    assert ours.get(slice(None)).tolist() == list(range(6))
    ours.load_state_dict(ListStorage(10).state_dict())
    assert len(ours) == 0


def test_a_state_that_is_too_large_or_of_another_kind_changes_nothing():
    ours = PackedEpisodeStorage(10)
    ours.set(range(6), torch.arange(6))
    large = LazyTensorStorage(20)
    large.set(range(15), torch.arange(15))
    for state in (large.state_dict(), {"_storage": [b"packed"], "_metadata": []}, {"_storage": 3, "_len": 3}):
        with pytest.raises(StateMismatchError):
            ours.load_state_dict(state)
        assert ours.get(slice(None)).tolist() == list(range(6))


def test_compiled_functions_extend_and_sample_without_tracing_the_storage():
    storage = PackedEpisodeStorage(400)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=16)

    @torch.compile(backend="eager", fullgraph=False)
    def step(data, scale):
        scaled = data["x"] * scale
        buffer.extend(TensorDict({"x": scaled, "next": {"x": scaled + 1}}, batch_size=[50]))
        return buffer.sample()["x"].sum() + scaled.sum()

    for number in range(4):
        numbers = torch.arange(50.0) + 50 * number
        total = step(TensorDict({"x": numbers}, batch_size=[50]), torch.tensor(2.0))
        assert bool(torch.isfinite(total))
    back = storage.get(slice(None))
    assert torch.equal(back["x"], torch.arange(200.0) * 2)
    assert torch.equal(back["next", "x"], torch.arange(200.0) * 2 + 1)


def test_compiled_functions_may_use_views_and_slices():
    storage = PackedEpisodeStorage(200)
    storage.set(range(200), rollout(1, 200)[0])
    sampler = EpisodeSliceSampler(slice_len=4)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=32)

    @torch.compile(backend="eager", fullgraph=False)
    def step(value):
        storage[10:20].set_("action", value + 1)
        return storage.get(slice(10, 20))["action"] * 2, buffer.sample()["time"]

    doubled, times = step(torch.zeros(10, 2))
    assert bool((doubled == 2).all())
    assert bool((times.reshape(8, 4).diff(dim=1) == 1).all())


def test_changing_a_step_twice_in_one_batch_again_and_again_loses_nothing():
    storage = PackedEpisodeStorage(64)
    storage.set(range(64), TensorDict({"a": torch.arange(64.0), "b": torch.arange(64.0)}, batch_size=[64]))
    expected = torch.arange(64.0)
    generator = torch.Generator().manual_seed(0)
    for number in range(100):
        index = torch.randint(0, 64, (8,), generator=generator)
        values = torch.arange(8.0) + 10 * number
        storage.set(index, TensorDict({"a": values, "b": values}, batch_size=[8]), set_cursor=False)
        for place, value in zip(index.tolist(), values.tolist(), strict=True):
            expected[place] = value
        back = storage.get(slice(None))
        assert torch.equal(back["a"], expected)
        assert torch.equal(back["b"], expected)


CHANGES = {
    "a view": lambda buffer, done: buffer.storage[:].set_(("next", "done"), done),
    "the buffer": lambda buffer, done: buffer.set_(("next", "done"), done),
    "the storage": lambda buffer, done: buffer.storage.write(("next", "done"), done),
}


@pytest.mark.parametrize("name", CHANGES)
def test_samplers_that_remember_the_ends_of_episodes_notice_changes(name):
    sampler = SliceSampler(slice_len=5, cache_values=True, end_key=("next", "done"))
    buffer = ReplayBuffer(storage=PackedEpisodeStorage(40), sampler=sampler, batch_size=200)
    data = rollout(1, 40)[0]
    data["next", "done"] = torch.zeros(40, 1, dtype=torch.bool)
    buffer.extend(data)
    buffer.sample()
    done = torch.zeros(40, 1, dtype=torch.bool)
    done[19] = True
    CHANGES[name](buffer, done)
    times = buffer.sample()["time"].reshape(40, 5)
    assert not bool(((times[:, 0] <= 19) & (times[:, -1] > 19)).any())


def test_a_device_that_holds_no_numbers_is_replaced():
    storage = PackedEpisodeStorage(10, device="meta")
    with pytest.warns(UserWarning, match="cannot be honored"):
        storage.set(range(4), torch.arange(4))
    assert storage.get(slice(None)).tolist() == [0, 1, 2, 3]
