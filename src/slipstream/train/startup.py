"""Prepare a process for training: threads, memory, seeds, and the run that a command line refers to."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch

from slipstream.dist.threads import local_world_size, numerics
from slipstream.errors import ConfigurationError
from slipstream.rollout.storage import RolloutStorage
from slipstream.run.folder import CONFIG, LAST, RunFolder, find_run, follow_link
from slipstream.store.urls import ObjectPath, as_path
from slipstream.text import alternatives, format_bytes, plural
from slipstream.threads import usable_cores
from slipstream.train.loggers import new_run_id
from slipstream.train.overrides import parse_overrides
from slipstream.train.settings import TrainSettings, compose_settings, override_settings, settings_of
from slipstream.train.stored import find_stored, read_settings, require_same_run

# A step of a rollout: observations twice, actions, rewards, statistics.
BYTES_PER_STEP = 2200
# The steps, the rollout made of them, and the intermediate results of training.
_STEPS_HELD = 2.5

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Older versions of glibc allow no more than the second.
_LARGEST_BLOCKS = (1 << 30, 1 << 25)


def prepare_process(num_threads: int = 0) -> list[str]:
    """Configure torch for training on a CPU; returns a description of what was set, one line each.

    Denormal numbers are flushed to zero: trained weights contain many of them, and arithmetic with them is much slower.
    Freed memory stays with the process: each iteration needs it again, and getting it back from Linux page by page
    takes a tenth of the time. OpenMP threads should sleep while they wait (``OMP_WAIT_POLICY=PASSIVE``), or they occupy
    the cores. That must be in the environment before torch is imported, so it is only reported here.

    Args:
        num_threads: How many threads torch uses; 0: one for each core that this process may use.
    """
    cores = usable_cores()
    threads = num_threads or cores
    torch.set_num_threads(threads)
    lines = [f"{plural(threads, 'thread')} on {plural(cores, 'CPU core')}"]
    if torch.set_flush_denormal(True):
        lines.append("denormal numbers flushed to zero")
    if _keep_freed_memory():
        lines.append("freed memory is kept")
    lines.append(_waiting())
    return lines


def _waiting() -> str:
    """Return how threads wait for each other."""
    if os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        return "threads spin while they wait: set OMP_WAIT_POLICY=PASSIVE if the machine is busy"
    if os.environ.get("GOMP_SPINCOUNT") == "0":
        return "threads sleep at once while they wait, because others use the cores (GOMP_SPINCOUNT=0)"
    return "threads sleep while they wait (OMP_WAIT_POLICY=PASSIVE)"


def _keep_freed_memory() -> bool:
    """Make glibc allocate large blocks on its heap and never shrink it; returns whether that worked."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        # Another system, or another C library.
        return False
    from_heap = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_BLOCKS)
    return bool(from_heap and mallopt(_M_TRIM_THRESHOLD, _LARGEST_BLOCKS[0]))


def open_run(overrides: Sequence[str]) -> tuple[TrainSettings, RunFolder, bool]:
    """Find the run that a command line refers to. Writes nothing.

    ``resume=FOLDER``, or ``resume=NAME`` for a run in ``run_dir``, resumes that run with its settings, of which single
    ones may be overridden. ``resume=last`` resumes the newest one. ``resume=URL`` resumes a run in an object store, in
    a new folder if this machine has none of it. ``resume=auto`` resumes the run of the given name or
    ``checkpoint_url`` if it exists, and starts it otherwise. A run that was killed before its first checkpoint starts
    over.

    `Trainer.restore` compares the settings with those of the checkpoint and refuses those that must not change.

    Args:
        overrides: The command line.

    Returns:
        Its settings, its folder, and whether there is a checkpoint to resume from.

    Raises:
        ConfigurationError: If the settings are invalid, if there is no such run, or if a new run has the name or URL of
            an existing one.
        StoreError: If an object store has to be read and cannot be.
    """
    url = _resumed_url(overrides)
    folder = None
    is_stored = False
    if url is None:
        folder = _resumed_folder(overrides)
    if url is not None:
        settings = _stored_settings(overrides, url)
        folder = find_run(settings.run_dir, settings.name)
        require_same_run(settings, folder, url)
        is_stored = True
    elif folder is None:
        settings = compose_settings(overrides)
        folder = _find_by_name(settings)
        is_stored = find_stored(settings, folder)
    else:
        settings = _resumed_settings(overrides, folder)
    settings.resume = None
    # The folder may have been renamed since. A copy of runs/last may even have the name of the link.
    if folder.name != LAST:
        settings.name = folder.name
    if settings.wandb.mode != "disabled" and settings.wandb.run_id is None:
        settings.wandb.run_id = new_run_id()
    return settings, folder, is_stored or folder.has_checkpoint()


def resolve_settings(overrides: Sequence[str]) -> TrainSettings:
    """Return the settings that a command line results in: those of the run that it resumes, or new ones.

    Args:
        overrides: The command line.

    Raises:
        ConfigurationError: If the settings are invalid, or if there is no such run.
    """
    url = _resumed_url(overrides)
    if url is not None:
        return _stored_settings(overrides, url)
    folder = _resumed_folder(overrides)
    if folder is None:
        return compose_settings(overrides)
    return _resumed_settings(overrides, folder)


def _resumed_url(overrides: Sequence[str]) -> ObjectPath | None:
    """Return the object store that ``resume=`` names; None if it names something else."""
    given = {override.key_or_group: override.value() for override in parse_overrides(overrides)}
    path = as_path(str(given.get("resume")))
    if isinstance(path, ObjectPath):
        return path
    return None


def _stored_settings(overrides: Sequence[str], url: ObjectPath) -> TrainSettings:
    """Return the settings of a run in an object store, with those of the command line in their place."""
    given = {override.key_or_group: override for override in parse_overrides(overrides)}
    others = [override.input_line or "" for key, override in given.items() if key != "resume"]
    settings = override_settings(read_settings(url), others)
    if "checkpoint_url" not in given:
        settings.checkpoint_url = str(url)
    return settings


def _resumed_folder(overrides: Sequence[str]) -> RunFolder | None:
    """Return the folder that ``resume=`` names; None without it, or for ``resume=auto``, which depends on the name."""
    given = {override.key_or_group: override.value() for override in parse_overrides(overrides)}
    resume = given.get("resume")
    if resume is None or resume == "auto":
        return None
    path = Path(str(resume)).expanduser()
    places = [path]
    # A name is looked up where runs are. It must not refer to another folder that happens to have the same name.
    if len(path.parts) == 1:
        run_dir = given.get("run_dir", compose_settings().run_dir)
        places.append(Path(str(run_dir)).expanduser() / path)
    for place in places:
        if (place / CONFIG).is_file():
            return RunFolder(follow_link(place))
    for place in places:
        if place.is_dir():
            # What is missing there is reported by the folder.
            return RunFolder(follow_link(place))
    raise ConfigurationError(f"resume={resume}: there is no such run, expected a folder {alternatives(places)}")


def _resumed_settings(overrides: Sequence[str], folder: RunFolder) -> TrainSettings:
    """Return the settings of a run, with those of the command line in their place."""
    given = {override.key_or_group: override for override in parse_overrides(overrides)}
    others = [override.input_line or "" for key, override in given.items() if key != "resume"]
    settings = override_settings(settings_of(folder), others)
    _require_same_place(settings, folder, given)
    return settings


def _find_by_name(settings: TrainSettings) -> RunFolder:
    """Return the folder of a run by its name: a new one, or an existing one with ``resume=auto``."""
    if settings.name is None and settings.resume == "auto":
        raise ConfigurationError("resume=auto needs the name of the run: name=... is missing")
    folder = find_run(settings.run_dir, settings.name)
    if not folder.config.exists():
        return folder
    if settings.resume != "auto":
        raise ConfigurationError(
            f"{folder.path} already contains a run: resume it with resume={folder.path}, or choose another name="
        )
    if settings.wandb.run_id is None:
        # Weights & Biases finds the run by this number.
        settings.wandb.run_id = settings_of(folder).wandb.run_id
    return folder


def _require_same_place(settings: TrainSettings, folder: RunFolder, given: Container[str]) -> None:
    """Refuse a name or a run_dir on the command line that contradicts the folder to resume."""
    real = Path(os.path.realpath(folder.path))
    parent = os.path.realpath(Path(settings.run_dir).expanduser())
    is_moved = parent != str(real.parent)
    contradictions = []
    if "name" in given and settings.name != real.name:
        contradictions.append(f"name={settings.name}")
    if "run_dir" in given and is_moved:
        contradictions.append(f"run_dir={settings.run_dir}")
    if contradictions:
        raise ConfigurationError(
            f"{' '.join(contradictions)} contradicts resume={folder.path}: resuming a run does not rename or move it"
        )
    if is_moved:
        settings.run_dir = str(real.parent)


def require_memory(settings: TrainSettings) -> None:
    """Refuse settings whose rollouts would not fit into memory, with those of the other processes on this machine.

    Raises:
        ConfigurationError: If they would not.
    """
    device = settings.torch_device()
    needed = settings.frames_per_iteration * BYTES_PER_STEP * _STEPS_HELD / settings.devices
    if device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(device)[0]
    else:
        free = _free_memory()
        needed *= min(settings.devices, local_world_size())
    if free is not None and needed > free:
        raise ConfigurationError(
            f"env.num_envs={settings.env.num_envs} times algo.training_frame_num={settings.algo.training_frame_num} "
            f"steps need about {format_bytes(needed)}, and {format_bytes(free)} of memory are free"
        )


def make_storages(
    settings: TrainSettings, folder: RunFolder, *, writes: bool
) -> tuple[RolloutStorage | None, RolloutStorage | None]:
    """Return where rollouts go that are kept for themselves, and those that are kept beside checkpoints."""
    level = settings.save_compression_level
    kept = beside = None
    if not writes:
        return kept, beside
    if settings.rollout_save_interval:
        kept = RolloutStorage(folder.rollouts, level, keep_last=settings.keep_rollouts)
    if settings.compress_lidar:
        beside = RolloutStorage(folder.checkpoints, level, keep_last=settings.keep_checkpoints)
    return kept, beside


def numerics_note(before: Mapping[str, str]) -> str | None:
    """Return a sentence about what differs from the machine that wrote a checkpoint; None if nothing is known to.

    Args:
        before: What `numerics` returned there; empty for checkpoints of earlier versions.
    """
    names = {"torch": "torch", "cpu": "CPU instructions"}
    now = numerics()
    changes = []
    for name, title in names.items():
        if name in before and before[name] != now[name]:
            changes.append(f"{title} {before[name]} -> {now[name]}")
    if not changes:
        return None
    return f"resumed with other arithmetic ({', '.join(changes)}): from here on, results differ in their last bits"


def _free_memory() -> int | None:
    """Return how many bytes of memory are available, or None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
