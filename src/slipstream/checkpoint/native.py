"""The native checkpoint format: write a state as the distinct memory of its tensors, and build it again.

``docs/formats/checkpoint.md`` describes the bytes. `slipstream.checkpoint.entries` plans which memory goes where,
`slipstream.checkpoint.layout` is the table of regions, and `slipstream.checkpoint.reader` reads entries.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checkpoint.delta import MIN_PACKED_BYTES, EntryContent, Parent, choose_difference
from slipstream.checkpoint.entries import Flat, PlannedEntry, find_regions, flatten_state, make_table, plan_entries
from slipstream.checkpoint.formats import Written
from slipstream.checkpoint.layout import KIND, TABLE, Header, identify
from slipstream.checkpoint.reader import Bytes, NativeReader
from slipstream.codecs import Codec, Planes, Raw, choose_codec
from slipstream.errors import UnsupportedStateError, naming
from slipstream.schema.flatten import Tree, flatten
from slipstream.schema.nodes import name_of
from slipstream.schema.structure import Leaf, contiguous_strides, drop_keys, leaves_of, select_keys
from slipstream.schema.unflatten import unflatten
from slipstream.schema.values import Json
from slipstream.store.index import dump_json
from slipstream.store.writer import DEFAULT_CHUNK_BYTES, ContainerWriter, write_container
from slipstream.tensors import TORCH, Regions, View, region_of, with_flags
from slipstream.threads import background_threads

if TYPE_CHECKING:
    from slipstream.checkpoint.snapshot import Snapshot

# Smaller regions share an entry, because packing 256 KiB takes 1.5 times as long per byte as packing 1 MiB. If nothing
# is packed, only the cost of an entry counts.
_SMALL_BYTES = 512 << 10
_SMALL_RAW_BYTES = 64 << 10
# A delta that shares less than this with its parent is not worth the dependency.
_MIN_SHARED_BYTES = 64 << 10


@dataclass(frozen=True)
class StoredState(Written):
    """A state that was written in the native format.

    Attributes:
        header: What the file says about itself.
        content: Its entries by name, for a delta to refer to.
    """

    header: Header
    content: Mapping[str, EntryContent]


@dataclass(frozen=True)
class NativeFormat:
    """Writes snapshots as native checkpoints, each complete in itself.

    Attributes:
        compress: Whether to pack the content. Checksums are there in any case.
    """

    compress: bool = True
    opaque = False

    def check(self, tree: Tree) -> None:
        """Accept every tree: `flatten` refuses what cannot be stored as data."""

    def write(self, path: Path, snapshot: Snapshot, metadata: Json) -> Written:
        """Write a snapshot; see `CheckpointFormat`."""
        return write_native(path, snapshot.flat(), metadata, threads=background_threads(), compress=self.compress)


def encode_metadata(metadata: Any) -> Json:
    """Return metadata as JSON, copied now. Scalars of NumPy and torch become Python numbers.

    Raises:
        UnsupportedStateError: If it contains larger arrays or tensors, or anything that cannot be stored as data.
    """
    tree = flatten(_with_plain_scalars(metadata), key=("metadata",))
    if tree.leaves:
        name = name_of(tree.nodes[0][0])
        raise UnsupportedStateError(
            f"{name} is a tensor or array, and metadata is for plain values; pass value.item() or value.tolist()"
        )
    return tree.structure


def _with_plain_scalars(value: Any) -> Any:
    """Return nested metadata in which everything with a single number is that number."""
    if isinstance(value, dict):
        return {key: _with_plain_scalars(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_with_plain_scalars, value))
    if isinstance(value, (np.number, np.bool_)):
        return value.item()
    if isinstance(value, (torch.Tensor, np.ndarray)) and not value.shape:
        return value.item()
    return value


def write_native(
    path: str | os.PathLike[str],
    state: Any,
    metadata: Json = None,
    parent: Parent | None = None,
    *,
    sequence: int | None = None,
    thinned: Sequence[str] = (),
    threads: int | None = None,
    compress: bool = True,
) -> StoredState:
    """Write a state to a file, durably and atomically; blocks until it is done.

    Args:
        path: The file to create or replace.
        state: Nested dicts, lists, tuples and TensorDicts of tensors, arrays and plain values; or a `Flat` one.
        metadata: What `encode_metadata` returned.
        parent: Store only what changed since this checkpoint.
        sequence: The number of this save among those of its folder.
        thinned: What was removed from the state, in words.
        threads: How many threads encode; by default one per core.
        compress: Whether to pack what is not stored against the parent.

    Raises:
        UnsupportedStateError: If the state contains anything that cannot be stored as data.
        WriteError: If the file cannot be written.
    """
    draft = _draft(state, metadata, sequence=sequence, thinned=thinned, compress=compress)
    # What a delta takes is not known. A packed state takes about four fifths. Freeing what is not needed takes time.
    expected_bytes = 0
    if parent is None:
        expected_bytes = sum(entry.array.nbytes for entry in draft.entries)
    if compress:
        expected_bytes = expected_bytes * 3 // 4
    with write_container(path, kind=KIND, threads=threads, expected_bytes=expected_bytes) as writer:
        header = _add_draft(writer, draft, parent)
    content = {entry.name: EntryContent(entry.array, entry.digests) for entry in draft.entries}
    return StoredState(Path(path), draft.raw_bytes, writer.file_bytes, header, content)


def encode_native(state: Any, *, threads: int | None = None, compress: bool = True) -> bytes:
    """Return the bytes of the file that `write_native` writes, for the same arguments.

    Raises:
        UnsupportedStateError: If the state contains anything that cannot be stored as data.
    """
    draft = _draft(state, None, compress=compress)
    file = io.BytesIO()
    writer = ContainerWriter(file, KIND, DEFAULT_CHUNK_BYTES, threads, verify=False)
    _add_draft(writer, draft, None)
    writer.finish()
    return file.getvalue()


@dataclass(frozen=True)
class _Draft:
    """What a checkpoint will contain, before it is known how its entries are stored.

    Attributes:
        entries: The memory of the state.
        rows: The table of regions.
        header: What the file says about itself, as that of a whole checkpoint.
        texts: State and metadata as JSON.
        raw_bytes: Size of the regions.
    """

    entries: Sequence[PlannedEntry]
    rows: NDArray[np.uint64]
    header: Header
    texts: Mapping[str, str]
    raw_bytes: int


def _draft(
    state: Any, metadata: Json, *, sequence: int | None = None, thinned: Sequence[str] = (), compress: bool
) -> _Draft:
    """Plan a checkpoint; see `write_native` for the arguments."""
    if not isinstance(state, Flat):
        state = flatten_state(state)
    small_bytes = _SMALL_BYTES
    if not compress:
        small_bytes = _SMALL_RAW_BYTES
    regions = find_regions(state)
    entries = plan_entries(regions, small_bytes, compress=compress)
    rows = make_table(entries).to_array()
    texts = {"state": dump_json(state.tree.structure), "metadata": dump_json(metadata)}
    header = Header(
        identity=identify(rows, "\n".join(texts.values()).encode()),
        entries=tuple(entry.name for entry in entries),
        sequence=sequence,
        thinned=tuple(thinned),
    )
    return _Draft(entries, rows, header, texts, sum(region.content.nbytes for region in regions))


def _add_draft(writer: ContainerWriter, draft: _Draft, parent: Parent | None) -> Header:
    """Add everything in a draft to a container. Returns the complete header."""
    header = _add_entries(writer, draft.entries, draft.header, parent)
    writer.add(TABLE, draft.rows, Raw())
    writer.set(KIND, header.to_json())
    for name, text in draft.texts.items():
        writer.set_encoded(name, text)
    return header


@dataclass(frozen=True)
class _Choice:
    """How an entry is stored: with a codec, against the entry of the parent, or not at all if that is the same."""

    entry: PlannedEntry
    codec: Codec | None
    before: EntryContent | None = None

    @property
    def is_same(self) -> bool:
        """Whether the parent has the same entry."""
        return self.before is not None and self.codec is None


def _add_entries(
    writer: ContainerWriter, entries: Sequence[PlannedEntry], header: Header, parent: Parent | None
) -> Header:
    """Write the entries, those that a parent has by reference or as a difference. Returns the complete header."""
    choices = [_choose(entry, parent) for entry in entries]
    shared_bytes = sum(choice.entry.array.nbytes for choice in choices if choice.before is not None)
    # What has little in common with its parent is better off without it.
    if parent is not None and shared_bytes < _MIN_SHARED_BYTES:
        parent = None
        choices = [_choose(entry, None) for entry in entries]
    same = []
    for choice in choices:
        if choice.is_same:
            same.append(choice.entry.name)
            continue
        reference = None
        if choice.before is not None:
            reference = choice.before.array
        writer.add(choice.entry.name, choice.entry.array, choice.codec, reference)
    if parent is None:
        return header
    return Header(header.identity, header.entries, frozenset(same), parent.ancestors, header.sequence, header.thinned)


def _choose(entry: PlannedEntry, parent: Parent | None) -> _Choice:
    """Decide how to store an entry."""
    before = None
    if parent is not None:
        before = parent.find(entry.name, entry.array)
    if before is not None and before.digests == entry.digests:
        return _Choice(entry, None, before)
    codec = entry.codec or choose_codec(entry.array)
    if before is not None:
        difference = choose_difference(entry.array, before.array, codec)
        if difference is not None:
            return _Choice(entry, difference, before)
    return _Choice(entry, codec)


def rewrite_whole(path: str | os.PathLike[str], threads: int | None = None, *, compress: bool = True) -> int:
    """Replace a delta by a whole checkpoint with the same content and identity; returns the size of the file.

    Deltas that are stored against it stay valid. Only one entry at a time is in memory.

    Raises:
        CorruptFileError: If the file or a parent is damaged or missing. The file is unchanged then.
        WriteError: If the file cannot be written.
    """
    with NativeReader(path) as file, write_container(path, kind=KIND, threads=threads) as writer:
        old = file.header
        for name in old.entries:
            array = file.read_entry(name, threads)
            codec: Codec | None = Raw()
            if compress and array.nbytes >= MIN_PACKED_BYTES:
                codec = _whole_codec(file.entry(name).codec, array)
            writer.add(name, array, codec)
        writer.add(TABLE, file.table.to_array(), Raw())
        header = Header(old.identity, old.entries, sequence=old.sequence, thinned=old.thinned)
        writer.set(KIND, header.to_json())
        for name in ("state", "metadata"):
            writer.set_encoded(name, dump_json(file.container.values.get(name)))
    return writer.file_bytes


def _whole_codec(codec: Codec, array: NDArray[Any]) -> Codec | None:
    """Return the codec that stores an entry whole, or None to choose it by a sample."""
    if not codec.needs_reference:
        return codec
    # Differences remember whether integers are floats that NumPy lacks.
    floating = getattr(codec, "floating", None)
    if floating or array.dtype.kind in "fc":
        return Planes(floating=floating)
    return None


class NativeFile(NativeReader):
    """Reads a native checkpoint, and builds its state with real tensors.

    Args:
        path: The file; or an open container, such as one in memory, which `close` closes.

    Raises:
        CorruptFileError: If it is not an intact native checkpoint.
    """

    @property
    def metadata(self) -> Any:
        """What was saved as metadata."""
        with naming(self.container.path):
            return unflatten(self.container.values.get("metadata"), [], torch=TORCH)

    def load(self, keys: str | Collection[Any] | None = None, drop: str | Collection[Any] = ()) -> Any:
        """Read the state, or a part of it. Only the entries that contain this part are read.

        Args:
            keys: Read only these branches; see `slipstream.checkpoint.load.load_checkpoint`.
            drop: Leave out these branches.

        Raises:
            KeyError: If a key matches nothing.
            CorruptFileError: If something is damaged. Names the tensor.
        """
        with naming(self.container.path):
            structure = self.structure
            if keys is not None:
                structure = select_keys(structure, keys)
            if drop:
                structure = drop_keys(structure, drop)
            return self.build(structure, list(leaves_of(structure)))

    def build(self, structure: Json, leaves: Sequence[tuple[Leaf, Json]]) -> Any:
        """Read a structure that was made from this file's, whose leaves are known already; otherwise as `load`."""
        with naming(self.container.path):
            memory = self.read_regions(leaves)
            return unflatten(structure, _build_leaves(leaves, memory), torch=TORCH)

    def flat(self, structure: Json) -> Flat:
        """Read a structure that was made from this file's: its memory, ready to be written again."""
        with naming(self.container.path):
            leaves = list(leaves_of(structure))
            memory = self.read_regions(leaves)
            values = _build_leaves(leaves, memory)
            return flatten_state(unflatten(structure, values, torch=TORCH))


def _build_leaves(leaves: Sequence[tuple[Leaf, Json]], memory: Mapping[int, Bytes]) -> list[Any]:
    """Return the arrays and tensors of a structure. Tensors that see the same region are tied."""
    pieces = {region: number for number, region in enumerate(memory)}
    values: list[Any] = []
    views: list[View] = []
    for leaf, node in leaves:
        region = node.get("region")
        if leaf.is_array:
            content = memory.get(region, _NOTHING)
            values.append(content.view(leaf.carrier).reshape(leaf.shape))
            continue
        stride = tuple(node.get("stride") or contiguous_strides(leaf.shape))
        # An empty tensor has no region.
        number = pieces.get(region, -1)
        views.append(View(number, node.get("offset", 0), TORCH.dtype(leaf.dtype), leaf.shape, stride))
        values.append(None)
    tensors = iter(Regions([region_of(content) for content in memory.values()], views).tensors())
    for position, (leaf, node) in enumerate(leaves):
        if not leaf.is_array:
            values[position] = with_flags(next(tensors), node)
    return values


_NOTHING = np.empty(0, np.uint8)
