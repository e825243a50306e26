"""Exact ray casting against boxes and the ground.

Rays of one azimuth differ only in pitch, so a box is cut once per azimuth in the plane and once per pitch in height.
A grid of cells lists the boxes that a ray from anywhere in a cell can reach: the broad phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from slipstream.nav.config import LidarConfig
from slipstream.nav.world import StaticMap, as_maps

CELL_M = 1.0
MARGIN_M = 1e-3  # the broad phase looks this much further, so that rounding never hides a box
MARGIN_RAD = 1e-3
LEAST_SLOPE = 1e-12  # added to a direction's components, so that a ray along an axis divides by something

Cut = Callable[..., tuple[torch.Tensor, list[torch.Tensor]]]


class Lidar:
    """Measures how far rays fly before they meet a box or the ground.

    `scan` first finds the azimuths at which each box can be seen, and cuts only those rays with that box: little work,
    but its shapes depend on the data. `scan_dense` cuts every ray with every box listed for its cell: 40 times as
    many cuts, but fixed shapes, which a compiler can fuse and an accelerator need not wait for. Both measure the same.

    Args:
        config: The rays.
        boxes: What there is to hit, besides the ground at height 0. Given several maps, each scan says which drone is
            on which map.
        device: Where scans are made.
    """

    def __init__(
        self, config: LidarConfig, boxes: StaticMap | Sequence[StaticMap], device: torch.device | str = "cpu"
    ) -> None:
        maps = as_maps(boxes)
        self.range_m = config.range_m
        self._beams = config.horizontal_beams
        self._tangents = tuple(math.tan(pitch) for pitch in config.pitches_rad)
        self._secants = tuple(1.0 / math.cos(pitch) for pitch in config.pitches_rad)
        # Once around in both directions, so that an azimuth counted from behind needs no remainder.
        around = torch.arange(-self._beams, 2 * self._beams + 1)
        angles = around.double() * (2 * math.pi / self._beams)
        self._wrapped = (around % self._beams).to(device)
        self._beam_cos = angles.cos().float().to(device)
        self._beam_sin = angles.sin().float().to(device)
        self._cell_origin_m, self._cells_per_side, listed = list_boxes(maps, config.range_m)
        self._slots = listed.shape[1]
        # One row more than there are boxes is what empty slots point to: out of reach of everything.
        low = pad(torch.cat([one.low_m.cpu() for one in maps]), (0, 0, 0, 1))
        high = pad(torch.cat([one.high_m.cpu() for one in maps]), (0, 0, 0, 1))
        height = pad(torch.cat([one.height_m.cpu() for one in maps]), (0, 1))
        radius = (high - low).norm(dim=1) / 2 + MARGIN_M
        reach = pad((radius[:-1] + config.range_m).square(), (0, 1), value=-1.0)
        near = torch.stack([*((low + high) / 2).unbind(1), reach])
        self._near = near[:, listed].transpose(0, 1).contiguous().to(device)  # [cells, x y reach, slots]
        self._listed = listed.to(device)
        self._sides = torch.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]]).to(device)
        self._radius = radius.to(device)
        self._height = height.to(device)

    def scan(
        self,
        position: torch.Tensor,
        heading: torch.Tensor,
        cut: Cut | None = None,
        map_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Measure distances from drones, visiting only rays that may hit.

        Args:
            position: Where the drones are, ``[envs, 3]``.
            heading: Unit vectors in the plane that azimuths count from, ``[envs, 2]``.
            cut: A compiled `cut`, if there is one.
            map_index: Which map each drone is on, ``[envs]``; the first by default.

        Returns:
            Distances along the rays, at most the range, ``[envs, azimuths, pitches]``; 0 inside a box.
        """
        x, y, z = position.t().contiguous()
        cos, sin = heading.t().contiguous()
        distances = self._to_ground(z)
        env, box, dx, dy = self._pairs(self._cell(position, map_index), x, y)
        if not len(env):  # as at the start of an episode
            return distances
        pair_cos, pair_sin = cos.index_select(0, env), sin.index_select(0, env)
        first, count = self._visible(dx * pair_cos + dy * pair_sin, dy * pair_cos - dx * pair_sin, box)
        # A pair of a drone and a box becomes as many candidates as there are azimuths at which one may see the other.
        pair = torch.repeat_interleave(count)
        beam = torch.arange(self._beams, self._beams + len(pair), device=pair.device)
        beam += (first - count.cumsum(0) + count).index_select(0, pair)
        env, box = env.index_select(0, pair), box.index_select(0, pair)
        ray, hits = (cut or self.cut)(env, box, beam, x, y, z, cos, sin)
        for pitch, hit in enumerate(hits):
            distances.view(-1)[pitch:].scatter_reduce_(0, ray, hit, "amin")
        return distances

    def cut(
        self,
        env: torch.Tensor,
        box: torch.Tensor,
        beam: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        z: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Cut candidates, each a drone, a box and an azimuth: the part of `scan` that is worth compiling.

        Args:
            env: The drone of each candidate.
            box: Its box.
            beam: Its azimuth, counted from one turn back.
            x: Where the drones are.
            y: See above.
            z: See above.
            cos: Where the drones face.
            sin: See above.

        Returns:
            Where each candidate's distances belong in a scan, and for each pitch the distance; infinity for a miss.
        """
        inverse_x, inverse_y = self._inverse_directions(cos.index_select(0, env), sin.index_select(0, env), beam)
        west, east, south, north = (side.index_select(0, box) for side in self._sides)
        x, y, z = x.index_select(0, env), y.index_select(0, env), z.index_select(0, env)
        near, far = _cut_in_plane(
            (west - x) * inverse_x, (east - x) * inverse_x, (south - y) * inverse_y, (north - y) * inverse_y
        )
        top = self._height.index_select(0, box) - z
        ray = (env * self._beams + self._wrapped.index_select(0, beam)) * len(self._tangents)
        return ray, [
            _cut_in_height(near, far, top, tangent) * secant
            for tangent, secant in zip(self._tangents, self._secants, strict=True)
        ]

    def scan_dense(
        self, position: torch.Tensor, heading: torch.Tensor, map_index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Measure distances from drones by cutting every ray with every box listed for its cell.

        Args:
            position: As for `scan`.
            heading: As for `scan`.
            map_index: As for `scan`.

        Returns:
            As from `scan`, save for rounding.
        """
        beam = torch.arange(self._beams, 2 * self._beams, device=position.device)
        inverse_x, inverse_y = self._inverse_directions(heading[:, 0, None, None], heading[:, 1, None, None], beam)
        x, y, z = position.unsqueeze(2).unbind(1)
        box = self._listed[self._cell(position, map_index)]
        west, east, south, north = (side[box] for side in self._sides)
        near, far = _cut_in_plane(
            (west - x).unsqueeze(2) * inverse_x,
            (east - x).unsqueeze(2) * inverse_x,
            (south - y).unsqueeze(2) * inverse_y,
            (north - y).unsqueeze(2) * inverse_y,
        )
        near = torch.where((box == len(self._height) - 1).unsqueeze(2), math.inf, near)
        top = (self._height[box] - z).unsqueeze(2)
        hits = [
            _cut_in_height(near, far, top, tangent).amin(1) * secant
            for tangent, secant in zip(self._tangents, self._secants, strict=True)
        ]
        return torch.minimum(torch.stack(hits, -1), self._to_ground(position[:, 2]))

    def _cell(self, position: torch.Tensor, map_index: torch.Tensor | None) -> torch.Tensor:
        """Return the cell of each position; the outermost cells, which list nothing, stand for all beyond."""
        place = (position[:, :2] - self._cell_origin_m) * (1.0 / CELL_M)
        column, row = place.long().clamp(0, self._cells_per_side - 1).unbind(1)
        cell = column * self._cells_per_side + row
        if map_index is None:
            return cell
        return map_index * self._cells_per_side**2 + cell

    def _pairs(
        self, cell: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all pairs within range of each other: drone, box, and the vector from one to the other's centre."""
        near = self._near.index_select(0, cell)
        dx, dy = near[:, 0] - x.unsqueeze(1), near[:, 1] - y.unsqueeze(1)
        slot = (dx * dx + dy * dy < near[:, 2]).view(-1).nonzero().squeeze(1)
        box = self._listed.index_select(0, cell).view(-1).index_select(0, slot)
        return slot // self._slots, box, dx.view(-1).index_select(0, slot), dy.view(-1).index_select(0, slot)

    def _visible(self, ahead: torch.Tensor, left: torch.Tensor, box: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first azimuth at which each pair's box may be seen, and how many there are: never too few."""
        radius = self._radius.index_select(0, box)
        tangent_squared = ahead * ahead + left * left - radius * radius
        beams_per_rad = self._beams / (2 * math.pi)
        bearing = torch.atan2(left, ahead) * beams_per_rad
        half = (torch.atan2(radius, tangent_squared.clamp(min=0).sqrt()) + MARGIN_RAD) * beams_per_rad
        half = torch.where(tangent_squared > 0, half, self._beams / 2)  # within the circle around it: all around
        first = (bearing - half).ceil()
        count = ((bearing + half).floor() - first + 1).clamp(0, self._beams)
        return first.long(), count.long()

    def _inverse_directions(
        self, cos: torch.Tensor, sin: torch.Tensor, beam: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 1 / x and 1 / y of the directions of beams in the plane."""
        beam_cos, beam_sin = self._beam_cos.index_select(0, beam), self._beam_sin.index_select(0, beam)
        x = cos * beam_cos - sin * beam_sin + LEAST_SLOPE
        y = sin * beam_cos + cos * beam_sin + LEAST_SLOPE
        return x.reciprocal(), y.reciprocal()

    def _to_ground(self, z: torch.Tensor) -> torch.Tensor:
        """Return the distances along all rays if there were no boxes, at most the range, in a new tensor."""
        distances = z.new_full((len(z), self._beams, len(self._tangents)), self.range_m)
        for pitch, (tangent, secant) in enumerate(zip(self._tangents, self._secants, strict=True)):
            if tangent < 0:
                distances[:, :, pitch] = (z * (-secant / tangent)).clamp(0.0, self.range_m).unsqueeze(1)
        return distances


def list_boxes(maps: Sequence[StaticMap], range_m: float) -> tuple[float, int, torch.Tensor]:
    """Divide the plane into square cells and list, for each, the boxes within range of any point of it.

    The cells extend one further than any box can be seen from, so the outermost ones list nothing.

    Args:
        maps: The boxes of each map. Boxes are numbered across all maps.
        range_m: The length of a ray.

    Returns:
        The lowest x and y of the first cell, the number of cells along a side, and the boxes of each cell,
        ``[maps * cells, slots]``. The total number of boxes stands for an empty slot. On the CPU.
    """
    reach = range_m + MARGIN_M
    corners = torch.cat([torch.zeros(1, 2), *(torch.cat([one.low_m, one.high_m]).cpu() for one in maps)])
    half = math.ceil((float(corners.abs().max()) + reach) / CELL_M) + 1
    side = 2 * half
    edges = torch.arange(-half, half, dtype=torch.float64) * CELL_M
    cells = []
    boxes = []
    count = 0
    for number, one in enumerate(maps):
        cell, box = _cells_in_reach(one, edges, reach).nonzero().unbind(1)
        cells.append(cell + number * side * side)
        boxes.append(box + count)
        count += len(one)
    cell, box = torch.cat(cells), torch.cat(boxes)
    # Pairs are sorted by cell, so the slot of a box is its distance from the first box of the same cell.
    sizes = torch.bincount(cell, minlength=len(maps) * side * side)
    slot = torch.arange(len(cell)) - (sizes.cumsum(0) - sizes)[cell]
    listed = torch.full((len(sizes), max(1, int(sizes.max()))), count)
    listed[cell, slot] = box
    return -half * CELL_M, side, listed


def _cells_in_reach(boxes: StaticMap, edges: torch.Tensor, reach: float) -> torch.Tensor:
    """Return which boxes are within reach of which cells, ``[cells, boxes]``."""
    low = boxes.low_m.double().cpu()
    high = boxes.high_m.double().cpu()
    apart = []
    for axis in (0, 1):
        gap = torch.maximum(low[:, axis] - (edges[:, None] + CELL_M), edges[:, None] - high[:, axis])
        apart.append(gap.clamp(min=0).square())
    return (apart[0][:, None] + apart[1][None] < reach**2).flatten(0, 1)


def _cut_in_plane(
    west: torch.Tensor, east: torch.Tensor, south: torch.Tensor, north: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far along, in the plane, rays enter and leave boxes, given where they cross the lines of the sides.

    Where a ray misses, it enters at infinity.
    """
    near = torch.maximum(torch.minimum(west, east), torch.minimum(south, north)).clamp(min=0)
    far = torch.minimum(torch.maximum(west, east), torch.maximum(south, north))
    return torch.where(near > far, math.inf, near), far


def _cut_in_height(near: torch.Tensor, far: torch.Tensor, top: torch.Tensor, tangent: float) -> torch.Tensor:
    """Return how far along, in the plane, rays of one pitch meet boxes; infinity where they do not.

    Boxes count as reaching down without end: what would be met below the ground is behind the ground.

    Args:
        near: Where rays enter boxes in the plane.
        far: Where they leave.
        top: How far the boxes' tops are above the drones.
        tangent: Of the pitch.
    """
    if tangent > 0:
        return torch.where(near * tangent > top, math.inf, near)
    if tangent == 0:
        return torch.where(top < 0, math.inf, near)
    enter = torch.maximum(near, top * (1.0 / tangent))  # through a side, or down onto the top
    return torch.where(enter > far, math.inf, enter)
