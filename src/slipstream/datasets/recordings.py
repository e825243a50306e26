"""Episodes in memory, but for their images: numbers and an index, and where each frame is.

Per step there are the action, the reward and two flags; per observation the joint position. An episode of `n` steps has
`n + 1` observations, the last of which is repeated where it was not recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.cache import find_cache
from slipstream.datasets.describe import describe
from slipstream.datasets.description import Description, Fields, Images, Stretch
from slipstream.datasets.files import MAX_OPEN, Files
from slipstream.datasets.frames import DatasetSource, FrameReader, Request, warn_if_slow
from slipstream.datasets.opening import dataset, opened, read_flags, read_rows
from slipstream.errors import DatasetError, MissingEntryError, NonFiniteError
from slipstream.memory import machine_bytes

logger = logging.getLogger(__name__)

_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class Plan:
    """Which episodes of a stretch are loaded: the first `num_episodes`."""

    description: Description
    stretch: Stretch
    num_episodes: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Steps of each."""
        return self.stretch.lengths[: self.num_episodes]


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
        joint: ``[observations, joint_dim]``, `n + 1` per episode.
        action: ``[steps, action_dim]``.
        reward: ``[steps]``.
        terminal: ``[steps]``, whether a step reached a terminal state.
        starts: First step of each episode, and the number of steps at the end.
        transitions: Transitions of each episode, as many as steps or one less.
        recorded: ``[observations]``, False where nothing was recorded after an episode and its last one is repeated.
        cameras: Where frames are.
        channels: Channels of each camera.
        sizes: Height and width of each camera's frames as stored, of each that occurs.
    """

    def __init__(self, plans: Sequence[Plan], cameras: Sequence[str], image_size: int | None, cache: Any) -> None:
        self.camera_names = tuple(cameras)
        lengths = np.concatenate([plan.lengths for plan in plans])
        self.starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.transitions = np.concatenate([plan.stretch.transitions()[: plan.num_episodes] for plan in plans])
        first = plans[0].description
        self.descriptions = list(dict.fromkeys(plan.description.path for plan in plans))
        steps, episodes = int(self.starts[-1]), len(lengths)
        self.recorded: NDArray[np.bool_] = np.ones(steps + episodes, bool)
        ends = self.starts[1:] + np.arange(episodes)
        self.recorded[ends] = np.concatenate([plan.stretch.has_final()[: plan.num_episodes] for plan in plans])
        _check_fits(plans, steps * (4 * first.action_dim + 5) + (steps + episodes) * 4 * first.joint_dim)
        self.joint: NDArray[np.float32] = np.empty((steps + episodes, first.joint_dim), np.float32)
        self.action: NDArray[np.float32] = np.empty((steps, first.action_dim), np.float32)
        self.reward: NDArray[np.float32] = np.zeros(steps, np.float32)
        self.terminal: NDArray[np.bool_] = np.zeros(steps, bool)
        self.frames = FrameReader(Files(MAX_OPEN))
        self.channels: dict[str, int] = {}
        self.sizes: dict[str, set[tuple[int, int]]] = {name: set() for name in cameras}
        self.readings: dict[str, set[str]] = {name: set() for name in cameras}
        self.paths: dict[str, set[str]] = {name: set() for name in cameras}
        self.cameras = {name: CameraIndex(*(np.empty(episodes, np.int64) for _ in range(4))) for name in cameras}
        self._image_size, self._cache_setting = image_size, cache
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
        return self.joint.nbytes + self.action.nbytes + self.reward.nbytes + self.terminal.nbytes

    def _load(self, plans: Sequence[Plan]) -> None:
        episode = 0
        for description, of_file in _by_file(plans):
            with opened(description.path) as (root, identity):
                if identity != description.identity:
                    description.identity.check(description.path)
                number = self.frames.files.add(description.path, identity)
                cache = find_cache(description.path, self._image_size, self._cache_setting)
                cached = None if cache is None else cache.register(self.frames.files)
                for plan in of_file:
                    group = root if plan.stretch.group == "/" else root[plan.stretch.group]
                    self._load_numbers(plan, group, episode)
                    self._index_frames(plan, episode, number, cached)
                    episode += plan.num_episodes

    def _load_numbers(self, plan: Plan, group: h5py.Group, episode: int) -> None:
        """Read what is not an image, and check it."""
        roles, count = plan.description.roles, plan.num_episodes
        first, last = int(self.starts[episode]), int(self.starts[episode + count])
        for path, values in ((roles.action, self.action[first:last]), (roles.reward, self.reward[first:last])):
            if path is not None:
                data = dataset(group, path)
                read_rows(data, 0, values)
                _check_finite(plan, data, values)
        if roles.terminal is not None:
            self.terminal[first:last] = read_flags(dataset(group, roles.terminal), last - first)
        column = 0
        for number, path in enumerate(roles.joint):
            data = dataset(group, path)
            width = data.shape[1] if data.ndim == 2 else 1
            after = dataset(group, roles.next_joint[number]) if plan.stretch.final == "next" else None
            target = self.joint[first + episode : last + episode + count, column : column + width]
            self._load_joint(plan, data, after, target)
            column += width

    def _load_joint(self, plan: Plan, data: h5py.Dataset, after: h5py.Dataset | None, target: NDArray[Any]) -> None:
        """Read observations so that each episode has one more than steps."""
        lengths, final = plan.lengths, plan.stretch.final
        if final == "own":
            read_rows(data, 0, target)
            _check_finite(plan, data, target)
            return
        starts = np.concatenate([[0], np.cumsum(lengths)])
        for first in range(0, int(starts[-1]), _BLOCK_ROWS):
            rows = np.empty((min(_BLOCK_ROWS, int(starts[-1]) - first), target.shape[1]), np.float32)
            read_rows(data, first, rows)
            _check_finite(plan, data, rows, np.arange(first, first + len(rows)))
            steps = np.arange(first, first + len(rows))
            target[np.searchsorted(starts, steps, "right") - 1 + steps] = rows
        ends = starts[1:] + np.arange(len(lengths))
        target[ends] = target[ends - 1]  # where nothing was recorded after the last step
        if after is not None:
            with np.errstate(over="ignore"):  # what is too large becomes infinite, and is reported
                target[ends] = np.asarray(after[starts[1:] - 1]).reshape(len(ends), -1)
            _check_finite(plan, after, target[ends], starts[1:] - 1)
        elif final == "stream" and plan.num_episodes == len(plan.stretch.lengths):
            last = target[int(ends[-1]) :]
            read_rows(data, int(starts[-1]), last)
            _check_finite(plan, data, last, starts[-1:])

    def _index_frames(self, plan: Plan, episode: int, file: int, cache: Any) -> None:
        """Note where the frames of a stretch are."""
        stretch, count = plan.stretch, plan.num_episodes
        starts = np.concatenate([[0], np.cumsum(stretch.lengths)])[: count + 1]
        rows = starts[:-1] + (np.arange(count) if stretch.final == "own" else 0)
        there = stretch.has_final()[:count]
        here = slice(episode, episode + count)
        for name in self.camera_names:
            path = plan.description.roles.cameras[name]
            source = self._source(plan, name, path, stretch.cameras[name], file, cache)
            index = self.cameras[name]
            index.source[here], index.row[here] = source, rows
            index.final_source[here] = source
            index.final_row[here] = rows + stretch.lengths[:count] - ~there
            if stretch.final == "next":
                after = plan.description.roles.next_cameras[name]
                index.final_source[here] = self._source(plan, name, after, stretch.next_cameras[name], file, cache)
                index.final_row[here] = rows + stretch.lengths[:count] - 1

    def _source(self, plan: Plan, camera: str, path: str, images: Images, file: int, cache: Any) -> int:
        where = f"{plan.stretch.group.strip('/')}/{path}".lstrip("/")
        kind = images.kind
        if self.channels.setdefault(camera, kind.channels) != kind.channels:
            raise DatasetError(
                f"{plan.description.path}: {where} has images of {kind.channels} channels, "
                f"those of the camera {camera} before it have {self.channels[camera]}"
            )
        self.sizes[camera].add((kind.height, kind.width))
        self.paths[camera].add(path)
        source = None if cache is None else cache.source(kind.cached_as(where), images.num_rows)
        if source is None:
            if kind.reading not in self.readings[camera]:
                warn_if_slow(plan.description.path, camera, kind)
            self.readings[camera].add(kind.reading)
            return self.frames.add(DatasetSource(file, where, kind, images.offset))
        self.readings[camera].add("cache")
        return self.frames.add(source)

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
    max_transitions: int | None = None,
    image_size: int | None = None,
    cache: Any = True,
) -> Recordings:
    """Look into files, check them, and load their numbers.

    Args:
        files: The files, in order.
        fields: Which datasets are what; see `Fields`.
        cameras: Which cameras; all of the first file by default.
        num_episodes: Load only so many.
        max_transitions: Load no more than that, in whole episodes.
        image_size: What frames will be resized to, to find a cache of that size.
        cache: Whether to look for caches beside the files, or the folder where they are.

    Raises:
        MissingEntryError: If a file lacks a camera; names those it has.
        DatasetError: If files contradict themselves or each other.
        NonFiniteError: If a number is NaN or infinite.
    """
    plans: list[Plan] = []
    episodes = transitions = left_out = 0
    description = None
    for path in files:
        if num_episodes is not None and episodes >= num_episodes:
            break
        description = describe(path, fields, cameras=cameras, like=description)
        names = tuple(description.roles.cameras) if cameras is None else tuple(cameras)
        cameras = names
        _check_like(description, plans[0].description if plans else description, names)
        for stretch in description.stretches:
            counts = stretch.transitions()
            wanted = len(counts) if num_episodes is None else min(len(counts), num_episodes - episodes)
            fitting = wanted
            if max_transitions is not None:
                fitting = int(np.searchsorted(np.cumsum(counts[:wanted]), max_transitions - transitions, "right"))
                fitting = 0 if left_out else fitting
            left_out += wanted - fitting
            if fitting:
                plans.append(Plan(description, stretch, fitting))
                transitions += int(counts[:fitting].sum())
                episodes += fitting
    if not plans:
        raise DatasetError(f"there is no episode to load: at most {max_transitions} transitions may be kept")
    if left_out:
        logger.warning("%d episodes were left out: no more than %s transitions may be kept", left_out, max_transitions)
    return Recordings(plans, cameras or (), image_size, cache)


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
