"""Which head of a folder is of the same moment as the file of the writer beside it.

TorchRL's ``ReplayBuffer.dumps`` writes its storage, its sampler and its writer one after another. If it is interrupted
in between, the storage in the folder is newer than the writer. So a head stores the state that the writer had, and the
head before it is kept as long as the file of the writer is of its moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_NAMES = ("cursor", "write_count")

WriterState = dict[str, int]


def state_of_writer(buffers: Iterable[Any]) -> WriterState | None:
    """Return the state of the writer of a storage; None unless one buffer has the storage, with a writer that tells.

    Args:
        buffers: What is attached to the storage.
    """
    found = None
    for buffer in buffers:
        writer = getattr(buffer, "writer", None)
        if writer is None:
            continue
        if found is not None:
            return None
        try:
            state = writer.state_dict()
        except NotImplementedError:
            return None
        found = _numbers_in(state, "_")
    return found


def writer_beside(folder: Path) -> WriterState | None:
    """Return the state of the writer that TorchRL saved beside the folder of a storage, if there is one."""
    try:
        document = json.loads((folder.parent / "writer" / "metadata.json").read_text())
    except (OSError, ValueError):
        return None
    return _numbers_in(document, "")


def _numbers_in(document: Any, prefix: str) -> WriterState | None:
    if not isinstance(document, Mapping):
        return None
    found = {}
    for name in _NAMES:
        value = document.get(prefix + name)
        if not isinstance(value, int):
            return None
        found[name] = value
    return found
