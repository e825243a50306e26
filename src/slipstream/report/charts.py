"""The charts of a page as data: what is drawn, not how; ``assets/charts.js`` draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.report.counters import Stalls
from slipstream.run.evaluation import MAIN_SCENARIO, Evaluation
from slipstream.run.metrics import STORAGE_PREFIXES, Curve, Floats, Metrics

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
    charts = []
    for number, plan in enumerate([*_LEARNING, *_unplanned(metrics)]):
        chart = _chart(plan, number, metrics)
        if chart is not None:
            charts.append(chart)
    evaluated = _evaluation_chart(metrics, evaluations)
    if evaluated is not None:
        # Beside the outcomes of training episodes, which come first.
        charts.insert(1, evaluated)
    return charts


def _unplanned(metrics: Metrics) -> list[_Plan]:
    """Return charts of metrics that no other chart shows, such as those of a custom logger."""
    known = set(_SHOWN_ELSEWHERE)
    for plan in _LEARNING:
        for key, _, _ in plan.keys:
            known.add(key)
    found = [key for key in sorted(metrics.columns) if key not in known and not key.startswith(_ELSEWHERE_PREFIXES)]
    return [_Plan(key, "", ((key, key, "a"),)) for key in found[:MAX_OTHERS]]


def _chart(plan: _Plan, number: int, metrics: Metrics) -> Chart | None:
    series = []
    for key, name, color in plan.keys:
        curve = metrics.curve(key)
        if curve is not None:
            series.append(_series(name, color, curve))
    if not series:
        return None
    data = {"kind": "lines", "x": metrics.x[1], "y": plan.unit, "percent": plan.percent, "series": series}
    return Chart(f"learning-{number}", plan.title, data, _summary(data))


@dataclass
class _Points:
    """Success in one scenario: mean, low and high by the place on the x axis."""

    title: str
    values: dict[float, tuple[float, float, float]] = field(default_factory=dict)


def _evaluation_chart(metrics: Metrics, evaluations: Sequence[Evaluation]) -> Chart | None:
    """Return success by scenario: from the evaluations, and from lines of metrics whose evaluation has no file."""
    x_name = "frames"
    if metrics.num_lines:
        x_name = metrics.x[1]
    points = _points_of_metrics(metrics)
    for evaluation in evaluations:
        at = evaluation.env_frames
        if metrics.x[1] == "iteration":
            at = evaluation.iteration
        # A curve shows the policy alone, under the same conditions at every point.
        if at is not None and not evaluation.changes:
            _add_evaluation(points, evaluation, at)
    # The main scenario has the first colour.
    names = sorted(points)
    if MAIN_SCENARIO in points:
        names.remove(MAIN_SCENARIO)
        names.insert(0, MAIN_SCENARIO)
    series = []
    for number, name in enumerate(names):
        if points[name].values:
            series.append(_interval_series(points[name], "abcdefgh"[number % 8]))
    if not series:
        return None
    data = {"kind": "points", "x": x_name, "y": "share", "percent": True, "series": series}
    return Chart("learning-evaluations", "Evaluations: flights that reached their goal", data, _summary(data))


def _points_of_metrics(metrics: Metrics) -> dict[str, _Points]:
    points: dict[str, _Points] = {}
    x = metrics.x[0]
    for key, values in metrics.columns.items():
        if not key.startswith("eval/") or not key.endswith("/success"):
            continue
        name = key.removeprefix("eval/").removesuffix("/success")
        points[name] = _Points(name)
        for line in np.flatnonzero(np.isfinite(values) & np.isfinite(x) & metrics.current):
            mean = float(values[line])
            points[name].values[float(x[line])] = (mean, mean, mean)
    return points


def _add_evaluation(points: dict[str, _Points], evaluation: Evaluation, at: float) -> None:
    for scenario in evaluation.scenarios:
        success = scenario.quantities.get("success")
        if not scenario.is_standard or success is None:
            continue
        found = points.setdefault(scenario.name, _Points(scenario.name))
        found.title = scenario.title
        low = success.mean
        high = success.mean
        if success.is_known:
            low = success.low
            high = success.high
        found.values[at] = (success.mean, low, high)


def _interval_series(points: _Points, color: str) -> dict[str, Any]:
    places = sorted(points.values)
    values = np.array([points.values[place] for place in places])
    return _series(points.title, color, Curve(np.array(places), *values.T))


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
    """Return the parts of an iteration with their means and standard deviations in seconds, and the remainder."""
    parts = []
    left = metrics.last("perf/iteration_mean")
    for name in PARTS:
        mean = metrics.last(f"perf/{name}_mean")
        if mean is None or mean < 0:
            continue
        parts.append((name, mean, metrics.last(f"perf/{name}_std")))
        if left is not None:
            left -= mean
    if parts and left is not None and left > 0:
        parts.append(("other", left, None))
    return parts


def stall_chart(stalls: Stalls, x_name: str) -> Chart | None:
    """Return what each save cost over the run."""
    series = []
    for name, color, curve in (
        ("call of save", "a", stalls.call_ms),
        ("wait of the optimizer", "b", stalls.barrier_ms),
    ):
        if curve is not None:
            series.append(_series(name, color, curve))
    if not series:
        return None
    data = {"kind": "dots", "x": x_name, "y": "ms per save", "zero": True, "series": series}
    return Chart("storage-stalls", "Training stalls", data, _summary(data), wide=True)


def _series(name: str, color: str, curve: Curve) -> dict[str, Any]:
    series = {"name": name, "color": color, "x": _numbers(curve.x), "y": _numbers(curve.y)}
    if curve.low is not None and curve.high is not None:
        series["low"] = _numbers(curve.low)
        series["high"] = _numbers(curve.high)
    return series


def _numbers(values: Floats) -> list[float]:
    return list(map(_short, values.tolist()))


def _short(value: float) -> float:
    """Return a number with as many digits as a screen can show; whole numbers, such as frames, stay exact."""
    if value == int(value) and math.fabs(value) < 1e15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def _summary(data: dict[str, Any]) -> str:
    """Return what a chart shows as text: where each curve begins and ends."""
    ends = [f"{series['name']} from {series['y'][0]:.4g} to {series['y'][-1]:.4g}" for series in data["series"]]
    return f"{'; '.join(ends)}, over {data['x']}"
