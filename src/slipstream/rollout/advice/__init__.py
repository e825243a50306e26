"""`advise`: which plan for rollouts suits a batch, by numbers measured on this machine, in words."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.errors import ConfigurationError
from slipstream.rollout.advice.measure import KeyNumbers, Measured, Progress, measure
from slipstream.rollout.advice.plans import (
    Decision,
    Network,
    Plan,
    Settings,
    cost_limit,
    decide,
    network,
    plans,
    say_network,
)
from slipstream.rollout.advice.sources import find_batch
from slipstream.text import align_columns, format_bytes, format_percent, format_ratio, format_seconds
from slipstream.threads import default_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensordict import TensorDictBase

__all__ = ["Advice", "advise"]


@dataclass(frozen=True)
class Advice:
    """Which plan to take, and the numbers behind it; ``print(advice)`` says it in words.

    Attributes:
        source: Where the batch is from.
        made_up: Whether its content was invented, so that ratios are a guess.
        measured_share: How much of the batch was measured; the rest is taken to be like it.
        machine: What it was measured on.
        load: How many programs per core wanted to run before measuring; 0 if that cannot be told.
        measured: The numbers.
        settings: What they were held against.
        plans: What A, B and C take.
        network: What sending a batch takes.
        decision: The plan, and why.
    """

    source: str
    made_up: bool
    measured_share: float
    machine: str
    load: float
    measured: Measured
    settings: Settings
    plans: tuple[Plan, Plan, Plan]
    network: Network
    decision: Decision

    @property
    def plan(self) -> str:
        """A, B or C."""
        return self.decision.plan

    def introduction(self) -> list[str]:
        """Return what was measured, in sentences, and how far to trust it."""
        m = self.measured
        size, batch_size = format_bytes(m.raw_bytes), list(m.batch_size)
        lines = [f"{self.source}: {batch_size}, {size}; measured on {self.machine}."]
        iteration_s = self.settings.known_iteration_s
        lines += [] if iteration_s is None else [f"An iteration takes {format_seconds(iteration_s)}."]
        if self.made_up:
            lines.append(
                "The content is made up, and content decides: ratios and times are a guess. "
                "Give a batch of yours to know."
            )
        if self.measured_share < 1:
            lines.append(f"{format_percent(self.measured_share)} of its environments were measured, and scaled up.")
        if self.load > _BUSY:
            lines.append(
                f"The machine was busy already ({self.load:.1f} programs per core): take the times for too long."
            )
        return lines

    def speeds(self) -> list[str]:
        """Return how fast the batch is packed and read, in sentences."""
        m, s = self.measured, self.settings
        encode, decode = (m.raw_bytes / max(1e-9, cpu_s) for cpu_s in (m.encode_cpu_s, m.decode_cpu_s))
        lines = [
            f"Packing takes {format_seconds(m.encode_s)} ({format_seconds(m.encode_cpu_s)} of one core, "
            f"{format_bytes(encode)}/s per core), unpacking {format_seconds(m.decode_s)} "
            f"({format_seconds(m.decode_cpu_s)}, {format_bytes(decode)}/s per core).",
            f"RolloutStorage.save returns after {format_seconds(m.save_call_s)}, and writes "
            f"{format_bytes(m.file_bytes)} for {format_seconds(m.save_background_s)} in the background.",
            f"An epoch of {s.minibatches} minibatches takes {format_seconds(m.epoch_a_s)} to read in plan A and "
            f"{format_seconds(m.epoch_c_s)} in plan C, in the order of CompressedTensorDict.minibatches; with all "
            f"steps shuffled, {format_seconds(m.epoch_c_shuffled_s)}.",
        ]
        if s.step_s is not None:
            a, c = (epoch_s / s.minibatches for epoch_s in (m.epoch_a_s, m.epoch_c_s))
            lines.append(
                f"A minibatch takes {format_seconds(a)} to read in plan A and {format_seconds(c)} in plan C: "
                f"{format_percent(a / s.step_s)} and {format_percent(c / s.step_s)} of a training step."
            )
        return lines

    def transfer(self) -> list[str]:
        """Return what sending a batch takes, in sentences."""
        return [say_network(self.network)]

    def caveats(self) -> list[str]:
        """Return what the numbers leave out, in sentences."""
        m, s = self.measured, self.settings
        peak = format_bytes(m.raw_bytes + m.distinct_bytes + m.memory_packed_bytes)
        worth = format_seconds(cost_limit(self.plans[2].time_s))
        lines = [
            f"While plan C packs a batch, that batch and a copy are in memory as well, {peak} in all: it gives memory "
            "back for the updates, not for the collection."
            if s.on_host
            else f"Plan C helps on {s.device} only if the collector keeps no batches there: storing_device='cpu'."
        ]
        if s.known_iteration_s is None:
            lines.append(
                "How long a training iteration takes is not known, so costs are in milliseconds: give iteration_s "
                f"(--iteration-seconds). Plan C is for iterations of {worth} or more."
            )
        elif s.iteration_s is None:
            lines.append("An iteration is taken to be its updates: the collection comes on top, and costs are less.")
        return lines

    def reasons(self) -> list[str]:
        """Return the decision, in sentences."""
        lines = [f"{number}. {ask} {answer}" for number, (ask, answer) in enumerate(self.decision.tree, 1)]
        lines += [f"Why not {letter}: {why}" for letter, why in self.decision.why_not.items()]
        headline = self.decision.headline
        return [*lines, f"Advice: {headline[:1].lower()}{headline[1:]}"]

    def text(self) -> str:
        """Return all of it as plain text."""
        parts = [
            self.introduction(),
            align_columns(PLAN_COLUMNS, [plan_cells(plan) for plan in self.plans], num_left=2),
            align_columns(KEY_COLUMNS, [key_cells(key) for key in self.measured.keys], num_left=3),
            self.speeds(),
            self.transfer(),
            self.caveats(),
            self.reasons(),
        ]
        return "\n\n".join("\n".join(part) for part in parts)

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> dict[str, Any]:
        """Return all of it as a JSON object; sizes are in bytes, times in seconds, shares out of 1."""
        document = dataclasses.asdict(self)
        document["network"]["packed_s"] = self.network.packed_s
        document["measured"]["ratio"] = self.measured.raw_bytes / max(1, self.measured.file_bytes)
        for key in document["measured"]["keys"]:
            key["ratio"] = key["raw_bytes"] / max(1, key["packed_bytes"])
            key["shape"] = list(key["shape"])
        document["measured"] |= {
            "batch_size": list(self.measured.batch_size),
            "keys": list(document["measured"]["keys"]),
        }
        document["plans"] = list(document["plans"])
        document["decision"]["tree"] = [
            {"question": question, "answer": answer} for question, answer in self.decision.tree
        ]
        return document


_BUSY = 0.5
PLAN_COLUMNS = ("plan", "", "time per iteration", "memory", "disk per 1000 rollouts")
KEY_COLUMNS = ("key", "dtype", "shape", "size", "packed", "ratio", "pack", "unpack", "plan C")


def plan_cells(plan: Plan) -> list[str]:
    """Return a row of the table of plans."""
    time = format_seconds(plan.time_s) if plan.time_s else "nothing"
    share = "" if plan.share is None or not plan.time_s else f" ({format_percent(plan.share)})"
    host = f" + {format_bytes(plan.host_bytes)} on the host" if plan.host_bytes else ""
    disk = "-" if plan.disk_per_1000_bytes is None else format_bytes(plan.disk_per_1000_bytes)
    return [plan.letter, plan.title, time + share, format_bytes(plan.memory_bytes) + host, disk]


def key_cells(key: KeyNumbers) -> list[str]:
    """Return a row of the table of keys."""
    return [
        key.key + (" + next" if key.with_next else ""),
        key.dtype,
        "x".join(map(str, key.shape)),
        format_bytes(key.raw_bytes) if key.raw_bytes else "-",
        format_bytes(key.packed_bytes),
        format_ratio(key.raw_bytes, key.packed_bytes) if key.raw_bytes else "-",
        format_seconds(key.encode_cpu_s),
        format_seconds(key.decode_cpu_s),
        "packed" if key.packed_in_c else "as it is",
    ]


def advise(
    batch: TensorDictBase | Mapping[Any, Any] | str | os.PathLike[str] | None = None,
    *,
    step_s: float | None = None,
    iteration_s: float | None = None,
    epochs: int = 4,
    minibatches: int = 16,
    memory_limit_bytes: int | None = None,
    rollout_save_interval: int = 100,
    keep_rollouts: bool = False,
    bandwidth_bytes_s: float | None = None,
    device: str | torch.device = "cpu",
    num_envs: int = 1024,
    num_steps: int = 32,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Measure a batch on this machine, and say which plan suits it.

    Plan A is no compression in the loop, plan B selected rollouts kept on disk (`RolloutStorage`), plan C rollouts
    packed in memory while training (`CompressedTensorDict`). Blocks for some seconds, uses all cores meanwhile, and a
    few times the memory of the batch; of a batch over 256 MiB only so many environments are measured. The batch is not
    changed. A file is written for a moment, and deleted.

    Args:
        batch: A TensorDict ``[environment, time, ...]``; or a file of one, ``.slip`` or ``.pt``; or a run folder, for
            its newest rollout and the time of its iterations; or shapes by key, ``{"lidar": ((36, 4), "float32")}``,
            of which a batch is made up, as it is in NavRL's shapes for None. What is made up has ratios that are a
            guess. A key ``next/lidar`` follows ``lidar``, as TorchRL has it.
        step_s: How long the update of one minibatch takes in your training.
        iteration_s: How long a whole iteration takes: turns costs into percent.
        epochs: How often an iteration reads a batch.
        minibatches: In how many parts each time.
        memory_limit_bytes: How much memory rollouts may take, on `device`.
        rollout_save_interval: Every how many iterations a rollout would be kept.
        keep_rollouts: Whether you want to keep any.
        bandwidth_bytes_s: Of a network that batches would go through; 1 Gbit/s by default.
        device: Where training is.
        num_envs: How many environments a batch made up of shapes has.
        num_steps: How many steps of each.
        folder: Where rollouts would be kept, to measure that disk; by default where temporary files go.
        progress: Told in words what is being measured.

    Raises:
        RolloutError: If the batch is not a rollout, or its file would have to run code to be loaded.
        CorruptFileError: If its file is damaged, or something else.
        ConfigurationError: If a setting makes no sense.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"observation": torch.zeros(64, 32, 30)}, batch_size=[64, 32])
        >>> advice = advise(batch, iteration_s=2.5)
        >>> advice.plan, advice.plans[2].memory_bytes < advice.plans[0].memory_bytes
        ('A', True)
    """
    asked = {"bandwidth_bytes_s": bandwidth_bytes_s} if bandwidth_bytes_s is not None else {}
    settings = Settings(
        epochs=epochs,
        minibatches=minibatches,
        iteration_s=iteration_s,
        step_s=step_s,
        memory_limit_bytes=memory_limit_bytes,
        rollout_save_interval=rollout_save_interval,
        keep_rollouts=keep_rollouts,
        device=str(device),
        **asked,
    )
    place = _device(device)
    source = find_batch(batch, num_envs, num_steps)
    if settings.known_iteration_s is None and source.iteration_s is not None:
        settings = dataclasses.replace(settings, iteration_s=source.iteration_s)
    load = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0
    where = None if folder is None else Path(folder)
    measured = measure(source.batch, minibatches=minibatches, device=place, folder=where, progress=progress)
    return conclude(
        measured.scaled(source.scale),
        settings,
        source.name,
        made_up=source.made_up,
        measured_share=1 / source.scale,
        load=load,
    )


def conclude(
    measured: Measured,
    settings: Settings,
    source: str,
    *,
    made_up: bool = False,
    measured_share: float = 1.0,
    load: float = 0.0,
) -> Advice:
    """Make the advice that follows from numbers."""
    return Advice(
        source=source,
        made_up=made_up,
        measured_share=measured_share,
        machine=f"{platform.node() or 'this machine'}, {default_threads()} threads",
        load=load,
        measured=measured,
        settings=settings,
        plans=plans(measured, settings),
        network=network(measured, settings),
        decision=decide(measured, settings),
    )


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:120]
        raise ConfigurationError(f"device is {str(device)!r}, which cannot be used here ({reason})") from error
    if place.type == "meta":
        raise ConfigurationError("device is 'meta', which holds no data; expected cpu, cuda or another")
    return place
