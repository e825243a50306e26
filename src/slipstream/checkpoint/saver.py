"""`AsyncCheckpointSaver`: save without stopping training."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from slipstream.checkpoint.native import write_native
from slipstream.checkpoint.portable import write_portable
from slipstream.checkpoint.snapshot import Guard, Snapshot, snapshot_pool, take_snapshot
from slipstream.checks import require_count
from slipstream.codecs.bytes import MAX_LZ4_LEVEL
from slipstream.errors import DiskFullError
from slipstream.store.handle import Handle
from slipstream.store.worker import Policy, Worker
from slipstream.text import format_bytes
from slipstream.threads import background_threads

logger = logging.getLogger(__name__)

FULL_QUEUE = "Save queue is full, checkpoint may be delayed"
SaveFormat = Literal["pt", "native"]


@dataclass(frozen=True)
class SaveResult:
    """The result of a save.

    Attributes:
        path: The file that was written.
        raw_bytes: Size of the state (native), or of what ``torch.save`` made of it.
        stored_bytes: Size of the file.
        seconds: From the call until the file was durable.
    """

    path: Path
    raw_bytes: int
    stored_bytes: int
    seconds: float


class AsyncCheckpointSaver:
    """Saves checkpoints in the background: consistent, durable, atomic, and never silently lost.

    `save_async` returns at once. What lands on disk is the state at the moment of the call. Tensors covered by `guard`
    are copied while training continues, and guarded optimizers wait, before their next step, for what is still being
    copied; everything else is copied before the call returns. At most `max_queue_size` copies are in memory, and their
    memory is reused. Normal exit, ``sys.exit``, SIGTERM and Ctrl-C write what is queued before the process ends.

    Args:
        max_queue_size: How many saves may be waiting or being written.
        compression_level: LZ4 level for ``compress=True``, 0 to 12.
        verbose: Whether to log a line per save at level INFO (else DEBUG).
        policy: When the queue is full: ``block`` until there is room, ``skip_oldest``, or ``raise``.
        warm: For how many snapshots `guard` gets memory ready; as many as are in use at once, as a rule.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with AsyncCheckpointSaver() as saver:
        ...     saver.guard(optimizer)
        ...     handle = saver.save_async({"model": model.state_dict()}, "/tmp/slipstream-doc/model.pt")
        >>> handle.result().path.name
        'model.pt.lz4'
    """

    def __init__(
        self,
        max_queue_size: int = 3,
        compression_level: int = 9,
        verbose: bool = False,
        *,
        policy: Policy = "block",
        warm: int = 1,
    ) -> None:
        require_count("compression_level", compression_level, 0, MAX_LZ4_LEVEL)
        self._worker = Worker(max_queue_size, policy, name="AsyncCheckpointSaver", on_full=self._warn_full)
        self._level = compression_level
        self._log_level = logging.INFO if verbose else logging.DEBUG
        self._guard = Guard()
        self._pool = snapshot_pool(2 * (max_queue_size + 1))
        self._warm = warm
        self._lock = threading.Lock()
        self._save_count = self._failed_count = 0
        self._raw_bytes = self._stored_bytes = 0
        self._call_s = self._write_s = 0.0

    def guard(self, *targets: torch.optim.Optimizer | torch.nn.Module) -> None:
        """Promise that the state of these changes only where we can wait: so that it need not be copied at once.

        For optimizers: in ``step`` and ``load_state_dict``. For modules: in ``load_state_dict``, in the forward pass of
        submodules with buffers while training, and by guarded optimizers. Any other change belongs under `mutating`. A
        broken promise is found by torch's version counters, and fails the save with `TornStateError`.

        Args:
            *targets: Optimizers (their parameters and state are covered) and modules (parameters and buffers).

        The memory for the first snapshot is got ready in the background, so that the first save stalls no more than
        the others.
        """
        self._guard.add(*targets)
        self._pool.warm(self._guard.expected_bytes(), self._warm)

    @contextlib.contextmanager
    def mutating(self) -> Iterator[None]:
        """Wait for copies in progress, so that guarded state may be changed in place inside the block.

        For value norms, exponential averages, or a manual ``copy_``.
        """
        self._guard.wait()
        yield

    def save_async(
        self,
        checkpoint: Any,
        path: str | os.PathLike[str],
        compress: bool = True,
        metadata: Any = None,
        *,
        format: SaveFormat = "pt",  # noqa: A002 - what it is
    ) -> Handle[SaveResult]:
        """Save a nested state in the background.

        Args:
            checkpoint: Nested dicts, lists and tuples of tensors, arrays and plain values; for ``format="pt"`` anything
                that can be pickled.
            path: The file; ``.lz4`` is added for compressed ``pt``.
            compress: Whether to pack it: into LZ4 frames, or tensor by tensor in a ``native`` file. Unpacked costs
                training least and loads faster.
            metadata: Plain values saved along; in a ``pt`` file under the key ``metadata`` of the checkpoint.
            format: ``pt`` is what ``torch.load`` reads; ``native`` is smaller, checked, and can be read in part.

        Returns:
            A handle: ``wait()``, ``done()``, ``result()``.

        Raises:
            BackgroundError: If an earlier save failed and nobody has heard of it.
            QueueFullError: If the queue is full and the policy is ``raise``.
            UnsupportedStateError: If the state cannot be stored in this format.
        """
        if format not in ("pt", "native"):
            raise ValueError(f"format is {format!r}, expected 'pt' or 'native'")
        if format == "pt" and metadata is not None:
            checkpoint = _with_metadata(checkpoint, metadata)
        target = Path(path)

        def write(snapshot: Snapshot) -> tuple[Path, int, int]:
            try:
                if format == "native":
                    written = write_native(
                        target, snapshot.flat(), metadata, threads=background_threads(), compress=compress
                    )
                    return target, written.raw_bytes, written.stored_bytes
                return write_portable(
                    target, snapshot.state(), compress=compress, level=self._level, threads=background_threads()
                )
            finally:
                snapshot.release()

        return self.submit(checkpoint, write, target, opaque=format == "pt")

    def submit(
        self,
        checkpoint: Any,
        write: Callable[[Snapshot], tuple[Path, int, int]],
        target: Path,
        *,
        opaque: bool = False,
    ) -> Handle[SaveResult]:
        """Snapshot a state and have a function of yours write it in the background.

        Args:
            checkpoint: The state.
            write: Gets the snapshot; returns the path, and the bytes before and after packing. It must release the
                snapshot, sooner or later.
            target: The file it is going to write, for messages and to see whether the disk has room.
            opaque: Whether objects that are not plain data may be in it; they are deep-copied.
        """
        start = time.perf_counter()
        with self._worker.room(str(target)) as put:
            snapshot = take_snapshot(checkpoint, self._guard, self._pool, opaque=opaque)
            handle = put(self._write, snapshot, write, target, start)
        self._call_s += time.perf_counter() - start
        return handle

    def flush(self, timeout: float | None = None) -> None:
        """Block until every save so far is durable; raises `BackgroundError` if one failed unheard."""
        self._worker.flush(timeout)

    def shutdown(self, timeout: float | None = 60) -> None:
        """Write what is queued, then take no more saves; raises `BackgroundError` if one failed unheard."""
        with self._unguarded_after():
            self._worker.close(timeout)

    def get_stats(self) -> dict[str, float]:
        """Return counts, bytes and times.

        ``save_count, total_saved_bytes, total_compressed_bytes, compression_ratio, queue_size``; also ``failed_count,
        skipped_count``, seconds spent in calls (``total_call_s``), in barriers (``total_barrier_s``) and until durable
        (``total_write_s``).
        """
        with self._lock:
            ratio = self._raw_bytes / self._stored_bytes if self._stored_bytes else 1.0
            return {
                "save_count": self._save_count,
                "total_saved_bytes": self._raw_bytes,
                "total_compressed_bytes": self._stored_bytes,
                "compression_ratio": ratio,
                "queue_size": self._worker.queue_size,
                "failed_count": self._failed_count,
                "skipped_count": self._worker.num_skipped,
                "total_call_s": self._call_s,
                "total_barrier_s": self._guard.waited_s,
                "total_write_s": self._write_s,
            }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._unguarded_after():
            self._worker.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def _unguarded_after(self) -> Iterator[None]:
        """Take the hooks of the guard back when the block ends, however it ends."""
        try:
            yield
        finally:
            self._guard.wait()
            self._guard.remove()

    def _warn_full(self) -> None:
        logger.warning(FULL_QUEUE)

    def _write(
        self, snapshot: Snapshot, write: Callable[[Snapshot], tuple[Path, int, int]], target: Path, start: float
    ) -> SaveResult:
        try:
            _check_space(target, snapshot.wait())
            path, raw, stored = write(snapshot)
        except BaseException:
            with self._lock:
                self._failed_count += 1
            raise
        result = SaveResult(path, raw, stored, time.perf_counter() - start)
        with self._lock:
            self._save_count += 1
            self._raw_bytes += raw
            self._stored_bytes += stored
            self._write_s += result.seconds
        logger.log(self._log_level, "saved %s: %s in %.2f s", path, format_bytes(stored), result.seconds)
        return result


def _with_metadata(checkpoint: Any, metadata: Any) -> Any:
    if not isinstance(checkpoint, dict) or "metadata" in checkpoint:
        raise ValueError("metadata needs a checkpoint that is a dict without a key 'metadata'")
    return {**checkpoint, "metadata": metadata}


def _check_space(target: Path, raw_bytes: int) -> None:
    """Fail before writing what cannot fit; the smallest that floats shrink to is about a third."""
    folder = next((parent for parent in target.absolute().parents if parent.exists()), Path("/"))
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if raw_bytes // 4 > free:
        raise DiskFullError(28, f"cannot write {target}: {free:,} bytes are free, the state is {raw_bytes:,}")
