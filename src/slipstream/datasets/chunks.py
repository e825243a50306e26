"""How the frames of a dataset lie in their file: contiguous, in chunks, or so that only HDF5 can read them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.cameras import Pixels, look_at
from slipstream.datasets.filters import Filter, can_decode
from slipstream.datasets.names import name_of
from slipstream.datasets.stored import creation_of
from slipstream.errors import CorruptFileError, DatasetError
from slipstream.memory import machine_bytes
from slipstream.text import install_hint

Reading = Literal["contiguous", "chunks", "locked"]
"""How frames are read: ``contiguous`` by position, ``chunks`` by a table of their chunks and our own decoding, both in
parallel; ``locked`` by HDF5, which does one read at a time."""
Encoding = Literal["raw", "rgb", "bgr"]
"""What a row is: pixels, or a compressed image (JPEG, PNG, WebP) whose channels had this order when it was encoded."""

_MAX_ROW_BYTES = 1 << 30
INGEST_HINT = "`slipstream data ingest` stores resized frames, once, that are read in parallel"


@dataclass(frozen=True)
class FrameKind:
    """How frames are stored; usually the same for all datasets of a camera.

    Attributes:
        height: Pixels from top to bottom.
        width: Pixels from left to right.
        channels: 1, 3 or 4.
        channels_first: Whether the channels of stored pixels come first.
        encoding: Whether rows are pixels or compressed images.
        reading: How they are read.
        row_shape: Shape of a stored row.
        chunk: Shape of a chunk, if there are chunks.
        filters: The filters that chunks went through, in the order of writing.
        fill: Value of a chunk that was never written.
        because: Why only HDF5 can read it, if so.
        dtype: Of stored values, in NumPy's notation.
        scale: What stored values are multiplied with to become 0 to 255.
        format: ``JPEG``, ``PNG`` or ``WebP`` if rows are compressed images.
        color_assumed: Whether the order of the channels of compressed images is a guess.
    """

    height: int
    width: int
    channels: int
    channels_first: bool
    encoding: Encoding
    reading: Reading
    row_shape: tuple[int, ...]
    chunk: tuple[int, ...] = ()
    filters: tuple[Filter, ...] = ()
    fill: float = 0
    because: str = ""
    dtype: str = "|u1"
    scale: float = 1.0
    format: str = ""
    color_assumed: bool = False

    @property
    def row_bytes(self) -> int:
        """Size of a stored row."""
        return math.prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def amplification(self) -> float:
        """How many bytes are decoded for each byte of a single frame."""
        if not self.chunk:
            return 1.0
        covered = 1
        for size, step in zip(self.row_shape, self.chunk[1:], strict=True):
            covered *= -(-size // step) * step
        return self.chunk[0] * covered / max(1, math.prod(self.row_shape))


def frame_kind(
    data: h5py.Dataset, *, color: Literal["rgb", "bgr"] | None = None, bgr: bool = False
) -> tuple[FrameKind, int]:
    """Return how the frames of a dataset are stored, and where they begin if they are contiguous.

    Args:
        data: The dataset.
        color: Order of the channels when images were encoded; None assumes RGB, or BGR if `bgr`.
        bgr: Whether recordings of this layout gave red for blue to OpenCV, as ALOHA does; reading undoes it.

    Raises:
        DatasetError: If it has no images, images without pixels, or images that would lose information.
        CorruptFileError: If it ends beyond the end of the file.
    """
    pixels = look_at(data, name_of(data), named=True)
    return kind_of(data, check_images(data, pixels), color=color, bgr=bgr)


def check_images(data: h5py.Dataset, found: Pixels | str | None) -> Pixels:
    """Return how images are read, or raise for the reason that they are not."""
    if isinstance(found, Pixels):
        return found
    where = f"{data.file.filename}: {name_of(data)}"
    if found is not None:
        raise DatasetError(f"{where} cannot be used as a camera: {found}")
    shape = "no shape"
    if data.shape is not None:
        shape = f"shape {list(data.shape)}"
    raise DatasetError(
        f"{where} holds {data.dtype} of {shape}, expected images: [rows, height, width, 3], [rows, 3, height, width] "
        "or [rows, height, width] of 0 to 255 or 0 to 1, or rows of compressed images"
    )


def kind_of(
    data: h5py.Dataset, pixels: Pixels, *, color: Literal["rgb", "bgr"] | None = None, bgr: bool = False
) -> tuple[FrameKind, int]:
    """Return the same as `frame_kind` for images that were looked at before."""
    itemsize = data.dtype.itemsize
    chunks = data.chunks or ()
    if 0 in data.shape[1:]:
        raise DatasetError(f"{_where(data)} has shape {list(data.shape)}: its images have no pixels")
    if max(math.prod(data.shape[1:]), math.prod(chunks)) * itemsize > _MAX_ROW_BYTES:
        raise DatasetError(
            f"{_where(data)} has images or chunks of more than {_MAX_ROW_BYTES >> 20} MiB, which is refused"
        )
    encoding: Encoding = "raw"
    if pixels.format:
        encoding = color or ("bgr" if bgr else "rgb")
    plist = creation_of(data)
    reading, because, filters = _reading(data, plist)
    offset = -1
    if reading == "contiguous":
        offset = _offset(data)
    # Bytes of fixed length are read as an axis of bytes, and images of one channel get an axis for it.
    row_shape = tuple(data.shape[1:])
    chunk: tuple[int, ...] = ()
    if reading == "chunks":
        chunk = tuple(chunks)
    dtype = data.dtype.str
    if data.dtype.kind in "SV":
        dtype = "|u1"
        row_shape = (itemsize,)
        chunk = (chunk[0], itemsize) if chunk else ()
    elif data.ndim == 3:
        row_shape = (*row_shape, 1)
        chunk = (*chunk, 1) if chunk else ()
    elif data.dtype.kind == "O":
        dtype = "|u1"
    color_assumed = bool(pixels.format) and color is None
    kind = _kind(
        pixels, encoding, reading, row_shape, chunk, filters, _fill(data, plist), because, dtype, color_assumed
    )  # fmt: skip
    return kind, offset


@functools.lru_cache(maxsize=256)
def _kind(
    pixels: Pixels, encoding: Encoding, reading: Reading, row_shape: tuple[int, ...], chunk: tuple[int, ...],
    filters: tuple[Filter, ...], fill: float, because: str, dtype: str, color_assumed: bool,
) -> FrameKind:  # fmt: skip
    """Return a kind; the same object for the same arguments, because thousands of episodes share one."""
    return FrameKind(
        height=pixels.height,
        width=pixels.width,
        channels=pixels.channels,
        channels_first=pixels.channels_first,
        encoding=encoding,
        reading=reading,
        row_shape=row_shape,
        chunk=chunk,
        filters=filters,
        fill=fill,
        because=because,
        dtype=dtype,
        scale=pixels.scale,
        format=pixels.format,
        color_assumed=color_assumed,
    )


def _fill(data: h5py.Dataset, plist: Any) -> float:
    """Return the value of what was never written; bytes of images are zeros there."""
    if data.dtype.kind not in "iuf" or plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        return 0
    return float(data.fillvalue or 0)


def _reading(data: h5py.Dataset, plist: Any) -> tuple[Reading, str, tuple[Filter, ...]]:
    """Decide how frames are read."""
    layout = plist.get_layout()
    if data.dtype.kind == "O":
        return "locked", "its rows have different lengths", ()
    if layout == h5py.h5d.CONTIGUOUS:
        if data.id.get_offset() is None:
            return "locked", "nothing was ever written to it", ()
        return "contiguous", "", ()
    if layout != h5py.h5d.CHUNKED:
        kind = "stored within its header"
        if layout == h5py.h5d.VIRTUAL:
            kind = "virtual"
        return "locked", f"it is {kind}", ()
    filters = filters_of(plist)
    unknown = [filter_ for filter_ in filters if not can_decode(filter_)]
    if not unknown:
        return "chunks", "", filters
    if not h5py.h5z.filter_avail(unknown[0].number):
        raise DatasetError(
            f"{data.file.filename}: {name_of(data)} is compressed with {unknown[0].name}, which HDF5 does not know "
            f"here; {install_hint('datasets')} brings more filters"
        )
    return "locked", f"it is compressed with {unknown[0].name}", filters


def filters_of(plist: Any) -> tuple[Filter, ...]:
    """Return the filters of a dataset's chunks, in the order of writing."""
    filters = []
    for position in range(plist.get_nfilters()):
        number, _, settings, _ = plist.get_filter(position)
        filters.append(Filter(number, tuple(settings)))
    return tuple(filters)


def _where(data: h5py.Dataset) -> str:
    return f"{data.file.filename}: {name_of(data)}"


def _offset(data: h5py.Dataset) -> int:
    offset = int(data.id.get_offset())
    end = offset + data.nbytes
    size = data.file.id.get_filesize()
    if offset < 0 or end > size:
        raise CorruptFileError(f"{_where(data)} ends at byte {end}, beyond the end of the file ({size} bytes)")
    return offset


class ChunkTable:
    """Where the chunks of a dataset are, 16 bytes each.

    Attributes:
        grid: How many chunks there are along each axis of a stored row, after the rows.
        offsets: Where each begins in the file, -1 where none was written.
        sizes: How many bytes each takes.
        masks: Which filters were left out, per chunk.
    """

    def __init__(self, data: h5py.Dataset) -> None:
        where = _where(data)
        grid = [-(-size // step) for size, step in zip(data.shape, data.chunks, strict=True)]
        count = math.prod(grid)
        if 16 * count > machine_bytes() // 2:
            raise DatasetError(f"{where} claims {count} chunks, more than can be kept track of")
        stored = data.id.get_num_chunks()
        if stored > count:
            raise CorruptFileError(f"{where} has {stored} chunks, expected at most {count}")
        self.grid = tuple(grid)
        self.offsets: NDArray[np.int64] = np.full(count, -1, np.int64)
        self.sizes: NDArray[np.uint32] = np.zeros(count, np.uint32)
        self.masks: NDArray[np.uint32] = np.zeros(count, np.uint32)
        strides = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
        steps = data.chunks
        limit = data.file.id.get_filesize()
        chunks: list[Any] = []
        data.id.chunk_iter(chunks.append)
        for chunk in chunks:
            number = 0
            for at, step, stride in zip(chunk.chunk_offset, steps, strides, strict=True):
                number += at // step * stride
            if not 0 <= number < count:
                raise CorruptFileError(f"{where} has a chunk outside of it")
            end = chunk.byte_offset + chunk.size
            if chunk.byte_offset < 0 or end > limit:
                raise CorruptFileError(
                    f"{where} has a chunk that ends at byte {end}, beyond the end of the file ({limit} bytes)"
                )
            self.offsets[number] = chunk.byte_offset
            self.sizes[number] = chunk.size
            self.masks[number] = chunk.filter_mask

    def of_rows(self, chunk_row: int) -> range:
        """Return the numbers of the chunks that hold some rows."""
        each = math.prod(self.grid[1:])
        return range(chunk_row * each, (chunk_row + 1) * each)
