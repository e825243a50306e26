"""The tests themselves, started where signals are ignored."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHILD = """
import os, signal, subprocess, sys

def test_children_start_with_default_handlers():
    script = "import signal; print(*[signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 3, 15)])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False"] * 4

def test_this_process_survives_the_end_of_its_terminal():
    os.kill(os.getpid(), signal.SIGHUP)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_ignored_signals_reach_neither_tests_nor_their_children(tmp_path, workers):
    if workers:
        pytest.importorskip("xdist")
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_child.py").write_text(CHILD)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, str(tmp_path)]
    done = subprocess.run(
        ["sh", "-c", 'trap "" HUP INT QUIT TERM; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
