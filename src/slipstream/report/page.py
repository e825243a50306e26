"""One HTML page that needs nothing but itself: scripts, styles and data are in it."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.errors import ConfigurationError
from slipstream.report import sections
from slipstream.report.charts import Chart
from slipstream.report.headline import headline
from slipstream.report.markup import Html, data_block, element, join, section, text
from slipstream.report.run import Run, read_run
from slipstream.store.local import atomic_write
from slipstream.text import install_hint

FILE_NAME = "report.html"

_logger = logging.getLogger(__name__)


def write_report(run: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write a run folder as one HTML page that works offline; blocks until it is complete and durable.

    The page makes no request of any kind. An older report is replaced as a whole or not at all. Text from the run's
    files is shown and never executed. What is damaged is left out, named in the page and logged as a warning. Takes
    memory for the metrics and the recorded flights of one scenario at a time.

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
    for problem in found.problems:
        _logger.warning("%s", problem)
    return save_page(found, output)


def save_page(run: Run, output: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run that was read; see `write_report`."""
    path = run.folder / FILE_NAME if output is None else Path(output)
    page = render_page(run).encode("utf-8", "backslashreplace")  # names of files need not be text
    with atomic_write(path) as file:
        file.write(page)
    return path


def render_page(run: Run) -> str:
    """Return the page of a run.

    Raises:
        ConfigurationError: If plotly, whose script draws the charts, is not installed.
    """
    parts: dict[str, Html | None] = {"problems": sections.problems(run), "flights": _flights(run)}
    charts: list[Chart] = []
    for name, made in (
        ("learning", sections.learning(run)),
        ("evaluation", sections.evaluations(run)),
        ("time", sections.time(run)),
        ("storage", sections.storage(run)),
        ("configuration", sections.configuration(run)),
    ):
        if isinstance(made, tuple):
            parts[name], drawn = made
            charts += drawn
        else:
            parts[name] = made
    present = {name: part for name, part in parts.items() if part is not None}
    scripts = [_asset("flights.js")] if run.flights else []
    if charts:
        scripts += [_plotly(), _asset("charts.js")]
    blocks = [data_block("charts", {chart.identifier: chart.data for chart in charts})]
    blocks += [
        data_block(f"flights-{number}", {**scene.packed, "source": scene.source})
        for number, scene in enumerate(run.flights)
    ]
    return _fill(
        _asset("page.html"),
        {
            "policy": _policy(scripts),
            "title": text(f"{run.name} - Slipstream report"),
            "style": _asset("style.css"),
            "headline": headline(run),
            "contents": _contents(present),
            "sections": join(present.values()),
            "version": text(__version__),
            "data": join(blocks),
            "scripts": join(Html(f"<script>{script}</script>") for script in scripts),
        },
    )


def _contents(present: Mapping[str, Html]) -> Html:
    """Return links to the sections that there are."""
    titles = {
        "problems": "Problems",
        "flights": "Flights",
        "learning": "Learning",
        "evaluation": "Evaluation",
        "time": "Time",
        "storage": "Storage",
        "configuration": "Configuration",
    }
    links = (element("li", element("a", titles[name], href=f"#{name}")) for name in present)
    return element("nav", element("ul", *links), aria_label="Sections")


def _flights(run: Run) -> Html | None:
    """Return the player, if there is something to play."""
    if not run.flights:
        return None
    first = 0
    for number, scene in enumerate(run.flights):
        if scene.is_main:
            first = number
    choices = [
        element("label", _radio(number, checked=number == first), element("span", scene.title))
        for number, scene in enumerate(run.flights)
    ]
    slots = {"scenarios": join(choices), "source": text(run.flights[first].source)}
    return section("flights", "Flights", Html(_fill(_asset("flights.html"), slots)))


def _radio(number: int, *, checked: bool) -> Html:
    return Html(f'<input type="radio" name="scenario" value="{number}"{" checked" if checked else ""}>')


def _plotly() -> Html:
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - only pages with charts need it
    except ImportError as error:
        raise ConfigurationError(
            f"charts need plotly, which is not installed: {install_hint('train')}, or plotly by itself"
        ) from error
    return Html(get_plotlyjs())


def _asset(name: str) -> Html:
    return Html((resources.files("slipstream.report") / "assets" / name).read_text(encoding="utf-8"))


def _policy(scripts: list[Html]) -> Html:
    """Return a content security policy: nothing but our own scripts runs, and nothing is loaded from anywhere."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests) or "'none'"
    return Html(
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def _fill(template: Html, slots: Mapping[str, Any]) -> str:
    """Return a template with its slots filled, in one pass: what is put in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(slots[match[1]]), template)
