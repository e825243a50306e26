"""The checkpoints of one folder, written one after another: numbered, stored against each other, and tidied up.

`CheckpointManager` is what users call; this is what happens in the background. A folder lock keeps managers of other
threads and processes from changing the folder at the same time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.checkpoint.delta import Parent
from slipstream.checkpoint.folder import FILE_ERRORS, CheckpointFile, CheckpointFolder
from slipstream.checkpoint.layout import MAX_LINKS, Ancestor
from slipstream.checkpoint.mirror import Mirror
from slipstream.checkpoint.native import StoredState, rewrite_whole, write_native
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


class Series:
    """Writes snapshots into a folder and applies the retention policy. A `CheckpointFormat`.

    Args:
        files: The folder.
        policy: Which checkpoints to keep.
        thin: What older ones lose, if anything.
        compress: Whether to pack checkpoints.
        differential: Whether to store checkpoints against each other.
        mirror: What uploads them, if anything.

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
        mirror: Mirror | None = None,
    ) -> None:
        self._files = files
        self._mirror = mirror
        self._policy = policy
        self._thin = thin
        self._compress = compress
        self._differential = differential
        self._previous: _Previous | None = None
        self._last_sequence = 0
        self.num_failures = 0

    def check(self, tree: Tree) -> None:
        """Accept every tree: `flatten` refuses what cannot be stored as data."""

    def write(self, path: Path, snapshot: Snapshot, metadata: Json) -> StoredState:
        """Write a snapshot, and tidy up the folder; see `CheckpointFormat`."""
        with self._locked():
            files = self._files.scan()
            self._make_way(path, metadata["step"], files)
            sequence = self._next_sequence(files)
            parent = self._find_parent(files, path, sequence, metadata)
            try:
                stored = self._store(path, snapshot, metadata, parent, sequence)
            except DiskFullError as error:
                logger.warning("%s; cleaning up and trying once more", error)
                self._clean_up(path)
                # Without the parent: its memory has been returned.
                stored = self._store(path, snapshot, metadata, None, sequence)
            self._remember(stored, snapshot)
            self._tidy_after(path)
        if self._mirror is not None:
            self._mirror.uploader.wake()
        return stored

    def plan(self) -> Plan:
        """Return what `tidy` would do."""
        return plan(self._files.scan(), self._policy)

    def tidy(self) -> Tidied:
        """Apply the retention policy now."""
        with self._locked():
            return self._carry_out(self.plan())

    def discard(self, file: CheckpointFile) -> None:
        """Delete a file that is somewhere else as well, unless a save has replaced it."""
        with self._locked():
            for other in self._files.scan():
                if (other.path, other.sequence, other.identity) == (file.path, file.sequence, file.identity):
                    other.path.unlink(missing_ok=True)

    def forget_parent(self) -> None:
        """Free the memory of the previous checkpoint. The next one is whole. Idempotent."""
        previous = self._previous
        self._previous = None
        if previous is not None:
            previous.snapshot.release()

    def __getstate__(self) -> dict[str, Any]:
        # A pickled series starts with a whole checkpoint: memory of a pool cannot be pickled.
        return {**vars(self), "_previous": None}

    def _next_sequence(self, files: Sequence[CheckpointFile]) -> int:
        """Return the number of the next save: above all that are in the folder, and all that were."""
        # A file may be unreadable for a moment. Its number must not be used again.
        highest = max((file.sequence for file in files), default=0)
        if self._mirror is not None:
            highest = max(highest, self._mirror.highest_sequence())
        self._last_sequence = max(self._last_sequence, highest) + 1
        return self._last_sequence

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
        try:
            return write_native(
                path,
                snapshot.flat(),
                metadata,
                parent,
                sequence=sequence,
                threads=background_threads(),
                compress=self._compress,
            )
        except BaseException:
            # Whatever went wrong, the next checkpoint depends on nothing that was written before.
            self.forget_parent()
            raise

    def _make_way(self, path: Path, step: int, files: Sequence[CheckpointFile]) -> None:
        """Rename the file that is about to be replaced, if it is more than an older checkpoint of the same step."""
        # A link points to a file somewhere else, which is the user's.
        is_in_use = path.is_symlink()
        for old in files:
            if old.path != path:
                continue
            children = tuple(file for file in files if old.identity in file.parents[:1])
            tidied = self._carry_out(Plan(keep=children, complete=children))
            # A file of another step was renamed by the user.
            is_in_use = is_in_use or bool(tidied.failures) or old.step != step
        if is_in_use:
            # Children find their parent by identity, whatever its name. Retention deletes it in its turn.
            with translate_errors(path):
                path.rename(_free_name(path))

    def _find_parent(self, files: Sequence[CheckpointFile], path: Path, sequence: int, metadata: Json) -> Parent | None:
        """Return what to store the next checkpoint against, or None if it has to be whole."""
        previous = self._previous
        if not self._differential or previous is None or len(previous.stored.header.parents) >= MAX_LINKS:
            return None
        others = [file for file in files if file.path != path]
        parent_file = _find_written(previous.stored, others)
        if parent_file is None:
            return None
        # The name under which it is verified below, and where a reader looks first.
        ancestors = (Ancestor(parent_file.identity, parent_file.path.name), *previous.stored.header.parents)
        parents = tuple(ancestor.identity for ancestor in ancestors)
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
        return Parent(ancestors, previous.stored.content)

    def _remember(self, stored: StoredState, snapshot: Snapshot) -> None:
        """Keep the memory of a checkpoint, so that the next one can be compared with it."""
        self.forget_parent()
        if self._differential:
            snapshot.retain()
            self._previous = _Previous(stored, snapshot)

    def _clean_up(self, path: Path) -> None:
        """Delete what nobody needs, after the disk was full."""
        sweep(self._files.path)
        self._tidy_after(path)

    def _tidy_after(self, path: Path) -> None:
        """Apply the retention policy after a save, which must not fail for that."""
        try:
            self._carry_out(plan(self._files.scan(), self._policy, just_written=path))
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here, the checkpoint is saved
            self.num_failures += 1
            logger.warning("cannot tidy up %s, will try again at the next save: %s", self._files.path, error)

    def _carry_out(self, todo: Plan) -> Tidied:
        tidied = apply(todo, self._complete, self._thin_one)
        self.num_failures += len(tidied.failures)
        return tidied

    def _complete(self, file: CheckpointFile) -> None:
        rewrite_whole(file.path, background_threads(), compress=self._compress)

    def _thin_one(self, file: CheckpointFile) -> None:
        if self._thin is not None:
            thin_file(file.path, self._thin, background_threads(), compress=self._compress)


def _find_written(stored: StoredState, files: Sequence[CheckpointFile]) -> CheckpointFile | None:
    """Return the file of a checkpoint that was written before, preferably under the name it was written to."""
    found = None
    for file in files:
        if file.identity != stored.header.identity:
            continue
        if found is None or file.path == stored.path:
            found = file
    return found


def _free_name(path: Path) -> Path:
    """Return an unused name for a file that has to make way."""
    for number in itertools.count(1):
        candidate = path.with_name(f"{path.stem}.replaced-{number}{path.suffix}")
        if not os.path.lexists(candidate):
            return candidate
    raise AssertionError("unreachable")


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
