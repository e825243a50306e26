"""Files are recognised by their content, checked, and described."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream import (
    CorruptFileError,
    DatasetError,
    Fields,
    MissingEntryError,
    SequenceDataset,
    SlipstreamError,
    describe,
)
from slipstream.datasets.opening import find_files, natural
from tests.datasets.conftest import (
    actions,
    frames,
    joints,
    write_a,
    write_aloha,
    write_d4rl,
    write_maniskill,
    write_minari,
    write_robomimic,
)

REAL = Path(os.environ.get("SLIPSTREAM_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))


def test_layout_a_has_its_cameras_by_name_and_one_observation_more_than_actions(file_a):
    found = describe(file_a)
    assert found.layout == "A (/observations)"
    assert found.roles.cameras == {camera: f"observations/{camera}_image" for camera in ("left", "right", "global")}
    assert (found.joint_dim, found.action_dim) == (16, 7)
    assert (found.num_episodes, found.num_steps, found.num_transitions) == (3, 30, 30)
    assert [row.role for row in found.rows] == ["left", "right", "global", "joint", "action", "reward", "terminal"]


def test_wrist_cameras_are_left_and_right(tmp_path):
    names = {"left": "left_wrist_image", "right": "right_wrist_image"}
    cameras = describe(write_a(tmp_path / "w.hdf5", names=names)).roles.cameras
    assert cameras["left"] == "observations/left_wrist_image"
    assert cameras["right"] == "observations/right_wrist_image"


@pytest.mark.parametrize("chw", [False, True])
@pytest.mark.parametrize("column", [False, True])
def test_layout_b_is_the_same_at_the_root_with_channels_first_or_last(tmp_path, chw, column):
    found = describe(write_a(tmp_path / "b.hdf5", prefix="", chw=chw, column=column))
    assert found.layout == "B (at the root)"
    kind = found.stretches[0].cameras["left"].kind
    assert (kind.height, kind.width, kind.channels, kind.channels_first) == (20, 24, 3, chw)
    assert found.num_transitions == 30


def test_robomimic_episodes_are_in_the_order_of_their_numbers(tmp_path):
    found = describe(write_robomimic(tmp_path / "r.hdf5", tuple(range(2, 14))))
    assert found.layout == "robomimic"
    assert [stretch.group for stretch in found.stretches][-3:] == ["data/demo_9", "data/demo_10", "data/demo_11"]
    assert [stretch.num_steps for stretch in found.stretches] == list(range(2, 14))
    assert found.roles.joint == ("obs/robot0_joint_pos", "obs/robot0_gripper_qpos")
    assert found.joint_dim == 9
    assert found.roles.cameras == {
        "global": "obs/agentview_image",
        "robot0_eye_in_hand": "obs/robot0_eye_in_hand_image",
    }
    assert found.stretches[0].final == "next"
    assert found.num_transitions == found.num_steps


def test_without_next_observations_the_last_step_counts_only_if_it_was_terminal(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5", after=False)
    assert describe(path).num_transitions == 15
    with h5py.File(path, "a") as file:
        for number in range(3):
            del file[f"data/demo_{number}/dones"]
    found = describe(path)
    assert (found.num_steps, found.num_transitions) == (15, 12)
    assert any("3 final steps have no next observation" in note for note in found.notes)


@pytest.mark.parametrize("jpeg", [False, True])
def test_aloha_has_its_three_cameras_and_a_fourth(tmp_path, jpeg):
    found = describe(write_aloha(tmp_path / "episode_0.hdf5", jpeg=jpeg))
    assert found.layout == "ALOHA"
    assert found.roles.cameras["left"] == "observations/images/cam_left_wrist"
    assert found.roles.cameras["right"] == "observations/images/cam_right_wrist"
    assert found.roles.cameras["global"] == "observations/images/cam_high"
    assert found.roles.cameras["cam_low"] == "observations/images/cam_low"
    assert (found.joint_dim, found.action_dim, found.num_episodes, found.num_transitions) == (14, 14, 1, 11)
    assert found.stretches[0].cameras["left"].kind.encoding == ("bgr" if jpeg else "raw")


@pytest.mark.parametrize("jpeg", [False, True])
def test_minari_episodes_have_a_last_observation_of_their_own(tmp_path, jpeg):
    found = describe(write_minari(tmp_path / "main_data.hdf5", jpeg=jpeg))
    assert found.layout == "Minari"
    assert (found.num_episodes, found.num_steps, found.num_transitions) == (3, 12, 12)
    assert found.roles.terminal == "terminations"
    assert any("HDF5 only" in note for note in found.notes) == jpeg


def test_d4rl_episodes_end_at_flags_if_timeouts_are_recorded(tmp_path):
    found = describe(write_d4rl(tmp_path / "d.hdf5"))
    assert found.layout == "D4RL"
    assert found.stretches[0].lengths.tolist() == [10, 10, 10]
    assert found.stretches[0].cut.tolist() == [False, True, True]
    assert found.num_transitions == 30
    assert any("the next observation of 1 step differs" in note for note in found.notes)


def test_d4rl_episodes_without_timeouts_end_where_the_next_observation_is_not_what_follows(tmp_path):
    path = write_d4rl(tmp_path / "d.hdf5", timeouts=())
    with h5py.File(path, "a") as file:
        del file["timeouts"]
    found = describe(path)
    assert found.stretches[0].lengths.tolist() == [10, 15, 5]
    assert "1 episodes end without a flag: the next observation is not what follows" in found.notes


def test_links_between_steps_are_compared_at_the_coarser_precision(tmp_path):
    path = write_d4rl(tmp_path / "d.hdf5", timeouts=())
    with h5py.File(path, "a") as file:
        del file["timeouts"]
        for name, dtype in (("observations", "f4"), ("next_observations", "f8")):
            values = file[name][()]
            del file[name]
            file[name] = (values / 3).astype(dtype)
    assert describe(path).stretches[0].lengths.tolist() == [10, 15, 5]


def test_shuffled_transitions_are_rejected(tmp_path):
    path = write_d4rl(tmp_path / "d.hdf5")
    with h5py.File(path, "a") as file:
        order = np.random.default_rng(3).permutation(30)
        for name in ("observations", "next_observations"):
            file[name][...] = file[name][()][order]
    with pytest.raises(DatasetError, match=r"/next_observations does not continue .* of 27 steps: the rows are not in"):
        describe(path)


def test_maniskill_flags_within_an_episode_end_nothing(tmp_path):
    found = describe(write_maniskill(tmp_path / "m.h5"))
    assert found.layout == "ManiSkill"
    assert (found.num_episodes, found.num_transitions) == (2, 7)
    assert found.roles.cameras == {"global": "obs/sensor_data/base_camera/rgb"}
    assert found.roles.joint == ("obs/agent/qpos",)
    assert "5 flags of ends are set before the last step of an episode, and end nothing" in found.notes


def test_anything_else_is_read_by_the_names_it_is_given(tmp_path):
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        for number in (2, 10):
            file[f"runs/run {number}/cam/l"] = frames("left", 5)
            file[f"runs/run {number}/arm"], file[f"runs/run {number}/hand"] = joints(5, 6), joints(5, 2)
            file[f"runs/run {number}/cmd"] = actions(4)
    with pytest.raises(DatasetError, match=r"x.hdf5: none of the layouts that are known .*runs/run 10/cmd \[4, 7\]"):
        describe(path)
    fields = Fields({"left": "cam/l"}, ("arm", "hand"), "cmd", episodes="runs")
    found = describe(path, fields)
    assert [stretch.group for stretch in found.stretches] == ["runs/run 2", "runs/run 10"]
    assert (found.joint_dim, found.action_dim, found.num_transitions) == (8, 7, 8)


def test_a_group_per_episode_under_any_name_is_found(tmp_path):
    with h5py.File(tmp_path / "g.hdf5", "w") as file:
        for name in ("run10", "run9"):
            file[f"{name}/observations/joint"], file[f"{name}/actions"] = joints(4), actions(3)
    found = describe(tmp_path / "g.hdf5")
    assert [stretch.group for stretch in found.stretches] == ["run9", "run10"]


def test_episodes_of_layout_a_may_each_have_their_last_observation(tmp_path):
    found = describe(write_a(tmp_path / "a.hdf5", ends=(9, 19), rows=33))
    assert found.stretches[0].final == "own"
    assert describe(write_a(tmp_path / "b.hdf5", ends=(9, 19), rows=31)).stretches[0].final == "stream"


def test_chunks_of_many_frames_are_named_with_what_to_do(tmp_path):
    found = describe(write_a(tmp_path / "c.hdf5", chunks=(16, 20, 24, 3), compression="gzip"))
    assert any("left decodes 16 times its size; `slipstream data ingest`" in note for note in found.notes)
    assert found.rows[0].storage == "chunks 16x20x24x3 gzip"


def test_files_of_a_folder_are_in_the_order_of_their_numbers(tmp_path):
    for number in (2, 10, 1):
        (tmp_path / f"episode_{number}.hdf5").touch()
    (tmp_path / "notes.txt").touch()
    assert [file.name for file in find_files(tmp_path)] == ["episode_1.hdf5", "episode_2.hdf5", "episode_10.hdf5"]


@given(st.lists(st.integers(0, 10**6), min_size=1))
def test_names_sort_by_their_numbers(numbers):
    names = sorted((f"demo_{number}" for number in numbers), key=natural)
    assert [int(name[5:]) for name in names] == sorted(numbers)


@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is not here")
@pytest.mark.parametrize(
    ("name", "layout", "episodes", "steps", "transitions"),
    [
        ("robosuite_lift.hdf5", "robomimic", 1, 412, 411),
        ("robosuite_four_demos.hdf5", "robomimic", 4, 1950, 1946),
        ("maniskill_fmb_assembly1.h5", "ManiSkill", 1, 812, 811),
    ],
)
def test_recordings_that_nobody_here_made_are_recognised(name, layout, episodes, steps, transitions):
    found = describe(REAL / name)
    counts = (found.num_episodes, found.num_steps, found.num_transitions)
    assert (found.layout, counts) == (layout, (episodes, steps, transitions))


def change(path: Path, **members: object) -> Path:
    """Replace members of a file of layout A; None deletes one."""
    with h5py.File(path, "a") as file:
        for name, value in members.items():
            place = {"joint": "observations/joint", "left": "observations/left_image"}.get(name, name)
            del file[place]
            if value is not None:
                file[place] = value
    return path


BAD = {
    "not HDF5": (lambda p: p.write_bytes(b"no" * 4000), CorruptFileError, "is not an HDF5 file"),
    "a pointer": (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1"), CorruptFileError,
                  "is not an HDF5 file but a pointer of Git LFS; run `git lfs pull`"),
    "empty": (lambda p: p.write_bytes(b""), CorruptFileError, "is empty"),
    "cut off": (lambda p: os.truncate(p, p.stat().st_size - 999), CorruptFileError, "it is cut off"),
    "cut off in its superblock": (lambda p: os.truncate(p, 40), CorruptFileError, "cannot be opened as HDF5"),
    "no actions": (lambda p: change(p, actions=None), DatasetError, r"it has observations/global_image \[31, 20"),
    "too few frames": (
        lambda p: change(p, left=frames("left", 20)),
        DatasetError,
        "observations have different numbers of rows: /observations/joint 31, /observations/left_image 20",
    ),
    "too few of all": (lambda p: change(p, actions=actions(50), rewards=np.zeros(50), terminals=np.zeros(50)),
                       DatasetError, r"/observations/joint has 31 rows, expected 51 \(one more than the 50 actions\)"),
    "too few rewards": (lambda p: change(p, rewards=np.zeros(7)), DatasetError,
                        r"/rewards has shape \[7\], expected \[30\] or \[30, 1\]"),
    "rewards of two": (lambda p: change(p, rewards=np.zeros((30, 2))), DatasetError, r"/rewards has shape \[30, 2\]"),
    "no joints in a row": (lambda p: change(p, joint=np.zeros((31, 0))), DatasetError, "its rows have no values"),
    "images without pixels": (lambda p: change(p, left=np.zeros((31, 0, 24, 3), np.uint8)), DatasetError,
                              "its images have no pixels"),
    "no steps": (lambda p: change(p, actions=np.zeros((0, 7))), DatasetError, "/actions has no rows"),
    "strings": (lambda p: change(p, actions=[b"up"] * 30), DatasetError, "/actions holds strings, expected numbers"),
    "complex": (lambda p: change(p, joint=np.zeros((31, 2), complex)), DatasetError, "holds complex128, expected"),
    "one value": (lambda p: change(p, actions=1.0), DatasetError, "/actions is a single value"),
    "too many axes": (lambda p: change(p, joint=np.zeros((31, 2, 2))), DatasetError, r"expected \[rows, values\]"),
    "an external link": (lambda p: change(p, left=h5py.ExternalLink("other.hdf5", "/x")), DatasetError,
                         "/observations/left_image is an external link to /x in other.hdf5"),
    "a link to nowhere": (lambda p: change(p, actions=h5py.SoftLink("/nowhere")), DatasetError,
                          "/actions is a link to /nowhere, which is not there"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_file_is_one_sentence(file_a, name):
    spoil, kind, sentence = BAD[name]
    spoil(file_a)
    with pytest.raises(kind, match=sentence) as caught:
        describe(file_a)
    assert str(file_a) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone.hdf5"):
        describe(tmp_path / "gone.hdf5")
    with pytest.raises(CorruptFileError, match="is a folder"):
        describe(tmp_path)
    with pytest.raises(DatasetError, match="is a folder without a file that ends in .hdf5 or .h5"):
        find_files(tmp_path)


def test_a_dataset_that_was_named_and_is_missing_is_said_to_be_among_those_that_are_there(file_a):
    with pytest.raises(
        MissingEntryError, match=r"/observations/cam is not there; it has actions \[30, 7\], observations"
    ):
        describe(file_a, Fields({"left": "observations/cam"}))
    with pytest.raises(DatasetError, match=r"/observations/joint holds float64 of shape \[31, 16\], expected images"):
        describe(file_a, Fields({"left": "observations/joint"}))


def test_an_empty_group_among_episodes_is_named(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5")
    with h5py.File(path, "a") as file:
        file.create_group("data/demo_3")
    with pytest.raises(DatasetError, match="the group /data/demo_3 is empty, expected actions in it"):
        describe(path)


def test_ragged_episodes_are_named(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5")
    with h5py.File(path, "a") as file:
        del file["data/demo_2/actions"]
        file["data/demo_2/actions"] = np.zeros((6, 3))
    with pytest.raises(DatasetError, match="/data/demo_2/actions makes the action 3 values wide, 7 before it"):
        describe(path)
    with h5py.File(path, "a") as file:
        del file["data/demo_2/obs/agentview_image"]
    with pytest.raises((DatasetError, MissingEntryError), match="demo_2"):
        describe(path)


def test_values_in_another_file_are_refused(tmp_path):
    raw = tmp_path / "values.bin"
    raw.write_bytes(bytes(30 * 7 * 8))
    path = write_a(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        del file["actions"]
        file.create_dataset("actions", (30, 7), "f8", external=[(str(raw), 0, h5py.h5f.UNLIMITED)])
    with pytest.raises(DatasetError, match="the values of /actions are in another file, .*values.bin"):
        describe(path)


def test_a_virtual_dataset_of_another_file_is_refused(tmp_path, file_a):
    path = write_a(tmp_path / "v.hdf5")
    with h5py.File(path, "a") as file:
        del file["observations/left_image"]
        layout = h5py.VirtualLayout((31, 20, 24, 3), np.uint8)
        layout[:] = h5py.VirtualSource(file_a, "observations/left_image", (31, 20, 24, 3))
        file.create_virtual_dataset("observations/left_image", layout)
    with pytest.raises(DatasetError, match="left_image are in another file, .*a.hdf5"):
        describe(path)


@pytest.mark.parametrize("name", ["actions", "observations/left_image"])
def test_sizes_that_no_machine_has_are_refused_and_not_allocated(file_a, name):
    shape = (1 << 45, 7) if name == "actions" else (31, 1 << 20, 1 << 20, 3)
    with h5py.File(file_a, "a") as file:
        dtype = file[name].dtype
        del file[name]
        file.create_dataset(name, shape, dtype, chunks=(1, 7) if name == "actions" else (1, 8, 8, 3))
    with pytest.raises(DatasetError, match="claims 35184372088832 rows|images or chunks of more than 1024 MiB"):
        describe(file_a)


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_are_an_error_of_ours_or_harmless(tmp_path, data):
    whole = tmp_path / "whole.hdf5"
    if not whole.exists():
        write_a(whole, 6, size=(8, 8), chunks=(2, 8, 8, 3), compression="gzip")
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    spoilt = tmp_path / "spoilt.hdf5"
    spoilt.write_bytes(content)
    try:
        with SequenceDataset(spoilt, 2, image_size=8) as found:
            found[list(range(len(found)))]
    except (SlipstreamError, OSError):
        pass


def test_a_soft_link_that_leads_to_another_file_is_refused(tmp_path, file_a):
    path = write_a(tmp_path / "links.hdf5")
    with h5py.File(path, "a") as file:
        file["out"] = h5py.ExternalLink(str(file_a), "/")
        for name in ("actions", "observations/left_image"):
            file.move(name, f"{name}_kept")
            file[name] = h5py.SoftLink(f"/out/{name}")
    with pytest.raises(DatasetError, match="/actions is a link to /out/actions, which leads to another file, .*a.hdf5"):
        describe(path)
    with h5py.File(path, "a") as file:
        del file["actions"]
        file.move("actions_kept", "actions")
    with pytest.raises(DatasetError, match="/left_image is a link to /out/.*, which leads to another file, .*a.hdf5"):
        describe(path)


def test_a_virtual_dataset_that_leads_to_another_file_by_a_link_is_refused(tmp_path, file_a):
    path = write_a(tmp_path / "v.hdf5")
    with h5py.File(path, "a") as file:
        del file["observations/left_image"]
        file["out"] = h5py.ExternalLink(str(file_a), "/observations")
        layout = h5py.VirtualLayout((31, 20, 24, 3), np.uint8)
        layout[:] = h5py.VirtualSource(".", "/out/left_image", (31, 20, 24, 3))
        file.create_virtual_dataset("observations/left_image", layout)
    with pytest.raises(DatasetError, match="/out is an external link to /observations in .*a.hdf5"):
        describe(path)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("next_obs/robot0_joint_pos", np.zeros((2, 7)), r"robot0_joint_pos has shape \[2, 7\], expected \[5, 7\]"),
        ("next_obs/robot0_joint_pos", [b"a"] * 5, "robot0_joint_pos holds strings, expected numbers"),
        (
            "next_obs/robot0_joint_pos",
            np.where(np.arange(5)[:, None] == 4, np.nan, np.zeros((5, 7))),
            "not finite in row 4: nan",
        ),
        ("dones", np.array([0, 0, np.nan, 0, 1]), "/data/demo_1/dones is not finite in row 2: nan"),
    ],
)
def test_what_is_wrong_with_what_follows_or_with_flags_is_named(tmp_path, name, value, sentence):
    path = write_robomimic(tmp_path / "r.hdf5")
    with h5py.File(path, "a") as file:
        del file[f"data/demo_1/{name}"]
        file[f"data/demo_1/{name}"] = value
    with pytest.raises(SlipstreamError, match=sentence):
        SequenceDataset(path, image_size=8)
