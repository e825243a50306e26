"""Imitating a teacher: which samples it is asked about, and what PPO learns from it."""

import pytest
import torch
from tensordict import TensorDict

from slipstream import ConfigurationError
from slipstream.rl import PPO, NavRLPolicy, PPOConfig
from slipstream.rl.symmetry import reflect_action, reflect_observation
from slipstream.rl.teacher import ask, imitation_loss

TAUGHT = PPOConfig(teacher_coefficient=30.0, teacher_interval=2, training_epoch_num=2, num_minibatches=2)
TARGET = torch.tensor([0.9, 0.2, 0.6])


def constant_teacher(samples: TensorDict) -> torch.Tensor:
    return TARGET.expand(samples.batch_size[0], 3)


def first_state_teacher(samples: TensorDict) -> torch.Tensor:
    """Answer with the first numbers of the state, so that an answer shows what was asked about."""
    return samples["agents", "observation", "state"][:, :3].clone()


def mean_action(policy: NavRLPolicy, seen: TensorDict) -> torch.Tensor:
    with torch.no_grad():
        return policy.evaluate(seen)[0].mean


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_teacher_is_asked_about_every_nth_environment(observations, threads):
    batch = observations(7, 4)
    lesson = ask(first_state_teacher, batch, first=1, interval=3, threads=threads)
    asked = [1, 4]
    others = [0, 2, 3, 5, 6]
    state = batch["agents", "observation", "state"]
    assert torch.equal(lesson.action[asked], state[asked][..., :3])
    assert (lesson.weight[asked] > 0).all()
    assert not lesson.weight[others].any()
    assert not lesson.action[others].any()


def test_an_interval_longer_than_the_rollout_still_asks_about_one_environment(observations):
    for first in range(8):
        lesson = ask(first_state_teacher, observations(2, 3), first=first, interval=8, threads=1)
        assert (lesson.weight > 0).any(1).sum() == 1


@pytest.mark.parametrize("num_envs", [1, 2, 5, 6, 8])
def test_the_weight_of_the_teacher_does_not_depend_on_how_many_environments_it_is_asked_about(observations, num_envs):
    for first in range(4):
        lesson = ask(first_state_teacher, observations(num_envs, 3), first=first, interval=4, threads=1)
        assert float(lesson.weight.mean()) == pytest.approx(1.0)


def test_every_environment_gets_its_turn(policy, rollout):
    learner = PPO(policy(), TAUGHT, teacher=constant_teacher)
    turns = []
    for number in range(2):
        batch = rollout(learner.policy, seed=number)
        learner.update(batch)
        turns.append((batch["teacher_weight"] > 0).any(1))
    assert torch.equal(turns[0], ~turns[1])


def test_the_loss_is_the_mean_over_taught_samples():
    mean = torch.zeros(4, 3)
    action = torch.tensor([[1.0, 2.0, 2.0], [9.0, 9.0, 9.0], [0.0, 0.0, 1.0], [9.0, 9.0, 9.0]])
    weight = torch.tensor([2.0, 0.0, 2.0, 0.0])
    assert float(imitation_loss(mean, action, weight)) == pytest.approx((9.0 + 1.0) / 2)


def test_the_parts_of_a_minibatch_add_up_to_the_whole(policy, rollout):
    results = []
    for threads in (1, 2, 3):
        config = PPOConfig(teacher_coefficient=30.0, mirror=True, update_threads=threads, num_minibatches=2)
        learner = PPO(policy(), config, teacher=first_state_teacher)
        metrics = learner.update(rollout(learner.policy), generator=torch.Generator().manual_seed(0))
        results.append((learner.policy.state_dict(), metrics))
    for weights, metrics in results[1:]:
        for name, value in results[0][0].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
        assert metrics["imitation_loss"] == pytest.approx(results[0][1]["imitation_loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.zeros(1, 3), r"the teacher returned \[1, 3\], expected \[\d+, 3\]"),
        (torch.zeros(24, 1), r"the teacher returned \[24, 1\], expected \[24, 3\]"),
        (torch.full((24, 3), 7.0), r"the teacher returned an action outside \[0, 1\]"),
        (torch.full((24, 3), float("nan")), r"the teacher returned an action outside \[0, 1\]"),
    ],
)
def test_an_answer_that_is_not_an_action_for_every_sample_is_refused(policy, rollout, answer, message):
    learner = PPO(policy(), TAUGHT, teacher=lambda samples: answer)
    with pytest.raises(ConfigurationError, match=message):
        learner.update(rollout(learner.policy))


def test_a_network_as_a_teacher_records_no_gradients(policy, rollout):
    expert = policy(seed=1)
    modes = []

    def teach(samples: TensorDict) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return expert.evaluate(samples)[0].mean

    config = PPOConfig(teacher_coefficient=1.0, teacher_interval=1, update_threads=2, num_minibatches=2)
    learner = PPO(policy(), config, teacher=teach)
    learner.update(rollout(learner.policy))
    assert modes == [False, False]
    assert all(parameter.grad is None for parameter in expert.parameters())


def test_a_policy_learns_what_the_teacher_does(policy, rollout, observations):
    seen = observations(64, seed=99)
    distances = {}
    for coefficient in (0.0, 30.0):
        learner = PPO(policy(), PPOConfig(num_minibatches=2), teacher=constant_teacher)
        learner.teacher_coefficient = coefficient
        for number in range(15):
            batch = rollout(learner.policy, seed=number)
            batch["next", "agents", "reward"].zero_()
            metrics = learner.update(batch, generator=torch.Generator().manual_seed(number))
            assert ("imitation_loss" in metrics) == (coefficient > 0)
        distances[coefficient] = float((mean_action(learner.policy, seen) - TARGET).square().sum(-1).mean())
    assert distances[30.0] < 0.1 * distances[0.0]


def test_in_a_mirrored_sample_the_mirrored_action_is_imitated(policy, rollout, observations):
    learner = PPO(policy(), PPOConfig(mirror=True, mirror_coefficient=0.0, num_minibatches=2), teacher=constant_teacher)
    learner.teacher_coefficient = 30.0
    # A teacher that always goes right teaches to go right, and left in the mirror: on average straight ahead.
    for number in range(15):
        batch = rollout(learner.policy, seed=number)
        batch["next", "agents", "reward"].zero_()
        learner.update(batch, generator=torch.Generator().manual_seed(number))
    assert batch["mirrored"].any()
    seen = observations(64, seed=99)
    parts = learner.policy.observation(seen)
    with torch.no_grad():
        mirrored = learner.policy.heads(learner.policy.features(*reflect_observation(*parts)))[0].mean
    sideways = (mean_action(learner.policy, seen) + mirrored)[:, 1] / 2
    expected = (TARGET + reflect_action(TARGET))[1] / 2
    assert float(sideways.mean()) == pytest.approx(float(expected), abs=0.1)


def test_without_weight_the_teacher_is_not_asked(policy, rollout):
    def refuse(samples: TensorDict) -> torch.Tensor:
        raise AssertionError("asked")

    learner = PPO(policy(), PPOConfig(num_minibatches=2), teacher=refuse)
    learner.update(rollout(learner.policy))
    learner.teacher_coefficient = 1.0
    with pytest.raises(AssertionError, match="asked"):
        learner.update(rollout(learner.policy))


def test_a_compressed_rollout_is_taught_the_same(policy, rollout):
    from slipstream.rollout.compressed import CompressedTensorDict

    results = []
    for compress in (False, True):
        learner = PPO(policy(), TAUGHT, teacher=first_state_teacher)
        batch = rollout(learner.policy)
        learner.update(CompressedTensorDict(batch) if compress else batch, generator=torch.Generator().manual_seed(0))
        results.append(learner.policy.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_weight_without_a_teacher_is_refused():
    with pytest.raises(ConfigurationError, match=r"teacher_coefficient is 30\.0, expected 0 without a teacher"):
        PPO(config=TAUGHT)
    learner = PPO()
    with pytest.raises(ConfigurationError, match=r"teacher_coefficient is 5\.0, expected 0 without a teacher"):
        learner.teacher_coefficient = 5.0
    with pytest.raises(ConfigurationError, match="teacher_coefficient is nan, expected a number of at least 0"):
        PPO(teacher=constant_teacher).teacher_coefficient = float("nan")
