"""How drones answer velocity commands: a quadrotor under a cascaded controller, or a first-order lag.

Both are pure functions of a `DroneState`, with all numbers as Python floats, so that a compiler can fuse them.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from slipstream.nav.config import NavigationConfig

GRAVITY_M_S2 = 9.81
VELOCITY_GAIN = 2.2  # m/s^2 for each m/s of error

MASS_KG = 0.716
INERTIA_KG_M2 = (0.007, 0.007, 0.012)
ARM_M = 0.17
ATTITUDE_GAIN = (0.7, 0.7, 0.035)  # N m for each rad
RATE_GAIN = (0.1, 0.1, 0.025)  # N m for each rad/s
MAX_ROTOR_THRUST_N = 8.54858e-6 * 838.0**2  # force constant times the square of the highest speed
ROTOR_DRAG_M = 0.016  # torque about the rotor's axis for each N of thrust
ROTOR_X = (1.0, 0.0, -1.0, 0.0)  # where the rotors are, in arms: ahead, left, behind, right
ROTOR_Y = (0.0, 1.0, 0.0, -1.0)
ROTOR_SPIN = (1.0, -1.0, 1.0, -1.0)  # sign of the torque that drag gives the body
ROTOR_RESPONSE = 0.43  # part of the way to the commanded throttle that a rotor goes in a reference step
REFERENCE_DT_S = 0.016
LEAST_DELAY_S = 1e-4
MAX_SUBSTEP_S = 0.02


class DroneState(NamedTuple):
    """Drones in the air. The quadrotor has an attitude and rotors; the delayed lag has an acceleration instead.

    Attributes:
        position_m: In the world, ``[envs, 3]``.
        velocity_m_s: In the world, ``[envs, 3]``.
        attitude: Unit quaternions, real part first, from body to world, ``[envs, 4]``.
        rate_rad_s: Angular velocity in the body frame, ``[envs, 3]``.
        throttle: Of each rotor, 0 to 1; thrust goes with its square, ``[envs, 4]``.
        acceleration_m_s2: In the world, ``[envs, 3]``.
        delay_s: Time constant of the acceleration, ``[envs]``.
    """

    position_m: torch.Tensor
    velocity_m_s: torch.Tensor
    attitude: torch.Tensor
    rate_rad_s: torch.Tensor
    throttle: torch.Tensor
    acceleration_m_s2: torch.Tensor
    delay_s: torch.Tensor


class Dynamics(Protocol):
    """What advances drones by one step."""

    def step(self, drone: DroneState, command_m_s: torch.Tensor, heading: torch.Tensor) -> DroneState:
        """Return drones one step later, as new tensors.

        Args:
            drone: Where they are now.
            command_m_s: The velocities they should take, in the world, ``[envs, 3]``.
            heading: Where they should face, unit vectors in the plane, ``[envs, 2]``.
        """
        ...


def make_dynamics(config: NavigationConfig) -> Dynamics:
    """Return the model that a configuration names."""
    if config.dynamics == "hummingbird":
        return Hummingbird(config.dt_s)
    if config.response_delay_s:
        return DelayedLag(config.dt_s)
    return VelocityLag(config.dt_s)


def hovering(position_m: torch.Tensor, heading: torch.Tensor, delay_s: torch.Tensor | None = None) -> DroneState:
    """Return drones at rest, level, facing along their headings, with rotors that carry their weight.

    Args:
        position_m: ``[envs, 3]``; copied.
        heading: Unit vectors in the plane, ``[envs, 2]``.
        delay_s: Time constants of their acceleration, ``[envs]``; 0 by default.
    """
    half_yaw = torch.atan2(heading[:, 1], heading[:, 0]) / 2
    zero = torch.zeros_like(half_yaw)
    throttle = math.sqrt(MASS_KG * GRAVITY_M_S2 / 4 / MAX_ROTOR_THRUST_N)
    return DroneState(
        position_m.clone(),
        torch.zeros_like(position_m),
        torch.stack([half_yaw.cos(), zero, zero, half_yaw.sin()], 1),
        torch.zeros_like(position_m),
        position_m.new_full((len(position_m), 4), throttle),
        torch.zeros_like(position_m),
        zero if delay_s is None else delay_s,
    )


class VelocityLag:
    """Velocities that approach the command exponentially, as the quadrotor's velocity loop would if it tilted at once.

    Integrated exactly: stable at any step, and two steps of half the length end where one does.

    Args:
        dt_s: Length of a step.
    """

    def __init__(self, dt_s: float) -> None:
        self._dt_s = dt_s
        self._kept = math.exp(-VELOCITY_GAIN * dt_s)

    def step(self, drone: DroneState, command_m_s: torch.Tensor, heading: torch.Tensor) -> DroneState:
        """Return drones one step later; see `Dynamics`."""
        error = drone.velocity_m_s - command_m_s
        travelled = command_m_s * self._dt_s + error * ((1.0 - self._kept) / VELOCITY_GAIN)
        return drone._replace(position_m=drone.position_m + travelled, velocity_m_s=command_m_s + error * self._kept)


class DelayedLag:
    """`VelocityLag` whose acceleration lags too, with a time constant of each drone.

    A quadrotor has to tilt before it accelerates. With a delay of 0.15 s, this is close to `Hummingbird`; without one,
    it is `VelocityLag`. Training with a range of delays makes a policy fly both.

    Args:
        dt_s: Length of a step. It is integrated in smaller ones of at most 0.02 s.
    """

    def __init__(self, dt_s: float) -> None:
        self._substeps = math.ceil(dt_s / MAX_SUBSTEP_S)
        self._dt_s = dt_s / self._substeps

    def step(self, drone: DroneState, command_m_s: torch.Tensor, heading: torch.Tensor) -> DroneState:
        """Return drones one step later; see `Dynamics`."""
        position, velocity, acceleration = drone.position_m, drone.velocity_m_s, drone.acceleration_m_s2
        kept = torch.exp(-self._dt_s / drone.delay_s.clamp(min=LEAST_DELAY_S)).unsqueeze(1)
        for _ in range(self._substeps):
            wanted = (command_m_s - velocity) * VELOCITY_GAIN
            acceleration = torch.lerp(wanted, acceleration, kept)
            velocity = velocity + acceleration * self._dt_s
            position = position + velocity * self._dt_s
        return drone._replace(position_m=position, velocity_m_s=velocity, acceleration_m_s2=acceleration)


class Hummingbird:
    """A quadrotor of 0.7 kg: a velocity loop asks for a thrust vector, an attitude loop turns the body towards it.

    The controller is the geometric one of Lee, Leok and McClamroch (2010) without position and feed-forward terms.
    Thrust saturates between nothing and full throttle, and rotors lag behind.

    Args:
        dt_s: Length of a step; up to 0.02 s.
    """

    def __init__(self, dt_s: float) -> None:
        self._dt_s = dt_s
        self._response: float = 1.0 - (1.0 - ROTOR_RESPONSE) ** (dt_s / REFERENCE_DT_S)

    def step(self, drone: DroneState, command_m_s: torch.Tensor, heading: torch.Tensor) -> DroneState:
        """Return drones one step later; see `Dynamics`."""
        body = _axes(drone.attitude)
        wanted = (command_m_s - drone.velocity_m_s) * VELOCITY_GAIN
        wanted = torch.cat([wanted[:, :2], wanted[:, 2:] + GRAVITY_M_S2], 1)
        thrust = MASS_KG * (wanted * body[2]).sum(1)
        torque = _scale(_attitude_error(body, wanted, heading), ATTITUDE_GAIN) + _scale(drone.rate_rad_s, RATE_GAIN)
        throttle = self._spin_up(drone.throttle, thrust, -torque)
        rotor_thrust = throttle.square() * MAX_ROTOR_THRUST_N
        acceleration = body[2] * (rotor_thrust.sum(1, keepdim=True) / MASS_KG)
        acceleration = torch.cat([acceleration[:, :2], acceleration[:, 2:] - GRAVITY_M_S2], 1)
        velocity = drone.velocity_m_s + acceleration * self._dt_s
        rate = self._turn(drone.rate_rad_s, rotor_thrust)
        return DroneState(
            drone.position_m + velocity * self._dt_s,
            velocity,
            _rotate(drone.attitude, rate, self._dt_s),
            rate,
            throttle,
            drone.acceleration_m_s2,
            drone.delay_s,
        )

    def _spin_up(self, throttle: torch.Tensor, thrust: torch.Tensor, torque: torch.Tensor) -> torch.Tensor:
        """Return throttles one step closer to those whose thrust and torque are wanted."""
        roll, pitch, yaw = torque.unbind(1)
        thrusts = [
            thrust / 4 + (y * roll - x * pitch) / (2 * ARM_M) + (spin / (4 * ROTOR_DRAG_M)) * yaw
            for x, y, spin in zip(ROTOR_X, ROTOR_Y, ROTOR_SPIN, strict=True)
        ]
        target = (torch.stack(thrusts, 1) / MAX_ROTOR_THRUST_N).clamp(0.0, 1.0).sqrt()
        return throttle + (target - throttle) * self._response

    def _turn(self, rate: torch.Tensor, rotor_thrust: torch.Tensor) -> torch.Tensor:
        """Return angular velocities one step later under what the rotors give."""
        ahead, left, behind, right = rotor_thrust.unbind(1)
        p, q, r = rate.unbind(1)
        i_x, i_y, i_z = INERTIA_KG_M2
        roll = (left - right) * ARM_M - (i_z - i_y) * q * r
        pitch = (behind - ahead) * ARM_M - (i_x - i_z) * r * p
        yaw = (ahead - left + behind - right) * ROTOR_DRAG_M - (i_y - i_x) * p * q
        return rate + torch.stack([roll / i_x, pitch / i_y, yaw / i_z], 1) * self._dt_s


def _scale(vector: torch.Tensor, gains: tuple[float, float, float]) -> torch.Tensor:
    return torch.stack([part * gain for part, gain in zip(vector.unbind(1), gains, strict=True)], 1)


def _unit(vector: torch.Tensor) -> torch.Tensor:
    unit: torch.Tensor = vector / vector.norm(dim=1, keepdim=True).clamp(min=1e-9)
    return unit


def _axes(attitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where the body's x, y and z axes point in the world."""
    w, x, y, z = attitude.unbind(1)
    return (
        torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)], 1),
        torch.stack([2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)], 1),
        torch.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)], 1),
    )


def _attitude_error(
    body: tuple[torch.Tensor, torch.Tensor, torch.Tensor], wanted: torch.Tensor, heading: torch.Tensor
) -> torch.Tensor:
    """Return the rotation from the wanted attitude to the present one, about the body's axes; sines, not angles.

    The wanted attitude has its z axis along `wanted` and its x axis as close to the heading as that allows.
    """
    up = _unit(wanted)
    ahead = torch.cat([heading, torch.zeros_like(heading[:, :1])], 1)
    left = _unit(torch.linalg.cross(up, ahead))
    target = (torch.linalg.cross(left, up), left, up)

    def along(one: int, other: int) -> torch.Tensor:
        return (target[one] * body[other]).sum(1) - (body[one] * target[other]).sum(1)

    return 0.5 * torch.stack([along(2, 1), along(0, 2), along(1, 0)], 1)


def _rotate(attitude: torch.Tensor, rate: torch.Tensor, dt_s: float) -> torch.Tensor:
    """Return attitudes turned by an angular velocity in the body frame for a time."""
    angle = rate.norm(dim=1) * dt_s
    # sin(angle / 2) / |rate|, whose limit at rest is dt / 2
    scale = torch.sinc(angle / (2 * math.pi)) * (dt_s / 2)
    a = (angle / 2).cos()
    b, c, d = (rate * scale.unsqueeze(1)).unbind(1)
    w, x, y, z = attitude.unbind(1)
    turned = torch.stack(
        [
            w * a - x * b - y * c - z * d,
            w * b + x * a + y * d - z * c,
            w * c - x * d + y * a + z * b,
            w * d + x * c - y * b + z * a,
        ],
        1,
    )
    return _unit(turned)
