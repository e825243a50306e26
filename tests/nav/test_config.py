"""Settings that make no sense are refused in a sentence."""

import math

import pytest

from slipstream import ConfigurationError, NavigationConfig
from slipstream.nav import LidarConfig


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_envs": 0}, "num_envs is 0, expected a whole number of at least 1"),
        ({"num_envs": 2.0}, "num_envs is 2.0, expected a whole number of at least 1"),
        ({"num_envs": True}, "num_envs is True, expected a whole number of at least 1"),
        ({"num_static_obstacles": -1}, "num_static_obstacles is -1, expected a whole number of at least 0"),
        ({"num_dynamic_obstacles": 83}, "num_dynamic_obstacles is 83, expected a multiple of 8"),
        ({"map_seed": -3}, "map_seed is -3, expected a whole number of at least 0"),
        ({"map_half_extent_m": 0.0}, "map_half_extent_m is 0.0, expected a number above 0"),
        ({"dt_s": math.nan}, "dt_s is nan, expected a number above 0"),
        ({"dt_s": -0.1}, "dt_s is -0.1, expected a number above 0"),
        ({"dt_s": 0.1}, "dt_s is 0.1, expected at most 0.02 for the dynamics 'hummingbird'; 'lag' takes longer steps"),
        ({"max_episode_length": 0}, "max_episode_length is 0, expected a whole number of at least 1"),
        ({"dynamics": "isaac"}, "dynamics is 'isaac', expected one of 'hummingbird', 'lag'"),
        ({"start": "middle"}, "start is 'middle', expected one of 'border', 'line'"),
        ({"num_static_obstacles": 100_000}, "num_static_obstacles is 100000, expected at most 5000 boxes"),
        ({"obstacle_speed_m_s": (1.5, 0.5)}, "obstacle_speed_m_s is (1.5, 0.5), expected two rising speeds from 0 on"),
        ({"obstacle_range_m": (1.0, -1.0, 0.0)}, "obstacle_range_m is (1.0, -1.0, 0.0), expected three lengths"),
        ({"compile": True}, "compile is True, expected one of 'auto', 'true', 'false'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error_that_says_which_and_why(settings, sentence):
    with pytest.raises(ConfigurationError) as caught:
        NavigationConfig(**settings)
    assert str(caught.value).startswith(sentence)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"range_m": 0}, "range_m is 0, expected a number above 0"),
        ({"vertical_beams": 0}, "vertical_beams is 0, expected a whole number of at least 1"),
        ({"horizontal_beams": 36.0}, "horizontal_beams is 36.0, expected a whole number of at least 1"),
        ({"vertical_fov_deg": (20.0, -10.0)}, "vertical_fov_deg is (20.0, -10.0), expected two rising angles"),
        ({"vertical_fov_deg": (-90.0, 0.0)}, "vertical_fov_deg is (-90.0, 0.0), expected two rising angles"),
    ],
)
def test_rays_that_make_no_sense_are_an_error_that_says_which_and_why(settings, sentence):
    with pytest.raises(ConfigurationError) as caught:
        LidarConfig(**settings)
    assert str(caught.value).startswith(sentence)


def test_the_beams_of_navrl_look_10_degrees_down_level_and_10_and_20_degrees_up():
    assert [round(math.degrees(pitch), 9) for pitch in LidarConfig().pitches_rad] == [-10.0, 0.0, 10.0, 20.0]


def test_a_single_beam_looks_along_the_lowest_pitch():
    assert LidarConfig(vertical_beams=1, vertical_fov_deg=(5.0, 5.0)).pitches_rad == (math.radians(5.0),)
