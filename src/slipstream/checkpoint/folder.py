"""What is in a folder of checkpoints. Each file describes itself: there is no list that could disagree with the folder.

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.checkpoint.reader import NativeReader
from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.store.base import FileInfo

SUFFIX = ".slip"
# The second form is for a file that had to make way for another of the same name.
_MANAGED_NAME = re.compile(r"checkpoint_iter_[0-9]+(\.replaced-[0-9]+)?\.slip")
# How often to list a folder again if files vanish between listing and opening them.
_ATTEMPTS = 10

# What may go wrong with one file without affecting the others.
FILE_ERRORS = (OSError, CorruptFileError, FormatVersionError)


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint that a manager wrote, as its file describes it.

    Attributes:
        path: The file. It may have been renamed.
        step: The step it was saved with.
        sequence: Its number among all saves into the folder: the order of time, whatever the steps are.
        time: When it was saved, in seconds. Orders saves of the same number, which should not exist.
        metrics: The metrics it was saved with.
        identity: The same for all copies of it, and for every way to store it.
        parents: The identities of the checkpoints that it is stored against, nearest first; empty if it is whole.
        thinned: What was removed from it, in words; empty if it is complete.
        pieces: The objects that contain it, if it is in an object store. Then `path` is a URL.
    """

    path: Path
    step: int
    sequence: int
    metrics: Mapping[str, Any]
    identity: str
    parents: tuple[str, ...] = ()
    thinned: tuple[str, ...] = ()
    time: float = 0.0
    is_link: bool = False
    pieces: tuple[FileInfo, ...] = ()

    # Cached, because a plan asks for these several times per file, and a run may keep thousands of files.
    @functools.cached_property
    def is_managed(self) -> bool:
        """Whether retention may delete it. Files that a user renamed or linked are the user's."""
        return has_managed_name(self.path.name) and not self.is_link

    @functools.cached_property
    def order(self) -> tuple[int, float, bool, str]:
        """Sorts files by the time of their save; of copies, the one that still has its name comes last."""
        return self.sequence, self.time, self.is_managed, self.path.name


class CheckpointFolder:
    """Lists the checkpoints of a folder, and remembers what it read from each file until the file changes.

    Args:
        path: The folder. It need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[Any, ...], CheckpointFile | Exception] = {}

    def name_for(self, step: int) -> Path:
        """Return where a new checkpoint of a step is written."""
        return self.path / managed_name(step)

    def scan(self) -> list[CheckpointFile]:
        """Return the readable checkpoints, in the order in which they were saved."""
        files = [found for found in self._read().values() if isinstance(found, CheckpointFile)]
        return sorted(files, key=operator.attrgetter("order"))

    def unreadable(self) -> dict[Path, Exception]:
        """Return the files that have the name of a checkpoint but cannot be read, and why."""
        return {self.path / name: found for name, found in self._read().items() if isinstance(found, Exception)}

    def find(self, step: int) -> CheckpointFile | None:
        """Return the newest checkpoint of a step, whatever its file is called."""
        found = None
        for file in self.scan():
            if file.step == step:
                found = file
        return found

    def _read(self) -> dict[str, CheckpointFile | Exception]:
        """Look at every file. If one is deleted meanwhile, there may be a newer one, so look again."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._read_once()
            except FileNotFoundError:
                continue
        return self._read_once(skip_missing=True)

    def _read_once(self, *, skip_missing: bool = False) -> dict[str, CheckpointFile | Exception]:
        """Look at every file; opens only those that are new or have changed. Returns what they are by name."""
        known: dict[tuple[Any, ...], CheckpointFile | Exception] = {}
        found: dict[str, CheckpointFile | Exception] = {}
        for entry in self._candidates():
            try:
                status = entry.stat()
                # The time of change, too: other permissions may make a file readable.
                key = (entry.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                description = self._known.get(key) or _describe(self.path / entry.name)
            except FileNotFoundError as error:
                if entry.is_symlink():
                    description = error
                elif skip_missing:
                    continue
                else:
                    raise
            except FILE_ERRORS as error:
                # An error that is kept must not keep the frames that raised it.
                description = error.with_traceback(None)
            if isinstance(description, Exception) and not has_managed_name(entry.name):
                # Rollouts and other files may be in the folder, too.
                continue
            if description is None:
                continue
            found[entry.name] = description
            # A disk may recover from an error, but a damaged file stays damaged until it is replaced.
            if not isinstance(description, OSError):
                known[key] = description
        self._known = known
        return found

    def _candidates(self) -> list[os.DirEntry[str]]:
        """Return the files that may be checkpoints, sorted by name, without links to others of them."""
        try:
            # Unlike paths, these know without a system call whether they are links. A run may keep thousands of files.
            with os.scandir(self.path) as entries:
                found = [entry for entry in entries if entry.name.endswith(SUFFIX) and not _is_alias(entry)]
        except FileNotFoundError:
            return []
        return sorted(found, key=operator.attrgetter("name"))


def _is_alias(entry: os.DirEntry[str]) -> bool:
    """Return whether a file is a link to another one of the same folder, such as ``latest.slip``."""
    if not entry.is_symlink():
        return False
    path = Path(entry.path)
    target = Path(os.path.realpath(path))
    return target.parent == Path(os.path.realpath(path.parent)) and target.exists()


def managed_name(step: int) -> str:
    """Return the name of the file of a step."""
    return f"checkpoint_iter_{step}{SUFFIX}"


def has_managed_name(name: str) -> bool:
    """Return whether a manager may have given a file its name."""
    return _MANAGED_NAME.fullmatch(name) is not None


def _describe(path: Path) -> CheckpointFile | None:
    """Return what a file says about itself; None if it is intact and no manager wrote it.

    Raises:
        OSError: If it cannot be opened.
        CorruptFileError: If it is damaged, or something else.
        FormatVersionError: If another version of the format wrote it.
    """
    with NativeReader(path) as file:
        found = describe(file)
    if found is None:
        return None
    return dataclasses.replace(found, is_link=path.is_symlink())


def describe(file: NativeReader) -> CheckpointFile | None:
    """Return what an open checkpoint says about itself; None if no manager wrote it."""
    metadata = file.metadata
    header = file.header
    if header.sequence is None or not isinstance(metadata, dict):
        return None
    step = metadata.get("step")
    metrics = metadata.get("metrics")
    time = metadata.get("time")
    if type(step) is not int or not isinstance(metrics, dict) or not isinstance(time, float):
        return None
    parents = tuple(parent.identity for parent in header.parents)
    path = file.container.path
    return CheckpointFile(path, step, header.sequence, metrics, header.identity, parents, header.thinned, time)


def no_checkpoint(folder: Path, problem: str = "no checkpoint in folder") -> FileNotFoundError:
    """Return the error for a checkpoint that is not there."""
    return FileNotFoundError(errno.ENOENT, problem, os.fspath(folder))
