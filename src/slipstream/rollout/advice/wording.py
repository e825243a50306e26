"""Numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence


def say_bytes(count: float) -> str:
    """Return a size in decimal units, as disks and ``slipstream inspect`` count."""
    return _scaled(count, (" bytes", " kB", " MB", " GB", " TB", " PB"))


def say_time(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 1:
        milliseconds = seconds * 1000
        return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def say_share(share: float) -> str:
    """Return a share in percent; what is too small to matter is said to be."""
    percent = 100 * share
    if 0 < percent < 0.01:
        return "under 0.01 %"
    return f"{percent:.2f} %" if percent < 1 else f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def say_bandwidth(bytes_s: float) -> str:
    """Return a bandwidth in bits, as networks are sold."""
    return _scaled(8 * bytes_s, (" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s"))


def say_ratio(raw: float, packed: float) -> str:
    """Return how many times smaller something got."""
    if not packed:
        return "-"
    return f"{raw / packed:.2f}x" if raw < 100 * packed else f"{raw / packed:.0f}x"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return a table as lines: the first `left` columns begin where the header does, the others end where it does."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _scaled(value: float, units: tuple[str, ...]) -> str:
    unit = 0
    while value >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f}{units[unit]}" if unit == 0 or value >= 99.95 else f"{value:.1f}{units[unit]}"
