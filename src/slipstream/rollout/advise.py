"""`advise`: measure a batch on this machine and decide which plan for rollouts suits it.

The decision is a pure function of the measured numbers and the settings, and its result is plain data. The command
``slipstream advise`` explains it in sentences.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from slipstream.checks import require_count, require_number, require_positive
from slipstream.errors import ConfigurationError, naming
from slipstream.rollout.measure import Measured, Progress, measure
from slipstream.rollout.sources import find_batch
from slipstream.text import format_bytes, format_seconds, plural
from slipstream.threads import default_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensordict import TensorDictBase

__all__ = ["Advice", "advise"]

Letter = Literal["A", "B", "C"]

# Plan C may take this share of an iteration: it makes a batch possible that would not fit otherwise.
MAX_SHARE_C = 0.20
# Plan B may take this share of an iteration: training does not need the rollouts that it keeps.
MAX_SHARE_B = 0.01
# A batch must get this many times smaller for packing to pay.
MIN_RATIO = 1.1


@dataclass(frozen=True)
class Settings:
    """What the user said about the training. `advise` explains the arguments."""

    epochs: int = 4
    minibatches: int = 16
    iteration_s: float | None = None
    step_s: float | None = None
    memory_limit_bytes: float | None = None
    rollout_save_interval: int = 100
    keep_rollouts: bool = False
    bandwidth_bytes_s: float = 125e6
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "rollout_save_interval"):
            require_count(name, getattr(self, name), most=10**9)
        for name in ("iteration_s", "step_s", "memory_limit_bytes", "bandwidth_bytes_s"):
            value = getattr(self, name)
            if value is not None:
                require_positive(name, value)
                # Quotients of more extreme numbers overflow.
                require_number(name, value, 1e-9, 1e18)

    @property
    def known_iteration_s(self) -> float | None:
        """How long an iteration takes. If only `step_s` is known, its updates alone: a lower bound."""
        if self.iteration_s is None and self.step_s is not None:
            return self.epochs * self.minibatches * self.step_s
        return self.iteration_s

    def share_of_iteration(self, time_s: float) -> float | None:
        """Return a time as a share of an iteration. None if the duration of an iteration is unknown."""
        if self.known_iteration_s is None:
            return None
        return time_s / self.known_iteration_s

    @property
    def on_host(self) -> bool:
        """Whether training uses the memory in which plan C keeps packed data."""
        return self.device.startswith("cpu")


@dataclass(frozen=True)
class Plan:
    """What a plan takes."""

    letter: Letter
    time_s: float  # what it adds to an iteration on average, without background work
    share: float | None  # the same as a share of an iteration; None if its duration is unknown
    memory_bytes: int  # on the device that trains
    host_bytes: int  # in addition, if that device is not the host
    disk_per_1000_bytes: int | None  # what 1000 saved rollouts take; None if the plan saves none


@dataclass(frozen=True)
class Network:
    """What sending a batch to another machine takes, raw and packed."""

    bandwidth_bytes_s: float
    raw_s: float
    pack_s: float
    send_s: float
    unpack_s: float  # on a machine like this one
    packed_s: float  # packing, sending and unpacking
    packed_wins: bool
    break_even_bytes_s: float | None  # packed is faster below this bandwidth; None if at no bandwidth


@dataclass(frozen=True)
class Decision:
    """The plan, and the facts that decided."""

    plan: Letter
    fits: bool  # the raw batch fits in the memory limit, or there is no limit
    packing_pays: bool  # plan C needs clearly less memory than the raw batch, its cache included
    packed_fits: bool  # plan C fits in the memory limit
    costs_too_much: bool | None  # plan C costs too large a share; None if an iteration's duration is unknown
    min_iteration_s: float  # plan C is acceptable for longer iterations than this
    file_is_smaller: bool  # the file of plan B is clearly smaller than the raw batch
    save_fits: bool  # the batch and the copy that a save makes fit in the memory limit
    min_save_interval: int | None  # the smallest interval at which plan B is cheap; None if that is unknown
    save_interval: int  # recommended: the requested interval, or the smallest one if that is larger
    num_envs_that_fit: int | None  # environments whose raw steps fit in the memory limit; None without a limit


@dataclass(frozen=True)
class Advice:
    """The recommended plan and the numbers behind it, as plain data. ``str(advice)`` is one line.

    Attributes:
        settings: What the numbers were compared with.
        measured: Sizes and times, in total and by key.
        plans: What plans A, B and C take.
        network: What sending a batch takes.
        decision: The plan, and the facts that decided.
        source: The path of the batch, or "the batch".
        iteration_from_run: Whether the duration of an iteration is from the metrics of a run folder.
        measured_share: Share of the environments that was measured; the numbers are scaled up to all.
        machine: Name of the machine and number of threads.
        load: Runnable processes per core before measuring; 0 if unknown.
    """

    settings: Settings
    measured: Measured
    plans: tuple[Plan, Plan, Plan]
    network: Network
    decision: Decision
    source: str = "the batch"
    iteration_from_run: bool = False
    measured_share: float = 1.0
    machine: str = "this machine"
    load: float = 0.0

    @property
    def plan(self) -> Letter:
        """A, B or C."""
        return self.decision.plan

    def __str__(self) -> str:
        chosen = self.plans["ABC".index(self.plan)]
        memory = format_bytes(chosen.memory_bytes)
        return f"plan {self.plan} for {self.source}: {format_seconds(chosen.time_s)} per iteration, {memory} of memory"

    def to_json(self) -> dict[str, Any]:
        """Return everything as a dict for `json.dumps`: sizes in bytes, times in seconds, shares of 1."""
        document = {"plan": self.plan, **dataclasses.asdict(self)}
        measured = document["measured"]
        measured["ratio"] = measured["raw_bytes"] / max(1, measured["file_bytes"])
        for key in measured["keys"]:
            key["ratio"] = key["raw_bytes"] / max(1, key["packed_bytes"])
        return document


def advise(
    batch: TensorDictBase | Mapping[Any, Any] | str | os.PathLike[str],
    *,
    step_s: float | None = None,
    iteration_s: float | None = None,
    epochs: int = 4,
    minibatches: int = 16,
    memory_limit_bytes: float | None = None,
    rollout_save_interval: int = 100,
    keep_rollouts: bool = False,
    bandwidth_bytes_s: float = 125e6,
    device: str | torch.device = "cpu",
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Measure a batch on this machine and recommend a plan for rollouts.

    Plan A does not compress, plan B keeps selected rollouts on disk (`RolloutStorage`), and plan C packs rollouts in
    memory while training (`CompressedTensorDict`). Blocks for some seconds, uses all cores and a few times the memory
    of the batch. Of a batch over 256 MiB only some environments are measured. The batch is not changed, and the
    temporary file that is written is deleted.

    Args:
        batch: A TensorDict of shape ``[environment, time, ...]``, a dict of tensors, the path of a ``.slip`` or ``.pt``
            file, or a run folder, for its newest rollout and the duration of its iterations.
        step_s: How long the update of one minibatch takes.
        iteration_s: How long an iteration takes. Needed to judge costs.
        epochs: How often an iteration reads the batch.
        minibatches: Number of minibatches per epoch.
        memory_limit_bytes: How much memory rollouts may take on `device`.
        rollout_save_interval: Number of iterations between saved rollouts.
        keep_rollouts: Whether you want to keep rollouts.
        bandwidth_bytes_s: Bandwidth of a network; 1 Gbit/s by default.
        device: The device that trains.
        folder: An existing folder on the disk for rollouts, to measure it. By default that of temporary files.
        progress: Called with a phrase before each measurement.

    Raises:
        RolloutError: If the batch is not a rollout, or loading its file would run code.
        CorruptFileError: If its file is damaged or has another format.
        ConfigurationError: If a setting is invalid.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"observation": torch.zeros(64, 32, 30)}, batch_size=[64, 32])
        >>> advice = advise(batch, iteration_s=2.5)
        >>> advice.plan, advice.plans[2].memory_bytes < advice.plans[0].memory_bytes
        ('A', True)
    """
    settings = Settings(
        epochs=epochs,
        minibatches=minibatches,
        iteration_s=iteration_s,
        step_s=step_s,
        memory_limit_bytes=memory_limit_bytes,
        rollout_save_interval=rollout_save_interval,
        keep_rollouts=keep_rollouts,
        bandwidth_bytes_s=bandwidth_bytes_s,
        device=str(device),
    )
    target = _require_device(device)
    if folder is not None and not Path(folder).is_dir():
        raise ConfigurationError(f"folder is {os.fspath(folder)!r}, expected an existing folder")
    source = find_batch(batch)
    iteration_from_run = settings.known_iteration_s is None and source.iteration_s is not None
    if iteration_from_run:
        settings = dataclasses.replace(settings, iteration_s=source.iteration_s)
    # Measuring itself raises the load, so read it first.
    load = 0.0
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
    with naming(source.name):
        measured = measure(source.batch, minibatches, target, folder, progress)
    return conclude(
        measured.scaled(source.scale),
        settings,
        source=source.name,
        iteration_from_run=iteration_from_run,
        measured_share=1 / source.scale,
        machine=f"{platform.node() or 'this machine'}, {plural(default_threads(), 'thread')}",
        load=load,
    )


def conclude(measured: Measured, settings: Settings, **context: Any) -> Advice:
    """Return the advice that follows from measured numbers. `context` sets the other fields of `Advice`."""
    return Advice(
        settings,
        measured,
        compare_plans(measured, settings),
        compare_network(measured, settings),
        decide(measured, settings),
        **context,
    )


def compare_plans(measured: Measured, settings: Settings) -> tuple[Plan, Plan, Plan]:
    """Return what each plan takes."""
    time_b = measured.save_call_s / settings.rollout_save_interval
    # Plan C may read faster than plan A because its minibatches lie closer together in memory. Plan A could use the
    # same order, so this does not count in favor of C.
    slower_epoch_s = max(0.0, measured.epoch_c_s - measured.epoch_a_s)
    time_c = measured.memory_pack_s + settings.epochs * slower_epoch_s
    raw = measured.raw_bytes
    copy = measured.distinct_bytes
    packed = measured.memory_packed_bytes + measured.memory_cache_bytes
    disk = 1000 * measured.file_bytes
    share_b = settings.share_of_iteration(time_b)
    share_c = settings.share_of_iteration(time_c)
    a = Plan("A", 0.0, settings.share_of_iteration(0.0), raw, 0, None)
    if settings.on_host:
        b = Plan("B", time_b, share_b, raw + copy, 0, disk)
        c = Plan("C", time_c, share_c, packed, 0, None)
    else:
        # Saves copy to the host. Plan C keeps packed data on the host and one minibatch on the device.
        b = Plan("B", time_b, share_b, raw, copy, disk)
        c = Plan("C", time_c, share_c, raw // settings.minibatches, packed, None)
    return a, b, c


def compare_network(measured: Measured, settings: Settings) -> Network:
    """Return what sending a batch takes. Packed wins if ``raw / bandwidth > pack + packed / bandwidth + unpack``."""
    bandwidth = settings.bandwidth_bytes_s
    pack_s = measured.copy_s + measured.encode_s
    send_s = measured.file_bytes / bandwidth
    saved_bytes = measured.raw_bytes - measured.file_bytes
    break_even = None
    if saved_bytes > 0:
        break_even = saved_bytes / max(1e-9, pack_s + measured.load_s)
    return Network(
        bandwidth_bytes_s=bandwidth,
        raw_s=measured.raw_bytes / bandwidth,
        pack_s=pack_s,
        send_s=send_s,
        unpack_s=measured.load_s,
        packed_s=pack_s + send_s + measured.load_s,
        packed_wins=break_even is not None and bandwidth < break_even,
        break_even_bytes_s=break_even,
    )


def decide(measured: Measured, settings: Settings) -> Decision:
    """Choose a plan. The same numbers always give the same answer."""
    a, b, c = compare_plans(measured, settings)
    limit = math.inf
    num_envs_that_fit = None
    if settings.memory_limit_bytes is not None:
        limit = settings.memory_limit_bytes
        num_envs_that_fit = math.floor(measured.num_envs * limit / measured.raw_bytes)
    costs_too_much = None
    if c.share is not None:
        costs_too_much = c.share >= MAX_SHARE_C
    min_save_interval = None
    if settings.known_iteration_s is not None:
        min_save_interval = _min_save_interval(measured, settings.known_iteration_s)
    fits = a.memory_bytes <= limit
    packing_pays = measured.raw_bytes > MIN_RATIO * (measured.memory_packed_bytes + measured.memory_cache_bytes)
    packed_fits = c.memory_bytes <= limit
    plan: Letter = "A"
    if not fits and packing_pays and packed_fits and not costs_too_much:
        plan = "C"
    elif settings.keep_rollouts:
        plan = "B"
    return Decision(
        plan=plan,
        fits=fits,
        packing_pays=packing_pays,
        packed_fits=packed_fits,
        costs_too_much=costs_too_much,
        min_iteration_s=c.time_s / MAX_SHARE_C,
        file_is_smaller=measured.raw_bytes > MIN_RATIO * measured.file_bytes,
        save_fits=b.memory_bytes <= limit,
        min_save_interval=min_save_interval,
        save_interval=max(settings.rollout_save_interval, min_save_interval or 1),
        num_envs_that_fit=num_envs_that_fit,
    )


def _min_save_interval(measured: Measured, iteration_s: float) -> int:
    """Return the smallest interval at which saves are cheap, and each is written before the next one."""
    cheap = measured.save_call_s / (MAX_SHARE_B * iteration_s)
    written = measured.save_background_s / iteration_s
    return max(1, math.ceil(cheap), math.ceil(written))


def _require_device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:120]
        raise ConfigurationError(f"device is {str(device)!r}, which is not available ({reason})") from error
    if target.type == "meta":
        raise ConfigurationError("device is 'meta', which holds no data; expected cpu, cuda or another device")
    return target
