"""The standing part of the world: boxes on flat ground, the same for a seed wherever it is built."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from slipstream.errors import ConfigurationError

GRID_M = 0.1
WIDTHS = (3, 7)  # in grid steps, drawn for each side
HEIGHT_BINS_M = (1.0, 1.5, 2.0, 4.0, 6.0)
HEIGHT_PROBABILITIES = (0.1, 0.15, 0.2, 0.55)
MAX_CLOSED_GAP = 2  # in grid steps: boxes this close look like one obstacle
MIN_OPEN_GAP = 10  # in grid steps: a drone fits through this; gaps between the two are not built
MAX_REJECTIONS = 10_000  # in a row, before a field counts as full


@dataclass(frozen=True)
class StaticMap:
    """Solid axis-aligned boxes that stand on the ground.

    Attributes:
        low_m: Lesser corner of each box in the plane, ``[boxes, 2]``.
        high_m: Greater corner in the plane, ``[boxes, 2]``.
        height_m: Height of its top above the ground, ``[boxes]``.

    Raises:
        ConfigurationError: If the three do not belong together.
    """

    low_m: torch.Tensor
    high_m: torch.Tensor
    height_m: torch.Tensor

    def __post_init__(self) -> None:
        boxes = len(self.height_m)
        if self.low_m.shape != (boxes, 2) or self.high_m.shape != (boxes, 2) or self.height_m.ndim != 1:
            raise ConfigurationError(
                f"the boxes' corners have the shapes {tuple(self.low_m.shape)} and {tuple(self.high_m.shape)}, their "
                f"heights {tuple(self.height_m.shape)}; expected (n, 2), (n, 2) and (n,)"
            )
        if bool((self.low_m > self.high_m).any()):
            raise ConfigurationError("a box has its lesser corner beyond its greater one")

    def __len__(self) -> int:
        return len(self.height_m)

    def to(self, device: torch.device | str) -> Self:
        """Return the same boxes on another device."""
        return type(self)(self.low_m.to(device), self.high_m.to(device), self.height_m.to(device))

    @classmethod
    def from_boxes(cls, *boxes: tuple[float, float, float, float, float]) -> Self:
        """Make a map by hand.

        Args:
            *boxes: For each box: least x, least y, greatest x, greatest y, height.

        Example:
            >>> len(StaticMap.from_boxes((1.0, -0.5, 2.0, 0.5, 3.0)))
            1
        """
        table = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 5)
        return cls(table[:, 0:2].contiguous(), table[:, 2:4].contiguous(), table[:, 4].contiguous())


def as_maps(boxes: StaticMap | Sequence[StaticMap]) -> list[StaticMap]:
    """Return maps as a list, given one or several."""
    if isinstance(boxes, StaticMap):
        return [boxes]
    return list(boxes)


def generate_map(num_boxes: int, half_extent_m: float, seed: int) -> StaticMap:
    """Place boxes at random so that the gap between any two is either wide enough to fly through or closed.

    Maps are made on the CPU with a private generator, so a seed gives the same map on every device. Boxes may touch and
    overlap; no two have a gap between 0.2 and 1.0 m.

    Args:
        num_boxes: Number of boxes.
        half_extent_m: The field extends from minus to plus this in x and y.
        seed: Which map.

    Returns:
        The map, on the CPU.

    Raises:
        ConfigurationError: If the field is too small, or full before all boxes are placed.
    """
    made = _generate_map(num_boxes, half_extent_m, seed)
    return StaticMap(made.low_m.clone(), made.high_m.clone(), made.height_m.clone())


@functools.lru_cache(maxsize=512)  # evaluations use the same maps again and again; one takes 10 kB
def _generate_map(num_boxes: int, half_extent_m: float, seed: int) -> StaticMap:
    generator = torch.Generator().manual_seed(seed)
    side = round(2 * half_extent_m / GRID_M)
    field = f"a field of {side * GRID_M:g} m by {side * GRID_M:g} m"
    if num_boxes and side < max(WIDTHS):
        raise ConfigurationError(f"{field} is smaller than a box")
    placed = np.zeros((num_boxes, 4), dtype=np.int64)
    count = rejections = 0
    while count < num_boxes:
        box = _draw_box(side, generator)
        if _leaves_bad_gap(box, placed[:count]):
            rejections += 1
            if rejections == MAX_REJECTIONS:
                raise ConfigurationError(
                    f"only {count} of {num_boxes} boxes fit into {field} without gaps that are neither open nor closed"
                )
            continue
        placed[count] = box
        count, rejections = count + 1, 0
    corners_m = (torch.from_numpy(placed).double() * GRID_M - half_extent_m).float()
    return StaticMap(corners_m[:, :2].contiguous(), corners_m[:, 2:].contiguous(), _draw_heights(num_boxes, generator))


def _draw_box(side: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Return lowest x, lowest y, highest x, highest y in grid steps from the field's corner."""
    draws: list[float] = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
    width, depth = WIDTHS[int(draws[0] * len(WIDTHS))], WIDTHS[int(draws[1] * len(WIDTHS))]
    x, y = int(draws[2] * (side - width + 1)), int(draws[3] * (side - depth + 1))
    return x, y, x + width, y + depth


def _leaves_bad_gap(box: tuple[int, int, int, int], others: np.ndarray[Any, np.dtype[np.int64]]) -> bool:
    # NumPy, because torch takes several times as long for arrays this small.
    low_x, low_y, high_x, high_y = box
    apart_x = np.maximum(np.maximum(others[:, 0] - high_x, low_x - others[:, 2]), 0)
    apart_y = np.maximum(np.maximum(others[:, 1] - high_y, low_y - others[:, 3]), 0)
    squared = apart_x * apart_x + apart_y * apart_y
    return bool(((squared > MAX_CLOSED_GAP**2) & (squared < MIN_OPEN_GAP**2)).any())


def _draw_heights(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return heights, uniform within a bin drawn by its probability."""
    which, where = torch.rand(2, count, generator=generator, dtype=torch.float64)
    edges = torch.tensor(HEIGHT_PROBABILITIES, dtype=torch.float64).cumsum(0)[:-1]
    bins = torch.bucketize(which, edges, right=True)
    limits = torch.tensor(HEIGHT_BINS_M, dtype=torch.float64)
    return torch.lerp(limits[bins], limits[bins + 1], where).float()
