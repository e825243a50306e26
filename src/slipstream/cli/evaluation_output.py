"""What people see of an evaluation: progress while it flies, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from slipstream.text import plural

if TYPE_CHECKING:
    from slipstream.run.evaluation import Interval
    from slipstream.train.evaluation.compare import Comparison
    from slipstream.train.evaluation.flights import OnStep
    from slipstream.train.evaluation.jobs import Job
    from slipstream.train.evaluation.results import ScenarioResult
    from slipstream.train.groups import RaySettings
    from slipstream.train.processes import Processes
    from slipstream.train.settings import TrainSettings

_RATE_TITLES = {
    "static_collision": "hit\nstatic",
    "dynamic_collision": "hit\nmoving",
    "out_of_bounds": "out of\nbounds",
    "timeout": "time\nout",
}
_MAX_SENSORS = 28
_MEAN_TITLES = {"inside_share": "inside\nfield", "time_to_goal_s": "time\ns", "path_length_m": "path\nm"}


def fly_jobs(
    jobs: Sequence[Job],
    settings: TrainSettings,
    screen: Console,
    episodes: int,
    seed: int,
    processes: Processes | None = None,
    ray: RaySettings | None = None,
) -> list[ScenarioResult]:
    """Fly jobs with a progress bar for each; without a terminal, a line for each. Several processes have one bar.

    Args:
        jobs: What to fly.
        settings: Drones, sensor and rules.
        screen: Where to show progress.
        episodes: The number of flights of each job.
        seed: Of the flights.
        processes: Those that share the flights, if there are several.
        ray: The cluster that flies instead, if there is one.
    """
    from slipstream.train.evaluation.jobs import run_jobs  # noqa: PLC0415 - this module works without torch

    columns = (TextColumn("flying: {task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    remaining = TimeRemainingColumn(compact=True, elapsed_when_finished=True)
    with Progress(*columns, remaining, console=screen, disable=not screen.is_terminal) as progress:

        def start_progress(title: str) -> OnStep:
            if not screen.is_terminal:
                screen.print(f"flying: {title}")
            task = progress.add_task(title, total=episodes)

            def on_step(num_ended: int, total: int) -> None:
                progress.update(task, completed=num_ended, total=total)

            return on_step

        return run_jobs(
            jobs,
            settings,
            episodes=episodes,
            seed=seed,
            start_progress=start_progress,
            processes=processes,
            ray=ray,
        )


def results_table(results: Sequence[ScenarioResult]) -> Table:
    """Return a row for each scenario, narrow enough for 80 columns. `footnotes` says what the columns contain."""
    table = _make_table("scenario")
    for title in ("flights", "success\n(95 %)", *_RATE_TITLES.values(), *_MEAN_TITLES.values()):
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        cells = [result.scenario.name, str(result.episodes), rate_text(result.rates["success"])]
        # The table would not fit on a screen with the intervals of all columns; they are in the file.
        cells += [_percent(result.rates[name].mean) for name in _RATE_TITLES]
        inside = result.means["inside_share"]
        cells.append("-" if inside is None else _percent(inside.mean))
        for name in ("time_to_goal_s", "path_length_m"):
            mean = result.means[name]
            cells.append("-" if mean is None else f"{mean.mean:.1f}")
        table.add_row(*cells)
    return table


def robustness_table(results: Sequence[ScenarioResult]) -> Table:
    """Return a row for each combination of sensor faults: success of each candidate."""
    candidates = list(dict.fromkeys(result.flown.candidate for result in results))
    table = _make_table("scenario")
    # Three faults at once take two lines.
    table.add_column("sensors", max_width=_MAX_SENSORS)
    for candidate in candidates:
        table.add_column(f"success:\n{candidate.replace('_', ' with ')}", justify="right", no_wrap=True)
    # Candidates follow each other for each scenario and fault.
    for begin in range(0, len(results), len(candidates)):
        row = results[begin : begin + len(candidates)]
        faults = row[0].flown.sensors.describe() or "perfect"
        cells = [rate_text(result.rates["success"]) for result in row]
        table.add_row(row[0].scenario.name, faults, *cells)
    return table


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a row for each scenario: success of both policies. `verdicts` says what the difference means."""
    table = _make_table("scenario")
    for title in ("flights", "success of A", "success of B"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in comparisons:
        first = rate_text(one.first.rates["success"])
        second = rate_text(one.second.rates["success"])
        table.add_row(one.first.scenario.name, str(one.first.episodes), first, second)
    return table


def verdicts(comparisons: Sequence[Comparison], names: tuple[str, str]) -> list[str]:
    """Return which policies were compared, and for each scenario whether their difference is significant."""
    lines = [f"A: {names[0]}", f"B: {names[1]}"]
    lines += [f"{one.first.scenario.name}: {one.verdict(*names)}" for one in comparisons]
    return lines


def footnotes(results: Sequence[ScenarioResult]) -> list[str]:
    """Return what a reader of the table should know about its scenarios, units and intervals."""
    lines = []
    for result in results:
        maps = plural(len(result.scenario.map_seeds), "map")
        lines.append(f"{result.scenario.name}: {result.flown.title}; {maps}")
    lines += [
        "Rates are in percent, times in seconds, paths in metres. All intervals are in the file. They account",
        "for flights that share a map, and meet the same obstacles.",
    ]
    single = [result.flown.title for result in results if result.interval == "assumed"]
    if single:
        lines.append(
            f"{', '.join(single)}: one map does not show how maps differ, so their intervals assume that flights are "
            "correlated. Fly more maps."
        )
    return lines


def rate_text(rate: Interval) -> str:
    """Return a rate with its 95 % interval, in percent."""
    return f"{_percent(rate.mean)} ({_percent(rate.low)}-{_percent(rate.high)})"


def _percent(share: float) -> str:
    # 100.0 would make the column wider than any other value.
    return f"{100 * share:.1f}".removesuffix(".0")


def _make_table(first: str) -> Table:
    """Return an empty table with its first column. Without padding, the box puts one space between columns."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column(first, no_wrap=True)
    return table
