"""Random numbers that depend on the seed, the rank, the worker and the epoch, and on nothing else."""

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from slipstream import ConfigurationError, MultimodalReplayBuffer
from slipstream.datasets.randomness import Randomness


class Draws(Dataset[torch.Tensor]):
    """Every element is drawn, whatever its number."""

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.randomness.draw(1 << 40, 3))


def epochs_of(randomness: Randomness, method: str, count: int = 2, **options: Any) -> list[list[list[int]]]:
    """Return what two workers draw in some epochs."""
    context = multiprocessing.get_context(method)
    loader = DataLoader(Draws(randomness), None, num_workers=2, multiprocessing_context=context, **options)
    return [[values.tolist() for values in loader] for _ in range(count)]


def flat(epochs: list[list[list[int]]]) -> list[tuple[int, ...]]:
    return [tuple(values) for epoch in epochs for values in epoch]


def test_a_seed_draws_the_same_numbers_for_any_start_method_whatever_was_started_or_drawn_before():
    forked = epochs_of(Randomness(7), "fork")
    # Every worker, and every epoch, draws other numbers.
    assert len(set(flat(forked))) == 8
    # Other processes of this program, and numbers drawn by the main process, change nothing.
    other = multiprocessing.get_context("fork").Process(target=int)
    other.start()
    other.join()
    drawn = Randomness(7)
    drawn.draw(10, 3)
    assert epochs_of(drawn, "spawn") == forked
    assert set(flat(epochs_of(Randomness(8), "fork"))).isdisjoint(flat(forked))


def test_workers_that_persist_draw_on():
    epochs = epochs_of(Randomness(7), "fork", persistent_workers=True)
    assert len(set(flat(epochs))) == 8
    assert epochs == epochs_of(Randomness(7), "fork", persistent_workers=True)
    # The first epoch is the same as with workers that live for one epoch.
    assert epochs[0] == epochs_of(Randomness(7), "fork", count=1)[0]


def test_ranks_draw_other_numbers_in_the_main_process_and_in_workers(monkeypatch):
    main = [Randomness(7, rank, 3).draw(1 << 40, 4).tolist() for rank in range(3)]
    assert len({tuple(values) for values in main}) == 3
    first = flat(epochs_of(Randomness(7, 0, 2), "fork"))
    second = flat(epochs_of(Randomness(7, 1, 2), "fork"))
    assert set(first).isdisjoint(second)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert Randomness(7).draw(1 << 40, 4).tolist() == main[2]
    assert Randomness(7, rank=1).draw(1 << 40, 4).tolist() == main[1]
    with pytest.raises(ConfigurationError, match="rank is 3, expected a whole number from 0 to 2"):
        Randomness(7, rank=3)


def test_a_pickled_stream_draws_what_it_would_have_drawn():
    randomness = Randomness(7)
    randomness.draw(10, 3)
    twin = pickle.loads(pickle.dumps(randomness))
    assert twin.draw(1 << 40, 4).tolist() == randomness.draw(1 << 40, 4).tolist()


class Batches(Dataset[torch.Tensor]):
    """Batches of a buffer, as a worker draws them."""

    def __init__(self, buffer: MultimodalReplayBuffer) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.buffer.sample(6).action[:, 0].clone()


def batches_of(file: Path, method: str, rank: int) -> list[list[list[float]]]:
    """Return the first actions of the batches that two workers draw in two epochs."""
    context = multiprocessing.get_context(method)
    with MultimodalReplayBuffer(7, image_size=16, seed=3, rank=rank, world_size=2) as buffer:
        buffer.load_from_hdf5(file)
        loader = DataLoader(Batches(buffer), None, num_workers=2, multiprocessing_context=context)
        return [[values.tolist() for values in loader] for _ in range(2)]


def test_a_buffer_draws_the_same_batches_for_any_start_method_and_others_in_every_rank(file_a):
    first = batches_of(file_a, "fork", 0)
    assert batches_of(file_a, "spawn", 0) == first
    second = batches_of(file_a, "fork", 1)
    drawn = [tuple(batch) for epoch in (*first, *second) for batch in epoch]
    assert len(set(drawn)) == 16
