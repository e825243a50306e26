"""torch, as training uses it: threads, denormal numbers, CUDA, and the compiler of ``torch.compile``."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.cli.doctor.findings import Finding, note, ok, problem
from slipstream.text import format_bytes

_PROGRAM = '#include <Python.h>\n#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n'
_COMPILE_TIMEOUT_S = 60


def examine() -> Iterator[Finding]:
    """Look at torch and what it finds on this machine."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        yield problem("torch", f"cannot be imported ({reason})", "pip install --force-reinstall torch")
        return
    threads = torch.get_num_threads()
    yield ok("torch", f"{torch.__version__}, {threads} threads", version=str(torch.__version__), threads=threads)
    yield denormals(torch)
    yield from cuda(torch)
    yield compiler(os.environ.get("CXX"))


def denormals(torch: Any) -> Finding:
    """Say whether numbers too small for their format can be flushed to zero, and leave that as it was."""
    flushed = bool(torch.set_flush_denormal(True))
    torch.set_flush_denormal(False)
    if flushed:
        return ok("denormal numbers", "can be flushed to zero, as train does", supported=True)
    advice = "nothing to do, but late in a training steps may take longer"
    return note("denormal numbers", "cannot be flushed to zero on this processor", advice, supported=False)


def cuda(torch: Any) -> Iterator[Finding]:
    """Say which GPUs torch finds, and whether memory can be pinned for them."""
    built = torch.version.cuda
    with warnings.catch_warnings(record=True) as said:  # torch tells what is wrong with a driver in a warning
        warnings.simplefilter("always")
        available = bool(torch.cuda.is_available())
    if not available:
        reason = f" ({str(said[0].message).splitlines()[0]})" if said else ""
        fact = (
            f"no GPU was found by torch, which is built for CUDA {built}{reason}"
            if built
            else f"{torch.__version__} is a build of torch without it"
        )
        advice = (
            "see whether nvidia-smi shows it, and update the driver"
            if built
            else "to train on a GPU, install a CUDA build of torch"
        )
        yield note("CUDA", fact, advice, available=False, built_for=built, devices=[])
        return
    devices = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        devices.append({"name": torch.cuda.get_device_name(index), "free_bytes": free, "total_bytes": total})
    named = (
        f"{one['name']}, {format_bytes(one['free_bytes'])} free of {format_bytes(one['total_bytes'])}"
        for one in devices
    )
    yield ok("CUDA", f"{built}: {'; '.join(named)}", available=True, built_for=built, devices=devices)
    try:
        pinned = bool(torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).is_pinned())
    except RuntimeError:
        pinned = False
    if pinned:
        yield ok("pinned memory", "works, snapshots are copied beside training", pinned=True)
    else:
        yield note("pinned memory", "cannot be had", "raise ulimit -l, or snapshots wait for the GPU", pinned=False)


def compiler(named: str | None) -> Finding:
    """Say whether the C++ compiler that ``torch.compile`` would take builds a library with Python and OpenMP."""
    command = named or ("clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(command)
    without = "the simulation runs uncompiled without it"
    if path is None:
        fact = f"{command}{', which CXX names,' if named else ''} is not there"
        return note("C++ compiler", fact, f"install it (apt install g++), {without}", path=None, works=False)
    version = _run([path, "--version"])
    named_version = version.stdout.splitlines()[0] if version.stdout else path
    with tempfile.TemporaryDirectory(prefix="slipstream-doctor-") as folder:
        source, headers = Path(folder) / "check.cpp", sysconfig.get_path("include")
        source.write_text(_PROGRAM)
        built = _run([path, "-shared", "-fPIC", "-fopenmp", f"-I{headers}", str(source), "-o", f"{folder}/check.so"])
    if built.returncode == 0:
        return ok("C++ compiler", f"{named_version}, for torch.compile", path=path, works=True)
    complaint = next((line for line in built.stderr.splitlines() if "error" in line), "it failed")
    fact = f"{path} cannot build for torch.compile ({complaint.strip()})"
    advice = f"install Python's headers and OpenMP (apt install python3-dev libgomp1), {without}"
    return note("C++ compiler", fact, advice, path=path, works=False)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - a compiler that the user named or has on the path
            command, capture_output=True, text=True, check=False, errors="replace", timeout=_COMPILE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", f"error: {error}")
