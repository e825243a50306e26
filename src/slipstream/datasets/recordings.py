"""Episodes in memory, but for their images: numbers and an index, and where each frame is.

Per step there are the action, the reward and a flag; per observation the joint position. An episode of `n` steps has
`n + 1` observations. If its last one was not recorded, the row that follows in the file stands in for it, or else the
row before it. Only a terminal step has such an outcome in a transition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.cache import find_cache
from slipstream.datasets.cached import RegisteredCache
from slipstream.datasets.describe import describe
from slipstream.datasets.description import Description, Fields, Images
from slipstream.datasets.files import MAX_OPEN, Files
from slipstream.datasets.frames import DatasetSource, FrameReader, Request, warn_if_slow
from slipstream.datasets.opening import known_dataset, opened, read_rows
from slipstream.datasets.plans import Plan, Room
from slipstream.errors import DatasetError, MissingEntryError, NonFiniteError
from slipstream.memory import machine_bytes

_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class CameraIndex:
    """Where the frames of a camera are, per episode.

    Attributes:
        source: Source of the frames of its steps.
        row: Row of the first.
        final_source: Source of the frame after its last step.
        final_row: Row of that.
    """

    source: NDArray[np.int64]
    row: NDArray[np.int64]
    final_source: NDArray[np.int64]
    final_row: NDArray[np.int64]


class Recordings:
    """Episodes of one or several files; nothing in it changes once it is loaded.

    Attributes:
        plans: Which episodes of which files these are.
        joint: ``[observations, joint_dim]``, `n + 1` per episode.
        action: ``[steps, action_dim]``.
        reward: ``[steps]``.
        terminal: ``[steps]``, whether a step reached a terminal state.
        starts: First step of each episode, and the number of steps at the end.
        transitions: Transitions of each episode, as many as steps or one less.
        recorded: ``[observations]``, False where another row stands in for an observation after the last step of an
            episode, which was not recorded.
        cameras: Where frames are.
        channels: Channels of each camera.
        sizes: Height and width of each camera's frames as stored, of each that occurs.
        file_starts: First step of each file.
        left_out: Whether the limits of `load` left anything out.
    """

    def __init__(self, plans: Sequence[Plan], cameras: Sequence[str], image_size: int | None, cache: Any) -> None:
        self.plans = tuple(plans)
        self.camera_names = tuple(cameras)
        lengths = np.concatenate([plan.lengths for plan in plans])
        self.starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.transitions: NDArray[np.int64] = np.concatenate([plan.transitions for plan in plans])
        first = plans[0].description
        self.descriptions = list(dict.fromkeys(plan.description.path for plan in plans))
        steps, episodes = int(self.starts[-1]), len(lengths)
        self.recorded: NDArray[np.bool_] = np.ones(steps + episodes, bool)
        ends = self.starts[1:] + np.arange(episodes)
        self.recorded[ends] = np.concatenate([plan.has_final for plan in plans])
        _check_fits(plans, steps * (4 * first.action_dim + 5) + (steps + episodes) * 4 * first.joint_dim)
        self.joint: NDArray[np.float32] = np.empty((steps + episodes, first.joint_dim), np.float32)
        self.action: NDArray[np.float32] = np.empty((steps, first.action_dim), np.float32)
        self.reward: NDArray[np.float32] = np.zeros(steps, np.float32)
        self.terminal: NDArray[np.bool_] = np.zeros(steps, bool)
        # Blocks of steps whose next observation is not that of the following step, and the next observations.
        self._exceptions: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
        self.frames = FrameReader(Files(MAX_OPEN))
        self.channels: dict[str, int] = {}
        self.sizes: dict[str, set[tuple[int, int]]] = {name: set() for name in cameras}
        self.readings: dict[str, set[str]] = {name: set() for name in cameras}
        self.paths: dict[str, set[str]] = {name: set() for name in cameras}
        self.cameras = {name: CameraIndex(*(np.empty(episodes, np.int64) for _ in range(4))) for name in cameras}
        self.left_out = False
        self.file_starts: list[int] = []
        self._image_size = image_size
        self._cache_setting = cache
        self._load(plans)

    @property
    def num_episodes(self) -> int:
        """Episodes that were loaded."""
        return len(self.starts) - 1

    @property
    def num_steps(self) -> int:
        """Steps of all of them."""
        return int(self.starts[-1])

    @property
    def nbytes(self) -> int:
        """Memory of the numbers."""
        exceptions = sum(steps.nbytes + rows.nbytes for steps, rows in self._exceptions)
        return self.joint.nbytes + self.action.nbytes + self.reward.nbytes + self.terminal.nbytes + exceptions

    def _load(self, plans: Sequence[Plan]) -> None:
        episode = 0
        for description, of_file in _by_file(plans):
            with opened(description.path, description.identity) as (root, identity):
                number = self.frames.files.add(description.path, identity)
                cache = find_cache(description.path, self._image_size, self._cache_setting)
                cached = None if cache is None else RegisteredCache(cache, self.frames.files, number)
                self.file_starts.append(int(self.starts[episode]))
                for plan in of_file:
                    group = root if plan.stretch.group == "/" else root[plan.stretch.group]
                    self._load_numbers(plan, group, episode)
                    self._load_next(plan, group, episode)
                    self._index_frames(plan, episode, number, cached)
                    episode += plan.num_episodes
        self._join_exceptions()

    def _load_numbers(self, plan: Plan, group: h5py.Group, episode: int) -> None:
        """Read what is not an image, and check it."""
        roles, count = plan.description.roles, plan.num_episodes
        first, last = int(self.starts[episode]), int(self.starts[episode + count])
        for path, values in ((roles.action, self.action[first:last]), (roles.reward, self.reward[first:last])):
            if path is not None:
                data = known_dataset(group, path)
                read_rows(data, 0, values)
                _check_finite(plan, data, values)
        self.terminal[first:last] = plan.stretch.terminal[: last - first]
        column = 0
        for path in roles.joint:
            data = known_dataset(group, path)
            width = data.shape[1] if data.ndim == 2 else 1
            target = self.joint[first + episode : last + episode + count, column : column + width]
            self._load_joint(plan, data, target)
            column += width

    def _load_joint(self, plan: Plan, data: h5py.Dataset, target: NDArray[Any]) -> None:
        """Read observations so that each episode has one more than steps."""
        lengths = plan.lengths
        num_steps = int(lengths.sum())
        if plan.stretch.final == "own" or len(lengths) == 1:
            num_rows = min(data.shape[0], len(target))
            read_rows(data, 0, target[:num_rows])
            _check_finite(plan, data, target[:num_rows])
            target[num_rows:] = target[num_rows - 1]
            return
        starts = np.concatenate([[0], np.cumsum(lengths)])
        ends = starts[1:] + np.arange(len(lengths))
        # Also read the row after the last step, if the dataset has it.
        num_rows = min(data.shape[0], num_steps + 1)
        for first in range(0, num_rows, _BLOCK_ROWS):
            numbers = np.arange(first, min(first + _BLOCK_ROWS, num_rows))
            rows = np.empty((len(numbers), target.shape[1]), np.float32)
            read_rows(data, first, rows)
            _check_finite(plan, data, rows, numbers)
            of_steps = numbers < num_steps
            steps = numbers[of_steps]
            target[np.searchsorted(starts, steps, "right") - 1 + steps] = rows[of_steps]
            # The first row of an episode is also what was recorded after the last step of the episode before it.
            following = np.isin(numbers, starts[1:])
            target[ends[np.searchsorted(starts[1:], numbers[following])]] = rows[following]
        if num_rows == num_steps:
            target[ends[-1]] = target[ends[-1] - 1]

    def _load_next(self, plan: Plan, group: h5py.Group, episode: int) -> None:
        """Read the observations after all steps, if they are stored separately.

        The last one of each episode belongs to `joint`. Any other that is not the observation of the following step is
        an exception.
        """
        paths = plan.description.roles.next_joint
        if plan.stretch.final != "next" or not paths:
            return
        datasets = [known_dataset(group, path) for path in paths]
        num_steps = int(plan.lengths.sum())
        starts = np.cumsum(plan.lengths) - plan.lengths
        first_step = int(self.starts[episode])
        for first in range(0, num_steps, _BLOCK_ROWS):
            steps = np.arange(first, min(first + _BLOCK_ROWS, num_steps))
            rows = np.empty((len(steps), self.joint.shape[1]), np.float32)
            episodes = episode + np.searchsorted(starts, steps, "right") - 1
            places = first_step + steps + episodes + 1
            is_last = first_step + steps + 1 == self.starts[episodes + 1]
            column = 0
            for data in datasets:
                width = math.prod(data.shape[1:])
                part = rows[:, column : column + width]
                read_rows(data, first, part)
                used = is_last | (part != self.joint[places, column : column + width]).any(1)
                _check_finite(plan, data, part[used], steps[used])
                column += width
            self.joint[places[is_last]] = rows[is_last]
            differ = (rows != self.joint[places]).any(1)
            if differ.any():
                self._exceptions.append((first_step + steps[differ], rows[differ]))

    def next_joint(self, steps: NDArray[np.int64], episodes: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the observations after some steps, as they were recorded."""
        values: NDArray[np.float32] = self.joint[steps + episodes + 1]
        if self._exceptions:
            exceptional, rows = self._exceptions[0]
            place = np.minimum(np.searchsorted(exceptional, steps), len(exceptional) - 1)
            found = exceptional[place] == steps
            values[found] = rows[place[found]]
        return values

    def _join_exceptions(self) -> None:
        """Make one block of the exceptions of all episodes, which are in order."""
        if self._exceptions:
            steps = np.concatenate([block[0] for block in self._exceptions])
            rows = np.concatenate([block[1] for block in self._exceptions])
            self._exceptions = [(steps, rows)]

    def _index_frames(self, plan: Plan, episode: int, file: int, cache: RegisteredCache | None) -> None:
        """Note where the frames of a stretch are."""
        stretch = plan.stretch
        lengths = plan.lengths
        rows = np.cumsum(lengths) - lengths
        if stretch.final == "own":
            rows += np.arange(len(rows))
        here = slice(episode, episode + len(rows))
        for name in self.camera_names:
            images = stretch.cameras[name]
            source = self._source(plan, name, plan.description.roles.cameras[name], images, file, cache)
            index = self.cameras[name]
            index.source[here] = source
            index.row[here] = rows
            index.final_source[here] = source
            # The row after the last step; the last frame once more if nothing was recorded after it.
            index.final_row[here] = np.minimum(rows + lengths, images.num_rows - 1)
            if stretch.final == "next":
                path = plan.description.roles.next_cameras[name]
                index.final_source[here] = self._source(plan, name, path, stretch.next_cameras[name], file, cache)
                index.final_row[here] = rows + lengths - 1

    def _source(
        self, plan: Plan, camera: str, path: str, images: Images, file: int, cache: RegisteredCache | None
    ) -> int:
        where = f"{plan.stretch.group.strip('/')}/{path}".lstrip("/")
        kind = images.kind
        if self.channels.setdefault(camera, kind.channels) != kind.channels:
            raise DatasetError(
                f"{plan.description.path}: {where} has images of {kind.channels} channels, "
                f"those of the camera {camera} before it have {self.channels[camera]}"
            )
        self.sizes[camera].add((kind.height, kind.width))
        self.paths[camera].add(path)
        recorded = DatasetSource(file, where, kind, images.offset)
        cached = None if cache is None else cache.source(where, images, recorded)
        if cached is not None:
            self.readings[camera].add("cache")
            return self.frames.add(cached)
        if kind.reading not in self.readings[camera]:
            warn_if_slow(plan.description.path, camera, kind)
        self.readings[camera].add(kind.reading)
        return self.frames.add(recorded)

    def locate(self, camera: str, episodes: NDArray[np.int64], numbers: NDArray[np.int64]) -> tuple[Any, Any]:
        """Return source and row of observations: number 0 to `n` of an episode of `n` steps."""
        index = self.cameras[camera]
        final = numbers == self.starts[episodes + 1] - self.starts[episodes]
        sources = np.where(final, index.final_source[episodes], index.source[episodes])
        return sources, np.where(final, index.final_row[episodes], index.row[episodes] + numbers)

    def request(
        self, camera: str, episodes: NDArray[np.int64], numbers: NDArray[np.int64], out: NDArray[np.uint8],
        places: NDArray[np.int64] | None = None,
    ) -> Request:  # fmt: skip
        """Return what the reader needs to know to read observations of a camera."""
        return Request(*self.locate(camera, episodes, numbers), out, places)

    def close(self) -> None:
        """Close all files."""
        self.frames.files.close()


def load(
    files: Iterable[Path],
    fields: Fields | None = None,
    *,
    cameras: Sequence[str] | None = None,
    num_episodes: int | None = None,
    num_transitions: int | None = None,
    image_size: int | None = None,
    cache: Any = True,
) -> Recordings:
    """Look into files, check them, and load their numbers.

    Args:
        files: The files, in order. Those after the limits are reached are not opened.
        fields: Which datasets are what; see `Fields`.
        cameras: Which cameras; all of the first file by default.
        num_episodes: Load at most this many episodes.
        num_transitions: Load at most this many transitions; the last episode may be cut.
        image_size: What frames will be resized to, to find a cache of that size.
        cache: Whether to look for caches beside the files, or the folder where they are.

    Raises:
        MissingEntryError: If a file lacks a camera; names those it has.
        DatasetError: If files contradict themselves or each other.
        NonFiniteError: If a number is NaN or infinite.
    """
    plans: list[Plan] = []
    room = Room(num_episodes, num_transitions)
    description = None
    for path in files:
        if room.is_used_up():
            room.left_out = True
            break
        description = describe(path, fields, cameras=cameras, like=description)
        if cameras is None:
            cameras = tuple(description.roles.cameras)
        first = plans[0].description if plans else description
        _check_like(description, first, cameras)
        for stretch in description.stretches:
            plan = room.plan(description, stretch)
            if plan is not None:
                plans.append(plan)
    recordings = Recordings(plans, cameras or (), image_size, cache)
    recordings.left_out = room.left_out
    return recordings


def _check_like(description: Description, first: Description, cameras: Sequence[str]) -> None:
    """Raise unless a file has the cameras, and numbers as wide as those of the first."""
    missing = [name for name in cameras if name not in description.roles.cameras]
    if missing:
        found = ", ".join(f"{name} ({path})" for name, path in description.roles.cameras.items()) or "none"
        raise MissingEntryError(
            f"{description.path}: there is no camera {missing[0]}; those found are {found}; name it, "
            f"as in cameras={{{missing[0]!r}: 'path/of/images'}}"
        )
    for what in ("action_dim", "joint_dim"):
        if getattr(description, what) != getattr(first, what):
            raise DatasetError(
                f"{description.path}: its {what} is {getattr(description, what)}, that of {first.path} is "
                f"{getattr(first, what)}"
            )


def _by_file(plans: Sequence[Plan]) -> Iterable[tuple[Description, list[Plan]]]:
    grouped: list[tuple[Description, list[Plan]]] = []
    for plan in plans:
        if not grouped or grouped[-1][0] is not plan.description:
            grouped.append((plan.description, []))
        grouped[-1][1].append(plan)
    return grouped


def _check_fits(plans: Sequence[Plan], nbytes: int) -> None:
    if nbytes > machine_bytes():
        raise DatasetError(
            f"{plans[0].description.path}: its numbers alone would take {nbytes} bytes, more than this machine has"
        )


def _check_finite(
    plan: Plan, data: h5py.Dataset, values: NDArray[Any], numbers: NDArray[np.int64] | None = None
) -> None:
    """Raise unless all values are finite; `numbers` are those of their rows in the dataset."""
    for start in range(0, len(values), _BLOCK_ROWS):  # no mask of the size of everything
        good = np.isfinite(values[start : start + _BLOCK_ROWS])
        if not good.all():
            row = start + int(np.argmin(good.reshape(len(good), -1).all(1)))
            bad = np.asarray(values[row]).reshape(-1)
            number = row if numbers is None else numbers[row]
            raise NonFiniteError(
                f"{plan.description.path}: {data.name} is not finite in row {number}: "
                f"{bad[~np.isfinite(bad)][0]} among {bad.size} values"
            )
