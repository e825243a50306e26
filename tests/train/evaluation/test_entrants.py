"""Entrants: what flies, with the settings of its training or of the original."""

import pytest

from slipstream import ConfigurationError
from slipstream.train.evaluation.entrants import choose_scenarios, load_entrant


def test_a_policy_flies_faithfully_whatever_it_was_trained_in(train, tmp_path):
    train("x", "sim.response_delay=0.2")
    entrant = load_entrant(str(tmp_path / "x"), faithful=True, shield=True)
    config = entrant.settings.navigation()
    assert (config.dynamics, config.dt_s, config.max_episode_length) == ("hummingbird", 0.016, 2200)
    assert entrant.trained is not None
    assert entrant.trained.sim.dynamics == "lag"
    assert entrant.candidate.name == "policy_shield"
    assert entrant.folder == tmp_path / "x" / "eval"
    assert entrant.about["iteration"] == 6
    names = [scenario.name for scenario in choose_scenarios([entrant])]
    assert names == ["through", "line", "training", "static", "empty", "border"]


def test_the_planner_needs_no_policy_and_has_no_training_map():
    entrant = load_entrant(None, ["preset=quick"], planner=True)
    assert entrant.candidate.name == "planner"
    assert "training" not in [scenario.name for scenario in choose_scenarios([entrant])]
    with pytest.raises(ConfigurationError, match="no policy is given"):
        load_entrant(None)


def test_scenarios_come_in_the_standard_order_however_they_are_named():
    entrant = load_entrant(None, ["preset=quick"], planner=True)
    chosen = choose_scenarios([entrant], ["empty", "line"], num_maps=3)
    assert [scenario.name for scenario in chosen] == ["line", "empty"]
    assert chosen[0].num_maps == 3
