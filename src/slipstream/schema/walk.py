"""Walk over the nodes of a structure without building values. Nothing is trusted: it may come from a file.

The functions take the `objects` of the same `slipstream.schema.flatten.Tree`, because keys may be objects. A file has
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slipstream.schema.nodes import (
    LEAF_TAGS,
    TAG,
    Key,
    check_limits,
    invalid,
    items_in,
    members_in,
    pairs_in,
    tag_of,
)
from slipstream.schema.unflatten import read_plain
from slipstream.schema.values import Json


def all_keys(structure: Json, objects: Sequence[Any] = ()) -> Iterator[Key]:
    """Yield the key of every container, leaf and plain value in order; not that of the structure itself."""
    for key, _, _ in _all_nodes(structure, (), objects):
        if key:
            yield key


def end_nodes(structure: Json, objects: Sequence[Any] = ()) -> Iterator[tuple[Key, Json]]:
    """Yield the nodes of all leaves and plain values with their keys, in order.

    Raises:
        CorruptFileError: If a container is invalid, or the structure is too deep or too large.
    """
    for at, node, is_container in _all_nodes(structure, (), objects):
        if not is_container:
            yield at, node


def leaf_nodes(structure: Json, key: Key = (), objects: Sequence[Any] = ()) -> Iterator[tuple[Key, Json]]:
    """Yield the node of every leaf with its key, in order, without checking the node."""
    for at, node, is_container in _all_nodes(structure, key, objects):
        if not is_container and tag_of(node) in LEAF_TAGS:
            yield at, node


def members_of(node: Json, key: Key, objects: Sequence[Any] = ()) -> list[tuple[Any, Json]] | None:
    """Return the members of a node with their keys, or None if it is a leaf or a plain value. Sets are plain values."""
    if isinstance(node, list):
        return list(enumerate(node))
    if not isinstance(node, dict):
        return None
    if TAG not in node:
        return list(node.items())
    try:
        match node[TAG]:
            case "tuple":
                return list(enumerate(items_in(node)))
            case "TensorDict":
                return list(members_in(node).items())
            case "dict" | "OrderedDict" | "Counter":
                return [(_read_key(key_node, key, objects), member) for key_node, member in pairs_in(node)]
    except (TypeError, KeyError) as error:
        raise invalid(node, key, error) from error
    return None


def with_members(node: Json, kept: dict[int, Json]) -> Json:
    """Return a node with other members: those in `kept`, by their position in what `members_of` returned."""
    if isinstance(node, list):
        return list(kept.values())
    if TAG not in node:
        names = list(node)
        return {names[position]: member for position, member in kept.items()}
    members = node["v"]
    if node[TAG] == "tuple":
        return {**node, "v": list(kept.values())}
    if node[TAG] == "TensorDict":
        names = list(members)
        return {**node, "v": {names[position]: member for position, member in kept.items()}}
    return {**node, "v": [[members[position][0], member] for position, member in kept.items()]}


def _all_nodes(structure: Json, key: Key, objects: Sequence[Any]) -> Iterator[tuple[Key, Json, bool]]:
    """Yield every node in order, with its key and whether it is a container."""
    num_nodes = 0
    # A stack instead of recursion: a file may claim any depth.
    stack = [(key, structure)]
    while stack:
        at, node = stack.pop()
        num_nodes += 1
        check_limits(at, num_nodes)
        members = members_of(node, at, objects)
        yield at, node, members is not None
        if members:
            # The first member goes onto the stack last, so that it comes off first.
            members.reverse()
            for part, member in members:
                stack.append(((*at, part), member))


def _read_key(node: Json, key: Key, objects: Sequence[Any]) -> Any:
    """Return the key of a dict. Raises `TypeError` if the value cannot be one."""
    # Most keys stand for themselves.
    if isinstance(node, (str, int)):
        return node
    name = read_plain(node, (*key, "keys"), objects)
    # Raises TypeError for values such as lists, and ValueError for a NumPy duration without a unit.
    try:
        hash(name)
    except ValueError as error:
        raise TypeError(error) from error
    return name
