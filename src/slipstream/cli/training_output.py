"""What ``slipstream train`` prints before and after a training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.text import format_count, format_percent, format_seconds, plural
from slipstream.threads import usable_cores

if TYPE_CHECKING:
    from slipstream.train.settings import TrainSettings

# A frame of preset=navrl took 0.17 ms of CPU time on a core of an AMD EPYC, and not all of the work runs in parallel.
_CPU_S_PER_FRAME = 2.4e-4
# A training that takes longer than this is announced with its duration, and with a preset that takes less.
_LONG_S = 4 * 3600.0

_OUTCOMES = ("success", "static_collision", "dynamic_collision", "out_of_bounds", "timeout")
_CANDIDATES = {"policy_shield": "success with shield", "planner": "success of planner"}
_WIDTH = 23


def describe_start(settings: TrainSettings, run: Path, done: int) -> list[str]:
    """Return what is about to be trained, as lines of text. Nothing for a run that is already finished.

    Args:
        settings: The settings to train with.
        run: The folder of the run.
        done: The number of iterations that an earlier training did.
    """
    remaining = settings.num_iterations - done
    if remaining <= 0:
        return []
    device = settings.torch_device()
    work = f"{plural(settings.num_iterations, 'iteration')} of {plural(settings.frames_per_iteration, 'frame')}"
    lines = [f"starting {run}: {work}, on {device}"]
    if done:
        lines = [f"resuming {run} from iteration {done} of {format_count(settings.num_iterations)}, on {device}"]
    seconds = remaining * settings.frames_per_iteration * _CPU_S_PER_FRAME / (usable_cores() * settings.devices)
    # Only a CPU is this slow. A cluster has an unknown number of them.
    if device.type == "cpu" and settings.rollouts == "local" and seconds > _LONG_S:
        lines += [
            f"On this CPU that takes about {_roughly(seconds)}. preset=quick learns to fly in minutes:",
            "  slipstream train preset=quick",
        ]
    return lines


def describe_outcome(outcome: Mapping[str, Any], settings: TrainSettings, *, was_complete: bool) -> list[str]:
    """Return the results of a training as lines of text.

    Args:
        outcome: The results.
        settings: The settings of the training.
        was_complete: Whether the run was already finished, so that nothing was trained this time.
    """
    if outcome["stopped"]:
        done = f"{outcome['iterations']} of {settings.num_iterations} iterations"
        return [f"Stopped after {done}. To resume: slipstream train resume={outcome['run']}"]
    lines = []
    if was_complete:
        lines.append(
            f"{outcome['run']} was already finished after iteration {outcome['iterations']}; nothing was trained."
        )
    if "evaluation" not in outcome:
        return [*lines, _line("run", outcome["run"])]
    return [*lines, *_describe_flights(outcome["evaluation"]), *_describe_training(outcome)]


def _describe_flights(results: list[dict[str, Any]]) -> list[str]:
    """Return how the flights of the policy ended, and how other pilots did on the same maps."""
    through = results[0]
    obstacles = f"{through['num_static_obstacles']} static and {through['num_dynamic_obstacles']} moving obstacles"
    maps = plural(len(through["map_seeds"]), "map")
    flights = plural(through["episodes"], "flight")
    lines = [f"{flights} on {maps} that it has never seen, with {obstacles}:"]
    rates = {name.replace("_", " "): through[name] for name in _OUTCOMES}
    for result in results:
        # The policy itself flew other scenarios, too.
        title = _CANDIDATES.get(result["candidate"])
        if title is not None:
            rates[title] = result["success"]
    lines += [_line(f"  {name}", _rate(rate)) for name, rate in rates.items()]
    return lines


def _describe_training(outcome: Mapping[str, Any]) -> list[str]:
    """Return what the training cost, and where its report is."""
    training = plural(outcome["env_frames"], "frame")
    if outcome["frames_per_s"]:
        training += f", {format_count(outcome['frames_per_s'])} frames/s"
    lines = [_line("training", training)]
    if outcome["checkpoints_saved"]:
        stall = format_seconds(outcome["checkpoint_stall_ms"] / 1000)
        lines.append(_line("checkpoints", f"{outcome['checkpoint_ratio']:.2f} times smaller, {stall} of stall each"))
    if outcome["rollout_ratio"]:
        lines.append(_line("rollouts", f"{outcome['rollout_ratio']:.1f} times smaller"))
    return [*lines, _line("report", outcome["report"])]


def _line(name: str, value: str) -> str:
    return f"{name:{_WIDTH}}{value}"


def _rate(rate: Mapping[str, float]) -> str:
    """Return a rate and its interval, rounded as in the report."""
    return f"{format_percent(rate['mean'])} (95 % interval: {100 * rate['low']:.1f} to {100 * rate['high']:.1f} %)"


def _roughly(seconds: float) -> str:
    """Return a duration in hours or days: it is an estimate."""
    hours = seconds / 3600
    if hours < 36:
        return plural(round(hours), "hour")
    return plural(round(hours / 24), "day")
