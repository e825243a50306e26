"""Streams of windows: ranks, workers, epochs."""

import copy
import multiprocessing
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from slipstream import ConfigurationError, SequenceDataset, SequenceStream
from slipstream.datasets.epochs import EpochCounter
from slipstream.datasets.ranks import find_ranks
from tests.datasets.conftest import write_robomimic

WINDOWS = [0, 1, 2, 3, 100, 101, 102, 103, 104, 200, 201, 202, 203, 204, 205]


@pytest.fixture
def data(tmp_path):
    """15 windows, whose first action says which one it is."""
    with SequenceDataset(write_robomimic(tmp_path / "r.hdf5", (4, 5, 6)), 2, cameras=[]) as data:
        yield data


def batches_of(stream: Any) -> list[list[int]]:
    return [batch["action"][:, 0, 0].int().tolist() for batch in stream]


def windows_of(batches: list[list[int]]) -> list[int]:
    return [window for batch in batches for window in batch]


def loader_of(stream: Any, workers: int, method: str | None, **options: Any) -> DataLoader[Any]:
    context = None
    if method is not None:
        context = multiprocessing.get_context(method)
    return DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context, **options)


def test_an_epoch_has_every_window_once_and_the_next_one_another_order(data):
    stream = SequenceStream(data, 4, seed=3)
    assert stream.epoch == 0
    first = batches_of(stream)
    assert stream.epoch == 1
    second = batches_of(stream)
    assert [len(batch) for batch in first] == [4, 4, 4, 3]
    assert len(stream) == len(first) == len(second)
    assert sorted(windows_of(first)) == sorted(windows_of(second)) == WINDOWS
    assert first != second
    stream.set_epoch(0)
    assert (batches_of(stream), batches_of(stream)) == (first, second)
    assert batches_of(SequenceStream(data, 4, seed=3)) == first
    assert batches_of(SequenceStream(data, 4, seed=4)) != first


def test_without_shuffling_windows_come_in_order(data):
    stream = SequenceStream(data, 6, shuffle=False)
    assert windows_of(batches_of(stream)) == WINDOWS == windows_of(batches_of(stream))


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 20])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_read_different_windows_and_the_same_number_of_batches(data, world_size, drop_last):
    options: Any = {"seed": 1, "drop_last": drop_last, "world_size": world_size}
    streams = [SequenceStream(data, 2, rank=rank, **options) for rank in range(world_size)]
    for _ in range(2):
        parts = [batches_of(stream) for stream in streams]
        assert {len(part) for part in parts} == {len(streams[0])}
        assert len({tuple(len(batch) for batch in part) for part in parts}) == 1
        counts = Counter(window for part in parts for window in windows_of(part))
        if drop_last:
            # No window twice, and only full batches.
            assert all(count == 1 for count in counts.values())
            assert all(len(batch) == 2 for part in parts for batch in part)
            assert len(counts) == 15 // world_size // 2 * 2 * world_size
        else:
            # Every window, and no more repeated than make the ranks equal.
            assert sorted(counts) == WINDOWS
            assert sum(counts.values()) - 15 == -15 % world_size
            assert max(counts.values()) <= -(-world_size // 15) + 1


def test_ranks_that_divide_the_windows_are_disjoint(data):
    parts = [set(windows_of(batches_of(SequenceStream(data, 4, rank=rank, world_size=5)))) for rank in range(5)]
    assert [len(part) for part in parts] == [3] * 5
    assert sorted(set().union(*parts)) == WINDOWS


def test_the_rank_comes_from_the_environment_or_is_given(data, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    stream = SequenceStream(data, 4)
    assert (stream.rank, stream.world_size, len(stream)) == (1, 3, 2)
    assert batches_of(stream) == batches_of(SequenceStream(data, 4, rank=1, world_size=3))
    given = SequenceStream(data, 4, rank=0, world_size=1)
    assert (given.rank, given.world_size, len(given)) == (0, 1, 4)


def test_an_environment_that_contradicts_itself_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_ranks() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_ranks() == (0, 1)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigurationError, match="only one of the environment variables RANK and WORLD_SIZE is set"):
        find_ranks()
    assert find_ranks(0, 1) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="rank is 2, expected a whole number from 0 to 1"):
        find_ranks()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigurationError, match="RANK is 'first', expected a whole number"):
        find_ranks()


def ranks_in_group(rank: int, meeting: Path, results: Any) -> None:
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    results.put(find_ranks())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_the_rank_comes_from_a_process_group_even_without_an_environment(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=ranks_in_group, args=(rank, tmp_path / "group", results)) for rank in range(2)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=120) for _ in processes) == [(0, 2), (1, 2)]
    for process in processes:
        process.join()
        assert process.exitcode == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank is 2, expected a whole number from 0 to 1"),
        ({"batch_size": 4, "world_size": 0}, "world_size is 0"),
        ({"batch_size": 4, "seed": -1}, "seed is -1"),
    ],
)
def test_invalid_settings_are_refused(data, options, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        SequenceStream(data, **options)


def test_an_epoch_that_is_no_number_is_refused(data):
    for epoch in (-1, 0.5, True):
        with pytest.raises(ConfigurationError, match="epoch is"):
            SequenceStream(data, 4).set_epoch(epoch)  # type: ignore[arg-type]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("method", "workers"), [("fork", 1), ("fork", 2), ("spawn", 2)])
def test_workers_give_the_same_batches_in_the_same_order_and_their_epochs_advance(data, method, workers, persistent):
    alone = SequenceStream(data, 4, seed=3)
    expected = [batches_of(alone) for _ in range(3)]
    assert expected[0] != expected[1]
    stream = SequenceStream(data, 4, seed=3)
    loader = loader_of(stream, workers, method, persistent_workers=persistent)
    assert len(loader) == 4
    assert [batches_of(loader) for _ in range(3)] == expected
    assert stream.epoch == 3
    stream.set_epoch(1)
    assert batches_of(loader) == expected[1]
    assert batches_of(loader) == expected[2]


def test_an_iteration_that_is_given_up_is_an_epoch(data):
    alone = SequenceStream(data, 1, seed=3)
    expected = [batches_of(alone) for _ in range(3)]
    loader = loader_of(SequenceStream(data, 1, seed=3), 2, "fork", prefetch_factor=1)
    for _ in loader:
        break
    assert [batches_of(loader) for _ in range(2)] == expected[1:]


def test_epochs_advance_though_every_loader_has_the_same_seed(data):
    """Workers know an iteration by the seed of their loader, which may be the same each time."""
    stream = SequenceStream(data, 4, seed=3)
    found = []
    for _ in range(3):
        loader = loader_of(stream, 2, "fork", generator=torch.Generator().manual_seed(0))
        found.append(batches_of(loader))
    alone = SequenceStream(data, 4, seed=3)
    assert found == [batches_of(alone) for _ in range(3)]


def test_workers_divide_the_batches_of_their_rank(data):
    parts = [
        batches_of(loader_of(SequenceStream(data, 2, seed=5, rank=rank, world_size=2), 2, "fork")) for rank in range(2)
    ]
    assert [len(part) for part in parts] == [4, 4]
    assert set(windows_of(parts[0]) + windows_of(parts[1])) == set(WINDOWS)
    assert parts == [batches_of(SequenceStream(data, 2, seed=5, rank=rank, world_size=2)) for rank in range(2)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_a_copy_counts_epochs_of_its_own_and_tells_its_workers(data, duplicate):
    stream = SequenceStream(data, 4, seed=3)
    expected = [batches_of(stream) for _ in range(2)]
    twin = duplicate(stream)
    assert twin.epoch == 2
    twin.set_epoch(0)
    assert stream.epoch == 2
    loader = loader_of(twin, 2, "fork")
    assert [batches_of(loader) for _ in range(2)] == expected


def test_many_epochs_are_counted():
    counter = EpochCounter()
    assert [counter.begin() for _ in range(300)] == list(range(300))
    counter.set_next(2**31 - 3)
    assert (counter.begin(), counter.next) == (2**31 - 3, 2**31 - 2)


def test_workers_that_begin_at_the_same_moment_agree_on_the_epoch(data):
    """Persistent workers, again and again: one that reads while another one writes must not count twice."""
    stream = SequenceStream(data, 4, seed=3)
    loader = loader_of(stream, 2, "fork", persistent_workers=True)
    for _ in range(200):
        assert sorted(windows_of(batches_of(loader))) == WINDOWS
    assert stream.epoch == 200
