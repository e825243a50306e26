"""Split nested data into its structure and its leaves, without importing torch: its types are recognized by name."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from slipstream.errors import UnsupportedStateError
from slipstream.schema.dtypes import dtype_name, is_plain
from slipstream.schema.nodes import LEAF_TAGS, MAX_DEPTH, MAX_NODES, TAG, Key, name_of, tag_of
from slipstream.schema.structure import MAX_AXES, end_nodes, leaf_nodes, select
from slipstream.schema.unflatten import read_plain
from slipstream.schema.values import KINDS, Json, TorchValues, is_exact_int, is_exact_text

_OBJECT = "object"
_CONTAINERS = frozenset({"list", "tuple", "set", "frozenset", "dict", "OrderedDict", "TensorDict"})


@dataclass(frozen=True)
class Tree:
    """Nested data as `flatten` returns it.

    Attributes:
        structure: The data as JSON, with a node for every leaf.
        leaves: The tensors and arrays, in the order of the structure.
        nodes: The key and the node of every leaf.
        objects: Other objects, if `flatten` accepts them. Their nodes say which is where.
    """

    structure: Json
    leaves: list[Any]
    nodes: list[tuple[Key, Json]]
    objects: list[Any]

    def select(self, matches: Callable[[Key], bool]) -> Tree | None:
        """Return the branches whose key matches, or None if there are none."""
        structure = select(self.structure, matches)
        if structure is None:
            return None
        # `select` keeps the nodes themselves, so their identity tells which leaves are left.
        leaf_of_node = {id(node): leaf for (_, node), leaf in zip(self.nodes, self.leaves, strict=True)}
        nodes = list(leaf_nodes(structure))
        leaves = [leaf_of_node[id(node)] for _, node in nodes]
        return Tree(structure, leaves, nodes, self.objects)

    def values(self, torch: TorchValues | None = None) -> Iterator[tuple[Key, Any]]:
        """Yield every leaf and every plain value with its key, in order. See `unflatten` for `torch`."""
        leaves = iter(self.leaves)
        for key, node in end_nodes(self.structure):
            if tag_of(node) in LEAF_TAGS:
                yield key, next(leaves)
            else:
                yield key, read_plain(node, key, self.objects, torch)


def flatten(value: Any, *, opaque: bool = False, key: Key = ()) -> Tree:
    """Split nested data into its structure and its leaves.

    Copies plain values; the leaves are the tensors and arrays themselves. Keys and sets may hold plain values only.

    Args:
        value: Nested dicts, lists, tuples and TensorDicts of tensors, arrays and plain values.
        opaque: Whether to accept anything else, as an object that is passed through. The structure is then for
            `unflatten` in the same process, not for a file.
        key: Where `value` itself is, for error messages.

    Raises:
        UnsupportedStateError: If something cannot be stored as data. Names its key.

    Example:
        >>> tree = flatten({"weights": np.zeros(2), "betas": (0.9, 0.999)})
        >>> tree.structure["weights"], len(tree.leaves)
        ({'$': 'array', 'dtype': '<f8', 'shape': [2]}, 1)
    """
    writer = _Writer(opaque=opaque)
    structure = writer.write(value, key)
    return Tree(structure, writer.leaves, writer.nodes, writer.objects)


def check_storable(tensor: Any, key: Key) -> None:
    """Raise `UnsupportedStateError` unless a tensor is a plain strided piece of memory."""
    kind: Any = type(tensor)
    problem = f"is a {kind.__qualname__}, which cannot be stored as data"
    if _tag_of_type(kind) == "tensor":
        problem = _memory_problem(tensor)
    if problem:
        raise UnsupportedStateError(f"{name_of(key, 'the state')} {problem}; store a dense tensor, or save as .pt")


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor of any kind, storable or not."""
    return any((base.__module__, base.__name__) == ("torch", "Tensor") for base in type(value).__mro__)


def _memory_problem(tensor: Any) -> str:
    """Return why a tensor is not a strided piece of memory; empty if it is one."""
    if not _is_strided(tensor.layout):
        return f"has layout {tensor.layout}, which cannot be stored as data"
    if tensor.is_quantized:
        return "is quantized, which cannot be stored as data"
    if tensor.is_meta:
        return "is a meta tensor without data"
    if tensor.is_nested:
        return "is a nested tensor, which cannot be stored as data"
    if tensor.ndim > MAX_AXES:
        return f"has {tensor.ndim} axes, at most {MAX_AXES} can be stored"
    return ""


@functools.lru_cache(maxsize=64)
def _is_strided(layout: Any) -> bool:
    return str(layout) == "torch.strided"


# Only these exact types: what a subclass adds would be lost. A masked array, for one, would lose its mask.
_TAGS: dict[type, str] = {
    type(None): "null",
    bool: "bool",
    int: "int",
    str: "str",
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    dict: "dict",
    OrderedDict: "OrderedDict",
    float: "float",
    complex: "complex",
    bytes: "bytes",
    bytearray: "bytearray",
    range: "range",
    slice: "slice",
    np.ndarray: "array",
    np.memmap: "array",
}
_TORCH_TAGS = {
    ("torch", "Tensor"): "tensor",
    ("torch.nn.parameter", "Parameter"): "tensor",
    ("torch", "dtype"): "torch.dtype",
    ("torch", "device"): "torch.device",
    ("torch", "Size"): "torch.Size",
}


@functools.lru_cache(maxsize=1024)
def _tag_of_type(kind: Any) -> str:
    """Return the tag of values of a type; ``object`` for types that cannot be stored as data."""
    if kind in _TAGS:
        return _TAGS[kind]
    if issubclass(kind, np.generic):
        return "numpy"
    if issubclass(kind, PurePath):
        return "path"
    if kind.__name__ == "TensorDict" and kind.__module__.startswith("tensordict"):
        return "TensorDict"
    return _TORCH_TAGS.get((kind.__module__, kind.__name__), _OBJECT)


class _Writer:
    """Writes the structure of nested data, and collects its leaves."""

    def __init__(self, *, opaque: bool) -> None:
        self.leaves: list[Any] = []
        self.nodes: list[tuple[Key, Json]] = []
        self.objects: list[Any] = []
        self._opaque = opaque
        self._num_nodes = 0
        # The containers that are being written, by id: a container inside itself is found here.
        self._open: set[int] = set()

    def write(self, value: Any, key: Key, *, plain: bool = False) -> Json:
        """Return the node of a value. `plain` is set where tensors are not allowed: in keys and in sets."""
        self._num_nodes += 1
        # The same limits as for reading. They also end the walk where nested lists share members, as in [a, a] with
        # a = [b, b], and so on: it visits exponentially many values.
        if len(key) > MAX_DEPTH:
            return self._refuse(value, key, f"is nested more than {MAX_DEPTH} levels deep")
        if self._num_nodes > MAX_NODES:
            return self._refuse(value, key, f"comes after {MAX_NODES:,} other values: store long lists as arrays")
        kind: Any = type(value)
        tag = _tag_of_type(kind)
        if plain and tag in ("tensor", "array", "TensorDict"):
            return self._refuse(value, key, f"is a {tag} used as a key or in a set")
        # The most frequent first: a save waits for this walk.
        if tag == "tensor":
            return self._write_tensor(value, key)
        if tag == "array":
            return self._write_array(value, key)
        if tag not in _CONTAINERS:
            return self._write_value(value, key, tag)
        if id(value) in self._open:
            raise UnsupportedStateError(f"{name_of(key)[:200]} contains itself, which cannot be stored")
        self._open.add(id(value))
        node = self._write_container(value, key, tag, plain)
        self._open.remove(id(value))
        return node

    def _write_container(self, value: Any, key: Key, tag: str, plain: bool) -> Json:
        match tag:
            case "list":
                return self._write_items(value, key, plain)
            case "tuple":
                return {TAG: tag, "v": self._write_items(value, key, plain)}
            case "set" | "frozenset":
                return {TAG: tag, "v": self._write_items(value, key, plain=True)}
            case "TensorDict":
                return self._write_tensordict(value, key)
        return self._write_dict(value, key, tag, plain)

    def _write_tensor(self, tensor: Any, key: Key) -> Json:
        problem = _memory_problem(tensor)
        if problem:
            return self._refuse(tensor, key, problem)
        node: dict[str, Json] = {TAG: "tensor", "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        # Written only where they are true, which keeps the index of large states small.
        if type(tensor).__name__ == "Parameter":
            node["parameter"] = True
        if tensor.requires_grad:
            node["requires_grad"] = True
        return self._add_leaf(tensor, key, node)

    def _write_array(self, array: Any, key: Key) -> Json:
        if not is_plain(array.dtype) or not array.dtype.itemsize:
            return self._refuse(array, key, f"is a numpy.ndarray of {array.dtype}, which cannot be stored as data")
        return self._add_leaf(array, key, {TAG: "array", "dtype": array.dtype.str, "shape": list(array.shape)})

    def _add_leaf(self, leaf: Any, key: Key, node: Json) -> Json:
        self.leaves.append(leaf)
        self.nodes.append((key, node))
        return node

    def _write_items(self, items: Any, key: Key, plain: bool) -> list[Json]:
        return [self.write(item, (*key, position), plain=plain) for position, item in enumerate(items)]

    def _write_dict(self, members: Any, key: Key, tag: str, plain: bool) -> Json:
        # Most dicts can stand for themselves.
        if tag == "dict" and all(map(_can_be_json_key, members)):
            return {name: self.write(member, (*key, name), plain=plain) for name, member in members.items()}
        pairs = []
        for name, member in members.items():
            # In messages, "keys" stands for any key of this dict.
            key_node = self.write(name, (*key, "keys"), plain=True)
            pairs.append([key_node, self.write(member, (*key, name), plain=plain)])
        node = {TAG: tag, "v": pairs}
        # The state dict of a module has the versions of its parts as an attribute.
        if "_metadata" in getattr(members, "__dict__", {}):
            node["metadata"] = self.write(members._metadata, (*key, "_metadata"), plain=True)
        return node

    def _write_tensordict(self, tensordict: Any, key: Key) -> Json:
        members = {}
        for name, member in tensordict.items():
            if not is_exact_text(name):
                return self._refuse(tensordict, key, f"has the key {name!r}, which JSON cannot hold")
            members[name] = self.write(member, (*key, name))
        return {TAG: "TensorDict", "v": members, "batch_size": list(tensordict.batch_size)}

    def _write_value(self, value: Any, key: Key, tag: str) -> Json:
        """Return the node of a plain value."""
        if tag in ("null", "bool"):
            return value
        if tag == "int" and is_exact_int(value):
            return value
        if tag == "str" and is_exact_text(value):
            return value
        # Paths are the only values that are not restored exactly: every kind of path is read as a `pathlib.Path`. So
        # they are passed through as objects where that is allowed.
        if tag in KINDS and not (self._opaque and tag == "path"):
            content = KINDS[tag].write(value)
            if content is not None:
                return {TAG: tag, "v": content}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if tag in ("int", "str"):
            return self._refuse(value, key, f"is a {kind} that JSON cannot hold")
        return self._refuse(value, key, f"is a {kind}, which cannot be stored as data")

    def _refuse(self, value: Any, key: Key, problem: str) -> Json:
        """Pass a value through as an object, or raise if objects are not accepted."""
        if not self._opaque:
            name = name_of(key, "the state")[:200]
            raise UnsupportedStateError(f"{name} {problem}; pass its state_dict() or plain data, or save as .pt")
        self.objects.append(value)
        return {TAG: _OBJECT, "v": len(self.objects) - 1}


def _can_be_json_key(key: Any) -> bool:
    """Return whether a key can stand for itself in a JSON object, where the tag has a meaning."""
    return type(key) is str and not key.startswith(TAG) and is_exact_text(key)
