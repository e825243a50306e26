"""A dataset of an open file that remembers its shape, type and creation properties.

h5py asks HDF5 for them each time, which takes longer than everything else when thousands of datasets are looked at.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import h5py
import numpy as np


class Stored(h5py.Dataset):  # type: ignore[misc]
    """A dataset that does not change while it is open."""

    def __init__(self, identifier: Any) -> None:
        super().__init__(identifier, readonly=True)

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of all values; None if it has no values."""
        found: tuple[int, ...] | None = self.id.shape
        if found == () and self.id.get_space().get_simple_extent_type() == h5py.h5s.NULL:
            return None
        return found

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        found: np.dtype[Any] = self.id.dtype
        return found

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape or ())

    @cached_property
    def plist(self) -> Any:
        """Properties that it was created with: storage layout, chunks, filters."""
        return self.id.get_create_plist()

    @cached_property
    def chunks(self) -> tuple[int, ...] | None:
        """Shape of a chunk; None if it is not stored in chunks."""
        if self.plist.get_layout() != h5py.h5d.CHUNKED:
            return None
        found: tuple[int, ...] = self.plist.get_chunk()
        return found


def read_all(data: h5py.Dataset) -> np.ndarray[Any, Any]:
    """Return all values of a dataset of numbers; for small ones, in a third of the time that indexing takes."""
    values = np.empty(data.shape, data.dtype)
    if values.size:
        data.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
    return values


def creation_of(data: h5py.Dataset) -> Any:
    """Return the properties that a dataset was created with."""
    if isinstance(data, Stored):
        return data.plist
    return data.id.get_create_plist()
