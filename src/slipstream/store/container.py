"""One file, many named arrays and small JSON values: written in one pass, verified on every read.

Layout, byte by byte in ``docs/formats/container.md``: a header, the encoded chunks, a JSON index, a footer. The index
comes last so that writing streams, and so that a file which was cut off is known by its missing footer.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import math
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from slipstream import __version__
from slipstream.codecs import Codec, Raw, choose_codec
from slipstream.codecs.base import part_shape, word_dtype
from slipstream.errors import CodecError, CorruptFileError, FormatVersionError, MissingEntryError, naming
from slipstream.memory import machine_bytes, scratch, scratch_scope
from slipstream.store.index import MAX_AXES, MAX_CHUNK_BYTES, MAX_INDEX_BYTES, Chunk, Entry, Grid, Index
from slipstream.store.local import atomic_write
from slipstream.threads import parallel_map

MAGIC = b"\x89SLIP\r\n\x1a"
END_MAGIC = b"\x1a\n\rPILS\x89"
VERSION = 1
DEFAULT_CHUNK_BYTES = 1 << 20

_HEADER = struct.Struct("<8sII")
_FOOTER = struct.Struct("<QQQQ8s")
_BYTES = np.dtype(np.uint8)

Reference = NDArray[Any] | Callable[[int, int], NDArray[Any]]
"""What a difference is taken to: an array, or a function that makes elements `start` to `stop` of it, in C order."""

_PartOf = Callable[[int, int, tuple[int, ...]], NDArray[Any] | None]


class ContainerWriter:
    """Adds arrays and values to a container that is being written; made by `write_container`.

    Attributes:
        identity: Once the file is complete, what `Container.identity` says of it.
        file_bytes: Once the file is complete, its size.
    """

    def __init__(self, file: BinaryIO, kind: str, chunk_bytes: int, threads: int | None, verify: bool) -> None:
        self._verify = verify
        self._file = file
        self._kind = kind
        self._chunk_bytes = chunk_bytes
        self._threads = threads
        self._entries: dict[str, Entry] = {}
        self._values: dict[str, Any] = {}
        self._sound = True
        self._header = _HEADER.pack(MAGIC, VERSION, 0)
        self._file.write(self._header)
        self._position = len(self._header)
        self.identity = ""
        self.file_bytes = 0

    def add(
        self, name: str, array: NDArray[Any], codec: Codec | None = None, reference: Reference | None = None
    ) -> Entry:
        """Encode `array` and write it under `name`; blocks until its bytes are handed to the operating system.

        Chunks are encoded in parallel; besides the array itself, memory holds a few chunks only.

        Args:
            name: Unique in the file.
            array: Bools, integers, floats or complex numbers of any shape.
            codec: How to pack it; by default what packs a sample of it best.
            reference: For `Difference`: the array to subtract, which reading will need again; or a function that makes
                a part of it, called from several threads, so that no more than a few parts are ever in memory.

        Raises:
            ValueError: If the name is taken.
            UnsupportedDtypeError: If the elements are not plain numbers.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of an entry is {name!r}, expected a string")
        if name in self._entries:
            raise ValueError(f"the container has an entry {name!r} already")
        array = np.asarray(array)
        word_dtype(array.dtype)
        if array.ndim > MAX_AXES:
            raise ValueError(f"entry {name!r} has {array.ndim} axes, at most {MAX_AXES} can be stored")
        other_part = _parts_of(reference, array.dtype, array.shape)
        if codec is None:
            codec = choose_codec(array, None if callable(reference) else reference)
        array = np.ascontiguousarray(array).reshape(array.shape)
        grid = Grid(array.shape, part_shape(array.shape, array.dtype.itemsize, self._chunk_bytes))
        flat = array.reshape(-1)

        def encode(number: int) -> tuple[bytes, int]:
            start, shape = grid.part(number)
            stop = start + math.prod(shape)
            part = flat[start:stop].reshape(shape)
            part_codec = bind(codec, other_part(start, stop, shape))
            payload = part_codec.encode(part)
            if self._verify:
                check_payload(name, part_codec, payload, part)
            return payload, xxhash.xxh3_64_intdigest(payload)

        chunks, position = [], self._position
        try:
            for payload, checksum in parallel_map(encode, range(grid.count()), self._threads):
                self._file.write(payload)
                chunks.append(Chunk(position, len(payload), checksum))
                position += len(payload)
        except BaseException:  # the caller may go on: leave no trace of this entry
            self._sound = False
            self._file.seek(self._position)
            self._file.truncate()
            self._sound = True
            raise
        self._position = position
        entry = Entry(name, array.dtype, grid, codec, tuple(chunks))
        self._entries[name] = entry
        return entry

    @property
    def entries(self) -> dict[str, Entry]:
        """What was added so far, by name."""
        return dict(self._entries)

    def set(self, name: str, value: Any) -> None:
        """Keep a small JSON value (numbers, strings, lists, dicts with string keys) under `name`, in the index.

        It is copied now. What JSON cannot hold raises `TypeError` or `ValueError`.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a value is {name!r}, expected a string")
        self._values[name] = json.loads(Index("", "", {}, {name: value}).to_json())["values"][name]

    def finish(self) -> None:
        """Write index and footer; `write_container` calls it."""
        if not self._sound:
            raise ValueError("the container was damaged by a failed write and cannot be finished")
        text = Index(self._kind, f"slipstream {__version__}", self._entries, self._values).to_json()
        if len(text) > MAX_INDEX_BYTES:
            raise ValueError(f"the container's index is {len(text)} bytes, at most {MAX_INDEX_BYTES} are allowed")
        Index.parse(text, _HEADER.size, self._position)  # whatever we write, we can read
        footer = _footer(self._header, self._position, text)
        self._file.write(text)
        self._file.write(footer)
        self.identity = _identity(xxhash.xxh3_64_intdigest(text))
        self.file_bytes = self._position + len(text) + len(footer)


def bind(codec: Codec, reference: NDArray[Any] | None) -> Codec:
    """Return the codec with a reference, if it needs one and there is one."""
    if reference is None or not codec.needs_reference:
        return codec
    return codec.against(reference)


def check_payload(name: str, codec: Codec, payload: bytes, array: NDArray[Any]) -> None:
    """Decode what a codec made of an array, and raise `CodecError` unless every bit is as it was."""
    decoded = np.empty(array.shape, array.dtype)
    codec.decode(payload, decoded)
    if array.tobytes() != decoded.tobytes():
        raise CodecError(f"entry {name!r} does not come back from codec {codec.name!r} as it was; nothing was written")


def check_out(out: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raise `CodecError` unless `out` is memory that an array of this dtype and shape can be decoded into."""
    fits = type(out) is np.ndarray and out.dtype == dtype and out.shape == shape
    if not fits or not out.flags.c_contiguous or not out.flags.writeable:
        raise CodecError(
            f"out is {out.dtype}{list(out.shape)}, expected a contiguous, writable array {dtype}{list(shape)}"
        )


def check_reference(reference: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return `reference` as an array; raise `CodecError` unless it is of this dtype and shape."""
    reference = np.asarray(reference)
    if reference.dtype != dtype or reference.shape != shape:
        raise CodecError(
            f"reference is {reference.dtype}{list(reference.shape)}, the array is {dtype}{list(shape)}: they must match"
        )
    return reference


def _parts_of(reference: Reference | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> _PartOf:
    """Return a function that gives the part of a reference that belongs to a chunk."""
    if reference is None:
        return lambda *_: None
    if callable(reference):
        make = reference
        return lambda start, stop, part: make(start, stop).reshape(part)
    flat = check_reference(reference, dtype, shape).reshape(-1)
    return lambda start, stop, part: flat[start:stop].reshape(part)


def _footer(header: bytes, index_offset: int, index: bytes) -> bytes:
    fields = struct.pack("<QQQ", index_offset, len(index), xxhash.xxh3_64_intdigest(index))
    return fields + struct.pack("<Q8s", xxhash.xxh3_64_intdigest(header + fields), END_MAGIC)


def _identity(index_checksum: int) -> str:
    return f"{index_checksum:016x}"


@contextlib.contextmanager
def write_container(
    path: str | os.PathLike[str],
    *,
    kind: str = "container",
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    threads: int | None = None,
    verify: bool = False,
) -> Iterator[ContainerWriter]:
    """Write a container: it appears at `path`, complete and durable, when the block ends without an error.

    An older file at `path` is replaced then and not before; see `atomic_write`.

    Args:
        path: The file to create or replace.
        kind: What the file is, for people and tools, such as ``checkpoint``.
        chunk_bytes: How much of an array one chunk holds before encoding: the least that can be read alone.
        threads: How many threads encode; by default one per core.
        verify: Whether to decode every chunk again and compare it before it is written.

    Raises:
        WriteError: If the file cannot be written, `DiskFullError` among them.

    Example:
        >>> import numpy as np
        >>> with write_container("/tmp/slipstream-doc/a.slip") as writer:
        ...     _ = writer.add("weights", np.arange(6.0).reshape(2, 3))
        ...     writer.set("step", 7)
        >>> with Container("/tmp/slipstream-doc/a.slip") as container:
        ...     print(container.values["step"], container.read("weights").sum())
        7 15.0
    """
    if not isinstance(kind, str):
        raise TypeError(f"kind is {kind!r}, expected a string")
    if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, expected 1 to {MAX_CHUNK_BYTES}")
    with atomic_write(path) as file:
        writer = ContainerWriter(file, kind, chunk_bytes, threads, verify)
        yield writer
        writer.finish()


class Container:
    """Reads a container file; opening reads the index only.

    May be shared by threads, and by forked processes: reads name their position and share no cursor. Pickling it sends
    the path, and the receiver opens the file anew. The file is never mapped into memory, so that damage or truncation
    under our feet is an error and not a crash.

    Args:
        path: The file.
        max_entry_bytes: Refuse to decode more than this at once; by default the memory of this machine.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is damaged, cut off, or not a container.
        FormatVersionError: If a newer release wrote it.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_entry_bytes: int | None = None) -> None:
        self.path = Path(path)
        self._max_entry_bytes = max_entry_bytes
        self._lock = threading.RLock()
        self._readers = 0
        self._descriptor: int | None = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with naming(self.path):
                self._index = self._read_index()
        except BaseException:
            self.close()
            raise

    @property
    def kind(self) -> str:
        """What its writer said the file is."""
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
        """A fingerprint of the whole content: the checksum of the index, which holds those of all chunks."""
        return _identity(self._index_checksum)

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
        """Read one array, or some rows of it; only the chunks that hold them are read, checked and decoded.

        Args:
            name: The entry.
            rows: A slice of the first axis, with step 1; all by default.
            reference: What was given to the writer, for `Difference`: an array of the whole entry's shape, or a
                function that makes a part of it.
            out: Contiguous memory of the right dtype and shape to read into; allocated if absent.
            threads: How many threads decode; by default one per core.

        Raises:
            MissingEntryError: If there is no such entry.
            CorruptFileError: If a chunk does not match its checksum or cannot be decoded.
            CodecError: If `reference` is needed and absent, or `reference` or `out` do not fit.
        """
        entry = self._entry(name)
        first, last = 0, math.prod(entry.shape)
        shape = entry.shape
        if rows is not None:
            if not shape or rows.step not in (None, 1):
                raise ValueError(f"cannot read {rows} of entry {name!r}, which has shape {list(shape)}")
            start, stop, _ = rows.indices(shape[0])
            row = math.prod(shape[1:])
            first, last = start * row, max(start, stop) * row
            shape = (max(0, stop - start), *shape[1:])
        if isinstance(reference, np.ndarray):
            reference = check_reference(reference, entry.dtype, entry.shape)
            if out is not None and np.may_share_memory(out, reference) and out.ctypes.data != reference.ctypes.data:
                reference = reference.copy()
        out = self._allocate(entry, shape, out)
        flat, other_part = out.reshape(-1), _parts_of(reference, entry.dtype, entry.shape)

        numbers = range(entry.grid.number_of(first), entry.grid.number_of(last - 1) + 1) if first < last else range(0)
        for _ in parallel_map(lambda number: self._fill(entry, number, flat, first, other_part), numbers, threads):
            pass
        return out

    def read_many(
        self, names: Iterable[str], references: Mapping[str, Reference] | None = None, threads: int | None = None
    ) -> dict[str, NDArray[Any]]:
        """Read several whole arrays at once: all their chunks share the threads, however small or large each is.

        Args:
            names: The entries.
            references: What was given to the writer, for those stored as a difference.
            threads: How many threads decode; by default one per core.

        Raises:
            MissingEntryError: If there is no such entry.
            CorruptFileError: If a chunk does not match its checksum or cannot be decoded.
            CodecError: If a reference is needed and absent, or does not fit.
        """
        arrays: dict[str, NDArray[Any]] = {}
        work: list[Callable[[], object]] = []
        for name in names:
            entry = self._entry(name)
            arrays[name] = self._allocate(entry, entry.shape, None)
            flat = arrays[name].reshape(-1)
            other_part = _parts_of((references or {}).get(name), entry.dtype, entry.shape)
            work += [functools.partial(self._fill, entry, i, flat, 0, other_part) for i in range(entry.grid.count())]
        for _ in parallel_map(lambda fill: fill(), work, threads):
            pass
        return arrays

    def _fill(self, entry: Entry, number: int, out: NDArray[Any], first: int, other_part: _PartOf) -> None:
        """Decode what a chunk has of the elements that `out` is for, which begin with number `first`."""
        start, part = entry.grid.part(number)
        stop, last = start + math.prod(part), first + out.size
        other = other_part(start, stop, part)
        if first <= start and stop <= last:
            self._decode(entry, number, part, other, out[start - first : stop - first].reshape(part))
        else:
            whole = self._decode(entry, number, part, other, None).reshape(-1)
            begin, end = max(first, start), min(last, stop)
            out[begin - first : end - first] = whole[begin - start : end - start]

    def find_damage(self, threads: int | None = None) -> Iterator[CorruptFileError | None]:
        """Read, check and decode every chunk; yields the damage of each, or None where it is sound.

        Arrays stored as a difference are checked by their checksum only, for lack of the reference.
        """
        chunks = [(entry, number) for entry in self._index.entries.values() for number in range(len(entry.chunks))]

        def check(item: tuple[Entry, int]) -> CorruptFileError | None:
            entry, number = item
            try:
                if entry.codec.needs_reference:
                    self._read_chunk(entry, number)
                else:
                    self._decode(entry, number, entry.grid.part(number)[1], None, None)
            except CorruptFileError as error:
                return error
            return None

        return parallel_map(check, chunks, threads)

    def close(self) -> None:
        """Close the file; reading after that is an error. Closing twice is not."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            unused = descriptor is not None and not self._readers
        if descriptor is not None and unused:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path.absolute(), self._max_entry_bytes)

    def _entry(self, name: str) -> Entry:
        try:
            return self._index.entries[name]
        except KeyError:
            close = difflib.get_close_matches(name, self._index.entries, n=3) or list(self._index.entries)[:3]
            hint = f"; it has {', '.join(map(repr, close))}" if close else "; it has none"
            raise MissingEntryError(f"{self.path}: no entry {name!r} among {len(self._index.entries)}{hint}") from None

    def _allocate(self, entry: Entry, shape: tuple[int, ...], out: NDArray[Any] | None) -> NDArray[Any]:
        if out is not None:
            check_out(out, entry.dtype, shape)
            return out
        limit = machine_bytes() if self._max_entry_bytes is None else self._max_entry_bytes
        needed = math.prod(shape) * entry.dtype.itemsize
        if needed > limit:
            raise CorruptFileError(
                f"{self.path}: entry {entry.name!r} claims {needed} bytes, more than the limit of {limit}; "
                "read it in slices, or raise max_entry_bytes if you trust the file"
            )
        return np.empty(shape, entry.dtype)

    def _decode(
        self,
        entry: Entry,
        number: int,
        shape: tuple[int, ...],
        reference: NDArray[Any] | None,
        out: NDArray[Any] | None,
    ) -> NDArray[Any]:
        if isinstance(entry.codec, Raw) and out is not None and out.nbytes == entry.chunks[number].length:
            self._read_chunk(entry, number, out.reshape(-1).view(np.uint8))
            return out
        if reference is None and entry.codec.needs_reference:
            raise CodecError(
                f"{self.path}: entry {entry.name!r} is a difference and needs a reference array to be read"
            )
        if out is None:
            out = np.empty(shape, entry.dtype)
        codec = bind(entry.codec, reference)
        with scratch_scope():
            payload = self._read_chunk(entry, number)
            try:
                codec.decode(payload, out)
            except CodecError as error:
                raise self._damage(entry, number, str(error)) from error
        return out

    def _read_chunk(self, entry: Entry, number: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Read one chunk and compare it with its checksum; the memory is this thread's until its next read."""
        chunk = entry.chunks[number]
        target = scratch("chunk", chunk.length, _BYTES) if out is None else out
        if self._pread_into(target, chunk.offset) != chunk.length:
            raise self._damage(entry, number, "the file ends before it, and was longer when it was opened")
        if xxhash.xxh3_64_intdigest(target.data) != chunk.checksum:
            raise self._damage(entry, number, "its bytes do not match their checksum")
        return target

    def _damage(self, entry: Entry, number: int, reason: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path}: entry {entry.name!r} is damaged in chunk {number + 1} of {len(entry.chunks)}: {reason}"
        )

    def _pread_into(self, target: NDArray[np.uint8], offset: int) -> int:
        view = target.data
        done = 0
        with self._reading() as descriptor:
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if count == 0:
                    break
                done += count
        return done

    @contextlib.contextmanager
    def _reading(self) -> Iterator[int]:
        """Hold the file open: a close from another thread takes effect after the last read."""
        with self._lock:
            if self._descriptor is None:
                raise ValueError(f"{self.path}: the container is closed")
            descriptor = self._descriptor
            self._readers += 1
        try:
            yield descriptor
        finally:
            with self._lock:
                self._readers -= 1
                last = not self._readers
            if last and self._is_closed():
                os.close(descriptor)

    def _is_closed(self) -> bool:
        return self._descriptor is None

    def _pread(self, length: int, offset: int) -> bytes:
        target = np.empty(length, np.uint8)
        if self._pread_into(target, offset) != length:
            raise CorruptFileError("the file is cut off")
        return target.tobytes()

    def _read_index(self) -> Index:
        assert self._descriptor is not None  # noqa: S101
        status = os.fstat(self._descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise CorruptFileError("is a folder, expected a file")
        if not stat.S_ISREG(status.st_mode):
            raise CorruptFileError("is not a regular file")
        self._file_bytes = size = status.st_size
        header = self._pread(min(_HEADER.size, size), 0)
        if header[: len(MAGIC)] != MAGIC:
            raise CorruptFileError("is not a Slipstream container" if header else "is empty")
        if size < _HEADER.size + _FOOTER.size:
            raise CorruptFileError("the file is cut off")
        _, version, reserved = _HEADER.unpack(header)
        if version != VERSION:
            raise FormatVersionError(f"has format version {version}, this release reads version {VERSION}")
        footer = self._pread(_FOOTER.size, size - _FOOTER.size)
        offset, length, checksum, footer_checksum, magic = _FOOTER.unpack(footer)
        if magic != END_MAGIC:
            raise CorruptFileError("the file is cut off, or was added to: its footer is not at its end")
        if reserved or xxhash.xxh3_64_intdigest(header + footer[:24]) != footer_checksum:
            raise CorruptFileError("header or footer do not match their checksum")
        if offset < _HEADER.size or offset + length + _FOOTER.size != size or length > MAX_INDEX_BYTES:
            raise CorruptFileError("the footer does not fit the file")
        text = self._pread(length, offset)
        self._index_checksum = checksum
        if xxhash.xxh3_64_intdigest(text) != checksum:
            raise CorruptFileError("the index does not match its checksum")
        return Index.parse(text, _HEADER.size, offset)


def _reopen(path: Path, max_entry_bytes: int | None) -> Container:
    return Container(path, max_entry_bytes=max_entry_bytes)
