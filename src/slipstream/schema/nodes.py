"""The nodes of a structure: nested data as JSON, as ``docs/formats/checkpoint.md`` describes it.

Null, booleans, integers, strings, lists, and objects without a tag stand for themselves. Everything else is an object
with the tag ``$``: containers that JSON lacks, plain values (`slipstream.schema.values`), and the leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import CorruptFileError
from slipstream.schema.values import Json

Key = tuple[Any, ...]
"""Where a value is: the keys of dicts and the positions in lists on the way to it, from the outside in."""

TAG = "$"
LEAF_TAGS = ("tensor", "array")

# Every level of a state takes up to three levels of JSON, and Python's JSON parser recurses. A limit far below Python's
# own guarantees that whatever was saved can be loaded, even from deep within a program.
MAX_DEPTH = 100
# Bounds the time and memory that a hostile file can cost. A state of this size has an index of more than 10 MB.
MAX_NODES = 1 << 22


def name_of(key: Key, root: str = "state") -> str:
    """Return a key as text, such as ``"optimizer/state/0/exp_avg"``; `root` if it has no parts."""
    return "/".join(map(str, key)) or root


def tag_of(node: Json) -> Any:
    """Return the tag of a node, or None if the node stands for itself."""
    if isinstance(node, dict):
        return node.get(TAG)
    return None


def check_limits(key: Key, num_nodes: int) -> None:
    """Raise `CorruptFileError` if a structure is deeper or larger than any that is written."""
    if len(key) > MAX_DEPTH:
        raise CorruptFileError(f"the state is nested more than {MAX_DEPTH} levels deep")
    if num_nodes > MAX_NODES:
        raise CorruptFileError(f"the state has more than {MAX_NODES:,} values")


def invalid(node: Json, key: Key, reason: object) -> CorruptFileError:
    """Return the error for a node that cannot have been written."""
    return CorruptFileError(f"{name_of(key)[:200]!r} is not a valid {str(tag_of(node))[:40]!r} ({reason})")


def items_in(node: Mapping[str, Json]) -> list[Json]:
    """Return the items of a tagged list. Raises `TypeError` if there are none."""
    items = node["v"]
    if not isinstance(items, list):
        raise TypeError(f"'v' is a {type(items).__name__}, expected a list")
    return items


def members_in(node: Mapping[str, Json]) -> dict[str, Json]:
    """Return the members of a tagged object. Raises `TypeError` if there are none."""
    members = node["v"]
    if not isinstance(members, dict):
        raise TypeError(f"'v' is a {type(members).__name__}, expected an object")
    return members


def pairs_in(node: Mapping[str, Json]) -> list[list[Json]]:
    """Return the key and value nodes of a tagged dict. Raises `TypeError` if they are not pairs."""
    pairs = items_in(node)
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise TypeError(f"{str(pair)[:40]!r} is not a pair of key and value")
    return pairs
