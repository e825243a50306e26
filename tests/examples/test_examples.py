"""Every example runs as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {  # those that take a minute as they are
    "checkpoint_your_loop.py": ["--steps", "40"],
    "navrl_loop.py": ["--iterations", "3", "--envs", "16", "--interval", "2"],
    "offline_bc.py": ["--tiny"],
    "packed_replay_sac.py": ["--tiny"],
    "torchrl_ppo.py": ["--iterations", "2", "--envs", "16"],
}
SAYS = {
    "checkpoint_your_loop.py": r"resumed after step 20, .*\n.*\n.*bit for bit: True",
    "inspect_everything.py": r"(?s)the last of 4 lines.*ppo/policy.*agents/observation/lidar.*unseen",
    "navrl_loop.py": r"checkpoint_3\.pt\.lz4 holds policy, optimizers, num_updates, metadata after 1536 frames",
    "torchrl_ppo.py": r"(?s)iteration 2: reward -?[\d.]+, rollouts packed [1-9][\d.]+ times smaller.*whole and checked",
}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_example_runs_and_is_short(example, tmp_path):
    assert len(example.read_text().splitlines()) < 80
    command = [sys.executable, str(example), *TINY.get(example.name, [])]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # what is tiny is slower on several
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, cwd=tmp_path, env=one_thread
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(SAYS.get(example.name, ""), result.stdout)


def test_the_packed_buffer_of_the_off_policy_example_is_smaller_than_its_steps():
    command = [sys.executable, str(EXAMPLES / "packed_replay_sac.py"), "--tiny"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) steps in ([\d.]+) MB, ([\d.]+) MB unpacked", result.stdout)
    assert found is not None
    assert int(found[1]) == 1600
    assert 0.1 < float(found[2]) < float(found[3])


def test_the_demo_finds_the_damage_it_made():
    result = subprocess.run(
        [sys.executable, EXAMPLES / "pack_and_verify.py"], capture_output=True, text=True, check=True
    )
    assert "bit for bit: True" in result.stdout
    assert "entry 'network/0.weight' is damaged in chunk 1 of" in result.stdout


def test_behaviour_cloning_learns_something_in_its_tiny_form():
    command = [sys.executable, str(EXAMPLES / "offline_bc.py"), "--tiny"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    left = [float(line.split()[2]) for line in result.stdout.splitlines() if line.startswith("epoch")]
    assert left[-1] < 0.85  # 1 is what the mean action leaves
