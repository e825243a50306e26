"""``metrics.jsonl``: one JSON object per iteration, written, read as rows or columns, and thinned for charts."""

from __future__ import annotations

import contextlib
import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError
from slipstream.store.local import atomic_write, open_regular

MAX_LINE_BYTES = 1 << 20
MAX_COLUMNS = 400
MAX_KEY = 200
MAX_POINTS = 1000  # of a mean with its envelope; a curve of up to twice as many points is not thinned
MAX_MAGNITUDE = 1e100  # so that sums and products of what a run measured stay finite
STORAGE_PREFIXES = ("ckpt/", "rollouts/", "memory/")
# These only grow while a process runs. A smaller value belongs to another process.
COUNTERS = (
    "ckpt/save_count",
    "ckpt/total_saved_bytes",
    "ckpt/total_call_s",
    "ckpt/total_write_s",
    "rollouts/save_count",
    "rollouts/raw_bytes",
    "rollouts/call_s",
    "memory/batch_count",
)
_TAIL_BYTES = 256 << 10

Floats = NDArray[np.float64]


class MetricsWriter:
    """Appends one JSON object per line. A line is in the file when `log` returns, even if the process is killed then.

    Args:
        path: The file to append to.
    """

    def __init__(self, path: Path) -> None:
        # Without a buffer, because what is in it would be lost with the process.
        self._file = path.open("ab", buffering=0)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Append a line. NaN and infinity, which JSON does not have, become null."""
        row: dict[str, Any] = {"iteration": iteration}
        for key, value in values.items():
            row[key] = None
            if math.isfinite(value):
                row[key] = value
        self._file.write(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        """Make the lines durable."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``, without one that a crash cut off."""
    rows = []
    with open_regular(path) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a ``metrics.jsonl``, atomically and durably."""
    lines = [json.dumps(row) + "\n" for row in rows]
    with atomic_write(path) as file:
        file.write("".join(lines).encode())


def forget_after(path: Path, iteration: int) -> None:
    """Drop the lines of later iterations from a ``metrics.jsonl``, and a line that a crash cut off."""
    if not path.exists():
        return
    kept = []
    for row in read_rows(path):
        number = row.get("iteration")
        if isinstance(number, int) and number <= iteration:
            kept.append(row)
    write_rows(path, kept)


def find_newest(path: Path, keys: Sequence[str], most: float = MAX_MAGNITUDE) -> float | None:
    """Return the newest positive value of any of some keys, without reading the whole file.

    Args:
        path: A ``metrics.jsonl``, which may be missing or damaged.
        keys: Names of the metric, in order of preference.
        most: Values of this size or larger are ignored.

    Returns:
        The value, or None if the end of the file has none.
    """
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except (OSError, CorruptFileError):
        return None
    # The first line may be cut off by `seek`, the last one by a crash.
    for line in reversed(lines):
        values = _values(line)
        if values is None:
            continue
        for key in keys:
            value = values.get(key)
            if value is not None and 0 < value < most:
                return value
    return None


def number_of(value: Any) -> float | None:
    """Return a finite number of sensible size, or None for anything else.

    Example:
        >>> number_of(3), number_of(True), number_of("3"), number_of(float("inf")), number_of(10**400)
        (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not -MAX_MAGNITUDE <= value <= MAX_MAGNITUDE:
        return None
    return float(value)


@dataclass(frozen=True)
class Curve:
    """Points of a curve. A thinned curve has means, each with the least and greatest value that it stands for.

    Attributes:
        x: Where.
        y: The values, or means of several.
        low: The least of them, if the curve was thinned.
        high: The greatest, if the curve was thinned.
    """

    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None


@dataclass(frozen=True)
class Metrics:
    """What a run measured, by name.

    Attributes:
        columns: One value per line of the file, in its order; NaN where a line has none.
        num_lines: The number of lines that could be read.
        num_skipped: The number of lines that could not.
        cut_off: Whether the last line is incomplete, as a crash leaves it.
    """

    columns: dict[str, Floats] = field(default_factory=dict)
    num_lines: int = 0
    num_skipped: int = 0
    cut_off: bool = False

    def __getitem__(self, key: str) -> Floats:
        return self.columns.get(key, np.full(self.num_lines, math.nan))

    def last(self, key: str) -> float | None:
        """Return the last value, or None if there is none."""
        values = self[key]
        values = values[np.isfinite(values)]
        if not len(values):
            return None
        return float(values[-1])

    @cached_property
    def current(self) -> NDArray[np.bool_]:
        """Which lines count: a resumed run repeats iterations, and the later line of an iteration counts."""
        # A line counts if every later one is of a greater iteration: the minimum of what follows, from the end.
        iteration = self["iteration"]
        later = np.fmin.accumulate(np.append(iteration, math.inf)[::-1])[::-1][1:]
        return np.isnan(iteration) | (iteration < later)

    @cached_property
    def starts(self) -> NDArray[np.bool_]:
        """Which lines are the first of a process: iterations or counters are smaller than before."""
        begins = np.zeros(self.num_lines, dtype=bool)
        begins[:1] = True
        begins |= _falls(self["iteration"], strictly=False)
        for key in COUNTERS:
            begins |= _falls(self[key], strictly=True)
        return begins

    @cached_property
    def x(self) -> tuple[Floats, str]:
        """The values and the name of the x axis: frames, iterations, or the numbers of lines."""
        for key, name in (("env_frames", "frames"), ("iteration", "iteration")):
            if np.isfinite(self[key]).any():
                return self[key], name
        return np.arange(1.0, self.num_lines + 1), "line"

    def curve(self, key: str, x_key: str | None = None) -> Curve | None:
        """Return the curve of a key, thinned if it is long; None if it has no value.

        Args:
            key: What is drawn.
            x_key: Over what; by default `x`.
        """
        x = self.x[0]
        if x_key is not None:
            x = self[x_key]
        x = x[self.current]
        y = self[key][self.current]
        known = np.isfinite(x) & np.isfinite(y)
        if not known.any():
            return None
        return thin(x[known], y[known])


def _falls(values: Floats, *, strictly: bool) -> NDArray[np.bool_]:
    """Return where a value is less than (or, unless `strictly`, equal to) the last known one."""
    known = np.flatnonzero(np.isfinite(values))
    steps = np.diff(values[known])
    fell = steps < 0
    if not strictly:
        fell = steps <= 0
    falls = np.zeros(len(values), dtype=bool)
    falls[known[1:][fell]] = True
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
    # All stretches have the same number of points, but the last, which may have fewer.
    begins = np.arange(0, len(x), math.ceil(len(x) / MAX_POINTS))
    sizes = np.diff(np.append(begins, len(x)))
    return Curve(
        np.add.reduceat(x, begins) / sizes,
        np.add.reduceat(y, begins) / sizes,
        np.minimum.reduceat(y, begins),
        np.maximum.reduceat(y, begins),
    )


def read_metrics(path: Path) -> Metrics:
    """Read a ``metrics.jsonl`` as columns. Skips lines that are not objects, and values that are not finite numbers.

    Takes eight bytes of memory per value, whatever else is in the file.

    Raises:
        OSError: If it cannot be read.
    """
    columns: dict[str, array[float]] = {}
    num_lines = 0
    num_skipped = 0
    cut_off = False
    for line in _lines(path):
        cut_off = line is not None and not line.endswith(b"\n")
        values = _values(line)
        if values is None:
            num_skipped += 1
            continue
        for key, value in values.items():
            if key not in columns:
                # Random keys in a damaged file must not take memory without limit.
                if len(columns) == MAX_COLUMNS:
                    continue
                columns[key] = array("d", [math.nan]) * num_lines
            columns[key].append(value)
        num_lines += 1
        # Columns that this line does not have.
        for column in columns.values():
            if len(column) < num_lines:
                column.append(math.nan)
    arrays = {key: np.frombuffer(column, dtype=np.float64) for key, column in columns.items()}
    return Metrics(arrays, num_lines, num_skipped, cut_off and num_skipped > 0)


def _lines(path: Path) -> Iterator[bytes | None]:
    """Yield lines that are not blank; None for one that is too long to be a line of metrics."""
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            # Skip the rest of such a line piece by piece, so that it is never in memory as a whole.
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
    values = {}
    for key, value in document.items():
        number = number_of(value)
        if number is not None and len(key) <= MAX_KEY:
            values[key] = number
    return values
