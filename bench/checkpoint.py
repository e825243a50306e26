"""Checkpoint savers against their peers, inside a training loop: what a save costs, and what it leaves on disk.

    python bench/checkpoint.py                              # print the tables, about 11 minutes
    python bench/checkpoint.py --quick                      # a minute and a half, without the largest state
    python bench/checkpoint.py --write docs/benchmarks.md   # and put them into the page, between its markers

Every saver has a process with the same trained network. The processes take turns, in rounds: the machine's speed
drifts, and this way it drifts for all alike. In a turn, rollouts (forward passes) and optimizer steps alternate, and a
save is requested right after the last step of an iteration. The stall is the time of the call, and of waiting before
the next step. The training time lost is the call, and how much longer the iterations until the file is durable take
than those without a save before and after it. Each saver has to return, from its first save, the state at the moment of
the call, although training continued; one that does not, or does not run, is left out and named.

CPU times are measured without training: user and system time of the whole process, from the call until the file is
durable. Time spent waiting for the disk is not CPU time.

A load is that of a program that has just started: freed memory is returned to the system first, so that everyone gets
pages that were never touched. A save is that of a program that saves regularly: it comes after another save, which is
not measured.

Few peers flush what they write to the disk. To measure all alike, each file is flushed (fsync) here, in the background,
as soon as its saver says that it is complete. A saver that has already done so loses nothing by it.

Torch's threads would spin while they wait for each other, so that anything else that runs for a moment, in this process
or another one, stops them all for many times as long, and the time lost would depend on the scheduler. They run with
OMP_WAIT_POLICY=passive here; set the variable to ``active`` to see the difference.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The folder of this script is on the path, its parent is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.page import machine, write_section
from bench.saving.contenders import CONTENDERS
from bench.saving.disk import disk_table, run_disk, sizes_table
from bench.saving.processes import Company
from bench.saving.tables import Measured, floors_table, gil_table, growth_table, savers_table
from bench.saving.targets import targets_table
from bench.saving.tiny import measure_tiny
from bench.saving.training import THREADS, Size, Training, raw_bytes

PEERS = (
    "lightning",
    "orbax-checkpoint",
    "torchsnapshot",
    "torch_checkpointing",
    "safetensors",
    "lz4",
    "zipnn",
    "pcodec",
)
# Optimizer steps before anything is measured: weights and moments then look like those of a real run.
TRAINED_STEPS = 60

SMALL_WIDTHS = (256, 272, 272, 272, 128)
MEDIUM_WIDTHS = (512, 960, 960, 960, 960, 256)
LARGE_WIDTHS = (1024, 2048, 2048, 2048, 2048, 512)

FULL = (
    Size("3 MB", SMALL_WIDTHS, passes=4, batch=256, rounds=11, saves=2, quiet=4, cpu_saves=3),
    Size("42 MB", MEDIUM_WIDTHS, passes=2, batch=256, rounds=9, saves=1, quiet=3, cpu_saves=1, probes_gil=True),
    Size("190 MB", LARGE_WIDTHS, passes=2, batch=128, rounds=6, saves=1, quiet=2, cpu_saves=1),
)
QUICK = (
    Size("3 MB", SMALL_WIDTHS, passes=4, batch=256, rounds=3, saves=2, quiet=3, cpu_saves=2),
    Size("42 MB", MEDIUM_WIDTHS, passes=2, batch=256, rounds=2, saves=1, quiet=2, cpu_saves=1, probes_gil=True),
)


def measure_size(size: Size, company: Company, folder: Path) -> Measured:
    """Train a network, and let all contenders measure saves of it."""
    training = Training.of(size)
    for _ in range(TRAINED_STEPS):
        training.step()
    state = training.state()
    folder.mkdir()
    start = folder / "start.pt"
    torch.save(state, start)
    turns = company.measure(size, start, folder)
    return Measured.of(size, raw_bytes(state), turns)


def measure_savers(sizes: Sequence[Size], names: Sequence[str], folder: Path) -> tuple[list[Measured], list[str]]:
    """Measure contenders at all sizes; returns what was measured, and why some were left out."""
    company = Company(names)
    try:
        measured = [measure_size(size, company, folder / size.name) for size in sizes]
    finally:
        company.end()
    return measured, company.left_out


def run(folder: Path, *, quick: bool, only: Sequence[str] | None = None) -> str:
    """Measure everything, or only these savers, and return the section of the page."""
    sizes: tuple[Size, ...] = FULL
    far = 100
    num_saves = 50
    tiny_rounds = 4
    if quick:
        sizes = QUICK
        far = 10
        num_saves = 20
        tiny_rounds = 2
    torch.set_num_threads(THREADS)
    load = f"{os.getloadavg()[0]:.1f}"
    measured, left_out = measure_savers(sizes, only or list(CONTENDERS), folder)
    sections = [
        machine(("numpy", "torch", *PEERS)),
        f"Load average before the run: {load} (anything above 0.5 is other work on the same cores).",
        "",
    ]
    # The largest first: that is what the front page quotes.
    sections += [savers_table(each) for each in reversed(measured)]
    sections += [f"{reason}\n" for reason in left_out]
    if only is not None:
        return "\n".join(sections)
    small, medium, *rest = measured
    large = next(iter(rest), None)
    disk = run_disk(SMALL_WIDTHS, far, num_saves, folder)
    sections.append(targets_table(small, medium, large, disk))
    sections.append(floors_table(measured))
    sections.append(growth_table(measured, measure_tiny(folder, tiny_rounds)))
    sections.append(gil_table(medium))
    sections.append(disk_table(disk))
    largest = Training.of(sizes[-1])
    for _ in range(TRAINED_STEPS):
        largest.step()
    sections.append(sizes_table(largest.state(), folder))
    return "\n".join(sections)


def main() -> None:
    """Parse the command line, measure, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--quick", action="store_true", help="less data and fewer repetitions: about a minute and a half"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page, between its markers")
    parser.add_argument("--folder", type=Path, help="where to save; by default the system's folder for temporary files")
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, metavar="SAVER", help=f"these savers only: {', '.join(CONTENDERS)}"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="slipstream-bench-") as folder:
        report = run(Path(folder), quick=arguments.quick, only=arguments.only)
    print(report)
    if arguments.write and not arguments.only:
        write_section(arguments.write, "checkpoint", report)


if __name__ == "__main__":
    main()
