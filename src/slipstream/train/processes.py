"""The processes of a command under ``torchrun``: how they are started, find each other, wait and end.

torchrun tells each process its place in environment variables. Before the processes form a group, they share values
through torchrun's store: which kind of group it is depends on the settings, and only the first process reads those.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime as dt
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from slipstream.dist.group import from_rank, portable
from slipstream.errors import ConfigurationError
from slipstream.train.overrides import parse_overrides
from slipstream.train.settings import TrainSettings

T = TypeVar("T")

_JOIN_S = 600.0  # until the first process has read the settings: importing torch may take minutes on a shared disk
_PARTING_S = 20.0  # less than the 30 s after which torchrun kills
_REMEDY = "start slipstream with torchrun, or unset WORLD_SIZE for a single process"
_SIGNAL_ON_END_OF_PARENT = 1  # PR_SET_PDEATHSIG of prctl.h
_BEGUN = "slipstream/begun"
_START = "start"
_LEFT = "left"


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process among those of a job.

    Attributes:
        rank: Its number.
        world: How many there are.
        store: Where they share values.
    """

    rank: int
    world: int
    store: Any

    def first(self, function: Callable[[], T]) -> T:
        """Call a function in the first process, and return its result, or raise its exception, in all; only once.

        Raises:
            Exception: What the function raised. In the other processes, it has the note "in rank 0".
        """
        if self.rank == 0:
            try:
                result = function()
            except Exception as error:
                self.store.set(_START, pickle.dumps(portable(error)))
                raise
            self.store.set(_START, pickle.dumps(result))
            return result
        received = pickle.loads(self.store.get(_START))  # noqa: S301 - from a process of the same run
        if isinstance(received, Exception):
            raise from_rank(received, 0)
        return received  # type: ignore[no-any-return]

    def form_group(self, settings: TrainSettings) -> None:
        """Let ``torch.distributed`` connect the processes, as the settings say."""
        device = process_device(settings)
        backend = settings.dist.backend
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch_dist.init_process_group(
            backend,
            store=PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world,
            timeout=dt.timedelta(seconds=settings.dist.timeout_s),
        )

    def leave(self, *, waits: bool) -> None:
        """Close the connections. Without this, torch may abort a process that ends.

        Args:
            waits: Whether the first process leaves before the others. Processes that fail should: torchrun ends all
                others when one fails, and the first one may still be writing.
        """
        if torch_dist.is_initialized():
            torch_dist.destroy_process_group()
        patience = dt.timedelta(seconds=_PARTING_S)
        # The store may be gone already, with the process that held it.
        with contextlib.suppress(RuntimeError):
            if self.rank > 0 and waits:
                self.store.wait([f"{_LEFT} 0"], patience)
            self.store.set(f"{_LEFT} {self.rank}", "")
            if self.rank == 0 and waits and "TORCHELASTIC_RUN_ID" not in os.environ:
                # Without torchrun, the store is part of this process.
                self.store.wait([f"{_LEFT} {rank}" for rank in range(1, self.world)], patience)


def connect() -> Processes | None:
    """Return this process among those of its job, or None if it trains by itself.

    Raises:
        ConfigurationError: If a launcher has told this process only a part of its place, or if the processes of the job
            cannot reach each other.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_launcher()
    if not under_torchrun() or world_size() == 1:
        return None
    _require_place()
    try:
        store, rank, world = next(rendezvous("env://", timeout=dt.timedelta(seconds=_JOIN_S)))
    except (RuntimeError, ValueError) as error:
        # Torch has several exceptions for this, all derived from these.
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(f"the processes of this job cannot meet at {address} ({reason})") from error
    # torchrun keeps its store when it restarts a job, with all values of the attempts before.
    return Processes(rank, world, PrefixStore(f"slipstream/{_restarts()}", store))


def process_device(settings: TrainSettings) -> torch.device:
    """Return the device of this process: of several processes on a machine with GPUs, each has its own.

    Raises:
        ConfigurationError: If there are fewer GPUs than processes, or one GPU was chosen for all.
    """
    device = settings.torch_device()
    if device.type != "cuda" or not under_torchrun() or world_size() == 1:
        return device
    if ":" in str(device):
        raise ConfigurationError(f"device is {device}, expected cuda: each process trains on its own GPU")
    local = _local_rank()
    if local >= torch.cuda.device_count():
        raise ConfigurationError(
            f"process {local} of this machine has no GPU, because there are {torch.cuda.device_count()}: start fewer "
            "processes, or set device=cpu"
        )
    return torch.device("cuda", local)


def take_gpu() -> None:
    """Let ``cuda`` mean another GPU in each process of this machine, as far as there are enough."""
    if torch.cuda.is_available():
        torch.cuda.set_device(_local_rank() % torch.cuda.device_count())


def _local_rank() -> int:
    """Return the number of this process among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def under_torchrun() -> bool:
    """Return whether torchrun, or something like it, started this process."""
    return "WORLD_SIZE" in os.environ


def _end_with_launcher() -> None:
    """Let this process be killed when torchrun is, on Linux: nobody else would end it, or know that it still trains."""
    # Not SIGTERM: Linux sends the signal once for each thread of torchrun, which looks like an impatient user.
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(_SIGNAL_ON_END_OF_PARENT, int(signal.SIGKILL), 0, 0, 0)


def world_size() -> int:
    """Return how many processes torchrun has started.

    Raises:
        ConfigurationError: If the environment does not say so in a number.
    """
    return _place("WORLD_SIZE", 1)


def _require_place() -> None:
    """Require all variables by which processes find each other.

    Some launchers set only a few of them, for which torch raises an error that names no remedy.
    """
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigurationError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {name} is not set: {_REMEDY}")
    _place("RANK", 0)
    _place("MASTER_PORT", 1)


def _place(name: str, least: int) -> int:
    """Return a number that a launcher has put into the environment."""
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(
            f"{name} is {text!r} in the environment, expected a number of at least {least}: {_REMEDY}"
        )
    return int(text)


def torchrun_command(devices: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a command of ``slipstream`` in several processes on this machine.

    Args:
        devices: How many processes.
        arguments: Of ``slipstream``, the command first.
    """
    launcher = [sys.executable, "-m", "slipstream.dist.launch", "--standalone", f"--nproc-per-node={devices}"]
    return [*launcher, "-m", "slipstream", *arguments]


def settle_devices(settings: TrainSettings, overrides: Sequence[str]) -> TrainSettings:
    """Return settings with the number of processes that torchrun started, if it did.

    Args:
        settings: The settings of the run.
        overrides: The command line.

    Raises:
        ConfigurationError: If the command line has another number, or if they cannot divide the run.
    """
    if not under_torchrun():
        return settings
    if "devices" in _given(overrides):
        require_devices(settings.devices)
    settled = dataclasses.replace(settings, devices=world_size())
    settled.check()
    return settled


def require_devices(devices: int) -> None:
    """Require that torchrun has started this number of processes.

    Raises:
        ConfigurationError: If it has started another number.
    """
    world = world_size()
    if devices != world:
        raise ConfigurationError(
            f"devices is {devices}, but torchrun has started {world}: leave devices out, or start slipstream without "
            "torchrun"
        )


def attempt_overrides(overrides: Sequence[str], *, has_begun: Callable[[], bool]) -> list[str]:
    """Return the command line for this attempt of a job: one that torchrun has restarted resumes its run.

    Args:
        overrides: The command line of the job.
        has_begun: Returns whether an earlier attempt has trained. If none has, the run of that name is another one,
            which the first attempt refused to continue.

    Raises:
        ConfigurationError: If torchrun may restart the job, and the run has no name by which it could be found again.
    """
    if not _is_restartable():
        return list(overrides)
    given = _given(overrides)
    added = []
    if given.get("resume") not in (None, "auto"):
        return list(overrides)
    if "name" not in given:
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        if job == "none":
            raise ConfigurationError(
                "torchrun --max-restarts finds a run by its name: set name=..., or pass --rdzv-id or --standalone to "
                "torchrun"
            )
        added.append(f"name='job-{job}'")
    if _restarts() and "resume" not in given and has_begun():
        added.append("resume=auto")
    return [*overrides, *added]


def remember_begin(processes: Processes | None) -> None:
    """Let later attempts of this job know that the run is theirs. Call it before training."""
    if _is_restartable():
        _job_store(processes).set(_BEGUN, "")


def has_begun(processes: Processes | None) -> bool:
    """Return whether an attempt of this job has called `remember_begin`."""
    return bool(_job_store(processes).check([_BEGUN]))


def _job_store(processes: Processes | None) -> Any:
    """Return the store that all attempts of a job share."""
    if processes is not None:
        return processes.store.underlying_store
    store, _, _ = next(rendezvous("env://", timeout=dt.timedelta(seconds=_JOIN_S)))
    return store


def _is_restartable() -> bool:
    """Return whether torchrun restarts this job if a process fails, or has done so."""
    return restarts_left() + _restarts() > 0


def restarts_left() -> int:
    """Return how often torchrun would still restart the job if a process failed."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - _restarts()


def _given(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings on a command line."""
    return {override.key_or_group: override.value() for override in parse_overrides(overrides)}


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
