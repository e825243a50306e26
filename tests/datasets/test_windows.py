"""Windows by offsets and timestamps, padding masks, extra keys, image sizes, and what an index may be."""

import json
from typing import Any

import cv2
import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from slipstream import (
    ConfigurationError,
    DatasetError,
    MissingEntryError,
    NonFiniteError,
    OutOfRangeError,
    SequenceDataset,
    ingest,
    prepare_frame,
)
from tests.datasets.conftest import row_of, write_a, write_d4rl, write_minari, write_robomimic

LENGTHS = (4, 5, 6)


@pytest.fixture
def robomimic(tmp_path):
    return write_robomimic(tmp_path / "r.hdf5", LENGTHS)


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """A dataset whose offsets a test may replace: opened once."""
    return write_robomimic(tmp_path_factory.mktemp("windows") / "r.hdf5", LENGTHS)


def rows(images: torch.Tensor) -> list[int]:
    return [row_of(image) for image in images]


def test_every_key_has_its_own_offsets_and_mask(robomimic):
    offsets = {"image": [-1, 0], "action": range(16), "joint": [0], "reward": [-3, 2]}
    with SequenceDataset(robomimic, offsets=offsets, image_size=16) as data:
        assert len(data) == sum(LENGTHS)
        first = data[0]
        last = data[8]
    assert rows(first["images"]["global"]) == [0, 0]
    assert first["image_is_pad"].tolist() == [True, False]
    assert first["action"][:, 0].tolist() == [0, 1, 2, 3] + [3] * 12
    assert first["action_is_pad"].tolist() == [False] * 4 + [True] * 12
    assert first["mask"].equal(~first["action_is_pad"])
    assert first["joint"].shape == (1, 9)
    assert first["reward_is_pad"].tolist() == [True, False]
    # The last step of the second episode.
    assert rows(last["images"]["global"]) == [103, 104]
    assert last["image_is_pad"].tolist() == [False, False]
    assert last["action"][:, 0].tolist() == [104] * 16
    assert last["action_is_pad"].tolist() == [False] + [True] * 15
    # A key without offsets has the current step.
    assert first["terminal"].shape == (1,)
    assert first["terminal_is_pad"].tolist() == [False]


@settings(max_examples=40, deadline=None)
@given(
    action=st.lists(st.integers(-9, 9), min_size=1, max_size=5),
    joint=st.lists(st.integers(-(2**31), 2**31), min_size=1, max_size=3),
)
def test_windows_are_those_of_lerobot(windows, action, joint):
    """LeRobot clamps ``index + delta`` to the episode, and says where it did."""
    with SequenceDataset(windows, offsets={"action": action, "joint": joint}, cameras=[]) as data:
        batch = data[:]
    for number in range(len(data)):
        start, length = 100 * int(batch["episode"][number]), LENGTHS[int(batch["episode"][number])]
        for key, deltas in (("action", action), ("joint", joint)):
            wanted = [int(batch["step"][number]) + delta for delta in deltas]
            clamped = [start + max(0, min(length - 1, step)) for step in wanted]
            assert batch[key][number, :, 0].tolist() == clamped
            assert batch[f"{key}_is_pad"][number].tolist() == [not 0 <= step < length for step in wanted]


def test_timestamps_are_offsets_at_the_frequency_of_the_recording(robomimic):
    # 0.1 + 0.2 is not 0.3, but within the tolerance.
    times: Any = {"image": [-0.1, 0.0], "action": [0.0, 0.1, 0.1 + 0.2], "joint": torch.tensor([0.0])}
    offsets = {"image": [-1, 0], "action": [0, 1, 3], "joint": [0]}
    with (
        SequenceDataset(robomimic, delta_timestamps=times, fps=np.int64(10), image_size=16) as data,  # type: ignore[arg-type]
        SequenceDataset(robomimic, offsets=offsets, image_size=16) as same,
    ):
        for key in ("action", "action_is_pad", "image_is_pad", "joint"):
            assert data[:][key].equal(same[:][key])
        assert data[3]["images"]["global"].equal(same[3]["images"]["global"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"delta_timestamps": {"action": [0.0]}}, "pass the steps per second as fps="),
        ({"delta_timestamps": {"action": [0.03]}, "fps": 10}, r"contain 0.03 s, which is no multiple of 1/10 s"),
        ({"delta_timestamps": {"action": [0.0]}, "fps": 0}, "fps is 0"),
        ({"delta_timestamps": {"action": [float("nan")]}, "fps": 10}, "delta_timestamps of 'action' is nan"),
        ({"delta_timestamps": {"action": ["now"]}, "fps": 10}, "delta_timestamps of 'action' is 'now'"),
        ({"delta_timestamps": {"a": [0.0]}, "offsets": {"a": [0]}, "fps": 1}, "pass one of them"),
        ({"offsets": {"images": [0]}}, "offsets are given for 'images', but the keys are image, joint, action, rew"),
        ({"offsets": {"action": []}}, "offsets of 'action' are empty"),
        ({"offsets": {"action": [0.5]}}, "an offset of 'action' is 0.5, expected a whole number"),
        ({"offsets": {"action": [True]}}, "an offset of 'action' is True"),
        ({"offsets": {"action": np.array([True, False])}}, "an offset of 'action' is True"),
        ({"offsets": {"action": 3}}, "the window of 'action' is 3, expected a list"),
        ({"offsets": {"action": "01"}}, "the window of 'action' is '01', expected a list"),
        ({"offsets": {"action": [2**40]}}, "an offset of 'action' is 1099511627776"),
        ({"offsets": [0]}, "offsets is a list, expected a dict"),
        ({"threads": 0}, "threads is 0"),
        ({"num_episodes": 1.5}, "num_episodes is 1.5"),
        ({"skip_last_steps": -1}, "skip_last_steps is -1"),
        ({"image_size": 0}, "image_size is 0"),
        ({"image_size": (64, 48, 3)}, r"image_size is \(64, 48, 3\), expected a whole number or \(height, width\)"),
        ({"image_size": (64, 0.5)}, "the width in image_size is 0.5"),
        ({"interpolation": "bicubic"}, "interpolation is 'bicubic', expected one of 'linear', 'area'"),
        ({"extra_keys": {"action": "actions"}}, "the extra key 'action' would replace a key of the window"),
        ({"extra_keys": {"action_is_pad": "actions"}}, "the extra key 'action_is_pad' would replace"),
        ({"extra_keys": ["obs/object"]}, "extra_keys is a list, expected a dict of paths by name"),
        ({"cameras": "global"}, r"cameras is 'global', expected a list of names, such as \['global'\]"),
        ({"extra_keys": {"a": "dones", "a_is_pad": "dones"}}, "the extra key 'a_is_pad' would replace a key"),
        ({"extra_keys": {"object": 3}}, "extra_keys has 'object': 3"),
    ],
)
def test_invalid_settings_are_refused(windows, options, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        SequenceDataset(windows, **options)


def test_cameras_may_have_offsets_of_their_own(robomimic):
    offsets = {"global": [-1, 0, 1], "image": [0]}
    with SequenceDataset(robomimic, offsets=offsets, image_size=16) as data:
        (other,) = set(data.cameras) - {"global"}
        window = data[3]
        assert window["images"]["global"].shape == (3, 3, 16, 16)
        assert window["images"][other].shape == (1, 3, 16, 16)
        assert rows(window["images"]["global"]) == [2, 3, 3]
        assert window["global_is_pad"].tolist() == [False, False, True]
        assert window["image_is_pad"].tolist() == [False]
    with SequenceDataset(robomimic, offsets={"global": [0]}, cameras=["global"], image_size=16) as data:
        assert "image_is_pad" not in data[0]
    with SequenceDataset(robomimic, cameras=[]) as data:
        assert "image_is_pad" not in data[0]


def test_a_camera_named_image_is_meant_like_all_others(tmp_path):
    with SequenceDataset(write_minari(tmp_path / "m.hdf5"), offsets={"image": [-1, 0]}, image_size=16) as data:
        window = data[1]
    assert rows(window["images"]["image"]) == [0, 1]
    assert window["image_is_pad"].tolist() == [False, False]


def test_the_last_steps_of_episodes_may_begin_no_window(robomimic):
    """As LeRobot's drop_n_last_frames and robomimic's pad_seq_length=False do it."""
    with SequenceDataset(robomimic, 3, skip_last_steps=2, cameras=[]) as data:
        assert len(data) == sum(LENGTHS) - 6
        batch = data[:]
        assert batch["action"][:, 0, 0].tolist() == [0, 1, 100, 101, 102, 200, 201, 202, 203]
        assert not batch["action_is_pad"].any()
        train, held = data.split(0.4)
        assert len(train) + len(held) == len(data)
    with SequenceDataset(robomimic, skip_last_steps=4, cameras=[]) as data:
        # The first episode has no window left.
        assert data[:]["action"][:, 0, 0].tolist() == [100, 200, 201]
    with pytest.raises(DatasetError, match="the longest episode has 6 steps, and skip_last_steps is 6"):
        SequenceDataset(robomimic, skip_last_steps=6, cameras=[])


# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_extras(robomimic):
    with h5py.File(robomimic, "r+") as file:
        for number, steps in enumerate(LENGTHS):
            group = file[f"data/demo_{number}"]
            group["obs/object"] = 100.0 * number + np.arange(steps)[:, None] + np.zeros((steps, 10))
            group["success"] = np.arange(steps) == steps - 1
            group["states"] = np.arange(steps + 1, dtype=np.uint32)
            group["language"] = f"task {number}"
            group["goal"] = np.full((1, 3), number, np.float64)
            group["words"] = np.array([f"{number}-{step}".encode() for step in range(steps)])
            group["broken"] = np.zeros(steps + 2)
            group["bad"] = np.where(np.arange(steps) == 2, np.nan, 0)
            group.attrs["lang"] = np.bytes_("pick é up".encode("latin-1"))
            group.attrs["ep_meta"] = json.dumps({"task": {"text": f"place {number}"}, "level": number})
        file["instruction"] = "tidy the table"
        file["data"].attrs["env_args"] = json.dumps({"env_kwargs": {"control_freq": 20}})
    return robomimic


def test_extra_keys_are_per_step_or_per_episode_and_numbers_or_text(with_extras):
    keys = {
        "object": "obs/object",
        "success": "success",
        "state": "states",
        "language": "language",
        "goal": "goal",
        "words": "words",
        "lang": "@lang",
        "task": "@ep_meta/task/text",
        "level": "@ep_meta/level",
        "instruction": "/instruction",
        "frequency": "/data@env_args/env_kwargs/control_freq",
    }
    offsets = {"object": [-1, 0], "success": [1], "words": [0, 1]}
    with SequenceDataset(with_extras, extra_keys=keys, offsets=offsets, cameras=[]) as data:
        window = data[4 + 4]
        batch = data[[0, 8, 14]]
    assert window["object"].dtype == torch.float32
    assert window["object"].shape == (2, 10)
    assert window["object"][:, 0].tolist() == [103, 104]
    assert window["object_is_pad"].tolist() == [False, False]
    assert window["success"].dtype == torch.bool
    assert window["success"].tolist() == [True]
    assert window["success_is_pad"].tolist() == [True]
    assert window["state"].tolist() == [4]
    assert window["state"].dtype == torch.int64
    assert window["language"] == "task 1"
    assert window["words"] == ["1-4", "1-4"]
    assert window["goal"].tolist() == [1, 1, 1]
    assert window["lang"] == "pick é up"
    assert (window["task"], int(window["level"]), window["instruction"]) == ("place 1", 1, "tidy the table")
    assert int(window["frequency"]) == 20
    assert batch["language"] == ["task 0", "task 1", "task 2"]
    assert batch["object"][:, 1, 0].tolist() == [0, 104, 205]
    assert batch["level"].tolist() == [0, 1, 2]


def test_an_ordinary_data_loader_collates_extra_keys(with_extras):
    keys = {"object": "obs/object", "language": "language"}
    with SequenceDataset(with_extras, extra_keys=keys, cameras=[]) as data:
        batch = next(iter(DataLoader(data, batch_size=5)))
    assert batch["language"] == ["task 0"] * 4 + ["task 1"]
    assert batch["object"].shape == (5, 1, 10)


def test_extra_keys_follow_episodes_in_files_without_groups(tmp_path):
    path = write_d4rl(tmp_path / "d.hdf5")
    with h5py.File(path, "r+") as file:
        file["infos/qpos"] = np.arange(30)[:, None] * np.ones(2)
    with SequenceDataset(path, extra_keys={"qpos": "infos/qpos"}, offsets={"qpos": [-1, 0]}) as data:
        batch = data[:]
    assert batch["qpos"][:, 1, 0].tolist() == list(range(30))
    assert batch["qpos"].dtype == torch.float32
    starts = [0, 10, 20]
    assert np.flatnonzero(batch["qpos_is_pad"][:, 0]).tolist() == starts


@pytest.mark.parametrize(
    ("path", "error", "sentence"),
    [
        ("obs/nothing", MissingEntryError, "data/demo_0/obs/nothing is not there; it has"),
        ("obs", MissingEntryError, "data/demo_0/obs is a group, expected a dataset"),
        ("@nothing", MissingEntryError, "/data/demo_0 has no attribute nothing; it has .*lang"),
        ("@ep_meta/task/other", MissingEntryError, "has no member other"),
        ("@lang/text", DatasetError, "is not JSON"),
        ("@ep_meta/task", DatasetError, "expected numbers or text"),
        ("nowhere@lang", MissingEntryError, "demo_0/nowhere is not there"),
        ("broken", DatasetError, r"has 6 rows, expected 4 \(one per step\), 5, or a single one"),
        ("bad", NonFiniteError, "bad is not finite in row 2 of /data/demo_0"),
    ],
)
def test_extra_keys_that_cannot_be_read_are_refused(with_extras, path, error, sentence):
    with pytest.raises(error, match=sentence):
        SequenceDataset(with_extras, extra_keys={"extra": path}, cameras=[])


def test_an_extra_key_that_differs_between_episodes_is_refused(with_extras):
    with h5py.File(with_extras, "r+") as file:
        del file["data/demo_1/obs/object"]
        file["data/demo_1/obs/object"] = np.zeros((5, 3))
        del file["data/demo_2/language"]
        file["data/demo_2/language"] = 7
    with pytest.raises(DatasetError, match=r"object is a value per step of shape \[10\] in one episode and .* \[3\]"):
        SequenceDataset(with_extras, extra_keys={"object": "obs/object"}, cameras=[])
    with pytest.raises(DatasetError, match="language is text in one episode and numbers in another"):
        SequenceDataset(with_extras, extra_keys={"language": "language"}, cameras=[])


# ---------------------------------------------------------------------------------------------------------------------


def write_noise(path: Any, steps: int = 6, size: tuple[int, int] = (48, 64), **storage: Any) -> Any:
    """Images whose every pixel matters."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (steps, *size, 3), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("observations/images/cam_scene", data=images, **storage)
        file["observations/qpos"] = np.zeros((steps, 2))
        file["action"] = np.zeros((steps, 2))
    return images


@pytest.mark.parametrize("image_size", [16, (30, 50), (96, 70), None])
@pytest.mark.parametrize("interpolation", ["linear", "area", "nearest", "cubic", "lanczos"])
def test_images_of_any_size_are_those_of_prepare_frame_and_of_opencv(tmp_path, image_size, interpolation):
    path = tmp_path / "n.hdf5"
    images = write_noise(path, chunks=(1, 48, 64, 3))
    with SequenceDataset(path, image_size=image_size, interpolation=interpolation) as data:
        found = data[:]["images"][data.cameras[0]][:, 0]
    height, width = (48, 64) if image_size is None else np.broadcast_to(image_size, 2).tolist()
    methods = {"linear": cv2.INTER_LINEAR, "area": cv2.INTER_AREA, "nearest": cv2.INTER_NEAREST}
    methods |= {"cubic": cv2.INTER_CUBIC, "lanczos": cv2.INTER_LANCZOS4}
    for image, stored in zip(found, images, strict=True):
        assert image.equal(prepare_frame(stored, image_size, interpolation=interpolation))
        expected = cv2.resize(stored, (width, height), interpolation=methods[interpolation])
        assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)


def test_the_default_is_linear_also_where_images_shrink_a_lot(tmp_path):
    images = write_noise(tmp_path / "n.hdf5", size=(480, 640), steps=2)
    with SequenceDataset(tmp_path / "n.hdf5", image_size=(48, 64)) as data:
        found = data[0]["images"][data.cameras[0]][0]
    assert np.array_equal(found.permute(1, 2, 0).numpy(), cv2.resize(images[0], (64, 48)))


def test_a_cache_is_used_for_linear_squares_only(tmp_path):
    path = tmp_path / "n.hdf5"
    images = write_noise(path)
    ingest(path, image_size=16)
    for size, method in ((16, "linear"), (16, "nearest"), ((16, 20), "linear")):
        with SequenceDataset(path, image_size=size, interpolation=method) as data:  # type: ignore[arg-type]
            found = data[:]["images"][data.cameras[0]][:, 0]
        for image, stored in zip(found, images, strict=True):
            assert image.equal(prepare_frame(stored, size, interpolation=method))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------


def test_an_index_may_be_a_slice_a_mask_or_numbers_of_any_kind(robomimic):
    with SequenceDataset(robomimic, cameras=[]) as data:
        mask = np.zeros(15, bool)
        mask[[2, 5]] = True
        wanted = data[[2, 5]]["action"]
        for index in (mask, mask.tolist(), torch.from_numpy(mask), slice(2, 6, 3), np.array([2, 5], np.uint8)):
            assert data[index]["action"].equal(wanted)
        assert data[[-1]]["action"].equal(data[14]["action"][None])
        assert data[np.int32(3)]["action"].equal(data[3]["action"])
        assert data[[]]["action"].shape == (0, 1, 7)
    with SequenceDataset(robomimic, image_size=16) as data:
        assert data[[]]["images"]["global"].shape == (0, 1, 3, 16, 16)
        assert data[np.zeros(15, bool)]["images"]["global"].shape == (0, 1, 3, 16, 16)


@pytest.mark.parametrize(
    ("index", "error", "sentence"),
    [
        (1.5, ConfigurationError, r"the index is 1.5 \(float64\), expected whole numbers or a mask"),
        ([0, 1.0], ConfigurationError, "expected whole numbers or a mask"),
        (np.array([0.0]), ConfigurationError, "expected whole numbers or a mask"),
        (True, ConfigurationError, r"the index is True \(bool\)"),
        ("3", ConfigurationError, "the index is '3'"),
        (None, ConfigurationError, "the index is None"),
        ([True, False], ConfigurationError, "the mask has 2 elements, expected 15"),
        ([[1, 2]], ConfigurationError, r"the indices have shape \[1, 2\], expected one axis"),
        ([[1], [2, 3]], ConfigurationError, "ragged"),
        (15, OutOfRangeError, "index 15 to 15, expected -15 to 14"),
        ([0, -16], OutOfRangeError, "index -16 to 0"),
        (2**70, ConfigurationError, "expected whole numbers"),
    ],
)
def test_an_index_that_is_no_number_is_refused(windows, index, error, sentence):
    with SequenceDataset(windows, cameras=[]) as data, pytest.raises(error, match=sentence):
        data[index]


def test_windows_of_transitions_are_not_disturbed_by_other_cameras(tmp_path):
    """Two files with images of different sizes give windows of one size."""
    paths = [write_a(tmp_path / "1.hdf5", 4), write_a(tmp_path / "2.hdf5", 4, size=(32, 40))]
    with SequenceDataset(paths, image_size=(12, 20), offsets={"image": [0, 1]}) as data:
        batch = data[[0, 4]]
    assert batch["images"]["left"].shape == (2, 2, 3, 12, 20)
    assert [rows(images) for images in batch["images"]["left"]] == [[0, 1], [0, 1]]
