"""`Shield`: replace velocity commands that would lead to a collision."""

from __future__ import annotations

import math

import torch

from slipstream.nav.avoidance import ShieldConfig, Surroundings, locate, predict_clearance
from slipstream.nav.observation import Observation

UNSAFE_COST = 1e6  # more than any safe command costs
LATE_WEIGHT = 0.3  # of a violation at the horizon, relative to one now: there is still time to react
BLOCK_ROWS = 64  # drones per block: bounds memory to a few MB, which stays in the cache


class Shield:
    """Replaces unsafe velocity commands by the best safe alternative.

    The shield samples velocities in the plane (directions x speeds, and rest), predicts the path of each, and chooses
    the one with the lowest cost: distance to the command, plus the cost of braking and of passing close. A command
    whose path stays away from everything passes unchanged, bit for bit. If no command is safe, the one that violates
    the clearance least and latest wins, so a drone that is already too close moves away.

    The vertical command is kept, limited so that the drone stops above the ground and below the ceiling. Drones do not
    observe their altitude: the LiDAR sees the ground only from less than 0.7 m above it (with NavRL's rays), and goals
    are at heights from 0.5 to 2.5 m. At or below the height of its goal, a drone descends at 0.5 m/s at most.

    The shield uses only the observation. It has no state and no randomness, and treats every drone independently.

    Args:
        config: Look-ahead, clearances and weights.

    Example:
        >>> from slipstream.nav import NavigationConfig, Simulation
        >>> simulation = Simulation(NavigationConfig(num_envs=2, num_static_obstacles=0, num_dynamic_obstacles=0))
        >>> command = torch.tensor([[2.0, 0.0, 0.0], [1.0, -0.5, 0.1]])
        >>> torch.equal(Shield()(simulation.reset(), command), command)
        True
    """

    def __init__(self, config: ShieldConfig | None = None) -> None:
        if config is None:
            config = ShieldConfig()
        self.config = config

    @torch.no_grad()
    def __call__(self, observation: Observation, command_m_s: torch.Tensor) -> torch.Tensor:
        """Return safe commands.

        Args:
            observation: What the drones observe now.
            command_m_s: The desired velocities in goal coordinates, ``[envs, 3]``. One that is not finite counts as 0.

        Returns:
            Velocities in goal coordinates, ``[envs, 3]``, as a new tensor on the same device.
        """
        around = locate(observation, self.config)
        # No comparison below holds for NaN, so such a command would pass.
        is_finite = command_m_s.isfinite().all(1, keepdim=True)
        command_m_s = torch.where(is_finite, command_m_s, torch.zeros_like(command_m_s))
        climb = torch.clamp(command_m_s[:, 2], around.least_vz_m_s, around.greatest_vz_m_s)
        plane = command_m_s[:, :2].clone()
        # Trying alternatives only where the command comes close to something saves work.
        cost = self._cost(around, plane.unsqueeze(1), plane, climb)
        rows = (cost[:, 0] > 0).nonzero().squeeze(1)
        for first in range(0, len(rows), BLOCK_ROWS):
            block = rows[first : first + BLOCK_ROWS]
            better = self._best(around.rows(block), plane.index_select(0, block), climb.index_select(0, block))
            plane.index_copy_(0, block, better)
        return torch.cat([plane, climb.unsqueeze(1)], 1)

    def _best(self, around: Surroundings, plane: torch.Tensor, climb: torch.Tensor) -> torch.Tensor:
        """Return the candidate with the lowest cost for each command in the plane, ``[envs, 2]``."""
        candidates = self._candidates(plane)
        best = self._cost(around, candidates, plane, climb).argmin(1)
        return candidates[torch.arange(len(plane), device=plane.device), best]

    def _candidates(self, plane: torch.Tensor) -> torch.Tensor:
        """Return the command, rest, and all sampled velocities in the plane, ``[envs, candidates, 2]``."""
        count = self.config.num_directions
        angle = torch.arange(count, device=plane.device) * (2 * math.pi / count)
        direction = torch.stack([angle.cos(), angle.sin()], 1)
        speed = torch.tensor(self.config.speeds_m_s, device=plane.device)
        ring = (direction * speed[:, None, None]).flatten(0, 1).to(plane.dtype)
        sampled = torch.cat([torch.zeros_like(ring[:1]), ring])
        return torch.cat([plane.unsqueeze(1), sampled.expand(len(plane), -1, 2)], 1)

    def _cost(
        self, around: Surroundings, candidates: torch.Tensor, plane: torch.Tensor, climb: torch.Tensor
    ) -> torch.Tensor:
        """Return the cost of candidates, ``[envs, candidates]``; 0 for a command that needs no alternative."""
        config = self.config
        clearance = predict_clearance(around, candidates, climb, config)
        deviation = (candidates - plane.unsqueeze(1)).square().sum(2)
        braking = (plane.norm(dim=1, keepdim=True) - candidates.norm(dim=2)).clamp(min=0.0)
        near = (config.comfort_m - clearance.static_m).clamp(min=0.0).square().mean(1)
        near_obstacle = (config.obstacle_comfort_m - clearance.moving_m).clamp(min=0.0).square().mean(1)
        cost = deviation + config.braking_weight * braking
        cost = cost + config.comfort_weight * near + config.obstacle_comfort_weight * near_obstacle
        missing = -torch.minimum(clearance.static_m, clearance.moving_m).clamp(max=0.0)
        weight = torch.linspace(1.0, LATE_WEIGHT, config.num_samples, device=missing.device)
        violation = (missing * weight.unsqueeze(1)).sum(1)
        return torch.where(violation > 0, UNSAFE_COST * (1.0 + violation), cost)
