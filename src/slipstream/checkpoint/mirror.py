"""`Mirror`: keeps the checkpoints of a folder in an object store as well, in the background."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.checkpoint.commits import CommittedRun
from slipstream.checkpoint.folder import CheckpointFile, CheckpointFolder
from slipstream.checkpoint.retention import RetentionPolicy, plan
from slipstream.errors import StoreError
from slipstream.store.upload import Uploader
from slipstream.store.urls import ObjectPath
from slipstream.threads import Notifier

logger = logging.getLogger(__name__)

# How long a save waits for the first answer of the store, to number its checkpoint. It runs in the background.
_FIRST_ANSWER_S = 5.0


class Mirror:
    """Uploads the checkpoints of a folder that a store does not have, newest first, and applies the retention policy.

    Which ones that are is derived from the folder and the store, so there is no queue that could be lost.

    Args:
        files: The folder.
        url: The URL of the run.
        policy: Which checkpoints the store keeps.

    Attributes:
        run: The checkpoints in the store.
        uploader: The thread that uploads.
        on_upload: Called after a checkpoint was uploaded.
    """

    def __init__(self, files: CheckpointFolder, url: ObjectPath, policy: RetentionPolicy) -> None:
        self.run = CommittedRun(url)
        self.uploader = Uploader(url, self)
        self.on_upload: Callable[[CheckpointFile], None] = _ignore
        self._files = files
        self._policy = policy
        # The identities of all commits by number; None until the store has answered.
        self._committed: dict[int, str | None] | None = None
        # The numbers of files that retention would delete from the store at once.
        self._unwanted: set[int] = set()
        self._answered = Notifier()
        self._has_answered = False
        self._has_saved = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Threads cannot be pickled. Where it is loaded, another one starts.
        return type(self), (self._files, self.run.url, self._policy), {"on_upload": self.on_upload}

    def highest_sequence(self) -> int:
        """Return the highest number of a commit, as far as that is known. Waits for the first answer of the store."""
        self.uploader.wake()
        if not self._has_saved:
            # Once: a store that is not available must not delay every save.
            self._has_saved = True
            self._answered.wait_until(self._is_answered, _FIRST_ANSWER_S)
        return max(self._committed or (), default=0)

    def _is_answered(self) -> bool:
        return self._has_answered

    def pending(self) -> list[CheckpointFile]:
        """Return what the store does not have and should keep, newest first."""
        if self._committed is None:
            try:
                self.scan()
            finally:
                # That it is not available is an answer, too.
                self._has_answered = True
                self._answered.notify_all()
        missing = self._missing()
        if not missing:
            return []
        # What retention would delete from the store at once is not uploaded.
        kept = plan([*self.run.scan(), *missing], self._policy).keep
        wanted = []
        for file in reversed(missing):
            if file in kept:
                wanted.append(file)
            else:
                self._unwanted.add(file.sequence)
        return wanted

    def waiting(self) -> list[Path]:
        """Return the files that are not in the store, as far as that is known without asking it."""
        return list(map(operator.attrgetter("path"), self._missing()))

    def _missing(self) -> list[CheckpointFile]:
        """Return the files that are not known to be in the store."""
        missing = []
        for file in self._files.scan():
            # Files that a user renamed are the user's. Deltas need other files.
            if file.is_managed and not file.parents and not self._is_known(file):
                missing.append(file)  # noqa: PERF401 - a loop is easier to read
        return missing

    def _is_known(self, file: CheckpointFile) -> bool:
        """Return whether the store has a file, or would delete it at once.

        Another checkpoint of the same number is not the file: uploading it tells that there are two writers.
        """
        if file.sequence in self._unwanted:
            return True
        committed = self._committed or {}
        return file.sequence in committed and committed[file.sequence] in (None, file.identity)

    def upload(self, item: CheckpointFile) -> int:
        """Upload a checkpoint. If this process saves, also delete from the store what the policy does not keep."""
        committed, num_bytes = self.run.upload(item.path)
        if self._committed is not None:
            self._committed[committed.sequence] = committed.identity
        self.on_upload(item)
        # What was only opened to be read may have another policy.
        if self._has_saved:
            self.prune()
        return num_bytes

    def prune(self) -> list[int]:
        """Delete from the store what the policy does not keep; returns the steps."""
        return self.run.prune(self._policy)

    def scan(self) -> list[CheckpointFile]:
        """Return the committed checkpoints; raises `StoreError` if the store cannot be read."""
        files = self.run.scan()
        self._committed = self.run.identities()
        return files


def _order(file: CheckpointFile) -> tuple[int, float, bool]:
    """Sort by the time of the save; of copies, the one on local disk comes last."""
    return file.sequence, file.time, not file.pieces


def _ignore(file: CheckpointFile) -> None:
    """Do nothing after an upload."""


class Sources:
    """The checkpoints of a run wherever they are: in its folder, in a store, or in both.

    Args:
        files: The folder.
        mirror: The store, if there is one.
    """

    def __init__(self, files: CheckpointFolder, mirror: Mirror | None) -> None:
        self._files = files
        self._mirror = mirror

    @property
    def place(self) -> Path:
        """The URL or the folder, for messages."""
        if self._mirror is not None:
            return self._mirror.run.url
        return self._files.path

    def scan(self) -> list[CheckpointFile]:
        """Return the readable checkpoints, in the order of their saves; of two copies, the one on local disk is last.

        If the store cannot be read, those on local disk are all there are.

        Raises:
            StoreError: If the store cannot be read and there is nothing on local disk.
        """
        files = self._files.scan()
        if self._mirror is None:
            return files
        try:
            files += self._mirror.scan()
        except StoreError as error:
            if not files:
                raise
            logger.warning("%s; looking at local disk only", error)
        return sorted(files, key=_order)

    def unreadable(self) -> dict[Path, Exception]:
        """Return the files that cannot be read, and commits that could not be read by the last `scan`, and why."""
        problems = self._files.unreadable()
        if self._mirror is not None:
            problems |= self._mirror.run.unreadable()
        return problems
