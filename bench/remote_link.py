"""Rollouts through a slow network: two hosts with a link of 100 Mbit/s, packed rollouts against TorchRL's.

    python bench/remote_link.py                              # print the table; about five minutes
    python bench/remote_link.py --quick                      # three minutes
    python bench/remote_link.py --rate 1000                  # a link of 1 Gbit/s
    python bench/remote_link.py --write docs/benchmarks.md   # and put it into the page

The hosts are network namespaces of this machine, which needs root and iproute2. Each has a Ray node: the learner is on
one, and all actors are on the other. Bytes are those that the learner's network interface has counted: rollouts,
states, weights, Ray's own messages and all headers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hosts import Host, missing, two_hosts
from page import machine, write_section
from remote import ACTORS, HEAD, PORT, STEPS, TITLES, contenders, ray_process, take_turns, use_token


def run(megabits: float, drones: int, turns: int, rounds: int) -> str:
    """Measure everything and return the report."""
    use_token()
    with two_hosts(megabits) as (learner, far):
        rows = measure(learner, far, drones, turns, rounds)
    lines = [
        machine(("torch", "torchrl", "ray")),
        "",
        f"{drones} drones on {ACTORS} actors, {STEPS} steps a rollout, weights sent before each round; the link has "
        f"{megabits:g} Mbit/s; {turns} turns of {rounds} rounds. Bytes are those of one round.",
        "",
        "| simulator | collector | received MB | sent MB | seconds a round | frames/s | times as fast |",
        "|---|---|---:|---:|---:|---:|---:|",
        *rows,
    ]
    return "\n".join(lines)


def measure(learner: Host, far: Host, drones: int, turns: int, rounds: int) -> list[str]:
    """Start a Ray node on each host, and measure; returns the rows of the table."""
    rows = []
    # TorchRL's weights travel outside of Ray. The name is the same on both hosts.
    os.environ["GLOO_SOCKET_IFNAME"] = learner.interface
    with contextlib.ExitStack() as stack:
        address = f"{learner.address}:{PORT}"
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slray", ignore_cleanup_errors=True))
        # No actor fits on the head.
        head = [*HEAD, f"--node-ip-address={learner.address}", "--num-cpus=0"]
        stack.enter_context(ray_process([*head, f"--temp-dir={folder}/a"], learner.prefix))
        other = [f"--address={address}", f"--node-ip-address={far.address}", f"--num-cpus={4 * ACTORS}"]
        stack.enter_context(ray_process([*other, f"--temp-dir={folder}/b"], far.prefix))
        for preset in ("navrl", "quick"):
            rows += measure_one(preset, learner, address, drones, turns, rounds)
    return rows


def measure_one(preset: str, learner: Host, address: str, drones: int, turns: int, rounds: int) -> list[str]:
    """Measure with one simulator; returns rows of the table."""
    methods = ("slipstream", "torchrl")
    started = contenders(methods, preset, drones, address, interface=learner.interface, prefix=learner.prefix)
    with started as everyone:
        take_turns(everyone, turns, rounds)
    rows = []
    raw = np.array(everyone[1].frames_per_s())
    for contender in everyone:
        rates = np.array(contender.frames_per_s())
        seconds = contender.median("seconds")
        cells: list[Any] = [preset, TITLES[contender.method]]
        cells += [f"{contender.median(name) / 1e6:.2f}" for name in ("wire_received", "wire_sent")]
        cells += [f"{seconds:.2f}", f"{np.median(rates):,.0f}", f"{np.median(rates / raw):.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few turns; about three minutes")
    parser.add_argument("--rate", type=float, default=100, help="of the link, in Mbit/s; 100 by default")
    parser.add_argument("--drones", type=int, default=1024, help="drones of all actors together; 1024 by default")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the report into a page, between its markers")
    arguments = parser.parse_args()
    problem = missing()
    if problem:
        raise SystemExit(f"there is no link to measure: {problem}")
    turns, rounds = (2, 2) if arguments.quick else (5, 3)
    report = run(arguments.rate, arguments.drones, turns, rounds)
    print(report)
    if arguments.write:
        write_section(arguments.write, "remote-link", report)


if __name__ == "__main__":
    main()
