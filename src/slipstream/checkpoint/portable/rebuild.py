"""The closed table of names that a portable checkpoint may use, and how the values behind them are built.

`NAMES` is the whole list. Every constructor checks its arguments, because they come from a file that anybody can write.
In particular, NumPy dtypes are rebuilt from a closed list of dtype strings: a dtype with fields of objects would make
NumPy follow pointers that the file contains. What is not in the table is refused when it is loaded and, by
`slipstream.checkpoint.portable.format.PortableFormat.check`, when it is saved.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

from slipstream.checkpoint.portable import rebuild_tensors
from slipstream.checkpoint.portable.inert import IGNORED, Allowance, Constructor, RefusedNameError, Symbol, Unfinished
from slipstream.checkpoint.portable.rebuild_tensors import SPARSE_COMPRESSED, check_shape, require_type
from slipstream.errors import FormatVersionError
from slipstream.schema.dtypes import DTYPES, parse_numpy_dtype
from slipstream.schema.values import KINDS
from slipstream.tensors import TORCH

_SET_MEMBER_BYTES = 64
# The names of `torch.FloatStorage` and so on, by the dtype of their elements.
_STORAGE_TYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QUInt8": "quint8",
    "QInt8": "qint8",
    "QInt32": "qint32",
}
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)


def _build_bytes(_: Allowance, *arguments: Any) -> bytes:
    # Protocol 2 writes empty bytes as a call without arguments. With a number, `bytes` would allocate memory.
    if arguments:
        raise ValueError("bytes are built from text")
    return b""


def _encode(allowance: Allowance, text: Any, encoding: Any) -> bytes:
    # Protocol 2 has no bytes. It stores them as text of the first 256 characters.
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are encoded as {str(encoding)[:40]!r}")
    allowance.charge(len(require_type(text, str)))
    return bytes(text.encode("latin1"))


def _build_bytearray(allowance: Allowance, content: Any = b"") -> bytearray:
    allowance.charge(len(require_type(content, bytes)))
    return bytearray(content)


def _build_set(allowance: Allowance, members: Any) -> set[Any]:
    allowance.charge(_SET_MEMBER_BYTES * len(require_type(members, list)))
    # Hashing comes next.
    for member in members:
        allowance.check_key(member)
    return set(members)


def _build_frozenset(allowance: Allowance, members: Any) -> frozenset[Any]:
    return frozenset(_build_set(allowance, members))


def _build_complex(_: Allowance, real: Any, imaginary: Any) -> complex:
    return complex(require_type(real, float), require_type(imaginary, float))


def _build_range(_: Allowance, start: Any, stop: Any, step: Any) -> range:
    return range(require_type(start, int), require_type(stop, int), require_type(step, int))


def _build_slice(_: Allowance, *parts: Any) -> slice:
    # The parts of slices of tables may be labels.
    for part in parts:
        require_type(part, int, type(None), bool, float, str)
    return slice(*parts)


def _build_ordered_dict(_: Allowance) -> OrderedDict[Any, Any]:
    return OrderedDict()


def _build_counter(allowance: Allowance, counts: Any) -> Counter[Any]:
    allowance.charge(_SET_MEMBER_BYTES * len(require_type(counts, dict)))
    return Counter(counts)


def _build_path(kind: type[pathlib.PurePath], allowance: Allowance, *parts: Any) -> pathlib.PurePath:
    for part in parts:
        allowance.charge(len(require_type(part, str)))
    return kind(*parts)


def _build_size(_: Allowance, sizes: Any) -> torch.Size:
    for size in require_type(sizes, tuple):
        require_type(size, int)
    return torch.Size(sizes)


def _build_device(_: Allowance, kind: Any, index: Any = None) -> torch.device:
    name = require_type(kind, str)
    if index is not None:
        name = f"{name}:{require_type(index, int)}"
    device: torch.device = KINDS["torch.device"].read(name, TORCH)
    return device


def _build_layout(_: Allowance, name: Any) -> torch.layout:
    return _LAYOUTS[require_type(name, str)]


def _dtype(_: Allowance, name: Any, _align: Any, _copy: Any) -> Unfinished:
    return Unfinished(functools.partial(_finish_dtype, require_type(name, str)))


def _finish_dtype(name: str, _: Allowance, state: Any) -> np.dtype[Any]:
    """Return the dtype that a name and a byte order spell. Records and objects have no such spelling."""
    version, order, subtype, names, fields, itemsize, _alignment, _flags, *metadata = require_type(state, tuple)
    if version not in (3, 4):
        raise ValueError(f"the NumPy dtype {name[:40]!r} has version {str(version)[:40]}")
    # A sound file may contain these. Only NumPy's own unpickler can build them, and it trusts the file.
    if name.startswith("O") or subtype is not None or names is not None or fields is not None:
        raise RefusedNameError(f"a NumPy dtype {name[:40]!r} of objects or fields")
    dtype = parse_numpy_dtype(f"{require_type(order, str)}{name}{_time_unit(metadata)}")
    # It is -1 where the name of the dtype already says it.
    if itemsize not in (-1, dtype.itemsize):
        raise ValueError(f"the NumPy dtype {name[:40]!r} has {itemsize} bytes")
    return dtype


def _time_unit(metadata: list[Any]) -> str:
    """Return the unit of dates and durations as text, such as ``[25us]``; empty for other dtypes."""
    if not metadata:
        return ""
    ((extra, parts),) = metadata
    unit, count, divisor, _ = require_type(parts, tuple)
    if extra is not None or require_type(divisor, int) != 1:
        raise ValueError("a NumPy dtype has metadata")
    name = require_type(unit, bytes).decode()
    if name == "generic":
        return ""
    # NumPy writes a single unit without its number.
    if require_type(count, int) == 1:
        return f"[{name}]"
    return f"[{count}{name}]"


def _array(_: Allowance, kind: Any, _shape: Any, _code: Any) -> Unfinished:
    # Subclasses such as `numpy.matrix` are not in the table.
    if require_type(kind, Symbol).meaning is not np.ndarray:
        raise ValueError("an array is not a numpy.ndarray")
    return Unfinished(_finish_array)


def _finish_array(allowance: Allowance, state: Any) -> np.ndarray[Any, Any]:
    _, shape, dtype, is_fortran, content = require_type(state, tuple)
    if not isinstance(dtype, np.dtype):
        raise TypeError("an array has no dtype")
    sizes = check_shape(shape)
    # The content must be exactly as long as the shape says: NumPy would read beyond it.
    if len(require_type(content, bytes)) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"an array of shape {sizes} has {len(content)} bytes")
    allowance.charge(len(content))
    order: Any = "C"
    if is_fortran:
        order = "F"
    # Copy it: the array must be writable, and own its memory.
    return np.ndarray(sizes, dtype, content, order=order).copy(order=order)


def _scalar(allowance: Allowance, dtype: Any, content: Any) -> Any:
    if not isinstance(dtype, np.dtype):
        raise TypeError("a scalar has no dtype")
    allowance.charge(2 * len(require_type(content, bytes)))
    if dtype.kind in "SU":
        # NumPy gives empty text one character more than its dtype has.
        content = content[: dtype.itemsize]
    return KINDS["numpy"].read([dtype.str, content.hex()], TORCH)


_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo, *SPARSE_COMPRESSED)}
_BUILTINS = {
    "bytes": Constructor(_build_bytes),
    "bytearray": Constructor(_build_bytearray),
    "set": Constructor(_build_set),
    "frozenset": Constructor(_build_frozenset),
    "complex": Constructor(_build_complex),
    "range": Constructor(_build_range),
    "xrange": Constructor(_build_range),
    "slice": Constructor(_build_slice),
}

NAMES: dict[str, Any] = {
    "_codecs encode": Constructor(_encode),
    "collections OrderedDict": Constructor(_build_ordered_dict),
    "collections Counter": Constructor(_build_counter),
    "numpy dtype": Constructor(_dtype),
    "numpy ndarray": Symbol(np.ndarray),
    "torch Size": Constructor(_build_size),
    "torch device": Constructor(_build_device),
    "torch.serialization _get_layout": Constructor(_build_layout),
    "torch.storage UntypedStorage": Symbol(torch.uint8),
    "torch._utils _rebuild_tensor": Constructor(rebuild_tensors.build_tensor),
    "torch._utils _rebuild_tensor_v2": Constructor(rebuild_tensors.build_tensor_v2),
    "torch._utils _rebuild_tensor_v3": Constructor(rebuild_tensors.build_tensor_v3),
    "torch._utils _rebuild_parameter": Constructor(rebuild_tensors.build_parameter),
    "torch._utils _rebuild_parameter_with_state": Constructor(rebuild_tensors.build_parameter_with_attributes),
    "torch._tensor _rebuild_from_type_v2": Constructor(rebuild_tensors.build_tensor_with_attributes),
    "torch Tensor": Symbol(torch.Tensor),
    "torch._utils _rebuild_meta_tensor_no_storage": Constructor(rebuild_tensors.build_meta_tensor),
    "torch._utils _rebuild_qtensor": Constructor(rebuild_tensors.build_quantized_tensor),
    "torch._utils _rebuild_sparse_tensor": Constructor(rebuild_tensors.build_sparse_tensor),
    "torch per_tensor_affine": torch.per_tensor_affine,
    "torch per_channel_affine": torch.per_channel_affine,
    "tensordict._td TensorDict": Symbol("TensorDict"),
    "tensordict._reductions _make_td": Constructor(rebuild_tensors.build_tensordict),
    "tensordict.utils _LockedSchema": IGNORED,
}
"""Everything that a portable checkpoint may name, as ``"module name"``: a constructor, a symbol or a constant."""

# Python 3 writes protocol 2 with the names of Python 2.
for _name, _entry in _BUILTINS.items():
    NAMES[f"builtins {_name}"] = _entry
    NAMES[f"__builtin__ {_name}"] = _entry
# NumPy 2 has moved its modules, and so has Python 3.13.
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    NAMES[f"{_module} _reconstruct"] = Constructor(_array)
    NAMES[f"{_module} scalar"] = Constructor(_scalar)
for _path in _PATHS:
    for _module in ("pathlib", "pathlib._local"):
        NAMES[f"{_module} {_path.__name__}"] = Constructor(functools.partial(_build_path, _path))
for _name, _dtype_name in _STORAGE_TYPES.items():
    NAMES[f"torch {_name}Storage"] = Symbol(TORCH.dtype(_dtype_name))
for _name in DTYPES:
    # Not every version of torch has all dtypes.
    with contextlib.suppress(FormatVersionError):
        NAMES[f"torch {_name}"] = TORCH.dtype(_name)
