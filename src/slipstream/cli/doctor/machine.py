"""Cores, memory, limits and the terminal: what the machine, or the container on it, lets a process have."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from slipstream.cli.doctor.findings import Finding, note, ok
from slipstream.text import format_bytes
from slipstream.threads import usable_cores

_LITTLE_MEMORY = 2_000_000_000  # importing torch and a small training take half of it
_LITTLE_SHARED = 1_000_000_000
_FEW_FILES = 1024
_CGROUPS = Path("/sys/fs/cgroup")
_PROCESSES = Path("/proc")


def examine() -> Iterator[Finding]:
    """Look at cores, memory, shared memory, the limit of open files, how threads wait, and the terminal."""
    yield cores()
    yield from memory()
    yield from shared_memory()
    yield open_files()
    yield wait_policy(os.environ.get("OMP_WAIT_POLICY"))
    yield terminal()


def cores() -> Finding:
    """Say which processor it is, and how much of it this process may use."""
    usable = usable_cores()
    total, quota, model = os.cpu_count() or usable, cpu_quota(), _processor()
    values = {"usable": usable, "total": total, "quota": quota, "model": model}
    fact = f"{usable} of {total} usable, {model}"
    if quota is not None and quota < usable:
        advice = f"train with num_threads={max(1, int(quota))}, or threads wait for each other"
        return note("cores", f"{fact}, but a limit of this container is {quota:g} cores' time", advice, **values)
    if usable == 1:
        return note("cores", fact, "saves in the background take turns with training, so give it two", **values)
    return ok("cores", fact, **values)


def memory() -> Iterator[Finding]:
    """Say how much memory there is, how much of it is free, and whether this container is limited to less."""
    known = _meminfo()
    total, available, (limit, used) = known.get("MemTotal"), known.get("MemAvailable"), memory_limit()
    if total is None or available is None:
        return
    free = available if limit is None else min(available, max(limit - used, 0))
    fact = f"{format_bytes(free)} free of {format_bytes(total)}"
    if limit is not None and limit < total:
        fact += f", and this container may use {format_bytes(limit)}"
    else:
        limit = None
    values = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit, "free_bytes": free}
    if free < _LITTLE_MEMORY:
        yield note("memory", fact, "end other programs, or train with a smaller env.num_envs", **values)
    else:
        yield ok("memory", fact, **values)


def shared_memory() -> Iterator[Finding]:
    """Say how much can be shared between processes, which containers often keep very small."""
    place = Path("/dev/shm")  # noqa: S108 - nothing is written there
    if not place.is_dir():
        return
    usage = shutil.disk_usage(place)
    fact, values = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}", {"total_bytes": usage.total}
    if usage.free < _LITTLE_SHARED:
        advice = "workers of a DataLoader need more: docker run --shm-size=8g, or --ipc=host"
        yield note("shared memory", fact, advice, **values, free_bytes=usage.free)
    else:
        yield ok("shared memory", fact, **values, free_bytes=usage.free)


def open_files() -> Finding:
    """Say how many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    values = {"limit": None if soft == unlimited else soft, "most": None if hard == unlimited else hard}
    if soft != unlimited and soft < _FEW_FILES:
        advice = f"ulimit -n {_FEW_FILES} before training, or datasets of many files fail to open"
        return note("open files", f"at most {soft}", advice, **values)
    return ok("open files", "no limit" if soft == unlimited else f"at most {soft}", **values)


def wait_policy(policy: str | None) -> Finding:
    """Say whether threads sleep while they wait for each other."""
    if (policy or "").lower() == "passive":
        return ok("OMP_WAIT_POLICY", "PASSIVE, threads sleep while they wait", policy=policy)
    advice = "train and eval set PASSIVE themselves, in a program of yours export it before torch is imported"
    return note("OMP_WAIT_POLICY", f"{policy or 'not set'}, threads spin while they wait", advice, policy=policy)


def terminal() -> Finding:
    """Say whether live progress can be shown."""
    encoding, shown = sys.stdout.encoding or "ascii", sys.stdout.isatty()
    size = shutil.get_terminal_size()
    values = {"is_terminal": shown, "encoding": encoding, "columns": size.columns if shown else None}
    if encoding.lower().replace("-", "") != "utf8":
        advice = "export PYTHONIOENCODING=utf-8, or names outside of it are shown escaped"
        return note("terminal", f"its encoding is {encoding}", advice, **values)
    fact = f"{size.columns} columns, live progress is shown" if shown else "none, progress is shown as lines"
    return ok("terminal", fact, **values)


def cpu_quota() -> float | None:
    """Return to how many cores' time the control group of this process is limited; None if it is not."""
    for folder in _cgroup_folders("cpu"):
        limits = _words(folder / "cpu.max")
        if len(limits) == 2 and limits[0].isdigit() and int(limits[1]):
            return int(limits[0]) / int(limits[1])
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and quota[0].isdigit() and int(period[0]):  # -1 is none
            return int(quota[0]) / int(period[0])
    return None


def memory_limit() -> tuple[int | None, int]:
    """Return how many bytes the control group of this process may use, None without a limit, and how many it does."""
    for folder in _cgroup_folders("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _words(folder / limit_name), _words(folder / used_name)
            if limit and limit[0].isdigit() and int(limit[0]) < 1 << 60:  # version 1 says almost 2^63 if there is none
                return int(limit[0]), int(used[0]) if used else 0
    return None, 0


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield where the limits of this process may be, the nearest first, in both versions of control groups."""
    for line in _lines(_PROCESSES / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = _CGROUPS / controller if controllers else _CGROUPS
        inner = base / path.lstrip("/")
        while inner != base and base in inner.parents:
            yield inner
            inner = inner.parent
        yield base


def _processor() -> str:
    lines = _lines(_PROCESSES / "cpuinfo")
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _meminfo() -> dict[str, int]:
    fields = (line.split() for line in _lines(_PROCESSES / "meminfo"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3}


def _words(file: Path) -> list[str]:
    return next((line.split() for line in _lines(file)), [])


def _lines(file: Path) -> list[str]:
    """Return the lines of a file of the kernel's; none if this system has no such file."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
