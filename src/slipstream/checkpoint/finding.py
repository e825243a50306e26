"""Find the native checkpoints of a folder, or of a run in an object store. Nothing here imports torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

from slipstream.checkpoint.commits import CommittedRun, open_pieces
from slipstream.checkpoint.folder import SUFFIX, no_checkpoint
from slipstream.checkpoint.layout import KIND
from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.store.container import Container
from slipstream.store.urls import ObjectPath

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
