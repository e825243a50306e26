"""HTML pages that need nothing but themselves: scripts, styles and data are in them."""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from slipstream import __version__
from slipstream.errors import ConfigurationError
from slipstream.report import costs, tables
from slipstream.report.charts import Chart, learning_charts, stall_chart, time_charts
from slipstream.report.comparison import Comparison, compare_runs
from slipstream.report.counters import find_stalls
from slipstream.report.drawing import draw_chart, draw_flights
from slipstream.report.run import Run, read_run
from slipstream.store.local import atomic_write
from slipstream.text import install_hint

FILE_NAME = "report.html"
COMPARISON_NAME = "comparison.html"
NO_SCRIPT = "'none'"
TITLES = {
    "problems": "Problems",
    "flights": "Flights",
    "learning": "Learning",
    "evaluation": "Evaluation",
    "time": "Time",
    "storage": "Storage",
    "configuration": "Configuration",
    "results": "Results",
    "settings": "Settings",
}

_logger = logging.getLogger(__name__)


def write_report(run: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write a run folder as one HTML page that works offline; blocks until it is complete and durable.

    The page makes no request of any kind. An older report is replaced as a whole or not at all. Text from the run's
    files is shown and never executed. What is damaged is left out, named in the page and logged as a warning. Takes
    memory for the metrics, and for one rollout at a time, recorded or saved by the training.

    Args:
        run: The run folder, or a link to it such as ``runs/last``; may still be growing.
        output: The file to create or replace; by default ``report.html`` in the run folder.

    Returns:
        The file that was written.

    Raises:
        FileNotFoundError: If there is no such folder.
        ConfigurationError: If it is not a run folder, or plotly is not installed.
        WriteError: If the page cannot be written.

    Example:
        >>> folder = Path("/tmp/slipstream-doc/runs/demo")
        >>> folder.mkdir(parents=True, exist_ok=True)
        >>> _ = (folder / "metrics.jsonl").write_text('{"iteration": 1, "env_frames": 4096, "entropy": 2.1}')
        >>> write_report(folder).name
        'report.html'
    """
    found = read_run(run)
    _warn(found.problems)
    return save_page(found, output)


def write_comparison(runs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None) -> Path:
    """Write several runs as one HTML page: results side by side, settings that differ, and curves in one chart each.

    Otherwise as `write_report`.

    Args:
        runs: Two to eight run folders, or links to them.
        output: The file to create or replace; by default ``comparison.html`` beside the first run folder.

    Returns:
        The file that was written.

    Raises:
        FileNotFoundError: If there is no such folder.
        ConfigurationError: If one is not a run folder, there are too few or too many, or plotly is not installed.
        WriteError: If the page cannot be written.

    Example:
        >>> for name, entropy in {"one": 2.1, "two": 1.9}.items():
        ...     folder = Path("/tmp/slipstream-doc/runs", name)
        ...     folder.mkdir(parents=True, exist_ok=True)
        ...     line = f'{{"iteration": 1, "env_frames": 4096, "entropy": {entropy}}}'
        ...     _ = (folder / "metrics.jsonl").write_text(line)
        >>> write_comparison(["/tmp/slipstream-doc/runs/one", "/tmp/slipstream-doc/runs/two"]).name
        'comparison.html'
    """
    compared = compare_runs([read_run(run) for run in runs])
    _warn(compared.problems)
    return save_comparison(compared, output)


def save_page(run: Run, output: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run that was read; see `write_report`."""
    path = run.folder / FILE_NAME
    if output is not None:
        path = Path(output)
    return _save(path, render_page(run))


def save_comparison(compared: Comparison, output: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of runs that were compared; see `write_comparison`."""
    path = compared.folder / COMPARISON_NAME
    if output is not None:
        path = Path(output)
    return _save(path, render_comparison(compared))


def render_page(run: Run) -> str:
    """Return the page of a run.

    Raises:
        ConfigurationError: If plotly, whose script draws the charts, is not installed.
    """
    stalls = find_stalls(run.metrics)
    storage_charts: list[Chart] = []
    if stalls is not None:
        storage_charts = list(filter(None, [stall_chart(stalls, run.metrics.x[1])]))
    parts: dict[str, Any] = {
        "problems": run.problems,
        "flights": run.flights,
        "learning": learning_charts(run.metrics, run.evaluations),
        "evaluation": None,
        "time_charts": time_charts(run.metrics),
        "storage": costs.storage_table(run),
        "listings": costs.file_listings(run),
        "config": run.config,
        "storage_charts": storage_charts,
    }
    if run.evaluation is not None:
        parts["evaluation"] = tables.evaluation_table(run.evaluation)
        parts["evaluation_about"] = tables.about_evaluation(run.evaluation)
        parts["other_evaluations"] = tables.other_evaluations(run.evaluations, run.evaluation)
        parts["num_others"] = len(run.evaluations) - 1
    if run.flights:
        parts |= _flight_parts(run)
    blocks: list[tuple[str, Any]] = []
    for number, scene in enumerate(run.flights):
        blocks.append((f"flights-{number}", {**scene.packed, "source": scene.source}))
    present = {
        "problems": run.problems,
        "flights": run.flights,
        "learning": parts["learning"],
        "evaluation": parts["evaluation"],
        "time": parts["time_charts"],
        "storage": parts["storage"] or parts["listings"],
        "configuration": run.config,
    }
    return _render(
        "run.html",
        run.name,
        present,
        [*parts["learning"], *parts["time_charts"], *storage_charts],
        blocks,
        **parts,
        when=tables.when(run),
        hero=tables.hero(run.evaluation),
        tiles=tables.tiles(run),
        thinned=tables.thinned_note(run.metrics),
        time_table=costs.time_table(run.metrics),
        time_note=costs.time_note(run.metrics),
        storage_notes=costs.storage_notes(run),
    )


def render_comparison(compared: Comparison) -> str:
    """Return the page of several runs.

    Raises:
        ConfigurationError: If plotly, whose script draws the charts, is not installed.
    """
    parts: dict[str, Any] = {
        "problems": compared.problems,
        "results": compared.results,
        "settings": compared.settings,
        "learning": compared.charts,
    }
    present = {**parts, "settings": True}
    names = list(zip(compared.names, compared.colors, strict=True))
    return _render("comparison.html", " / ".join(compared.names), present, compared.charts, [], **parts, names=names)


def _flight_parts(run: Run) -> dict[str, Any]:
    """Return which scene is shown first, and what readers without scripts see of it."""
    first = 0
    for number, scene in enumerate(run.flights):
        if scene.is_main:
            first = number
    return {
        "first": first,
        "flight_map": draw_flights(run.flights[first].packed),
        "scene_table": tables.scene_table(run.flights),
    }


def _render(
    template: str,
    title: str,
    present: Mapping[str, Any],
    charts: Sequence[Chart],
    blocks: Sequence[tuple[str, Any]],
    **parts: Any,
) -> str:
    """Return a page.

    Args:
        template: Its template.
        title: Its title.
        present: The sections in order; those that are empty are left out of the contents.
        charts: All charts on the page.
        blocks: Other data for scripts, by the name of its element.
        parts: What else the template shows.
    """
    scripts = []
    if parts.get("flights"):
        scripts.append(_asset("flights.js"))
    if charts:
        scripts += [_plotly(), _asset("charts.js")]
    return (
        _templates()
        .get_template(template)
        .render(
            **parts,
            title=title,
            version=__version__,
            policy=_policy(scripts),
            style=_asset("style.css"),
            contents=[(name, TITLES[name]) for name, content in present.items() if content],
            drawings={chart.identifier: draw_chart(chart) for chart in charts},
            blocks=[("charts", {chart.identifier: chart.data for chart in charts}), *blocks],
            scripts=scripts,
        )
    )


@functools.cache
def _templates() -> jinja2.Environment:
    """Return the templates. What is put into them is text and escaped, unless it is `Markup`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("slipstream.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # JSON in a script element: `tojson` writes <, > and & so that no text can end the element.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def _save(path: Path, page: str) -> Path:
    with atomic_write(path) as file:
        # The names of files need not be text.
        file.write(page.encode("utf-8", "backslashreplace"))
    return path


def _warn(problems: Iterable[str]) -> None:
    for problem in problems:
        _logger.warning("%s", problem)


def _plotly() -> Markup:
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - only pages with charts need it
    except ImportError as error:
        raise ConfigurationError(
            f"charts need plotly, which is not installed: {install_hint('train')}, or plotly by itself"
        ) from error
    return Markup(get_plotlyjs())  # noqa: S704 - the script of an installed package


def _asset(name: str) -> Markup:
    text = (resources.files("slipstream.report") / "assets" / name).read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704 - a file of this package


def _policy(scripts: Iterable[str]) -> str:
    """Return a content security policy: only these scripts run, and nothing is loaded from anywhere."""
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed or NO_SCRIPT}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
