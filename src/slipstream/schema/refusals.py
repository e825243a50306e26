"""Why values cannot be stored, and what to store instead. Types of other packages are recognized by name."""

from __future__ import annotations

import enum
import functools
from typing import Any

import numpy as np

from slipstream.errors import UnsupportedStateError
from slipstream.schema.dtypes import DTYPES, dtype_name
from slipstream.schema.nodes import Key, name_of
from slipstream.schema.storable import storable_tag
from slipstream.schema.structure import MAX_AXES
from slipstream.schema.values import is_exact_text, write_device

# By the package and the name of a class. The classes of a value are looked up from the most derived one to its bases.
_ADVICE = {
    ("numpy", "MaskedArray"): "store value.data and value.mask",
    ("numpy", "memmap"): "store numpy.array(value)",
    ("numpy", "recarray"): "store a dict with an array per field",
    ("numpy", "ndarray"): "store numpy.asarray(value)",
    ("numpy", "longdouble"): "store numpy.float64(value)",
    ("numpy", "clongdouble"): "store numpy.complex128(value)",
    ("numpy", "void"): "store a dict of its fields",
    ("numpy", "generic"): "store value.item()",
    ("numpy", "dtype"): "store value.str",
    ("builtins", "bool"): "store bool(value)",
    ("builtins", "int"): "store int(value)",
    ("builtins", "float"): "store float(value)",
    ("builtins", "complex"): "store complex(value)",
    ("builtins", "str"): "store str(value)",
    ("builtins", "bytes"): "store bytes(value)",
    ("builtins", "bytearray"): "store bytes(value)",
    ("builtins", "memoryview"): "store bytes(value)",
    # Those that cannot be stored have unusual parts.
    ("builtins", "range"): "store a tuple of start, stop and step",
    ("builtins", "slice"): "store a tuple of start, stop and step",
    ("builtins", "list"): "store list(value)",
    ("builtins", "tuple"): "store tuple(value)",
    ("builtins", "set"): "store set(value)",
    ("builtins", "frozenset"): "store frozenset(value)",
    ("builtins", "dict"): "store dict(value)",
    ("collections", "OrderedDict"): "store collections.OrderedDict(value)",
    ("collections", "Counter"): "store collections.Counter(value)",
    ("collections", "deque"): "store list(value)",
    ("pathlib", "PurePath"): "store str(value)",
    ("torch", "UninitializedTensorMixin"): "run a forward pass first, which initializes it",
    ("torch", "Tensor"): "store a plain torch.Tensor",
    ("torch", "Generator"): "store value.get_state()",
    ("torch", "layout"): "store str(value)",
    ("torch", "memory_format"): "store str(value)",
    ("tensordict", "NonTensorDataBase"): "store value.data outside of the TensorDict",
    ("tensordict", "NonTensorStack"): "store value.tolist() outside of the TensorDict",
    ("tensordict", "TensorDictBase"): "store value.to_tensordict()",
}


def unsupported(key: Key, problem: str) -> UnsupportedStateError:
    """Return the error for a value that cannot be stored."""
    return UnsupportedStateError(
        f"{name_of(key, 'the state')[:200]} {problem}, or save as .pt, with weights_only=False if necessary"
    )


def tensor_problem(tensor: Any) -> str:
    """Return why a tensor cannot be stored, and what to store instead; empty if it can."""
    kind: Any = type(tensor)
    if storable_tag(kind) in ("tensor", "parameter"):
        return memory_problem(tensor)
    return type_problem(tensor)


def type_problem(value: Any) -> str:
    """Return that a value cannot be stored because of its type, and what to store instead."""
    kind = type(value)
    return f"is a {kind.__module__}.{kind.__qualname__}, which cannot be stored as data; {advice_for(value)}"


def memory_problem(tensor: Any) -> str:
    """Return why a tensor is not a strided piece of memory, and what to store instead; empty if it is one."""
    if not is_strided(tensor.layout):
        return f"has layout {tensor.layout}, which cannot be stored as data; store value.to_dense()"
    if tensor.is_quantized:
        return "is quantized, which cannot be stored as data; store value.dequantize()"
    if tensor.is_meta:
        return "is a meta tensor without data; initialize it first"
    if tensor.is_nested:
        return "is a nested tensor, which cannot be stored as data; store value.unbind()"
    if tensor.ndim > MAX_AXES:
        return f"has {tensor.ndim} axes, at most {MAX_AXES} can be stored; store value.flatten()"
    if not element_name(tensor.dtype):
        return f"has the unknown dtype {tensor.dtype}, which cannot be stored as data; store another dtype"
    return ""


def array_problem(array: Any) -> str:
    """Return that an array cannot be stored because of its dtype, and what to store instead."""
    return f"is a numpy.ndarray of {array.dtype}, which cannot be stored as data; {advice_for(array)}"


def tensordict_problem(tensordict: Any) -> str:
    """Return why the node of a TensorDict cannot be written, and what to do; empty if it can."""
    if tensordict.device is not None and write_device(tensordict.device) is None:
        return f"is on the device {tensordict.device}, which cannot be stored; store value.cpu()"
    for text in [*tensordict.keys(), *tensordict.names]:
        # A dimension without a name has None.
        if text is not None and not (type(text) is str and is_exact_text(text)):
            return f"has the key or name {text!r}, which JSON cannot hold; rename it"
    return ""


@functools.lru_cache(maxsize=256)
def element_name(dtype: Any) -> str:
    """Return the name of a torch dtype, or empty text if elements of it are more than their bits."""
    name = dtype_name(dtype)
    if name not in DTYPES or DTYPES[name].is_quantized:
        return ""
    return name


@functools.lru_cache(maxsize=64)
def is_strided(layout: Any) -> bool:
    """Return whether a layout is that of a tensor with strides."""
    return str(layout) == "torch.strided"


def advice_for(value: Any) -> str:
    """Return what to store instead of a value, such as ``"store dict(value)"``."""
    if type(value) is np.ndarray:
        return _advice_for_dtype(value.dtype)
    # Many are also integers or strings, but str() of one is its name.
    if isinstance(value, enum.Enum):
        return "store value.value"
    for base in type(value).__mro__:
        advice = _ADVICE.get((base.__module__.partition(".")[0], base.__name__))
        if advice:
            return advice
    # Classes with the decorator `tensordict.tensorclass` have no common base.
    if hasattr(type(value), "to_tensordict"):
        return "store value.to_tensordict()"
    if hasattr(type(value), "state_dict"):
        return "store value.state_dict()"
    return "convert it to plain data"


def _advice_for_dtype(dtype: np.dtype[Any]) -> str:
    """Return what to store instead of an array whose elements are not plain."""
    if dtype.names:
        return "store a dict with an array per field"
    if dtype.char == "g":
        return "store value.astype(numpy.float64)"
    if dtype.char == "G":
        return "store value.astype(numpy.complex128)"
    if dtype.char == "T":
        return "store value.astype(str)"
    # Such a dtype is plain but for its metadata.
    if dtype.metadata:
        return "store value.astype(value.dtype.str)"
    return "store value.tolist()"
