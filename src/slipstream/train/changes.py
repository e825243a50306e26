"""Which settings of a run may change when it is resumed.

The settings that a checkpoint was trained with are stored in it. They are what a resumed run is compared with, not
``config.yaml``: that file may have been edited, or written by a process that trained no further.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from slipstream.errors import ConfigurationError
from slipstream.text import list_first
from slipstream.train.overrides import flatten
from slipstream.train.schedule import collision_penalty, learning_rate_factor, teacher_coefficient
from slipstream.train.settings import TrainSettings, settings_from

_MAX_LISTED = 4

Rule = Literal["fixed", "recorded", "free"]

# The experiment: a run with another value is a different run. Every setting must be in exactly one of the three lists.
FIXED = frozenset(
    {
        "sensor.lidar_range",
        "sensor.lidar_vfov",
        "sensor.lidar_vbeams",
        "sensor.lidar_hres",
        "env.num_envs",
        "env.num_obstacles",
        "env.max_episode_length",
        "env.map_seed",
        "env.num_maps",
        "env.start",
        "env.inside_starts",
        "env.centred_reward",
        "env.collision_penalty",
        "env.collision_penalty_start",
        "env.collision_penalty_ramp",
        "env.danger_weight",
        "env.goal_truncates",
        "env.random_clocks",
        "env_dyn.num_obstacles",
        "env_dyn.vel_range",
        "env_dyn.local_range",
        "sim.dynamics",
        "sim.dt",
        "sim.response_delay",
        "algo.feature_extractor.dyn_obs_num",
        "algo.training_frame_num",
        "algo.navrl_compat",
        "dist.shards",
        "name",
        "seed",
    }
)

# How the policy learns from here on: allowed, but the run no longer equals one that was not interrupted.
RECORDED = frozenset(
    {
        "algo.feature_extractor.learning_rate",
        "algo.actor.learning_rate",
        "algo.actor.clip_ratio",
        "algo.critic.learning_rate",
        "algo.critic.clip_ratio",
        "algo.entropy_loss_coefficient",
        "algo.training_epoch_num",
        "algo.num_minibatches",
        "algo.gamma",
        "algo.lmbda",
        "algo.huber_delta",
        "algo.max_grad_norm",
        "algo.value_norm_beta",
        "algo.max_importance_weight",
        "algo.learning_rate_schedule",
        "algo.mirror",
        "algo.mirror_coefficient",
        "algo.teacher_coefficient",
        "algo.teacher_interval",
        "algo.precision",
        "algo.update_threads",
        "algo.compile",
        "env.compile",
        "device",
        "num_threads",
        "max_frame_num",
        "gpu_memory_limited",
        "use_pipelined_collector",
        "prefetch_count",
    }
)

# What is written, shown and logged, where, and by how many processes and actors: no effect on what is learned.
FREE = frozenset(
    {
        "run_dir",
        "resume",
        "headless",
        "save_interval",
        "eval_interval",
        "eval_episodes",
        "rollout_save_interval",
        "keep_rollouts",
        "keep_checkpoints",
        "compress_checkpoint",
        "checkpoint_url",
        "async_checkpoint_queue_size",
        "save_compression_level",
        "compress_lidar",
        "tensorboard",
        "devices",
        "dist.backend",
        "dist.timeout_s",
        "rollouts",
        "ray.address",
        "ray.actors",
        "ray.max_restarts",
        "wandb.mode",
        "wandb.project",
        "wandb.entity",
        "wandb.name",
        "wandb.run_id",
    }
)


@dataclass(frozen=True)
class Change:
    """A setting with another value than before."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


def rule_of(name: str) -> Rule:
    """Return what happens if a setting has another value when a run is resumed.

    ``fixed``: the resume is refused. ``recorded``: the change is logged and recorded. ``free``: it is just used.
    """
    if name in FREE:
        return "free"
    if name in RECORDED:
        return "recorded"
    # Also a setting that is in no list.
    return "fixed"


def compare_settings(before: Mapping[str, Any], after: TrainSettings) -> list[Change]:
    """Return the settings that differ, in the order of `TrainSettings`.

    Args:
        before: Nested values as in a checkpoint. A setting that is missing has its default, which is what earlier
            versions did; it is not compared if it has none.
        after: The settings to use from now on.
    """
    old = {**_defaults(), **flatten(before)}
    changes = []
    for name, value in flatten(dataclasses.asdict(after)).items():
        if name in old and old[name] != value:
            changes.append(Change(name, old[name], value))
    return changes


def require_resumable(run: Path, before: Mapping[str, Any], after: TrainSettings) -> list[Change]:
    """Return the changes to record when a run is resumed with other settings.

    The name is not compared: a run that is moved or renamed is still the same run.

    Args:
        run: The folder of the run, for the message.
        before: The settings of the checkpoint that is resumed.
        after: The settings to use from now on.

    Raises:
        ConfigurationError: If a fixed setting differs; says which, and the value that the run has.
    """
    refused = []
    recorded = []
    for change in compare_settings(before, after):
        rule = rule_of(change.name)
        if rule == "recorded":
            recorded.append(change)
        if rule == "fixed" and change.name != "name":
            refused.append(f"{change.name}={change.after} (the run has {change.before})")
    if refused:
        raise ConfigurationError(
            f"{run} cannot be resumed with {list_first(refused, _MAX_LISTED)}: that is another experiment; "
            f"resume={run} alone keeps its settings, another name= starts a new run"
        )
    return recorded


def schedule_note(before: Mapping[str, Any], after: TrainSettings, iteration: int) -> str | None:
    """Return a sentence about the values that jump because of a new `max_frame_num`; None if none does.

    Schedules stretch over the whole run, so extending it moves them back: the linear learning rate of a finished run,
    which had reached 0, rises again.

    Args:
        before: The settings of the checkpoint that is resumed.
        after: The settings to use from now on.
        iteration: How many iterations are done.
    """
    try:
        planned = settings_from(before)
    except ConfigurationError:
        # Settings of another version cannot be told what they would have done.
        return None
    frames = planned.max_frame_num
    if frames == after.max_frame_num:
        return None
    jumps = []
    old = learning_rate_factor(planned, iteration)
    new = learning_rate_factor(after, iteration)
    if old != new:
        jumps.append(f"the learning rate continues at {new:.3f} of its initial value instead of {old:.3f}")
    old = collision_penalty(planned, iteration)
    new = collision_penalty(after, iteration)
    if old != new:
        jumps.append(f"the collision penalty continues at {new:.1f} instead of {old:.1f}")
    old = teacher_coefficient(planned, iteration)
    new = teacher_coefficient(after, iteration)
    if old != new:
        jumps.append(f"the weight of the teacher continues at {new:.1f} instead of {old:.1f}")
    if not jumps:
        return None
    return f"with max_frame_num={after.max_frame_num:,.0f} instead of {frames:,.0f}, {' and '.join(jumps)}"


def _defaults() -> dict[str, Any]:
    """Return the settings that have a default, by name."""
    defaults = {}
    for group, kind in get_type_hints(TrainSettings).items():
        if not dataclasses.is_dataclass(kind):
            continue
        for setting in dataclasses.fields(kind):
            if setting.default is not dataclasses.MISSING:
                defaults[f"{group}.{setting.name}"] = setting.default
    return defaults
