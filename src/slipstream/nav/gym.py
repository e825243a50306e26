"""`NavigationVectorEnv`: the simulation as a Gymnasium vector environment.

Importing this module registers it, which Gymnasium does by itself for a name with a module in front::

    gymnasium.make_vec("slipstream.nav.gym:slipstream/Navigation-v0", num_envs=64, dynamics="lag", dt_s=0.1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slipstream.text import install_hint

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError as error:
    raise ImportError(f"NavigationVectorEnv needs gymnasium, which is not installed: {install_hint('gym')}") from error

from slipstream.nav.config import NavigationConfig
from slipstream.nav.frame import MAX_SPEED_M_S
from slipstream.nav.observation import Observation
from slipstream.nav.simulation import Simulation
from slipstream.nav.world import StaticMap

ENV_ID = "slipstream/Navigation-v0"

Observations = dict[str, np.ndarray[Any, Any]]
Array = np.ndarray[Any, Any]


class NavigationVectorEnv(VectorEnv[Observations, Array, Array]):
    """Drones that fly to their goals through obstacles, for libraries that speak Gymnasium.

    Observations are dicts of NumPy arrays with the names and shapes of `Observation`; actions are velocities in m/s in
    the goal frame. Environments that are done are reset by the next step, which ignores their action (Gymnasium's
    ``NEXT_STEP``): so what a step returns with ``terminated`` or ``truncated`` is the end of that episode. ``infos``
    holds ``position``, ``static_collision``, ``dynamic_collision``, ``out_of_bounds``, ``reached_goal``.

    Args:
        num_envs: How many drones fly at once.
        device: Where the simulation runs.
        boxes: What stands in the world, instead of the map of ``map_seed``; one for each map.
        **settings: Any other field of `NavigationConfig`.

    Raises:
        ConfigurationError: If a setting is out of range.
        ImportError: If Gymnasium is not installed.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        device: torch.device | str = "cpu",
        boxes: StaticMap | Sequence[StaticMap] | None = None,
        **settings: Any,
    ) -> None:
        self.simulation = Simulation(NavigationConfig(num_envs=num_envs, **settings), device, boxes)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Dict(
            {
                name: gymnasium.spaces.Box(-np.inf, np.inf, tuple(part.shape[1:]), np.float32)
                for name, part in self.simulation.reset()._asdict().items()
            }
        )
        self.single_action_space = gymnasium.spaces.Box(-MAX_SPEED_M_S, MAX_SPEED_M_S, (3,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._done = torch.zeros(num_envs, dtype=torch.bool, device=self.simulation.device)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin new episodes everywhere, with the moving obstacles at their origins.

        Args:
            seed: Of starts, goals and the ways of obstacles; without it, the generators continue.
            options: Not used.

        Returns:
            What the drones see, and where they are.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.simulation.seed(seed)
        observation = self.simulation.reset()
        self._done = torch.zeros_like(self._done)
        return _to_numpy(observation), {"position": self.simulation.drone.position_m.cpu().numpy().copy()}

    def step(self, actions: Array) -> tuple[Observations, Array, Array, Array, dict[str, Any]]:
        """Advance by one step; where an episode had ended, begin a new one instead.

        Args:
            actions: Velocities in the goal frame, m/s, ``[envs, 3]``.

        Returns:
            Observations, rewards, terminated, truncated, infos.
        """
        device, fresh = self.simulation.device, self._done
        outcome = self.simulation.step(torch.as_tensor(np.asarray(actions, dtype=np.float32), device=device))
        observation, verdict, position = outcome.observation, outcome.verdict, outcome.position_m
        if bool(fresh.any()):
            begun = self.simulation.reset(fresh)
            observation = Observation(*(_choose(fresh, new, old) for new, old in zip(begun, observation, strict=True)))
            position = _choose(fresh, self.simulation.drone.position_m, position)
        terminated, truncated = outcome.terminated & ~fresh, outcome.truncated & ~fresh
        self._done = terminated | truncated
        names = ("static_collision", "dynamic_collision", "out_of_bounds", "reached_goal")
        infos = {name: (getattr(verdict, name) & ~fresh).cpu().numpy() for name in names}
        infos["position"] = position.cpu().numpy()
        rewards = verdict.reward.masked_fill(fresh, 0.0).cpu().numpy()
        return _to_numpy(observation), rewards, terminated.cpu().numpy(), truncated.cpu().numpy(), infos


def _to_numpy(observation: Observation) -> Observations:
    return {name: part.cpu().numpy() for name, part in observation._asdict().items()}


def _choose(mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.view(-1, *(1,) * (new.ndim - 1)), new, old)


if ENV_ID not in gymnasium.registry:
    gymnasium.register(ENV_ID, vector_entry_point=f"{__name__}:{NavigationVectorEnv.__name__}")
