"""`SequenceDataset`: windows of recorded episodes, as policies that predict sequences are trained on."""

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
from torch.utils.data import Dataset

from slipstream.checks import require_count
from slipstream.datasets.cache import CacheSetting
from slipstream.datasets.description import Fields
from slipstream.datasets.extras import load_extras, require_extras
from slipstream.datasets.indices import require_indices
from slipstream.datasets.offsets import Steps, offsets_of_timestamps, require_offsets
from slipstream.datasets.opening import find_files
from slipstream.datasets.prepare import ImageSize, Interpolation, require_image_size, require_interpolation
from slipstream.datasets.recordings import Recordings, load
from slipstream.datasets.statistics import Statistics
from slipstream.datasets.transitions import reading_threads
from slipstream.errors import ConfigurationError, DatasetError
from slipstream.memory import Pool

Window = dict[str, Any]
"""``images`` (by camera), ``joint``, ``action``, ``reward``, ``terminal``, a ``..._is_pad`` each, ``mask``,
``episode``, ``step``, and extra keys."""

NUMBERS = ("joint", "action", "reward", "terminal")
IMAGE = "image"
RESERVED = (*NUMBERS, IMAGE, "images", "mask", "episode", "step")


class SequenceDataset(Dataset[Window]):
    """Windows of recorded episodes, one for every step; no image is in memory.

    A window consists of the steps at some offsets from its current step, which may differ between keys:
    ``offsets={"image": [-1, 0], "action": range(16)}`` gives the images of the last and the current step, and sixteen
    actions from the current one. `delta_timestamps` says the same in seconds, as in LeRobot. ``horizon=16,
    image_steps=1`` is short for ``range(16)`` and ``range(1)`` for images.

    A window never crosses the ends of an episode: where it would, the first or last step is repeated, and
    ``<key>_is_pad`` is True.

    A window is a dict. ``T`` is the number of offsets of a key:

    * ``images``: uint8 ``[T, channels, height, width]`` by camera, and ``image_is_pad``.
    * ``joint`` and ``action``: float32 ``[T, ...]``; ``reward``: float32 ``[T]``; ``terminal``: bool ``[T]``; and
      ``joint_is_pad``, ``action_is_pad``, ``reward_is_pad``, ``terminal_is_pad``: bool ``[T]``.
    * ``mask``: the inverse of ``action_is_pad``.
    * ``episode`` and ``step``: where the current step is.
    * extra keys: ``[T, ...]`` and ``<key>_is_pad`` if there is a value per step, otherwise the value of the episode.

    Indexed with a list of numbers, a slice or a mask, it returns one such dict with a batch axis, and reads each frame
    once, however many windows share it. That makes `DataLoader` fast:
    ``DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 64, drop_last=True))``.

    Works in the workers of a `DataLoader`, forked or spawned, in threads, and after pickling.

    Args:
        path: A file, several, or a folder of them.
        horizon: Number of steps of every key without offsets, from the current one.
        image_steps: The same for images; `horizon` by default. Behaviour cloning that predicts several actions from one
            look needs 1.
        offsets: Steps relative to the current one, by key: ``"image"`` (all cameras), the name of a camera,
            ``"joint"``, ``"action"``, ``"reward"``, ``"terminal"``, or an extra key. A camera that is named has its
            own mask, ``<camera>_is_pad``.
        delta_timestamps: The same in seconds. Needs `fps`.
        fps: Steps per second of the recording.
        tolerance_s: How far a time in `delta_timestamps` may be from a step.
        extra_keys: Paths of further values by name: ``obs/object`` (a dataset of the episode), ``/language`` (of the
            file), ``@lang`` (an attribute of the episode's group), ``/data@info/task`` (a member of the JSON object in
            an attribute). Text becomes str. Kept in memory.
        skip_last_steps: How many steps at the end of each episode are not the current step of any window.
        cameras: Names of cameras, as `slipstream data inspect` shows them; or paths by name. All by default;
            an empty list reads none.
        image_size: Side that images are resized to, or ``(height, width)``; None keeps the stored size.
        interpolation: How images are resized; see `prepare_frame`, which does the same to a live camera frame.
        fields: Which datasets are what, if the layout is not recognised.
        num_episodes: Maximum number of episodes to load.
        cache: Whether to use a cache made by `ingest`, or the folder where caches are. Caches hold square images that
            were resized linearly; with other settings none is used.
        threads: Number of reading threads; by default one per core, and one in a worker.

    Raises:
        ConfigurationError: If a setting is invalid.
        FileNotFoundError: If a file does not exist.
        CorruptFileError: If a file is not HDF5, or damaged.
        MissingEntryError: If something is not in a file; lists what is.
        DatasetError: If parts of a file contradict each other.
        NonFiniteError: If a number is NaN or infinite.

    Example:
        >>> import h5py, numpy
        >>> with h5py.File("/tmp/slipstream-doc-windows.hdf5", "w") as file:
        ...     for number, steps in enumerate((5, 8)):
        ...         file[f"data/demo_{number}/obs/agentview_image"] = numpy.zeros((steps, 84, 84, 3), "uint8")
        ...         file[f"data/demo_{number}/obs/robot0_joint_pos"] = numpy.zeros((steps, 7))
        ...         file[f"data/demo_{number}/actions"] = numpy.zeros((steps, 7))
        >>> offsets = {"image": [-1, 0], "action": range(3)}
        >>> data = SequenceDataset("/tmp/slipstream-doc-windows.hdf5", offsets=offsets)
        >>> len(data), data[0]["image_is_pad"].tolist(), data[4]["action_is_pad"].tolist()
        (13, [True, False], [False, True, True])
        >>> data[[0, 1]]["images"]["global"].shape
        torch.Size([2, 2, 3, 224, 224])
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        horizon: int = 1,
        *,
        image_steps: int | None = None,
        offsets: Mapping[str, Sequence[int]] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        fps: float | None = None,
        tolerance_s: float = 1e-4,
        extra_keys: Mapping[str, str] | None = None,
        skip_last_steps: int = 0,
        cameras: Sequence[str] | Mapping[str, str] | None = None,
        image_size: ImageSize = 224,
        interpolation: Interpolation = "linear",
        fields: Fields | None = None,
        num_episodes: int | None = None,
        cache: CacheSetting = True,
        threads: int | None = None,
    ) -> None:
        self.horizon = require_count("horizon", horizon)
        # No more images than steps.
        self.image_steps = self.horizon
        if image_steps is not None:
            self.image_steps = require_count("image_steps", image_steps, 1, horizon)
        if delta_timestamps is not None:
            if offsets is not None:
                raise ConfigurationError("offsets and delta_timestamps are two ways to say the same; pass one of them")
            offsets = offsets_of_timestamps(delta_timestamps, fps, tolerance_s)
        for name, value in (("num_episodes", num_episodes), ("threads", threads)):
            if value is not None:
                require_count(name, value)
        self.image_size = require_image_size(image_size)
        self.interpolation = require_interpolation(interpolation)
        self._skip_last_steps = require_count("skip_last_steps", skip_last_steps, 0)
        self._threads = threads
        self._memory = Pool()
        self._data = self._load(path, cameras, fields, num_episodes, cache)
        self.cameras = self._data.camera_names
        self._check_sizes()
        extra_paths = require_extras(extra_keys, (*RESERVED, *self.cameras))
        self._extras = load_extras(self._data.plans, extra_paths)
        self._offsets = self._choose_offsets(offsets or {})
        self._closed = False
        self.episodes: NDArray[np.int64] = np.arange(self._data.num_episodes)
        self._use(self.episodes)
        self.statistics = self._measure()

    def _load(
        self, path: Any, cameras: Any, fields: Fields | None, num_episodes: int | None, cache: CacheSetting
    ) -> Recordings:
        """Load the numbers, and note where the images are."""
        if isinstance(cameras, str):
            raise ConfigurationError(f"cameras is {cameras!r}, expected a list of names, such as [{cameras!r}]")
        names = None
        if cameras is not None:
            names = list(cameras)
        if isinstance(cameras, Mapping):
            fields = replace(fields or Fields(), cameras=dict(cameras))
        # A cache holds square frames that were resized linearly.
        side = None
        if self.image_size is not None and self.image_size[0] == self.image_size[1]:
            side = self.image_size[0]
        if self.interpolation != "linear":
            cache = False
        return load(find_files(path), fields, cameras=names, num_episodes=num_episodes, image_size=side, cache=cache)

    def _check_sizes(self) -> None:
        """Raise if images keep their sizes and have several."""
        if self.image_size is not None:
            return
        for name, sizes in self._data.sizes.items():
            if len(sizes) > 1:
                raise DatasetError(
                    f"{self._data.descriptions[0]}: images of the camera {name} have different sizes "
                    f"{sorted(sizes)}, so image_size cannot be None"
                )

    def _choose_offsets(self, offsets: Mapping[str, Sequence[int]]) -> dict[str, NDArray[np.int64]]:
        """Return the offsets of every key and of every camera that is named."""
        per_step = [name for name, extra in self._extras.items() if extra.per_step]
        keys = [IMAGE, *NUMBERS, *per_step, *(name for name in self.cameras if name not in (IMAGE, *NUMBERS))]
        given = require_offsets(offsets, keys)
        chosen = {key: np.arange(self.horizon) for key in (*NUMBERS, *per_step)}
        chosen[IMAGE] = np.arange(self.image_steps)
        chosen.update(given)
        return chosen

    def _use(self, episodes: NDArray[np.int64]) -> None:
        """Restrict the dataset to some episodes."""
        self.episodes = episodes
        lengths = self._data.starts[episodes + 1] - self._data.starts[episodes]
        self._ends = np.cumsum(np.maximum(0, lengths - self._skip_last_steps))
        if not len(self):
            raise DatasetError(
                f"{self._data.descriptions[0]}: the longest episode has {lengths.max()} steps, and skip_last_steps is "
                f"{self._skip_last_steps}, so there is no window"
            )

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
            seed: Seed of the choice.

        Raises:
            ConfigurationError: If the share is not between 0 and 1, or there are too few episodes.
        """
        require_count("seed", seed, 0)
        count = len(self.episodes)
        is_share = isinstance(validation, int | float) and 0 < validation < 1
        if not is_share or count < 2:
            raise ConfigurationError(
                f"cannot take a share of {validation} of {count} episodes for validation, expected more than 0, less "
                "than 1, and at least 2 episodes"
            )
        shuffled = np.random.default_rng(seed).permutation(self.episodes)
        held = min(count - 1, max(1, round(validation * count)))
        train = copy.copy(self)
        train._use(np.sort(shuffled[held:]))
        other = copy.copy(self)
        other._use(np.sort(shuffled[:held]))
        train.statistics = train._measure()
        other.statistics = train.statistics
        return train, other

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int | np.integer[Any] | slice | Sequence[int] | NDArray[Any] | torch.Tensor) -> Window:
        indices = require_indices(index, len(self))
        if indices.ndim == 0:
            return _pick(self._read(indices[None]), 0)
        return self._read(indices)

    def __getitems__(self, indices: Sequence[int]) -> list[Window]:
        """Read several windows at once, as `DataLoader` asks for them."""
        batch = self._read(require_indices(indices, len(self)))
        return [_pick(batch, number) for number in range(len(indices))]

    def _read(self, indices: NDArray[np.int64]) -> Window:
        if self._closed:
            raise DatasetError("the dataset is closed, and nothing can be read from it any more")
        data = self._data
        place = np.searchsorted(self._ends, indices, "right")
        episodes = self.episodes[place]
        lengths = data.starts[episodes + 1] - data.starts[episodes]
        first_windows = np.concatenate([[0], self._ends[:-1]])
        current = indices - first_windows[place]
        steps = {key: Steps.of(current, lengths, offsets) for key, offsets in self._offsets.items()}
        # The first step of each episode among all steps; an episode has one more joint position than steps.
        starts = data.starts[episodes][:, None]
        joints = starts + episodes[:, None] + steps["joint"].numbers
        window: Window = {
            "images": self._images(episodes, steps),
            "joint": torch.from_numpy(data.joint[joints]),
            "action": torch.from_numpy(data.action[starts + steps["action"].numbers]),
            "reward": torch.from_numpy(data.reward[starts + steps["reward"].numbers]),
            "terminal": torch.from_numpy(data.terminal[starts + steps["terminal"].numbers]),
        }
        for name, extra in self._extras.items():
            rows = episodes
            if extra.per_step:
                rows = starts + steps[name].numbers
            window[name] = extra.take(rows)
        for key, chosen in steps.items():
            if key != IMAGE or self._has_shared_offsets():
                window[f"{key}_is_pad"] = torch.from_numpy(chosen.is_pad)
        window["mask"] = ~window["action_is_pad"]
        window["episode"] = torch.from_numpy(episodes)
        window["step"] = torch.from_numpy(current)
        return window

    def _has_shared_offsets(self) -> bool:
        """Tell whether there is a camera without its own offsets."""
        return any(self._key_of(camera) == IMAGE for camera in self.cameras)

    def _key_of(self, camera: str) -> str:
        """Return the key whose offsets a camera has."""
        if camera in self._offsets and camera not in NUMBERS:
            return camera
        return IMAGE

    def _images(self, episodes: NDArray[np.int64], steps: Mapping[str, Steps]) -> dict[str, torch.Tensor]:
        requests = []
        found = {}
        for camera in self.cameras:
            numbers = steps[self._key_of(camera)].numbers
            size = self.image_size or next(iter(self._data.sizes[camera]))
            out = self._memory.take((numbers.size, self._data.channels[camera], *size))
            flat = np.repeat(episodes, numbers.shape[1])
            requests.append(self._data.request(camera, flat, numbers.reshape(-1), out))
            found[camera] = torch.from_numpy(out).reshape(*numbers.shape, *out.shape[1:])
        self._data.frames.read(requests, reading_threads(self._threads), self.interpolation)
        return found

    @property
    def num_open_files(self) -> int:
        """How many files are open in this process: never more than 64, and 4 by way of HDF5."""
        return self._data.frames.files.num_open

    def close(self) -> None:
        """Close all files, those of parts of it too. Idempotent; reading afterwards raises."""
        self._closed = True
        self._data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _pick(batch: Window, number: int) -> Window:
    """Return one window of a batch."""
    window = {}
    for name, value in batch.items():
        if name == "images":
            window[name] = {camera: images[number] for camera, images in value.items()}
        else:
            window[name] = value[number]
    return window
