"""`AsyncCheckpointSaver`: save without stopping training."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch

from slipstream.checkpoint.formats import CheckpointFormat, Written
from slipstream.checkpoint.guard import Guard
from slipstream.checkpoint.native import NativeFormat, encode_metadata
from slipstream.checkpoint.portable.format import PortableFormat
from slipstream.checkpoint.snapshot import Snapshot, snapshot_pool, take_snapshot
from slipstream.checks import require_choice, require_count
from slipstream.codecs.bytes import MAX_LZ4_LEVEL
from slipstream.store.handle import Handle
from slipstream.store.local import refuse_url
from slipstream.store.worker import Policy, Worker
from slipstream.text import format_bytes

logger = logging.getLogger(__name__)

FULL_QUEUE = "Save queue is full, checkpoint may be delayed"
SaveFormat = Literal["pt", "native"]

# A snapshot takes up to two buffers. One is being written while the next is taken; more are rare and not worth keeping.
_MAX_FREE_BUFFERS = 4


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


@dataclass(frozen=True)
class _Totals:
    """What all saves so far add up to."""

    save_count: int = 0
    failed_count: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    write_s: float = 0.0

    def with_save(self, result: SaveResult) -> _Totals:
        return replace(
            self,
            save_count=self.save_count + 1,
            raw_bytes=self.raw_bytes + result.raw_bytes,
            stored_bytes=self.stored_bytes + result.stored_bytes,
            write_s=self.write_s + result.seconds,
        )

    def with_failure(self) -> _Totals:
        return replace(self, failed_count=self.failed_count + 1)

    @property
    def ratio(self) -> float:
        if not self.stored_bytes:
            return 1.0
        return self.raw_bytes / self.stored_bytes


class AsyncCheckpointSaver:
    """Saves checkpoints in the background: consistent, durable, atomic, and never silently lost.

    `save_async` returns as soon as the state may change again. The file contains the state at the moment of the call.
    Parameters and optimizer state covered by `guard` are copied while training continues, and guarded optimizers wait
    before their next step for what is still being copied; everything else is copied before the call returns. At most
    `max_queue_size` copies are in memory, and their memory is reused. Normal exit, ``sys.exit``, SIGTERM and Ctrl-C
    write what is queued before the process ends.

    Args:
        max_queue_size: How many saves may be waiting or being written.
        compression_level: LZ4 level for ``compress=True``, 0 to 12.
        verbose: Whether to log a line per save at level INFO (else DEBUG).
        policy: When the queue is full: ``block`` until there is room, ``skip_oldest``, or ``raise``.
        warm: For how many snapshots `guard` prepares memory.

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
        self._worker = Worker(max_queue_size, policy, name="AsyncCheckpointSaver", on_full=_warn_full)
        self._level = compression_level
        self._log_level = logging.DEBUG
        if verbose:
            self._log_level = logging.INFO
        self._guard = Guard()
        self._pool = snapshot_pool(_MAX_FREE_BUFFERS)
        self._warm = warm
        # Replaced as a whole, and only by jobs, which run one after another. A lock could be held in another thread
        # while this process forks, and then the child would wait for it forever.
        self._totals = _Totals()
        self._call_s = 0.0

    def guard(self, *targets: torch.optim.Optimizer | torch.nn.Module) -> None:
        """Copy the parameters and optimizer state of these in the background.

        They may change only where the saver can block the change: in ``step`` and ``load_state_dict`` of a guarded
        optimizer, and in ``load_state_dict`` of a guarded module or its submodules. Put any other change, such as an
        exponential average, under `mutating`. A change elsewhere is found by torch's version counters: that save fails
        with `TornStateError`, and later saves copy the tensor during the call. Buffers are always copied during the
        call.

        What frees their memory must be under `mutating`, too, or the process may crash: ``resize_`` of a storage,
        ``share_memory``, and sending them to another process, unless they are in shared memory already.

        Memory for the first snapshot is prepared in the background. Guarding a target again has no effect. The targets
        can still be copied, pickled and scripted; copies of them are not guarded.

        Args:
            *targets: Optimizers (their parameters and state are covered) and modules (their parameters are).

        Raises:
            TypeError: If a target is neither an optimizer nor a module.
            RuntimeError: After `shutdown`.
        """
        if self._worker.is_closed:
            raise RuntimeError("AsyncCheckpointSaver: shut down, so it guards nothing any more")
        self._guard.add(*targets)
        self._pool.warm(self._guard.expected_bytes(), self._warm)

    @contextlib.contextmanager
    def mutating(self) -> Iterator[None]:
        """Wait for copies in progress, so that guarded state may be changed in place inside the block.

        For value norms, exponential averages, or a manual ``copy_``.
        """
        block = _Block()
        self._guard.begin_change(block)
        try:
            yield
        finally:
            self._guard.end_change(block)

    def save_async(
        self,
        checkpoint: Any,
        path: str | os.PathLike[str],
        compress: bool = True,
        metadata: Any = None,
        *,
        format: SaveFormat = "pt",  # noqa: A002 - the word users expect
        weights_only: bool = True,
    ) -> Handle[SaveResult]:
        """Save a nested state in the background.

        Path and metadata are captured now: changing the working directory or the metadata later has no effect.

        Args:
            checkpoint: Nested dicts, lists and tuples of tensors, arrays and plain values.
            path: The file; ``.lz4`` is added for compressed ``pt``.
            compress: Whether to pack it: into LZ4 frames, or tensor by tensor in a ``native`` file. Unpacked costs
                training least and loads faster.
            metadata: Plain values saved along; in a ``pt`` file under the key ``metadata`` of the checkpoint.
            format: ``pt`` is what ``torch.load`` reads; ``native`` is smaller, checked, and can be read in part.
            weights_only: Whether to refuse, now, what `load_checkpoint` refuses by default. With False, a ``pt`` file
                may contain anything that can be pickled, and loading it takes ``weights_only=False``, too.

        Returns:
            A handle: ``wait()``, ``done()``, ``result()``.

        Raises:
            BackgroundError: If an earlier save failed and its error was not retrieved.
            QueueFullError: If the queue is full and the policy is ``raise``.
            UnsupportedStateError: If the state cannot be stored in this format. Names the key.
        """
        require_choice("format", format, get_args(SaveFormat))
        if format == "native":
            return self.save(checkpoint, path, NativeFormat(compress), encode_metadata(metadata))
        if metadata is not None:
            checkpoint = _with_metadata(checkpoint, metadata)
        return self.save(checkpoint, path, PortableFormat(compress, self._level, weights_only))

    def save(
        self, state: Any, path: str | os.PathLike[str], file_format: CheckpointFormat, metadata: Any = None
    ) -> Handle[SaveResult]:
        """Snapshot a state and write it in the background, in any format.

        Args:
            state: The state.
            path: The file. A relative path is resolved now.
            file_format: Checks the state now and writes the snapshot later.
            metadata: Passed to the format as it is.

        Raises:
            BackgroundError: If an earlier save failed and its error was not retrieved.
            QueueFullError: If the queue is full and the policy is ``raise``.
            UnsupportedStateError: If the format cannot store the state.
        """
        started = time.perf_counter()
        target = _absolute(path)
        # Wait for room first: a full queue must not take memory for yet another snapshot.
        with self._worker.room(str(target)) as submit:
            snapshot = take_snapshot(state, self._guard, self._pool, opaque=file_format.opaque, check=file_format.check)
            handle: Handle[SaveResult] = submit(self._write, snapshot, target, file_format, metadata, started)
        self._call_s += time.perf_counter() - started
        return handle

    def flush(self, timeout: float | None = None) -> None:
        """Block until every save so far is durable; raises `BackgroundError` if one failed unnoticed."""
        self._worker.flush(timeout)

    def shutdown(self, timeout: float | None = 60) -> None:
        """Write what is queued and accept no more saves; raises `BackgroundError` if one failed unnoticed.

        Frees the memory of snapshots and removes the hooks of `guard`. Idempotent.
        """
        with self._released_after():
            self._worker.close(timeout)

    def get_stats(self) -> dict[str, float]:
        """Return counts, bytes and times.

        ``save_count, total_saved_bytes, total_compressed_bytes, compression_ratio, queue_size``; also ``failed_count,
        skipped_count``, seconds spent in calls (``total_call_s``), in barriers (``total_barrier_s``) and until durable
        (``total_write_s``).
        """
        totals = self._totals
        return {
            "save_count": totals.save_count,
            "total_saved_bytes": totals.raw_bytes,
            "total_compressed_bytes": totals.stored_bytes,
            "compression_ratio": totals.ratio,
            "queue_size": self._worker.queue_size,
            "failed_count": totals.failed_count,
            "skipped_count": self._worker.num_skipped,
            "total_call_s": self._call_s,
            "total_barrier_s": self._guard.waited_s,
            "total_write_s": totals.write_s,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._released_after():
            self._worker.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def _released_after(self) -> Iterator[None]:
        """Remove the hooks of the guard and free the pool when the block ends, however it ends."""
        try:
            yield
        finally:
            self._guard.wait()
            self._guard.remove()
            self._pool.clear()

    def _write(
        self, snapshot: Snapshot, path: Path, file_format: CheckpointFormat, metadata: Any, started: float
    ) -> SaveResult:
        """Write one snapshot; runs on the background thread."""
        try:
            snapshot.wait()
            written: Written = file_format.write(path, snapshot, metadata)
        except BaseException:
            self._totals = self._totals.with_failure()
            raise
        finally:
            # A format that needs it as a parent has retained it.
            snapshot.release()
        result = SaveResult(written.path, written.raw_bytes, written.stored_bytes, time.perf_counter() - started)
        self._totals = self._totals.with_save(result)
        size = format_bytes(result.stored_bytes)
        logger.log(self._log_level, "saved %s: %s in %.2f s", result.path, size, result.seconds)
        return result


class _Block:
    """Stands for a block that changes guarded state."""


def _warn_full() -> None:
    logger.warning(FULL_QUEUE)


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path that later changes of the working directory do not affect."""
    text = os.fspath(path)
    # A path that ends with "/" or "." is a folder, whether it exists or not.
    if not isinstance(text, str) or text.rpartition("/")[2] in ("", ".", ".."):
        raise ValueError(f"path is {text!r}, expected the name of a file")
    refuse_url(text)
    return Path(text).absolute()


def _with_metadata(checkpoint: Any, metadata: Any) -> Any:
    if not isinstance(checkpoint, dict) or "metadata" in checkpoint:
        raise ValueError("metadata needs a checkpoint that is a dict without a key 'metadata'")
    # A shallow copy keeps the type, and what a module's state dict has as an attribute.
    extended = copy.copy(checkpoint)
    extended["metadata"] = metadata
    return extended
