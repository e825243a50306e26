"""Mirror images of samples, and what PPO learns from them."""

from typing import Any, cast

import pytest
import torch

from slipstream import NavigationConfig
from slipstream.nav import Simulation, StaticMap
from slipstream.nav.dynamics import hovering
from slipstream.nav.frame import heading_between, velocity_from_unit
from slipstream.nav.observation import Task
from slipstream.rl import PPO, NavRLPolicy, PPOConfig
from slipstream.rl.symmetry import reflect_action, reflect_observation, reflect_some

MIRRORING = PPOConfig(mirror=True, training_epoch_num=2, num_minibatches=2)


def world(sign: float) -> Simulation:
    """Return a drone between boxes and moving obstacles; the sign mirrors everything left to right."""
    boxes = [(1.0, 0.5, 1.6, 1.2, 4.0), (-1.0, -2.0, -0.3, -1.4, 1.5), (0.6, -1.4, 1.3, -0.7, 4.0)]
    mirrored = [(x0, min(sign * y0, sign * y1), x1, max(sign * y0, sign * y1), h) for x0, y0, x1, y1, h in boxes]
    config = NavigationConfig(num_envs=1, num_dynamic_obstacles=16, dynamics="lag", dt_s=0.1, compile="false")
    sim = Simulation(config, boxes=StaticMap.from_boxes(*mirrored))
    start, goal = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[10.0, 0.0, 1.4]])
    sim.task = Task(start, goal, heading_between(start, goal))
    sim.drone = hovering(torch.tensor([[0.0, sign * 0.1, 1.0]]), sim.task.heading)
    state = sim.obstacles.state_dict()
    generator = torch.Generator().manual_seed(3)
    state["position_m"] = (torch.rand(16, 3, generator=generator) * 6 - 3) + torch.tensor([0.0, 0.0, 2.0])
    state["velocity_m_s"] = torch.rand(16, 3, generator=generator) * 2 - 1
    for name in ("position_m", "velocity_m_s"):
        state[name][:, 1] *= sign
    sim.obstacles.load_state_dict(state)
    return sim


def test_the_mirror_image_of_an_observation_is_what_is_seen_in_the_mirrored_world():
    one, other = world(1.0), world(-1.0)
    action = torch.tensor([[0.8, 0.9, 0.6]])
    for _ in range(3):
        seen = one.step(velocity_from_unit(action)).observation
        mirrored = other.step(velocity_from_unit(reflect_action(action))).observation
        reflected = reflect_observation(seen.lidar, seen.dynamic_obstacle, seen.state)
        assert seen.lidar.any()
        assert seen.dynamic_obstacle[..., 6].any()
        expected = (mirrored.lidar, mirrored.dynamic_obstacle, mirrored.state)
        for image, truth in zip(reflected, expected, strict=True):
            torch.testing.assert_close(image, truth, rtol=1e-4, atol=1e-4)


def test_reflecting_twice_changes_nothing(observations):
    seen = observations(4)["agents", "observation"]
    parts = (seen["lidar"], seen["dynamic_obstacle"], seen["state"])
    for twice, once in zip(reflect_observation(*reflect_observation(*parts)), parts, strict=True):
        assert torch.equal(twice, once)


def test_only_masked_samples_are_reflected(observations):
    seen = observations(4)["agents", "observation"]
    parts = (seen["lidar"], seen["dynamic_obstacle"], seen["state"])
    action = torch.rand(4, 3)
    mask = torch.tensor([True, False, False, True])
    some, actions = reflect_some(parts, action, mask)
    for part, old, new in zip(some, parts, reflect_observation(*parts), strict=True):
        assert torch.equal(part[mask], new[mask])
        assert torch.equal(part[~mask], old[~mask])
    assert torch.equal(actions[mask], reflect_action(action)[mask])
    assert torch.equal(actions[~mask], action[~mask])


def asymmetry(policy, seen) -> float:
    parts = policy.observation(seen)
    with torch.no_grad():
        mean = policy.heads(policy.features(*parts))[0].mean
        mirrored = policy.heads(policy.features(*reflect_observation(*parts)))[0].mean
    return float((mirrored - reflect_action(mean)).square().sum(-1).mean())


def lean_left(policy: NavRLPolicy, amount: float) -> None:
    """Change a policy so that it dodges to one side."""
    head = cast("Any", policy.actor.module[0]).module
    head.alpha_layer.bias += torch.tensor([0.0, amount, 0.0])


def test_a_policy_learns_to_treat_left_and_right_alike(policy, rollout, observations):
    left = {}
    for mirror in (False, True):
        learner = PPO(policy(), PPOConfig(mirror=mirror, mirror_coefficient=30.0, num_minibatches=2))
        with torch.no_grad():
            lean_left(learner.policy, 2.0)
        for number in range(15):
            batch = rollout(learner.policy, seed=number)
            batch["next", "agents", "reward"].zero_()
            learner.update(batch, generator=torch.Generator().manual_seed(number))
        left[mirror] = asymmetry(learner.policy, observations(64, seed=99))
    assert left[True] < 0.25 * left[False]


def test_the_rollout_keeps_what_was_observed_and_done(policy, rollout):
    learner = PPO(policy(), MIRRORING)
    batch = rollout(learner.policy)
    before = batch.clone()
    learner.update(batch)
    for key in before.keys(include_nested=True, leaves_only=True):
        assert torch.equal(batch[key], before[key]), key
    assert batch["mirrored"].any()
    assert not batch["mirrored"].view(-1)[1::2].any()


def test_the_weight_of_a_mirrored_sample_is_its_likelihood_ratio_and_at_most_one(policy, rollout):
    learner = PPO(policy(), MIRRORING)
    with torch.no_grad():
        lean_left(learner.policy, 1.0)
    batch = rollout(learner.policy)
    with torch.no_grad():
        seen = reflect_observation(*learner.policy.observation(batch))
        distribution, value = learner.policy.heads(learner.policy.features(*seen))
        log_prob = distribution.log_prob(reflect_action(batch["agents", "action_normalized"]))
    learner.update(batch)
    mirrored = batch["mirrored"]
    ratio = (log_prob - batch["sample_log_prob"]).exp()
    torch.testing.assert_close(batch["importance"][mirrored], ratio[mirrored].clamp(max=1.0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch["proximal_value"][mirrored], value[mirrored], rtol=1e-4, atol=1e-5)
    assert (batch["importance"][~mirrored] == 1.0).all()
    chosen = torch.zeros_like(mirrored).view(-1)
    chosen[::2] = True
    assert torch.equal(mirrored, chosen.view_as(mirrored) & (ratio > 0.1))
    assert mirrored.sum() < chosen.sum()


def test_a_compressed_rollout_is_mirrored_the_same(policy, rollout):
    from slipstream.rollout.compressed import CompressedTensorDict

    results = []
    for compress in (False, True):
        learner = PPO(policy(), MIRRORING)
        batch = rollout(learner.policy)
        learner.update(CompressedTensorDict(batch) if compress else batch, generator=torch.Generator().manual_seed(0))
        results.append(learner.policy.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("mirror", [False, True])
def test_the_parts_of_a_minibatch_add_up_to_the_whole(policy, rollout, mirror):
    results = []
    for threads in (1, 2, 3):
        learner = PPO(policy(), PPOConfig(mirror=mirror, update_threads=threads, num_minibatches=2))
        metrics = learner.update(rollout(learner.policy), generator=torch.Generator().manual_seed(0))
        results.append((learner.policy.state_dict(), metrics))
    for weights, metrics in results[1:]:
        for name, value in results[0][0].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
        for name, value in results[0][1].items():
            assert metrics[name] == pytest.approx(value, rel=1e-2, abs=1e-4), name


def test_the_result_does_not_depend_on_the_number_of_torch_threads(policy, rollout):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            learner = PPO(policy(), PPOConfig(mirror=True, update_threads=2, num_minibatches=2))
            learner.update(rollout(learner.policy), generator=torch.Generator().manual_seed(0))
            assert torch.get_num_threads() == threads
            results.append(learner.policy.state_dict())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_an_error_in_a_part_reaches_the_caller_and_changes_nothing(policy, rollout, monkeypatch):
    learner = PPO(policy(), PPOConfig(update_threads=2, num_minibatches=2))
    batch = rollout(learner.policy)
    before = {name: value.clone() for name, value in learner.policy.state_dict().items()}
    monkeypatch.setattr(learner.policy.actor, "forward", lambda features: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learner.update(batch)
    after = learner.policy.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith(("value_norm", "gae")))


def test_bfloat16_features_are_close_and_come_back_as_float32(policy, rollout):
    exact, coarse = policy(), policy()
    coarse.precision = "bfloat16"
    batch = rollout(exact)
    one, other = exact.evaluate(batch)[1], coarse.evaluate(batch)[1]
    assert other.dtype == torch.float32
    torch.testing.assert_close(one, other, rtol=0.1, atol=0.05)
    assert not torch.equal(one, other)
    learner = PPO(coarse, PPOConfig(precision="bfloat16", num_minibatches=2))
    assert learner.policy.precision == "bfloat16"
    learner.update(rollout(coarse))
    assert all(value.dtype == torch.float32 for value in learner.policy.state_dict().values())
