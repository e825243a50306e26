"""The shield: which commands it passes, which it replaces, and flights that it saves."""

from typing import Any

import pytest
import torch

from slipstream import ConfigurationError, NavigationConfig
from slipstream.nav import LidarConfig, Observation, Shield, ShieldConfig, Simulation, StaticMap
from slipstream.nav.dynamics import hovering
from slipstream.nav.frame import heading_between
from slipstream.nav.observation import Task

AHEAD = torch.tensor([[2.0, 0.0, 0.0]])
WALL_AHEAD = (1.5, -4.0, 2.0, 4.0, 5.0)


def observe(
    *boxes: tuple[float, float, float, float, float],
    velocity: tuple[float, float, float] = (0.0, 0.0, 0.0),
    height: float = 2.0,
    goal_height: float = 2.0,
) -> Observation:
    """Observe boxes from the origin, with the goal far ahead along x."""
    simulation = fly_at(StaticMap.from_boxes(*boxes), (0.0, 0.0, height), (30.0, 0.0, goal_height))
    observation = simulation.step(torch.zeros(1, 3)).observation
    state = observation.state.clone()
    state[:, 5:8] = torch.tensor(velocity)
    return observation._replace(state=state)


def fly_at(
    boxes: StaticMap, start: tuple[float, float, float], goal: tuple[float, float, float], **settings: Any
) -> Simulation:
    """Put one drone at rest into a world made by hand."""
    defaults = {"num_dynamic_obstacles": 0, "dynamics": "lag", "dt_s": 0.1, "compile": "false"}
    simulation = Simulation(NavigationConfig(num_envs=1, **{**defaults, **settings}), boxes=boxes)
    begin = torch.tensor([start])
    end = torch.tensor([goal])
    simulation.task = Task(begin, end, heading_between(begin, end))
    simulation.drone = hovering(begin, simulation.task.heading)
    return simulation


def with_obstacle(
    observation: Observation,
    place: tuple[float, float, float],
    velocity: tuple[float, float, float],
    *,
    width_category: int = 3,
    flying: bool = False,
) -> Observation:
    """Add a moving obstacle at a place relative to the drone."""
    offset = torch.tensor(place)
    features = observation.dynamic_obstacle.clone()
    features[:, 0, 0, :3] = offset / offset.norm()
    features[:, 0, 0, 3] = offset[:2].norm()
    features[:, 0, 0, 4] = offset[2]
    features[:, 0, 0, 5:8] = torch.tensor(velocity)
    features[:, 0, 0, 8] = float(width_category)
    features[:, 0, 0, 9] = float(flying)
    return observation._replace(dynamic_obstacle=features)


def mirrored(observation: Observation) -> Observation:
    """Swap left and right."""
    sign = torch.tensor([1.0, -1.0, 1.0])
    state = observation.state.clone()
    state[:, :3] *= sign
    state[:, 5:8] *= sign
    obstacles = observation.dynamic_obstacle.clone()
    obstacles[..., :3] *= sign
    obstacles[..., 5:8] *= sign
    azimuths = -torch.arange(observation.lidar.shape[2]) % observation.lidar.shape[2]
    return Observation(state, observation.lidar[:, :, azimuths], observation.direction, obstacles)


def flying_observation(num_envs: int = 16) -> Observation:
    """Return what drones observe in the middle of an ordinary field."""
    config = NavigationConfig(num_envs=num_envs, dynamics="lag", dt_s=0.1, start="line", compile="false")
    simulation = Simulation(config)
    shield = Shield()
    observation = simulation.reset()
    for _ in range(80):
        observation = simulation.step(shield(observation, AHEAD.expand(num_envs, 3))).observation
    return observation


@pytest.mark.parametrize("command", [[2.0, 0.0, 0.0], [-1.3, 0.7, 0.2], [0.0, 0.0, 0.0], [0.1, -2.0, -0.3]])
def test_a_command_in_free_space_passes_unchanged(command: list[float]) -> None:
    wanted = torch.tensor([command])
    assert torch.equal(Shield()(observe(), wanted), wanted)


def test_the_command_is_not_modified_in_place() -> None:
    command = AHEAD.clone()
    Shield()(observe(WALL_AHEAD), command)
    assert torch.equal(command, AHEAD)


def test_a_command_into_a_wall_is_replaced() -> None:
    safe = Shield()(observe(WALL_AHEAD, velocity=(2.0, 0.0, 0.0)), AHEAD)
    assert safe[0, 0] < 0.5


def test_a_command_away_from_a_wall_passes_unchanged() -> None:
    away = torch.tensor([[-2.0, 0.0, 0.0]])
    assert torch.equal(Shield()(observe(WALL_AHEAD), away), away)


def test_a_drone_swerves_around_a_pillar_instead_of_stopping() -> None:
    pillar = (1.8, -0.1, 2.2, 0.3, 5.0)
    safe = Shield()(observe(pillar, velocity=(2.0, 0.0, 0.0)), AHEAD)
    assert safe[0, 0] > 0.5
    assert safe[0, 1] < -0.3  # the pillar is slightly to the left


def test_a_drone_that_is_too_close_to_a_wall_moves_away() -> None:
    wall = (0.32, -4.0, 1.0, 4.0, 5.0)
    safe = Shield()(observe(wall), AHEAD)
    assert safe[0, 0] < -0.5


def test_a_drone_between_two_close_walls_flies_along_them() -> None:
    walls = ((-4.0, 0.35, 4.0, 1.0, 5.0), (-4.0, -1.0, 4.0, -0.35, 5.0))
    sideways = torch.tensor([[1.0, 2.0, 0.0]])
    safe = Shield()(observe(*walls), sideways)
    assert safe[0, 1].abs() < 0.1


def test_a_drone_evades_an_obstacle_that_crosses_its_path() -> None:
    # Both would be at (1.5, 0) at about the same time.
    observation = with_obstacle(observe(velocity=(2.0, 0.0, 0.0)), (1.5, 0.9, 0.0), (0.0, -1.2, 0.0))
    safe = Shield()(observation, AHEAD)
    assert not torch.equal(safe, AHEAD)
    assert safe[0, 0] < 1.5


def test_a_hovering_drone_makes_way_for_an_obstacle() -> None:
    observation = with_obstacle(observe(), (1.2, 0.0, 0.0), (-1.5, 0.0, 0.0))
    safe = Shield()(observation, torch.zeros(1, 3))
    assert safe[0, :2].norm() > 0.9


def test_a_cuboid_far_below_does_not_matter_but_a_cylinder_does() -> None:
    below = with_obstacle(observe(velocity=(2.0, 0.0, 0.0)), (1.5, 0.0, -2.5), (0.0, 0.0, 0.0), flying=True)
    beside = with_obstacle(observe(velocity=(2.0, 0.0, 0.0)), (1.5, 0.0, 0.0), (0.0, 0.0, 0.0))
    assert torch.equal(Shield()(below, AHEAD), AHEAD)
    assert not torch.equal(Shield()(beside, AHEAD), AHEAD)


def test_a_descent_ends_above_the_ground_and_a_climb_below_the_ceiling() -> None:
    simulation = fly_at(StaticMap.from_boxes(), (0.0, 0.0, 2.0), (30.0, 0.0, 2.5), map_half_extent_m=40.0)
    shield = Shield()
    for climb, limit in ((-2.0, 0.2), (2.0, 4.0)):
        observation = simulation.step(torch.zeros(1, 3)).observation
        for _ in range(100):
            outcome = simulation.step(shield(observation, torch.tensor([[0.0, 0.0, climb]])))
            observation = outcome.observation
            assert not outcome.terminated.any()
        assert (simulation.drone.position_m[0, 2] - limit).abs() < 0.3


def test_the_ground_is_not_an_obstacle() -> None:
    low = observe(height=0.5, goal_height=0.5)
    assert (low.lidar > 0).any()  # the lowest rays do see the ground
    assert torch.equal(Shield()(low, AHEAD), AHEAD)


def test_a_mirrored_observation_gives_the_mirrored_command() -> None:
    observation = flying_observation()
    command = torch.tensor([1.8, 0.3, 0.1]).expand(16, 3)
    sign = torch.tensor([1.0, -1.0, 1.0])
    safe = Shield()(observation, command)
    assert not torch.equal(safe, command)
    torch.testing.assert_close(Shield()(mirrored(observation), command * sign), safe * sign)


def test_a_drone_gets_the_same_command_alone_and_in_a_batch() -> None:
    observation = flying_observation()
    command = AHEAD.expand(16, 3)
    together = Shield()(observation, command)
    for index in range(16):
        alone = Observation(*(part[index : index + 1] for part in observation))
        torch.testing.assert_close(Shield()(alone, AHEAD)[0], together[index])


def test_the_number_of_drones_is_not_limited_by_the_block_size() -> None:
    observation = flying_observation()
    command = AHEAD.expand(16, 3)
    many = Observation(*(part.repeat(20, *(1,) * (part.ndim - 1)) for part in observation))
    safe = Shield()(many, command.repeat(20, 1))
    torch.testing.assert_close(safe, Shield()(observation, command).repeat(20, 1))


def test_an_empty_batch_gives_an_empty_batch() -> None:
    observation = Observation(*(part[:0] for part in observe()))
    assert Shield()(observation, torch.zeros(0, 3)).shape == (0, 3)


def test_a_flight_through_boxes_succeeds_with_the_shield_and_fails_without() -> None:
    boxes = StaticMap.from_boxes(
        (4.0, -0.6, 4.7, 0.1, 5.0), (6.5, 0.3, 7.2, 1.0, 5.0), (6.4, -1.9, 7.1, -1.2, 5.0), (9.0, -0.3, 9.7, 0.4, 5.0)
    )
    assert not reaches_goal(boxes, Shield(ShieldConfig(horizon_s=0.001, clearance_m=0.0, comfort_weight=0.0)))
    assert reaches_goal(boxes, Shield())


def reaches_goal(boxes: StaticMap, shield: Shield) -> bool:
    """Fly straight ahead behind a shield until the flight ends."""
    simulation = fly_at(boxes, (0.0, 0.0, 2.0), (14.0, 0.0, 2.0))
    observation = simulation.step(torch.zeros(1, 3)).observation
    for _ in range(200):
        toward = observation.state[:, :3] * 2.0
        outcome = simulation.step(shield(observation, toward))
        observation = outcome.observation
        if outcome.terminated.any():
            return False
        if outcome.verdict.reached_goal.any():
            return True
    return False


def test_other_rays_work_too() -> None:
    lidar = LidarConfig(range_m=6.0, vertical_fov_deg=(0.0, 0.0), vertical_beams=1, horizontal_beams=72)
    simulation = fly_at(StaticMap.from_boxes(WALL_AHEAD), (0.0, 0.0, 2.0), (30.0, 0.0, 2.0), lidar=lidar)
    observation = simulation.step(torch.zeros(1, 3)).observation
    shield = Shield(ShieldConfig(lidar=lidar))
    assert shield(observation, AHEAD)[0, 0] < 2.0
    assert torch.equal(shield(observation, -AHEAD), -AHEAD)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gain", 0.0),
        ("horizon_s", -1.0),
        ("num_samples", 0),
        ("num_directions", 2),
        ("speeds_m_s", ()),
        ("speeds_m_s", (1.0, 0.0)),
        ("clearance_m", -0.1),
        ("obstacle_clearance_m", float("nan")),
        ("comfort_m", -1.0),
        ("comfort_weight", -1.0),
        ("obstacle_comfort_m", float("inf")),
        ("obstacle_comfort_weight", "much"),
        ("braking_weight", -2.0),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        ShieldConfig(**{name: value})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_command_that_is_not_finite_counts_as_rest(number):
    for observation in (observe(), observe(WALL_AHEAD, velocity=(2.0, 0.0, 0.0))):
        broken = torch.tensor([[1.0, number, 0.0]])
        assert torch.equal(Shield()(observation, broken), Shield()(observation, torch.zeros(1, 3)))
