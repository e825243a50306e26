"""Mean and standard deviation of values that arrive in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigurationError

_LEAST_STD = 1e-6
_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class Statistics:
    """Count, mean, and sum of squared distances from the mean, in float64; and the extremes.

    Example:
        >>> import numpy
        >>> Statistics.none(1).update(numpy.array([[1.0], [3.0]])).mean
        array([2.], dtype=float32)
    """

    count: int
    center: NDArray[np.float64]
    squares: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @classmethod
    def none(cls, width: int) -> Statistics:
        """Return those of no values."""
        return cls(0, np.zeros(width), np.zeros(width), np.full(width, np.inf), np.full(width, -np.inf))

    def update(self, values: NDArray[Any], count: NDArray[np.bool_] | None = None) -> Statistics:
        """Return the statistics of all values so far and more, ``[rows, width]``; needs memory for one block of rows.

        Args:
            values: The values.
            count: Mask of the rows that count; all by default.

        Raises:
            ConfigurationError: If the rows have another width, or the mask is not one bool per row.
        """
        if values.ndim != 2 or values.shape[1] != len(self.center):
            raise ConfigurationError(
                f"the values have shape {list(values.shape)}, expected [rows, {len(self.center)}] as before"
            )
        # Numbers would select rows by index, and count some of them twice.
        if count is not None and (count.dtype != bool or count.shape != (len(values),)):
            raise ConfigurationError(
                f"the mask is {count.dtype}{list(count.shape)}, expected bool[{len(values)}], one per row"
            )
        result = self
        for start in range(0, len(values), _BLOCK_ROWS):
            block = values[start : start + _BLOCK_ROWS]
            if count is not None:
                block = block[count[start : start + _BLOCK_ROWS]]
            if len(block):
                result = result._with(block.astype(np.float64))
        return result

    def _with(self, block: NDArray[np.float64]) -> Statistics:
        """Combine by the formula of Chan, Golub and LeVeque, which does not cancel."""
        count = self.count + len(block)
        center = block.mean(0)
        apart = center - self.center
        squares = ((block - center) ** 2).sum(0) + apart**2 * (self.count * len(block) / count)
        return Statistics(
            count, self.center + apart * (len(block) / count), self.squares + squares,
            np.minimum(self.low, block.min(0)), np.maximum(self.high, block.max(0)),
        )  # fmt: skip

    @property
    def mean(self) -> NDArray[np.float32]:
        """Mean of each value."""
        return self.center.astype(np.float32)

    @property
    def std(self) -> NDArray[np.float32]:
        """Standard deviation of each value, at least 1e-6 so that dividing by it is safe."""
        return np.maximum(np.sqrt(self.squares / max(1, self.count)), _LEAST_STD).astype(np.float32)

    @property
    def min(self) -> NDArray[np.float32]:
        """Least of each value."""
        return self.low.astype(np.float32)

    @property
    def max(self) -> NDArray[np.float32]:
        """Greatest of each value."""
        return self.high.astype(np.float32)
