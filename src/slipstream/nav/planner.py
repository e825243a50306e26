"""`Planner`: fly to the goal without learning, as a reference for every learned policy."""

from __future__ import annotations

import torch

from slipstream.checks import require_positive
from slipstream.nav.avoidance import ShieldConfig
from slipstream.nav.frame import MAX_SPEED_M_S
from slipstream.nav.observation import Observation
from slipstream.nav.shield import Shield

APPROACH_GAIN = 1.0  # m/s for each metre to the goal: slows down only close to it
MAX_CLIMB_M_S = 1.0


class Planner:
    """Flies straight to the goal and lets a `Shield` avoid obstacles.

    Like the shield, the planner uses only the observation, has no state, and is deterministic. It does not map its
    surroundings, so it can get stuck in a dead end.

    Args:
        config: Look-ahead, clearances and weights of the shield.
        speed_m_s: Cruising speed in the plane.

    Raises:
        ConfigurationError: If the speed is not positive.

    Example:
        >>> from slipstream.nav import NavigationConfig, Simulation
        >>> simulation = Simulation(NavigationConfig(num_envs=2, start="line"))
        >>> Planner()(simulation.reset()).shape
        torch.Size([2, 3])
    """

    def __init__(self, config: ShieldConfig | None = None, speed_m_s: float = MAX_SPEED_M_S) -> None:
        require_positive("speed_m_s", speed_m_s)
        self.shield = Shield(config)
        self.speed_m_s = speed_m_s

    @torch.no_grad()
    def __call__(self, observation: Observation) -> torch.Tensor:
        """Return velocity commands.

        Args:
            observation: What the drones observe now.

        Returns:
            Velocities in goal coordinates, ``[envs, 3]``, on the same device.
        """
        toward = observation.state[:, :2]
        direction = toward / toward.norm(dim=1, keepdim=True).clamp(min=1e-6)
        speed = (observation.state[:, 3:4] * APPROACH_GAIN).clamp(max=self.speed_m_s)
        climb = (observation.state[:, 4:5] * APPROACH_GAIN).clamp(-MAX_CLIMB_M_S, MAX_CLIMB_M_S)
        return self.shield(observation, torch.cat([direction * speed, climb], 1))
