"""The nodes of a structure: nested data as JSON, as ``docs/formats/checkpoint.md`` describes it.

Null, booleans, integers, strings, lists, and objects without a tag stand for themselves. Everything else is an object
with the tag ``$``: containers that JSON lacks, plain values (`slipstream.schema.values`), and the leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from slipstream.errors import CorruptFileError
from slipstream.schema.values import Json, is_exact_text

Key = tuple[Any, ...]
"""Where a value is: the keys of dicts and the positions in lists on the way to it, from the outside in."""

TAG = "$"
LEAF_TAGS = ("tensor", "array")

# Every level of a state takes up to three levels of JSON, and Python's JSON parser recurses. A limit far below Python's
# own guarantees that whatever was saved can be loaded, even from deep within a program.
MAX_DEPTH = 100
# Bounds the time and memory that a hostile file can cost. A node takes up to three lists or objects in JSON, and the
# index of a container holds at most three million of them.
MAX_NODES = 1 << 20
# Bounds what text and bytes may add to the index of a container, which holds at most 64 MiB.
MAX_CHARACTERS = 32 << 20


def name_of(key: Key, root: str = "state") -> str:
    """Return a key as text, such as ``"optimizer/state/0/exp_avg"``; `root` if it has no parts."""
    try:
        return "/".join(map(str, key)) or root
    except ValueError:
        return "/".join(map(_text_of, key))


def _text_of(part: Any) -> str:
    """Return a part of a key as text, also if it contains an integer that is too long for Python to print."""
    try:
        return str(part)
    except ValueError:
        return f"<{type(part).__name__}>"


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


_TEXT = frozenset({str})


def are_json_keys(names: Collection[Any]) -> bool:
    """Return whether all keys of a dict can stand for themselves in a JSON object, where the tag has a meaning."""
    # Exact types: a key of a subclass would come back as a string.
    if not _TEXT.issuperset(map(type, names)):
        return False
    text = "".join(names)
    # True for nearly all dicts, and much cheaper than to look at every key.
    if text.isascii() and TAG not in text:
        return True
    return all(map(_is_json_key, names))


def _is_json_key(key: str) -> bool:
    return not key.startswith(TAG) and is_exact_text(key)
