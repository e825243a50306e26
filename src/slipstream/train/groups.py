"""The groups of settings, with NavRL's names. Their values and what they mean are in ``conf/<group>/*.yaml``.

A setting that is added later needs a default here: what earlier versions did. Their runs do not have it.
"""

from __future__ import annotations

from dataclasses import dataclass


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
