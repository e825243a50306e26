"""Evaluations of a run: what a policy was measured to do, read from JSON that anyone may have edited."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.report.numbers import number_of
from slipstream.store.local import open_regular

FORMAT, VERSION = "slipstream.evaluation", 1
MAX_FILE_BYTES = 1 << 20
MAX_SCENARIOS = 50
RATES = ("success", "static_collision", "dynamic_collision", "out_of_bounds", "timeout")
AMOUNTS = ("time_to_goal_s", "path_length_m", "return")


@dataclass(frozen=True)
class Quantity:
    """A mean and its 95 % interval, which may be unknown."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Scenario:
    """How a policy did in one scenario.

    Attributes:
        name: Its name.
        title: Its name as people read it.
        episodes: How many there were.
        quantities: What was measured, by name; what has no sample is not in it.
        flights: The file of recorded flights, beside the evaluation.
        facts: Numbers that describe it, such as ``num_static_obstacles``.
    """

    name: str
    title: str
    episodes: int | None = None
    quantities: Mapping[str, Quantity] = field(default_factory=dict)
    flights: str | None = None
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one checkpoint, in several scenarios."""

    name: str
    scenarios: tuple[Scenario, ...]
    iteration: float | None = None
    env_frames: float | None = None
    time: float | None = None
    checkpoint: str | None = None
    action: str | None = None

    def scenario(self, name: str) -> Scenario | None:
        """Return the scenario of a name."""
        return next((scenario for scenario in self.scenarios if scenario.name == name), None)

    @property
    def main(self) -> Scenario | None:
        """The scenario that says most: a map that the policy has never seen."""
        return self.scenario("unseen") or next(iter(self.scenarios), None)


def read_evaluation(path: Path) -> Evaluation:
    """Read an evaluation.

    Raises:
        CorruptFileError: If the file is damaged, or something else.
        FormatVersionError: If a newer release wrote it.
        OSError: If it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise CorruptFileError(f"{path}: is not an evaluation, it has more than {MAX_FILE_BYTES} bytes")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: is not JSON ({type(error).__name__})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptFileError(f"{path}: is not an evaluation, expected a JSON object with the format {FORMAT!r}")
    if document.get("version") != VERSION:
        raise FormatVersionError(f"{path}: is of version {document.get('version')!r}, expected {VERSION}")
    scenarios = document.get("scenarios")
    if not isinstance(scenarios, list) or not all(isinstance(item, dict) for item in scenarios):
        raise CorruptFileError(f"{path}: has no list of scenarios")
    if len(scenarios) > MAX_SCENARIOS:
        raise CorruptFileError(f"{path}: has {len(scenarios)} scenarios, expected at most {MAX_SCENARIOS}")
    return Evaluation(
        name=path.stem,
        scenarios=tuple(_scenario(item, number) for number, item in enumerate(scenarios, 1)),
        iteration=number_of(document.get("iteration")),
        env_frames=number_of(document.get("env_frames")),
        time=number_of(document.get("time")),
        checkpoint=_text(document.get("checkpoint")),
        action=_text(document.get("action")),
    )


def _scenario(item: dict[str, Any], number: int) -> Scenario:
    name = _text(item.get("name")) or f"scenario {number}"
    episodes = number_of(item.get("episodes"))
    measured = ((key, _quantity(item.get(key))) for key in (*RATES, *AMOUNTS))
    facts = ((key, number_of(item.get(key))) for key in ("map_seed", "num_static_obstacles", "num_dynamic_obstacles"))
    return Scenario(
        name=name,
        title=_text(item.get("title")) or name,
        episodes=None if episodes is None else round(episodes),
        quantities={key: quantity for key, quantity in measured if quantity is not None},
        flights=_text(item.get("flights")),
        facts={key: fact for key, fact in facts if fact is not None},
    )


def _quantity(value: Any) -> Quantity | None:
    if not isinstance(value, dict) or (mean := number_of(value.get("mean"))) is None:
        return None
    low, high = number_of(value.get("low")), number_of(value.get("high"))
    return Quantity(mean, low, high) if low is not None and high is not None else Quantity(mean)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
