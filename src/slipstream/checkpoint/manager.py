"""`CheckpointManager`: a folder of checkpoints that looks after itself."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from slipstream.checkpoint.load import move
from slipstream.checkpoint.native import NativeFile, Parent, Written, write_native
from slipstream.checkpoint.saver import AsyncCheckpointSaver, SaveResult
from slipstream.checkpoint.snapshot import Snapshot
from slipstream.checks import require_count
from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.schema.flatten import flatten
from slipstream.schema.unflatten import unflatten
from slipstream.store.handle import Handle
from slipstream.store.local import make_folder, sync_folder
from slipstream.store.lock import FileLock
from slipstream.store.worker import Policy
from slipstream.tensors import TORCH
from slipstream.threads import background_threads

logger = logging.getLogger(__name__)

BASES = ".bases"
SUFFIX = ".slip"
_NAME = re.compile(r"checkpoint_iter_(\d+)\.slip")
# Another process may be writing a large checkpoint. A longer wait means that it hangs.
_LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Thin:
    """What older checkpoints give up.

    Attributes:
        keep_full: How many of the newest stay as they are.
        drop: Paths to leave out, such as ``"optimizer"`` or ``"*/optimizer*"``.
        dtype: What fp32 tensors are stored as, such as ``torch.bfloat16``; None leaves them.
    """

    keep_full: int = 1
    drop: tuple[str, ...] = ("optimizer*", "*optimizer*")
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read: its step, its state, and the metrics saved with it."""

    step: int
    state: Any
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Info:
    """What retention needs to know of a file."""

    step: int
    metrics: Mapping[str, Any]
    parents: tuple[str, ...]
    thinned: bool


class CheckpointManager:
    """Saves, finds, restores, thins and deletes the checkpoints of a run.

    Saves are asynchronous, in the native format, and store only what changed since the one before; see
    `AsyncCheckpointSaver` for what that guarantees. Each file says by itself what it is: there is no list that could
    disagree with the folder. A file that others are stored against may be deleted, even with ``rm``: they keep it under
    another name (a hard link in ``.bases``) until none of them is left.

    Args:
        folder: Where the checkpoints are, as ``checkpoint_iter_<step>.slip``.
        keep_last: Keep the N newest checkpoints; None keeps all.
        keep_every: Keep those whose step is a multiple of this, too.
        keep_best: Keep the best by a metric, too: ``("reward", "max")`` or ``("loss", "min")``.
        thin: What older ones give up; by default nothing.
        full_every: Write a complete file every N saves, and deltas in between; 1 for no deltas.
        max_queue_size: How many saves may be waiting or being written.
        policy: What to do when the queue is full; see `AsyncCheckpointSaver`.
        compress: Whether to pack checkpoints; if not, each is complete in itself.

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
        full_every: int = 10,
        max_queue_size: int = 3,
        policy: Policy = "block",
        compress: bool = True,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every), ("full_every", full_every)):
            if value is not None:
                require_count(name, value)
        if keep_best is not None and keep_best[1] not in ("min", "max"):
            raise ValueError(f"keep_best is {keep_best!r}, expected a metric's name and 'min' or 'max'")
        self.folder = Path(folder)
        make_folder(self.folder)
        self.keep_last, self.keep_every, self.keep_best, self.thin = keep_last, keep_every, keep_best, thin
        self.compress = compress
        self.full_every = full_every = full_every if compress else 1
        # One snapshot being written, and the one before it, which it is stored against.
        self.saver = AsyncCheckpointSaver(max_queue_size, policy=policy, warm=1 if full_every == 1 else 2)
        self.guard = self.saver.guard
        self.mutating = self.saver.mutating
        self._reference: tuple[Path, Written, Snapshot] | None = None
        self._infos: dict[tuple[str, int, int], _Info] = {}
        self._lock = threading.RLock()

    def save(self, step: int, state: Any, metrics: Mapping[str, Any] | None = None) -> Handle[SaveResult]:
        """Save a state in the background, then delete and thin what the policies say; returns at once.

        Args:
            step: Iteration, frame or epoch; a checkpoint of the same step is replaced.
            state: Nested dicts, lists and tuples of tensors, arrays and plain values.
            metrics: Numbers to choose the best by, and anything else that should be readable without the tensors.
        """
        step = require_count("step", step, least=0)
        path = self.path(step)
        metadata = {"step": step, "metrics": dict(metrics or {}), "time": time.time()}
        return self.saver.submit(state, lambda snapshot: self._write(path, snapshot, metadata), path)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is or would be."""
        return self.folder / f"checkpoint_iter_{step}{SUFFIX}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint on disk, in order."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int | None:
        """Return the newest step on disk, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Return the step that is best by `keep_best`, or None if no checkpoint has that metric."""
        if self.keep_best is None:
            raise ValueError("keep_best was not set, so there is no metric to tell the best by")
        return _best_of(self._readable(), self.keep_best)

    def restore(
        self, step: int | None = None, device: str | torch.device = "cpu", keys: Collection[str] | None = None
    ) -> Restored:
        """Read a checkpoint: that of `step`, or the newest that is sound; says so if newer ones are damaged.

        Blocks until pending saves are written.

        Raises:
            FileNotFoundError: If there is none.
            CorruptFileError: If the one asked for, or every one, is damaged.
        """
        self.saver.flush()
        steps = self.steps() if step is None else [step]
        failure: Exception | None = None
        for candidate in reversed(steps):
            try:
                restored = self._read(candidate, device, keys)
            except (CorruptFileError, FormatVersionError) as error:
                if step is not None:
                    raise
                logger.warning("%s; trying the checkpoint before it", error)
                failure = failure or error
                continue
            if failure is not None:
                logger.warning("restored step %d instead of %d", candidate, steps[-1])
            return restored
        if failure is not None:
            raise CorruptFileError(f"{self.folder}: none of its {len(steps)} checkpoints is sound") from failure
        raise FileNotFoundError(errno.ENOENT, "no checkpoint in folder", str(self.folder))

    def flush(self, timeout: float | None = None) -> None:
        """Block until every save so far is durable."""
        self.saver.flush(timeout)

    def close(self, timeout: float | None = 60) -> None:
        """Finish what is queued, then take no more saves."""
        self.saver.shutdown(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.saver.__exit__(kind, error, trace)

    def prune(self) -> list[int]:
        """Delete what the policies do not keep, and thin what they thin; `save` does it too. Returns steps deleted."""
        with self._folder_lock():
            return self._prune()

    def _read(self, step: int, device: str | torch.device, keys: Collection[str] | None) -> Restored:
        path = self.path(step)
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, f"no checkpoint of step {step}", str(path))
        with NativeFile(path) as file:
            metadata = file.metadata
            metrics = metadata.get("metrics", {}) if isinstance(metadata, dict) else {}
            return Restored(step, move(file.load(keys), device), metrics)

    def _write(self, path: Path, snapshot: Snapshot, metadata: Any) -> tuple[Path, int, int]:
        state = snapshot.flat()
        with self._folder_lock():
            parent = self._parent()
            written = write_native(path, state, metadata, parent, background_threads(), compress=self.compress)
            previous, self._reference = self._reference, (path, written, snapshot)
            with contextlib.suppress(OSError):  # somebody deleted it already
                self._infos[_key(path)] = _Info(metadata["step"], metadata["metrics"], written.parents, thinned=False)
            if previous is not None:
                previous[2].release()
            self._prune()
        return path, written.raw_bytes, written.stored_bytes

    def _parent(self) -> Parent | None:
        """Return what to store the next checkpoint against, safe from deletion; None for a full one."""
        if self._reference is None:
            return None
        path, written, _ = self._reference
        if len(written.parents) + 1 >= self.full_every:
            return None
        base = self.folder / BASES / f"{written.identity}{SUFFIX}"
        if not base.exists():
            make_folder(base.parent)
            try:
                os.link(path, base)
            except OSError:  # no such file any more, or no hard links here: a full checkpoint needs neither
                return None
            sync_folder(base.parent)
            with contextlib.suppress(OSError, CorruptFileError, FormatVersionError), NativeFile(base) as file:
                if file.container.identity == written.identity:
                    return Parent(base, written.identity, written.parents, written.content)
            base.unlink(missing_ok=True)  # another process replaced the file under that name
            return None
        return Parent(base, written.identity, written.parents, written.content)

    def _readable(self) -> list[_Info]:
        """Return what can be said of each checkpoint on disk, in order; damaged ones are left out."""
        infos, known = [], {}
        for step in self.steps():
            path = self.path(step)
            try:
                key = _key(path)
                info = self._infos.get(key) or _describe(step, path)
            except (OSError, CorruptFileError, FormatVersionError):
                continue
            known[key] = info
            infos.append(info)
        self._infos = known
        return infos

    def _prune(self) -> list[int]:
        infos = self._readable()
        keep = {info.step for info in (infos if self.keep_last is None else infos[-self.keep_last :])}
        if self.keep_every is not None:
            keep |= {info.step for info in infos if info.step % self.keep_every == 0}
        if self.keep_best is not None and (best := _best_of(infos, self.keep_best)) is not None:
            keep.add(best)
        deleted = [info.step for info in infos if info.step not in keep]
        for step in deleted:
            self.path(step).unlink(missing_ok=True)
        if self.thin is not None:
            kept = [info for info in infos if info.step in keep]
            for info in kept[: -self.thin.keep_full or None]:
                if not info.thinned:
                    self._thin(info.step, self.thin)
        self._sweep_bases()
        return deleted

    def _thin(self, step: int, thin: Thin) -> None:
        path = self.path(step)
        with NativeFile(path) as file:
            tree = flatten(file.load(drop=thin.drop))
            metadata = {**file.metadata, "thinned": True}
        leaves = []
        for leaf in tree.leaves:
            if isinstance(leaf, torch.Tensor) and thin.dtype is not None and leaf.dtype == torch.float32:
                leaves.append(leaf.detach().to(thin.dtype))
            else:
                leaves.append(leaf)
        state = unflatten(tree.structure, leaves, torch=TORCH)
        write_native(path, state, metadata, threads=background_threads(), compress=self.compress)

    def _sweep_bases(self) -> None:
        """Delete the bases that no checkpoint needs any more."""
        folder = self.folder / BASES
        if not folder.is_dir():
            return
        infos = self._readable()
        if len(infos) < len(self.steps()):  # who knows what the unreadable ones are stored against
            return
        needed = {parent for info in infos for parent in info.parents}
        if self._reference is not None:
            needed.add(self._reference[1].identity)
        for base in folder.glob(f"*{SUFFIX}"):
            if base.stem not in needed:
                base.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _folder_lock(self) -> Iterator[None]:
        """Keep other managers of the same folder, in this process or another, from pruning under our feet."""
        with self._lock, FileLock(self.folder / ".lock", timeout_s=_LOCK_TIMEOUT_S):
            yield


def _key(path: Path) -> tuple[str, int, int]:
    """Return what is different if a file was replaced."""
    status = path.stat()
    return path.name, status.st_mtime_ns, status.st_size


def _describe(step: int, path: Path) -> _Info:
    with NativeFile(path) as file:
        metadata = file.metadata if isinstance(file.metadata, dict) else {}
        parents = []
        ancestor = file
        while ancestor.parent:
            parents.append(str(ancestor.parent.get("identity")))
            ancestor = ancestor.open_parent()
        metrics = metadata.get("metrics")
        return _Info(step, metrics if isinstance(metrics, dict) else {}, tuple(parents), bool(metadata.get("thinned")))


def _best_of(infos: list[_Info], keep_best: tuple[str, str]) -> int | None:
    metric, mode = keep_best
    values = [(info.metrics.get(metric), info.step) for info in infos]
    comparable = [(float(v), step) for v, step in values if isinstance(v, (int, float)) and math.isfinite(v)]
    if not comparable:
        return None
    sign = 1 if mode == "max" else -1
    return max(comparable, key=lambda pair: (sign * pair[0], pair[1]))[1]
