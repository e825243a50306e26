"""`NavigationEnv`: the simulation as a TorchRL environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from slipstream.text import install_hint

try:
    from tensordict import TensorDict, TensorDictBase
    from torchrl.data import Bounded, Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase
except ImportError as error:
    raise ImportError(
        f"NavigationEnv needs torchrl, which is not installed: {install_hint('train')}, or torchrl by itself"
    ) from error

from slipstream.nav.config import NavigationConfig
from slipstream.nav.frame import MAX_SPEED_M_S
from slipstream.nav.observation import NUM_NEAREST, OBSTACLE_FEATURES, STATE_FEATURES
from slipstream.nav.simulation import Simulation
from slipstream.nav.world import StaticMap

STATS = ("return", "episode_len", "reach_goal", "collision", "truncated")
FLAGS = ("static_collision", "dynamic_collision", "out_of_bounds", "reached_goal")


class NavigationEnv(EnvBase):  # type: ignore[misc, unused-ignore]
    """Drones that fly to their goals through obstacles: NavRL's task, keys and shapes.

    Reads ``("agents", "action")``: velocities in m/s in the goal frame, ``[envs, 3]``; those of a policy that emits
    values in [0, 1] go through `velocity_from_unit` first. Writes ``("agents", "observation", ...)`` (see
    `Observation`), ``("agents", "reward")``, ``terminated``, ``truncated``, ``done``, and besides:

    - ``("stats", ...)``, as floats: ``return``, ``episode_len``, ``reach_goal`` (ever in this episode), ``collision``,
      ``truncated``: those of whole episodes where ``done``;
    - ``("info", ...)``: ``position``, and as bools of this very step ``static_collision``, ``dynamic_collision``,
      ``out_of_bounds`` (too low or too high), ``reached_goal``.

    What it returns is never its own memory. Environments that are done fly on until reset; a partial reset (the
    ``_reset`` key) leaves all others, and the moving obstacles, as they are. The generators are its own, so the global
    seed does not matter. `state_dict` is all it takes to continue exactly, bit for bit on the CPU.

    Args:
        config: World, drones and rules.
        device: Where it runs and what it returns lives.
        boxes: What stands in the world, instead of the map of ``config.map_seed``; one for each map.

    Attributes:
        simulation: What the environment is a view of: map, obstacles, drones.

    Raises:
        ConfigurationError: If the map cannot hold the requested number of boxes.
        ImportError: If TorchRL is not installed.

    Example:
        >>> env = NavigationEnv(NavigationConfig(num_envs=2, num_static_obstacles=10))
        >>> env.rollout(3)["next", "agents", "reward"].shape
        torch.Size([2, 3, 1])
    """

    def __init__(
        self,
        config: NavigationConfig | None = None,
        device: torch.device | str = "cpu",
        *,
        boxes: StaticMap | Sequence[StaticMap] | None = None,
    ) -> None:
        config = NavigationConfig() if config is None else config
        super().__init__(device=device, batch_size=torch.Size([config.num_envs]))
        self.config = config
        self.simulation = Simulation(config, device, boxes)
        self._make_specs()

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return copies of all that changes: drones, goals, clocks, obstacles, generators."""
        return self.simulation.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Continue where an environment of the same configuration was.

        Args:
            state_dict: From its `state_dict`; copied.

        Raises:
            StateMismatchError: If it is of another number of environments or obstacles.
        """
        self.simulation.load_state_dict(state_dict)

    def to(self, device: torch.device | str) -> Self:
        """Move to another device, and keep the state."""
        if torch.device(device) != self.simulation.device:
            state = self.simulation.state_dict()
            self.simulation = Simulation(self.config, device, self.simulation.maps)
            self.simulation.load_state_dict(state)
        moved: Self = super().to(device)
        return moved

    def _make_specs(self) -> None:
        shape, device, lidar = self.batch_size, self.device, self.config.lidar

        def real(*size: int) -> Any:
            return Unbounded((*shape, *size), device=device, dtype=torch.float32)

        def flag() -> Any:
            return Categorical(2, (*shape, 1), device=device, dtype=torch.bool)

        def group(**parts: Any) -> Any:
            return Composite(parts, shape=shape, device=device)

        observation = group(
            state=real(STATE_FEATURES),
            lidar=real(1, lidar.horizontal_beams, lidar.vertical_beams),
            direction=real(1, 3),
            dynamic_obstacle=real(1, NUM_NEAREST, OBSTACLE_FEATURES),
        )
        stats = {name: real(1) for name in STATS}
        flags = {name: flag() for name in FLAGS}
        self.observation_spec = group(
            agents=group(observation=observation), stats=group(**stats), info=group(position=real(3), **flags)
        )
        limit = torch.full((*shape, 3), MAX_SPEED_M_S, device=device)
        self.action_spec = group(agents=group(action=Bounded(-limit, limit, (*shape, 3), device, torch.float32)))
        self.reward_spec = group(agents=group(reward=real(1)))
        self.done_spec = group(done=flag(), terminated=flag(), truncated=flag())

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        observation = self.simulation.reset(None if mask is None else mask.reshape(-1))
        nothing = torch.zeros(*self.batch_size, 1, device=self.device)
        info = {name: nothing.bool() for name in FLAGS}
        return self._pack(
            {
                "agents": {"observation": observation._asdict()},
                "stats": {name: nothing.clone() for name in STATS},
                "info": {"position": self.simulation.drone.position_m.clone(), **info},
                **{name: nothing.bool() for name in ("done", "terminated", "truncated")},
            }
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcome = self.simulation.step(tensordict.get(("agents", "action")))
        terminated, truncated = outcome.terminated.unsqueeze(1), outcome.truncated.unsqueeze(1)
        verdict = {name: part.unsqueeze(1) for name, part in outcome.verdict._asdict().items()}
        progress = {name: part.unsqueeze(1).float() for name, part in outcome.progress._asdict().items()}
        collision = verdict["static_collision"] | verdict["dynamic_collision"]
        return self._pack(
            {
                "agents": {"observation": outcome.observation._asdict(), "reward": verdict["reward"]},
                "stats": {
                    "return": progress["returns"],
                    "episode_len": progress["steps"],
                    "reach_goal": progress["reached"],
                    "collision": collision.float(),
                    "truncated": truncated.float(),
                },
                "info": {"position": outcome.position_m, **{name: verdict[name] for name in FLAGS}},
                "terminated": terminated,
                "truncated": truncated,
                "done": terminated | truncated,
            }
        )

    def _set_seed(self, seed: int | None) -> None:
        """Seed starts, goals and the ways of obstacles, from the next reset on; the map stays."""
        self.simulation.seed(torch.Generator().seed() if seed is None else seed)

    def _pack(self, parts: dict[str, Any]) -> TensorDictBase:
        return TensorDict(parts, batch_size=self.batch_size, device=self.device)
