"""Maps: what they hold, what they never hold, and that a seed is a map."""

import itertools
import math

import pytest
import torch

from slipstream import ConfigurationError
from slipstream.nav import StaticMap, generate_map, world


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_map_has_as_many_boxes_as_asked_for_and_all_are_inside_the_field(seed):
    boxes = generate_map(350, 20.0, seed)
    assert len(boxes) == 350
    assert boxes.low_m.min() >= -20.0
    assert boxes.high_m.max() <= 20.0


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_no_two_boxes_have_a_gap_too_narrow_to_fly_and_too_wide_to_look_closed(seed):
    boxes = generate_map(350, 20.0, seed)
    corners = torch.cat([boxes.low_m, boxes.high_m], 1).tolist()
    for (west, south, east, north), (west2, south2, east2, north2) in itertools.combinations(corners, 2):
        gap = math.hypot(max(west - east2, west2 - east, 0.0), max(south - north2, south2 - north, 0.0))
        assert gap <= 0.2 + 1e-5 or gap >= 1.0 - 1e-5


def test_sides_are_30_or_70_cm_and_corners_are_on_the_grid():
    boxes = generate_map(350, 20.0, 0)
    sides = ((boxes.high_m - boxes.low_m) * 10).round().long()
    assert set(sides.unique().tolist()) == {3, 7}
    assert set(map(tuple, sides.tolist())) == {(3, 3), (3, 7), (7, 3), (7, 7)}
    torch.testing.assert_close(boxes.low_m * 10, (boxes.low_m * 10).round(), atol=1e-4, rtol=0)


def test_heights_follow_the_bins_and_their_probabilities():
    heights = torch.cat([generate_map(350, 20.0, seed).height_m for seed in range(6)])
    assert heights.min() >= 1.0
    assert heights.max() <= 6.0
    shares = torch.histogram(heights, torch.tensor([1.0, 1.5, 2.0, 4.0, 6.0])).hist / len(heights)
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.15, 0.2, 0.55]), atol=0.03, rtol=0)


def test_the_same_seed_is_the_same_map_whatever_the_global_seed_and_another_is_another():
    torch.manual_seed(1)
    one = generate_map(50, 20.0, 3)
    torch.manual_seed(2)
    same, other = generate_map(50, 20.0, 3), generate_map(50, 20.0, 4)
    assert torch.equal(one.low_m, same.low_m)
    assert torch.equal(one.height_m, same.height_m)
    assert not torch.equal(one.low_m, other.low_m)


def test_the_training_map_is_what_it_has_always_been():
    boxes = generate_map(350, 20.0, 0)
    torch.testing.assert_close(boxes.low_m[:3], torch.tensor([[-2.0, 16.2], [-13.0, -6.2], [-2.2, -13.0]]))
    torch.testing.assert_close(boxes.high_m[:3], torch.tensor([[-1.3, 16.9], [-12.3, -5.5], [-1.5, -12.7]]))
    torch.testing.assert_close(boxes.height_m[:3], torch.tensor([4.698274, 2.634095, 2.080535]))


def test_an_empty_map_is_a_map():
    assert len(generate_map(0, 20.0, 0)) == 0
    assert len(StaticMap.from_boxes()) == 0


def test_a_field_in_which_no_place_is_found_is_an_error_that_says_how_many_boxes_fit(monkeypatch):
    monkeypatch.setattr(world, "MAX_REJECTIONS", 1)
    with pytest.raises(ConfigurationError, match=r"only \d+ of 350 boxes fit into a field of 40 m by 40 m"):
        generate_map(350, 20.0, 123_456)  # a map that has not been made before


def test_a_field_smaller_than_a_box_is_an_error():
    with pytest.raises(ConfigurationError, match=r"a field of 0.6 m by 0.6 m is smaller than a box"):
        generate_map(1, 0.3, 0)


def test_corners_and_heights_that_do_not_belong_together_are_an_error():
    with pytest.raises(ConfigurationError, match=r"shapes \(2, 2\) and \(2, 2\), their heights \(3,\)"):
        StaticMap(torch.zeros(2, 2), torch.ones(2, 2), torch.ones(3))
    with pytest.raises(ConfigurationError, match="lesser corner beyond its greater one"):
        StaticMap.from_boxes((1.0, 0.0, 0.0, 1.0, 2.0))
