"""``slipstream report``: a run folder as one HTML page."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import JsonOption

if TYPE_CHECKING:
    from slipstream.report.run import Run

EXAMPLE = "slipstream report runs/last --open"


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or a link to it: runs/last.", show_default=False)
    ],
    *,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it; by default report.html in RUN.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in a browser afterwards.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a run as one HTML page that works offline: flights, curves, evaluations, where time went, what was saved.

    What is damaged is left out and named, in the page and on stderr.
    """
    from slipstream.cli.output import plain, print_json, print_lines
    from slipstream.report.page import save_page
    from slipstream.report.run import read_run
    from slipstream.text import plural

    found = read_run(run)
    for problem in found.problems:
        typer.echo(f"slipstream: warning: {plain(problem).plain}", err=True)
    path = save_page(found, output)
    if json:
        print_json(_document(found, path))
    else:
        parts = (
            plural(found.metrics.num_lines, "line") + " of metrics",
            plural(len(found.evaluations), "evaluation"),
            "flights of " + plural(len(found.flights), "scenario"),
        )
        print_lines(f"{path}: {', '.join(parts)}")
    if open_page and typer.launch(str(path.resolve())):
        typer.echo(f"slipstream: warning: no browser could be started for {plain(str(path)).plain}", err=True)


def _document(run: Run, path: Path) -> dict[str, Any]:
    metrics = run.metrics
    return {
        "report": str(path),
        "bytes": path.stat().st_size,
        "run": run.name,
        "metrics_lines": metrics.num_lines,
        "metrics_lines_left_out": metrics.num_skipped,
        "iteration": metrics.last("iteration"),
        "env_frames": metrics.last("env_frames"),
        "evaluations": [evaluation.name for evaluation in run.evaluations],
        "flights": [scene.name for scene in run.flights],
        "problems": list(run.problems),
    }
