"""The Gymnasium vector environment."""

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import gymnasium

from slipstream import ConfigurationError
from slipstream.nav import NavigationVectorEnv
from slipstream.text import install_hint

NAME = "slipstream.nav.gym:slipstream/Navigation-v0"
SETTINGS: dict[str, Any] = {"num_static_obstacles": 40, "num_dynamic_obstacles": 8, "dynamics": "lag", "dt_s": 0.1}


def test_it_is_made_by_name_with_any_setting():
    env = gymnasium.make_vec(NAME, num_envs=3, max_episode_length=7, **SETTINGS)
    assert isinstance(env, NavigationVectorEnv)
    assert env.num_envs == 3
    assert env.simulation.config.max_episode_length == 7
    assert env.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.NEXT_STEP
    env.close()


def test_what_it_returns_is_in_its_spaces():
    env = NavigationVectorEnv(3, **SETTINGS)
    observations, infos = env.reset(seed=1)
    assert env.observation_space.contains(observations)
    assert infos["position"].shape == (3, 3)
    env.action_space.seed(0)
    observations, rewards, terminated, truncated, infos = env.step(env.action_space.sample())
    assert env.observation_space.contains(observations)
    assert rewards.shape == terminated.shape == truncated.shape == (3,)
    assert rewards.dtype == np.float32
    assert terminated.dtype == truncated.dtype == bool
    assert set(infos) == {"position", "static_collision", "dynamic_collision", "out_of_bounds", "reached_goal"}


def test_an_episode_that_ended_begins_anew_with_the_next_step_which_earns_nothing():
    env = NavigationVectorEnv(2, max_episode_length=3, **SETTINGS)
    env.reset(seed=0)
    still = np.zeros((2, 3), np.float32)
    ends = [env.step(still) for _ in range(3)]
    assert [end[3].tolist() for end in ends] == [[False] * 2, [False] * 2, [True] * 2]
    _, rewards, terminated, truncated, infos = env.step(still)
    assert rewards.tolist() == [0.0, 0.0]
    assert not terminated.any()
    assert not truncated.any()
    assert not np.array_equal(infos["position"], ends[-1][4]["position"])
    assert env.simulation.progress.steps.tolist() == [0, 0]
    assert env.step(still)[1].all()


def test_the_same_seed_is_the_same_flight():
    env = NavigationVectorEnv(4, **SETTINGS)
    flights = []
    for _ in range(2):
        env.reset(seed=3)
        env.action_space.seed(3)
        flights.append([env.step(env.action_space.sample()) for _ in range(20)])
    for one, other in zip(*flights, strict=True):
        np.testing.assert_array_equal(one[0]["lidar"], other[0]["lidar"])
        np.testing.assert_array_equal(one[1], other[1])


def test_it_works_under_gymnasiums_own_wrappers():
    env = gymnasium.wrappers.vector.RecordEpisodeStatistics(NavigationVectorEnv(2, max_episode_length=4, **SETTINGS))
    env.reset(seed=0)
    for _ in range(4):
        infos = env.step(np.zeros((2, 3), np.float32))[4]
    assert infos["episode"]["l"].tolist() == [4, 4]


def test_a_setting_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigurationError, match="num_envs is 0"):
        NavigationVectorEnv(0)


@pytest.mark.parametrize(
    ("library", "name", "extra"), [("gymnasium", "NavigationVectorEnv", "gym"), ("torchrl", "NavigationEnv", "train")]
)
def test_the_simulator_needs_no_library_and_what_needs_one_says_what_to_install(library, name, extra):
    script = f"""
        import sys
        sys.modules["{library}"] = None
        import slipstream.nav
        assert not {{"torchrl", "tensordict", "gymnasium"}} & {{name for name, module in sys.modules.items() if module}}
        try:
            slipstream.nav.{name}
        except ImportError as error:
            sentence = "{name} needs {library}, which is not installed: {install_hint(extra)}"
            assert str(error).startswith(sentence), error
        else:
            raise AssertionError("no error")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_an_unknown_name_is_an_attribute_error():
    import slipstream.nav

    with pytest.raises(AttributeError, match="module 'slipstream.nav' has no attribute 'Drone'"):
        slipstream.nav.Drone  # noqa: B018
