"""What stood and moved around drones while a rollout was collected: stored beside it, so that flights can be replayed.

A rollout has the positions of its drones. What all drones on a map have in common is not repeated for each: the boxes
and the positions of the moving obstacles are extra arrays of the file, everything else is metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.run.metrics import number_of

FORMAT = "slipstream.world"
VERSION = 1
OLD_FORMAT = "slipstream.flights"  # recorded flights of earlier releases, which were not rollouts
ARRAYS = ("boxes", "obstacles")
MAX_SIZE = 1e6  # metres, seconds: a larger value is damage
MAX_THINGS = 20_000  # boxes or obstacles on one map

Array = NDArray[Any]


@dataclass(frozen=True)
class World:
    """The worlds of a rollout: one or more maps, with the same number of environments on each, map after map.

    Attributes:
        dt_s: Seconds per step.
        half_extent_m: The field is this far from its centre to each side.
        lidar_range_m: How far the LiDAR reaches.
        map_seeds: The seed of each map.
        obstacle_widths_m: Of each moving obstacle; the same on all maps.
        obstacle_is_cylinder: Whether each is a cylinder, or else a cuboid.
        boxes: West, south, east, north and height of each box, ``[maps, boxes, 5]``, float32. Maps with fewer boxes
            are filled with NaN.
        obstacles: Centres of the moving obstacles before each step, and after the last one,
            ``[maps, steps + 1, obstacles, 3]``, float32.
    """

    dt_s: float
    half_extent_m: float
    lidar_range_m: float
    map_seeds: Sequence[int]
    obstacle_widths_m: Sequence[float]
    obstacle_is_cylinder: Sequence[bool]
    boxes: Array
    obstacles: Array

    def metadata(self) -> dict[str, Any]:
        """Return everything but the arrays as JSON values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "dt_s": self.dt_s,
            "half_extent_m": self.half_extent_m,
            "lidar_range_m": self.lidar_range_m,
            "map_seeds": list(self.map_seeds),
            "obstacle_widths_m": list(self.obstacle_widths_m),
            "obstacle_is_cylinder": list(self.obstacle_is_cylinder),
        }

    def arrays(self) -> dict[str, Array]:
        """Return what is stored as extra arrays of the rollout."""
        return {"boxes": self.boxes, "obstacles": self.obstacles}


def join_worlds(worlds: Sequence[World]) -> World:
    """Return the worlds of several rollouts whose environments are concatenated. They differ in their maps only."""
    # Maps may have different numbers of boxes, and an array has room for the most.
    first = worlds[0]
    seeds: list[int] = []
    num_boxes = 0
    for world in worlds:
        seeds += world.map_seeds
        num_boxes = max(num_boxes, world.boxes.shape[1])
    boxes = [pad_boxes(world.boxes, num_boxes) for world in worlds]
    return World(
        first.dt_s,
        first.half_extent_m,
        first.lidar_range_m,
        seeds,
        first.obstacle_widths_m,
        first.obstacle_is_cylinder,
        np.concatenate(boxes),
        np.concatenate([world.obstacles for world in worlds]),
    )


def pad_boxes(boxes: Array, count: int) -> Array:
    """Return boxes ``[maps, boxes, 5]``, filled with NaN up to a number of boxes."""
    missing = count - boxes.shape[1]
    return np.pad(boxes, ((0, 0), (0, missing), (0, 0)), constant_values=np.nan)


def has_world(metadata: Any, path: Path) -> bool:
    """Return whether the metadata of a rollout describes its world.

    Raises:
        FormatVersionError: If another release wrote it, in a version that this one does not read.
    """
    if not isinstance(metadata, Mapping):
        return False
    if metadata.get("format") == OLD_FORMAT:
        raise FormatVersionError(
            f"{path}: holds flights in the format of an earlier release, which is not supported any more; record them "
            "again with `slipstream eval`"
        )
    if metadata.get("format") != FORMAT:
        return False
    if metadata.get("version") != VERSION:
        raise FormatVersionError(f"{path}: its world is of version {metadata.get('version')!r}, expected {VERSION}")
    return True


def parse_world(
    metadata: Mapping[str, Any], arrays: Mapping[str, Array], num_envs: int, num_steps: int, path: Path
) -> World:
    """Return the world of a rollout, after checking that it fits.

    Args:
        metadata: Of the file, which may have been written by anyone.
        arrays: Its extra arrays, by the names in `ARRAYS`.
        num_envs: The number of environments of the rollout.
        num_steps: The number of its steps.
        path: Named in errors.

    Raises:
        CorruptFileError: If something does not fit, or is not finite.
    """
    # The sizes first: everything else relies on them.
    facts = _Facts(metadata, path)
    boxes = arrays["boxes"]
    obstacles = arrays["obstacles"]
    num_maps = len(boxes)
    for name, array, rank in (("boxes", boxes, 3), ("obstacles", obstacles, 4)):
        if array.dtype != np.float32 or array.ndim != rank or array.size > 3 * MAX_THINGS * (num_steps + 1) * num_envs:
            raise CorruptFileError(f"{path}: {name} has the shape {array.shape} and the dtype {array.dtype}")
    if not num_maps or num_envs % num_maps or boxes.shape[2] != 5 or boxes.shape[1] > MAX_THINGS:
        raise CorruptFileError(f"{path}: boxes has the shape {boxes.shape}, expected (maps, boxes, 5)")
    widths = facts.numbers("obstacle_widths_m")
    if obstacles.shape != (num_maps, num_steps + 1, len(widths), 3):
        raise CorruptFileError(
            f"{path}: obstacles has the shape {obstacles.shape}, expected {(num_maps, num_steps + 1, len(widths), 3)}"
        )
    # NaN is not a position, but fills the boxes of maps that have fewer.
    if not (np.abs(obstacles) < MAX_SIZE).all() or (np.abs(boxes) > MAX_SIZE).any():
        raise CorruptFileError(f"{path}: boxes or obstacles are not finite, or further away than {MAX_SIZE:g} m")
    return World(
        dt_s=facts.length("dt_s"),
        half_extent_m=facts.length("half_extent_m"),
        lidar_range_m=facts.length("lidar_range_m"),
        map_seeds=facts.integers("map_seeds", num_maps),
        obstacle_widths_m=widths,
        obstacle_is_cylinder=facts.flags("obstacle_is_cylinder", len(widths)),
        boxes=boxes,
        obstacles=obstacles,
    )


class _Facts:
    """The metadata of a world. A value that is not as expected means that the file is damaged."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path

    def length(self, key: str) -> float:
        value = number_of(self._metadata.get(key))
        if value is None or not 1 / MAX_SIZE <= value <= MAX_SIZE:
            raise CorruptFileError(f"{self._path}: {key} is {self._metadata.get(key)!r}, expected a number above 0")
        return value

    def numbers(self, key: str, count: int | None = None) -> list[float]:
        numbers = []
        for value in self._list(key, count):
            number = number_of(value)
            if number is None or math.fabs(number) > MAX_SIZE:
                raise CorruptFileError(
                    f"{self._path}: {key} holds {repr(value)[:40]}, expected numbers of sensible size"
                )
            numbers.append(number)
        return numbers

    def integers(self, key: str, count: int) -> list[int]:
        return list(map(round, self.numbers(key, count)))

    def flags(self, key: str, count: int) -> list[bool]:
        return [value is True for value in self._list(key, count)]

    def _list(self, key: str, count: int | None) -> list[Any]:
        values = self._metadata.get(key)
        if not isinstance(values, list) or len(values) > MAX_THINGS or count not in (None, len(values)):
            expected = "values"
            if count is not None:
                expected = str(count)
            raise CorruptFileError(f"{self._path}: {key} is not a list of {expected}")
        return values
