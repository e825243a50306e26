"""What drones see, computed by hand in worlds small enough for it."""

import math

import pytest
import torch

from slipstream.nav.frame import heading_between
from slipstream.nav.observation import ObstacleTable, Task, _nearest, look_around, observe


def table(*obstacles: tuple[float, ...]) -> ObstacleTable:
    """Build eight obstacles or more: x, y, z, vx, vy, vz, category, whether it flies; the rest is far away."""
    rows = [*obstacles, *[(500.0 + index, 500.0, 1.0, 1.0, 1.0, 1.0, 3, 1) for index in range(8 - len(obstacles))]]
    columns = torch.tensor(rows).t()
    half = torch.where(columns[7] > 0, 0.5, math.inf)
    return ObstacleTable(columns[0:3], columns[3:6], (columns[6] + 1) * 0.25, half, columns[6], columns[7])


def task(start: tuple[float, float, float], goal: tuple[float, float, float]) -> Task:
    begin, end = torch.tensor([start]), torch.tensor([goal])
    return Task(begin, end, heading_between(begin, end))


NORTH = task((0.0, -10.0, 1.0), (0.0, 10.0, 2.0))
CLEAR = torch.full((1, 36, 4), 4.0)


def test_the_state_is_goal_direction_distances_and_velocity_in_the_goal_frame():
    position, velocity = torch.tensor([[4.0, 7.0, 2.0]]), torch.tensor([[1.0, 0.5, -0.25]])
    seen, _ = observe(position, velocity, NORTH, CLEAR, table(), 4.0)
    # The goal is 3 m ahead (north) and 4 m to the left (west), level; east is to the right.
    assert seen.state.tolist()[0] == pytest.approx([0.6, 0.8, 0.0, 5.0, 0.0, 0.5, -1.0, -0.25])


def test_the_height_of_the_goal_counts_upwards():
    seen, _ = observe(torch.tensor([[0.0, 10.0, 0.5]]), torch.zeros(1, 3), NORTH, CLEAR, table(), 4.0)
    assert seen.state.tolist()[0] == pytest.approx([0.0, 0.0, 1.0, 0.0, 1.5, 0.0, 0.0, 0.0])


def test_at_the_goal_itself_there_is_no_direction_and_no_division_by_zero():
    seen, _ = observe(torch.tensor([[0.0, 10.0, 2.0]]), torch.zeros(1, 3), NORTH, CLEAR, table(), 4.0)
    assert not seen.state.any()


def test_the_direction_is_from_start_to_goal_in_the_world_and_level():
    seen, _ = observe(torch.tensor([[4.0, 7.0, 2.0]]), torch.zeros(1, 3), NORTH, CLEAR, table(), 4.0)
    assert seen.direction.tolist() == [[[0.0, 20.0, 0.0]]]


def test_the_lidar_shows_range_minus_distance():
    distances = torch.arange(144.0).view(1, 36, 4) / 36
    seen, _ = observe(torch.zeros(1, 3), torch.zeros(1, 3), NORTH, distances, table(), 4.0)
    assert seen.lidar.shape == (1, 1, 36, 4)
    torch.testing.assert_close(seen.lidar[0, 0], 4.0 - distances[0])


def test_a_cuboid_shows_direction_distances_velocity_width_and_height():
    cuboid = (3.0, 0.0, 5.0, -1.0, 0.5, 0.25, 2, 1)  # 3 m east and 4 m above: to the right of one who looks north
    seen = look_around(torch.tensor([[0.0, 0.0, 1.0]]), NORTH.heading, table(cuboid), 4.0)
    expected = [0.0, -0.6, 0.8, 3.0, 4.0, 0.5, 1.0, 0.25, 2.0, 1.0]
    assert seen.features[0, 0].tolist() == pytest.approx(expected)
    assert seen.distance_m[0].tolist() == pytest.approx([5.0 - 0.375, 4.0, 4.0, 4.0, 4.0])


def test_a_cylinder_is_always_level_and_has_height_0():
    cylinder = (0.0, 2.0, 2.5, 0.0, -1.0, 0.0, 3, 0)
    seen = look_around(torch.tensor([[0.0, 0.0, 0.5]]), NORTH.heading, table(cylinder), 4.0)
    assert seen.features[0, 0].tolist() == pytest.approx([1.0, 0.0, 0.0, 2.0, 0.0, -1.0, 0.0, 0.0, 3.0, 0.0])
    assert seen.distance_m[0, 0].item() == pytest.approx(1.5)


def test_the_five_nearest_in_the_plane_are_shown_nearest_first():
    around = [(0.0, distance, 1.0, 0.0, 0.0, 0.0, 0, 1) for distance in (3.0, 1.0, 3.5, 2.0, 2.5, 1.5)]
    seen = look_around(torch.tensor([[0.0, 0.0, 1.0]]), NORTH.heading, table(*around), 4.0)
    assert seen.features[0, :, 3].tolist() == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0])


def test_what_is_beyond_the_range_in_the_plane_is_all_zero():
    around = [(0.0, 3.99, 1.0, 1.0, 1.0, 1.0, 3, 1), (0.0, -4.01, 1.0, 1.0, 1.0, 1.0, 3, 1)]
    seen = look_around(torch.tensor([[0.0, 0.0, 1.0]]), NORTH.heading, table(*around), 4.0)
    assert seen.features[0, 0].any()
    assert not seen.features[0, 1:].any()


def test_where_nothing_moves_nothing_is_seen_and_there_is_no_distance():
    none = ObstacleTable(torch.zeros(3, 0), torch.zeros(3, 0), *(torch.zeros(0) for _ in range(4)))
    seen = look_around(torch.zeros(2, 3), NORTH.heading.expand(2, 2), none, 4.0)
    assert seen.features.shape == (2, 5, 10)
    assert not seen.features.any()
    assert seen.distance_m.shape == (2, 0)
    assert seen.collision.tolist() == [False, False]


@pytest.mark.parametrize(
    ("obstacle", "collides"),
    [
        ((0.79, 0.0, 2.0, 0, 0, 0, 3, 1), True),  # a cuboid 1 m wide: half of it and 0.3 m
        ((0.81, 0.0, 2.0, 0, 0, 0, 3, 1), False),
        ((0.42, 0.0, 2.0, 0, 0, 0, 0, 1), True),  # a quarter of a metre wide: 0.125 m and 0.3 m
        ((0.43, 0.0, 2.0, 0, 0, 0, 0, 1), False),
        ((0.0, 0.0, 2.79, 0, 0, 0, 0, 1), True),  # from below: half of 1 m and 0.3 m
        ((0.0, 0.0, 2.81, 0, 0, 0, 0, 1), False),
        ((0.0, 0.0, 1.19, 0, 0, 0, 0, 1), False),
        ((0.5, 0.6, 2.5, 0, 0, 0, 3, 0), True),  # a cylinder, at any height
        ((0.5, 0.7, 2.5, 0, 0, 0, 3, 0), False),
    ],
)
def test_a_collision_is_half_the_obstacle_and_the_radius_of_the_drone(obstacle, collides):
    seen = look_around(torch.tensor([[0.0, 0.0, 2.0]]), NORTH.heading, table(obstacle), 4.0)
    assert seen.collision.tolist() == [collides]


def test_a_collision_counts_even_if_five_others_are_nearer_in_the_plane():
    above = [(0.0, 0.01 * index, 4.4, 0, 0, 0, 0, 1) for index in range(5)]  # above and below are free
    touching = (0.0, 0.7, 2.0, 0, 0, 0, 3, 1)
    seen = look_around(torch.tensor([[0.0, 0.0, 2.0]]), NORTH.heading, table(*above, touching), 4.0)
    assert seen.collision.tolist() == [True]


def test_a_position_that_is_not_a_number_harms_no_other_drone():
    position = torch.tensor([[0.0, 0.0, 1.0], [math.nan, 0.0, 1.0]])
    seen = look_around(position, NORTH.heading.expand(2, 2), table((0.0, 2.0, 1.0, 0, 0, 0, 0, 1)), 4.0)
    assert seen.features[0, 0, 3].item() == pytest.approx(2.0)


def test_both_ways_to_choose_the_nearest_choose_the_same(monkeypatch):
    squared = torch.rand(100, 80, generator=torch.Generator().manual_seed(0))
    expected = _nearest(squared)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(_nearest(squared), expected)
