"""`CheckpointManager`: a folder of checkpoints that looks after itself."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from slipstream.checkpoint.folder import CheckpointFolder, managed_name
from slipstream.checkpoint.mirror import Mirror, Sources
from slipstream.checkpoint.native import encode_metadata
from slipstream.checkpoint.portable.torch_file import require_device
from slipstream.checkpoint.restoring import Restored, restore_newest
from slipstream.checkpoint.retention import Plan, RetentionPolicy, as_number, find_best
from slipstream.checkpoint.saver import AsyncCheckpointSaver, SaveResult
from slipstream.checkpoint.series import Series
from slipstream.checkpoint.thinning import Thin
from slipstream.checks import require_choice, require_count
from slipstream.errors import BackgroundError, ConfigurationError, CorruptFileError, WriteError
from slipstream.schema.unflatten import unflatten
from slipstream.store.handle import Handle
from slipstream.store.upload import spool_folder
from slipstream.store.urls import ObjectPath, as_path
from slipstream.store.worker import Policy

logger = logging.getLogger(__name__)

# The digits are part of a file name.
_MAX_STEP = (1 << 63) - 1


class CheckpointManager:
    """Saves, finds, restores, thins and deletes the checkpoints of a run.

    Saves are asynchronous and in the native format; see `AsyncCheckpointSaver` for what that guarantees. Each file is
    complete in itself: it can be copied, renamed or moved and still loads. The newest checkpoint is the one that was
    saved last, even if its step is lower than that of others. Several managers, in any number of processes, may use one
    folder. The folder is created by the first save.

    With `checkpoint_url`, checkpoints are also uploaded to an object store: in the background, after they are durable
    on local disk, newest first. A store that is not available delays nothing and fails nothing. What it lacks is
    uploaded when it is available again, or when the next process starts.

    Args:
        folder: Where the checkpoints are, as ``checkpoint_iter_<step>.slip``. Files that you rename are never deleted.
            Or the URL of a run in an object store, such as ``s3://bucket/runs/walker``: then local disk holds only what
            is not uploaded yet.
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
        checkpoint_url: Where to upload checkpoints to. The retention policy holds there, too, except for `thin`.

    Raises:
        ConfigurationError: If a setting is invalid.
        ImportError: If the package for object stores is needed and not installed.

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
        checkpoint_url: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_flags(keep_last, keep_every, keep_best, thin, differential=differential, compress=compress)
        keep_full = None
        if thin is not None:
            keep_full = thin.keep_full
        self.folder, url = _resolve(folder, checkpoint_url)
        if url is not None and differential:
            raise ConfigurationError(
                "differential=True does not work with an object store, which keeps complete checkpoints only: pass "
                "differential=False, or no URL"
            )
        self.keep_best = keep_best
        self._files = CheckpointFolder(self.folder)
        retention = RetentionPolicy(keep_last, keep_every, keep_best, keep_full)
        self._mirror: Mirror | None = None
        if url is not None:
            self._mirror = Mirror(self._files, url, retention)
        self._series = Series(
            self._files, retention, thin, compress=compress, differential=differential, mirror=self._mirror
        )
        self._sources = Sources(self._files, self._mirror)
        # Of a URL, local disk only has what is not uploaded yet.
        self._is_spool = isinstance(as_path(folder), ObjectPath)
        self._continue_uploads()
        warm = 1
        if differential:
            # One snapshot is being written, and the one before it is kept to be compared with.
            warm = 2
        self.saver = AsyncCheckpointSaver(max_queue_size, policy=policy, warm=warm)
        self.guard = self.saver.guard
        self.mutating = self.saver.mutating
        self._best_metric_seen = False

    def _continue_uploads(self) -> None:
        """Upload what an earlier process did not."""
        if self._mirror is None:
            return
        if self._is_spool:
            self._mirror.on_upload = self._series.discard
        if self.folder.is_dir():
            self._mirror.uploader.wake()

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
            WriterConflictError: If another process uploads to the same URL.
        """
        if self._mirror is not None:
            self._mirror.uploader.raise_conflict()
        step = require_count("step", step, 0, _MAX_STEP)
        metadata = encode_metadata({"step": step, "metrics": dict(metrics or {}), "time": time.time()})
        self._check_best_metric(unflatten(metadata["metrics"], []))
        return self.saver.save(state, self._files.name_for(step), self._series, metadata)

    def path(self, step: int) -> Path:
        """Return the file of the checkpoint of a step, or where it would be written, or uploaded to."""
        file = self._files.find(step)
        if file is not None:
            return file.path
        if self._is_spool:
            return self._sources.place / managed_name(step)
        return self._files.name_for(step)

    def steps(self) -> list[int]:
        """Return the steps that have a readable checkpoint, in ascending order."""
        return sorted({file.step for file in self._sources.scan()})

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was saved last, or None."""
        files = self._sources.scan()
        if not files:
            return None
        return files[-1].step

    def best(self) -> int | None:
        """Return the step that is best by `keep_best`, or None if no checkpoint has that metric."""
        if self.keep_best is None:
            raise ValueError("keep_best was not set, so there is no metric to choose the best by")
        best = find_best(self._sources.scan(), self.keep_best)
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
            StoreError: If the object store cannot be read and the folder has no checkpoint.
        """
        require_device(device)
        try:
            self.saver.flush()
        except BackgroundError as error:
            logger.warning("%s; restoring what is on disk", error)
        if step is not None:
            step = require_count("step", step, 0, _MAX_STEP)
        return restore_newest(self._sources, step, device, keys)

    def flush(self, timeout: float | None = None) -> None:
        """Block until every save so far is durable."""
        self.saver.flush(timeout)

    def close(self, timeout: float | None = 60) -> None:
        """Finish what is queued, then accept no more saves. Idempotent.

        Waits for uploads as well, for at most as long as a signal waits for background jobs, and not at all if the
        store is not available. What is not uploaded by then is logged, and the next start uploads it.
        """
        try:
            self.saver.shutdown(timeout)
        finally:
            self._end(timeout)

    def wait_uploaded(self, timeout: float | None = None) -> bool:
        """Block until all checkpoints are uploaded, or the store is not available; return whether all are.

        Raises:
            WriterConflictError: If another process uploads to the same URL.
        """
        if self._mirror is None:
            return True
        is_done = self._mirror.uploader.flush(timeout)
        self._mirror.uploader.raise_conflict()
        return is_done

    def describe_uploads(self) -> str:
        """Return the progress of uploads as one line; empty if nothing is uploaded."""
        if self._mirror is None:
            return ""
        return self._mirror.uploader.describe()

    def get_stats(self) -> dict[str, float]:
        """Return what `AsyncCheckpointSaver.get_stats` does, and ``retention_failures``: files not tidied up so far.

        With an object store, also ``upload_count, upload_failed_count, uploaded_bytes, upload_s`` and
        ``upload_pending``.
        """
        stats = {**self.saver.get_stats(), "retention_failures": self._series.num_failures}
        if self._mirror is not None:
            stats |= self._mirror.uploader.get_stats()
        return stats

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.saver.__exit__(kind, error, trace)
        finally:
            self._end(None)

    def _end(self, timeout: float | None) -> None:
        """Free what saves have kept, and end the thread that uploads."""
        self._series.forget_parent()
        if self._mirror is not None:
            self._mirror.uploader.close(timeout)

    def plan(self) -> Plan:
        """Return what `prune` would do to the files on local disk, without doing it."""
        return self._series.plan()

    def prune(self) -> list[int]:
        """Apply the retention policy now; `save` does so, too. Returns the steps of the files that were deleted.

        Raises:
            WriteError: If files could not be changed or deleted. All others were.
        """
        deleted = []
        if self._mirror is not None:
            deleted += self._mirror.prune()
        if not self.folder.is_dir():
            return deleted
        tidied = self._series.tidy()
        for path, error in tidied.failures.items():
            # A damaged delta cannot be made whole, and does not keep anything else from being tidied up.
            if not isinstance(error, CorruptFileError):
                raise WriteError(0, f"cannot tidy up {path}: {error}") from error
        return sorted({*deleted, *tidied.deleted})

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


def _resolve(
    folder: str | os.PathLike[str], checkpoint_url: str | os.PathLike[str] | None
) -> tuple[Path, ObjectPath | None]:
    """Return the folder on local disk and the URL to upload to, if any."""
    path = as_path(folder)
    if isinstance(path, ObjectPath):
        if checkpoint_url is not None:
            raise ConfigurationError("folder and checkpoint_url are both URLs, expected a folder on local disk")
        return spool_folder(path), path
    # Absolute, so that a later change of the working directory does not move the run.
    if checkpoint_url is None:
        return path.absolute(), None
    url = as_path(checkpoint_url)
    if not isinstance(url, ObjectPath):
        raise ConfigurationError(
            f"checkpoint_url is {str(url)!r}, expected a URL such as s3://bucket/runs/walker or file:///folder"
        )
    return path.absolute(), url


def _check_flags(
    keep_last: Any, keep_every: Any, keep_best: Any, thin: Any, *, differential: Any, compress: Any
) -> None:
    """Raise `ConfigurationError` if a setting is invalid."""
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


def _check_keep_best(keep_best: Any) -> None:
    if not isinstance(keep_best, (tuple, list)) or len(keep_best) != 2 or not isinstance(keep_best[0], str):
        raise ConfigurationError(f"keep_best is {keep_best!r}, expected a metric's name and 'min' or 'max'")
    require_choice("the mode of keep_best", keep_best[1], ("min", "max"))
