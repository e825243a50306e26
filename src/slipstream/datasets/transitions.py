"""`TransitionDataset`: transitions of recorded episodes, with any number of cameras."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, get_worker_info

from slipstream.checks import require_count
from slipstream.datasets.cache import CacheSetting
from slipstream.datasets.description import Fields
from slipstream.datasets.index import COLUMNS, EpisodeIndex, Places, gather, measure
from slipstream.datasets.indices import require_indices
from slipstream.datasets.opening import find_files
from slipstream.datasets.prepare import Interpolation, require_image_size, require_interpolation
from slipstream.datasets.randomness import Randomness
from slipstream.datasets.recordings import Recordings, load
from slipstream.datasets.statistics import Statistics
from slipstream.errors import ConfigurationError, DatasetError
from slipstream.memory import Pool

Transition = dict[str, Any]
"""``images`` and ``next_images`` (by camera), ``joint``, ``next_joint``, ``action``, ``reward``, ``not_done``,
``episode``, ``step``."""


class TransitionDataset(Dataset[Transition]):
    """Transitions of recorded episodes, with any number of cameras or none; no image is in memory.

    A transition is a dict of ``images`` and ``next_images`` (by camera, ``[channels, image_size, image_size]``),
    ``joint`` and ``next_joint`` (float32, only if the file has them), ``action`` (float32), ``reward`` and ``not_done``
    (float32 ``[1]``), ``episode`` and ``step``. `sample` draws a random batch. Indexing with a list of numbers also
    reads one batch, each frame once however often it occurs.

    * *Ends of episodes*: a transition never crosses one. If the last step of an episode is terminal, ``not_done`` is 0
      and the next observation is the recorded one, the row that follows in the file, or else the last one once more.
      The last step of an episode that was cut off has no transition unless its outcome was recorded.
    * *Memory*: numbers and an index, about 100 bytes per transition with 16 joints and 7 actions. The memory of a batch
      is reused when the batch and all views of it are gone.
    * *Processes*: works in threads, in the workers of a `DataLoader`, forked or spawned, and after pickling. Every
      process opens its files itself and draws different numbers from the seed.

    Args:
        path: A file, several, or a folder of them.
        cameras: Which cameras, by the names that ``slipstream data inspect`` shows; or paths by name. All by default;
            an empty list reads none.
        image_size: Side that images are resized to, or ``(height, width)``.
        interpolation: How images are resized; see `prepare_frame`, which does the same to a live camera frame.
        image_dtype: ``torch.uint8``, 0 to 255 as they are stored, or a floating dtype. Images move to the device as
            bytes and are converted there.
        image_scale: Largest value of floating images: 1 or 255. 1 by default.
        fields: Which datasets are what, if the layout is not recognised.
        num_transitions: Load at most this many transitions. May cut the last episode; a cut is not terminal.
        num_episodes: Load at most this many episodes.
        cache: Whether to use a cache made by `ingest`, or the folder where caches are.
        device: Where batches go.
        seed: Makes samples repeatable. Random by default.
        rank: Number of this process among those that train together; each draws different samples. By default that of
            ``torch.distributed`` or of the environment variable ``RANK``.
        world_size: Number of these processes; likewise.
        threads: How many threads read; by default one per core, and one in a worker.

    Raises:
        ConfigurationError: If an argument is out of range.
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is not an HDF5 file, or damaged.
        MissingEntryError: If something is missing; lists what the file has.
        DatasetError: If its parts contradict each other, or it has no transition.
        NonFiniteError: If a number is NaN or infinite.

    Example:
        >>> import h5py, numpy
        >>> with h5py.File("/tmp/slipstream-doc-d4rl.hdf5", "w") as file:
        ...     file["observations"], file["actions"] = numpy.zeros((20, 11)), numpy.zeros((20, 3))
        ...     file["rewards"], file["terminals"] = numpy.ones(20), numpy.arange(20) == 19
        >>> data = TransitionDataset("/tmp/slipstream-doc-d4rl.hdf5", seed=0)
        >>> batch = data.sample(8)
        >>> len(data), batch["joint"].shape, batch["not_done"].shape, data[19]["not_done"]
        (20, torch.Size([8, 11]), torch.Size([8, 1]), tensor([0.]))
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        cameras: Sequence[str] | Mapping[str, str] | None = None,
        image_size: int | tuple[int, int] = 224,
        interpolation: Interpolation = "linear",
        image_dtype: torch.dtype = torch.uint8,
        image_scale: int | None = None,
        fields: Fields | None = None,
        num_transitions: int | None = None,
        num_episodes: int | None = None,
        cache: CacheSetting = True,
        device: str | torch.device = "cpu",
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        threads: int | None = None,
    ) -> None:
        size = require_image_size(image_size)
        if size is None:
            raise ConfigurationError("image_size is None, expected a whole number or (height, width)")
        self.image_size = size
        self.interpolation = require_interpolation(interpolation)
        self.image_scale = choose_scale(image_dtype, image_scale)
        for name, value in (
            ("num_transitions", num_transitions), ("num_episodes", num_episodes), ("threads", threads),
        ):  # fmt: skip
            if value is not None:
                require_count(name, value)
        self.image_dtype = image_dtype
        self.device = torch.device(device)
        self._threads = threads
        self._randomness = Randomness(seed, rank, world_size)
        self._memory = Pool()
        self._closed = False
        if isinstance(cameras, Mapping):
            fields = replace(fields or Fields(), cameras=dict(cameras))
        # A cache holds square frames that were resized linearly.
        side = None
        if self.image_size[0] == self.image_size[1] and interpolation == "linear":
            side = self.image_size[0]
        names = None
        if cameras is not None:
            names = list(cameras)
        part = load(
            find_files(path), fields, cameras=names, num_episodes=num_episodes, num_transitions=num_transitions,
            image_size=side, cache=cache,
        )  # fmt: skip
        if not part.transitions.sum():
            part.close()
            raise DatasetError(f"{part.descriptions[0]}: has no transition: nothing was recorded after any step")
        self.cameras = part.camera_names
        self.parts: tuple[Recordings, ...] = (part,)
        self.index = EpisodeIndex.of(part)
        self.statistics = measure(self.parts, self.index)

    @property
    def left_out(self) -> bool:
        """Whether `num_transitions` or `num_episodes` left anything out."""
        return any(part.left_out for part in self.parts)

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.index.ends)

    @property
    def nbytes(self) -> int:
        """Memory of what is loaded: numbers, and not the images."""
        return sum(part.nbytes for part in self.parts)

    def __len__(self) -> int:
        return self.index.num_transitions

    def joined(self, other: TransitionDataset) -> TransitionDataset:
        """Return a dataset with the transitions of both, which shares their memory and files.

        Raises:
            DatasetError: If their numbers have different widths, or their images different channels.
        """
        mine = self.parts[0]
        theirs = other.parts[0]
        for what in ("action", "joint"):
            found = getattr(theirs, what).shape[1]
            expected = getattr(mine, what).shape[1]
            if found != expected:
                raise DatasetError(
                    f"{theirs.descriptions[0]}: its {what} has {found} values, what is loaded already has {expected}"
                )
        for name, channels in mine.channels.items():
            if theirs.channels[name] != channels:
                raise DatasetError(
                    f"{theirs.descriptions[0]}: the images of the camera {name} have {theirs.channels[name]} channels, "
                    f"those that are loaded already have {channels}"
                )
        both = copy.copy(self)
        both.parts = (*self.parts, *other.parts)
        both.index = self.index.joined(other.index, len(self.parts))
        both.statistics = measure(other.parts, other.index, self.statistics)
        return both

    def split(self, fraction: float = 0.1, seed: int = 0) -> tuple[TransitionDataset, TransitionDataset]:
        """Return two parts of it, for training and for validation; no episode is in both.

        Both share the memory and the files of this dataset, and both have the `statistics` of the training part: the
        numbers that a policy is normalised with must not depend on what it is validated on.

        Args:
            fraction: Share of the episodes that are for validation; at least one is.
            seed: Which ones.

        Raises:
            ConfigurationError: If the share is not between 0 and 1, or there are too few episodes.
        """
        count = self.num_episodes
        if not 0 < fraction < 1 or count < 2:
            raise ConfigurationError(
                f"cannot split off a fraction of {fraction} of {count} episodes; expected a fraction above 0 and below "
                "1, and at least 2 episodes"
            )
        order = np.random.default_rng(seed).permutation(count)
        num_held = min(count - 1, max(1, round(fraction * count)))
        index = self.index.take(np.sort(order[num_held:]))
        statistics = measure(self.parts, index)
        # Different seeds: otherwise drawing from one part would change what the other draws.
        train = copy.copy(self)
        train.restrict(index, statistics, self._randomness.seed + 1)
        held = copy.copy(self)
        held.restrict(self.index.take(np.sort(order[:num_held])), statistics, self._randomness.seed + 2)
        return train, held

    def restrict(self, index: EpisodeIndex, statistics: dict[str, Statistics], seed: int) -> None:
        """Keep only the episodes in an index, and draw from them with another seed."""
        self.index = index
        self.statistics = statistics
        self._randomness = Randomness(seed, self._randomness.rank, self._randomness.world_size)

    def sample(self, batch_size: int, indices: NDArray[np.int64] | None = None) -> Transition:
        """Draw transitions at random, with replacement, and read their images; blocks until they are read.

        Args:
            batch_size: How many.
            indices: Which ones instead of random ones, 0 to ``len(dataset) - 1``.

        Raises:
            DatasetError: If the dataset is closed, or a file changed since it was loaded.
            CorruptFileError: If an image cannot be read.
        """
        require_count("batch_size", batch_size)
        if indices is None:
            indices = self._randomness.draw(len(self), batch_size)
        if np.shape(indices) != (batch_size,):
            raise ConfigurationError(f"indices have shape {list(np.shape(indices))}, expected [{batch_size}]")
        return self.read(indices)

    def __getitem__(self, index: int | slice | Sequence[int] | NDArray[Any] | torch.Tensor) -> Transition:
        if not isinstance(index, slice) and np.ndim(index) == 0:
            return _pick(self.read([index]), 0)
        return self.read(index)

    def __getitems__(self, indices: Sequence[int]) -> list[Transition]:
        """Read several transitions at once, as `DataLoader` asks for them."""
        batch = self.read(indices)
        return [_pick(batch, number) for number in range(len(indices))]

    def read(self, indices: Any) -> Transition:
        """Return a batch of some transitions: whole numbers, negative ones from the end; a slice; or a mask.

        Raises:
            ConfigurationError: If they are not whole numbers, or a mask has another length.
            OutOfRangeError: If a transition does not exist.
        """
        if self._closed:
            raise DatasetError("the dataset is closed, and nothing can be read from it any more")
        places = self.index.locate(require_indices(indices, len(self)))
        now, after = self._read_images(places)
        batch: Transition = {"images": now, "next_images": after}
        for name in COLUMNS:
            values = gather(self.parts, places, name)
            # A file without joints has none of width 0 either.
            if values.shape[1]:
                batch[name] = torch.from_numpy(values).to(self.device)
        batch["episode"] = torch.from_numpy(places.episode)
        batch["step"] = torch.from_numpy(places.step)
        return batch

    def _read_images(self, places: Places) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Read the images before and after some transitions, in one call: neighbours share frames."""
        count = len(places.part)
        images = {}
        for name in self.cameras:
            shape = (2 * count, self.parts[0].channels[name], *self.image_size)
            images[name] = self._memory.take(shape)
        for number in np.unique(places.part).tolist():
            where = np.flatnonzero(places.part == number)
            step = places.step[where]
            episodes = np.tile(places.episode[where], 2)
            numbers = np.concatenate([step, step + 1])
            targets = np.concatenate([where, where + count])
            part = self.parts[number]
            requests = []
            for name, out in images.items():
                requests.append(part.request(name, episodes, numbers, out, targets))
            if requests:
                part.frames.read(requests, reading_threads(self._threads), self.interpolation)
        now = {}
        after = {}
        for name, out in images.items():
            shown = self._show(torch.from_numpy(out))
            now[name] = shown[:count]
            after[name] = shown[count:]
        return now, after

    def _show(self, images: torch.Tensor) -> torch.Tensor:
        """Move images to the device as bytes, and convert them there."""
        images = images.to(self.device)
        if self.image_dtype == torch.uint8:
            return images
        images = images.to(self.image_dtype)
        if self.image_scale == 1:
            images.div_(255)
        return images

    def close(self) -> None:
        """Close all files, also those of parts of it, and free memory; batches stay valid. Idempotent."""
        self._closed = True
        for part in self.parts:
            part.close()
        self._memory.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def choose_scale(dtype: torch.dtype, scale: int | None) -> int:
    """Return the largest value of images of a dtype.

    Raises:
        ConfigurationError: If the dtype or the scale is not allowed.
    """
    if dtype == torch.uint8:
        if scale not in (None, 255):
            raise ConfigurationError(f"image_scale is {scale!r}, expected 255 for image_dtype=torch.uint8")
        return 255
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(f"image_dtype is {dtype}, expected torch.uint8 or a floating dtype")
    if scale is None:
        return 1
    if isinstance(scale, bool) or scale not in (1, 255):
        raise ConfigurationError(f"image_scale is {scale!r}, expected 1 or 255")
    return int(scale)


def reading_threads(threads: int | None) -> int | None:
    """Return how many threads read: one in a worker of a `DataLoader`, because there are several workers."""
    if threads is None and get_worker_info() is not None:
        return 1
    return threads


def _pick(batch: Transition, number: int) -> Transition:
    """Return one item of a batch."""
    found = {}
    for name, value in batch.items():
        if isinstance(value, dict):
            found[name] = {camera: images[number] for camera, images in value.items()}
        else:
            found[name] = value[number]
    return found
