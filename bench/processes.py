"""What training in shards costs, and what more processes gain: against one process, DDP, and rsl_rl's way.

    python bench/processes.py                              # print the table, about ten minutes
    python bench/processes.py --quick                      # two minutes, for a look
    python bench/processes.py --write docs/benchmarks.md   # and put it into the page

All contenders train the network, the simulator and the loss of `slipstream train preset=quick`, with the same number of
drones together, and take turns. *Shards* are ours: the same run with any number of processes. *all_reduce* is what
rsl_rl does: every process has a share of the drones, normalises its advantages by itself, and gradients are averaged
before each step. *DDP* does the same with torch's DistributedDataParallel. Neither gives the run of one process.

The last column compares weights after all turns, bit for bit, with those of the same method in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from page import machine, write_section

WARM_UP = 3  # iterations


@dataclass
class Contender:
    """A method in a number of processes.

    Attributes:
        title: For the table.
        method: ``shards``, ``alone``, ``all_reduce`` or ``ddp``.
        world: The number of processes.
        shards: The number of shards, with that method.
        threads: The number of threads of each process.
        seconds: Time by the clock of an iteration, in each turn.
        parts: What the first process answered, in each turn.
    """

    title: str
    method: str
    world: int
    shards: int
    threads: int
    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, num_envs: int, folder: Path) -> None:
        """Start the processes."""
        store = folder / f"{self.method}-{self.world}-{self.shards}-{self.threads}"
        for rank in range(self.world):
            arguments = [self.method, rank, self.world, self.shards, self.threads, num_envs, store]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, Path(__file__).with_name("processes_worker.py"), *map(str, arguments)],
                    env={**os.environ, "LOCAL_WORLD_SIZE": str(self.world)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def train(self, iterations: int) -> tuple[float, dict[str, Any]]:
        """Train for some iterations; returns the time of each, and what the first process says."""
        began = time.perf_counter()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{iterations}\n")
            process.stdin.flush()
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        seconds = (time.perf_counter() - began) / iterations
        if len({answer["digest"] for answer in answers}) > 1:
            raise ValueError(f"{self.title}: the processes have different weights")
        return seconds, answers[0]

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.communicate()


def contenders() -> list[Contender]:
    """Return what is compared. What other rows refer to is named by its title."""
    return [
        Contender("one process, not divided, 2 threads", "alone", 1, 0, 2),
        Contender("one process, not divided, 1 thread", "alone", 1, 0, 1),
        Contender("1 shard, 1 process", "shards", 1, 1, 1),
        Contender("4 shards, 1 process, 1 thread", "shards", 1, 4, 1),
        Contender("4 shards, 1 process, 2 threads", "shards", 1, 4, 2),
        Contender("4 shards, 2 processes", "shards", 2, 4, 1),
        Contender("2 shards, 1 process, 1 thread", "shards", 1, 2, 1),
        Contender("2 shards, 2 processes", "shards", 2, 2, 1),
        Contender("all_reduce, 2 processes", "all_reduce", 2, 0, 1),
        Contender("DDP, 2 processes", "ddp", 2, 0, 1),
    ]


def run(num_envs: int, turns: int, iterations: int) -> str:
    """Measure everything and return the report."""
    everyone = contenders()
    with tempfile.TemporaryDirectory() as folder:
        for contender in everyone:
            contender.start(num_envs, Path(folder))
        for contender in everyone:
            contender.train(WARM_UP)
        for _ in range(turns):
            for contender in everyone:
                seconds, answer = contender.train(iterations)
                contender.seconds.append(seconds)
                contender.parts.append(answer)
        for contender in everyone:
            contender.stop()
    by_title = {contender.title: contender for contender in everyone}
    lines = [
        machine(("torch",)),
        "",
        f"{num_envs} drones together, {turns} turns of {iterations} iterations. The network has "
        f"{everyone[0].parts[0]['parameters']:,} parameters.",
        "",
        "| contender | ms an iteration | collecting | updating | of one thread, not divided | weights |",
        "|---|---:|---:|---:|---:|---|",
    ]
    single = by_title["one process, not divided, 1 thread"]
    for contender in everyone:
        cells = [contender.title, f"{1e3 * np.median(contender.seconds):.0f}"]
        for part in ("collect_s", "update_s"):
            spent = [answer[part] for answer in contender.parts]
            cells += [f"{1e3 * np.median(spent) / iterations:.0f}"]
        cells.append(f"{ratio(contender, single):.2f}")
        cells.append(same_weights(contender, everyone))
        lines.append(f"| {' | '.join(cells)} |")
    one_shard = by_title["1 shard, 1 process"]
    four = by_title["4 shards, 1 process, 2 threads"]
    slow = by_title["4 shards, 1 process, 1 thread"]
    fast = by_title["4 shards, 2 processes"]
    lines += [
        "",
        f"Four shards in one process take {ratio(four, one_shard):.2f} times as long as one shard on two threads, and "
        f"{ratio(slow, one_shard):.2f} times on one (target: at most 1.25). Two processes with one thread each are "
        f"{ratio(slow, fast):.2f} times as fast as one with one thread (target: 1.5); with all_reduce "
        f"{ratio(single, by_title['all_reduce, 2 processes']):.2f} times, with DDP "
        f"{ratio(single, by_title['DDP, 2 processes']):.2f} times, each compared with one thread and no division.",
    ]
    return "\n".join(lines)


def ratio(one: Contender, other: Contender) -> float:
    """Return the median of the ratios of all turns."""
    return float(np.median(np.array(one.seconds) / np.array(other.seconds)))


def same_weights(contender: Contender, everyone: list[Contender]) -> str:
    """Return whether the weights are those of the same run in one process."""
    if contender.world == 1:
        return ""
    method, shards = ("shards", contender.shards) if contender.method == "shards" else ("alone", 0)
    mine = contender.parts[-1]["digest"]
    for other in everyone:
        if (other.method, other.shards, other.world) == (method, shards, 1) and other.parts[-1]["digest"] == mine:
            return "the same"
    return "different"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few turns; about two minutes")
    parser.add_argument("--envs", type=int, default=512, help="drones of all shards together; 512 by default")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the report into a page, between its markers")
    arguments = parser.parse_args()
    turns, iterations = (3, 2) if arguments.quick else (15, 3)
    report = run(arguments.envs, turns, iterations)
    print(report)
    if arguments.write:
        write_section(arguments.write, "processes", report)


if __name__ == "__main__":
    main()
