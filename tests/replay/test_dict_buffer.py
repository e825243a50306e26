"""`DictReplayBuffer`: whole episodes in, tensors out."""

import numpy as np
import pytest
import torch

from slipstream import ConfigurationError, DictReplayBuffer, ReplayError, StateMismatchError
from tests.replay.samples import assert_same, episode

KEYS = ("position", "action", "done", "camera")


def filled():
    buffer = DictReplayBuffer(200, KEYS, "cpu", True, seed=0)
    for number in range(4):
        assert buffer.add(episode(30, number, image=True)) == number
    return buffer


def test_steps_come_back_as_tensors_with_their_next():
    batch = filled().sample(32)
    assert {name: (values.dtype, tuple(values.shape)) for name, values in batch.items()} == {
        "position": (torch.float32, (32, 3)),
        "next_position": (torch.float32, (32, 3)),
        "action": (torch.float64, (32, 1)),
        "done": (torch.bool, (32,)),
        "camera": (torch.uint8, (32, 24, 20, 3)),
        "next_camera": (torch.uint8, (32, 24, 20, 3)),
    }
    assert bool((batch["next_position"] == batch["position"] + 1).all())


def test_sequences_stay_in_their_episode():
    batch = filled().sample_sequences(16, 12)
    assert batch["position"].shape == (16, 13, 3)
    assert bool((batch["position"][..., 0].diff(dim=1) == 1).all())


def test_arrays_of_one_length_are_frames_and_the_last_is_the_end():
    buffer = DictReplayBuffer(100, ["x"], seed=0)
    buffer.add({"x": torch.arange(10)})
    assert len(buffer) == 9
    batch = buffer.sample(50)
    assert bool((batch["next_x"] == batch["x"] + 1).all())


def test_the_oldest_episodes_go():
    buffer = filled()
    for number in range(4, 9):
        buffer.add(episode(30, number, image=True))
    assert (buffer.num_episodes, len(buffer)) == (6, 180)
    assert int(buffer.sample(100)["position"].min()) >= 3000


def test_images_are_packed_only_if_asked_for():
    packed, raw = filled(), DictReplayBuffer(200, KEYS, img_compressed=False)
    for number in range(4):
        raw.add(episode(30, number, image=True))
    assert raw.get_stats()["packed_bytes"] > 1.5 * packed.get_stats()["packed_bytes"]
    assert_same(raw.store.episode(2), packed.store.episode(2))


def test_saved_and_restored_it_draws_the_same(tmp_path):
    buffer = filled()
    buffer.save(tmp_path / "a")
    twins = [DictReplayBuffer(200, KEYS), DictReplayBuffer(200, KEYS)]
    assert twins[0].restore(tmp_path / "a").num_episodes == 4
    twins[1].load_state_dict(buffer.state_dict())
    expected = buffer.sample(20)
    for twin in twins:
        assert_same(twin.sample(20), expected)


@pytest.mark.parametrize("keys", [(), "abc", ("x", "x")])
def test_keys_that_make_no_sense_are_refused(keys):
    with pytest.raises(ConfigurationError, match="keys are"):
        DictReplayBuffer(10, keys)


def test_an_episode_with_other_keys_is_refused():
    with pytest.raises(ReplayError, match="expected \\['action', 'camera', 'done', 'position'\\]"):
        filled().add({"position": np.zeros((3, 3), np.float32)})
    with pytest.raises(ReplayError, match="nothing to sample"):
        DictReplayBuffer(10, ["x"]).sample(1)


def test_a_folder_or_state_with_other_keys_is_refused_and_nothing_changes(tmp_path):
    other = DictReplayBuffer(100, ["image", "action"])
    other.add({"image": np.zeros((4, 8, 8, 3), np.uint8), "action": np.zeros((3, 2), np.float32)})
    other.save(tmp_path / "other")
    buffer = DictReplayBuffer(100, ["position", "action"])
    buffer.add({"position": np.ones((4, 3), np.float32), "action": np.zeros((3, 2), np.float32)})
    with pytest.raises(StateMismatchError, match=r"other has episodes of \['action', 'image'\], expected"):
        buffer.restore(tmp_path / "other")
    with pytest.raises(StateMismatchError, match="expected"):
        buffer.load_state_dict(other.state_dict())
    assert buffer.num_episodes == 1
    assert set(buffer.sample(2)) == {"position", "next_position", "action"}


def test_a_jpeg_quality_for_what_is_no_image_is_refused():
    buffer = DictReplayBuffer(100, ["image", "action"], jpeg={"imgae": 90})
    with pytest.raises(ReplayError, match=r"jpeg names 'imgae', which is not an image here; images are \['image'\]"):
        buffer.add({"image": np.zeros((4, 64, 64, 3), np.uint8), "action": np.zeros((3, 2), np.float32)})
