"""What an index means: whole numbers, a slice or a mask, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigurationError, OutOfRangeError


def require_indices(indices: Any, count: int) -> NDArray[np.int64]:
    """Return what an index means, as numbers from 0 to `count` - 1: whole numbers, a slice, or a mask.

    Args:
        indices: A sequence, an array or a tensor. Negative numbers count from the end. A mask has `count` bools.
        count: How many elements there are.

    Raises:
        ConfigurationError: If they are not whole numbers, or a mask has another length.
        OutOfRangeError: If an element does not exist.

    Example:
        >>> require_indices([0, -1], 10), require_indices(slice(8, None), 10)
        (array([0, 9]), array([8, 9]))
    """
    if isinstance(indices, slice):
        return np.arange(count)[indices]
    try:
        found = np.asarray(indices)
    except ValueError as error:
        raise ConfigurationError(f"the indices are a ragged list, expected whole numbers: {error}") from error
    if found.ndim > 1:
        raise ConfigurationError(f"the indices have shape {list(found.shape)}, expected one axis")
    if found.dtype == bool and found.ndim:
        if len(found) != count:
            raise ConfigurationError(f"the mask has {len(found)} elements, expected {count}")
        return np.flatnonzero(found)
    # An empty list becomes an array of floats.
    if found.dtype.kind not in "iu" and found.size:
        raise ConfigurationError(f"the index is {indices!r} ({found.dtype}), expected whole numbers or a mask")
    outside = found.size and (found.min() < -count or found.max() >= count)
    if outside:
        raise OutOfRangeError(f"index {found.min()} to {found.max()}, expected {-count} to {count - 1}")
    numbers: NDArray[np.int64] = found.astype(np.int64)
    return np.where(numbers < 0, numbers + count, numbers)
