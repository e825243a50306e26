"""Read the newest intact checkpoint of a run, from local disk or from an object store."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.finding import open_pieces
from slipstream.checkpoint.folder import FILE_ERRORS, CheckpointFile, managed_name, no_checkpoint
from slipstream.checkpoint.load import move
from slipstream.checkpoint.mirror import Sources
from slipstream.checkpoint.native import NativeFile
from slipstream.errors import CorruptFileError, StoreError
from slipstream.store.container import Container

logger = logging.getLogger(__name__)

Keys = str | Collection[Any] | None

# How often to look again if files vanish while they are read.
_ATTEMPTS = 5


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        step: The step it was saved with, whatever its file is called.
        state: The state.
        metrics: The metrics that were saved with it.
        thinned: What was removed from it after it was saved, in words; empty if it is complete.
    """

    step: int
    state: Any
    metrics: dict[str, Any] = field(default_factory=dict)
    thinned: tuple[str, ...] = ()


def restore_newest(sources: Sources, step: int | None, device: str | torch.device, keys: Keys) -> Restored:
    """Read the newest checkpoint that is intact: of a step, or of all. Logs those that are skipped.

    Raises:
        FileNotFoundError: If there is none.
        CorruptFileError: If the one asked for, or every one, is damaged.
        KeyError: If a key matches nothing.
        StoreError: If the store cannot be read.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return _read_newest(sources, step, device, keys)
        except FileNotFoundError:
            # Another process may have deleted what was listed, and there may be a newer one.
            if not sources.scan():
                raise
    return _read_newest(sources, step, device, keys)


def _read_newest(sources: Sources, step: int | None, device: str | torch.device, keys: Keys) -> Restored:
    files = sources.scan()
    problems = sources.unreadable()
    failures = list(problems.values())
    if step is not None:
        files = [file for file in files if file.step == step]
        # Only its name tells which step a file was, if nothing else can be read.
        failures = [problem for path, problem in problems.items() if path.name == managed_name(step)]
    for file in reversed(files):
        try:
            restored = _read(sources, file, device, keys)
        except StoreError:
            # What is there and cannot be reached is not a reason to continue from something older.
            raise
        except FILE_ERRORS as error:
            failures.append(error)
            continue
        _log_skipped(failures, file, restored)
        return restored
    raise _nothing_to_restore(sources, step, failures)


def _log_skipped(failures: Sequence[Exception], file: CheckpointFile, restored: Restored) -> None:
    """Log what could not be read, and what was read instead."""
    for failure in failures:
        logger.warning("skipping a checkpoint: %s", failure)
    if not failures:
        return
    logger.warning("restored step %d from %s, the newest that is intact", file.step, file.path)
    if restored.thinned:
        logger.warning(
            "step %d was thinned (%s), so a run cannot resume from it exactly; Thin(keep_full=2) or more "
            "keeps an older checkpoint complete",
            file.step,
            ", ".join(restored.thinned),
        )


def _read(sources: Sources, file: CheckpointFile, device: str | torch.device, keys: Keys) -> Restored:
    try:
        return _load(file, device, keys)
    except FILE_ERRORS:
        # Another process may have made it whole and deleted its parent while it was read here.
        for other in sources.scan():
            if other.identity == file.identity and other != file and not other.pieces:
                return _load(other, device, keys)
        raise


def _load(file: CheckpointFile, device: str | torch.device, keys: Keys) -> Restored:
    source: Path | Container = file.path
    if file.pieces:
        source = open_pieces(file)
    with NativeFile(source) as native:
        state = move(native.load(keys), device)
        metrics = native.metadata["metrics"]
    return Restored(file.step, state, metrics, file.thinned)


def _nothing_to_restore(sources: Sources, step: int | None, failures: Sequence[Exception]) -> Exception:
    """Return the error for a run without an intact checkpoint."""
    # What vanished while it was read is not damaged.
    damaged = [failure for failure in failures if not isinstance(failure, FileNotFoundError)]
    for failure in damaged:
        logger.warning("skipping a checkpoint: %s", failure)
    if not damaged and step is not None:
        steps = sorted({file.step for file in sources.scan()})
        known = ", ".join(map(str, steps)) or "none"
        return no_checkpoint(sources.place, f"no checkpoint of step {step}, the folder has {known}")
    if not damaged:
        return no_checkpoint(sources.place)
    if step is None:
        error = CorruptFileError(f"{sources.place}: none of its {len(damaged)} checkpoints is intact")
    else:
        error = CorruptFileError(f"no checkpoint of step {step} can be read ({damaged[-1]})")
    error.__cause__ = damaged[0]
    return error
