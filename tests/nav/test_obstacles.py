"""Moving obstacles: kinds, homes, and how they wander."""

from typing import Any

import pytest
import torch

from slipstream import NavigationConfig
from slipstream.nav.obstacles import DynamicObstacles, draw_origins


def obstacles(seed: int = 0, **settings: Any) -> DynamicObstacles:
    config = NavigationConfig(num_envs=1, num_static_obstacles=0, **settings)
    return DynamicObstacles(config, torch.Generator().manual_seed(seed), torch.device("cpu"))


def test_there_are_as_many_of_each_of_eight_kinds_and_the_second_half_are_cylinders():
    moving = obstacles()
    assert len(moving) == 80
    assert moving.width_m.view(8, 10).unique(dim=1).squeeze(1).tolist() == [0.25, 0.5, 0.75, 1.0] * 2
    assert moving.category.view(8, 10)[:, 0].tolist() == [0, 1, 2, 3] * 2
    assert moving.standing.tolist() == [False] * 40 + [True] * 40
    assert moving.height_m.tolist() == [1.0] * 40 + [5.0] * 40


def test_origins_are_spread_over_the_field_and_cylinders_stand_on_the_ground():
    origins = draw_origins(80, 20.0, 0)
    assert origins[:, :2].abs().max() <= 20.0
    assert torch.pdist(origins[:, :2]).min() > 2.0
    assert origins[:40, 2].min() >= 0.0
    assert origins[:40, 2].max() <= 4.5
    assert origins[40:, 2].unique().tolist() == [2.5]


def test_origins_belong_to_the_map_and_not_to_the_seed():
    assert torch.equal(obstacles(seed=1).origin_m, obstacles(seed=2).origin_m)
    assert not torch.equal(obstacles(map_seed=1).origin_m, obstacles(map_seed=2).origin_m)


def test_speeds_are_between_half_and_one_and_a_half_metres_per_second():
    moving = obstacles()
    for _ in range(400):
        moving.move()
        speed = moving.velocity_m_s.norm(dim=1)
        assert float(speed.min()) >= 0.5 - 1e-4
        assert float(speed.max()) <= 1.5 + 1e-4


@pytest.mark.parametrize(("dt_s", "period"), [(0.016, 125), (0.1, 20), (3.0, 1)])
def test_direction_and_speed_change_only_every_two_seconds(dt_s, period):
    moving = obstacles(dynamics="lag", dt_s=dt_s)
    for step in range(1, 3 * period + 2):
        before = moving.velocity_m_s
        moving.move()
        assert torch.equal(before, moving.velocity_m_s) is (step % period != 0)


def test_they_fly_on_past_a_goal_they_have_reached_and_take_another():
    moving = obstacles()
    state = moving.state_dict()
    state["goal_m"][0] = state["position_m"][0] + state["velocity_m_s"][0] * 0.1  # just ahead
    moving.load_state_dict(state)
    moving.move()
    after = moving.state_dict()
    assert torch.equal(after["velocity_m_s"], state["velocity_m_s"])
    assert not torch.equal(after["goal_m"][0], state["goal_m"][0])
    assert torch.equal(after["goal_m"][1:], state["goal_m"][1:])


def test_goals_are_near_the_origin_and_inside_the_field_and_cylinders_never_leave_the_ground():
    moving = obstacles(dynamics="lag", dt_s=0.1)
    for _ in range(600):
        moving.move()
        goal = moving.state_dict()["goal_m"]
        offset = goal - moving.origin_m
        assert offset[:, :2].abs().max() <= 5.0
        assert offset[:, 2].min() >= -5.0
        assert offset[:, 2].max() <= 4.0
        assert goal[:, :2].abs().max() <= 20.0
        assert goal[:, 2].min() >= 0.0
        assert goal[:, 2].max() <= 4.5
        assert moving.position_m[40:, 2].unique().tolist() == [2.5]
        assert moving.position_m[:, :2].abs().max() <= 23.0  # a second and a half past the edge, no further


def test_the_same_seed_is_the_same_course_and_another_is_another():
    one, same, other = obstacles(seed=5), obstacles(seed=5), obstacles(seed=6)
    for moving in (one, same, other):
        for _ in range(300):
            moving.move()
    assert torch.equal(one.position_m, same.position_m)
    assert not torch.equal(one.position_m, other.position_m)


def test_after_a_restart_they_are_at_their_origins_and_about_to_move():
    moving = obstacles()
    for _ in range(10):
        moving.move()
    moving.restart()
    assert torch.equal(moving.position_m, moving.origin_m)
    assert float(moving.velocity_m_s.norm(dim=1).min()) >= 0.5 - 1e-4


def test_none_at_all_may_move_too():
    moving = obstacles(num_dynamic_obstacles=0)
    moving.move()
    assert moving.position_m.shape == (0, 3)
