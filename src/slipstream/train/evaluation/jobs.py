"""Which candidate flies which scenario, and flying them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import ConfigurationError
from slipstream.rl.network import NavRLPolicy
from slipstream.train.evaluation.flights import NO_FAULTS, SEED, OnStep
from slipstream.train.evaluation.flying import Plan, Together, fly_together
from slipstream.train.evaluation.pilots import (
    Candidate,
    Sensors,
    planner_candidate,
    policy_candidate,
    with_shield,
)
from slipstream.train.evaluation.results import ScenarioResult, summarise
from slipstream.train.evaluation.scenarios import (
    NUM_EPISODES,
    OBSTACLE_WARMUP_S,
    Scenario,
    fit_scenario,
    plan_flights,
    standard_scenarios,
)
from slipstream.train.groups import RaySettings
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


def evaluate(
    candidate: Candidate,
    settings: TrainSettings,
    scenario: Scenario,
    *,
    episodes: int = NUM_EPISODES,
    seed: int = SEED,
    sensors: Sensors = NO_FAULTS,
    num_recorded: int = 0,
    on_step: OnStep | None = None,
) -> ScenarioResult:
    """Fly the episodes of a scenario and return how they ended, with 95 % intervals over maps.

    Blocks until every episode has ended. See `run_jobs` for what the result depends on.

    Args:
        candidate: What flies, for example ``policy_candidate(policy)``.
        settings: Drones, sensor and rules; the scenario replaces map, obstacles and starts.
        scenario: Where to fly; see `standard_scenarios`.
        episodes: The number of episodes, rounded up to the same number for each map.
        seed: Of starts, goals, courses of obstacles, noise and sampled actions.
        sensors: What is wrong with the sensors.
        num_recorded: The number of additional flights on the first map that are recorded, and not counted.
        on_step: Called after each step with the number of episodes that have ended, and of all.

    Raises:
        ConfigurationError: If there is no episode to fly, or the settings are invalid.
    """

    def start(_: str) -> OnStep | None:
        return on_step

    job = Job(candidate, scenario, sensors, num_recorded)
    [result] = run_jobs([job], settings, episodes=episodes, seed=seed, start_progress=start)
    return result


def run_jobs(
    jobs: Sequence[Job],
    settings: TrainSettings,
    *,
    episodes: int = NUM_EPISODES,
    seed: int = SEED,
    start_progress: StartProgress | None = None,
    processes: Together | None = None,
    ray: RaySettings | None = None,
) -> list[ScenarioResult]:
    """Fly jobs; blocks until all have ended.

    The simulations of all jobs fly side by side, as many as torch may use threads (``torch.set_num_threads``), each on
    one thread. Results do not depend on that number, and not on the number of processes either: every simulation has
    separate random numbers. Global random numbers and the candidates stay as they are.

    Args:
        jobs: What to fly.
        settings: Drones, sensor and rules; scenarios replace map, obstacles and starts.
        episodes: The number of episodes of each job.
        seed: The same for all jobs: candidates meet the same flights.
        start_progress: Called with the title of each job before it flies, perhaps in another thread.
        processes: Those that share the work, if there are several; each of them has to call this. The first one returns
            all results, the others return none.
        ray: The cluster that flies instead of this process, if there is one. It flies on CPUs.

    Raises:
        ConfigurationError: If there is no episode to fly, or the settings are invalid.
        OrderError: If the cluster could not fly a simulation.
    """
    plans = []
    for job in jobs:
        scenario = fit_scenario(job.scenario, episodes)
        parts = plan_flights(scenario, settings, episodes, seed)
        plans.append(Plan(dataclasses.replace(job, scenario=scenario), parts))
    device = settings.torch_device()
    threads = 1
    if device.type == "cpu":
        threads = torch.get_num_threads()

    def start(title: str) -> OnStep | None:
        return None if start_progress is None else start_progress(title)

    if ray is not None:
        if device.type != "cpu":
            raise ConfigurationError(f"a Ray cluster flies on CPUs, but device is {device}: set device=cpu")
        from slipstream.train.evaluation.remote import fly_on_ray  # noqa: PLC0415 - an optional dependency

        return list(map(summarise, fly_on_ray(plans, ray, start_progress=start)))
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for pilots that draw from the global generator
        flown = fly_together(plans, device, threads=threads, start_progress=start, processes=processes)
    return list(map(summarise, flown))


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
