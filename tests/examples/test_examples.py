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
    "many_processes.py": ["--iterations", "2", "--envs", "32"],
    "navrl_loop.py": ["--iterations", "3", "--envs", "16", "--interval", "2"],
    "offline_bc.py": ["--tiny"],
    "packed_replay_sac.py": ["--tiny"],
    "ray_rollouts.py": ["--iterations", "3"],
    "sb3_replay.py": ["--steps", "1000"],
    "torchrl_ppo.py": ["--iterations", "2", "--envs", "16"],
}
SAYS = {
    "checkpoint_your_loop.py": r"resumed after step 20, .*\n.*\n.*bit for bit: True",
    "inspect_everything.py": r"(?s)the last of 4 lines.*ppo/policy.*agents/observation/lidar.*through",
    "many_processes.py": r"rank 0 of 1: weights [0-9a-f]{16}",
    "navrl_loop.py": r"checkpoint_3\.pt\.lz4 holds policy, optimizers, num_updates, metadata after 1536 frames",
    "offline_bc.py": r"epoch 3: 0\.[0-7]",
    "packed_replay_sac.py": r"1600 steps are [1-9][\d.]+ times smaller",
    "ray_rollouts.py": r"2 actors, 1 replaced: rollouts were [1-9][\d.]+ times.*\n.*same bits after a kill: True",
    "sb3_replay.py": r"250 of 250 steps.* [3-9]\.\d times smaller than SB3's; weights equal: True",
    "torchrl_ppo.py": r"(?s)iteration 2: reward -?[\d.]+, rollouts packed [1-9][\d.]+ times smaller.*whole and checked",
}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_example_runs_and_is_short(example, tmp_path):
    assert len(example.read_text().splitlines()) < 80
    command = [sys.executable, str(example), *TINY.get(example.name, [])]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # what is tiny is slower on several
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=one_thread)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(SAYS.get(example.name, ""), result.stdout)


def test_the_demo_finds_the_damage_it_made():
    result = subprocess.run(
        [sys.executable, EXAMPLES / "pack_and_verify.py"], capture_output=True, text=True, check=True
    )
    assert "bit for bit: True" in result.stdout
    assert "entry 'network/0.weight' is damaged in chunk 1 of" in result.stdout
