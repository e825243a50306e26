"""The page that benchmarks put their tables into, each between markers of its own."""

from __future__ import annotations

from pathlib import Path


def write_section(page: Path, name: str, report: str) -> None:
    """Replace what is between ``<!-- name -->`` and ``<!-- /name -->`` by a report, and leave the rest as it is."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = page.read_text().partition(start)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{start}\n{report}\n{end}{after}")
