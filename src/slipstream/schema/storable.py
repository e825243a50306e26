"""Which types can be stored: a closed list of exact types, each with the tag of its nodes.

`slipstream.schema.flatten` describes the list. The types of torch and tensordict are recognized by name, so that
neither has to be imported.
"""

from __future__ import annotations

import functools
import pathlib
from collections import Counter, OrderedDict

import numpy as np

OBJECT = "object"
"""The tag of everything that is not on the list."""

_TAGS: dict[type, str] = {
    type(None): "null",
    bool: "bool",
    int: "int",
    str: "str",
    float: "float",
    complex: "complex",
    bytes: "bytes",
    bytearray: "bytearray",
    range: "range",
    slice: "slice",
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    dict: "dict",
    OrderedDict: "OrderedDict",
    Counter: "Counter",
    np.ndarray: "array",
    # The class of this system's paths. Those of other systems, and pure paths, would not come back as such.
    type(pathlib.Path()): "path",
}
_TAGS_BY_NAME = {
    ("torch", "Tensor"): "tensor",
    ("torch.nn.parameter", "Parameter"): "parameter",
    ("torch", "dtype"): "torch.dtype",
    ("torch", "device"): "torch.device",
    ("torch", "Size"): "torch.Size",
    ("tensordict", "TensorDict"): "TensorDict",
}


@functools.lru_cache(maxsize=1024)
def storable_tag(kind: type) -> str:
    """Return the tag of values of a type; `OBJECT` if they cannot be stored."""
    if kind in _TAGS:
        return _TAGS[kind]
    # `slipstream.schema.values` checks which of NumPy's scalars can be stored.
    if issubclass(kind, np.generic):
        return "numpy"
    module = kind.__module__
    # tensordict defines its classes in private modules.
    if module.partition(".")[0] == "tensordict":
        module = "tensordict"
    return _TAGS_BY_NAME.get((module, kind.__name__), OBJECT)
