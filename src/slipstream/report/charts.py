"""The charts of a page as data: what is drawn, not how; ``assets/charts.js`` draws it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.report.counters import Stalls
from slipstream.report.evaluations import MAIN_SCENARIO, Evaluation, Scenario
from slipstream.report.metrics import STORAGE_PREFIXES, Curve, Floats, Metrics

PARTS = ("rollout", "update", "save", "evaluate", "log")
MAX_OTHERS = 24
DIGITS = 6


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        identifier: Of its element.
        title: What stands above it.
        data: What the page's script draws, as JSON.
        summary: What it shows, for those who cannot see it.
        wide: Whether it takes the whole width.
    """

    identifier: str
    title: str
    data: dict[str, Any]
    summary: str
    wide: bool = False


@dataclass(frozen=True)
class _Plan:
    """A chart of metrics: its title, what its axis shows, and the keys on it with their names and colours."""

    title: str
    unit: str
    keys: tuple[tuple[str, str, str], ...]
    percent: bool = False


_LEARNING = (
    _Plan(
        "Episodes that ended",
        "share",
        (
            ("train/stats.reach_goal", "success", "reached"),
            ("train/stats.collision", "collision", "static"),
            ("train/stats.truncated", "truncated", "timeout"),
        ),
        percent=True,
    ),
    _Plan("Return of an episode", "return", (("train/stats.return", "return", "a"),)),
    _Plan("Length of an episode", "steps", (("train/stats.episode_len", "length", "a"),)),
    _Plan("Actor loss", "loss", (("actor_loss", "actor", "a"),)),
    _Plan("Critic loss", "loss", (("critic_loss", "critic", "b"),)),
    _Plan("Entropy", "nats", (("entropy", "entropy", "a"),)),
    _Plan("KL divergence", "nats", (("approx_kl", "in an update", "a"), ("behaviour_kl", "to behaviour", "b"))),
    _Plan("Clip fraction", "share", (("clip_fraction", "clipped", "a"),), percent=True),
    _Plan("Explained variance", "", (("explained_variance", "explained variance", "a"),)),
    _Plan(
        "Gradient norms",
        "norm",
        (
            ("feature_extractor_grad_norm", "features", "a"),
            ("actor_grad_norm", "actor", "b"),
            ("critic_grad_norm", "critic", "c"),
        ),
    ),
    _Plan("Distance from the teacher's actions", "squared", (("imitation_loss", "imitation loss", "a"),)),
    _Plan("Weight of the teacher", "", (("schedule/teacher_coefficient", "weight", "a"),)),
    _Plan("Learning rate", "", (("schedule/learning_rate", "learning rate", "a"),)),
    _Plan(
        "Obstacles in training",
        "obstacles",
        (("schedule/num_obstacles", "static", "a"), ("schedule/num_dynamic_obstacles", "dynamic", "dynamic")),
    ),
    _Plan("Staleness", "versions", (("staleness", "staleness", "a"),)),
    _Plan("Effective sample size", "share", (("ess", "ESS", "a"),)),
)
_SHOWN_ELSEWHERE = {"iteration", "env_frames", "time", "rollout_fps"}
_ELSEWHERE_PREFIXES = ("perf/", "eval/", *STORAGE_PREFIXES)


def learning_charts(metrics: Metrics, evaluations: Sequence[Evaluation]) -> list[Chart]:
    """Return the curves of a run that have any value."""
    plans = [*_LEARNING, *(_Plan(key, "", ((key, key, "a"),)) for key in _others(metrics))]
    charts = [_chart(plan, number, metrics) for number, plan in enumerate(plans)]
    evaluated = _evaluation_chart(metrics, evaluations)
    found = [chart for chart in charts if chart is not None]
    return [*found[:1], evaluated, *found[1:]] if evaluated is not None else found


def _others(metrics: Metrics) -> list[str]:
    """Return the metrics that no planned chart shows."""
    planned = {key for plan in _LEARNING for key, _, _ in plan.keys} | _SHOWN_ELSEWHERE
    free = (key for key in metrics.columns if key not in planned and not key.startswith(_ELSEWHERE_PREFIXES))
    return sorted(free)[:MAX_OTHERS]


def _chart(plan: _Plan, number: int, metrics: Metrics) -> Chart | None:
    series = [
        _series(name, color, curve) for key, name, color in plan.keys if (curve := metrics.curve(key)) is not None
    ]
    if not series:
        return None
    data = {"kind": "lines", "x": metrics.x[1], "y": plan.unit, "percent": plan.percent, "series": series}
    return Chart(f"learning-{number}", plan.title, data, _summary(data))


def _evaluation_chart(metrics: Metrics, evaluations: Sequence[Evaluation]) -> Chart | None:
    """Return success by scenario: from the evaluations, and from the lines of metrics that have no file of theirs."""
    points: dict[str, dict[float, tuple[float, float, float]]] = {}
    titles: dict[str, str] = {}
    x, x_name = metrics.x
    for key in (key for key in metrics.columns if key.startswith("eval/") and key.endswith("/success")):
        name = key.removeprefix("eval/").removesuffix("/success")
        values = metrics[key]
        for line in np.flatnonzero(np.isfinite(values) & np.isfinite(x) & metrics.current):
            points.setdefault(name, {})[float(x[line])] = (float(values[line]),) * 3
    for evaluation in evaluations:
        at = evaluation.iteration if x_name == "iteration" else evaluation.env_frames
        # A curve shows the policy alone, under the same conditions at every point.
        for scenario in evaluation.scenarios:
            if scenario.is_standard and not evaluation.changes:
                _add_point(points, titles, scenario, at)
    series = [
        _interval_series(titles.get(name, name), "abcdefgh"[number % 8], points[name])
        for number, name in enumerate(sorted(points, key=lambda name: (name != MAIN_SCENARIO, name)))
    ]
    if not series:
        return None
    data = {"kind": "points", "x": x_name if metrics.num_lines else "frames", "y": "share", "percent": True}
    data["series"] = series
    return Chart("learning-evaluations", "Evaluations: flights that reached their goal", data, _summary(data))


def _add_point(
    points: dict[str, dict[float, tuple[float, float, float]]],
    titles: dict[str, str],
    scenario: Scenario,
    at: float | None,
) -> None:
    titles[scenario.name] = scenario.title
    success = scenario.quantities.get("success")
    if success is not None and at is not None:
        low = success.mean if success.low is None else success.low
        high = success.mean if success.high is None else success.high
        points.setdefault(scenario.name, {})[at] = (success.mean, low, high)


def _interval_series(name: str, color: str, points: dict[float, tuple[float, float, float]]) -> dict[str, Any]:
    places = sorted(points)
    mean, low, high = (np.array([points[place][part] for place in places]) for part in range(3))
    return _series(name, color, Curve(np.array(places), mean, low, high))


def time_charts(metrics: Metrics) -> list[Chart]:
    """Return where the time of an iteration goes, and frames per second over the run."""
    charts = []
    parts = time_parts(metrics)
    if parts:
        series = [{"name": name, "value": _short(mean)} for name, mean, _ in parts]
        summary = ", ".join(f"{name} {mean:.3g} s" for name, mean, _ in parts)
        charts.append(Chart("time-parts", "An iteration", {"kind": "stack", "series": series}, summary, wide=True))
    curve = metrics.curve("rollout_fps")
    if curve is not None:
        series = [_series("frames/s", "a", curve)]
        data = {"kind": "lines", "x": metrics.x[1], "y": "frames/s", "zero": True, "series": series}
        charts.append(Chart("time-fps", "Frames per second", data, _summary(data), wide=True))
    return charts


def time_parts(metrics: Metrics) -> list[tuple[str, float, float | None]]:
    """Return the parts of an iteration with their means and standard deviations in seconds, and what is left."""
    parts = [
        (name, mean, metrics.last(f"perf/{name}_std"))
        for name in PARTS
        if (mean := metrics.last(f"perf/{name}_mean")) is not None and mean >= 0
    ]
    whole = metrics.last("perf/iteration_mean")
    if whole is not None and parts:
        left = whole - sum(mean for _, mean, _ in parts)
        if left > 0:
            parts.append(("other", left, None))
    return parts


def stall_chart(stalls: Stalls, x_name: str) -> Chart | None:
    """Return what each save cost over the run."""
    curves = (("call of save", "a", stalls.call_ms), ("wait of the optimizer", "b", stalls.barrier_ms))
    series = [_series(name, color, curve) for name, color, curve in curves if curve is not None]
    if not series:
        return None
    data = {"kind": "dots", "x": x_name, "y": "ms per save", "zero": True, "series": series}
    return Chart("storage-stalls", "Training stalls", data, _summary(data), wide=True)


def _series(name: str, color: str, curve: Curve) -> dict[str, Any]:
    series = {"name": name, "color": color, "x": _numbers(curve.x), "y": _numbers(curve.y)}
    if curve.low is not None and curve.high is not None:
        series |= {"low": _numbers(curve.low), "high": _numbers(curve.high)}
    return series


def _numbers(values: Floats) -> list[float]:
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float:
    """Return a number with as many digits as a screen can show; the x axis counts frames, which stay whole."""
    if not value or value == int(value):
        return int(value) if math.fabs(value) < 1e15 else value
    return float(f"{value:.{DIGITS}g}")


def _summary(data: dict[str, Any]) -> str:
    ends: Iterable[str] = (
        f"{series['name']} from {series['y'][0]:.4g} to {series['y'][-1]:.4g}" for series in data["series"]
    )
    return f"{'; '.join(ends)}, over {data['x']}"
