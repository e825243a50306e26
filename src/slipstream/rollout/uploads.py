"""Rollouts in an object store, one object each, uploaded from local disk. Nothing here imports torch."""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import CorruptFileError
from slipstream.rollout.files import SUFFIX
from slipstream.store.base import FileInfo
from slipstream.store.upload import Uploader
from slipstream.store.urls import ObjectPath, open_store

MAX_WAITING = 64
"""How many rollouts wait on local disk at most while the store is not available."""

_NAME = re.compile(r"rollout_(\d{6,})\.slip")


def rollout_name(iteration: int) -> str:
    """Return the name of the file of an iteration."""
    return f"rollout_{iteration:06d}{SUFFIX}"


def find_iterations(names: Iterable[str]) -> set[int]:
    """Return the iterations whose rollouts are among these names."""
    numbers = set()
    for name in names:
        match = _NAME.fullmatch(name)
        # A name with extra zeros is not that of a rollout.
        if match and name == rollout_name(int(match[1])):
            numbers.add(int(match[1]))
    return numbers


def iterations_in(folder: Path) -> set[int]:
    """Return the iterations whose rollouts are in a folder."""
    return find_iterations(path.name for path in folder.iterdir())


def surplus(sizes: Mapping[str, int], keep_last: int | None, max_bytes: int | None) -> list[str]:
    """Return the names to delete, oldest first, so that the limits are met. The newest always stays.

    By age, not by iteration: a run resumed from an older checkpoint saves lower iterations than those that are there.

    Args:
        sizes: Sizes by name, oldest first.
        keep_last: How many to keep at most.
        max_bytes: How large they may be together.
    """
    total = sum(sizes.values())
    names = list(sizes)
    deleted = []
    for position, name in enumerate(names[:-1]):
        has_too_many = keep_last is not None and len(names) - position > keep_last
        is_too_large = max_bytes is not None and total > max_bytes
        if not has_too_many and not is_too_large:
            break
        total -= sizes[name]
        deleted.append(name)
    return deleted


@dataclass(frozen=True)
class WaitingRollout:
    """A rollout on local disk that is not uploaded yet."""

    path: Path


class RolloutUploads:
    """Moves the rollouts of a folder into an object store, newest first, and deletes the oldest there.

    Args:
        url: Where to.
        folder: The folder on local disk.
        keep_last: How many rollouts the store keeps.
        max_bytes: How large they may be together.

    Attributes:
        known: The names of objects in the store, as far as they are known.
        writing: Taken while a file of the folder is written, or deleted because it is uploaded.
        uploader: The thread that uploads.
    """

    def __init__(self, url: ObjectPath, folder: Path, keep_last: int | None, max_bytes: int | None) -> None:
        self.url = url
        self.known: frozenset[str] = frozenset()
        self.writing = threading.Lock()
        self.uploader = Uploader(url, self)
        self._folder = folder
        self._keep_last = keep_last
        self._max_bytes = max_bytes
        self._store = open_store(url)
        # Names that a save asked to replace. After a crash nobody knows, and the older object stays.
        self._replaced: set[str] = set()
        self._has_listed = False

    def stored(self) -> list[FileInfo]:
        """Return the rollouts in the store, oldest first.

        Raises:
            StoreError: If the store cannot be read.
        """
        found = []
        for info in self._store.list("rollout_"):
            if find_iterations([info.name]):
                found.append(info)  # noqa: PERF401 - a loop is easier to read
        self.known = frozenset(map(operator.attrgetter("name"), found))
        return sorted(found, key=operator.attrgetter("modified_s", "name"))

    def replace(self, name: str) -> None:
        """Let the next upload of a rollout replace an older one."""
        self._replaced.add(name)

    def pending(self) -> list[WaitingRollout]:
        """Return the rollouts on local disk, newest first."""
        # So that a save of an iteration that the store has is refused, without waiting for the store.
        if not self._has_listed:
            self.stored()
            self._has_listed = True
        return list(map(WaitingRollout, self.waiting()))

    def waiting(self) -> list[Path]:
        """Return the rollouts on local disk, newest first: those in the store have no file there."""
        ages = {}
        for number in iterations_in(self._folder):
            path = self._folder / rollout_name(number)
            try:
                ages[path] = path.stat().st_mtime_ns
            except FileNotFoundError:
                # Pruned meanwhile.
                continue
        return sorted(ages, key=ages.__getitem__, reverse=True)

    def upload(self, item: WaitingRollout) -> int:
        """Upload one rollout, delete its file, and delete what is too much from the store."""
        path = item.path
        before = path.stat()
        content = path.read_bytes()
        self._put(path.name, content)
        with self.writing:
            # If a save has replaced the file meanwhile, the new one is uploaded next.
            if path.stat().st_ino == before.st_ino:
                path.unlink()
                self._replaced.discard(path.name)
        self._prune()
        return len(content)

    def _put(self, name: str, content: bytes) -> None:
        try:
            self._store.put_new(name, content)
        except FileExistsError:
            # The reply to an earlier attempt was lost, or the process was killed before it deleted the file.
            if self._store.get(name) == content:
                return
            if name not in self._replaced:
                raise CorruptFileError(
                    f"{self._folder / name}: {self.url / name} exists with other content, and overwrite was not set"
                ) from None
            self._store.delete(name)
            self._store.put_new(name, content)

    def _prune(self) -> None:
        """Delete the oldest rollouts from the store until the limits are met."""
        sizes = {info.name: info.size_bytes for info in self.stored()}
        for name in surplus(sizes, self._keep_last, self._max_bytes):
            self._store.delete(name)
