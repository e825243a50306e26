"""``slipstream doctor``: what Slipstream finds on this machine, what is missing, and how to fix it."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import platform
import resource
import secrets
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from slipstream import __version__
from slipstream.cli.limits import cpu_quota, memory_limit, read_meminfo
from slipstream.cli.options import JsonOption
from slipstream.cli.packages import Package, complaint, required_packages
from slipstream.text import DISTRIBUTION, format_bytes, install_hint, plural
from slipstream.threads import usable_cores

EXAMPLE = "slipstream doctor --folder runs"

# Extras for people who work on Slipstream itself.
_OWN_EXTRAS = ("bench", "dev", "docs")
_LITTLE_MEMORY = 2_000_000_000  # importing torch and a small training take half of it
_LITTLE_SHARED = 1_000_000_000
_LITTLE_SPACE = 10_000_000_000
_FEW_FILES = 1024
_SLOW_BYTES_S = 20e6
_WRITTEN_BYTES = 64 << 20
_MEASURE_S = 0.2  # of each direction of each codec
_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the result.

    Attributes:
        status: ``ok``, ``note`` if something could be better, ``problem`` if Slipstream does not work because of it.
        name: What was checked; the same on every machine.
        fact: What was found.
        advice: What to do about it; None if it is ok.
        values: The fact for scripts: sizes in bytes, times in seconds.
    """

    status: Literal["ok", "note", "problem"]
    name: str
    fact: str
    advice: str | None = None
    values: dict[str, Any] = field(default_factory=dict)


def doctor(
    *,
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Where files would go: its disk is measured, and nothing stays there.")
    ] = Path(),
    json: JsonOption = False,
) -> None:
    """Check this machine: packages, cores, memory, GPUs, disk and codecs. Takes some seconds.

    Each line is ok, a note (something could be better) or a problem (Slipstream does not work). Exits with 1 if there
    is a problem.
    """
    from slipstream.cli.output import print_json, print_lines

    if not folder.is_dir():
        folder.stat()  # raises if there is nothing
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    findings = []
    for finding in _examine(folder):
        findings.append(finding)
        if not json:
            _show(finding)
    counts: Counter[str] = Counter(finding.status for finding in findings)
    if json:
        print_json(
            {
                "slipstream": __version__,
                "folder": str(folder.absolute()),
                "works": not counts["problem"],
                "problems": counts["problem"],
                "notes": counts["note"],
                "findings": list(map(asdict, findings)),
            }
        )
    else:
        print_lines("", _verdict(counts))
    if counts["problem"]:
        raise typer.Exit(1)


def _examine(folder: Path) -> Iterator[Finding]:
    """Yield all findings as they are made; a check that fails is a finding, and the others still run."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "packages": check_packages,
        "machine": check_machine,
        "torch": check_torch,
        "disk": lambda: check_disk(folder),
        "codecs": check_codecs,
    }
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - what is broken may fail in any way
            advice = "fix this and run `slipstream doctor` again"
            yield Finding("problem", name, f"check failed ({_first_line(error)})", advice)


def _show(finding: Finding) -> None:
    from rich.text import Text

    from slipstream.cli.output import console, plain

    sentence = finding.fact
    if finding.advice:
        sentence = f"{finding.fact}: {finding.advice}"
    status = Text(f"{finding.status:<8} ", style=_COLOURS[finding.status])
    console().print(status + plain(f"{finding.name:<17} {sentence}"))


def _verdict(counts: Counter[str]) -> str:
    found = [plural(counts[status], status) for status in ("problem", "note") if counts[status]]
    if counts["problem"]:
        return f"{' and '.join(found)}: Slipstream does not work here until the problems are solved"
    return "; ".join(["Slipstream works here", *found])


def check_packages() -> Iterator[Finding]:
    """Check Python, the packages that Slipstream needs, and those of its extras."""
    version = platform.python_version()
    values: dict[str, Any] = {"version": version, "executable": sys.executable}
    yield Finding("ok", "Python", f"{version} ({sys.executable})", None, values)
    try:
        requirements = required_packages(metadata.requires(DISTRIBUTION) or [])
    except metadata.PackageNotFoundError:
        yield Finding("note", "packages", "slipstream is not installed, only on the path", "pip install -e .")
        return
    yield judge_dependencies(requirements.pop(None, []))
    for name in ("numpy", "h5py", "lz4.frame", "xxhash", "zstandard"):
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:
            package = name.partition(".")[0]
            advice = f"pip install --force-reinstall {package}"
            yield Finding("problem", package, f"cannot be imported ({_first_line(error)})", advice)
    for extra in sorted(map(str, requirements)):
        if extra not in _OWN_EXTRAS:
            yield judge_extra(extra, requirements[extra])


def judge_dependencies(packages: list[Package]) -> Finding:
    """Judge the packages that Slipstream never works without."""
    values = {package.name: package.version for package in packages}
    wrong = complaint(packages)
    if wrong is None:
        return Finding(
            "ok", "packages", f"slipstream {__version__} has all {len(packages)} that it needs", None, values
        )
    needed = " ".join(repr(package.requirement) for package in packages if not package.is_fine)
    return Finding("problem", "packages", wrong, f"pip install {needed}", values)


def judge_extra(extra: str, packages: list[Package]) -> Finding:
    """Judge an extra: complete, or what is missing and how to install it."""
    wrong = complaint(packages)
    command = install_hint(extra)
    installed = {package.name: package.version for package in packages}
    values = {"extra": extra, "packages": installed, "complete": wrong is None, "command": command}
    if wrong is None:
        return Finding("ok", f"extra {extra}", ", ".join(installed), None, values)
    return Finding("note", f"extra {extra}", wrong, command, values)


def check_machine() -> Iterator[Finding]:
    """Check cores, memory, shared memory, and the limit of open files, with the limits of a container."""
    yield check_cores()
    yield from check_memory()
    place = Path("/dev/shm")  # noqa: S108 - nothing is written there
    if place.is_dir():
        usage = shutil.disk_usage(place)
        fact = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
        advice = None
        if usage.free < _LITTLE_SHARED:
            advice = "workers of a DataLoader need more: docker run --shm-size=8g, or --ipc=host"
        values = {"free_bytes": usage.free, "total_bytes": usage.total}
        yield _note_if(advice, "shared memory", fact, values)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    advice = None
    if limit != resource.RLIM_INFINITY and limit < _FEW_FILES:
        advice = f"ulimit -n {_FEW_FILES}, or datasets of many files fail to open"
    yield _note_if(advice, "open files", f"at most {limit}", {"limit": limit})


def check_cores() -> Finding:
    """Check how many cores this process may use, and for how much of the time."""
    usable = usable_cores()
    quota = cpu_quota()
    fact = f"{usable} of {os.cpu_count() or usable} usable"
    advice = None
    if quota is not None and quota < usable:
        fact = f"{fact}, and this container is limited to the time of {quota:g}"
        advice = f"train with num_threads={max(1, int(quota))}, or threads wait for each other"
    elif usable == 1:
        advice = "background saves take turns with training, so give it two"
    return _note_if(advice, "cores", fact, {"usable": usable, "quota": quota})


def check_memory() -> Iterator[Finding]:
    """Check how much memory is free, and whether this container is limited to less."""
    known = read_meminfo()
    if not {"MemTotal", "MemAvailable"} <= set(known):
        return
    total = known["MemTotal"]
    free = known["MemAvailable"]
    fact = f"of {format_bytes(total)}"
    limit = memory_limit()
    if limit is not None and limit[0] < total:
        free = min(free, max(limit[0] - limit[1], 0))
        fact = f"{fact}, and this container may use {format_bytes(limit[0])}"
    advice = None
    if free < _LITTLE_MEMORY:
        advice = "end other programs, or train with a smaller env.num_envs"
    yield _note_if(advice, "memory", f"{format_bytes(free)} free {fact}", {"free_bytes": free, "total_bytes": total})


def check_torch() -> Iterator[Finding]:
    """Check torch, GPUs, and the compiler that ``torch.compile`` needs."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        advice = "pip install --force-reinstall torch"
        yield Finding("problem", "torch", f"cannot be imported ({_first_line(error)})", advice)
        return
    version = str(torch.__version__)
    threads = torch.get_num_threads()
    yield Finding("ok", "torch", f"{version}, {threads} threads", None, {"version": version, "threads": threads})
    yield check_gpus(torch)
    command = os.environ.get("CXX") or "g++"
    path = shutil.which(command)
    if path is None:
        advice = "apt install g++, or the simulation runs uncompiled"
        yield Finding("note", "C++ compiler", f"{command} is not installed", advice, {"path": None})
    else:
        yield Finding("ok", "C++ compiler", f"{path}, for torch.compile", None, {"path": path})


def check_gpus(torch: Any) -> Finding:
    """Check which GPUs torch finds."""
    built = torch.version.cuda
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("ok", "CUDA", f"{built}: {', '.join(names)}", None, {"devices": names})
    values: dict[str, Any] = {"devices": []}
    if built is None:
        advice = "to train on a GPU, install a CUDA build of torch"
        return Finding("note", "CUDA", "this build of torch has none", advice, values)
    advice = "if nvidia-smi shows one, update the driver"
    return Finding("note", "CUDA", f"torch is built for CUDA {built} and finds no GPU", advice, values)


def check_disk(folder: Path) -> Iterator[Finding]:
    """Check a folder: space, speed and locks. What is written there is deleted again, whatever happens."""
    place = str(folder.absolute())
    usage = shutil.disk_usage(folder)
    advice = None
    if usage.free < _LITTLE_SPACE:
        advice = "free some space, or keep fewer checkpoints and rollouts"
    fact = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} in {place}"
    yield _note_if(advice, "disk", fact, {"folder": place, "free_bytes": usage.free, "total_bytes": usage.total})
    # A signal while a TemporaryDirectory is being created could leave it there. This name is known before.
    inside = folder / f".slipstream-doctor-{secrets.token_hex(8)}"
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, inside, ignore_errors=True)
            inside.mkdir(mode=0o700)
            if usage.free > 4 * _WRITTEN_BYTES:
                yield check_writing(inside)
            yield check_locks(inside)
    except OSError as error:
        advice = "choose another with --folder, or make it writable"
        yield Finding("problem", "writing", f"cannot write to {place} ({error.strerror or error})", advice)


def check_writing(folder: Path) -> Finding:
    """Measure how fast a checkpoint becomes durable: written, flushed, renamed, and the folder flushed."""
    from slipstream.store.local import atomic_write

    # A file system that compresses gains nothing from random bytes.
    content = os.urandom(_WRITTEN_BYTES)
    start = time.perf_counter()
    with atomic_write(folder / "large") as file:
        file.write(content)
    speed = _WRITTEN_BYTES / (time.perf_counter() - start)
    advice = None
    if speed < _SLOW_BYTES_S:
        advice = "use a local disk, or save less often"
    return _note_if(advice, "writing", f"{format_bytes(speed)}/s, durable", {"bytes_per_s": speed})


def check_locks(folder: Path) -> Finding:
    """Check whether a process can lock a file against another, which keeps two writers out of one folder."""
    from slipstream.store.lock import try_lock

    path = folder / "lock"
    with path.open("wb", buffering=0) as mine, path.open("wb", buffering=0) as another:
        try:
            try_lock(mine)
            works = not try_lock(another)
        except OSError:
            works = False
    if works:
        return Finding("ok", "file locks", "work", None, {"supported": True})
    advice = "never let two processes write to one folder here"
    return Finding("note", "file locks", "do not work in this folder", advice, {"supported": False})


def check_codecs() -> Iterator[Finding]:
    """Measure the codecs of weights and rollouts, and check that they restore what they were given."""
    import numpy as np

    from slipstream.codecs import Planes, Timewise

    random = np.random.default_rng(0)
    weights = random.standard_normal((1024, 1024), dtype=np.float32) * np.float32(0.02)
    yield measure_codec("codec planes", Planes(), weights, "weights")
    # A range sensor: 128 environments, 64 steps, 144 rays that change slowly or reach nothing.
    drift = np.cumsum(random.normal(0, 0.02, (128, 64, 144)), axis=1)
    readings = np.clip(2.5 + drift + np.linspace(-2, 2, 144), 0, 4).astype(np.float32)
    yield measure_codec("codec timewise", Timewise(), readings, "sensor readings")


def measure_codec(name: str, codec: Any, array: Any, what: str) -> Finding:
    """Measure a codec on an array, in bytes of the array per second of one core."""
    payload = codec.encode(array)
    out = array.copy()
    out.fill(0)
    codec.decode(payload, out)
    if out.tobytes() != array.tobytes():
        advice = "pip install --force-reinstall zstandard numpy, and do not trust files written here"
        return Finding("problem", name, "does not restore what it was given", advice)
    pack = array.nbytes / _best_s(lambda: codec.encode(array))
    unpack = array.nbytes / _best_s(lambda: codec.decode(payload, out))
    ratio = array.nbytes / len(payload)
    fact = (
        f"packs {format_bytes(pack)}/s, unpacks {format_bytes(unpack)}/s on one core; {what} get {ratio:.2f}x smaller"
    )
    return Finding("ok", name, fact, None, {"pack_bytes_per_s": pack, "unpack_bytes_per_s": unpack, "ratio": ratio})


def _best_s(work: Callable[[], Any]) -> float:
    """Return the shortest CPU time of several calls, which other programs change little."""
    times: list[float] = []
    while sum(times) < _MEASURE_S:
        start = time.thread_time()
        work()
        times.append(max(time.thread_time() - start, 1e-9))
    return min(times)


def _note_if(advice: str | None, name: str, fact: str, values: dict[str, Any]) -> Finding:
    """Return a note if there is advice."""
    if advice is None:
        return Finding("ok", name, fact, None, values)
    return Finding("note", name, fact, advice, values)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
