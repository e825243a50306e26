"""Read a container file: one array, many, or a few rows, verified on every read."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from slipstream.codecs import Codec, Raw
from slipstream.errors import CodecError, CorruptFileError, MissingEntryError, naming
from slipstream.memory import fresh, machine_bytes, scratch, scratch_scope
from slipstream.store.base import Buffer, Range
from slipstream.store.header import FOOTER, HEADER, check_header, parse_footer
from slipstream.store.index import Entry, Index
from slipstream.store.local import open_descriptor
from slipstream.store.opened import OpenBuffer, OpenFile
from slipstream.store.ranges import OpenObject
from slipstream.store.reference import ChunkReferences, Reference
from slipstream.store.requests import Request, check_out, locate_rows, without_overlap
from slipstream.store.urls import ObjectPath, as_path, open_object
from slipstream.threads import parallel_each, parallel_map

Receive = Callable[[str, NDArray[Any], tuple[slice, ...]], object]
"""Gets the name of an entry, a chunk of it, which is valid during the call only, and the index of the chunk."""

_BYTES = np.dtype(np.uint8)
# Starting a thread, and the memory that it works in, take longer than decoding this much on one thread.
_PARALLEL_BYTES = 4 << 20


class Container:
    """Reads a container file. Opening it reads and checks the index only.

    Thread-safe, and safe to share with forked processes: every read names its position, and there is neither a cursor
    nor a lock. A pickled container opens the file again where it is loaded. The file is never mapped into memory, so a
    file that is damaged or truncated while it is open raises an error instead of crashing the process.

    Args:
        path: The file, or the URL of an object, of which only the parts that are needed are fetched.
        max_entry_bytes: Refuse to decode more than this at once; by default the memory of this machine.
        buffer: The bytes of a container in memory. They are not copied, and must not change while it is open. No file
            is read then: `path` only names the container in error messages.
        source: What to read, if it is open already. `path` only names the container in error messages.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is damaged, truncated, or not a container.
        FormatVersionError: If a newer release wrote it.
        StoreError: If an object store cannot be read.

    Example:
        >>> import numpy as np
        >>> from slipstream import write_container
        >>> with write_container("/tmp/slipstream-doc/b.slip") as writer:
        ...     _ = writer.add("images", np.zeros((100, 32, 32), np.uint8))
        >>> with Container("/tmp/slipstream-doc/b.slip") as container:
        ...     container.read("images", slice(10, 20)).shape
        (10, 32, 32)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_entry_bytes: int | None = None,
        buffer: Buffer | None = None,
        source: OpenFile | OpenObject | None = None,
    ) -> None:
        self.path = as_path(path)
        self._max_entry_bytes = max_entry_bytes
        self._file: OpenFile | OpenBuffer | OpenObject | None = source
        try:
            with naming(self.path):
                if buffer is not None:
                    self._file = OpenBuffer(buffer)
                elif isinstance(self.path, ObjectPath) and source is None:
                    self._file = open_object(self.path)
                elif source is None:
                    self._file = OpenFile(open_descriptor(self.path))
                self._read_index()
        except BaseException:
            self.close()
            raise

    def _read_index(self) -> None:
        """Read and check everything but the chunks."""
        assert self._file is not None, "the container is open"  # noqa: S101
        file_bytes = self._file.size_bytes()
        header = self._read_bytes(0, min(HEADER.size, file_bytes))
        check_header(header, file_bytes)
        footer_bytes = self._read_bytes(file_bytes - FOOTER.size, FOOTER.size)
        footer = parse_footer(header, footer_bytes, file_bytes)
        text = self._read_bytes(footer.index_offset, footer.index_length)
        if xxhash.xxh3_64_intdigest(text) != footer.index_checksum:
            raise CorruptFileError("the index does not match its checksum")
        self._index = Index.parse(text, HEADER.size, footer.index_offset)
        self._identity = footer.identity
        self._file_bytes = file_bytes

    @property
    def kind(self) -> str:
        """What the file is, as its writer said."""
        return self._index.kind

    @property
    def written_by(self) -> str:
        """Name and version of the program that wrote the file."""
        return self._index.written_by

    @property
    def entries(self) -> dict[str, Entry]:
        """The arrays in the file by name, in the order they were written."""
        return dict(self._index.entries)

    @property
    def values(self) -> dict[str, Any]:
        """The JSON values in the file by name."""
        return dict(self._index.values)

    @property
    def identity(self) -> str:
        """A fingerprint of the whole content: the checksum of the index, which contains those of all chunks."""
        return self._identity

    @property
    def is_in_memory(self) -> bool:
        """Whether it is read from a buffer, and `path` is only a name."""
        return isinstance(self._file, OpenBuffer)

    @property
    def is_in_store(self) -> bool:
        """Whether it is read from an object store, and has no folder on this machine."""
        return isinstance(self._file, OpenObject)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self._file_bytes

    def read(
        self,
        name: str,
        rows: slice | None = None,
        *,
        reference: Reference | None = None,
        out: NDArray[Any] | None = None,
        threads: int | None = None,
    ) -> NDArray[Any]:
        """Read one array, or some rows of it. Only the chunks that contain them are read, checked and decoded.

        Args:
            name: The entry.
            rows: A slice of the first axis with step 1; all by default.
            reference: For `Difference`, the reference that the writer used: an array of the whole entry's shape, or a
                function that returns a part of it.
            out: Contiguous memory of the right dtype and shape to read into; allocated by default. It may be the memory
                of the reference.
            threads: Number of threads that decode; by default one per core.

        Raises:
            MissingEntryError: If there is no such entry.
            CorruptFileError: If a chunk does not match its checksum or cannot be decoded.
            CodecError: If `reference` is needed and missing, or `reference` or `out` do not fit.
        """
        entry = self._entry(name)
        first = 0
        shape = entry.shape
        if rows is not None:
            first, shape = locate_rows(entry, rows)
        if out is None:
            out = self._allocate(entry, shape)
        else:
            check_out(out, entry.dtype, shape)
            reference = without_overlap(entry, reference, out)
        self._decode_all([self._request(entry, first, out, reference)], threads)
        return out

    def read_many(
        self,
        names: Iterable[str],
        references: Mapping[str, Reference] | None = None,
        threads: int | None = None,
        *,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Read several whole arrays at once. All chunks share the threads, which makes small arrays fast.

        Args:
            names: The entries.
            references: The references that the writer used, by name, for entries stored as a difference.
            threads: Number of threads that decode; by default one per core.
            out: Contiguous memory to read some of the entries into, by name; see `read`.

        Raises:
            MissingEntryError: If there is no such entry.
            CorruptFileError: If a chunk does not match its checksum or cannot be decoded.
            CodecError: If a reference is needed and missing, or does not fit.
        """
        if references is None:
            references = {}
        if out is None:
            out = {}
        arrays: dict[str, NDArray[Any]] = {}
        requests = []
        for name in names:
            entry = self._entry(name)
            reference = references.get(name)
            if name in out:
                check_out(out[name], entry.dtype, entry.shape)
                arrays[name] = out[name]
                reference = without_overlap(entry, reference, out[name])
            else:
                arrays[name] = self._allocate(entry, entry.shape)
            requests.append(self._request(entry, 0, arrays[name], reference))
        self._decode_all(requests, threads)
        return arrays

    def visit(
        self, names: Iterable[str], receive: Receive, rows: slice | None = None, threads: int | None = None
    ) -> None:
        """Decode arrays chunk by chunk, and hand over each chunk instead of building the arrays.

        Saves memory and time if the elements are copied somewhere else anyway.

        Args:
            names: The entries.
            receive: Called once per chunk, on several threads at once.
            rows: Only chunks that contain some of these rows, a slice of the first axis with step 1.
            threads: Number of threads that decode; by default one per core.

        Raises:
            MissingEntryError: If there is no such entry.
            CorruptFileError: If a chunk does not match its checksum or cannot be decoded.
            CodecError: If an entry is stored as a difference.
        """
        jobs: list[tuple[Entry, int]] = []
        total_bytes = 0
        for name in names:
            entry = self._entry(name)
            if entry.codec.needs_reference:
                raise CodecError(f"{self.path}: entry {name!r} is a difference, which only `read` can decode")
            first = 0
            shape = entry.shape
            if rows is not None:
                first, shape = locate_rows(entry, rows)
            total_bytes += self._check_size(entry, shape)
            for number in entry.grid.numbers(first, math.prod(shape)):
                jobs.append((entry, number))  # noqa: PERF401 - a loop is easier to read

        def visit(job: tuple[Entry, int]) -> None:
            entry, number = job
            _, shape = entry.grid.part(number)
            with scratch_scope():
                part = scratch("part", math.prod(shape), entry.dtype).reshape(shape)
                self._decode(entry, number, entry.codec, part)
                receive(entry.name, part, entry.grid.index(number))

        if total_bytes < _PARALLEL_BYTES:
            threads = 1
        for part in self._parts(jobs):
            parallel_each(visit, jobs[part], threads)

    def find_damage(self, threads: int | None = None) -> Iterator[CorruptFileError | None]:
        """Read, check and decode every chunk. Yields the damage of each one, or None where it is intact.

        Of arrays stored as a difference only the checksums are checked, because there is no reference to decode them.
        """
        chunks = self._all_chunks()
        for part in self._parts(chunks):
            yield from parallel_map(self._damage_of, chunks[part], threads)

    def check_chunks(self, threads: int | None = None) -> None:
        """Read every chunk and compare it with its checksum, without decoding any: as fast as the disk.

        Raises:
            CorruptFileError: If a chunk does not match. Names the entry.
        """
        chunks = self._all_chunks()
        for part in self._parts(chunks):
            parallel_each(self._check_chunk, chunks[part], threads)

    def close(self) -> None:
        """Close the file. Idempotent; reading afterwards raises. Reads in progress on other threads finish."""
        # Readers hold a reference to the file while they use it; the last one closes the descriptor.
        self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_in_memory:
            raise TypeError(f"{self.path}: a container in memory cannot be pickled; pickle its bytes instead")
        if isinstance(self._file, OpenObject):
            return _reopen, (self.path, self._max_entry_bytes, self._file)
        return _reopen, (self.path.absolute(), self._max_entry_bytes, None)

    def _entry(self, name: str) -> Entry:
        entries = self._index.entries
        if name in entries:
            return entries[name]
        # A typo is likely: suggest what is similar, or else show what there is.
        suggestions = difflib.get_close_matches(name, entries, n=3) or list(entries)[:3]
        found = ", ".join(map(repr, suggestions)) or "none"
        raise MissingEntryError(f"{self.path}: no entry {name!r} among {len(entries)}; it has {found}")

    def _allocate(self, entry: Entry, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return memory for decoded elements."""
        return fresh(self._check_size(entry, shape)).view(entry.dtype).reshape(shape)

    def _check_size(self, entry: Entry, shape: tuple[int, ...]) -> int:
        """Return the size of decoded elements; raises if a forged index claims more than this machine has."""
        limit = self._max_entry_bytes
        if limit is None:
            limit = machine_bytes()
        needed = math.prod(shape) * entry.dtype.itemsize
        if needed > limit:
            raise CorruptFileError(
                f"{self.path}: entry {entry.name!r} claims {needed} bytes, more than the limit of {limit}; "
                "read it in slices, or raise max_entry_bytes if you trust the file"
            )
        return needed

    def _request(self, entry: Entry, first: int, out: NDArray[Any], reference: Reference | None) -> Request:
        # An empty array has no chunks, and nothing to subtract.
        if entry.codec.needs_reference and reference is None and entry.chunks:
            raise CodecError(
                f"{self.path}: entry {entry.name!r} is a difference and needs a reference array to be read"
            )
        references = ChunkReferences(reference, entry.dtype, entry.shape)
        return Request(entry, first, out.reshape(-1), references)

    def _decode_all(self, requests: Sequence[Request], threads: int | None) -> None:
        """Decode the chunks of all requests in parallel. All reading of arrays ends up here."""
        jobs: list[tuple[Request, int]] = []
        chunks: list[tuple[Entry, int]] = []
        total_bytes = 0
        for request in requests:
            total_bytes += request.out.nbytes
            for number in request.entry.grid.numbers(request.first, request.out.size):
                jobs.append((request, number))
                chunks.append((request.entry, number))
        if total_bytes < _PARALLEL_BYTES:
            threads = 1
        for part in self._parts(chunks):
            parallel_each(self._decode_into, jobs[part], threads)

    def _decode_into(self, job: tuple[Request, int]) -> None:
        """Decode the elements of one chunk that a request asks for."""
        request, number = job
        entry = request.entry
        # All positions are in the flat array. The chunk is from `start` to `stop`, the request from `first` to `end`.
        start, shape = entry.grid.part(number)
        stop = start + math.prod(shape)
        codec = request.references.bind(entry.codec, start, shape)
        first = request.first
        end = first + request.out.size
        if first <= start and stop <= end:
            self._decode(entry, number, codec, request.out[start - first : stop - first].reshape(shape))
            return
        # The first and the last chunk may reach beyond the requested rows: decode all of it, and copy the overlap.
        decoded = np.empty(shape, entry.dtype)
        self._decode(entry, number, codec, decoded)
        low = max(first, start)
        high = min(end, stop)
        request.out[low - first : high - first] = decoded.reshape(-1)[low - start : high - start]

    def _decode(self, entry: Entry, number: int, codec: Codec, out: NDArray[Any]) -> None:
        """Read one chunk, check it and decode it into `out`."""
        chunk = entry.chunks[number]
        # Raw bytes are read right where they belong.
        if isinstance(codec, Raw) and out.nbytes == chunk.length:
            self._read_chunk(entry, number, out.reshape(-1).view(np.uint8))
            return
        with scratch_scope():
            payload = scratch("chunk", chunk.length, _BYTES)
            self._read_chunk(entry, number, payload)
            try:
                codec.decode(payload, out)
            except CodecError as error:
                raise self._damage(entry, number, str(error)) from error

    def _read_chunk(self, entry: Entry, number: int, target: NDArray[np.uint8]) -> None:
        """Read the bytes of one chunk and compare them with their checksum."""
        chunk = entry.chunks[number]
        if self._read_at(chunk.offset, target) != chunk.length:
            raise self._damage(entry, number, "the file was truncated after it was opened")
        if xxhash.xxh3_64_intdigest(target.data) != chunk.checksum:
            raise self._damage(entry, number, "its bytes do not match their checksum")

    def _parts(self, chunks: Sequence[tuple[Entry, int]]) -> Iterator[slice]:
        """Yield slices of chunks to read one after another: all of a file, or those of an object that have arrived."""
        file = self._file
        # Reading a closed container raises, with the reason.
        if not isinstance(file, OpenObject):
            yield slice(None)
            return
        ranges = []
        for entry, number in chunks:
            chunk = entry.chunks[number]
            ranges.append(Range(chunk.offset, chunk.length))
        with naming(self.path):
            yield from file.parts(ranges)

    def _all_chunks(self) -> list[tuple[Entry, int]]:
        """Return every chunk as its entry and its number, in the order of the file."""
        chunks = []
        for entry in self._index.entries.values():
            for number in range(len(entry.chunks)):
                chunks.append((entry, number))  # noqa: PERF401 - a loop is easier to read
        return chunks

    def _check_chunk(self, chunk: tuple[Entry, int]) -> None:
        """Read one chunk into scratch memory and compare it with its checksum."""
        entry, number = chunk
        with scratch_scope():
            self._read_chunk(entry, number, scratch("chunk", entry.chunks[number].length, _BYTES))

    def _damage_of(self, chunk: tuple[Entry, int]) -> CorruptFileError | None:
        """Return the damage of a chunk, or None."""
        entry, number = chunk
        try:
            if entry.codec.needs_reference:
                self._check_chunk(chunk)
            else:
                _, shape = entry.grid.part(number)
                self._decode(entry, number, entry.codec, np.empty(shape, entry.dtype))
        except CorruptFileError as error:
            return error
        return None

    def _damage(self, entry: Entry, number: int, reason: str) -> CorruptFileError:
        error = CorruptFileError(
            f"{self.path}: entry {entry.name!r} is damaged in chunk {number + 1} of {len(entry.chunks)}: {reason}"
        )
        error.entry = entry.name
        return error

    def _read_bytes(self, offset: int, length: int) -> bytes:
        target = np.empty(length, np.uint8)
        if self._read_at(offset, target) != length:
            raise CorruptFileError("the file was truncated while it was opened")
        return target.tobytes()

    def _read_at(self, offset: int, target: NDArray[np.uint8]) -> int:
        """Fill `target` from a position of the file; returns how many bytes there were. Nothing else reads the file."""
        file = self._file
        if file is None:
            raise ValueError(f"{self.path}: the container is closed")
        try:
            return file.read_into(target.data, offset)
        finally:
            # The traceback of an error must not keep the file open.
            del file


def _reopen(path: Path, max_entry_bytes: int | None, source: OpenObject | None) -> Container:
    """Open a container again; how a pickled one is loaded."""
    return Container(path, max_entry_bytes=max_entry_bytes, source=source)
