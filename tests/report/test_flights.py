"""Flights packed for the page: small, within a quantum of what was recorded, and damage is told."""

import base64
import itertools
import re

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from slipstream import CorruptFileError, FormatVersionError, save_rollout_compressed
from slipstream.report import flights as module
from slipstream.report.flights import read_flights


@pytest.fixture
def pack(tmp_path, make_flights):
    def packed(change=None, **sizes):
        batch, metadata = make_flights(**sizes)
        if change is not None:
            changed = change(batch, metadata)
            batch = batch if changed is None else changed
        path = save_rollout_compressed(batch, tmp_path / "final_unseen.slip", metadata=metadata)
        return read_flights(path), batch

    return packed


def unpack(packed):
    """Return position, LiDAR and last moments of each drone, as the page's script reads them."""
    positions = np.frombuffer(base64.b64decode(packed["positions"]), "<i2").reshape(-1, 3) * packed["step_m"]
    lidar = np.frombuffer(base64.b64decode(packed["lidar"]), "u1").reshape(-1, packed["beams"])
    counts = [-(-end // packed["stride"]) + 1 for end in packed["ends"]]
    edges = np.cumsum([0, *counts])
    assert edges[-1] == len(positions) == len(lidar)
    return [
        (positions[begin:end], lidar[begin:end] * packed["range_m"] / 255) for begin, end in itertools.pairwise(edges)
    ]


def test_what_is_packed_is_what_was_recorded_but_for_half_a_step(pack):
    packed, batch = pack()
    assert packed["stride"] == 1
    for drone, (position, lidar) in enumerate(unpack(packed)):
        end = packed["ends"][drone]
        assert end == (60 if drone == 0 else 60 - 3 * drone)
        recorded = batch["drone", "position"][0, : end + 1, drone].numpy()
        np.testing.assert_allclose(position, recorded, atol=packed["step_m"] / 2 + 1e-6)
        seen = batch["drone", "lidar"][0, : end + 1, drone, :, 1].numpy()
        np.testing.assert_allclose(lidar, seen, atol=packed["range_m"] / 510 + 1e-6)
    obstacles = np.frombuffer(base64.b64decode(packed["obstacles"]), "<i2").reshape(61, 8, 3) * packed["step_m"]
    np.testing.assert_allclose(obstacles, batch["obstacle", "position"][0].numpy(), atol=packed["step_m"])
    assert packed["outcomes"] == [0, 1, 2, 3, 4, 5]


def test_moments_are_left_out_first_and_drones_second_and_every_flight_keeps_its_end(pack, monkeypatch):
    monkeypatch.setattr(module, "MAX_PACKED_BYTES", 6_000)
    packed, batch = pack()
    assert packed["stride"] == 2
    assert packed["num_recorded"] == 6
    assert 1 <= len(packed["ends"]) < 6
    for drone, (position, _) in enumerate(unpack(packed)):
        last = batch["drone", "position"][0, packed["ends"][drone], drone].numpy()
        np.testing.assert_allclose(position[-1], last, atol=packed["step_m"])
    assert sum(len(packed[key]) for key in ("positions", "lidar", "obstacles")) < 6_000 * 4 / 3 + 100


def test_many_drones_for_long_stay_below_one_and_a_half_megabytes(pack):
    packed, _ = pack(num_drones=200, num_steps=900, num_obstacles=80)
    assert sum(len(packed[key]) for key in ("positions", "lidar", "obstacles")) < 1_500_000


def test_there_may_be_no_moving_obstacles(pack):
    packed, _ = pack(num_obstacles=0)
    assert packed["obstacles"] == ""


def test_a_field_of_many_kilometres_gets_coarser_steps(pack):
    def far(batch, metadata):
        batch["drone", "position"][0, :, 0, 0] = 90_000.0

    packed, _ = pack(far)
    assert unpack(packed)[0][0][0, 0] == pytest.approx(90_000, rel=1e-4)


def _set(key, value):
    def change(batch, metadata):
        metadata[key] = value

    return change


def _blind(batch, metadata):
    batch["drone", "lidar"] = torch.zeros(1, 61, 6, 0, 4)


def _nowhere(batch, metadata):
    batch["drone", "position"][0, 3, 2, 1] = float("nan")


def _unheard_of(batch, metadata):
    batch["drone", "outcome"][0, 3] = 6


def _two_worlds(batch, metadata):
    return torch.cat([batch, batch])


def _half(batch, metadata):
    batch["drone", "position"] = batch["drone", "position"].half()


def _fewer(batch, metadata):
    batch["drone", "position"] = batch["drone", "position"][:, :, :3].clone()


def _no_lidar(batch, metadata):
    del batch["drone", "lidar"]


def _something_else(batch, metadata):
    return TensorDict({"observation": torch.zeros(1, 4, 3)}, batch_size=[1, 4])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("format", "other"), "does not hold flights"),
        (_set("goals", [[1, 2, 3]]), "goals is not a list of 6"),
        (_set("goals", [[1, 2, "</script>"]] * 6), "goals holds '</script>', expected numbers"),
        (_set("boxes", [[1, 2, 3]]), "boxes holds something other than rows of 5"),
        (_set("boxes", [[0.0] * 5] * 20_001), "boxes has 20001 rows, expected at most 20000"),
        (_set("boxes", None), "boxes is not a list"),
        (_set("headings", [1e300] * 6), "headings holds 1e+300, expected numbers of sensible size"),
        (_set("dt_s", 0), "dt_s is 0, expected a number above 0"),
        (_set("lidar_range_m", "far"), "lidar_range_m is 'far'"),
        (_set("obstacle_widths_m", []), "obstacle_widths_m is not a list of 8"),
        (_blind, "have no LiDAR"),
        (_nowhere, "drone/position is not finite everywhere"),
        (_unheard_of, "outcome that is unknown"),
        (_two_worlds, "drone/position has the shape (2, 61, 6, 3), expected one world"),
        (_half, "drone/position is float16, expected float32"),
        (_fewer, "do not fit their outcomes"),
        (_no_lidar, "a key of them is missing"),
        (_something_else, "a key of them is missing"),
    ],
)
def test_a_file_that_is_sound_but_no_record_of_flights_is_named_with_what_is_wrong(pack, change, words):
    with pytest.raises(CorruptFileError, match=re.escape(words)) as caught:
        pack(change)
    assert "final_unseen.slip: " in str(caught.value)


def test_flights_of_a_newer_version_are_told_apart_from_damage(pack):
    with pytest.raises(FormatVersionError, match="holds flights of version 2, expected 1"):
        pack(_set("version", 2))
