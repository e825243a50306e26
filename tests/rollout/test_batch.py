"""A TensorDict as arrays, each observation once, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from slipstream import Container, CorruptFileError, RolloutError, UnsupportedStateError
from slipstream.rollout.batch import build_batch, split_batch
from slipstream.rollout.files import RolloutFile, encode_rollout
from slipstream.rollout.layout import Layout, Rollout
from slipstream.rollout.reading import read_fields


def there_and_back(batch, **part):
    rollout = split_batch(batch)
    rollout.layout = Layout.from_json(rollout.layout.to_json())
    return back(rollout, **part)


def back(rollout: Rollout, keys=None, envs=None, steps=None):
    with RolloutFile(Container("rollout", buffer=encode_rollout(rollout, 1, {}))) as file:
        arrays = file.read(keys, envs=envs, steps=steps)
    return build_batch(rollout.layout, arrays, envs=envs, steps=steps, complete=keys is None)


def stored_bytes(rollout: Rollout) -> int:
    return sum(array.nbytes for array in rollout.arrays.values())


def test_a_rollout_comes_back_with_keys_batch_sizes_names_and_every_bit(make_rollout, same):
    batch = make_rollout()
    same(there_and_back(batch), batch)


def test_observations_that_next_repeats_are_kept_once(make_rollout):
    batch = make_rollout(num_envs=64, num_steps=32, ends=0)
    taken = split_batch(batch)
    assert set(taken.arrays) == {
        "agents/observation/state",
        "agents/observation/lidar",
        "exceptions",
        "next/agents/observation/state",
        "next/agents/observation/lidar",
        "action",
        "done",
        "next/done",
        "next/reward",
    }
    assert taken.arrays["agents/observation/state"].shape == (64, 33, 3)
    assert taken.arrays["next/agents/observation/state"].shape == (0, 3)
    once = sum(batch[key].nbytes for key in (("agents", "observation", "state"), ("agents", "observation", "lidar")))
    assert stored_bytes(taken) < taken.layout.raw_bytes - 0.9 * once


def test_what_an_episode_ended_with_is_kept_beside_what_the_next_began_with(make_rollout, same):
    batch = make_rollout(40, 20)
    ended = batch["next", "done"].squeeze(-1)[:, :-1]
    assert ended.any()
    taken = split_batch(batch)
    assert len(taken.arrays["next/agents/observation/state"]) == ended.sum()
    same(there_and_back(batch), batch)


def test_every_kind_of_number_comes_back_and_special_values_keep_their_bits(same):
    special = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-45], dtype=torch.float32)
    signalling = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    members = {"special": torch.cat([special, signalling]).repeat(3, 4, 1)}
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ):
        content = torch.arange(24, dtype=torch.float32).reshape(3, 4, 2)
        members[str(dtype)] = content.to(torch.float16).to(dtype) if dtype.itemsize == 1 else content.to(dtype)
    batch = TensorDict({**members, "next": {key: value.clone() for key, value in members.items()}}, batch_size=[3, 4])
    found = there_and_back(batch)
    assert list(found.keys(True, True)) == list(batch.keys(True, True))
    for key, value in batch.items(True, True):
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key].view(torch.uint8), value.contiguous().view(torch.uint8)), key


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 8), st.integers(1, 9)),
    inner=st.sampled_from([(), (1,), (2, 3)]),
    ends=st.sampled_from([0.0, 0.05, 0.1, 0.15, 0.2, 1.0]),  # few enough for exceptions, none, and all
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_part_of_any_rollout_is_that_part_of_the_whole(sizes, inner, ends, seed, data):
    generator = torch.Generator().manual_seed(seed)
    envs, steps = sizes
    long = torch.randn(envs, steps + 1, *inner, generator=generator)
    after = long[:, 1:].clone()
    after[torch.rand(envs, steps, generator=generator) < ends] = -1.0
    batch = TensorDict(
        {"x": long[:, :-1], "next": {"x": after}, "y": torch.rand(envs, steps)}, batch_size=[envs, steps]
    )
    first, last = sorted(data.draw(st.tuples(st.integers(0, envs), st.integers(0, envs))))
    begin, end = sorted(data.draw(st.tuples(st.integers(0, steps), st.integers(0, steps))))
    whole = there_and_back(batch)
    part = there_and_back(batch, envs=slice(first, last), steps=slice(begin, end))
    for key in batch.keys(True, True):
        assert torch.equal(whole[key], batch[key])
        assert torch.equal(part[key], batch[key][first:last, begin:end])


def test_only_the_arrays_of_the_keys_are_read(make_rollout):
    batch = make_rollout()
    rollout = split_batch(batch)
    content = bytearray(encode_rollout(rollout, 1, {}))
    # All other arrays are damaged, so that reading them would raise.
    for name, entry in Container("rollout", buffer=bytes(content)).entries.items():
        for chunk in entry.chunks:
            if name not in ("agents/observation/lidar", "action"):
                content[chunk.offset] ^= 1
    container = Container("rollout", buffer=content)
    found = read_fields(rollout.layout, container, [("agents", "observation", "lidar"), "action"])
    with pytest.raises(CorruptFileError, match="checksum"):
        read_fields(rollout.layout, container)
    assert set(found) == {("agents", "observation", "lidar"), ("action",)}
    part = back(rollout, [("agents", "observation", "lidar"), "action"])
    assert set(part.keys(True, True)) == {("agents", "observation", "lidar"), "action"}
    assert back(rollout, ["next"])["next"].keys() == batch["next"].keys()


def test_a_key_that_is_not_there_is_named_with_those_that_are(make_rollout):
    with pytest.raises(KeyError, match="nothing under 'agents/lidar'.*agents/observation/state"):
        there_and_back(make_rollout(), keys=[("agents", "lidar")])


def test_several_axes_of_environments_and_axes_after_time_are_kept(same):
    batch = TensorDict(
        {"x": torch.rand(2, 3, 5, 7), "nested": TensorDict({"y": torch.rand(2, 3, 5, 4)}, batch_size=[2, 3, 5, 4])},
        batch_size=[2, 3, 5],
        names=[None, None, "time"],
    )
    same(there_and_back(batch), batch)
    assert torch.equal(there_and_back(batch, envs=slice(3, 6))["x"], batch["x"].reshape(6, 5, 7)[3:6])
    tail = TensorDict({"x": torch.rand(4, 5, 2, 3)}, batch_size=[4, 5, 2])
    same(there_and_back(tail), tail)
    alone = TensorDict({"x": torch.rand(5, 3), "next": {"x": torch.rand(5, 3)}}, batch_size=[5])
    same(there_and_back(alone), alone)
    with pytest.raises(RolloutError, match="without an axis for environments"):
        there_and_back(alone, envs=slice(0, 1))


def test_empty_ones_come_back(same):
    for batch in (
        TensorDict({}, batch_size=[2, 3]),
        TensorDict({"x": torch.rand(0, 4, 2)}, batch_size=[0, 4]),
        TensorDict({"x": torch.rand(2, 0, 2), "next": {"x": torch.rand(2, 0, 2)}}, batch_size=[2, 0]),
        TensorDict({"a": TensorDict({}, batch_size=[2, 3]), "x": torch.rand(2, 3, 0)}, batch_size=[2, 3]),
    ):
        same(there_and_back(batch), batch)


def test_the_batch_may_be_overwritten_at_once(make_rollout, same):
    batch = make_rollout()
    before = batch.clone()
    taken = split_batch(batch)
    for value in batch.values(True, True):
        value.zero_()
    same(back(taken), before)


def test_memory_mapped_tensors_are_tensors(tmp_path):
    batch = TensorDict({"x": torch.rand(3, 4)}, [3, 4])
    assert torch.equal(there_and_back(batch.memmap(tmp_path))["x"], batch["x"])


def test_gradients_stay_behind():
    weight = torch.ones(2, requires_grad=True)
    batch = TensorDict({"x": torch.ones(3, 4, 2) * weight}, batch_size=[3, 4])
    assert not there_and_back(batch)["x"].requires_grad


def test_time_before_environments_is_noticed_by_name_and_by_content(make_rollout):
    batch = make_rollout(num_envs=20, num_steps=10)
    swapped = batch.transpose(0, 1)
    with pytest.raises(RolloutError, match="first axis of the batch .* is named 'time'.*transpose"):
        split_batch(swapped)
    nameless = swapped.contiguous()
    nameless.names = None
    with pytest.raises(RolloutError, match="follows along the first axis.*transpose"):
        split_batch(nameless)


def test_what_is_not_a_rollout_is_refused_with_a_sentence(make_rollout):
    with pytest.raises(RolloutError, match="not a dict"):
        split_batch({"x": torch.zeros(2, 3)})
    with pytest.raises(RolloutError, match="no batch size"):
        split_batch(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[]))
    words = make_rollout()
    words["task"] = NonTensorData("fly", batch_size=[6, 8])
    with pytest.raises(RolloutError, match="task is not a tensor"):
        split_batch(words)
    sparse = TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3])
    sparse["nested", "y"] = torch.zeros(2, 3, 4).to_sparse()
    with pytest.raises(UnsupportedStateError, match="nested/y has layout torch.sparse_coo"):
        split_batch(sparse)


def test_a_stack_whose_parts_have_different_keys_is_refused(same):
    one, other = TensorDict({"x": torch.zeros(3)}, [3]), TensorDict({"x": torch.ones(3), "y": torch.ones(3)}, [3])
    with pytest.raises(RolloutError, match="different keys: y"):
        split_batch(LazyStackedTensorDict(one, other, stack_dim=0))
    long = TensorDict({"x": torch.zeros(3, 2)}, [3])
    with pytest.raises(RolloutError, match="x has different shapes in different environments"):
        split_batch(LazyStackedTensorDict(one, long, stack_dim=0))
    found = there_and_back(LazyStackedTensorDict(one, one.clone() + 1, stack_dim=0))
    assert torch.equal(found["x"], torch.stack([torch.zeros(3), torch.ones(3)]))


@pytest.mark.parametrize("mask", [torch.zeros(40), torch.zeros(40, 19), torch.zeros(40, 1, 1, dtype=torch.bool)])
def test_a_wrong_mask_is_damage(make_rollout, mask):
    rollout = split_batch(make_rollout(40, 20))
    rollout.arrays["exceptions"] = mask.numpy()
    with pytest.raises(CorruptFileError, match="next/agents/observation/state is stored in the array 'exceptions' of"):
        back(rollout)


@pytest.mark.parametrize("name", ["agents/observation/state", "exceptions", "next/agents/observation/state"])
def test_arrays_that_do_not_fit_the_layout_are_damage(make_rollout, name):
    rollout = split_batch(make_rollout(40, 20))
    rollout.arrays[name] = rollout.arrays[name][:3]
    with pytest.raises(CorruptFileError, match="is .*, expected|exceptions"):
        back(rollout)
