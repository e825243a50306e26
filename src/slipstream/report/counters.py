"""Counters that grow while a process runs and begin again at 0 with the next: totals and what was added when."""

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
    """Return by how much a counter grew in each line, whatever became of the lines' iterations afterwards."""
    values = metrics[key]
    known = np.flatnonzero(np.isfinite(values))
    grown = np.zeros(len(values))
    process = np.cumsum(metrics.starts)[known]
    before = np.concatenate([[0.0], values[known][:-1]])
    before[np.flatnonzero(np.diff(process, prepend=-1))] = 0.0
    grown[known] = np.maximum(values[known] - before, 0.0)
    return grown


def total(metrics: Metrics, key: str) -> float | None:
    """Return what a counter came to over all processes of a run; None if it was never written."""
    return float(added(metrics, key).sum()) if np.isfinite(metrics[key]).any() else None


def find_stalls(metrics: Metrics) -> Stalls | None:
    """Return what saving checkpoints cost; None if none was saved.

    An optimizer waits in the iterations after a save: what it waits until the next one counts for this one.
    """
    saves = added(metrics, "ckpt/save_count")
    events = np.flatnonzero(saves > 0)
    if not len(events):
        return None
    call, barrier = added(metrics, "ckpt/total_call_s"), added(metrics, "ckpt/total_barrier_s")
    x = metrics.x[0][events]
    known = np.isfinite(x)
    curves = [
        thin(x[known], (1000 * np.add.reduceat(part, events) / saves[events])[known]) if known.any() else None
        for part in (call, barrier)
    ]
    return Stalls(round(saves.sum()), float(call.sum()), float(barrier.sum()), curves[0], curves[1])


def running_time_s(metrics: Metrics) -> float | None:
    """Return how long the processes of a run took, without the pauses between them; None if nobody looked at a clock.

    The first iteration of a process, whose beginning is in no line, counts as long as a usual one.
    """
    time = metrics["time"]
    known = np.flatnonzero(np.isfinite(time))
    if not len(known):
        return None
    process = np.cumsum(metrics.starts)[known]
    steps, same = np.diff(time[known]), np.diff(process) == 0
    within = steps[same & (steps >= 0)]
    usual = float(np.median(within)) if len(within) else metrics.last("perf/iteration_mean")
    if usual is None:
        return None
    seconds = float(within.sum()) + usual * len(np.unique(process))
    return seconds if math.isfinite(seconds) and seconds > 0 else None
