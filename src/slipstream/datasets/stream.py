"""`SequenceStream`: shuffled batches of windows, divided among ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from slipstream.checks import require_count
from slipstream.datasets.epochs import EpochCounter
from slipstream.datasets.ranks import find_ranks
from slipstream.datasets.sequences import SequenceDataset, Window


class SequenceStream(IterableDataset[Window]):
    """Batches of windows of a `SequenceDataset`, in another order each epoch, divided among ranks and workers.

    * *Ranks* get different windows and the same number of batches. If the ranks do not divide the number of windows,
      some windows are repeated, fewer than there are ranks; with ``drop_last=True`` they are left out instead.
    * *Workers* take turns with the batches of their rank: a seed gives the same batches in the same order for any
      number of workers and any start method.
    * *Epochs* advance by themselves: every iteration has the next one, with and without ``persistent_workers``.
      `set_epoch` selects one, for instance to resume.
    * ``len(stream)`` is the number of batches of this rank per epoch.

    For ``DataLoader(stream, batch_size=None, num_workers=...)``, or to be iterated over directly.

    Args:
        dataset: Where windows come from.
        batch_size: Number of windows in a batch.
        shuffle: Whether to shuffle the windows. Otherwise all epochs are the same.
        seed: Seed of the order. All ranks must use the same.
        drop_last: Whether to leave out an incomplete last batch.
        rank: Number of this process among those that train together. By default from ``torch.distributed`` if that is
            initialized, or from the environment variable ``RANK``.
        world_size: Number of these processes. By default from ``torch.distributed`` or ``WORLD_SIZE``.

    Raises:
        ConfigurationError: If a number is out of range.

    Example:
        >>> import h5py, numpy
        >>> with h5py.File("/tmp/slipstream-doc-stream.hdf5", "w") as file:
        ...     file["observations/joint"] = numpy.zeros((11, 2))
        ...     file["actions"] = numpy.zeros((10, 3))
        >>> stream = SequenceStream(SequenceDataset("/tmp/slipstream-doc-stream.hdf5", horizon=2), batch_size=4)
        >>> [len(batch["action"]) for batch in stream], len(stream)
        ([4, 4, 2], 3)
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = require_count("batch_size", batch_size)
        self.shuffle = shuffle
        self.seed = require_count("seed", seed, 0)
        self.drop_last = drop_last
        self.rank, self.world_size = find_ranks(rank, world_size)
        self._epochs = EpochCounter()

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will have."""
        return self._epochs.next

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next iteration, for all workers; the following ones count from there.

        Raises:
            ConfigurationError: If it is not a whole number from 0.
        """
        self._epochs.set_next(epoch)

    def __len__(self) -> int:
        num_windows = self._num_windows()
        if not self.drop_last:
            # The last batch may be incomplete.
            num_windows += self.batch_size - 1
        return num_windows // self.batch_size

    def __iter__(self) -> Iterator[Window]:
        # Not a generator: the epoch begins when the iterator is made, in every worker.
        return self._batches(self._epochs.begin())

    def _num_windows(self) -> int:
        """Return how many windows each rank reads per epoch."""
        if self.drop_last:
            return len(self.dataset) // self.world_size
        return -(-len(self.dataset) // self.world_size)

    def _share(self, epoch: int) -> NDArray[np.int64]:
        """Return the windows of this rank, in order."""
        order = np.arange(len(self.dataset))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        # Truncates the order or repeats its beginning, so that all ranks have equally many.
        order = np.resize(order, self._num_windows() * self.world_size)
        return order[self.rank :: self.world_size]

    def _batches(self, epoch: int) -> Iterator[Window]:
        worker = get_worker_info()
        first, step = 0, 1
        if worker is not None:
            first, step = worker.id, worker.num_workers
        share = self._share(epoch)
        for number in range(first, len(self), step):
            start = number * self.batch_size
            yield self.dataset[share[start : start + self.batch_size]]
