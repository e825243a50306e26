"""Several maps in one simulation: each drone sees its own, exactly as if there were no other."""

from typing import Any

import pytest
import torch

from slipstream import ConfigurationError, NavigationConfig
from slipstream.nav import Simulation, StaticMap, generate_map


def config(**settings: Any) -> NavigationConfig:
    defaults = {"start": "through", "dynamics": "lag", "dt_s": 0.1, "compile": "false", "danger_weight": 3.0}
    return NavigationConfig(**{**defaults, **settings})


def of_map(values: Any, number: int, per_map: int) -> Any:
    return type(values)(*(part[number * per_map : (number + 1) * per_map] for part in values))


def test_every_drone_sees_and_hits_what_is_on_its_map_alone():
    per_map, num_maps = 16, 3
    together = Simulation(config(num_envs=per_map * num_maps, num_maps=num_maps, map_seed=5, inside_starts=1.0))
    alone = [Simulation(config(num_envs=per_map, map_seed=5 + number, inside_starts=1.0)) for number in range(3)]
    state, obstacles = together.state_dict(), together.obstacles.state_dict()
    for number, sim in enumerate(alone):
        assert torch.equal(sim.boxes.low_m, together.maps[number].low_m)
        drones, others = slice(number * per_map, (number + 1) * per_map), slice(number * 80, (number + 1) * 80)
        part = sim.state_dict()
        for name in ("drone", "task", "progress"):
            part[name] = {key: value[drones] for key, value in state[name].items()}
        part["obstacles"] = {key: value[others] for key, value in obstacles.items() if key != "tick"} | {"tick": 0}
        sim.load_state_dict(part)
        # Random goals of obstacles differ between the simulations, so keep them away.
        sim.obstacles._goal_m = sim.obstacles._goal_m + 100
    together.obstacles._goal_m = together.obstacles._goal_m + 100
    command = torch.tensor([2.0, 0.5, 0.0]).expand(per_map * num_maps, 3)
    num_hit = 0
    for _ in range(15):
        outcome = together.step(command)
        num_hit += int(outcome.terminated.sum())
        for number, sim in enumerate(alone):
            expected = sim.step(command[:per_map])
            for one, other in zip(expected.observation, of_map(outcome.observation, number, per_map), strict=True):
                torch.testing.assert_close(one, other)
            for one, other in zip(expected.verdict, of_map(outcome.verdict, number, per_map), strict=True):
                torch.testing.assert_close(one, other)
    assert num_hit


def test_the_dense_scan_sees_the_same_maps():
    sim = Simulation(config(num_envs=24, num_maps=4, inside_starts=1.0))
    position, heading = sim.drone.position_m, sim.task.heading
    expected = sim.lidar.scan(position, heading, map_index=sim.map_index)
    assert (expected < 4.0).any()
    torch.testing.assert_close(sim.lidar.scan_dense(position, heading, sim.map_index), expected)


def test_a_partial_reset_looks_at_the_right_map():
    far, near = StaticMap.from_boxes(), StaticMap.from_boxes((-24.5, -24.5, 24.5, 24.5, 4.0))
    sim = Simulation(config(num_envs=4, num_maps=2, num_dynamic_obstacles=0), boxes=[far, near])
    seen = sim.reset(torch.tensor([True, False, False, True]))
    assert (seen.lidar[3, 0, :, 1] == 4.0).all()  # inside the box
    assert (seen.lidar[0, 0, :, 1] == 0.0).all()


def test_maps_have_the_seeds_that_follow_the_first():
    sim = Simulation(config(num_envs=2, num_maps=2, map_seed=7))
    for number, boxes in enumerate(sim.maps):
        assert torch.equal(boxes.low_m, generate_map(350, 20.0, 7 + number).low_m)
    assert not torch.equal(sim.obstacles.origin_m[:80], sim.obstacles.origin_m[80:])


def test_a_simulation_of_several_maps_resumes_exactly():
    settings = config(num_envs=8, num_maps=2, inside_starts=0.5, max_episode_length=5)
    one, other = Simulation(settings), Simulation(settings)
    command = torch.tensor([1.0, 0.0, 0.0]).expand(8, 3)
    for _ in range(7):
        outcome = one.step(command)
        one.reset(outcome.terminated | outcome.truncated)
    other.load_state_dict(one.state_dict())
    for _ in range(7):
        mine, others = one.step(command), other.step(command)
        assert torch.equal(mine.observation.lidar, others.observation.lidar)
        assert torch.equal(mine.verdict.reward, others.verdict.reward)
        one.reset(mine.terminated | mine.truncated)
        other.reset(others.terminated | others.truncated)


def test_the_number_of_maps_given_must_match():
    with pytest.raises(ConfigurationError, match="1 maps of boxes were given, expected num_maps, which is 2"):
        Simulation(config(num_envs=4, num_maps=2), boxes=StaticMap.from_boxes())


def test_obstacles_have_moved_before_the_drones_start_if_asked():
    still, moved = Simulation(config(num_envs=1)), Simulation(config(num_envs=1, obstacle_warmup_s=10.0))
    assert torch.equal(still.obstacles.position_m, still.obstacles.origin_m)
    assert (moved.obstacles.position_m - moved.obstacles.origin_m).norm(dim=1).median() > 1.0


def test_flying_obstacles_overshoot_their_goals_by_at_most_three_metres():
    sim = Simulation(config(num_envs=1, num_static_obstacles=0))
    lowest, highest = 0.0, 0.0
    for _ in range(1000):
        sim.obstacles.move()
        height = sim.obstacles.position_m[:40, 2]
        lowest, highest = min(lowest, float(height.min())), max(highest, float(height.max()))
    assert -3.0 <= lowest < 0.0
    assert 4.5 < highest <= 7.5


def test_worlds_that_repeat_a_map_have_its_boxes_and_origins_but_other_paths_of_obstacles():
    repeated = NavigationConfig(
        num_envs=4, num_maps=4, map_repeats=2, map_seed=7, num_static_obstacles=20, num_dynamic_obstacles=8
    )
    assert repeated.map_seeds == [7, 7, 8, 8]
    simulation = Simulation(repeated)
    assert torch.equal(simulation.maps[0].low_m, simulation.maps[1].low_m)
    assert not torch.equal(simulation.maps[1].low_m, simulation.maps[2].low_m)
    origins = simulation.obstacles.origin_m.view(4, 8, 3)
    assert torch.equal(origins[0], origins[1])
    velocities = simulation.obstacles.velocity_m_s.view(4, 8, 3)
    assert not torch.equal(velocities[0], velocities[1])


def test_repeats_that_do_not_divide_the_number_of_maps_are_refused():
    with pytest.raises(ConfigurationError, match="map_repeats is 2, expected a divisor of num_maps, which is 3"):
        NavigationConfig(num_envs=3, num_maps=3, map_repeats=2)
