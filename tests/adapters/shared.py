"""What the tests of all adapters need."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slipstream.store.worker import Worker


@contextmanager
def busy_background() -> Iterator[None]:
    """Keep the background from starting a new job inside the block."""
    release = threading.Event()
    with Worker(1) as worker:
        worker.submit(release.wait)
        try:
            yield
        finally:
            release.set()


def same(first: Any, second: Any) -> bool:
    """Compare nested states bit for bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a process with `folder` as its current folder."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
