"""A state as names and leaves: its tensors, arrays and plain values under the names on their paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream.schema.flatten import is_leaf, map_leaves


def flatten(state: Any) -> dict[str, Any]:
    """Return every tensor, array and plain value of a state under the names on its path, joined by slashes."""
    flat: dict[str, Any] = {}

    def add(value: Any, path: tuple[str, ...]) -> None:
        flat[_unique("/".join(path) or "state", flat)] = value

    map_leaves(state, add, add)
    return flat


def leaves(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors and arrays of a flat state, without its plain values."""
    return {name: value for name, value in flat.items() if is_leaf(value)}


def is_tensor(value: Any) -> bool:
    """Tell a tensor from an array and from a plain value."""
    return is_leaf(value) and not isinstance(value, np.ndarray)


def dtype_name(leaf: Any) -> str:
    """Return the name of a dtype, such as ``bfloat16`` or ``numpy uint8``."""
    return str(leaf.dtype).removeprefix("torch.") if is_tensor(leaf) else f"numpy {leaf.dtype.name}"


def kind_of(leaf: Any) -> str:
    """Return dtype and shape, such as ``float32[60, 50]``."""
    return f"{dtype_name(leaf)}{list(leaf.shape)}"


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    unique, number = name, 2
    while unique in taken:
        unique, number = f"{name}#{number}", number + 1
    return unique
