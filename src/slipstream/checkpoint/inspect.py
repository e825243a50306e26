"""List what is in a checkpoint, or in a folder of them. Native files are read without torch, which is slow to import.

`slipstream.checkpoint.verify` compares the content with its checksums.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.checkpoint.finding import find_sources, open_checkpoint
from slipstream.checkpoint.folder import FILE_ERRORS
from slipstream.checkpoint.formats import FormatName, find_format
from slipstream.checkpoint.layout import Ancestor
from slipstream.checkpoint.reader import NativeReader
from slipstream.errors import CorruptFileError, StoreError, naming
from slipstream.schema.structure import Leaf, check_fits, leaves_of
from slipstream.store.container import Container
from slipstream.store.index import Entry
from slipstream.store.urls import ObjectPath, as_path

# What is shown in place of a codec.
_SAME = "same"
_TIED = "tied"
_NONE = "-"


@dataclass(frozen=True)
class TensorListing:
    """One tensor or array of a checkpoint.

    Attributes:
        name: Its key as text, such as ``"optimizer/state/0/exp_avg"``.
        dtype: Its dtype, such as ``"bfloat16"``; ``"numpy float64"`` for an array.
        shape: Its shape.
        nbytes: The size of its elements.
        codec: How it is stored: the name of a codec; ``same`` if only the parent has it; ``tied`` if it shares memory
            with a tensor above; ``-`` if it has no elements, or the format does not say.
        stored_bytes: How much of the file it takes; None if only the parent has it, if it is tied, or if the format
            does not say.
        is_packed_with_others: Whether small tensors share an entry of the file. Then `stored_bytes` is an estimate: as
            much of the entry as the tensor takes before packing.
        digest: xxh3-128 of its decoded memory as hexadecimal digits; None if the format has none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    codec: str = _NONE
    stored_bytes: int | None = None
    is_packed_with_others: bool = False
    digest: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "codec": self.codec,
            "bytes": self.nbytes,
            "stored_bytes": self.stored_bytes,
            "packed_with_others": self.is_packed_with_others,
            "digest": self.digest,
        }


@dataclass(frozen=True)
class CheckpointListing:
    """What is in one checkpoint.

    Attributes:
        path: The file.
        format: Its format.
        file_bytes: The size of the file.
        tensors: Its tensors and arrays, in the order of the state.
        raw_bytes: The memory of all tensors. Memory that several share counts once.
        metadata: What was saved as metadata, in the form that JSON can hold.
        written_by: Name and version of the program that wrote a native file.
        identity: The same for all copies of a native checkpoint.
        sequence: Its number among the saves into its folder, if a manager wrote it.
        thinned: What was removed from it after it was saved, in words.
        parents: The checkpoints that a delta is stored against, nearest first; empty for a whole checkpoint.
        same: The entries that a delta does not contain because they are equal in the parent.
    """

    path: Path
    format: FormatName
    file_bytes: int
    tensors: tuple[TensorListing, ...]
    raw_bytes: int
    metadata: Any = None
    written_by: str | None = None
    identity: str | None = None
    sequence: int | None = None
    thinned: tuple[str, ...] = ()
    parents: tuple[Ancestor, ...] = ()
    same: tuple[str, ...] = ()

    @property
    def step(self) -> Any:
        """The step in the metadata, or None."""
        return self._known("step")

    @property
    def metrics(self) -> Any:
        """The metrics in the metadata, or None."""
        return self._known("metrics")

    def _known(self, name: str) -> Any:
        # Any value can be metadata. Managers save a dict.
        if isinstance(self.metadata, dict):
            return self.metadata.get(name)
        return None

    def summary(self) -> dict[str, Any]:
        """Return all but the tensors as a JSON object."""
        parent = None
        if self.parents:
            nearest = self.parents[0]
            depth = len(self.parents)
            parent = {"file": nearest.file, "identity": nearest.identity, "depth": depth, "same": list(self.same)}
        return {
            "file": str(self.path),
            "format": self.format,
            "file_bytes": self.file_bytes,
            "written_by": self.written_by,
            "identity": self.identity,
            "step": self.step,
            "sequence": self.sequence,
            "metrics": self.metrics,
            "metadata": self.metadata,
            "thinned": list(self.thinned),
            "parent": parent,
            "parents": [parent.file for parent in self.parents],
            "bytes": self.raw_bytes,
        }

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**self.summary(), "tensors": [tensor.to_json() for tensor in self.tensors]}


@dataclass(frozen=True)
class FolderListing:
    """The native checkpoints of a folder.

    Attributes:
        path: The folder.
        checkpoints: Those that can be read, in the order in which they were saved. Files that no manager wrote have no
            sequence number and come last.
        unreadable: Why the other files cannot be read.
    """

    path: Path
    checkpoints: tuple[CheckpointListing, ...]
    unreadable: Mapping[Path, str]

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        problems = [{"file": str(path), "problem": problem} for path, problem in self.unreadable.items()]
        return {
            "folder": str(self.path),
            "checkpoints": [checkpoint.summary() for checkpoint in self.checkpoints],
            "unreadable": problems,
        }


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointListing:
    """List the tensors of a checkpoint of any format, and what was saved along with them.

    Of a native file only the index and the table of regions are read, whatever its size; the parents of a delta need
    not be there. Other formats have no index that says everything, so they are loaded, without running code from them.

    Args:
        path: The file, or its URL in an object store.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is damaged, or not a checkpoint.
        FormatVersionError: If a newer release wrote it.
        ImportError: If it is a safetensors file, and that package is not installed.

    Example:
        >>> import torch
        >>> from slipstream import AsyncCheckpointSaver
        >>> with AsyncCheckpointSaver() as saver:
        ...     _ = saver.save_async({"w": torch.ones(3, 2)}, "/tmp/slipstream-doc/inspect.slip", format="native")
        >>> [(tensor.name, tensor.shape) for tensor in inspect_checkpoint("/tmp/slipstream-doc/inspect.slip").tensors]
        [('w', (3, 2))]
    """
    path = as_path(path)
    if isinstance(path, ObjectPath):
        return _list_native(open_checkpoint(path))
    # By content, not by name: files get renamed.
    found = find_format(path)
    if found == "native":
        return _list_native(path)
    return _list_loaded(path, found)


def inspect_folder(folder: str | os.PathLike[str]) -> FolderListing:
    """List the native checkpoints of a folder: all files ``*.slip`` except containers of another kind.

    Files that cannot be read are listed with the reason, and do not keep the others from being listed.

    Args:
        folder: The folder, or the URL of a run in an object store.

    Raises:
        FileNotFoundError: If there is no such folder, or no such file in it.
        StoreError: If the store cannot be read.
    """
    folder = as_path(folder)
    checkpoints = []
    sources, problems = find_sources(folder)
    unreadable = {path: str(problem).removeprefix(f"{path}: ") for path, problem in problems.items()}
    for path, open_source in sources.items():
        try:
            checkpoints.append(_list_native(open_source()))
        except StoreError:
            raise
        except FILE_ERRORS as error:
            # The caller has the path already.
            unreadable[path] = str(error).removeprefix(f"{path}: ")
    checkpoints.sort(key=_save_order)
    return FolderListing(folder, tuple(checkpoints), unreadable)


def _save_order(listing: CheckpointListing) -> tuple[bool, int, str]:
    return listing.sequence is None, listing.sequence or 0, listing.path.name


def _list_native(source: Path | Container) -> CheckpointListing:
    with NativeReader(source) as reader, naming(reader.container.path):
        path = reader.container.path
        header = reader.header
        return CheckpointListing(
            path=path,
            format="native",
            file_bytes=reader.container.file_bytes,
            tensors=tuple(_list_tensors(reader)),
            raw_bytes=int(reader.table.sizes.sum()),
            metadata=_as_json(reader.metadata),
            written_by=reader.container.written_by,
            identity=header.identity,
            sequence=header.sequence,
            thinned=header.thinned,
            parents=header.parents,
            same=tuple(sorted(header.same)),
        )


def _list_tensors(reader: NativeReader) -> list[TensorListing]:
    own = reader.container.entries
    table = reader.table
    num_regions = np.bincount(table.entries, minlength=len(reader.header.entries))
    tensors = []
    seen: set[int] = set()
    for leaf, node in leaves_of(reader.structure):
        region = node.get("region")
        # A tensor without elements has no memory.
        if region is None:
            tensors.append(TensorListing(leaf.name, _dtype_of(leaf), leaf.shape, leaf.nbytes))
            continue
        if region >= len(table):
            raise CorruptFileError(f"{leaf.name[:200]!r} is in region {region} of {len(table)}")
        region_bytes = int(table.sizes[region])
        check_fits(leaf, node, region_bytes)
        # An entry that the file lacks is in the parent: the reader has checked that.
        number = int(table.entries[region])
        entry = own.get(reader.header.entries[number])
        codec = _codec_of(entry)
        stored_bytes = None
        # Only the first tensor of a region counts as stored.
        if region in seen:
            codec = _TIED
        elif entry is not None:
            stored_bytes = _share_of(entry, region_bytes)
        seen.add(region)
        tensors.append(
            TensorListing(
                name=leaf.name,
                dtype=_dtype_of(leaf),
                shape=leaf.shape,
                nbytes=leaf.nbytes,
                codec=codec,
                stored_bytes=stored_bytes,
                is_packed_with_others=stored_bytes is not None and bool(num_regions[number] > 1),
                digest=table.digests[region].hex(),
            )
        )
    return tensors


def _share_of(entry: Entry, nbytes: int) -> int:
    """Return how much of a stored entry a part of it takes; all of it if the part is the whole entry."""
    return round(entry.stored_bytes * nbytes / max(entry.nbytes, 1))


def _codec_of(entry: Entry | None) -> str:
    """Return the codec of an entry, or ``same`` if the file does not contain it."""
    if entry is None:
        return _SAME
    return entry.codec.name


def _dtype_of(leaf: Leaf) -> str:
    if leaf.is_array:
        return f"numpy {leaf.carrier.name}"
    return leaf.dtype


def _list_loaded(path: Path, found: FormatName) -> CheckpointListing:
    """List a checkpoint of another format by loading it."""
    # Imported here, because it imports torch.
    from slipstream.checkpoint.leaves import dtype_of, memory_key, named_leaves  # noqa: PLC0415
    from slipstream.checkpoint.load import load_file  # noqa: PLC0415

    tensors = []
    raw_bytes = 0
    seen: set[Any] = set()
    for name, leaf in named_leaves(load_file(path)).items():
        nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        codec = _NONE
        # As in native files, memory that several tensors see counts once.
        memory = memory_key(leaf)
        if memory is not None and memory in seen:
            codec = _TIED
        else:
            raw_bytes += nbytes
        seen.add(memory)
        tensors.append(TensorListing(name, dtype_of(leaf), tuple(leaf.shape), nbytes, codec))
    return CheckpointListing(path, found, path.stat().st_size, tuple(tensors), raw_bytes)


def _as_json(value: Any) -> Any:
    """Return metadata in the form that JSON can hold. What JSON lacks becomes text."""
    if isinstance(value, dict):
        return {str(key): _as_json(member) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_as_json(member) for member in value]
    # NumPy's numbers print as themselves, but JSON does not take them.
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)
