"""The planner: where it flies, and that it arrives."""

from typing import Any

import pytest
import torch

from slipstream import ConfigurationError, NavigationConfig
from slipstream.nav import Observation, Planner, ShieldConfig, Simulation
from slipstream.nav.config import StartMode

QUICK: dict[str, Any] = {
    "dynamics": "lag",
    "dt_s": 0.1,
    "max_episode_length": 400,
    "goal_truncates": True,
    "compile": "false",
}


def empty_world(num_envs: int = 4) -> Simulation:
    config = NavigationConfig(num_envs=num_envs, num_static_obstacles=0, num_dynamic_obstacles=0, **QUICK)
    return Simulation(config)


def outcomes(simulation: Simulation, planner: Planner) -> tuple[int, int]:
    """Fly every drone until its first episode ends; return how many arrived and how many crashed."""
    observation = simulation.reset()
    arrived = torch.zeros(simulation.config.num_envs, dtype=torch.bool)
    crashed = torch.zeros_like(arrived)
    for _ in range(simulation.config.max_episode_length):
        outcome = simulation.step(planner(observation))
        observation = outcome.observation
        arrived |= outcome.verdict.reached_goal & ~crashed
        crashed |= outcome.terminated & ~arrived
        if bool((arrived | crashed).all()):
            break
    return int(arrived.sum()), int(crashed.sum())


def test_it_flies_to_the_goal_in_an_empty_world() -> None:
    simulation = empty_world()
    assert outcomes(simulation, Planner()) == (4, 0)


def test_it_flies_straight_to_the_goal_at_the_given_speed() -> None:
    observation = empty_world().reset()
    command = Planner(speed_m_s=1.5)(observation)
    torch.testing.assert_close(command[:, :2].norm(dim=1), torch.full((4,), 1.5))
    toward = observation.state[:, :2] / observation.state[:, :2].norm(dim=1, keepdim=True)
    torch.testing.assert_close(command[:, :2], toward * 1.5)


def test_it_stops_at_the_goal() -> None:
    simulation = empty_world(1)
    observation = simulation.reset()
    for _ in range(400):
        observation = simulation.step(Planner()(observation)).observation
    assert observation.state[0, 3] < 0.1
    assert observation.state[0, 5:8].norm() < 0.1


@pytest.mark.parametrize("start", ["line", "through"])
def test_most_drones_cross_a_field_of_boxes_and_moving_obstacles(start: StartMode) -> None:
    config = NavigationConfig(num_envs=16, num_maps=4, map_seed=500, start=start, obstacle_warmup_s=10.0, **QUICK)
    arrived, crashed = outcomes(Simulation(config), Planner())
    assert arrived >= 14
    assert crashed <= 2


def test_it_is_deterministic_and_treats_drones_independently() -> None:
    simulation = Simulation(NavigationConfig(num_envs=8, start="line", **QUICK))
    planner = Planner()
    observation = simulation.reset()
    for _ in range(60):
        observation = simulation.step(planner(observation)).observation
    command = planner(observation)
    assert torch.equal(planner(observation), command)
    reverse = Observation(*(part.flip(0) for part in observation))
    torch.testing.assert_close(planner(reverse), command.flip(0))


def test_the_settings_of_the_shield_apply() -> None:
    wide = Planner(ShieldConfig(clearance_m=0.6))
    assert wide.shield.config.clearance_m == 0.6


def test_a_speed_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="speed_m_s"):
        Planner(speed_m_s=0.0)
