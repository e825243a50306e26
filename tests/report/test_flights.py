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
from slipstream.report.flights import read_crashes, read_flights


@pytest.fixture
def pack(tmp_path, make_flights):
    """Save flights, perhaps changed, and return them as a function packs them, with what was saved."""

    def packed(change=None, read=read_flights, **sizes):
        batch, world = make_flights(**sizes)
        metadata = world.metadata()
        arrays = world.arrays()
        if change is not None:
            changed = change(batch, metadata, arrays)
            batch = batch if changed is None else changed
        path = save_rollout_compressed(batch, tmp_path / "final_unseen.slip", metadata=metadata, extra=arrays)
        return read(path), batch

    return packed


def unpack(packed):
    """Return position, LiDAR and last moments of each drone, as the page's script reads them."""
    positions = np.frombuffer(base64.b64decode(packed["positions"]), "<i2").reshape(-1, 3) * packed["step_m"]
    lidar = np.frombuffer(base64.b64decode(packed["lidar"]), "u1").reshape(-1, packed["beams"])
    lengths = np.subtract(packed["ends"], packed["begins"])
    counts = [-(-length // packed["stride"]) + 1 for length in lengths]
    edges = np.cumsum([0, *counts])
    assert edges[-1] == len(positions) == len(lidar)
    return [
        (positions[begin:end], lidar[begin:end] * packed["range_m"] / 255) for begin, end in itertools.pairwise(edges)
    ]


def moments(batch, key, drone, end):
    """Return what a rollout has of a drone before each step, and after the last one before a moment."""
    before = batch[key][drone, :end]
    after = batch[("next", *key)][drone, end - 1 : end]
    return torch.cat([before, after]).numpy()


def test_what_is_packed_is_what_was_recorded_but_for_half_a_step(pack):
    packed, batch = pack()
    assert (packed["stride"], packed["map"]) == (1, 10_000)
    assert packed["begins"] == [0] * 6
    for drone, (position, lidar) in enumerate(unpack(packed)):
        end = packed["ends"][drone]
        assert end == 60 - 3 * drone
        recorded = moments(batch, ("info", "position"), drone, end)
        np.testing.assert_allclose(position, recorded, atol=packed["step_m"] / 2 + 1e-6)
        seen = moments(batch, ("agents", "observation", "lidar"), drone, end)[:, 0, :, 1]
        np.testing.assert_allclose(lidar, seen, atol=packed["range_m"] / 510 + 1e-6)
    obstacles = np.frombuffer(base64.b64decode(packed["obstacles"]), "<i2").reshape(61, 8, 3) * packed["step_m"]
    np.testing.assert_allclose(obstacles[:, 0, 0], np.sin(0.1 * np.arange(61)) - 4, atol=packed["step_m"])
    assert packed["outcomes"] == [0, 1, 2, 3, 4, 5]


def test_goals_and_headings_follow_from_what_drones_observe(pack):
    packed, _ = pack()
    assert packed["starts"][1] == [-9.0, -3.0, 1.5]
    assert packed["goals"] == [[9.0, -5 + 2.0 * drone, 1.5] for drone in range(6)]
    assert packed["headings"] == [0.0] * 6

    def turn(batch, *_):
        # The same world seen by drones that face +y: their goal is to the right of where they look.
        batch["agents", "observation", "direction"] = torch.tensor([0.0, 18.0, 0.0]).expand(6, 60, 1, 3).clone()
        batch["agents", "observation", "state"][..., :2] = torch.tensor([0.0, -1.0])

    turned, _ = pack(turn)
    np.testing.assert_allclose(turned["goals"], packed["goals"], atol=1e-3)
    assert turned["headings"] == [1.5708] * 6


def test_only_the_first_episode_of_a_drone_is_a_flight_of_an_evaluation(pack):
    def crash_again(batch, *_):
        batch["next", "done"][:, -1] = True
        batch["next", "info", "static_collision"][:, -1] = True

    packed, _ = pack(crash_again)
    assert packed["outcomes"] == [2, 1, 2, 3, 4, 5]
    assert packed["ends"] == [60 - 3 * drone for drone in range(6)]


def test_crashes_of_a_training_are_the_flights_that_ended_in_a_collision(pack):
    packed, batch = pack(read=read_crashes)
    assert packed["outcomes"] == [2, 3]
    assert (packed["begins"], packed["ends"]) == ([0, 0], [54, 51])
    last = batch["next", "info", "position"][2, 53].numpy()
    np.testing.assert_allclose(unpack(packed)[0][0][-1], last, atol=packed["step_m"])


def test_a_crash_begins_after_the_end_of_the_episode_before(pack):
    def crash_twice(batch, *_):
        batch["next", "done"][0, [19, 39]] = True
        batch["next", "info", "dynamic_collision"][0, [19, 39]] = True

    packed, _ = pack(crash_twice, read=read_crashes)
    assert (packed["begins"][:2], packed["ends"][:2]) == ([0, 20], [20, 40])
    assert packed["outcomes"] == [3, 3, 2, 3]


def test_crashes_are_those_on_the_map_with_most_of_them(pack):
    def two_maps(batch, metadata, arrays):
        metadata["map_seeds"] = [5, 7]
        arrays["boxes"] = np.concatenate([arrays["boxes"], np.full_like(arrays["boxes"], np.nan)])
        arrays["obstacles"] = np.concatenate([arrays["obstacles"], arrays["obstacles"] + 1])
        batch["next", "done"][4:, 5] = True
        batch["next", "info", "static_collision"][4:, 5] = True

    packed, _ = pack(two_maps, read=read_crashes)
    assert packed["map"] == 7
    assert packed["boxes"] == []
    # Drone 3 is the first one on the second map.
    assert packed["outcomes"] == [3, 2, 2]


def test_a_rollout_without_a_crash_or_without_a_world_has_nothing_to_replay(pack):
    assert pack(read=read_crashes, num_drones=2)[0] is None

    def strip(batch, metadata, arrays):
        metadata.clear()
        arrays.clear()

    assert pack(strip, read=read_crashes)[0] is None


def test_moments_are_left_out_first_and_drones_second_and_every_flight_keeps_its_end(pack, monkeypatch):
    monkeypatch.setattr(module, "MAX_PACKED_BYTES", 6_000)
    packed, batch = pack()
    assert packed["stride"] == 2
    assert packed["num_recorded"] == 6
    assert 1 <= len(packed["ends"]) < 6
    for drone, (position, _) in enumerate(unpack(packed)):
        last = batch["next", "info", "position"][drone, packed["ends"][drone] - 1].numpy()
        np.testing.assert_allclose(position[-1], last, atol=packed["step_m"])
    assert sum(len(packed[key]) for key in ("positions", "lidar", "obstacles")) < 6_000 * 4 / 3 + 100


def test_many_drones_for_long_stay_below_one_and_a_half_megabytes(pack):
    packed, _ = pack(num_drones=200, num_steps=900, num_obstacles=80)
    assert sum(len(packed[key]) for key in ("positions", "lidar", "obstacles")) < 1_500_000


def test_there_may_be_no_moving_obstacles(pack):
    packed, _ = pack(num_obstacles=0)
    assert packed["obstacles"] == ""


def test_a_field_of_many_kilometres_gets_coarser_steps(pack):
    def far(batch, *_):
        batch["info", "position"][0, :, 0] = 90_000.0

    packed, _ = pack(far)
    assert unpack(packed)[0][0][0, 0] == pytest.approx(90_000, rel=1e-4)


def _set(key, value):
    def change(batch, metadata, arrays):
        metadata[key] = value

    return change


def _array(name, change):
    def changed(batch, metadata, arrays):
        arrays[name] = change(arrays[name])

    return changed


def _replace(key, change):
    def changed(batch, metadata, arrays):
        batch[key] = change(batch[key])

    return changed


def _no_lidar(batch, *_):
    del batch["agents", "observation", "lidar"]


def _something_else(*_):
    return TensorDict({"observation": torch.zeros(1, 4, 3)}, batch_size=[1, 4])


POSITION = ("info", "position")
LIDAR = ("agents", "observation", "lidar")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("format", "other"), "does not hold flights"),
        (_set("map_seeds", []), "map_seeds is not a list of 1"),
        (_set("map_seeds", ["</script>"]), "map_seeds holds '</script>', expected numbers"),
        (_set("dt_s", 0), "dt_s is 0, expected a number above 0"),
        (_set("lidar_range_m", "far"), "lidar_range_m is 'far'"),
        (_set("obstacle_widths_m", []), "obstacles has the shape (1, 61, 8, 3), expected (1, 61, 0, 3)"),
        (_set("obstacle_widths_m", [1e300] * 8), "obstacle_widths_m holds 1e+300, expected numbers of sensible size"),
        (_set("obstacle_is_cylinder", None), "obstacle_is_cylinder is not a list of 8"),
        (_array("boxes", lambda boxes: boxes[..., :4]), "boxes has the shape (1, 8, 4)"),
        (_array("boxes", lambda boxes: boxes[:0]), "boxes has the shape (0, 8, 5)"),
        (_array("boxes", lambda boxes: np.zeros((1, 20_001, 5), np.float32)), "boxes has the shape (1, 20001, 5)"),
        (_array("boxes", lambda boxes: boxes + np.inf), "boxes or obstacles are not finite"),
        (_array("obstacles", lambda places: places * np.nan), "boxes or obstacles are not finite"),
        (_array("obstacles", lambda places: places[:, :9]), "obstacles has the shape (1, 9, 8, 3)"),
        (
            _array("obstacles", lambda places: places.astype("i4")),
            "(1, 61, 8, 3) and the dtype",
        ),
        (_replace(LIDAR, lambda lidar: lidar[..., :0]), "expected beams of a LiDAR"),
        (_replace(POSITION, lambda places: places * float("nan")), "info/position is not finite everywhere"),
        (_replace(POSITION, lambda places: places.half()), "info/position is float16"),
        (_replace(("next", "done"), lambda done: done.float()), "next/done is float32"),
        (_no_lidar, "has nothing under 'agents/observation/lidar'"),
        (_something_else, "does not hold flights"),
    ],
)
def test_a_file_that_is_sound_but_no_record_of_flights_is_named_with_what_is_wrong(pack, change, words):
    with pytest.raises(CorruptFileError, match=re.escape(words)) as caught:
        pack(change)
    assert "final_unseen.slip: " in str(caught.value)


def test_the_world_of_a_newer_version_is_told_apart_from_damage(pack):
    with pytest.raises(FormatVersionError, match="its world is of version 2, expected 1"):
        pack(_set("version", 2))


def test_flights_of_an_earlier_release_are_named_as_unsupported(pack):
    def as_before(*_):
        drone = {"position": torch.zeros(1, 4, 2, 3), "outcome": torch.zeros(1, 4, 2, dtype=torch.uint8)}
        return TensorDict({"drone": drone}, batch_size=[1, 4])

    def change(batch, metadata, arrays):
        metadata |= {"format": "slipstream.flights", "version": 1}
        return as_before()

    with pytest.raises(FormatVersionError, match="the format of an earlier release.* record them again"):
        pack(change)


def test_a_missing_extra_array_is_damage(pack):
    def change(batch, metadata, arrays):
        del arrays["obstacles"]

    with pytest.raises(CorruptFileError, match="has no extra array 'obstacles'"):
        pack(change)
