"""Where episodes start and where their goals are."""

from typing import Any

import pytest
import torch

from slipstream import ConfigurationError, NavigationConfig
from slipstream.nav import Simulation, StaticMap


def simulation(**settings: Any) -> Simulation:
    defaults = {"num_envs": 256, "num_dynamic_obstacles": 0, "dynamics": "lag", "dt_s": 0.1, "compile": "false"}
    return Simulation(NavigationConfig(**{**defaults, **settings}))


def side(position: torch.Tensor) -> torch.Tensor:
    """Return the side of the start square that each position is on, as a unit vector."""
    return torch.where(position[:, :2].abs() >= 24.0 - 1e-4, position[:, :2].sign(), 0.0)


def test_through_the_goal_is_on_the_opposite_side_at_another_offset_and_height():
    sim = simulation(start="through", num_static_obstacles=0)
    start, goal = sim.task.start_m, sim.task.goal_m
    assert torch.equal(side(start), -side(goal))
    assert len(side(start).unique(dim=0)) == 4
    along = torch.where(side(start) == 0, start[:, :2], 0.0).sum(1)
    along_goal = torch.where(side(goal) == 0, goal[:, :2], 0.0).sum(1)
    assert -0.2 < torch.corrcoef(torch.stack([along, along_goal]))[0, 1] < 0.2
    assert along.min() < -20
    assert along.max() > 20
    assert ((start[:, 2] >= 0.5) & (start[:, 2] <= 2.5)).all()
    assert (start[:, 2] - goal[:, 2]).abs().max() > 1


def test_a_share_of_episodes_starts_at_a_free_place_inside_the_field():
    sim = simulation(start="through", inside_starts=0.5, num_dynamic_obstacles=80, obstacle_warmup_s=5.0)
    start, goal = sim.task.start_m, sim.task.goal_m
    inside = (start[:, :2].abs() <= 20.0).all(1)
    assert 0.35 < inside.float().mean() < 0.65
    points = start[inside, None, :2]
    boxes = sim.boxes
    apart = torch.maximum(boxes.low_m - points, points - boxes.high_m).clamp(min=0).norm(dim=2)
    assert apart.min() > 0.8
    assert (points - sim.obstacles.position_m[:, :2]).norm(dim=2).min() > 1.2
    assert (start - goal)[inside, :2].norm(dim=1).min() > 8.0


def test_where_nothing_is_free_episodes_start_on_the_border():
    sim = Simulation(
        NavigationConfig(num_envs=8, num_dynamic_obstacles=0, inside_starts=1.0, dynamics="lag", dt_s=0.1),
        boxes=StaticMap.from_boxes((-20.0, -20.0, 20.0, 20.0, 4.0)),
    )
    assert (sim.task.start_m[:, :2].abs().amax(1) >= 24.0 - 1e-4).all()


def test_drones_of_each_map_are_spread_over_the_whole_line():
    sim = simulation(start="line", num_envs=12, num_maps=3, num_static_obstacles=0)
    x = sim.task.start_m[:, 0].view(3, 4)
    torch.testing.assert_close(x, torch.tensor([-16.0, -16 / 3, 16 / 3, 16.0]).expand(3, 4))
    assert torch.equal(sim.task.goal_m[:, 0], sim.task.start_m[:, 0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inside_starts": 1.5}, "inside_starts is 1.5, expected a number from 0 to 1"),
        ({"inside_starts": 0.5, "start": "line"}, "inside_starts is 0.5, expected 0 with start='line'"),
        ({"num_maps": 3, "num_envs": 8}, "num_maps is 3, expected a divisor of num_envs, which is 8"),
        ({"start": "around"}, "start is 'around'"),
        ({"collision_penalty": -1.0}, "collision_penalty is -1.0"),
        ({"danger_weight": float("nan")}, "danger_weight is nan"),
        ({"obstacle_warmup_s": -1.0}, "obstacle_warmup_s is -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        NavigationConfig(**settings)
