"""Batches of every kind next to `LazyTensorStorage`: text, pytrees, tensorclasses, and stacks of unequal shapes."""

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass
from torch.utils import _pytree as pytree
from torchrl.data import LazyTensorStorage, ReplayBuffer

from slipstream import PackedEpisodeStorage, ReplayError, UnsupportedStateError
from tests.replay.samples import rollout


class Step(NamedTuple):
    obs: torch.Tensor
    reward: torch.Tensor


def with_text(first, count):
    """Return steps whose text tells their number."""
    numbers = range(first, first + count)
    words = NonTensorStack(*[f"step {number}" for number in numbers])
    inner = NonTensorStack(*[{"number": number} for number in numbers])
    content = {"x": torch.arange(first, first + count).float(), "text": words, "nested": {"info": inner}}
    return TensorDict(content, batch_size=[count]).set("task", NonTensorData("fly", batch_size=[count]))


def pair(capacity=10, ndim=1):
    return LazyTensorStorage(capacity, ndim=ndim), PackedEpisodeStorage(capacity, ndim=ndim)


INDICES = {
    "a number": 2,
    "a slice": slice(1, 5),
    "a tensor": torch.tensor([3, 0, 3]),
    "a mask": torch.arange(8) % 3 == 0,
    "a list": [7, 1],
}


@pytest.mark.parametrize("name", INDICES)
def test_text_comes_back_with_its_step(name):
    theirs, ours = pair()
    for storage in (theirs, ours):
        storage.set(range(8), with_text(0, 8))
    for read in (ours.get, ours.__getitem__):
        back, expected = read(INDICES[name]), theirs.get(INDICES[name])
        for key in ("text", "task", ("nested", "info")):
            assert back[key] == expected[key]
        assert torch.equal(back["x"], expected["x"])


def test_text_is_overwritten_like_tensors_and_missing_where_a_batch_has_none():
    _, ours = pair()
    ours.set(range(8), with_text(0, 8))
    ours.set(torch.tensor([8, 9, 0, 1]), with_text(8, 4))
    assert ours.get(slice(None))["text"] == [f"step {n}" for n in (10, 11, 2, 3, 4, 5, 6, 7, 8, 9)]
    ours.set(range(2, 4), with_text(20, 2).exclude("text"))
    assert ours.get(slice(1, 5))["text"] == ["step 11", None, None, "step 4"]
    assert ours.get(slice(1, 5))["x"].tolist() == [11, 20, 21, 4]


def test_text_is_changed_through_a_view_and_by_assignment():
    theirs, ours = pair(8)
    for storage in (theirs, ours):
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        buffer.extend(with_text(0, 8))
        storage[1:3].set_("text", NonTensorStack("one", "two"))
        buffer[4:6] = with_text(40, 2)
    assert ours.get(slice(None))["text"] == theirs.get(slice(None))["text"]
    ours.write("text", NonTensorData("same"), slice(0, 2))
    assert ours.get(slice(0, 3))["text"] == ["same", "same", "two"]


def test_text_of_environments_and_of_more_batch_axes_comes_back():
    words = [[f"{env} {time}" for time in range(5)] for env in range(3)]
    stack = NonTensorStack(*[NonTensorStack(*row) for row in words])
    data = TensorDict({"x": torch.arange(15.0).reshape(3, 5), "text": stack}, batch_size=[3, 5])
    for ndim in (1, 2):
        storage = PackedEpisodeStorage(30, ndim=ndim)
        storage.set(range(3), data)
        back = storage.get(slice(1, 3))
        assert back["text"] == words[1:]
        assert torch.equal(back["x"], data["x"][1:])


def test_text_survives_folders_states_and_pickles(tmp_path):
    _, ours = pair()
    ours.set(range(8), with_text(0, 8))
    ours.dumps(tmp_path)
    copies = [PackedEpisodeStorage(10), PackedEpisodeStorage(10), pickle.loads(pickle.dumps(ours))]
    copies[0].loads(tmp_path)
    copies[1].load_state_dict(ours.state_dict())
    for copy in copies:
        back = copy.get(slice(None))
        assert back["text"] == [f"step {n}" for n in range(8)]
        assert back["nested", "info"][5] == {"number": 5}
        copy.set(range(8, 10), with_text(8, 2))
        assert copy.get(9)["text"] == "step 9"


def test_objects_that_are_not_plain_are_kept_but_not_saved(tmp_path):
    class Camera:
        pass

    camera = Camera()
    data = TensorDict({"x": torch.zeros(4), "camera": NonTensorData(camera, batch_size=[4])}, batch_size=[4])
    storage = PackedEpisodeStorage(10)
    storage.set(range(4), data)
    assert storage.get(2)["camera"] is camera
    with pytest.raises(UnsupportedStateError, match="'camera' holds a .*Camera, .*store text, finite numbers"):
        storage.dumps(tmp_path)
    with pytest.raises(UnsupportedStateError, match="'camera' holds a .*Camera"):
        storage.state_dict()


def trees(first, count):
    """Return batches of nested containers whose numbers tell the step."""
    numbers = torch.arange(first, first + count)
    return {
        "a dict": {"obs": numbers[:, None].float(), "inner": {"action": [numbers, (numbers * 2,)]}, 30: -numbers},
        "a tuple": (numbers, {"b": numbers.float()[:, None]}),
        "a named tuple": Step(numbers[:, None].expand(count, 3).clone(), numbers.double()),
        "names that look the same": {30: numbers, "30": numbers + 1000},
    }


@pytest.mark.parametrize("name", trees(0, 1))
def test_containers_of_tensors_come_back_as_they_were(name):
    theirs, ours = pair()
    for storage in (theirs, ours):
        storage.set(range(6), trees(0, 6)[name])
        storage.set(torch.tensor([6, 7, 8, 9, 0]), trees(6, 5)[name])
        storage.set(3, pytree.tree_map(lambda tensor: tensor[0], trees(100, 1)[name]))
    for index in (slice(None), 4, torch.tensor([2, 9, 3])):
        for read in (ours.get, ours.__getitem__):
            back, expected = read(index), theirs.get(index)
            assert pytree.tree_structure(back) == pytree.tree_structure(expected)
            assert all(map(torch.equal, pytree.tree_leaves(back), pytree.tree_leaves(expected)))


def test_containers_work_with_a_buffer_and_lists_of_items():
    buffer = ReplayBuffer(storage=PackedEpisodeStorage(20), batch_size=6)
    buffer.extend([({"obs": torch.full((3,), n)}, torch.tensor(n)) for n in range(10)])
    buffer.add(({"obs": torch.full((3,), 10)}, torch.tensor(10)))
    content, number = buffer.sample()
    assert torch.equal(content["obs"], number[:, None].expand(6, 3))
    assert len(buffer) == 11
    with pytest.raises(RuntimeError, match="Stacking the elements of the list resulted in an error"):
        buffer.extend([torch.zeros(4), torch.zeros(1)])


def test_observations_under_next_of_a_dict_are_kept_once():
    state = torch.randn(2001, 24)
    storage = PackedEpisodeStorage(2000)
    storage.set(range(2000), {"obs": state[:-1], "next": {"obs": state[1:]}})
    assert torch.equal(storage.get(slice(None))["next"]["obs"], state[1:])
    assert storage.get_stats()["held_bytes"] < 0.75 * storage.get_stats()["raw_bytes"]


@pytest.mark.parametrize("name", trees(0, 1))
def test_containers_are_saved_and_named_tuples_take_their_class_from_the_next_batch(name, tmp_path):
    storage = PackedEpisodeStorage(10)
    storage.set(range(6), trees(0, 6)[name])
    storage.dumps(tmp_path)
    restored = PackedEpisodeStorage(10)
    restored.loads(tmp_path)
    expected = pytree.tree_leaves(storage.get(slice(None)))
    assert all(map(torch.equal, pytree.tree_leaves(restored.get(slice(None))), expected))
    if name == "a named tuple":
        assert type(restored.get(2)) is tuple
    restored.set(range(6, 8), trees(6, 2)[name])
    assert type(restored.get(2)) is type(storage.get(2))


def test_a_pickled_copy_knows_the_class_of_its_steps():
    storage = PackedEpisodeStorage(10)
    storage.set(range(6), trees(0, 6)["a named tuple"])
    back = pickle.loads(pickle.dumps(storage)).get(slice(None))
    assert isinstance(back, Step)
    assert torch.equal(back.reward, torch.arange(6.0).double())


def test_batches_of_another_type_are_refused():
    storage = PackedEpisodeStorage(10)
    storage.set(range(4), {"obs": torch.zeros(4)})
    for other in (torch.zeros(4), TensorDict({"obs": torch.zeros(4)}, batch_size=[4])):
        with pytest.raises(ReplayError, match="of another type than those before"):
            storage.set(range(4), other)
    with pytest.raises(UnsupportedStateError, match="reward is a float, expected"):
        storage.set(range(4), {"obs": torch.zeros(4), "reward": 1.0})
    with pytest.raises(ReplayError, match="lacks"):
        storage.set(range(4), {"other": torch.zeros(4)})
    assert len(storage) == 4


@tensorclass
class Inner:
    velocity: torch.Tensor


@tensorclass
class Record:
    obs: torch.Tensor
    text: str
    inner: Inner


def records(count):
    numbers = torch.arange(count).float()
    # The decorator adds these arguments, which a type checker does not see.
    make_inner: Any = Inner
    make_record: Any = Record
    inner = make_inner(velocity=-numbers, batch_size=[count])
    return make_record(obs=numbers, text="label", inner=inner, batch_size=[count])


@pytest.mark.parametrize("copied", [False, True])
def test_nested_tensorclasses_with_text_come_back(copied):
    storage = PackedEpisodeStorage(10)
    storage.set(range(6), records(6))
    if copied:
        storage = pickle.loads(pickle.dumps(storage))
    for back in (storage.get(slice(2, 5)), storage[2:5], storage[1:][1:4], storage[:].split([2, 3, 1])[1]):
        assert type(back) is Record
        assert type(back.inner) is Inner
        assert back.inner.velocity.tolist() == [-2, -3, -4]
        assert list(back.text) == ["label"] * 3


def test_tensorclasses_in_a_folder_take_their_class_from_the_storage_or_the_next_batch(tmp_path):
    storage = PackedEpisodeStorage(10)
    storage.set(range(6), records(6))
    storage.dumps(tmp_path)
    known, unknown = PackedEpisodeStorage(10), PackedEpisodeStorage(10)
    known.set(range(2), records(2))
    known.loads(tmp_path)
    unknown.loads(tmp_path)
    assert type(known.get(0)) is Record
    assert unknown.get(3)["obs"] == 3
    unknown.set(range(6, 8), records(2))
    assert type(unknown.get(3)) is Record


def ragged(first, count):
    """Return a lazy stack of steps that see another number of points each."""
    steps = []
    for number in range(first, first + count):
        points = torch.full((number % 3 + 1, 2), float(number))
        steps.append(TensorDict({"points": points, "x": torch.tensor(number)}, batch_size=[]))
    return lazy_stack(steps)


def test_tensors_with_another_shape_in_each_step_come_back():
    storage = PackedEpisodeStorage(10)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    buffer.extend(ragged(0, 8))
    buffer.extend(ragged(8, 5))
    for read in (storage.get, storage.__getitem__):
        for place, number in [(0, 10), (2, 12), (5, 5), (9, 9)]:
            step = read(place)
            assert step["x"] == number
            assert torch.equal(step["points"], torch.full((number % 3 + 1, 2), float(number)))
    for step in buffer.sample():
        assert len(step["points"]) == int(step["x"]) % 3 + 1
        assert bool((step["points"] == step["x"]).all())
    assert storage.get(torch.tensor([3, 6]))["points"].shape == (2, 1, 2)


def test_keys_that_only_some_parts_of_a_stack_have_come_back():
    steps = [TensorDict({"x": torch.tensor(0)}), TensorDict({"x": torch.tensor(1), "extra": torch.ones(2)})]
    storage = PackedEpisodeStorage(4)
    storage.set(range(2), lazy_stack(steps))
    assert "extra" not in storage.get(0)
    assert storage.get(1)["extra"].tolist() == [1, 1]
    assert storage.get(slice(None))["x"].tolist() == [0, 1]


def test_ragged_axes_after_the_steps_come_back():
    parts = [TensorDict({"a": torch.rand(5, size, 8), "x": torch.arange(5)}, batch_size=[5]) for size in (4, 3)]
    storage = PackedEpisodeStorage(6)
    ReplayBuffer(storage=storage, batch_size=3).extend(lazy_stack(parts, 1))
    back = storage.get(3)
    assert back.batch_size == (2,)
    for number, part in enumerate(parts):
        assert torch.equal(back[number]["a"], part["a"][3])
    assert back["x"].tolist() == [3, 3]


def test_ragged_tensors_are_copied_by_pickle_and_refused_by_folders(tmp_path):
    storage = PackedEpisodeStorage(10)
    storage.set(range(4), ragged(0, 4))
    copy = pickle.loads(pickle.dumps(storage))
    assert torch.equal(copy.get(2)["points"], torch.full((3, 2), 2.0))
    with pytest.raises(UnsupportedStateError, match="points have another shape in each step.*pad them"):
        storage.dumps(tmp_path)


def test_a_storage_of_steps_that_were_declared_but_never_written_is_empty():
    storage = PackedEpisodeStorage(10)
    storage.set(range(0), rollout(1, 1)[0][:0])
    assert len(storage) == 0
