"""How OpenMP's threads wait for each other: has to be in the environment before torch is imported."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_LOOK_S = 0.2
_BUSY_SHARE = 0.15
_NOT_BUSY = (3, 4)  # columns of /proc/stat: idle, and waiting for a disk


def calm_threads() -> None:
    """Let threads spin for a moment before they sleep if the cores are idle, and sleep at once if others use them.

    Either is wrong in the other's place: on idle cores, training with threads that sleep at once takes half as long
    again; beside another program, with threads that spin, three times as long. What is set already stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "GOMP_SPINCOUNT" not in os.environ:
        before = cpu_times()
        time.sleep(_LOOK_S)
        os.environ["GOMP_SPINCOUNT"] = "0" if busy_share(before, cpu_times()) > _BUSY_SHARE else "50000"


def cpu_times() -> list[list[int]]:
    """Return what the cores that this process may use have spent their time on, as Linux counts it."""
    try:
        lines = _STAT.read_text().splitlines()
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        return [[int(ticks) for ticks in line.split()[1:9]] for line in lines if line.split(" ", 1)[0] in cores]
    except (OSError, AttributeError, ValueError):  # another system
        return []


def busy_share(before: list[list[int]], after: list[list[int]]) -> float:
    """Return which share of the cores' time between two looks at them went to anything."""
    spent = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=False)]
    total = sum(map(sum, spent))
    return 1 - sum(core[column] for core in spent for column in _NOT_BUSY) / total if total else 0.0
