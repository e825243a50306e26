"""`MultimodalReplayBuffer`: transitions of three cameras and joints, from files that do not fit into memory."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.datasets.cache import CacheSetting
from slipstream.datasets.description import Fields
from slipstream.datasets.index import measure
from slipstream.datasets.randomness import Randomness
from slipstream.datasets.recordings import Recordings
from slipstream.datasets.statistics import Statistics
from slipstream.datasets.transitions import TransitionDataset, choose_scale
from slipstream.datasets.views import Storage, Transitions, as_tuple, describe_images
from slipstream.errors import DatasetError, MissingEntryError

logger = logging.getLogger(__name__)

CAMERAS = ("left", "right", "global")

Values = TypeVar("Values", torch.Tensor, NDArray[Any])
Moments = NDArray[np.float32] | None


class MultimodalReplayBuffer:
    """Samples transitions of three cameras and joint positions from HDF5 files, without ever loading their images.

    A view of a `TransitionDataset` with the cameras ``left``, ``right`` and ``global``, whose batches are tuples.
    Numbers and an index are in memory, about 100 bytes per transition with 16 joints and 7 actions; images are read
    when they are sampled and resized on the CPU, each once however often it occurs in a batch. May be sampled from by
    several threads, by the workers of a `DataLoader` however they are started, and after pickling: every process opens
    its files itself and draws different numbers from the seed.

    Args:
        action_dim: Values of an action; what is loaded must have as many.
        joint_dim: Values of a joint position; likewise.
        device: Where batches go.
        max_size: Load at most this many transitions; a longer file is truncated, which is logged. Unlimited by default.
        image_size: Height and width that images are resized to.
        image_dtype: ``torch.uint8``, 0 to 255 as they are stored, or a floating dtype. Images move to the device as
            bytes and are converted there.
        image_scale: Largest value of floating images: 1 or 255. 1 by default.
        seed: Makes samples repeatable. Random by default.
        rank: Number of this process among those that train together; see `TransitionDataset`.
        world_size: Number of these processes; likewise.
        threads: How many threads read and resize; by default one per core, and one in a worker of a `DataLoader`.

    Attributes:
        action_mean: Mean of all actions, float32 ``[action_dim]``; None before loading. May be assigned.
        action_std: Their standard deviation, at least 1e-6 so that dividing by it is safe; likewise.
        joint_mean: Mean of all joint positions, float32 ``[joint_dim]``; likewise.
        joint_std: Their standard deviation; likewise.

    Example:
        >>> import h5py, numpy
        >>> with h5py.File("/tmp/slipstream-doc-buffer.hdf5", "w") as file:
        ...     for camera in ("left", "right", "global"):
        ...         file[f"observations/{camera}_image"] = numpy.zeros((11, 64, 64, 3), "uint8")
        ...     file["observations/joint"] = numpy.zeros((11, 16))
        ...     file["actions"], file["rewards"] = numpy.zeros((10, 7)), numpy.ones(10)
        ...     file["terminals"] = numpy.eye(10)[9]
        >>> with MultimodalReplayBuffer(action_dim=7, seed=0) as buffer:
        ...     buffer.load_from_hdf5("/tmp/slipstream-doc-buffer.hdf5")
        ...     left, *_, reward, not_done = buffer.sample(4)
        >>> left.shape, left.dtype, reward.shape
        (torch.Size([4, 3, 224, 224]), torch.uint8, torch.Size([4, 1]))
    """

    def __init__(
        self,
        action_dim: int,
        joint_dim: int = 16,
        device: str | torch.device = "cpu",
        max_size: int | None = None,
        image_size: int = 224,
        *,
        image_dtype: torch.dtype = torch.uint8,
        image_scale: int | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.action_dim = require_count("action_dim", action_dim)
        self.joint_dim = require_count("joint_dim", joint_dim)
        self.image_size = require_count("image_size", image_size)
        if max_size is not None:
            require_count("max_size", max_size)
        self.max_size = max_size
        self.image_scale = choose_scale(image_dtype, image_scale)
        self.image_dtype = image_dtype
        self.device = torch.device(device)
        self.action_mean: Moments = None
        self.action_std: Moments = None
        self.joint_mean: Moments = None
        self.joint_std: Moments = None
        self._threads = threads
        # For the first dataset; those that are joined to it draw with its numbers.
        self._randomness = Randomness(seed, rank, world_size)
        self._data: TransitionDataset | None = None
        self._closed = False

    def load_from_hdf5(
        self,
        hdf5_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        num_traj: int | None = None,
        *,
        num_episodes: int | None = None,
        cameras: Mapping[str, str] | None = None,
        joint: str | Sequence[str] | None = None,
        action: str | None = None,
        reward: str | None = None,
        terminal: str | None = None,
        timeout: str | None = None,
        episodes: str | None = None,
        fields: Fields | None = None,
        cache: CacheSetting = True,
    ) -> None:
        """Load the numbers of recorded episodes, and note where their images are; adds to what is loaded already.

        Reads no image, and computes the statistics of all that is loaded. A layout that is not recognised is described
        by naming its datasets: each path begins at the group of an episode, or at the root of the file. If anything is
        wrong nothing is added.

        Args:
            hdf5_path: A file, several, or a folder of them.
            num_traj: Load at most this many transitions. May cut the last episode; a cut is not terminal.
            num_episodes: Load at most this many episodes.
            cameras: Paths of the images of ``left``, ``right`` and ``global``.
            joint: Path of joint positions, or several to be concatenated.
            action: Path of actions.
            reward: Path of rewards.
            terminal: Path of flags of terminal states.
            timeout: Path of flags of episodes that were cut off.
            episodes: The group whose groups are the episodes.
            fields: All of this and more in one object; the names above win.
            cache: Whether to use a cache made by `ingest`, if there is a fresh one beside the file; or the folder where
                caches are.

        Raises:
            FileNotFoundError: If there is no such file.
            CorruptFileError: If it is not an HDF5 file, or damaged.
            MissingEntryError: If something is missing; lists what the file has.
            DatasetError: If its parts contradict each other, or have other widths than the buffer.
            NonFiniteError: If a number is NaN or infinite.
        """
        self._check_open()
        if num_traj is not None:
            require_count("num_traj", num_traj)
        if isinstance(joint, Sequence) and not isinstance(joint, str):
            joint = tuple(joint)
        named = {
            "cameras": cameras, "joint": joint, "action": action, "reward": reward, "terminal": terminal,
            "timeout": timeout, "episodes": episodes,
        }  # fmt: skip
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        limit = num_traj
        if self.max_size is not None:
            room = self.max_size - self.size
            if room <= 0:
                logger.warning(
                    "%s: not loaded: the buffer has %d transitions and max_size is %d",
                    hdf5_path, self.size, self.max_size,
                )  # fmt: skip
                return
            limit = room if num_traj is None else min(room, num_traj)
        data = TransitionDataset(
            hdf5_path, cameras=CAMERAS, image_size=self.image_size, image_dtype=self.image_dtype,
            image_scale=self.image_scale, fields=replace(fields or Fields(), **given), num_transitions=limit,
            num_episodes=num_episodes, cache=cache, device=self.device, threads=self._threads,
            seed=self._randomness.seed, rank=self._randomness.rank, world_size=self._randomness.world_size,
        )  # fmt: skip
        try:
            self._check_widths(data.parts[0])
            joined = data if self._data is None else self._data.joined(data)
        except BaseException:
            data.close()
            raise
        if data.left_out and limit != num_traj:
            logger.warning(
                "%s: truncated to %d transitions, because max_size is %d", hdf5_path, len(data), self.max_size
            )
        # With one assignment: a thread that samples at the same time sees all of it or nothing.
        self.view(joined)

    def _check_widths(self, part: Recordings) -> None:
        if not part.joint.shape[1]:
            raise MissingEntryError(
                f"{part.descriptions[0]}: no dataset was recognised as joint positions; name it, as in "
                "joint='path/of/joints' (slipstream data inspect lists the datasets)"
            )
        for what, found, expected in (
            ("action", part.action.shape[1], self.action_dim), ("joint", part.joint.shape[1], self.joint_dim),
        ):  # fmt: skip
            if found != expected:
                raise DatasetError(
                    f"{part.descriptions[0]}: its {what} has {found} values, the buffer was created with "
                    f"{what}_dim={expected}"
                )

    def sample(self, batch_size: int, indices: NDArray[np.int64] | None = None) -> Transitions:
        """Draw transitions at random, with replacement, and read their images; blocks until they are read.

        The memory of a batch is reused only when the batch and all views of it are gone.

        Args:
            batch_size: How many.
            indices: Which ones instead of random ones, 0 to `size` - 1.

        Returns:
            ``(left, right, global, joint, action, next_left, next_right, next_global, next_joint, reward, not_done)``:
            images ``[batch, channels, image_size, image_size]``, joints and actions float32, reward and not_done
            float32 ``[batch, 1]``. After a terminal step not_done is 0, and the next observation is the recorded one,
            the row that follows in the file, or else the last one once more.

        Raises:
            DatasetError: If nothing is loaded, the buffer is closed, or a file changed since it was loaded.
            CorruptFileError: If an image cannot be read.
        """
        return as_tuple(self._loaded().sample(batch_size, indices))

    def normalize_action(self, action: Values) -> Values:
        """Return actions, a tensor or an array, minus `action_mean`, divided by `action_std`."""
        mean, std = self._moments("action", action)
        normalized: Values = (action - mean) / std
        return normalized

    def unnormalize_action(self, action: Values) -> Values:
        """Undo `normalize_action`."""
        mean, std = self._moments("action", action)
        values: Values = action * std + mean
        return values

    def normalize_joint(self, joint: Values) -> Values:
        """Return joint positions, a tensor or an array, minus `joint_mean`, divided by `joint_std`."""
        mean, std = self._moments("joint", joint)
        normalized: Values = (joint - mean) / std
        return normalized

    def unnormalize_joint(self, joint: Values) -> Values:
        """Undo `normalize_joint`."""
        mean, std = self._moments("joint", joint)
        values: Values = joint * std + mean
        return values

    def _moments(self, name: str, like: Any) -> tuple[Any, Any]:
        """Return mean and standard deviation as what `like` is: tensors on its device, or arrays."""
        mean = getattr(self, f"{name}_mean")
        std = getattr(self, f"{name}_std")
        if mean is None or std is None:
            raise DatasetError(f"{name}_mean and {name}_std are None: call load_from_hdf5 first, or assign them")
        if isinstance(like, torch.Tensor):
            return torch.as_tensor(mean).to(like.device), torch.as_tensor(std).to(like.device)
        return np.asarray(mean), np.asarray(std)

    def compute_statistics(self) -> dict[str, Statistics]:
        """Measure all that is loaded again, which replaces means and deviations that were assigned.

        Returns:
            Those of ``action`` and ``joint``, also with their extremes.
        """
        data = self._loaded()
        found = measure(data.parts, data.index)
        self._use(found)
        return found

    def _use(self, statistics: Mapping[str, Statistics]) -> None:
        self.action_mean = statistics["action"].mean
        self.action_std = statistics["action"].std
        self.joint_mean = statistics["joint"].mean
        self.joint_std = statistics["joint"].std

    def split(self, fraction: float = 0.1, seed: int = 0) -> tuple[MultimodalReplayBuffer, MultimodalReplayBuffer]:
        """Return two buffers with parts of the episodes, for training and for validation; no episode is in both.

        Both share the files of this one: closing any closes all. Both have the statistics of the training part.

        Args:
            fraction: Share of the episodes that are for validation; at least one is.
            seed: Which ones.

        Raises:
            ConfigurationError: If the fraction is not between 0 and 1, or there are too few episodes.
            DatasetError: If nothing is loaded.
        """
        train, held = self._loaded().split(fraction, seed)
        return copy.copy(self).view(train), copy.copy(self).view(held)

    def view(self, data: TransitionDataset) -> Self:
        """Use other transitions, of the cameras ``left``, ``right`` and ``global``; returns the buffer."""
        self._data = data
        self._use(data.statistics)
        return self

    def add(self, *transition: Any, **more: Any) -> None:
        """Refuse: transitions come from files.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "MultimodalReplayBuffer reads recorded files and takes no single transitions; use load_from_hdf5"
        )

    @property
    def size(self) -> int:
        """Number of transitions."""
        return 0 if self._data is None else len(self._data)

    def __len__(self) -> int:
        return self.size

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return 0 if self._data is None else self._data.num_episodes

    @property
    def nbytes(self) -> int:
        """Memory of what is loaded: numbers, and not the images."""
        return 0 if self._data is None else self._data.nbytes

    @property
    def storage(self) -> Mapping[str, NDArray[Any]]:
        """The numbers of all transitions, read-only: ``joint``, ``action``, ``next_joint``, ``reward``, ``not_done``.

        Each array is put in order when it is looked up, in time and memory proportional to its size; keep it.
        """
        if self._data is None:
            return Storage((), None)
        return Storage(self._data.parts, self._data.index)

    @property
    def image_metadata(self) -> dict[str, Any]:
        """Where images are.

        * ``hdf5_path``: the file as a string, or a list of several.
        * ``indices``: the row of each transition among the actions of its file, episode after episode.
        * per camera a dict of its ``datasets``, ``files``, ``stored_sizes``, ``channels`` and how it is read
          (``reading``).
        """
        if self._data is None:
            return {}
        return describe_images(self._data.parts, self._data.index)

    def close(self) -> None:
        """Close all files and free all memory; batches that were handed out stay valid. Idempotent."""
        self._closed = True
        if self._data is not None:
            self._data.close()

    def _loaded(self) -> TransitionDataset:
        self._check_open()
        if self._data is None:
            raise DatasetError("nothing is loaded yet: call load_from_hdf5 first")
        return self._data

    def _check_open(self) -> None:
        if self._closed:
            raise DatasetError("the buffer is closed, and nothing can be sampled from it any more")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
