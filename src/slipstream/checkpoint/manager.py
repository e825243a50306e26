"""`CheckpointManager`: a folder of checkpoints that looks after itself."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from slipstream.checkpoint.folder import FILE_ERRORS, CheckpointFile, CheckpointFolder, no_checkpoint
from slipstream.checkpoint.load import move
from slipstream.checkpoint.native import NativeFile, encode_metadata
from slipstream.checkpoint.portable.torch_file import require_device
from slipstream.checkpoint.retention import Plan, RetentionPolicy, as_number, find_best
from slipstream.checkpoint.saver import AsyncCheckpointSaver, SaveResult
from slipstream.checkpoint.series import Series
from slipstream.checkpoint.thinning import Thin
from slipstream.checks import require_choice, require_count
from slipstream.errors import BackgroundError, ConfigurationError, CorruptFileError, WriteError
from slipstream.schema.unflatten import unflatten
from slipstream.store.handle import Handle
from slipstream.store.worker import Policy

logger = logging.getLogger(__name__)

# The digits are part of a file name.
_MAX_STEP = (1 << 63) - 1
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


class CheckpointManager:
    """Saves, finds, restores, thins and deletes the checkpoints of a run.

    Saves are asynchronous and in the native format; see `AsyncCheckpointSaver` for what that guarantees. Each file is
    complete in itself: it can be copied, renamed or moved and still loads. The newest checkpoint is the one that was
    saved last, even if its step is lower than that of others. Several managers, in any number of processes, may use one
    folder. The folder is created by the first save.

    Args:
        folder: Where the checkpoints are, as ``checkpoint_iter_<step>.slip``. Files that you rename are never deleted.
        keep_last: Keep the N newest checkpoints; None keeps all.
        keep_every: Keep those whose step is a multiple of this, too.
        keep_best: Keep the best by a metric, too: ``("reward", "max")`` or ``("loss", "min")``.
        thin: What older checkpoints lose; by default nothing.
        differential: Store tensors that did not change by reference to an earlier checkpoint, and others as a
            difference to it where that is at least a quarter smaller. Takes less space where parts of a model are
            frozen or saves are a few steps apart, and keeps one more copy of the state in memory. A file then needs its
            parents, at most 16, to be loaded. The best checkpoint is always whole, and never do all checkpoints depend
            on the same file.
        max_queue_size: How many saves may be waiting or being written.
        policy: What to do when the queue is full; see `AsyncCheckpointSaver`.
        compress: Whether to pack checkpoints.

    Raises:
        ConfigurationError: If a setting is invalid.

    Example:
        >>> import torch
        >>> with CheckpointManager("/tmp/slipstream-doc/run", keep_last=2) as manager:
        ...     for step in (100, 200, 300):
        ...         _ = manager.save(step, {"weight": torch.full((2,), float(step))}, {"reward": step / 10})
        >>> manager.steps(), manager.restore().state["weight"]
        ([200, 300], tensor([300., 300.]))
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep_last: int | None = 5,
        keep_every: int | None = None,
        keep_best: tuple[str, Literal["min", "max"]] | None = None,
        thin: Thin | None = None,
        *,
        differential: bool = False,
        max_queue_size: int = 3,
        policy: Policy = "block",
        compress: bool = True,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None:
                require_count(name, value)
        if keep_best is not None:
            _check_keep_best(keep_best)
        if thin is not None and not isinstance(thin, Thin):
            raise ConfigurationError(f"thin is {thin!r}, expected a Thin or None")
        for name, flag in (("differential", differential), ("compress", compress)):
            if not isinstance(flag, bool):
                raise ConfigurationError(f"{name} is {flag!r}, expected True or False")
        keep_full = None
        if thin is not None:
            keep_full = thin.keep_full
        # Absolute, so that a later change of the working directory does not move the run.
        self.folder = Path(folder).absolute()
        self.keep_best = keep_best
        self._files = CheckpointFolder(self.folder)
        retention = RetentionPolicy(keep_last, keep_every, keep_best, keep_full)
        self._series = Series(self._files, retention, thin, compress=compress, differential=differential)
        warm = 1
        if differential:
            # One snapshot is being written, and the one before it is kept to be compared with.
            warm = 2
        self.saver = AsyncCheckpointSaver(max_queue_size, policy=policy, warm=warm)
        self.guard = self.saver.guard
        self.mutating = self.saver.mutating
        self._best_metric_seen = False

    def save(self, step: int, state: Any, metrics: Mapping[str, Any] | None = None) -> Handle[SaveResult]:
        """Save a state in the background, then apply the retention policy.

        Returns as soon as the state may change again. Metrics are captured now; NumPy and torch scalars become numbers.
        A failure to delete or thin other checkpoints does not fail the save: it is logged, tried again at the next
        save, and counted in `get_stats`.

        Args:
            step: Iteration, frame or epoch, a whole number. A checkpoint of the same step is replaced.
            state: Nested dicts, lists and tuples of tensors, arrays and plain values.
            metrics: Numbers to choose the best by, and anything else that should be readable without the tensors.

        Raises:
            ConfigurationError: If `keep_best` is set and its metric is not a number, or is missing although there are
                others.
            UnsupportedStateError: If state or metrics contain something that cannot be stored. Names the key.
            BackgroundError: If an earlier save failed and its error was not retrieved.
        """
        step = require_count("step", step, 0, _MAX_STEP)
        metadata = encode_metadata({"step": step, "metrics": dict(metrics or {}), "time": time.time()})
        self._check_best_metric(unflatten(metadata["metrics"], []))
        return self.saver.save(state, self._files.name_for(step), self._series, metadata)

    def path(self, step: int) -> Path:
        """Return the file of the checkpoint of a step, or where it would be written."""
        file = self._files.find(step)
        if file is None:
            return self._files.name_for(step)
        return file.path

    def steps(self) -> list[int]:
        """Return the steps that have a readable checkpoint on disk, in ascending order."""
        return sorted({file.step for file in self._files.scan()})

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was saved last, or None."""
        files = self._files.scan()
        if not files:
            return None
        return files[-1].step

    def best(self) -> int | None:
        """Return the step that is best by `keep_best`, or None if no checkpoint has that metric."""
        if self.keep_best is None:
            raise ValueError("keep_best was not set, so there is no metric to choose the best by")
        best = find_best(self._files.scan(), self.keep_best)
        if best is None:
            return None
        return best.step

    def restore(
        self,
        step: int | None = None,
        device: str | torch.device = "cpu",
        keys: str | Collection[Any] | None = None,
    ) -> Restored:
        """Read a checkpoint: that of `step`, or the newest that is intact.

        Blocks until pending saves are written. A save that failed, and files that cannot be read, are logged; without
        `step`, the next older checkpoint is tried.

        Args:
            step: Which checkpoint; the newest by default.
            device: Where tensors go.
            keys: Load only these branches; see `load_checkpoint`.

        Raises:
            FileNotFoundError: If there is none.
            CorruptFileError: If the one asked for, or every one, is damaged.
            KeyError: If a key matches nothing.
            ConfigurationError: If the device is not available.
        """
        require_device(device)
        try:
            self.saver.flush()
        except BackgroundError as error:
            logger.warning("%s; restoring what is on disk", error)
        if step is not None:
            step = require_count("step", step, 0, _MAX_STEP)
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._read_newest(step, device, keys)
            except FileNotFoundError:
                # Another process may have deleted what was listed, and there may be a newer one.
                if not self._files.scan():
                    raise
        return self._read_newest(step, device, keys)

    def flush(self, timeout: float | None = None) -> None:
        """Block until every save so far is durable."""
        self.saver.flush(timeout)

    def close(self, timeout: float | None = 60) -> None:
        """Finish what is queued, then accept no more saves. Idempotent."""
        try:
            self.saver.shutdown(timeout)
        finally:
            self._series.forget_parent()

    def get_stats(self) -> dict[str, float]:
        """Return what `AsyncCheckpointSaver.get_stats` does, and ``retention_failures``: files not tidied up so far."""
        return {**self.saver.get_stats(), "retention_failures": self._series.num_failures}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.saver.__exit__(kind, error, trace)
        finally:
            self._series.forget_parent()

    def plan(self) -> Plan:
        """Return what `prune` would do, without doing it."""
        return self._series.plan()

    def prune(self) -> list[int]:
        """Apply the retention policy now; `save` does so, too. Returns the steps that were deleted.

        Raises:
            WriteError: If files could not be changed or deleted. All others were.
        """
        if not self.folder.is_dir():
            return []
        tidied = self._series.tidy()
        for path, error in tidied.failures.items():
            # A damaged delta cannot be made whole, and does not keep anything else from being tidied up.
            if not isinstance(error, CorruptFileError):
                raise WriteError(0, f"cannot tidy up {path}: {error}") from error
        return tidied.deleted

    def _check_best_metric(self, metrics: Mapping[str, Any]) -> None:
        """Refuse metrics that the best cannot be chosen by: otherwise retention would delete the best silently."""
        if self.keep_best is None:
            return
        metric, _ = self.keep_best
        if metric in metrics:
            value = metrics[metric]
            if value is not None and as_number(value) is None:
                raise ConfigurationError(f"metric {metric!r} is {value!r}, expected a number to choose the best by")
            self._best_metric_seen = True
        elif metrics and not self._best_metric_seen:
            # Later saves may leave it out, if it is not measured every time. A name that never occurs is a mistake.
            raise ConfigurationError(
                f"keep_best needs metric {metric!r}, but metrics are {', '.join(map(repr, metrics))}; pass "
                f"{metric!r}: None if it was not measured yet"
            )

    def _read_newest(
        self, step: int | None, device: str | torch.device, keys: str | Collection[Any] | None
    ) -> Restored:
        """Read the newest checkpoint that can be read: of a step, or of all."""
        files = self._files.scan()
        problems = self._files.unreadable()
        failures = list(problems.values())
        if step is not None:
            files = [file for file in files if file.step == step]
            failures = []
            # Only its name tells which step a file was, if nothing else can be read.
            if self._files.name_for(step) in problems:
                failures.append(problems[self._files.name_for(step)])
        for file in reversed(files):
            try:
                restored = self._read(file, device, keys)
            except FILE_ERRORS as error:
                failures.append(error)
                continue
            for failure in failures:
                logger.warning("skipping a checkpoint: %s", failure)
            if failures:
                logger.warning("restored step %d from %s, the newest that is intact", file.step, file.path)
                if restored.thinned:
                    logger.warning(
                        "step %d was thinned (%s), so a run cannot resume from it exactly; Thin(keep_full=2) or more "
                        "keeps an older checkpoint complete",
                        file.step,
                        ", ".join(restored.thinned),
                    )
            return restored
        raise self._nothing_to_restore(step, failures)

    def _read(self, file: CheckpointFile, device: str | torch.device, keys: str | Collection[Any] | None) -> Restored:
        try:
            return _load(file, device, keys)
        except FILE_ERRORS:
            # Another process may have made it whole and deleted its parent while it was read here.
            for other in self._files.scan():
                if other.identity == file.identity and other != file:
                    return _load(other, device, keys)
            raise

    def _nothing_to_restore(self, step: int | None, failures: list[Exception]) -> Exception:
        """Return the error for a folder without an intact checkpoint."""
        # What vanished while it was read is not damaged.
        damaged = [failure for failure in failures if not isinstance(failure, FileNotFoundError)]
        for failure in damaged:
            logger.warning("skipping a checkpoint: %s", failure)
        if not damaged and step is not None:
            known = ", ".join(map(str, self.steps())) or "none"
            return no_checkpoint(self.folder, f"no checkpoint of step {step}, the folder has {known}")
        if not damaged:
            return no_checkpoint(self.folder)
        if step is None:
            error = CorruptFileError(f"{self.folder}: none of its {len(damaged)} checkpoints is intact")
        else:
            error = CorruptFileError(f"no checkpoint of step {step} can be read ({damaged[-1]})")
        error.__cause__ = damaged[0]
        return error


def _load(file: CheckpointFile, device: str | torch.device, keys: str | Collection[Any] | None) -> Restored:
    with NativeFile(file.path) as native:
        state = move(native.load(keys), device)
        metrics = native.metadata["metrics"]
    return Restored(file.step, state, metrics, file.thinned)


def _check_keep_best(keep_best: Any) -> None:
    if not isinstance(keep_best, (tuple, list)) or len(keep_best) != 2 or not isinstance(keep_best[0], str):
        raise ConfigurationError(f"keep_best is {keep_best!r}, expected a metric's name and 'min' or 'max'")
    require_choice("the mode of keep_best", keep_best[1], ("min", "max"))
