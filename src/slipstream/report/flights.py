"""Recorded flights, made small enough to travel in a page."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.rollout.files import RolloutFile
from slipstream.run.metrics import number_of

FORMAT, VERSION = "slipstream.flights", 1
MAX_PACKED_BYTES = 1_100_000  # of a scenario, before base64 makes it a third longer
MAX_MOMENT_S = 0.25  # between the moments that are kept: straight lines between them still look like the flight
MAX_THINGS = 20_000  # boxes, or obstacles: more than anyone could see
LEAST_STEP_M = 0.001
MAX_SIZE = 1e6  # metres, seconds or radians: beyond it, something is not what it claims to be
LEVEL_BEAM = 1  # of the pitches -10, 0, 10 and 20 degrees
NUM_OUTCOMES = 6  # flying, reached, hit a static obstacle, hit a moving one, out of bounds, timed out

KEYS = [("drone", "position"), ("drone", "lidar"), ("drone", "outcome"), ("obstacle", "position")]

Array = NDArray[Any]


def read_flights(path: Path) -> dict[str, Any]:
    """Read flights and pack them as JSON for the page.

    Positions become int16 in steps of ``step_m``, level LiDAR readings uint8 in steps of ``range_m / 255``, both until
    a drone's flight ends. If that is more than about a megabyte, moments are left out, then drones; ``stride`` and
    ``num_recorded`` tell.

    Raises:
        CorruptFileError: If the file is damaged, or does not hold flights.
        FormatVersionError: If a newer release wrote it.
        OSError: If it cannot be read.
    """
    with RolloutFile(path) as file:
        metadata = file.metadata
        if not isinstance(metadata, Mapping) or metadata.get("format") != FORMAT:
            raise CorruptFileError(f"{path}: does not hold flights, expected metadata of the format {FORMAT!r}")
        if metadata.get("version") != VERSION:
            raise FormatVersionError(
                f"{path}: holds flights of version {metadata.get('version')!r}, expected {VERSION}"
            )
        try:
            arrays = file.read(KEYS)
        except KeyError as error:
            raise CorruptFileError(f"{path}: does not hold flights, a key of them is missing") from error
    flights = {}
    for key in KEYS:
        # A key may also name a nested TensorDict: then only the tensors below it were read.
        if key not in arrays:
            raise CorruptFileError(f"{path}: does not hold flights, {'/'.join(key)} is not a tensor")
        flights[key] = _world(arrays[key], key, path)
    return _pack(flights, metadata, path)


def _world(values: Array, key: tuple[str, str], path: Path) -> Array:
    """Return an array of the one world, by time."""
    expected = np.uint8 if key == ("drone", "outcome") else np.float32
    if values.dtype != expected:
        raise CorruptFileError(f"{path}: {'/'.join(key)} is {values.dtype}, expected {np.dtype(expected)}")
    ranks = {("drone", "lidar"): 5, ("drone", "outcome"): 3}
    if values.ndim != ranks.get(key, 4) or values.shape[0] != 1 or not values.shape[1]:
        raise CorruptFileError(f"{path}: {'/'.join(key)} has the shape {values.shape}, expected one world over time")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise CorruptFileError(f"{path}: {'/'.join(key)} is not finite everywhere")
    world: Array = values[0]
    return world


def _pack(arrays: dict[tuple[str, str], Array], metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    position, lidar = arrays["drone", "position"], arrays["drone", "lidar"]
    outcome, obstacles = arrays["drone", "outcome"], arrays["obstacle", "position"]
    num_moments, num_drones = outcome.shape
    if position.shape != (num_moments, num_drones, 3) or lidar.shape[:2] != (num_moments, num_drones):
        raise CorruptFileError(f"{path}: its drones' positions and LiDAR do not fit their outcomes")
    if obstacles.shape[0] != num_moments or obstacles.shape[2] != 3 or obstacles.shape[1] > MAX_THINGS:
        raise CorruptFileError(f"{path}: its obstacles have the shape {obstacles.shape}, expected moments x count x 3")
    if not num_drones or not lidar.shape[2] * lidar.shape[3] or outcome.max() >= NUM_OUTCOMES:
        raise CorruptFileError(f"{path}: its drones have no LiDAR, or an outcome that is unknown")
    facts = _Facts(metadata, path)
    dt_s, range_m = facts.length("dt_s"), facts.length("lidar_range_m")
    beam = lidar[:, :, :, min(LEVEL_BEAM, lidar.shape[3] - 1)]
    ended = outcome > 0
    ends = np.where(ended.any(0), ended.argmax(0), num_moments - 1)
    stride, kept = _fit(ends, beam.shape[2], obstacles.shape[1], num_moments, dt_s)
    step_m = max(LEAST_STEP_M, *(float(np.abs(part).max(initial=0)) / 32_000 for part in (position, obstacles)))
    moments = np.minimum(np.arange(-(-(num_moments - 1) // stride) + 1) * stride, num_moments - 1)
    rows = [(np.minimum(moments[: -(-int(ends[drone]) // stride) + 1], ends[drone]), drone) for drone in range(kept)]
    return {
        "dt_s": dt_s,
        "stride": stride,
        "num_recorded": num_drones,
        "num_moments": num_moments,
        "half_extent_m": facts.length("half_extent_m"),
        "range_m": range_m,
        "step_m": step_m,
        "beams": beam.shape[2],
        "starts": facts.rows("starts", 3, num_drones)[:kept],
        "goals": facts.rows("goals", 3, num_drones)[:kept],
        "headings": facts.numbers("headings", num_drones)[:kept],
        "boxes": facts.rows("boxes", 5),
        "widths": facts.numbers("obstacle_widths_m", obstacles.shape[1]),
        "cylinders": facts.flags("obstacle_is_cylinder", obstacles.shape[1]),
        "ends": ends[:kept].tolist(),
        "outcomes": outcome[-1, :kept].tolist(),
        "positions": _base64(np.concatenate([position[row] for row in rows]) / step_m, "<i2"),
        "lidar": _base64(np.concatenate([beam[row] for row in rows]).clip(0, range_m) * (255 / range_m), "u1"),
        "obstacles": _base64(obstacles[moments] / step_m, "<i2"),
    }


def _fit(ends: Array, beams: int, num_obstacles: int, num_moments: int, dt_s: float) -> tuple[int, int]:
    """Return every how many moments, and how many of the drones, are kept."""

    def size(stride: int, kept: int) -> float:
        moments = (ends[:kept] // stride + 2).sum()
        return float(moments * (6 + beams) + (num_moments // stride + 2) * num_obstacles * 6)

    stride, kept = 1, len(ends)
    while size(stride, kept) > MAX_PACKED_BYTES and (stride + 1) * dt_s <= MAX_MOMENT_S:
        stride += 1
    while size(stride, kept) > MAX_PACKED_BYTES and kept > 1:
        kept = max(1, kept * 9 // 10)
    while size(stride, kept) > MAX_PACKED_BYTES and stride < num_moments:
        stride *= 2
    return stride, kept


def _base64(values: Array, dtype: str) -> str:
    return base64.b64encode(np.rint(values).astype(dtype).tobytes()).decode("ascii")


class _Facts:
    """Metadata of flights; what is not as expected is damage."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path

    def length(self, key: str) -> float:
        value = number_of(self._metadata.get(key))
        if value is None or not 1 / MAX_SIZE <= value <= MAX_SIZE:
            raise CorruptFileError(f"{self._path}: {key} is {self._metadata.get(key)!r}, expected a number above 0")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        return self._finite(key, self._list(key, count))

    def rows(self, key: str, width: int, count: int | None = None) -> list[list[float]]:
        rows = self._list(key, count)
        if not all(isinstance(row, list) and len(row) == width for row in rows):
            raise CorruptFileError(f"{self._path}: {key} holds something other than rows of {width} numbers")
        flat = self._finite(key, [value for row in rows for value in row])
        return [flat[begin : begin + width] for begin in range(0, len(flat), width)]

    def flags(self, key: str, count: int) -> list[int]:
        return [int(value is True) for value in self._list(key, count)]

    def _finite(self, key: str, values: list[Any]) -> list[float]:
        finite = []
        for value in values:
            number = number_of(value)
            if number is None or math.fabs(number) > MAX_SIZE:
                raise CorruptFileError(
                    f"{self._path}: {key} holds {repr(value)[:40]}, expected numbers of sensible size"
                )
            finite.append(round(number, 4))
        return finite

    def _list(self, key: str, count: int | None) -> list[Any]:
        values = self._metadata.get(key)
        if not isinstance(values, list) or (count is not None and len(values) != count):
            raise CorruptFileError(f"{self._path}: {key} is not a list of {'rows' if count is None else count}")
        if count is None and len(values) > MAX_THINGS:
            raise CorruptFileError(f"{self._path}: {key} has {len(values)} rows, expected at most {MAX_THINGS}")
        return values
