"""List the leaves of a structure, and select or drop parts of it, without building anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import CorruptFileError
from slipstream.schema.dtypes import DTYPES, parse_numpy_dtype, parse_torch_dtype
from slipstream.schema.keys import Keys, missing_error, resolve_keys
from slipstream.schema.nodes import TAG, Key, invalid, name_of
from slipstream.schema.values import MAX_INDEX, Json, read_sizes
from slipstream.schema.walk import leaf_nodes, members_of, with_members

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
    """Yield every leaf with its node, in order, after checking the node.

    A leaf with elements names the ``"region"`` that holds them: the number of a piece of memory in a table of the file.
    The caller must check that number, and with `check_fits` that the leaf stays inside its region. A leaf without
    elements has no region.

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


def select_keys(structure: Json, keys: Keys, objects: Sequence[Any] = ()) -> Json:
    """Return the branches of a structure whose keys were requested, each with everything below it.

    Containers keep their type; lists and tuples keep only the selected items, in order. The nodes of the branches are
    the same objects as in `structure`, not copies.

    Args:
        structure: As it was read from a file, or as `slipstream.schema.flatten.flatten` returns it.
        keys: A string, which is one name or pattern, or a collection of names, patterns and exact paths (tuples); see
            `slipstream.schema.keys.resolve_keys`.
        objects: The objects of the same `slipstream.schema.flatten.Tree`; a file has none.

    Raises:
        MissingEntryError: If a key matches nothing. Names all such keys, and similar ones that exist.
        ConfigurationError: If `keys` is empty.
        TypeError: If it contains anything but strings and tuples.
        CorruptFileError: If the structure is invalid.

    Example:
        >>> select_keys({"policy": {"actor": 1, "critic": 2}, "step": 3}, ["policy/act*", ("step",)])
        {'policy': {'actor': 1}, 'step': 3}
    """
    selection = resolve_keys(structure, keys, objects)
    if selection.missing:
        raise missing_error(structure, selection.missing, objects)
    return _select(structure, selection.matches, (), objects)


def drop_keys(structure: Json, keys: Keys) -> Json:
    """Return a structure without the branches whose keys are given. Keys that match nothing are ignored.

    Args and errors are those of `select_keys`, except that keys may be missing or empty.

    Example:
        >>> drop_keys({"policy": {"actor": 1, "critic": 2}, "step": 3}, ["policy/act*", "absent"])
        {'policy': {'critic': 2}, 'step': 3}
    """
    # Unlike a selection of nothing, this is not a mistake.
    if not keys:
        return structure
    return _drop(structure, resolve_keys(structure, keys).matches, ())


def _select(structure: Json, matches: Callable[[Key], bool], key: Key, objects: Sequence[Any]) -> Json | None:
    """Return the branches below a key that match, or None if there are none. `resolve_keys` has checked the depth."""
    kept: dict[int, Json] = {}
    for position, (part, member) in enumerate(members_of(structure, key, objects) or ()):
        at = (*key, part)
        if matches(at):
            kept[position] = member
            continue
        branch = _select(member, matches, at, objects)
        if branch is not None:
            kept[position] = branch
    if not kept:
        return None
    return with_members(structure, kept)


def _drop(structure: Json, matches: Callable[[Key], bool], key: Key) -> Json:
    """Return a structure without the branches whose key matches."""
    members = members_of(structure, key)
    if members is None:
        return structure
    kept: dict[int, Json] = {}
    for position, (part, member) in enumerate(members):
        if not matches((*key, part)):
            kept[position] = _drop(member, matches, (*key, part))
    return with_members(structure, kept)


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
    """Raise `CorruptFileError` unless a leaf stays inside the memory that was stored for it.

    Args:
        leaf: The leaf.
        node: Its node, which `leaves_of` has checked.
        stored_bytes: The size of its region. An array takes all of it; tensors may share it.
    """
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
    _check_region(node, shape)
    return Leaf(key, dtype, shape)


def _check_region(node: Mapping[str, Json], shape: tuple[int, ...]) -> None:
    """Check that a leaf names a region exactly if it has elements."""
    if 0 in shape:
        if "region" in node or node.get("offset", 0):
            raise ValueError("a leaf without elements has no region and no offset")
    else:
        read_sizes([node.get("region")])


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
