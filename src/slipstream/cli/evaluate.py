"""``slipstream eval``: fly a policy or the planner, count how the flights end, and compare."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.checks import require_choice
from slipstream.cli.evaluation_plan import (
    Options,
    Planned,
    make_sensors,
    plan_comparison,
    plan_evaluation,
    plan_everywhere,
)
from slipstream.cli.threads import calm_threads
from slipstream.errors import ConfigurationError
from slipstream.text import list_first

if TYPE_CHECKING:
    from slipstream.train.evaluation.entrants import Entrant
    from slipstream.train.groups import RaySettings
    from slipstream.train.processes import Processes

EXAMPLE = "slipstream eval runs/last --scenario through --scenario line"

_MAX_NAME_BYTES = 200  # of the 255 of a file name; the rest is for scenario, candidate and suffix

_HELP = """Fly a policy on maps it has never seen, and count how the flights end.

Scenarios, in this order: through (border to opposite border, unseen maps, moving obstacles), line (NavRL's evaluation),
training (the training map), static (nothing moving), empty (no obstacles), border (random border points). A flight ends
at the goal, in a collision, out of bounds, or when time is up. Intervals account for flights that share a map.

Writes NAME.json, and recorded flights for the report. An evaluation under other conditions gets another name.
With devices=N, N processes share the flights, and with rollouts=ray a Ray cluster flies; the result is the same.

\b
Examples:
  slipstream eval runs/last --faithful --shield
  slipstream eval navrl_checkpoint.pt preset=quick --scenario line
  slipstream eval --policy planner preset=quick
  slipstream eval --compare runs/a runs/b
  slipstream eval runs/last --lidar-noise 0.05 --dropout 0.1 --latency 0.1
  slipstream eval runs/last --robustness --scenario through
  slipstream eval runs/last devices=4
  slipstream eval runs/last rollouts=ray ray.address=auto ray.actors=8
"""


def evaluate(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="POLICY",
            help="A run's folder, one of its checkpoints, or a .pt of the original NavRL.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings in place of the run's.", show_default=False),
    ] = None,
    *,
    episodes: Annotated[int, typer.Option(help="Flights in each scenario, the same number on each map.", min=1)] = 512,
    maps: Annotated[int, typer.Option(help="Number of unseen maps.", min=1)] = 64,
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="through, line, training, static, empty or border; may be repeated. All by default."),
    ] = None,
    policy: Annotated[str, typer.Option(help="learned, or planner: a reference that needs no checkpoint.")] = "learned",
    shield: Annotated[bool, typer.Option("--shield", help="Replace commands that lead to a collision.")] = False,
    faithful: Annotated[
        bool, typer.Option("--faithful", help="Fly NavRL's quadrotor at 62.5 Hz, whatever was trained.")
    ] = False,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Compare two policies on the same flights.", show_default=False),
    ] = None,
    robustness: Annotated[
        bool, typer.Option("--robustness", help="Table over noise, dropout and latency, with and without shield.")
    ] = False,
    lidar_noise: Annotated[float, typer.Option(help="Standard deviation of LiDAR distances in metres.")] = 0.0,
    dropout: Annotated[float, typer.Option(help="Share of LiDAR returns that are missing.")] = 0.0,
    latency: Annotated[float, typer.Option(help="Age of observations in seconds, rounded to steps.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of starts, goals, obstacles and noise.", min=0, max=2**32 - 1)] = 1,
    sample: Annotated[bool, typer.Option("--sample", help="Draw actions instead of taking their means.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for files; default: the eval folder of the run.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the files.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Evaluate; see `_HELP`, which is what people see."""
    calm_threads()
    from slipstream.cli.processes import one_voice  # noqa: PLC0415 - keeps --help quick
    from slipstream.train.evaluation.entrants import PLANNER  # noqa: PLC0415
    from slipstream.train.processes import connect  # noqa: PLC0415

    if name is not None and (not name or Path(name).name != name):
        raise ConfigurationError(f"--name is {name!r}, expected the name of a file without a folder")
    if name is not None and len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise ConfigurationError(
            f"--name has {len(os.fsencode(name))} bytes, expected at most {_MAX_NAME_BYTES}: file names begin with it"
        )
    require_choice("--policy", policy, ("learned", PLANNER))
    changes = list(overrides or [])
    if checkpoint is not None and "=" in checkpoint and (compare is not None or policy == PLANNER):
        # No policy is given, so the first argument is a setting already.
        changes.insert(0, checkpoint)
        checkpoint = None
    sensors = make_sensors(lidar_noise, dropout, latency)
    if robustness and (shield or sensors.describe()):
        raise ConfigurationError("--robustness cannot be combined with --shield, --lidar-noise, --dropout or --latency")
    if compare is not None:
        if checkpoint is not None or robustness or policy == PLANNER:
            raise ConfigurationError("--compare takes two policies, expected no other policy and no --robustness")
        if name is not None and output is None:
            raise ConfigurationError("--name needs --output here: without it, a comparison is printed and not written")
    # Not earlier: every process would say what is wrong with the options.
    changes = _settle_devices(changes)
    changes, ray = _settle_ray(changes)
    options = Options(
        overrides=changes,
        scenarios=scenario,
        maps=maps,
        episodes=episodes,
        seed=seed,
        action="sample" if sample else "mean",
        faithful=faithful,
        shield=shield,
        robustness=robustness,
        sensors=sensors,
        output=output,
        name=name,
        as_json=json,
        ray=ray,
    )
    processes = connect()
    if processes is not None and ray is not None:
        raise ConfigurationError("rollouts=ray needs one process, which gives the flights to the cluster: omit devices")
    with one_voice(processes):
        if compare is None:
            _evaluate(checkpoint, options, processes, planner=policy == PLANNER)
        else:
            _compare(compare, options, processes)


evaluate.__doc__ = _HELP


def _settle_devices(overrides: list[str]) -> list[str]:
    """Start as many processes as the command line asks for, or check that they are there; returns the other settings.

    The number of processes does not change the result, so it is not among the conditions of an evaluation.
    """
    from slipstream.cli.processes import relaunch  # noqa: PLC0415 - keeps --help quick
    from slipstream.train.processes import require_devices, under_torchrun  # noqa: PLC0415

    given = [override for override in overrides if override.startswith("devices=")]
    if not given:
        return overrides
    text = given[-1].partition("=")[2]
    if not text.isdecimal() or not int(text):
        raise ConfigurationError(f"devices is {text}, expected a whole number of at least 1")
    devices = int(text)
    if under_torchrun():
        require_devices(devices)
    elif devices > 1:
        relaunch(devices, [argument for argument in sys.argv[1:] if not argument.startswith("devices=")])
    return [override for override in overrides if override not in given]


def _settle_ray(overrides: list[str]) -> tuple[list[str], RaySettings | None]:
    """Return the settings that say what flies, and the Ray cluster on which, if the command line names one.

    A run that was trained with Ray is not evaluated with it unless requested: the cluster may be gone.
    """
    from slipstream.train.settings import compose_settings  # noqa: PLC0415 - keeps --help quick

    given = [override for override in overrides if override.startswith(("rollouts=", "ray."))]
    if not given:
        return overrides, None
    others = [override for override in overrides if override not in given]
    chosen = compose_settings(given)
    if chosen.rollouts != "ray":
        return others, None
    return others, chosen.ray


def _evaluate(checkpoint: str | None, options: Options, processes: Processes | None, *, planner: bool) -> None:
    """Evaluate one policy or the planner."""
    from slipstream.cli import evaluation_output as display  # noqa: PLC0415 - keeps --help quick
    from slipstream.cli.output import console, print_json, print_lines, print_table  # noqa: PLC0415
    from slipstream.train.evaluation.results import save_evaluation  # noqa: PLC0415

    def plan(rank: int) -> Planned:
        return plan_evaluation(checkpoint, options, planner=planner, writes=rank == 0)

    planned = plan_everywhere(processes, plan)
    screen = console(stderr=True)
    results = display.fly_jobs(
        planned.jobs, planned.settings, screen, options.episodes, options.seed, processes, options.ray
    )
    if planned.name is None:
        return
    folder = options.output or planned.entrants[0].folder
    path, document = save_evaluation(results, folder, planned.name, planned.about)
    if options.as_json:
        print_json(document)
        return
    if options.robustness:
        print_table(display.robustness_table(results))
    else:
        print_table(display.results_table(results))
    print_lines(*display.footnotes(results), f"written to {path}")


def _compare(policies: tuple[str, str], options: Options, processes: Processes | None) -> None:
    """Compare two policies on the same flights."""
    from slipstream.cli import evaluation_output as display  # noqa: PLC0415 - keeps --help quick
    from slipstream.cli.output import console, print_json, print_lines, print_table  # noqa: PLC0415
    from slipstream.train.evaluation.compare import compare, save_comparison  # noqa: PLC0415

    def plan(rank: int) -> Planned:
        return plan_comparison(policies, options, writes=rank == 0)

    planned = plan_everywhere(processes, plan)
    screen = console(stderr=True)
    results = display.fly_jobs(
        planned.jobs, planned.settings, screen, options.episodes, options.seed, processes, options.ray
    )
    if planned.name is None:
        return
    comparisons = []
    for first, second in zip(results[::2], results[1::2], strict=True):
        comparisons.append(compare(first, second))
    path, document = save_comparison(comparisons, planned.about, options.output, planned.name)
    if options.as_json:
        print_json(document)
        return
    print_table(display.comparison_table(comparisons))
    print_lines(*display.verdicts(comparisons, policies))
    differences = _differences(policies, planned.entrants, planned.host)
    print_lines(f"Both fly with the settings of {policies[planned.host]}.", *differences)
    if path is not None:
        print_lines(f"written to {path}")


def _differences(policies: tuple[str, str], entrants: Sequence[Entrant], host: int) -> list[str]:
    """Return a sentence if one of the policies flies in another world than it was trained in."""
    from slipstream.train.evaluation.entrants import world_differences  # noqa: PLC0415 - keeps --help quick

    trained = entrants[1 - host].trained
    if trained is None:
        return []
    found = world_differences(entrants[host].trained or entrants[host].settings, trained)
    if not found:
        return []
    return [f"{policies[1 - host]} was trained with {list_first(found, 4)}, which counts against it."]
