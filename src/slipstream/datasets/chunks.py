"""How the frames of a dataset lie in their file: in one piece, in chunks, or so that only HDF5 can get at them."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.files import decode_each
from slipstream.datasets.filters import Filter, can_decode
from slipstream.errors import CorruptFileError, DatasetError
from slipstream.memory import machine_bytes
from slipstream.text import install_hint

Reading = Literal["contiguous", "chunks", "locked"]
"""How frames are read: ``contiguous`` by position, ``chunks`` by a table of their chunks and our own decoding, both in
parallel; ``locked`` by HDF5, which is one read at a time."""
Encoding = Literal["raw", "rgb", "bgr"]
"""What a row is: pixels, or a compressed picture (JPEG or PNG) whose channels were in this order when it was made."""

_CHANNELS = (1, 3, 4)
_MAX_ROW_BYTES = 1 << 30
_PICTURES = (b"\xff\xd8\xff", b"\x89PNG")
REPACK = "`slipstream data ingest` stores resized frames, once, that are read in parallel"


@dataclass(frozen=True)
class FrameKind:
    """How frames are stored; the same for all datasets of a camera, as a rule.

    Attributes:
        height: Pixels from top to bottom.
        width: Pixels from left to right.
        channels: 1, 3 or 4.
        channels_first: Whether the channels of stored pixels come first.
        encoding: Whether rows are pixels or pictures.
        reading: How they are read.
        row_shape: Shape of a stored row.
        chunk: Shape of a chunk, if there are chunks.
        filters: What the chunks went through, in the order of writing.
        fill: What a chunk holds that was never written.
        because: Why only HDF5 can read it, if so.
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
    fill: int = 0
    because: str = ""

    @property
    def row_bytes(self) -> int:
        """Size of a stored row."""
        return math.prod(self.row_shape)

    @property
    def amplification(self) -> float:
        """How many bytes are decoded for each byte of a frame that is wanted alone."""
        if not self.chunk:
            return 1.0
        covered = math.prod(-(-size // step) * step for size, step in zip(self.row_shape, self.chunk[1:], strict=True))
        return self.chunk[0] * covered / max(1, self.row_bytes)


def is_camera(data: h5py.Dataset) -> bool:
    """Tell whether a dataset looks like images: pixels with channels first or last, or compressed pictures."""
    if data.shape is None:
        return False
    if data.dtype == np.uint8 and data.ndim == 4:
        return data.shape[1] in _CHANNELS or data.shape[3] in _CHANNELS
    return bool(data.shape[0]) and _is_pictures(data)


def _is_pictures(data: h5py.Dataset) -> bool:
    variable = data.ndim == 1 and h5py.check_vlen_dtype(data.dtype) == np.uint8
    if not variable and not (data.ndim == 2 and data.dtype == np.uint8):
        return False
    return bytes(np.asarray(data[0])[:4]).startswith(_PICTURES)


def frame_kind(data: h5py.Dataset, *, bgr: bool = False) -> tuple[FrameKind, int]:
    """Return how the frames of a dataset are stored, and where they begin if they are in one piece.

    Args:
        data: The dataset.
        bgr: Whether whoever compressed pictures gave red for blue to OpenCV, as ALOHA does; reading undoes it.

    Raises:
        DatasetError: If it does not hold images, or images without pixels.
        CorruptFileError: If it lies beyond the end of the file.
    """
    where = f"{data.file.filename}: {data.name}"
    if data.shape is None or not is_camera(data):
        shape = "no shape" if data.shape is None else f"shape {list(data.shape)}"
        raise DatasetError(
            f"{where} holds {data.dtype} of {shape}, expected images: uint8 of shape [rows, height, width, 3] or "
            "[rows, 3, height, width], or compressed pictures"
        )
    if 0 in data.shape[1:]:
        raise DatasetError(f"{where} has shape {list(data.shape)}: its images have no pixels")
    if math.prod(data.shape[1:]) > _MAX_ROW_BYTES or math.prod(data.chunks or ()) > _MAX_ROW_BYTES:
        raise DatasetError(f"{where} has images or chunks of more than {_MAX_ROW_BYTES >> 20} MiB, which is refused")
    if _is_pictures(data):
        height, width, channels = _picture_size(data)
        encoding: Encoding = "bgr" if bgr else "rgb"
        first = False
    else:
        encoding, first = "raw", data.shape[3] not in _CHANNELS
        height, width = data.shape[2:] if first else data.shape[1:3]
        channels = data.shape[1] if first else data.shape[3]
    plist = data.id.get_create_plist()
    reading, because, filters = _reading(data, plist)
    offset = _offset(data, where) if reading == "contiguous" else -1
    kind = FrameKind(
        height, width, channels, first, encoding, reading, tuple(data.shape[1:]),
        tuple(data.chunks) if reading == "chunks" else (), filters, int(data.fillvalue or 0) if data.ndim > 1 else 0,
        because,
    )  # fmt: skip
    return kind, offset


def _picture_size(data: h5py.Dataset) -> tuple[int, int, int]:
    import cv2  # noqa: PLC0415 - only files with pictures need it to be looked at

    pictures: list[Any] = []

    def decode(raw: NDArray[np.uint8]) -> None:
        with contextlib.suppress(cv2.error):
            pictures.append(cv2.imdecode(raw, cv2.IMREAD_UNCHANGED))

    decode_each(decode, [np.asarray(data[0])])
    picture = pictures[0] if pictures else None
    if picture is None:
        raise CorruptFileError(f"{data.file.filename}: {data.name} begins with a picture that cannot be decoded")
    height, width = picture.shape[:2]
    return height, width, 1 if picture.ndim == 2 else 3


def _reading(data: h5py.Dataset, plist: Any) -> tuple[Reading, str, tuple[Filter, ...]]:
    """Decide how frames are read."""
    layout = plist.get_layout()
    if data.dtype != np.uint8:
        return "locked", "its rows have lengths of their own", ()
    if layout == h5py.h5d.CONTIGUOUS:
        if data.id.get_offset() is None:
            return "locked", "nothing was ever written to it", ()
        return "contiguous", "", ()
    if layout != h5py.h5d.CHUNKED:
        kind = "virtual" if layout == h5py.h5d.VIRTUAL else "stored within its header"
        return "locked", f"it is {kind}", ()
    found = [plist.get_filter(number) for number in range(plist.get_nfilters())]
    filters = tuple(Filter(number, tuple(settings)) for number, _, settings, _ in found)
    unknown = [filter_ for filter_ in filters if not can_decode(filter_)]
    if unknown:
        if not h5py.h5z.filter_avail(unknown[0].number):
            raise DatasetError(
                f"{data.file.filename}: {data.name} is compressed with {unknown[0].name}, which HDF5 does not know "
                f"here; {install_hint('datasets')} brings more filters"
            )
        return "locked", f"it is compressed with {unknown[0].name}", filters
    return "chunks", "", filters


def _offset(data: h5py.Dataset, where: str) -> int:
    offset = int(data.id.get_offset())
    end, size = offset + data.nbytes, data.file.id.get_filesize()
    if offset < 0 or end > size:
        raise CorruptFileError(f"{where} is said to end at byte {end} of a file of {size}")
    return offset


class ChunkTable:
    """Where the chunks of a dataset are: read once, 16 bytes a chunk.

    Attributes:
        grid: How many chunks there are along each axis.
        offsets: Where each begins in the file, -1 where none was written.
        sizes: How many bytes each takes.
        masks: Which filters were left out, per chunk.
    """

    def __init__(self, data: h5py.Dataset) -> None:
        self.grid = tuple(-(-size // step) for size, step in zip(data.shape, data.chunks, strict=True))
        count = math.prod(self.grid)
        if 16 * count > machine_bytes() // 2:
            raise DatasetError(
                f"{data.file.filename}: {data.name} claims {count} chunks, more than can be kept track of"
            )
        stored = data.id.get_num_chunks()
        if stored > count:
            raise CorruptFileError(f"{data.file.filename}: {data.name} has {stored} chunks, expected at most {count}")
        self.offsets: NDArray[np.int64] = np.full(count, -1, np.int64)
        self.sizes: NDArray[np.uint32] = np.zeros(count, np.uint32)
        self.masks: NDArray[np.uint32] = np.zeros(count, np.uint32)
        strides = [math.prod(self.grid[axis + 1 :]) for axis in range(len(self.grid))]
        steps, limit = data.chunks, data.file.id.get_filesize()

        def note(chunk: Any) -> None:
            number = sum(
                at // step * stride for at, step, stride in zip(chunk.chunk_offset, steps, strides, strict=True)
            )
            if not 0 <= number < count:
                raise CorruptFileError(f"{data.file.filename}: {data.name} has a chunk outside of it")
            if chunk.byte_offset < 0 or chunk.byte_offset + chunk.size > limit:
                raise CorruptFileError(
                    f"{data.file.filename}: a chunk of {data.name} is said to end at byte "
                    f"{chunk.byte_offset + chunk.size} of a file of {limit}"
                )
            self.offsets[number], self.sizes[number] = chunk.byte_offset, chunk.size
            self.masks[number] = chunk.filter_mask

        data.id.chunk_iter(note)

    def of_rows(self, chunk_row: int) -> range:
        """Return the numbers of the chunks that hold some rows."""
        each = math.prod(self.grid[1:])
        return range(chunk_row * each, (chunk_row + 1) * each)
