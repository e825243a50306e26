"""Real processes of a distributed run."""

import os
import subprocess
import sys
from pathlib import Path

HANG_S = 240  # far beyond what anything here takes, also on a busy machine


def start_ranks(script: Path | str, world: int, folder: Path, *arguments: object) -> list[subprocess.Popen[str]]:
    """Start ``python script RANK WORLD STORE arguments`` for every rank; ``script`` may be source code."""
    store = folder / f"store_{world}_{len(list(folder.iterdir()))}"
    source = [str(script)] if isinstance(script, Path) else ["-c", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(world):
        command = [sys.executable, *source, str(rank), str(world), str(store), *map(str, arguments)]
        processes.append(
            subprocess.Popen(
                command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder
            )
        )
    return processes


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for all processes; returns exit code, output and errors of each."""
    results = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=HANG_S)
            results.append((process.returncode, output, errors))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def run_ranks(script: Path | str, world: int, folder: Path, *arguments: object) -> list[str]:
    """Run all ranks to their end; returns what each printed."""
    results = finish(start_ranks(script, world, folder, *arguments))
    for code, _, errors in results:
        assert code == 0, errors
    return [output for _, output, _ in results]
