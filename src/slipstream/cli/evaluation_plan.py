"""What an evaluation on the command line will fly, and where its result goes: checked before anything flies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigurationError

if TYPE_CHECKING:
    from slipstream.rl.network import Choice
    from slipstream.train.evaluation.entrants import Entrant
    from slipstream.train.evaluation.jobs import Job
    from slipstream.train.evaluation.pilots import Sensors
    from slipstream.train.groups import RaySettings
    from slipstream.train.processes import Processes
    from slipstream.train.settings import TrainSettings


@dataclass(frozen=True)
class Options:
    """The options of the command that do not choose what flies."""

    overrides: Sequence[str]
    scenarios: Sequence[str] | None
    maps: int
    episodes: int
    seed: int
    action: Choice
    faithful: bool
    shield: bool
    robustness: bool
    sensors: Sensors
    output: Path | None
    name: str | None
    as_json: bool
    ray: RaySettings | None = None

    def load(self, policy: str | None, *, planner: bool) -> Entrant:
        """Load what flies."""
        from slipstream.train.evaluation.entrants import load_entrant  # noqa: PLC0415 - keeps --help quick

        return load_entrant(
            policy,
            self.overrides,
            planner=planner,
            faithful=self.faithful,
            shield=self.shield,
            choose=self.action,
        )

    def conditions(self, jobs: Sequence[Job], entrant: Entrant) -> dict[str, Any]:
        """Return everything that defines the evaluation except the policy."""
        from slipstream.train.evaluation.jobs import describe_conditions  # noqa: PLC0415 - keeps --help quick

        return describe_conditions(
            jobs,
            entrant.settings,
            episodes=self.episodes,
            seed=self.seed,
            action=self.action,
            faithful=self.faithful,
            overrides=self.overrides,
        )


@dataclass(frozen=True)
class Planned:
    """What will fly.

    Attributes:
        jobs: What flies where.
        entrants: The policies.
        host: The number of the one with whose settings all fly.
        about: What the result says about policies and conditions.
        name: Of the files; None in processes that do not write.
    """

    jobs: list[Job]
    entrants: list[Entrant]
    host: int
    about: dict[str, Any]
    name: str | None

    @property
    def settings(self) -> TrainSettings:
        """With which all fly."""
        return self.entrants[self.host].settings


def plan_everywhere(processes: Processes | None, plan: Callable[[int], Planned]) -> Planned:
    """Plan in the first process and, if that worked, in the others: policies are loaded, not sent.

    Args:
        processes: Those that share the work, if there are several.
        plan: Called with the number of this process. The first one writes the result.
    """
    from slipstream.dist.threads import share_of_cores  # noqa: PLC0415 - keeps --help quick
    from slipstream.train.processes import take_gpu  # noqa: PLC0415
    from slipstream.train.startup import prepare_process  # noqa: PLC0415

    if processes is not None:
        take_gpu()
    planned: list[Planned] = []

    def plan_first() -> None:
        planned.append(plan(0))

    if processes is None:
        plan_first()
    else:
        processes.first(plan_first)
        if processes.rank > 0:
            planned.append(plan(processes.rank))
    prepare_process(planned[0].settings.num_threads or share_of_cores())
    return planned[0]


def plan_evaluation(checkpoint: str | None, options: Options, *, planner: bool, writes: bool) -> Planned:
    """Plan the flights of one policy or the planner."""
    from slipstream.run.evaluation import FORMAT  # noqa: PLC0415
    from slipstream.train.evaluation.entrants import choose_scenarios  # noqa: PLC0415 - keeps --help quick
    from slipstream.train.evaluation.jobs import plan_jobs, robustness_jobs  # noqa: PLC0415

    entrant = options.load(checkpoint, planner=planner)
    scenarios = choose_scenarios([entrant], options.scenarios, options.maps)
    if options.robustness:
        if options.scenarios is None:
            scenarios = scenarios[:1]
        jobs = robustness_jobs(entrant.candidate, scenarios)
    else:
        jobs = plan_jobs(entrant.candidate, scenarios, options.sensors)
    for job in jobs:
        # Before anything flies: a latency that is too short would be found after most of the work is done.
        job.sensors.latency_steps(entrant.settings.sim.dt)
    about = {**entrant.about, "conditions": options.conditions(jobs, entrant)}
    name = None
    if writes:
        folder = options.output or entrant.folder
        name = _reserve_name(folder, options.name, _default_name(options, entrant), about, FORMAT)
    return Planned(jobs, [entrant], 0, about, name)


def plan_comparison(policies: tuple[str, str], options: Options, *, writes: bool) -> Planned:
    """Plan the flights of two policies, in the world of the first one; the planner has no world."""
    from slipstream.train.evaluation.compare import FORMAT  # noqa: PLC0415 - keeps --help quick
    from slipstream.train.evaluation.entrants import PLANNER, choose_scenarios  # noqa: PLC0415
    from slipstream.train.evaluation.jobs import Job  # noqa: PLC0415

    entrants = []
    for policy in policies:
        is_planner = policy == PLANNER
        entrants.append(options.load(None if is_planner else policy, planner=is_planner))
    host = 0
    if policies[0] == PLANNER:
        host = 1
    scenarios = choose_scenarios([entrants[host], entrants[1 - host]], options.scenarios, options.maps)
    jobs: list[Job] = []
    for scenario in scenarios:
        jobs += [Job(entrant.candidate, scenario, options.sensors) for entrant in entrants]
    about = {
        "policies": [entrant.about for entrant in entrants],
        "conditions": options.conditions(jobs, entrants[host]),
    }
    name = None
    if writes:
        name = "comparison"
    if writes and options.output is not None:
        name = _reserve_name(options.output, options.name, "comparison", about, FORMAT)
    return Planned(jobs, entrants, host, about, name)


def make_sensors(lidar_noise_m: float, dropout: float, latency_s: float) -> Sensors:
    """Return what is wrong with the sensors, by the options of the command."""
    from slipstream.checks import require_number  # noqa: PLC0415 - keeps --help quick
    from slipstream.train.evaluation.pilots import Sensors  # noqa: PLC0415

    # Checked here too, so that an error names the option.
    require_number("--lidar-noise", lidar_noise_m, 0)
    require_number("--dropout", dropout, 0, 1)
    require_number("--latency", latency_s, 0, 10)
    return Sensors(lidar_noise_m, dropout, latency_s)


def _reserve_name(folder: Path, name: str | None, default: str, about: dict[str, Any], kind: str) -> str:
    """Return the name of the files, after checking that they can be written and replace nothing else."""
    from slipstream.run.evaluation import choose_name, may_replace, require_writable  # noqa: PLC0415

    require_writable(folder)
    if name is None:
        return choose_name(folder, default, about, kind)
    path = folder / f"{name}.json"
    if not may_replace(path, about, kind):
        raise ConfigurationError(f"{path} exists and is another evaluation, expected another --name")
    return name


def _default_name(options: Options, entrant: Entrant) -> str:
    """Return a name that tells how an evaluation differs from the standard one."""
    faults = options.sensors
    parts = {
        "robustness": options.robustness,
        "faithful": options.faithful,
        "planner": entrant.candidate.name.startswith("planner"),
        "shield": options.shield,
        "sample": options.action == "sample",
        "noise": faults.lidar_noise_m > 0,
        "dropout": faults.dropout > 0,
        "latency": faults.latency_s > 0,
    }
    return "_".join(["evaluation", *(part for part, holds in parts.items() if holds)])
