"""Learning in shards: the same bits for any number of processes."""

from pathlib import Path

import pytest
import torch

from slipstream import PPO, ConfigurationError, NonFiniteError, PPOConfig
from slipstream.dist import ShardGroup
from slipstream.rl import NavRLPolicy
from slipstream.rl.ppo import shuffle
from tests.dist.ranks import run_ranks
from tests.rl.conftest import make_rollout

LEARNER = Path(__file__).with_name("learner.py")


@pytest.mark.parametrize("plan", ["plain", "compressed"])
def test_updates_are_the_same_bits_with_one_two_and_four_processes(tmp_path, plan):
    digests = set()
    for world in (1, 2, 4):
        outputs = run_ranks(LEARNER, world, tmp_path, 4, 3, plan)
        digests |= set(outputs)
    assert len(digests) == 1
    assert len(set(digests.pop().split())) == 3


def make_policy():
    torch.manual_seed(0)
    return NavRLPolicy()


def sharded(policy, shards, **settings):
    """Return a learner of several shards in this process, a rollout of each, and their generators."""
    group = ShardGroup(shards)
    ppo = PPO(policy, PPOConfig(num_minibatches=2, **settings), group=group)
    rollouts = [make_rollout(policy, 8, 6, seed=shard) for shard in group.local_shards]
    generators = [torch.Generator().manual_seed(shard) for shard in group.local_shards]
    return ppo, rollouts, generators


def test_one_shard_learns_what_a_single_rollout_teaches():
    alone = PPO(make_policy(), PPOConfig(num_minibatches=2, training_epoch_num=1))
    ppo, rollouts, generators = sharded(make_policy(), 1, training_epoch_num=1)
    expected = alone.update(rollouts[0].clone(), generator=torch.Generator().manual_seed(0))
    found = ppo.update(rollouts, generators=generators)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_shards_learn_what_one_large_rollout_teaches():
    # One minibatch, so that its order does not matter.
    ppo, rollouts, generators = sharded(make_policy(), 2, training_epoch_num=1)
    ppo = PPO(make_policy(), PPOConfig(num_minibatches=1, training_epoch_num=1), group=ShardGroup(2))
    alone = PPO(make_policy(), PPOConfig(num_minibatches=1, training_epoch_num=1))
    expected = alone.update(torch.cat([rollout.clone() for rollout in rollouts]))
    found = ppo.update(rollouts, generators=generators)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    for mine, other in zip(ppo.policy.parameters(), alone.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def test_a_shard_that_is_not_finite_stops_the_update_and_leaves_the_policy():
    ppo, rollouts, generators = sharded(make_policy(), 2)
    rollouts[1]["next", "agents", "reward"][0, 0] = float("nan")
    before = {name: tensor.clone() for name, tensor in ppo.policy.state_dict().items()}
    with pytest.raises(NonFiniteError, match="reward"):
        ppo.update(rollouts, generators=generators)
    for name, tensor in ppo.policy.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_update_needs_a_rollout_and_a_generator_for_each_shard():
    ppo, rollouts, generators = sharded(make_policy(), 2)
    with pytest.raises(ConfigurationError, match="expected a list of 2 rollouts"):
        ppo.update(rollouts[0], generators=generators)
    with pytest.raises(ConfigurationError, match="expected a list of 2 generators"):
        ppo.update(rollouts)


@pytest.mark.parametrize(("count", "message"), [(1, "has fewer than 2 minibatches"), (3, "more than num_minibatches=2")])
def test_every_minibatch_counts_and_none_is_left_out_without_a_word(count, message):
    ppo, rollouts, generators = sharded(make_policy(), 2)

    def minibatches(rollout, generator):
        return shuffle(rollout, num_minibatches=count, generator=generator)

    with pytest.raises(ConfigurationError, match=message):
        ppo.update(rollouts, minibatches, generators=generators)
