"""Which settings may change when a run is resumed, and what is said about those that did."""

import dataclasses
from pathlib import Path

import pytest

from slipstream import ConfigurationError
from slipstream.train.changes import FIXED, FREE, RECORDED, require_resumable, rule_of, schedule_note
from slipstream.train.overrides import flatten
from slipstream.train.settings import compose_settings
from tests.train.conftest import small

RUN = Path("runs/first")


def test_every_setting_is_in_exactly_one_list():
    names = sorted(flatten(dataclasses.asdict(small())))
    assert sorted([*FIXED, *RECORDED, *FREE]) == names, "put a new setting into one of the lists of train/changes.py"


def test_a_setting_in_no_list_is_treated_as_part_of_the_experiment():
    assert rule_of("env.gravity") == "fixed"


@pytest.mark.parametrize(
    "override",
    [
        "env.map_seed=5",
        "env.num_obstacles=30",
        "env_dyn.vel_range=[0.5,3.0]",
        "sim.dt=0.05",
        "sensor.lidar_range=3.0",
        "algo.training_frame_num=16",
        "seed=9",
    ],
)
def test_a_setting_that_makes_it_another_experiment_is_refused_with_both_values(override):
    name, value = override.split("=")
    before = dataclasses.asdict(small())
    with pytest.raises(ConfigurationError) as caught:
        require_resumable(RUN, before, small(override))
    message = str(caught.value)
    assert message.startswith(f"runs/first cannot be resumed with {name}={value.replace(',', ', ')} (the run has ")
    assert message.endswith("resume=runs/first alone keeps its settings, another name= starts a new run")
    assert "\n" not in message


def test_many_differences_are_summarised():
    with pytest.raises(ConfigurationError, match=r"\(the run has .* and \d+ more: that is another experiment"):
        require_resumable(RUN, dataclasses.asdict(compose_settings()), small())


def test_settings_of_learning_may_change_and_are_returned():
    before = dataclasses.asdict(small("algo.gamma=0.97", "algo.actor.learning_rate=1e-3"))
    after = small("algo.gamma=0.95", "algo.actor.learning_rate=1e-4", "save_interval=7", "num_threads=1")
    changes = require_resumable(RUN, before, after)
    assert [str(change) for change in changes] == [
        "algo.actor.learning_rate: 0.001 -> 0.0001",
        "algo.gamma: 0.97 -> 0.95",
        "num_threads: 0 -> 1",
    ]


def test_a_renamed_run_and_a_setting_that_the_run_did_not_know_are_accepted():
    before = dataclasses.asdict(small("name=old"))
    del before["env"]["random_clocks"]
    assert require_resumable(RUN, before, small("name=new")) == []


def test_a_setting_that_the_run_did_not_know_had_its_default():
    plain = ("env.danger_weight=0", "algo.mirror=false")
    before = dataclasses.asdict(small(*plain))
    del before["env"]["danger_weight"]
    del before["algo"]["mirror"]
    assert require_resumable(RUN, before, small(*plain)) == []
    changes = require_resumable(RUN, before, small("env.danger_weight=0", "algo.mirror=true"))
    assert [str(change) for change in changes] == ["algo.mirror: False -> True"]
    with pytest.raises(ConfigurationError, match=r"env\.danger_weight=3\.0 \(the run has 0\.0\)"):
        require_resumable(RUN, before, small("env.danger_weight=3", "algo.mirror=false"))


def test_a_longer_run_says_that_its_linear_learning_rate_rises():
    steady = ("algo.learning_rate_schedule=linear", "env.collision_penalty_ramp=0", "algo.teacher_coefficient=0")
    before = dataclasses.asdict(small(*steady, "max_frame_num=768"))
    assert schedule_note(before, small(*steady, "max_frame_num=1536"), 6) == (
        "with max_frame_num=1,536 instead of 768, the learning rate continues at 0.500 of its initial value instead of "
        "0.000"
    )
    assert schedule_note(before, small(*steady, "max_frame_num=768"), 3) is None
    constant = ("algo.learning_rate_schedule=constant", "env.collision_penalty_ramp=0", "algo.teacher_coefficient=0")
    assert schedule_note(dataclasses.asdict(small(*constant)), small(*constant, "max_frame_num=1536"), 6) is None


def test_a_longer_run_says_that_its_collision_penalty_falls():
    rising = (
        "algo.learning_rate_schedule=constant",
        "env.collision_penalty=60",
        "env.collision_penalty_start=20",
        "env.collision_penalty_ramp=1",
        "algo.teacher_coefficient=0",
    )
    before = dataclasses.asdict(small(*rising, "max_frame_num=768"))
    assert schedule_note(before, small(*rising, "max_frame_num=1536"), 6) == (
        "with max_frame_num=1,536 instead of 768, the collision penalty continues at 40.0 instead of 60.0"
    )


def test_a_schedule_is_compared_with_what_the_run_had_before():
    before = dataclasses.asdict(small("max_frame_num=768", "algo.learning_rate_schedule=constant"))
    for name in ("teacher_coefficient", "teacher_interval"):
        del before["algo"][name]
    after = small(
        "max_frame_num=1536",
        "algo.learning_rate_schedule=linear",
        "algo.teacher_coefficient=20",
        "env.collision_penalty_ramp=0",
    )
    before["env"]["collision_penalty_ramp"] = 0.0
    assert schedule_note(before, after, 3) == (
        "with max_frame_num=1,536 instead of 768, the learning rate continues at 0.750 of its initial value instead of "
        "1.000 and the weight of the teacher continues at 15.0 instead of 0.0"
    )


def test_a_longer_run_says_that_the_teacher_returns():
    taught = (
        "algo.learning_rate_schedule=constant",
        "env.collision_penalty_ramp=0",
        "algo.teacher_coefficient=20",
    )
    before = dataclasses.asdict(small(*taught, "max_frame_num=768"))
    assert schedule_note(before, small(*taught, "max_frame_num=1536"), 6) == (
        "with max_frame_num=1,536 instead of 768, the weight of the teacher continues at 10.0 instead of 0.0"
    )
