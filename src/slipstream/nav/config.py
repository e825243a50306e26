"""What a simulation is made of: frozen, checked when made, and small enough to print."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from slipstream.checks import require_choice, require_count, require_positive
from slipstream.errors import ConfigurationError

CompileMode = Literal["auto", "true", "false"]
DynamicsKind = Literal["hummingbird", "lag"]
StartMode = Literal["border", "line"]

MAX_STATIC_OBSTACLES = 5000  # placing more takes minutes, and there is hardly room
NUM_KINDS = 8  # of dynamic obstacles: four widths, each as a flying cuboid and as a standing cylinder
MAX_HUMMINGBIRD_DT_S = 0.02  # the attitude loop (10 rad/s behind a rotor lag) is no longer sound beyond it


@dataclass(frozen=True)
class LidarConfig:
    """The rays of the range finder.

    Attributes:
        range_m: How far a ray sees.
        vertical_fov_deg: Lowest and highest pitch; beams lie at equal angles between them, both ends included.
        vertical_beams: How many pitches.
        horizontal_beams: How many azimuths, at equal angles around, counter-clockwise from the heading.

    Raises:
        ConfigurationError: If a value makes no sense; says which and why.
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
    """A world, the drones in it, and the rules they fly by. The defaults are NavRL's training.

    Attributes:
        num_envs: How many drones fly at once. They share one world and pass through each other.
        num_static_obstacles: How many boxes stand in the field; 0 leaves it empty.
        num_dynamic_obstacles: How many obstacles move; a multiple of 8, for there are 8 kinds of them.
        map_seed: Which field: where the boxes stand, and where the moving obstacles are at home.
        map_half_extent_m: Obstacles are within plus or minus this; drones start 4 m outside of it.
        start: ``border``: start and goal anywhere on the square 4 m around the field (training). ``line``: side by
            side along one edge, goals straight across (evaluation).
        dynamics: ``hummingbird``: a quadrotor under a velocity controller. ``lag``: velocities follow commands with
            a first-order lag, for larger steps.
        dt_s: Length of a step.
        max_episode_length: After how many steps an episode is truncated.
        goal_truncates: Whether reaching the goal truncates the episode; in NavRL it does not end it.
        random_clocks: Whether episodes begun by a reset of all environments are cut short by a random number of
            steps, so that they do not end all at once. Later episodes have full length.
        lidar: The range finder.
        obstacle_speed_m_s: Slowest and fastest of the moving obstacles.
        obstacle_range_m: How far from home they wander in x, y and z, rounded away from home on the lower side and
            towards it on the upper one, as NavRL does: 4.5 is from 5 m below to 4 m above.
        seed: Of starts, goals and the ways of moving obstacles; ``set_seed`` replaces it.
        compile: Whether to use ``torch.compile``. ``auto``: from 256 environments on, if it works here.

    Raises:
        ConfigurationError: If a value makes no sense; says which and why.

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

    def __post_init__(self) -> None:
        require_count("num_envs", self.num_envs, least=1)
        require_count("num_static_obstacles", self.num_static_obstacles, least=0)
        require_count("num_dynamic_obstacles", self.num_dynamic_obstacles, least=0)
        require_count("map_seed", self.map_seed, least=0)
        require_count("max_episode_length", self.max_episode_length, least=1)
        require_count("seed", self.seed, least=0)
        require_positive("map_half_extent_m", self.map_half_extent_m)
        require_positive("dt_s", self.dt_s)
        require_choice("start", self.start, ("border", "line"))
        require_choice("dynamics", self.dynamics, ("hummingbird", "lag"))
        require_choice("compile", self.compile, ("auto", "true", "false"))
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
    def start_half_extent_m(self) -> float:
        """Half the side of the square on whose border drones start."""
        return self.map_half_extent_m + 4.0
