"""``slipstream report``: one or more run folders as one HTML page."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import JsonOption

if TYPE_CHECKING:
    from slipstream.report.comparison import Comparison
    from slipstream.report.run import Run

EXAMPLE = "slipstream report runs/last --open"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or links to them: runs/last.", show_default=False),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write it; by default report.html in RUN, or comparison.html beside the first of several.",
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in a browser afterwards.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a run as one HTML page that works offline: flights, curves, evaluations, where time went, what was saved.

    Several runs are compared: results side by side, the settings that differ, and their curves in one chart each.
    What is damaged is left out and named, in the page and on stderr.
    """
    from slipstream.cli.output import plain, print_json, print_lines
    from slipstream.report.comparison import compare_runs
    from slipstream.report.page import save_comparison, save_page
    from slipstream.report.run import read_run

    found = [read_run(run) for run in runs]
    if len(found) == 1:
        problems = found[0].problems
        path = save_page(found[0], output)
        document = {"report": str(path), "bytes": path.stat().st_size, **_document(found[0])}
        line = f"{path}: {_summary(found[0])}"
    else:
        compared = compare_runs(found)
        problems = tuple(compared.problems)
        path = save_comparison(compared, output)
        document = {"report": str(path), "bytes": path.stat().st_size, "runs": [_document(run) for run in found]}
        document["differing_settings"] = compared.differing
        line = f"{path}: {', '.join(compared.names)}; {_count_settings(compared)}"
    for problem in problems:
        typer.echo(f"slipstream: warning: {plain(problem).plain}", err=True)
    if json:
        print_json(document)
    else:
        print_lines(line)
    if open_page and typer.launch(str(path.resolve())):
        typer.echo(f"slipstream: warning: no browser could be started for {plain(str(path)).plain}", err=True)


def _summary(run: Run) -> str:
    from slipstream.text import plural

    parts = (
        plural(run.metrics.num_lines, "line") + " of metrics",
        plural(len(run.evaluations), "evaluation"),
        "flights of " + plural(len(run.flights), "scenario"),
    )
    return ", ".join(parts)


def _count_settings(compared: Comparison) -> str:
    from slipstream.text import plural

    count = len(compared.differing)
    if count == 1:
        return "1 setting differs"
    return f"{plural(count, 'setting')} differ"


def _document(run: Run) -> dict[str, Any]:
    metrics = run.metrics
    return {
        "run": run.name,
        "metrics_lines": metrics.num_lines,
        "metrics_lines_left_out": metrics.num_skipped,
        "iteration": metrics.last("iteration"),
        "env_frames": metrics.last("env_frames"),
        "evaluations": [evaluation.name for evaluation in run.evaluations],
        "flights": [scene.name for scene in run.flights],
        "problems": list(run.problems),
    }
