"""`Simulation`: drones in one or more worlds, in plain torch. The TorchRL and Gymnasium environments wrap it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from slipstream.devices import resolve_device
from slipstream.errors import ConfigurationError, StateMismatchError
from slipstream.nav.compile import maybe_compiled
from slipstream.nav.config import NavigationConfig
from slipstream.nav.dynamics import DroneState, hovering, make_dynamics
from slipstream.nav.frame import heading_between, to_world_frame
from slipstream.nav.lidar import Lidar
from slipstream.nav.observation import Observation, ObstacleTable, Task, observe
from slipstream.nav.obstacles import DynamicObstacles
from slipstream.nav.reward import RewardTerms, Verdict, judge, ray_directions
from slipstream.nav.starts import CANDIDATES, border_tasks, inside_starts, line_tasks, through_tasks
from slipstream.nav.world import StaticMap, as_maps, generate_map

WAYS_SEED = 0x0DD5  # mixed into the seed: the two generators need not be alike

P = ParamSpec("P")
R = TypeVar("R")


class Progress(NamedTuple):
    """How episodes are going, ``[envs]`` each.

    Attributes:
        steps: How many steps were flown.
        deadline: After how many steps the episode is truncated.
        returns: The sum of rewards so far.
        reached: Whether the goal was ever reached.
    """

    steps: torch.Tensor
    deadline: torch.Tensor
    returns: torch.Tensor
    reached: torch.Tensor


class Outcome(NamedTuple):
    """What a step led to. Nothing in it is shared with the simulation or with another outcome.

    Attributes:
        observation: What the drones see.
        verdict: Rewards, collisions, and whether the goal was reached.
        terminated: Whether the episode ended in a collision or out of bounds, ``[envs]``.
        truncated: Whether time is up, or the goal was reached if that truncates, ``[envs]``.
        progress: The episode so far, this step included.
        position_m: Where the drones are, ``[envs, 3]``.
    """

    observation: Observation
    verdict: Verdict
    terminated: torch.Tensor
    truncated: torch.Tensor
    progress: Progress
    position_m: torch.Tensor


class Simulation:
    """Many drones that fly through one or more worlds, in lockstep, on any device.

    All random numbers come from two private generators: one for the drones' starts and goals, one for the paths of
    obstacles. The same seed gives the same flights, and `state_dict` contains everything needed to continue them bit
    for bit (on the CPU).

    Args:
        config: Worlds, drones and rules.
        device: Where the tensors live.
        boxes: What stands in the world, instead of the map of ``config.map_seed``; one for each map.

    Attributes:
        maps: The boxes of each map.
        map_index: Which map each drone is on, ``[envs]``; None if there is only one map.
        collision_penalty: Subtracted from the reward of a step that ends in a collision or out of bounds. May be
            changed at any time; it is not part of the state.
        obstacle_track: If it is a list, every step appends where the moving obstacles are then, ``[obstacles, 3]``. An
            empty one gets the positions before the step, too. Not part of the state.

    Raises:
        ConfigurationError: If a map cannot hold the requested number of boxes, or the number of maps does not match.
    """

    def __init__(
        self,
        config: NavigationConfig,
        device: torch.device | str = "cpu",
        boxes: StaticMap | Sequence[StaticMap] | None = None,
    ) -> None:
        self.config = config
        self.device = resolve_device(device)
        self.collision_penalty = config.collision_penalty
        self.obstacle_track: list[torch.Tensor] | None = None
        self.maps = [one.to(self.device) for one in _make_maps(config, boxes)]
        self.map_index: torch.Tensor | None = None
        if config.num_maps > 1:
            per_map = config.num_envs // config.num_maps
            self.map_index = torch.arange(config.num_envs, device=self.device) // per_map
        self._starts, self._ways = torch.Generator(), torch.Generator()
        self.seed(config.seed)
        self.obstacles = DynamicObstacles(config, self._ways, self.device)
        self.lidar = Lidar(config.lidar, self.maps, self.device)
        self._fly = self._compiled(_make_fly(config))
        self._perceive = self._compiled(_make_perceive(config, self.device))
        self._scan = self._make_scan()
        self.reset()

    @property
    def boxes(self) -> StaticMap:
        """The boxes of the first map."""
        return self.maps[0]

    def seed(self, seed: int) -> None:
        """Seed both generators; takes effect with the next draws."""
        self._starts.manual_seed(seed)
        self._ways.manual_seed(seed ^ WAYS_SEED)

    @torch.no_grad()
    def reset(self, mask: torch.Tensor | None = None) -> Observation:
        """Begin new episodes.

        Args:
            mask: Which environments, ``[envs]``. They get full-length episodes, and nothing else changes. Without it:
                all, the moving obstacles go back to their origins too, and random clocks are drawn if configured.

        Returns:
            What the drones see. Where the mask is false: zeros.
        """
        if mask is None:
            self.obstacles.restart()
            rows = torch.arange(self.config.num_envs, device=self.device)
            self.task, self.progress = self._new_episodes(rows, whole=True)
            self.drone = self._new_drones(self.task)
            return self._look(self.drone, self.task, self.map_index)
        rows = mask.to(self.device).nonzero().squeeze(1)
        task, progress = self._new_episodes(rows, whole=False)
        drone = self._new_drones(task)
        self.task = Task(*_replace_rows(self.task, rows, task))
        self.progress = Progress(*_replace_rows(self.progress, rows, progress))
        self.drone = DroneState(*_replace_rows(self.drone, rows, drone))
        seen = self._look(drone, task, self._maps_of(rows))
        blank = (part.new_zeros(self.config.num_envs, *part.shape[1:]) for part in seen)
        return Observation(*(all_rows.index_copy_(0, rows, part) for all_rows, part in zip(blank, seen, strict=True)))

    @torch.no_grad()
    def step(self, command_m_s: torch.Tensor) -> Outcome:
        """Advance the world by one step.

        Args:
            command_m_s: The velocities that drones should take, in their goal frames, ``[envs, 3]``; not clamped.

        Returns:
            What that led to. Drones whose episode ended fly on until they are reset.
        """
        before = self.drone.velocity_m_s
        self._move_obstacles()
        self.drone = self._fly(self.drone, command_m_s.detach(), self.task.heading)
        position, velocity = self.drone.position_m, self.drone.velocity_m_s
        distances = self._scan(position, self.task.heading)
        table = ObstacleTable.of(self.obstacles)
        observation, verdict = self._perceive(position, velocity, before, self.task, distances, table)
        terminated = verdict.static_collision | verdict.dynamic_collision | verdict.out_of_bounds
        if self.collision_penalty:
            verdict = Verdict(verdict.reward - self.collision_penalty * terminated, *verdict[1:])
        old = self.progress
        steps, returns = old.steps + 1, old.returns + verdict.reward
        self.progress = Progress(steps, old.deadline, returns, old.reached | verdict.reached_goal)
        truncated = steps >= old.deadline
        if self.config.goal_truncates:
            truncated = truncated | verdict.reached_goal
        progress = Progress(*(part.clone() for part in self.progress))
        return Outcome(observation, verdict, terminated, truncated, progress, position.clone())

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that changes: drones, tasks, progress, obstacles and generators."""
        return {
            "drone": _copy(self.drone),
            "task": _copy(self.task),
            "progress": _copy(self.progress),
            "obstacles": self.obstacles.state_dict(),
            "generators": {"starts": self._starts.get_state(), "ways": self._ways.get_state()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where a simulation of the same configuration was.

        Args:
            state: From `state_dict`; copied, so it may be changed afterwards. It may come from an earlier version, in
                which drones had no response delay.

        Raises:
            StateMismatchError: If it is of another number of environments or obstacles, or not a state at all.
        """
        state = _with_delay(state, self.config)
        differing = [*_differences(self.state_dict(), state)]
        if differing:
            raise StateMismatchError(f"the state does not fit this simulation: {'; '.join(differing)}")
        device = self.device
        self.drone = DroneState(**{name: part.to(device, copy=True) for name, part in state["drone"].items()})
        self.task = Task(**{name: part.to(device, copy=True) for name, part in state["task"].items()})
        self.progress = Progress(**{name: part.to(device, copy=True) for name, part in state["progress"].items()})
        self.obstacles.load_state_dict(state["obstacles"])
        self._starts.set_state(state["generators"]["starts"].cpu())
        self._ways.set_state(state["generators"]["ways"].cpu())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle, and copy, as what it was made of and where it is now: compiled code is made again."""
        return _restore, (self.config, str(self.device), self.maps, self.state_dict())

    def _move_obstacles(self) -> None:
        track = self.obstacle_track
        if track is not None and not track:
            track.append(self.obstacles.position_m)
        self.obstacles.move()
        # Every move makes a new tensor, so the track needs no copies.
        if track is not None:
            track.append(self.obstacles.position_m)

    def _compiled(self, function: Callable[P, R], *, dynamic: bool = False) -> Callable[P, R]:
        return maybe_compiled(function, self.config.compile, self.config.num_envs, dynamic=dynamic)

    def _make_scan(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the quicker way to scan: visiting little on a CPU, fixed shapes on an accelerator."""
        if self.device.type != "cpu":
            return functools.partial(self._compiled(self.lidar.scan_dense), map_index=self.map_index)
        cut = None
        if any(map(len, self.maps)):
            cut = self._compiled(self.lidar.cut, dynamic=True)
        return functools.partial(self.lidar.scan, cut=cut, map_index=self.map_index)

    def _maps_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        if self.map_index is None:
            return None
        return self.map_index[rows]

    def _new_episodes(self, rows: torch.Tensor, *, whole: bool) -> tuple[Task, Progress]:
        config = self.config
        start, goal = self._new_tasks(rows)
        deadline = torch.full_like(rows, config.max_episode_length)
        if whole and config.random_clocks:
            passed = torch.rand(len(rows), generator=self._starts) * config.max_episode_length
            deadline = deadline - passed.long().to(self.device)
        zero = torch.zeros_like(start[:, 0])
        progress = Progress(torch.zeros_like(rows), deadline, zero, torch.zeros_like(rows, dtype=torch.bool))
        return Task(start, goal, heading_between(start, goal)), progress

    def _new_drones(self, task: Task) -> DroneState:
        delay_s = torch.zeros(len(task.start_m))
        if self.config.response_delay_s:
            delay_s = torch.rand(len(delay_s), generator=self._starts) * self.config.response_delay_s
        return hovering(task.start_m, task.heading, delay_s.to(self.device))

    def _new_tasks(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw starts and goals for some drones."""
        config, count = self.config, len(rows)
        draws = torch.rand(2, 2, count, generator=self._starts)
        if config.start == "line":
            start, goal = line_tasks(config, rows.cpu())
        elif config.start == "through":
            start, goal = through_tasks(draws, config.start_half_extent_m)
        else:
            start, goal = border_tasks(draws, config.start_half_extent_m)
        start, goal = start.to(self.device), goal.to(self.device)
        if not config.inside_starts:
            return start, goal
        is_inside = torch.rand(count, generator=self._starts) < config.inside_starts
        places = torch.rand(3, count, CANDIDATES, generator=self._starts).to(self.device)
        obstacles = self.obstacles.position_m.view(config.num_maps, -1, 3)
        inside, is_free = inside_starts(
            places, goal, self.maps, self._maps_of(rows), obstacles, config.map_half_extent_m
        )
        moved = is_inside.to(self.device) & is_free
        return torch.where(moved.unsqueeze(1), inside, start), goal

    def _look(self, drone: DroneState, task: Task, map_index: torch.Tensor | None) -> Observation:
        distances = self.lidar.scan(drone.position_m, task.heading, map_index=map_index)
        table = ObstacleTable.of(self.obstacles)
        if map_index is not None:
            table = table.rows(map_index)
        return observe(drone.position_m, drone.velocity_m_s, task, distances, table, self.lidar.range_m)[0]


def _make_maps(config: NavigationConfig, boxes: StaticMap | Sequence[StaticMap] | None) -> list[StaticMap]:
    if boxes is None:
        half = config.map_half_extent_m
        return [generate_map(config.num_static_obstacles, half, seed) for seed in config.map_seeds]
    maps = as_maps(boxes)
    if len(maps) != config.num_maps:
        raise ConfigurationError(f"{len(maps)} maps of boxes were given, expected num_maps, which is {config.num_maps}")
    return maps


def _restore(config: NavigationConfig, device: str, maps: Sequence[StaticMap], state: Mapping[str, Any]) -> Simulation:
    simulation = Simulation(config, device, maps)
    simulation.load_state_dict(state)
    return simulation


def _make_fly(config: NavigationConfig) -> Callable[[DroneState, torch.Tensor, torch.Tensor], DroneState]:
    dynamics = make_dynamics(config)

    def fly(drone: DroneState, command_m_s: torch.Tensor, heading: torch.Tensor) -> DroneState:
        return dynamics.step(drone, to_world_frame(command_m_s, heading), heading)

    return fly


def _make_perceive(config: NavigationConfig, device: torch.device) -> Callable[..., tuple[Observation, Verdict]]:
    """Return a function that observes and judges: one function to compile, with the configuration as constants."""
    range_m = config.lidar.range_m
    rays = None
    if config.danger_weight:
        rays = ray_directions(config.lidar, device)
    terms = RewardTerms(config.centred_reward, config.danger_weight, rays)

    def perceive(
        position: torch.Tensor,
        velocity: torch.Tensor,
        previous_velocity: torch.Tensor,
        task: Task,
        distances: torch.Tensor,
        obstacles: ObstacleTable,
    ) -> tuple[Observation, Verdict]:
        observation, nearby = observe(position, velocity, task, distances, obstacles, range_m)
        return observation, judge(position, velocity, previous_velocity, task, distances, nearby, range_m, terms)

    return perceive


def _with_delay(state: Mapping[str, Any], config: NavigationConfig) -> Mapping[str, Any]:
    """Return a state whose drones have a response delay; states of earlier versions lack it, so it is 0."""
    drone = state.get("drone")
    if not isinstance(drone, Mapping) or config.response_delay_s:
        return state
    count = config.num_envs
    undelayed = {"acceleration_m_s2": torch.zeros(count, 3), "delay_s": torch.zeros(count)}
    return {**state, "drone": {**undelayed, **drone}}


def _copy(parts: DroneState | Task | Progress) -> dict[str, torch.Tensor]:
    return {name: part.clone() for name, part in parts._asdict().items()}


def _replace_rows(old: Any, rows: torch.Tensor, new: Any) -> list[torch.Tensor]:
    """Return tensors with some rows replaced; the old ones stay as they are."""
    return [before.index_copy(0, rows, after) for before, after in zip(old, new, strict=True)]


def _differences(mine: Any, other: Any, path: str = "state") -> list[str]:
    """Return in words where another nested state lacks something of mine or has another shape."""
    if isinstance(mine, Mapping):
        if not isinstance(other, Mapping) or set(mine) != set(other):
            return [f"{path} should hold {', '.join(sorted(mine))}"]
        return [line for key in mine for line in _differences(mine[key], other[key], f"{path}.{key}")]
    if isinstance(mine, torch.Tensor) and getattr(other, "shape", None) != mine.shape:
        return [f"{path} has the shape {tuple(getattr(other, 'shape', ()))}, expected {tuple(mine.shape)}"]
    return []
