"""Evaluation: every episode is counted once, recorded flights are real, files say what defined them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream import ConfigurationError, NavRLPolicy, load_rollout, policy_candidate
from slipstream.nav import Simulation, velocity_from_unit
from slipstream.report.flights import read_flights
from slipstream.rollout.files import RolloutFile
from slipstream.run.evaluation import OUTCOMES, choose_name, require_writable
from slipstream.train.evaluation.compare import compare
from slipstream.train.evaluation.jobs import Job, describe_conditions, evaluate, run_jobs
from slipstream.train.evaluation.pilots import Sensors
from slipstream.train.evaluation.results import save_evaluation
from slipstream.train.evaluation.scenarios import Scenario, plan_flights
from tests.train.conftest import small
from tests.train.evaluation.conftest import CROWDED, EMPTY, FEW_BOXES, STILL, STRAIGHT, long_enough


def test_in_an_empty_world_flying_straight_always_succeeds():
    result = evaluate(STRAIGHT, long_enough(), EMPTY, episodes=32)
    assert result.rates["success"].mean == 1.0
    assert 0.8 < result.rates["success"].low < 1.0
    assert result.episodes == 32
    assert (result.num_clusters, result.interval) == (32, "flights")
    time_s = result.means["time_to_goal_s"]
    path_m = result.means["path_length_m"]
    inside = result.means["inside_share"]
    assert time_s is not None
    assert path_m is not None
    assert inside is not None
    assert path_m.mean / time_s.mean == pytest.approx(1.9, abs=0.15)  # it accelerates to 2 m/s first
    assert 40 / 48 < inside.mean + 0.1 < 1.0  # at most 40 of at least 48 m are inside the field


def test_standing_still_runs_out_of_time_outside_the_field():
    result = evaluate(STILL, small(), EMPTY, episodes=8)
    assert result.rates["timeout"].mean == 1.0
    assert result.means["time_to_goal_s"] is None
    inside = result.means["inside_share"]
    assert inside is not None
    assert inside.mean == 0.0


def test_every_episode_has_one_outcome_and_straight_flight_meets_all_kinds_of_obstacles():
    result = evaluate(STRAIGHT, long_enough(), CROWDED, episodes=120)
    assert math.fsum(rate.mean for rate in result.rates.values()) == pytest.approx(1.0)
    assert result.rates["static_collision"].mean > 0.1
    assert result.rates["dynamic_collision"].mean > 0.02
    assert 0 < result.rates["success"].mean < 0.9
    assert (result.num_clusters, result.interval) == (4, "clusters")


def test_courses_of_one_map_are_related_unless_it_is_the_only_one():
    settings = small()
    several = evaluate(STRAIGHT, settings, Scenario("training", "Maps", "through", 0, 4, 20, 8, 3), episodes=24).flown
    assert several.log.cluster.tolist() == [number // 6 for number in range(24)]
    single = evaluate(STRAIGHT, settings, Scenario("training", "Map", "through", 0, 1, 20, 8, 3), episodes=6).flown
    assert single.log.cluster.tolist() == [0, 0, 1, 1, 2, 2]


def test_means_stay_within_what_is_possible():
    result = evaluate(STRAIGHT, small(), FEW_BOXES, episodes=3)
    inside = result.means["inside_share"]
    assert inside is not None
    assert 0.0 <= inside.low <= inside.high <= 1.0
    for name in ("time_to_goal_s", "path_length_m"):
        mean = result.means[name]
        assert mean is None or mean.low >= 0.0


def test_one_map_is_said_to_be_one():
    single = Scenario("through", "One map", "through", 1000, 1, 100, 8)
    assert evaluate(STRAIGHT, long_enough(), single, episodes=8).interval == "assumed"


def test_the_same_seed_gives_the_same_result_and_another_one_another():
    candidate = policy_candidate(NavRLPolicy(action_map=velocity_from_unit))
    one, same, other = (evaluate(candidate, small(), CROWDED, episodes=16, seed=seed) for seed in (5, 5, 6))
    assert (one.rates, one.means) == (same.rates, same.means)
    assert one.means != other.means


def test_sampled_actions_depend_on_the_seed_alone_and_leave_global_random_numbers_alone():
    policy = NavRLPolicy(action_map=velocity_from_unit)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    rng = torch.get_rng_state()
    candidate = policy_candidate(policy, "sample")
    one = evaluate(candidate, small(), EMPTY, episodes=4)
    torch.rand(3)
    same = evaluate(candidate, small(), EMPTY, episodes=4)
    assert one.means == same.means
    torch.set_rng_state(rng)
    evaluate(candidate, small(), EMPTY, episodes=4)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_obstacles_have_left_their_origins_when_drones_start():
    flown = evaluate(STILL, small(), CROWDED, episodes=4, num_recorded=2).flown
    unmoved = evaluate(STILL, small(), CROWDED, episodes=4, num_recorded=2, seed=2).flown
    assert flown.flights is not None
    assert unmoved.flights is not None
    first = flown.flights.world.obstacles[0, 0]
    other = unmoved.flights.world.obstacles[0, 0]
    # Both seeds have the same origins, so obstacles that had just started would be at the same places.
    assert np.median(np.linalg.norm(first - other, axis=1)) > 1.0


def test_no_flight_on_the_line_is_flown_twice_even_if_nothing_moves():
    still_world = Scenario("line", "Line", "line", 1000, 3, 40, 0)
    flights = set()
    for part in plan_flights(still_world, small(), 3 * 1100, seed=1):
        simulation = Simulation(part.config)
        per_map = part.config.num_envs // part.config.num_maps
        for drone, start in enumerate(simulation.task.start_m.tolist()):
            flights.add((part.config.map_seed + drone // per_map, *start))
    assert len(flights) == 3300


def test_progress_is_reported_until_all_episodes_have_ended():
    calls: list[tuple[int, int]] = []
    evaluate(STILL, small(), EMPTY, episodes=4, on_step=lambda ended, total: calls.append((ended, total)))
    assert calls[-1] == (4, 4)
    assert len(calls) == 20


def test_noise_and_latency_make_flights_worse_on_the_same_starts():
    policy = STRAIGHT
    plain = evaluate(policy, long_enough(), EMPTY, episodes=8, num_recorded=3).flown
    late = evaluate(policy, long_enough(), EMPTY, episodes=8, num_recorded=3, sensors=Sensors(latency_s=1.0)).flown
    assert plain.flights is not None
    assert late.flights is not None
    starts = plain.flights.rollout["info", "position"][:, 0]
    assert torch.equal(starts, late.flights.rollout["info", "position"][:, 0])
    assert late.title == "Empty world (latency 1 s)"
    assert not np.array_equal(plain.log.path_m, late.log.path_m)


def test_flights_are_recorded_as_an_ordinary_rollout_with_its_world(tmp_path):
    result = evaluate(STRAIGHT, long_enough(), CROWDED, episodes=12, num_recorded=5)
    assert result.episodes == 12
    path, document = save_evaluation([result], tmp_path, "final", {"iteration": 3})
    assert json.loads(path.read_text()) == document
    assert (document["format"], document["version"]) == ("slipstream.evaluation", 2)
    [entry] = document["results"]
    assert entry["success"].keys() == {"mean", "low", "high"}
    assert entry["simulation"]["start"] == "through"
    assert entry["map_seeds"] == [1000, 1001, 1002, 1003]
    flights = load_rollout(tmp_path / entry["flights"])
    num_drones, num_steps = flights.batch_size
    assert num_drones == 5
    done = flights["next", "done"].squeeze(2)
    # The last flight ends with the rollout, and the others before.
    assert done.any(1).all()
    assert done[:, -1].any()
    packed = read_flights(tmp_path / entry["flights"])
    assert packed["ends"] == (done.int().argmax(1) + 1).tolist()
    assert packed["map"] == 1000
    assert len(packed["boxes"]) == 60
    with RolloutFile(tmp_path / entry["flights"]) as file:
        assert file.read_extra("obstacles").shape == (1, num_steps + 1, 80, 3)
    for drone, (start, goal, heading) in enumerate(
        zip(packed["starts"], packed["goals"], packed["headings"], strict=True)
    ):
        assert heading == pytest.approx(math.atan2(goal[1] - start[1], goal[0] - start[0]), abs=1e-3)
        last = flights["next", "info", "position"][drone, packed["ends"][drone] - 1]
        near = (last - torch.tensor(goal)).norm() < 0.6
        assert bool(near) == (OUTCOMES[packed["outcomes"][drone]] == "success")


def test_recorded_flights_are_those_that_are_counted_if_there_are_as_many_on_one_map():
    scenario = Scenario("static", "Few boxes", "through", 1000, 1, 40, 80)
    flown = evaluate(STRAIGHT, long_enough(), scenario, episodes=6, num_recorded=6).flown
    assert flown.flights is not None
    rollout = flown.flights.rollout
    steps = rollout["next", "done"].squeeze(2).int().argmax(1) + 1
    np.testing.assert_allclose(flown.log.flight_s, steps.numpy() * flown.config.dt_s)
    for drone, num_steps in enumerate(steps.tolist()):
        reached = bool(rollout["next", "info", "reached_goal"][drone, num_steps - 1])
        assert reached == bool(flown.log.success[drone])


def test_an_evaluation_replaces_only_one_of_the_same_policy_and_conditions(tmp_path):
    jobs = [Job(STILL, EMPTY)]
    results = run_jobs(jobs, small(), episodes=2)

    def about(**conditions):
        return {"checkpoint": "a.slip", "conditions": describe_conditions(jobs, small(), episodes=2, **conditions)}

    assert choose_name(tmp_path, "evaluation", about()) == "evaluation"
    save_evaluation(results, tmp_path, "evaluation", about())
    assert choose_name(tmp_path, "evaluation", about()) == "evaluation"
    assert choose_name(tmp_path, "evaluation", about(seed=2)) == "evaluation_2"
    assert choose_name(tmp_path, "evaluation", about(overrides=["env.num_obstacles=9"])) == "evaluation_2"
    assert choose_name(tmp_path, "evaluation", {**about(), "checkpoint": "b.slip"}) == "evaluation_2"
    (tmp_path / "notes.json").write_text("not an evaluation")
    assert choose_name(tmp_path, "notes", about()) == "notes_2"


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_flies(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="cannot write evaluations there"):
        require_writable(tmp_path / "file")
    require_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_two_candidates_are_compared_flight_by_flight():
    straight, still = run_jobs([Job(STRAIGHT, FEW_BOXES), Job(STILL, FEW_BOXES)], long_enough(), episodes=32)
    comparison = compare(still, straight)
    assert comparison.success.mean == straight.rates["success"].mean
    assert comparison.num_better == round(32 * straight.rates["success"].mean)
    assert comparison.num_worse == 0
    assert "runs/b is better by" in compare(still, straight).verdict("runs/a", "runs/b")
    assert "runs/a is better by" in compare(straight, still).verdict("runs/a", "runs/b")
    same = compare(straight, straight)
    assert same.success.mean == 0
    assert same.verdict("a", "b").startswith("no significant difference: b +0.000")


def test_a_comparison_on_too_few_maps_is_not_called_a_result():
    few = [Job(candidate, replace(FEW_BOXES, num_maps=5)) for candidate in (STILL, STRAIGHT)]
    comparison = compare(*run_jobs(few, long_enough(), episodes=40))
    assert comparison.success.mean > 0.2
    assert not comparison.success.significant
    sentence = comparison.verdict("a", "b")
    assert sentence.startswith("not tested: b +0.")
    assert sentence.endswith("a test needs 6 maps, and these are 5")


def test_flights_that_are_not_the_same_cannot_be_compared():
    one = evaluate(STILL, small(), EMPTY, episodes=4, seed=1)
    other = evaluate(STILL, small(), EMPTY, episodes=4, seed=2)
    with pytest.raises(ConfigurationError, match="are not the same"):
        compare(one, other)
