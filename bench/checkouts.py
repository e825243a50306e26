"""Compare this checkout with another one: a process for each, in turns, so that a busy machine slows both alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Measured = dict[str, Any]


class Checkout:
    """A process that measures one checkout.

    Args:
        source: The checkout, whose ``src`` folder is imported.
        worker: The script of the process. It reads a request per line, and answers with a line of JSON.
        *arguments: Its arguments.
    """

    def __init__(self, source: Path, worker: Path, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, worker, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(source / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, request: str) -> Measured:
        """Measure something once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        measured: Measured = json.loads(self._process.stdout.readline())
        return measured

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def alternate(new: Checkout, old: Checkout, request: str, num_rounds: int) -> list[tuple[Measured, Measured]]:
    """Measure a request in turns; returns what the new and the old checkout answered in each round."""
    pairs = []
    for number in range(num_rounds + 1):
        # Who goes first alternates: the second one finds warmer caches.
        if number % 2:
            ours = new.measure(request)
            theirs = old.measure(request)
        else:
            theirs = old.measure(request)
            ours = new.measure(request)
        # The first round warms memory and caches.
        if number:
            pairs.append((ours, theirs))
    return pairs


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of ratios and its bootstrap 95 % confidence interval."""
    values = np.asarray(ratios)
    picks = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    medians = np.median(values[picks], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)
