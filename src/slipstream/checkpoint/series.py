"""The checkpoints of one folder, written one after another: numbered, stored against each other, and tidied up.

`CheckpointManager` is what users call; this is what happens in the background. A folder lock keeps managers of other
threads and processes from changing the folder at the same time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.checkpoint.delta import Parent
from slipstream.checkpoint.folder import FILE_ERRORS, CheckpointFile, CheckpointFolder
from slipstream.checkpoint.layout import MAX_LINKS, Ancestor
from slipstream.checkpoint.native import SMALL_DELTA_BYTES, StoredState, rewrite_whole, write_native
from slipstream.checkpoint.reader import NativeReader
from slipstream.checkpoint.retention import (
    Plan,
    RetentionPolicy,
    Tidied,
    apply,
    by_identity,
    find_best,
    find_root,
    plan,
)
from slipstream.checkpoint.snapshot import Snapshot
from slipstream.checkpoint.thinning import Thin, thin_file
from slipstream.errors import DiskFullError
from slipstream.schema.flatten import Tree
from slipstream.schema.unflatten import unflatten
from slipstream.schema.values import Json
from slipstream.store.local import make_folder, sweep, translate_errors
from slipstream.store.lock import FileLock
from slipstream.threads import background_threads

logger = logging.getLogger(__name__)

_LOCK = ".lock"
# Another process may be writing a large checkpoint. A longer wait means that it hangs.
_LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class _Previous:
    """The checkpoint that this process wrote last, with its memory."""

    stored: StoredState
    snapshot: Snapshot

    @property
    def ancestors(self) -> tuple[Ancestor, ...]:
        """What a delta to it is stored against."""
        header = self.stored.header
        return (Ancestor(header.identity, self.stored.path.name), *header.parents)


class Series:
    """Writes snapshots into a folder and applies the retention policy. A `CheckpointFormat`.

    Args:
        files: The folder.
        policy: Which checkpoints to keep.
        thin: What older ones lose, if anything.
        compress: Whether to pack checkpoints.
        differential: Whether to store checkpoints against each other.

    Attributes:
        num_failures: How many files could not be deleted, thinned or completed so far.
    """

    opaque = False

    def __init__(
        self,
        files: CheckpointFolder,
        policy: RetentionPolicy,
        thin: Thin | None,
        *,
        compress: bool,
        differential: bool,
    ) -> None:
        self._files = files
        self._policy = policy
        self._thin = thin
        self._compress = compress
        self._differential = differential
        self._previous: _Previous | None = None
        self.num_failures = 0

    def check(self, tree: Tree) -> None:
        """Accept every tree: `flatten` refuses what cannot be stored as data."""

    def write(self, path: Path, snapshot: Snapshot, metadata: Json) -> StoredState:
        """Write a snapshot, and tidy up the folder; see `CheckpointFormat`."""
        with self._locked():
            self._make_way(path, metadata["step"])
            files = self._files.scan()
            sequence = max((file.sequence for file in files), default=0) + 1
            parent = self._find_parent(files, path, sequence, metadata)
            try:
                stored = self._store(path, snapshot, metadata, parent, sequence)
            except DiskFullError as error:
                logger.warning("%s; cleaning up and trying once more", error)
                self._clean_up()
                stored = self._store(path, snapshot, metadata, parent, sequence)
            self._remember(stored, snapshot)
            self._tidy()
        return stored

    def plan(self) -> Plan:
        """Return what `tidy` would do."""
        return plan(self._files.scan(), self._policy)

    def tidy(self) -> Tidied:
        """Apply the retention policy now."""
        with self._locked():
            return self._tidy()

    def forget_parent(self) -> None:
        """Free the memory of the previous checkpoint. The next one is whole. Idempotent."""
        previous = self._previous
        self._previous = None
        if previous is not None:
            previous.snapshot.release()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Create the folder if it is missing, and keep everyone else from changing its checkpoints."""
        folder = self._files.path
        with translate_errors(folder):
            make_folder(folder)
            lock = FileLock(folder / _LOCK, timeout_s=_LOCK_TIMEOUT_S)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _store(
        self, path: Path, snapshot: Snapshot, metadata: Json, parent: Parent | None, sequence: int
    ) -> StoredState:
        options: dict[str, Any] = {"threads": background_threads(), "compress": self._compress}
        if self._differential:
            options["small_bytes"] = SMALL_DELTA_BYTES
        try:
            return write_native(path, snapshot.flat(), metadata, parent, sequence=sequence, **options)
        except BaseException:
            # Whatever went wrong, the next checkpoint depends on nothing that was written before.
            self.forget_parent()
            raise

    def _make_way(self, path: Path, step: int) -> None:
        """Prepare for a file to be replaced. Others may be stored against it, or it may be another step's."""
        files = self._files.scan()
        for old in files:
            if old.path != path:
                continue
            children = tuple(file for file in files if old.identity in file.parents[:1])
            stuck = apply(Plan(keep=children, complete=children), self._complete, self._thin_one).failures
            if stuck or old.step != step:
                # Children find their parent by identity, whatever its name. Retention deletes it in its turn.
                path.rename(path.with_name(f"{path.stem}_{old.sequence}{path.suffix}"))

    def _find_parent(self, files: Sequence[CheckpointFile], path: Path, sequence: int, metadata: Json) -> Parent | None:
        """Return what to store the next checkpoint against, or None if it has to be whole."""
        previous = self._previous
        if not self._differential or previous is None or len(previous.ancestors) > MAX_LINKS:
            return None
        identity = previous.stored.header.identity
        parent_file = None
        for file in files:
            if file.identity == identity and file.path != path:
                parent_file = file
        if parent_file is None:
            return None
        others = [file for file in files if file.path != path]
        parents = tuple(ancestor.identity for ancestor in previous.ancestors)
        metrics = unflatten(metadata["metrics"], [])
        new = CheckpointFile(path, metadata["step"], sequence, metrics, "new", parents)
        if not _may_be_delta(new, parent_file, others, self._policy):
            return None
        try:
            # Every byte of it, and of what it is stored against: one damaged byte would spoil the new checkpoint, too.
            with NativeReader(parent_file.path) as reader:
                reader.check_chunks(background_threads())
        except FILE_ERRORS as error:
            logger.warning("%s; the next checkpoint does not refer to it", error)
            return None
        return Parent(previous.ancestors, previous.stored.content)

    def _remember(self, stored: StoredState, snapshot: Snapshot) -> None:
        """Keep the memory of a checkpoint, so that the next one can be compared with it."""
        self.forget_parent()
        if self._differential:
            snapshot.retain()
            self._previous = _Previous(stored, snapshot)

    def _clean_up(self) -> None:
        """Delete what nobody needs, after the disk was full."""
        sweep(self._files.path)
        self._tidy()

    def _tidy(self) -> Tidied:
        tidied = apply(self.plan(), self._complete, self._thin_one)
        self.num_failures += len(tidied.failures)
        return tidied

    def _complete(self, file: CheckpointFile) -> None:
        rewrite_whole(file.path, background_threads(), compress=self._compress)

    def _thin_one(self, file: CheckpointFile) -> None:
        if self._thin is not None:
            thin_file(file.path, self._thin, background_threads(), compress=self._compress)


def _may_be_delta(
    new: CheckpointFile, parent: CheckpointFile, others: Sequence[CheckpointFile], policy: RetentionPolicy
) -> bool:
    """Return whether a new checkpoint may be stored against its parent without putting others at risk."""
    todo = plan([*others, new], policy)
    if find_best(todo.keep, policy.keep_best) == new:
        return False
    # A parent that is about to be deleted or thinned would have to be read again at once to complete the child.
    if parent not in todo.keep or parent in todo.thin:
        return False
    # At least one checkpoint must survive damage to the file that this one depends on in the end.
    known = by_identity(others)
    roots = {find_root(file, known) for file in todo.keep if file not in (new, parent)}
    return bool(roots - {None, find_root(parent, known)})
