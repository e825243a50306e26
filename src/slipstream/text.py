"""How values are written in messages, tables and reports: one style for sizes, times, shares and counts."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

DISTRIBUTION = "slipstream-rl"
"""The name to install, and to look up in `importlib.metadata`. The import name and the command are ``slipstream``."""


def format_bytes(count: float) -> str:
    """Return a size in decimal units, as disks are sold, with about three digits.

    Example:
        >>> format_bytes(1), format_bytes(999), format_bytes(57_346_000), format_bytes(600_000)
        ('1 byte', '999 bytes', '57.3 MB', '600 kB')
    """
    if count == 1:
        return "1 byte"
    return _scale(count, (" bytes", " kB", " MB", " GB", " TB", " PB"))


def format_bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth in bits, as networks are sold.

    Example:
        >>> format_bandwidth(125e6)
        '1.0 Gbit/s'
    """
    return _scale(8 * bytes_per_s, (" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s"))


def format_seconds(seconds: float) -> str:
    """Return a time in the unit that suits it; from a minute on, in two units.

    Example:
        >>> format_seconds(0.0042), format_seconds(12.34), format_seconds(95), format_seconds(7384)
        ('4.2 ms', '12.3 s', '1 min 35 s', '2 h 3 min')
    """
    # Each limit is where the smaller unit would round up to the larger one: 59.97 s is "1 min 0 s", not "60.0 s".
    if seconds < 0.00995:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def format_percent(share: float) -> str:
    """Return a share as a percentage.

    Example:
        >>> format_percent(0.973), format_percent(0.2), format_percent(0.0046), format_percent(0.00001)
        ('97.3 %', '20 %', '0.46 %', 'under 0.01 %')
    """
    value = 100 * share
    if 0 < value < 0.01:
        return "under 0.01 %"
    if 0 < value < 0.995:
        return f"{value:.2f} %"
    return f"{value:.1f}".removesuffix(".0") + " %"


def format_ratio(raw: float, stored: float) -> str:
    """Return how many times smaller something got; ``-`` if nothing is stored.

    Example:
        >>> format_ratio(300, 40), format_ratio(3000, 10), format_ratio(8, 0)
        ('7.50x', '300x', '-')
    """
    if not stored:
        return "-"
    if raw < 100 * stored:
        return f"{raw / stored:.2f}x"
    return f"{raw / stored:.0f}x"


def format_count(number: float) -> str:
    """Return a whole number with separators between thousands.

    Example:
        >>> format_count(1589248.0)
        '1,589,248'
    """
    # More digits than a float has would be noise.
    if abs(number) >= 1e15:
        return f"{number:.4g}"
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """Return a number with the noun it counts.

    Example:
        >>> plural(1, "step"), plural(1000, "step")
        ('1 step', '1,000 steps')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{format_count(number)} {noun}s"


def list_first(names: Sequence[str], most: int = 3) -> str:
    """Return the first of some names, and how many more there are.

    Example:
        >>> list_first(["a", "b", "c"]), list_first(["a", "b", "c"], most=1)
        ('a, b, c', 'a and 2 more')
    """
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def alternatives(values: Sequence[object]) -> str:
    """Return a list of values of which one is expected.

    Example:
        >>> alternatives([1]), alternatives([1, 2]), alternatives([1, 2, 4])
        ('1', '1 or 2', '1, 2 or 4')
    """
    names = list(map(str, values))
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def install_hint(extra: str) -> str:
    """Return the command that installs one of Slipstream's extras.

    In a checkout of the repository the command installs from the checkout; run it in the repository's root folder.

    Args:
        extra: A name from ``[project.optional-dependencies]`` in ``pyproject.toml``.

    Returns:
        A shell command, such as ``pip install 'slipstream-rl[train]'``.
    """
    if _runs_from_checkout():
        return f"pip install -e '.[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _runs_from_checkout() -> bool:
    """Return whether this package lies in ``src/`` of Slipstream's repository, as it does after an editable install."""
    project_file = Path(__file__).parents[2] / "pyproject.toml"
    try:
        project = tomllib.loads(project_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False
    # A package that was copied into the src/ of another project finds their pyproject.toml.
    name = project.get("project", {}).get("name")
    return bool(name == DISTRIBUTION)


def _scale(value: float, units: tuple[str, ...]) -> str:
    """Return a value with the first unit in which it stays below 1000; each unit is 1000 times the one before."""
    unit = 0
    while value >= 999.5 and unit < len(units) - 1:
        value /= 1000
        unit += 1
    # Whole units have no fraction, and three digits are enough.
    if unit == 0 or value >= 99.95:
        return f"{value:.0f}{units[unit]}"
    return f"{value:.1f}{units[unit]}"
