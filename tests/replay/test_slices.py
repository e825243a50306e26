"""`EpisodeSliceSampler`: slices that never cross the end of an episode."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from slipstream import ConfigurationError, EpisodeSliceSampler, PackedEpisodeStorage, ReplayError


def steps(lengths, start=0, padding=4):
    """Return episodes whose every step knows its episode and its place in it."""
    episode = torch.cat([torch.full((length,), start + number) for number, length in enumerate(lengths)])
    place = torch.cat([torch.arange(length) for length in lengths])
    last = torch.cat([torch.arange(length) == length - 1 for length in lengths])
    return TensorDict(
        {
            "number": torch.stack([episode, place], 1).float().repeat(1, padding),
            "next": {"done": last[:, None], "terminated": last[:, None]},
        },
        batch_size=[len(place)],
    )


def check(batch, length):
    number = batch["number"].reshape(-1, length, batch["number"].shape[-1])
    assert bool((number[..., 0] == number[:, :1, 0]).all())
    assert bool((number[..., 1].diff(dim=1) == 1).all())
    return number


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(30, 90),
)
def test_no_slice_crosses_an_end_however_the_ring_was_written(writes, length, size):
    buffer = ReplayBuffer(
        storage=PackedEpisodeStorage(size), sampler=EpisodeSliceSampler(slice_len=length), batch_size=8 * length
    )
    written, start = [], 0
    for lengths in writes:
        buffer.extend(steps(lengths, start))
        written += [(start + number, place) for number, count in enumerate(lengths) for place in range(count)]
        start += len(lengths)
    left = set(written[-size:])
    possible = any({(e, p + k) for k in range(length)} <= left for e, p in left)
    if possible:
        check(buffer.sample(), length)
    else:
        with pytest.raises(ReplayError, match="no episode in the storage has"):
            buffer.sample()


def test_all_slices_have_the_same_chance():
    buffer = ReplayBuffer(
        storage=PackedEpisodeStorage(200),
        sampler=EpisodeSliceSampler(num_slices=4000),
        batch_size=4000 * 8,
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(steps([8, 17, 3, 30]))
    number = check(buffer.sample(), 8)
    counts = torch.bincount(number[:, 0, 0].long(), minlength=4) / 4000
    assert torch.allclose(counts, torch.tensor([1, 10, 0, 23]) / 34, atol=0.04)


def test_slices_on_two_axes_stay_in_their_environment():
    buffer = ReplayBuffer(
        storage=PackedEpisodeStorage(240, ndim=2), sampler=EpisodeSliceSampler(slice_len=5), batch_size=50
    )
    for number in range(5):
        parts = [steps([30 - 3 * env, 3 * env], start=10 * number + 100 * env) for env in range(1, 4)]
        buffer.extend(torch.stack(parts))
        batch = buffer.sample()
        check(batch, 5)
        assert buffer.storage.runs.shape == (80, 3)


def test_an_episode_goes_on_from_one_write_to_the_next():
    buffer = ReplayBuffer(storage=PackedEpisodeStorage(100), sampler=EpisodeSliceSampler(slice_len=60), batch_size=60)
    whole = steps([70])
    for part in whole.split(7):
        buffer.extend(part)
    check(buffer.sample(), 60)


def test_trajectory_ids_are_ends_too():
    data = TensorDict({"episode": torch.arange(60) // 6, "number": torch.zeros(60, 4)}, batch_size=[60])
    buffer = ReplayBuffer(storage=PackedEpisodeStorage(100), sampler=EpisodeSliceSampler(slice_len=6), batch_size=60)
    buffer.extend(data)
    ids = buffer.sample()["episode"].reshape(-1, 6)
    assert bool((ids == ids[:, :1]).all())


def test_ends_written_afterwards_are_seen():
    buffer = ReplayBuffer(storage=PackedEpisodeStorage(40), sampler=EpisodeSliceSampler(slice_len=8), batch_size=80)
    buffer.extend(steps([40]))
    buffer[torch.tensor([19])] = (
        buffer[torch.tensor([19])].clone().update({"next": {"done": torch.ones(1, 1, dtype=torch.bool)}})
    )
    places = buffer.sample()["number"].reshape(10, 8, -1)[..., 1]
    assert not bool(((places[:, :-1] == 19).any(dim=1)).any())


def test_the_end_of_each_slice_is_marked_as_truncated():
    buffer = ReplayBuffer(storage=PackedEpisodeStorage(100), sampler=EpisodeSliceSampler(slice_len=4), batch_size=20)
    buffer.extend(steps([4, 9, 30]))
    batch, info = buffer.sample(return_info=True)
    assert info["next", "truncated"].reshape(5, 4).tolist() == [[False, False, False, True]] * 5
    assert torch.equal(info["next", "done"] | batch["next", "done"], info["next", "done"])
    assert torch.equal(info["next", "terminated"], batch["next", "terminated"])


def test_what_cannot_be_is_refused():
    for options in ({}, {"slice_len": 2, "num_slices": 2}, {"slice_len": 0}, {"num_slices": 1.5}):
        with pytest.raises(ConfigurationError, match="expected a whole number "):
            EpisodeSliceSampler(**options)
    buffer = ReplayBuffer(storage=PackedEpisodeStorage(50), sampler=EpisodeSliceSampler(slice_len=4), batch_size=10)
    with pytest.raises(ReplayError, match="multiple of slice_len=4"):
        buffer.sample()
    with pytest.raises(ReplayError, match="nothing was stored yet"):
        buffer.sampler.sample(buffer.storage, 8)
    other = ReplayBuffer(storage=LazyTensorStorage(50), sampler=EpisodeSliceSampler(slice_len=4), batch_size=8)
    other.extend(steps([20]))
    with pytest.raises(ReplayError, match="expected a PackedEpisodeStorage"):
        other.sample()
