"""The settings of a training: Hydra's groups with NavRL's names, as typed and validated objects.

The default values are in ``conf/*.yaml`` beside this module.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from slipstream.checks import require_choice, require_count, require_number
from slipstream.text import install_hint

try:
    from hydra import compose, initialize_config_dir
    from hydra.core.override_parser.types import Override
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ImportError as missing:
    raise ImportError(f"training needs hydra-core: {install_hint('train')}") from missing

import torch

from slipstream.errors import ConfigurationError
from slipstream.nav.config import LidarConfig, NavigationConfig
from slipstream.rl.config import (
    ActorConfig,
    CriticConfig,
    FeatureExtractorConfig,
    PPOConfig,
    Precision,
    resolve_precision,
)
from slipstream.rl.network import OBSERVATION_SHAPES
from slipstream.run.folder import RunFolder
from slipstream.store.urls import ObjectPath, as_path
from slipstream.train.groups import (
    SETTING_OF,
    AlgoSettings,
    DistSettings,
    EnvDynSettings,
    EnvSettings,
    RaySettings,
    SensorSettings,
    SimSettings,
    WandbSettings,
    shards_for,
)
from slipstream.train.overrides import first_line, flatten, parse_overrides

CONF = Path(__file__).with_name("conf")
MAX_SEED = 2**63 - 1
GROUPS = tuple(sorted(path.name for path in CONF.iterdir() if path.is_dir()))


@dataclass
class TrainSettings:
    """All settings of a training; ``conf/train.yaml`` describes each value.

    Raises:
        ConfigurationError: From `check`, if a value is invalid; says which and why.
    """

    sensor: SensorSettings
    env: EnvSettings
    env_dyn: EnvDynSettings
    sim: SimSettings
    algo: AlgoSettings
    wandb: WandbSettings
    name: str | None
    run_dir: str
    resume: str | None
    seed: int
    device: str
    num_threads: int
    headless: bool
    max_frame_num: float
    save_interval: int
    eval_interval: int
    eval_episodes: int
    rollout_save_interval: int
    keep_rollouts: int
    keep_checkpoints: int
    compress_checkpoint: bool
    async_checkpoint_queue_size: int
    save_compression_level: int
    compress_lidar: bool
    gpu_memory_limited: bool
    use_pipelined_collector: bool
    prefetch_count: int
    tensorboard: bool
    devices: int = 1
    dist: DistSettings = dataclasses.field(default_factory=DistSettings)
    rollouts: str = "local"
    ray: RaySettings = dataclasses.field(default_factory=RaySettings)
    checkpoint_url: str | None = None

    @property
    def frames_per_iteration(self) -> int:
        """How many steps a rollout contains, of all environments together."""
        return self.env.num_envs * self.algo.training_frame_num

    @property
    def num_iterations(self) -> int:
        """How many iterations it takes to reach `max_frame_num` frames."""
        return max(1, math.ceil(self.max_frame_num / self.frames_per_iteration))

    def navigation(self, **changes: Any) -> NavigationConfig:
        """Return the simulation's configuration, with other values for some of its fields.

        Raises:
            ConfigurationError: If a value is invalid.
        """
        sensor, env, moving = self.sensor, self.env, self.env_dyn
        beams = 360.0 / sensor.lidar_hres if sensor.lidar_hres > 0 else 0.0
        if beams < 1 or abs(beams - round(beams)) > 1e-6:
            raise ConfigurationError(f"sensor.lidar_hres is {sensor.lidar_hres}, expected degrees that divide 360")
        for name, values in (("sensor.lidar_vfov", sensor.lidar_vfov), ("env_dyn.vel_range", moving.vel_range)):
            if len(values) != 2:
                raise ConfigurationError(f"{name} is {values}, expected two numbers")
        low, high = sensor.lidar_vfov
        fields: dict[str, Any] = {
            "num_envs": env.num_envs,
            "num_static_obstacles": env.num_obstacles,
            "num_dynamic_obstacles": moving.num_obstacles,
            "map_seed": env.map_seed,
            "num_maps": env.num_maps,
            "start": env.start,
            "inside_starts": env.inside_starts,
            "centred_reward": env.centred_reward,
            "collision_penalty": env.collision_penalty,
            "danger_weight": env.danger_weight,
            "dynamics": self.sim.dynamics,
            "dt_s": self.sim.dt,
            "response_delay_s": self.sim.response_delay,
            "max_episode_length": env.max_episode_length,
            "goal_truncates": env.goal_truncates,
            "random_clocks": env.random_clocks,
            "obstacle_speed_m_s": tuple(moving.vel_range),
            "obstacle_range_m": tuple(moving.local_range),
            "seed": self.seed,
            "compile": env.compile,
        }
        try:
            lidar = LidarConfig(sensor.lidar_range, (low, high), sensor.lidar_vbeams, round(beams))
            return NavigationConfig(**{**fields, "lidar": lidar, **changes})
        except ConfigurationError as error:
            name, _, problem = str(error).partition(" ")
            raise ConfigurationError(f"{SETTING_OF.get(name, name)} {problem}") from error

    def ppo(self) -> PPOConfig:
        """Return PPO's configuration.

        Raises:
            ConfigurationError: If a value is invalid.
        """
        algo = self.algo
        same = {field.name for field in dataclasses.fields(PPOConfig)} & set(vars(algo))
        values = {name: getattr(algo, name) for name in same - {"feature_extractor", "actor", "critic"}}
        values["precision"] = self.precision()
        try:
            return PPOConfig(
                feature_extractor=FeatureExtractorConfig(algo.feature_extractor.learning_rate),
                actor=ActorConfig(algo.actor.learning_rate, algo.actor.clip_ratio),
                critic=CriticConfig(algo.critic.learning_rate, algo.critic.clip_ratio),
                **values,
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"algo.{error}") from error

    def precision(self) -> Precision:
        """Return the precision of features; ``auto`` is bfloat16 on a CPU that has instructions for it."""
        if self.algo.precision == "auto" and self.torch_device().type != "cpu":
            return "float32"
        return resolve_precision(self.algo.precision)

    def torch_device(self) -> torch.device:
        """Return the device to train on.

        Raises:
            ConfigurationError: If the device is not available.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            # Reading a value back fails on the meta device, which has no data.
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigurationError(f"device {self.device!r} is not available: {reason}") from error
        return device

    def check(self) -> None:
        """Validate all settings. Call it before anything is written.

        Raises:
            ConfigurationError: If a value is invalid; says which and why.
        """
        may_be_zero = ("seed", "num_threads", "eval_interval", "rollout_save_interval", "save_compression_level")
        least = dict.fromkeys(may_be_zero, 0)
        for field in dataclasses.fields(self):
            value, lowest = getattr(self, field.name), least.get(field.name, 1)
            # A bool is an int to Python, but flags have no range.
            if isinstance(value, int | float) and not isinstance(value, bool):
                require_number(field.name, value, lowest)
        require_count("save_compression_level", self.save_compression_level, 0, 12)
        require_count("seed", self.seed, 0, MAX_SEED)
        require_count("env.map_seed", self.env.map_seed, 0, MAX_SEED)
        if self.algo.feature_extractor.dyn_obs_num != OBSERVATION_SHAPES["dynamic_obstacle"][1]:
            raise ConfigurationError(
                f"algo.feature_extractor.dyn_obs_num is {self.algo.feature_extractor.dyn_obs_num}, expected 5: "
                "the network is NavRL's"
            )
        require_choice("algo.learning_rate_schedule", self.algo.learning_rate_schedule, ("constant", "linear"))
        require_choice("algo.precision", self.algo.precision, ("auto", "float32", "bfloat16"))
        require_number("env.collision_penalty_start", self.env.collision_penalty_start, 0)
        require_number("env.collision_penalty_ramp", self.env.collision_penalty_ramp, 0, 1)
        require_choice("wandb.mode", self.wandb.mode, ("offline", "online", "disabled"))
        lidar, ppo = self.navigation().lidar, self.ppo()
        if (1, lidar.horizontal_beams, lidar.vertical_beams) != OBSERVATION_SHAPES["lidar"]:
            raise ConfigurationError(
                f"the sensor has {lidar.horizontal_beams} x {lidar.vertical_beams} beams, expected 36 x 4: the network "
                "is NavRL's (sensor.lidar_hres=10 sensor.lidar_vbeams=4)"
            )
        if self.frames_per_iteration < ppo.num_minibatches:
            raise ConfigurationError(
                f"env.num_envs x algo.training_frame_num is {self.frames_per_iteration} steps, expected at least one "
                f"for each of the {ppo.num_minibatches} minibatches"
            )
        self.dist.check(self.devices, self.env, self.algo)
        require_choice("rollouts", self.rollouts, ("local", "ray"))
        if self.rollouts == "ray":
            self.ray.check(self.devices, self.dist)
        if self.name is not None and not _is_folder_name(self.name):
            raise ConfigurationError(f"name is {self.name!r}, expected the name of a folder other than 'last'")
        self._check_urls()
        device = self.torch_device()
        if self.devices > 1 and self.dist.backend == "nccl" and device.type != "cuda":
            raise ConfigurationError(f"dist.backend is nccl, expected auto or gloo with device={device}")

    def _check_urls(self) -> None:
        if self.checkpoint_url is not None and not isinstance(as_path(self.checkpoint_url), ObjectPath):
            raise ConfigurationError(
                f"checkpoint_url is {self.checkpoint_url!r}, expected a URL such as s3://bucket/runs/walker"
            )
        if isinstance(as_path(self.run_dir), ObjectPath):
            raise ConfigurationError("run_dir is a URL, expected a folder on this machine; checkpoint_url takes a URL")


def compose_settings(overrides: Sequence[str] = ()) -> TrainSettings:
    """Return the settings for the overrides of a command line.

    Args:
        overrides: Such as ``["preset=quick", "env.num_envs=64"]``.

    Raises:
        ConfigurationError: If a setting does not exist or its value is invalid; suggests similar names.

    Example:
        >>> compose_settings(["preset=quick", "env.num_envs=64"]).env.num_envs
        64
    """
    parsed = parse_overrides(overrides)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF.absolute())):
        known = compose("train")
        for override in parsed:
            _check_known(override, known)
        try:
            composed = compose("train", overrides=list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigurationError(first_line(error)) from error
    return settings_from(composed)


def settings_from(values: Mapping[str, Any] | DictConfig, source: str = "the configuration") -> TrainSettings:
    """Return settings from nested values, such as those of a run's ``config.yaml``.

    Settings that were added later have a default, so that the runs of older versions can be resumed.

    Raises:
        ConfigurationError: If a setting is missing or unknown, or has another type.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TrainSettings), cast("DictConfig", values))
        settings = cast("TrainSettings", OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise ConfigurationError(f"{source}: {f'{key}: ' if key else ''}{first_line(error)}") from error
    # env.compile=False is a bool in YAML, and becomes 'False' here.
    settings.env.compile = settings.env.compile.lower()
    if settings.rollouts == "ray" and not settings.dist.shards:
        settings.dist.shards = shards_for(settings.ray.num_actors, settings.env)
    settings.check()
    return settings


def override_settings(settings: TrainSettings, overrides: Sequence[str]) -> TrainSettings:
    """Return settings with some values replaced, to resume a run or to evaluate it differently.

    Raises:
        ConfigurationError: If a setting does not exist, or a whole group is replaced.
    """
    values = OmegaConf.create(dataclasses.asdict(settings))
    for override in parse_overrides(overrides):
        _check_known(override, values)
        if override.key_or_group in GROUPS:
            raise ConfigurationError(
                f"{override.input_line} replaces a group of settings, but an existing run keeps its groups: "
                "override single settings, such as max_frame_num"
            )
        OmegaConf.update(values, override.key_or_group, override.value())
    return settings_from(values)


def to_yaml(settings: TrainSettings) -> str:
    """Return settings as the YAML that `settings_from` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(settings)))


def settings_of(run: RunFolder) -> TrainSettings:
    """Return the settings of a run.

    Raises:
        ConfigurationError: If this is not the folder of a run, or its settings are invalid.
    """
    return load_yaml(run.require_config())


def load_yaml(path: Path) -> TrainSettings:
    """Return the settings in the ``config.yaml`` of a run.

    Raises:
        ConfigurationError: If the file is not valid.
    """
    try:
        values = OmegaConf.load(path)
    except Exception as error:
        if isinstance(error, OSError):
            raise
        raise ConfigurationError(f"{path} is not YAML: {first_line(error)}") from error
    if not isinstance(values, DictConfig):
        raise ConfigurationError(f"{path} contains no settings")
    return settings_from(values, str(path))


def _check_known(override: Override, known: DictConfig) -> None:
    key = override.key_or_group
    if key in GROUPS:
        choices = sorted(path.stem for path in (CONF / key).glob("*.yaml"))
        require_choice(key, str(override.value()), tuple(choices))
        return
    names = [*flatten(cast("dict[str, Any]", OmegaConf.to_container(known))), *GROUPS]
    if key in names:
        return
    close = difflib.get_close_matches(key, names, n=3) or [name for name in names if name.split(".")[-1] == key][:3]
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ConfigurationError(f"there is no setting {key!r}{hint}")


def _is_folder_name(name: str) -> bool:
    """Return whether a run can have this name; ``last`` is the link to the newest run."""
    return name not in ("", ".", "..", "last") and Path(name).name == name
