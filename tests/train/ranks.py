"""Processes that train together: started as a launcher would, without its delay, and compared bit for bit."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream import load_checkpoint, load_rollout
from slipstream.run.metrics import read_rows
from tests.train.conftest import SMALL

HANG_S = 120  # far beyond what anything here takes, also on a busy machine
SHARDED = (*SMALL, "env.num_maps=2", "eval_interval=3", "eval_episodes=2", "dist.shards=4")
EACH_TIME_ANEW = ("time", "rollout_fps", "perf/", "ckpt/", "rollouts/", "memory/", "ray/")
# How far ahead rollouts had been collected when a checkpoint was saved is a matter of luck.
AHEAD = {"base", "batches", "orders", "pending", "collecting", "is_updated", "randomness"}

# Runs ``slipstream`` with the arguments of the script, and kills it in a step of the simulation.
KILLED = """
import os, signal, sys
from slipstream.cli import main
from slipstream.nav.env import NavigationEnv
step = NavigationEnv._step
steps = 0

def count(env, tensordict):
    global steps
    steps += 1
    if steps == {step} and {condition}:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(env, tensordict)

NavigationEnv._step = count
main()
"""
# Writes no file larger than this.
LIMITED = """
import resource
from slipstream.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
main()
"""
PLAIN = "from slipstream.cli import main; main()"

Process = subprocess.Popen[str]


def start(folder: Path, world: int, *arguments: str, scripts: dict[int, str] | None = None) -> list[Process]:
    """Start ``slipstream train`` in several processes.

    Args:
        folder: Where they run.
        world: How many.
        *arguments: Of the command.
        scripts: Python code instead of the plain command, by rank.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(world):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if world > 1:
            environment |= {name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}
        script = (scripts or {}).get(rank, PLAIN)
        command = [sys.executable, "-W", "ignore", "-c", script, "train", *arguments]
        processes.append(
            subprocess.Popen(
                command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    return processes


def finish(processes: list[Process]) -> list[tuple[int, str]]:
    """Wait for all processes; returns the exit code of each, and what it printed as one line."""
    results = []
    with ending(processes):
        for process in processes:
            output, errors = process.communicate(timeout=HANG_S)
            results.append((process.returncode, " ".join((output + errors).split())))
    return results


@contextlib.contextmanager
def ending(processes: list[Process]) -> Iterator[None]:
    """Kill what still runs at the end."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train(folder: Path, world: int, *arguments: str) -> list[str]:
    """Train to the end, without an evaluation there; returns what each process printed."""
    results = finish(start(folder, world, *arguments, "--no-evaluate"))
    for code, text in results:
        assert code == 0, text
    return [text for _, text in results]


def content(run: Path) -> dict[str, Any]:
    """Return everything that a run has computed, after every iteration, without what depends on the clock."""
    found: dict[str, Any] = {}
    for row in read_rows(run / "metrics.jsonl"):
        values = {key: value for key, value in row.items() if not key.startswith(EACH_TIME_ANEW)}
        found[f"metrics {row['iteration']}"] = values
    for path in sorted(run.glob("checkpoints/checkpoint_iter_*.slip")):
        found[path.name] = _plain(load_checkpoint(path))
    for path in sorted(run.glob("*/rollout_*.slip")):
        found[str(path.relative_to(run))] = _plain(load_rollout(path).to_dict())
    return found


def _plain(value: Any) -> Any:
    """Return a state in which everything can be compared with ``==``, bit for bit."""
    if isinstance(value, dict):
        skipped = AHEAD if "orders" in value else set()
        return {str(key): _plain(member) for key, member in value.items() if key not in skipped}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return (value.shape, value.tobytes())
    return value


def assert_same(one: dict[str, Any], other: dict[str, Any], iterations: int = 6) -> None:
    """Compare what two runs have computed."""
    assert one.keys() == other.keys()
    assert [name for name in one if name.startswith("metrics")] == [f"metrics {i + 1}" for i in range(iterations)]
    assert f"checkpoint_iter_{iterations}.slip" in one
    differing = [name for name in one if one[name] != other[name]]
    assert not differing
