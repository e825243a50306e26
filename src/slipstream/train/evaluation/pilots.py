"""Pilots: functions from what a drone observes to the velocity it should take, and sensors between world and pilot.

A policy, the planner, and a shield around either have the same function type. Sensing functions return a noisy or late
observation and can be chained. An evaluation flies any combination.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.checks import require_number
from slipstream.errors import ConfigurationError
from slipstream.nav.avoidance import ShieldConfig
from slipstream.nav.config import NavigationConfig
from slipstream.nav.observation import Observation
from slipstream.nav.planner import Planner
from slipstream.nav.shield import Shield
from slipstream.rl.network import ACTION, Choice, NavRLPolicy
from slipstream.tensors import import_tensordict

Pilot = Callable[[Observation], torch.Tensor]
"""Returns a velocity in goal coordinates, m/s, ``[drones, 3]``, for the observation of some drones."""

Sensing = Callable[[Observation], Observation]
"""Returns what a pilot gets to see of an observation of all drones; called once in each step."""


@dataclass(frozen=True)
class Candidate:
    """What is evaluated: a policy, the planner, or one of them with a shield.

    Attributes:
        name: For files: ``policy``, ``planner``, ``policy_shield`` or ``planner_shield``.
        title: For people.
        make_pilot: Returns a new pilot for a simulation of the given configuration. Simulations may fly at the same
            time, so pilots should share nothing that changes.
    """

    name: str
    title: str
    make_pilot: Callable[[NavigationConfig], Pilot]


@dataclass(frozen=True)
class Sensors:
    """What is wrong with the sensors; by default nothing.

    Attributes:
        lidar_noise_m: Standard deviation of the distance that each LiDAR return measures.
        dropout: Share of LiDAR returns that are missing; a missing return looks like free space.
        latency_s: Age of the observation that a command is based on, rounded to whole steps.

    Raises:
        ConfigurationError: If a value is out of range; says which and why.
    """

    lidar_noise_m: float = 0.0
    dropout: float = 0.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        require_number("lidar_noise_m", self.lidar_noise_m, 0)
        require_number("dropout", self.dropout, 0, 1)
        require_number("latency_s", self.latency_s, 0, 10)

    def latency_steps(self, dt_s: float) -> int:
        """Return the latency in steps of the simulation.

        Raises:
            ConfigurationError: If it is shorter than half a step, so that it would have no effect.
        """
        steps = round(self.latency_s / dt_s)
        if self.latency_s > 0 and not steps:
            raise ConfigurationError(f"latency_s is {self.latency_s}, expected 0 or at least a step of {dt_s} s")
        return steps

    def describe(self) -> str:
        """Return what is wrong, as text; empty if nothing is."""
        parts = []
        if self.lidar_noise_m:
            parts.append(f"LiDAR noise {self.lidar_noise_m:g} m")
        if self.dropout:
            parts.append(f"{100 * self.dropout:g} % of returns missing")
        if self.latency_s:
            parts.append(f"latency {self.latency_s:g} s")
        return ", ".join(parts)


def policy_candidate(policy: NavRLPolicy, choose: Choice = "mean") -> Candidate:
    """Return a copy of a learned policy as a candidate; it computes in float32, as an exported policy does.

    Args:
        policy: With an action map, on the device of the simulation.
        choose: How actions are chosen from their distribution.
    """
    flown = copy.deepcopy(policy)
    flown.precision = "float32"

    def make_pilot(config: NavigationConfig) -> Pilot:
        device = next(flown.parameters()).device
        return policy_pilot(flown, choose, torch.Generator(device).manual_seed(config.seed))

    return Candidate("policy", "policy", make_pilot)


def planner_candidate() -> Candidate:
    """Return the planner, which has learned nothing: the reference for every policy."""

    def make_pilot(config: NavigationConfig) -> Pilot:
        return Planner(ShieldConfig(lidar=config.lidar))

    return Candidate("planner", "planner", make_pilot)


def with_shield(candidate: Candidate) -> Candidate:
    """Return a candidate whose commands pass through a shield."""

    def make_pilot(config: NavigationConfig) -> Pilot:
        return shielded(candidate.make_pilot(config), Shield(ShieldConfig(lidar=config.lidar)))

    return Candidate(f"{candidate.name}_shield", f"{candidate.title} with shield", make_pilot)


def policy_pilot(policy: NavRLPolicy, choose: Choice = "mean", generator: torch.Generator | None = None) -> Pilot:
    """Return a pilot that acts as a policy does.

    Args:
        policy: With an action map.
        choose: How actions are chosen from their distribution.
        generator: Where samples come from; torch's global generator by default.
    """
    tensordict_class = import_tensordict().TensorDict

    def pilot(observation: Observation) -> torch.Tensor:
        parts = {
            "state": observation.state,
            "lidar": observation.lidar,
            "direction": observation.direction,
            "dynamic_obstacle": observation.dynamic_obstacle,
        }
        seen = tensordict_class({"agents": {"observation": parts}}, batch_size=[len(observation.state)])
        command: torch.Tensor = policy.act(seen, choose, generator=generator)[ACTION]
        return command

    return pilot


def shielded(pilot: Pilot, shield: Callable[[Observation, torch.Tensor], torch.Tensor]) -> Pilot:
    """Return a pilot whose commands are replaced where they would lead into an obstacle that the drone observes."""

    def safe_pilot(observation: Observation) -> torch.Tensor:
        return shield(observation, pilot(observation))

    return safe_pilot


def make_sensing(sensors: Sensors, config: NavigationConfig, seed: int) -> Sensing:
    """Return a function from perfect to imperfect observations; measurements are disturbed first and delayed then.

    Args:
        sensors: What is wrong with them.
        config: Of the simulation, for its LiDAR and its step.
        seed: Of the noise, which has a generator to itself.
    """
    stages: list[Sensing] = []
    if sensors.lidar_noise_m or sensors.dropout:
        stages.append(noisy(sensors.lidar_noise_m, sensors.dropout, config.lidar.range_m, seed))
    num_steps = sensors.latency_steps(config.dt_s)
    if num_steps:
        stages.append(delayed(num_steps))

    def sense(observation: Observation) -> Observation:
        for stage in stages:
            observation = stage(observation)
        return observation

    return sense


def delayed(num_steps: int) -> Sensing:
    """Return a function that returns the observation of `num_steps` steps ago; at first, the first one."""
    waiting: collections.deque[Observation] = collections.deque(maxlen=num_steps + 1)

    def sense(observation: Observation) -> Observation:
        waiting.append(observation)
        return waiting[0]

    return sense


def noisy(noise_m: float, dropout: float, range_m: float, seed: int) -> Sensing:
    """Return a function whose LiDAR measures with noise and misses returns.

    Rays that hit nothing stay as they are. Each step draws the same number of random numbers on the CPU: a seed gives
    the same noise on every device and for every pilot.

    Args:
        noise_m: Standard deviation of the distance.
        dropout: Share of returns that are missing.
        range_m: How far the LiDAR reaches.
        seed: Of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def sense(observation: Observation) -> Observation:
        # The observation is range minus distance, so 0 is a ray without a return.
        lidar = observation.lidar
        noise = torch.randn(lidar.shape, generator=generator).to(lidar)
        draw = torch.rand(lidar.shape, generator=generator).to(lidar)
        measured = (lidar + noise_m * noise).clamp(0.0, range_m)
        returned = (lidar > 0) & (draw >= dropout)
        disturbed = torch.where(returned, measured, torch.zeros_like(lidar))
        return Observation(observation.state, disturbed, observation.direction, observation.dynamic_obstacle)

    return sense
