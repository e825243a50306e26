"""`MultimodalReplayBuffer`: transitions of three cameras and joints, from files that do not fit into memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.datasets.cache import CacheSetting
from slipstream.datasets.description import Fields
from slipstream.datasets.opening import find_files
from slipstream.datasets.randomness import Randomness
from slipstream.datasets.recordings import Recordings, load
from slipstream.datasets.statistics import Statistics
from slipstream.errors import ConfigurationError, DatasetError, MissingEntryError
from slipstream.memory import Pool

CAMERAS = ("left", "right", "global")


class Transitions(NamedTuple):
    """A batch of transitions, in the order that training code unpacks it."""

    left: torch.Tensor
    right: torch.Tensor
    global_: torch.Tensor
    joint: torch.Tensor
    action: torch.Tensor
    next_left: torch.Tensor
    next_right: torch.Tensor
    next_global: torch.Tensor
    next_joint: torch.Tensor
    reward: torch.Tensor
    not_done: torch.Tensor


class MultimodalReplayBuffer:
    """Samples transitions of three cameras and joint positions from HDF5 files, without ever loading their images.

    Numbers and an index are in memory, about 150 bytes a transition with 16 joints and as many actions; images are read
    when they are sampled, resized on the CPU, each once however often it occurs in a batch. May be sampled from by
    several threads, by the workers of a `DataLoader` however they are started, and after pickling: every process opens
    its own files, and draws its own numbers from the seed.

    Args:
        action_dim: Values of an action; what is loaded must have as many.
        joint_dim: Values of a joint position; likewise.
        device: Where batches go.
        max_size: Load no more than so many transitions, in whole episodes; what is left out is logged.
        image_size: Height and width that images are resized to.
        image_dtype: ``torch.uint8``, 0 to 255 as they are stored; or a floating dtype, 0 to 1, which is made of them on
            the device.
        seed: Makes samples repeatable.
        threads: How many threads read and resize; by default one per core, and one in a worker of a `DataLoader`.

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
        max_size: int = 1_000_000,
        image_size: int = 224,
        *,
        image_dtype: torch.dtype = torch.uint8,
        seed: int | None = None,
        threads: int | None = None,
    ) -> None:
        for name, value in (
            ("action_dim", action_dim), ("joint_dim", joint_dim), ("max_size", max_size), ("image_size", image_size),
        ):  # fmt: skip
            require_count(name, value)
        if image_dtype != torch.uint8 and not image_dtype.is_floating_point:
            raise ConfigurationError(f"image_dtype is {image_dtype}, expected torch.uint8 or a floating dtype")
        self.action_dim, self.joint_dim, self.max_size = action_dim, joint_dim, max_size
        self.image_size, self.image_dtype = image_size, image_dtype
        self.device = torch.device(device)
        self._threads = threads
        self._randomness = Randomness(seed)
        self._memory = Pool()
        self._parts: list[Recordings] = []
        self._first: NDArray[np.int64] = np.zeros(1, np.int64)  # number of the first transition of each part
        self._ends: list[NDArray[np.int64]] = []
        self._closed = False
        self._statistics: dict[str, Statistics] = {}

    def load_from_hdf5(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        num_traj: int | None = None,
        *,
        cameras: Mapping[str, str] | None = None,
        joint: str | Sequence[str] | None = None,
        action: str | None = None,
        reward: str | None = None,
        terminal: str | None = None,
        timeout: str | None = None,
        episodes: str | None = None,
        cache: CacheSetting = True,
    ) -> None:
        """Load the numbers of recorded episodes, and note where their images are; adds to what is loaded already.

        Reads no image. A layout that is not recognised is named: each path begins at the group of an episode, or at the
        root of the file. If anything is wrong nothing is added.

        Args:
            path: A file, several, or a folder of them.
            num_traj: Load only so many episodes.
            cameras: Paths of the images of ``left``, ``right`` and ``global``.
            joint: Path of joint positions, or several to be put side by side.
            action: Path of actions.
            reward: Path of rewards.
            terminal: Path of flags of terminal states.
            timeout: Path of flags of episodes that were cut off.
            episodes: The group whose groups are the episodes.
            cache: Whether to use a cache made by `ingest`, where there is a fresh one beside the file; or the folder
                where caches are.

        Raises:
            FileNotFoundError: If there is no such file.
            CorruptFileError: If it is no HDF5 file, or damaged.
            MissingEntryError: If something is not in it; lists what is.
            DatasetError: If its parts contradict each other, or have other widths than the buffer.
            NonFiniteError: If a number is NaN or infinite.
        """
        self._check_open()
        if num_traj is not None:
            require_count("num_traj", num_traj)
        told = joint if joint is None or isinstance(joint, str) else tuple(joint)
        fields = Fields(cameras, told, action, reward, terminal, timeout, episodes=episodes)
        room = self.max_size - self.size
        if room <= 0:
            raise DatasetError(f"the buffer holds {self.size} transitions already, and max_size is {self.max_size}")
        part = load(
            find_files(path), fields, cameras=CAMERAS, num_episodes=num_traj, max_transitions=room,
            image_size=self.image_size, cache=cache,
        )  # fmt: skip
        self._check_widths(part)
        statistics = dict(self._statistics)
        for name, values, recorded in (("action", part.action, None), ("joint", part.joint, part.recorded)):
            statistics[name] = statistics.get(name, Statistics.none(values.shape[1])).update(values, recorded)
        self._ends.append(np.cumsum(part.transitions))
        self._parts.append(part)
        self._statistics = statistics
        # Last, and at once: a thread that samples meanwhile sees all of it or nothing.
        self._first = np.append(self._first, self._first[-1] + int(part.transitions.sum()))

    def _check_widths(self, part: Recordings) -> None:
        if not part.joint.shape[1]:
            raise MissingEntryError(
                f"{part.descriptions[0]}: no dataset was recognised as joint positions; name it, as in "
                "joint='path/of/joints' (slipstream data inspect shows what there is)"
            )
        if not part.transitions.sum():
            raise DatasetError(f"{part.descriptions[0]}: holds no transition: nothing was recorded after any step")
        for what, found, wanted in (
            ("action", part.action.shape[1], self.action_dim), ("joint", part.joint.shape[1], self.joint_dim),
        ):  # fmt: skip
            if found != wanted:
                part.close()
                raise DatasetError(
                    f"{part.descriptions[0]}: its {what} has {found} values, the buffer was made for "
                    f"{what}_dim={wanted}"
                )
        for name, channels in self._parts[0].channels.items() if self._parts else ():
            if part.channels[name] != channels:
                raise DatasetError(
                    f"{part.descriptions[0]}: the images of the camera {name} have {part.channels[name]} channels, "
                    f"those that are loaded already have {channels}"
                )

    def sample(self, batch_size: int, indices: NDArray[np.int64] | None = None) -> Transitions:
        """Draw transitions at random, with replacement, and read their images; blocks until they are read.

        The memory of a batch is used again only when the batch and all views of it are gone.

        Args:
            batch_size: How many.
            indices: Which ones instead of random ones, 0 to `size` - 1.

        Returns:
            ``(left, right, global, joint, action, next_left, next_right, next_global, next_joint, reward, not_done)``:
            images ``[batch, channels, image_size, image_size]``, joints and actions float32, reward and not_done
            float32 ``[batch, 1]``. Where an episode reached its end and nothing was recorded after it, the next
            observation is the last one, and not_done is 0.

        Raises:
            DatasetError: If nothing is loaded, the buffer is closed, or a file changed since it was loaded.
            CorruptFileError: If an image cannot be read.
        """
        self._check_open()
        require_count("batch_size", batch_size)
        if not self._parts:
            raise DatasetError("nothing is loaded yet: call load_from_hdf5 first")
        indices = self._randomness.draw(self.size, batch_size) if indices is None else np.asarray(indices, np.int64)
        if len(indices) != batch_size or indices.min() < 0 or indices.max() >= self.size:
            raise ConfigurationError(f"expected {batch_size} indices from 0 to {self.size - 1}")
        return self._gather(indices)

    def _gather(self, indices: NDArray[np.int64]) -> Transitions:
        count, size = len(indices), self.image_size
        images = {name: self._memory.take((2 * count, self._parts[0].channels[name], size, size)) for name in CAMERAS}
        joint = np.empty((2, count, self.joint_dim), np.float32)
        action = np.empty((count, self.action_dim), np.float32)
        reward, not_done = np.empty((count, 1), np.float32), np.empty((count, 1), np.float32)
        home = np.searchsorted(self._first, indices, "right") - 1
        for number in np.unique(home):
            where = np.flatnonzero(home == number)
            part = self._parts[number]
            within = indices[where] - self._first[number]
            episodes = np.searchsorted(self._ends[number], within, "right")
            before = self._ends[number][episodes] - part.transitions[episodes]
            steps = within - before
            rows = part.starts[episodes] + steps
            joint[0, where], joint[1, where] = part.joint[rows + episodes], part.joint[rows + episodes + 1]
            action[where], reward[where, 0] = part.action[rows], part.reward[rows]
            not_done[where, 0] = ~part.terminal[rows]
            self._read_images(part, images, where, episodes, steps)
        return self._batch(images, joint, action, reward, not_done)

    def _read_images(
        self, part: Recordings, images: dict[str, NDArray[np.uint8]], where: NDArray[np.int64],
        episodes: NDArray[np.int64], steps: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Read the frames of some transitions, those before and those after in one go: neighbours share them."""
        count = len(next(iter(images.values()))) // 2
        both = np.concatenate([episodes, episodes])
        numbers = np.concatenate([steps, steps + 1])
        places = np.concatenate([where, where + count])
        requests = [part.request(name, both, numbers, images[name], places) for name in CAMERAS]
        part.frames.read(requests, reading_threads(self._threads))

    def _batch(
        self, images: dict[str, NDArray[np.uint8]], joint: NDArray[Any], action: NDArray[Any], reward: NDArray[Any],
        not_done: NDArray[Any],
    ) -> Transitions:  # fmt: skip
        count = len(action)
        shown = {name: self._show(torch.from_numpy(images[name])) for name in CAMERAS}
        numbers = [torch.from_numpy(values).to(self.device) for values in (joint, action, reward, not_done)]
        now, after = ([shown[name][part] for name in CAMERAS] for part in (slice(count), slice(count, None)))
        joints, actions, rewards, flags = numbers
        return Transitions._make([*now, joints[0], actions, *after, joints[1], rewards, flags])

    def _show(self, images: torch.Tensor) -> torch.Tensor:
        """Move images to the device as bytes, and only there make floats of them if that is asked for."""
        images = images.to(self.device)
        return images if self.image_dtype == torch.uint8 else images.to(self.image_dtype).div_(255)

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
        """How many transitions are loaded."""
        return int(self._first[-1])

    def __len__(self) -> int:
        return self.size

    @property
    def num_episodes(self) -> int:
        """How many episodes are loaded."""
        return sum(part.num_episodes for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Memory of what is loaded: numbers, and not the images."""
        return sum(part.nbytes for part in self._parts)

    @property
    def image_metadata(self) -> dict[str, dict[str, Any]]:
        """Of each camera: its datasets, the sizes of its stored images, and how they are read."""
        return {
            name: {
                "datasets": sorted(set().union(*(part.paths[name] for part in self._parts))),
                "files": [str(path) for part in self._parts for path in part.descriptions],
                "stored_sizes": sorted(set().union(*(part.sizes[name] for part in self._parts))),
                "channels": self._parts[0].channels[name],
                "reading": sorted(set().union(*(part.readings[name] for part in self._parts))),
            }
            for name in CAMERAS
            if self._parts
        }

    @property
    def action_mean(self) -> torch.Tensor:
        """Mean of all actions, ``[action_dim]``."""
        return self._moment("action", "mean")

    @property
    def action_std(self) -> torch.Tensor:
        """Standard deviation of all actions, at least 1e-6 so that dividing by it is safe."""
        return self._moment("action", "std")

    @property
    def joint_mean(self) -> torch.Tensor:
        """Mean of all joint positions, ``[joint_dim]``."""
        return self._moment("joint", "mean")

    @property
    def joint_std(self) -> torch.Tensor:
        """Standard deviation of all joint positions, at least 1e-6 so that dividing by it is safe."""
        return self._moment("joint", "std")

    def _moment(self, name: str, moment: str) -> torch.Tensor:
        if name not in self._statistics:
            raise DatasetError("nothing is loaded yet: call load_from_hdf5 first")
        return torch.from_numpy(getattr(self._statistics[name], moment)).to(self.device)

    def close(self) -> None:
        """Close all files and let go of all memory; batches that were handed out stay. Closing twice is no error."""
        self._closed = True
        for part in self._parts:
            part.close()
        self._memory.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise DatasetError("the buffer is closed, and nothing can be sampled from it any more")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


def reading_threads(threads: int | None) -> int | None:
    """Return how many threads read: one in a worker of a `DataLoader`, of which there are several."""
    return 1 if threads is None and torch.utils.data.get_worker_info() is not None else threads
