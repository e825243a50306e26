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
