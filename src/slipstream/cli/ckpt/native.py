"""List a native checkpoint from its index alone, without torch: importing torch takes longer than all the rest."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.checkpoint.chain import NativeReader
from slipstream.cli.ckpt.listing import Listing, Row
from slipstream.errors import CorruptFileError, naming
from slipstream.schema.nodes import TAG
from slipstream.schema.structure import Leaf, check_fits, leaves_of
from slipstream.schema.unflatten import unflatten


def list_native(file: Path) -> Listing:
    """Return the tensors and metadata of a native checkpoint; reads its index only."""
    with NativeReader(file) as reader, naming(file):
        metadata = _metadata(reader.container.values.get("metadata"))
        return Listing(file, "native", _rows(reader), metadata, reader.container.written_by, _parent(reader))


def _parent(reader: NativeReader) -> dict[str, Any] | None:
    if not reader.parent:
        return None
    shown: dict[str, Any] = {}
    for key in ("file", "identity", "depth", "same"):
        if key not in reader.parent:
            raise CorruptFileError(f"its parent has no {key!r}")
        shown[key] = reader.parent[key]
    return shown


def _rows(reader: NativeReader) -> list[Row]:
    rows = []
    entries = reader.container.entries
    same = set(reader.parent.get("same", ()))
    seen: set[str] = set()
    for leaf, node in leaves_of(reader.structure):
        row = Row(leaf.name, _shown_dtype(leaf), list(leaf.shape), leaf.nbytes)
        rows.append(row)
        if "hex" in node:
            row.codec = "inline"
            row.memory_bytes = row.nbytes
            continue
        name = node["entry"]
        # Only the first tensor of an entry counts its memory.
        if name in seen:
            row.codec = "tied"
        elif name in entries:
            check_fits(leaf, node, entries[name].nbytes)
            row.codec = entries[name].codec.name
            row.memory_bytes = entries[name].nbytes
            row.stored_bytes = entries[name].stored_bytes
        elif name in same:
            row.codec = "same"
            row.memory_bytes = row.nbytes
        else:
            raise CorruptFileError(f"{leaf.name!r} is in entry {name!r}, which is missing")
        seen.add(name)
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
