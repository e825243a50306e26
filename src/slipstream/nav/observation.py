"""What a drone perceives: NavRL's observation as a pure function of tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from slipstream.nav.frame import to_goal_frame
from slipstream.nav.obstacles import DynamicObstacles

NUM_NEAREST = 5
OBSTACLE_FEATURES = 10
STATE_FEATURES = 8
DRONE_RADIUS_M = 0.3


class Observation(NamedTuple):
    """What the policy sees; vectors are in the goal frame.

    Attributes:
        state: Unit vector to the goal (3), distance in the plane, height above, velocity (3): ``[envs, 8]``.
        lidar: Range minus distance: ``[envs, 1, azimuths, pitches]``.
        direction: From start to goal, in the world, with z = 0: ``[envs, 1, 3]``.
        dynamic_obstacle: The five nearest in the plane, nearest first: unit vector (3), distance in the plane, height
            above, velocity (3), width category 0 to 3, height (1 for cuboids, 0 for cylinders). Height above is 0 for
            cylinders; all is 0 out of range: ``[envs, 1, 5, 10]``.
    """

    state: torch.Tensor
    lidar: torch.Tensor
    direction: torch.Tensor
    dynamic_obstacle: torch.Tensor


class Task(NamedTuple):
    """What an episode is about, fixed at its reset: start and goal ``[envs, 3]``, heading ``[envs, 2]``."""

    start_m: torch.Tensor
    goal_m: torch.Tensor
    heading: torch.Tensor


class ObstacleTable(NamedTuple):
    """Moving obstacles by column, ``[obstacles]`` each, but position and velocity ``[3, obstacles]``.

    With several maps, position and velocity are ``[3, maps, obstacles]``, and the drones are in equal blocks, map after
    map. Every map has the same kinds of obstacles.
    Half of a cylinder's height counts as infinite: there is no flying over it.
    """

    position_m: torch.Tensor
    velocity_m_s: torch.Tensor
    width_m: torch.Tensor
    half_height_m: torch.Tensor
    category: torch.Tensor
    flying: torch.Tensor

    @classmethod
    def of(cls, obstacles: DynamicObstacles) -> ObstacleTable:
        """Return where the obstacles are now and what they are."""
        position = obstacles.position_m.t().contiguous()
        velocity = obstacles.velocity_m_s.t().contiguous()
        if obstacles.num_maps > 1:
            position = position.view(3, obstacles.num_maps, -1)
            velocity = velocity.view(3, obstacles.num_maps, -1)
        one_map = slice(0, len(obstacles) // obstacles.num_maps)
        standing = obstacles.standing[one_map]
        return cls(
            position,
            velocity,
            obstacles.width_m[one_map],
            torch.where(standing, math.inf, obstacles.height_m[one_map] / 2),
            obstacles.category[one_map].float(),
            (~standing).float(),
        )

    def rows(self, map_index: torch.Tensor) -> ObstacleTable:
        """Return the obstacles around some of the drones, with position and velocity ``[3, drones, obstacles]``.

        Args:
            map_index: Which map each of the drones is on.
        """
        return ObstacleTable(self.position_m[:, map_index], self.velocity_m_s[:, map_index], *self[2:])


class Nearby(NamedTuple):
    """What moves around drones.

    Attributes:
        features: As in the observation, ``[envs, 5, 10]``.
        distance_m: From the drones to the sides of the five, roughly: to the centre, less half the width; the range if
            further than that. ``[envs, 5]``, or ``[envs, 0]`` if nothing moves.
        collision: Whether the drone touches any, ``[envs]``.
    """

    features: torch.Tensor
    distance_m: torch.Tensor
    collision: torch.Tensor


def observe(
    position: torch.Tensor,
    velocity: torch.Tensor,
    task: Task,
    distances: torch.Tensor,
    obstacles: ObstacleTable,
    range_m: float,
) -> tuple[Observation, Nearby]:
    """Return what drones see.

    Args:
        position: Where they are, ``[envs, 3]``.
        velocity: Their velocity in the world, ``[envs, 3]``.
        task: Where they come from and go to.
        distances: What the range finder measured, ``[envs, azimuths, pitches]``.
        obstacles: What moves; may be none.
        range_m: How far the range finder sees; obstacles beyond are not seen either.

    Returns:
        The observation, and what of it the reward needs, in new tensors.
    """
    to_goal = task.goal_m - position
    state = torch.cat(
        [
            to_goal_frame(to_goal / to_goal.norm(dim=1, keepdim=True).clamp(min=1e-6), task.heading),
            to_goal[:, :2].norm(dim=1, keepdim=True),
            to_goal[:, 2:],
            to_goal_frame(velocity, task.heading),
        ],
        1,
    )
    route = task.goal_m - task.start_m
    level = torch.cat([route[:, :2], torch.zeros_like(route[:, 2:])], 1)
    nearby = look_around(position, task.heading, obstacles, range_m)
    lidar = range_m - distances
    return Observation(state, lidar.unsqueeze(1), level.unsqueeze(1), nearby.features.unsqueeze(1)), nearby


def look_around(position: torch.Tensor, heading: torch.Tensor, obstacles: ObstacleTable, range_m: float) -> Nearby:
    """Return what moves around drones.

    Args:
        position: Where the drones are, ``[envs, 3]``.
        heading: The x axes of their goal frames, ``[envs, 2]``.
        obstacles: What moves; may be none.
        range_m: How far they see in the plane.
    """
    if not obstacles.width_m.shape[0]:
        blank = position.new_zeros(len(position), NUM_NEAREST, OBSTACLE_FEATURES)
        return Nearby(blank, blank[:, :0, 0], torch.zeros_like(position[:, 0], dtype=torch.bool))
    # Each block of drones is compared with the obstacles of its map: [maps, drones of a map, obstacles].
    count = len(obstacles.width_m)
    num_maps = obstacles.position_m[0].numel() // count
    block = len(position) // max(num_maps, 1)  # there is no map where no drone is
    place_x, place_y, place_z = obstacles.position_m.view(3, num_maps, 1, count)
    block_x, block_y, block_z = position.view(num_maps, block, 3, 1).unbind(2)
    squared = (place_x - block_x).square() + (place_y - block_y).square()
    beside = squared - (obstacles.width_m / 2 + DRONE_RADIUS_M).square()
    above = (place_z - block_z).abs() - obstacles.half_height_m - DRONE_RADIUS_M
    collision = torch.maximum(beside, above).flatten(0, 1).amin(1) <= 0
    which = _nearest(squared.flatten(0, 1))
    columns = (*obstacles.position_m, *obstacles.velocity_m_s, obstacles.width_m, obstacles.category, obstacles.flying)
    ox, oy, oz, vx, vy, vz, width, category, flying = (_pick(part, which) for part in columns)
    x, y, z = position.unsqueeze(2).unbind(1)
    dx, dy, dz = ox - x, oy - y, (oz - z) * flying
    squared = dx * dx + dy * dy
    plane, space = squared.sqrt(), (squared + dz * dz).sqrt()
    seen = plane <= range_m
    cos, sin = heading.unsqueeze(2).unbind(1)
    scale = space.clamp(min=1e-6).reciprocal()
    ahead, left = (dx * cos + dy * sin) * scale, (dy * cos - dx * sin) * scale
    turned = vx * cos + vy * sin, vy * cos - vx * sin, vz
    # Stacked by feature and then turned round: many times faster than stacking along the last dimension.
    features = torch.stack([ahead, left, dz * scale, plane, dz, *turned, category, flying]) * seen
    return Nearby(features.permute(1, 2, 0).contiguous(), torch.where(seen, space - width / 2, range_m), collision)


def _pick(column: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Return the values of some obstacles for each drone, from one row for all drones or a row for each block."""
    if column.ndim == 1:
        return column.index_select(0, which.view(-1)).view_as(which)
    num_maps, count = column.shape
    block = len(which) // max(num_maps, 1)
    every = column.unsqueeze(1).expand(num_maps, block, count)
    return every.gather(2, which.view(num_maps, block, which.shape[1])).flatten(0, 1)


def _nearest(squared: torch.Tensor) -> torch.Tensor:
    """Return the columns of the five least values of each row, least first."""
    if not torch.compiler.is_compiling():
        return squared.topk(NUM_NEAREST, 1, largest=False).indices
    # To a compiler topk is a black box, and one that takes longer than ten reductions which it can fuse.
    index = torch.arange(squared.shape[1], dtype=squared.dtype, device=squared.device)
    chosen = []
    for _ in range(NUM_NEAREST):
        least = squared == squared.amin(1, keepdim=True)
        column = torch.where(least, index, 0.0).amax(1, keepdim=True)
        squared = torch.where(index == column, math.inf, squared)
        chosen.append(column)
    return torch.cat(chosen, 1).long()
