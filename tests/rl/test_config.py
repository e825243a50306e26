"""The settings: NavRL's by default, and refused with a sentence where they make no sense."""

import dataclasses

import pytest

from slipstream import ConfigurationError
from slipstream.rl import ActorConfig, CriticConfig, FeatureExtractorConfig, PPOConfig


def test_the_defaults_are_those_of_navrl():
    config = PPOConfig()
    assert config.feature_extractor.learning_rate == config.actor.learning_rate == config.critic.learning_rate == 5e-4
    assert config.actor.clip_ratio == config.critic.clip_ratio == 0.1
    assert config.entropy_loss_coefficient == 1e-3
    assert (config.training_frame_num, config.training_epoch_num, config.num_minibatches) == (32, 4, 16)
    assert (config.gamma, config.lmbda, config.huber_delta, config.max_grad_norm) == (0.99, 0.95, 10.0, 5.0)
    assert config.value_norm_beta == 0.995
    assert not config.navrl_compat


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().gamma = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, "gamma is 1.5, expected a number from 0 to 1"),
        ({"lmbda": -0.1}, "lmbda is -0.1, expected a number from 0 to 1"),
        ({"training_epoch_num": 0}, "training_epoch_num is 0, expected a whole number of at least 1"),
        ({"num_minibatches": 2.0}, "num_minibatches is 2.0, expected a whole number of at least 1"),
        ({"huber_delta": 0}, "huber_delta is 0, expected a number above 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan, expected a number above 0"),
        ({"entropy_loss_coefficient": -1}, "entropy_loss_coefficient is -1, expected a number of at least 0"),
        ({"value_norm_beta": 1.0}, "value_norm_beta is 1, expected less than 1"),
        ({"max_importance_weight": 0.5}, "max_importance_weight is 0.5, expected a number of at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_value(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        PPOConfig(**settings)


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        (FeatureExtractorConfig, {"learning_rate": 0.0}, "feature_extractor.learning_rate"),
        (ActorConfig, {"learning_rate": "fast"}, "actor.learning_rate"),
        (ActorConfig, {"clip_ratio": -0.1}, "actor.clip_ratio"),
        (CriticConfig, {"clip_ratio": True}, "critic.clip_ratio"),
    ],
)
def test_the_parts_say_whose_setting_it_is(kind, settings, name):
    with pytest.raises(ConfigurationError, match=f"{name} is .*, expected a number above 0"):
        kind(**settings)
