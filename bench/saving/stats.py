"""Medians with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A median, and the 95 % interval around it.

    Attributes:
        median: The median of the samples.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Interval:
        """Return the median of samples, with an interval from a bootstrap."""
        if not samples:
            return cls(math.nan, math.nan, math.nan)
        values = np.asarray(samples, np.float64)
        # Seeded: the same samples always give the same interval.
        picked = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
        low, high = np.percentile(np.median(values[picked], axis=1), (2.5, 97.5))
        return cls(float(np.median(values)), float(low), float(high))

    def minus(self, value: float) -> Interval:
        """Return by how much this exceeds a value."""
        return Interval(self.median - value, self.low - value, self.high - value)

    def text(self, scale: float = 1.0, digits: int = 0) -> str:
        """Return the median and the interval as text, such as ``24 [20, 28]``."""
        return f"{scale * self.median:,.{digits}f} {self.ends(scale, digits)}"

    def ends(self, scale: float = 1.0, digits: int = 0) -> str:
        """Return the interval as text, such as ``[20, 28]``."""
        return f"[{scale * self.low:,.{digits}f}, {scale * self.high:,.{digits}f}]"
