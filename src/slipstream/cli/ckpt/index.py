"""What the index of a native checkpoint says, read without torch: importing it would take longer than all the rest."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.cli.ckpt.listing import Listing, Row
from slipstream.cli.ckpt.reading import reading
from slipstream.errors import CorruptFileError
from slipstream.store.container import Container

_TAG = "$"  # as in slipstream.schema.flatten, which would import torch
_MAX_BYTES = 1 << 48


def list_native(file: Path) -> Listing:
    """Return what there is to say about a native checkpoint; reads its index only."""
    with Container(file) as container, reading(file):
        values = container.values
        if container.kind != "checkpoint" or "state" not in values:
            raise CorruptFileError(f"{file}: is a container of kind {container.kind!r}, expected a checkpoint")
        parent = _read_parent(file, values.get("parent"))
        rows = _native_rows(container, set(parent["same"]) if parent else set())
        return Listing(file, "native", rows, _shown(values.get("metadata")), container.written_by, parent)


def _read_parent(file: Path, parent: Any) -> dict[str, Any] | None:
    if not parent:
        return None
    kinds = {"file": str, "identity": str, "depth": int, "same": list}
    sound = isinstance(parent, dict) and all(isinstance(parent.get(key), kind) for key, kind in kinds.items())
    if not sound or not all(isinstance(name, str) for name in parent["same"]):
        raise CorruptFileError(f"{file}: what it says of its parent is not as a writer writes it")
    return {key: parent[key] for key in kinds}


def _native_rows(container: Container, same: set[str]) -> list[Row]:
    entries, seen = container.entries, set()
    rows = []
    for name, node in _leaf_nodes(container.values["state"]):
        row = _row(container.path, name, node)
        home = node.get("entry")
        if "hex" in node:
            row.codec, row.memory_bytes = "inline", row.nbytes
        elif home in seen:
            row.codec = "tied"
        elif home in entries:
            entry = entries[home]
            row.codec, row.memory_bytes, row.stored_bytes = entry.codec.name, entry.nbytes, entry.stored_bytes
        elif home in same:
            row.codec, row.memory_bytes = "same", row.nbytes
        else:
            raise CorruptFileError(f"{container.path}: {name!r} is in an entry {home!r}, which it does not have")
        seen.add(home)
        rows.append(row)
    return rows


def _row(file: Path, name: str, node: Mapping[str, Any]) -> Row:
    dtype, shape = node.get("dtype"), node.get("shape")
    sizes = shape if isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) else None
    if not isinstance(dtype, str) or sizes is None or math.prod(sizes) > _MAX_BYTES:
        raise CorruptFileError(f"{file}: {name!r} has a dtype or shape that no writer writes")
    if node[_TAG] == "array":
        array = np.dtype(dtype)
        return Row(name, f"numpy {array.name}", sizes, math.prod(sizes) * array.itemsize)
    return Row(name, dtype, sizes, math.prod(sizes) * _itemsize(dtype))


def _itemsize(dtype: str) -> int:
    """Return the bytes of an element from the name of its torch dtype, such as ``bfloat16`` or ``float8_e5m2``."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _leaf_nodes(structure: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Walk a state as `slipstream.schema.flatten` writes it, and yield its tensors and arrays with their names."""
    stack: list[tuple[tuple[str, ...], Any]] = [((), structure)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, dict) and node.get(_TAG) in ("tensor", "array"):
            yield "/".join(path) or "state", node
        else:
            stack += [((*path, key), value) for key, value in reversed(_members(node))]


def _members(node: Any) -> list[tuple[str, Any]]:
    inner = node.get("v") if isinstance(node, dict) and _TAG in node else node
    if isinstance(node, dict) and node.get(_TAG) in ("dict", "OrderedDict") and isinstance(inner, list):
        return [(str(_shown(key)), value) for key, value in inner]
    if isinstance(inner, dict):
        return list(inner.items())
    return [(str(i), value) for i, value in enumerate(inner)] if isinstance(inner, list) else []


def _shown(node: Any) -> Any:
    """Return plain values as `slipstream.schema.flatten` writes them in the form that JSON would give them."""
    if isinstance(node, list):
        return [_shown(value) for value in node]
    if not isinstance(node, dict):
        return node
    kind, inner = node.get(_TAG), node.get("v")
    if kind is None:
        return {key: _shown(value) for key, value in node.items()}
    if kind in ("dict", "OrderedDict") and isinstance(inner, list):
        return {str(_shown(key)): _shown(value) for key, value in inner}
    if kind == "float":
        return str(struct.unpack("<d", bytes.fromhex(inner))[0]) if isinstance(inner, str) else inner
    if kind == "numpy" and isinstance(inner, list):
        return _shown_scalar(inner)
    if kind in ("tensor", "array"):
        return f"{kind} {node.get('dtype')}{node.get('shape')}"
    return _shown(inner)


def _shown_scalar(inner: list[str]) -> Any:
    value = np.frombuffer(bytes.fromhex(inner[1]), np.dtype(inner[0]))[0].item()
    plain = isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)
