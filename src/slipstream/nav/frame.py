"""The goal frame: x points from start to goal in the plane, z up, fixed for an episode.

A heading is a unit vector in the plane, ``[envs, 2]``: the x axis of that frame, and where the drone faces.
"""

from __future__ import annotations

import torch

MAX_SPEED_M_S = 2.0


def heading_between(start: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Return the unit vector in the plane from starts to goals; along x where they coincide.

    Args:
        start: Positions, ``[..., 3]``.
        goal: Positions, ``[..., 3]``.

    Returns:
        Headings, ``[..., 2]``.
    """
    offset = goal[..., :2] - start[..., :2]
    length = offset.norm(dim=-1, keepdim=True)
    ahead = torch.zeros_like(offset)
    ahead[..., 0] = 1.0
    return torch.where(length > 1e-6, offset / length.clamp(min=1e-6), ahead)


def to_goal_frame(vector: torch.Tensor, heading: torch.Tensor) -> torch.Tensor:
    """Express world vectors ``[..., 3]`` in the goal frame of headings ``[..., 2]``."""
    x, y, z = vector.unbind(-1)
    cos, sin = heading.unbind(-1)
    return torch.stack([x * cos + y * sin, y * cos - x * sin, z], -1)


def to_world_frame(vector: torch.Tensor, heading: torch.Tensor) -> torch.Tensor:
    """Express goal-frame vectors ``[..., 3]`` of headings ``[..., 2]`` in the world frame."""
    x, y, z = vector.unbind(-1)
    cos, sin = heading.unbind(-1)
    return torch.stack([x * cos - y * sin, x * sin + y * cos, z], -1)


def velocity_from_unit(action: torch.Tensor, max_speed_m_s: float = MAX_SPEED_M_S) -> torch.Tensor:
    """Map what a Beta policy emits to the velocity that the environment takes.

    Args:
        action: Values in [0, 1], one per axis.
        max_speed_m_s: What 1 stands for; 0 stands for as much backwards, 0.5 for rest.

    Returns:
        Velocities in the goal frame, m/s, of the same shape.

    Example:
        >>> velocity_from_unit(torch.tensor([0.0, 0.5, 1.0]))
        tensor([-2.,  0.,  2.])
    """
    return (2.0 * action - 1.0) * max_speed_m_s


def unit_from_velocity(velocity_m_s: torch.Tensor, max_speed_m_s: float = MAX_SPEED_M_S) -> torch.Tensor:
    """Map a velocity in the goal frame to the action in [0, 1] that stands for it: the inverse of `velocity_from_unit`.

    Args:
        velocity_m_s: One value per axis. Faster velocities give actions beyond 0 and 1.
        max_speed_m_s: What 1 stands for.

    Example:
        >>> unit_from_velocity(torch.tensor([-2.0, 0.0, 2.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    return (velocity_m_s / max_speed_m_s + 1.0) / 2.0
