"""Counters that grow while a process runs and start at 0 in the next one: totals, and what was added when."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slipstream.run.metrics import Curve, Floats, Metrics, thin


@dataclass(frozen=True)
class Stalls:
    """What saving cost the training loop.

    Attributes:
        num_saves: How many saves there were, over all processes.
        call_s: Seconds in calls of save, in total.
        barrier_s: Seconds in which an optimizer waited for a snapshot, in total.
        call_ms: Milliseconds of each save over the run, if they are known.
        barrier_ms: Likewise.
    """

    num_saves: int
    call_s: float
    barrier_s: float
    call_ms: Curve | None
    barrier_ms: Curve | None

    @property
    def per_save_ms(self) -> float:
        """How long a save held training up, on average."""
        return (self.call_s + self.barrier_s) / self.num_saves * 1000


def added(metrics: Metrics, key: str) -> Floats:
    """Return by how much a counter grew in each line, also in lines whose iterations were repeated."""
    values = metrics[key]
    known = np.flatnonzero(np.isfinite(values))
    # The first value of a process counts from 0.
    grown = np.zeros(len(values))
    process = np.cumsum(metrics.starts)[known]
    before = np.concatenate([[0.0], values[known][:-1]])
    before[np.flatnonzero(np.diff(process, prepend=-1))] = 0.0
    grown[known] = np.maximum(values[known] - before, 0.0)
    return grown


def total(metrics: Metrics, key: str) -> float | None:
    """Return the sum of a counter over all processes of a run; None if it was never written."""
    if not np.isfinite(metrics[key]).any():
        return None
    return float(added(metrics, key).sum())


def find_stalls(metrics: Metrics) -> Stalls | None:
    """Return what saving checkpoints cost; None if none was saved.

    An optimizer waits in the iterations after a save: what it waits until the next one counts for this one.
    """
    saves = added(metrics, "ckpt/save_count")
    events = np.flatnonzero(saves > 0)
    if not len(events):
        return None
    call = added(metrics, "ckpt/total_call_s")
    barrier = added(metrics, "ckpt/total_barrier_s")
    x = metrics.x[0][events]
    known = np.isfinite(x)
    curves: list[Curve | None] = []
    for part in (call, barrier):
        curve = None
        if known.any():
            each_ms = 1000 * np.add.reduceat(part, events) / saves[events]
            curve = thin(x[known], each_ms[known])
        curves.append(curve)
    return Stalls(round(saves.sum()), float(call.sum()), float(barrier.sum()), curves[0], curves[1])


def running_time_s(metrics: Metrics) -> float | None:
    """Return how long the processes of a run took, without the pauses between them; None if no time is known.

    The first iteration of a process, whose start is in no line, counts as long as a usual one.
    """
    time = metrics["time"]
    known = np.flatnonzero(np.isfinite(time))
    if not len(known):
        return None
    process = np.cumsum(metrics.starts)[known]
    steps = np.diff(time[known])
    # Steps between processes are pauses, and clocks may be set back.
    within = steps[(np.diff(process) == 0) & (steps >= 0)]
    usual = metrics.last("perf/iteration_mean")
    if len(within):
        usual = float(np.median(within))
    if usual is None:
        return None
    seconds = float(within.sum()) + usual * len(np.unique(process))
    if not math.isfinite(seconds) or seconds <= 0:
        return None
    return seconds
