"""What a read of a container asks for: elements of an entry, where they go, and what they are stored against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.base import check_reference
from slipstream.errors import CodecError
from slipstream.store.index import Entry
from slipstream.store.reference import ChunkReferences, Reference


@dataclass(frozen=True)
class Request:
    """Elements of an entry to decode into memory.

    Attributes:
        entry: The entry.
        first: Number of the first element in the flat array.
        out: Flat memory for the elements.
        references: What the chunks are stored against.
    """

    entry: Entry
    first: int
    out: NDArray[Any]
    references: ChunkReferences


def locate_rows(entry: Entry, rows: slice) -> tuple[int, tuple[int, ...]]:
    """Return the number of the first element of some rows, and the shape of these rows."""
    if not entry.shape or rows.step not in (None, 1):
        raise ValueError(f"cannot read {rows} of entry {entry.name!r}, which has shape {list(entry.shape)}")
    start, stop, _ = rows.indices(entry.shape[0])
    row_shape = entry.shape[1:]
    return start * math.prod(row_shape), (max(0, stop - start), *row_shape)


def check_out(out: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raise `CodecError` unless an array of this dtype and shape can be decoded into `out`."""
    fits = type(out) is np.ndarray and out.dtype == dtype and out.shape == shape
    if not fits or not out.flags.c_contiguous or not out.flags.writeable:
        raise CodecError(
            f"out is {out.dtype}{list(out.shape)}, expected a contiguous, writable array {dtype}{list(shape)}"
        )


def without_overlap(entry: Entry, reference: Reference | None, out: NDArray[Any]) -> Reference | None:
    """Copy a reference that overlaps `out`. The same address is safe: a chunk overwrites only the part that it read."""
    if not isinstance(reference, np.ndarray):
        return reference
    check_reference(reference, entry.dtype, entry.shape)
    if np.may_share_memory(out, reference) and out.ctypes.data != reference.ctypes.data:
        return reference.copy()
    return reference
