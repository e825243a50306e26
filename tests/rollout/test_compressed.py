"""Rollouts that stay packed in memory."""

import pytest
import torch
from tensordict import TensorDict

from slipstream import CompressedTensorDict, RolloutError
from slipstream.rollout.minibatches import grouped_indices

LIDAR = ("agents", "observation", "lidar")


def packed_all(batch, **options):
    """Pack every key, small ones too, in small groups, so that every path through the code is taken."""
    return CompressedTensorDict(batch, compress_keys=list(batch.keys(True, True)), group_envs=4, **options)


@pytest.mark.parametrize("pack", [CompressedTensorDict, packed_all])
def test_everything_in_it_is_as_it_was(make_rollout, pack):
    batch = make_rollout(13, 8)
    packed = pack(batch)
    assert packed.batch_size == packed.shape == batch.batch_size
    whole = packed.to_tensordict()
    assert whole.batch_size == batch.batch_size
    assert set(packed.keys(True, True)) == set(batch.keys(True, True))
    for key, value in batch.items(True, True):
        for found in (packed[key], packed.get(key), whole[key]):
            assert torch.equal(found.view(torch.uint8), value.contiguous().view(torch.uint8)), key


@pytest.mark.parametrize("pack", [CompressedTensorDict, packed_all])
@pytest.mark.parametrize(
    "index",
    [
        3,
        -1,
        slice(2, 9, 3),
        torch.tensor([5, 5, 0, 12]),
        torch.arange(13) % 2 == 0,
        (slice(None), 4),
        (torch.tensor([1, 2]), torch.tensor([7, 0])),
        (3, slice(2, 6)),
        ...,
        None,
    ],
    ids=str,
)
def test_an_index_gives_what_a_tensordict_gives(make_rollout, pack, index):
    batch = make_rollout(13, 8)
    found, expected = pack(batch)[index], batch.contiguous()[index]
    assert found.batch_size == expected.batch_size
    for key, value in expected.items(True, True):
        assert torch.equal(found[key].nan_to_num(7), value.nan_to_num(7)), key


def test_minibatches_of_shuffled_steps_are_those_of_the_batch_for_several_epochs(make_rollout):
    batch = make_rollout(20, 8)
    packed, flat = packed_all(batch, cache_bytes=5000).reshape(-1), batch.reshape(-1)
    assert packed.batch_size == (160,)
    for _ in range(3):
        for index in torch.randperm(160).split(48):
            found, expected = packed[index], flat[index]
            for key in batch.keys(True, True):
                assert torch.equal(found[key].nan_to_num(7), expected[key].nan_to_num(7)), key


def test_the_cache_stays_within_its_bytes_and_saves_decoding(make_rollout):
    batch = make_rollout(40, 8)
    packed = packed_all(batch, cache_bytes=4000)
    for env in range(40):
        packed[env].to_tensordict()
        assert 0 < packed.get_stats()["cache_bytes"] <= 4000
    large = packed_all(batch, cache_bytes=10_000_000)
    large.to_tensordict()
    misses = large.get_stats()["cache_misses"]
    large.to_tensordict()
    assert large.get_stats()["cache_misses"] == misses
    none = packed_all(batch, cache_bytes=0)
    none.to_tensordict()
    assert none.get_stats()["cache_bytes"] == 0


def test_reading_a_key_decodes_that_key_only(make_rollout):
    packed = packed_all(make_rollout(16, 8))
    packed["action"]
    assert packed.get_stats()["cache_misses"] == 4
    assert packed.select("action")[2:3].keys() == {"action"}


def test_what_was_decoded_may_be_changed_without_changing_what_is_packed(make_rollout):
    batch = make_rollout(8, 8)
    packed = packed_all(batch)
    packed["action"].zero_()
    packed[0]["action"].zero_()
    assert torch.equal(packed["action"], batch["action"])


def test_advantages_can_be_set_and_read_with_the_rest(make_rollout):
    batch = make_rollout(8, 6)
    packed = CompressedTensorDict(batch)
    advantage = torch.rand(8, 6, 1)
    packed["advantage"] = advantage
    packed.set(("agents", "observation", "state"), batch["agents", "observation", "state"] * 2)
    flat = packed.reshape(-1)
    index = torch.tensor([3, 47, 3])
    assert torch.equal(flat[index]["advantage"], advantage.reshape(-1, 1)[index])
    doubled = 2 * batch["agents", "observation", "state"].reshape(-1, 3)[index]
    assert torch.equal(flat[index]["agents", "observation", "state"], doubled)
    assert torch.equal(flat["advantage"], advantage.reshape(48, 1))
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        packed["advantage"] = torch.rand(6, 8)


def test_keys_look_like_those_of_a_tensordict(make_rollout):
    batch = make_rollout()
    packed = CompressedTensorDict(batch)
    assert set(packed.keys()) == set(batch.keys())
    assert set(packed.keys(True)) == set(batch.keys(True))
    assert set(packed.exclude("next").keys(True, True)) == set(batch.exclude("next").keys(True, True))
    nested = packed["agents", "observation"]
    assert isinstance(nested, TensorDict)
    assert torch.equal(nested["lidar"], batch[LIDAR])
    assert packed.get("nothing", None) is None
    with pytest.raises(KeyError, match='"nothing" not found'):
        packed["nothing"]
    assert dict(packed.select("action").items())["action"].shape == (6, 8, 3)


def test_device_is_where_things_are_read_to(make_rollout):
    packed = CompressedTensorDict(make_rollout()).to("meta")
    assert packed.device == torch.device("meta")
    assert packed["action"].is_meta
    assert packed.reshape(-1)[torch.tensor([1, 2])]["action"].is_meta


def test_the_batch_may_be_reused_at_once(make_rollout):
    batch = make_rollout(16, 8)
    before = batch.clone()
    packed = CompressedTensorDict(batch)
    for value in batch.values(True, True):
        value.zero_()
    for key, value in before.items(True, True):
        assert torch.equal(packed[key].nan_to_num(7), value.nan_to_num(7)), key


def test_a_navigation_batch_takes_a_quarter_of_its_memory_at_most():
    generator = torch.Generator().manual_seed(0)
    distance = 12 * torch.rand(256, 1, 144, generator=generator)
    lidar = (4 - distance + 0.03 * torch.rand(256, 1, 144, generator=generator) * torch.arange(33)[:, None]).clamp(0, 4)
    batch = TensorDict({"lidar": lidar[:, :-1], "next": {"lidar": lidar[:, 1:]}}, batch_size=[256, 32])
    packed = CompressedTensorDict(batch)
    assert packed.nbytes + packed.content.cache.max_bytes < packed.get_stats()["raw_bytes"] / 4


def test_noise_is_kept_as_it_is():
    batch = TensorDict({"x": torch.randint(0, 2**31, (64, 32, 64), dtype=torch.int32)}, batch_size=[64, 32])
    packed = CompressedTensorDict(batch)
    assert packed.nbytes == batch["x"].nbytes
    assert torch.equal(packed["x"], batch["x"])


def test_every_step_is_in_one_minibatch_of_an_epoch(make_rollout):
    batch = make_rollout(20, 8)
    batch["number"] = torch.arange(160).reshape(20, 8)
    packed = packed_all(batch)
    seen = torch.cat([some["number"] for some in packed.minibatches(4, window=2)])
    assert torch.equal(seen.sort().values, torch.arange(160))
    again = [list(packed.minibatches(4, generator=torch.Generator().manual_seed(3))) for _ in range(2)]
    assert all(torch.equal(a["number"], b["number"]) for a, b in zip(*again, strict=True))


def test_an_epoch_of_grouped_minibatches_decodes_each_group_about_once(make_rollout):
    batch = make_rollout(64, 8)
    window_bytes = 4 * batch["action"][:4].nbytes
    packed = CompressedTensorDict(batch, ["action"], group_envs=4, cache_bytes=window_bytes).select("action")
    for _ in packed.minibatches(16, window=4):
        pass
    assert packed.get_stats()["cache_misses"] <= 16 * 1.5


@pytest.mark.parametrize(
    ("envs", "steps", "count", "group", "window"), [(7, 5, 3, 2, 2), (8, 4, 32, 3, 1), (5, 5, 1, 9, 1)]
)
def test_grouped_indices_are_a_shuffle_without_repeats(envs, steps, count, group, window):
    parts = list(grouped_indices(envs, steps, count, group, window))
    assert len(parts) == count
    numbers = torch.cat(parts)
    assert len(numbers) == envs * steps // count * count
    assert len(numbers.unique()) == len(numbers)
    assert 0 <= numbers.min() <= numbers.max() < envs * steps


def test_minibatches_that_cannot_be_made_are_refused():
    for arguments in ((2, 2, 5, 1, 1), (2, 2, 0, 1, 1), (2, 2, 1, 0, 1), (2, 2, 1, 1, 0)):
        with pytest.raises(ValueError, match="cannot make"):
            list(grouped_indices(*arguments))


def test_mistakes_are_said_to_be_so(make_rollout):
    with pytest.raises(KeyError, match="compress_keys has 'lidr'"):
        CompressedTensorDict(make_rollout(), ["lidr"])
    with pytest.raises(ValueError, match="group_envs is -1"):
        CompressedTensorDict(make_rollout(), group_envs=-1)
    with pytest.raises(RolloutError, match="time has to be its last axis"):
        CompressedTensorDict(TensorDict({"x": torch.zeros(2, 3, 4)}, batch_size=[2, 3, 4]))


def test_a_network_trained_on_it_has_the_same_losses_bit_for_bit(make_rollout):
    batch = make_rollout(32, 16)
    batch["target"] = batch["agents", "observation", "state"].sum(-1, keepdim=True)

    def train(source):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(15, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.Adam(network.parameters())
        losses = []
        for epoch in range(3):
            generator = torch.Generator().manual_seed(epoch)
            for index in grouped_indices(32, 16, 8, 4, 2, generator):
                steps = source[index]
                seen = torch.cat([steps["agents", "observation", "state"], steps[LIDAR].flatten(1)], -1)
                loss = (network(seen) - steps["target"]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    assert train(packed_all(batch).reshape(-1)) == train(batch.reshape(-1))


def test_what_is_set_on_one_view_is_not_seen_by_another(make_rollout):
    packed = CompressedTensorDict(make_rollout(8, 16))
    one, other = packed.reshape(-1), packed.reshape(-1)
    one.set("advantage", torch.zeros(128))
    other.set("advantage", torch.ones(128))
    assert one["advantage"].sum() == 0
    assert "advantage" in one
    assert "advantage" not in packed


def test_mistakes_with_keys_are_heard_of_at_once(make_rollout):
    packed = CompressedTensorDict(make_rollout())
    with pytest.raises(KeyError, match='"nothing" not found'):
        packed.select("nothing")
    with pytest.raises(KeyError, match="action is already present"):
        packed.set(("action", "x"), torch.zeros(6, 8))
    packed.set("next", torch.zeros(6, 8))
    assert ("next", "reward") not in packed.keys(True)
    with pytest.raises(ValueError, match="group_envs is 0"):
        CompressedTensorDict(make_rollout(), group_envs=0)


def test_nested_batch_sizes_and_names_are_kept(same):
    batch = TensorDict(
        {"agents": TensorDict({"x": torch.rand(8, 16, 3, 2)}, [8, 16, 3]), "y": torch.rand(8, 16)},
        [8, 16],
        names=[None, "time"],
    )
    packed = CompressedTensorDict(batch)
    same(packed.to_tensordict(), batch)
    assert packed.reshape(-1)[torch.arange(5)]["agents"].batch_size == (5, 3)


def test_it_can_be_pickled_and_copied(make_rollout):
    import copy
    import pickle

    batch = make_rollout(8, 8)
    packed = packed_all(batch)
    for twin in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert torch.equal(twin["action"], batch["action"])


def test_a_default_device_changes_nothing(make_rollout, tmp_path):
    from slipstream import load_rollout, save_rollout_compressed

    batch = make_rollout(8, 8)
    torch.set_default_device("meta")
    try:
        packed = packed_all(batch)
        some = packed.reshape(-1)[torch.tensor([3, 5], device="cpu")]
        (first, *_) = packed.minibatches(4, generator=torch.Generator("cpu"))
        loaded = load_rollout(save_rollout_compressed(batch, tmp_path / "r"))
    finally:
        torch.set_default_device(None)
    assert torch.equal(some["action"], batch["action"].reshape(-1, 3)[[3, 5]])
    assert torch.equal(loaded["action"], batch["action"])
    assert first.batch_size == (16,)


def test_reading_everything_leaves_the_cache_to_minibatches(make_rollout):
    packed = packed_all(make_rollout(40, 8), cache_bytes=4000)
    packed[0].to_tensordict()
    cached = packed.get_stats()["cache_bytes"]
    packed.to_tensordict()
    hits = packed.get_stats()["cache_hits"]
    assert packed.get_stats()["cache_bytes"] == cached
    packed[0].to_tensordict()
    assert packed.get_stats()["cache_hits"] > hits


def test_minibatches_decode_each_group_about_once(make_rollout):
    packed = packed_all(make_rollout(64, 8), cache_bytes=100_000)
    for _ in packed.minibatches(8):
        pass
    num_groups = sum(len(array.payloads) for array in packed.content.packed.values())
    assert packed.get_stats()["cache_misses"] <= num_groups
