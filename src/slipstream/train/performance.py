"""`PerformanceMonitor`: how long things take, and how that changes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.checks import require_count


@dataclass
class _Series:
    """The last values of one name, and what is known of all of them."""

    recent: deque[float]
    total: float = 0.0
    count: int = 0
    started: dict[int, list[float]] = field(default_factory=dict)


class PerformanceMonitor:
    """Keeps the times, and any other numbers, of a training loop by name.

    May be used from several threads: each has its own running timers. Memory is bounded: of each name the last
    `max_samples` values are kept, and the sum and number of all.

    Args:
        max_samples: How many values of each name to keep.

    Example:
        >>> monitor = PerformanceMonitor()
        >>> with monitor.timer("rollout"):
        ...     pass
        >>> monitor.record("loss", 0.5)
        >>> monitor.get_stats()["loss"]["mean"]
        0.5
    """

    def __init__(self, max_samples: int = 1000) -> None:
        require_count("max_samples", max_samples)
        self._max_samples = max_samples
        self._series: dict[str, _Series] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Measure what the block takes, in seconds, also when it ends in an exception."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.record(name, time.perf_counter() - start)

    def start_timer(self, name: str) -> None:
        """Start measuring; timers of one name may be nested, and the last that was started ends first."""
        now = time.perf_counter()
        with self._lock:
            self._get(name).started.setdefault(threading.get_ident(), []).append(now)

    def end_timer(self, name: str) -> float:
        """End the timer that this thread started last under a name, and return its seconds.

        Raises:
            ValueError: If this thread has none running under that name.
        """
        now = time.perf_counter()
        with self._lock:
            series = self._series.get(name)
            running = series.started.get(threading.get_ident()) if series else None
            if not series or not running:
                raise ValueError(f"no timer {name!r} is running in this thread: start_timer({name!r}) comes first")
            seconds = now - running.pop()
            if not running:
                del series.started[threading.get_ident()]
        self.record(name, seconds)
        return seconds

    def record(self, name: str, value: float) -> None:
        """Keep a value under a name."""
        value = float(value)
        with self._lock:
            series = self._get(name)
            series.recent.append(value)
            series.total += value
            series.count += 1

    def get_stats(self, window: int = 100) -> dict[str, dict[str, float]]:
        """Return ``mean, std, min, max`` of the last `window` values of each name, and ``total, count`` of all of them.

        A name whose timer has not ended once is left out.
        """
        require_count("window", window)
        with self._lock:
            known = {name: (list(s.recent)[-window:], s.total, s.count) for name, s in self._series.items() if s.count}
        found: dict[str, dict[str, float]] = {}
        for name, (values, total, count) in known.items():
            mean = math.fsum(values) / len(values)
            variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
            found[name] = {
                "mean": mean,
                "std": math.sqrt(variance),
                "min": min(values),
                "max": max(values),
                "total": total,
                "count": count,
            }
        return found

    def get_summary(self, window: int = 100) -> str:
        """Return a heading and one line per name, in milliseconds: mean, ± std, [min, max].

        Names with the largest total come first.

        Args:
            window: How many of the last values of each name to summarize.

        Example:
            >>> monitor = PerformanceMonitor()
            >>> monitor.record("update", 0.5)
            >>> print(monitor.get_summary())
            === Performance Summary ===
            update     500.000 ± 0.000 ms  [500.000, 500.000]
        """
        stats = sorted(self.get_stats(window).items(), key=lambda item: -item[1]["total"])
        width = max((len(name) for name, _ in stats), default=0)
        lines = ["=== Performance Summary ==="]
        for name, s in stats:
            mean, std, low, high = (1e3 * s[key] for key in ("mean", "std", "min", "max"))
            lines.append(f"{name:<{width}}  {mean:10.3f} ± {std:.3f} ms  [{low:.3f}, {high:.3f}]")
        return "\n".join(lines)

    def report(self, window: int = 100) -> dict[str, float]:
        """Return ``{name}_mean`` and ``{name}_std`` of each name, for a logger."""
        flat: dict[str, float] = {}
        for name, stats in self.get_stats(window).items():
            flat[f"{name}_mean"], flat[f"{name}_std"] = stats["mean"], stats["std"]
        return flat

    def reset(self) -> None:
        """Forget all values; timers that are running go on."""
        with self._lock:
            self._series = {name: self._empty(series) for name, series in self._series.items() if series.started}

    def _get(self, name: str) -> _Series:
        if name not in self._series:
            self._series[name] = self._empty()
        return self._series[name]

    def _empty(self, running: _Series | None = None) -> _Series:
        return _Series(deque(maxlen=self._max_samples), started=running.started if running else {})
