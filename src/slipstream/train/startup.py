"""What a process is set to before it trains, and whether what it should do fits into it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from slipstream.errors import ConfigurationError
from slipstream.text import format_bytes
from slipstream.threads import usable_cores
from slipstream.train.folder import RunFolder, find_run
from slipstream.train.loggers import new_run_id
from slipstream.train.settings import TrainSettings, compose_settings, override_settings, parse_overrides

_BYTES_PER_STEP = 2200  # of a rollout: observations twice, actions, rewards, statistics
_STEPS_HELD = 2.5  # the steps, the rollout made of them, and what training adds

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_BLOCKS = (1 << 30, 1 << 25)  # the second is as much as older ones allow

# What may differ between a run and the command line that goes on with it by name.
_FREE = ("resume", "headless", "max_frame_num", "num_threads", "wandb")


def prepare_process(num_threads: int = 0) -> list[str]:
    """Set torch up for training on a CPU; returns what was set, in words.

    Denormal numbers are flushed to zero: trained weights are full of them, and they take many times longer. OpenMP's
    threads should sleep while they wait (``OMP_WAIT_POLICY=PASSIVE``), or they keep everything else from the cores;
    that has to be in the environment before torch is imported, so here it is only looked at. Memory that is freed stays
    with the process: each iteration needs as much again, and taking it back from Linux page by page costs a tenth of
    the time.

    Args:
        num_threads: How many threads torch computes with; 0: one for each core that this process may use.
    """
    cores = usable_cores()
    threads = num_threads or cores
    torch.set_num_threads(threads)
    said = [f"{threads} threads on {cores} cores"]
    if torch.set_flush_denormal(True):
        said.append("denormal numbers flushed to zero")
    if _keep_freed_memory():
        said.append("freed memory is kept")
    said.append(_waiting())
    return said


def _waiting() -> str:
    """Say how threads wait for each other."""
    if os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        return "threads spin while they wait: set OMP_WAIT_POLICY=PASSIVE if the machine is busy"
    if os.environ.get("GOMP_SPINCOUNT") == "0":
        return "threads sleep at once while they wait, because others use the cores (GOMP_SPINCOUNT=0)"
    return "threads sleep while they wait (OMP_WAIT_POLICY=PASSIVE)"


def _keep_freed_memory() -> bool:
    """Tell glibc to take large blocks from its heap, and never to give the end of it back; returns whether it does."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another system, another C library
        return False
    from_heap = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_BLOCKS)
    return bool(from_heap and mallopt(_M_TRIM_THRESHOLD, _LARGEST_BLOCKS[0]))


def seed_everything(seed: int) -> None:
    """Seed the global random numbers of Python, NumPy and torch: a checkpoint holds them all."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def open_run(overrides: Sequence[str]) -> tuple[TrainSettings, RunFolder, bool]:
    """Find out which run a command line means; nothing is written.

    ``resume=FOLDER`` goes on with that run and its settings, of which single ones may be overridden. ``resume=auto``
    goes on with the run of the given name if there is one, and begins it otherwise. A run that was ended before its
    first checkpoint begins again.

    Args:
        overrides: The command line.

    Returns:
        Its settings, its folder, and whether there is a checkpoint to go on from.

    Raises:
        ConfigurationError: If the settings make no sense, there is no such run, or one of that name has other settings.
    """
    given = {override.key_or_group: override for override in parse_overrides(overrides)}
    resume = str(given["resume"].value()) if "resume" in given else "None"
    if resume not in ("None", "auto"):
        folder = RunFolder(Path(resume).expanduser())
        others = [override.input_line for key, override in given.items() if key != "resume"]
        settings = override_settings(folder.settings(), [text for text in others if text])
        return settings, folder, folder.has_checkpoint()
    settings = compose_settings(overrides)
    settings.resume = None
    folder = find_run(settings)
    if settings.name is None and resume == "auto":
        raise ConfigurationError("resume=auto goes on with a run by its name: name=... is missing")
    if not folder.config.exists():
        settings.name = folder.path.name
        if settings.wandb.mode != "disabled" and settings.wandb.run_id is None:
            settings.wandb.run_id = new_run_id()
        return settings, folder, False
    if resume != "auto":
        raise ConfigurationError(
            f"{folder.path} holds a run already: resume={folder.path} goes on with it, name=... begins another"
        )
    before = folder.settings()
    _require_same(before, settings, folder)
    kept = dataclasses.replace(settings, wandb=before.wandb, name=before.name)
    return kept, folder, folder.has_checkpoint()


def require_memory(settings: TrainSettings) -> None:
    """Refuse a training whose rollouts would not fit into memory, before it brings the machine down.

    Raises:
        ConfigurationError: If they would not.
    """
    device = settings.torch_device()
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    needed = settings.frames_per_iteration * _BYTES_PER_STEP * _STEPS_HELD
    if free is not None and needed > free:
        raise ConfigurationError(
            f"env.num_envs={settings.env.num_envs} times algo.training_frame_num={settings.algo.training_frame_num} "
            f"steps need about {format_bytes(needed)}, and {format_bytes(free)} of memory are free"
        )


def _require_same(before: TrainSettings, now: TrainSettings, folder: RunFolder) -> None:
    old, new = dataclasses.asdict(before), dataclasses.asdict(now)
    differing = [name for name in old if name not in (*_FREE, "name") and old[name] != new[name]]
    if differing:
        raise ConfigurationError(
            f"{folder.path} was begun with other settings of {', '.join(differing)}: resume={folder.path} goes on with "
            "its own, name=... begins another"
        )


def _free_memory() -> int | None:
    """Return how many bytes of memory may still be used, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else None
