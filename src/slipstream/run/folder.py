"""`RunFolder`: where the files of a run are, and which process may write them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigurationError, LockedError
from slipstream.run.metrics import forget_after, read_rows, write_rows
from slipstream.store.local import atomic_write, make_folder, open_regular, sync_folder
from slipstream.store.lock import FileLock

LAST = "last"
CONFIG = "config.yaml"
FINAL = "final"  # name of the evaluation at the end of a training


class RunFolder:
    """``runs/<name>``: configuration, metrics, checkpoints, rollouts, evaluations and the report of a run.

    One process at a time trains in it: `claim` takes a lock that lasts until `release`, or the end of the process.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / CONFIG
        self.changes = self.path / "changes.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.rollouts = self.path / "rollouts"
        self.tensorboard = self.path / "tb"
        self.evaluations = self.path / "eval"
        self.report = self.path / "report.html"
        self._lock = FileLock(self.path / ".lock")
        self._is_new = False

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.path.resolve().name

    def has_checkpoint(self) -> bool:
        """Return whether the run has a checkpoint, intact or not."""
        return self.checkpoints.is_dir() and any(self.checkpoints.glob("checkpoint_iter_*.slip"))

    def require_config(self) -> Path:
        """Return the path of the settings.

        Raises:
            ConfigurationError: If this is not the folder of a run.
        """
        if not self.path.is_dir():
            raise ConfigurationError(f"{self.path} is not a folder, expected the folder of a run")
        if not self.config.is_file():
            raise ConfigurationError(f"{self.path} has no {CONFIG}, so it is not the folder of a run")
        return self.config

    def require_restored(self, iteration: int) -> None:
        """Refuse to start over beside the checkpoints of a run.

        Args:
            iteration: How many iterations are done.

        Raises:
            ConfigurationError: If there are none, and the run has checkpoints.
        """
        # Another process may have trained here after this one looked, and before it took the lock.
        if iteration == 0 and self.has_checkpoint():
            raise ConfigurationError(
                f"{self.path} contains the checkpoints of a run: resume it, or choose another folder"
            )

    def claim(self) -> None:
        """Create the folder if it is missing, and lock it. Writes nothing else; does nothing if it is locked already.

        Raises:
            ConfigurationError: If another process trains there.
            OSError: If the folder cannot be created.
        """
        if self._lock.held:
            return
        is_new = self._create()
        try:
            self._lock.acquire()
        except LockedError as error:
            raise ConfigurationError(f"{self.path} is in use: another process trains there ({error})") from error
        self._is_new = is_new

    def _create(self) -> bool:
        """Create the folder; return False if it exists, or if another process was faster."""
        make_folder(self.path.parent)
        try:
            self.path.mkdir()
        except FileExistsError:
            return False
        sync_folder(self.path.parent)
        return True

    def begin(self, config: str, iteration: int, changes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Write the settings, record what changed since the checkpoint, and point ``last`` beside the folder to it.

        Call it after `claim`, when nothing can refuse the settings any more: a run with wrong ones does not resume.

        Args:
            config: The settings to train with from now on, as YAML.
            iteration: How many iterations are done.
            changes: What differs from the settings of the checkpoint that is resumed: ``from`` and ``to`` of each
                setting.

        Raises:
            WriteError: If a file cannot be written.
        """
        with atomic_write(self.config) as file:
            file.write(config.encode())
        self._record(iteration, changes)
        self._link()

    def _record(self, iteration: int, changes: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Add a line to ``changes.jsonl`` if there are changes."""
        # Lines of this iteration are from a resume that left no checkpoint. What still applies is in `changes`.
        forget_after(self.changes, iteration - 1)
        if not changes:
            return
        rows = []
        if self.changes.exists():
            rows = read_rows(self.changes)
        write_rows(self.changes, [*rows, {"iteration": iteration, "changes": changes}])

    def _link(self) -> None:
        """Point ``last`` to this folder."""
        # The path may be a link itself, or relative to the folder ("."): link the folder that it refers to.
        real = Path(os.path.realpath(self.path))
        link = real.parent / LAST
        if real == link or (link.exists() and not link.is_symlink()):
            return
        temporary = link.with_name(f".{LAST}-{os.getpid()}")
        # Some file systems have no links. Then there is no `last`.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(real.name)
            temporary.replace(link)

    def forget_after(self, iteration: int) -> None:
        """Delete the metrics and the evaluations of later iterations: a resumed run repeats those.

        Evaluations by `slipstream eval` stay: they say which iteration they are of.
        """
        forget_after(self.metrics, iteration)
        if not self.evaluations.is_dir():
            return
        for path in self.evaluations.iterdir():
            match = re.match(r"iter_(\d+)", path.name)
            if match is not None and int(match[1]) > iteration:
                path.unlink()
        self._forget_final(iteration)

    def _forget_final(self, iteration: int) -> None:
        """Delete the evaluation at the end of a training that ended after this iteration.

        That happens if the newest checkpoint of a complete run is damaged: the run resumes from the one before.
        """
        path = self.evaluations / f"{FINAL}.json"
        try:
            with open_regular(path) as file:
                document = json.load(file)
            evaluated = document["iteration"]
            flights = [result["flights"] for result in document["results"]]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            # There is none, or it is not ours.
            return
        if not isinstance(evaluated, int) or evaluated <= iteration:
            return
        path.unlink()
        for name in flights:
            if isinstance(name, str) and name == Path(name).name:
                (self.evaluations / name).unlink(missing_ok=True)

    def release(self) -> None:
        """Let other processes train here. A folder that `claim` created is removed if the run never began."""
        # Only while the lock is held: then everything in the folder was written by this process.
        if self._is_new and self._lock.held and not self.config.exists():
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def find_run(run_dir: str | os.PathLike[str], name: str | None) -> RunFolder:
    """Return the folder for a run, which need not exist.

    Args:
        run_dir: The folder of all runs; ``~`` is the home folder.
        name: The name of the run; None is the current time, with a number if that is taken.
    """
    parent = Path(run_dir).expanduser()
    if name is not None:
        return RunFolder(follow_link(parent / name))
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    path = parent / stamp
    number = 1
    while path.exists():
        number += 1
        path = parent / f"{stamp}-{number}"
    return RunFolder(path)


def follow_link(path: Path) -> Path:
    """Return the folder that a link such as ``runs/last`` points to; another path is returned unchanged.

    The link names another folder as soon as another run starts.
    """
    if path.is_symlink():
        return Path(os.path.realpath(path))
    return path
