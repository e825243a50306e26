"""Rewards and verdicts, term by term, by hand."""

import math

import pytest
import torch

from slipstream.nav.frame import heading_between
from slipstream.nav.observation import Nearby, Task
from slipstream.nav.reward import judge

BEGIN, END = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[10.0, 0.0, 2.0]])
EAST = Task(BEGIN, END, heading_between(BEGIN, END))
LEVEL = Task(BEGIN, torch.tensor([[10.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
LOG_4 = math.log(4.0)


def judged(
    position=(5.0, 0.0, 1.0),
    velocity=(0.0, 0.0, 0.0),
    before=None,
    distances=None,
    moving=(4.0,) * 5,
    task=LEVEL,
    collision=False,
):
    now = torch.tensor([velocity])
    return judge(
        torch.tensor([position]),
        now,
        now if before is None else torch.tensor([before]),
        task,
        torch.full((1, 36, 4), 4.0) if distances is None else distances,
        Nearby(torch.zeros(1, 5, 10), torch.tensor([moving]).view(1, -1), torch.tensor([collision])),
        4.0,
    )


def reward(**situation) -> float:
    return judged(**situation).reward.item()


def test_at_rest_with_nothing_around_the_reward_is_one_and_twice_the_logarithm_of_the_range():
    assert reward() == pytest.approx(1.0 + 2 * LOG_4)


def test_where_nothing_moves_there_is_no_term_for_it():
    assert reward(moving=()) == pytest.approx(1.0 + LOG_4)


def test_velocity_counts_as_far_as_it_leads_to_the_goal():
    assert reward(velocity=(1.5, 0.7, 0.0)) - reward() == pytest.approx(1.5)
    assert reward(velocity=(-2.0, 0.0, 0.0)) - reward() == pytest.approx(-2.0)
    slanted = {"position": (7.0, 4.0, 1.0)}  # 3 m and 4 m from the goal
    assert reward(velocity=(1.0, -1.0, 0.0), **slanted) - reward(**slanted) == pytest.approx(0.6 + 0.8)


def test_near_boxes_cost_the_mean_logarithm_of_all_rays():
    distances = torch.full((1, 36, 4), 4.0)
    distances[0, :9] = 0.5  # a quarter of the rays
    assert reward(distances=distances) == pytest.approx(1.0 + 0.25 * math.log(0.5) + 0.75 * LOG_4 + LOG_4)


def test_a_ray_of_length_0_counts_as_a_micrometre():
    distances = torch.zeros(1, 36, 4)
    assert reward(distances=distances) == pytest.approx(1.0 + math.log(1e-6) + LOG_4)


def test_moving_obstacles_cost_the_mean_logarithm_of_the_nearest_five():
    assert reward(moving=(1.0, 2.0, 4.0, 4.0, 9.0)) == pytest.approx(1.0 + LOG_4 + (0.0 + math.log(2) + 3 * LOG_4) / 5)
    assert reward(moving=(-0.1, 4.0, 4.0, 4.0, 4.0)) == pytest.approx(1.0 + LOG_4 + (math.log(1e-6) + 4 * LOG_4) / 5)


def test_a_change_of_velocity_costs_a_tenth_of_its_length():
    change = {"velocity": (1.0, 0.0, 0.0), "before": (1.0, 3.0, -4.0)}
    assert reward(**change) - reward(velocity=(1.0, 0.0, 0.0)) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("height", "outside"), [(0.5, 0.3), (0.8, 0.0), (1.0, 0.0), (1.5, 0.0), (2.2, 0.0), (2.5, 0.3), (3.2, 1.0)]
)
def test_heights_outside_those_of_start_and_goal_cost_eight_times_the_square(height, outside):
    # At the same distance to the goal and at rest, only the height term differs.
    found = reward(position=(5.0, 0.0, height), task=EAST)
    assert found == pytest.approx(1.0 + 2 * LOG_4 - 8 * outside**2, abs=1e-4)


def test_neither_a_collision_nor_the_goal_has_a_reward_of_its_own():
    assert reward(collision=True) == reward()
    assert reward(position=(9.9, 0.0, 1.0)) == pytest.approx(reward())


@pytest.mark.parametrize(("nearest", "collides"), [(0.29, True), (0.31, False)])
def test_a_return_closer_than_the_drone_is_wide_is_a_static_collision(nearest, collides):
    distances = torch.full((1, 36, 4), 4.0)
    distances[0, 17, 2] = nearest
    assert judged(distances=distances).static_collision.tolist() == [collides]


@pytest.mark.parametrize(("height", "outside"), [(0.19, True), (0.21, False), (3.99, False), (4.01, True)])
def test_too_low_and_too_high_are_out_of_bounds(height, outside):
    assert judged(position=(5.0, 0.0, height)).out_of_bounds.tolist() == [outside]


@pytest.mark.parametrize(
    ("position", "reached"), [((9.51, 0.0, 1.0), True), ((9.49, 0.0, 1.0), False), ((10.0, 0.0, 1.6), False)]
)
def test_the_goal_is_reached_within_half_a_metre_in_space(position, reached):
    assert judged(position=position).reached_goal.tolist() == [reached]
