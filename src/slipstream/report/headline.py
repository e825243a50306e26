"""The top of the page: which run this is, and what came out of it."""

from __future__ import annotations

import numpy as np

from slipstream.report.counters import Stalls, find_stalls, running_time_s, total
from slipstream.report.markup import Html, element, join
from slipstream.report.run import Run
from slipstream.report.wording import say_interval, say_moment
from slipstream.run.evaluation import Evaluation, Interval, Scenario
from slipstream.text import format_bytes, format_count, format_percent, format_ratio, format_seconds, plural

CANDIDATE_TITLES = {"policy_shield": "Policy with shield", "planner": "Planner, without learning"}


def headline(run: Run) -> Html:
    """Return the header of the page."""
    tiles = [*_progress_tiles(run), *_storage_tiles(run)]
    hero = None
    if run.evaluation is not None:
        hero = _hero(run.evaluation)
    facts = element("dl", *(_tile(*tile) for tile in tiles), class_="tiles") if tiles else None
    body = [part for part in (hero, facts) if part is not None]
    if not body:
        body = [element("p", "Nothing has been measured yet.", class_="note")]
    return join([element("h1", run.name), _when(run), element("div", *body, class_="headline")])


def _when(run: Run) -> Html:
    times = run.metrics["time"]
    times = times[np.isfinite(times)]
    words = []
    if len(times) and (begin := say_moment(times[0])) and (end := say_moment(times[-1])):
        words += [f"from {begin}", f"to {end}"]
    elif run.evaluation and run.evaluation.time and (moment := say_moment(run.evaluation.time)):
        words.append(f"evaluated {moment}")
    resumes = int(run.metrics.starts.sum()) - 1
    if resumes > 0:
        words.append(f"resumed {'once' if resumes == 1 else f'{resumes} times'}")
    said = ", ".join(words)
    return element("p", said[:1].upper() + said[1:], class_="when")


def _hero(evaluation: Evaluation) -> Html | None:
    """Return success in the main scenario, next to that of other candidates there."""
    scenario = evaluation.main
    success = None
    if scenario is not None:
        success = scenario.quantities.get("success")
    if scenario is None or success is None:
        return None
    interval = say_interval(success, percent=True)
    flown = "of flights"
    if scenario.episodes:
        flown = f"of {plural(scenario.episodes, 'flight')}"
    return element(
        "div",
        element("p", format_percent(success.mean), class_="number"),
        element("p", f"{flown} reached their goal", class_="what"),
        element("p", _where(scenario), class_="note"),
        interval_bar(success),
        element("p", f"95 % interval: {interval}", class_="note") if interval else "",
        _references(evaluation, scenario),
        class_="hero",
    )


def _where(scenario: Scenario) -> str:
    """Return where the flights of a scenario were."""
    words = []
    for key, what in (("num_maps", "map"), ("num_dynamic_obstacles", "moving obstacle")):
        number = scenario.facts.get(key)
        if number:
            words.append(plural(int(number), what))
    if not words:
        return scenario.title
    return f"{scenario.title} ({', '.join(words)})"


def _references(evaluation: Evaluation, main: Scenario) -> Html | str:
    """Return how other candidates did on the same flights."""
    lines = []
    for candidate, title in CANDIDATE_TITLES.items():
        for scenario in evaluation.scenarios:
            same_flights = scenario.name == main.name and not scenario.has_faults
            success = scenario.quantities.get("success")
            if scenario.candidate != candidate or not same_flights or success is None:
                continue
            interval = say_interval(success, percent=True)
            lines.append(element("li", f"{title}: {format_percent(success.mean)} ({interval})"))
    if not lines:
        return ""
    return element("ul", *lines, class_="references")


def interval_bar(quantity: Interval) -> Html:
    """Return a rate as a bar, with its interval."""

    def clamp(share: float) -> float:
        return round(100 * min(max(share, 0.0), 1.0), 2)

    mean = clamp(quantity.mean)
    begin = mean
    end = mean
    if quantity.is_known:
        begin = clamp(quantity.low)
        end = clamp(quantity.high)
    return element(
        "svg",
        element("rect", class_="track", x=0, y=3, width=100, height=4),
        element("rect", class_="fill", x=0, y=3, width=mean, height=4),
        element("rect", class_="range", x=begin, y=1, width=round(max(end - begin, 0.4), 2), height=8),
        class_="rate",
        viewBox="0 0 100 10",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _tile(label: str, value: str, note: str | None = None) -> Html:
    more = element("dd", note, class_="note") if note else ""
    return element("div", element("dt", label), element("dd", value, class_="number"), more, class_="tile")


def _progress_tiles(run: Run) -> list[tuple[str, str, str | None]]:
    metrics = run.metrics
    tiles: list[tuple[str, str, str | None]] = []
    frames, iterations = metrics.last("env_frames"), metrics.last("iteration")
    seconds = running_time_s(metrics)
    if frames is not None:
        tiles.append(("Frames", format_count(frames), None))
    if iterations is not None:
        tiles.append(("Iterations", format_count(iterations), None))
    if seconds is not None:
        tiles.append(("Wall time", format_seconds(seconds), "while a process ran"))
    rates = metrics["rollout_fps"][metrics.current]
    rates = rates[np.isfinite(rates)]
    if len(rates):
        tiles.append(("Frames per second", format_count(float(np.median(rates))), "median of iterations"))
    return tiles


def _storage_tiles(run: Run) -> list[tuple[str, str, str | None]]:
    tiles: list[tuple[str, str, str | None]] = []
    stalls = find_stalls(run.metrics)
    if stalls is not None:
        tiles.append(("Checkpoint stall", say_stall(stalls), f"per save, {format_count(stalls.num_saves)} saves"))
    for name, raw_key, stored_key in (
        ("Checkpoints", "ckpt/total_saved_bytes", "ckpt/total_compressed_bytes"),
        ("Rollouts", "rollouts/raw_bytes", "rollouts/stored_bytes"),
    ):
        raw, stored = total(run.metrics, raw_key), total(run.metrics, stored_key)
        if raw and stored:
            note = f"{format_bytes(raw)} in {format_bytes(stored)}"
            tiles.append((f"{name} packed", format_ratio(raw, stored), note))
    return tiles


def say_stall(stalls: Stalls) -> str:
    """Return how long a save holds training up, on average."""
    return format_seconds(stalls.per_save_ms / 1000)
