"""Fly the simulations of several jobs on a Ray cluster."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slipstream import __version__
from slipstream.checkpoint.buffers import pack_state, unpack_state
from slipstream.collect.cluster import connected
from slipstream.errors import ConfigurationError, CorruptFileError, FormatVersionError, OrderError
from slipstream.run.world import ARRAYS, World
from slipstream.train.evaluation.flights import FlightLog, Flights, Flown, FlownPart, OnStep
from slipstream.train.evaluation.flying import Plan, Progress, Task, fly_task, join_plans, list_tasks
from slipstream.train.groups import RaySettings
from slipstream.train.startup import prepare_process

_POLL_S = 1.0  # how often Ctrl-C is noticed while nothing arrives


def fly_on_ray(
    plans: Sequence[Plan], settings: RaySettings, *, start_progress: Callable[[str], OnStep | None]
) -> list[Flown]:
    """Fly all simulations on a Ray cluster, each on one CPU; returns what each job has flown.

    The results are those of `slipstream.train.evaluation.flying.fly_together`, bit for bit if the CPUs are alike. A
    simulation depends on nothing but its task, so Ray may repeat one whose process or node is lost.

    Args:
        plans: The simulations of each job.
        settings: Where Ray is, how many simulations fly at once, and how often one may be lost.
        start_progress: Called with the title of each job when its first simulation is submitted; returns what to call
            after each simulation.

    Raises:
        ImportError: If Ray is not installed.
        ConfigurationError: If there is no cluster at the address, or a machine has another version of Slipstream.
        OrderError: If a simulation failed, or was lost too often; names it.
    """
    progress = Progress(plans, start_progress)
    results: dict[Task, FlownPart | Flights] = {}
    waiting = list_tasks(plans)
    waiting.reverse()
    with connected(settings.address, num_cpus=settings.num_actors) as ray:
        fly = ray.remote(_fly).options(num_cpus=1, max_retries=settings.max_restarts)
        shared = ray.put(plans)
        running: dict[Any, Task] = {}
        try:
            while waiting or running:
                # Results are taken as they come, so that few of them are in memory at any time.
                while waiting and len(running) < settings.num_actors:
                    task = waiting.pop()
                    running[fly.remote(shared, task, __version__)] = task
                    progress.start(task[0])
                finished, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_S)
                for reference in finished:
                    task = running.pop(reference)
                    title = plans[task[0]].title
                    results[task] = _receive(ray, reference, title)
                    _count(progress, task, results[task])
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
    return join_plans(plans, results)


def _count(progress: Progress, task: Task, result: FlownPart | Flights) -> None:
    """Show that the flights of a simulation have ended."""
    if isinstance(result, FlownPart):
        progress.update(task[0], task[1], len(result.log.outcome))


def _fly(plans: Sequence[Plan], task: Task, version: str) -> bytes:
    """Fly one simulation in a worker of Ray's; returns it packed, or why it failed."""
    if version != __version__:
        return pack_state({"version": __version__})
    prepare_process(1)
    try:
        result = fly_task(plans, task, torch.device("cpu"))
    except Exception as error:  # noqa: BLE001 - it travels as text, because reading a foreign object would run its code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return pack_state({"error": reason, "traceback": "".join(traceback.format_exception(error))})
    if isinstance(result, Flights):
        arrays = {name: torch.from_numpy(array) for name, array in result.world.arrays().items()}
        return pack_state({"rollout": result.rollout, "world": vars(result.world) | arrays})
    return pack_state({"log": vars(result.log), "num_steps": result.num_steps, "seconds": result.seconds})


def _receive(ray: Any, reference: Any, title: str) -> FlownPart | Flights:
    """Return what a simulation has flown."""
    try:
        state = unpack_state(ray.get(reference))
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise OrderError(f"a simulation of {title!r} was lost: {reason}") from error
    except (CorruptFileError, FormatVersionError, TypeError) as error:
        raise OrderError(f"the result of a simulation of {title!r} cannot be read: {error}") from error
    if "version" in state:
        raise ConfigurationError(
            f"a machine of the cluster has slipstream {state['version']}, expected {__version__} as on this machine"
        )
    if "error" in state:
        failure = OrderError(f"a simulation of {title!r} failed: {state['error']}")
        failure.add_note(state["traceback"])
        raise failure
    if "log" in state:
        return FlownPart(FlightLog(**state["log"]), state["num_steps"], state["seconds"])
    world = dict(state["world"])
    for name in ARRAYS:
        world[name] = world[name].numpy()
    return Flights(state["rollout"], World(**world))
