"""Flags that end an episode and ids of episodes, of any dtype and shape."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from slipstream import EpisodeSliceSampler, PackedEpisodeStorage, ReplayError

LENGTHS = (5, 9, 3, 14, 8, 21)


def places():
    """Return the episode of every step, its place in it, and whether it is the last."""
    episode = torch.cat([torch.full((length,), number) for number, length in enumerate(LENGTHS)])
    place = torch.cat([torch.arange(length) for length in LENGTHS])
    last = torch.cat([torch.arange(length) == length - 1 for length in LENGTHS])
    return episode, place, last


def buffer_of(leaves, **options):
    episode, place, _ = places()
    buffer = ReplayBuffer(
        storage=PackedEpisodeStorage(100, **options), sampler=EpisodeSliceSampler(slice_len=4), batch_size=400
    )
    content = {"number": torch.stack([episode, place], 1).float().repeat(1, 4)}
    data = TensorDict(content, batch_size=[len(place)])
    for key, value in leaves.items():
        data[key] = value
    # In pieces, so that runs continue from one write to the next.
    for part in data.split(7):
        buffer.extend(part)
    return buffer


def assert_slices_stay_in_episodes(buffer):
    number = buffer.sample()["number"].reshape(100, 4, -1)
    assert bool((number[..., 0] == number[:, :1, 0]).all())
    assert bool((number[..., 1].diff(dim=1) == 1).all())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int16, torch.int64, torch.float16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("agents", [None, 1, 3])
def test_an_end_flag_may_have_any_dtype_and_an_axis_of_agents(dtype, agents):
    _, _, last = places()
    flags = last[:, None].to(dtype)
    if agents is not None:
        flags = torch.zeros(len(last), agents, 1, dtype=dtype)
        flags[:, agents // 2, 0] = last.to(dtype)
    assert_slices_stay_in_episodes(buffer_of({("next", "done"): flags}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("agents", [None, 1, 3])
def test_an_episode_id_may_have_any_dtype_and_an_axis_of_agents(dtype, agents):
    episode, _, _ = places()
    ids = episode.to(dtype)
    if agents is not None:
        ids = torch.zeros(len(episode), agents, dtype=dtype)
        ids[:, agents - 1] = episode.to(dtype)
    assert_slices_stay_in_episodes(buffer_of({("collector", "traj_ids"): ids}))
    assert_slices_stay_in_episodes(buffer_of({"flight": ids}, id_key="flight"))


def test_flags_written_afterwards_are_reduced_too():
    _, _, last = places()
    buffer = buffer_of({("next", "done"): torch.zeros(len(last), 2, 1)})
    flags = torch.zeros(len(last), 2, 1)
    flags[:, 1, 0] = last.float()
    buffer.set_(("next", "done"), flags)
    assert_slices_stay_in_episodes(buffer)


def test_a_misspelt_or_missing_role_is_an_error_of_one_sentence():
    episode, _, last = places()
    flags = last[:, None]
    for leaves, options, message in (
        ({}, {}, r"neither \('next', 'done'\) nor an id"),
        ({("next", "done"): flags}, {"end_key": ("next", "doen")}, r"end_key is \('next', 'doen'\), which no step has"),
        ({("next", "done"): flags}, {"id_key": "flihgt"}, "id_key is 'flihgt', which no step has"),
        ({"flight": episode}, {"end_key": "end", "id_key": "flight"}, "end_key is 'end'"),
    ):
        buffer = buffer_of(leaves, **options)
        with pytest.raises(ReplayError, match=message) as caught:
            buffer.sample()
        assert "\n" not in str(caught.value)


def test_ends_are_marked_once_per_step_with_several_agents():
    _, _, last = places()
    flags = torch.zeros(len(last), 3, 1, dtype=torch.bool)
    flags[:, 2, 0] = last
    buffer = buffer_of({("next", "done"): flags})
    _, info = buffer.sample(return_info=True)
    assert info["next", "done"].shape == (400, 1)
    assert bool(info["next", "done"].reshape(100, 4)[:, -1].all())
