"""What is in a frame: named arrays of one dtype and shape each, and where in the rows of which column they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.base import word_dtype
from slipstream.errors import CorruptFileError, ReplayError
from slipstream.replay.images import line_bytes_of
from slipstream.replay.jpeg import channel_axis, check_quality
from slipstream.replay.packing import ImageRows, RowPacker, Rows, VectorRows
from slipstream.schema.dtypes import parse_numpy_dtype

VECTORS = 0
"""The column of everything that is not an image."""

_IMAGE_BYTES = 1024


@dataclass(frozen=True)
class Field:
    """One named array: its elements, whether it belongs to frames (has a next) or to steps, and where it is kept."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    of_frames: bool
    column: int
    start: int

    @property
    def stop(self) -> int:
        """Where it ends in a row."""
        return self.start + math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def read(self, rows: Rows) -> NDArray[Any]:
        """Return the array in rows of its column; a view if it is all there is in them."""
        part = np.ascontiguousarray(rows[:, self.start : self.stop])
        return part.view(self.dtype).reshape(len(rows), *self.shape)

    def write(self, rows: Rows, values: NDArray[Any], where: Any = slice(None)) -> None:
        """Put an array into rows of its column."""
        rows[where, self.start : self.stop] = bytes_of(values)


def bytes_of(values: NDArray[Any]) -> Rows:
    """View ``[rows, ...]`` as bytes; copies what is not contiguous."""
    width = math.prod(values.shape[1:]) * values.dtype.itemsize
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(len(values), width)


@dataclass(frozen=True)
class Packing:
    """How a buffer packs.

    Args:
        jpeg: Quality for all images, or for those named; without loss by default.
        images: Whether to pack images as such; if not, they are kept as they are.
    """

    jpeg: int | Mapping[str, int] | None = None
    images: bool = True

    def __post_init__(self) -> None:
        for quality in self.jpeg.values() if isinstance(self.jpeg, Mapping) else (self.jpeg,):
            check_quality(quality)

    def check_names(self, images: Sequence[str]) -> None:
        """Raise `ReplayError` if the quality of something is told that is not among the images."""
        unknown = sorted(set(self.jpeg) - set(images)) if isinstance(self.jpeg, Mapping) else []
        if unknown:
            raise ReplayError(f"jpeg names {unknown[0]!r}, which is not an image here; images are {sorted(images)}")

    def quality(self, name: str) -> int | None:
        """Return the JPEG quality for an image, or None."""
        return self.jpeg.get(name) if isinstance(self.jpeg, Mapping) else self.jpeg


@dataclass(frozen=True)
class Spec:
    """What a field is before it has a place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    of_frames: bool


class RowLayout:
    """The fields of a buffer, and the columns that hold them."""

    def __init__(self, fields: Sequence[Field], packers: Sequence[RowPacker]) -> None:
        self.fields = {field.name: field for field in fields}
        self.packers = list(packers)

    @classmethod
    def plan(cls, specs: Sequence[Spec], packing: Packing) -> RowLayout:
        """Give every field a place: images a column each, all others one together, those of frames first.

        Raises:
            UnsupportedDtypeError: If elements are not plain numbers.
            ReplayError: If an image cannot be a JPEG though that is asked for, or if what shall be one is no image.
        """
        fields: list[Field] = []
        packers: list[RowPacker] = [VectorRows(0)]
        used = 0
        for spec in sorted(specs, key=lambda spec: not spec.of_frames):
            dtype = np.dtype(spec.dtype)
            word_dtype(dtype)
            nbytes = math.prod(spec.shape) * dtype.itemsize
            if dtype == np.uint8 and len(spec.shape) > 1 and nbytes >= _IMAGE_BYTES:
                quality = packing.quality(spec.name) if packing.images else None
                if quality is not None:
                    channel_axis(spec.shape)
                fields.append(Field(spec.name, dtype.str, spec.shape, spec.of_frames, len(packers), 0))
                packers.append(ImageRows(nbytes, line_bytes_of(spec.shape), quality, spec.shape, not packing.images))
            else:
                fields.append(Field(spec.name, dtype.str, spec.shape, spec.of_frames, VECTORS, used))
                used += nbytes
        packers[VECTORS] = VectorRows(used)
        packing.check_names([field.name for field in fields if field.column != VECTORS])
        order = {spec.name: number for number, spec in enumerate(specs)}
        return cls(sorted(fields, key=lambda field: order[field.name]), packers)

    @property
    def frame_fields(self) -> list[Field]:
        """Those that have a next."""
        return [field for field in self.fields.values() if field.of_frames]

    @property
    def step_fields(self) -> list[Field]:
        """Those that belong to a step."""
        return [field for field in self.fields.values() if not field.of_frames]

    @property
    def row_bytes(self) -> int:
        """The size of a frame before packing."""
        return sum(packer.row_bytes for packer in self.packers)

    def empty_rows(self, count: int) -> list[Rows]:
        """Return memory for so many frames, of zeros."""
        return [np.zeros((count, packer.row_bytes), np.uint8) for packer in self.packers]

    def fill(self, rows: Sequence[Rows], values: Mapping[str, NDArray[Any]], where: Any = slice(None)) -> None:
        """Put arrays into the rows of their columns."""
        for name, array in values.items():
            field = self.fields[name]
            field.write(rows[field.column], array, where)

    def check(self, name: str, values: NDArray[Any]) -> None:
        """Raise `ReplayError` unless ``[rows, ...]`` is of the dtype and shape that a field has."""
        field = self.fields[name]
        if values.dtype.str != field.dtype or values.shape[1:] != field.shape:
            raise ReplayError(
                f"{name!r} is {values.dtype}{list(values.shape[1:])}, in this buffer it is "
                f"{np.dtype(field.dtype)}{list(field.shape)}"
            )

    def to_json(self) -> list[dict[str, Any]]:
        """Return the fields as JSON."""
        documents = []
        for field in self.fields.values():
            packer = self.packers[field.column]
            ways = (packer.jpeg, packer.stored) if isinstance(packer, ImageRows) else (None, False)
            documents.append({**asdict(field), "shape": list(field.shape), "jpeg": ways[0], "stored": ways[1]})
        return documents

    @classmethod
    def from_json(cls, documents: Any) -> RowLayout:
        """Read what `to_json` wrote.

        Raises:
            CorruptFileError: If it is not something that `to_json` writes.
        """
        try:
            specs = [
                Spec(
                    str(item["name"]),
                    parse_numpy_dtype(item["dtype"]).str,
                    tuple(map(int, item["shape"])),
                    bool(item["of_frames"]),
                )
                for item in documents
            ]
            qualities = {item["name"]: item["jpeg"] for item in documents if item["jpeg"] is not None}
            layout = cls.plan(specs, Packing(qualities, images=not any(item["stored"] for item in documents)))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"the fields of a replay buffer are not as a writer writes them ({error})"
            ) from error
        if layout.to_json() != documents:
            raise CorruptFileError("the fields of a replay buffer do not lie where this release puts them")
        return layout
