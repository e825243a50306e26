"""The page that benchmarks put their tables into, each between markers of its own."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path


def machine(packages: Iterable[str]) -> str:
    """Name the machine, the versions of packages that are installed, and the day."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = []
    for name in packages:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    today = dt.datetime.now(dt.UTC).date()
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {', '.join(versions)}; {today}."


def write_section(page: Path, name: str, report: str) -> None:
    """Replace what is between ``<!-- name -->`` and ``<!-- /name -->`` by a report, and leave the rest as it is."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = page.read_text().partition(start)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"{page}: has no place for the report: {start.strip()} and {end} are not both in it")
    page.write_text(f"{before}{start}\n{report}\n{end}{after}")
