"""Results of an evaluation: rates and means with intervals, and the JSON document that records them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.rollout.batch import save_rollout_compressed
from slipstream.run.evaluation import OUTCOMES, RATES, Interval, write_evaluation
from slipstream.store.local import make_folder
from slipstream.train.evaluation.flights import Flown
from slipstream.train.evaluation.scenarios import Scenario
from slipstream.train.evaluation.statistics import rate_interval, ratio_interval


@dataclass(frozen=True)
class ScenarioResult:
    """How well a candidate flew a scenario.

    Attributes:
        flown: The flights.
        rates: The share of each outcome; the means sum to 1.
        means: ``inside_share`` (share of the flight time inside the field) and ``return`` over all flights,
            ``time_to_goal_s`` and ``path_length_m`` over those that reached the goal; None where there are none.
        num_clusters: The number of groups of flights that share a map and a course of moving obstacles.
        interval: What intervals are based on: ``clusters`` (a bootstrap over maps), ``flights`` (independent flights)
            or ``assumed`` (one map: flights on it are assumed to have a correlation of 0.1).
    """

    flown: Flown
    rates: dict[str, Interval]
    means: dict[str, Interval | None]
    num_clusters: int
    interval: str

    @property
    def scenario(self) -> Scenario:
        """Where the flights were."""
        return self.flown.scenario

    @property
    def episodes(self) -> int:
        """The number of flights."""
        return len(self.flown.log.outcome)

    def to_json(self, flights: str | None = None) -> dict[str, Any]:
        """Return everything but the flights as JSON values.

        Args:
            flights: The name of the file that the recorded flights are in.
        """
        flown = self.flown
        scenario = flown.scenario
        values: dict[str, Any] = {
            "scenario": scenario.name,
            "candidate": flown.candidate,
            "title": flown.title,
            "map_seeds": list(scenario.map_seeds),
            "num_courses": scenario.num_courses,
            "num_static_obstacles": scenario.num_static_obstacles,
            "num_dynamic_obstacles": scenario.num_dynamic_obstacles,
            "sensors": dataclasses.asdict(flown.sensors),
            "simulation": dataclasses.asdict(flown.config),
            "episodes": self.episodes,
            "clusters": self.num_clusters,
            "interval": self.interval,
        }
        for name, rate in self.rates.items():
            values[name] = rate.to_json()
        for name, mean in self.means.items():
            values[name] = None
            if mean is not None:
                values[name] = mean.to_json()
        values["steps_per_s"] = flown.steps_per_s
        values["flights"] = flights
        return values


def summarise(flown: Flown) -> ScenarioResult:
    """Return rates and means of flights, with 95 % intervals over maps."""
    log = flown.log
    rates = {}
    for number, name in enumerate(OUTCOMES):
        if name in RATES:
            rates[name] = rate_interval(log.outcome == number, log.cluster)
    arrived = log.success.astype(np.float64)
    means = {
        "inside_share": ratio_interval(log.inside_s, log.flight_s, log.cluster, least=0.0, most=1.0),
        "time_to_goal_s": ratio_interval(log.flight_s * arrived, arrived, log.cluster, least=0.0),
        "path_length_m": ratio_interval(log.path_m * arrived, arrived, log.cluster, least=0.0),
        "return": ratio_interval(log.returns, np.ones(len(arrived)), log.cluster),
    }
    num_clusters = len(np.unique(log.cluster))
    interval = "clusters"
    if num_clusters == len(arrived):
        interval = "flights"
    elif num_clusters == 1:
        interval = "assumed"
    return ScenarioResult(flown, rates, means, num_clusters, interval)


def save_evaluation(
    results: Sequence[ScenarioResult], folder: Path, name: str, about: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Write an evaluation: ``<name>.json``, and recorded flights beside it. Replaces files of that name.

    Args:
        results: One for each scenario and candidate.
        folder: Where; created if it does not exist.
        name: Of the files.
        about: What else the JSON should say: the conditions of the evaluation, such as checkpoint, seed and overrides.

    Returns:
        The path of the JSON file, and its content.
    """
    make_folder(folder)
    entries = []
    for result in results:
        file = None
        flown = result.flown
        if flown.flights is not None:
            file = f"{name}_{_file_part(flown)}.slip"
            world = flown.flights.world
            save_rollout_compressed(
                flown.flights.rollout, folder / file, metadata=world.metadata(), extra=world.arrays()
            )
        entries.append(result.to_json(file))
    return write_evaluation(entries, folder, name, about)


def _file_part(flown: Flown) -> str:
    """Return what distinguishes recorded flights in a file name."""
    if flown.candidate == "policy":
        return flown.scenario.name
    return f"{flown.scenario.name}_{flown.candidate}"
