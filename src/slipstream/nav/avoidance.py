"""Predict how close a velocity command brings a drone to what it observes.

`Shield` compares commands by the clearance of the predicted paths. Everything is in goal coordinates relative to the
drone, batched over drones, and computed from the observation only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from slipstream.checks import require_count, require_number, require_positive
from slipstream.errors import ConfigurationError
from slipstream.nav.config import LidarConfig
from slipstream.nav.dynamics import VELOCITY_GAIN
from slipstream.nav.frame import MAX_SPEED_M_S
from slipstream.nav.observation import DRONE_RADIUS_M, Observation
from slipstream.nav.obstacles import CUBOID_HEIGHT_M, MAX_WIDTH_M, NUM_WIDTHS
from slipstream.nav.reward import CEILING_M, FLOOR_M

ABSENT_M = 100.0  # where missing returns and obstacles are placed: far enough never to matter
NO_RETURN_M = 0.01  # a ray that ends this close to the range hit nothing
GROUND_SLACK_M = 0.03  # a return this close to the estimated ground height is the ground
HEIGHT_MARGIN_M = 0.15  # stay this far from the floor and the ceiling
VERTICAL_MARGIN_M = 0.1  # beyond half the height of a cuboid and the radius of the drone
GOAL_HEIGHTS_M = (0.5, 2.5)  # drones do not observe their altitude, only the height of the goal above them
STOPPING_GAIN = 2.0  # how fast a drone approaches a vertical limit, relative to the gain of its response


@dataclass(frozen=True)
class ShieldConfig:
    """How far ahead the shield looks and how much clearance it keeps.

    A command is *safe* if the predicted path keeps both clearances. The comfort distances and weights only rank safe
    commands: obstacles change direction without warning, so it pays to stay further away than necessary.

    Attributes:
        gain: Acceleration for each m/s of velocity error, 1/s: the response that the prediction assumes.
        horizon_s: How far ahead paths are predicted.
        num_samples: How many points of a path are checked, at equal intervals.
        num_directions: How many directions in the plane are tried.
        speeds_m_s: The speeds that are tried in every direction.
        clearance_m: Smallest distance in the plane to a LiDAR return.
        obstacle_clearance_m: Smallest distance in the plane to the side of a moving obstacle.
        comfort_m: Extra distance to LiDAR returns below which a command becomes less attractive.
        comfort_weight: Cost per squared metre of missing extra distance to LiDAR returns, averaged over the path.
        obstacle_comfort_m: As `comfort_m`, for moving obstacles.
        obstacle_comfort_weight: As `comfort_weight`, for moving obstacles.
        braking_weight: Cost for each m/s that an alternative is slower than the command. Without it, a drone in front
            of a wall prefers stopping to flying around.
        lidar: The rays of the observation.

    Raises:
        ConfigurationError: If a value is out of range; the message names it.

    Example:
        >>> ShieldConfig(horizon_s=1.5, num_samples=10).clearance_m
        0.38
    """

    gain: float = VELOCITY_GAIN
    horizon_s: float = 1.2
    num_samples: int = 8
    num_directions: int = 24
    speeds_m_s: tuple[float, ...] = (MAX_SPEED_M_S / 2, MAX_SPEED_M_S)
    clearance_m: float = 0.38
    obstacle_clearance_m: float = 0.42
    comfort_m: float = 0.2
    comfort_weight: float = 20.0
    obstacle_comfort_m: float = 1.0
    obstacle_comfort_weight: float = 40.0
    braking_weight: float = 2.0
    lidar: LidarConfig = field(default_factory=LidarConfig)

    def __post_init__(self) -> None:
        require_positive("gain", self.gain)
        require_positive("horizon_s", self.horizon_s)
        require_count("num_samples", self.num_samples)
        require_count("num_directions", self.num_directions, least=3)
        require_number("clearance_m", self.clearance_m, 0.0)
        require_number("obstacle_clearance_m", self.obstacle_clearance_m, 0.0)
        require_number("comfort_m", self.comfort_m, 0.0)
        require_number("comfort_weight", self.comfort_weight, 0.0)
        require_number("obstacle_comfort_m", self.obstacle_comfort_m, 0.0)
        require_number("obstacle_comfort_weight", self.obstacle_comfort_weight, 0.0)
        require_number("braking_weight", self.braking_weight, 0.0)
        if not self.speeds_m_s:
            raise ConfigurationError("speeds_m_s is empty, expected at least one speed")
        for speed in self.speeds_m_s:
            require_positive("speeds_m_s", speed)


class Surroundings(NamedTuple):
    """What drones observe, as positions in goal coordinates relative to the drone.

    Attributes:
        velocity_m_s: Of the drone, ``[envs, 3]``.
        return_m: The nearest LiDAR return of each azimuth in the plane, ``[envs, azimuths, 2]``.
        obstacle_m: Centres of the moving obstacles, ``[envs, 5, 3]``.
        obstacle_velocity_m_s: ``[envs, 5, 3]``.
        obstacle_radius_m: Half the width of each, ``[envs, 5]``.
        standing: Which are cylinders, ``[envs, 5]``. There is no way over or under them.
        least_vz_m_s: The fastest descent that still stops above the ground, ``[envs]``.
        greatest_vz_m_s: The fastest climb that still stops below the ceiling, ``[envs]``.
    """

    velocity_m_s: torch.Tensor
    return_m: torch.Tensor
    obstacle_m: torch.Tensor
    obstacle_velocity_m_s: torch.Tensor
    obstacle_radius_m: torch.Tensor
    standing: torch.Tensor
    least_vz_m_s: torch.Tensor
    greatest_vz_m_s: torch.Tensor

    def rows(self, index: torch.Tensor) -> Surroundings:
        """Return the surroundings of some of the drones."""
        return Surroundings(*(part.index_select(0, index) for part in self))


class Clearance(NamedTuple):
    """Distance beyond the required clearance along predicted paths, ``[envs, samples, candidates]`` each.

    Attributes:
        static_m: To the nearest LiDAR return.
        moving_m: To the nearest moving obstacle, extrapolated at constant velocity.
    """

    static_m: torch.Tensor
    moving_m: torch.Tensor


def locate(observation: Observation, config: ShieldConfig) -> Surroundings:
    """Convert an observation into positions.

    Args:
        observation: What the drones observe.
        config: The rays of the LiDAR, and the gain for the limits of the vertical speed.

    Returns:
        New tensors on the device of the observation.
    """
    returns, height_m = _returns(observation.lidar[:, 0], config.lidar)
    features = observation.dynamic_obstacle[:, 0]
    distance_m = features[..., 3:5].norm(dim=2, keepdim=True)
    # All features of an empty slot are 0. An obstacle exactly at the drone's position has collided already.
    absent = (features[..., :5] == 0).all(2, keepdim=True)
    category = features[..., 8]
    least_vz, greatest_vz = _vertical_limits(observation.state, height_m, config.gain)
    return Surroundings(
        velocity_m_s=observation.state[:, 5:8],
        return_m=returns,
        obstacle_m=torch.where(absent, ABSENT_M, features[..., :3] * distance_m),
        obstacle_velocity_m_s=features[..., 5:8],
        obstacle_radius_m=(category + 1.0) * (MAX_WIDTH_M / NUM_WIDTHS / 2),
        standing=features[..., 9] == 0,
        least_vz_m_s=least_vz,
        greatest_vz_m_s=greatest_vz,
    )


def predict_clearance(
    around: Surroundings, plane_m_s: torch.Tensor, climb_m_s: torch.Tensor, config: ShieldConfig
) -> Clearance:
    """Predict the clearance of drones that follow each of several commands.

    Velocities approach the command with a first-order lag, and obstacles keep their velocity. Memory is
    ``envs * samples * candidates * azimuths`` floats.

    Args:
        around: What is around the drones.
        plane_m_s: Velocities in the plane, ``[envs, candidates, 2]``.
        climb_m_s: The vertical velocity, which all candidates of a drone share, ``[envs]``.
        config: Response, horizon and clearances.
    """
    step_s = config.horizon_s / config.num_samples
    time_s = (torch.arange(1, config.num_samples + 1, device=plane_m_s.device) * step_s).unsqueeze(1)
    # Closed form of the lag: the initial velocity decays while the command builds up.
    coasting_s = (1.0 - torch.exp(-config.gain * time_s)) / config.gain
    driven_s = time_s - coasting_s
    velocity = around.velocity_m_s[:, :, None, None]
    # Candidates are the last dimension, and coordinates are separate tensors: this makes the loops below long.
    x = velocity[:, 0] * coasting_s + plane_m_s[:, None, :, 0] * driven_s
    y = velocity[:, 1] * coasting_s + plane_m_s[:, None, :, 1] * driven_s
    z = velocity[:, 2] * coasting_s + climb_m_s[:, None, None] * driven_s
    moving = _obstacle_clearance(around, x, y, z, time_s)
    return Clearance(
        _return_distance(around.return_m, x, y) - config.clearance_m,
        moving - config.obstacle_clearance_m,
    )


def _returns(lidar: torch.Tensor, config: LidarConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Locate the nearest return of each azimuth, and estimate how high the drone is.

    Boxes stand on the ground, so a return at any pitch blocks the plane at its place. Returns from the ground do not.

    Args:
        lidar: Range minus distance, ``[envs, azimuths, pitches]``.
        config: The rays.

    Returns:
        Positions in the plane, ``[envs, azimuths, 2]``, and a lower bound of the height, ``[envs]``.
    """
    distance = config.range_m - lidar
    pitch = torch.tensor(config.pitches_rad, dtype=lidar.dtype, device=lidar.device)
    depth = -distance * pitch.sin()
    # The ray that reaches deepest either ends on the ground or sees no ground within its range.
    height = depth.flatten(1).amax(1)
    ground = (depth >= height[:, None, None] - GROUND_SLACK_M) & (pitch < 0)
    missing = distance >= config.range_m - NO_RETURN_M
    nearest = (distance * pitch.cos()).masked_fill(ground | missing, ABSENT_M).amin(2)
    azimuth = torch.arange(config.horizontal_beams, device=lidar.device) * (2 * math.pi / config.horizontal_beams)
    return torch.stack([nearest * azimuth.cos(), nearest * azimuth.sin()], 2), height


def _vertical_limits(state: torch.Tensor, seen_m: torch.Tensor, gain: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Limit the vertical command so that drones stop above the floor and below the ceiling.

    Args:
        state: The state of the observation, ``[envs, 8]``.
        seen_m: A lower bound of the height from the LiDAR, ``[envs]``.
        gain: Of the drone's response.

    Returns:
        The least and the greatest command, ``[envs]`` each.
    """
    goal_above_m = state[:, 4]
    # A drone that stops now still coasts this far.
    coasting_m = state[:, 7] / gain
    lowest_goal_m, highest_goal_m = GOAL_HEIGHTS_M
    height_m = torch.maximum(seen_m, lowest_goal_m - goal_above_m)
    below_m = height_m + coasting_m - FLOOR_M - HEIGHT_MARGIN_M
    above_m = CEILING_M - HEIGHT_MARGIN_M - highest_goal_m + goal_above_m - coasting_m
    # A drone may start far above a low goal. That is no reason to descend, only one not to climb.
    return -STOPPING_GAIN * gain * below_m, STOPPING_GAIN * gain * above_m.clamp(min=0.0)


def _return_distance(return_m: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the distance in the plane from paths ``[envs, samples, candidates]`` to the nearest return."""
    # |p - q|^2 = |p|^2 + (|q|^2 - 2 p q): the bracket is one matrix product, by far the cheapest way to all pairs.
    path = torch.stack([x, y, torch.ones_like(x)], 1).flatten(2)
    length = return_m.square().sum(2, keepdim=True)
    pairs = torch.bmm(torch.cat([return_m * -2.0, length], 2), path)
    squared = x.square() + y.square() + pairs.amin(1).view_as(x)
    return squared.clamp(min=0.0).sqrt()


def _obstacle_clearance(
    around: Surroundings, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, time_s: torch.Tensor
) -> torch.Tensor:
    """Return the distance from paths ``[envs, samples, candidates]`` to the nearest obstacle, beside or above it."""
    position = around.obstacle_m[..., None, None]
    velocity = around.obstacle_velocity_m_s[..., None, None]
    place_x, place_y, place_z = (position + velocity * time_s).unbind(2)
    squared = (x.unsqueeze(1) - place_x).square() + (y.unsqueeze(1) - place_y).square()
    beside = squared.sqrt() - around.obstacle_radius_m[..., None, None]
    beyond = (z.unsqueeze(1) - place_z).abs() - (CUBOID_HEIGHT_M / 2 + DRONE_RADIUS_M + VERTICAL_MARGIN_M)
    beyond = beyond.masked_fill(around.standing[..., None, None], -ABSENT_M)
    return torch.maximum(beside, beyond).amin(1)
