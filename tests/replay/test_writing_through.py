"""Writes that reach the storage, keys that come later, other processes: next to `LazyTensorStorage`."""

import copy
import multiprocessing
import os
import pickle
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
from torchrl.envs.transforms import RewardScaling

from slipstream import EpisodeSliceSampler, EpisodeStore, PackedEpisodeStorage, ReplayError, StateMismatchError
from tests.replay.samples import assert_same, episode, rollout


def pair(ndim=1):
    """Return a full buffer on TorchRL's storage and one on ours, with the same content."""
    data = rollout(3, 40)
    buffers = []
    for kind in (LazyTensorStorage, PackedEpisodeStorage):
        buffer = ReplayBuffer(storage=kind(120, ndim=ndim), batch_size=8)
        buffer.extend(data.clone() if ndim == 2 else data.reshape(-1).clone())
        buffers.append(buffer)
    return buffers


NEW = rollout(3, 40, seed=9).reshape(-1)

WRITES = {
    "a key": lambda rb: rb.__setitem__("action", torch.full((120, 2), 3.0)),
    "a nested key": lambda rb: rb.__setitem__(("next", "reward"), torch.full((120, 1), 3.0)),
    "fill": lambda rb: rb[:].fill_("action", 4.0),
    "a nested tensordict": lambda rb: rb.storage[:]["next"].set_("reward", torch.ones(120, 1)),
    "a slice": lambda rb: rb.storage[:10].set_("action", torch.ones(10, 2)),
    "a slice of a slice": lambda rb: rb.storage[10:50][5:9].set_("action", torch.ones(4, 2)),
    "zero": lambda rb: rb.storage[:]["next"].zero_(),
    "steps": lambda rb: rb[:].__setitem__(slice(3, 8), NEW[:5]),
    "one step": lambda rb: rb.set_at_("action", torch.ones(2), 3),
    "some keys": lambda rb: rb[:].select("action", "next").fill_("action", 4.0),
    "all but some keys": lambda rb: rb[:].exclude("time")["next"].fill_("reward", 4.0),
    "joined keys": lambda rb: rb[:].flatten_keys(".").fill_("next.reward", 4.0),
    "steps of a nested tensordict": lambda rb: rb[:]["next"][3:9].fill_("reward", 4.0),
    "step by step": lambda rb: [step.fill_("action", i) for i, step in enumerate(rb[:].unbind(0))],
    "parts": lambda rb: [part.fill_("action", i) for i, part in enumerate(rb[5:50].split(7))],
    "two axes": lambda rb: rb[:].view(12, 10)[2:4, 3].fill_("action", 4.0),
    "one more axis": lambda rb: rb[3:9].unsqueeze(1).squeeze(1).fill_("action", 4.0),
    "exchanged axes": lambda rb: rb[:].view(12, 10).permute(1, 0)[3].set_("action", torch.ones(12, 2)),
    "arithmetic": lambda rb: rb[3:9].select("action", ("next", "reward")).mul_(2),
    "a mask": lambda rb: rb[:].masked_fill_(torch.arange(120) % 7 == 0, 0),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_lazy_tensor_storage_honours_is_honoured(name):
    theirs, ours = pair()
    for buffer in (theirs, ours):
        WRITES[name](buffer)
    assert_same(theirs.storage.get(slice(None)), ours.storage.get(slice(None)))


@pytest.mark.parametrize("arrange", [lambda view: view.clone(), lambda view: view + 0, lambda view: view[[3, 4]]])
def test_what_is_no_view_does_not_write(arrange):
    _, ours = pair()
    before = ours.storage.get(slice(None))
    arrange(ours[:].select("action")).fill_("action", 4.0)
    assert_same(ours.storage.get(slice(None)), before)


def test_parts_of_a_view_have_what_was_changed_in_it():
    _, ours = pair()
    ours.append_transform(RewardScaling(0.0, 10.0, in_keys=[("next", "reward")]))
    view = ours[:]
    view["new"] = torch.arange(120)
    assert torch.equal(view["next", "reward"], ours.storage["next", "reward"] * 10)
    parts: list[Any] = [
        view[3:9],
        view[torch.arange(3, 9)],
        view.split([3, 6, 111])[1],
        torch.stack(view.unbind(0)[3:9]),
    ]
    for part in parts:
        assert torch.equal(part["next", "reward"], view["next", "reward"][3:9])
        assert torch.equal(part["new"], torch.arange(3, 9))
        assert torch.equal(part["action"], view["action"][3:9])


def test_a_copy_of_a_view_has_its_steps_and_not_the_storage(tmp_path):
    _, ours = pair()
    view = ours[3:5]
    view.memmap(tmp_path)
    copies = [copy.deepcopy(view), pickle.loads(pickle.dumps(view)), TensorDict.load_memmap(tmp_path)]
    for other in copies:
        assert_same(other, view.clone())
    copies[0].fill_("action", 4.0)
    assert not bool((ours.storage["action"] == 4).any())
    assert len(pickle.dumps(view)) < 2 * len(pickle.dumps(view.to_tensordict()))


def test_steps_of_some_environments_may_be_assigned():
    theirs, ours = pair(ndim=2)
    new = rollout(3, 40, seed=7)
    for buffer in (theirs, ours):
        buffer[0, 1:2] = new[0, 1:2]
        buffer[:, 7:8] = new[:, 7:8]
    assert_same(theirs.storage.get(slice(None)), ours.storage.get(slice(None)))


def test_single_steps_of_several_environments_may_be_changed_before_any_is_packed():
    buffers = []
    for kind in (LazyTensorStorage, PackedEpisodeStorage):
        buffer = ReplayBuffer(storage=kind(120, ndim=2), batch_size=8)
        buffer.extend(rollout(3, 5))
        buffer.storage[torch.tensor([4, 0, 2]), torch.tensor([1, 2, 0])] = NEW[:3]
        buffer.extend(rollout(3, 5, seed=1))
        buffers.append(buffer.storage.get(slice(None)))
    assert_same(*buffers)


def test_one_tensor_may_be_changed_before_it_is_known_which_leaves_repeat():
    storage = PackedEpisodeStorage(100)
    data = rollout(1, 40)[0]
    for number in range(40):
        storage.set(number, data[number])
    storage.write(("next", "obs", "state"), 5.0, slice(3, 30))
    data["next", "obs", "state"][3:30] = 5.0
    assert_same(storage.get(slice(None)), data)


def test_of_several_steps_for_one_slot_the_last_counts():
    storage = PackedEpisodeStorage(100)
    data = rollout(1, 40)[0]
    storage.set(range(40), data)
    for number in range(30):
        storage[torch.tensor([7, 7, 7])] = NEW[number : number + 3]
        data[7] = NEW[number + 2]
        assert_same(storage.get(slice(None)), data)


def test_a_tensor_that_was_taken_out_is_changed_with_an_explicit_call():
    _, ours = pair()
    ours[:]["action"].zero_()
    assert bool((ours[:]["action"] != 0).any())
    ours.storage.write("action", 0.0)
    assert not bool((ours[:]["action"] != 0).any())


def test_keys_that_come_later_are_added_and_zero_elsewhere():
    storage = PackedEpisodeStorage(100)
    data = rollout(1, 60)[0]
    storage.set(range(60), data)
    storage.write("value_target", torch.arange(20.0)[:, None], slice(10, 30))
    assert storage.get(slice(None))["value_target"].flatten()[9:12].tolist() == [0.0, 0.0, 1.0]
    more = data.clone()
    more["extra"] = torch.ones(60, 3)
    storage.set(range(30, 90), more)
    back = storage.get(slice(0, 90))
    assert back["extra"].sum() == 180
    assert float(back["value_target"][35:].abs().sum()) == 0.0
    assert torch.equal(back["action"][30:], data["action"])


def test_a_storage_is_read_by_key():
    theirs, ours = pair()
    assert torch.equal(theirs.storage.get(slice(None))["action"], ours.storage["action"])
    assert torch.equal(theirs.storage.get(slice(None))["next", "done"], ours.storage.get(("next", "done")))


def test_updates_of_steps_that_are_still_there():
    ours = ReplayBuffer(storage=PackedEpisodeStorage(40), writer=RoundRobinWriter(track_generations=True), batch_size=4)
    index = ours.extend(rollout(1, 40)[0])
    generation = ours.writer.generations_of(index)
    ours.extend(rollout(1, 10, seed=3)[0])
    result = ours.update_if_present(index=index, generation=generation, patch={"action": torch.full((40, 2), 5.0)})
    assert result.updated_count == 30
    assert bool((ours.storage.get(slice(10, 40))["action"] == 5).all())
    assert not bool((ours.storage.get(slice(0, 10))["action"] == 5).any())


def test_states_of_torchrls_storages_are_packed():
    theirs, _ = pair()
    ours = PackedEpisodeStorage(120)
    ours.load_state_dict(theirs.storage.state_dict())
    assert_same(theirs.storage.get(slice(None)), ours.get(slice(None)))


@pytest.mark.parametrize("number", [torch.eye(120).to_sparse(), torch.empty(120, 2, device="meta"), torch.zeros(7)])
def test_a_state_that_does_not_fit_leaves_what_was_there(number):
    theirs, ours = pair()
    before = ours.storage.get(slice(None))
    cursor = ours.storage.state_dict()["plain"]["storage"]["last_cursor"]
    state = theirs.storage.state_dict()
    state["_storage"]["unfit"] = number
    with pytest.raises((StateMismatchError, ReplayError)):
        ours.storage.load_state_dict(state)
    assert_same(ours.storage.get(slice(None)), before)
    assert ours.storage.state_dict()["plain"]["storage"]["last_cursor"] == cursor
    ours.extend(NEW[:10])
    assert_same(ours.storage.get(slice(0, 10)), NEW[:10])


def test_more_batch_axes_and_their_names_are_kept():
    data = TensorDict({"o": torch.randn(40, 3, 2)}, batch_size=[40, 3], names=["time", "agent"])
    storage = PackedEpisodeStorage(50)
    storage.set(range(40), data)
    for back in (storage.get(slice(5, 9)), storage[5:9]):
        assert back.batch_size == (4, 3)
        assert torch.equal(back["o"], data["o"][5:9])
    assert storage.get(slice(5, 9)).names == [None, "agent"]


def test_steps_that_were_not_written_one_after_another_are_not_joined():
    storage = PackedEpisodeStorage(100)
    buffer = ReplayBuffer(storage=storage, sampler=EpisodeSliceSampler(slice_len=5), batch_size=500)

    def steps(start, count):
        done = torch.zeros(count, 1, dtype=torch.bool)
        return TensorDict({"n": torch.arange(start, start + count), "next": {"done": done}}, batch_size=[count])

    storage.set(range(60), steps(0, 60))
    # A writer that was restored from an older moment continues at an older slot.
    storage.set(range(20, 40), steps(1000, 20))
    numbers = buffer.sample()["n"].reshape(100, 5)
    assert bool((numbers.diff(dim=1) == 1).all())


def write_in_another_process(storage, queue):
    state = storage.state_dict()
    changes = (
        lambda: storage.set(range(10), rollout(1, 10)[0]),
        storage._empty,
        lambda: storage.load_state_dict(state),
    )
    for change in changes:
        try:
            change()
            queue.put("written")
        except ReplayError as error:
            queue.put(str(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_writing_to_a_copy_in_another_process_is_an_error(method):
    storage = PackedEpisodeStorage(100)
    storage.set(range(50), rollout(1, 50)[0])
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=write_in_another_process, args=(storage, queue))
    process.start()
    for _ in range(3):
        assert "a copy in another process" in queue.get()
    process.join()


def test_a_child_that_is_forked_while_threads_read_and_write_does_not_hang():
    storage = PackedEpisodeStorage(500)
    data = rollout(1, 500)[0]
    storage.set(range(500), data)
    stop = threading.Event()

    def read():
        while not stop.is_set():
            storage.get(torch.randint(0, 500, (64,)))

    def write():
        while not stop.is_set():
            storage.set(range(100), data[:100], set_cursor=False)
            # This makes a second engine while the process forks.
            storage.load_state_dict(storage.state_dict())

    threads = [threading.Thread(target=read), threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            child = os.fork()
            if not child:
                back = storage.get(slice(None))
                storage.set(range(100), data[:100], set_cursor=False)
                os._exit(0 if torch.equal(back["action"], data["action"]) else 1)
            assert wait_for(child) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def wait_for(child):
    """Return the exit code of a child, or None if it hangs."""
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def test_readers_do_not_wait_while_steps_are_packed(monkeypatch):
    storage = PackedEpisodeStorage(400)
    data = rollout(1, 200)[0]
    storage.set(range(200), data)
    column = storage.steps._columns[0]
    packing, release = threading.Event(), threading.Event()
    pack = column.pack

    def slow(*args):
        packing.set()
        assert release.wait(30)
        return pack(*args)

    monkeypatch.setattr(column, "pack", slow)
    writer = threading.Thread(target=storage.set, args=(range(200, 400), data))
    writer.start()
    assert packing.wait(30)
    assert torch.equal(storage.get(slice(None))["action"], data["action"])
    release.set()
    writer.join()
    assert len(storage) == 400


def test_unfinished_episodes_are_packed_block_by_block():
    frames = np.zeros((400, 4, 32, 32), np.uint8)
    rows = {"pixels": frames, "action": np.arange(400.0)[:, None]}
    store = EpisodeStore(max_bytes=200_000, frames=["pixels"], seed=0)
    store.append(rows)
    assert store.nbytes < 200_000 < frames.nbytes
    assert set(store.sample(4)) == {"pixels", "next_pixels", "action"}
    assert store.get([0, 63, 64, 300, 398])["action"].flatten().tolist() == [0.0, 63.0, 64.0, 300.0, 398.0]
    store.finish({"pixels": frames[0]})
    assert store.episode(0)["action"].flatten().tolist() == list(range(400))
    store.add({name: values[: 9 + (name == "pixels")] for name, values in rows.items()})
    assert store.num_episodes == 2


def test_unfinished_packed_episodes_are_saved(tmp_path):
    store = EpisodeStore(seed=0)
    store.add(episode(20, 0))
    one = episode(200, 3)
    store.append({name: values[:150] for name, values in one.items()})
    store.save(tmp_path)
    twin = EpisodeStore()
    twin.restore(tmp_path)
    twin.append({name: values[150:200] for name, values in one.items()})
    twin.finish({"position": one["position"][200]})
    assert_same(twin.episode(1), one)
