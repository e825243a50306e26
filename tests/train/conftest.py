"""Trainings small enough for a test."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from slipstream.run.folder import RunFolder
from slipstream.train.settings import TrainSettings, compose_settings
from slipstream.train.trainer import Trainer

SMALL = (
    "preset=quick",
    "env.num_envs=16",
    "env.num_obstacles=40",
    "env.max_episode_length=20",
    "algo.training_frame_num=8",
    "algo.num_minibatches=2",
    "algo.training_epoch_num=1",
    f"max_frame_num={16 * 8 * 6}",
    "save_interval=1",
    "rollout_save_interval=1",
    "eval_interval=0",
    "eval_episodes=8",
    "keep_checkpoints=20",
    "wandb=disabled",
    "tensorboard=false",
)


Watch = Callable[[Mapping[str, float]], None]


def small(*overrides: str) -> TrainSettings:
    """Settings of a training of six iterations, of a fraction of a second each."""
    return compose_settings([*SMALL, *overrides])


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Trainer]:
    """Train a run to its end, and return what trained it."""

    def run(
        name: str, *overrides: str, resume: bool = False, until: int | None = None, watch: Watch | None = None
    ) -> Trainer:
        def on_iteration(metrics: Mapping[str, float]) -> None:
            if watch is not None:
                watch(metrics)
            if metrics["iteration"] == until:
                trainer.stop(15)

        trainer = Trainer(small(*overrides), RunFolder(tmp_path / name), on_iteration)
        try:
            if resume:
                trainer.restore()
            trainer.run()
        finally:
            trainer.close()
        return trainer

    return run
