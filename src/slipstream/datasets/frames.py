"""Read frames from wherever they are, resized, into a batch: in parallel, each frame once, and without HDF5's lock.

=============  =====================================================================================================
stored         is read by
=============  =====================================================================================================
contiguous     ``pread`` at its position
in chunks      a table of the chunks, made once; ``pread`` of the chunk, and decoding here, see `filters`
otherwise      HDF5, one at a time: rows of different lengths, filters that are not known here
=============  =====================================================================================================

Nothing is mapped into memory: a mapping costs more on first touch, grows the resident size with what was read, and
turns a file that got shorter into a crash.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.cameras import row_bytes, to_bytes
from slipstream.datasets.chunks import INGEST_HINT, ChunkTable, FrameKind
from slipstream.datasets.files import Files, decode_each, pread_into
from slipstream.datasets.filters import decode_chunk
from slipstream.datasets.opening import dataset
from slipstream.datasets.pictures import decode_picture
from slipstream.datasets.prepare import Frame, Interpolation, placing
from slipstream.errors import CodecError, CorruptFileError, SlipstreamError
from slipstream.memory import scratch, scratch_scope
from slipstream.threads import default_threads

logger = logging.getLogger(__name__)

_LEAST_FRAMES, _MOST_FRAMES = 4, 256  # in a part of a batch, which one thread reads
_ROW_BITS = 40
_BYTES = np.dtype(np.uint8)


class Source(Protocol):
    """Where the frames of one dataset are read from."""

    file: int

    @property
    def rows_together(self) -> int:
        """How many neighbours are decoded with a frame, and given to `read` together; 0 if it takes any rows."""

    def read(
        self, files: Files, rows: Sequence[int], targets: Sequence[Frame], interpolation: Interpolation = "linear"
    ) -> None:
        """Read frames, each into its target ``[channels, height, width]``, resized to that."""


@dataclass(frozen=True)
class Request:
    """Frames of one camera, and where they shall go.

    Attributes:
        sources: Number of the source of each frame.
        rows: Row of each frame in it.
        out: Memory for them, ``[places, channels, height, width]``.
        places: At which place of it each frame goes; by default one after another.
    """

    sources: NDArray[np.int64]
    rows: NDArray[np.int64]
    out: NDArray[np.uint8]
    places: NDArray[np.int64] | None = None


class FrameReader:
    """Reads batches of frames from many sources.

    May be used by several threads, and after a fork or pickling.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.sources: list[Source] = []
        _readers.add(self)

    def add(self, source: Source) -> int:
        """Add a source and return its number."""
        self.sources.append(source)
        return len(self.sources) - 1

    def prepare(self) -> None:
        """Find where the chunks of all datasets are, each once.

        Called before a process starts workers, so that they need not do it again. A file that cannot be read is
        reported when a frame of it is wanted.
        """
        pending = [source for source in self.sources if isinstance(source, DatasetSource) and source.needs_table]
        for source in pending:
            with contextlib.suppress(SlipstreamError, OSError):
                source.find_chunks(self.files)

    def __getstate__(self) -> dict[str, Any]:
        if not self.files.closed:
            self.prepare()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _readers.add(self)

    def read(
        self, requests: Sequence[Request], threads: int | None = None, interpolation: Interpolation = "linear"
    ) -> None:
        """Fill the memory of all requests; a frame that is asked for twice by one request is decoded once.

        Args:
            requests: What to read, and into which memory.
            threads: Number of threads; by default one per core.
            interpolation: How to resize frames that are stored in another size.

        Raises:
            CorruptFileError: If a frame cannot be read or decoded.
            DatasetError: If a file changed since it was opened, or all are closed.
        """
        count = threads or default_threads()
        # Few large parts: at every end of one, threads wait for the interpreter, and for each other.
        part = min(_MOST_FRAMES, max(_LEAST_FRAMES, -(-sum(len(one.rows) for one in requests) // (3 * count))))
        groups: list[tuple[Source, list[int], list[Frame]]] = []
        repeats: list[tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]] = []
        for request in requests:
            keys = request.sources << _ROW_BITS | request.rows
            unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            places = np.arange(len(keys)) if request.places is None else request.places
            groups.extend(self._groups(unique, places[first], request.out, part))
            origin = first[inverse]
            repeated = np.flatnonzero(origin != np.arange(len(keys)))
            repeats.append((request.out, places[repeated], places[origin[repeated]]))
        read_block = functools.partial(self._read_block, interpolation)
        decode_each(read_block, list(_blocks(groups, part)), count)
        for out, to, origin in repeats:
            for target, source in zip(to.tolist(), origin.tolist(), strict=True):
                out[target] = out[source]
        for number in {source.file for source, _, _ in groups}:
            self.files.check(number)

    def _groups(
        self, keys: NDArray[np.int64], places: NDArray[np.int64], out: NDArray[np.uint8], part: int
    ) -> Iterator[tuple[Source, list[int], list[Frame]]]:
        """Put frames together that are decoded together, and otherwise as many as make a part; keys are in order."""
        numbers, rows = keys >> _ROW_BITS, keys & ((1 << _ROW_BITS) - 1)
        for number in np.unique(numbers).tolist():
            source = self.sources[number]
            first, last = np.searchsorted(numbers, [number, number + 1]).tolist()
            mine = rows[first:last]
            if source.rows_together:
                cuts = np.flatnonzero(np.diff(mine // source.rows_together)) + 1
            else:
                cuts = np.arange(part, len(mine), part)
            for some, wanted in zip(np.split(mine, cuts), np.split(places[first:last], cuts), strict=True):
                yield source, some.tolist(), [out[place] for place in wanted.tolist()]

    def _read_block(self, interpolation: Interpolation, block: list[tuple[Source, list[int], list[Frame]]]) -> None:
        with scratch_scope():
            for source, rows, targets in block:
                source.read(self.files, rows, targets, interpolation)


def _blocks(groups: Sequence[Any], part: int) -> Iterator[list[Any]]:
    """Cut work into parts that are worth the while of a thread."""
    block: list[Any] = []
    frames = 0
    for group in groups:
        block.append(group)
        frames += len(group[1])
        if frames >= part:
            yield block
            block, frames = [], 0
    if block:
        yield block


class DatasetSource:
    """The frames of a dataset in an HDF5 file.

    Args:
        file: Number of the file in the table of files.
        path: Of the dataset.
        kind: How it is stored.
        offset: Where it begins, if it is in one piece.
    """

    __slots__ = ("_table", "file", "kind", "offset", "path")

    def __init__(self, file: int, path: str, kind: FrameKind, offset: int) -> None:
        self.file, self.path, self.kind, self.offset = file, path, kind, offset
        self._table: ChunkTable | None = None

    @property
    def rows_together(self) -> int:
        """How many neighbours are decoded with a frame, and given to `read` together; 0 if it takes any rows."""
        return self.kind.chunk[0] if self.kind.chunk else 0

    def read(
        self, files: Files, rows: Sequence[int], targets: Sequence[Frame], interpolation: Interpolation = "linear"
    ) -> None:
        """Read frames, each into its target, resized to that."""
        if self.kind.reading == "chunks":
            self._read_chunks(files, rows, targets, interpolation)
        elif self.kind.reading == "contiguous":
            self._read_contiguous(files, rows, targets, interpolation)
        else:
            for row, target in zip(rows, targets, strict=True):
                self._place(files, self._by_hdf5(files, row), target, row, interpolation)

    def _read_contiguous(
        self, files: Files, rows: Sequence[int], targets: Sequence[Frame], interpolation: Interpolation
    ) -> None:
        """Read frames by their position; straight into the batch if they are stored as they are wanted."""
        kind = self.kind
        memory = scratch("row", kind.row_bytes, _BYTES)
        raw = memory.view(kind.dtype).reshape(kind.row_shape)
        are_bytes = kind.encoding == "raw" and kind.dtype == _BYTES.str
        as_wanted = are_bytes and kind.channels_first and targets[0].shape == kind.row_shape
        put = None
        if are_bytes:
            put = placing(raw.shape, targets[0].shape, channels_first=kind.channels_first, interpolation=interpolation)
        with files.borrow(self.file) as descriptor:
            for row, target in zip(rows, targets, strict=True):
                place = target if as_wanted else memory
                if not pread_into(descriptor, place, self.offset + row * kind.row_bytes):
                    files.check(self.file)
                    raise self._damage(files, row, "the file ends before it")
                if put is None:
                    self._place(files, raw, target, row, interpolation)
                elif not as_wanted:
                    put(raw, target)

    def _by_hdf5(self, files: Files, row: int) -> NDArray[Any]:
        with files.hdf5(self.file) as file, self._naming(files, row):
            data = dataset(file, self.path)
            if self.kind.encoding != "raw":
                return row_bytes(data, row)
            return np.asarray(data[row]).reshape(self.kind.row_shape)

    def _read_chunks(
        self, files: Files, rows: Sequence[int], targets: Sequence[Frame], interpolation: Interpolation
    ) -> None:
        """Read frames that are in the same chunks."""
        kind = self.kind
        table = self.find_chunks(files, rows[0])
        chunk_row = rows[0] // kind.chunk[0]
        numbers = table.of_rows(chunk_row)
        within = [row - chunk_row * kind.chunk[0] for row in rows]
        if len(numbers) == 1 and kind.chunk[1:] == kind.row_shape:
            whole = self._chunk(files, table, numbers[0], rows[0])
            frames = [whole[number] for number in within]
        else:
            frames = list(self._assemble(files, table, numbers, within, rows[0]))
        for row, frame, target in zip(rows, frames, targets, strict=True):
            self._place(files, frame, target, row, interpolation)

    def _assemble(self, files: Files, table: ChunkTable, numbers: range, within: list[int], row: int) -> NDArray[Any]:
        """Assemble frames whose pixels are in several chunks."""
        kind = self.kind
        frames = np.empty((len(within), *kind.row_shape), kind.dtype)
        # The grid has no axis for the bytes of a string, nor for the only channel of an image without channels.
        grid = (*table.grid, *(1,) * (len(kind.chunk) - len(table.grid)))
        for number in numbers:
            at = np.unravel_index(number, grid)[1:]
            corner = [int(index) * step for index, step in zip(at, kind.chunk[1:], strict=True)]
            ends = [min(c + step, size) for c, step, size in zip(corner, kind.chunk[1:], kind.row_shape, strict=True)]
            chunk = self._chunk(files, table, number, row)
            part = tuple(slice(0, end - start) for start, end in zip(corner, ends, strict=True))
            frames[(slice(None), *map(slice, corner, ends))] = chunk[within][(slice(None), *part)]
        return frames

    def _chunk(self, files: Files, table: ChunkTable, number: int, row: int) -> NDArray[Any]:
        kind = self.kind
        if table.offsets[number] < 0:
            return np.full(kind.chunk, kind.fill, kind.dtype)
        nbytes = math.prod(kind.chunk) * np.dtype(kind.dtype).itemsize
        if table.sizes[number] > 2 * nbytes + 4096:
            raise self._damage(files, row, f"its chunk takes {table.sizes[number]} bytes for {nbytes}")
        payload = np.empty(int(table.sizes[number]), np.uint8)
        self._pread(files, payload, int(table.offsets[number]), row)
        try:
            whole = decode_chunk(payload, kind.filters, int(table.masks[number]), nbytes)
        except CodecError as error:
            raise self._damage(files, row, f"its chunk {error}") from error
        return whole.view(kind.dtype).reshape(kind.chunk)

    @property
    def needs_table(self) -> bool:
        """Whether its chunks were not looked for yet."""
        return self.kind.reading == "chunks" and self._table is None

    def find_chunks(self, files: Files, row: int = 0) -> ChunkTable:
        """Return where its chunks are; HDF5 is asked once."""
        table = self._table
        if table is None:
            with files.hdf5(self.file) as file, self._naming(files, row):
                table = self._table = ChunkTable(dataset(file, self.path))
        return table

    def _pread(self, files: Files, target: NDArray[np.uint8], offset: int, row: int) -> None:
        with files.borrow(self.file) as descriptor:
            if not pread_into(descriptor, target, offset):
                files.check(self.file)
                raise self._damage(files, row, "the file ends before it")

    def _place(self, files: Files, raw: NDArray[Any], target: Frame, row: int, interpolation: Interpolation) -> None:
        if self.kind.encoding == "raw":
            put = placing(raw.shape, target.shape, channels_first=self.kind.channels_first, interpolation=interpolation)
            try:
                put(to_bytes(raw, self.kind.scale), target)
            except CodecError as error:
                raise self._damage(files, row, str(error)) from error
            return
        try:
            picture = decode_picture(raw, self.kind.channels, self.kind.height * self.kind.width)
        except CodecError as error:
            raise self._damage(files, row, str(error)) from error
        put = placing(picture.shape, target.shape, swap=self.kind.encoding == "rgb", interpolation=interpolation)
        put(picture, target)

    @contextlib.contextmanager
    def _naming(self, files: Files, row: int) -> Iterator[None]:
        """Take any failure of HDF5 for damage."""
        try:
            yield
        except SlipstreamError:
            raise
        except Exception as error:
            files.check(self.file)
            raise self._damage(files, row, f"HDF5 says {' '.join(str(error).split())}") from error

    def _damage(self, files: Files, row: int, reason: str) -> CorruptFileError:
        return CorruptFileError(f"{files.paths[self.file]}: row {row} of {self.path} cannot be read: {reason}")

    def __getstate__(self) -> tuple[Any, ...]:
        return self.file, self.path, self.kind, self.offset, self._table

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.file, self.path, self.kind, self.offset, self._table = state


def warn_if_slow(path: object, camera: str, kind: FrameKind) -> None:
    """Log what will be slow and what can be done about it, and which order of colors is assumed."""
    if kind.reading == "locked":
        reason = f"can be read by HDF5 only, one frame at a time ({kind.because})"
        logger.warning("%s: the camera %s %s; %s", path, camera, reason, INGEST_HINT)
    elif kind.amplification > 2:
        reason = f"decodes {kind.amplification:.0f} times its size"
        logger.warning("%s: reading a frame of the camera %s %s; %s", path, camera, reason, INGEST_HINT)
    if kind.color_assumed and kind.channels > 1:
        assumed = f"{kind.format} images of the camera {camera} are assumed to be {kind.encoding.upper()}"
        other = "bgr" if kind.encoding == "rgb" else "rgb"
        logger.warning('%s: %s; pass color="%s" if red and blue are exchanged', path, assumed, other)


_readers: weakref.WeakSet[FrameReader] = weakref.WeakSet()


def _prepare_all() -> None:
    """Find all chunks before a fork: its children would all do the same again."""
    for reader in list(_readers):
        if not reader.files.closed:
            reader.prepare()


# Registered after the hook of `files`, so it runs before that one waits for HDF5's lock.
os.register_at_fork(before=_prepare_all)
