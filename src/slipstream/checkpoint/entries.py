"""Plan the entries of a native checkpoint: which memory of a state goes where.

A state is a set of regions of memory (`slipstream.tensors.Regions`). Large ones become an entry of the container each.
Small ones share entries, because an entry has a cost whatever its size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checkpoint.delta import MIN_PACKED_BYTES
from slipstream.checkpoint.layout import TABLE, RegionTable, digest_of
from slipstream.checkpoint.reader import Bytes
from slipstream.codecs import Codec, Planes, Raw
from slipstream.schema.dtypes import DType
from slipstream.schema.flatten import Tree, flatten
from slipstream.schema.nodes import TAG, Key, name_of
from slipstream.schema.structure import contiguous_strides
from slipstream.schema.values import Json
from slipstream.store.index import DTYPES as CONTAINER_DTYPES
from slipstream.tensors import Regions, View, dtype_info

# As much as one chunk. Loading a single small tensor decodes no more than this.
_GROUP_BYTES = 1 << 20


@dataclass(frozen=True)
class Flat:
    """A state that is ready to be written.

    Attributes:
        tree: Its structure and its arrays. Tensors may be missing from its leaves.
        regions: The memory of its tensors, in their order. It must be on the host.
    """

    tree: Tree
    regions: Regions


def flatten_state(state: Any) -> Flat:
    """Split a state into structure and memory without copying it; tensors on other devices are copied to the host.

    Raises:
        UnsupportedStateError: If the state contains anything that cannot be stored as data.
    """
    tree = flatten(state)
    tensors = [leaf.cpu() for leaf in tree.leaves if isinstance(leaf, torch.Tensor)]
    return Flat(tree, Regions.of(tensors))


@dataclass
class PlannedRegion:
    """A piece of memory to store, and the nodes that see it."""

    name: str
    content: Bytes
    dtype: np.dtype[Any]
    codec: Codec | None
    nodes: list[dict[str, Json]]

    @property
    def last_name(self) -> str:
        """The last part of the name, such as ``exp_avg``."""
        return self.name.rpartition("/")[2]


@dataclass
class PlannedEntry:
    """An entry of the container: one large region, or several small ones."""

    name: str
    array: NDArray[Any]
    codec: Codec | None
    regions: list[PlannedRegion]
    digests: tuple[bytes, ...] = ()


def find_regions(state: Flat) -> list[PlannedRegion]:
    """Return the distinct memory of a state, and say in the nodes of tensors how they see it."""
    regions: list[PlannedRegion] = []
    # By number in `state.regions`. Tensors that share memory come back tied.
    seen: dict[int, PlannedRegion] = {}
    views = iter(state.regions.views)
    for (key, node), leaf in zip(state.tree.nodes, state.tree.leaves, strict=True):
        if node[TAG] == "array":
            if leaf.nbytes:
                regions.append(_array_region(key, node, leaf))
            continue
        view = next(views)
        _describe_view(node, view)
        # An empty tensor has no memory.
        if view.region < 0:
            continue
        if view.region in seen:
            seen[view.region].nodes.append(node)
            continue
        piece = state.regions.pieces[view.region]
        info = dtype_info(piece.dtype)
        region = PlannedRegion(name_of(key), piece.content(), info.carrier, _codec_for(info), [node])
        seen[view.region] = region
        regions.append(region)
    return regions


def _array_region(key: Key, node: dict[str, Json], array: NDArray[Any]) -> PlannedRegion:
    dtype = array.dtype
    # Containers hold numbers only. Text and dates are stored as bytes; the structure says what they are.
    if dtype.str not in CONTAINER_DTYPES:
        dtype = np.dtype(np.uint8)
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    codec: Codec | None = None
    if dtype.kind in "fc":
        codec = Planes()
    return PlannedRegion(name_of(key), content, dtype, codec, [node])


def _describe_view(node: dict[str, Json], view: View) -> None:
    """Say how a tensor sees its region, where that is not obvious."""
    if view.offset:
        node["offset"] = view.offset
    if view.stride != contiguous_strides(view.shape):
        node["stride"] = list(view.stride)


@functools.cache
def _codec_for(dtype: DType) -> Codec | None:
    """Return the codec for tensors of a dtype, or None to choose it by a sample."""
    if dtype.is_float and dtype.itemsize > 1:
        return Planes(floating=dtype.is_hidden_float or None)
    if dtype.is_complex:
        return Planes()
    return None


def plan_entries(regions: Sequence[PlannedRegion], small_bytes: int, *, compress: bool) -> list[PlannedEntry]:
    """Assign regions to entries: large ones alone, small ones together with others of their kind."""
    entries: list[PlannedEntry] = []
    small: dict[tuple[str, Codec | None], list[PlannedRegion]] = {}
    names = _Names()
    for region in regions:
        if region.content.nbytes < small_bytes:
            small.setdefault((region.dtype.str, region.codec), []).append(region)
            continue
        array = region.content.view(region.dtype)
        entries.append(PlannedEntry(names.unique(region.name), array, region.codec, [region]))
    for alike in small.values():
        for group in _split(alike):
            array = np.concatenate([region.content for region in group]).view(group[0].dtype)
            codec = group[0].codec
            if array.nbytes < MIN_PACKED_BYTES:
                codec = Raw()
            entries.append(PlannedEntry(names.unique("small"), array, codec, group))
    if not compress:
        for entry in entries:
            entry.codec = Raw()
    return entries


def _split(regions: list[PlannedRegion]) -> Iterator[list[PlannedRegion]]:
    """Yield small regions of one dtype in groups, none larger than a chunk."""
    # Regions whose names end alike, such as the second moments of Adam, are similar and compress better together.
    regions.sort(key=operator.attrgetter("last_name"))
    group: list[PlannedRegion] = []
    size = 0
    for region in regions:
        if size + region.content.nbytes > _GROUP_BYTES:
            yield group
            group = []
            size = 0
        group.append(region)
        size += region.content.nbytes
    yield group


@dataclass
class _Names:
    """Makes the names of entries unique."""

    taken: set[str] = field(default_factory=lambda: {TABLE})

    def unique(self, name: str) -> str:
        """Return a name that no other entry has, in constant time on average."""
        candidate = name
        while candidate in self.taken:
            candidate = f"{name}#{len(self.taken)}"
        self.taken.add(candidate)
        return candidate


def make_table(entries: Sequence[PlannedEntry]) -> RegionTable:
    """Make the table of regions, and write the number of its region into every node."""
    numbers: list[int] = []
    starts: list[int] = []
    sizes: list[int] = []
    digests: list[bytes] = []
    for number, entry in enumerate(entries):
        start = 0
        for region in entry.regions:
            for node in region.nodes:
                node["region"] = len(digests)
            numbers.append(number)
            starts.append(start)
            sizes.append(region.content.nbytes)
            digests.append(digest_of(region.content))
            start += region.content.nbytes
        entry.digests = tuple(digests[-len(entry.regions) :])
    return RegionTable(np.array(numbers, np.int64), np.array(starts, np.int64), np.array(sizes, np.int64), digests)
