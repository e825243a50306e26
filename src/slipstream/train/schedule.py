"""Schedules: values that change while a run trains.

Each is a function of the settings and the iteration alone. A checkpoint needs no state for them, and a resumed run has
the same values as one that was not interrupted.
"""

from __future__ import annotations

from slipstream.train.settings import TrainSettings


def learning_rate_factor(settings: TrainSettings, iteration: int) -> float:
    """Return what learning rates are multiplied with after `iteration` iterations."""
    if settings.algo.learning_rate_schedule == "constant":
        return 1.0
    return max(0.0, 1.0 - iteration / settings.num_iterations)


def teacher_coefficient(settings: TrainSettings, iteration: int) -> float:
    """Return the weight of the teacher after `iteration` iterations: it falls linearly to 0 at the end of the run."""
    return settings.algo.teacher_coefficient * max(0.0, 1.0 - iteration / settings.num_iterations)


def collision_penalty(settings: TrainSettings, rollout: int) -> float:
    """Return the collision penalty while a rollout is collected.

    It depends on the number of the rollout, not on the iteration, because rollouts may be collected ahead.

    Args:
        settings: The settings of the run.
        rollout: How many rollouts were collected before.
    """
    env = settings.env
    ramp = env.collision_penalty_ramp * settings.num_iterations
    if rollout >= ramp:
        return env.collision_penalty
    risen = rollout / ramp
    return env.collision_penalty_start + (env.collision_penalty - env.collision_penalty_start) * risen
