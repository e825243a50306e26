"""`PackedEpisodeStorage` next to `LazyTensorStorage`: the same steps, samples, lengths and indices."""

import itertools
import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import Compose, RenameTransform, RewardScaling

from slipstream import (
    ConfigurationError,
    DictReplayBuffer,
    OutOfRangeError,
    PackedEpisodeStorage,
    ReplayError,
    UnsupportedStateError,
)
from slipstream.replay.log import RowLog
from tests.replay.samples import assert_same, rollout


def pair(make, *args, **kwargs):
    """Make the same buffer twice: on TorchRL's storage and on ours, with equal generators."""
    return [
        make(storage, *args, **kwargs, generator=torch.Generator().manual_seed(0))
        for storage in (LazyTensorStorage, PackedEpisodeStorage)
    ]


def buffer(storage, size=200, *, ndim=1, sampler=RandomSampler, kind=ReplayBuffer, **options):
    return kind(storage=storage(size, ndim=ndim), sampler=sampler(), **options)


def batches(ndim, count=6, image=False):
    for number in range(count):
        data = rollout(3, 20 + number, seed=number, start=100 * number, image=image)
        data["next", "done"][:, -1] = True
        yield data if ndim == 2 else data.reshape(-1)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("image", [False, True], ids=["vectors", "images"])
def test_samples_are_those_of_a_lazy_tensor_storage_bit_for_bit(ndim, image):
    theirs, ours = pair(buffer, ndim=ndim, batch_size=32)
    for data in batches(ndim, image=image):
        assert torch.equal(theirs.extend(data.clone()), ours.extend(data.clone()))
        assert len(theirs) == len(ours)
        assert theirs.storage.shape == ours.storage.shape
        for _ in range(3):
            one, other = theirs.sample(return_info=True), ours.sample(return_info=True)
            assert_same(one[0], other[0])
    assert_same(theirs[:], ours[:])
    assert_same(theirs.storage.get(slice(None)), ours.storage.get(slice(None)))


def test_single_steps_added_one_by_one_come_back_before_and_after_they_are_packed():
    theirs, ours = pair(buffer, 150, batch_size=16)
    data = rollout(1, 400, image=True)[0]
    for number, step in enumerate(data.unbind(0)):
        assert theirs.add(step) == ours.add(step)
        if number % 37 == 0:
            assert_same(theirs[:], ours[:])
            assert_same(theirs.sample(), ours.sample())
    assert_same(theirs[:], ours[:])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 33])
def test_small_batches_of_all_environments_come_back(size):
    theirs, ours = pair(buffer, 150, ndim=2, batch_size=16)
    data = rollout(3, 280)
    for first in range(0, 280, size):
        part = data[:, first : first + size]
        theirs.extend(part)
        ours.extend(part)
    assert_same(theirs[:], ours[:])
    assert_same(theirs.sample(), ours.sample())


def test_a_batch_longer_than_the_storage_leaves_its_end():
    ours = ReplayBuffer(storage=PackedEpisodeStorage(50), batch_size=8)
    data = rollout(1, 175)[0]
    ours.extend(data)
    assert len(ours) == 50
    assert sorted(ours[:]["time"].tolist()) == list(range(125, 175))
    ours.extend(data[:10])
    assert sorted(ours[:]["time"].tolist()) == [*range(10), *range(135, 175)]


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        17,
        slice(3, 40, 7),
        slice(None, None, -1),
        torch.tensor([5, 5, 0, 99]),
        torch.tensor([[1, 2], [3, 4]]),
        [4, 2],
        range(10, 20),
        torch.arange(120) % 3 == 0,
    ],
    ids=str,
)
def test_every_kind_of_index_means_what_it_means_to_torchrl(index):
    theirs, ours = LazyTensorStorage(120), PackedEpisodeStorage(120)
    data = rollout(1, 120)[0]
    for storage in (theirs, ours):
        storage.set(range(120), data)
    if isinstance(index, slice) and index.step is not None and index.step < 0:
        expected = theirs.get(torch.arange(119, -1, -1))
    else:
        expected = theirs.get(index)
    assert_same(expected, ours.get(index))
    assert_same(expected, ours[index])


@pytest.mark.parametrize(
    "index", [3, (2, 1), (torch.tensor([0, 39]), torch.tensor([2, 0])), slice(1, 5), (slice(None), 1)], ids=str
)
def test_every_kind_of_index_works_on_two_axes(index):
    theirs, ours = LazyTensorStorage(120, ndim=2), PackedEpisodeStorage(120, ndim=2)
    data = rollout(3, 40).transpose(0, 1)
    for storage in (theirs, ours):
        storage.set(range(40), data)
    assert_same(theirs.get(index), ours.get(index))


@pytest.mark.parametrize("index", [120, -121, [0, 500], torch.tensor([120])], ids=str)
def test_an_index_out_of_range_is_an_error(index):
    storage = PackedEpisodeStorage(200)
    storage.set(range(120), rollout(1, 120)[0])
    with pytest.raises(OutOfRangeError, match="out of range"):
        storage.get(index)


def test_steps_in_the_place_of_old_ones_are_found_there():
    theirs, ours = pair(buffer, 150, batch_size=16)
    for data in batches(1, 3):
        theirs.extend(data)
        ours.extend(data)
    where = torch.tensor([3, 77, 20, 21])
    new = rollout(1, 4, seed=99)[0]
    for one in (theirs, ours):
        one[where] = new
        one.set_at_("action", torch.full((2, 2), 7.0), torch.tensor([5, 140]))
        one.set_at_(("next", "reward"), torch.full((1, 1), -3.0), torch.tensor([9]))
    assert_same(theirs[:], ours[:])
    for one in (theirs, ours):
        one.set_("action", torch.zeros(150, 2))
        one.update_({"time": torch.arange(150)})
    assert_same(theirs[:], ours[:])


def test_writing_out_of_order_again_and_again_does_not_fill_memory():
    ours = PackedEpisodeStorage(500)
    ours.set(range(500), rollout(1, 500)[0])
    generator = torch.Generator().manual_seed(0)
    expected = ours.get(slice(None))
    for number in range(130):
        where = torch.randperm(500, generator=generator)[:400]
        new = rollout(1, 400, seed=number)[0]
        ours.set(where, new, set_cursor=False)
        expected[where] = new
    assert_same(expected, ours.get(slice(None)))
    assert ours.get_stats()["num_frames"] < 4_000


@pytest.mark.parametrize("ndim", [1, 2])
def test_torchrls_slice_sampler_finds_the_ends_of_episodes(ndim):
    def make(storage, generator):
        sampler = SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=True)
        return TensorDictReplayBuffer(
            storage=storage(300, ndim=ndim), sampler=sampler, batch_size=32, generator=generator
        )

    theirs, ours = pair(make)
    for data in batches(ndim):
        theirs.extend(data.clone())
        ours.extend(data.clone())
        one, other = theirs.sample(), ours.sample()
        assert_same(one, other)
        times = other["time"].reshape(-1, 4)
        assert bool((times.diff(dim=1) == 1).all())


def test_slices_without_replacement_and_trajectory_ids_work():
    def make(storage, generator):
        sampler = SliceSamplerWithoutReplacement(slice_len=5, traj_key="episode")
        return TensorDictReplayBuffer(storage=storage(300), sampler=sampler, batch_size=10, generator=generator)

    theirs, ours = pair(make)
    data = rollout(1, 200)[0]
    data["episode"] = torch.arange(200) // 20
    for one in (theirs, ours):
        one.extend(data.clone())
    for _ in range(3):
        assert_same(theirs.sample(), ours.sample())


@pytest.mark.usefixtures("priority_trees")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # TorchRL's sampler on two axes
@pytest.mark.parametrize("ndim", [1, 2])
def test_priorities_steer_what_is_sampled(ndim):
    def make(storage, generator):
        return TensorDictPrioritizedReplayBuffer(
            storage=storage(240, ndim=ndim), alpha=0.7, beta=0.5, batch_size=64, generator=generator
        )

    theirs, ours = pair(make)
    for data in batches(ndim, 5):
        for one in (theirs, ours):
            one.extend(data.clone())
        for _ in range(3):
            drawn = [one.sample() for one in (theirs, ours)]
            assert_same(*drawn)
            for one, batch in zip((theirs, ours), drawn, strict=True):
                batch["td_error"] = (batch["time"] % 100 == 5).float() * 100 + 0.01
                one.update_tensordict_priority(batch)
    assert float((ours.sample()["time"] % 100 == 5).float().mean()) > 0.3


def test_samplers_without_replacement_see_every_step_once():
    ours = ReplayBuffer(storage=PackedEpisodeStorage(120), sampler=SamplerWithoutReplacement(), batch_size=20)
    ours.extend(rollout(1, 120)[0])
    seen = torch.cat([ours.sample()["time"] for _ in range(6)])
    assert sorted(seen.tolist()) == list(range(120))


def test_prefetching_and_transforms_work():
    ours = TensorDictReplayBuffer(storage=PackedEpisodeStorage(200), batch_size=16, prefetch=3)
    ours.append_transform(
        Compose(RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]), RenameTransform(["action"], ["deed"]))
    )
    data = rollout(1, 150)[0]
    ours.extend(data.clone())
    for _ in range(5):
        batch = ours.sample()
        rows = data[batch["index"]]
        assert torch.allclose(batch["next", "reward"], rows["next", "reward"] * 2)
        assert torch.equal(batch["deed"], rows["action"])


def test_the_best_steps_stay_with_a_max_value_writer():
    ours = TensorDictReplayBuffer(
        storage=PackedEpisodeStorage(30), writer=TensorDictMaxValueWriter(rank_key=("next", "reward")), batch_size=10
    )
    data = rollout(1, 200)[0]
    for part in data.split(20):
        ours.extend(part)
    best = data["next", "reward"].flatten().topk(30).values
    assert torch.equal(ours[:]["next", "reward"].flatten().sort().values, best.sort().values)


def test_plain_tensors_may_be_stored():
    theirs, ours = LazyTensorStorage(50), PackedEpisodeStorage(50)
    for storage in (theirs, ours):
        ReplayBuffer(storage=storage, batch_size=5).extend(torch.arange(240).reshape(40, 6))
    assert torch.equal(theirs.get(slice(None)), ours.get(slice(None)))
    assert torch.equal(theirs.get(3), ours.get(3))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.int64,
    ],
)
def test_every_dtype_comes_back(dtype):
    values = (torch.arange(80 * 3).reshape(80, 3) % 90).to(dtype)
    storage = PackedEpisodeStorage(100)
    storage.set(range(80), TensorDict({"x": values, "flag": values[:, 0]}, batch_size=[80]))
    back = storage.get(slice(None))
    assert back["x"].dtype == dtype
    assert torch.equal(back["x"], values)
    assert torch.equal(back["flag"], values[:, 0])


def test_images_only_stacks_of_steps_and_nothing_at_all_may_be_written():
    pixels = torch.randint(0, 9, (41, 3, 20, 24), dtype=torch.uint8)
    steps = [TensorDict({"p": one, "next": {"p": other}}, batch_size=[]) for one, other in itertools.pairwise(pixels)]
    storage = PackedEpisodeStorage(50)
    storage.set(range(40), TensorDict.lazy_stack(steps))
    storage.set(torch.arange(0), TensorDict({"p": pixels[:0], "next": {"p": pixels[:0]}}, batch_size=[0]))
    assert len(storage) == 40
    back = storage.get(slice(None))
    assert torch.equal(back["p"], pixels[:-1])
    assert torch.equal(back["next", "p"], pixels[1:])
    assert storage.get_stats()["num_frames"] == 41
    learned = torch.ones(40, 3, requires_grad=True) * 2
    other = PackedEpisodeStorage(50)
    other.set(range(40), learned)
    assert not other.get(3).requires_grad


def test_nested_batch_sizes_are_kept():
    data = TensorDict({"agents": TensorDict({"x": torch.randn(40, 3, 2)}, batch_size=[40, 3])}, batch_size=[40])
    storage = PackedEpisodeStorage(50)
    storage.set(range(40), data)
    assert storage.get(slice(0, 5))["agents"].batch_size == (5, 3)
    assert_same(storage.get(slice(None)), data)


def test_rows_are_decoded_only_when_they_are_asked_for():
    storage = PackedEpisodeStorage(400, cache_bytes=0)
    storage.set(range(300), rollout(1, 300, image=True)[0])
    rows = storage[:]
    assert rows["next", "done"].shape == (300, 1)
    assert storage.steps.cache.misses == 0
    assert rows["obs", "state"].shape == (300, 5)
    assert storage.steps.cache.misses > 0
    assert rows.batch_size == (300,)
    assert_same(rows.clone(), storage.get(slice(None)))
    assert_same(rows[10:20], storage.get(slice(10, 20)))
    assert set(dict(rows.items())) == {"obs", "action", "time", "env", "pixels", "next"}


def test_observations_under_next_are_kept_once():
    storage = PackedEpisodeStorage(3000)
    noise = torch.randn(1501, 64)
    done = torch.zeros(1500, 1, dtype=torch.bool)
    storage.set(range(1500), TensorDict({"x": noise[:-1], "next": {"x": noise[1:], "done": done}}, batch_size=[1500]))
    stats = storage.get_stats()
    assert stats["num_frames"] == 1501
    assert stats["packed_bytes"] < 1.02 * noise.nbytes
    storage.set(
        range(1500, 2000),
        TensorDict(
            {"x": torch.randn(500, 64), "next": {"x": torch.randn(500, 64), "done": done[:500]}}, batch_size=[500]
        ),
    )
    assert storage.get_stats()["num_frames"] == 1501 + 1000


@pytest.mark.parametrize("deepest_first", [False, True])
@pytest.mark.parametrize("at_once", [1, 40])
def test_what_follows_what_follows_comes_back(at_once, deepest_first):
    position = torch.arange(42.0)[:, None].expand(42, 9)
    after = {"o": position[1:41], "next": {"o": position[2:]}}
    steps = {"o": position[:40], "next": after}
    if deepest_first:
        steps = {"next": {"next": after["next"], "o": after["o"]}, "o": position[:40]}
    steps = TensorDict(steps, batch_size=[40])
    storage = PackedEpisodeStorage(40)
    for first in range(0, 40, at_once):
        storage.set(range(first, first + at_once), steps[first : first + at_once])
    assert_same(storage.get(slice(None)), steps)


def test_statistics_separate_what_grows_with_the_steps_from_what_is_preallocated():
    storage = PackedEpisodeStorage(1_000)
    steps = rollout(1, 500, seed=1)[0]
    storage.set(range(100), steps[:100])
    few = storage.get_stats()
    storage.set(range(100, 500), steps[100:])
    many = storage.get_stats()
    for stats in (few, many):
        assert stats["held_bytes"] == stats["stored_bytes"] + stats["preallocated_bytes"]
        assert 0 < stats["packed_bytes"] + stats["tail_bytes"] <= stats["stored_bytes"]
    assert few["preallocated_bytes"] == many["preallocated_bytes"] > 0
    assert few["stored_bytes"] < many["stored_bytes"] / 2
    # What is reserved for later steps does not count against the first ones.
    assert few["compression_ratio"] > few["raw_bytes"] / few["held_bytes"]
    assert "preallocated" in repr(storage)


def test_a_batch_with_too_few_axes_is_refused_with_both_ways_to_fix_it():
    storage = PackedEpisodeStorage(100, ndim=2)
    flat = TensorDict({"o": torch.zeros(10, 3)}, batch_size=[10])
    expected = (
        r"shape \[10\] .* with ndim=2, expected at least 2 axes, such as \[environments, time\]: .* or use ndim=1"
    )
    with pytest.raises(ReplayError, match=expected):
        storage.set(range(10), flat)
    assert len(storage) == 0


@pytest.mark.parametrize("make", [PackedEpisodeStorage, lambda size, device: DictReplayBuffer(size, ["o"], device)])
@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_an_unavailable_device_is_refused_by_the_constructor(make, device):
    with pytest.raises(ConfigurationError, match=f"device '{device}' is not available: "):
        make(10, device=device)


def test_memory_stays_the_same_when_the_ring_goes_round():
    storage = PackedEpisodeStorage(2000)
    ring = ReplayBuffer(storage=storage, batch_size=4)
    sizes = []
    for number in range(30):
        ring.extend(rollout(1, 500, seed=number)[0])
        sizes.append(storage.get_stats()["held_bytes"])
    assert max(sizes[8:]) < 1.4 * sizes[4]


def test_what_does_not_fit_is_refused_and_nothing_has_changed():
    storage = PackedEpisodeStorage(200)
    good = rollout(1, 50)[0]
    storage.set(range(50), good)
    before = storage.get(slice(None))
    bad = {
        "dtype": good.clone().update({"action": good["action"].double()}),
        "shape": good.clone().update({"action": torch.zeros(50, 3)}),
    }
    for name, data in bad.items():
        with pytest.raises(ReplayError, match="action"):
            storage.set(range(50, 100), data)
        assert len(storage) == 50, name
    with pytest.raises(OutOfRangeError, match="there are 200"):
        storage.set(torch.arange(180, 230), good)
    with pytest.raises(ReplayError, match="slots for"):
        storage.set(range(10), good)
    with pytest.raises(UnsupportedStateError, match="expected a TensorDict, a tensor"):
        storage.set(0, "step")
    sparse = TensorDict({"x": torch.eye(4).to_sparse()}, batch_size=[4])
    with pytest.raises(UnsupportedStateError, match="x has layout torch.sparse_coo"):
        PackedEpisodeStorage(5).set(range(4), sparse)
    assert_same(before, storage.get(slice(None)))
    assert len(storage) == 50


def test_nothing_can_be_read_before_something_was_stored():
    with pytest.raises(ReplayError, match="nothing was stored yet"):
        PackedEpisodeStorage(5).get(0)
    empty = ReplayBuffer(storage=PackedEpisodeStorage(5), batch_size=2)
    with pytest.raises(Exception, match="."):
        empty.sample()
    assert len(empty) == 0


@pytest.mark.parametrize(
    "options", [{"max_size": 0}, {"max_size": 5, "ndim": 0}, {"max_size": 5, "jpeg": 300}, {"max_size": 2.5}]
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigurationError):
        PackedEpisodeStorage(**options)


def test_emptied_it_takes_other_steps():
    ours = ReplayBuffer(storage=PackedEpisodeStorage(50), batch_size=5)
    ours.extend(rollout(1, 40)[0])
    ours.empty()
    assert len(ours) == 0
    ours.extend(TensorDict({"other": torch.arange(30)}, batch_size=[30]))
    assert ours[:]["other"].tolist() == list(range(30))


def test_jpeg_is_lossy_only_for_images():
    storage = PackedEpisodeStorage(100, jpeg=50)
    data = rollout(1, 60, image=True)[0]
    data["pixels"] = (data["pixels"] // 16).contiguous()
    storage.set(range(60), data)
    back = storage.get(slice(None))
    assert torch.equal(back["obs", "state"], data["obs", "state"])
    assert not torch.equal(back["pixels"], data["pixels"])
    assert back["pixels"].shape == data["pixels"].shape


def test_a_pickled_storage_is_a_copy_of_its_own():
    storage = PackedEpisodeStorage(300)
    storage.set(range(100), rollout(1, 100)[0])
    for step, row in enumerate(rollout(1, 5, seed=3)[0].unbind(0)):
        storage.set(100 + step, row)
    twin = pickle.loads(pickle.dumps(storage))
    assert_same(storage.get(slice(None)), twin.get(slice(None)))
    twin.set(range(105, 150), rollout(1, 45)[0])
    assert (len(storage), len(twin)) == (105, 150)
    assert "holds=" in repr(twin)


def test_overwriting_all_but_one_step_again_and_again_does_not_grow():
    ours = PackedEpisodeStorage(50)
    expected = torch.zeros(50, 4)
    ours.set(range(50), TensorDict({"o": expected.clone()}, batch_size=[50]))
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        where = 1 + torch.randperm(49, generator=generator)  # the first slot keeps its row
        expected[where] = torch.randn(49, 4, generator=generator)
        ours.set(where, TensorDict({"o": expected[where]}, batch_size=[49]), set_cursor=False)
        assert ours.get_stats()["num_frames"] <= 400
    assert torch.equal(ours.get(slice(None))["o"], expected)


def test_changing_one_tensor_of_all_steps_again_and_again_does_not_grow():
    ours = ReplayBuffer(storage=PackedEpisodeStorage(1000))
    ours.extend(rollout(1, 1000)[0])
    before = ours.storage.get_stats()["held_bytes"]
    for number in range(40):
        ours.set_("action", torch.full((1000, 2), float(number)))
    assert ours.storage.get_stats()["held_bytes"] < 1.2 * before
    assert bool((ours[:]["action"] == 39).all())


def test_changing_one_reward_decodes_only_what_is_packed_with_it():
    storage = PackedEpisodeStorage(400, cache_bytes=0)
    data = rollout(1, 300, image=True)[0]
    storage.set(range(300), data)
    before = storage.steps.cache.misses
    storage.write(("next", "reward"), 5.0, slice(7, 8))
    assert storage.steps.cache.misses - before <= 4
    assert float(storage.get(7)["next", "reward"]) == 5.0
    data["next", "reward"][7] = 5.0
    assert_same(storage.get(slice(None)), data)


def test_empty_tensors_come_back_before_and_after_they_are_packed():
    ours = PackedEpisodeStorage(100)
    for number in range(70):
        ours.set(number, TensorDict({"none": torch.zeros(0), "o": torch.full((3,), float(number))}, batch_size=[]))
        back = ours.get(slice(None))
        assert back["none"].shape == (number + 1, 0)
        assert back["o"][:, 0].tolist() == list(range(number + 1))


@pytest.mark.parametrize("slots", [range(500, 520), (torch.arange(20) + 90,)])
def test_a_refused_first_batch_leaves_no_trace(slots):
    ours = PackedEpisodeStorage(100)
    with pytest.raises(OutOfRangeError, match="there are"):
        ours.set(slots, TensorDict({"o": torch.zeros(20, 3)}, batch_size=[20]))
    assert not ours.initialized
    ours.set(range(20), TensorDict({"other": torch.ones(20, 2)}, batch_size=[20]))
    assert ours.get(slice(None))["other"].sum() == 40


def test_jpeg_may_be_asked_for_by_key():
    data = rollout(1, 60, image=True)[0].select("pixels")
    data["wrist", "pixels"] = data["pixels"].clone()
    storage = PackedEpisodeStorage(100, jpeg={"wrist/pixels": 50})
    storage.set(range(60), data)
    back = storage.get(slice(None))
    assert torch.equal(back["pixels"], data["pixels"])
    assert not torch.equal(back["wrist", "pixels"], data["wrist", "pixels"])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8])
def test_a_single_step_of_bytes_next_to_a_float_comes_back(dtype):
    storage = PackedEpisodeStorage(100)
    data = TensorDict({"bytes": torch.ones(80, 3, dtype=dtype), "x": torch.arange(80.0)[:, None]}, batch_size=[80])
    storage.set(range(80), data)
    assert float(storage.get(3)["x"]) == 3.0
    assert storage.get(3)["bytes"].tolist() == data["bytes"][3].tolist()


def test_one_step_may_be_changed_by_its_number():
    theirs, ours = pair(buffer, 150, batch_size=16)
    for one in (theirs, ours):
        one.extend(rollout(1, 100)[0])
        one.set_at_("action", torch.full((2,), 7.0), 3)
        one.set_at_(("next", "reward"), torch.full((1,), 7.0), -1)
    assert_same(theirs[:], ours[:])


def test_an_automatic_device_is_that_of_the_first_batch():
    storage = PackedEpisodeStorage(20, device="auto")
    storage.set(range(10), TensorDict({"o": torch.zeros(10, 3)}, batch_size=[10]))
    assert storage.device == torch.device("cpu")
    assert storage.get(0).device == torch.device("cpu")


@pytest.mark.parametrize("prefetch", [1, 3])
def test_prefetched_batches_equal_those_that_are_read_directly(prefetch):
    steps = torch.arange(400 * 8, dtype=torch.float32).reshape(400, 8)
    data = TensorDict({"o": steps[:-1], "next": {"o": steps[1:], "done": torch.zeros(399, 1, dtype=torch.bool)}}, [399])
    storages = [PackedEpisodeStorage(400), LazyTensorStorage(400)]
    packed, lazy = (TensorDictReplayBuffer(storage=storage, batch_size=32, prefetch=prefetch) for storage in storages)
    packed.extend(data)
    lazy.extend(data)
    for _ in range(12):
        batch = packed.sample()
        # Threads draw in any order, so a batch is compared with the steps it says it holds.
        index = batch["index"]
        for storage in storages:
            expected = storage.get(index)
            for key in ("o", ("next", "o"), ("next", "done")):
                assert torch.equal(batch[key], expected[key])


def test_one_prefetching_thread_draws_the_same_batches_as_none():
    steps = torch.arange(300 * 5, dtype=torch.float32).reshape(300, 5)
    data = TensorDict({"o": steps[:-1], "next": {"o": steps[1:]}}, [299])
    drawn = []
    for options in ({}, {"prefetch": 1}):
        buffer = TensorDictReplayBuffer(storage=PackedEpisodeStorage(300), batch_size=16, **options)
        buffer.set_rng(torch.Generator().manual_seed(7))
        buffer.extend(data)
        drawn.append([buffer.sample() for _ in range(8)])
    for one, other in zip(*drawn, strict=True):
        for key in ("index", "o", ("next", "o")):
            assert torch.equal(one[key], other[key])


def test_what_was_decoded_while_a_write_failed_is_not_found_later(monkeypatch):
    """The columns of a write that fails are gone, and rows of others may have the same numbers."""
    storage = PackedEpisodeStorage(200)
    image = torch.randint(0, 5, (40, 36, 30), dtype=torch.uint8)
    noise = torch.randn(41, 6)
    follows = TensorDict({"o": noise[:-1], "image": image, "next": {"o": noise[1:]}}, [40])
    other = TensorDict({"o": torch.randn(40, 6), "image": image, "next": {"o": torch.randn(40, 6)}}, [40])
    storage.set(range(10), follows[:10])
    pack = RowLog.pack

    def fail(log, rows, runs):
        if log.packer.kind == "images":
            storage.get(torch.arange(10))
            raise MemoryError
        return pack(log, rows, runs)

    monkeypatch.setattr(RowLog, "pack", fail)
    with pytest.raises(MemoryError):
        storage.set(range(10, 30), follows[10:30])
    monkeypatch.undo()
    storage.set(range(10, 50), other)
    found = storage.get(torch.arange(8))
    for key in ("o", ("next", "o")):
        assert torch.equal(found[key], follows[:8][key])
