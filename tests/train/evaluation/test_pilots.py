"""Pilots compose, and sensors are as faulty as they claim to be."""

import pytest
import torch

from slipstream import ConfigurationError, NavRLPolicy
from slipstream.nav import NavigationConfig, Observation, velocity_from_unit
from slipstream.train.evaluation.pilots import (
    Sensors,
    delayed,
    make_sensing,
    noisy,
    policy_candidate,
    policy_pilot,
    shielded,
)

CONFIG = NavigationConfig(num_envs=3, dynamics="lag", dt_s=0.1)


def observation(value: float = 1.0, envs: int = 3) -> Observation:
    """Return an observation in which half of the rays return something."""
    lidar = torch.full((envs, 1, 36, 4), value)
    lidar[:, :, ::2] = 0
    return Observation(torch.zeros(envs, 8), lidar, torch.zeros(envs, 1, 3), torch.zeros(envs, 1, 5, 10))


def test_a_policy_as_a_pilot_commands_its_mean_action_in_metres_per_second():
    policy = NavRLPolicy(action_map=velocity_from_unit)
    seen = observation(2.0)
    distribution, _ = policy.heads(policy.features(seen.lidar, seen.dynamic_obstacle, seen.state))
    assert torch.allclose(policy_pilot(policy)(seen), velocity_from_unit(distribution.mean))


def test_a_candidate_keeps_flying_as_its_policy_was_when_training_goes_further():
    policy = NavRLPolicy(action_map=velocity_from_unit)
    pilot = policy_candidate(policy).make_pilot(CONFIG)
    before = pilot(observation())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert torch.equal(pilot(observation()), before)


def test_a_shield_gets_the_observation_and_the_command_of_the_pilot_inside():
    seen = observation()
    command = torch.ones(3, 3)
    pilot = shielded(lambda _: command, lambda got, inner: inner * 2 + got.state[:, :3])
    assert torch.equal(pilot(seen), 2 * command)


def test_a_late_sensor_shows_the_observation_of_some_steps_ago():
    sense = delayed(2)
    seen = [sense(observation(value)) for value in (0.0, 1.0, 2.0, 3.0)]
    assert [float(one.lidar.max()) for one in seen] == [0, 0, 0, 1]


def test_noise_has_the_standard_deviation_asked_for_and_spares_rays_without_a_return():
    lidar = noisy(0.05, 0.0, 4.0, seed=1)(observation(2.0, envs=200)).lidar
    assert (lidar[:, :, ::2] == 0).all()
    assert float(lidar[:, :, 1::2].std()) == pytest.approx(0.05, rel=0.05)
    assert float(lidar[:, :, 1::2].mean()) == pytest.approx(2.0, abs=0.005)


def test_returns_that_drop_out_look_like_free_space():
    lidar = noisy(0.0, 0.3, 4.0, seed=1)(observation(2.0, envs=200)).lidar[:, :, 1::2]
    assert set(lidar.unique().tolist()) == {0.0, 2.0}
    assert float((lidar == 0).float().mean()) == pytest.approx(0.3, abs=0.01)


def test_noise_depends_on_the_seed_alone():
    first, same, other = (noisy(0.1, 0.1, 4.0, seed)(observation(2.0)).lidar for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_a_measurement_is_disturbed_before_it_gets_old():
    sense = make_sensing(Sensors(lidar_noise_m=0.1, latency_s=0.1), CONFIG, seed=1)
    first = sense(observation(2.0)).lidar
    # The same measurement arrives twice, so its noise must be the same.
    assert torch.equal(sense(observation(3.0)).lidar, first)
    assert first.unique().numel() > 100


def test_perfect_sensors_change_nothing():
    seen = observation()
    assert make_sensing(Sensors(), CONFIG, seed=1)(seen) is seen
    assert Sensors().describe() == ""


def test_faults_are_described_and_rounded_to_steps():
    sensors = Sensors(0.05, 0.1, 0.2)
    assert sensors.describe() == "LiDAR noise 0.05 m, 10 % of returns missing, latency 0.2 s"
    assert sensors.latency_steps(0.1) == 2
    assert sensors.latency_steps(0.016) == 12


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((-0.1, 0.0, 0.0), "lidar_noise_m is -0.1, expected a number of at least 0"),
        ((0.0, 1.5, 0.0), "dropout is 1.5, expected a number from 0 to 1"),
        ((0.0, 0.0, float("nan")), "latency_s is nan"),
    ],
)
def test_faults_out_of_range_are_refused(values, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        Sensors(*values)


def test_a_latency_too_short_to_have_an_effect_is_refused():
    with pytest.raises(ConfigurationError, match=r"latency_s is 0.01, expected 0 or at least a step of 0.1 s"):
        Sensors(latency_s=0.01).latency_steps(0.1)
