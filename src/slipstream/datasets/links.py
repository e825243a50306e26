"""Whether the observation after each step is the one that the following row has."""

from __future__ import annotations

import h5py
import numpy as np
from numpy.typing import NDArray

_BLOCK_ROWS = 1 << 16


def differ(data: h5py.Dataset, after: h5py.Dataset, num_links: int) -> NDArray[np.bool_]:
    """Compare the next observation of each step with the observation of the following one, at the coarser precision."""
    coarser = min(data.dtype, after.dtype, key=_precision)
    differ = np.zeros(num_links, bool)
    for start in range(0, num_links, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, num_links)
        # Values that a coarser type cannot hold are infinite in both.
        with np.errstate(over="ignore", invalid="ignore"):
            here = data[start + 1 : stop + 1].astype(coarser).reshape(stop - start, -1)
            there = after[start:stop].astype(coarser).reshape(stop - start, -1)
        # NaN in both is no difference; that it is not finite is reported when it is loaded.
        differ[start:stop] = ((here != there) & ~((here != here) & (there != there))).any(1)  # noqa: PLR0124
    return differ


def _precision(dtype: np.dtype[np.generic]) -> tuple[bool, int]:
    """Return a key that is smaller for a type that keeps fewer digits of a measurement."""
    return (dtype.kind == "f", dtype.itemsize)
