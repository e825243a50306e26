"""Fly simulations: every episode once, counted when it ends, and some flights recorded as rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.collect.serial import SerialCollector
from slipstream.nav.config import NavigationConfig
from slipstream.nav.env import NavigationEnv
from slipstream.nav.observation import Observation
from slipstream.nav.simulation import Outcome, Simulation
from slipstream.run.evaluation import OUTCOMES
from slipstream.run.world import World
from slipstream.train.evaluation.pilots import Candidate, Pilot, Sensing, Sensors, make_sensing
from slipstream.train.evaluation.scenarios import Part, Scenario
from slipstream.train.worlds import world_of

if TYPE_CHECKING:
    from tensordict import TensorDictBase

SEED = 1
NO_FAULTS = Sensors()
CHUNK_STEPS = 64  # of the rollouts that recorded flights consist of

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
    """Recorded flights on one map: the first episode of each drone.

    Attributes:
        rollout: An ordinary rollout ``[drones, steps]`` that contains these episodes. A drone whose flight has ended
            is reset and hovers until the last flight ends.
        world: What stood and moved around the drones.
    """

    rollout: TensorDictBase
    world: World


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
    env = NavigationEnv(alone, device)
    track: list[torch.Tensor] = []
    env.simulation.obstacle_track = track
    act = _Recorded(candidate.make_pilot(alone), make_sensing(sensors, alone, alone.seed))
    chunks = []
    flying = torch.ones(count, dtype=torch.bool, device=device)
    with SerialCollector(env, act, num_steps=CHUNK_STEPS) as collector:
        while flying.any():
            rollout = collector.collect()
            chunks.append(rollout.cpu())
            flying &= ~rollout["next", "done"].squeeze(2).any(1)
            if on_step is not None:
                on_step(count - int(flying.sum()))
    whole: TensorDictBase = torch.cat(chunks, 1)
    # Without the steps of the last chunk after the end of the last flight.
    first_ends = whole["next", "done"].squeeze(2).int().argmax(1)
    num_steps = int(first_ends.max()) + 1
    return Flights(whole[:, :num_steps].contiguous(), world_of(env.simulation, track[: num_steps + 1]))


class _Recorded:
    """A pilot as the policy of a collector, for the first episode of each drone. Later episodes hover."""

    def __init__(self, pilot: Pilot, sense: Sensing) -> None:
        self._pilot = pilot
        self._sense = sense
        self._num_steps = 0

    def __call__(self, seen: TensorDictBase) -> TensorDictBase:
        # A drone that has been reset is in a later episode than the first: it has done fewer steps than were flown.
        flying = seen["stats", "episode_len"].squeeze(1) >= self._num_steps
        self._num_steps += 1
        parts = seen["agents", "observation"]
        observation = Observation(parts["state"], parts["lidar"], parts["direction"], parts["dynamic_obstacle"])
        seen["agents", "action"] = _command(self._pilot, self._sense(observation), flying)
        return seen


def fly_episodes(
    pilot: Pilot,
    simulation: Simulation,
    sense: Sensing,
    on_step: Callable[[int], None] | None = None,
) -> Tally:
    """Fly one episode with each drone of a simulation.

    Flights that are only counted do not go through a collector, which takes 20 to 40 % longer: it resets drones whose
    flight has ended, and makes rollouts that are not needed.

    Args:
        pilot: What flies.
        simulation: Where; it is reset first.
        sense: Returns what the pilot gets to see of an observation.
        on_step: Called after each step with the number of episodes that have ended.
    """
    observation = simulation.reset()
    tally = Tally(simulation)
    while tally.num_ended < len(tally.outcome):
        outcome = simulation.step(_command(pilot, sense(observation), tally.outcome == 0))
        observation = outcome.observation
        tally.add(outcome)
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
