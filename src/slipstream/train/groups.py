"""The groups of settings, with NavRL's names. Their values and what they mean are in ``conf/<group>/*.yaml``.

A setting that is added later needs a default here: what earlier versions did. Their runs do not have it.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.checks import require_choice, require_count, require_number
from slipstream.errors import ConfigurationError
from slipstream.text import alternatives
from slipstream.threads import usable_cores

_LEAST_TIMEOUT_S = 60.0  # the first process says this often that it is still busy with an evaluation


# The setting that a field of NavigationConfig comes from: errors name what the user has written.
SETTING_OF = {
    "num_envs": "env.num_envs",
    "num_static_obstacles": "env.num_obstacles",
    "num_dynamic_obstacles": "env_dyn.num_obstacles",
    "map_seed": "env.map_seed",
    "num_maps": "env.num_maps",
    "start": "env.start",
    "inside_starts": "env.inside_starts",
    "collision_penalty": "env.collision_penalty",
    "danger_weight": "env.danger_weight",
    "dynamics": "sim.dynamics",
    "dt_s": "sim.dt",
    "response_delay_s": "sim.response_delay",
    "max_episode_length": "env.max_episode_length",
    "compile": "env.compile",
    "obstacle_speed_m_s": "env_dyn.vel_range",
    "obstacle_range_m": "env_dyn.local_range",
    "range_m": "sensor.lidar_range",
    "vertical_fov_deg": "sensor.lidar_vfov",
    "vertical_beams": "sensor.lidar_vbeams",
}


@dataclass
class SensorSettings:
    """The LiDAR; see ``conf/sensor``."""

    lidar_range: float
    lidar_vfov: list[float]
    lidar_vbeams: int
    lidar_hres: float


@dataclass(kw_only=True)
class EnvSettings:
    """Drones, their field and their episodes; see ``conf/env``."""

    num_envs: int
    num_obstacles: int
    max_episode_length: int
    map_seed: int
    num_maps: int = 1
    start: str
    inside_starts: float = 0.0
    centred_reward: bool = False
    collision_penalty: float = 0.0
    collision_penalty_start: float = 0.0
    collision_penalty_ramp: float = 0.0
    danger_weight: float = 0.0
    goal_truncates: bool
    random_clocks: bool
    compile: str


@dataclass
class EnvDynSettings:
    """Moving obstacles; see ``conf/env_dyn``."""

    num_obstacles: int
    vel_range: list[float]
    local_range: list[float]


@dataclass
class SimSettings:
    """Dynamics of the drones; see ``conf/sim``."""

    dynamics: str
    dt: float
    response_delay: float = 0.0


@dataclass
class FeatureExtractorSettings:
    """How the feature extractor learns; see ``conf/algo``."""

    learning_rate: float
    dyn_obs_num: int


@dataclass
class HeadSettings:
    """How the actor or the critic learns; see ``conf/algo``."""

    learning_rate: float
    clip_ratio: float


@dataclass(kw_only=True)
class AlgoSettings:
    """PPO; see ``conf/algo`` and `PPOConfig`."""

    feature_extractor: FeatureExtractorSettings
    actor: HeadSettings
    critic: HeadSettings
    entropy_loss_coefficient: float
    training_frame_num: int
    training_epoch_num: int
    num_minibatches: int
    gamma: float
    lmbda: float
    huber_delta: float
    max_grad_norm: float
    value_norm_beta: float
    max_importance_weight: float
    learning_rate_schedule: str
    mirror: bool = False
    mirror_coefficient: float = 3.0
    teacher_coefficient: float = 0.0
    teacher_interval: int = 4
    precision: str = "float32"
    update_threads: int = 1
    navrl_compat: bool
    compile: bool


@dataclass
class WandbSettings:
    """Weights & Biases; see ``conf/wandb``."""

    mode: str
    project: str
    entity: str | None
    name: str | None
    run_id: str | None


@dataclass
class DistSettings:
    """Training in shards, on any number of processes; see ``conf/train.yaml``."""

    shards: int = 0
    backend: str = "auto"
    timeout_s: float = 1800.0

    def check(self, devices: int, env: EnvSettings, algo: AlgoSettings) -> None:
        """Validate these settings for a number of processes.

        Raises:
            ConfigurationError: If one is invalid, or they do not fit each other; lists what would.
        """
        require_count("devices", devices)
        require_count("dist.shards", self.shards, least=0)
        require_choice("dist.backend", self.backend, ("auto", "gloo", "nccl"))
        require_number("dist.timeout_s", self.timeout_s, _LEAST_TIMEOUT_S)
        if not self.shards:
            if devices > 1:
                raise ConfigurationError(_missing_shards(devices, env))
            return
        valid = possible_shards(env)
        if self.shards not in valid:
            raise ConfigurationError(
                f"dist.shards is {self.shards}, expected 0, {alternatives(valid)}: a power of two that divides "
                f"env.num_envs={env.num_envs}, and that divides env.num_maps={env.num_maps} or is a multiple of it"
            )
        if self.shards % devices:
            worlds = [shards for shards in valid if shards <= self.shards]
            raise ConfigurationError(
                f"devices is {devices}, expected {alternatives(worlds)} for dist.shards={self.shards}"
            )
        steps = env.num_envs // self.shards * algo.training_frame_num
        if steps < algo.num_minibatches:
            raise ConfigurationError(
                f"dist.shards={self.shards} leaves {steps} steps to each shard, expected at least one for each of "
                f"algo.num_minibatches={algo.num_minibatches}"
            )


@dataclass
class RaySettings:
    """Collecting on the actors of a Ray cluster, with ``rollouts=ray``; see ``conf/train.yaml``."""

    address: str | None = None
    actors: int = 0
    max_restarts: int = 5

    @property
    def num_actors(self) -> int:
        """How many actors collect, or how many simulations of an evaluation fly at once."""
        return self.actors or usable_cores()

    def check(self, devices: int, dist: DistSettings) -> None:
        """Validate these settings.

        Raises:
            ConfigurationError: If one is invalid, or they do not fit the others.
        """
        require_count("ray.actors", self.actors, least=0)
        require_count("ray.max_restarts", self.max_restarts, least=0)
        if not dist.shards:
            raise ConfigurationError("rollouts=ray needs shards to give to the actors: set dist.shards")
        if devices > 1 and self.address is None:
            raise ConfigurationError(
                f"devices is {devices} and ray.address is not set: each process would start Ray for itself; start it "
                "with `ray start --head`, and set ray.address=auto"
            )


def shards_for(actors: int, env: EnvSettings) -> int:
    """Return into how many shards to divide a run for a number of actors: no actor should be idle, if possible."""
    possible = possible_shards(env)
    enough = [shards for shards in possible if shards >= actors]
    return min(enough, default=possible[-1])


def possible_shards(env: EnvSettings) -> list[int]:
    """Return the numbers of shards that an environment can be divided into."""
    found = []
    shards = 1
    while env.num_envs % shards == 0:
        # Each shard has whole maps, or is a part of the drones of one map.
        if env.num_maps % shards == 0 or shards % env.num_maps == 0:
            found.append(shards)
        shards *= 2
    return found


def _missing_shards(devices: int, env: EnvSettings) -> str:
    """Return what is wrong with several processes and no shards."""
    possible = possible_shards(env)
    valid = [shards for shards in possible if shards % devices == 0]
    if not valid:
        return f"devices is {devices}, expected {alternatives(possible)} for env.num_envs={env.num_envs}"
    return (
        f"dist.shards is 0, expected {alternatives(valid)} for {devices} processes: set dist.shards={valid[0]}, or "
        "more to allow for more processes later"
    )
