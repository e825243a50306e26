"""`ReplayBuffer.dumps` that is interrupted between its files: storage and writer are restored as of one moment."""

import logging
import os

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, RoundRobinWriter, SamplerWithoutReplacement

from slipstream import EpisodeSliceSampler, PackedEpisodeStorage


class Interrupted(BaseException):
    """What ends a process in the middle of a call."""


def steps(start, count):
    done = torch.zeros(count, 1, dtype=torch.bool)
    frames = torch.arange(float(start), start + count)[:, None].expand(count, 8)
    return TensorDict({"number": torch.arange(start, start + count), "o": frames, "next": {"done": done}}, [count])


def make(size=60):
    storage = PackedEpisodeStorage(size)
    return ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), writer=RoundRobinWriter(), batch_size=5)


def numbers(buffer):
    return buffer.storage.get(slice(None))["number"].tolist()


def interrupt(monkeypatch, buffer, folder, part):
    """Save, but end before the sampler or the writer has been written."""

    def dumps(path):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(getattr(buffer, part), "dumps", dumps)
        with pytest.raises(Interrupted):
            buffer.dumps(folder)


@pytest.mark.parametrize("part", ["sampler", "writer"])
@pytest.mark.parametrize("times", [1, 3])
def test_the_moment_before_is_restored_whole(tmp_path, monkeypatch, caplog, part, times):
    buffer = make()
    buffer.extend(steps(0, 40))
    buffer.dumps(tmp_path)
    expected = numbers(buffer)
    for number in range(times):
        # More than once around, so that nothing of the moment before is left in memory.
        buffer.extend(steps(1000 + 90 * number, 90))
        interrupt(monkeypatch, buffer, tmp_path, part)
    twin = make()
    with caplog.at_level(logging.WARNING):
        twin.loads(tmp_path)
    assert "saving was interrupted" in caplog.text
    assert numbers(twin) == expected
    # The writer continues where the storage ends.
    assert twin.extend(steps(40, 5)).tolist() == [40, 41, 42, 43, 44]
    assert numbers(twin) == list(range(45))
    sampler = EpisodeSliceSampler(slice_len=45)
    assert sampler.sample(twin.storage, 45)[0][0].tolist() == list(range(45))


def test_after_an_interruption_the_next_save_counts(tmp_path, monkeypatch):
    buffer = make()
    for number in range(5):
        buffer.extend(steps(100 * number, 50))
        interrupt(monkeypatch, buffer, tmp_path, "writer") if number % 2 else buffer.dumps(tmp_path)
    twin = make()
    twin.loads(tmp_path)
    assert numbers(twin) == numbers(buffer)
    assert twin.write_count == buffer.write_count
    twin.extend(steps(900, 7))
    twin.dumps(tmp_path)
    third = make()
    third.loads(tmp_path)
    assert numbers(third) == numbers(twin)
    # At most the parts of two moments are in the folder.
    assert len(list((tmp_path / "storage").glob("rows-*"))) <= 4


def test_a_moment_that_was_restored_after_an_interruption_may_be_saved_into_its_folder(tmp_path, monkeypatch):
    buffer = make()
    buffer.extend(steps(0, 40))
    buffer.dumps(tmp_path)
    buffer.extend(steps(40, 70))
    interrupt(monkeypatch, buffer, tmp_path, "writer")
    twin = make()
    twin.loads(tmp_path)
    twin.extend(steps(40, 3))
    interrupt(monkeypatch, twin, tmp_path, "sampler")
    third = make()
    third.loads(tmp_path)
    assert numbers(third) == list(range(40))
    twin.dumps(tmp_path)
    third.loads(tmp_path)
    assert numbers(third) == list(range(43))


def test_a_process_that_ends_between_the_files_leaves_a_folder_of_one_moment(tmp_path):
    buffer = make()
    buffer.extend(steps(0, 40))
    buffer.dumps(tmp_path)
    child = os.fork()
    if not child:
        try:
            buffer.extend(steps(500, 31))
            buffer.writer.dumps = lambda path: os._exit(0)
            buffer.dumps(tmp_path)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    twin = make()
    twin.loads(tmp_path)
    assert numbers(twin) == list(range(40))


def test_a_storage_that_is_saved_alone_has_one_moment(tmp_path):
    buffer = make()
    buffer.extend(steps(0, 40))
    buffer.dumps(tmp_path)
    buffer.extend(steps(40, 10))
    # Beside a writer's file, but not by its buffer: what is saved last counts.
    alone = PackedEpisodeStorage(60)
    alone.set(range(20), steps(200, 20))
    alone.dumps(tmp_path / "storage")
    twin = PackedEpisodeStorage(60)
    twin.loads(tmp_path / "storage")
    assert twin.get(slice(None))["number"].tolist() == list(range(200, 220))
    assert alone.writer_state is None


def test_slots_that_a_writer_left_out_are_never_sampled():
    storage = PackedEpisodeStorage(100)
    buffer = ReplayBuffer(storage=storage, batch_size=300)
    storage.set(range(20, 50), steps(20, 30))
    assert len(storage) == len(buffer) == 30
    assert set(buffer.sample()["number"].tolist()) == set(range(20, 30))
    storage.set(range(20), steps(0, 20))
    assert set(buffer.sample()["number"].tolist()) <= set(range(50))
