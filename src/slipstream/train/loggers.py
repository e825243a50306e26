"""Where the numbers of a run go: a JSON line an iteration always, TensorBoard and Weights & Biases besides."""

from __future__ import annotations

import json
import logging
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from slipstream.text import install_hint
from slipstream.train.folder import RunFolder
from slipstream.train.settings import TrainSettings, WandbSettings

logger = logging.getLogger(__name__)


class Logger(Protocol):
    """Takes the numbers of an iteration. That is all that a logger of your own needs; `close` ends it."""

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Keep the numbers of an iteration; keys are names such as ``train/stats.return``."""

    def close(self) -> None:
        """Write what is not written yet."""


class JsonlLogger:
    """One JSON object a line. A line is in the file as soon as `log` returns, also if the process is killed then.

    Args:
        path: The file, which is appended to.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Append a line. Values that are not finite, which JSON does not know, become null."""
        row = {"iteration": iteration, **{key: _plain(value) for key, value in values.items()}}
        self._file.write(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        """Make the lines durable."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


class TensorBoardLogger:
    """TensorBoard's event files.

    Args:
        folder: Where they go.
        first: The first iteration to be logged: of a run that is resumed, TensorBoard hides what came after.
    """

    def __init__(self, folder: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - heavy, and an extra

        purge = first if folder.exists() and first > 1 else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Add a point to the curve of each value."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, iteration)

    def close(self) -> None:
        """Write what is not written yet."""
        self._writer.close()


class WandbLogger:
    """Weights & Biases; offline unless the settings say otherwise.

    Args:
        settings: Mode, project and names.
        config: What the run is set to.
        folder: Where offline data goes.
        name: The run's, unless the settings have one.
    """

    def __init__(self, settings: WandbSettings, config: dict[str, Any], folder: Path, name: str) -> None:
        import wandb  # noqa: PLC0415 - heavy, and an extra

        self._run: Any = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or name,
            id=settings.run_id,
            resume="allow" if settings.run_id else None,
            mode="online" if settings.mode == "online" else "offline",
            dir=str(folder),
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Log the values of an iteration."""
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        """End the run, which uploads what is left if it is online."""
        self._run.finish()


def make_loggers(settings: TrainSettings, config: dict[str, Any], folder: RunFolder, first: int) -> list[Logger]:
    """Return the loggers that the settings ask for; one whose library is missing is left out, and that is said.

    Args:
        settings: What is asked for.
        config: What to tell Weights & Biases of the run.
        folder: Where files go.
        first: The first iteration to be logged.
    """
    loggers: list[Logger] = [JsonlLogger(folder.metrics)]
    if settings.tensorboard:
        try:
            loggers.append(TensorBoardLogger(folder.tensorboard, first))
        except ImportError:
            logger.warning(
                "TensorBoard is not installed, so nothing is written for it: %s, or tensorboard by itself",
                install_hint("train"),
            )
    if settings.wandb.mode != "disabled":
        try:
            loggers.append(WandbLogger(settings.wandb, config, folder.path, folder.name))
        except ImportError:
            logger.warning(
                "Weights & Biases is not installed, so nothing is logged there: %s, or wandb by itself",
                install_hint("train"),
            )
    return loggers


def new_run_id() -> str:
    """Return an identifier for Weights & Biases, under which a run can be found again."""
    return uuid.uuid4().hex[:8]


def _plain(value: float) -> float | int | None:
    return value if math.isfinite(value) else None
