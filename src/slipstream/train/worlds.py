"""What is stored beside rollouts of the simulator: its world, and where the obstacles were in each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.nav.env import NavigationEnv
from slipstream.nav.simulation import Simulation
from slipstream.run.world import Array, World, pad_boxes


class ObstacleTracks:
    """Keeps where the moving obstacles of an environment were in the latest rollouts.

    A collector may be ahead of the trainer that saves a rollout, so several rollouts are kept.

    Args:
        env: The environment.
        num_kept: How many rollouts are kept.
    """

    def __init__(self, env: NavigationEnv, num_kept: int) -> None:
        self._env = env
        self._num_kept = num_kept
        self._tracks: dict[int, list[torch.Tensor]] = {}

    def begin(self, rollout: int) -> None:
        """Start the track of a rollout; called where it is collected, before its first step."""
        track: list[torch.Tensor] = []
        self._env.simulation.obstacle_track = track
        self._tracks[rollout] = track
        # The trainer may read another entry at the same time, but never the oldest one that is dropped here.
        for number in sorted(self._tracks)[: -self._num_kept]:
            del self._tracks[number]

    def world(self, rollout: int) -> World | None:
        """Return the world of a rollout; None if its track is unknown, as after a resume."""
        track = self._tracks.get(rollout)
        if not track:
            return None
        return world_of(self._env.simulation, track)


def world_of(simulation: Simulation, track: Sequence[torch.Tensor]) -> World:
    """Return the world of a rollout.

    Args:
        simulation: Where it was collected.
        track: Where the obstacles were before each step and after the last one; see `Simulation.obstacle_track`.
    """
    config = simulation.config
    num_maps = len(simulation.maps)
    positions = torch.stack(list(track)).cpu().float()
    num_moments = len(positions)
    # The obstacles of all maps are in one tensor, map after map.
    by_map = positions.view(num_moments, num_maps, -1, 3).transpose(0, 1).contiguous()
    num_obstacles = by_map.shape[2]
    obstacles = simulation.obstacles
    return World(
        dt_s=config.dt_s,
        half_extent_m=config.map_half_extent_m,
        lidar_range_m=config.lidar.range_m,
        map_seeds=list(config.map_seeds),
        obstacle_widths_m=obstacles.width_m[:num_obstacles].tolist(),
        obstacle_is_cylinder=obstacles.standing[:num_obstacles].tolist(),
        boxes=_boxes_of(simulation),
        obstacles=by_map.numpy(),
    )


def _boxes_of(simulation: Simulation) -> Array:
    """Return the boxes of all maps, ``[maps, boxes, 5]``."""
    most = max(map(len, simulation.maps))
    boxes = []
    for one in simulation.maps:
        corners = torch.cat([one.low_m, one.high_m, one.height_m.unsqueeze(1)], 1)
        boxes.append(pad_boxes(corners.cpu().float().numpy()[np.newaxis], most))
    return np.concatenate(boxes)
