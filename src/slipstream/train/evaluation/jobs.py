"""Which candidate flies which scenario, and flying them one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.rl.network import NavRLPolicy
from slipstream.train.evaluation.flights import NO_FAULTS, SEED, OnStep, flight_title
from slipstream.train.evaluation.pilots import (
    Candidate,
    Sensors,
    planner_candidate,
    policy_candidate,
    with_shield,
)
from slipstream.train.evaluation.results import ScenarioResult, evaluate
from slipstream.train.evaluation.scenarios import NUM_EPISODES, OBSTACLE_WARMUP_S, Scenario, standard_scenarios
from slipstream.train.settings import TrainSettings

NUM_RECORDED = 32
RECORDED = ("through",)  # recording takes as long as flying, and a page with flights of all scenarios 10 MB

ROBUSTNESS = (
    NO_FAULTS,
    Sensors(lidar_noise_m=0.05),
    Sensors(lidar_noise_m=0.1),
    Sensors(dropout=0.1),
    Sensors(dropout=0.3),
    Sensors(latency_s=0.1),
    Sensors(latency_s=0.2),
    Sensors(lidar_noise_m=0.05, dropout=0.1, latency_s=0.1),
)
"""The sensor faults of the robustness table."""

StartProgress = Callable[[str], OnStep | None]
"""Called with the title of each job before it flies; returns what to call after each step."""


@dataclass(frozen=True)
class Job:
    """A scenario to be flown by a candidate.

    Attributes:
        candidate: What flies.
        scenario: Where.
        sensors: What is wrong with the sensors.
        num_recorded: The number of recorded flights.
    """

    candidate: Candidate
    scenario: Scenario
    sensors: Sensors = NO_FAULTS
    num_recorded: int = 0


def plan_jobs(candidate: Candidate, scenarios: Sequence[Scenario], sensors: Sensors = NO_FAULTS) -> list[Job]:
    """Return a job for each scenario; flights of the first one, and of those in `RECORDED`, are recorded."""
    jobs = []
    for scenario in scenarios:
        num_recorded = 0
        if scenario.name in RECORDED or scenario is scenarios[0]:
            num_recorded = NUM_RECORDED
        jobs.append(Job(candidate, scenario, sensors, num_recorded))
    return jobs


def final_jobs(policy: NavRLPolicy, settings: TrainSettings) -> list[Job]:
    """Return the evaluation at the end of a training.

    The policy flies all scenarios. With a shield it flies the first one, and so does the planner.
    """
    scenarios = standard_scenarios(settings)
    candidate = policy_candidate(policy)
    jobs = plan_jobs(candidate, scenarios)
    jobs += plan_jobs(with_shield(candidate), scenarios[:1])
    jobs += plan_jobs(planner_candidate(), scenarios[:1])
    return jobs


def robustness_jobs(candidate: Candidate, scenarios: Sequence[Scenario]) -> list[Job]:
    """Return jobs for a candidate with and without a shield under each of the sensor faults in `ROBUSTNESS`."""
    pair = (candidate, with_shield(candidate))
    jobs: list[Job] = []
    for scenario in scenarios:
        for sensors in ROBUSTNESS:
            jobs += [Job(one, scenario, sensors) for one in pair]
    return jobs


def run_jobs(
    jobs: Sequence[Job],
    settings: TrainSettings,
    *,
    episodes: int = NUM_EPISODES,
    seed: int = SEED,
    start_progress: StartProgress | None = None,
) -> list[ScenarioResult]:
    """Fly jobs one after another; blocks until all have ended.

    Args:
        jobs: What to fly.
        settings: Drones, sensor and rules.
        episodes: The number of episodes of each job.
        seed: The same for all jobs: candidates meet the same flights.
        start_progress: Called with the title of each job before it flies.
    """
    results = []
    for job in jobs:
        on_step = None
        if start_progress is not None:
            on_step = start_progress(flight_title(job.scenario, job.candidate, job.sensors))
        result = evaluate(
            job.candidate,
            settings,
            job.scenario,
            episodes=episodes,
            seed=seed,
            sensors=job.sensors,
            num_recorded=job.num_recorded,
            on_step=on_step,
        )
        results.append(result)
    return results


def describe_conditions(
    jobs: Sequence[Job],
    settings: TrainSettings,
    *,
    episodes: int = NUM_EPISODES,
    seed: int = SEED,
    action: str = "mean",
    faithful: bool = False,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Return everything that defines an evaluation except the policy, as JSON values.

    Args:
        jobs: What flies.
        settings: With overrides applied.
        episodes: The number of episodes of each job.
        seed: Of the flights.
        action: How actions are chosen from the policy's distribution.
        faithful: Whether NavRL's dynamics replace those of the training.
        overrides: Settings that differ from those of the training.
    """
    flown = []
    for job in jobs:
        scenario = job.scenario
        entry = {
            "scenario": scenario.name,
            "candidate": job.candidate.name,
            "maps": [scenario.map_seed, scenario.num_maps],
            "sensors": dataclasses.asdict(job.sensors),
        }
        flown.append(entry)
    return {
        "flown": flown,
        "episodes": episodes,
        "seed": seed,
        "action": action,
        "faithful": faithful,
        "overrides": list(overrides),
        "dynamics": settings.sim.dynamics,
        "dt_s": settings.sim.dt,
        "max_episode_length": settings.env.max_episode_length,
        "obstacle_warmup_s": OBSTACLE_WARMUP_S,
    }
