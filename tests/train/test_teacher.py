"""The planner as a teacher."""

import pytest
import torch
from tensordict import TensorDict

from slipstream import NavigationConfig
from slipstream.nav import NavigationEnv, Planner
from slipstream.nav.frame import unit_from_velocity, velocity_from_unit
from slipstream.nav.observation import Observation
from slipstream.train.teacher import planner_teacher
from tests.train.conftest import small


def observations() -> TensorDict:
    env = NavigationEnv(NavigationConfig(num_envs=16, start="line", dynamics="lag", dt_s=0.1, compile="false"))
    return env.rollout(20, env.rand_action, break_when_any_done=False)[:, -1]


def test_the_teacher_does_what_the_planner_does():
    seen = observations()
    parts = [seen["agents", "observation", name] for name in ("state", "lidar", "direction", "dynamic_obstacle")]
    command = Planner()(Observation(*parts))
    action = planner_teacher(NavigationConfig().lidar)(seen)
    torch.testing.assert_close(velocity_from_unit(action), command.clamp(-1.92, 1.92))
    # A policy reaches neither 0 nor 1.
    assert action.min() >= 0.02
    assert action.max() <= 0.98


def test_a_velocity_and_its_action_are_inverse():
    action = torch.rand(8, 3)
    torch.testing.assert_close(unit_from_velocity(velocity_from_unit(action)), action)


def test_a_run_follows_the_schedule_of_the_teacher(train):
    trainer = train("run")
    coefficient = trainer.settings.algo.teacher_coefficient
    assert coefficient > 0
    rows = trainer.folder.metrics.read_text().splitlines()
    assert len(rows) == 6
    assert trainer.ppo.teacher_coefficient == pytest.approx(coefficient / 6)
    assert '"imitation_loss"' in rows[0]


def test_without_a_teacher_there_is_nothing_to_imitate(train):
    trainer = train("run", "algo.teacher_coefficient=0")
    assert "imitation_loss" not in trainer.folder.metrics.read_text()


def test_an_invalid_teacher_is_refused():
    with pytest.raises(ValueError, match=r"algo\.teacher_coefficient is -1\.0, expected a number of at least 0"):
        small("algo.teacher_coefficient=-1")
    with pytest.raises(ValueError, match=r"algo\.teacher_interval is 0, expected a whole number of at least 1"):
        small("algo.teacher_interval=0")
