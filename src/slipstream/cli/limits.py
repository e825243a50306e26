"""What the kernel says about this process: memory, and the limits of the container that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def read_meminfo() -> dict[str, int]:
    """Return the sizes in ``/proc/meminfo`` in bytes; nothing if this system has no such file."""
    known: dict[str, int] = {}
    for line in _lines(PROC / "meminfo"):
        words = line.split()
        if len(words) == 3:
            known[words[0].rstrip(":")] = int(words[1]) * 1024
    return known


def cpu_quota() -> float | None:
    """Return to how many cores' time the control group of this process is limited; None if it is not."""
    found = []
    for folder in _groups():
        limits = _words(folder / "cpu.max")
        if len(limits) == 2 and limits[0].isdigit():
            found.append(int(limits[0]) / int(limits[1]))
    return min(found, default=None)


def memory_limit() -> tuple[int, int] | None:
    """Return how many bytes the control group of this process may use and how many it does; None without a limit."""
    found = []
    for folder in _groups():
        limit = _words(folder / "memory.max")
        used = _words(folder / "memory.current")
        if limit and limit[0].isdigit() and used:
            found.append((int(limit[0]), int(used[0])))
    return min(found, default=None)


def _groups() -> Iterator[Path]:
    """Yield the control groups of this process, the innermost first. Each may have limits."""
    for line in _lines(PROC / "self/cgroup"):
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            inner = CGROUP / path.lstrip("/")
            yield inner
            for outer in inner.parents:
                if outer == CGROUP or CGROUP in outer.parents:
                    yield outer


def _words(file: Path) -> list[str]:
    lines = _lines(file) or [""]
    return lines[0].split()


def _lines(file: Path) -> list[str]:
    """Return the lines of a file of the kernel; none if this system has no such file."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
