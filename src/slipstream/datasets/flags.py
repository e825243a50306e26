"""Flags of the ends of episodes, in whatever type they are stored."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.names import name_of
from slipstream.datasets.stored import read_all
from slipstream.errors import DatasetError, NonFiniteError

_BLOCK_ROWS = 1 << 22
# Flags are 0 or 1 up to this error, for instance where they went through float arithmetic.
_FLAG_TOLERANCE = 1e-6


def read_flags(data: h5py.Dataset, count: int) -> NDArray[np.bool_]:
    """Read the first `count` flags of a dataset; values within 1e-6 of 0 and 1 count as those.

    Raises:
        NonFiniteError: If a flag is NaN or infinite.
        DatasetError: If a flag is neither 0 nor 1.
    """
    flags = np.zeros(count, bool)
    for first in range(0, count, _BLOCK_ROWS):
        last = min(first + _BLOCK_ROWS, count)
        values = read_all(data) if count == data.shape[0] <= _BLOCK_ROWS else data[first:last]
        values = np.asarray(values).reshape(-1)
        flags[first:last] = _flags_of(data, values, first)
    return flags


def _flags_of(data: h5py.Dataset, values: NDArray[Any], first: int) -> NDArray[np.bool_]:
    if values.dtype == np.bool_:
        return values
    is_set = values == 1
    # Most files have nothing but 0 and 1.
    if (is_set | (values == 0)).all():
        return np.asarray(is_set)
    where = f"{data.file.filename}: {name_of(data)}"
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        raise NonFiniteError(f"{where} is not finite in row {first + wrong[0]}: {values[wrong[0]]}")
    numbers = values.astype(np.float64)
    is_set = np.abs(numbers - 1) <= _FLAG_TOLERANCE
    wrong = np.flatnonzero(~is_set & (np.abs(numbers) > _FLAG_TOLERANCE))
    if wrong.size:
        raise DatasetError(f"{where} is {values[wrong[0]]} in row {first + wrong[0]}, expected flags of 0 and 1")
    return is_set
