"""Which rollouts a path stands for: a file, a folder of them, or the folder of a run."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from slipstream.store.local import check_regular
from slipstream.store.urls import ObjectPath, as_path, open_store

PATTERN = "rollout_*.slip"
_SUFFIX = ".slip"
_NAME = re.compile(r"rollout_(\d{6,})\.slip")  # what a RolloutStorage calls them
_FOLDER = "rollouts"


def iteration_of(file: Path) -> int | None:
    """Return the iteration that the name of a file says, if it says one."""
    match = _NAME.fullmatch(file.name)
    return int(match[1]) if match else None


def find_rollouts(path: Path) -> list[Path]:
    """Return the rollouts of a path, by iteration; a file is taken as it is.

    Raises:
        FileNotFoundError: If there is nothing, or a folder without a rollout.
        CorruptFileError: If it is neither a file nor a folder.
    """
    path = as_path(path)
    if isinstance(path, ObjectPath):
        return _find_objects(path)
    if not path.is_dir():
        check_regular(path)
        return [path]
    for folder in (path, path / _FOLDER):
        found = list(folder.glob(PATTERN)) if folder.is_dir() else []
        numbers = {file: number for file in found if (number := iteration_of(file)) is not None}
        if numbers:
            return sorted(numbers, key=lambda file: (numbers[file], file.name))
    raise FileNotFoundError(errno.ENOENT, f"holds no {PATTERN}, nor does a folder {_FOLDER} in it", str(path))


def is_folder(path: Path) -> bool:
    """Return whether a path stands for the rollouts in it: a folder, or a URL that is not that of a file."""
    path = as_path(path)
    return path.is_dir() or (isinstance(path, ObjectPath) and path.suffix != _SUFFIX)


def _find_objects(url: ObjectPath) -> list[Path]:
    """Return the rollouts of a URL, by iteration."""
    if not is_folder(url):
        return [url]
    for folder in (url, url / _FOLDER):
        names = [info.name for info in open_store(folder).list("rollout_")]
        files = {number: folder / name for name in names if (number := iteration_of(Path(name))) is not None}
        if files:
            return [files[number] for number in sorted(files)]
    raise FileNotFoundError(errno.ENOENT, f"holds no {PATTERN}, nor does a folder {_FOLDER} in it", str(url))
