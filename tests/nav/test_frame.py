"""The goal frame, and the way from a Beta policy's numbers to velocities."""

import math

import torch

from slipstream.nav import to_goal_frame, to_world_frame, velocity_from_unit
from slipstream.nav.frame import heading_between


def test_the_heading_points_from_start_to_goal_in_the_plane():
    start, goal = torch.tensor([[1.0, 1.0, 0.5]]), torch.tensor([[1.0, -5.0, 2.5]])
    torch.testing.assert_close(heading_between(start, goal), torch.tensor([[0.0, -1.0]]))


def test_a_goal_straight_above_its_start_has_a_heading_all_the_same():
    place = torch.tensor([[3.0, 4.0, 1.0]])
    assert torch.equal(heading_between(place, place + torch.tensor([0.0, 0.0, 1.0])), torch.tensor([[1.0, 0.0]]))


def test_towards_the_goal_is_x_to_its_left_is_y_and_up_stays_up():
    heading = torch.tensor([[0.0, -1.0]])  # the goal lies south: left of it is east
    assert to_goal_frame(torch.tensor([[0.0, -3.0, 0.0]]), heading).tolist() == [[3.0, 0.0, 0.0]]
    assert to_goal_frame(torch.tensor([[2.0, 0.0, 5.0]]), heading).tolist() == [[0.0, 2.0, 5.0]]


def test_there_and_back_is_the_same_vector():
    angles = torch.linspace(0, 2 * math.pi, 17)
    heading = torch.stack([angles.cos(), angles.sin()], 1)
    vectors = torch.randn(17, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(to_world_frame(to_goal_frame(vectors, heading), heading), vectors)


def test_a_half_is_rest_and_the_ends_are_full_speed():
    assert velocity_from_unit(torch.tensor([[0.0, 0.5, 1.0]])).tolist() == [[-2.0, 0.0, 2.0]]
    assert velocity_from_unit(torch.tensor([0.75]), max_speed_m_s=4.0).tolist() == [2.0]
