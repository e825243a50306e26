"""Transitions with any number of cameras: what `MultimodalReplayBuffer` is a view of."""

import pickle
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from slipstream import ConfigurationError, DatasetError, MissingEntryError, TransitionDataset
from tests.datasets.conftest import (
    actions,
    camera_of,
    joints,
    row_of,
    write_a,
    write_aloha,
    write_d4rl,
    write_maniskill,
    write_minari,
    write_robomimic,
)


def test_a_batch_is_a_dict_with_the_cameras_of_the_file(tmp_path):
    with TransitionDataset(write_aloha(tmp_path / "a.hdf5"), image_size=16, seed=0) as data:
        batch = data.sample(5)
    assert list(data.cameras) == ["left", "right", "global", "cam_low"]
    assert list(batch["images"]) == list(batch["next_images"]) == list(data.cameras)
    assert sorted(batch) == [
        "action", "episode", "images", "joint", "next_images", "next_joint", "not_done", "reward", "step",
    ]  # fmt: skip
    for name in ("left", "right", "global"):
        image = batch["images"][name]
        assert (image.shape, image.dtype) == ((5, 3, 16, 16), torch.uint8)
        assert {camera_of(one) for one in image} == {name}
        assert [row_of(one) for one in image] == batch["step"].tolist()
        assert [row_of(one) for one in batch["next_images"][name]] == (batch["step"] + 1).tolist()
    assert batch["action"][:, 0].tolist() == batch["joint"][:, 0].tolist() == batch["step"].tolist()
    assert (batch["reward"].shape, batch["not_done"].shape) == ((5, 1), (5, 1))


@pytest.mark.parametrize(
    ("write", "count", "width", "cameras"),
    [
        (write_d4rl, 30, 4, []),
        (write_minari, 12, 5, ["image"]),
        (write_robomimic, 15, 9, ["robot0_eye_in_hand", "global"]),
        (write_maniskill, 7, 9, ["global"]),
    ],
)
def test_files_of_other_layouts_load_with_the_cameras_that_they_have(tmp_path, write, count, width, cameras):
    with TransitionDataset(write(tmp_path / "x.hdf5"), image_size=16) as data:
        batch = data[np.arange(len(data))]
    assert (len(data), batch["joint"].shape[1], sorted(data.cameras)) == (count, width, sorted(cameras))
    for name in data.cameras:
        steps = [row_of(image) for image in batch["next_images"][name]]
        assert [step % 100 for step in steps] == (batch["step"] + 1).tolist()


def test_d4rl_takes_what_follows_each_step_from_next_observations(tmp_path):
    path = write_d4rl(tmp_path / "d.hdf5")
    with TransitionDataset(path) as data:
        batch = data[np.arange(30)]
    with h5py.File(path) as file:
        np.testing.assert_array_equal(batch["joint"], file["observations"][()].astype(np.float32))
        np.testing.assert_array_equal(batch["next_joint"], file["next_observations"][()].astype(np.float32))
        np.testing.assert_array_equal(batch["action"], file["actions"][()].astype(np.float32))
        np.testing.assert_array_equal(batch["reward"][:, 0], file["rewards"][()])
        np.testing.assert_array_equal(batch["not_done"][:, 0], ~file["terminals"][()])
    assert batch["images"] == {}


SHARED = Path(__file__).parents[3] / "shared" / "data"


def recording(name: str) -> Path:
    """A public recording, which is not part of this repository."""
    if not (SHARED / name).exists():
        pytest.skip(f"{SHARED / name} is not there")
    return SHARED / name


@pytest.mark.parametrize("name", ["d4rl_hopper_medium_replay_v1.hdf5", "d4rl_pen_expert_v1.hdf5"])
def test_public_d4rl_files_have_the_numbers_that_h5py_reads(name):
    path = recording(name)
    with h5py.File(path) as file:
        observations, terminals, timeouts = (file[key][()] for key in ("observations", "terminals", "timeouts"))
        after = np.append(observations[1:], observations[-1:], 0)
        lost = timeouts.astype(bool) & ~terminals.astype(bool)
        if "next_observations" in file:
            after = file["next_observations"][()]
            lost[:] = False
        # Without them, the outcome of a timeout is not in the file.
        rows = np.flatnonzero(~lost)
        with TransitionDataset(path) as data:
            batch = data[:]
        np.testing.assert_array_equal(batch["joint"], observations[rows].astype(np.float32))
        np.testing.assert_array_equal(batch["next_joint"], after[rows].astype(np.float32))
        np.testing.assert_array_equal(batch["action"], file["actions"][()][rows].astype(np.float32))
        np.testing.assert_array_equal(batch["reward"][:, 0], file["rewards"][()].reshape(-1)[rows].astype(np.float32))
        np.testing.assert_array_equal(batch["not_done"][:, 0], ~terminals[rows].astype(bool))


def test_a_public_robomimic_file_has_the_numbers_that_h5py_reads():
    path = recording("robomimic_lift_low_dim.hdf5")
    with TransitionDataset(path) as data, h5py.File(path) as file:
        batch = data[:]
        names = ("robot0_joint_pos", "robot0_gripper_qpos")
        demos = sorted(file["data"], key=lambda name: int(name.removeprefix("demo_")))
        for key, group in (("joint", "obs"), ("next_joint", "next_obs")):
            whole = [np.concatenate([file[f"data/{demo}/{group}/{name}"] for name in names], 1) for demo in demos]
            np.testing.assert_array_equal(batch[key], np.concatenate(whole).astype(np.float32))
        actions = np.concatenate([file[f"data/{demo}/actions"] for demo in demos])
        np.testing.assert_array_equal(batch["action"], actions.astype(np.float32))


def test_d4rl_without_next_observations_drops_steps_after_which_nothing_was_recorded(tmp_path):
    """A terminal step in the middle is followed by the row that is there; a timeout is not: the episode is another."""
    path = write_d4rl(tmp_path / "d.hdf5", ends=(9,), timeouts=(19,))
    with h5py.File(path, "a") as file:
        del file["next_observations"]
    with TransitionDataset(path) as data:
        batch = data[np.arange(len(data))]
    assert batch["joint"][:, 0].tolist() == [step for step in range(30) if step not in (19, 29)]
    assert batch["next_joint"][9, 0] == 10
    assert batch["not_done"][9, 0] == 0


def test_cameras_may_be_chosen_named_or_left_out(tmp_path):
    path = write_a(tmp_path / "a.hdf5")
    with TransitionDataset(path, cameras=["right"], image_size=16) as data:
        assert list(data[0]["images"]) == ["right"]
        assert camera_of(data[0]["images"]["right"]) == "right"
    with TransitionDataset(path, cameras={"eye": "observations/global_image"}, image_size=16) as data:
        assert camera_of(data[0]["images"]["eye"]) == "global"
    with TransitionDataset(path, cameras=[]) as data:
        assert data[3]["images"] == {}
    with pytest.raises(MissingEntryError, match="wrist"):
        TransitionDataset(path, cameras=["wrist"])


def test_images_may_have_any_height_and_width(file_a):
    with TransitionDataset(file_a, image_size=(8, 20), interpolation="nearest") as data:
        image = data[3]["images"]["left"]
        assert image.shape == (3, 8, 20)
        assert row_of(image) == 3


def test_ranks_draw_different_samples_and_a_seed_repeats_them(file_a):
    drawn = []
    for rank in (0, 1, 1):
        with TransitionDataset(file_a, image_size=16, seed=2, rank=rank, world_size=2) as data:
            drawn.append(data.sample(50)["action"][:, 0].tolist())
    assert drawn[0] != drawn[1] == drawn[2]


def test_one_number_is_one_transition_and_negative_ones_count_from_the_end(file_a):
    with TransitionDataset(file_a, image_size=16) as data:
        one = data[-1]
        assert one["images"]["left"].shape == (3, 16, 16)
        assert (row_of(one["images"]["left"]), row_of(one["next_images"]["left"])) == (29, 30)
        assert (int(one["episode"]), int(one["step"])) == (2, 9)
        assert one["not_done"].tolist() == [1]
        for index in (30, -31):
            with pytest.raises(IndexError, match="expected -30 to 29"):
                data[index]
        with pytest.raises(ConfigurationError, match="expected whole numbers or a mask"):
            data[cast("Any", [0.5])]
        assert data[np.arange(30) == 4]["step"].tolist() == data[4:5]["step"].tolist() == [4]
        with pytest.raises(ConfigurationError, match=r"indices have shape \[2\], expected \[3\]"):
            data.sample(3, np.array([1, 2]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_loader_reads_batches_in_its_workers(file_a, method):
    with TransitionDataset(file_a, image_size=16) as data:
        sampler = BatchSampler(RandomSampler(data), 7, drop_last=False)
        seen = []
        for batch in DataLoader(data, None, sampler=sampler, num_workers=2, multiprocessing_context=method):
            assert [row_of(image) for image in batch["images"]["left"]] == batch["action"][:, 0].int().tolist()
            seen += batch["action"][:, 0].int().tolist()
    assert sorted(seen) == list(range(30))


def test_a_loader_that_collates_items_itself_works_too(file_a):
    with TransitionDataset(file_a, image_size=16) as data:
        batch = next(iter(DataLoader(data, batch_size=6)))
    assert [row_of(image) for image in batch["next_images"]["global"]] == [1, 2, 3, 4, 5, 6]


def test_a_pickled_dataset_continues_where_it_was(file_a):
    with TransitionDataset(file_a, image_size=16, seed=5) as data:
        data.sample(3)
        twin = pickle.loads(pickle.dumps(data))
        assert torch.equal(twin.sample(9)["action"], data.sample(9)["action"])


def test_parts_of_a_split_draw_independently_and_cover_everything(file_a):
    with TransitionDataset(file_a, image_size=16, seed=5) as data:
        train, held = data.split(0.3, seed=1)
        again, _ = data.split(0.3, seed=1)
        held.sample(100)
        assert torch.equal(train.sample(9)["action"], again.sample(9)["action"])
        found = [set(part[np.arange(len(part))]["action"][:, 0].int().tolist()) for part in (train, held)]
        assert sorted(map(len, found)) == [10, 20]
        assert found[0] | found[1] == set(range(30))
        assert held.statistics is train.statistics
        with pytest.raises(ConfigurationError, match="at least 2 episodes"):
            held.split(0.5)


def test_a_file_without_joints_has_no_entry_for_them(tmp_path):
    path = write_a(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        file.move("observations/joint", "observations/servo")
    with TransitionDataset(path, image_size=16) as data:
        assert "joint" not in data[0]
        assert data[0]["action"].shape == (7,)


def test_what_cannot_be_loaded_is_said(tmp_path):
    path = write_a(tmp_path / "a.hdf5")
    for options, sentence in (
        ({"num_transitions": 0}, "num_transitions is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"image_size": "large"}, "image_size is 'large'"),
        ({"image_dtype": torch.int64}, "image_dtype is torch.int64"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            TransitionDataset(path, **options)
    with h5py.File(tmp_path / "one.hdf5", "w") as file:
        file["observations/joint"], file["actions"] = np.zeros((1, 2)), np.zeros((1, 2))
    with pytest.raises(DatasetError, match=r"one.hdf5: has no transition: nothing was recorded after any step"):
        TransitionDataset(tmp_path / "one.hdf5")
    data = TransitionDataset(path, image_size=16)
    data.close()
    data.close()
    with pytest.raises(DatasetError, match="the dataset is closed"):
        data[0]


def write_many(path: Path, steps: int, length: int) -> None:
    """A flat file of many short episodes, without images."""
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = joints(steps + 1, 4), actions(steps, 2)
        file["terminals"] = np.arange(1, steps + 1) % length == 0


def test_many_short_episodes_are_indexed_like_plain_rows(tmp_path):
    write_many(tmp_path / "m.hdf5", 70_000, 3)
    with TransitionDataset(tmp_path / "m.hdf5", seed=1) as data:
        assert (len(data), data.num_episodes) == (70_000, 23_334)
        batch = data.sample(1000)
        rows = batch["action"][:, 0]
        assert torch.equal(batch["joint"][:, 0], rows)
        assert torch.equal(batch["next_joint"][:, 0], rows + 1)
        assert torch.equal(batch["not_done"][:, 0] == 0, rows % 3 == 2)
        train, held = data.split(0.5)
        assert len(train) + len(held) == 70_000


def test_next_observations_are_those_recorded_even_where_they_are_not_the_following_row(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5", (4, 5, 6))
    generator = np.random.default_rng(0)
    with h5py.File(path, "a") as file:
        for demo in file["data"].values():
            demo["next_obs/robot0_joint_pos"][1:3] = generator.normal(size=(2, 7))
        expected = np.concatenate([file[f"data/demo_{k}/next_obs/robot0_joint_pos"] for k in range(3)])
    with TransitionDataset(path, cameras=[]) as data:
        np.testing.assert_array_equal(data[:]["next_joint"][:, :7], expected.astype(np.float32))
        chosen = np.array([14, 6, 2, 6])
        np.testing.assert_array_equal(data[chosen]["next_joint"][:, :7], expected[chosen].astype(np.float32))
