"""`RolloutStorage`: selected rollouts kept on disk, written while training goes on."""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from slipstream.codecs import Codec
from slipstream.rollout.batch import BatchFile, split_batch
from slipstream.rollout.files import SUFFIX, write_rollout, zstd_level
from slipstream.rollout.layout import Key, Rollout
from slipstream.store.handle import Handle
from slipstream.store.local import make_folder
from slipstream.store.worker import Policy, Worker
from slipstream.threads import background_threads

if TYPE_CHECKING:
    from tensordict import TensorDictBase

logger = logging.getLogger(__name__)

_SETTLED_FOR = 16
_NAME = re.compile(r"rollout_(\d{6,})\.slip")


class RolloutStorage:
    """A folder of rollouts, each packed into a file of its own.

    `save` copies the batch and returns; packing, checking and writing happen in the background, durably and atomically.
    The caller may reuse the batch at once. An error in the background reaches the next call, `flush` and `close`.
    Normal exit, ``sys.exit``, SIGTERM and Ctrl-C write what is queued before the process ends.

    Args:
        save_dir: The folder; it is made if need be.
        compression_level: 0 to 12; up to 9 is fast.
        keep_last: Keep the so many that were saved last; all by default.
        max_bytes: Delete those that were saved first while all together are larger than this; the last one stays in any
            case.
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
        for name, value in (("keep_last", keep_last), ("max_bytes", max_bytes)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value}, expected a whole number from 1 up")
        self._level = zstd_level(compression_level)
        self.folder = Path(save_dir)
        make_folder(self.folder)
        self.keep_last, self.max_bytes = keep_last, max_bytes
        self._worker = Worker(max_queue_size, policy, name="RolloutStorage")
        self._lock = threading.Lock()
        self._pending: dict[int, Handle[Path]] = {}
        self._saving: list[int] = []
        self._codecs: dict[str, Codec] = {}
        self._stats = {"save_count": 0, "raw_bytes": 0, "stored_bytes": 0, "call_s": 0.0, "write_s": 0.0}

    def save(self, data: TensorDictBase, iteration: int, *, overwrite: bool = False, metadata: Any = None) -> Path:
        """Save a rollout in the background; returns the path that it will have.

        Args:
            data: A TensorDict of shape ``[environment, time, ...]``; it is copied before this returns.
            iteration: Which one it is.
            overwrite: Whether a rollout of the same iteration may be replaced.
            metadata: A JSON value to be kept with it.

        Raises:
            FileExistsError: If there is one of that iteration already.
            RolloutError: If `data` is not a rollout; nothing is written then.
            BackgroundError: If an earlier save failed and nobody has heard of it.
        """
        start = time.perf_counter()
        if isinstance(iteration, bool) or not hasattr(iteration, "__index__") or iteration < 0:
            raise ValueError(f"iteration is {iteration!r}, expected a whole number from 0 up")
        iteration = operator.index(iteration)
        path = self.path(iteration)
        values = json.loads(json.dumps({"iteration": iteration, "metadata": metadata, "time": time.time()}))
        with self._reserved(iteration, path, overwrite=overwrite), self._worker.room(str(path)) as put:
            rollout = split_batch(data)
            handle = put(self._write, rollout, path, values)
            with self._lock:
                self._pending = {number: other for number, other in self._pending.items() if not other.done()}
                self._pending[iteration] = handle
                self._stats["call_s"] += time.perf_counter() - start
        return path

    def path(self, iteration: int) -> Path:
        """Return where the rollout of an iteration is or would be."""
        return self.folder / f"rollout_{iteration:06d}{SUFFIX}"

    def iterations(self) -> list[int]:
        """Return the iterations that have a rollout on disk, in order."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        numbers = (int(match[1]) for match in found if match)
        return sorted({number for number in numbers if self.path(number).exists()})  # not those with a zero too many

    def load(
        self,
        iteration: int,
        device: str | torch.device | None = None,
        *,
        keys: Sequence[str | Key] | None = None,
        envs: slice | None = None,
        steps: slice | None = None,
    ) -> TensorDictBase:
        """Load a rollout, or a part of it; waits for its save if that is under way. See `load_rollout`."""
        with self.open(iteration) as file:
            return file.load(device, keys=keys, envs=envs, steps=steps)

    def open(self, iteration: int) -> BatchFile:
        """Open a rollout, to look at it or to read parts of it one after another."""
        with self._lock:
            pending = self._pending.get(iteration)
        if pending is not None:
            pending.result()
        path = self.path(iteration)
        try:
            return BatchFile(path)
        except FileNotFoundError:
            known = self.iterations()
            hint = f"there are {len(known)}, {known[0]} to {known[-1]}" if known else "there is none"
            raise FileNotFoundError(2, f"no rollout of iteration {iteration}: {hint}", str(path)) from None

    def __iter__(self) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield every iteration and its rollout, in order; one that is deleted meanwhile is left out and logged."""
        self.flush()
        for iteration in self.iterations():
            try:
                rollout = self.load(iteration)
            except FileNotFoundError:
                logger.warning("%s: the rollout of iteration %d was deleted meanwhile", self.folder, iteration)
                continue
            yield iteration, rollout

    def __len__(self) -> int:
        """Return how many rollouts are on disk."""
        return len(self.iterations())

    def get_stats(self) -> dict[str, float]:
        """Return ``save_count, raw_bytes, stored_bytes, compression_ratio``, and seconds in calls and in writing."""
        with self._lock:
            stats = dict(self._stats)
        stats["compression_ratio"] = stats["raw_bytes"] / stats["stored_bytes"] if stats["stored_bytes"] else 1.0
        return {**stats, "queue_size": self._worker.queue_size}

    def flush(self, timeout: float | None = None) -> None:
        """Block until every save so far is durable; raises `BackgroundError` if one failed unheard."""
        self._worker.flush(timeout)

    def close(self, timeout: float | None = 60) -> None:
        """Write what is queued, then take no more."""
        self._worker.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def _reserved(self, iteration: int, path: Path, *, overwrite: bool) -> Iterator[None]:
        """Keep other threads from saving the same iteration while the block lasts."""
        with self._lock:
            pending = self._pending.get(iteration)
            taken = iteration in self._saving or (pending is not None and not pending.done()) or path.exists()
            if taken and not overwrite:
                message = f"iteration {iteration} is saved already; overwrite=True replaces it"
                raise FileExistsError(17, message, str(path))
            self._saving.append(iteration)
        try:
            yield
        finally:
            with self._lock:
                self._saving.remove(iteration)

    def _write(self, rollout: Rollout, path: Path, values: dict[str, Any]) -> Path:
        start = time.perf_counter()
        if self._stats["save_count"] % _SETTLED_FOR == 0:  # rollouts change as the policy learns
            self._codecs = {}
        write_rollout(rollout, path, self._level, values, background_threads(), codecs=self._codecs)
        stored = _age_and_size(path)[1]
        with self._lock:
            self._stats["save_count"] += 1
            self._stats["raw_bytes"] += rollout.layout.raw_bytes
            self._stats["stored_bytes"] += stored
            self._stats["write_s"] += time.perf_counter() - start
        self._prune(path)
        return path

    def _prune(self, newest: Path) -> None:
        """Delete the rollouts that the limits do not allow, those that were written first before the others.

        By age, not by number: a run that was resumed from an older checkpoint saves lower numbers than there are.
        """
        paths = [self.path(number) for number in self.iterations()]
        ages = {path: _age_and_size(path) for path in paths if path != newest}
        left = [*sorted(ages, key=lambda path: ages[path][0]), newest]
        ages[newest] = _age_and_size(newest)
        doomed: list[Path] = []
        if self.keep_last is not None:
            doomed, left = left[: -self.keep_last], left[-self.keep_last :]
        while self.max_bytes is not None and len(left) > 1 and sum(ages[path][1] for path in left) > self.max_bytes:
            doomed.append(left.pop(0))
        for path in doomed:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # not ours, or not allowed: no reason to call the save a failure
                logger.warning("%s: cannot be deleted (%s)", path, error)


def _age_and_size(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
