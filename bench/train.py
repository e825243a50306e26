"""How fast the embedded simulator and the trainer are, and what the data plane costs them.

    python bench/train.py                              # print the tables, about 8 minutes
    python bench/train.py --quick                      # a minute, for a look
    python bench/train.py --write docs/benchmarks.md   # and put them into the page

Three questions. *Simulator*: steps of all environments together per CPU second, with exact rays, every drone in the
field, eager and compiled (compiling not counted). *Training*: frames per CPU second of collecting and updating. *Data
plane*: the same loop with nothing but that in it, and as `slipstream train preset=quick` runs it: metrics, TensorBoard,
a checkpoint every 10 iterations, rollouts kept on disk. The two take turns, because the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from page import machine, write_section

from slipstream.nav import NavigationConfig, NavigationEnv
from slipstream.train.folder import RunFolder
from slipstream.train.settings import compose_settings
from slipstream.train.startup import prepare_process
from slipstream.train.trainer import Trainer

SIZES = (256, 1024, 4096)
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


def data_plane(iterations: int, turns: int) -> list[str]:
    """Return the table of the loop without and with the data plane."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["preset=quick", "eval_interval=0", "wandb=disabled", "max_frame_num=1e12"]
        settings = compose_settings(overrides)
        bare = Trainer(settings, RunFolder(Path(folder) / "bare"))
        full = Trainer(compose_settings(overrides), RunFolder(Path(folder) / "full"))
        frames = settings.frames_per_iteration * iterations

        def run_bare() -> None:
            for _ in range(iterations):
                bare.ppo.update(bare.collector.collect())

        def run_full() -> None:
            last = full.iteration + iterations
            full._on_iteration = lambda metrics: full.stop(15) if metrics["iteration"] >= last else None
            full._stop = None
            full.run()

        times: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
        run_bare()
        run_full()
        for _ in range(turns):
            times["off"].append(_times(run_bare))
            times["on"].append(_times(run_full))
        bare.close()
        full.close()
    lines = ["| data plane | frames per s | frames per CPU s |", "|---|---|---|"]
    medians = {}
    for name, pairs in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        medians[name] = (wall, cpu)
        lines.append(f"| {name} | {frames / wall:,.0f} | {frames / cpu:,.0f} |")
    wall, cpu = (100 * (medians["on"][place] / medians["off"][place] - 1) for place in (0, 1))
    spread = 100 * (max(times["off"])[0] / min(times["off"])[0] - 1)
    note = (
        f"On costs {wall:+.1f} % of the time and {cpu:+.1f} % of the CPU time (target: under 2 %); without it, turns "
        f"of {iterations} iterations differ by {spread:.0f} % among themselves. A turn with it ends with a checkpoint "
        "more than training would make, and waits for it."
    )
    return [*lines, "", note]


def _cpu_s(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def _times(run: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Print the tables; write them into a page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and iterations")
    parser.add_argument("--write", type=Path, help="the page whose section `train` is replaced")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    said = prepare_process()
    sizes, num_steps, rounds = ((1024,), 20, 2) if arguments.quick else (SIZES, 100, 5)
    iterations, turns = (10, 1) if arguments.quick else (20, 4)
    lines = [machine(("torch", "tensordict", "torchrl")), "", f"{'; '.join(said)}.", ""]
    lines += ["Simulator, exact rays, 350 boxes, 80 moving obstacles, quadrotor dynamics:", ""]
    lines += [*simulator(sizes, num_steps, rounds), ""]
    lines += [
        f"Training, 512 environments x 32 steps, median of {turns} turns:",
        "",
        *data_plane(iterations, turns),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        write_section(arguments.write, "train", text)


if __name__ == "__main__":
    main()
