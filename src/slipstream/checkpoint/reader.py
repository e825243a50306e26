"""Read the structure and the memory of a native checkpoint. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.checkpoint.layout import TABLE, RegionTable, check_table_entry, digest_of
from slipstream.checkpoint.lineage import EntryReader
from slipstream.codecs import Raw
from slipstream.errors import CorruptFileError, FormatVersionError, naming
from slipstream.memory import machine_bytes
from slipstream.schema.structure import Leaf, check_fits, leaves_of
from slipstream.schema.unflatten import unflatten
from slipstream.schema.values import Json
from slipstream.text import list_first
from slipstream.threads import parallel_map

Bytes = NDArray[np.uint8]

# Digests of smaller regions are not worth a second thread.
_PARALLEL_BYTES = 1 << 20


class NativeReader(EntryReader):
    """Reads the structure and the memory of a native checkpoint, whole or a delta.

    See `slipstream.checkpoint.lineage.EntryReader` for how a delta finds its parents.
    """

    @functools.cached_property
    def table(self) -> RegionTable:
        """Where the regions of the state are."""
        with naming(self.container.path):
            if TABLE not in self.own:
                raise CorruptFileError("has no table of regions")
            check_table_entry(self.own[TABLE], self.container.file_bytes)
            return RegionTable.parse(self.container.read(TABLE), len(self.header.entries))

    @property
    def metadata(self) -> Any:
        """What was saved as metadata."""
        with naming(self.container.path):
            return unflatten(self.container.values.get("metadata"), [])

    def decode(
        self, names: Collection[str], before: Mapping[str, NDArray[Any]], threads: int | None
    ) -> dict[str, NDArray[Any]]:
        """Decode entries of this file; see `EntryReader.decode`. Names the tensors in a damaged entry."""
        try:
            return super().decode(names, before, threads)
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
            suspects = [region for region, name in zip(regions, names, strict=True) if not self._is_verified(name)]
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

    def _is_verified(self, name: str) -> bool:
        """Return whether the checksums of its chunks have verified an entry: it is stored verbatim."""
        # What is in memory may come from anyone, and may contradict itself. A digest takes little time there.
        if self.container.is_in_memory:
            return False
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


def _mismatch(what: str) -> CorruptFileError:
    return CorruptFileError(
        f"{what} does not match its digest after decoding: the file, or one that it is stored against, is damaged"
    )
