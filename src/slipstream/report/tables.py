"""Headline and results of a page in words and numbers, as data that the templates render."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.report.counters import find_stalls, running_time_s, total
from slipstream.report.run import Run, Scene
from slipstream.run.evaluation import OUTCOMES, Evaluation, Interval, Scenario
from slipstream.run.metrics import MAX_POINTS, Metrics
from slipstream.text import format_bytes, format_count, format_percent, format_ratio, format_seconds, plural

NOTHING = "\N{EN DASH}"
CANDIDATE_TITLES = {"policy_shield": "Policy with shield", "planner": "Planner, without learning"}
RATE_TITLES = {
    "success": "Success",
    "static_collision": "Hit a static obstacle",
    "dynamic_collision": "Hit a moving one",
    "out_of_bounds": "Out of bounds",
    "timeout": "Timed out",
}
_AMOUNTS = (("time_to_goal_s", "Time to goal", " s"), ("path_length_m", "Path", " m"), ("return", "Return", ""))
_INSIDE = ("inside_share", "Time inside the field")


@dataclass(frozen=True)
class Bar:
    """A rate and its interval, in percent of the width of a bar."""

    mean: float
    begin: float
    width: float


@dataclass(frozen=True)
class Cell:
    """What is in a cell of a table: text, a smaller line below it, and a bar below that."""

    text: str
    note: str = ""
    bar: Bar | None = None


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Hero:
    """Success in the main scenario, next to that of other candidates there."""

    value: str
    flights: str
    where: str
    bar: Bar
    interval: str
    references: Sequence[str]


def when(run: Run) -> str:
    """Return from when to when a run was trained, and how often it was resumed."""
    times = run.metrics["time"]
    times = times[np.isfinite(times)]
    words = []
    if len(times):
        begin = format_moment(times[0])
        end = format_moment(times[-1])
        if begin and end:
            words += [f"from {begin}", f"to {end}"]
    elif run.evaluation is not None and run.evaluation.time is not None:
        moment = format_moment(run.evaluation.time)
        if moment:
            words.append(f"evaluated {moment}")
    num_resumes = int(run.metrics.starts.sum()) - 1
    if num_resumes == 1:
        words.append("resumed once")
    elif num_resumes > 1:
        words.append(f"resumed {num_resumes} times")
    sentence = ", ".join(words)
    return sentence[:1].upper() + sentence[1:]


def format_moment(unix_s: float) -> str | None:
    """Return a moment in UTC, or None if it is outside the calendar's range."""
    # Damaged metrics may contain any number, also one beyond the year 9999.
    try:
        moment = dt.datetime.fromtimestamp(unix_s, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def format_interval(quantity: Interval, *, percent: bool = False) -> str:
    """Return the 95 % interval of a quantity; empty if it has none."""
    if not quantity.is_known:
        return ""
    if percent:
        return f"{100 * quantity.low:.1f} to {100 * quantity.high:.1f} %"
    return f"{quantity.low:.1f} to {quantity.high:.1f}"


def hero(evaluation: Evaluation | None) -> Hero | None:
    """Return success in the main scenario of an evaluation; None if it was not measured."""
    if evaluation is None or evaluation.main is None:
        return None
    scenario = evaluation.main
    success = scenario.quantities.get("success")
    if success is None:
        return None
    flights = "of flights"
    if scenario.episodes:
        flights = f"of {plural(scenario.episodes, 'flight')}"
    return Hero(
        value=format_percent(success.mean),
        flights=flights,
        where=_where(scenario),
        bar=bar_of(success),
        interval=format_interval(success, percent=True),
        references=_references(evaluation, scenario),
    )


def _where(scenario: Scenario) -> str:
    """Return where the flights of a scenario were."""
    words = []
    maps = format_maps(scenario)
    if maps:
        words.append(maps)
    num_moving = scenario.facts.get("num_dynamic_obstacles")
    if num_moving:
        words.append(plural(int(num_moving), "moving obstacle"))
    if not words:
        return scenario.title
    return f"{scenario.title} ({', '.join(words)})"


def format_maps(scenario: Scenario) -> str:
    """Return which maps a scenario was flown on; empty if that is unknown."""
    facts = scenario.facts
    if "map_seed" in facts:
        return f"map {facts['map_seed']:.0f}"
    if "num_maps" not in facts:
        return ""
    count = plural(int(facts["num_maps"]), "map")
    if "first_map" not in facts:
        return count
    if facts["num_maps"] == 1:
        return f"map {facts['first_map']:.0f}"
    return f"{count}, {facts['first_map']:.0f} to {facts['last_map']:.0f}"


def _references(evaluation: Evaluation, main: Scenario) -> list[str]:
    """Return how other candidates did on the same flights."""
    lines = []
    for candidate, title in CANDIDATE_TITLES.items():
        for scenario in evaluation.scenarios:
            success = scenario.quantities.get("success")
            same_flights = scenario.name == main.name and not scenario.has_faults
            if scenario.candidate == candidate and same_flights and success is not None:
                interval = format_interval(success, percent=True)
                lines.append(f"{title}: {format_percent(success.mean)} ({interval})")
    return lines


def bar_of(quantity: Interval) -> Bar:
    """Return a rate as a bar, with its interval."""
    begin = quantity.mean
    end = quantity.mean
    if quantity.is_known:
        begin = quantity.low
        end = quantity.high
    first = _percent_of_width(begin)
    # An interval of no width would not be visible.
    width = max(_percent_of_width(end) - first, 0.4)
    return Bar(_percent_of_width(quantity.mean), first, round(width, 2))


def _percent_of_width(share: float) -> float:
    return round(100 * min(max(share, 0.0), 1.0), 2)


def tiles(run: Run) -> list[Tile]:
    """Return how far a run is, how fast it was, and what storage cost and saved."""
    metrics = run.metrics
    found = []
    frames = metrics.last("env_frames")
    if frames is not None:
        found.append(Tile("Frames", format_count(frames)))
    iterations = metrics.last("iteration")
    if iterations is not None:
        found.append(Tile("Iterations", format_count(iterations)))
    seconds = running_time_s(metrics)
    if seconds is not None:
        found.append(Tile("Wall time", format_seconds(seconds), "while a process ran"))
    rates = metrics["rollout_fps"][metrics.current]
    rates = rates[np.isfinite(rates)]
    if len(rates):
        found.append(Tile("Frames per second", format_count(float(np.median(rates))), "median of iterations"))
    stalls = find_stalls(metrics)
    if stalls is not None:
        note = f"per save, {plural(stalls.num_saves, 'save')}"
        found.append(Tile("Checkpoint stall", format_seconds(stalls.per_save_ms / 1000), note))
    for name, raw_key, stored_key in (
        ("Checkpoints", "ckpt/total_saved_bytes", "ckpt/total_compressed_bytes"),
        ("Rollouts", "rollouts/raw_bytes", "rollouts/stored_bytes"),
    ):
        raw = total(metrics, raw_key)
        stored = total(metrics, stored_key)
        if raw and stored:
            note = f"{format_bytes(raw)} in {format_bytes(stored)}"
            found.append(Tile(f"{name} packed", format_ratio(raw, stored), note))
    return found


def scene_table(scenes: Sequence[Scene]) -> Table:
    """Return how the flights of each scene ended, for readers without scripts."""
    titles = {"success": "reached the goal", "static_collision": "hit a static obstacle"}
    titles |= {"dynamic_collision": "hit a moving one", "out_of_bounds": "out of bounds", "timeout": "timed out"}
    rows = []
    for scene in scenes:
        outcomes = scene.packed["outcomes"]
        row = [Cell(scene.title, f"map {scene.packed['map']}"), Cell(format_count(len(outcomes)))]
        row += [Cell(format_count(outcomes.count(OUTCOMES.index(name)))) for name in titles]
        rows.append(row)
    return Table("How the flights ended", ("Flights of", "Count", *titles.values()), rows)


def thinned_note(metrics: Metrics) -> str:
    """Return how long curves were thinned; empty if none was."""
    if metrics.num_lines <= 2 * MAX_POINTS:
        return ""
    return (
        f"The run has {format_count(metrics.num_lines)} lines of metrics. Curves of more than {2 * MAX_POINTS:,} "
        f"points, here and below, show the means of {MAX_POINTS:,} stretches or fewer; the band is from the least to "
        f"the greatest value in each."
    )


def about_evaluation(evaluation: Evaluation) -> str:
    """Return which checkpoint an evaluation flew, and under which conditions."""
    words = [f"Evaluation {evaluation.name}"]
    if evaluation.iteration is not None:
        words.append(f"of iteration {format_count(evaluation.iteration)}")
    if evaluation.env_frames is not None:
        words.append(f"after {format_count(evaluation.env_frames)} frames")
    if evaluation.action is not None:
        words.append(f"with the action {evaluation.action!r}")
    if evaluation.changes:
        words.append(f"under other conditions ({', '.join(evaluation.changes)})")
    return f"{' '.join(words)}. Means with their 95 % intervals, which account for flights that share a map."


def evaluation_table(evaluation: Evaluation) -> Table:
    """Return the rates and means of each scenario and candidate."""
    shares = {**RATE_TITLES, _INSIDE[0]: _INSIDE[1]}
    header = ["Scenario", "Flights", *shares.values()]
    header += [title for _, title, _ in _AMOUNTS]
    rows = []
    for scenario in evaluation.scenarios:
        row = [_described(scenario), _count(scenario.episodes)]
        row += [rate_cell(scenario, key) for key in shares]
        row += [_amount(scenario.quantities.get(key), unit) for key, _, unit in _AMOUNTS]
        rows.append(row)
    return Table(f"Evaluation {evaluation.name}", header, rows)


def other_evaluations(evaluations: Sequence[Evaluation], last: Evaluation) -> Table | None:
    """Return the rates of all evaluations but one, the newest first; None if there is no other."""
    rows = []
    for evaluation in reversed(evaluations):
        if evaluation is last:
            continue
        for scenario in evaluation.scenarios:
            row = [Cell(evaluation.name, ", ".join(evaluation.changes)), _count(evaluation.iteration)]
            row.append(Cell(scenario.title, format_maps(scenario)))
            row += [rate_cell(scenario, key) for key in RATE_TITLES]
            rows.append(row)
    if not rows:
        return None
    header = ("Evaluation", "Iteration", "Scenario", *RATE_TITLES.values())
    return Table("Other evaluations", header, rows)


def _described(scenario: Scenario) -> Cell:
    words = []
    for key, name in (("num_static_obstacles", "static"), ("num_dynamic_obstacles", "moving")):
        number = scenario.facts.get(key)
        if number:
            words.append(f"{format_count(number)} {name}")
    maps = format_maps(scenario)
    if maps:
        words.append(maps)
    return Cell(scenario.title, ", ".join(words))


def _count(number: float | None) -> Cell:
    if number is None:
        return Cell(NOTHING)
    return Cell(format_count(number))


def rate_cell(scenario: Scenario, key: str) -> Cell:
    """Return a rate with its interval; success also as a bar."""
    quantity = scenario.quantities.get(key)
    if quantity is None:
        return Cell(NOTHING)
    bar = None
    if key == "success":
        bar = bar_of(quantity)
    return Cell(format_percent(quantity.mean), format_interval(quantity, percent=True), bar)


def _amount(quantity: Interval | None, unit: str) -> Cell:
    if quantity is None:
        return Cell(NOTHING)
    return Cell(f"{quantity.mean:,.1f}{unit}", format_interval(quantity))
