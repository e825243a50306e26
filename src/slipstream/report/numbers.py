"""Numbers from files that anyone may have written."""

from __future__ import annotations

from typing import Any

MAX_MAGNITUDE = 1e100  # so that sums and products of what a run measured stay finite


def number_of(value: Any) -> float | None:
    """Return a number of sensible size, or None for anything else.

    Example:
        >>> number_of(3), number_of(True), number_of("3"), number_of(float("inf")), number_of(10**400)
        (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -MAX_MAGNITUDE <= value <= MAX_MAGNITUDE else None
