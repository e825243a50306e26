"""Flights in constructed worlds: how they begin, end, repeat and resume."""

import copy
import pickle
from typing import Any

import pytest
import torch

from slipstream import NavigationConfig, StateMismatchError
from slipstream.nav import Simulation, StaticMap
from slipstream.nav.dynamics import hovering
from slipstream.nav.frame import heading_between
from slipstream.nav.observation import Task
from slipstream.nav.simulation import Outcome

STILL = torch.zeros(1, 3)


def simulation(num_envs: int = 1, boxes: StaticMap | None = None, **settings: Any) -> Simulation:
    defaults = {
        "num_static_obstacles": 0,
        "num_dynamic_obstacles": 0,
        "dynamics": "lag",
        "dt_s": 0.1,
        "compile": "false",
    }
    return Simulation(NavigationConfig(num_envs=num_envs, **{**defaults, **settings}), boxes=boxes)


def place(
    sim: Simulation, *positions: tuple[float, float, float], goal: tuple[float, float, float] = (15, 0, 2)
) -> None:
    """Put drones at rest somewhere, on their way to one goal."""
    start, end = torch.tensor(positions, dtype=torch.float32), torch.tensor([goal]).float().expand(len(positions), 3)
    sim.task = Task(start, end, heading_between(start, end))
    sim.drone = hovering(start, sim.task.heading)


def place_obstacle(sim: Simulation, index: int, position: tuple[float, float, float]) -> None:
    """Put one obstacle somewhere, and all others far away, at rest."""
    state = sim.obstacles.state_dict()
    state["position_m"][:] = 1000.0
    state["position_m"][index] = torch.tensor(position)
    state["velocity_m_s"][:] = 0.0
    sim.obstacles.load_state_dict(state)


def everything(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [tensor for part in values for tensor in everything(part)]


def assert_same(one: Any, other: Any) -> None:
    mine, others = everything(one), everything(other)
    assert len(mine) == len(others) > 0
    assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def fly(sim: Simulation, steps: int, seed: int = 0) -> list[Outcome]:
    """Fly with made-up commands, resetting what is done."""
    generator = torch.Generator().manual_seed(seed)
    outcomes = []
    for _ in range(steps):
        command = torch.rand(sim.config.num_envs, 3, generator=generator) * 2 - torch.tensor([0.0, 1.0, 1.0])
        outcomes.append(sim.step(command))
        done = outcomes[-1].terminated | outcomes[-1].truncated
        if bool(done.any()):
            sim.reset(done)
    return outcomes


def test_a_box_closer_than_the_drone_is_wide_terminates():
    boxes = StaticMap.from_boxes((0.0, -0.5, 0.7, 0.5, 3.0))
    sim = simulation(3, boxes)
    place(sim, (-0.35, 0.0, 1.0), (-0.25, 0.0, 1.0), (0.3, 0.1, 1.0))
    outcome = sim.step(torch.zeros(3, 3))
    assert outcome.verdict.static_collision.tolist() == [False, True, True]
    assert outcome.terminated.tolist() == [False, True, True]
    assert not outcome.truncated.any()


def test_a_low_box_can_be_flown_over():
    sim = simulation(1, StaticMap.from_boxes((-0.5, -0.5, 0.5, 0.5, 1.0)))
    place(sim, (0.0, 0.0, 2.0))
    assert not sim.step(STILL).terminated.any()


@pytest.mark.parametrize(("height", "ends"), [(0.15, True), (0.25, False), (3.95, False), (4.05, True)])
def test_floor_and_ceiling_terminate(height, ends):
    sim = simulation()
    place(sim, (0.0, 0.0, height))
    outcome = sim.step(STILL)
    assert outcome.verdict.out_of_bounds.tolist() == [ends]
    assert outcome.terminated.tolist() == [ends]


@pytest.mark.parametrize(
    ("index", "offset", "ends"),
    [
        (39, (0.7, 0.0, 0.0), True),  # the last cuboid is 1 m wide
        (39, (0.9, 0.0, 0.0), False),
        (39, (0.0, 0.0, 0.7), True),
        (39, (0.0, 0.0, 0.9), False),
        (40, (0.4, 0.0, 0.5), True),  # the first cylinder is 0.25 m wide and 5 m high
        (40, (0.5, 0.0, 0.5), False),
        (79, (0.0, 0.7, 0.5), True),
    ],
)
def test_a_moving_obstacle_in_the_way_terminates(index, offset, ends):
    sim = simulation(num_dynamic_obstacles=80)
    place(sim, (0.0, 0.0, 2.0))
    place_obstacle(sim, index, (offset[0], offset[1], 2.0 + offset[2]))
    outcome = sim.step(STILL)
    assert outcome.verdict.dynamic_collision.tolist() == [ends]
    assert outcome.terminated.tolist() == [ends]
    assert not outcome.verdict.static_collision.any()  # rays do not see what moves


def test_an_episode_is_truncated_after_its_length_and_not_before():
    sim = simulation(2, max_episode_length=5)
    place(sim, (0.0, 0.0, 2.0), (1.0, 0.0, 2.0))
    assert [sim.step(torch.zeros(2, 3)).truncated.tolist() for _ in range(5)] == [[False] * 2] * 4 + [[True] * 2]


def test_reaching_the_goal_ends_an_episode_only_if_told_to_but_is_always_counted():
    for truncates in (False, True):
        sim = simulation(goal_truncates=truncates)
        place(sim, (14.8, 0.0, 2.0))
        outcome = sim.step(STILL)
        assert outcome.verdict.reached_goal.tolist() == [True]
        assert outcome.truncated.tolist() == [truncates]
        assert not outcome.terminated.any()
        place_away = sim.drone._replace(position_m=torch.tensor([[0.0, 0.0, 2.0]]))
        sim.drone = place_away
        outcome = sim.step(STILL)
        assert outcome.verdict.reached_goal.tolist() == [False]
        assert outcome.progress.reached.tolist() == [True]


def test_the_penalty_on_changing_velocity_is_really_paid():
    # With a lag of rate 2.2 and steps of 0.1 s, a command across the way changes the velocity by a fifth of it.
    sim, other = simulation(), simulation()
    for each in (sim, other):
        place(each, (0.0, 0.0, 2.0), goal=(1e6, 0.0, 2.0))
    moved, rested = sim.step(torch.tensor([[0.0, 2.0, 0.0]])), other.step(STILL)
    change = float(sim.drone.velocity_m_s[0, 1])
    assert change == pytest.approx(2.0 * (1 - 2.718281828**-0.22), abs=1e-5)
    difference = float(moved.verdict.reward - rested.verdict.reward)
    assert difference == pytest.approx(-0.1 * change, abs=1e-5)


def test_commands_are_in_the_goal_frame():
    sim = simulation()
    place(sim, (0.0, 0.0, 2.0), goal=(0.0, -20.0, 2.0))
    for _ in range(50):
        sim.step(torch.tensor([[2.0, 0.0, 0.0]]))
    torch.testing.assert_close(sim.drone.velocity_m_s, torch.tensor([[0.0, -2.0, 0.0]]), atol=1e-3, rtol=0)


def test_training_starts_and_goals_are_on_the_border_at_flying_height():
    sim = simulation(4000)
    for places in (sim.task.start_m, sim.task.goal_m):
        assert places[:, :2].abs().amax(1).unique().tolist() == [24.0]
        assert 0.5 <= float(places[:, 2].min()) < 0.51
        assert 2.49 < float(places[:, 2].max()) <= 2.5
        for side in (places[:, 0] == 24, places[:, 0] == -24, places[:, 1] == 24, places[:, 1] == -24):
            assert 900 < int(side.sum()) < 1100
    assert not torch.equal(sim.task.start_m, sim.task.goal_m)


def test_evaluation_starts_are_side_by_side_and_goals_straight_across():
    sim = simulation(5, start="line")
    assert sim.task.start_m[:, 0].tolist() == [-16.0, -8.0, 0.0, 8.0, 16.0]
    assert sim.task.start_m[:, 1:].unique(dim=0).tolist() == [[24.0, 2.0]]
    assert torch.equal(sim.task.goal_m, sim.task.start_m * torch.tensor([1.0, -1.0, 1.0]))
    sim.reset(torch.tensor([False, True, False, False, False]))
    assert sim.task.start_m[:, 0].tolist() == [-16.0, -8.0, 0.0, 8.0, 16.0]


def test_drones_start_at_rest_facing_their_goals():
    sim = simulation(16)
    assert not sim.drone.velocity_m_s.any()
    observation = sim.reset()
    assert bool((observation.state[:, 0] > 0).all())
    torch.testing.assert_close(observation.state[:, 1], torch.zeros(16), atol=1e-5, rtol=0)


def test_random_clocks_spread_the_first_episodes_and_leave_the_later_ones_whole():
    sim = simulation(1000, random_clocks=True, max_episode_length=400)
    first = sim.progress.deadline
    assert 1 <= int(first.min()) < 20
    assert 380 < int(first.max()) <= 400
    assert 180 < float(first.float().mean()) < 220
    sim.reset(torch.ones(1000, dtype=torch.bool))
    assert sim.progress.deadline.unique().tolist() == [400]


def test_a_partial_reset_leaves_all_else_bit_identical():
    sim = simulation(6, num_static_obstacles=100, num_dynamic_obstacles=16)
    fly(sim, 20)
    before = copy.deepcopy(sim.state_dict())
    mask = torch.tensor([False, True, False, False, True, False])
    observation = sim.reset(mask)
    after = sim.state_dict()
    for group in ("drone", "task", "progress"):
        for name, tensor in after[group].items():
            assert torch.equal(tensor[~mask], before[group][name][~mask])
    assert not torch.equal(after["drone"]["position_m"][mask], before["drone"]["position_m"][mask])
    assert_same(after["obstacles"], before["obstacles"])
    assert torch.equal(after["generators"]["ways"], before["generators"]["ways"])
    assert after["progress"]["steps"][mask].tolist() == [0, 0]
    assert after["progress"]["returns"][mask].tolist() == [0.0, 0.0]
    assert observation.state[mask].any(1).all()


def test_others_fly_on_bit_identically_whether_or_not_one_was_reset():
    one, other = (simulation(6, num_static_obstacles=100, num_dynamic_obstacles=16) for _ in range(2))
    one.reset(torch.tensor([True, False, False, False, False, False]))
    command = torch.tensor([[1.0, 0.3, 0.0]]).expand(6, 3)
    for _ in range(30):
        mine, others = one.step(command), other.step(command)
    assert torch.equal(mine.position_m[1:], others.position_m[1:])
    assert torch.equal(mine.observation.dynamic_obstacle[1:], others.observation.dynamic_obstacle[1:])


@pytest.mark.parametrize("dynamics", ["lag", "hummingbird"])
def test_a_simulation_restored_in_mid_flight_continues_bit_for_bit(dynamics):
    settings: dict[str, Any] = {
        "num_static_obstacles": 200,
        "num_dynamic_obstacles": 40,
        "dynamics": dynamics,
        "dt_s": 0.016 if dynamics == "hummingbird" else 0.1,
        "max_episode_length": 60,
        "random_clocks": True,
    }
    sim = simulation(16, **settings)
    fly(sim, 45, seed=1)
    saved = copy.deepcopy(sim.state_dict())
    expected = fly(sim, 80, seed=2)
    restored = simulation(16, **{**settings, "seed": 99})
    fly(restored, 7, seed=3)
    restored.load_state_dict(saved)
    found = fly(restored, 80, seed=2)
    assert any(bool(outcome.truncated.any()) for outcome in expected)  # with resets on the way
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


def test_a_state_dict_is_a_copy_and_so_is_what_is_loaded():
    sim = simulation(2, num_dynamic_obstacles=8)
    state = sim.state_dict()
    frozen = copy.deepcopy(state)
    sim.step(torch.ones(2, 3))
    assert_same(state, frozen)
    sim.load_state_dict(state)
    for tensor in everything(state):
        tensor.zero_()
    assert_same(sim.state_dict(), frozen)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim))])
def test_copies_fly_on_by_themselves_as_the_original_does(duplicate):
    sim = simulation(4, num_static_obstacles=50, num_dynamic_obstacles=8)
    fly(sim, 10)
    other = duplicate(sim)
    expected, found = fly(sim, 20), fly(other, 20)
    for one, two in zip(expected, found, strict=True):
        assert_same(one, two)


def test_a_state_of_another_size_is_refused_and_changes_nothing():
    sim = simulation(2)
    before = sim.state_dict()
    with pytest.raises(StateMismatchError, match=r"state.drone.position_m has the shape \(3, 3\), expected \(2, 3\)"):
        sim.load_state_dict(simulation(3).state_dict())
    with pytest.raises(StateMismatchError, match="state should hold drone, generators, obstacles, progress, task"):
        sim.load_state_dict({"policy": torch.zeros(1)})
    assert_same(sim.state_dict(), before)


def test_a_state_from_before_drones_had_a_response_delay_is_loaded():
    sim = simulation(2, dynamics="lag")
    fly(sim, 3)
    state = sim.state_dict()
    del state["drone"]["delay_s"], state["drone"]["acceleration_m_s2"]
    restored = simulation(2, dynamics="lag")
    restored.load_state_dict(state)
    assert_same(restored.state_dict(), sim.state_dict())
    delayed = simulation(2, dynamics="lag", response_delay_s=0.3)
    with pytest.raises(StateMismatchError, match="state.drone should hold acceleration_m_s2, "):
        delayed.load_state_dict(state)


def test_the_same_seed_is_the_same_flight_and_another_is_another():
    settings: dict[str, Any] = {"num_static_obstacles": 100, "num_dynamic_obstacles": 16}
    one, same, other = (simulation(8, seed=seed, **settings) for seed in (3, 3, 4))
    torch.manual_seed(1)
    first = fly(one, 60)
    torch.manual_seed(2)
    second = fly(same, 60)
    assert all(torch.equal(a.position_m, b.position_m) for a, b in zip(first, second, strict=True))
    assert not torch.equal(fly(other, 60)[-1].position_m, first[-1].position_m)


def test_seed_and_reset_begin_the_same_flight_whatever_was_flown_before():
    sim = simulation(8, num_static_obstacles=100, num_dynamic_obstacles=16)
    flights = []
    for warm_up in (0, 17):
        fly(sim, warm_up)
        sim.seed(11)
        sim.reset()
        flights.append(fly(sim, 40))
    assert all(torch.equal(a.position_m, b.position_m) for a, b in zip(*flights, strict=True))


def test_outcomes_are_never_the_memory_of_the_simulation():
    sim = simulation(2, num_dynamic_obstacles=8)
    outcome = sim.step(torch.ones(2, 3))
    before = copy.deepcopy(sim.state_dict())
    for tensor in everything(outcome):
        tensor.zero_()
    for tensor in everything(sim.reset(torch.tensor([False, False]))):
        tensor.fill_(7.0)
    assert_same(sim.state_dict()["drone"], before["drone"])
    assert_same(sim.state_dict()["task"], before["task"])
    assert_same(sim.state_dict()["progress"], before["progress"])
    assert_same(sim.state_dict()["obstacles"], before["obstacles"])


def test_commands_that_require_gradients_leave_none_behind():
    sim = simulation(2)
    outcome = sim.step(torch.ones(2, 3, requires_grad=True))
    assert not any(tensor.requires_grad for tensor in everything(outcome))
    assert not sim.drone.velocity_m_s.requires_grad


def test_what_begins_under_inference_mode_goes_on_without_it():
    sim = simulation(2)
    with torch.inference_mode():
        sim.step(torch.ones(2, 3))
    sim.reset(torch.tensor([True, False]))
    assert sim.step(torch.ones(2, 3)).progress.steps.tolist() == [1, 2]


def test_the_sum_of_rewards_and_the_steps_are_counted():
    sim = simulation(2)
    outcomes = [sim.step(torch.ones(2, 3)) for _ in range(4)]
    total = torch.stack([outcome.verdict.reward for outcome in outcomes]).sum(0)
    torch.testing.assert_close(outcomes[-1].progress.returns, total)
    assert outcomes[-1].progress.steps.tolist() == [4, 4]


def test_a_quadrotor_flies_across_an_empty_field_and_reaches_its_goal():
    sim = simulation(4, dynamics="hummingbird", dt_s=0.016, start="line", goal_truncates=True)
    for _ in range(2200):
        offset = sim.task.goal_m - sim.drone.position_m
        ahead = offset[:, 1:2].abs().clamp(max=2.0)
        outcome = sim.step(torch.cat([ahead, torch.zeros(4, 2)], 1))
        assert not outcome.terminated.any()
        if bool(outcome.truncated.all()):
            break
    assert outcome.progress.reached.tolist() == [True] * 4
    assert int(outcome.progress.steps[0]) == pytest.approx(48 / 2 / 0.016, rel=0.05)


def test_a_collision_costs_the_penalty_of_the_moment_and_the_return_has_it():
    wall = StaticMap.from_boxes((0.5, -5.0, 1.0, 5.0, 4.0))
    free, fined = simulation(boxes=wall), simulation(boxes=wall, collision_penalty=15.0)
    changed = simulation(boxes=wall, collision_penalty=15.0)
    changed.collision_penalty = 60.0
    rewards = []
    for sim in (free, fined, changed):
        place(sim, (0.0, 0.0, 2.0))
        for _ in range(10):
            outcome = sim.step(torch.tensor([[2.0, 0.0, 0.0]]))
            if outcome.terminated:
                break
        assert outcome.terminated
        rewards.append(outcome.verdict.reward.item())
        returns = outcome.progress.returns.item()
    assert rewards[0] - rewards[1] == pytest.approx(15.0, abs=1e-4)
    assert rewards[0] - rewards[2] == pytest.approx(60.0, abs=1e-4)
    assert returns < -50
