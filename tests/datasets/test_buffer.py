"""Transitions of three cameras, as training code meets them."""

import gc
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, cast

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from slipstream import (
    AsyncSampler,
    ConfigurationError,
    DatasetError,
    MissingEntryError,
    MultimodalReplayBuffer,
    NonFiniteError,
)
from tests.datasets.conftest import (
    CAMERAS,
    actions,
    camera_of,
    frames,
    joints,
    row_of,
    write_a,
    write_aloha,
    write_minari,
    write_robomimic,
)


def buffer_of(path: Path, **options) -> MultimodalReplayBuffer:
    buffer = MultimodalReplayBuffer(action_dim=7, image_size=16, seed=3, **options)
    buffer.load_from_hdf5(path)
    return buffer


def known(statistic: Any) -> Any:
    """Return a statistic that has to be known."""
    assert statistic is not None
    return statistic


def everything(buffer):
    return buffer.sample(buffer.size, np.arange(buffer.size))


def test_a_batch_has_images_channels_first_and_everything_in_its_order(file_a):
    with buffer_of(file_a) as buffer:
        batch = buffer.sample(8)
    left, right, global_, joint, action, next_left, next_right, next_global, next_joint, reward, not_done = batch
    for image in (left, right, global_, next_left, next_right, next_global):
        assert (image.shape, image.dtype) == ((8, 3, 16, 16), torch.uint8)
        assert image.is_contiguous()
    assert (joint.shape, action.shape, reward.shape, not_done.shape) == ((8, 16), (8, 7), (8, 1), (8, 1))
    assert {value.dtype for value in (joint, action, next_joint, reward, not_done)} == {torch.float32}
    for number in range(8):
        step = int(action[number, 0])
        assert [camera_of(image[number]) for image in (left, right, global_)] == list(CAMERAS)
        assert row_of(left[number]) == row_of(right[number]) == row_of(global_[number]) == step
        assert int(joint[number, 0]) == step
        assert reward[number, 0] == pytest.approx(step / 10)


def test_a_terminal_step_is_not_done_and_followed_by_the_recorded_row(file_a):
    """Steps 9 and 19 are terminal: the next row belongs to the next episode, and not_done says that it is not used."""
    with buffer_of(file_a) as buffer:
        batch = everything(buffer)
    for step in range(30):
        assert row_of(batch.next_left[step]) == row_of(batch.next_global[step]) == step + 1
        assert int(batch.next_joint[step, 0]) == step + 1
        assert float(batch.not_done[step]) == (step not in (9, 19))


def test_a_terminal_step_without_any_row_after_it_repeats_the_last_one(tmp_path):
    with buffer_of(write_a(tmp_path / "a.hdf5", ends=(9, 29), rows=30)) as buffer:
        assert buffer.size == 30
        batch = everything(buffer)
    assert row_of(batch.next_left[29]) == row_of(batch.left[29]) == 29
    assert torch.equal(batch.next_joint[29], batch.joint[29])
    assert row_of(batch.next_left[9]) == 10
    assert batch.not_done[[9, 29], 0].tolist() == [0, 0]


def test_last_observations_of_episodes_are_used_where_they_were_recorded(tmp_path):
    with buffer_of(write_a(tmp_path / "a.hdf5", ends=(9, 19), rows=33)) as buffer:
        batch = everything(buffer)
    for step in range(30):
        row = step + step // 10
        assert row_of(batch.left[step]) == row
        assert row_of(batch.next_right[step]) == row + 1
        assert int(batch.next_joint[step, 0]) == row + 1


def test_the_last_step_of_an_episode_that_was_cut_off_is_no_transition_without_what_followed(tmp_path):
    with buffer_of(write_a(tmp_path / "a.hdf5", ends=(9,), rows=30)) as buffer:
        assert buffer.size == 29
        batch = everything(buffer)
        assert int(batch.action[-1, 0]) == 28
        assert row_of(batch.next_left[9]) == 10
        assert row_of(batch.next_left[28]) == 29


def test_robomimic_takes_what_follows_the_last_step_from_next_obs(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5", (4, 5))
    with MultimodalReplayBuffer(7, 9, image_size=16) as buffer:
        hand = "obs/robot0_eye_in_hand_image"
        with pytest.raises(MissingEntryError, match=r"no cameras left, right; those found are global"):
            buffer.load_from_hdf5(path)
        buffer.load_from_hdf5(path, cameras={"left": hand, "right": hand, "global": "obs/agentview_image"})
        batch = everything(buffer)
    assert [row_of(image) for image in batch.global_] == [0, 1, 2, 3, 100, 101, 102, 103, 104]
    assert [row_of(image) for image in batch.next_global] == [1, 2, 3, 4, 101, 102, 103, 104, 105]
    assert batch.next_joint[:, 0].tolist() == [1, 2, 3, 4, 101, 102, 103, 104, 105]
    assert batch.not_done[:, 0].tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 0]


def test_aloha_files_of_a_folder_are_episodes(tmp_path):
    for number in (0, 1):
        write_aloha(tmp_path / f"episode_{number}.hdf5", 5)
    with MultimodalReplayBuffer(14, 14, image_size=16) as buffer:
        buffer.load_from_hdf5(tmp_path)
        assert (buffer.num_episodes, buffer.size) == (2, 8)
        batch = everything(buffer)
        assert [row_of(image) for image in batch.left] == [0, 1, 2, 3] * 2
        assert batch.reward.sum() == 0


def test_flags_of_truncation_leave_not_done_alone(tmp_path):
    path = write_minari(tmp_path / "m.hdf5")
    with MultimodalReplayBuffer(3, 5, image_size=16) as buffer:
        image = "observations/image"
        buffer.load_from_hdf5(path, cameras=dict.fromkeys(CAMERAS, image))
        batch = everything(buffer)
    assert batch.not_done.min() == 1
    assert [row_of(image) for image in batch.next_left] == [1, 2, 3, 101, 102, 103, 104, 201, 202, 203, 204, 205]


def test_several_files_of_different_image_sizes_are_one_buffer(tmp_path):
    first = write_a(tmp_path / "1.hdf5", 10)
    second = write_a(tmp_path / "2.hdf5", 6, size=(40, 32), chw=True, prefix="", compression="gzip")
    with MultimodalReplayBuffer(7, image_size=16) as buffer:
        buffer.load_from_hdf5([first, second])
        assert (buffer.size, buffer.num_episodes) == (16, 2)
        batch = everything(buffer)
        assert [row_of(image) for image in batch.next_right] == [*range(1, 11), *range(1, 7)]
        metadata = buffer.image_metadata["left"]
        assert metadata["stored_sizes"] == [(20, 24), (40, 32)]
        assert metadata["reading"] == ["chunks", "contiguous"]
        buffer.load_from_hdf5(first, num_episodes=1)
        assert buffer.size == 26
        assert [row_of(image) for image in everything(buffer).left][16:] == list(range(10))
        assert buffer.image_metadata["hdf5_path"] == [str(first), str(second), str(first)]
        assert buffer.image_metadata["indices"].tolist() == [*range(10), *range(6), *range(10)]


def test_only_some_episodes_are_loaded_when_that_is_asked_for(file_a, caplog):
    with MultimodalReplayBuffer(7, image_size=16) as buffer, caplog.at_level(logging.WARNING):
        buffer.load_from_hdf5(file_a, num_episodes=2)
        assert (buffer.size, buffer.num_episodes) == (20, 2)
    assert caplog.text == ""


@pytest.mark.parametrize("rows", [30, 31, 33])
@pytest.mark.parametrize("count", [1, 9, 10, 13, 29])
def test_num_traj_limits_transitions_and_a_cut_is_not_terminal(tmp_path, rows, count):
    """Rows are those of files with no last observation, with that of the whole file, and with that of each episode."""
    path = write_a(tmp_path / "a.hdf5", ends=(9, 19), rows=rows)
    with buffer_of(path) as whole, MultimodalReplayBuffer(7, image_size=16) as buffer:
        buffer.load_from_hdf5(path, num_traj=count)
        assert buffer.size == len(buffer) == count
        expected = whole.sample(count, np.arange(count))
        for found, wanted in zip(everything(buffer), expected, strict=True):
            assert torch.equal(found, wanted)
        assert known(buffer.action_mean)[0] == pytest.approx(np.arange(count).mean())


def test_num_traj_cuts_where_next_observations_are_apart(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5", (4, 5))
    hand = "obs/robot0_eye_in_hand_image"
    with MultimodalReplayBuffer(7, 9, image_size=16) as buffer:
        cameras = {"left": hand, "right": hand, "global": "obs/agentview_image"}
        buffer.load_from_hdf5(path, num_traj=6, cameras=cameras)
        batch = everything(buffer)
    assert [row_of(image) for image in batch.next_global] == [1, 2, 3, 4, 101, 102]
    assert batch.next_joint[:, 0].tolist() == [1, 2, 3, 4, 101, 102]
    assert batch.not_done[:, 0].tolist() == [1, 1, 1, 0, 1, 1]


def test_a_longer_file_than_max_size_is_truncated_and_that_is_logged(file_a, caplog):
    with MultimodalReplayBuffer(7, max_size=25, image_size=16) as buffer, caplog.at_level(logging.WARNING):
        buffer.load_from_hdf5(file_a, num_traj=5)
        assert caplog.text == ""
        buffer.load_from_hdf5(file_a)
        assert buffer.size == 25
        assert "a.hdf5: truncated to 20 transitions, because max_size is 25" in caplog.text
        assert everything(buffer).action[:, 0].tolist() == [*range(5), *range(20)]
        buffer.load_from_hdf5(file_a)
        assert buffer.size == 25
        assert "a.hdf5: not loaded: the buffer has 25 transitions and max_size is 25" in caplog.text
    with MultimodalReplayBuffer(7, max_size=30) as buffer:
        caplog.clear()
        buffer.load_from_hdf5(file_a)
        assert (buffer.size, caplog.text) == (30, "")


def test_the_documented_program_runs(tmp_path, monkeypatch, capsys):
    """As it is written for the original class, but for the training loop."""
    monkeypatch.chdir(tmp_path)
    for name in ("offline_dataset.hdf5", "data.hdf5"):
        path = write_a(tmp_path / name, ends=(9,))
        with h5py.File(path, "a") as file:
            del file["actions"]
            file["actions"] = actions(30, 4)

    def model(*batch):
        assert [value.shape[0] for value in batch] == [256] * 11
        return batch[0].float().mean()

    buffer = MultimodalReplayBuffer(action_dim=4, joint_dim=16)
    assert (buffer.action_mean, buffer.action_std, buffer.joint_mean, buffer.joint_std) == (None,) * 4
    buffer.load_from_hdf5("offline_dataset.hdf5")
    batch = buffer.sample(batch_size=256)
    loss = model(*batch)
    assert loss > 0

    buffer.load_from_hdf5("data.hdf5", num_traj=100000)
    print(buffer.action_mean, buffer.action_std)  # noqa: T201 - part of the program
    assert capsys.readouterr().out.startswith("[14.5")
    sampler = AsyncSampler(buffer, batch_size=256, queue_size=4)
    assert len(sampler.get_batch()) == 11
    sampler.stop()
    buffer.close()


def test_the_path_may_be_named_and_where_images_are_is_known(file_a):
    with MultimodalReplayBuffer(7) as buffer:
        assert buffer.image_metadata == {}
        buffer.load_from_hdf5(hdf5_path=str(file_a), num_traj=12)
        assert buffer.image_metadata["hdf5_path"] == str(file_a)
        assert buffer.image_metadata["indices"].tolist() == list(range(12))
        assert buffer.image_metadata["left"]["datasets"] == ["observations/left_image"]


def test_indices_count_all_episodes_of_a_file(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5", (4, 5))
    with MultimodalReplayBuffer(7, 9) as buffer:
        buffer.load_from_hdf5(path, cameras=dict.fromkeys(CAMERAS, "obs/agentview_image"))
        assert buffer.image_metadata["indices"].tolist() == list(range(9))


def test_storage_has_the_numbers_of_all_transitions_and_is_read_only(file_a):
    with MultimodalReplayBuffer(7, image_size=16) as buffer:
        assert dict(buffer.storage) == {}
        buffer.load_from_hdf5(file_a)
        batch = everything(buffer)
        assert list(buffer.storage) == ["joint", "action", "next_joint", "reward", "not_done"]
        for name, values in buffer.storage.items():
            np.testing.assert_array_equal(values, getattr(batch, name))
            with pytest.raises(ValueError, match="read-only"):
                values[0] = 1
        with pytest.raises(TypeError):
            cast("Any", buffer.storage)["action"] = np.zeros(3)
        with pytest.raises(KeyError):
            buffer.storage["images"]


def test_actions_and_joints_are_normalised_as_tensors_and_as_arrays(file_a):
    with MultimodalReplayBuffer(7) as buffer:
        with pytest.raises(DatasetError, match="action_mean and action_std are None: call load_from_hdf5 first"):
            buffer.normalize_action(np.zeros(7))
        buffer.load_from_hdf5(file_a)
        values = buffer.storage["action"]
        scaled = buffer.normalize_action(values)
        assert isinstance(scaled, np.ndarray)
        np.testing.assert_allclose(scaled[:, 0].std(), 1, rtol=1e-5)
        np.testing.assert_allclose(buffer.unnormalize_action(scaled), values, atol=1e-5)
        joint = torch.from_numpy(buffer.storage["joint"].copy())
        assert isinstance(buffer.normalize_joint(joint), torch.Tensor)
        torch.testing.assert_close(buffer.unnormalize_joint(buffer.normalize_joint(joint)), joint)


def test_statistics_may_be_assigned_and_computed_again(file_a):
    with buffer_of(file_a) as buffer:
        mean = buffer.action_mean
        buffer.action_mean = np.full(7, 2.0, np.float32)
        buffer.action_std = np.full(7, 4.0, np.float32)
        assert buffer.normalize_action(np.full(7, 10.0)).tolist() == [2.0] * 7
        assert buffer.unnormalize_action(torch.zeros(7)).tolist() == [2.0] * 7
        found = buffer.compute_statistics()
        np.testing.assert_array_equal(buffer.action_mean, mean)
        assert (found["action"].min[0], found["action"].max[0]) == (0, 29)


def test_a_split_shares_no_episode_and_normalises_with_the_training_part(tmp_path):
    path = write_a(tmp_path / "a.hdf5", ends=tuple(range(4, 50, 5)), steps=50)
    with buffer_of(path) as buffer:
        train, held = buffer.split(0.2)
        assert (train.num_episodes, held.num_episodes) == (8, 2)
        assert (train.size, held.size) == (40, 10)
        steps = [set(part.storage["action"][:, 0].astype(int) // 5) for part in (train, held)]
        assert steps[0] | steps[1] == set(range(10))
        assert not steps[0] & steps[1]
        values = train.storage["action"]
        np.testing.assert_allclose(known(train.action_mean), values.mean(0), rtol=1e-5)
        np.testing.assert_array_equal(held.action_mean, train.action_mean)
        batch = held.sample(20)
        assert set(batch.action[:, 0].int().tolist()) <= set(held.storage["action"][:, 0].astype(int))
        assert [row_of(image) for image in batch.left] == batch.action[:, 0].int().tolist()
        assert buffer.size == 50
        with pytest.raises(ConfigurationError, match=r"fraction of 1.5 of 10 episodes"):
            buffer.split(1.5)


def test_a_part_of_a_buffer_outlives_it(file_a):
    train, held = buffer_of(file_a).split(0.4)
    gc.collect()
    assert train.sample(4).left.shape[0] == held.sample(4).left.shape[0] == 4


def test_statistics_are_those_of_all_that_is_loaded(tmp_path):
    paths = [write_a(tmp_path / "1.hdf5", 10), write_a(tmp_path / "2.hdf5", 25)]
    with MultimodalReplayBuffer(7) as buffer:
        assert buffer.action_mean is None
        for path in paths:
            buffer.load_from_hdf5(path)
        values = np.concatenate([actions(10), actions(25)])
        np.testing.assert_allclose(known(buffer.action_mean), values.mean(0), rtol=1e-6)
        np.testing.assert_allclose(known(buffer.action_std)[0], values.std(0)[0], rtol=1e-6)
        assert known(buffer.action_std)[1] == pytest.approx(1e-6)  # a constant: dividing by it stays finite
        values = np.concatenate([joints(11), joints(26)])
        np.testing.assert_allclose(known(buffer.joint_mean), values.mean(0), atol=1e-6)
        np.testing.assert_allclose(known(buffer.joint_std), values.std(0), rtol=1e-5)


def test_the_same_seed_draws_the_same_batches(file_a):
    first, second, other = (buffer_of(file_a), buffer_of(file_a), MultimodalReplayBuffer(7, image_size=16, seed=4))
    other.load_from_hdf5(file_a)
    for _ in range(3):
        batches = [buffer.sample(16) for buffer in (first, second, other)]
        assert all(torch.equal(a, b) for a, b in zip(batches[0], batches[1], strict=True))
        assert not torch.equal(batches[0].action, batches[2].action)


@pytest.mark.parametrize("scale", [None, 1, 255])
def test_floats_have_the_scale_that_was_asked_for(file_a, scale):
    whole = buffer_of(file_a)
    floats = buffer_of(file_a, image_dtype=torch.float32, image_scale=scale)
    assert (whole.image_dtype, whole.image_scale) == (torch.uint8, 255)
    assert (floats.image_dtype, floats.image_scale) == (torch.float32, scale or 1)
    for image, scaled in zip(whole.sample(4)[:3], floats.sample(4)[:3], strict=True):
        torch.testing.assert_close(scaled, image.float() * floats.image_scale / 255)


def test_a_batch_stays_as_it_is_while_someone_has_it_and_its_memory_is_used_again_after(file_a):
    buffer = buffer_of(file_a)
    first = buffer.sample(4, np.arange(4))
    kept = first.left[2]
    place = first.left.data_ptr()
    del first
    for _ in range(5):
        buffer.sample(4, np.arange(10, 14))
    assert row_of(kept) == 2
    del kept
    assert place in {buffer.sample(4).left.data_ptr() for _ in range(5)}


def test_adding_single_transitions_is_refused_with_what_to_do(file_a):
    with pytest.raises(NotImplementedError, match="use load_from_hdf5"):
        buffer_of(file_a).add(1, 2, 3)


def test_sampling_after_close_is_an_error_and_closing_twice_is_not(file_a):
    buffer = buffer_of(file_a)
    batch = buffer.sample(2, np.array([5, 6]))
    buffer.close()
    buffer.close()
    with pytest.raises(DatasetError, match="the buffer is closed"):
        buffer.sample(2)
    with pytest.raises(DatasetError, match="the buffer is closed"):
        buffer.load_from_hdf5(file_a)
    assert row_of(batch.left[0]) == 5


def test_sampling_before_loading_is_an_error():
    with pytest.raises(DatasetError, match="nothing is loaded yet: call load_from_hdf5 first"):
        MultimodalReplayBuffer(7).sample(2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"action_dim": 0}, "action_dim is 0, expected a whole number of at least 1"),
        ({"action_dim": 7, "image_size": 2.5}, "image_size is 2.5"),
        ({"action_dim": 7, "max_size": True}, "max_size is True"),
        ({"action_dim": 7, "image_dtype": torch.int32}, "image_dtype is torch.int32"),
        ({"action_dim": 7, "image_scale": 1}, "image_scale is 1, expected 255 for image_dtype=torch.uint8"),
        ({"action_dim": 7, "image_dtype": torch.float32, "image_scale": 2}, "image_scale is 2, expected 1 or 255"),
        ({"action_dim": 7, "image_dtype": torch.float32, "image_scale": True}, "image_scale is True"),
        ({"action_dim": 7, "max_size": 0}, "max_size is 0"),
        ({"action_dim": 7, "seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        MultimodalReplayBuffer(**options)


def test_a_file_without_joints_or_without_transitions_is_refused_with_what_to_do(tmp_path, file_a):
    with h5py.File(file_a, "a") as file:
        file.move("observations/joint", "observations/servo")
    with pytest.raises(MissingEntryError, match="no dataset was recognised as joint positions; name it, as in joint="):
        buffer_of(file_a)
    buffer = MultimodalReplayBuffer(7, image_size=16)
    buffer.load_from_hdf5(file_a, joint="observations/servo")
    assert buffer.size == 30
    with MultimodalReplayBuffer(14, 14) as buffer, pytest.raises(DatasetError, match="has no transition"):
        buffer.load_from_hdf5(write_aloha(tmp_path / "one.hdf5", 1))


def test_widths_other_than_those_of_the_buffer_are_refused_and_nothing_is_added(file_a):
    buffer = MultimodalReplayBuffer(6)
    with pytest.raises(DatasetError, match="its action has 7 values, the buffer was created with action_dim=6"):
        buffer.load_from_hdf5(file_a)
    buffer = MultimodalReplayBuffer(7, 14)
    with pytest.raises(DatasetError, match="its joint has 16 values, the buffer was created with joint_dim=14"):
        buffer.load_from_hdf5(file_a)
    assert buffer.size == 0


@pytest.mark.parametrize("name", ["actions", "rewards", "observations/joint"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_numbers_that_are_not_finite_are_named_with_their_row(file_a, name, value):
    with h5py.File(file_a, "a") as file:
        file[name][13] = value
    with pytest.raises(NonFiniteError, match=f"a.hdf5: /{name} is not finite in row 13: (nan|inf)"):
        buffer_of(file_a)


def test_a_file_that_changed_or_went_after_loading_is_an_error(file_a, tmp_path):
    buffer = buffer_of(file_a)
    with h5py.File(file_a, "a") as file:
        file["observations/left_image"][0] = 0
    os.utime(file_a, ns=(1, 1))
    with pytest.raises(DatasetError, match="a.hdf5: changed since it was opened"):
        buffer.sample(4)
    gone = write_a(tmp_path / "gone.hdf5")
    buffer = buffer_of(gone)
    gone.unlink()
    with pytest.raises(FileNotFoundError, match="gone.hdf5"):
        buffer.sample(4)


def test_a_camera_that_only_hdf5_can_read_is_read_with_a_warning_that_says_what_to_do(tmp_path, caplog):
    path = write_minari(tmp_path / "m.hdf5", jpeg=True)
    with MultimodalReplayBuffer(3, 5, image_size=16) as buffer, caplog.at_level(logging.WARNING):
        buffer.load_from_hdf5(path, cameras=dict.fromkeys(CAMERAS, "observations/image"))
        batch = everything(buffer)
    assert "can be read by HDF5 only, one frame at a time (its rows have different lengths)" in caplog.text
    assert "`slipstream data ingest`" in caplog.text
    red = batch.left[:, 0].float().mean((1, 2))
    assert red.tolist() == pytest.approx([0, 1, 2, 100, 101, 102, 103, 200, 201, 202, 203, 204], abs=4)  # JPEG is lossy


def test_a_pickled_buffer_goes_on_where_it_was(file_a):
    buffer = buffer_of(file_a)
    buffer.sample(4)
    twin = pickle.loads(pickle.dumps(buffer))
    assert all(torch.equal(a, b) for a, b in zip(buffer.sample(8), twin.sample(8), strict=True))
    buffer.close()
    assert twin.sample(2).left.shape == (2, 3, 16, 16)


def test_threads_may_sample_at_once(file_a):
    buffer = buffer_of(file_a)
    wrong: list[int] = []

    def sample():
        for _ in range(30):
            batch = buffer.sample(4)
            wrong.extend(n for n in range(4) if row_of(batch.left[n]) != int(batch.action[n, 0]))

    threads = [threading.Thread(target=sample) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Batches(Dataset[Any]):
    def __init__(self, buffer):
        self.buffer = buffer

    def __len__(self):
        return 6

    def __getitem__(self, index):
        batch = self.buffer.sample(5)
        assert [row_of(image) for image in batch.left] == batch.action[:, 0].int().tolist()
        return batch.action[:, 0].clone(), os.getpid()


def drawn(file: Path, method: str, workers: int = 2) -> list[tuple[list[float], int]]:
    with MultimodalReplayBuffer(7, image_size=16, seed=11) as buffer:
        buffer.load_from_hdf5(file)
        buffer.sample(3)  # its files are open when the workers start
        context = multiprocessing.get_context(method)
        context_loader = DataLoader(Batches(buffer), None, num_workers=workers, multiprocessing_context=context)
        return [(values.tolist(), int(process)) for values, process in context_loader]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_open_their_own_files_and_draw_their_own_numbers(file_a, method):
    batches = drawn(file_a, method)
    assert len({process for _, process in batches}) == 2
    assert os.getpid() not in {process for _, process in batches}
    assert len({tuple(values) for values, _ in batches}) == 6


def child_draws(file: Path) -> list[list[str]]:
    """What two children and their parent draw, in two runs of a program."""
    script = (
        "import sys, multiprocessing as m\n"
        "from slipstream import MultimodalReplayBuffer\n"
        "c = m.get_context('fork'); q = c.Queue()\n"
        "b = MultimodalReplayBuffer(7, image_size=16, seed=11); b.load_from_hdf5(sys.argv[1]); b.sample(2)\n"
        "def f(): q.put(b.sample(9).action[:, 0].tolist())\n"
        "for _ in range(2):\n"
        "    p = c.Process(target=f); p.start(); print(q.get()); p.join()\n"
        "print(b.sample(9).action[:, 0].tolist())\n"
    )
    command = [sys.executable, "-c", script, str(file)]
    programs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return [program.communicate()[0].splitlines() for program in programs]


def test_forked_children_draw_other_numbers_than_each_other_and_the_same_ones_next_time(file_a):
    first, second = child_draws(file_a)
    assert first == second
    assert len(set(first)) == 3


@pytest.mark.parametrize("storage", [{}, {"chunks": (1, 20, 24, 3), **hdf5plugin.Blosc2()}])
def test_a_fork_in_the_middle_of_reading_does_not_hang(tmp_path, storage):
    """The second way to store is read by HDF5, which has a lock of its own.

    In a process of its own: threads and locks that other tests left in this one can hang a child by themselves.
    """
    path = write_a(tmp_path / "a.hdf5", **storage)
    command = [sys.executable, "-c", textwrap.dedent(FORKING), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FORKING = """
    import os, sys, threading
    from slipstream import MultimodalReplayBuffer

    buffer = MultimodalReplayBuffer(7, image_size=16, seed=3)
    buffer.load_from_hdf5(sys.argv[1])
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            buffer.sample(8)

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    failed = 0
    for _ in range(10):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if buffer.sample(4).left.shape[0] == 4 else 1
            finally:
                os._exit(code)
        failed += os.waitpid(child, 0)[1] != 0
    stop.set()
    for thread in threads:
        thread.join()
    sys.exit(failed)
"""


def test_a_process_is_not_forked_while_frames_are_decoded():
    """OpenCV would be locked for ever in the child."""
    command = [sys.executable, "-c", textwrap.dedent(DECODING)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


DECODING = """
    import os, sys, threading
    from slipstream.datasets.files import decode_each

    begun, forking, ended = threading.Event(), threading.Event(), threading.Event()

    def decode(_):
        begun.set()
        forking.wait()
        sum(range(3_000_000))
        ended.set()

    os.register_at_fork(before=forking.set)
    thread = threading.Thread(target=decode_each, args=(decode, [0]))
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        decode_each(lambda _: None, range(4), 2)
        os._exit(0 if ended.is_set() else 1)
    thread.join()
    sys.exit(os.waitpid(child, 0)[1] != 0)
"""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_leaks_in_ten_thousand_samples(tmp_path):
    paths = [write_a(tmp_path / f"{number}.hdf5", 6, size=(8, 8), compression="gzip") for number in range(3)]
    buffer = MultimodalReplayBuffer(7, image_size=8, seed=0)
    buffer.load_from_hdf5(paths)
    for _ in range(500):
        buffer.sample(1)
    gc.collect()
    files, memory, threads = len(os.listdir("/proc/self/fd")), resident_bytes(), threading.active_count()
    for _ in range(10_000):
        buffer.sample(1)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() <= threads  # threads of an earlier test may end meanwhile
    assert resident_bytes() - memory < 8 << 20
    buffer.close()
    assert len(os.listdir("/proc/self/fd")) == files - 6  # three by position, three by way of HDF5


def test_a_buffer_that_is_dropped_closes_its_files(file_a):
    gc.collect()  # what earlier tests dropped
    before = len(os.listdir("/proc/self/fd"))
    buffer = buffer_of(file_a)
    buffer.sample(2)
    assert len(os.listdir("/proc/self/fd")) > before
    del buffer
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_that_of_numbers_and_not_of_images(tmp_path):
    path = tmp_path / "large.hdf5"
    steps = 20_000
    with h5py.File(path, "w") as file:
        for camera in CAMERAS:  # never written, and never read: half a gigabyte each
            file.create_dataset(f"observations/{camera}_image", (steps + 1, 96, 96, 3), np.uint8, chunks=(1, 96, 96, 3))
        file["observations/joint"], file["actions"] = joints(steps + 1), actions(steps)
    before = resident_bytes()
    with MultimodalReplayBuffer(7) as buffer:
        buffer.load_from_hdf5(path)
        assert buffer.nbytes < 110 * steps
        assert resident_bytes() - before < 30 << 20
        assert buffer.size == steps


def test_frames_helper_tells_rows_apart():
    assert row_of(frames("left", 600)[599].transpose(2, 0, 1)) == 599


@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_other_channels_than_those_that_are_loaded_are_refused(file_a, tmp_path, channels):
    other = write_a(tmp_path / "other.hdf5")
    with h5py.File(other, "a") as file:
        for camera in CAMERAS:
            del file[f"observations/{camera}_image"]
            file[f"observations/{camera}_image"] = np.zeros((31, 16, 16, channels), np.uint8)
    with MultimodalReplayBuffer(7, image_size=16) as buffer:
        buffer.load_from_hdf5(file_a)
        with pytest.raises(DatasetError, match=f"camera left have {channels} channels, .* loaded already have 3"):
            buffer.load_from_hdf5(other)
        assert buffer.size == 30


@pytest.mark.parametrize("rows", [30, 31, 33])
def test_statistics_of_joints_count_each_recorded_position_once(tmp_path, rows):
    path = write_a(tmp_path / "a.hdf5", ends=(9, 19), rows=rows)
    with h5py.File(path) as file:
        values = file["observations/joint"][()]
    with MultimodalReplayBuffer(7, image_size=16) as buffer:
        buffer.load_from_hdf5(path)
        np.testing.assert_allclose(known(buffer.joint_mean), values.mean(0), atol=1e-5)
        np.testing.assert_allclose(known(buffer.joint_std), values.std(0), rtol=1e-5)


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_file_that_is_replaced_or_deleted_while_it_is_open_is_an_error(file_a, tmp_path, how):
    with MultimodalReplayBuffer(7, image_size=16) as buffer:
        buffer.load_from_hdf5(file_a)
        buffer.sample(4)
        if how == "replaced":
            write_a(tmp_path / "new.hdf5").replace(file_a)
        else:
            file_a.unlink()
        with pytest.raises((DatasetError, FileNotFoundError), match="a.hdf5"):
            buffer.sample(4)


def test_a_process_that_is_forked_before_anything_was_drawn_draws_numbers_of_its_own(file_a):
    script = (
        "import os, sys\n"
        "from slipstream import MultimodalReplayBuffer\n"
        "b = MultimodalReplayBuffer(7, image_size=16, seed=1); b.load_from_hdf5(sys.argv[1])\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0)\n"
        "print(b.sample(20).action[:, 0].tolist(), flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(file_a)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(set(lines)) == 2
