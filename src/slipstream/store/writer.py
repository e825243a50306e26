"""Write a container file: many named arrays and small JSON values, in one pass.

A header, the encoded chunks, a JSON index and a footer follow each other. The index comes last so that writing streams,
and so that a truncated file is recognized by its missing footer.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from slipstream import __version__
from slipstream.checks import require_count
from slipstream.codecs import Codec, Raw, choose_codec
from slipstream.codecs.base import as_words, part_shape, word_dtype
from slipstream.errors import CodecError
from slipstream.memory import scratch, scratch_scope
from slipstream.store.header import Footer, pack_header
from slipstream.store.index import MAX_AXES, MAX_CHUNK_BYTES, Chunk, Entry, Grid, check_limits, encode_json, join_index
from slipstream.store.local import atomic_write
from slipstream.store.reference import ChunkReferences, Reference
from slipstream.threads import parallel_map

DEFAULT_CHUNK_BYTES = 1 << 20


@contextlib.contextmanager
def write_container(
    path: str | os.PathLike[str],
    *,
    kind: str = "container",
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    threads: int | None = None,
    verify: bool = False,
    expected_bytes: int = 0,
) -> Iterator[ContainerWriter]:
    """Write a container that appears at `path`, complete and durable, when the block ends without an error.

    An older file at `path` is replaced then and not before; see `atomic_write`.

    Args:
        path: The file to create or replace.
        kind: What the file is, for people and tools, such as ``checkpoint``.
        chunk_bytes: How much of an array one chunk holds before encoding. A chunk is the least that can be read.
        threads: Number of threads that encode; by default one per core.
        verify: Whether to decode every chunk again and compare it before it is written.
        expected_bytes: About how large the file will be; see `atomic_write`.

    Yields:
        The writer, to add arrays and values to.

    Raises:
        WriteError: If the file cannot be written, `DiskFullError` among them.

    Example:
        >>> import numpy as np
        >>> from slipstream import Container
        >>> with write_container("/tmp/slipstream-doc/a.slip") as writer:
        ...     _ = writer.add("weights", np.arange(6.0).reshape(2, 3))
        ...     writer.set("step", 7)
        >>> with Container("/tmp/slipstream-doc/a.slip") as container:
        ...     print(container.values["step"], container.read("weights").sum())
        7 15.0
    """
    if not isinstance(kind, str):
        raise TypeError(f"kind is {kind!r}, expected a string")
    require_count("chunk_bytes", chunk_bytes, 1, MAX_CHUNK_BYTES)
    with atomic_write(path, expected_bytes=expected_bytes) as file:
        writer = ContainerWriter(file, kind, chunk_bytes, threads, verify=verify)
        yield writer
        writer.finish()


class ContainerWriter:
    """Adds arrays and values to a container that is being written; created by `write_container`. Not thread-safe.

    Attributes:
        identity: `Container.identity` of the file, once it is complete.
        file_bytes: Size of the file, once it is complete.
    """

    def __init__(self, file: BinaryIO, kind: str, chunk_bytes: int, threads: int | None, *, verify: bool) -> None:
        self._file = file
        self._kind = kind
        self._chunk_bytes = chunk_bytes
        self._threads = threads
        self._verify = verify
        self._entries: dict[str, Entry] = {}
        # As JSON: encoded when they are set, so that later changes do not matter and finishing is cheap.
        self._values: dict[str, str] = {}
        self._intact = True
        self.identity = ""
        self.file_bytes = 0
        self._header = pack_header()
        self._file.write(self._header)
        # Where the next chunk goes.
        self._position = len(self._header)

    @property
    def entries(self) -> dict[str, Entry]:
        """The arrays added so far, by name."""
        return dict(self._entries)

    def add(
        self, name: str, array: NDArray[Any], codec: Codec | None = None, reference: Reference | None = None
    ) -> Entry:
        """Encode `array` and write it under `name`; blocks until its bytes are handed to the operating system.

        Chunks are encoded in parallel. Besides the array itself, only a few chunks are in memory. If it raises, the
        container is as it was before, and more arrays may be added.

        Args:
            name: Unique in the file.
            array: Bools, integers, floats or complex numbers of any shape.
            codec: How to encode it; by default the codec that compresses a sample of it best.
            reference: For `Difference`: the array to subtract, which reading needs again; or a function that returns a
                part of it, called from several threads, so that only a few parts are in memory at a time.

        Returns:
            What the index will say about the array.

        Raises:
            ValueError: If the name is taken, or the array has too many axes.
            UnsupportedDtypeError: If the elements are not plain numbers.
            CodecError: If the reference does not match the array.
        """
        self._check_name(name)
        array = np.asarray(array)
        # Raises for dtypes that cannot be stored.
        word_dtype(array.dtype)
        if array.ndim > MAX_AXES:
            raise ValueError(f"entry {name!r} has {array.ndim} axes, at most {MAX_AXES} can be stored")
        references = ChunkReferences(reference, array.dtype, array.shape)
        if codec is None:
            codec = _choose_codec(array, reference)
        grid = Grid(array.shape, part_shape(array.shape, array.dtype.itemsize, self._chunk_bytes))
        flat = np.ascontiguousarray(array).reshape(-1)
        chunks = self._write_chunks(_Encoder(name, flat, grid, codec, references, self._verify))
        entry = Entry(name, array.dtype, grid, codec, chunks)
        self._entries[name] = entry
        return entry

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of an entry is {name!r}, expected a string")
        if name in self._entries:
            raise ValueError(f"the container has an entry {name!r} already")

    def _write_chunks(self, encoder: _Encoder) -> tuple[Chunk, ...]:
        """Encode all chunks of an entry in parallel and write them in order; writes nothing if it raises."""
        chunks = []
        position = self._position
        try:
            for payload, checksum in parallel_map(encoder.encode, range(encoder.grid.count()), self._threads):
                self._file.write(payload)
                chunks.append(Chunk(position, len(payload), checksum))
                position += len(payload)
        except BaseException:
            # The caller may continue after an error, so remove the chunks that were written. If that fails as well,
            # the container cannot be completed.
            self._intact = False
            self._file.seek(self._position)
            self._file.truncate()
            self._intact = True
            raise
        self._position = position
        return tuple(chunks)

    def set(self, name: str, value: Any) -> None:
        """Store a small JSON value (numbers, strings, lists, dicts with string keys) under `name`, in the index.

        The value is copied now.

        Raises:
            TypeError: If the value is not plain JSON.
            ValueError: If the value contains NaN or an infinite number.
        """
        self.set_encoded(name, encode_json(value, name))

    def set_encoded(self, name: str, text: str) -> None:
        """Store JSON that is encoded already, as `dump_json` encodes it; for values that are large."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a value is {name!r}, expected a string")
        self._values[name] = text

    def finish(self) -> None:
        """Write index and footer; `write_container` calls it."""
        if not self._intact:
            raise ValueError("the container was damaged by a failed write and cannot be finished")
        text = join_index(self._kind, f"slipstream {__version__}", self._entries, self._values)
        # Never write what cannot be read.
        check_limits(text)
        footer = Footer.of(self._position, text)
        packed_footer = footer.pack(self._header)
        self._file.write(text)
        self._file.write(packed_footer)
        self.identity = footer.identity
        self.file_bytes = self._position + len(text) + len(packed_footer)


@dataclass(frozen=True)
class _Encoder:
    """Encodes the chunks of one array; called from several threads."""

    name: str
    flat: NDArray[Any]
    grid: Grid
    codec: Codec
    references: ChunkReferences
    verify: bool

    def encode(self, number: int) -> tuple[bytes | memoryview, int]:
        """Return the payload of a chunk and its checksum."""
        start, shape = self.grid.part(number)
        part = self.flat[start : start + math.prod(shape)].reshape(shape)
        codec = self.references.bind(self.codec, start, shape)
        # Raw bytes are written from where they are.
        payload: bytes | memoryview = part.reshape(-1).view(np.uint8).data
        if not isinstance(codec, Raw):
            payload = codec.encode(part)
        if self.verify:
            check_payload(self.name, codec, payload, part)
        return payload, xxhash.xxh3_64_intdigest(payload)


def _choose_codec(array: NDArray[Any], reference: Reference | None) -> Codec:
    # A reference that exists in parts only cannot be sampled.
    if callable(reference):
        reference = None
    return choose_codec(array, reference)


def check_payload(name: str, codec: Codec, payload: bytes | memoryview, array: NDArray[Any]) -> None:
    """Decode the payload of an array and raise `CodecError` unless every bit is the same."""
    # Compared as words: NaN equals the same NaN, and no bytes are copied.
    with scratch_scope():
        decoded = scratch("decoded", array.size, array.dtype).reshape(array.shape)
        codec.decode(payload, decoded)
        is_same = np.array_equal(as_words(array), as_words(decoded))
    if not is_same:
        raise CodecError(f"entry {name!r} does not come back from codec {codec.name!r} as it was; nothing was written")
