"""The charts of a page as data: what is drawn, not how; ``assets/charts.js`` draws it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slipstream.report.counters import Stalls
from slipstream.run.evaluation import MAIN_SCENARIO, Evaluation
from slipstream.run.metrics import STORAGE_PREFIXES, Curve, Floats, Metrics

TIMED_OUT = "train/stats.timed_out"  # derived from what training logs
PARTS = ("rollout", "update", "save", "evaluate", "log")
MAX_OTHERS = 24
COLORS = "abcdefgh"  # of the style sheet
X_NAMES = {"env_frames": "frames", "iteration": "iteration"}
DIGITS = 6
LEAST_SHARE = 1e-5  # of an iteration, for a part that is shown


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
            (TIMED_OUT, "timed out", "timeout"),
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
_SHOWN_ELSEWHERE = {"iteration", "env_frames", "time", "rollout_fps", "train/stats.truncated"}
# What is only worth a curve if a run uses a feature: the metric that is 0 throughout if it does not, and the others.
_FEATURES = {
    "staleness": ("ess", "behaviour_kl"),
    "schedule/teacher_coefficient": ("imitation_loss",),
    "schedule/num_dynamic_obstacles": (),
}
_SPEED = (_Plan("Frames per second", "frames/s", (("rollout_fps", "frames/s", "a"),)),)
_ELSEWHERE_PREFIXES = ("perf/", "eval/", *STORAGE_PREFIXES)


def learning_charts(metrics: Metrics, evaluations: Sequence[Evaluation]) -> list[Chart]:
    """Return the curves of a run that have any value."""
    charts = []
    shown = _prepare(metrics)
    for number, plan in enumerate([*_LEARNING, *_unplanned(shown)]):
        chart = _chart(plan, number, shown)
        if chart is not None:
            charts.append(chart)
    evaluated = _evaluation_chart(metrics, evaluations)
    if evaluated is not None:
        # Beside the outcomes of training episodes, which come first.
        charts.insert(1, evaluated)
    return charts


def compare_curves(runs: Mapping[str, tuple[Metrics, Sequence[Evaluation]]]) -> list[Chart]:
    """Return the curves of several runs: one chart for each metric, with a curve for each run that has it.

    Args:
        runs: Metrics and evaluations by the name of the run.
    """
    prepared = {}
    for name, (metrics, _) in runs.items():
        prepared[name] = _prepare(metrics)
    # All runs need the same x axis, so frames are out of the question if one of them does not count them.
    x_names = {metrics.x[1] for metrics in prepared.values() if metrics.num_lines}
    x_key = "env_frames"
    if x_names != {"frames"}:
        x_key = "iteration"
    charts = [_compare_evaluations(runs, x_key)]
    for plan in [*_LEARNING, *_unplanned_in_any(list(prepared.values())), *_SPEED]:
        for key, series_name, _ in plan.keys:
            title = plan.title
            if len(plan.keys) > 1:
                title = f"{plan.title}: {series_name}"
            charts.append(_compare_metric(prepared, x_key, key, title, plan))
    return list(filter(None, charts))


def _compare_metric(runs: Mapping[str, Metrics], x_key: str, key: str, title: str, plan: _Plan) -> Chart | None:
    """Return the curves of one metric; None if no run has it."""
    series = []
    for (name, metrics), color in zip(runs.items(), COLORS, strict=False):
        curve = metrics.curve(key, x_key)
        if curve is not None:
            series.append(_series(name, color, curve))
    if not series:
        return None
    data = {"kind": "lines", "x": X_NAMES[x_key], "y": plan.unit, "percent": plan.percent, "series": series}
    return Chart(f"compared-{key}", title, data, _summary(data))


def _compare_evaluations(runs: Mapping[str, tuple[Metrics, Sequence[Evaluation]]], x_key: str) -> Chart | None:
    """Return success through the field in each run's evaluations; None if there is none."""
    series = []
    for (name, (_, evaluations)), color in zip(runs.items(), COLORS, strict=False):
        points: dict[str, _Points] = {}
        for evaluation in evaluations:
            at = evaluation.iteration
            if x_key == "env_frames":
                at = evaluation.env_frames
            if at is not None and not evaluation.changes:
                _add_evaluation(points, evaluation, at)
        if MAIN_SCENARIO in points:
            points[MAIN_SCENARIO].title = name
            series.append(_interval_series(points[MAIN_SCENARIO], color))
    if not series:
        return None
    data = {"kind": "points", "x": X_NAMES[x_key], "y": "share", "percent": True, "series": series}
    return Chart("evaluations-compared", "Evaluations: flights that reached their goal", data, _summary(data))


def _prepare(metrics: Metrics) -> Metrics:
    """Return metrics as they are drawn: without features that the run does not use, and with the share of timeouts."""
    columns = dict(metrics.columns)
    for key, others in _FEATURES.items():
        values = metrics[key]
        if np.isfinite(values).any() and not np.nan_to_num(values).any():
            for unused in (key, *others):
                columns.pop(unused, None)
    # An episode that reaches its goal ends as truncated, or flies on until it times out: neither is a timeout.
    truncated = columns.get("train/stats.truncated")
    if truncated is not None:
        columns[TIMED_OUT] = np.maximum(truncated - metrics["train/stats.reach_goal"], 0.0)
    return replace(metrics, columns=columns)


def _unplanned_in_any(runs: Sequence[Metrics]) -> list[_Plan]:
    """Return charts of metrics that no other chart shows, of all runs."""
    plans = {}
    for metrics in runs:
        for plan in _unplanned(metrics):
            plans[plan.title] = plan
    return list(plans.values())[:MAX_OTHERS]


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
            series.append(_interval_series(points[name], COLORS[number % len(COLORS)]))
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
    whole = metrics.last("perf/iteration_mean")
    left = whole
    for name in PARTS:
        mean = metrics.last(f"perf/{name}_mean")
        # Asking whether to do something that the run never does, such as evaluating, takes microseconds.
        if mean is None or mean <= LEAST_SHARE * (whole or 0.0):
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
