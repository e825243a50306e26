"""Flights in rollouts, made small enough for a page: recorded flights of an evaluation, and crashes of a training.

Both are ordinary rollouts of the simulator, with the world beside them; see `slipstream.run.world`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError
from slipstream.rollout.files import RolloutFile
from slipstream.rollout.layout import Key
from slipstream.run.world import ARRAYS, MAX_SIZE, World, has_world, parse_world

MAX_PACKED_BYTES = 1_100_000  # of a scene, before base64 makes it a third longer
MAX_MOMENT_S = 0.25  # between the moments that are kept: straight lines between them still look like the flight
MAX_CRASHES = 200
LEAST_STEP_M = 0.001
LEVEL_BEAM = 1  # of the pitches -10, 0, 10 and 20 degrees
NUM_STATE = 8  # features of the observation: direction to the goal (3), distance to it, height above, velocity (3)
FLYING = 0
# Indices into `slipstream.run.evaluation.OUTCOMES`. The last one that holds wins: a drone that touches something at the
# goal has crashed.
ENDS = (("truncated", 5), ("reached_goal", 1), ("out_of_bounds", 4), ("dynamic_collision", 3), ("static_collision", 2))
CRASHES = (2, 3)

_OBSERVATION = ("agents", "observation")
_FLAGS = ("static_collision", "dynamic_collision", "out_of_bounds", "reached_goal")
_FLOATS: dict[Key, tuple[int, ...]] = {
    ("info", "position"): (3,),
    (*_OBSERVATION, "state"): (NUM_STATE,),
    (*_OBSERVATION, "direction"): (1, 3),
}
_LIDAR = (*_OBSERVATION, "lidar")

Array = NDArray[Any]


@dataclass(frozen=True)
class Flight:
    """Some steps of one environment, within one episode.

    Attributes:
        env: Number of the environment.
        begin: The first step.
        end: The last step, which is included.
        outcome: How the last step ended the episode: index into `slipstream.run.evaluation.OUTCOMES`.
    """

    env: int
    begin: int
    end: int
    outcome: int


@dataclass(frozen=True)
class _Rollout:
    """The arrays of a rollout that flights are drawn from, ``[environments, steps, ...]``, and its world."""

    path: Path
    arrays: dict[Key, Array]
    world: World
    outcomes: Array

    @property
    def num_envs(self) -> int:
        return int(self.outcomes.shape[0])

    @property
    def num_steps(self) -> int:
        return int(self.outcomes.shape[1])

    def moments(self, key: Key, flight: Flight) -> Array:
        """Return an observation before each step of a flight, and after its last one."""
        before = self.arrays[key][flight.env, flight.begin : flight.end + 1]
        after = self.arrays[("next", *key)][flight.env, flight.end : flight.end + 1]
        return np.concatenate([before, after])


def read_flights(path: Path) -> dict[str, Any]:
    """Read the recorded flights of an evaluation, the first episode of each drone, and pack them as JSON for the page.

    Positions become int16 in steps of ``step_m``, level LiDAR readings uint8 in steps of ``range_m / 255``, both until
    a drone's flight ends. If that is more than about a megabyte, moments are left out, then drones: ``stride`` and
    ``num_recorded`` say how many.

    Raises:
        CorruptFileError: If the file is damaged, or is not a rollout of the simulator with its world.
        FormatVersionError: If another release wrote it in a format that this one does not read.
        OSError: If it cannot be read.
    """
    rollout = _read(path)
    if rollout is None:
        raise CorruptFileError(f"{path}: does not hold flights, expected a rollout with the world it was collected in")
    flights = []
    for env in range(rollout.num_envs):
        ends = np.flatnonzero(rollout.outcomes[env])
        end = rollout.num_steps - 1
        if len(ends):
            end = int(ends[0])
        flights.append(Flight(env, 0, end, int(rollout.outcomes[env, end])))
    return _pack(rollout, flights)


def read_crashes(path: Path) -> dict[str, Any] | None:
    """Read the flights that ended in a collision in a rollout of a training, on the map that has most of them.

    A flight is shown from where its episode or the rollout began. See `read_flights` for how they are packed.

    Returns:
        The flights; None if there is no collision, or the rollout was saved without its world.

    Raises:
        CorruptFileError: If the file is damaged, or is not a rollout of the simulator.
        FormatVersionError: If another release wrote it in a format that this one does not read.
        OSError: If it cannot be read.
    """
    rollout = _read(path)
    if rollout is None:
        return None
    crashes: list[list[Flight]] = [[] for _ in rollout.world.map_seeds]
    per_map = rollout.num_envs // len(crashes)
    for env, end in np.argwhere(np.isin(rollout.outcomes, CRASHES)).tolist():
        earlier = np.flatnonzero(rollout.outcomes[env, :end])
        begin = 0
        if len(earlier):
            begin = int(earlier[-1]) + 1
        crashes[env // per_map].append(Flight(env, begin, end, int(rollout.outcomes[env, end])))
    most = max(crashes, key=len)
    if not most:
        return None
    return _pack(rollout, most[:MAX_CRASHES])


def _read(path: Path) -> _Rollout | None:
    """Read what flights are drawn from; None if the rollout has no world."""
    with RolloutFile(path) as file:
        if not has_world(file.metadata, path):
            return None
        keys: list[Key] = [*_FLOATS, _LIDAR]
        keys += [("next", *key) for key in keys]
        keys += [("next", "info", name) for name in _FLAGS]
        keys += [("next", "truncated"), ("next", "done")]
        try:
            arrays = file.read(keys)
            extra = {name: file.read_extra(name) for name in ARRAYS}
        except KeyError as error:
            raise CorruptFileError(f"{path}: does not hold flights, {error.args[0]}") from error
        num_envs = file.layout.num_envs
        num_steps = file.layout.num_steps
        for key in keys:
            # A key may also name a nested TensorDict: then only the tensors below it were read.
            if key not in arrays:
                raise CorruptFileError(f"{path}: does not hold flights, {'/'.join(key)} is not a tensor")
        metadata = file.metadata
    if not num_envs or not num_steps:
        raise CorruptFileError(f"{path}: does not hold flights, it has no environments or no steps")
    _check(arrays, (num_envs, num_steps), path)
    world = parse_world(metadata, extra, num_envs, num_steps, path)
    return _Rollout(path, arrays, world, _outcomes(arrays))


def _check(arrays: dict[Key, Array], size: tuple[int, int], path: Path) -> None:
    """Raise `CorruptFileError` unless the arrays of a rollout have the dtypes, shapes and values of the simulator's."""
    for key, values in arrays.items():
        name = "/".join(key)
        inner = key[1:] if key[0] == "next" else key
        expected: tuple[int, ...] = (*size, *_FLOATS.get(inner, (1,)))
        dtype: np.dtype[Any] = np.dtype(np.float32)
        if inner == _LIDAR:
            expected = (*size, 1, *values.shape[3:])
            if values.ndim != 5 or not values.size:
                raise CorruptFileError(f"{path}: {name} has the shape {values.shape}, expected beams of a LiDAR")
        elif inner not in _FLOATS:
            dtype = np.dtype(np.bool_)
        if values.dtype != dtype or values.shape != expected:
            raise CorruptFileError(f"{path}: {name} is {values.dtype} {values.shape}, expected {dtype.name} {expected}")
        if dtype.kind == "f" and not (np.abs(values) < MAX_SIZE).all():
            raise CorruptFileError(f"{path}: {name} is not finite everywhere")


def _outcomes(arrays: dict[Key, Array]) -> Array:
    """Return how each step ended an episode, ``[environments, steps]``; `FLYING` if it did not."""
    done = arrays["next", "done"][..., 0]
    outcomes = np.zeros(done.shape, np.uint8)
    for name, number in ENDS:
        key: Key = ("next", "info", name)
        if name == "truncated":
            key = ("next", name)
        outcomes[arrays[key][..., 0] & done] = number
    # An episode may end for another reason, in an environment of the user.
    outcomes[done & (outcomes == FLYING)] = dict(ENDS)["truncated"]
    return outcomes


def _pack(rollout: _Rollout, flights: Sequence[Flight]) -> dict[str, Any]:
    """Pack flights on one map."""
    world = rollout.world
    at = flights[0].env // (rollout.num_envs // len(world.map_seeds))
    last = max(flight.end for flight in flights) + 1
    obstacles = world.obstacles[at, : last + 1]
    beams = rollout.arrays[_LIDAR].shape[3]
    beam = min(LEVEL_BEAM, rollout.arrays[_LIDAR].shape[4] - 1)
    lengths = np.array([flight.end + 1 - flight.begin for flight in flights])
    stride, kept = _fit(lengths, beams, obstacles.shape[1], last + 1, world.dt_s)
    positions = []
    lidar = []
    ends = []
    for flight in flights[:kept]:
        length = flight.end + 1 - flight.begin
        # The last moment is always kept: it shows how the flight ended.
        rows = np.minimum(np.arange(-(-length // stride) + 1) * stride, length)
        positions.append(rollout.moments(("info", "position"), flight)[rows])
        lidar.append(rollout.moments(_LIDAR, flight)[rows, 0, :, beam])
        ends.append(_ends_of(rollout, flight))
    every_position = np.concatenate(positions)
    furthest_m = max(np.abs(every_position).max(), np.abs(obstacles).max(initial=0))
    step_m = max(LEAST_STEP_M, float(furthest_m) / 32_000)
    moments = np.minimum(np.arange(-(-last // stride) + 1) * stride, last)
    boxes = world.boxes[at]
    return {
        "dt_s": world.dt_s,
        "stride": stride,
        "map": world.map_seeds[at],
        "num_recorded": len(flights),
        "num_moments": last + 1,
        "half_extent_m": world.half_extent_m,
        "range_m": world.lidar_range_m,
        "step_m": step_m,
        "beams": beams,
        "starts": [start for start, _, _ in ends],
        "goals": [goal for _, goal, _ in ends],
        "headings": [heading for _, _, heading in ends],
        "boxes": boxes[np.isfinite(boxes).all(1)].round(4).astype(float).round(4).tolist(),
        "widths": world.obstacle_widths_m,
        "cylinders": list(map(int, world.obstacle_is_cylinder)),
        "begins": [flight.begin for flight in flights[:kept]],
        "ends": [flight.end + 1 for flight in flights[:kept]],
        "outcomes": [flight.outcome for flight in flights[:kept]],
        "positions": _base64(every_position / step_m, "<i2"),
        "lidar": _base64(np.concatenate(lidar).clip(0, world.lidar_range_m) * (255 / world.lidar_range_m), "u1"),
        "obstacles": _base64(obstacles[moments] / step_m, "<i2"),
    }


def _ends_of(rollout: _Rollout, flight: Flight) -> tuple[list[float], list[float], float]:
    """Return where a flight starts, its goal, and the heading of its drone.

    The goal is not in a rollout, but the observation says where it is: in which direction in goal coordinates, how far
    away in the plane, and how much higher.
    """
    place = (flight.env, flight.begin)
    start = rollout.arrays["info", "position"][place].astype(float)
    state = rollout.arrays[(*_OBSERVATION, "state")][place].astype(float)
    route = rollout.arrays[(*_OBSERVATION, "direction")][place][0].astype(float)
    heading = 0.0
    if route[:2].any():
        heading = float(np.arctan2(route[1], route[0]))
    bearing = heading + np.arctan2(state[1], state[0])
    goal = start + np.array([state[3] * np.cos(bearing), state[3] * np.sin(bearing), state[4]])
    return start.round(4).tolist(), goal.round(4).tolist(), round(heading, 4)


def _fit(lengths: Array, beams: int, num_obstacles: int, num_moments: int, dt_s: float) -> tuple[int, int]:
    """Return every how many moments, and how many of the flights, are kept."""

    def size(stride: int, kept: int) -> float:
        moments = (lengths[:kept] // stride + 2).sum()
        return float(moments * (6 + beams) + (num_moments // stride + 2) * num_obstacles * 6)

    stride = 1
    kept = len(lengths)
    while size(stride, kept) > MAX_PACKED_BYTES and (stride + 1) * dt_s <= MAX_MOMENT_S:
        stride += 1
    while size(stride, kept) > MAX_PACKED_BYTES and kept > 1:
        kept = max(1, kept * 9 // 10)
    while size(stride, kept) > MAX_PACKED_BYTES and stride < num_moments:
        stride *= 2
    return stride, kept


def _base64(values: Array, dtype: str) -> str:
    return base64.b64encode(np.rint(values).astype(dtype).tobytes()).decode("ascii")
