"""Batches of any kind: taken apart by key, built again, copied, moved, stamped, and as plain data."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from slipstream import UnsupportedStateError
from slipstream.batches import (
    STAMP,
    build,
    clone,
    flatten,
    from_state,
    is_tensordict,
    map_tensors,
    move,
    stamp,
    tensors_of,
    to_state,
)


def assert_same(one: Any, other: Any) -> None:
    """Compare two TensorDicts: keys and their order, batch sizes, axis names, devices and values."""
    assert list(one.keys(True)) == list(other.keys(True))
    assert one.batch_size == other.batch_size
    assert one.names == other.names
    assert one.device == other.device
    for key in one.keys(True):
        if isinstance(one[key], torch.Tensor):
            assert one[key].dtype == other[key].dtype
            assert torch.equal(one[key], other[key]), key
        else:
            assert one[key].batch_size == other[key].batch_size, key


def batch() -> TensorDict:
    inner = TensorDict({"deep": torch.arange(24.0).reshape(2, 3, 4)}, batch_size=[2, 3, 4])
    return TensorDict(
        {"agents": {"observation": torch.rand(2, 3, 5), "inner": inner}, "done": torch.zeros(2, 3, dtype=torch.bool)},
        batch_size=[2, 3],
        names=[None, "time"],
    )


@st.composite
def tensordicts(draw, depth=3, batch_size=(2, 3)):
    """Draw nested TensorDicts, empty ones and larger batch sizes included."""
    made = TensorDict({}, batch_size=batch_size)
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=3)):
        if depth and draw(st.booleans()):
            more = draw(st.sampled_from([(), (4,)]))
            made[name] = draw(tensordicts(depth - 1, (*batch_size, *more)))
        else:
            made[name] = torch.randint(0, 9, (*batch_size, *draw(st.sampled_from([(), (1,), (2, 2)]))))
    return made


@settings(max_examples=60, deadline=None)
@given(tensordicts())
def test_a_tensordict_is_built_again_from_its_members(original):
    members = flatten(original)
    assert_same(build(members, original.batch_size), original)
    tensors = {key: value for key, value in members.items() if isinstance(value, torch.Tensor)}
    flat = original.flatten_keys("/")
    assert list(tensors) == [tuple(key.split("/")) for key in flat.keys(False) if isinstance(flat[key], torch.Tensor)]


def test_members_are_tensors_and_the_sizes_of_nested_tensordicts_in_order():
    original = batch()
    members = flatten(original)
    assert list(members) == [
        ("agents",),
        ("agents", "observation"),
        ("agents", "inner"),
        ("agents", "inner", "deep"),
        ("done",),
    ]
    assert members["agents", "inner"] == torch.Size([2, 3, 4])
    assert members["done",] is original["done"]


def test_axes_and_devices_are_set_where_they_are_asked_for():
    original = batch()
    members = flatten(original)
    assert_same(build(members, (2, 3), names=(None, "time")), original)
    moved = build(members, (2, 3), device=torch.device("cpu"))
    assert moved.device == moved["agents", "inner"].device == torch.device("cpu")


def test_nested_tensordicts_that_are_not_listed_are_created():
    made = build({("a", "b", "c"): torch.ones(2, 3), ("d",): torch.zeros(2)}, (2,))
    assert made["a", "b"].batch_size == (2,)
    assert list(made.keys()) == ["a", "d"]


def test_a_tensor_that_does_not_fit_the_batch_size_is_an_error():
    with pytest.raises(RuntimeError, match="batch dimension"):
        build({("a",): torch.ones(3)}, (2,))


def test_what_is_not_a_tensor_is_handed_to_the_caller():
    words = batch()
    words["task"] = NonTensorData("fly", batch_size=[2, 3])
    assert isinstance(flatten(words)["task",], NonTensorData)


def test_memory_mapped_tensors_become_tensors(tmp_path):
    members = flatten(TensorDict({"x": torch.ones(3)}, [3]).memmap(tmp_path))
    assert type(members["x",]) is torch.Tensor


def test_stacks_of_unlike_parts_are_refused():
    one = TensorDict({"x": torch.zeros(3)}, [3])
    other = TensorDict({"x": torch.ones(3), "y": torch.ones(3)}, [3])
    with pytest.raises(ValueError, match="the batch is a stack whose parts have different keys: y are not in all"):
        flatten(LazyStackedTensorDict(one, other, stack_dim=0))
    long = TensorDict({"x": torch.zeros(3, 2)}, [3])
    with pytest.raises(ValueError, match="x has different shapes in different environments"):
        flatten(LazyStackedTensorDict(one, long, stack_dim=0))
    stack = flatten(LazyStackedTensorDict(one, one + 1, stack_dim=0))
    assert torch.equal(stack["x",], torch.stack([torch.zeros(3), torch.ones(3)]))


def test_every_tensor_of_nested_dicts_lists_and_tuples_is_visited_with_its_path():
    tree = {"a": [torch.zeros(1), (torch.ones(1), "text")], "td": batch()}
    seen = []

    def add_one(path, tensor):
        seen.append(path)
        return tensor + 1

    made = map_tensors(tree, add_one)
    assert seen[:2] == [("a", 0), ("a", 1, 0)]
    assert ("td", ("agents", "inner", "deep")) in seen
    assert made["a"][1][0].item() == 2
    assert made["a"][1][1] == "text"
    assert torch.equal(made["td"]["agents", "observation"], tree["td"]["agents", "observation"] + 1)
    assert len(tensors_of(tree)) == 5


def test_a_clone_shares_nothing():
    original = {"x": torch.zeros(2), "note": ["text"]}
    copied = clone(original)
    copied["x"] += 1
    copied["note"].append("more")
    assert original["x"].sum() == 0  # type: ignore[attr-defined]
    assert original["note"] == ["text"]


def test_a_batch_that_is_where_it_should_be_is_not_copied():
    tree = {"x": torch.zeros(2)}
    assert move(tree, None) is tree
    assert move(tree, torch.device("cpu")) is tree
    assert move(tree, torch.device("meta"))["x"].is_meta
    td = batch().to("cpu")
    assert move(td, torch.device("cpu")) is td
    assert move(td, torch.device("meta"))["done"].is_meta


def test_a_stamp_names_the_weights_of_every_element_or_of_the_whole_batch():
    td = stamp(batch(), 7)
    assert td[STAMP].tolist() == [[7] * 3] * 2
    assert td[STAMP].dtype == torch.int64
    plain = stamp({"collector": {"other": 1}}, 7)
    assert plain["collector"]["other"] == 1
    assert plain["collector"]["policy_version"].item() == 7
    assert stamp([1, 2], 7) == [1, 2]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_batch_comes_back_from_plain_data(device):
    td = batch()
    if device is not None:
        td = td.to(device)
    td["task"] = NonTensorData("fly", batch_size=[2, 3])
    state = to_state(td)
    again = from_state(state)
    assert again["task"] == "fly"
    assert_same(again.exclude("task"), td.exclude("task"))
    again["done"].fill_(True)
    assert not state["members"]["done"].any()
    tree = {"x": [torch.ones(2)], "n": 3}
    assert from_state(to_state(tree))["x"][0].tolist() == [1, 1]


def test_a_batch_that_cannot_be_made_plain_is_refused():
    ragged = LazyStackedTensorDict(TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.ones(3)}), stack_dim=0)
    with pytest.raises(UnsupportedStateError, match="cannot be stored"):
        to_state(ragged)
    words = batch()
    words["task"] = NonTensorStack(NonTensorData("fly", batch_size=[3]), NonTensorData("land", batch_size=[3]))
    with pytest.raises(UnsupportedStateError, match="task is a NonTensorStack"):
        to_state(words)


def test_plain_batches_need_no_tensordict():
    script = (
        "import sys, torch\n"
        "from slipstream.batches import clone, from_state, is_tensordict, move, stamp, to_state\n"
        "batch = stamp({'x': [torch.ones(2)]}, 3)\n"
        "assert from_state(to_state(move(batch, torch.device('cpu'))))['x'][0].sum() == 2\n"
        "assert not is_tensordict(batch)\n"
        "assert 'tensordict' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert is_tensordict(batch())
