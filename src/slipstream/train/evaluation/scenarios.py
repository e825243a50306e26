"""Scenarios: where a policy is evaluated, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.checks import require_count
from slipstream.nav.config import NavigationConfig, StartMode
from slipstream.train.settings import TrainSettings

# No setting, weight or threshold was chosen by its results on the maps from here on: not of the presets, and not of the
# planner and the shield, which were tuned on maps below 9000.
FIRST_UNSEEN_MAP = 10_000
NUM_MAPS = 64
NUM_EPISODES = 512
OBSTACLE_WARMUP_S = 20.0  # obstacles leave their origins in this time, so a start meets them anywhere
# Drones in one simulation: fewer take more time together, and more only cost memory. In between, a scenario has a few
# simulations, so that threads and processes can share it.
_LEAST_DRONES = 256
_MOST_DRONES = 2048
_PARTS = 4
SCENARIO_NAMES = ("through", "line", "training", "static", "empty", "border")


@dataclass(frozen=True)
class Scenario:
    """Where to fly.

    Attributes:
        name: For files and metrics.
        title: For people.
        start: How starts and goals are placed; see `NavigationConfig`.
        map_seed: The first map.
        num_maps: The number of maps: `map_seed`, `map_seed` + 1 and so on.
        num_static_obstacles: The number of boxes on each map.
        num_dynamic_obstacles: The number of moving obstacles on each map.
        num_courses: On how many courses of the moving obstacles each map is flown.
    """

    name: str
    title: str
    start: StartMode
    map_seed: int
    num_maps: int
    num_static_obstacles: int
    num_dynamic_obstacles: int
    num_courses: int = 1

    @property
    def map_seeds(self) -> range:
        """The seeds of all maps."""
        return range(self.map_seed, self.map_seed + self.num_maps)


@dataclass(frozen=True)
class Part:
    """The flights of a scenario that share a simulation.

    Attributes:
        config: Of the simulation.
        first_world: The number of its first world; the others follow.
        first_flight: The number of flights in the parts before this one.
        is_single_map: Whether the scenario has only one map.
    """

    config: NavigationConfig
    first_world: int
    first_flight: int
    is_single_map: bool


def standard_scenarios(
    settings: TrainSettings, num_maps: int = NUM_MAPS, trained: Sequence[TrainSettings] | None = None
) -> list[Scenario]:
    """Return the six standard scenarios, the one that matters most first.

    Unseen maps begin at `FIRST_UNSEEN_MAP`, or after the training maps if those overlap.

    Args:
        settings: Of the evaluation: how many obstacles there are.
        num_maps: The number of unseen maps.
        trained: Settings of the trainings of all policies that fly; `settings` by default. The scenario ``training`` is
            left out if there is none, if they trained on different maps, or if `settings` change the map.
    """
    require_count("num_maps", num_maps)
    trainings = [settings] if trained is None else list(trained)
    num_boxes = settings.env.num_obstacles
    num_moving = settings.env_dyn.num_obstacles
    first = _first_unseen_map(num_maps, trainings)
    scenarios = [
        Scenario("through", "Through the field, unseen maps", "through", first, num_maps, num_boxes, num_moving),
        Scenario("line", "NavRL's line, unseen maps", "line", first, num_maps, num_boxes, num_moving),
        Scenario("static", "Through, unseen maps, nothing moving", "through", first, num_maps, num_boxes, 0),
        Scenario("empty", "Through, empty world", "through", first, 1, 0, 0),
        Scenario("border", "Border to border, unseen maps", "border", first, num_maps, num_boxes, num_moving),
    ]
    maps = _training_maps(settings, trainings)
    if maps:
        known = min(len(maps), num_maps)
        # A single map has no other maps to vary over, so the courses of its obstacles vary.
        courses = max(1, num_maps // known)
        title = "Through, training map"
        if known > 1:
            title = "Through, training maps"
        training = Scenario("training", title, "through", maps[0], known, num_boxes, num_moving, courses)
        scenarios.insert(SCENARIO_NAMES.index("training"), training)
    return scenarios


def fit_scenario(scenario: Scenario, episodes: int) -> Scenario:
    """Return a scenario with as many of its maps and courses as there are episodes to fly.

    Maps without obstacles are all the same, so one of them is left.

    Raises:
        ConfigurationError: If there is no episode.
    """
    require_count("episodes", episodes)
    num_maps = min(scenario.num_maps, episodes)
    if not scenario.num_static_obstacles and not scenario.num_dynamic_obstacles:
        # On a second empty map, flights along the line would repeat those on the first.
        num_maps = 1
    num_courses = min(scenario.num_courses, episodes // num_maps)
    return replace(scenario, num_maps=num_maps, num_courses=num_courses)


def plan_flights(scenario: Scenario, settings: TrainSettings, episodes: int, seed: int) -> list[Part]:
    """Return the simulations that fly the episodes of a scenario.

    Each map and course gets the same number of episodes, so the total is rounded up. An episode ends at the goal, the
    reward is NavRL's, drones respond without an extra delay, and obstacles are already moving at the start, whatever
    the settings of the training.

    Args:
        scenario: Where to fly.
        settings: Drones, sensor and rules.
        episodes: The number of episodes.
        seed: Of starts, goals and the courses of obstacles.
    """
    num_courses = scenario.num_courses
    num_worlds = scenario.num_maps * num_courses
    per_world = math.ceil(episodes / num_worlds)
    num_drones = min(max(_LEAST_DRONES, episodes // _PARTS), _MOST_DRONES)
    # All courses of a map share a simulation.
    at_once = max(1, num_drones // (per_world * num_courses)) * num_courses
    parts: list[Part] = []
    for first in range(0, num_worlds, at_once):
        count = min(at_once, num_worlds - first)
        config = settings.navigation(
            num_envs=count * per_world,
            num_maps=count,
            map_repeats=num_courses,
            num_static_obstacles=scenario.num_static_obstacles,
            num_dynamic_obstacles=scenario.num_dynamic_obstacles,
            map_seed=scenario.map_seed + first // num_courses,
            start=scenario.start,
            inside_starts=0.0,
            response_delay_s=0.0,
            obstacle_warmup_s=OBSTACLE_WARMUP_S,
            centred_reward=False,
            collision_penalty=0.0,
            danger_weight=0.0,
            goal_truncates=True,
            random_clocks=False,
            seed=seed + 1000 * len(parts),
            compile="false",
        )
        parts.append(Part(config, first, first * per_world, is_single_map=scenario.num_maps == 1))
    return parts


def _first_unseen_map(num_maps: int, trainings: Sequence[TrainSettings]) -> int:
    first = FIRST_UNSEEN_MAP
    by_map = sorted(trainings, key=_first_training_map)
    for training in by_map:
        seen = _maps_of(training)
        if seen.start < first + num_maps and first < seen.stop:
            first = seen.stop
    return first


def _first_training_map(settings: TrainSettings) -> int:
    return settings.env.map_seed


def _maps_of(training: TrainSettings) -> range:
    config = training.navigation()
    return range(config.map_seed, config.map_seed + config.num_maps)


def _training_maps(settings: TrainSettings, trainings: Sequence[TrainSettings]) -> range:
    """Return the maps that all trainings flew on, if the settings leave them as they were; else nothing."""
    nothing = range(0)
    if not trainings:
        return nothing
    maps = _maps_of(trainings[0])
    for training in trainings:
        if _maps_of(training) != maps or training.env.num_obstacles != settings.env.num_obstacles:
            return nothing
    return maps
