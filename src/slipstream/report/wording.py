"""Numbers of a run as a person reads them."""

from __future__ import annotations

import datetime as dt

from slipstream.report.evaluations import Quantity


def say_count(number: float) -> str:
    """Return a whole number with its thousands apart.

    Example:
        >>> say_count(1589248.0)
        '1,589,248'
    """
    return f"{number:,.0f}" if abs(number) < 1e15 else f"{number:.4g}"


def say_duration(seconds: float) -> str:
    """Return a time in the two units that suit it.

    Example:
        >>> say_duration(7384)
        '2 h 3 min'
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = divmod(round(seconds), 60), divmod(round(seconds / 60), 60)
    if seconds < 3600:
        return f"{minutes[0]} min {minutes[1]} s"
    return f"{hours[0]} h {hours[1]} min" if hours[0] < 48 else f"{hours[0] // 24} d {hours[0] % 24} h"


def say_moment(unix_s: float) -> str | None:
    """Return a moment in UTC, or None if no calendar has it."""
    try:
        moment = dt.datetime.fromtimestamp(unix_s, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def say_rate(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f} %"


def say_interval(quantity: Quantity, *, percent: bool = False) -> str | None:
    """Return the 95 % interval of a quantity, if it has one."""
    if quantity.low is None or quantity.high is None:
        return None
    factor = 100 if percent else 1
    return f"{factor * quantity.low:.1f} to {factor * quantity.high:.1f}{' %' if percent else ''}"
