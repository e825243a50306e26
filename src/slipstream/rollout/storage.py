"""`RolloutStorage`: selected rollouts on disk, written in the background."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.codecs import Codec
from slipstream.rollout.batch import BatchFile, split_batch
from slipstream.rollout.files import add_extra, write_rollout, zstd_level
from slipstream.rollout.layout import Key, Rollout
from slipstream.rollout.uploads import (
    MAX_WAITING,
    RolloutUploads,
    find_iterations,
    iterations_in,
    rollout_name,
    surplus,
)
from slipstream.store.handle import Handle
from slipstream.store.local import make_folder
from slipstream.store.upload import spool_folder
from slipstream.store.urls import ObjectPath, as_path
from slipstream.store.worker import Policy, Worker
from slipstream.threads import background_threads

if TYPE_CHECKING:
    from tensordict import TensorDictBase

logger = logging.getLogger(__name__)

_SETTLED_FOR = 16


class RolloutStorage:
    """A folder of rollouts, one file each.

    `save` copies the batch and returns. Encoding, verifying and writing happen in the background, atomically and
    durably, so the caller may reuse the batch immediately. An error in the background is raised by the next call of
    `save`, `flush` or `close`. Normal exit, ``sys.exit``, SIGTERM and Ctrl-C write queued rollouts before the process
    ends. Thread-safe.

    With a URL, rollouts are written to local disk as well, and uploaded from there in the background. A store that is
    not available delays nothing and fails nothing. What is not uploaded when the process ends, the next start uploads.
    At most 64 rollouts wait, or `keep_last` if that is less: then the oldest is deleted, and a warning names it.

    Args:
        save_dir: The folder; created if it does not exist. Or a URL in an object store, such as
            ``s3://bucket/runs/walker/rollouts``.
        compression_level: 0 to 12; up to 9 is fast.
        keep_last: Keep the N rollouts that were saved last; all by default.
        max_bytes: Delete the oldest rollouts while the folder is larger than this. The newest is never deleted.
        max_queue_size: How many rollouts may be waiting or being written.
        policy: When the queue is full: ``block`` until there is room, ``skip_oldest``, or ``raise``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"observation": torch.zeros(8, 32, 3)}, batch_size=[8, 32])
        >>> with RolloutStorage("/tmp/slipstream-doc/rollouts") as storage:
        ...     path = storage.save(batch, 100, overwrite=True)
        ...     print(path.name, storage.load(100, steps=slice(0, 4)).batch_size)
        rollout_000100.slip torch.Size([8, 4])
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        compression_level: int = 9,
        *,
        keep_last: int | None = None,
        max_bytes: int | None = None,
        max_queue_size: int = 2,
        policy: Policy = "block",
    ) -> None:
        if keep_last is not None:
            keep_last = require_count("keep_last", keep_last)
        if max_bytes is not None:
            max_bytes = require_count("max_bytes", max_bytes)
        self._level = zstd_level(compression_level)
        self.folder = as_path(save_dir)
        # Where files are written: for a URL, until they are uploaded.
        self._disk = self.folder
        self._uploads: RolloutUploads | None = None
        if isinstance(self.folder, ObjectPath):
            self._disk = spool_folder(self.folder)
            self._uploads = RolloutUploads(self.folder, self._disk, keep_last, max_bytes)
        make_folder(self._disk)
        if self._uploads is not None:
            self._uploads.uploader.wake()
        self.keep_last = keep_last
        self.max_bytes = max_bytes
        self._worker = Worker(max_queue_size, policy, name="RolloutStorage")
        self._lock = threading.Lock()
        self._pending: dict[int, Handle[Path]] = {}
        self._saving: list[int] = []
        self._codecs: dict[str, Codec] = {}
        self._stats = {"save_count": 0, "raw_bytes": 0, "stored_bytes": 0, "call_s": 0.0, "write_s": 0.0}

    def save(
        self,
        data: TensorDictBase,
        iteration: int,
        *,
        overwrite: bool = False,
        metadata: Any = None,
        extra: Mapping[str, NDArray[Any]] | None = None,
    ) -> Path:
        """Save a rollout in the background.

        Blocks while the batch is copied, and while the queue is full if the policy says so.

        Args:
            data: A TensorDict of shape ``[environment, time, ...]``; copied before this returns.
            iteration: The iteration that collected it.
            overwrite: Whether to replace a rollout of the same iteration.
            metadata: A JSON value to store with it.
            extra: Arrays to store beside it, such as what all environments have in common; copied.

        Returns:
            The path that the file will have.

        Raises:
            FileExistsError: If that iteration has a rollout already.
            RolloutError: If `data` is not a rollout; nothing is written.
            BackgroundError: If an earlier save failed and its error was not retrieved.
        """
        start = time.perf_counter()
        iteration = require_count("iteration", iteration, least=0)
        path = self._file(iteration)
        # A copy as JSON: the caller may change the metadata, and a value that JSON cannot hold fails here.
        values = json.loads(json.dumps({"iteration": iteration, "metadata": metadata, "time": time.time()}))
        with self._reserved(iteration, path, overwrite=overwrite), self._worker.room(str(path)) as put:
            rollout = split_batch(data)
            add_extra(rollout, extra)
            handle = put(self._write, rollout, path, values)
            with self._lock:
                self._forget_finished()
                self._pending[iteration] = handle
                self._stats["call_s"] += time.perf_counter() - start
        return self.path(iteration)

    def path(self, iteration: int) -> Path:
        """Return the path or the URL of an iteration's rollout, whether it exists or not."""
        return self.folder / rollout_name(iteration)

    def iterations(self) -> list[int]:
        """Return the iterations that have a rollout, in order.

        Raises:
            StoreError: If the object store cannot be read.
        """
        numbers = iterations_in(self._disk)
        if self._uploads is not None:
            numbers |= find_iterations(info.name for info in self._uploads.stored())
        return sorted(numbers)

    def load(
        self,
        iteration: int,
        device: str | torch.device | None = None,
        *,
        keys: Sequence[str | Key] | None = None,
        envs: slice | None = None,
        steps: slice | None = None,
    ) -> TensorDictBase:
        """Load a rollout, or a part of it; see `load_rollout`. Blocks until a pending save of it is complete."""
        with self.open(iteration) as file:
            return file.load(device, keys=keys, envs=envs, steps=steps)

    def open(self, iteration: int) -> BatchFile:
        """Open a rollout, to inspect it or to read several parts. Blocks until a pending save of it is complete."""
        with self._lock:
            pending = self._pending.get(iteration)
        if pending is not None:
            pending.result()
        path = self.path(iteration)
        # What is not uploaded yet is on local disk only.
        if self._uploads is not None:
            with contextlib.suppress(FileNotFoundError):
                return BatchFile(self._file(iteration))
        try:
            return BatchFile(path)
        except FileNotFoundError:
            known = self.iterations()
            hint = "there is none"
            if known:
                hint = f"there are {len(known)}, {known[0]} to {known[-1]}"
            raise FileNotFoundError(2, f"no rollout of iteration {iteration}: {hint}", str(path)) from None

    def __iter__(self) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield every iteration and its rollout, in order. Skips and logs rollouts that are deleted meanwhile."""
        self.flush()
        for iteration in self.iterations():
            try:
                rollout = self.load(iteration)
            except FileNotFoundError:
                logger.warning("%s: skipped the rollout of iteration %d, which was deleted", self.folder, iteration)
                continue
            yield iteration, rollout

    def __len__(self) -> int:
        """Return the number of rollouts on disk."""
        return len(self.iterations())

    def get_stats(self) -> dict[str, float]:
        """Return ``save_count, raw_bytes, stored_bytes, compression_ratio``, and seconds in calls and in writing."""
        with self._lock:
            stats = dict(self._stats)
        stats["compression_ratio"] = 1.0
        if stats["stored_bytes"]:
            stats["compression_ratio"] = stats["raw_bytes"] / stats["stored_bytes"]
        stats["queue_size"] = self._worker.queue_size
        if self._uploads is not None:
            stats |= self._uploads.uploader.get_stats()
        return stats

    def flush(self, timeout: float | None = None) -> None:
        """Block until every save so far is durable on local disk; raises `BackgroundError` if one failed."""
        self._worker.flush(timeout)

    def wait_uploaded(self, timeout: float | None = None) -> bool:
        """Block until all rollouts are uploaded, or the store is not available; return whether all are."""
        self.flush(timeout)
        return self._uploads is None or self._uploads.uploader.flush(timeout)

    def close(self, timeout: float | None = 60) -> None:
        """Write queued rollouts, then refuse further saves. Idempotent.

        Waits for uploads as well, for at most as long as a signal waits for background jobs, and not at all if the
        store is not available. What is not uploaded by then is logged.
        """
        try:
            self._worker.close(timeout)
        finally:
            self._end_uploads(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._worker.__exit__(kind, error, trace)
        finally:
            self._end_uploads(None)

    def _end_uploads(self, timeout: float | None) -> None:
        if self._uploads is not None:
            self._uploads.uploader.close(timeout)

    def _file(self, iteration: int) -> Path:
        """Return where the file of a rollout is written."""
        return self._disk / rollout_name(iteration)

    @contextlib.contextmanager
    def _reserved(self, iteration: int, path: Path, *, overwrite: bool) -> Iterator[None]:
        """Prevent other threads from saving the same iteration inside the block."""
        with self._lock:
            pending = self._pending.get(iteration)
            is_pending = pending is not None and not pending.done()
            is_taken = iteration in self._saving or is_pending or path.exists() or self._is_uploaded(iteration)
            if is_taken and not overwrite:
                message = f"iteration {iteration} is saved already; overwrite=True replaces it"
                raise FileExistsError(17, message, str(self.path(iteration)))
            self._saving.append(iteration)
            if self._uploads is not None and overwrite:
                self._uploads.replace(path.name)
        try:
            yield
        finally:
            with self._lock:
                self._saving.remove(iteration)

    def _is_uploaded(self, iteration: int) -> bool:
        """Return whether the store has a rollout, as far as that is known: nothing waits for its answer here."""
        return self._uploads is not None and rollout_name(iteration) in self._uploads.known

    def _forget_finished(self) -> None:
        """Drop handles of finished saves, which `open` need not wait for. Call with the lock held."""
        for number, handle in list(self._pending.items()):
            if handle.done():
                del self._pending[number]

    def _write(self, rollout: Rollout, path: Path, values: dict[str, Any]) -> Path:
        start = time.perf_counter()
        # Codecs chosen for one rollout serve the next ones, but rollouts change as the policy learns.
        if self._stats["save_count"] % _SETTLED_FOR == 0:
            self._codecs = {}
        writing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._uploads is not None:
            writing = self._uploads.writing
        with writing:
            write_rollout(rollout, path, self._level, values, background_threads(), codecs=self._codecs)
        stored = _age_and_size(path)[1]
        with self._lock:
            self._stats["save_count"] += 1
            self._stats["raw_bytes"] += rollout.layout.raw_bytes
            self._stats["stored_bytes"] += stored
            self._stats["write_s"] += time.perf_counter() - start
        self._prune(path)
        if self._uploads is not None:
            self._uploads.uploader.wake()
        return path

    def _prune(self, newest: Path) -> None:
        """Delete the oldest files until the limits are met. The newest is never deleted."""
        found = []
        for number in iterations_in(self._disk):
            path = self._file(number)
            if path != newest:
                age, size = _age_and_size(path)
                found.append((age, size, path.name))
        found.sort()
        found.append((0, _age_and_size(newest)[1], newest.name))
        sizes = {name: size for _, size, name in found}
        keep_last = self.keep_last
        if self._uploads is not None:
            # A store that is down for days must not fill the disk.
            keep_last = min(MAX_WAITING, keep_last or MAX_WAITING)
        for name in surplus(sizes, keep_last, self.max_bytes):
            path = self._disk / name
            if self._uploads is not None:
                logger.warning("%s: deleted before it was uploaded, because newer rollouts are waiting", path)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                # A file of another user, or no permission: the save itself succeeded.
                logger.warning("%s: cannot be deleted (%s)", path, error)


def _age_and_size(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
