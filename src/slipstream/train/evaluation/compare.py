"""Compare two candidates on the same flights: same maps, starts, obstacles and noise."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import ConfigurationError
from slipstream.store.local import atomic_write, make_folder
from slipstream.train.evaluation.results import ScenarioResult
from slipstream.train.evaluation.statistics import LEAST_CLUSTERS, Difference, paired_difference

FORMAT = "slipstream.comparison"
VERSION = 1


@dataclass(frozen=True)
class Comparison:
    """How two candidates did in one scenario.

    Attributes:
        first: Result of the first one.
        second: Result of the second one.
        success: Success of the second minus success of the first.
        num_better: The number of flights in which only the second one reached the goal.
        num_worse: The number of flights in which only the first one did.
    """

    first: ScenarioResult
    second: ScenarioResult
    success: Difference
    num_better: int
    num_worse: int

    def to_json(self) -> dict[str, Any]:
        """Return everything but the flights as JSON values."""
        return {
            "scenario": self.first.scenario.name,
            "title": self.first.scenario.title,
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "success_difference": vars(self.success),
            "only_second_succeeds": self.num_better,
            "only_first_succeeds": self.num_worse,
        }

    def verdict(self, first: str, second: str) -> str:
        """Return in a sentence whether the difference is significant.

        Args:
            first: What to call the first candidate.
            second: What to call the second candidate.
        """
        difference = self.success
        size = f"{abs(difference.mean):.3f}"
        numbers = f"95 %: {difference.low:+.3f} to {difference.high:+.3f}, p = {difference.p_value:.3g}"
        num_clusters = self.first.num_clusters
        if num_clusters < LEAST_CLUSTERS:
            return (
                f"not tested: {second} {difference.mean:+.3f} ({numbers}); "
                f"a test needs {LEAST_CLUSTERS} maps, and these are {num_clusters}"
            )
        if not difference.significant:
            return f"no significant difference: {second} {difference.mean:+.3f} ({numbers})"
        better = second
        if difference.mean < 0:
            better = first
        return f"{better} is better by {size}, which is significant ({numbers})"


def compare(first: ScenarioResult, second: ScenarioResult) -> Comparison:
    """Compare two results flight by flight.

    Args:
        first: Of the first candidate.
        second: Of the second candidate, in the same scenario with the same seed.

    Raises:
        ConfigurationError: If the flights are not the same.
    """
    one = first.flown
    other = second.flown
    same_flights = one.config == other.config and np.array_equal(one.log.cluster, other.log.cluster)
    if one.scenario != other.scenario or not same_flights:
        raise ConfigurationError(
            f"flights of {one.title!r} and {other.title!r} are not the same, so they have no pairs"
        )
    won = one.log.success
    won_second = other.log.success
    return Comparison(
        first=first,
        second=second,
        success=paired_difference(won, won_second, one.log.cluster),
        num_better=int((won_second & ~won).sum()),
        num_worse=int((won & ~won_second).sum()),
    )


def save_comparison(
    comparisons: Sequence[Comparison], about: Mapping[str, Any], folder: Path | None, name: str
) -> tuple[Path | None, dict[str, Any]]:
    """Return a comparison as JSON values, and write it to a file if there is a folder for it.

    Args:
        comparisons: One for each scenario.
        about: The two policies, and the conditions of the comparison.
        folder: Where; created if it does not exist. None writes nothing.
        name: Of the file, which is replaced.

    Returns:
        The path of the file, if any, and its content.
    """
    entries = [comparison.to_json() for comparison in comparisons]
    document = {"format": FORMAT, "version": VERSION, **about, "time": time.time(), "scenarios": entries}
    text = json.dumps(document, indent=2)
    path = None
    if folder is not None:
        make_folder(folder)
        path = folder / f"{name}.json"
        with atomic_write(path) as stream:
            stream.write(text.encode())
    content: dict[str, Any] = json.loads(text)
    return path, content
