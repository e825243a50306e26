"""Exact ray casting against boxes and the ground.

Rays of one azimuth differ only in pitch, so a box is cut once per azimuth in the plane and once per pitch in height.
A grid of cells lists the boxes that a ray from anywhere in a cell can reach: the broad phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from slipstream.nav.config import LidarConfig
from slipstream.nav.world import StaticMap

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
        boxes: What there is to hit, besides the ground at height 0.
        device: Where scans are made.
    """

    def __init__(self, config: LidarConfig, boxes: StaticMap, device: torch.device | str = "cpu") -> None:
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
        self._cell_origin_m, self._cells_per_side, listed = list_boxes(boxes, config.range_m)
        self._slots = listed.shape[1]
        # One row more than there are boxes is what empty slots point to: out of reach of everything.
        low, high = pad(boxes.low_m.cpu(), (0, 0, 0, 1)), pad(boxes.high_m.cpu(), (0, 0, 0, 1))
        radius = (high - low).norm(dim=1) / 2 + MARGIN_M
        reach = pad((radius[:-1] + config.range_m).square(), (0, 1), value=-1.0)
        near = torch.stack([*((low + high) / 2).unbind(1), reach])
        self._near = near[:, listed].transpose(0, 1).contiguous().to(device)  # [cells, x y reach, slots]
        self._listed = listed.to(device)
        self._sides = torch.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]]).to(device)
        self._radius = radius.to(device)
        self._height = pad(boxes.height_m.cpu(), (0, 1)).to(device)

    def scan(self, position: torch.Tensor, heading: torch.Tensor, cut: Cut | None = None) -> torch.Tensor:
        """Measure distances from drones, visiting only rays that may hit.

        Args:
            position: Where the drones are, ``[envs, 3]``.
            heading: Unit vectors in the plane that azimuths count from, ``[envs, 2]``.
            cut: A compiled `cut`, if there is one.

        Returns:
            Distances along the rays, at most the range, ``[envs, azimuths, pitches]``; 0 inside a box.
        """
        x, y, z = position.t().contiguous()
        cos, sin = heading.t().contiguous()
        distances = self._to_ground(z)
        env, box, dx, dy = self._pairs(position, x, y)
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

    def scan_dense(self, position: torch.Tensor, heading: torch.Tensor) -> torch.Tensor:
        """Measure distances from drones by cutting every ray with every box listed for its cell.

        Args:
            position: As for `scan`.
            heading: As for `scan`.

        Returns:
            As from `scan`, save for rounding.
        """
        beam = torch.arange(self._beams, 2 * self._beams, device=position.device)
        inverse_x, inverse_y = self._inverse_directions(heading[:, 0, None, None], heading[:, 1, None, None], beam)
        x, y, z = position.unsqueeze(2).unbind(1)
        box = self._listed[self._cell(position)]
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

    def _cell(self, position: torch.Tensor) -> torch.Tensor:
        """Return the cell of each position; the outermost cells, which list nothing, stand for all beyond."""
        place = (position[:, :2] - self._cell_origin_m) * (1.0 / CELL_M)
        column, row = place.long().clamp(0, self._cells_per_side - 1).unbind(1)
        return column * self._cells_per_side + row

    def _pairs(
        self, position: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all pairs within range of each other: drone, box, and the vector from one to the other's centre."""
        cell = self._cell(position)
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
        """Return the distances along all rays if there were no boxes, at most the range, in a tensor of their own."""
        distances = z.new_full((len(z), self._beams, len(self._tangents)), self.range_m)
        for pitch, (tangent, secant) in enumerate(zip(self._tangents, self._secants, strict=True)):
            if tangent < 0:
                distances[:, :, pitch] = (z * (-secant / tangent)).clamp(0.0, self.range_m).unsqueeze(1)
        return distances


def list_boxes(boxes: StaticMap, range_m: float) -> tuple[float, int, torch.Tensor]:
    """Divide the plane into square cells and list, for each, the boxes within range of any point of it.

    Cells reach one further than any box can be seen from: the outermost list nothing.

    Args:
        boxes: What to list.
        range_m: How far a ray flies.

    Returns:
        The least x and y of the first cell, how many cells there are along a side, and the indices of boxes by cell,
        ``[cells, slots]``, where the number of boxes stands for an empty slot. On the CPU.
    """
    low, high = boxes.low_m.double().cpu(), boxes.high_m.double().cpu()
    reach = range_m + MARGIN_M
    extent = float(torch.cat([low, high, torch.zeros(1, 2)]).abs().max()) + reach
    half = math.ceil(extent / CELL_M) + 1
    side = 2 * half
    edges = torch.arange(-half, half, dtype=torch.float64) * CELL_M
    apart_x, apart_y = (
        torch.maximum(low[:, axis, None] - (edges + CELL_M), edges - high[:, axis, None]).clamp(min=0).square()
        for axis in (0, 1)
    )
    lists: list[list[int]] = [[] for _ in range(side * side)]
    for box in range(len(boxes)):
        within = apart_x[box, :, None] + apart_y[box] < reach**2
        for cell in within.view(-1).nonzero().squeeze(1).tolist():
            lists[cell].append(box)
    slots = max(1, *map(len, lists))
    rows = [members + [len(boxes)] * (slots - len(members)) for members in lists]
    return -half * CELL_M, side, torch.tensor(rows, dtype=torch.int64)


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
