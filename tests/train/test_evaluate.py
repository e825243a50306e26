"""Evaluation: every episode counted once, whatever its length."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slipstream.train.evaluate import (
    OUTCOMES,
    Scenario,
    evaluate,
    mean_interval,
    rate_interval,
    save_evaluation,
    standard_scenarios,
)

from slipstream import ConfigurationError, NavRLPolicy, load_rollout
from slipstream.nav import velocity_from_unit
from tests.train.conftest import small

EMPTY = Scenario("empty", "Empty world", (1,), 0, 0)


class Straight(NavRLPolicy):
    """Flies straight to its goal at full speed, whatever is in the way."""

    def act(self, tensordict, choose="sample"):
        direction = tensordict["agents", "observation", "state"][..., :3]
        return tensordict.set(("agents", "action"), 2.0 * direction)


class Still(NavRLPolicy):
    """Stays where it is."""

    def act(self, tensordict, choose="sample"):
        return tensordict.set(("agents", "action"), torch.zeros(*tensordict.batch_size, 3))


LONG = ("env.max_episode_length=400",)


def test_in_an_empty_world_flying_straight_always_succeeds():
    result = evaluate(Straight(), small(*LONG), EMPTY, episodes=32)
    assert result.rates["success"].mean == 1.0
    assert result.episodes == 32
    time_s, path_m = result.means["time_to_goal_s"], result.means["path_length_m"]
    assert time_s is not None
    assert path_m is not None
    assert path_m.mean / time_s.mean == pytest.approx(1.9, abs=0.15)  # it has to get up to its 2 m/s first


def test_standing_still_runs_out_of_time_and_leaves_no_time_to_goal():
    result = evaluate(Still(), small(), EMPTY, episodes=8)
    assert result.rates["timeout"].mean == 1.0
    assert result.means["time_to_goal_s"] is None
    returns = result.means["return"]
    assert returns is not None
    assert math.isfinite(returns.mean)


def test_every_episode_has_one_outcome_and_straight_flight_meets_all_kinds_of_obstacles():
    scenario = Scenario("unseen", "Unseen maps", (1, 2), 200, 80)
    result = evaluate(Straight(), small(*LONG), scenario, episodes=120)
    assert math.fsum(rate.mean for rate in result.rates.values()) == pytest.approx(1.0)
    assert result.rates["static_collision"].mean > 0.1
    assert result.rates["dynamic_collision"].mean > 0.02
    assert 0 < result.rates["success"].mean < 0.9


def test_the_same_seed_gives_the_same_result_and_another_one_another():
    scenario = Scenario("x", "x", (3,), 100, 40)
    policy = NavRLPolicy(action_map=velocity_from_unit)
    one, same, other = (evaluate(policy, small(), scenario, episodes=16, seed=seed) for seed in (5, 5, 6))
    assert (one.rates, one.means) == (same.rates, same.means)
    assert one.means != other.means


def test_evaluation_leaves_global_random_numbers_and_the_policy_alone():
    policy = NavRLPolicy(action_map=velocity_from_unit)
    before, rng = {name: tensor.clone() for name, tensor in policy.state_dict().items()}, torch.get_rng_state()
    evaluate(policy, small(), EMPTY, episodes=4)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_progress_is_told_until_all_episodes_have_ended():
    told: list[tuple[int, int]] = []
    evaluate(Still(), small(), EMPTY, episodes=4, on_step=lambda ended, total: told.append((ended, total)))
    assert told[-1] == (4, 4)
    assert len(told) == 20


def test_flights_are_recorded_moment_by_moment_and_stay_where_they_ended(tmp_path):
    scenario = Scenario("unseen", "Unseen maps", (1,), 200, 80)
    result = evaluate(Straight(), small(*LONG), scenario, episodes=12, num_flights=5)
    path, document = save_evaluation([result], tmp_path, "final", {"iteration": 3})
    assert json.loads(path.read_text()) == document
    assert document["format"] == "slipstream.evaluation"
    assert document["scenarios"][0]["success"].keys() == {"mean", "low", "high"}
    flights = load_rollout(tmp_path / document["scenarios"][0]["flights"])
    outcome, position = flights["drone", "outcome"][0], flights["drone", "position"][0]
    assert flights["drone", "lidar"].shape[2:] == (5, 36, 4)
    assert flights["obstacle", "position"].shape[2:] == (80, 3)
    assert (outcome[0] == 0).all()
    assert (outcome[-1] > 0).all()
    assert (outcome[1:] >= outcome[:-1]).all()
    for drone in range(5):
        end = int((outcome[:, drone] > 0).nonzero()[0])
        assert (position[end:, drone] == position[end, drone]).all()
        assert (position[end, drone] != position[end - 1, drone]).any()
    assert result.flights is not None
    world = result.flights.world
    assert len(world["boxes"]) == 200
    assert len(world["goals"]) == len(world["starts"]) == 5
    assert position[0].tolist() == world["starts"]
    for start, goal, heading in zip(world["starts"], world["goals"], world["headings"], strict=True):
        assert heading == pytest.approx(math.atan2(goal[1] - start[1], goal[0] - start[0]), abs=1e-4)
    for drone, goal in enumerate(world["goals"]):
        near = (position[-1, drone] - torch.tensor(goal)).norm() < 0.6
        assert bool(near) == (OUTCOMES[outcome[-1, drone]] == "success")


def test_more_episodes_than_fly_at_once_are_flown_one_lot_after_another(monkeypatch):
    monkeypatch.setattr("slipstream.train.evaluate._MAX_DRONES", 4)
    result = evaluate(Still(), small(), Scenario("x", "x", (1, 2), 0, 0), episodes=11)
    assert result.episodes == 11


def test_no_episode_is_an_error():
    with pytest.raises(ConfigurationError, match="episodes is 0, expected a whole number of at least 1"):
        evaluate(Still(), small(), EMPTY, episodes=0)


def test_unseen_maps_do_not_include_the_training_map():
    for seed in range(5):
        unseen, training, *_ = standard_scenarios(small(f"env.map_seed={seed}"))
        assert training.map_seeds == (seed,)
        assert seed not in unseen.map_seeds
        assert len(set(unseen.map_seeds)) == 3


@given(st.integers(1, 2000).flatmap(lambda tries: st.tuples(st.integers(0, tries), st.just(tries))))
def test_a_rate_lies_within_its_interval_and_the_interval_within_0_and_1(counts):
    interval = rate_interval(*counts)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.low < interval.high


def test_wilsons_interval_has_the_values_of_the_textbook():
    interval = rate_interval(8, 10)
    assert [interval.low, interval.high] == pytest.approx([0.490, 0.943], abs=1e-3)


def test_the_interval_of_a_mean_shrinks_with_the_root_of_the_number():
    few, many = mean_interval(torch.arange(100.0)), mean_interval(torch.arange(100.0).repeat(100))
    assert few is not None
    assert many is not None
    assert few.mean == many.mean == 49.5
    assert (few.high - few.mean) / (many.high - many.mean) == pytest.approx(10, rel=0.01)
    assert mean_interval(torch.zeros(0)) is None
