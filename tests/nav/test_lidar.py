"""Rays are exact: compared, one by one, with a caster too simple to be wrong."""

import functools
import math

import numpy as np
import pytest
import torch

from slipstream.nav import Lidar, LidarConfig, StaticMap, generate_map
from slipstream.nav.lidar import list_boxes

NUDGES = ((0.0, 0.0), (1e-6, 0.0), (0.0, -1e-6))


def cast_slowly(config: LidarConfig, boxes: StaticMap, position: torch.Tensor, heading: torch.Tensor) -> np.ndarray:
    """Cut every ray with every box and the ground in double precision, with the textbook's three slabs."""
    azimuth0 = math.atan2(float(heading[1]), float(heading[0]))
    azimuths = azimuth0 + np.arange(config.horizontal_beams) * (2 * math.pi / config.horizontal_beams)
    pitches = np.array(config.pitches_rad)
    direction = np.stack(
        [
            np.cos(azimuths)[:, None] * np.cos(pitches),
            np.sin(azimuths)[:, None] * np.cos(pitches),
            np.broadcast_to(np.sin(pitches), (len(azimuths), len(pitches))),
        ],
        -1,
    )
    origin = position.double().numpy()
    best = np.full(direction.shape[:2], config.range_m)
    with np.errstate(divide="ignore"):
        down = np.where(direction[..., 2] < -1e-12, origin[2] / -direction[..., 2], np.inf)
        best = np.minimum(best, np.maximum(down, 0.0))
        for low, high, height in zip(boxes.low_m.double(), boxes.high_m.double(), boxes.height_m, strict=True):
            near, far = np.zeros(best.shape), np.full(best.shape, np.inf)
            for axis, (least, greatest) in enumerate(
                [(float(low[0]), float(high[0])), (float(low[1]), float(high[1])), (0.0, float(height))]
            ):
                parallel = np.abs(direction[..., axis]) < 1e-12
                slope = np.where(parallel, 1.0, direction[..., axis])
                one, other = (least - origin[axis]) / slope, (greatest - origin[axis]) / slope
                inside = least <= origin[axis] <= greatest
                near = np.where(parallel, near if inside else np.inf, np.maximum(near, np.minimum(one, other)))
                far = np.where(parallel, far, np.minimum(far, np.maximum(one, other)))
            best = np.where(near <= far, np.minimum(best, near), best)
    return best


def unit(angles_rad: torch.Tensor) -> torch.Tensor:
    return torch.stack([angles_rad.cos(), angles_rad.sin()], -1)


def assert_exact(config: LidarConfig, boxes: StaticMap, position: torch.Tensor, heading: torch.Tensor) -> None:
    lidar = Lidar(config, boxes)
    expected = np.stack([cast_slowly(config, boxes, *pose) for pose in zip(position, heading, strict=True)])
    for scan in (lidar.scan, lidar.scan_dense):
        found = scan(position, heading)
        assert found.shape == (len(position), config.horizontal_beams, config.vertical_beams)
        np.testing.assert_allclose(found.numpy(), expected, atol=2e-5, rtol=0)


@functools.cache
def training_map(seed: int = 0) -> StaticMap:
    return generate_map(350, 20.0, seed)


def random_poses(count: int, seed: int, spread_m: float = 24.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    place = torch.rand(count, 3, generator=generator)
    position = torch.stack(
        [(place[:, 0] * 2 - 1) * spread_m, (place[:, 1] * 2 - 1) * spread_m, place[:, 2] * 4 + 0.01], 1
    )
    return position, unit(torch.rand(count, generator=generator) * 2 * math.pi)


@pytest.mark.parametrize("seed", [0, 1])
def test_scans_of_the_training_map_are_exact_from_anywhere(seed):
    assert_exact(LidarConfig(), training_map(seed), *random_poses(50, seed))


@pytest.mark.parametrize(
    "config",
    [
        LidarConfig(range_m=2.5, horizontal_beams=7, vertical_beams=1, vertical_fov_deg=(0.0, 0.0)),
        LidarConfig(range_m=6.0, horizontal_beams=90, vertical_beams=5, vertical_fov_deg=(-60.0, 60.0)),
        LidarConfig(range_m=1.0, horizontal_beams=1, vertical_beams=2, vertical_fov_deg=(-80.0, -5.0)),
    ],
)
def test_scans_with_other_rays_are_exact_too(config):
    assert_exact(config, generate_map(120, 8.0, 5), *random_poses(40, 2, spread_m=9.0))


def test_rays_along_the_axes_are_exact():
    boxes = StaticMap.from_boxes(
        (1.5, -0.35, 2.2, 0.35, 3.0), (-0.15, -3.3, 0.15, -3.0, 1.0), (-2.0, 0.5, -1.7, 0.8, 6.0)
    )
    position = torch.tensor([[0.0, 0.0, 0.5]]).expand(4, 3)
    heading = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    assert_exact(LidarConfig(), boxes, position, heading)
    distances = Lidar(LidarConfig(), boxes).scan(position, heading)
    assert distances[0, 0, 1].item() == pytest.approx(1.5)
    assert distances[0, 27, 1].item() == pytest.approx(3.0)  # counter-clockwise from east: 27 is south
    assert distances[1, 27, 1].item() == pytest.approx(1.5)  # and from north: 27 is east


def test_drones_exactly_on_the_border_of_a_cell_see_what_is_there():
    places = [(x + dx, y + dy, 1.2) for x in (-1.0, 0.0, 20.0) for y in (-20.0, 5.0) for dx, dy in NUDGES]
    assert_exact(LidarConfig(), training_map(), torch.tensor(places), unit(torch.full((len(places),), 0.3)))


def test_a_box_is_seen_just_within_the_range_and_not_just_beyond_it():
    for gap, seen in ((3.9999, True), (4.0001, False)):
        for angle in (0.0, math.pi / 2, math.pi, -math.pi / 2):
            ahead = unit(torch.tensor(angle))
            centre = ahead * (gap + 0.35)
            boxes = StaticMap.from_boxes((*(centre - 0.35).tolist(), *(centre + 0.35).tolist(), 2.0))
            distances = Lidar(LidarConfig(), boxes).scan(torch.tensor([[0.0, 0.0, 1.0]]), ahead.unsqueeze(0))
            assert (distances[0, 0, 1].item() < 4.0) is seen
            assert bool((distances[0, 1:, 1] == 4.0).all())


def test_a_box_is_seen_from_everywhere_around_it_at_the_edge_of_the_range():
    boxes = StaticMap.from_boxes((7.3, -2.2, 7.6, -1.5, 2.0))
    angles = torch.linspace(0, 2 * math.pi, 400)
    outward = unit(angles)
    centre = torch.tensor([7.45, -1.85])
    position = torch.cat([centre + outward * 4.05, torch.ones(400, 1)], 1)
    assert_exact(LidarConfig(), boxes, position, -outward)


def test_the_ground_ends_rays_that_look_down_and_no_others():
    lidar = Lidar(LidarConfig(), StaticMap.from_boxes())
    heights = torch.tensor([0.3, 0.69, 0.7, 2.0])
    position = torch.cat([torch.zeros(4, 2), heights.unsqueeze(1)], 1)
    distances = lidar.scan(position, unit(torch.zeros(4)))
    expected = (heights / math.sin(math.radians(10))).clamp(max=4.0)
    torch.testing.assert_close(distances[:, :, 0], expected.unsqueeze(1).expand(4, 36))
    assert bool((distances[:, :, 1:] == 4.0).all())


def test_rays_fly_over_boxes_and_come_down_on_their_tops():
    boxes = StaticMap.from_boxes((-3.0, -3.0, 3.0, 3.0, 1.0))
    distances = Lidar(LidarConfig(), boxes).scan(torch.tensor([[0.0, 0.0, 1.3]]), torch.tensor([[1.0, 0.0]]))
    expected = torch.full((36,), 0.3 / math.sin(math.radians(10)))
    torch.testing.assert_close(distances[0, :, 0], expected)
    assert bool((distances[0, :, 1:] == 4.0).all())


def test_rays_that_climb_pass_over_a_box_that_level_ones_hit():
    boxes = StaticMap.from_boxes((2.0, -0.5, 2.5, 0.5, 1.2))
    distances = Lidar(LidarConfig(), boxes).scan(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    # 10 degrees climb 0.35 m in 2 m, 10 degrees down meet the side, level meets the side
    assert distances[0, 0].tolist() == pytest.approx([2.0 / math.cos(math.radians(10)), 2.0, 4.0, 4.0])


def test_inside_a_box_every_ray_is_0():
    boxes = StaticMap.from_boxes((0.0, 0.0, 0.7, 0.7, 2.0))
    distances = Lidar(LidarConfig(), boxes).scan(torch.tensor([[0.2, 0.6, 1.0]]), unit(torch.tensor([1.0])))
    assert not distances.any()


def test_far_outside_the_map_there_is_only_ground():
    lidar = Lidar(LidarConfig(), training_map())
    position = torch.tensor([[1e6, 0.0, 1.0], [-300.0, 300.0, 1.0], [25.0, -25.0, 1.0]])
    assert bool((lidar.scan(position, unit(torch.zeros(3))) == 4.0).all())


def test_a_position_that_is_not_a_number_does_not_disturb_the_others():
    lidar = Lidar(LidarConfig(), training_map())
    position, heading = random_poses(8, 0)
    expected = lidar.scan(position, heading)
    position[3] = math.nan
    found = lidar.scan(position, heading)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[others], expected[others])


def test_cells_list_every_box_within_range_and_the_outermost_list_none():
    boxes = training_map()
    origin, side, listed = list_boxes([boxes], 4.0)
    generator = torch.Generator().manual_seed(0)
    for x, y in ((torch.rand(200, 2, generator=generator) * 2 - 1) * 26).tolist():
        dx = torch.maximum(boxes.low_m[:, 0] - x, x - boxes.high_m[:, 0]).clamp(min=0)
        dy = torch.maximum(boxes.low_m[:, 1] - y, y - boxes.high_m[:, 1]).clamp(min=0)
        near = set((dx.hypot(dy) <= 4.0).nonzero().squeeze(1).tolist())
        column, row = (min(max(math.floor(part - origin), 0), side - 1) for part in (x, y))
        assert near <= set(listed[column * side + row].tolist())
    grid = (listed < len(boxes)).any(1).view(side, side)
    assert not grid[[0, -1]].any()
    assert not grid[:, [0, -1]].any()
