"""A checkpoint of any format as names and values: its tensors, arrays and plain values under their keys as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.errors import UnsupportedStateError
from slipstream.schema.dtypes import dtype_name
from slipstream.schema.flatten import check_storable, flatten
from slipstream.schema.nodes import name_of
from slipstream.tensors import TORCH


def named_values(state: Any) -> dict[str, Any]:
    """Return every tensor, array and plain value of a state under its key as text."""
    values: dict[str, Any] = {}
    # Portable checkpoints may contain objects, which have a name as well.
    for key, value in flatten(state, opaque=True).values(TORCH):
        name = name_of(key)
        # Keys that differ only in type, such as 0 and "0", have the same text.
        number = 2
        while name in values:
            name = f"{name_of(key)}#{number}"
            number += 1
        values[name] = value
    return values


def named_leaves(state: Any) -> dict[str, Any]:
    """Return the tensors and arrays of a state under their keys as text."""
    return {name: value for name, value in named_values(state).items() if is_leaf(value)}


def dtype_of(leaf: Any) -> str:
    """Return the dtype of a tensor or an array, such as ``bfloat16`` or ``numpy uint8``."""
    if isinstance(leaf, torch.Tensor):
        return dtype_name(leaf.dtype)
    return f"numpy {leaf.dtype.name}"


def kind_of(leaf: Any) -> str:
    """Return dtype and shape of a tensor or an array, such as ``float32[60, 50]``."""
    return f"{dtype_of(leaf)}{list(leaf.shape)}"


def memory_key(leaf: Any) -> tuple[Any, ...] | None:
    """Return what tied tensors have in common; None for what has no plain memory."""
    if isinstance(leaf, torch.Tensor) and is_storable(leaf) and leaf.numel():
        return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()
    return None


def is_leaf(value: Any) -> bool:
    """Return whether a value is a tensor of any kind, or an array of anything but objects."""
    return isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)


def is_storable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain strided piece of memory: not sparse, quantized or a subclass."""
    try:
        check_storable(tensor, ())
    except UnsupportedStateError:
        return False
    return True
