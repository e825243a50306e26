"""Scenarios: six, in a fixed order, on maps that nobody trained on."""

import pytest

from slipstream import ConfigurationError
from slipstream.train.evaluation.scenarios import Scenario, fit_scenario, plan_flights, standard_scenarios
from tests.train.conftest import small


def by_name(*overrides: str, **options) -> dict[str, Scenario]:
    return {scenario.name: scenario for scenario in standard_scenarios(small(*overrides), **options)}


def test_there_are_six_scenarios_and_flying_through_comes_first():
    scenarios = by_name("env.num_obstacles=350")
    assert list(scenarios) == ["through", "line", "training", "static", "empty", "border"]
    starts = [scenario.start for scenario in scenarios.values()]
    assert starts == ["through", "line", "through", "through", "through", "border"]
    boxes = [scenario.num_static_obstacles for scenario in scenarios.values()]
    assert boxes == [350, 350, 350, 350, 0, 350]
    moving = [scenario.num_dynamic_obstacles for scenario in scenarios.values()]
    assert moving == [80, 80, 80, 0, 0, 80]


def test_unseen_maps_are_64_from_10000_on():
    assert by_name()["through"].map_seeds == range(10000, 10064)


@pytest.mark.parametrize("map_seed", [0, 9990, 10000, 10030, 10063, 10064])
def test_no_unseen_map_was_trained_on(map_seed):
    scenarios = by_name(f"env.map_seed={map_seed}", "env.num_maps=16")
    trained = set(range(map_seed, map_seed + 16))
    for name in ("through", "line", "static", "border"):
        assert len(scenarios[name].map_seeds) == 64
        assert trained.isdisjoint(scenarios[name].map_seeds)
    assert set(scenarios["training"].map_seeds) == trained


def test_maps_of_all_policies_are_avoided_and_there_is_no_training_map_they_share():
    trained = [small("env.map_seed=10000", "env.num_maps=8"), small("env.map_seed=10008", "env.num_maps=8")]
    scenarios = by_name(trained=trained)
    assert scenarios["through"].map_seeds == range(10016, 10080)
    assert "training" not in scenarios


def test_a_training_map_that_is_changed_or_unknown_is_not_called_the_training_map():
    trained = small()
    assert "training" in by_name(trained=[trained])
    assert "training" not in by_name("env.num_obstacles=50", trained=[trained])
    assert "training" not in by_name(trained=[])


def test_one_training_map_is_flown_on_many_courses_and_many_on_one():
    single = by_name("env.num_maps=1")["training"]
    assert (single.num_maps, single.num_courses) == (1, 64)
    scenarios = by_name("env.num_envs=64", "env.num_maps=16")
    assert (scenarios["training"].num_maps, scenarios["training"].num_courses) == (16, 4)


def test_the_maps_of_a_scenario_share_a_few_simulations_with_as_many_flights_on_each():
    parts = plan_flights(by_name()["through"], small(), 512, seed=3)
    assert [(part.config.num_envs, part.config.num_maps) for part in parts] == [(256, 32), (256, 32)]
    assert [part.config.map_seed for part in parts] == [10000, 10032]
    assert [part.config.seed for part in parts] == [3, 1003]
    assert [part.first_flight for part in parts] == [0, 256]
    assert len(plan_flights(by_name()["through"], small(), 1280, seed=3)) == 4


def test_an_evaluation_flies_whole_episodes_to_the_goal_whatever_the_training_did():
    settings = small(
        "env.inside_starts=0.5", "env.danger_weight=3", "env.collision_penalty=60", "sim.response_delay=0.2"
    )
    [part] = plan_flights(standard_scenarios(settings)[0], settings, 64, seed=1)
    config = part.config
    assert config.goal_truncates
    assert not config.random_clocks
    assert not config.centred_reward
    assert (config.inside_starts, config.danger_weight, config.collision_penalty) == (0, 0, 0)
    assert config.response_delay_s == 0
    assert config.obstacle_warmup_s > 10


def test_courses_of_one_map_share_a_simulation_and_are_clusters():
    [part] = plan_flights(by_name("env.num_maps=1")["training"], small(), 512, seed=1)
    assert part.config.map_seeds == [0] * 64
    assert part.config.num_envs == 512
    many = plan_flights(by_name("env.num_maps=16")["training"], small(), 16 * 4 * 100, seed=1)
    assert [seed for part in many for seed in part.config.map_seeds] == [seed for seed in range(16) for _ in range(4)]
    assert [part.first_world for part in many] == [0, 16, 32, 48]


def test_more_flights_than_fit_into_a_simulation_are_flown_map_by_map():
    parts = plan_flights(by_name()["line"], small(), 64 * 100, seed=1)
    maps = [seed for part in parts for seed in range(part.config.map_seed, part.config.map_seed + part.config.num_maps)]
    assert maps == list(range(10000, 10064))
    assert max(part.config.num_envs for part in parts) <= 2048
    assert sum(part.config.num_envs for part in parts) == 6400


def test_fewer_episodes_than_maps_leave_maps_out_and_others_are_rounded_up():
    through = by_name()["through"]
    assert fit_scenario(through, 5).num_maps == 5
    [part] = plan_flights(fit_scenario(through, 100), small(), 100, seed=1)
    assert part.config.num_envs == 128


def test_empty_maps_are_one_map_so_that_no_flight_is_counted_twice():
    nothing = by_name("env.num_obstacles=0", "env_dyn.num_obstacles=0")
    assert fit_scenario(nothing["line"], 512).num_maps == 1
    assert fit_scenario(by_name("env.num_obstacles=0")["line"], 512).num_maps == 64


def test_no_episode_is_an_error():
    with pytest.raises(ConfigurationError, match="episodes is 0, expected a whole number of at least 1"):
        fit_scenario(by_name()["empty"], 0)
