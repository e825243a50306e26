"""The moving part of the world: obstacles that wander around their origins, the same for all drones."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from slipstream.nav.config import NUM_KINDS, NavigationConfig

NUM_WIDTHS = NUM_KINDS // 2
MAX_WIDTH_M = 1.0
CUBOID_HEIGHT_M = 1.0
CYLINDER_HEIGHT_M = 5.0
CEILING_M = 4.5  # highest centre of a flying cuboid
ARRIVAL_M = 0.5
AIM_PERIOD_S = 2.0
ORIGIN_SEED = 0x0B57AC1E  # mixed into the map's seed: origins and boxes need not be alike


class DynamicObstacles:
    """Obstacles in motion; a state that `move` advances and `state_dict` copies.

    On each map, one eighth each have the widths 0.25, 0.5, 0.75 and 1 m as flying cuboids 1 m high, and one eighth each
    the same widths as standing cylinders 5 m high. Each heads for a goal near its origin. A new goal is drawn on
    arrival, but direction and speed only every 2 s, so obstacles overshoot by up to 3 m. That is how NavRL's obstacles
    move, and it applies to height too: a flying cuboid may dip below the ground, where it is harmless, or rise above
    the drones' ceiling. Random numbers come from the CPU, so a seed gives the same paths on every device.

    Attributes:
        num_maps: Number of maps. The obstacles of all maps are in one row, map after map.
        width_m: Width of each, ``[obstacles]``.
        height_m: Height of each.
        category: The width as 0 to 3.
        standing: Whether it is a cylinder.
        origin_m: ``[obstacles, 3]``; of the map, not of the seed.
        position_m: Centres, ``[obstacles, 3]``.
        velocity_m_s: ``[obstacles, 3]``.

    Args:
        config: How many, on which map, and how long a step is.
        generator: Where the random numbers of `restart` and `move` come from; on the CPU.
        device: Where the tensors live.
    """

    def __init__(self, config: NavigationConfig, generator: torch.Generator, device: torch.device) -> None:
        self.num_maps = config.num_maps
        count = config.num_dynamic_obstacles
        self._generator = generator
        self._dt_s = config.dt_s
        self._aim_every = max(1, int(AIM_PERIOD_S / config.dt_s))
        self._tick = 0
        self._warmup_steps = round(config.obstacle_warmup_s / config.dt_s)
        kind = torch.arange(count, device=device).repeat(self.num_maps) // max(count // NUM_KINDS, 1)
        self.category = kind % NUM_WIDTHS
        self.standing = kind >= NUM_WIDTHS
        self.width_m = (self.category + 1) * (MAX_WIDTH_M / NUM_WIDTHS)
        self.height_m = torch.where(self.standing, CYLINDER_HEIGHT_M, CUBOID_HEIGHT_M)
        half = config.map_half_extent_m
        self.origin_m = torch.cat([draw_origins(count, half, seed) for seed in config.map_seeds]).to(device)
        self._low = torch.tensor([-half, -half, 0.0], device=device)
        self._high = torch.tensor([half, half, CEILING_M], device=device)
        reach = torch.tensor(config.obstacle_range_m, device=device)
        self._wander_low = torch.floor(-reach)
        self._wander_span = torch.floor(reach) - self._wander_low
        self._speed_range_m_s = config.obstacle_speed_m_s
        self.position_m = self._goal_m = self.velocity_m_s = self.origin_m
        self.restart()

    def __len__(self) -> int:
        return len(self.origin_m)

    def restart(self) -> None:
        """Put every obstacle back to its origin, with a new goal and speed, and let it move for the warm-up time."""
        draws = self._draw()
        self._tick = 0
        self.position_m = self.origin_m.clone()
        self._goal_m = self._goals(draws)
        self.velocity_m_s = self._aim(draws)
        for _ in range(self._warmup_steps):
            self.move()

    def move(self) -> None:
        """Advance by one step."""
        draws = self._draw()
        self._tick += 1
        arrived = (self.position_m - self._goal_m).norm(dim=1, keepdim=True) < ARRIVAL_M
        self._goal_m = torch.where(arrived, self._goals(draws), self._goal_m)
        if self._tick % self._aim_every == 0:
            self.velocity_m_s = self._aim(draws)
        self.position_m = self.position_m + self.velocity_m_s * self._dt_s

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that changes, but not the generator."""
        return {
            "position_m": self.position_m.clone(),
            "goal_m": self._goal_m.clone(),
            "velocity_m_s": self.velocity_m_s.clone(),
            "tick": self._tick,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all that changes, by copy."""
        device = self.origin_m.device
        self.position_m = state["position_m"].to(device, copy=True)
        self._goal_m = state["goal_m"].to(device, copy=True)
        self.velocity_m_s = state["velocity_m_s"].to(device, copy=True)
        self._tick = int(state["tick"])

    def _draw(self) -> torch.Tensor:
        """Return four numbers in [0, 1) for each: as many in every step, whatever becomes of them."""
        return torch.rand(len(self), 4, generator=self._generator).to(self.origin_m.device)

    def _goals(self, draws: torch.Tensor) -> torch.Tensor:
        goal = self.origin_m + self._wander_low + draws[:, :3] * self._wander_span
        goal = torch.minimum(torch.maximum(goal, self._low), self._high)
        goal[:, 2] = torch.where(self.standing, CYLINDER_HEIGHT_M / 2, goal[:, 2])
        return goal

    def _aim(self, draws: torch.Tensor) -> torch.Tensor:
        slowest, fastest = self._speed_range_m_s
        offset = self._goal_m - self.position_m
        direction: torch.Tensor = offset / offset.norm(dim=1, keepdim=True).clamp(min=1e-6)
        return direction * (slowest + (fastest - slowest) * draws[:, 3:])


def draw_origins(count: int, half_extent_m: float, seed: int) -> torch.Tensor:
    """Draw where obstacles are at home: spread evenly, cuboids at any height, cylinders on the ground.

    Args:
        count: How many; the second half are cylinders.
        half_extent_m: The field reaches from minus to plus this in x and y.
        seed: Of the map.

    Returns:
        Centres, ``[count, 3]``, on the CPU.
    """
    return _draw_origins(count, half_extent_m, seed).clone()


@functools.lru_cache(maxsize=512)  # evaluations use the same maps again and again; one takes 1 kB
def _draw_origins(count: int, half_extent_m: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed ^ ORIGIN_SEED)
    origins = torch.zeros(count, 3)
    even_m = 2 * half_extent_m / max(count, 1) ** 0.5
    for index in range(count):
        spacing_m = even_m
        while True:  # ends: the spacing shrinks until anything goes
            places = (torch.rand(64, 2, generator=generator) * 2 - 1) * half_extent_m
            free = (torch.cdist(places, origins[:index, :2]) > spacing_m).all(1).nonzero()
            if len(free):
                origins[index, :2] = places[free[0, 0]]
                break
            spacing_m *= 0.8
    origins[:, 2] = torch.rand(count, generator=generator) * CEILING_M
    origins[count // 2 :, 2] = CYLINDER_HEIGHT_M / 2
    return origins
