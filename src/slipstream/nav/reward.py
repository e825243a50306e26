"""What a step is worth and what it ran into: NavRL's reward and ends as a pure function of tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream.nav.observation import DRONE_RADIUS_M, Nearby, Task

GOAL_RADIUS_M = 0.5
FLOOR_M = 0.2
CEILING_M = 4.0
HEIGHT_SLACK_M = 0.2
LEAST_DISTANCE_M = 1e-6
SMOOTHNESS_WEIGHT = 0.1
HEIGHT_WEIGHT = 8.0


class Verdict(NamedTuple):
    """What a step was worth and what it ran into, ``[envs]`` each.

    Attributes:
        reward: The sum of all terms; neither collisions nor goals have a term of their own.
        static_collision: Whether a ray returned from closer than the drone's radius.
        dynamic_collision: Whether the drone touches a moving obstacle.
        out_of_bounds: Whether it is too low or too high.
        reached_goal: Whether it is at its goal.
    """

    reward: torch.Tensor
    static_collision: torch.Tensor
    dynamic_collision: torch.Tensor
    out_of_bounds: torch.Tensor
    reached_goal: torch.Tensor


def judge(
    position: torch.Tensor,
    velocity: torch.Tensor,
    previous_velocity: torch.Tensor,
    task: Task,
    distances: torch.Tensor,
    nearby: Nearby,
    range_m: float,
) -> Verdict:
    """Return how drones fared in a step.

    Args:
        position: Where they are after it, ``[envs, 3]``.
        velocity: Their velocity after it, ``[envs, 3]``.
        previous_velocity: Their velocity before it.
        task: Where they come from and go to.
        distances: What the range finder measured, ``[envs, azimuths, pitches]``.
        nearby: What moves around them. If nothing moves in this world, the reward has no term for it.
        range_m: How far the range finder sees.
    """
    to_goal = task.goal_m - position
    goal_distance = to_goal.norm(dim=1)
    approach = (velocity * to_goal).sum(1) / goal_distance.clamp(min=1e-6)
    flat = distances.flatten(1)
    reward = approach + 1.0 + _mean_log(flat, range_m)
    if nearby.distance_m.shape[1]:
        reward = reward + _mean_log(nearby.distance_m, range_m)
    reward = reward - SMOOTHNESS_WEIGHT * (velocity - previous_velocity).norm(dim=1)
    z = position[:, 2]
    reward = reward - HEIGHT_WEIGHT * _height_excess(z, task).square()
    return Verdict(
        reward,
        flat.amin(1) < DRONE_RADIUS_M,
        nearby.collision.clone(),
        (z < FLOOR_M) | (z > CEILING_M),
        goal_distance < GOAL_RADIUS_M,
    )


def _mean_log(distance_m: torch.Tensor, range_m: float) -> torch.Tensor:
    return distance_m.clamp(LEAST_DISTANCE_M, range_m).log().mean(1)


def _height_excess(z: torch.Tensor, task: Task) -> torch.Tensor:
    """Return by how many metres drones are outside the heights between start and goal, with some slack."""
    start_z, goal_z = task.start_m[:, 2], task.goal_m[:, 2]
    above = z - torch.maximum(start_z, goal_z) - HEIGHT_SLACK_M
    below = torch.minimum(start_z, goal_z) - HEIGHT_SLACK_M - z
    return torch.maximum(above, below).clamp(min=0)
