"""Every layout that public recordings have loads with the numbers that h5py reads, and says what it does not use."""

from typing import Any

import h5py
import numpy as np
import pytest

from slipstream import ConfigurationError, DatasetError, Fields, MissingEntryError, NonFiniteError, SequenceDataset
from slipstream.datasets.describe import describe
from slipstream.datasets.opening import find_files
from slipstream.datasets.recordings import load
from tests.datasets.conftest import write_a
from tests.datasets.layouts import (
    LAYOUTS,
    images,
    numbers,
    write_aloha,
    write_droid,
    write_libero,
    write_minari,
    write_robomimic_image,
    write_robosuite,
)
from tests.datasets.plain import check_against_h5py


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_loads_with_the_numbers_that_h5py_reads(tmp_path, name):
    expected = LAYOUTS[name]
    path = tmp_path / "file.hdf5"
    expected["write"](path)
    found = check_against_h5py(path)
    assert found.layout == expected["layout"]
    assert [stretch.group.strip("/") for stretch in found.stretches] == expected["groups"]
    assert found.roles.action == expected["action"]
    assert list(found.roles.joint) == expected["joint"]
    assert found.roles.cameras == expected["cameras"]
    for note in expected["notes"]:
        assert note in found.notes


@pytest.mark.parametrize("name", [name for name, one in LAYOUTS.items() if one["cameras"]])
def test_the_images_of_a_layout_are_those_of_h5py(tmp_path, name):
    import cv2

    path = tmp_path / "file.hdf5"
    LAYOUTS[name]["write"](path)
    cameras = LAYOUTS[name]["cameras"]
    with SequenceDataset(path, 1, image_size=None, cameras=list(cameras)) as data, h5py.File(path) as file:
        group = file[LAYOUTS[name]["groups"][0] or "/"]
        for camera, where in cameras.items():
            row = group[where][2]
            image: Any = row if row.ndim == 3 else cv2.imdecode(row, cv2.IMREAD_COLOR)
            np.testing.assert_array_equal(data[2]["images"][camera][0].numpy(), image.transpose(2, 0, 1))


def test_several_kinds_of_actions_are_a_choice(tmp_path):
    write_droid(tmp_path / "trajectory.h5")
    with pytest.raises(MissingEntryError, match=r"/action is a group with action/cartesian_velocity, .* choose"):
        describe(tmp_path / "trajectory.h5")
    found = check_against_h5py(tmp_path / "trajectory.h5", Fields(action="action/cartesian_velocity"))
    assert found.roles.joint == (
        "observation/robot_state/joint_positions", "observation/robot_state/gripper_position",
    )  # fmt: skip


def test_any_numbers_can_be_selected_as_joints(tmp_path):
    write_robosuite(tmp_path / "demo.hdf5")
    assert describe(tmp_path / "demo.hdf5").joint_dim == 0
    assert check_against_h5py(tmp_path / "demo.hdf5", Fields(joint="states")).joint_dim == 32


def test_none_searches_and_empty_means_none(tmp_path):
    write_libero(tmp_path / "demo.hdf5")
    found = describe(tmp_path / "demo.hdf5", Fields(cameras={}, joint=()))
    assert (found.roles.cameras, found.roles.joint) == ({}, ())
    assert describe(tmp_path / "demo.hdf5", cameras=()).roles.cameras == {}


def test_named_cameras_join_the_recognised_ones_and_all_that_are_missing_are_listed(tmp_path):
    write_aloha(tmp_path / "episode_0.hdf5")
    fields = Fields(cameras={"low": "observations/images/cam_low"})
    found = describe(tmp_path / "episode_0.hdf5", fields)
    assert sorted(found.roles.cameras) == ["global", "left", "low", "right"]
    with pytest.raises(MissingEntryError, match="are no cameras front, back; those found are low .*left .*'back'"):
        describe(tmp_path / "episode_0.hdf5", fields, cameras=("left", "front", "back"))


def test_only_what_was_asked_for_is_checked(tmp_path):
    path = write_a(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        del file["observations/left_image"]
        file["observations/left_image"] = images(9, 8, 8, 3)
    with pytest.raises(DatasetError, match="observations have different numbers of rows"):
        describe(path)
    assert describe(path, cameras=["right"]).roles.cameras == {"right": "observations/right_image"}
    with SequenceDataset(path, 2, cameras=["right"], image_size=8) as data:
        assert data[0]["images"]["right"].shape == (2, 3, 8, 8)


def test_observations_are_listed_with_what_follows_them(tmp_path):
    write_robomimic_image(tmp_path / "demo.hdf5")
    found = {one.path: one for one in describe(tmp_path / "demo.hdf5").observations}
    assert found["obs/object"].next_path == "next_obs/object"
    assert (found["obs/object"].shape, found["obs/object"].width, found["obs/object"].is_joint) == ((5, 10), 10, False)
    assert found["obs/robot0_joint_pos"].is_joint
    assert "actions" not in found


# Selecting episodes.


def test_a_filter_key_selects_episodes(tmp_path):
    write_robomimic_image(tmp_path / "demo.hdf5")
    found = describe(tmp_path / "demo.hdf5", Fields(filter_key="train"))
    assert [stretch.group for stretch in found.stretches] == ["data/demo_1"]
    found = describe(tmp_path / "demo.hdf5", Fields(filter_key="valid"))
    assert [stretch.group for stretch in found.stretches] == ["data/demo_0"]
    assert "the filter key names 1 episode that the file does not have" in found.notes
    with pytest.raises(MissingEntryError, match="there is no filter key 'test' .* those it has are train, valid"):
        describe(tmp_path / "demo.hdf5", Fields(filter_key="test"))


def test_episodes_are_selected_by_name_or_number_in_that_order(tmp_path):
    write_robomimic_image(tmp_path / "demo.hdf5")
    choices: list[list[Any]] = [["demo_1", 0], [1, "data/demo_0"], [np.int64(1), 0, 1]]
    for wanted in choices:
        found = describe(tmp_path / "demo.hdf5", Fields(episodes=wanted))
        assert [stretch.group for stretch in found.stretches] == ["data/demo_1", "data/demo_0"]
    with pytest.raises(MissingEntryError, match=r"no episode \['demo_7', 9\]; those it has are demo_0, demo_1"):
        describe(tmp_path / "demo.hdf5", Fields(episodes=["demo_7", 0, 9]))
    with pytest.raises(ConfigurationError, match="episodes is an empty list"):
        describe(tmp_path / "demo.hdf5", Fields(episodes=[]))
    path = write_a(tmp_path / "a.hdf5")
    with pytest.raises(DatasetError, match="has no such groups"):
        describe(path, Fields(episodes=[0]))


def test_bad_episodes_are_an_error_or_are_skipped_and_counted(tmp_path):
    path = tmp_path / "demo.hdf5"
    write_robomimic_image(path)
    with h5py.File(path, "a") as file:
        file.copy("data/demo_1", "data/demo_2")
        file.copy("data/demo_1", "data/demo_3")
        file.create_group("data/demo_4")
        del file["data/demo_0/actions"]
        del file["data/demo_2/obs/agentview_image"]
        file["data/demo_2/obs/agentview_image"] = images(3, 12, 12, 3)
        file["data/demo_3/dones"][...] = False
        del file["data/demo_3/dones"]
        file["data/demo_3/dones"] = np.full(7, np.nan)
        file.copy("data/demo_1", "data/demo_5")
        file["data/demo_5/actions"][3, 2] = np.nan
    with pytest.raises(MissingEntryError, match="/data/demo_0/actions is not there"):
        describe(path)
    found = describe(path, Fields(on_bad_episode="skip"))
    assert [stretch.group for stretch in found.stretches] == ["data/demo_1"]
    assert [one.group for one in found.skipped] == [
        "data/demo_0",
        "data/demo_2",
        "data/demo_3",
        "data/demo_4",
        "data/demo_5",
    ]
    assert any(note.startswith("skipped 5 episodes that cannot be used: ") for note in found.notes)
    # Images that nobody needs do not make an episode bad.
    assert load([path], Fields(on_bad_episode="skip"), cameras=()).num_episodes == 2
    assert load([path], Fields(on_bad_episode="skip")).num_episodes == 1
    with h5py.File(path, "a") as file:
        del file["data/demo_1"]
    with pytest.raises(DatasetError, match="none of its 5 episodes can be used|/data/demo_5/actions is not finite"):
        describe(path, Fields(on_bad_episode="skip"))
    with pytest.raises(ConfigurationError, match="on_bad_episode is 'ignore', expected one of 'raise', 'skip'"):
        Fields(on_bad_episode="ignore")  # type: ignore[arg-type]


def test_a_group_of_actions_alone_is_not_an_episode(tmp_path):
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        file["policy/actions"], file["world/state"] = numbers(5, 2), numbers(5, 3)
    with pytest.raises(DatasetError, match="none of the layouts that are known .* together with observations"):
        describe(tmp_path / "f.hdf5")


# Minari.


def test_a_minari_dataset_is_found_by_its_root_and_among_others(tmp_path):
    for name in ("door/human-v2", "pen/human-v10", "pen/human-v9"):
        (tmp_path / name / "data").mkdir(parents=True)
        write_minari(tmp_path / name / "data" / "main_data.hdf5")
        (tmp_path / name / "data" / "metadata.json").write_text("{}")
    (tmp_path / ".hidden").mkdir()
    write_minari(tmp_path / ".hidden" / "main_data.hdf5")
    one = tmp_path / "door" / "human-v2"
    assert find_files(one) == [one / "data" / "main_data.hdf5"]
    assert [str(file.relative_to(tmp_path)) for file in find_files(tmp_path)] == [
        "door/human-v2/data/main_data.hdf5", "pen/human-v9/data/main_data.hdf5", "pen/human-v10/data/main_data.hdf5",
    ]  # fmt: skip
    assert load(find_files(tmp_path)).num_episodes == 6


def test_rows_are_counted_over_all_of_a_nested_observation(tmp_path):
    write_minari(tmp_path / "main_data.hdf5")
    with h5py.File(tmp_path / "main_data.hdf5", "a") as file:
        del file["episode_1/observations/desired_goal"]
        file["episode_1/observations/desired_goal"] = numbers(5, 2)
    with pytest.raises(DatasetError, match="/episode_1/observations/desired_goal 5, /episode_1/observations/observ"):
        describe(tmp_path / "main_data.hdf5")


@pytest.mark.parametrize("shape", [None, (6, 0)])
def test_empty_observations_are_rejected(tmp_path, shape):
    with h5py.File(tmp_path / "main_data.hdf5", "w") as file:
        if shape is None:
            file.create_group("episode_0/observations")
        else:
            file["episode_0/observations"] = np.zeros(shape)
        file["episode_0/actions"] = numbers(5, 2)
    with pytest.raises(DatasetError, match="observations of /episode_0 are empty|its rows have no values"):
        describe(tmp_path / "main_data.hdf5")


# Flags.


@pytest.mark.parametrize(("value", "is_end"), [(1e-9, False), (1 - 1e-9, True), (1.0, True), (0.0, False)])
def test_flags_are_0_and_1_up_to_rounding(tmp_path, value, is_end):
    path = write_a(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        del file["terminals"]
        file["terminals"] = np.where(np.arange(30) == 9, value, 0.0)
    assert (describe(path).num_episodes == 2) == is_end
    assert load([path], cameras=()).terminal[9] == is_end


@pytest.mark.parametrize(("value", "kind"), [(-1, DatasetError), (0.5, DatasetError), (np.nan, NonFiniteError)])
def test_other_flags_are_rejected_with_their_row(tmp_path, value, kind):
    path = write_a(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        del file["terminals"]
        file["terminals"] = np.where(np.arange(30) == 9, value, 0.0)
    with pytest.raises(kind, match="/terminals is .*in row 9"):
        describe(path)
