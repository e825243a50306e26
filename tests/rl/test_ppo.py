"""PPO: what it learns, what it clips, what it refuses, and that it resumes exactly."""

import copy
import itertools

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from slipstream import CompressedTensorDict, ConfigurationError, RolloutError, SlipstreamError, StateMismatchError
from slipstream.checkpoint.state import TrainingState
from slipstream.rl import GAE, PPO, ActorConfig, FeatureExtractorConfig, NonFiniteError, PPOConfig
from slipstream.rl.ppo import shuffle
from slipstream.rl.targets import next_values
from slipstream.rollout.minibatches import grouped_indices

SMALL = PPOConfig(training_epoch_num=2, num_minibatches=3)


def weights(ppo: PPO) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in ppo.policy.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def settled(ppo: PPO) -> PPO:
    """Give the value normalisation a history."""
    ppo.policy.value_norm.update(torch.tensor([[-3.0], [5.0]]))
    return ppo


def test_it_learns_a_task_of_one_step_that_depends_on_what_is_seen(observations, policy):
    fast = {"feature_extractor": FeatureExtractorConfig(2e-3), "actor": ActorConfig(5e-3)}
    ppo = PPO(policy(spread=False), PPOConfig(**fast, num_minibatches=4))  # type: ignore[arg-type]
    torch.manual_seed(1)
    rewards = []
    for number in range(25):
        batch = observations(128, 1, seed=number)
        is_odd = (torch.arange(128) % 2 == 1).reshape(128, 1, 1)
        batch["agents", "observation", "state"] = torch.where(is_odd, 3.0, -3.0).expand(128, 1, 8).clone()
        wanted = torch.where(is_odd, 0.8, 0.2)
        ppo.act(batch)
        reward = 1 - (batch["agents", "action_normalized"] - wanted).abs().mean(-1, keepdim=True)
        ended = torch.ones(128, 1, 1, dtype=torch.bool)
        after = observations(128, 1, seed=number).update({"terminated": ended, "done": ended})
        batch["next"] = after.set(("agents", "reward"), reward)
        metrics = ppo.update(batch)
        rewards.append(float(reward.mean()))
    assert rewards[0] < 0.72
    assert sum(rewards[-3:]) / 3 > 0.82
    assert metrics["entropy"] < -0.5
    assert float(ppo.policy.value_norm.statistics()[0]) > 0.7


def test_metrics_are_finite_and_complete(policy, rollout):
    ppo = PPO(policy(), SMALL)
    metrics = ppo.update(rollout(ppo.policy))
    assert set(metrics) == {
        *("actor_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance"),
        *("feature_extractor_grad_norm", "actor_grad_norm", "critic_grad_norm", "staleness", "behaviour_kl", "ess"),
    }
    assert all(isinstance(value, float) and value == value for value in metrics.values())
    assert (metrics["staleness"], metrics["behaviour_kl"], metrics["ess"]) == (0.0, 0.0, 1.0)
    assert ppo.num_updates == 1


def test_targets_are_advantages_with_the_values_of_true_next_observations(policy, rollout):
    ppo = settled(PPO(policy(), SMALL))
    batch = rollout(ppo.policy, 8, 12)
    norm = ppo.policy.value_norm
    with torch.no_grad():
        value = norm.denormalize(ppo.policy.evaluate(batch)[1])
        next_value = norm.denormalize(ppo.policy.evaluate(batch["next"])[1])
    ended = batch["next", "done"]
    assert ended.any()
    advantage, target = GAE()(batch["next", "agents", "reward"], batch["next", "terminated"], ended, value, next_value)
    ppo.update(batch)
    torch.testing.assert_close(batch["adv"], (advantage - advantage.mean()) / advantage.std(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(batch["ret"], norm.normalize(target), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_next_values_are_right_also_where_steps_do_not_follow_each_other(policy, rollout, is_shuffled):
    ppo = PPO(policy(), SMALL)
    batch = rollout(ppo.policy, 6, 5)
    if is_shuffled:
        batch = batch[:, torch.tensor([3, 1, 4, 0, 2])].clone()
    terminated, done = batch["next", "terminated"], batch["next", "done"]
    with torch.no_grad():
        found = next_values(ppo.policy, batch)
        expected = ppo.policy.evaluate(batch["next"])[1]
    assert terminated.any()
    assert not torch.equal(terminated, done)
    torch.testing.assert_close(found[~terminated], expected[~terminated], rtol=1e-4, atol=1e-5)


def test_compatibility_with_navrl_lets_advantages_leak_across_truncation(policy, rollout):
    advantages = []
    for compat in (False, True):
        ppo = settled(PPO(policy(), PPOConfig(navrl_compat=compat, num_minibatches=3)))
        batch = rollout(ppo.policy, 8, 12)
        value = ppo.policy.value_norm.denormalize(batch["state_value"])
        with torch.no_grad():
            next_value = ppo.policy.value_norm.denormalize(ppo.policy.evaluate(batch["next"])[1])
        ends = batch["next", "terminated" if compat else "done"]
        raw, _ = GAE()(batch["next", "agents", "reward"], batch["next", "terminated"], ends, value, next_value)
        ppo.update(batch)
        torch.testing.assert_close(batch["adv"], (raw - raw.mean()) / raw.std(), rtol=1e-4, atol=1e-4)
        advantages.append(batch["adv"])
    assert not torch.allclose(advantages[0], advantages[1], atol=1e-2)


@pytest.mark.parametrize("compat", [False, True])
def test_all_gradients_are_clipped_but_in_compatibility_not_those_of_the_feature_extractor(policy, rollout, compat):
    config = PPOConfig(training_epoch_num=1, num_minibatches=1, max_grad_norm=1e-3, navrl_compat=compat)
    ppo = PPO(policy(), config)
    norms = {}
    for name, optimizer in ppo.optimizers().items():

        def note(optimizer, args, kwargs, name=name):
            gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            norms[name] = float(nn.utils.get_total_norm(gradients))

        optimizer.register_step_pre_hook(note)
    metrics = ppo.update(rollout(ppo.policy))
    for name, norm in norms.items():
        before = metrics[f"{name}_grad_norm"]
        assert before > 2e-3
        is_free = compat and name == "feature_extractor"
        assert norm == pytest.approx(before if is_free else 1e-3, rel=1e-2)
    assert set(norms) == {"feature_extractor", "actor", "critic"}


def test_a_compressed_rollout_trains_bit_for_bit_the_same(policy, rollout):
    results = []
    for pack in (lambda batch: batch, CompressedTensorDict):
        ppo = PPO(policy(), SMALL)
        metrics = ppo.update(pack(rollout(ppo.policy)), generator=torch.Generator().manual_seed(4))
        results.append((metrics, weights(ppo)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def test_minibatches_may_come_from_outside(policy, rollout):
    def own(batch):
        flat = batch.reshape(-1)
        for index in grouped_indices(8, 6, 3, 2, window=3, generator=torch.Generator().manual_seed(4)):
            yield flat[index]

    results = []
    for is_packed in (False, True):
        ppo = PPO(policy(), SMALL)
        batch = rollout(ppo.policy)
        if is_packed:
            packed = CompressedTensorDict(batch, group_envs=2)
            ppo.update(packed, lambda some: some.minibatches(3, window=3, generator=torch.Generator().manual_seed(4)))
        else:
            ppo.update(batch, own)
        results.append(weights(ppo))
    assert same(*results)
    with pytest.raises(ConfigurationError, match="there was no minibatch"):
        ppo.update(batch, lambda _: ())


def test_without_lag_the_decoupled_objective_is_the_plain_one_bit_for_bit(policy, rollout):
    results = []
    for staleness in (0, 1):
        ppo = PPO(policy(), SMALL)
        batch = rollout(ppo.policy)
        flat = batch.reshape(-1)
        with torch.no_grad():
            distribution, value = ppo.policy.evaluate(flat)
            flat["sample_log_prob"], flat["state_value"] = (
                distribution.log_prob(flat["agents", "action_normalized"]),
                value,
            )
        metrics = ppo.update(
            flat.reshape(8, 6).clone(), staleness=staleness, generator=torch.Generator().manual_seed(4)
        )
        results.append(weights(ppo))
        assert metrics.pop("staleness") == staleness
        assert metrics["ess"] == 1.0
        assert metrics["behaviour_kl"] == 0.0
    assert same(*results)


def test_data_of_an_older_policy_is_weighted_and_the_lag_is_reported(policy, rollout):
    older, ppo = policy(seed=0), PPO(policy(seed=1), SMALL)
    settled(ppo)
    batch = rollout(older)
    behaviour, old_value = batch["sample_log_prob"].clone(), batch["state_value"].clone()
    distribution, value = ppo.policy.evaluate(batch)
    proximal = distribution.log_prob(batch["agents", "action_normalized"]).detach()
    weight = (proximal - behaviour).exp()
    metrics = ppo.update(batch, staleness=2)
    torch.testing.assert_close(batch["proximal_log_prob"], proximal, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch["state_value"], value.detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(batch["sample_log_prob"], behaviour)
    assert not torch.allclose(batch["state_value"], old_value)
    assert metrics["ess"] == pytest.approx(float(weight.sum() ** 2 / weight.square().sum() / weight.numel()), rel=1e-3)
    assert metrics["behaviour_kl"] == pytest.approx(float((weight - 1 - weight.log()).mean()), rel=1e-2)
    assert 0 < metrics["ess"] < 1
    assert metrics["staleness"] == 2.0


def test_weights_of_old_data_are_cut_off(policy, rollout):
    losses = []
    for shift in (2.0, 50.0):
        ppo = PPO(policy(), PPOConfig(training_epoch_num=1, num_minibatches=1))
        batch = rollout(ppo.policy)
        batch["sample_log_prob"] -= shift
        losses.append(ppo.update(batch, staleness=1, generator=torch.Generator().manual_seed(4))["actor_loss"])
    assert losses[0] == losses[1]


def test_a_rollout_with_a_reward_that_is_no_number_changes_nothing(policy, rollout):
    ppo = settled(PPO(policy(), SMALL))
    batch = rollout(ppo.policy)
    before = weights(ppo)
    batch["next", "agents", "reward"][3, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="update 0: reward, advantage, return are not finite .reward has 1 of 48"):
        ppo.update(batch)
    assert same(before, weights(ppo))
    assert ppo.num_updates == 0
    assert issubclass(NonFiniteError, SlipstreamError)
    assert issubclass(NonFiniteError, ArithmeticError)


def test_a_minibatch_whose_loss_is_no_number_is_named_and_not_applied(policy, rollout):
    ppo = PPO(policy(), SMALL)
    batch = rollout(ppo.policy)
    seen = []

    def spoiled(some):
        flat = some.reshape(-1)
        yield flat[torch.arange(24)]
        seen.append((weights(ppo), copy.deepcopy(ppo.state_dict()["optimizers"])))
        bad = flat[torch.arange(24, 48)]
        bad["agents", "observation", "lidar"][0] = float("inf")
        yield bad

    with pytest.raises(
        NonFiniteError, match=r"update 0, epoch 0, minibatch 1: actor_loss, .*value_loss nan.*not taken"
    ):
        ppo.update(batch, spoiled)
    ((expected, optimizers),) = seen
    assert same(expected, weights(ppo))
    assert all(bool(tensor.isfinite().all()) for tensor in weights(ppo).values())
    for name, optimizer in ppo.optimizers().items():
        for number, moments in optimizer.state_dict()["state"].items():
            assert same(moments, optimizers[name]["state"][number])
    assert all(parameter.grad is None for parameter in ppo.policy.parameters())


def test_a_resumed_run_equals_the_one_that_went_on(policy, rollout):
    def go_on(ppo: PPO, numbers: range) -> dict[str, torch.Tensor]:
        for number in numbers:
            ppo.update(rollout(ppo.policy, seed=number), generator=torch.Generator().manual_seed(number))
        return weights(ppo)

    ppo = PPO(policy(), SMALL)
    go_on(ppo, range(2))
    whole = copy.deepcopy(ppo.state_dict())
    parts = TrainingState(policy=ppo.policy, **ppo.optimizers(), rng=False)
    in_parts = copy.deepcopy(parts.state_dict())
    expected = go_on(ppo, range(2, 4))

    other = PPO(policy(seed=9), SMALL)
    other.load_state_dict(whole)
    assert other.num_updates == 2
    assert same(expected, go_on(other, range(2, 4)))

    another = PPO(policy(seed=9), SMALL)
    TrainingState(policy=another.policy, **another.optimizers(), rng=False).load_state_dict(in_parts)
    assert same(expected, go_on(another, range(2, 4)))


def test_a_state_that_lacks_something_is_refused(policy):
    ppo = PPO(policy())
    state = ppo.state_dict()
    del state["num_updates"], state["optimizers"]["critic"]
    with pytest.raises(StateMismatchError, match="lacks num_updates, optimizers/critic"):
        ppo.load_state_dict(state)


def test_the_configuration_decides_on_the_discount_whatever_was_loaded(policy, rollout):
    ppo = PPO(policy(), PPOConfig(gamma=0.5, lmbda=0.25, num_minibatches=3))
    ppo.policy.load_state_dict(policy(seed=1).state_dict())
    assert float(ppo.policy.gae.gamma) == pytest.approx(0.99)
    ppo.update(rollout(ppo.policy))
    assert (float(ppo.policy.gae.gamma), float(ppo.policy.gae.lmbda)) == (0.5, 0.25)


def test_every_step_is_used_once_an_epoch_also_when_parts_are_not_equal(policy, rollout):
    batch: TensorDict = rollout(policy()).set("number", torch.arange(48).reshape(8, 6))
    parts = list(shuffle(batch, num_minibatches=5))
    assert sorted(len(part) for part in parts) == [9, 9, 10, 10, 10]
    assert sorted(itertools.chain(*(part["number"].tolist() for part in parts))) == list(range(48))


def test_a_batch_that_is_too_small_or_flat_is_refused(policy, rollout):
    ppo = PPO(policy())
    with pytest.raises(ConfigurationError, match="the batch has 4 steps, expected at least one for 16 minibatches"):
        ppo.update(rollout(ppo.policy, 2, 2))
    with pytest.raises(RolloutError, match="the batch has the shape .48., expected .environment, time."):
        ppo.update(rollout(ppo.policy).reshape(-1))


def test_updating_leaves_the_mode_of_the_module_alone(policy, rollout):
    ppo = PPO(policy(), SMALL)
    ppo.policy.eval()
    ppo.update(rollout(ppo.policy))
    assert not ppo.policy.training
    assert ppo.policy.train() is ppo.policy


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*deprecated:DeprecationWarning")
def test_a_compiled_feature_extractor_learns_the_same_within_rounding(policy, rollout):
    results = []
    for is_compiled in (False, True):
        ppo = PPO(policy(), PPOConfig(training_epoch_num=1, num_minibatches=1), compile=is_compiled)
        results.append(ppo.update(rollout(ppo.policy), generator=torch.Generator().manual_seed(4)))
    assert results[1] == pytest.approx(results[0], rel=1e-3, abs=1e-4)
