"""The configuration of a simulation: frozen dataclasses that are checked on creation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from slipstream.checks import require_choice, require_count, require_number, require_positive
from slipstream.errors import ConfigurationError

CompileMode = Literal["auto", "true", "false"]
DynamicsKind = Literal["hummingbird", "lag"]
StartMode = Literal["border", "line", "through"]

MAX_STATIC_OBSTACLES = 5000  # placing more takes minutes, and there is hardly room
NUM_KINDS = 8  # of dynamic obstacles: four widths, each as a flying cuboid and as a standing cylinder
MAX_HUMMINGBIRD_DT_S = 0.02  # the attitude loop (10 rad/s behind a rotor lag) is no longer sound beyond it

MAX_RESPONSE_DELAY_S = 1.0  # a drone that reacts later cannot be steered through obstacles


@dataclass(frozen=True)
class LidarConfig:
    """The rays of the range finder.

    Attributes:
        range_m: How far a ray sees.
        vertical_fov_deg: Lowest and highest pitch; beams lie at equal angles between them, both ends included.
        vertical_beams: How many pitches.
        horizontal_beams: How many azimuths, at equal angles around, counter-clockwise from the heading.

    Raises:
        ConfigurationError: If a value is out of range; says which and why.
    """

    range_m: float = 4.0
    vertical_fov_deg: tuple[float, float] = (-10.0, 20.0)
    vertical_beams: int = 4
    horizontal_beams: int = 36

    def __post_init__(self) -> None:
        require_positive("range_m", self.range_m)
        require_count("vertical_beams", self.vertical_beams, least=1)
        require_count("horizontal_beams", self.horizontal_beams, least=1)
        low, high = self.vertical_fov_deg
        if not -89.0 <= low <= high <= 89.0:
            raise ConfigurationError(
                f"vertical_fov_deg is {self.vertical_fov_deg}, expected two rising angles from -89 to 89"
            )

    @property
    def pitches_rad(self) -> tuple[float, ...]:
        """The pitch of each vertical beam, lowest first."""
        low, high = self.vertical_fov_deg
        gaps = max(self.vertical_beams - 1, 1)
        return tuple(math.radians(low + (high - low) * beam / gaps) for beam in range(self.vertical_beams))


@dataclass(frozen=True)
class NavigationConfig:
    """A world, the drones in it, and the rules they fly by. The defaults are those of NavRL's training.

    Attributes:
        num_envs: Number of drones that fly at once. They never collide with each other.
        num_maps: Number of independent worlds. Drones are assigned in equal blocks: drone ``i`` flies on map
            ``i // (num_envs // num_maps)``. Each map has its own boxes and moving obstacles.
        map_repeats: Number of consecutive worlds with the same map; a divisor of `num_maps`. Their moving obstacles
            take different paths.
        num_static_obstacles: Number of boxes on each map; 0 leaves the field empty.
        num_dynamic_obstacles: Number of moving obstacles on each map: a multiple of 8, because there are 8 kinds.
        map_seed: Seed of the first map; the others have the seeds that follow it. It determines where the boxes stand
            and where the moving obstacles start.
        map_half_extent_m: Obstacles are within plus or minus this distance; drones start 4 m outside of it.
        start: ``border``: start and goal anywhere on the square 4 m around the field (NavRL's training). ``through``:
            start anywhere on that square, goal anywhere on the opposite side. ``line``: starts spread along one side,
            goals straight across (NavRL's evaluation).
        line_part: Which part of that line the drones of a map take, counted from 0, and of how many: ``(1, 4)`` is the
            second quarter. For environments that share a line.
        inside_starts: Share of the episodes that start at a free place inside the field instead, with the goal as
            above. For training with ``border`` or ``through``.
        dynamics: ``hummingbird``: a quadrotor with a velocity controller. ``lag``: velocities follow commands with a
            first-order lag, which allows larger steps.
        response_delay_s: Longest time constant of a drone's acceleration: each episode draws one between 0 and this.
            For training with ``lag``, so that the policy also flies a quadrotor, which has to tilt first.
        dt_s: Length of a step.
        max_episode_length: Number of steps after which an episode is truncated.
        goal_truncates: Whether reaching the goal truncates the episode. In NavRL, the episode continues.
        random_clocks: Whether a reset of all environments shortens each episode by a random number of steps, so that
            they do not all end at once. Later episodes have full length.
        lidar: The range finder.
        obstacle_speed_m_s: Lowest and highest speed of the moving obstacles.
        obstacle_range_m: How far from their origin they wander in x, y and z. As in NavRL, both bounds are rounded
            down: 4.5 means from 5 m below to 4 m above.
        obstacle_warmup_s: How long the obstacles move before the drones start, on a reset of all environments.
        centred_reward: Whether to subtract the reward of hovering in the open, so that it is worth nothing to stay
            alive far from the goal.
        collision_penalty: Subtracted from the reward of the step that ends an episode in a collision or out of bounds.
            `Simulation.collision_penalty` changes it later.
        danger_weight: Weight of the reward's term for being on a collision course; see `slipstream.nav.reward.danger`.
        seed: Seed of starts, goals and the paths of moving obstacles; ``set_seed`` replaces it.
        compile: Whether to use ``torch.compile``. ``auto``: with 256 environments or more, if it works here.

    Raises:
        ConfigurationError: If a value is out of range.

    Example:
        >>> NavigationConfig(num_envs=4, dynamics="lag", dt_s=0.1, max_episode_length=400).dt_s
        0.1
    """

    num_envs: int = 1024
    num_static_obstacles: int = 350
    num_dynamic_obstacles: int = 80
    map_seed: int = 0
    map_half_extent_m: float = 20.0
    start: StartMode = "border"
    dynamics: DynamicsKind = "hummingbird"
    dt_s: float = 0.016
    max_episode_length: int = 2200
    goal_truncates: bool = False
    random_clocks: bool = False
    lidar: LidarConfig = field(default_factory=LidarConfig)
    obstacle_speed_m_s: tuple[float, float] = (0.5, 1.5)
    obstacle_range_m: tuple[float, float, float] = (5.0, 5.0, 4.5)
    seed: int = 0
    compile: CompileMode = "auto"
    num_maps: int = 1
    map_repeats: int = 1
    inside_starts: float = 0.0
    response_delay_s: float = 0.0
    obstacle_warmup_s: float = 0.0
    centred_reward: bool = False
    collision_penalty: float = 0.0
    danger_weight: float = 0.0
    line_part: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        require_count("num_envs", self.num_envs, least=1)
        require_count("num_maps", self.num_maps, least=1)
        require_count("map_repeats", self.map_repeats, least=1)
        require_count("num_static_obstacles", self.num_static_obstacles, least=0)
        require_count("num_dynamic_obstacles", self.num_dynamic_obstacles, least=0)
        require_count("map_seed", self.map_seed, least=0)
        require_count("max_episode_length", self.max_episode_length, least=1)
        require_count("seed", self.seed, least=0)
        require_positive("map_half_extent_m", self.map_half_extent_m)
        require_positive("dt_s", self.dt_s)
        require_number("inside_starts", self.inside_starts, 0, 1)
        require_number("response_delay_s", self.response_delay_s, 0, MAX_RESPONSE_DELAY_S)
        require_number("obstacle_warmup_s", self.obstacle_warmup_s, 0)
        require_number("collision_penalty", self.collision_penalty, 0)
        require_number("danger_weight", self.danger_weight, 0)
        require_choice("start", self.start, ("border", "line", "through"))
        require_choice("dynamics", self.dynamics, ("hummingbird", "lag"))
        require_choice("compile", self.compile, ("auto", "true", "false"))
        if self.num_envs % self.num_maps:
            raise ConfigurationError(
                f"num_maps is {self.num_maps}, expected a divisor of num_envs, which is {self.num_envs}"
            )
        if self.response_delay_s and self.dynamics != "lag":
            raise ConfigurationError(
                f"response_delay_s is {self.response_delay_s}, expected 0 for the dynamics {self.dynamics!r}, which "
                "have a delay by nature"
            )
        if self.num_maps % self.map_repeats:
            raise ConfigurationError(
                f"map_repeats is {self.map_repeats}, expected a divisor of num_maps, which is {self.num_maps}"
            )
        if self.start == "line" and self.inside_starts:
            raise ConfigurationError(f"inside_starts is {self.inside_starts}, expected 0 with start='line'")
        _require_part("line_part", self.line_part)
        slowest, fastest = self.obstacle_speed_m_s
        if not 0 <= slowest <= fastest < math.inf:
            raise ConfigurationError(
                f"obstacle_speed_m_s is {self.obstacle_speed_m_s}, expected two rising speeds from 0 on"
            )
        if len(self.obstacle_range_m) != 3 or not all(0 <= reach < math.inf for reach in self.obstacle_range_m):
            raise ConfigurationError(f"obstacle_range_m is {self.obstacle_range_m}, expected three lengths from 0 on")
        if self.num_static_obstacles > MAX_STATIC_OBSTACLES:
            raise ConfigurationError(
                f"num_static_obstacles is {self.num_static_obstacles}, expected at most {MAX_STATIC_OBSTACLES} boxes"
            )
        if self.num_dynamic_obstacles % NUM_KINDS:
            raise ConfigurationError(
                f"num_dynamic_obstacles is {self.num_dynamic_obstacles}, expected a multiple of {NUM_KINDS}: there are "
                f"{NUM_KINDS} kinds, as many of each"
            )
        if self.dynamics == "hummingbird" and self.dt_s > MAX_HUMMINGBIRD_DT_S:
            raise ConfigurationError(
                f"dt_s is {self.dt_s}, expected at most {MAX_HUMMINGBIRD_DT_S} for the dynamics 'hummingbird'; "
                f"'lag' takes longer steps"
            )

    @property
    def map_seeds(self) -> list[int]:
        """The seed of the map of each world."""
        return [self.map_seed + world // self.map_repeats for world in range(self.num_maps)]

    @property
    def start_half_extent_m(self) -> float:
        """Half the side of the square on whose border drones start."""
        return self.map_half_extent_m + 4.0


def _require_part(name: str, value: tuple[int, int]) -> None:
    part, parts = value
    if not 0 <= part < parts:
        raise ConfigurationError(f"{name} is {value}, expected a number from 0 and a larger number of parts")
