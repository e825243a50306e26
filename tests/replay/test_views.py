"""Views of a storage whose batches have more axes than steps: every write reaches the storage, or raises."""

import threading

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyTensorStorage

from slipstream import PackedEpisodeStorage, ReplayError
from tests.replay.samples import assert_same

NUM_STEPS = 40


def agents(seed=0):
    """Return steps of three agents: a batch of [time, agents]."""
    generator = torch.Generator().manual_seed(seed)
    size = [NUM_STEPS, 3]
    seen = torch.randn(NUM_STEPS + 1, 3, 4, generator=generator)
    inner = TensorDict({"speed": torch.randn(*size, 2, generator=generator)}, size)
    after = TensorDict({"seen": seen[1:].clone(), "done": torch.zeros(*size, 1, dtype=torch.bool)}, size)
    number = torch.arange(NUM_STEPS * 3).reshape(size)
    return TensorDict({"seen": seen[:-1].clone(), "number": number, "inner": inner, "next": after}, size)


def pair(ndim=1):
    """Return TorchRL's storage and ours, with the same content."""
    storages = []
    for kind in (LazyTensorStorage, PackedEpisodeStorage):
        storage = kind(NUM_STEPS * 3 ** (ndim - 1), ndim=ndim)
        storage.set(range(NUM_STEPS), agents())
        storages.append(storage)
    return storages


OTHER = agents(seed=1)
WRITES = {
    "one agent": lambda storage: storage[2:9][:, 1].fill_("seen", 5.0),
    "some agents": lambda storage: storage[2:9][:, 1:3].fill_("number", 5),
    "one agent of a step": lambda storage: storage[4][2].fill_("seen", 5.0),
    "exchanged axes": lambda storage: storage[2:9].transpose(0, 1)[1].fill_("seen", 5.0),
    "joined axes": lambda storage: storage[2:9].reshape(-1)[4:11].fill_("seen", 5.0),
    "split axes": lambda storage: storage[2:8].unflatten(0, (2, 3))[1, :, 2].fill_("seen", 5.0),
    "agent by agent": lambda storage: [part.fill_("number", i) for i, part in enumerate(storage[:].unbind(1))],
    "parts of parts": lambda storage: [part.fill_("seen", 3.0) for part in storage[3].unbind(0)],
    "a place": lambda storage: storage[2:9][:, 1].set_at_("seen", torch.ones(4), 3),
    "places": lambda storage: storage[2:9].set_at_("seen", torch.ones(2, 4), (torch.tensor([0, 5]), [2, 1])),
    "a mask": lambda storage: storage[2:9].__setitem__(torch.arange(21).reshape(7, 3) % 4 == 0, OTHER.view(-1)[:6]),
    "arithmetic": lambda storage: storage[2:9][:, 1].select("seen", ("inner", "speed")).mul_(2),
    "zero": lambda storage: storage[2:9][:, 1].zero_(),
    "a function": lambda storage: storage[2:9][:, 1].apply_(torch.Tensor.zero_),
    "an assignment": lambda storage: storage[2:9].__setitem__((slice(None), 1), OTHER[:7, 1]),
    "an assignment to a view": lambda storage: storage[2:9][:, 1].__setitem__(slice(0, 3), OTHER[:3, 1]),
    "an update": lambda storage: storage[2:9][:, 1].update_(OTHER[:7, 1].select("seen", ("inner", "speed"))),
    "an update of some keys": lambda storage: storage[:].update_(OTHER, keys_to_update=["number", ("next", "seen")]),
    "a nested tensordict": lambda storage: storage[2:9]["inner"][:, 2].fill_("speed", 3.0),
    "another dtype": lambda storage: storage[2:8].select("seen").view(torch.int32)[:, 1].zero_(),
    "an expanded step": lambda storage: storage[2][None].expand(4, 3)[1].fill_("seen", 2.0),
    "a shallow copy": lambda storage: storage[2:8].copy()[:, 1].fill_("seen", 2.0),
    "a renamed key": lambda storage: storage[2:8].rename_key_("seen", "sight").fill_("sight", 2.0),
    "a container": lambda storage: TensorDict({"steps": storage[2:8]}, [6])[1:3].fill_(("steps", "seen"), 7.0),
    "what torch has to copy": lambda storage: storage[2:8].transpose(0, 1).reshape(-1).fill_("seen", 9.0),
}


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("name", WRITES)
def test_writes_through_any_view_are_those_of_a_lazy_tensor_storage(name, ndim):
    storages = pair(ndim)
    for storage in storages:
        WRITES[name](storage)
    assert_same(storages[0].get(slice(None)), storages[1].get(slice(None)))


def test_a_view_and_views_of_it_show_what_was_written_through_any_of_them():
    _, storage = pair()
    view = storage[2:9]
    part = view[:, 1]
    assert not bool((part["seen"] == 5).any())
    view.fill_("seen", 5.0)
    assert bool((part["seen"] == 5).all())
    part.fill_("seen", 6.0)
    assert bool((view["seen"][:, 1] == 6).all())
    assert bool((view["seen"][:, 0] == 5).all())


def test_a_view_shows_the_steps_that_were_there_when_it_was_made():
    _, storage = pair()
    view, part, batch = storage[2:9], storage[2:9][1:3], storage[torch.arange(2, 9)]
    before = storage.get(slice(2, 9))
    storage.set(range(NUM_STEPS), OTHER)
    assert_same(view.clone(), before)
    assert_same(part.clone(), before[1:3])
    assert_same(batch.clone(), before)


def test_arithmetic_does_not_write_back_what_is_outdated():
    _, storage = pair()
    view = storage[2:9].select("number")
    assert int(view["number"][0, 0]) == 6
    storage.write("number", 100)
    view.add_(1)
    assert bool((storage["number"][2:9] == 101).all())


def test_threads_may_write_to_different_agents_of_the_same_steps():
    _, storage = pair()

    def write(agent):
        view = storage[:][:, agent]
        for number in range(20):
            view.fill_("number", 100 * agent + number)

    threads = [threading.Thread(target=write, args=(agent,)) for agent in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(storage["number"], torch.tensor([19, 119, 219]).expand(NUM_STEPS, 3))


def test_a_batch_that_is_a_copy_keeps_what_is_written_to_it_and_its_parts():
    _, storage = pair()
    before = storage.get(slice(None))
    batch = storage[torch.tensor([3, 7, 3])]
    batch[:, 1].fill_("seen", 5.0)
    batch.select("number").mul_(0)
    assert bool((batch["seen"][:, 1] == 5).all())
    assert not bool(batch["number"].any())
    assert_same(storage.get(slice(None)), before)


def test_arithmetic_in_place_on_a_container_of_steps_is_refused():
    _, storage = pair()
    before = storage.get(slice(None))
    steps = storage[2:8].select("seen")
    for outer in (TensorDict({"steps": steps}, [6]), lazy_stack([steps])):
        with pytest.raises(ReplayError, match="put a clone of them there"):
            outer.mul_(2)
        assert bool((outer * 2 == outer + outer).all())
    assert_same(storage.get(slice(None)), before)


def test_a_number_of_one_step_may_be_changed():
    storage = PackedEpisodeStorage(5)
    storage.set(range(5), TensorDict({"number": torch.zeros(5)}, [5]))
    storage[2].set_("number", torch.tensor(3.0))
    storage[3].fill_("number", 4.0)
    assert storage["number"].tolist() == [0, 0, 3, 4, 0]
