"""Schedules that follow training: the collision penalty and the weight of the teacher."""

import pytest

from slipstream import ConfigurationError
from slipstream.train.schedule import collision_penalty, teacher_coefficient
from slipstream.train.settings import compose_settings

RISING = ["preset=quick", "env.num_envs=64", "max_frame_num=102400"]  # 100 iterations


def test_the_penalty_rises_linearly_and_stays():
    settings = compose_settings(RISING)
    assert settings.num_iterations == 100
    assert collision_penalty(settings, 0) == 15.0
    assert collision_penalty(settings, 30) == pytest.approx(37.5)
    assert collision_penalty(settings, 60) == 60.0
    assert collision_penalty(settings, 1000) == 60.0


def test_without_a_ramp_the_penalty_is_constant():
    settings = compose_settings([*RISING, "env.collision_penalty_ramp=0"])
    assert collision_penalty(settings, 0) == 60.0
    assert collision_penalty(compose_settings([]), 0) == 0.0


def test_the_weight_of_the_teacher_falls_linearly_to_zero():
    settings = compose_settings([*RISING, "algo.teacher_coefficient=20"])
    assert teacher_coefficient(settings, 0) == 20.0
    assert teacher_coefficient(settings, 25) == pytest.approx(15.0)
    assert teacher_coefficient(settings, 100) == 0.0
    assert teacher_coefficient(settings, 1000) == 0.0
    assert teacher_coefficient(compose_settings([]), 0) == 0.0


@pytest.mark.parametrize(
    "override", ["env.collision_penalty=-1", "env.collision_penalty_start=-1", "env.collision_penalty_ramp=1.5"]
)
def test_a_penalty_out_of_range_is_refused(override):
    with pytest.raises(ConfigurationError, match=override.partition("=")[0]):
        compose_settings([override])
