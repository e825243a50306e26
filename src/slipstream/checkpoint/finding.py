"""Find and open the native checkpoints of a folder, or of a run in an object store. Nothing here imports torch."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.checkpoint.commits import CommittedRun
from slipstream.checkpoint.folder import SUFFIX, CheckpointFile, has_managed_name, no_checkpoint
from slipstream.checkpoint.layout import KIND
from slipstream.errors import CorruptFileError, FormatVersionError, naming
from slipstream.store.container import Container
from slipstream.store.ranges import OpenObject
from slipstream.store.urls import ObjectPath, open_store

logger = logging.getLogger(__name__)

Opener = Callable[[], Path | Container]
"""Returns a file, or an open checkpoint of a store."""


def find_sources(folder: Path) -> tuple[dict[Path, Opener], dict[Path, Exception]]:
    """Return how to open each checkpoint of a folder or of a run in a store, and the commits that cannot be read.

    Raises:
        FileNotFoundError: If there is no such folder or run, or no checkpoint in it.
        StoreError: If the store cannot be read.
    """
    sources: dict[Path, Opener] = {}
    if not isinstance(folder, ObjectPath):
        for path in find_native_files(folder):
            sources[path] = functools.partial(Path, path)
        return sources, {}
    run = CommittedRun(folder)
    for file in run.scan():
        sources[file.path] = functools.partial(open_pieces, file)
    unreadable = run.unreadable()
    if not sources and not unreadable:
        raise no_checkpoint(folder, "no checkpoint at this URL")
    return sources, unreadable


def find_native_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are native checkpoints, or may have been ones before they were damaged.

    Raises:
        FileNotFoundError: If there is no such folder, or no such file in it.
    """
    # Globbing yields nothing for a folder that does not exist. This raises.
    folder.stat()
    candidates = sorted(folder.glob(f"*{SUFFIX}"), key=_natural_order)
    paths = list(itertools.filterfalse(_is_other_kind, candidates))
    if not paths:
        raise no_checkpoint(folder, f"contains no checkpoint *{SUFFIX}")
    return paths


def _natural_order(path: Path) -> tuple[int, str]:
    """Sort step 900 before step 1000."""
    return len(path.name), path.name


def _is_other_kind(path: Path) -> bool:
    """Return whether a file is an intact container of something else, such as a rollout."""
    try:
        with Container(path) as container:
            return container.kind != KIND
    except (OSError, CorruptFileError, FormatVersionError):
        # Damaged: nothing says that it was something else.
        return False


def open_pieces(file: CheckpointFile) -> Container:
    """Open a committed checkpoint. Fetches its ends; the rest is fetched when it is read.

    Raises:
        CorruptFileError: If it refers to data that is missing, truncated or damaged.
        StoreError: If the store cannot be read.
    """
    with naming(file.path):
        return Container(file.path, source=OpenObject(open_store(file.path.parent), file.pieces))


def is_run(path: Path) -> bool:
    """Return whether a path is the URL of a run in a store, and not that of a file."""
    return isinstance(path, ObjectPath) and path.suffix != SUFFIX


def open_checkpoint(url: ObjectPath) -> Container:
    """Open the checkpoint at the URL of a file: a committed one such as ``checkpoint_iter_100.slip``, or an object.

    Raises:
        FileNotFoundError: If there is neither.
        CorruptFileError: If it is damaged.
        StoreError: If the store cannot be read.
    """
    # A bucket may have such a name, too.
    if url.key and has_managed_name(url.name):
        file = CommittedRun(url.parent).find(url.name)
        if file is not None:
            return open_pieces(file)
    return Container(url)


def newest_first(url: Path) -> Iterator[CheckpointFile]:
    """Yield the checkpoints of the run at a URL, newest first; logs those whose commits cannot be read.

    Raises:
        FileNotFoundError: If there is no commit.
        CorruptFileError: If no commit can be read.
        StoreError: If the store cannot be read.
    """
    has_found = False
    problems = []
    for found in CommittedRun(url).newest_first():
        if isinstance(found, CheckpointFile):
            has_found = True
            yield found
        else:
            problems.append(found)
            logger.warning("skipping a checkpoint: %s", found)
    if not has_found and problems:
        raise CorruptFileError(f"{url}: none of its {len(problems)} checkpoints is intact") from problems[0]
    if not has_found:
        raise no_checkpoint(url, "no checkpoint at this URL")
