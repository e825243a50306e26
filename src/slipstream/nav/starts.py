"""Where episodes start and where their goals are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.nav.config import NavigationConfig
from slipstream.nav.world import StaticMap

START_HEIGHTS_M = (0.5, 2.5)
LINE_HALF_WIDTH_M = 16.0
LINE_HEIGHT_M = 2.0
BOX_CLEARANCE_M = 0.8
OBSTACLE_CLEARANCE_M = 1.2
LEAST_FLIGHT_M = 8.0  # from a start inside the field to the goal
CANDIDATES = 16  # places tried for a start inside the field; four in five tries are free


def border_tasks(draws: torch.Tensor, half_extent_m: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts and goals anywhere on the border of a square, ``[tasks, 3]`` each.

    Args:
        draws: Numbers in [0, 1): position along the border and height, for start and goal, ``[2, 2, tasks]``.
        half_extent_m: Half the side of the square.
    """
    start, goal = _on_border(draws, half_extent_m)
    return start, goal


def through_tasks(draws: torch.Tensor, half_extent_m: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts anywhere on the border of a square, and goals anywhere on the opposite side.

    Args:
        draws: As for `border_tasks`.
        half_extent_m: Half the side of the square.
    """
    start_side = (draws[0, 0] * 4).floor()
    opposite_side = start_side + 1 - 2 * (start_side % 2)  # 0 and 1 face each other, 2 and 3 do
    along = draws[0, 1].clamp(max=1 - 1e-6)  # or rounding could take it around the corner
    around = torch.stack([draws[0, 0], (opposite_side + along) / 4])
    start, goal = _on_border(torch.stack([around, draws[1]]), half_extent_m)
    return start, goal


def line_tasks(config: NavigationConfig, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts spread along the side at the highest y, and goals straight across the field.

    Args:
        config: The field, and how many drones share a map.
        rows: The drones, on the CPU.
    """
    per_map = config.num_envs // config.num_maps
    part, parts = config.line_part
    places = per_map * parts
    x = torch.zeros(1)
    if places > 1:
        x = torch.linspace(-1.0, 1.0, places)
    x = (x * (LINE_HALF_WIDTH_M / 20.0 * config.map_half_extent_m))[part * per_map + rows % per_map]
    y = torch.full_like(x, config.start_half_extent_m)
    z = torch.full_like(x, LINE_HEIGHT_M)
    return torch.stack([x, y, z], 1), torch.stack([x, -y, z], 1)


def inside_starts(
    draws: torch.Tensor,
    goal: torch.Tensor,
    maps: Sequence[StaticMap],
    map_index: torch.Tensor | None,
    obstacles_m: torch.Tensor,
    half_extent_m: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return free places inside the field, ``[tasks, 3]``, and whether one was found, ``[tasks]``.

    A place is free if it is 0.8 m from any box, 1.2 m from any moving obstacle, and 8 m from the goal, all in the
    plane.

    Args:
        draws: Numbers in [0, 1): x, y and height of each candidate, ``[3, tasks, candidates]``.
        goal: Goals of the tasks.
        maps: The boxes of each map.
        map_index: Which map each task is on; None if there is one.
        obstacles_m: Positions of the moving obstacles, ``[maps, obstacles, 3]``.
        half_extent_m: The field extends from minus to plus this in x and y.
    """
    place = (draws[:2] * 2 - 1).permute(1, 2, 0) * half_extent_m
    is_free = (place - goal[:, None, :2]).norm(dim=2) > LEAST_FLIGHT_M
    for number, boxes in enumerate(maps):
        # With one map, an index would only copy everything.
        rows: torch.Tensor | slice = slice(None)
        if map_index is not None:
            rows = (map_index == number).nonzero().squeeze(1)
        here = place[rows]
        is_free[rows] &= _clear_of_boxes(here, boxes) & _clear_of_obstacles(here, obstacles_m[number])
    first = is_free.float().argmax(1)  # the first one that is free
    row = torch.arange(len(first), device=first.device)
    height = _height(draws[2])[row, first]
    chosen = torch.cat([place[row, first], height.unsqueeze(1)], 1)
    return chosen, is_free.any(1)


def _clear_of_boxes(place: torch.Tensor, boxes: StaticMap) -> torch.Tensor:
    points = place.unsqueeze(2)
    apart = torch.maximum(boxes.low_m - points, points - boxes.high_m).clamp(min=0)
    return (apart.square().sum(3) > BOX_CLEARANCE_M**2).all(2)


def _clear_of_obstacles(place: torch.Tensor, obstacles_m: torch.Tensor) -> torch.Tensor:
    apart = place.unsqueeze(2) - obstacles_m[:, :2]
    return (apart.square().sum(3) > OBSTACLE_CLEARANCE_M**2).all(2)


def _on_border(draws: torch.Tensor, half_extent_m: float) -> torch.Tensor:
    """Return places on the border of a square, ``[..., 3]``, from numbers in [0, 1): position along it, and height."""
    around = draws[0] * 4
    side = around.floor()
    along = ((around - side) * 2 - 1) * half_extent_m
    edge = torch.where(side % 2 == 0, half_extent_m, -half_extent_m)
    x = torch.where(side < 2, edge, along)
    y = torch.where(side < 2, along, edge)
    return torch.stack([x, y, _height(draws[1])], -1)


def _height(draws: torch.Tensor) -> torch.Tensor:
    lowest, highest = START_HEIGHTS_M
    return lowest + (highest - lowest) * draws
