"""`RunFolder`: where a run keeps everything, and how it is found again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigurationError, LockedError
from slipstream.store.local import atomic_write, make_folder, open_regular
from slipstream.store.lock import FileLock
from slipstream.train.settings import TrainSettings, load_yaml, to_yaml

LAST = "last"


class RunFolder:
    """``runs/<name>``: configuration, metrics, checkpoints, rollouts, evaluations and the report of a run.

    One process at a time trains in it: `open` takes a lock that lasts until `release`, or the end of the process.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.rollouts = self.path / "rollouts"
        self.tensorboard = self.path / "tb"
        self.evaluations = self.path / "eval"
        self.report = self.path / "report.html"
        self._lock = FileLock(self.path / ".lock")

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.path.resolve().name

    def has_checkpoint(self) -> bool:
        """Tell whether there is one, sound or not."""
        return self.checkpoints.is_dir() and any(self.checkpoints.glob("checkpoint_iter_*.slip"))

    def settings(self) -> TrainSettings:
        """Return the settings of the run.

        Raises:
            ConfigurationError: If this is not a run's folder.
        """
        if not self.path.is_dir():
            raise ConfigurationError(f"{self.path} is not a folder, expected that of a run")
        if not self.config.is_file():
            raise ConfigurationError(f"{self.path} holds no config.yaml, so it is not the folder of a run")
        return load_yaml(self.config)

    def open(self, settings: TrainSettings) -> None:
        """Make the folder if need be, claim it, write the settings, and point ``last`` beside it to it.

        Raises:
            ConfigurationError: If another process trains there.
            WriteError: If it cannot be made or written to.
        """
        is_new = not self.path.exists()
        make_folder(self.path)
        try:
            self._claim()
            with atomic_write(self.config) as file:
                file.write(to_yaml(settings).encode())
        except BaseException:
            self.release()
            if is_new:
                shutil.rmtree(self.path, ignore_errors=True)
            raise
        link = self.path.parent / LAST
        if link.is_symlink() or not link.exists():
            temporary = link.with_name(f".{LAST}-{os.getpid()}")
            with contextlib.suppress(OSError):  # a file system without links: one does without
                temporary.unlink(missing_ok=True)
                temporary.symlink_to(self.path.name)
                temporary.replace(link)

    def _claim(self) -> None:
        """Keep other processes from training here until this one ends."""
        if self._lock.held:
            return
        try:
            self._lock.acquire()
        except LockedError as error:
            raise ConfigurationError(f"{self.path} is in use: another process trains there ({error})") from error

    def release(self) -> None:
        """Let other processes train here."""
        self._lock.release()


def find_run(settings: TrainSettings) -> RunFolder:
    """Return the folder for a run, which may not be there yet: that of its name, or of the present time."""
    parent = Path(settings.run_dir).expanduser()
    if settings.name is not None:
        return RunFolder(parent / settings.name)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 1000))]
    return RunFolder(next(parent / name for name in names if not (parent / name).exists()))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``; what a crash cut off is left out."""
    rows = []
    with open_regular(path) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
    return rows


def forget_after(path: Path, iteration: int) -> None:
    """Drop the lines of later iterations from a ``metrics.jsonl``, and what a crash cut off."""
    if not path.exists():
        return
    kept = [
        row for row in read_metrics(path) if isinstance(row.get("iteration"), int) and row["iteration"] <= iteration
    ]
    with atomic_write(path) as file:
        file.write(b"".join(json.dumps(row).encode() + b"\n" for row in kept))
