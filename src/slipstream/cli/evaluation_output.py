"""What people see of an evaluation: progress while it flies, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from slipstream.run.evaluation import Interval
    from slipstream.train.evaluation.compare import Comparison
    from slipstream.train.evaluation.flights import OnStep
    from slipstream.train.evaluation.jobs import Job
    from slipstream.train.evaluation.results import ScenarioResult
    from slipstream.train.groups import RaySettings
    from slipstream.train.processes import Processes
    from slipstream.train.settings import TrainSettings

_RATES = ("success", "static_collision", "dynamic_collision", "out_of_bounds", "timeout")
_MEAN_TITLES = {"inside_share": "inside field", "time_to_goal_s": "time to goal s", "path_length_m": "path length m"}


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
    """Return a row for each scenario and candidate."""
    table = Table("scenario", "flights", "maps")
    for name in _RATES:
        table.add_column(name.replace("_", " "), justify="right")
    for title in _MEAN_TITLES.values():
        table.add_column(title, justify="right")
    for result in results:
        cells = [result.flown.title, str(result.episodes), str(len(result.scenario.map_seeds))]
        cells.append(rate_text(result.rates["success"]))
        # The table would not fit on a screen with the intervals of all rates; they are in the file.
        cells += [f"{result.rates[name].mean:.3f}" for name in _RATES[1:]]
        cells.append(rate_text(result.means["inside_share"]))
        cells.append(_mean_text(result.means["time_to_goal_s"]))
        cells.append(_mean_text(result.means["path_length_m"]))
        table.add_row(*cells)
    return table


def robustness_table(results: Sequence[ScenarioResult]) -> Table:
    """Return a row for each combination of sensor faults: success of each candidate."""
    candidates = list(dict.fromkeys(result.flown.candidate for result in results))
    table = Table("scenario", "sensors")
    for candidate in candidates:
        table.add_column(f"success: {candidate.replace('_', ' with ')}", justify="right")
    # Candidates follow each other for each scenario and fault.
    for begin in range(0, len(results), len(candidates)):
        row = results[begin : begin + len(candidates)]
        faults = row[0].flown.sensors.describe() or "perfect"
        cells = [rate_text(result.rates["success"]) for result in row]
        table.add_row(row[0].scenario.name, faults, *cells)
    return table


def comparison_table(comparisons: Sequence[Comparison], names: tuple[str, str]) -> Table:
    """Return a row for each scenario: success of both, and whether the difference is significant."""
    table = Table("scenario", "flights", f"success: {names[0]}", f"success: {names[1]}", "difference")
    for one in comparisons:
        first = rate_text(one.first.rates["success"])
        second = rate_text(one.second.rates["success"])
        table.add_row(one.first.scenario.title, str(one.first.episodes), first, second, one.verdict(*names))
    return table


def footnotes(results: Sequence[ScenarioResult]) -> list[str]:
    """Return what a reader of the table should know about its intervals."""
    lines = [
        "95 % intervals account for flights that share a map, and meet the same obstacles. The file has the intervals "
        "of all columns."
    ]
    single = [result.flown.title for result in results if result.interval == "assumed"]
    if single:
        lines.append(
            f"{', '.join(single)}: one map does not show how maps differ, so their intervals assume that flights are "
            "correlated. Fly more maps."
        )
    return lines


def rate_text(rate: Interval | None) -> str:
    """Return a rate with its interval."""
    if rate is None:
        return "-"
    return f"{rate.mean:.3f} [{rate.low:.3f}, {rate.high:.3f}]"


def _mean_text(mean: Interval | None) -> str:
    if mean is None:
        return "-"
    if math.isinf(mean.high):
        # A single flight says nothing about others.
        return f"{mean.mean:.1f}"
    return f"{mean.mean:.1f} [{mean.low:.1f}, {mean.high:.1f}]"
