"""List the leaves of a structure, and select or drop parts of it, without building anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from slipstream.errors import CorruptFileError
from slipstream.schema.dtypes import DTYPES, parse_numpy_dtype, parse_torch_dtype
from slipstream.schema.nodes import (
    LEAF_TAGS,
    TAG,
    Key,
    check_limits,
    invalid,
    items_in,
    members_in,
    name_of,
    pairs_in,
    tag_of,
)
from slipstream.schema.unflatten import read_plain
from slipstream.schema.values import MAX_INDEX, Json, read_sizes

MAX_AXES = 64
"""How many axes a leaf may have: as many as NumPy allows."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor or array of nested data, without its content.

    Attributes:
        key: Where it is.
        dtype: Torch's name of the dtype, such as ``"bfloat16"``; for a NumPy array NumPy's, such as ``"<f8"``.
        shape: Its shape.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The key as text, such as ``"optimizer/state/0/exp_avg"``."""
        return name_of(self.key)

    @property
    def is_array(self) -> bool:
        """Whether it is a NumPy array rather than a tensor."""
        return self.dtype not in DTYPES

    @property
    def carrier(self) -> np.dtype[Any]:
        """The NumPy dtype that holds its bits."""
        if self.is_array:
            return parse_numpy_dtype(self.dtype)
        return DTYPES[self.dtype].carrier

    @property
    def nbytes(self) -> int:
        """The size of its elements. The memory behind them is smaller if elements share it."""
        return math.prod(self.shape) * self.carrier.itemsize


def leaves_of(structure: Json, key: Key = ()) -> Iterator[tuple[Leaf, Json]]:
    """Yield every leaf with its node, in order. Checks the nodes; for those with an entry see also `check_fits`.

    Args:
        structure: As it was read from a file.
        key: Where the structure itself is.

    Raises:
        CorruptFileError: If the structure or the node of a leaf is invalid.
    """
    for at, node in leaf_nodes(structure, key):
        try:
            leaf = _parse_leaf(at, node)
        except (ValueError, TypeError) as error:
            raise invalid(node, at, error) from error
        yield leaf, node


def leaf_nodes(structure: Json, key: Key = ()) -> Iterator[tuple[Key, Json]]:
    """Yield the node of every leaf with its key, in order, without checking the node."""
    for at, node in end_nodes(structure, key):
        if tag_of(node) in LEAF_TAGS:
            yield at, node


def end_nodes(structure: Json, key: Key = ()) -> Iterator[tuple[Key, Json]]:
    """Yield the nodes of all leaves and plain values with their keys, in order."""
    num_nodes = 0
    stack = [(key, structure)]
    while stack:
        at, node = stack.pop()
        num_nodes += 1
        check_limits(at, num_nodes)
        members = _members(node, at)
        if members is None:
            yield at, node
            continue
        # The first member goes onto the stack last, so that it comes off first.
        for part, member in reversed(members):
            stack.append(((*at, part), member))


def select(structure: Json, matches: Callable[[Key], bool], key: Key = ()) -> Json | None:
    """Return the branches whose key matches, each whole, or None if there are none.

    The nodes of these branches are the same objects as in `structure`, not copies.
    """
    if key and matches(key):
        return structure
    # Bounds the recursion. The number of nodes needs no bound here: each one is visited at most once.
    check_limits(key, 0)
    members = _members(structure, key)
    if members is None:
        return None
    kept: dict[int, Json] = {}
    for position, (part, member) in enumerate(members):
        branch = select(member, matches, (*key, part))
        if branch is not None:
            kept[position] = branch
    if not kept:
        return None
    return _with_members(structure, kept)


def drop(structure: Json, matches: Callable[[Key], bool], key: Key = ()) -> Json:
    """Return the structure without the branches whose key matches."""
    check_limits(key, 0)
    members = _members(structure, key)
    if members is None:
        return structure
    kept: dict[int, Json] = {}
    for position, (part, member) in enumerate(members):
        if not matches((*key, part)):
            kept[position] = drop(member, matches, (*key, part))
    return _with_members(structure, kept)


def matching(patterns: Sequence[str]) -> Callable[[Key], bool]:
    """Return a function that tells whether the name of a key matches a pattern such as ``"policy/actor.*"``."""

    def matches(key: Key) -> bool:
        name = name_of(key)
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return matches


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor in C order, as torch computes them."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        # Torch counts an empty axis as one of size 1.
        step *= max(size, 1)
    return tuple(reversed(strides))


def check_fits(leaf: Leaf, node: Mapping[str, Json], stored_bytes: int) -> None:
    """Raise `CorruptFileError` unless a leaf stays inside the memory that was stored for it."""
    if leaf.is_array and leaf.nbytes != stored_bytes:
        raise CorruptFileError(f"{leaf.name[:200]!r} needs {leaf.nbytes:,} bytes, {stored_bytes:,} are stored")
    # A tensor may see only a part of its memory, and share it with others.
    if not leaf.is_array and _end(leaf, node) > stored_bytes:
        raise CorruptFileError(f"{leaf.name[:200]!r} reaches beyond the {stored_bytes:,} bytes that are stored for it")


def _end(leaf: Leaf, node: Mapping[str, Json]) -> int:
    """Return where a tensor ends, in bytes from the start of its memory."""
    if 0 in leaf.shape:
        return 0
    strides = node.get("stride") or contiguous_strides(leaf.shape)
    last = 0
    for size, stride in zip(leaf.shape, strides, strict=True):
        last += (size - 1) * int(stride)
    return int(node.get("offset", 0)) + (last + 1) * leaf.carrier.itemsize


def _members(node: Json, key: Key) -> list[tuple[Any, Json]] | None:
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
            case "dict" | "OrderedDict":
                return [(_read_key(key_node, key), member) for key_node, member in pairs_in(node)]
    except (TypeError, KeyError) as error:
        raise invalid(node, key, error) from error
    return None


def _with_members(node: Json, kept: dict[int, Json]) -> Json:
    """Return a node with other members: those in `kept`, by their position in what `_members` returned."""
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


def _read_key(node: Json, key: Key) -> Any:
    """Return the key of a dict. Raises `TypeError` if the value cannot be one."""
    # Most keys stand for themselves.
    if isinstance(node, (str, int)):
        return node
    name = read_plain(node, (*key, "keys"))
    # Raises TypeError for values such as lists.
    hash(name)
    return name


def _parse_leaf(key: Key, node: Mapping[str, Json]) -> Leaf:
    """Check the node of a leaf. Raises `ValueError` or `TypeError` if it is invalid."""
    shape = tuple(read_sizes(node.get("shape")))
    # The product bounds every later computation with sizes. Empty axes must not hide the others.
    if len(shape) > MAX_AXES or math.prod(max(size, 1) for size in shape) > MAX_INDEX:
        raise ValueError(f"the shape is {str(list(shape))[:80]}")
    if node[TAG] == "array":
        dtype = _parse_array_dtype(node.get("dtype"))
    else:
        dtype = _parse_tensor_dtype(node.get("dtype"))
        _check_view(node, dtype, len(shape))
    # The content is either in the node itself or in an entry of the file.
    if ("hex" in node) == ("entry" in node):
        raise ValueError("expected either 'hex' or 'entry'")
    leaf = Leaf(key, dtype, shape)
    if "hex" in node:
        check_fits(leaf, node, len(bytes.fromhex(node["hex"])))
    elif not isinstance(node["entry"], str):
        raise TypeError("'entry' is not a string")
    return leaf


def _parse_array_dtype(name: Json) -> str:
    """Return the NumPy dtype that a node claims. Raises `ValueError` if there are no arrays of it."""
    dtype = parse_numpy_dtype(name)
    # Scalars may be empty text, but NumPy cannot view memory as elements of no bytes.
    if not dtype.itemsize:
        raise ValueError(f"the elements of {dtype.str!r} have no bytes")
    return dtype.str


def _parse_tensor_dtype(name: Json) -> str:
    """Return the torch dtype that a node claims. Raises `ValueError` if there are no plain tensors of it."""
    dtype = parse_torch_dtype(name)
    # Torch would build a tensor without scale and zero point, which fails at its first use.
    if dtype.is_quantized:
        raise ValueError(f"{dtype.name} is quantized")
    return dtype.name


def _check_view(node: Mapping[str, Json], dtype: str, num_axes: int) -> None:
    """Check how a tensor sees its memory, and its flags."""
    if "stride" in node and len(read_sizes(node["stride"])) != num_axes:
        raise ValueError(f"{len(node['stride'])} strides for {num_axes} axes")
    (offset,) = read_sizes([node.get("offset", 0)])
    if offset % DTYPES[dtype].itemsize:
        raise ValueError(f"the offset {offset} is not a multiple of the size of an element")
    for flag in ("parameter", "requires_grad"):
        if not isinstance(node.get(flag, False), bool):
            raise TypeError(f"{flag!r} is {str(node[flag])[:40]!r}, expected true or false")
    if node.get("requires_grad") and not (DTYPES[dtype].is_float or DTYPES[dtype].is_complex):
        raise ValueError(f"a tensor of {dtype} cannot require gradients")
