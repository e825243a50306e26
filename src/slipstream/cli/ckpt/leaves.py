"""A state as names and leaves: its tensors, arrays and plain values under the names on their paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream.schema.dtypes import dtype_name
from slipstream.schema.flatten import flatten, is_tensor
from slipstream.schema.nodes import name_of
from slipstream.tensors import TORCH


def by_name(state: Any) -> dict[str, Any]:
    """Return every tensor, array and plain value of a state under the names on its path, joined by slashes."""
    values: dict[str, Any] = {}
    for key, value in flatten(state, opaque=True).values(TORCH):
        values[_unique(name_of(key), values)] = value
    return values


def leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors and arrays of a state by name, without its plain values."""
    return {name: value for name, value in values.items() if _is_leaf(value)}


def shown_dtype(leaf: Any) -> str:
    """Return the name of a dtype, such as ``bfloat16`` or ``numpy uint8``."""
    if is_tensor(leaf):
        return dtype_name(leaf.dtype)
    return f"numpy {leaf.dtype.name}"


def kind_of(leaf: Any) -> str:
    """Return dtype and shape, such as ``float32[60, 50]``."""
    return f"{shown_dtype(leaf)}{list(leaf.shape)}"


def _is_leaf(value: Any) -> bool:
    return is_tensor(value) or (isinstance(value, np.ndarray) and value.dtype != object)


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    unique = name
    number = 2
    while unique in taken:
        unique = f"{name}#{number}"
        number += 1
    return unique
