"""The native checkpoint format: a container whose entries are the distinct memory of a state's tensors.

The value ``state`` is the structure, as `slipstream.schema` writes it. A tensor there names the entry that holds its
memory and how it sees it; tensors of up to 128 bytes (step counters, scalars) are written into the structure. A *delta*
holds only what changed since its parent: entries that are equal are not there, others may be stored as a difference.
See ``docs/formats/checkpoint.md``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checkpoint.chain import KIND, NativeReader, recipe_inputs
from slipstream.checkpoint.predict import Moments, Recipe, apply, find_moments, prediction, recipes, sample
from slipstream.codecs import Codec, Difference, Planes, Raw, choose_codec
from slipstream.errors import naming
from slipstream.schema.dtypes import DType
from slipstream.schema.flatten import Tree, flatten
from slipstream.schema.nodes import TAG, Key, name_of
from slipstream.schema.structure import Leaf, check_fits, contiguous_strides, leaves_of, matching, select
from slipstream.schema.structure import drop as drop_branches
from slipstream.schema.unflatten import unflatten
from slipstream.store.index import DTYPES as CONTAINER_DTYPES
from slipstream.store.index import MAX_AXES
from slipstream.store.reference import Reference
from slipstream.store.writer import ContainerWriter, write_container
from slipstream.tensors import TORCH, Region, Regions, View, dtype_info, region_of, with_flags

_INLINE_BYTES = 128
_SMALL_BYTES = 2048  # packing less than this takes longer than it is worth


@dataclass(frozen=True)
class Content:
    """The memory of a state by entry name: what a child of this checkpoint may refer to."""

    arrays: Mapping[str, NDArray[Any]]
    moments: Mapping[str, Moments] = field(default_factory=dict)


@dataclass(frozen=True)
class Parent:
    """A checkpoint that another one is stored against.

    Attributes:
        path: Its file.
        identity: Its fingerprint, so that another file in its place is noticed.
        parents: Identities of its parents, nearest first.
        content: Its memory.
    """

    path: Path
    identity: str
    parents: tuple[str, ...]
    content: Content


@dataclass
class Written:
    """The result of writing a state: sizes, and its memory for a child to refer to."""

    raw_bytes: int
    stored_bytes: int
    identity: str
    parents: tuple[str, ...]
    content: Content


@dataclass(frozen=True)
class Flat:
    """A state that is ready to be written.

    Attributes:
        tree: Its structure and its arrays. Tensors may be missing from its leaves.
        regions: The memory of its tensors, in their order. It must be on the host.
    """

    tree: Tree
    regions: Regions


def flatten_state(state: Any, key: Key = ()) -> Flat:
    """Take a state apart without copying it; tensors on other devices are copied to the host.

    Raises:
        UnsupportedStateError: If the state holds anything that cannot be stored as data.
    """
    tree = flatten(state, key=key)
    tensors = [leaf.cpu() for leaf in tree.leaves if isinstance(leaf, torch.Tensor)]
    return Flat(tree, Regions.of(tensors))


@dataclass
class _Entries:
    """The entries of a file: the arrays of a state, and the memory of its tensors, each piece once.

    Putting a state in writes into the nodes of its structure where the content of each leaf is.
    """

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    codecs: dict[str, Codec | None] = field(default_factory=dict)  # None: choose when it is written
    entry_of: dict[Key, str] = field(default_factory=dict)
    raw_bytes: int = 0

    def add_arrays(self, tree: Tree) -> None:
        """Add the NumPy arrays of a state."""
        for (key, node), leaf in zip(tree.nodes, tree.leaves, strict=True):
            if node[TAG] != "array":
                continue
            self.raw_bytes += leaf.nbytes
            # Containers hold numbers only, so that short texts and dates are written into the structure too.
            if leaf.nbytes <= _INLINE_BYTES or leaf.dtype.str not in CONTAINER_DTYPES:
                node["hex"] = leaf.tobytes().hex()
                continue
            codec: Codec | None = None
            if leaf.nbytes < _SMALL_BYTES:
                codec = Raw()
            node["entry"] = self._add(name_of(key), _limit_axes(np.asarray(leaf)), codec)

    def add_tensors(self, tree: Tree, regions: Regions) -> None:
        """Add the memory of the tensors of a state."""
        entries: dict[int, str] = {}
        tensors = [(key, node) for key, node in tree.nodes if node[TAG] == "tensor"]
        for (key, node), view in zip(tensors, regions.views, strict=True):
            if view.region < 0:
                node["hex"] = ""
            else:
                self._place(key, node, view.region, regions.pieces[view.region], entries)
            if view.offset:
                node["offset"] = view.offset
            if view.stride != contiguous_strides(view.shape):
                node["stride"] = list(view.stride)

    def _place(self, key: Key, node: dict[str, Any], number: int, region: Region, entries: dict[int, str]) -> None:
        """Say in a node where its memory is, and add the memory with the first node that sees it."""
        if number not in entries:
            self.raw_bytes += region.nbytes
            # Step counters and other scalars: an entry in the index would take more than they do.
            if region.nbytes <= _INLINE_BYTES and region.num_views == 1:
                node["hex"] = region.content().tobytes().hex()
                return
            codec = _codec_for(dtype_info(region.dtype), region.nbytes)
            entries[number] = self._add(name_of(key), region.array(), codec)
        node["entry"] = entries[number]
        self.entry_of[tuple(map(str, key))] = entries[number]

    def _add(self, name: str, array: NDArray[Any], codec: Codec | None) -> str:
        unique = name
        number = 2
        while unique in self.arrays:
            unique = f"{name}#{number}"
            number += 1
        self.arrays[unique] = array
        self.codecs[unique] = codec
        return unique


def _limit_axes(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that a container can hold: the structure says which shape it has."""
    if array.ndim <= MAX_AXES:
        return array
    return array.reshape(-1)


def _codec_for(dtype: DType, nbytes: int) -> Codec | None:
    """Return the codec for a region, or None to choose it by a sample."""
    if nbytes < _SMALL_BYTES:
        return Raw()
    if dtype.is_float and dtype.itemsize > 1:
        return Planes(floating=dtype.is_hidden_float or None)
    if dtype.is_complex:
        return Planes()
    return None


def write_native(
    path: str | os.PathLike[str],
    state: Any,
    metadata: Any = None,
    parent: Parent | None = None,
    threads: int | None = None,
    *,
    compress: bool = True,
) -> Written:
    """Write a state to a file, durably and atomically; blocks until it is done.

    Args:
        path: The file to create or replace.
        state: Nested dicts, lists, tuples and TensorDicts of tensors, arrays and plain values; or a `Flat` one.
        metadata: Anything of plain values that should be readable without the tensors.
        parent: Store only what changed since this checkpoint.
        threads: How many threads encode; by default one per core.
        compress: Whether to pack what is not stored against the parent; checksums are there in any case.

    Raises:
        UnsupportedStateError: If the state holds anything that cannot be stored as data.
        WriteError: If the file cannot be written.
    """
    if not isinstance(state, Flat):
        state = flatten_state(state)
    described = flatten_state(metadata, ("metadata",))
    entries = _Entries()
    # Arrays come first in the file, then the memory of tensors: golden files have this order.
    entries.add_arrays(state.tree)
    entries.add_arrays(described.tree)
    entries.add_tensors(state.tree, state.regions)
    entries.add_tensors(described.tree, described.regions)
    if not compress:
        entries.codecs = dict.fromkeys(entries.codecs, Raw())
    content = Content(entries.arrays, _find_moments(state, entries.entry_of))
    parents: tuple[str, ...] = ()
    with write_container(path, kind=KIND, threads=threads) as writer:
        if parent:
            same, predicted = _add_changes(writer, content, entries.codecs, parent.content)
        else:
            for name, array in content.arrays.items():
                writer.add(name, array, entries.codecs[name])
        writer.set("state", state.tree.structure)
        writer.set("metadata", described.tree.structure)
        if parent:
            parents = (parent.identity, *parent.parents)
            relative = os.path.relpath(parent.path, Path(path).parent)
            writer.set(
                "parent",
                {
                    "file": relative,
                    "identity": parent.identity,
                    "depth": len(parents),
                    "same": same,
                    "predicted": {name: recipe.to_json() for name, recipe in predicted.items()},
                },
            )
    return Written(entries.raw_bytes, writer.file_bytes, writer.identity, parents, content)


def _find_moments(state: Flat, entry_of: Mapping[Key, str]) -> dict[str, Moments]:
    """Find the moments of Adam in a state, if it has any."""
    if not any(key[-1] == "exp_avg" for key in entry_of if key):
        return {}
    # Of the tensors, only the step counters are looked at.
    tensors = iter(range(len(state.regions.views)))
    leaves: list[Any] = []
    for _, node in state.tree.nodes:
        leaves.append(None)
        if node[TAG] == "tensor":
            position = next(tensors)
            if not node["shape"]:
                leaves[-1] = state.regions.scalar(position)
    return find_moments(unflatten(state.tree.structure, leaves), entry_of)


def _add_changes(
    writer: ContainerWriter, content: Content, codecs: Mapping[str, Codec | None], old: Content
) -> tuple[list[str], dict[str, Recipe]]:
    """Add what differs from the parent; returns what is the same, and what was stored against a prediction."""
    same: list[str] = []
    predicted: dict[str, Recipe] = {}
    moments = {key: one for key, one in content.moments.items() if content.arrays[one.first].nbytes >= _SMALL_BYTES}
    candidates = recipes(content.arrays, moments, old.arrays, old.moments)
    for name, array in content.arrays.items():
        before = old.arrays.get(name)
        if before is None or (before.dtype, before.shape) != (array.dtype, array.shape):
            writer.add(name, array, codecs[name])
        elif _equal(array, before):
            same.append(name)
        elif array.nbytes < _SMALL_BYTES:
            writer.add(name, array, codecs[name])
        else:
            plain = codecs[name] or choose_codec(array)
            codec, recipe = _best(name, content, old, plain, candidates.get(name, []))
            reference: Reference | None = before if codec.needs_reference else None
            if recipe is not None:
                predicted[name] = recipe
                reference = prediction(recipe, recipe_inputs(recipe, old.arrays, content.arrays))
            writer.add(name, array, codec, reference)
    return same, predicted


def _best(
    name: str, content: Content, old: Content, plain: Codec, candidates: list[Recipe]
) -> tuple[Codec, Recipe | None]:
    """Choose on a sample: the codec for the array as it is, its difference to the parent, or to a prediction."""
    array = content.arrays[name]
    part = sample(array)
    codec = Difference(floating=plain.floating if isinstance(plain, Planes) else None)
    options: list[tuple[int, Codec, Recipe | None]] = [
        (len(plain.encode(part)), plain, None),
        (len(codec.against(sample(old.arrays[name])).encode(part)), codec, None),
    ]
    for recipe in candidates:
        arrays = recipe_inputs(recipe, old.arrays, content.arrays)
        if all((item.dtype, item.shape) == (np.dtype(np.float32), array.shape) for item in arrays):
            guess = apply(recipe, [sample(item) for item in arrays])
            options.append((len(codec.against(guess).encode(part)), codec, recipe))
    _, chosen, recipe_or_none = min(options, key=lambda option: option[0])
    return chosen, recipe_or_none


def _equal(first: NDArray[Any], second: NDArray[Any]) -> bool:
    return bool(np.array_equal(first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8)))


class NativeFile(NativeReader):
    """Reads a native checkpoint; a delta opens its parents as it needs them.

    Args:
        path: The file.

    Raises:
        CorruptFileError: If it is not a sound native checkpoint.
    """

    @property
    def metadata(self) -> Any:
        """What was saved as metadata."""
        with naming(self.container.path):
            return self._decode(self.container.values.get("metadata"))

    def load(self, keys: Collection[str] | None = None, drop: Collection[str] = ()) -> Any:
        """Read the state, or a part of it; only the tensors in that part are read.

        Args:
            keys: Read only the branches whose names match one of these patterns.
            drop: Leave out the branches whose names match one of these patterns.
        """
        with naming(self.container.path):
            structure = self.structure
            if keys is not None:
                structure = select(structure, matching(tuple(keys)))
                if structure is None:
                    raise KeyError(f"{self.container.path}: nothing in it matches {', '.join(map(repr, keys))}")
            if drop:
                structure = drop_branches(structure, matching(tuple(drop)))
            return self._decode(structure)

    def _decode(self, structure: Any) -> Any:
        """Read the memory that a structure refers to, and build the values."""
        leaves = list(leaves_of(structure))
        names = {node["entry"] for _, node in leaves if "entry" in node}
        memory = self.read_many(sorted(names))
        return unflatten(structure, _build_leaves(leaves, memory), torch=TORCH)


def _build_leaves(leaves: Sequence[tuple[Leaf, Any]], memory: Mapping[str, NDArray[Any]]) -> list[Any]:
    """Return the arrays and tensors of a structure; tensors of the same entry are tied."""
    values: list[Any] = []
    pieces = [region_of(array) for array in memory.values()]
    number_of = {name: number for number, name in enumerate(memory)}
    views: list[View] = []
    for leaf, node in leaves:
        content = _content(node, memory)
        check_fits(leaf, node, content.nbytes)
        if leaf.is_array:
            values.append(content.view(leaf.carrier).reshape(leaf.shape))
            continue
        if "entry" in node:
            number = number_of[node["entry"]]
        else:
            number = len(pieces)
            pieces.append(region_of(content))
        stride = tuple(node.get("stride") or contiguous_strides(leaf.shape))
        views.append(View(number, node.get("offset", 0), TORCH.dtype(leaf.dtype), leaf.shape, stride))
        values.append(None)
    tensors = iter(Regions(pieces, views).tensors())
    for position, (leaf, node) in enumerate(leaves):
        if not leaf.is_array:
            values[position] = with_flags(next(tensors), node)
    return values


def _content(node: Mapping[str, Any], memory: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    if "entry" in node:
        return memory[node["entry"]].reshape(-1).view(np.uint8)
    # A bytearray, because the tensors of a state can be written to.
    return np.frombuffer(bytearray.fromhex(node["hex"]), np.uint8)
