"""Rebuild nested data from its structure. Nothing in a structure is trusted: it may come from a file."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.schema.nodes import TAG, Key, check_limits, invalid, items_in, members_in, name_of, pairs_in, tag_of
from slipstream.schema.storable import OBJECT
from slipstream.schema.values import KINDS, Json, TorchValues, read_device, read_names, read_sizes


def unflatten(
    structure: Json, leaves: Sequence[Any], objects: Sequence[Any] = (), torch: TorchValues | None = None
) -> Any:
    """Rebuild nested data from its structure.

    Args:
        structure: As `slipstream.schema.flatten.flatten` returns it, or from a file.
        leaves: A value for every leaf, in order.
        objects: The objects of the same `Tree`; a file has none.
        torch: How to build torch values. By default they are described; `slipstream.tensors.TORCH` builds real ones.

    Raises:
        CorruptFileError: If the structure is invalid.
        FormatVersionError: If it contains a kind of value that this release does not know.

    Example:
        >>> unflatten({"betas": {"$": "tuple", "v": [{"$": "float", "v": 0.9}, 1]}, "kind": "adam"}, [])
        {'betas': (0.9, 1), 'kind': 'adam'}
    """
    reader = _Reader(leaves, objects, torch or TorchValues())
    value = reader.read(structure, ())
    reader.require_end()
    return value


def read_plain(node: Json, key: Key, objects: Sequence[Any] = (), torch: TorchValues | None = None) -> Any:
    """Return the value of a node that holds no tensors and arrays, such as the key of a dict."""
    return _Reader((), objects, torch or TorchValues()).read(node, key, plain=True)


# The kinds of dicts with a tag.
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


# What is in a TensorDict. Objects are there only if the structure is not from a file.
_TENSORDICT_MEMBERS = ("tensor", "TensorDict", OBJECT)


class _Reader:
    """Rebuilds nested data, and checks everything on the way."""

    def __init__(self, leaves: Sequence[Any], objects: Sequence[Any], torch: TorchValues) -> None:
        self._leaves = iter(leaves)
        self._objects = objects
        self._torch = torch
        self._num_nodes = 0

    def read(self, node: Json, key: Key, *, plain: bool = False) -> Any:
        """Return the value of a node. `plain` is set where tensors are not allowed: in keys and in sets."""
        self._num_nodes += 1
        check_limits(key, self._num_nodes)
        if isinstance(node, list):
            return self._read_items(node, key, plain)
        if not isinstance(node, dict):
            return node
        if TAG not in node:
            return self._read_members(node, key, plain)
        try:
            return self._read_tagged(node[TAG], node, key, plain)
        except (CorruptFileError, FormatVersionError):
            # A member has raised it, and its message is more precise than one from here.
            raise
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise invalid(node, key, error) from error

    def require_end(self) -> None:
        """Raise unless every leaf was used."""
        left = sum(1 for _ in self._leaves)
        if left:
            raise ValueError(f"{left} more leaves than the structure has nodes for")

    def _read_tagged(self, tag: Any, node: Mapping[str, Json], key: Key, plain: bool) -> Any:
        match tag:
            case "tensor" | "array" | "TensorDict" if plain:
                raise CorruptFileError(f"{name_of(key)[:200]!r} is a {tag}, where only plain values are allowed")
            case "tensor" | "array":
                return self._read_leaf(key)
            case "tuple":
                return tuple(self._read_items(items_in(node), key, plain))
            case "set" | "frozenset":
                return self._read_set(tag, node, key)
            case "dict" | "OrderedDict" | "Counter":
                return self._read_dict(tag, node, key, plain)
            case "TensorDict":
                return self._read_tensordict(node, key)
            case "object" if self._objects:
                return self._objects[node["v"]]
        if not isinstance(tag, str) or tag not in KINDS:
            raise FormatVersionError(
                f"the state holds a value of kind {str(tag)[:40]!r}, which this release does not know"
            )
        return KINDS[tag].read(node["v"], self._torch)

    def _read_leaf(self, key: Key) -> Any:
        for leaf in self._leaves:
            return leaf
        raise CorruptFileError(f"{name_of(key)[:200]!r} is a tensor or array, where only plain values are allowed")

    def _read_items(self, nodes: list[Json], key: Key, plain: bool) -> list[Any]:
        return [self.read(node, (*key, position), plain=plain) for position, node in enumerate(nodes)]

    def _read_members(self, nodes: Mapping[str, Json], key: Key, plain: bool) -> dict[str, Any]:
        return {name: self.read(node, (*key, name), plain=plain) for name, node in nodes.items()}

    def _read_tensordict(self, node: Mapping[str, Json], key: Key) -> Any:
        members = self._read_members(members_in(node), key, plain=False)
        # tensordict would convert other values, in ways that no size in the file foretells.
        for name, member in members_in(node).items():
            if tag_of(member) not in _TENSORDICT_MEMBERS:
                raise ValueError(f"its member {name[:40]!r} is neither a tensor nor a TensorDict")
        batch_size = read_sizes(node["batch_size"])
        names = None
        if "names" in node:
            names = read_names(node["names"], len(batch_size))
        device = None
        if "device" in node:
            device = read_device(node["device"])
        return self._torch.tensordict(members, batch_size, names, device)

    def _read_set(self, tag: str, node: Mapping[str, Json], key: Key) -> set[Any] | frozenset[Any]:
        items = self._read_items(items_in(node), key, plain=True)
        values = set(items)
        if len(values) != len(items):
            raise ValueError("a member occurs twice")
        if tag == "frozenset":
            return frozenset(values)
        return values

    def _read_dict(self, tag: str, node: Mapping[str, Json], key: Key, plain: bool) -> dict[Any, Any]:
        members: dict[Any, Any] = _DICTS[tag]()
        for key_node, value_node in pairs_in(node):
            name = self.read(key_node, (*key, "keys"), plain=True)
            # Keys that JSON tells apart may be equal, as 1 and true are.
            if name in members:
                raise ValueError(f"the key {str(name)[:40]!r} occurs twice")
            members[name] = self.read(value_node, (*key, name), plain=plain)
        if "metadata" in node:
            if tag != "OrderedDict":
                raise ValueError("only an OrderedDict has metadata")
            metadata = self.read(node["metadata"], (*key, "_metadata"), plain=True)
            # Where `torch.nn.Module.load_state_dict` looks for it.
            members.__dict__["_metadata"] = metadata
        return members
