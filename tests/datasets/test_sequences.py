"""Windows of episodes: by horizon, split, loaded by a DataLoader."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from slipstream import ConfigurationError, DatasetError, Fields, SequenceDataset
from tests.datasets.conftest import row_of, write_a, write_minari, write_robomimic


@pytest.fixture
def robomimic(tmp_path):
    return write_robomimic(tmp_path / "r.hdf5", (4, 5, 6))


def test_a_window_begins_at_every_step_and_repeats_the_last_one_where_the_episode_ends(robomimic):
    with SequenceDataset(robomimic, 3, image_size=16) as data:
        assert len(data) == 15
        window = data[2]
        assert window["action"][:, 0].tolist() == [2, 3, 3]
        assert window["mask"].tolist() == [True, True, False]
        assert [row_of(image) for image in window["images"]["global"]] == [2, 3, 3]
        assert window["joint"].shape == (3, 9)
        assert window["joint"][:, 0].tolist() == [2, 3, 3]
        assert window["terminal"].tolist() == [False, True, True]
        assert (int(window["episode"]), int(window["step"])) == (0, 2)
        assert data[4]["action"][:, 0].tolist() == [100, 101, 102]
        assert data[-1]["action"][:, 0].tolist() == [205, 205, 205]
        with pytest.raises(IndexError):
            data[15]


def test_no_window_holds_steps_of_two_episodes(robomimic):
    with SequenceDataset(robomimic, 7, image_size=16) as data:
        batch = data[list(range(15))]
    assert batch["images"]["global"].shape == (15, 7, 3, 16, 16)
    episodes = batch["action"][:, :, 0] // 100
    assert (episodes == batch["episode"][:, None]).all()
    assert (batch["images"]["global"][:, :, 0, 0, 0].int() == batch["action"][:, :, 0].int() % 256).all()
    steps = batch["step"][:, None] + torch.arange(7)
    lengths = torch.tensor([4, 5, 6])[batch["episode"]][:, None]
    assert torch.equal(batch["mask"], steps < lengths)


def test_images_may_be_read_of_the_first_steps_only(robomimic):
    with SequenceDataset(robomimic, 5, image_steps=1, cameras=["global"], image_size=16) as data:
        window = data[0]
        assert window["images"].keys() == {"global"}
        assert window["images"]["global"].shape == (1, 3, 16, 16)
        assert window["action"].shape == (5, 7)


def test_cameras_may_be_named_or_left_out_and_images_keep_their_size(robomimic):
    named = {"hand": "obs/robot0_eye_in_hand_image"}
    with SequenceDataset(robomimic, 2, cameras=named, image_size=None) as data:
        assert data[0]["images"]["hand"].shape == (2, 3, 20, 24)
    with SequenceDataset(robomimic, 2, cameras=[]) as data:
        assert data[0]["images"] == {}


def test_images_of_different_sizes_cannot_keep_them(tmp_path):
    paths = [write_a(tmp_path / "1.hdf5", 4), write_a(tmp_path / "2.hdf5", 4, size=(32, 32))]
    with pytest.raises(DatasetError, match=r"different sizes \[\(20, 24\), \(32, 32\)\], so image_size cannot be None"):
        SequenceDataset(paths, image_size=None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"horizon": 0}, "horizon is 0"),
        ({"horizon": 2, "image_steps": 3}, "image_steps is 3, expected a whole number from 1 to 2"),
    ],
)
def test_windows_that_make_no_sense_are_refused(robomimic, options, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        SequenceDataset(robomimic, **options)


def test_a_split_is_by_episode_and_statistics_are_of_the_training_part_alone(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5", (5,) * 10)
    with SequenceDataset(path, cameras=[]) as data:
        train, held = data.split(0.3, seed=1)
        assert len(held.episodes) == 3
        assert sorted([*train.episodes, *held.episodes]) == list(range(10))
        seen = {int(data["episode"]) for data in (train[n] for n in range(len(train)))}
        assert seen == set(train.episodes.tolist())
        values = np.concatenate([train[n]["action"].numpy() for n in range(len(train))])
        for part in (train, held):
            np.testing.assert_allclose(part.statistics["action"].mean, values.mean(0), rtol=1e-6)
            np.testing.assert_allclose(part.statistics["action"].std[0], values.std(0)[0], rtol=1e-6)
            assert part.statistics["action"].max[0] == values[:, 0].max()
        assert not np.allclose(data.statistics["action"].mean, train.statistics["action"].mean)
        again, _ = data.split(0.3, seed=1)
        other, _ = data.split(0.3, seed=2)
        assert again.episodes.tolist() == train.episodes.tolist() != other.episodes.tolist()


@pytest.mark.parametrize("share", [0, 1, -0.5])
def test_a_split_that_leaves_a_part_empty_is_refused(robomimic, share):
    with SequenceDataset(robomimic) as data, pytest.raises(ConfigurationError, match="cannot take a share of"):
        data.split(share)


def test_reading_after_close_is_an_error_in_every_part(robomimic):
    data = SequenceDataset(robomimic, image_size=16)
    train, _ = data.split(0.4)
    train[0]
    data.close()
    for part in (data, train):
        with pytest.raises(DatasetError, match="closed"):
            part[0]


def test_it_reads_the_same_after_pickling(robomimic):
    data = SequenceDataset(robomimic, 2, image_size=16)
    twin = pickle.loads(pickle.dumps(data))
    data.close()
    assert [row_of(image) for image in twin[5]["images"]["global"]] == [101, 102]


@pytest.mark.parametrize("method", [None, "fork"])
def test_a_data_loader_gives_every_window_once(robomimic, method):
    with SequenceDataset(robomimic, 2, image_size=16) as data:
        data[0]
        workers = 0 if method is None else 2
        context = None if method is None else multiprocessing.get_context(method)
        generator = torch.Generator().manual_seed(0)
        order = BatchSampler(RandomSampler(data, generator=generator), 4, drop_last=False)
        loader = DataLoader(data, None, sampler=order, num_workers=workers, multiprocessing_context=context)
        found = []
        for batch in loader:
            rows = [row_of(image) for image in batch["images"]["global"][:, 0]]
            assert rows == batch["action"][:, 0, 0].int().tolist()
            found += rows
    assert sorted(found) == [0, 1, 2, 3, 100, 101, 102, 103, 104, 200, 201, 202, 203, 204, 205]


def test_an_ordinary_data_loader_collates_windows(robomimic):
    with SequenceDataset(robomimic, 2, image_size=16) as data:
        batch = next(iter(DataLoader(data, batch_size=3)))
    assert batch["images"]["global"].shape == (3, 2, 3, 16, 16)
    assert batch["action"][:, 0, 0].tolist() == [0, 1, 2]


def test_minari_windows_leave_the_last_observation_out(tmp_path):
    with SequenceDataset(write_minari(tmp_path / "m.hdf5"), 4, image_size=16) as data:
        assert len(data) == 12
        assert [row_of(image) for image in data[0]["images"]["image"]] == [0, 1, 2, 2]


def test_fields_name_what_is_not_recognised(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5")
    fields = Fields(joint="obs/robot0_gripper_qpos", reward="dones")
    with SequenceDataset(path, fields=fields, cameras=[]) as data:
        assert data[3]["joint"].shape == (1, 2)
        assert float(data[3]["reward"]) == 1


def test_a_number_may_be_a_tensor(robomimic):
    with SequenceDataset(robomimic, 2, cameras=[]) as data:
        assert data[torch.tensor(3)]["action"].equal(data[3]["action"])
