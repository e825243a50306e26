"""Loggers for the metrics of a run: always JSON lines, optionally TensorBoard and Weights & Biases."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from slipstream.errors import ConfigurationError
from slipstream.run.folder import RunFolder
from slipstream.run.metrics import MetricsWriter
from slipstream.text import install_hint
from slipstream.train.groups import WandbSettings
from slipstream.train.settings import TrainSettings

logger = logging.getLogger(__name__)


class Logger(Protocol):
    """Receives the metrics of each iteration. A custom logger needs only these two methods."""

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Log the metrics of an iteration; keys are names such as ``train/stats.return``."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoardLogger:
    """Event files for TensorBoard.

    Args:
        folder: The folder for the event files.
        first: The first iteration that will be logged. TensorBoard hides this one and later ones of older files, which
            a run logged before it was killed.
    """

    def __init__(self, folder: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - heavy, and an extra

        purge = None
        if folder.exists():
            purge = first
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Add a point to the curve of each value."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, iteration)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbLogger:
    """Weights & Biases; offline by default.

    Args:
        settings: Mode, project and names.
        config: The settings of the run.
        folder: The folder for offline data.
        name: The name of the run, unless the settings have one.

    Raises:
        ConfigurationError: If Weights & Biases refuses, such as for a missing API key.
    """

    def __init__(self, settings: WandbSettings, config: dict[str, Any], folder: Path, name: str) -> None:
        import wandb  # noqa: PLC0415 - heavy, and an extra

        mode: Literal["online", "offline"] = "offline"
        if settings.mode == "online":
            mode = "online"
        try:
            self._run: Any = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=settings.name or name,
                id=settings.run_id,
                resume="allow",
                mode=mode,
                dir=str(folder),
                config=config,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.errors.Error, ValueError) as error:
            # ValueError: a variable such as WANDB_MODE has a value that does not exist.
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigurationError(
                f"wandb.mode={settings.mode} failed: {reason}; wandb.mode=offline needs no account"
            ) from error

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Log the values of an iteration."""
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        """Finish the run, and upload what is left if it is online."""
        self._run.finish()


def make_loggers(settings: TrainSettings, config: dict[str, Any], folder: RunFolder, first: int) -> list[Logger]:
    """Return the loggers that the settings ask for. One whose library is missing is left out with a warning.

    Args:
        settings: Which loggers to create.
        config: The settings to show in Weights & Biases.
        folder: The folder of the run.
        first: The first iteration that will be logged.

    Raises:
        ConfigurationError: If Weights & Biases refuses; no file was created by then.
    """
    loggers: list[Logger] = []
    # First, because it is the only one that may refuse.
    if settings.wandb.mode != "disabled":
        try:
            loggers.append(WandbLogger(settings.wandb, config, folder.path, folder.name))
        except ImportError:
            logger.warning(
                "Weights & Biases is not installed, so nothing is logged there: %s, or install wandb",
                install_hint("train"),
            )
    if settings.tensorboard:
        try:
            loggers.append(TensorBoardLogger(folder.tensorboard, first))
        except ImportError:
            logger.warning(
                "TensorBoard is not installed, so nothing is written for it: %s, or install tensorboard",
                install_hint("train"),
            )
    return [MetricsWriter(folder.metrics), *loggers]


def new_run_id() -> str:
    """Return a random identifier with which Weights & Biases recognises a resumed run."""
    return uuid.uuid4().hex[:8]
