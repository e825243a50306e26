"""Fly simulations: every episode once, counted when it ends, and some flights recorded moment by moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.nav.config import NavigationConfig
from slipstream.nav.observation import Observation
from slipstream.nav.simulation import Outcome, Simulation
from slipstream.run.evaluation import OUTCOMES
from slipstream.tensors import import_tensordict
from slipstream.train.evaluation.pilots import Candidate, Pilot, Sensing, Sensors, make_sensing
from slipstream.train.evaluation.scenarios import Part, Scenario

if TYPE_CHECKING:
    from tensordict import TensorDict

SEED = 1
NO_FAULTS = Sensors()

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class FlightLog:
    """How every flight of a scenario went, in a fixed order: two candidates' logs can be compared flight by flight.

    Attributes:
        outcome: Index into `OUTCOMES`, ``[flights]``, as are all others.
        flight_s: Duration.
        inside_s: Time inside the field, between the borders at which obstacles end.
        path_m: Length of the path.
        returns: Sum of NavRL's rewards.
        cluster: Which flights share a map; if there is only one map, which share a course of its moving obstacles.
            Flights in an empty world share nothing.
    """

    outcome: NDArray[Any]
    flight_s: NDArray[Any]
    inside_s: NDArray[Any]
    path_m: NDArray[Any]
    returns: NDArray[Any]
    cluster: NDArray[Any]

    @property
    def success(self) -> NDArray[Any]:
        """Whether each flight reached its goal."""
        reached: NDArray[Any] = self.outcome == OUTCOMES.index("success")
        return reached


@dataclass(frozen=True)
class Flights:
    """Recorded flights on one map.

    Attributes:
        data: TensorDict ``[1, moments]`` with ``("drone", "position" | "lidar" | "outcome")`` and
            ``("obstacle", "position")``.
        world: What does not move, as JSON values.
    """

    data: TensorDict
    world: dict[str, Any]


@dataclass(frozen=True)
class Flown:
    """A scenario that a candidate has flown.

    Attributes:
        scenario: Where.
        candidate: Name of the candidate.
        title: Scenario, candidate and sensor faults, for people.
        sensors: What was wrong with the sensors.
        config: The simulation of the first flights; others differ in map, number of drones and seed only.
        log: How every flight went.
        steps_per_s: Throughput of one simulation in steps of all drones, without those whose flight had ended.
        flights: Recorded flights, if requested.
    """

    scenario: Scenario
    candidate: str
    title: str
    sensors: Sensors
    config: NavigationConfig
    log: FlightLog
    steps_per_s: float
    flights: Flights | None = field(default=None, repr=False)


@dataclass(frozen=True)
class FlownPart:
    """The flights of one simulation.

    Attributes:
        log: How they went.
        num_steps: How many steps they took together.
        seconds: How long simulating them took.
    """

    log: FlightLog
    num_steps: int
    seconds: float


def fly_part(
    candidate: Candidate,
    part: Part,
    device: torch.device,
    *,
    sensors: Sensors = NO_FAULTS,
    on_step: Callable[[int], None] | None = None,
) -> FlownPart:
    """Fly one episode with each drone of a simulation.

    Starts, goals, obstacles and sensor noise depend on the part and the sensors, and not on the candidate. Memory
    depends on the number of drones, not on the length of episodes.

    Args:
        candidate: What flies.
        part: The simulation.
        device: Where to simulate.
        sensors: What is wrong with the sensors.
        on_step: Called after each step with the number of episodes that have ended.
    """
    started = time.perf_counter()
    simulation = Simulation(part.config, device)
    pilot = candidate.make_pilot(part.config)
    sense = make_sensing(sensors, part.config, part.config.seed)
    tally = fly_episodes(pilot, simulation, sense, on_step=on_step)
    return FlownPart(_log_of(tally, part), int(tally.steps.sum()), time.perf_counter() - started)


def join_parts(
    scenario: Scenario,
    candidate: Candidate,
    sensors: Sensors,
    config: NavigationConfig,
    parts: Sequence[FlownPart],
    flights: Flights | None = None,
) -> Flown:
    """Return the flights of all simulations of a scenario as one.

    Args:
        scenario: Where they flew.
        candidate: What flew.
        sensors: What was wrong with the sensors.
        config: Of the first simulation.
        parts: The flights of each simulation, in order.
        flights: Recorded flights, if there are any.
    """
    logs: list[FlightLog] = []
    num_steps = 0
    seconds = 0.0
    for part in parts:
        logs.append(part.log)
        num_steps += part.num_steps
        seconds += part.seconds
    return Flown(
        scenario=scenario,
        candidate=candidate.name,
        title=flight_title(scenario, candidate, sensors),
        sensors=sensors,
        config=config,
        log=_join_logs(logs),
        steps_per_s=num_steps / seconds,
        flights=flights,
    )


def flight_title(scenario: Scenario, candidate: Candidate, sensors: Sensors) -> str:
    """Return scenario, candidate and sensor faults, for people."""
    title = scenario.title
    if candidate.name != "policy":
        title = f"{title}: {candidate.title}"
    faults = sensors.describe()
    if faults:
        title = f"{title} ({faults})"
    return title


def record_flights(
    candidate: Candidate,
    config: NavigationConfig,
    sensors: Sensors,
    count: int,
    device: torch.device,
    on_step: Callable[[int], None] | None = None,
) -> Flights:
    """Record flights on the first map of a simulation.

    Args:
        candidate: What flies.
        config: Of the simulation; one map of it is flown.
        sensors: What is wrong with the sensors.
        count: The number of flights.
        device: Where the simulation runs.
        on_step: Called after each step with the number of flights that have ended.
    """
    alone = replace(config, num_maps=1, map_repeats=1, num_envs=count)
    simulation = Simulation(alone, device)
    recorder = _Recorder(simulation)
    sense = make_sensing(sensors, alone, alone.seed)
    fly_episodes(candidate.make_pilot(alone), simulation, sense, recorder, on_step)
    return recorder.flights()


def fly_episodes(
    pilot: Pilot,
    simulation: Simulation,
    sense: Sensing,
    recorder: _Recorder | None = None,
    on_step: Callable[[int], None] | None = None,
) -> Tally:
    """Fly one episode with each drone of a simulation.

    Args:
        pilot: What flies.
        simulation: Where; it is reset first.
        sense: Returns what the pilot gets to see of an observation.
        recorder: Keeps every moment, if given.
        on_step: Called after each step with the number of episodes that have ended.
    """
    observation = simulation.reset()
    tally = Tally(simulation)
    if recorder is not None:
        recorder.add(observation, tally)
    while tally.num_ended < len(tally.outcome):
        outcome = simulation.step(_command(pilot, sense(observation), tally.outcome == 0))
        observation = outcome.observation
        tally.add(outcome)
        if recorder is not None:
            recorder.add(observation, tally)
        if on_step is not None:
            on_step(tally.num_ended)
    return tally


def _command(pilot: Pilot, observation: Observation, flying: torch.Tensor) -> torch.Tensor:
    """Return the commands of all drones; the pilot computes only those of drones that are still flying."""
    rows = flying.nonzero().squeeze(1)
    some = Observation(*(part[rows] for part in observation))
    commands = torch.zeros_like(observation.state[:, :3])
    commands[rows] = pilot(some)
    return commands


class Tally:
    """How the first episode of each drone went, updated step by step.

    Attributes:
        outcome: Index into `OUTCOMES`, ``[envs]``, as are all others.
        steps: Number of steps.
        steps_inside: Number of steps that ended inside the field.
        path_m: Length of the path.
        returns: Sum of rewards.
        position_m: Where the drone is, ``[envs, 3]``; where its flight ended, if it has.
        num_ended: Number of episodes that have ended.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._half_extent_m = simulation.config.map_half_extent_m
        self.position_m = simulation.drone.position_m.clone()
        zeros = torch.zeros_like(self.position_m[:, 0])
        self.outcome = torch.zeros_like(zeros, dtype=torch.uint8)
        self.steps = zeros.clone()
        self.steps_inside = zeros.clone()
        self.path_m = zeros.clone()
        self.returns = zeros.clone()
        self.num_ended = 0

    def add(self, outcome: Outcome) -> None:
        """Count a step."""
        flying = self.outcome == 0
        position = outcome.position_m
        verdict = outcome.verdict
        inside = (position[:, :2].abs() <= self._half_extent_m).all(1)
        self.steps += flying
        self.steps_inside += flying & inside
        self.path_m += torch.where(flying, (position - self.position_m).norm(dim=1), 0.0)
        self.returns += torch.where(flying, verdict.reward, 0.0)
        self.position_m = torch.where(flying.unsqueeze(1), position, self.position_m)
        # The last condition that holds wins: a drone that touches something at the goal has collided.
        for name, holds in (
            ("timeout", outcome.truncated),
            ("success", verdict.reached_goal),
            ("out_of_bounds", verdict.out_of_bounds),
            ("dynamic_collision", verdict.dynamic_collision),
            ("static_collision", verdict.static_collision),
        ):
            self.outcome[flying & holds] = OUTCOMES.index(name)
        self.num_ended = int((self.outcome > 0).sum())


class _Recorder:
    """Keeps every moment of the flights of a simulation with one map."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._positions: list[torch.Tensor] = []
        self._lidar: list[torch.Tensor] = []
        self._outcomes: list[torch.Tensor] = []
        self._obstacles: list[torch.Tensor] = []

    def add(self, observation: Observation, tally: Tally) -> None:
        """Keep a moment; a drone whose flight has ended stays as it was then."""
        lidar = observation.lidar[:, 0]
        if self._outcomes:
            ended = self._outcomes[-1] > 0
            lidar = torch.where(ended[:, None, None], self._lidar[-1], lidar)
        self._positions.append(tally.position_m.clone())
        self._lidar.append(lidar.clone())
        self._outcomes.append(tally.outcome.clone())
        self._obstacles.append(self._simulation.obstacles.position_m.clone())

    def flights(self) -> Flights:
        """Return what was kept."""
        drone = {
            "position": _stack(self._positions),
            "lidar": _stack(self._lidar),
            "outcome": _stack(self._outcomes),
        }
        parts = {"drone": drone, "obstacle": {"position": _stack(self._obstacles)}}
        data = import_tensordict().TensorDict(parts, batch_size=[1, len(self._outcomes)])
        simulation = self._simulation
        config = simulation.config
        task = simulation.task
        boxes = simulation.boxes
        corners = torch.cat([boxes.low_m, boxes.high_m, boxes.height_m.unsqueeze(1)], 1)
        world = {
            "format": "slipstream.flights",
            "version": 1,
            "dt_s": config.dt_s,
            "half_extent_m": config.map_half_extent_m,
            "lidar_range_m": config.lidar.range_m,
            "starts": task.start_m.tolist(),
            "goals": task.goal_m.tolist(),
            "headings": torch.atan2(task.heading[:, 1], task.heading[:, 0]).tolist(),
            "boxes": corners.tolist(),
            "obstacle_widths_m": simulation.obstacles.width_m.tolist(),
            "obstacle_is_cylinder": simulation.obstacles.standing.tolist(),
        }
        return Flights(data, world)


def _stack(moments: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(moments).unsqueeze(0).cpu()


def _log_of(tally: Tally, part: Part) -> FlightLog:
    config = part.config
    drones = np.arange(config.num_envs)
    world = part.first_world + drones // (config.num_envs // config.num_maps)
    cluster = world
    if not part.is_single_map:
        # Courses of one map share its boxes.
        cluster = world // config.map_repeats
    if not config.num_static_obstacles and not config.num_dynamic_obstacles:
        # In an empty world, flights have nothing in common, so each one is a cluster.
        cluster = part.first_flight + drones
    return FlightLog(
        outcome=tally.outcome.cpu().numpy(),
        flight_s=_numbers(tally.steps) * config.dt_s,
        inside_s=_numbers(tally.steps_inside) * config.dt_s,
        path_m=_numbers(tally.path_m),
        returns=_numbers(tally.returns),
        cluster=cluster,
    )


def _numbers(values: torch.Tensor) -> NDArray[Any]:
    numbers: NDArray[Any] = values.cpu().double().numpy()
    return numbers


def _join_logs(logs: list[FlightLog]) -> FlightLog:
    """Return the logs of all simulations as one."""
    columns = {}
    for name in FlightLog.__dataclass_fields__:
        columns[name] = np.concatenate([getattr(log, name) for log in logs])
    return FlightLog(**columns)
