"""An evaluation as a JSON document: training and ``slipstream eval`` write it, the report reads it.

The files that are read may have been edited by anyone, so nothing in them is trusted.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigurationError, CorruptFileError, FormatVersionError
from slipstream.run.metrics import number_of
from slipstream.store.local import atomic_write, make_folder, open_regular

FORMAT = "slipstream.evaluation"
VERSION = 2
OUTCOMES = ("flying", "success", "static_collision", "dynamic_collision", "out_of_bounds", "timeout")
"""How a flight stands. Its number in files and tensors is the index into this tuple."""

RATES = OUTCOMES[1:]
AMOUNTS = ("inside_share", "time_to_goal_s", "path_length_m", "return")
POLICY = "policy"
MAIN_SCENARIO = "through"
MAX_FILE_BYTES = 1 << 20
MAX_SCENARIOS = 150


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval.

    Attributes:
        mean: The estimate.
        low: Lower end of the interval; minus infinity if it is unknown.
        high: Upper end of the interval; infinity if it is unknown.
    """

    mean: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def is_known(self) -> bool:
        """Whether the interval has two ends."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def to_json(self) -> dict[str, float | None]:
        """Return JSON values; JSON has no infinity, so an end that is infinite becomes null."""
        ends = {"low": self.low, "high": self.high}
        values: dict[str, float | None] = {"mean": self.mean}
        for name, end in ends.items():
            values[name] = None
            if math.isfinite(end):
                values[name] = end
        return values


@dataclass(frozen=True)
class Scenario:
    """How well a candidate flew a scenario.

    Attributes:
        name: Its name.
        title: Its name for people, with the candidate and sensor faults.
        episodes: The number of flights.
        quantities: Rates and means by name, without those that have no sample.
        flights: The file of recorded flights, beside the evaluation.
        facts: Numbers that describe it, such as ``num_static_obstacles``.
        candidate: What flew: ``policy``, ``policy_shield``, ``planner``.
        has_faults: Whether sensors were noisy or late.
    """

    name: str
    title: str
    episodes: int | None = None
    quantities: Mapping[str, Interval] = field(default_factory=dict)
    flights: str | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    candidate: str = POLICY
    has_faults: bool = False

    @property
    def is_standard(self) -> bool:
        """Whether the policy flew without a shield and with perfect sensors."""
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
        """Return the scenario of a name that the policy flew without a shield and with perfect sensors."""
        for one in self.scenarios:
            if one.name == name and one.is_standard:
                return one
        return None

    @property
    def main(self) -> Scenario | None:
        """The scenario that says most: through unseen maps with moving obstacles."""
        if self._through_field is None and self.scenarios:
            return self.scenarios[0]
        return self._through_field

    @property
    def _through_field(self) -> Scenario | None:
        # Evaluations of version 1 have no flights through the field.
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


def write_evaluation(
    entries: Sequence[Mapping[str, Any]], folder: Path, name: str, about: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Write ``<name>.json``, atomically and durably. Replaces a file of that name.

    Args:
        entries: JSON values of each scenario and candidate.
        folder: Where; it exists.
        name: Of the file.
        about: What else the document should say: the conditions of the evaluation, such as checkpoint and seed.

    Returns:
        The path of the file, and its content.
    """
    document = {"format": FORMAT, "version": VERSION, **about, "time": time.time(), "results": list(entries)}
    # Through JSON and back: tuples become lists, so the returned document equals the file.
    text = json.dumps(document, indent=2)
    path = folder / f"{name}.json"
    with atomic_write(path) as stream:
        stream.write(text.encode())
    content: dict[str, Any] = json.loads(text)
    return path, content


def choose_name(folder: Path, stem: str, about: Mapping[str, Any], kind: str = FORMAT) -> str:
    """Return a name under which an evaluation replaces only an earlier one of the same policy and conditions.

    Args:
        folder: Where evaluations are.
        stem: The name if it is free; otherwise a number is added.
        about: What the evaluation says about itself; see `write_evaluation`.
        kind: The format of the files.
    """
    name = stem
    number = 2
    while not may_replace(folder / f"{name}.json", about, kind):
        name = f"{stem}_{number}"
        number += 1
    return name


def may_replace(path: Path, about: Mapping[str, Any], kind: str = FORMAT) -> bool:
    """Return whether a file is missing, or of this format and says the same about itself."""
    if not os.path.lexists(path):
        return True
    return _read_same(path, about, kind) is not None


def recorded_evaluation(folder: Path, name: str, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an evaluation of the same policy under the same conditions that was written before; None if there is none.

    Args:
        folder: Where evaluations are.
        name: Of its file.
        about: What it must say about itself; see `write_evaluation`.
    """
    document = _read_same(folder / f"{name}.json", about, FORMAT)
    if document is None or document.get("version") != VERSION or not document.get("results"):
        return None
    return document


def _read_same(path: Path, about: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """Return the content of a file that is of this format and says the same about itself; None for any other."""
    try:
        with open_regular(path) as file:
            document = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("format") != kind:
        return None
    # As it would be in a file: with lists for tuples.
    wanted = json.loads(json.dumps(about))
    if any(document.get(key) != value for key, value in wanted.items()):
        return None
    return document


def require_writable(folder: Path) -> None:
    """Require a folder that files can be written to, or that can be created, before hours of work depend on it.

    Raises:
        ConfigurationError: If it is a file, or cannot be created or written to.
    """
    try:
        make_folder(folder)
        probe = folder / f".slipstream-{os.getpid()}"
        with probe.open("xb"):
            pass
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot write evaluations there ({error.strerror or error})") from error


def read_evaluation(path: Path) -> Evaluation:
    """Read an evaluation.

    Raises:
        CorruptFileError: If the file is damaged, or something else.
        FormatVersionError: If a newer release wrote it.
        OSError: If it cannot be read.
    """
    # Read one byte more than is allowed: the size of a file that grows, or of a device, is not known beforehand.
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
    # A newer version may mean something else by the same names.
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
    if episodes is not None:
        episodes = round(episodes)
    quantities = {}
    for key in (*RATES, *AMOUNTS):
        quantity = _interval(item.get(key))
        if quantity is not None:
            quantities[key] = quantity
    # Perfect sensors have 0 for every fault.
    sensors = item.get("sensors")
    has_faults = isinstance(sensors, dict) and any(sensors.values())
    return Scenario(
        name=name,
        title=_text(item.get("title")) or name,
        episodes=episodes,
        quantities=quantities,
        flights=_text(item.get("flights")),
        facts=_facts(item),
        candidate=_text(item.get("candidate")) or POLICY,
        has_faults=has_faults,
    )


def _facts(item: dict[str, Any]) -> dict[str, float]:
    """Return numbers that describe a scenario."""
    facts: dict[str, float] = {}
    for key in ("map_seed", "num_static_obstacles", "num_dynamic_obstacles"):
        fact = number_of(item.get(key))
        if fact is not None:
            facts[key] = fact
    seeds = item.get("map_seeds")
    # Version 1 names one map, version 2 lists all.
    if "map_seed" not in facts and isinstance(seeds, list):
        facts["num_maps"] = len(seeds)
        for place, key in ((0, "first_map"), (-1, "last_map")):
            number = number_of(seeds[place]) if seeds else None
            if number is not None:
                facts[key] = number
    return facts


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


def _interval(value: Any) -> Interval | None:
    if not isinstance(value, dict):
        return None
    mean = number_of(value.get("mean"))
    if mean is None:
        return None
    # One end alone is no interval.
    low = number_of(value.get("low"))
    high = number_of(value.get("high"))
    if low is None or high is None:
        return Interval(mean)
    return Interval(mean, low, high)


def _text(value: Any) -> str | None:
    if isinstance(value, str) and value:
        return value
    return None
