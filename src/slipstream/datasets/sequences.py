"""Windows of recorded episodes as PyTorch datasets: one that is asked by number, and one that streams batches."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from slipstream.checks import require_count
from slipstream.datasets.cache import CacheSetting
from slipstream.datasets.description import Fields
from slipstream.datasets.opening import find_files
from slipstream.datasets.recordings import load
from slipstream.datasets.statistics import Statistics
from slipstream.datasets.transitions import reading_threads
from slipstream.errors import ConfigurationError, DatasetError
from slipstream.memory import Pool

Window = dict[str, Any]
"""``images`` (by camera), ``joint``, ``action``, ``reward``, ``terminal``, ``mask``, ``episode``, ``step``."""


class SequenceDataset(Dataset[Window]):
    """Windows of `horizon` steps of recorded episodes, one beginning at every step; no image is in memory.

    A window never crosses the end of an episode: where it would, the last step is repeated, and ``mask`` is False. A
    window is a dict of ``images`` (by camera, uint8 ``[image_steps, channels, size, size]``), ``joint`` and ``action``
    (float32 ``[horizon, ...]``), ``reward`` (float32 ``[horizon]``), ``terminal`` and ``mask`` (bool ``[horizon]``),
    ``episode`` and ``step``. Asked for a list of numbers it returns one such dict with a batch axis, and reads each
    frame once however many windows share it; that is what makes `DataLoader` fast:
    ``DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 64, drop_last=True))``.

    Works in the workers of a `DataLoader`, forked or spawned, in threads, and after pickling.

    Args:
        path: A file, several, or a folder of them.
        horizon: Steps of a window.
        image_steps: Of how many of these the images are read, counted from the first; all by default. Behaviour cloning
            that predicts several actions from one look needs 1.
        cameras: Which cameras, by the names that `slipstream data inspect` shows; or paths by name. All by default;
            an empty list reads none.
        image_size: Height and width that images are resized to; None keeps them as they are stored.
        fields: Which datasets are what, if the layout is not recognised.
        num_episodes: Load only so many.
        cache: Whether to use a cache made by `ingest`, or the folder where caches are.
        threads: How many threads read; by default one per core, and one in a worker.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is no HDF5 file, or damaged.
        MissingEntryError: If something is not in it; lists what is.
        DatasetError: If its parts contradict each other.
        NonFiniteError: If a number is NaN or infinite.

    Example:
        >>> import h5py, numpy
        >>> with h5py.File("/tmp/slipstream-doc-windows.hdf5", "w") as file:
        ...     for number, steps in enumerate((5, 8)):
        ...         file[f"data/demo_{number}/obs/agentview_image"] = numpy.zeros((steps, 84, 84, 3), "uint8")
        ...         file[f"data/demo_{number}/obs/robot0_joint_pos"] = numpy.zeros((steps, 7))
        ...         file[f"data/demo_{number}/actions"] = numpy.zeros((steps, 7))
        >>> data = SequenceDataset("/tmp/slipstream-doc-windows.hdf5", horizon=4, image_steps=1)
        >>> len(data), data[4]["mask"].tolist(), data[[0, 1]]["images"]["global"].shape
        (13, [True, False, False, False], torch.Size([2, 1, 3, 224, 224]))
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        horizon: int = 1,
        *,
        image_steps: int | None = None,
        cameras: Sequence[str] | Mapping[str, str] | None = None,
        image_size: int | None = 224,
        fields: Fields | None = None,
        num_episodes: int | None = None,
        cache: CacheSetting = True,
        threads: int | None = None,
    ) -> None:
        image_steps = horizon if image_steps is None else image_steps
        require_count("horizon", horizon)
        require_count("image_steps", image_steps, 1, horizon)  # no more images than steps
        if isinstance(cameras, Mapping):
            fields = replace(fields or Fields(), cameras=dict(cameras))
        self.horizon, self.image_steps, self.image_size = horizon, image_steps, image_size
        self._threads = threads
        self._memory = Pool()
        self._data = load(
            find_files(path), fields, cameras=None if cameras is None else list(cameras), num_episodes=num_episodes,
            image_size=image_size, cache=cache,
        )  # fmt: skip
        self.cameras = self._data.camera_names
        if image_size is None:
            for name, sizes in self._data.sizes.items():
                if len(sizes) > 1:
                    raise DatasetError(
                        f"{self._data.descriptions[0]}: images of the camera {name} have different sizes "
                        f"{sorted(sizes)}, so image_size cannot be None"
                    )
        self.episodes: NDArray[np.int64] = np.arange(self._data.num_episodes)
        self._closed = False
        self._use(self.episodes)
        self.statistics = self._measure()

    def _use(self, episodes: NDArray[np.int64]) -> None:
        self.episodes = episodes
        lengths = self._data.starts[episodes + 1] - self._data.starts[episodes]
        self._ends = np.cumsum(lengths)

    def _measure(self) -> dict[str, Statistics]:
        """Return mean and spread of actions and joints of this part's episodes."""
        data = self._data
        found = {"action": Statistics.none(data.action.shape[1]), "joint": Statistics.none(data.joint.shape[1])}
        for episode in self.episodes.tolist():
            first, last = int(data.starts[episode]), int(data.starts[episode + 1])
            found["action"] = found["action"].update(data.action[first:last])
            found["joint"] = found["joint"].update(data.joint[first + episode : last + episode])
        return found

    def split(self, validation: float = 0.1, seed: int = 0) -> tuple[SequenceDataset, SequenceDataset]:
        """Return two parts of it, for training and for validation; no episode is in both.

        Both share the memory and the files of this one, and both have the `statistics` of the training part: what a
        policy is normalised with must not know what it is validated on.

        Args:
            validation: Share of the episodes that are for validation; at least one is.
            seed: Which ones.

        Raises:
            ConfigurationError: If the share is not between 0 and 1, or there are too few episodes.
        """
        count = len(self.episodes)
        if not 0 < validation < 1 or count < 2:
            raise ConfigurationError(
                f"cannot take a share of {validation} of {count} episodes for validation, expected more than 0, less "
                "than 1, and at least 2 episodes"
            )
        shuffled = np.random.default_rng(seed).permutation(self.episodes)
        held = min(count - 1, max(1, round(validation * count)))
        train, other = copy.copy(self), copy.copy(self)
        train._use(np.sort(shuffled[held:]))
        other._use(np.sort(shuffled[:held]))
        train.statistics = other.statistics = train._measure()
        return train, other

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int | Sequence[int] | NDArray[np.int64] | torch.Tensor) -> Window:
        if np.ndim(index) == 0:
            return _pick(self._read(np.array([index], np.int64)), 0)
        return self._read(np.asarray(index, np.int64))

    def __getitems__(self, indices: Sequence[int]) -> list[Window]:
        """Read several windows at once, as `DataLoader` asks for them."""
        batch = self._read(np.asarray(indices, np.int64))
        return [_pick(batch, number) for number in range(len(indices))]

    def _read(self, indices: NDArray[np.int64]) -> Window:
        if self._closed:
            raise DatasetError("the dataset is closed, and nothing can be read from it any more")
        count = len(self)
        if indices.size and (indices.min() < -count or indices.max() >= count):
            raise IndexError(f"window {indices.min()} to {indices.max()} of {count}")
        indices = indices % count
        data = self._data
        place = np.searchsorted(self._ends, indices, "right")
        episodes = self.episodes[place]
        lengths = data.starts[episodes + 1] - data.starts[episodes]
        first = indices - (self._ends[place] - lengths)
        numbers = first[:, None] + np.arange(self.horizon)
        mask = numbers < lengths[:, None]
        numbers = np.minimum(numbers, lengths[:, None] - 1)
        rows = data.starts[episodes][:, None] + numbers
        window: Window = {
            "images": self._images(episodes, numbers[:, : self.image_steps]),
            "joint": torch.from_numpy(data.joint[rows + episodes[:, None]]),
            "action": torch.from_numpy(data.action[rows]),
            "reward": torch.from_numpy(data.reward[rows]),
            "terminal": torch.from_numpy(data.terminal[rows]),
            "mask": torch.from_numpy(mask),
            "episode": torch.from_numpy(episodes),
            "step": torch.from_numpy(first),
        }
        return window

    def _images(self, episodes: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        batch, steps = numbers.shape
        flat, requests, found = np.repeat(episodes, steps), [], {}
        for name in self.cameras:
            height, width = (
                (self.image_size, self.image_size) if self.image_size else next(iter(self._data.sizes[name]))
            )
            out = self._memory.take((batch * steps, self._data.channels[name], height, width))
            requests.append(self._data.request(name, flat, numbers.reshape(-1), out))
            found[name] = torch.from_numpy(out).reshape(batch, steps, *out.shape[1:])
        self._data.frames.read(requests, reading_threads(self._threads))
        return found

    @property
    def num_open_files(self) -> int:
        """How many files are open in this process: never more than 64, and 4 by way of HDF5."""
        return self._data.frames.files.num_open

    def close(self) -> None:
        """Close all files, those of parts of it too; reading after that is an error. Twice is not."""
        self._closed = True
        self._data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class SequenceStream(IterableDataset[Window]):
    """Batches of windows of a `SequenceDataset`, each epoch in another order, shared among workers and machines.

    Every window comes once an epoch, in one process of all. Given the same seed, epoch, and numbers of workers and
    processes, it gives the same batches. Workers that live for one epoch only, as those of a `DataLoader` without
    ``persistent_workers``, know of none before it: call `set_epoch` then, or every epoch has the order of the first.
    For `DataLoader(stream, batch_size=None, num_workers=...)`, or to be iterated over as it is.

    Args:
        dataset: Where windows come from.
        batch_size: Windows of a batch.
        shuffle: Whether in random order.
        seed: Which one.
        drop_last: Whether to leave out a last batch with fewer windows.
        rank: Number of this process among those that train together.
        world_size: How many these are.

    Example:
        >>> import h5py, numpy
        >>> with h5py.File("/tmp/slipstream-doc-stream.hdf5", "w") as file:
        ...     file["observations/joint"], file["actions"] = numpy.zeros((11, 2)), numpy.zeros((10, 3))
        >>> stream = SequenceStream(SequenceDataset("/tmp/slipstream-doc-stream.hdf5", horizon=2), batch_size=4)
        >>> [len(batch["action"]) for batch in stream]
        [4, 4, 2]
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        require_count("batch_size", batch_size)
        require_count("world_size", world_size)
        require_count("rank", rank, 0, world_size - 1)
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.drop_last, self.rank, self.world_size = drop_last, rank, world_size
        self.epoch = 0
        # How often an epoch was set, and which: in shared memory, so that workers that are there already see it.
        self._told: torch.Tensor = cast("Any", torch.zeros(2, dtype=torch.int64)).share_memory_()
        self._times_heard = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, to all workers; without it each process counts those that it has seen."""
        self.epoch = epoch
        self._told[1] = epoch
        self._told[0] += 1

    def __iter__(self) -> Iterator[Window]:
        times, told = self._told.tolist()
        if times != self._times_heard:
            self._times_heard, self.epoch = times, told
        epoch, self.epoch = self.epoch, self.epoch + 1
        count = len(self.dataset)
        order = np.random.default_rng([self.seed, epoch]).permutation(count) if self.shuffle else np.arange(count)
        worker = get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        share = order[self.rank * workers + number :: self.world_size * workers]
        for start in range(0, len(share), self.batch_size):
            indices = share[start : start + self.batch_size]
            if len(indices) == self.batch_size or not self.drop_last:
                yield self.dataset[indices]


def _pick(batch: Window, number: int) -> Window:
    return {
        name: {camera: images[number] for camera, images in value.items()} if name == "images" else value[number]
        for name, value in batch.items()
    }
