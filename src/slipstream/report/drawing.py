"""Charts and flights as drawings without scripts: for readers that block them, and before they have run."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.report.charts import Chart
from slipstream.run.evaluation import OUTCOMES

WIDTH = 400
HEIGHT = 170
MAX_POINTS = 150  # of a static curve
MAX_PATH_POINTS = 60
BORDER_M = 2.0
# The colours of outcomes in the style sheet, in the order of `OUTCOMES`.
COLORS = ("flying", "reached", "static", "dynamic", "bounds", "timeout")


@dataclass(frozen=True)
class Line:
    """A curve: its name, colour, and points as an SVG attribute."""

    name: str
    color: str
    points: str


@dataclass(frozen=True)
class Part:
    """A part of a stacked bar."""

    name: str
    color: str
    x: float
    width: float


@dataclass(frozen=True)
class Drawing:
    """A chart that needs no script.

    Attributes:
        lines: Its curves.
        parts: The parts of its bar, if it is one.
        low: The least value, as text.
        high: The greatest.
        first: The first place on the x axis.
        last: The last.
    """

    lines: Sequence[Line]
    parts: Sequence[Part]
    low: str = ""
    high: str = ""
    first: str = ""
    last: str = ""


@dataclass(frozen=True)
class FlightMap:
    """Recorded flights from above, with north up: y is negated.

    Attributes:
        view: The ``viewBox``.
        half_m: Half the side of the field.
        boxes: West, north, width and height of each box.
        lines: The path of each drone.
    """

    view: str
    half_m: float
    boxes: Sequence[Sequence[float]]
    lines: Sequence[Line]


def draw_chart(chart: Chart) -> Drawing:
    """Return a chart as a drawing."""
    series = chart.data["series"]
    if chart.data["kind"] == "stack":
        return Drawing([], _stack(series))
    x = list(itertools.chain.from_iterable(one["x"] for one in series))
    y = list(itertools.chain.from_iterable(one["y"] for one in series))
    first = min(x)
    last = max(x)
    low = min(y)
    high = max(y)
    if chart.data.get("percent") or chart.data.get("zero"):
        low = min(low, 0)
    across = WIDTH / ((last - first) or 1)
    up = HEIGHT / ((high - low) or 1)
    lines = []
    for one in series:
        places = _thin(len(one["x"]), MAX_POINTS)
        shown_x = (np.array(one["x"], float)[places] - first) * across
        shown_y = HEIGHT - (np.array(one["y"], float)[places] - low) * up
        if len(places) == 1:
            # A line of no length and with round ends is a dot.
            shown_x = np.repeat(shown_x, 2)
            shown_y = np.repeat(shown_y, 2)
        points = " ".join(f"{at:.1f},{value:.1f}" for at, value in zip(shown_x, shown_y, strict=True))
        lines.append(Line(one["name"], one["color"], points))
    form = "{:,.4g}"
    if chart.data.get("percent"):
        form = "{:.0%}"
    return Drawing(lines, [], form.format(low), form.format(high), f"{first:,.6g}", f"{last:,.6g} {chart.data['x']}")


def _stack(series: Sequence[dict[str, Any]]) -> list[Part]:
    whole = sum(one["value"] for one in series) or 1
    parts = []
    x = 0.0
    for number, one in enumerate(series):
        width = WIDTH * one["value"] / whole
        parts.append(Part(f"{one['name']} {one['value']:.3g} s", "abcdefg"[number % 7], round(x, 1), round(width, 1)))
        x += width
    return parts


def draw_flights(packed: dict[str, Any]) -> FlightMap:
    """Return packed flights as a drawing; see `slipstream.report.flights` for how they are packed."""
    positions = np.frombuffer(base64.b64decode(packed["positions"]), "<i2").reshape(-1, 3) * packed["step_m"]
    lines = []
    first = 0
    for begin, end, outcome in zip(packed["begins"], packed["ends"], packed["outcomes"], strict=True):
        count = -(-(end - begin) // packed["stride"]) + 1
        path = positions[first : first + count]
        points = [f"{path[place, 0]:.2f},{-path[place, 1]:.2f}" for place in _thin(count, MAX_PATH_POINTS)]
        lines.append(Line(OUTCOMES[outcome], COLORS[outcome], " ".join(points)))
        first += count
    half = packed["half_extent_m"]
    # One drone that flew far off should not make all others small.
    reach = min(max(half, float(np.abs(positions[:, :2]).max())), 1.5 * half) + BORDER_M
    boxes = []
    for west, south, east, north, _ in packed["boxes"]:
        boxes.append((round(west, 2), round(-north, 2), round(east - west, 2), round(north - south, 2)))
    return FlightMap(f"{-reach:.1f} {-reach:.1f} {2 * reach:.1f} {2 * reach:.1f}", half, boxes, lines)


def _thin(count: int, most: int) -> list[int]:
    """Return evenly spaced places of a curve, with the first and the last one."""
    places: list[int] = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()
    return places
