"""Read the entries of a native checkpoint, following a delta to its parents. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slipstream.checkpoint.layout import KIND, MAX_LINKS, TABLE, Header, RegionTable, digest_of
from slipstream.codecs import Raw
from slipstream.errors import CorruptFileError, FormatVersionError, naming
from slipstream.memory import machine_bytes
from slipstream.schema.structure import Leaf, check_fits, leaves_of
from slipstream.schema.unflatten import unflatten
from slipstream.schema.values import Json
from slipstream.store.container import Container
from slipstream.store.header import MAGIC
from slipstream.store.index import Entry
from slipstream.store.local import open_regular
from slipstream.text import list_first
from slipstream.threads import parallel_map

Bytes = NDArray[np.uint8]

# Digests of smaller regions are not worth a second thread.
_PARALLEL_BYTES = 1 << 20


class NativeReader:
    """Reads the structure and the memory of a native checkpoint. Opens the parents of a delta when it needs them.

    Args:
        path: The file.

    Raises:
        CorruptFileError: If it is not an intact native checkpoint.
        FormatVersionError: If another version of the format wrote it.

    Attributes:
        container: The file.
        header: What it says about itself.
        structure: The state as JSON.
        own: The entries in this file by name, without those that are only in the parents.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.container = Container(path)
        self._parent: Self | None = None
        self.own = self.container.entries
        try:
            with naming(path):
                self.header = self._read_header()
                self.structure: Json = self.container.values["state"]
        except (CorruptFileError, FormatVersionError):
            self.container.close()
            raise

    def _read_header(self) -> Header:
        values = self.container.values
        if self.container.kind != KIND or "state" not in values:
            raise CorruptFileError(f"is a container of kind {self.container.kind[:40]!r}, expected a checkpoint")
        header = Header.parse(values.get(KIND))
        for name in header.entries:
            if name not in self.own and name not in header.same:
                raise CorruptFileError(f"the state needs entry {name[:200]!r}, which is missing")
        return header

    @functools.cached_property
    def table(self) -> RegionTable:
        """Where the regions of the state are."""
        with naming(self.container.path):
            if TABLE not in self.own:
                raise CorruptFileError("has no table of regions")
            return RegionTable.parse(self.container.read(TABLE), len(self.header.entries))

    @property
    def metadata(self) -> Any:
        """What was saved as metadata."""
        with naming(self.container.path):
            return unflatten(self.container.values.get("metadata"), [])

    def close(self) -> None:
        """Close the file and its parents. Idempotent."""
        self.container.close()
        if self._parent is not None:
            self._parent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lineage(self) -> Iterator[NativeReader]:
        """Yield this file and its parents, nearest first.

        Raises:
            CorruptFileError: If a parent is missing, or the chain is longer than any that is written.
        """
        file: NativeReader = self
        yield file
        for _ in range(MAX_LINKS):
            if not file.header.parents:
                return
            file = file.open_parent()
            yield file
        if file.header.parents:
            raise CorruptFileError(f"{self.container.path}: has more than {MAX_LINKS} parents")

    def open_parent(self, *, intact: bool = False) -> Self:
        """Return the checkpoint that this one is stored against, found by its identity whatever its name.

        Args:
            intact: Look for it again, and skip copies whose chunks are damaged.

        Raises:
            CorruptFileError: If it is not in the folder. Names all parents that are needed.
        """
        if self._parent is None or intact:
            self._parent = self._find_parent(intact=intact)
        return self._parent

    def _find_parent(self, *, intact: bool = False) -> Self:
        """Find the parent in the folder. With `intact`, skip copies of it whose chunks are damaged."""
        wanted = self.header.parents[0]
        folder = self.container.path.parent
        hint = folder / wanted.file
        # It nearly always still has the name it had. If not, any file in the folder may be it.
        others = [path for path in sorted(folder.iterdir()) if path != hint]
        failure: OSError | None = None
        for path in [hint, *others]:
            try:
                file = self._open_if(path, wanted.identity)
                if file is not None and intact:
                    file.container.check_chunks()
            except (FileNotFoundError, CorruptFileError, FormatVersionError):
                # Deleted in the meantime, damaged, or no checkpoint. Another file may be the one.
                continue
            except OSError as error:
                # A file that cannot be read now is not known to be missing.
                failure = error
                continue
            if file is not None:
                return file
        if failure is not None:
            raise failure
        names = ", ".join(parent.file for parent in self.header.parents)
        raise CorruptFileError(
            f"{self.container.path}: contains only what changed since {wanted.file}, which is missing or damaged; "
            f"put its parents into the same folder ({names})"
        )

    def _open_if(self, path: Path, identity: str) -> Self | None:
        """Open a file if it is the checkpoint with an identity."""
        if not looks_native(path):
            return None
        file = type(self)(path)
        if file.header.identity == identity:
            return file
        file.close()
        return None

    def choose_intact_parents(self, max_links: int = MAX_LINKS) -> bool:
        """Look for an intact copy of every parent, after reading has found damage.

        Args:
            max_links: How many parents to look for at most.

        Returns:
            Whether there are parents, and an intact copy of each.
        """
        if not self.header.parents or not max_links:
            return False
        try:
            found = self.open_parent(intact=True)
        except CorruptFileError:
            return False
        return not found.header.parents or found.choose_intact_parents(max_links - 1)

    def entry(self, name: str) -> Entry:
        """Return an entry of this file, or that of a parent if it has not changed since.

        Raises:
            CorruptFileError: If there is none.
        """
        for file in self.lineage():
            if name in file.own:
                return file.own[name]
            if name not in file.header.same:
                break
        raise CorruptFileError(f"{self.container.path}: the state needs entry {name[:200]!r}, which is missing")

    def read_arrays(self, names: Collection[str], threads: int | None = None) -> dict[str, NDArray[Any]]:
        """Read entries, following references to the parents. Decodes every entry of every file at most once.

        Differences are added to the memory of their reference, so a chain takes no more memory than a whole file.

        Raises:
            CorruptFileError: If a chunk is damaged or a parent is missing.
        """
        # Walk up to the files that contain each entry whole.
        steps: list[tuple[NativeReader, list[str]]] = []
        wanted = list(names)
        lineage = self.lineage()
        while wanted:
            file = next(lineage, None)
            if file is None:
                raise CorruptFileError(f"{self.container.path}: the state needs entry {wanted[0][:200]!r} of a parent")
            steps.append((file, [name for name in wanted if name in file.own]))
            wanted = [name for name in wanted if file.needs_parent(name)]
        # Decode on the way back.
        arrays: dict[str, NDArray[Any]] = {}
        for file, own in reversed(steps):
            arrays |= file.decode(own, arrays, threads)
        return arrays

    def needs_parent(self, name: str) -> bool:
        """Return whether an entry, or what it is stored against, is in the parent."""
        if name in self.own:
            return self.own[name].codec.needs_reference
        if name not in self.header.same:
            raise CorruptFileError(f"{self.container.path}: the state needs entry {name[:200]!r}, which is missing")
        return True

    def decode(
        self, names: Collection[str], before: Mapping[str, NDArray[Any]], threads: int | None
    ) -> dict[str, NDArray[Any]]:
        """Decode entries of this file. `before` has those of the parent, and is overwritten by differences to it."""
        references = {}
        for name in names:
            entry = self.own[name]
            if not entry.codec.needs_reference:
                continue
            references[name] = before[name]
            if (entry.dtype, entry.shape) != (before[name].dtype, before[name].shape):
                raise CorruptFileError(
                    f"{self.container.path}: entry {name[:200]!r} is stored against an entry of another shape"
                )
        try:
            return self.container.read_many(names, references, threads, out=references)
        except CorruptFileError as error:
            self._name_tensors(error)
            raise

    def _name_tensors(self, error: CorruptFileError) -> None:
        """Add the names of the tensors in a damaged entry, unless the entry has the name of its only tensor."""
        names = []
        # The structure may be damaged, too. Then the name of the entry has to do.
        with contextlib.suppress(CorruptFileError, FormatVersionError):
            for leaf, node in leaves_of(self.structure):
                region = node.get("region", len(self.table))
                if region < len(self.table) and self.header.entries[int(self.table.entries[region])] == error.entry:
                    names.append(leaf.name[:200])
        if names and names != [error.entry]:
            error.args = (f"{error}; it contains {list_first(names)}",)

    def read_regions(self, leaves: Collection[tuple[Leaf, Json]], threads: int | None = None) -> dict[int, Bytes]:
        """Read the memory that leaves see, and verify every region with its digest.

        Args:
            leaves: Leaves of this file's structure, with their nodes.
            threads: Number of threads that decode; by default one per core.

        Returns:
            The bytes of each region by its number, each in separate memory.

        Raises:
            CorruptFileError: If something is damaged, or a leaf does not fit its region. Names the tensor.
        """
        try:
            return self._read_regions(leaves, threads)
        except CorruptFileError:
            # There may be several copies of a parent.
            if not self.choose_intact_parents():
                raise
            return self._read_regions(leaves, threads)

    def _read_regions(self, leaves: Collection[tuple[Leaf, Json]], threads: int | None) -> dict[int, Bytes]:
        with naming(self.container.path):
            first_leaf = self._find_regions(leaves)
            regions = sorted(first_leaf)
            names = [self.header.entries[int(number)] for number in self.table.entries[regions]]
            self._check_total(set(names))
            # In the order of the file, so that the disk is read in one direction.
            arrays = self.read_arrays(list(dict.fromkeys(names)), threads)
            memory = {}
            for region, name in zip(regions, names, strict=True):
                memory[region] = self._cut(arrays[name], region, first_leaf[region])
            suspects = [region for region, name in zip(regions, names, strict=True) if not self._is_raw(name)]
            self._check_digests(suspects, memory, first_leaf, threads)
            return memory

    def read_entry(self, name: str, threads: int | None = None) -> NDArray[Any]:
        """Read one entry, and verify all regions in it with their digests.

        Raises:
            CorruptFileError: If it is damaged, or a parent is missing.
        """
        try:
            return self._read_entry(name, threads)
        except CorruptFileError:
            if not self.choose_intact_parents():
                raise
            return self._read_entry(name, threads)

    def _read_entry(self, name: str, threads: int | None) -> NDArray[Any]:
        with naming(self.container.path):
            array = self.read_arrays([name], threads)[name]
            content = array.reshape(-1).view(np.uint8)
            number = self.header.entries.index(name)
            for region in np.flatnonzero(self.table.entries == number).tolist():
                start = int(self.table.starts[region])
                stop = start + int(self.table.sizes[region])
                if digest_of(content[start:stop]) != self.table.digests[region]:
                    raise _mismatch(f"entry {name[:200]!r}")
            return array

    def _find_regions(self, leaves: Collection[tuple[Leaf, Json]]) -> dict[int, Leaf]:
        """Return the regions that leaves see, with the first leaf of each, after checking that all leaves fit."""
        first_leaf: dict[int, Leaf] = {}
        for leaf, node in leaves:
            region = node.get("region")
            if region is None:
                continue
            if region >= len(self.table):
                raise CorruptFileError(f"{leaf.name[:200]!r} is in region {region} of {len(self.table)}")
            check_fits(leaf, node, int(self.table.sizes[region]))
            first_leaf.setdefault(region, leaf)
        return first_leaf

    def _check_total(self, names: Collection[str]) -> None:
        """Refuse to read more than this machine can hold. A few forged bytes may claim terabytes."""
        total = sum(self.entry(name).nbytes for name in names)
        limit = machine_bytes()
        if total > limit:
            raise CorruptFileError(f"claims {total} bytes, more than the memory of this machine ({limit})")

    def _cut(self, array: NDArray[Any], region: int, leaf: Leaf) -> Bytes:
        """Return the bytes of a region of a decoded entry."""
        content = array.reshape(-1).view(np.uint8)
        start = int(self.table.starts[region])
        stop = start + int(self.table.sizes[region])
        if stop > content.size:
            raise CorruptFileError(f"{leaf.name[:200]!r} ends at byte {stop} of an entry of {content.size}")
        if stop - start == content.size:
            return content
        # Small regions share an entry. A copy for each keeps a tensor from holding on to the memory of all others, and
        # from growing into it if it is resized.
        return content[start:stop].copy()

    def _is_raw(self, name: str) -> bool:
        """Return whether an entry is stored verbatim: then the checksums of its chunks have verified its content."""
        return name in self.own and isinstance(self.own[name].codec, Raw)

    def _check_digests(
        self, regions: list[int], memory: Mapping[int, Bytes], leaves: Mapping[int, Leaf], threads: int | None
    ) -> None:
        """Compare decoded regions with their digests."""
        if sum(memory[region].size for region in regions) < _PARALLEL_BYTES:
            threads = 1
        digests = parallel_map(lambda region: digest_of(memory[region]), regions, threads)
        for region, digest in zip(regions, digests, strict=True):
            if digest != self.table.digests[region]:
                raise _mismatch(repr(leaves[region].name[:200]))

    def check(self) -> None:
        """Check what state and metadata refer to, down to the parents, without reading any content.

        Raises:
            CorruptFileError: If they cannot be built from what is stored.
            FormatVersionError: If they contain a kind of value that this release does not know.
        """
        with naming(self.container.path):
            leaves = list(leaves_of(self.structure))
            self._find_regions(leaves)
            for number, stop in zip(self.table.entries, self.table.starts + self.table.sizes, strict=True):
                name = self.header.entries[int(number)]
                if stop > self.entry(name).nbytes:
                    raise CorruptFileError(f"a region ends at byte {stop} of entry {name[:200]!r}")
            unflatten(self.structure, [None] * len(leaves))
            unflatten(self.container.values.get("metadata"), [])

    def check_chunks(self, threads: int | None = None) -> None:
        """Compare every byte of this file and its parents with its checksum, without decoding.

        Raises:
            CorruptFileError: If something is damaged or missing.
        """
        for file in self.lineage():
            file.container.check_chunks(threads)


def _mismatch(what: str) -> CorruptFileError:
    return CorruptFileError(
        f"{what} does not match its digest after decoding: the file, or one that it is stored against, is damaged"
    )


def looks_native(path: Path) -> bool:
    """Return whether a path is a regular file that begins like a container. Never blocks.

    Raises:
        OSError: If it exists and cannot be read.
    """
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (FileNotFoundError, CorruptFileError):
        return False
