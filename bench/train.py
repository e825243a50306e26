"""How fast the embedded simulator and the trainer are, and what the data plane costs them.

    python bench/train.py                              # print the tables, about 9 minutes
    python bench/train.py --quick                      # two minutes, for a look
    python bench/train.py --write docs/benchmarks.md   # and put them into the page

Three questions. *Simulator*: steps of all environments together per CPU second, with exact rays, every drone in the
field, eager and compiled (compiling not counted). *Training*: frames per CPU second of collecting and updating. *Data
plane*: the same loop with nothing but that in it, and as `slipstream train preset=quick` runs it: metrics, TensorBoard,
a checkpoint every 20 iterations, rollouts kept on disk. The two take turns at every iteration, because the machine's
speed drifts. A turn of the trainer goes on until all that was saved at its beginning is written: what is done in the
background counts as its own.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `slipstream train` does, before torch is there
os.environ.setdefault("GOMP_SPINCOUNT", "50000")

import torch
from page import machine, write_section

from slipstream.nav import NavigationConfig, NavigationEnv
from slipstream.run.folder import RunFolder
from slipstream.train.settings import compose_settings
from slipstream.train.startup import prepare_process
from slipstream.train.trainer import Trainer

SIZES = (256, 1024, 4096)
WARM_UP = 5  # iterations
TARGETS = {"false": 37_000, "true": 110_000}


def steps_per_cpu_s(num_envs: int, compile_mode: str, num_steps: int, rounds: int) -> float:
    """Return the best of some rounds; every drone is inside the field, among the obstacles."""
    config = NavigationConfig(num_envs=num_envs, compile=compile_mode)  # type: ignore[arg-type]
    env = NavigationEnv(config)
    generator = torch.Generator().manual_seed(0)
    inside = (torch.rand(num_envs, 2, generator=generator) * 2 - 1) * config.map_half_extent_m
    action = torch.rand(num_envs, 3, generator=generator) * 4 - 2
    seen = env.reset()

    def place() -> None:
        env.simulation.drone.position_m[:, :2] = inside

    def fly(steps: int) -> None:
        nonlocal seen
        place()
        for _ in range(steps):
            seen = env.step(seen.set(("agents", "action"), action))["next"]

    fly(12)  # compiles, and fills caches
    return max(num_envs * num_steps / _cpu_s(lambda: fly(num_steps)) for _ in range(rounds))


def simulator(sizes: tuple[int, ...], num_steps: int, rounds: int) -> list[str]:
    """Return the table of the simulator."""
    lines = ["| environments | eager, steps per CPU s | compiled | ratio |", "|---|---|---|---|"]
    for size in sizes:
        steps = max(10, num_steps * 1024 // size)
        eager, compiled = (steps_per_cpu_s(size, mode, steps, rounds) for mode in ("false", "true"))
        lines.append(f"| {size} | {eager:,.0f} | {compiled:,.0f} | {compiled / eager:.2f} |")
    targets = f"Targets at 1024: {TARGETS['false']:,} eager and {TARGETS['true']:,} compiled."
    return [*lines, "", targets]


def data_plane(pairs: int) -> list[str]:
    """Return the table of the loop without and with the data plane."""
    overrides = ["preset=quick", "eval_interval=0", "wandb=disabled", "max_frame_num=1e12"]
    settings = compose_settings(overrides)
    off: list[tuple[float, float]] = []
    on: list[tuple[float, float]] = []
    began = _now()

    def change_turns(metrics: Mapping[str, float]) -> None:
        """End the trainer's turn, which began with saving what the one before made, and give the bare loop one."""
        nonlocal began
        full.checkpoints.flush()
        for storage in full.storages():
            storage.flush()
        taken, began = _since(began), _now()
        rollout = next(iter(bare.shards))
        bare.ppo.update(rollout)
        if metrics["iteration"] > WARM_UP:
            on.append(taken)
            off.append(_since(began))
        if len(on) == pairs:
            full.stop(signal.SIGTERM)
        began = _now()

    with tempfile.TemporaryDirectory() as folder:
        bare = Trainer(settings, RunFolder(Path(folder) / "bare"))
        full = Trainer(compose_settings(overrides), RunFolder(Path(folder) / "full"), change_turns)
        full.run()
        bare.close()
        full.close()
    lines = ["| data plane | frames per s | frames per CPU s |", "|---|---|---|"]
    for name, times in (("off", off), ("on", on)):
        wall, cpu = (settings.frames_per_iteration / statistics.mean(kind) for kind in zip(*times, strict=True))
        lines.append(f"| {name} | {wall:,.0f} | {cpu:,.0f} |")
    wall_cost, cpu_cost = (_cost([one[kind] for one in off], [one[kind] for one in on]) for kind in (0, 1))
    note = f"On costs {wall_cost} % of the time and {cpu_cost} % of the CPU time (target: under 2 %)."
    return [*lines, "", note]


def _cost(off: list[float], on: list[float]) -> str:
    """Return how much longer the second ones take than the first ones, in per cent, and the standard error of that."""
    differences = [b - a for a, b in zip(off, on, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return (
        f"{100 * statistics.mean(differences) / statistics.mean(off):+.1f} ± {100 * error / statistics.mean(off):.1f}"
    )


def _cpu_s(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = _now()
    return wall - began[0], cpu - began[1]


def main() -> None:
    """Print the tables; write them into a page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and iterations")
    parser.add_argument("--write", type=Path, help="the page whose section `train` is replaced")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    sizes, num_steps, rounds = ((1024,), 20, 2) if arguments.quick else (SIZES, 100, 5)
    pairs = 10 if arguments.quick else 100
    prepare_process(num_threads=1)
    lines = [machine(("torch", "tensordict", "torchrl")), ""]
    lines += ["Simulator, exact rays, 350 boxes, 80 moving obstacles, quadrotor dynamics, one thread:", ""]
    lines += [*simulator(sizes, num_steps, rounds), ""]
    said = prepare_process()
    lines += [
        f"Training, preset=quick, 512 environments x 16 steps, {pairs} pairs of iterations; {'; '.join(said)}:",
        "",
        *data_plane(pairs),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        write_section(arguments.write, "train", text)


if __name__ == "__main__":
    main()
