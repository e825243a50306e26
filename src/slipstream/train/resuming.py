"""Read the checkpoint that a run continues from, and log what is different from then on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.restoring import Restored
from slipstream.checkpoint.state import TrainingState
from slipstream.errors import ConfigurationError, CorruptFileError, StateMismatchError
from slipstream.train.changes import Change, require_resumable, schedule_note
from slipstream.train.settings import TrainSettings
from slipstream.train.startup import numerics_note

logger = logging.getLogger(__name__)


def read_checkpoint(
    checkpoints: CheckpointManager, run: Path, settings: TrainSettings
) -> tuple[Restored, list[Change]]:
    """Return the newest intact checkpoint of a run, and the settings that have changed since.

    Args:
        checkpoints: Those of the run.
        run: Its folder, for messages.
        settings: The settings to train with from now on.

    Raises:
        ConfigurationError: If there is no checkpoint, or if a setting differs that must not change.
    """
    try:
        restored = checkpoints.restore()
    except FileNotFoundError:
        raise ConfigurationError(f"{run} has no checkpoint to resume from") from None
    except CorruptFileError as error:
        raise ConfigurationError(f"{run} cannot be resumed: {error}") from error
    return restored, require_resumable(run, restored.metrics.get("config", {}), settings)


def load_state(state: TrainingState, restored: Restored, run: Path) -> None:
    """Load a checkpoint.

    Raises:
        ConfigurationError: If it is of another network or environment.
    """
    try:
        state.load_state_dict(restored.state)
    except StateMismatchError as error:
        raise ConfigurationError(f"{run} cannot be resumed: {error}") from error


def log_changes(changes: Sequence[Change], metrics: Mapping[str, Any], settings: TrainSettings, iteration: int) -> None:
    """Log what differs from the process that saved a checkpoint: settings, schedules, and rounding.

    Args:
        changes: Settings with another value.
        metrics: Those of the checkpoint.
        settings: The settings to train with from now on.
        iteration: How many iterations are done.
    """
    for change in changes:
        logger.warning("changed since iteration %d: %s", iteration, change)
    schedules = schedule_note(metrics.get("config", {}), settings, iteration)
    rounding = numerics_note(metrics.get("numerics", {}))
    for note in (schedules, rounding):
        if note is not None:
            logger.warning("%s", note)
