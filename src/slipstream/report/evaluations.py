"""Evaluations of a run, read from JSON that anyone may have edited."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.report.numbers import number_of
from slipstream.store.local import open_regular

FORMAT = "slipstream.evaluation"
VERSION = 2
MAX_FILE_BYTES = 1 << 20
MAX_SCENARIOS = 150
RATES = ("success", "static_collision", "dynamic_collision", "out_of_bounds", "timeout")
AMOUNTS = ("inside_share", "time_to_goal_s", "path_length_m", "return")
POLICY = "policy"
MAIN_SCENARIO = "through"


@dataclass(frozen=True)
class Quantity:
    """A mean and its 95 % interval, which may be unknown."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Scenario:
    """How well a candidate did in one scenario.

    Attributes:
        name: Its name.
        title: Its name as people read it, with the candidate and sensor faults.
        episodes: The number of flights.
        quantities: What was measured, by name; what has no sample is not in it.
        flights: The file of recorded flights, beside the evaluation.
        facts: Numbers that describe it, such as ``num_static_obstacles``.
        candidate: What flew: ``policy``, ``policy_shield``, ``planner``.
        has_faults: Whether sensors were noisy or late.
    """

    name: str
    title: str
    episodes: int | None = None
    quantities: Mapping[str, Quantity] = field(default_factory=dict)
    flights: str | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    candidate: str = POLICY
    has_faults: bool = False

    @property
    def is_standard(self) -> bool:
        """Whether the policy flew by itself, with perfect sensors."""
        return self.candidate == POLICY and not self.has_faults


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one checkpoint, in several scenarios.

    Attributes:
        changes: How its conditions differ from the standard ones, as text; empty if they do not.
    """

    name: str
    scenarios: tuple[Scenario, ...]
    iteration: float | None = None
    env_frames: float | None = None
    time: float | None = None
    checkpoint: str | None = None
    action: str | None = None
    changes: tuple[str, ...] = ()

    def scenario(self, name: str) -> Scenario | None:
        """Return the scenario of a name that the policy flew by itself, with perfect sensors."""
        return next((one for one in self.scenarios if one.name == name and one.is_standard), None)

    @property
    def main(self) -> Scenario | None:
        """The scenario that says most: through unseen maps with moving obstacles."""
        # Evaluations of version 1 have no flights through the field.
        return self._through_field or next(iter(self.scenarios), None)

    @property
    def _through_field(self) -> Scenario | None:
        return self.scenario(MAIN_SCENARIO) or self.scenario("unseen")

    @property
    def is_standard(self) -> bool:
        """Whether a policy was flown under the conditions of its training."""
        return not self.changes and any(scenario.is_standard for scenario in self.scenarios)

    @property
    def rank(self) -> int:
        """How much it says about the policy: 2 with the main scenario under standard conditions, 1 with others."""
        if not self.is_standard:
            return 0
        if self._through_field is None:
            return 1
        return 2


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
    version = document.get("version")
    if version not in (1, VERSION):
        raise FormatVersionError(f"{path}: is of version {version!r}, expected {VERSION}")
    # Version 1 has one result for each scenario.
    scenarios = document.get("scenarios" if version == 1 else "results")
    conditions = document.get("conditions")
    if not isinstance(conditions, dict):
        conditions = {}
    if not isinstance(scenarios, list) or not all(isinstance(item, dict) for item in scenarios):
        raise CorruptFileError(f"{path}: has no list of results")
    if len(scenarios) > MAX_SCENARIOS:
        raise CorruptFileError(f"{path}: has {len(scenarios)} results, expected at most {MAX_SCENARIOS}")
    return Evaluation(
        name=path.stem,
        scenarios=tuple(_scenario(item, number) for number, item in enumerate(scenarios, 1)),
        iteration=number_of(document.get("iteration")),
        env_frames=number_of(document.get("env_frames")),
        time=number_of(document.get("time")),
        checkpoint=_text(document.get("checkpoint")),
        action=_text(document.get("action")) or _text(conditions.get("action")),
        changes=_changes(conditions),
    )


def _scenario(item: dict[str, Any], number: int) -> Scenario:
    name = _text(item.get("scenario")) or _text(item.get("name")) or f"scenario {number}"
    episodes = number_of(item.get("episodes"))
    measured = ((key, _quantity(item.get(key))) for key in (*RATES, *AMOUNTS))
    names = ("map_seed", "num_static_obstacles", "num_dynamic_obstacles")
    facts = {key: fact for key in names if (fact := number_of(item.get(key))) is not None}
    seeds = item.get("map_seeds")
    if "map_seed" not in facts and isinstance(seeds, list):
        facts["num_maps"] = len(seeds)
    sensors = item.get("sensors")
    has_faults = isinstance(sensors, dict) and any(sensors.values())
    return Scenario(
        name=name,
        title=_text(item.get("title")) or name,
        episodes=None if episodes is None else round(episodes),
        quantities={key: quantity for key, quantity in measured if quantity is not None},
        flights=_text(item.get("flights")),
        facts=facts,
        candidate=_text(item.get("candidate")) or POLICY,
        has_faults=has_faults,
    )


def _changes(conditions: dict[str, Any]) -> tuple[str, ...]:
    """Return how the conditions of an evaluation differ from the standard ones."""
    changes = []
    if conditions.get("faithful") is True:
        changes.append("NavRL's dynamics")
    if conditions.get("action") == "sample":
        changes.append("sampled actions")
    overrides = conditions.get("overrides")
    if isinstance(overrides, list):
        changes += [str(override) for override in overrides]
    return tuple(changes)


def _quantity(value: Any) -> Quantity | None:
    if not isinstance(value, dict) or (mean := number_of(value.get("mean"))) is None:
        return None
    low, high = number_of(value.get("low")), number_of(value.get("high"))
    return Quantity(mean, low, high) if low is not None and high is not None else Quantity(mean)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
