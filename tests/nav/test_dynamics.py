"""Drones follow commands: the quadrotor stably, the lag exactly."""

import math

import pytest
import torch

from slipstream import ConfigurationError, NavigationConfig
from slipstream.nav import Simulation
from slipstream.nav.dynamics import DelayedLag, DroneState, Hummingbird, VelocityLag, _axes, hovering, make_dynamics


def facing(*angles_deg: float) -> torch.Tensor:
    angles = torch.deg2rad(torch.tensor(angles_deg))
    return torch.stack([angles.cos(), angles.sin()], 1)


def fly(drone: DroneState, command: torch.Tensor, heading: torch.Tensor, seconds: float, dt_s: float = 0.016):
    model = Hummingbird(dt_s)
    for _ in range(round(seconds / dt_s)):
        drone = model.step(drone, command, heading)
    return drone


def test_the_quadrotor_hovers_where_it_is_and_keeps_facing_where_it_faced():
    heading = facing(0.0, 90.0, -170.0)
    start = torch.tensor([[0.0, 0.0, 1.0], [5.0, -3.0, 2.0], [-7.0, 1.0, 0.5]])
    drone = fly(hovering(start, heading), torch.zeros(3, 3), heading, seconds=10)
    torch.testing.assert_close(drone.position_m, start, atol=1e-3, rtol=0)
    torch.testing.assert_close(_axes(drone.attitude)[0][:, :2], heading, atol=1e-3, rtol=0)


def test_the_quadrotor_takes_up_a_commanded_velocity_within_two_seconds_and_holds_it():
    commands = torch.cat([2.0 * torch.eye(3), -2.0 * torch.eye(3)])
    heading = facing(*[37.0] * 6)
    drone = fly(hovering(torch.zeros(6, 3), heading), commands, heading, seconds=0.8)
    assert float((drone.velocity_m_s - commands).norm(dim=1).max()) < 0.5
    for seconds in (1.2, 5.0):
        drone = fly(drone, commands, heading, seconds)
        torch.testing.assert_close(drone.velocity_m_s, commands, atol=0.05, rtol=0)
    assert float(_axes(drone.attitude)[2][:, 2].min()) > 0.999  # level again: there is no drag to lean against


def test_the_quadrotor_stays_upright_under_commands_that_jump_from_one_extreme_to_another():
    generator = torch.Generator().manual_seed(0)
    heading = facing(*torch.linspace(-180, 180, 64).tolist())
    drone = hovering(torch.zeros(64, 3), heading)
    model = Hummingbird(0.016)
    for _ in range(50):
        command = (torch.rand(64, 3, generator=generator) < 0.5) * 4.0 - 2.0
        for _ in range(20):
            drone = model.step(drone, command, heading)
            assert float(_axes(drone.attitude)[2][:, 2].min()) > 0.2
            assert float(drone.velocity_m_s.norm(dim=1).max()) < 6.0
    drone = fly(drone, torch.zeros(64, 3), heading, seconds=8)
    torch.testing.assert_close(drone.velocity_m_s, torch.zeros(64, 3), atol=0.02, rtol=0)
    torch.testing.assert_close(_axes(drone.attitude)[0][:, :2], heading, atol=0.02, rtol=0)


def test_the_quadrotor_does_not_answer_at_once():
    heading = facing(0.0)
    drone = Hummingbird(0.016).step(hovering(torch.zeros(1, 3), heading), torch.tensor([[2.0, 0.0, 0.0]]), heading)
    assert float(drone.velocity_m_s[0, 0]) == pytest.approx(0.0, abs=1e-6)  # it must tilt first
    assert float(drone.rate_rad_s[0, 1]) > 0.0  # nose down


def test_the_quadrotor_without_thrust_falls_as_anything_falls():
    heading = facing(0.0)
    drone = hovering(torch.zeros(1, 3), heading)._replace(throttle=torch.zeros(1, 4))
    command = torch.tensor([[0.0, 0.0, -100.0]])  # asks for less than nothing
    drone = fly(drone, command, heading, seconds=0.16)
    assert float(drone.velocity_m_s[0, 2]) == pytest.approx(-9.81 * 0.16, abs=1e-4)


def test_attitudes_stay_unit_quaternions():
    heading = facing(10.0, 200.0)
    drone = fly(hovering(torch.zeros(2, 3), heading), torch.tensor([[2.0, -2.0, 1.0]]).expand(2, 3), heading, 5.0)
    torch.testing.assert_close(drone.attitude.norm(dim=1), torch.ones(2))


def test_the_lag_halves_the_error_in_its_half_life():
    start = hovering(torch.zeros(1, 3), facing(0.0))
    drone = VelocityLag(math.log(2) / 2.2).step(start, torch.tensor([[2.0, 0.0, -1.0]]), facing(0.0))
    torch.testing.assert_close(drone.velocity_m_s, torch.tensor([[1.0, 0.0, -0.5]]))


def test_the_lag_ends_in_the_same_place_however_its_time_is_cut():
    command, heading = torch.tensor([[1.5, -0.5, 0.25]]), facing(0.0)
    start = hovering(torch.zeros(1, 3), heading)._replace(velocity_m_s=torch.tensor([[-2.0, 1.0, 0.0]]))
    ends = []
    for steps in (1, 4, 32):
        drone, model = start, VelocityLag(1.6 / steps)
        for _ in range(steps):
            drone = model.step(drone, command, heading)
        ends.append(drone)
    for end in ends[1:]:
        torch.testing.assert_close(end.position_m, ends[0].position_m)
        torch.testing.assert_close(end.velocity_m_s, ends[0].velocity_m_s)


def test_a_step_leaves_the_state_it_started_from_alone():
    for config in (NavigationConfig(), NavigationConfig(dynamics="lag", dt_s=0.1)):
        start = hovering(torch.ones(2, 3), facing(0.0, 90.0))
        copies = [part.clone() for part in start]
        make_dynamics(config).step(start, torch.ones(2, 3), facing(0.0, 90.0))
        assert all(torch.equal(part, copy) for part, copy in zip(start, copies, strict=True))


def test_without_a_delay_the_delayed_lag_is_nearly_the_plain_one():
    heading = facing(0.0, 90.0)
    drone = hovering(torch.zeros(2, 3), heading)._replace(velocity_m_s=torch.tensor([[-2.0, 1.0, 0.0]]).expand(2, 3))
    command = torch.tensor([[2.0, -1.0, 0.5], [0.0, 2.0, 0.0]])
    plain, delayed = VelocityLag(0.1).step(drone, command, heading), DelayedLag(0.1).step(drone, command, heading)
    torch.testing.assert_close(plain.position_m, delayed.position_m, rtol=0, atol=0.02)
    torch.testing.assert_close(plain.velocity_m_s, delayed.velocity_m_s, rtol=0, atol=0.02)


@pytest.mark.parametrize("command", [(2.0, 0.0, 0.0), (-1.0, 1.5, 0.0)])
def test_a_delay_of_a_seventh_of_a_second_resembles_the_quadrotor_all_along(command):
    heading, wanted = facing(0.0), torch.tensor([command])
    start = hovering(torch.zeros(1, 3), heading)
    apart = {}
    for delay in (0.0, 0.15):
        drone, quadrotor, model = start._replace(delay_s=torch.tensor([delay])), start, DelayedLag(0.096)
        distances = []
        for _ in range(20):
            drone = model.step(drone, wanted, heading)
            quadrotor = fly(quadrotor, wanted, heading, seconds=0.096)
            distances.append(float((drone.position_m - quadrotor.position_m).norm()))
        apart[delay] = max(distances)
    assert apart[0.0] > 0.1
    assert apart[0.15] < 0.5 * apart[0.0]


def test_every_episode_draws_a_delay_and_the_quadrotor_has_none_to_draw():
    config = NavigationConfig(num_envs=64, num_static_obstacles=0, dynamics="lag", dt_s=0.1, response_delay_s=0.3)
    sim = Simulation(config)
    delays = sim.drone.delay_s.clone()
    assert 0.0 <= delays.min() < 0.05
    assert 0.25 < delays.max() <= 0.3
    mask = torch.arange(64) < 8
    sim.reset(mask)
    assert not torch.equal(sim.drone.delay_s[mask], delays[mask])
    assert torch.equal(sim.drone.delay_s[~mask], delays[~mask])
    with pytest.raises(ConfigurationError, match="response_delay_s is 0.3, expected 0 for the dynamics 'hummingbird'"):
        NavigationConfig(response_delay_s=0.3)
