"""Moments and intervals of a run, as text."""

from __future__ import annotations

import datetime as dt

from slipstream.run.evaluation import Interval


def say_moment(unix_s: float) -> str | None:
    """Return a moment in UTC, or None if it is outside the calendar's range."""
    # Damaged metrics may contain any number, also one beyond the year 9999.
    try:
        moment = dt.datetime.fromtimestamp(unix_s, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def say_interval(quantity: Interval, *, percent: bool = False) -> str | None:
    """Return the 95 % interval of a quantity, if it has one."""
    if not quantity.is_known:
        return None
    factor = 100 if percent else 1
    return f"{factor * quantity.low:.1f} to {factor * quantity.high:.1f}{' %' if percent else ''}"
