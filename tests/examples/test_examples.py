"""Every example runs as it is."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_example_runs_and_is_short(example):
    assert len(example.read_text().splitlines()) < 80
    result = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False, timeout=200)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_demo_finds_the_damage_it_made():
    result = subprocess.run(
        [sys.executable, EXAMPLES / "pack_and_verify.py"], capture_output=True, text=True, check=True
    )
    assert "bit for bit: True" in result.stdout
    assert "entry 'network/0.weight' is damaged in chunk 1 of" in result.stdout
