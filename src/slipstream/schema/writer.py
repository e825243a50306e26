"""Write nested data as JSON, and collect its leaves. `slipstream.schema.flatten` says what can be written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from slipstream.schema.dtypes import is_plain
from slipstream.schema.nodes import MAX_CHARACTERS, MAX_DEPTH, MAX_NODES, TAG, Key, are_json_keys
from slipstream.schema.refusals import (
    array_problem,
    element_name,
    is_strided,
    memory_problem,
    tensordict_problem,
    type_problem,
    unsupported,
)
from slipstream.schema.storable import OBJECT, storable_tag
from slipstream.schema.structure import MAX_AXES
from slipstream.schema.values import KINDS, Json, is_exact_int, is_exact_text, write_device

LONG_KINDS = "SUVmM"
"""The kinds of NumPy scalars whose dtypes are not singletons: text, bytes and dates."""


def _container(write: Callable[[Writer, Any, Key], Json]) -> Callable[[Writer, Any, Key], Json]:
    """Make a method that writes a container check the limits, and that the container is not inside itself."""

    @functools.wraps(write)
    def write_once(self: Writer, value: Any, key: Key) -> Json:
        problem = self.count_members(value, key)
        if problem:
            return self.refuse(value, key, problem)
        if id(value) in self.open:
            raise unsupported(key, "contains itself, which cannot be stored; store it once")
        self.open.add(id(value))
        node = write(self, value, key)
        self.open.remove(id(value))
        return node

    return write_once


class Writer:
    """Writes the structure of nested data, and collects its leaves.

    There is a method for every kind of value, see `_METHODS`. A save waits for this walk, so every call in it counts.
    """

    def __init__(self, *, opaque: bool) -> None:
        self.leaves: list[Any] = []
        self.nodes: list[tuple[Key, Json]] = []
        self.objects: list[Any] = []
        self.num_long_scalars = 0
        # The containers that are being written, by id.
        self.open: set[int] = set()
        self._opaque = opaque
        self._num_nodes = 1
        self._num_characters = 0
        # Whether a key or a set is being written, where tensors are not allowed.
        self._is_plain = False

    def write(self, value: Any, key: Key) -> Json:
        """Return the node of a value."""
        kind = type(value)
        write = _WRITERS.get(kind) or _find_writer(kind)
        return write(self, value, key)

    def count_members(self, container: Any, key: Key) -> str:
        """Count the members of a container, and return why it cannot be written; empty if it can.

        The limits are those for reading. They also end the walk where nested lists share members, as in [a, a] with
        a = [b, b], and so on: it visits exponentially many values.
        """
        num_members = len(container)
        self._num_nodes += num_members
        # The keys of a dict and its metadata can be nodes as well.
        if isinstance(container, dict):
            self._num_nodes += num_members + 1
        if self._num_nodes > MAX_NODES:
            return f"is too long for a state of at most {MAX_NODES:,} values; store long lists as arrays"
        if num_members and len(key) >= MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} levels deep; store a flat dict"
        return ""

    def _count_characters(self, content: Json) -> str:
        """Count the text in the node of a plain value, and return why it cannot be written; empty if it can."""
        parts = content
        if not isinstance(content, list):
            parts = [content]
        for part in parts:
            if isinstance(part, str):
                self._num_characters += len(part)
                # JSON needs up to twelve characters for one that is not ASCII.
                if not part.isascii():
                    self._num_characters += 11 * len(part)
        if self._num_characters > MAX_CHARACTERS:
            return f"exceeds {MAX_CHARACTERS:,} characters of text and bytes in a state; store large ones as arrays"
        return ""

    def write_itself(self, value: Any, key: Key) -> Json:
        """Return a value that JSON holds as it is."""
        return value

    def write_int(self, value: int, key: Key) -> Json:
        """Return an integer, which has a tag if it is very long."""
        if is_exact_int(value):
            return value
        return self.write_kind(value, key)

    def write_text(self, value: str, key: Key) -> Json:
        """Return text, which JSON holds as it is with one exception."""
        problem = self._count_characters(value)
        if problem:
            return self.refuse(value, key, problem)
        if is_exact_text(value):
            return value
        return self.refuse(value, key, "is text with a split surrogate pair, which JSON cannot hold; store bytes")

    def write_kind(self, value: Any, key: Key) -> Json:
        """Return the node of a plain value that JSON lacks."""
        kind: Any = type(value)
        tag = storable_tag(kind)
        content = KINDS[tag].write(value)
        if content is None:
            return self.write_object(value, key)
        problem = self._count_characters(content)
        if problem:
            return self.refuse(value, key, problem)
        if tag == "numpy" and value.dtype.kind in LONG_KINDS:
            self.num_long_scalars += 1
        return {TAG: tag, "v": content}

    def write_object(self, value: Any, key: Key) -> Json:
        """Handle a value that is not on the list."""
        return self.refuse(value, key, type_problem(value))

    def write_tensor(self, tensor: Any, key: Key) -> Json:
        """Return the node of a tensor, which becomes a leaf."""
        # Every look at a tensor costs 50 ns, so `memory_problem` looks again only if there is one.
        if self._is_plain or tensor.is_meta or tensor.is_nested or not is_strided(tensor.layout):
            return self._refuse_leaf(tensor, key, memory_problem(tensor))
        dtype = element_name(tensor.dtype)
        shape = list(tensor.shape)
        if not dtype or len(shape) > MAX_AXES:
            return self._refuse_leaf(tensor, key, memory_problem(tensor))
        node: dict[str, Json] = {TAG: "tensor", "dtype": dtype, "shape": shape}
        # Written only where it is true, which keeps the index of large states small.
        if tensor.requires_grad:
            node["requires_grad"] = True
        self.leaves.append(tensor)
        self.nodes.append((key, node))
        return node

    def write_parameter(self, parameter: Any, key: Key) -> Json:
        """Return the node of a parameter: that of a tensor with a flag."""
        node = self.write_tensor(parameter, key)
        if node[TAG] == "tensor":
            node["parameter"] = True
        return node

    def write_array(self, array: Any, key: Key) -> Json:
        """Return the node of an array, which becomes a leaf."""
        dtype = array.dtype
        # NumPy cannot view memory as elements of no bytes.
        if self._is_plain or not is_plain(dtype) or not dtype.itemsize:
            return self._refuse_leaf(array, key, array_problem(array))
        node = {TAG: "array", "dtype": dtype.str, "shape": list(array.shape)}
        self.leaves.append(array)
        self.nodes.append((key, node))
        return node

    @_container
    def write_list(self, items: Any, key: Key) -> Json:
        """Return a list, which JSON has."""
        return self._write_items(items, key)

    @_container
    def write_tuple(self, items: Any, key: Key) -> Json:
        """Return the node of a tuple."""
        return {TAG: "tuple", "v": self._write_items(items, key)}

    @_container
    def write_set(self, items: Any, key: Key) -> Json:
        """Return the node of a set or frozenset."""
        return {TAG: type(items).__name__, "v": self._write_plain(items, (*key, "members"))}

    @_container
    def write_dict(self, members: Any, key: Key) -> Json:
        """Return the node of a dict: without a tag if JSON can hold its keys."""
        if are_json_keys(members):
            return self._write_members(members, key)
        return {TAG: "dict", "v": self._write_pairs(members, key)}

    @_container
    def write_special_dict(self, members: Any, key: Key) -> Json:
        """Return the node of a Counter, or of an OrderedDict, which may have one attribute."""
        tag = type(members).__name__
        attributes = vars(members)
        unknown = attributes.keys() - {"_metadata"}
        if unknown or (attributes and tag == "Counter"):
            names = ", ".join(sorted(attributes))
            return self.refuse(members, key, f"has the attributes {names}, which cannot be stored; store them as keys")
        node = {TAG: tag, "v": self._write_pairs(members, key)}
        # The state dict of a module has the versions of its parts as an attribute.
        if attributes:
            (node["metadata"],) = self._write_plain([members._metadata], (*key, "_metadata"))
        return node

    def write_tensordict(self, tensordict: Any, key: Key) -> Json:
        """Return the node of a TensorDict."""
        members = dict(tensordict.items())
        problem = tensordict_problem(tensordict) or self.count_members(members, key)
        if self._is_plain or problem:
            return self._refuse_leaf(tensordict, key, problem)
        nodes = self._write_members(members, key)
        node: dict[str, Json] = {TAG: "TensorDict", "v": nodes, "batch_size": list(tensordict.batch_size)}
        # Most TensorDicts have neither.
        if set(tensordict.names) - {None}:
            node["names"] = list(tensordict.names)
        if tensordict.device is not None:
            node["device"] = write_device(tensordict.device)
        return node

    def _write_items(self, items: Any, key: Key) -> list[Json]:
        # For the few members of most containers, a loop is faster than a comprehension.
        nodes = []
        for position, item in enumerate(items):
            nodes.append(self.write(item, (*key, position)))
        return nodes

    def _write_members(self, members: Any, key: Key) -> dict[str, Json]:
        nodes = {}
        for name, member in members.items():
            nodes[name] = self.write(member, (*key, name))
        return nodes

    def _write_pairs(self, members: Any, key: Key) -> list[list[Json]]:
        key_nodes = self._write_plain(members, (*key, "keys"))
        pairs = []
        for key_node, (name, member) in zip(key_nodes, members.items(), strict=True):
            pairs.append([key_node, self.write(member, (*key, name))])
        return pairs

    def _write_plain(self, values: Any, key: Key) -> list[Json]:
        """Return the nodes of values that must not contain tensors. In messages, they all have the same key."""
        was_plain = self._is_plain
        self._is_plain = True
        nodes = [self.write(value, key) for value in values]
        self._is_plain = was_plain
        return nodes

    def _refuse_leaf(self, leaf: Any, key: Key, problem: str) -> Json:
        """Refuse a tensor, an array or a TensorDict, either for itself or for its place."""
        if self._is_plain:
            problem = f"is a {type(leaf).__name__} used as a key or in a set; store it as a value"
        return self.refuse(leaf, key, problem)

    def refuse(self, value: Any, key: Key, problem: str) -> Json:
        """Pass a value through as an object, or raise if objects are not accepted."""
        if not self._opaque:
            raise unsupported(key, problem)
        self.objects.append(value)
        return {TAG: OBJECT, "v": len(self.objects) - 1}


# Plain values that are not here have a tag, see `KINDS`.
_METHODS: dict[str, Callable[[Writer, Any, Key], Json]] = {
    "null": Writer.write_itself,
    "bool": Writer.write_itself,
    "int": Writer.write_int,
    "str": Writer.write_text,
    "list": Writer.write_list,
    "tuple": Writer.write_tuple,
    "set": Writer.write_set,
    "frozenset": Writer.write_set,
    "dict": Writer.write_dict,
    "OrderedDict": Writer.write_special_dict,
    "Counter": Writer.write_special_dict,
    "TensorDict": Writer.write_tensordict,
    "array": Writer.write_array,
    "tensor": Writer.write_tensor,
    "parameter": Writer.write_parameter,
    OBJECT: Writer.write_object,
}
# The methods for types that occurred: a single look-up for every value.
_WRITERS: dict[type, Callable[[Writer, Any, Key], Json]] = {}


def _find_writer(kind: type) -> Callable[[Writer, Any, Key], Json]:
    """Return the method that writes values of a type, and remember it if they can be stored."""
    tag = storable_tag(kind)
    writer = _METHODS.get(tag, Writer.write_kind)
    # Other types are not remembered: a program may define any number of them.
    if tag != OBJECT:
        _WRITERS[kind] = writer
    return writer
