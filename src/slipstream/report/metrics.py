"""``metrics.jsonl`` as columns: read around damage, one value an iteration, thinned for the page."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.report.numbers import number_of
from slipstream.store.local import open_regular

MAX_LINE_BYTES = 1 << 20
MAX_COLUMNS = 400
MAX_KEY = 200
MAX_POINTS = 1000  # of a mean with its envelope; twice as many where there is no need to thin
STORAGE_PREFIXES = ("ckpt/", "rollouts/", "memory/")
COUNTERS = (  # what only grows while a process runs: that it fell tells of another one
    "ckpt/save_count",
    "ckpt/total_saved_bytes",
    "ckpt/total_call_s",
    "ckpt/total_write_s",
    "rollouts/save_count",
    "rollouts/raw_bytes",
    "rollouts/call_s",
    "memory/batch_count",
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Points of a curve; where it was thinned, means with the least and the greatest value beside them.

    Attributes:
        x: Where.
        y: The values, or the means of several.
        low: The least of them, if it was thinned.
        high: The greatest, if it was thinned.
    """

    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None


@dataclass(frozen=True)
class Metrics:
    """What a run measured, by name.

    Attributes:
        columns: One value a line of the file, in its order; NaN where a line has none.
        num_lines: How many lines could be read.
        num_skipped: How many could not.
        cut_off: Whether the last line lacks its end, as a crash leaves it.
    """

    columns: dict[str, Floats] = field(default_factory=dict)
    num_lines: int = 0
    num_skipped: int = 0
    cut_off: bool = False

    def __getitem__(self, key: str) -> Floats:
        return self.columns.get(key, np.full(self.num_lines, math.nan))

    def last(self, key: str) -> float | None:
        """Return the last value that there is, if there is any."""
        values = self[key]
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else None

    @cached_property
    def current(self) -> NDArray[np.bool_]:
        """Which lines count: after a resume, iterations are run again, and the later line is the one that counts."""
        iteration = self["iteration"]
        later = np.fmin.accumulate(np.append(iteration, math.inf)[::-1])[::-1][1:]
        return np.isnan(iteration) | (iteration < later)

    @cached_property
    def starts(self) -> NDArray[np.bool_]:
        """Which lines are the first of a process: iterations or counters went back there."""
        begins = np.zeros(self.num_lines, dtype=bool)
        begins[:1] = True
        begins |= _falls(self["iteration"], strictly=False)
        for key in COUNTERS:
            begins |= _falls(self[key], strictly=True)
        return begins

    @cached_property
    def x(self) -> tuple[Floats, str]:
        """Return what curves are drawn over, and what that is called."""
        for key, name in (("env_frames", "frames"), ("iteration", "iteration")):
            if np.isfinite(self[key]).any():
                return self[key], name
        return np.arange(1.0, self.num_lines + 1), "line"

    def curve(self, key: str) -> Curve | None:
        """Return the curve of a key, thinned if need be; None if it has no value."""
        x, y = self.x[0][self.current], self[key][self.current]
        known = np.isfinite(x) & np.isfinite(y)
        return thin(x[known], y[known]) if known.any() else None


def _falls(values: Floats, *, strictly: bool) -> NDArray[np.bool_]:
    """Return where a value is less than (or, unless `strictly`, equal to) the one known before it."""
    known = np.flatnonzero(np.isfinite(values))
    steps = np.diff(values[known])
    falls = np.zeros(len(values), dtype=bool)
    falls[known[1:][steps < 0 if strictly else steps <= 0]] = True
    return falls


def thin(x: Floats, y: Floats) -> Curve:
    """Return at most `MAX_POINTS` means with their envelopes, or all points of a curve up to twice as long.

    Example:
        >>> curve = thin(np.arange(10_000.0), np.arange(10_000.0) % 2)
        >>> len(curve.x), float(curve.y[0]), float(curve.low[0]), float(curve.high[0])
        (1000, 0.5, 0.0, 1.0)
    """
    if len(x) <= 2 * MAX_POINTS:
        return Curve(x, y)
    begins = np.arange(0, len(x), math.ceil(len(x) / MAX_POINTS))
    sizes = np.diff(np.append(begins, len(x)))
    return Curve(
        np.add.reduceat(x, begins) / sizes,
        np.add.reduceat(y, begins) / sizes,
        np.minimum.reduceat(y, begins),
        np.maximum.reduceat(y, begins),
    )


def read_metrics(path: Path) -> Metrics:
    """Read a file of one JSON object a line; lines that are none, and values that are no finite numbers, are left out.

    Takes eight bytes of memory a value, whatever else is in the file.

    Raises:
        OSError: If it cannot be read.
    """
    columns: dict[str, array[float]] = {}
    lines = skipped = 0
    cut_off = False
    for line in _lines(path):
        cut_off = line is not None and not line.endswith(b"\n")
        values = _values(line)
        if values is None:
            skipped += 1
            continue
        for key, value in values.items():
            if key not in columns:
                if len(columns) == MAX_COLUMNS:
                    continue
                columns[key] = array("d", [math.nan]) * lines
            columns[key].append(value)
        lines += 1
        for column in columns.values():
            if len(column) < lines:
                column.append(math.nan)
    arrays = {key: np.frombuffer(column, dtype=np.float64) for key, column in columns.items()}
    return Metrics(arrays, lines, skipped, cut_off and skipped > 0)


def _lines(path: Path) -> Iterator[bytes | None]:
    """Yield lines that are not blank; None for one that is too long to be a line of metrics."""
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            too_long = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
            while too_long and (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            if too_long:
                yield None
            elif line.strip():
                yield line


def _values(line: bytes | None) -> dict[str, float] | None:
    """Return the numbers of a line, or None if it is not an object."""
    try:
        document = json.loads(line or b"")
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    numbers = ((key, number_of(value)) for key, value in document.items() if len(key) <= MAX_KEY)
    return {key: number for key, number in numbers if number is not None}
