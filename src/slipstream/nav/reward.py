"""Rewards and collisions of a step, as pure functions of tensors.

The defaults are NavRL's reward. It pays about 3.8 for every step in the open, which is worth as much as a collision
penalty of 75 at a discount of .95: entering the field costs more than it pays, so drones learn to wait or to fly
around. The options of `RewardTerms` remove that: centring makes waiting worthless, and the danger term says early
which courses end in a collision.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from slipstream.nav.config import LidarConfig
from slipstream.nav.frame import to_goal_frame
from slipstream.nav.observation import DRONE_RADIUS_M, Nearby, Task
from slipstream.nav.obstacles import MAX_WIDTH_M, NUM_WIDTHS

GOAL_RADIUS_M = 0.5
FLOOR_M = 0.2
CEILING_M = 4.0
HEIGHT_SLACK_M = 0.2
LEAST_DISTANCE_M = 1e-6
SMOOTHNESS_WEIGHT = 0.1
HEIGHT_WEIGHT = 8.0
MISS_SLACK_M = 0.4  # half of it is too thin for rays 10 degrees apart
DANGER_HORIZON_S = 1.3


class RewardTerms(NamedTuple):
    """What the reward contains besides NavRL's terms.

    Attributes:
        is_centred: Whether the reward of hovering in the open is subtracted.
        danger_weight: Weight of `danger`.
        rays: Directions of the LiDAR's rays, from `ray_directions`; None leaves danger out.
    """

    is_centred: bool = False
    danger_weight: float = 0.0
    rays: torch.Tensor | None = None


class Verdict(NamedTuple):
    """What a step was worth and what it ran into, ``[envs]`` each.

    Attributes:
        reward: The sum of all terms, without a penalty for collisions.
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
    terms: RewardTerms = RewardTerms(),  # noqa: B008 - it cannot change
) -> Verdict:
    """Return rewards and collisions of a step.

    Args:
        position: Where they are after it, ``[envs, 3]``.
        velocity: Their velocity after it, ``[envs, 3]``.
        previous_velocity: Their velocity before it.
        task: Where they come from and go to.
        distances: What the range finder measured, ``[envs, azimuths, pitches]``.
        nearby: What moves around them. If nothing moves in this world, the reward has no term for it.
        range_m: How far the range finder sees.
        terms: What else the reward contains.
    """
    to_goal = task.goal_m - position
    goal_distance = to_goal.norm(dim=1)
    approach = (velocity * to_goal).sum(1) / goal_distance.clamp(min=1e-6)
    flat = distances.flatten(1)
    reward = approach + 1.0 + _mean_log(flat, range_m)
    in_the_open = 1.0 + math.log(range_m)
    if nearby.distance_m.shape[1]:
        reward = reward + _mean_log(nearby.distance_m, range_m)
        in_the_open += math.log(range_m)
    if terms.is_centred:
        reward = reward - in_the_open
    if terms.rays is not None:
        own_velocity = to_goal_frame(velocity, task.heading)
        reward = reward - terms.danger_weight * danger(own_velocity, distances, nearby.features, terms.rays, range_m)
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


def danger(
    velocity: torch.Tensor, distances: torch.Tensor, obstacles: torch.Tensor, rays: torch.Tensor, range_m: float
) -> torch.Tensor:
    """Return how much drones are on a collision course, ``[envs]``: from 0, for not at all, to 2.

    It is the largest danger of any LiDAR return plus the largest of any moving obstacle. A danger is the product of
    how squarely the drone would hit at its present velocity and how soon.

    Args:
        velocity: Velocity in the goal frame, ``[envs, 3]``.
        distances: LiDAR distances, ``[envs, azimuths, pitches]``.
        obstacles: Features of the nearest moving obstacles, as observed, ``[envs, obstacles, 10]``.
        rays: Directions of the rays, from `ray_directions`.
        range_m: How far the range finder sees.
    """
    flat = distances.flatten(1)
    speed_squared = velocity.square().sum(1, keepdim=True)
    # The distance along the course is one matrix product, because a return is its ray times its distance.
    ahead = _danger_of(flat.square(), flat * (velocity @ rays), speed_squared, DRONE_RADIUS_M) * (flat < range_m)
    features = obstacles.permute(2, 0, 1)
    is_seen, is_flying = features[3] > 0, features[9]
    space_squared = features[3].square() + features[4].square()
    own = velocity.t().unsqueeze(2)
    # A cylinder reaches over all heights, so only the plane counts.
    course = torch.stack([own[0] - features[5], own[1] - features[6], (own[2] - features[7]) * is_flying])
    along = (features[:3] * course).sum(0) * space_squared.sqrt()
    radius = (features[8] + 1) * (MAX_WIDTH_M / NUM_WIDTHS / 2) + DRONE_RADIUS_M
    moving = _danger_of(space_squared, along, course.square().sum(0), radius) * is_seen
    return ahead.amax(1) + moving.amax(1)


def ray_directions(lidar: LidarConfig, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return unit vectors of all rays in the goal frame, ``[3, azimuths * pitches]``.

    The drone faces along the goal frame's x axis; azimuths count counter-clockwise.
    """
    azimuth = torch.arange(lidar.horizontal_beams, dtype=torch.float64) * (2 * math.pi / lidar.horizontal_beams)
    pitch = torch.tensor(lidar.pitches_rad, dtype=torch.float64)
    level = pitch.cos().expand(len(azimuth), -1)
    x, y = azimuth.cos().unsqueeze(1) * level, azimuth.sin().unsqueeze(1) * level
    z = pitch.sin().expand(len(azimuth), -1)
    return torch.stack([x, y, z]).flatten(1).float().to(device)


def _danger_of(
    distance_squared: torch.Tensor, along: torch.Tensor, speed_squared: torch.Tensor, radius: torch.Tensor | float
) -> torch.Tensor:
    """Return the danger of points, ``[envs, points]``.

    Args:
        distance_squared: How far they are, squared.
        along: Scalar product of their position and the drone's velocity relative to them.
        speed_squared: That velocity's length, squared.
        radius: How close is a collision.
    """
    speed_squared = speed_squared.clamp(min=1e-6)
    time = along / speed_squared
    miss = (distance_squared - along * time).clamp(min=0).sqrt()
    square = (1 - (miss - radius) / MISS_SLACK_M).clamp(0, 1)
    time_to_contact = (time - radius * speed_squared.rsqrt()).clamp(min=0)
    soon = (1 - time_to_contact / DANGER_HORIZON_S).clamp(min=0)
    return square * soon * (time > 0)


def _mean_log(distance_m: torch.Tensor, range_m: float) -> torch.Tensor:
    return distance_m.clamp(LEAST_DISTANCE_M, range_m).log().mean(1)


def _height_excess(z: torch.Tensor, task: Task) -> torch.Tensor:
    """Return by how many metres drones are outside the heights between start and goal, with some slack."""
    start_z, goal_z = task.start_m[:, 2], task.goal_m[:, 2]
    above = z - torch.maximum(start_z, goal_z) - HEIGHT_SLACK_M
    below = torch.minimum(start_z, goal_z) - HEIGHT_SLACK_M - z
    return torch.maximum(above, below).clamp(min=0)
