"""How well a policy flies: episodes flown once each, counted as they end, in memory that does not grow with them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.checks import require_count
from slipstream.nav.env import NavigationEnv
from slipstream.rl.network import Choice, NavRLPolicy
from slipstream.rollout.batch import save_rollout_compressed
from slipstream.store.local import atomic_write, make_folder
from slipstream.tensors import import_tensordict
from slipstream.train.settings import TrainSettings

if TYPE_CHECKING:
    from tensordict import TensorDict

OUTCOMES = ("flying", "success", "static_collision", "dynamic_collision", "out_of_bounds", "timeout")
"""How an episode can stand; the number of each is its place in here."""

UNSEEN_MAPS = (1, 2, 3)
_MAX_DRONES = 1024  # at once: more only cost memory
_Z95 = 1.959964  # of a normal distribution, 95 % are within so many standard deviations


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Scenario:
    """Where to fly.

    Attributes:
        name: For files and metrics.
        title: For people.
        map_seeds: The maps; episodes are spread evenly over them.
        num_static_obstacles: How many boxes stand in each.
        num_dynamic_obstacles: How many obstacles move.
    """

    name: str
    title: str
    map_seeds: tuple[int, ...]
    num_static_obstacles: int
    num_dynamic_obstacles: int


@dataclass(frozen=True)
class Flights:
    """Some of the flights, moment by moment: what there is to be seen of one world.

    Attributes:
        data: TensorDict ``[1, moments]`` with ``("drone", "position" | "lidar" | "outcome")`` and
            ``("obstacle", "position")``.
        world: What does not move, as JSON values.
    """

    data: TensorDict
    world: dict[str, Any]


@dataclass(frozen=True)
class ScenarioResult:
    """What became of the episodes of a scenario.

    Attributes:
        scenario: Which one.
        episodes: How many.
        rates: The share of each outcome.
        means: ``time_to_goal_s`` and ``path_length_m`` of episodes that reached the goal, ``return`` of all; None
            where there were none.
        steps_per_s: How many steps of all drones were flown in a second.
        flights: Some of them, if asked for.
    """

    scenario: Scenario
    episodes: int
    rates: dict[str, Interval]
    means: dict[str, Interval | None]
    steps_per_s: float
    flights: Flights | None = None

    def to_json(self, flights: str | None = None) -> dict[str, Any]:
        """Return all but the flights as JSON values.

        Args:
            flights: The name of the file that they are in.
        """
        scenario = self.scenario
        values: dict[str, Any] = {
            "name": scenario.name,
            "title": scenario.title,
            "map_seed": scenario.map_seeds[0],
            "map_seeds": list(scenario.map_seeds),
            "num_static_obstacles": scenario.num_static_obstacles,
            "num_dynamic_obstacles": scenario.num_dynamic_obstacles,
            "episodes": self.episodes,
        }
        numbers = {**self.rates, **self.means}
        values |= {name: None if value is None else vars(value) for name, value in numbers.items()}
        return {**values, "steps_per_s": self.steps_per_s, "flights": flights}


def standard_scenarios(settings: TrainSettings) -> list[Scenario]:
    """Return where a policy is tried: the map it trained on, unseen ones, those without moving obstacles, and nothing.

    Args:
        settings: Of its training.
    """
    static, dynamic = settings.env.num_obstacles, settings.env_dyn.num_obstacles
    unseen = tuple(seed + (seed >= settings.env.map_seed > 0) for seed in UNSEEN_MAPS)
    return [
        Scenario("unseen", "Unseen maps", unseen, static, dynamic),
        Scenario("training", "Training map", (settings.env.map_seed,), static, dynamic),
        Scenario("static", "Unseen maps, nothing moves", unseen, static, 0),
        Scenario("empty", "Empty world", unseen[:1], 0, 0),
    ]


def evaluate(
    policy: NavRLPolicy,
    settings: TrainSettings,
    scenario: Scenario,
    *,
    episodes: int = 512,
    seed: int = 1,
    choose: Choice = "mean",
    num_flights: int = 0,
    on_step: Callable[[int, int], None] | None = None,
) -> ScenarioResult:
    """Fly episodes and count how they end. An episode ends at the goal, whatever the settings say.

    Memory depends on how many drones fly at once (at most 1,024), not on how long. Neither the policy nor any global
    random numbers are changed, unless actions are sampled.

    Args:
        policy: What flies, on its device.
        settings: Drones, sensor and rules; its obstacles and map give way to the scenario's.
        scenario: Where.
        episodes: How many, of which each is flown by a drone of its own.
        seed: Of starts, goals and obstacles' ways.
        choose: How actions are chosen from their distribution.
        num_flights: How many flights to record, all of them of the first map.
        on_step: Told after each step how many episodes have ended, and of how many.

    Raises:
        ConfigurationError: If there is no episode to fly.
    """
    require_count("episodes", episodes)
    tallies: list[_Tally] = []
    flights: Flights | None = None
    began, num_steps, ended_before = time.perf_counter(), 0, 0
    for part, (map_seed, count) in enumerate(_spread(episodes, scenario.map_seeds)):
        config = settings.navigation(
            num_envs=count,
            num_static_obstacles=scenario.num_static_obstacles,
            num_dynamic_obstacles=scenario.num_dynamic_obstacles,
            map_seed=map_seed,
            goal_truncates=True,
            random_clocks=False,
            seed=seed + 1000 * part,
            compile="false",
        )
        env = NavigationEnv(config, next(policy.parameters()).device)
        recorder = _Recorder(env, min(num_flights, count)) if num_flights and not part else None
        seen = env.reset()
        tally = _Tally(seen, config.dt_s)
        for steps in _fly(policy, env, seen, tally, recorder, choose):
            num_steps += steps
            if on_step is not None:
                on_step(ended_before + tally.num_ended(), episodes)
        ended_before += count
        tallies.append(tally)
        flights = recorder.flights() if recorder is not None else flights
    seconds = time.perf_counter() - began
    return _summarise(scenario, tallies, num_steps / seconds, flights)


def save_evaluation(
    results: Sequence[ScenarioResult], folder: Path, name: str, about: dict[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Write an evaluation: ``<name>.json``, and the flights of each scenario beside it.

    Args:
        results: One for each scenario.
        folder: Where; made if need be.
        name: Of the files.
        about: What else the JSON should say: checkpoint, iteration, seed and the like.

    Returns:
        The path of the JSON file, and what it holds.
    """
    make_folder(folder)
    scenarios = []
    for result in results:
        file = None
        if result.flights is not None:
            file = f"{name}_{result.scenario.name}.slip"
            save_rollout_compressed(result.flights.data, folder / file, metadata=result.flights.world)
        scenarios.append(result.to_json(file))
    document = {"format": "slipstream.evaluation", "version": 1, **about, "time": time.time(), "scenarios": scenarios}
    path = folder / f"{name}.json"
    with atomic_write(path) as stream:
        stream.write(json.dumps(document, indent=2).encode())
    return path, document


class _Tally:
    """How the first episode of each drone went, updated step by step."""

    def __init__(self, seen: Any, dt_s: float) -> None:
        self.dt_s = dt_s
        self._last_m = seen["info", "position"]
        zeros = torch.zeros_like(self._last_m[:, 0])
        self.outcome = torch.zeros_like(zeros, dtype=torch.uint8)
        self.steps, self.path_m, self.returns = zeros.clone(), zeros.clone(), zeros.clone()

    def num_ended(self) -> int:
        return int((self.outcome > 0).sum())

    def add(self, seen: Any) -> None:
        """Count a step, given what the environment returned for it."""
        flying = self.outcome == 0
        position = seen["info", "position"]
        self.steps += flying
        self.path_m += (position - self._last_m).norm(dim=1) * flying
        self.returns += seen["agents", "reward"].squeeze(1) * flying
        self._last_m = position
        # The last that holds wins: a drone that touches something at the goal has collided.
        for number, now in (
            (5, seen["truncated"]),
            (1, seen["info", "reached_goal"]),
            (4, seen["info", "out_of_bounds"]),
            (3, seen["info", "dynamic_collision"]),
            (2, seen["info", "static_collision"]),
        ):
            self.outcome[flying & now.squeeze(1)] = number


class _Recorder:
    """Keeps the moments of the first few flights."""

    def __init__(self, env: NavigationEnv, count: int) -> None:
        self._env = env
        self._count = count
        self._moments: dict[str, list[torch.Tensor]] = {"position": [], "lidar": [], "outcome": [], "obstacle": []}

    def add(self, seen: Any, tally: _Tally) -> bool:
        """Keep a moment; returns whether any of the flights goes on."""
        moments, count = self._moments, self._count
        outcome = tally.outcome[:count].clone()
        position = seen["info", "position"][:count].clone()
        lidar = seen["agents", "observation", "lidar"][:count, 0].clone()
        if moments["outcome"]:
            over = moments["outcome"][-1] > 0
            position[over], lidar[over] = moments["position"][-1][over], moments["lidar"][-1][over]
        moments["position"].append(position)
        moments["lidar"].append(lidar)
        moments["outcome"].append(outcome)
        moments["obstacle"].append(self._env.simulation.obstacles.position_m.clone())
        return bool((outcome == 0).any())

    def flights(self) -> Flights:
        """Return what was kept."""
        parts = {name: torch.stack(values).unsqueeze(0).cpu() for name, values in self._moments.items()}
        drone = {name: parts[name] for name in ("position", "lidar", "outcome")}
        shape = parts["outcome"].shape[:2]
        data = import_tensordict().TensorDict(
            {"drone": drone, "obstacle": {"position": parts["obstacle"]}}, batch_size=shape
        )
        simulation, config, count = self._env.simulation, self._env.config, self._count
        boxes, obstacles, task = simulation.boxes, simulation.obstacles, simulation.task
        world = {
            "format": "slipstream.flights",
            "version": 1,
            "dt_s": config.dt_s,
            "half_extent_m": config.map_half_extent_m,
            "lidar_range_m": config.lidar.range_m,
            "starts": task.start_m[:count].tolist(),
            "goals": task.goal_m[:count].tolist(),
            "headings": torch.atan2(task.heading[:count, 1], task.heading[:count, 0]).tolist(),
            "boxes": torch.cat([boxes.low_m, boxes.high_m, boxes.height_m.unsqueeze(1)], 1).tolist(),
            "obstacle_widths_m": obstacles.width_m.tolist(),
            "obstacle_is_cylinder": obstacles.standing.tolist(),
        }
        return Flights(data, world)


def _fly(
    policy: NavRLPolicy, env: NavigationEnv, seen: Any, tally: _Tally, recorder: _Recorder | None, choose: Choice
) -> Iterator[int]:
    """Fly on until every first episode has ended; yields how many drones were still flying in each step."""
    is_recording = recorder is not None and recorder.add(seen, tally)
    for _ in range(env.config.max_episode_length):
        flying = env.config.num_envs - tally.num_ended()
        if not flying:
            return
        seen = env.step(policy.act(seen, choose))["next"]
        tally.add(seen)
        if recorder is not None and is_recording:
            is_recording = recorder.add(seen, tally)
        yield flying


def _spread(episodes: int, map_seeds: Sequence[int]) -> list[tuple[int, int]]:
    """Return maps, and how many episodes to fly on each, few enough at once."""
    parts = []
    for number, map_seed in enumerate(map_seeds):
        left = episodes // len(map_seeds) + (number < episodes % len(map_seeds))
        while left:
            count = min(left, _MAX_DRONES)
            parts.append((map_seed, count))
            left -= count
    return parts


def _summarise(
    scenario: Scenario, tallies: Sequence[_Tally], steps_per_s: float, flights: Flights | None
) -> ScenarioResult:
    outcome = torch.cat([tally.outcome for tally in tallies]).cpu()
    seconds, path, returns = (
        torch.cat([getattr(tally, name) for tally in tallies]).cpu().double() for name in ("steps", "path_m", "returns")
    )
    seconds = seconds * tallies[0].dt_s
    arrived = outcome == OUTCOMES.index("success")
    rates = {
        name: rate_interval(int((outcome == number).sum()), len(outcome))
        for number, name in enumerate(OUTCOMES)
        if number
    }
    means = {
        "time_to_goal_s": mean_interval(seconds[arrived]),
        "path_length_m": mean_interval(path[arrived]),
        "return": mean_interval(returns),
    }
    return ScenarioResult(scenario, len(outcome), rates, means, steps_per_s, flights)


def rate_interval(hits: int, tries: int) -> Interval:
    """Return a rate with Wilson's interval, which is sound for rates near 0 and 1 too.

    Example:
        >>> rate_interval(0, 100).high < 0.04
        True
    """
    share, square = hits / tries, _Z95**2
    centre = (share + square / (2 * tries)) / (1 + square / tries)
    half = _Z95 / (1 + square / tries) * math.sqrt(share * (1 - share) / tries + square / (4 * tries**2))
    return Interval(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def mean_interval(values: torch.Tensor) -> Interval | None:
    """Return the mean of values with the interval that a normal distribution gives; None of nothing."""
    if not len(values):
        return None
    mean = float(values.mean())
    half = _Z95 * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Interval(mean, mean - half, mean + half)
