"""List a native checkpoint from its index alone, without torch: importing torch takes longer than all the rest."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.cli.ckpt.listing import Listing, Row
from slipstream.errors import CorruptFileError, naming
from slipstream.schema.nodes import TAG
from slipstream.schema.structure import Leaf, leaves_of, memory_end
from slipstream.schema.unflatten import unflatten
from slipstream.store.container import Container


def list_native(file: Path) -> Listing:
    """Return the tensors and metadata of a native checkpoint; reads its index only."""
    with Container(file) as container, naming(file):
        values = container.values
        if container.kind != "checkpoint" or "state" not in values:
            raise CorruptFileError(f"is a container of kind {container.kind!r}, expected a checkpoint")
        parent = _read_parent(values.get("parent"))
        same = set()
        if parent is not None:
            same = set(parent["same"])
        rows = _rows(container, same)
        return Listing(file, "native", rows, _metadata(values.get("metadata")), container.written_by, parent)


def _read_parent(parent: Any) -> dict[str, Any] | None:
    if not parent:
        return None
    if not isinstance(parent, dict):
        raise CorruptFileError(f"its parent is {str(parent)[:40]!r}, expected an object")
    for key, kind in (("file", str), ("identity", str), ("depth", int), ("same", list)):
        if not isinstance(parent.get(key), kind):
            raise CorruptFileError(f"the {key!r} of its parent is not a {kind.__name__}")
    if not all(isinstance(name, str) for name in parent["same"]):
        raise CorruptFileError("the 'same' of its parent holds something other than names")
    return {key: parent[key] for key in ("file", "identity", "depth", "same")}


def _rows(container: Container, same: set[str]) -> list[Row]:
    rows = []
    seen: set[str] = set()
    for leaf, node in leaves_of(container.values["state"]):
        row = Row(leaf.name, _shown_dtype(leaf), list(leaf.shape), leaf.nbytes)
        entry = node.get("entry")
        if entry is None:
            row.codec = "inline"
            row.memory_bytes = row.nbytes
        elif entry in seen:
            row.codec = "tied"
        elif entry in container.entries:
            stored = container.entries[entry]
            if memory_end(leaf, node) > stored.nbytes:
                raise CorruptFileError(f"{leaf.name!r} reaches beyond the memory that was stored for it")
            row.codec = stored.codec.name
            row.memory_bytes = stored.nbytes
            row.stored_bytes = stored.stored_bytes
        elif entry in same:
            row.codec = "same"
            row.memory_bytes = row.nbytes
        else:
            raise CorruptFileError(f"{leaf.name!r} is in entry {entry!r}, which is missing")
        # Only the first tensor of an entry counts its memory.
        if entry is not None:
            seen.add(entry)
        rows.append(row)
    return rows


def _shown_dtype(leaf: Leaf) -> str:
    if leaf.is_array:
        return f"numpy {leaf.carrier.name}"
    return leaf.dtype


def _metadata(structure: Any) -> Any:
    """Return metadata in the form that JSON would give it. Tensors in it are described, not read."""
    leaves = [f"{node[TAG]} {leaf.dtype}{list(leaf.shape)}" for leaf, node in leaves_of(structure)]
    return _as_json(unflatten(structure, leaves))


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_json(member) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_as_json(member) for member in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)
