"""Rollouts, one after another, that go on exactly where they were left."""

import itertools

import pytest
import torch

from slipstream import ConfigurationError, NavigationConfig, NavigationEnv, NavRLPolicy, StateMismatchError
from slipstream.collect.serial import SerialCollector
from slipstream.nav import velocity_from_unit


def collector(num_envs: int = 6, total_rollouts: int | None = None) -> SerialCollector:
    config = NavigationConfig(
        num_envs=num_envs, num_static_obstacles=20, dynamics="lag", dt_s=0.1, max_episode_length=7, random_clocks=True
    )
    torch.manual_seed(0)
    policy = NavRLPolicy(action_map=velocity_from_unit)
    return SerialCollector(NavigationEnv(config), policy, num_steps=5, total_rollouts=total_rollouts)


def test_a_rollout_begins_where_the_last_one_ended():
    rollouts = list(collector(total_rollouts=6))
    num_ended = 0
    for one, two in itertools.pairwise(rollouts):
        assert one.batch_size == (6, 5)
        going_on = ~one["next", "done"][:, -1, 0]
        num_ended += int((~going_on).sum())
        seen, before = (part["agents", "observation", "state"] for part in (two[:, 0], one["next"][:, -1]))
        assert torch.equal(seen[going_on], before[going_on])
        assert (seen[~going_on] != before[~going_on]).any(1).all()
    assert 0 < num_ended < 30


def test_within_a_rollout_every_step_follows_the_one_before_or_a_reset():
    (rollout,) = collector(total_rollouts=1)
    seen, then = rollout["agents", "observation", "state"], rollout["next", "agents", "observation", "state"]
    follows = (seen[:, 1:] == then[:, :-1]).all(2)
    assert torch.equal(follows, ~rollout["next", "done"][:, :-1, 0])
    assert not follows.all()


def test_rollouts_are_memory_of_their_own():
    source = collector()
    one = source.collect()
    kept = one.clone()
    source.collect()
    assert (one == kept).all()


def test_a_collector_that_is_restored_goes_on_bit_for_bit():
    source = collector()
    source.collect()
    state, rng = source.state_dict(), torch.get_rng_state()
    expected = [source.collect() for _ in range(3)]
    other = collector()
    other.load_state_dict(state)
    torch.set_rng_state(rng)
    assert all((other.collect() == rollout).all() for rollout in expected)
    assert other.num_rollouts == 4


def test_the_number_of_rollouts_counts_those_before_a_restore():
    source = collector(total_rollouts=3)
    source.collect()
    other = collector(total_rollouts=3)
    other.load_state_dict(source.state_dict())
    assert len(list(other)) == 2


def test_a_state_of_something_else_is_refused():
    with pytest.raises(StateMismatchError, match="the collector's state lacks env, num_rollouts, seen"):
        collector().load_state_dict({})
    with pytest.raises(StateMismatchError, match="does not fit this simulation"):
        collector(num_envs=5).load_state_dict(collector(num_envs=6).state_dict())


def test_a_number_that_makes_no_sense_is_an_error():
    with pytest.raises(ConfigurationError, match="total_rollouts is 0, expected a whole number of at least 1"):
        collector(total_rollouts=0)


def test_seeding_begins_all_episodes_anew():
    source = collector()
    source.set_seed(3)
    torch.manual_seed(1)
    one = source.collect()
    source.set_seed(3)
    torch.manual_seed(1)
    assert (source.collect() == one).all()


def test_schedules_are_told_the_number_of_each_rollout_also_after_a_resume():
    def recorded(numbers: list[int]) -> SerialCollector:
        env = NavigationEnv(NavigationConfig(num_envs=2, num_static_obstacles=5, dynamics="lag", dt_s=0.1))
        policy = NavRLPolicy(action_map=velocity_from_unit)
        return SerialCollector(env, policy, num_steps=2, before_rollout=numbers.append)

    first: list[int] = []
    second: list[int] = []
    one, other = recorded(first), recorded(second)
    one.collect()
    one.collect()
    other.load_state_dict(one.state_dict())
    other.collect()
    assert first == [0, 1]
    assert second == [2]
