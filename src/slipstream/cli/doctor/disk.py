"""The folder that files go to: its space, its speed, and whether it has locks."""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.cli.doctor.findings import Finding, note, ok, problem
from slipstream.store.local import atomic_write
from slipstream.store.lock import try_lock
from slipstream.text import format_bytes

_PIECE_BYTES = 8 << 20
_MOST_BYTES = 128 << 20
_SPARE_BYTES = 1 << 30  # measuring does not use up what others may need
_LITTLE_SPACE = 10_000_000_000
_SLOW_BYTES_S = 20e6
_SLOW_ATOMIC_S = 0.1
_NUM_SMALL = 20
_MEASURE_S = 1.0


def examine(folder: Path) -> Iterator[Finding]:
    """Look at a folder; what is written there for it is deleted again, whatever happens."""
    place = str(folder.absolute())
    usage = shutil.disk_usage(folder)
    free = usage.free
    fact = f"{format_bytes(free)} free of {format_bytes(usage.total)} in {place}"
    values = {"free_bytes": free, "total_bytes": usage.total}
    if free < _LITTLE_SPACE:
        yield note("disk", fact, "make room, or keep fewer checkpoints and rollouts", **values, folder=place)
    else:
        yield ok("disk", fact, **values, folder=place)
    inside = folder / f".slipstream-doctor-{secrets.token_hex(8)}"
    try:
        try:  # with a name of our own: a signal in the middle of making a TemporaryDirectory would leave it there
            inside.mkdir(mode=0o700)
            yield writing(inside, free)
            yield atomic_writes(inside)
            yield locks(inside)
        finally:
            shutil.rmtree(inside, ignore_errors=True)
    except OSError as error:
        advice = "choose another with --folder, or make it writable and not full"
        yield problem("writing", f"{place} cannot be written to ({error.strerror or error})", advice)


def writing(folder: Path, free_bytes: int) -> Finding:
    """Measure how fast a file of a checkpoint's size gets onto the disk, and not only into the system's memory."""
    if free_bytes < _SPARE_BYTES:
        return note("writing", "not measured, for the disk is nearly full", "make room", bytes_per_s=None)
    speed = _write_speed(folder, _PIECE_BYTES)  # says how much may be written in about a second
    size = int(min(_MOST_BYTES, speed * _MEASURE_S)) // _PIECE_BYTES * _PIECE_BYTES
    speed = max(speed, _write_speed(folder, size)) if size else speed
    fact = f"{format_bytes(speed)}/s, in one piece and flushed"
    if speed < _SLOW_BYTES_S:
        return note("writing", fact, "a local disk would be faster, else save less often", bytes_per_s=speed)
    return ok("writing", fact, bytes_per_s=speed)


def atomic_writes(folder: Path) -> Finding:
    """Measure how long a small file takes until it is there for good: written, flushed, renamed, folder flushed."""
    times: list[float] = []
    content = os.urandom(4096)
    while len(times) < _NUM_SMALL and sum(times) < _MEASURE_S:
        start = time.perf_counter()
        with atomic_write(folder / "small") as file:
            file.write(content)
        times.append(time.perf_counter() - start)
    middle, worst = statistics.median(times), max(times)
    fact = f"{middle * 1e3:.1f} ms for a small file, {worst * 1e3:.1f} ms at worst"
    values = {"median_s": middle, "worst_s": worst, "num_files": len(times)}
    if middle > _SLOW_ATOMIC_S:
        return note("atomic writes", fact, "a local disk would be faster, else save less often", **values)
    return ok("atomic writes", fact, **values)


def locks(folder: Path) -> Finding:
    """Say whether one process can lock a file against another, which keeps writers of one folder apart."""
    advice = "let no two processes write into one folder here, or choose another file system"
    path = folder / "lock"
    with path.open("wb", buffering=0) as mine, path.open("wb", buffering=0) as another:
        try:
            try_lock(mine)
            excludes = not try_lock(another)
        except OSError as error:
            return note("file locks", f"none in this folder ({error.strerror})", advice, supported=False)
        if excludes:
            return ok("file locks", "work, writers of one folder are kept apart", supported=True)
    return note("file locks", "in this folder lock nothing", advice, supported=False)


def _write_speed(folder: Path, size: int) -> float:
    """Return how fast a file without a name is written and flushed, in bytes per second."""
    piece = os.urandom(_PIECE_BYTES)  # a file system that compresses gains nothing by it
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(0, size, _PIECE_BYTES):
            view = memoryview(piece)
            while view:
                view = view[os.write(file.fileno(), view) :]
        os.fsync(file.fileno())
        return size / (time.perf_counter() - start)
