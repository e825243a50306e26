"""Rewards and verdicts, term by term, by hand."""

import math

import pytest
import torch

from slipstream.nav import LidarConfig
from slipstream.nav.frame import heading_between
from slipstream.nav.observation import Nearby, Task
from slipstream.nav.reward import RewardTerms, danger, judge, ray_directions

BEGIN, END = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[10.0, 0.0, 2.0]])
EAST = Task(BEGIN, END, heading_between(BEGIN, END))
LEVEL = Task(BEGIN, torch.tensor([[10.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
NAVRL_TERMS = RewardTerms()
LOG_4 = math.log(4.0)


def judged(
    position=(5.0, 0.0, 1.0),
    velocity=(0.0, 0.0, 0.0),
    before=None,
    distances=None,
    moving=(4.0,) * 5,
    task=LEVEL,
    collision=False,
    terms=NAVRL_TERMS,
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
        terms,
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


def endangered(velocity, distances=None, obstacle=None) -> float:
    """Return the danger of a drone among LiDAR returns and one moving obstacle."""
    lidar = LidarConfig()
    seen = torch.full((1, 36, 4), 4.0) if distances is None else distances
    features = torch.zeros(1, 5, 10)
    if obstacle is not None:
        features[0, 0] = torch.tensor(obstacle)
    return danger(torch.tensor([velocity]), seen, features, ray_directions(lidar), lidar.range_m).item()


def wall_ahead(distance: float) -> torch.Tensor:
    distances = torch.full((1, 36, 4), 4.0)
    distances[0, 0, 1] = distance  # the level ray straight ahead
    return distances


def test_danger_is_how_squarely_and_how_soon_a_return_would_be_hit():
    # Contact after (1.3 - 0.3) / 2 seconds, dead ahead.
    assert endangered((2.0, 0.0, 0.0), wall_ahead(1.3)) == pytest.approx(1 - 0.5 / 1.3, abs=1e-5)
    # Past it at 0.5 m: half of the slack of 0.4 m beyond the radius of 0.3 m.
    course = (2.0 * math.cos(math.asin(0.5 / 1.3)), 2.0 * 0.5 / 1.3, 0.0)
    time = math.sqrt(1.3**2 - 0.5**2) / 2.0
    assert endangered(course, wall_ahead(1.3)) == pytest.approx(0.5 * (1 - (time - 0.15) / 1.3), abs=1e-4)


def test_there_is_no_danger_behind_out_of_range_at_rest_or_at_a_wide_berth():
    assert endangered((-2.0, 0.0, 0.0), wall_ahead(1.0)) == 0
    assert endangered((2.0, 0.0, 0.0)) == 0
    assert endangered((0.0, 0.0, 0.0), wall_ahead(1.0)) == 0
    assert endangered((0.0, 2.0, 0.0), wall_ahead(1.0)) == 0


def test_the_danger_of_a_moving_obstacle_depends_on_relative_velocity():
    ahead = (1.0, 0.0, 0.0, 2.0, 0.0, -1.0, 0.0, 0.0, 3.0, 0.0)  # 2 m ahead, 1 m wide, approaches at 1 m/s
    assert endangered((0.0, 0.0, 0.0), obstacle=ahead) == pytest.approx(1 - (2.0 - 0.8) / 1.3, abs=1e-5)
    assert endangered((1.0, 0.0, 0.0), obstacle=ahead) == pytest.approx(1 - (1.0 - 0.4) / 1.3, abs=1e-5)
    assert endangered((-1.0, 0.0, 0.0), obstacle=ahead) == 0


def test_a_cylinder_cannot_be_flown_over_but_a_cuboid_can():
    cylinder = (1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    cuboid = (1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    climbing = (1.4, 0.0, 1.4)
    assert endangered(climbing, obstacle=cylinder) > 0
    assert endangered(climbing, obstacle=cuboid) == 0


def test_the_danger_of_boxes_and_of_moving_obstacles_add_up_with_their_weight():
    ahead = (1.0, 0.0, 0.0, 2.0, 0.0, -1.0, 0.0, 0.0, 3.0, 0.0)
    both = endangered((1.0, 0.0, 0.0), wall_ahead(1.0), ahead)
    assert both == pytest.approx(
        endangered((1.0, 0.0, 0.0), wall_ahead(1.0)) + endangered((1.0, 0.0, 0.0), obstacle=ahead)
    )
    terms = RewardTerms(danger_weight=3.0, rays=ray_directions(LidarConfig()))
    situation = {"velocity": (1.0, 0.0, 0.0), "distances": wall_ahead(1.0)}
    least = endangered((1.0, 0.0, 0.0), wall_ahead(1.0))
    assert reward(**situation) - reward(**situation, terms=terms) == pytest.approx(3 * least, abs=1e-5)


@pytest.mark.parametrize("moving", [(4.0,) * 5, ()])
def test_centred_hovering_in_the_open_is_worth_nothing(moving):
    assert reward(moving=moving, terms=RewardTerms(is_centred=True)) == pytest.approx(0.0, abs=1e-6)
