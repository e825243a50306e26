"""Nested state as JSON, and back: structure, plain values and where each tensor belongs.

Tensors and arrays are leaves that the caller turns into JSON of its own. Everything else is written out exactly: tuples
stay tuples, integer keys stay integers, floats keep their bits, an `OrderedDict` of a module keeps its ``_metadata``.
What cannot be written out without running code on reading (arbitrary objects) is refused by name.
"""

from __future__ import annotations

import base64
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from slipstream.errors import CorruptFileError, FormatVersionError, UnsupportedStateError
from slipstream.text import install_hint

TAG = "$"
Leaf = Any
"""A tensor, the slot of one, or an array of numbers."""
Path = tuple[str, ...]


class Slot:
    """Stands for a tensor in a structure whose tensors are kept elsewhere."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def is_leaf(node: Any) -> bool:
    """Tell whether `node` is a tensor, the slot of one, or an array of numbers."""
    return isinstance(node, (torch.Tensor, Slot)) or (isinstance(node, np.ndarray) and node.dtype != object)


def is_tensordict(node: Any) -> bool:
    """Tell whether `node` is a plain TensorDict, without importing tensordict."""
    return type(node).__name__ == "TensorDict" and type(node).__module__.startswith("tensordict")


class Members(dict[str, Any]):
    """What is in a TensorDict while its leaves are not tensors."""

    def __init__(self, members: Mapping[str, Any], batch_size: Any) -> None:
        super().__init__(members)
        self.batch_size = batch_size


def import_tensordict() -> Any:
    """Return the package tensordict, which only those need who have TensorDicts.

    Raises:
        ImportError: If it is not installed; names the extra that it is part of.
    """
    try:
        import tensordict  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            f"TensorDicts need tensordict, which is not installed: {install_hint('train')}, or tensordict by itself"
        ) from error
    return tensordict


def _tensordict(members: Mapping[str, Any], batch_size: Any) -> Any:
    return import_tensordict().TensorDict(members, batch_size=batch_size)


def map_leaves(
    node: Any, function: Callable[[Leaf, Path], Any], other: Callable[[Any, Path], Any], path: Path = ()
) -> Any:
    """Rebuild a nested state with every tensor and array replaced.

    Args:
        node: Nested dicts, lists, tuples and TensorDicts.
        function: What becomes of a leaf, given its path.
        other: What becomes of any other value that is not a container, given its path.
        path: Where `node` is.
    """
    if is_leaf(node):
        return function(node, path)
    if isinstance(node, dict) and type(node) in (dict, OrderedDict):
        copy = type(node)((key, map_leaves(value, function, other, (*path, str(key)))) for key, value in node.items())
        if "_metadata" in getattr(node, "__dict__", {}):
            copy._metadata = node._metadata  # type: ignore[attr-defined]
        return copy
    if type(node) in (list, tuple):
        return type(node)(map_leaves(value, function, other, (*path, str(i))) for i, value in enumerate(node))
    if is_tensordict(node) or type(node) is Members:
        members = {key: map_leaves(value, function, other, (*path, key)) for key, value in node.items()}
        if all(isinstance(value, torch.Tensor) or is_tensordict(value) for value in members.values()):
            return _tensordict(members, node.batch_size)
        return Members(members, batch_size=node.batch_size)
    return other(node, path)


def encode(node: Any, leaf: Callable[[Leaf, Path], Any], path: Path = ()) -> Any:
    """Write a nested state as JSON.

    Args:
        node: The state.
        leaf: Turns a tensor or array into a JSON object, given its path.
        path: Where `node` is.

    Raises:
        UnsupportedStateError: If there is something that JSON and tensors cannot express; it says where and what.
    """
    if is_leaf(node):
        return leaf(node, path)
    if node is None or type(node) in (bool, int, str):
        return node
    if type(node) is list:
        return [encode(value, leaf, (*path, str(i))) for i, value in enumerate(node)]
    if type(node) is dict and all(type(key) is str and not key.startswith(TAG) for key in node):
        return {key: encode(value, leaf, (*path, key)) for key, value in node.items()}
    for tag, (kind, write, _) in _KINDS.items():
        if type(node) is kind or (isinstance(kind, tuple) and isinstance(node, kind)):
            return {TAG: tag, "v": write(node)}
    return _encode_container(node, leaf, path)


def _encode_container(node: Any, leaf: Callable[[Leaf, Path], Any], path: Path) -> Any:
    if type(node) in (tuple, set, frozenset):
        values = [encode(value, leaf, (*path, str(i))) for i, value in enumerate(node)]
        return {TAG: type(node).__name__, "v": values}
    if type(node) in (dict, OrderedDict):
        pairs = [
            [encode(key, leaf, (*path, "keys")), encode(value, leaf, (*path, str(key)))] for key, value in node.items()
        ]
        document = {TAG: type(node).__name__, "v": pairs}
        if "_metadata" in getattr(node, "__dict__", {}):
            document["metadata"] = encode(node._metadata, leaf, (*path, "_metadata"))
        return document
    if is_tensordict(node):
        members = {key: encode(value, leaf, (*path, key)) for key, value in node.items()}
        return {TAG: "TensorDict", "v": members, "batch_size": list(node.batch_size)}
    raise UnsupportedStateError(
        f"{'/'.join(path) or 'the state'} is a {type(node).__module__}.{type(node).__qualname__}, which cannot be "
        "stored as data; give its state_dict(), or save as .pt"
    )


def decode(node: Any, leaf: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Read what `encode` wrote; `leaf` turns the JSON object of a tensor or array back into one.

    Raises:
        CorruptFileError: If it is not something that `encode` writes.
        FormatVersionError: If it holds a kind of value that this release does not know.
    """
    if isinstance(node, list):
        return [decode(value, leaf) for value in node]
    if not isinstance(node, dict):
        return node
    tag = node.get(TAG)
    if tag is None:
        return {key: decode(value, leaf) for key, value in node.items()}
    try:
        return _decode_tagged(tag, node, leaf)
    except (CorruptFileError, FormatVersionError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, RuntimeError) as error:
        raise CorruptFileError(f"a value of kind {str(tag)[:40]!r} is not as a writer writes it ({error})") from error


def _decode_tagged(tag: str, node: Mapping[str, Any], leaf: Callable[[Mapping[str, Any]], Any]) -> Any:
    if tag in ("tensor", "array"):
        return leaf(node)
    if tag in _KINDS:
        return _KINDS[tag][2](node["v"])
    if tag in ("tuple", "set", "frozenset"):
        kinds: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
        return kinds[tag](decode(value, leaf) for value in node["v"])
    if tag in ("dict", "OrderedDict"):
        pairs = [(decode(key, leaf), decode(value, leaf)) for key, value in node["v"]]
        if tag == "dict":
            return dict(pairs)
        ordered: Any = OrderedDict(pairs)
        if "metadata" in node:
            ordered._metadata = decode(node["metadata"], leaf)
        return ordered
    if tag == "TensorDict":
        return _tensordict({key: decode(value, leaf) for key, value in node["v"].items()}, node["batch_size"])
    raise FormatVersionError(f"the state holds a value of kind {str(tag)[:40]!r}, which this release does not know")


def _float_bits(value: float) -> str | float:
    return value if value - value == 0 else struct.pack("<d", value).hex()


def _read_float(value: str | float) -> float:
    if isinstance(value, str):
        (number,) = struct.unpack("<d", bytes.fromhex(value))
        return float(number)
    return float(value)


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype


def _read_scalar(value: list[str]) -> Any:
    return np.frombuffer(bytes.fromhex(value[1]), np.dtype(value[0]))[0]


# How plain values that JSON lacks are written and read, by tag.
_KINDS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, _float_bits, _read_float),
    "complex": (complex, lambda v: [_float_bits(v.real), _float_bits(v.imag)], lambda v: complex(*map(_read_float, v))),
    "bytes": (bytes, lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v, validate=True)),
    "bytearray": (bytearray, lambda v: base64.b64encode(v).decode(), lambda v: bytearray(base64.b64decode(v))),
    "numpy": ((np.generic,), lambda v: [v.dtype.str, v.tobytes().hex()], _read_scalar),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    "slice": (slice, lambda v: [v.start, v.stop, v.step], lambda v: slice(*v)),
    "path": ((PurePath,), str, FilePath),
    "torch.dtype": (torch.dtype, lambda v: str(v).removeprefix("torch."), _read_dtype),
    "torch.device": (torch.device, str, torch.device),
    "torch.Size": (torch.Size, list, torch.Size),
}
