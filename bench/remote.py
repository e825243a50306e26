"""What rollouts over Ray cost: `RayDataCollector` against TorchRL's `RayCollector`, and against no Ray at all.

    python bench/remote.py                              # print the tables, about eight minutes
    python bench/remote.py --quick                      # three minutes, for a look
    python bench/remote.py --write docs/benchmarks.md   # and put them into the page

All contenders fly the same drones with the same policy, whose weights change before each round, and take turns on one
machine. What each sends is counted in bytes:

* `RayCollector`: the size that Ray reports for the object that an actor returns (`get_object_locations`), which is what
  it copies to the learner's node if that is another, and the tensors of the policy for each actor.
* `RayDataCollector`: the answers, which contain the rollout and the state of the environment, both packed, and the
  packed weights for each node. `bench/remote_link.py` counts what goes through a network instead.

Then one actor is killed with SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from page import machine, write_section

HERE = Path(__file__).parent
ACTORS = 2
STEPS = 32
WARM_UP = 2  # rounds
PATIENCE_S = 60.0  # how long to wait for a collector that has lost an actor
START_S = 300.0
PORT = 26390
HEAD = ("--head", f"--port={PORT}", "--include-dashboard=false")
TITLES = {
    "slipstream": "`RayDataCollector`",
    "torchrl": "TorchRL's `RayCollector`",
    "serial": "`SerialCollector`, no Ray",
}


class NoAnswerError(Exception):
    """A contender is still busy when it should be done."""


class Contender:
    """A collector in a process that commands are sent to.

    Args:
        method: ``slipstream``, ``torchrl`` or ``serial``.
        command: What starts the process.

    Attributes:
        turns: What it answered in each turn.
    """

    def __init__(self, method: str, command: Sequence[str]) -> None:
        self.method = method
        self.turns: list[dict[str, Any]] = []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # The rest is Ray's.
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")

    def ask(self, command: str, timeout_s: float = START_S) -> dict[str, Any]:
        """Send a line, and return the answer.

        Raises:
            NoAnswerError: If there is none in time.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = START_S) -> dict[str, Any]:
        """Return the next answer."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty as error:
            raise NoAnswerError(f"{self.method} is still busy after {timeout_s:.0f} s") from error
        if not line:
            raise SystemExit(f"{self.method} has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def median(self, name: str) -> float:
        """Return the median over all turns of a value for each round."""
        return float(np.median([turn[name] / turn["rounds"] for turn in self.turns]))

    def frames_per_s(self) -> list[float]:
        """Return the throughput in each turn."""
        return [turn["frames"] / turn["seconds"] for turn in self.turns]

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def contenders(
    methods: Sequence[str], preset: str, drones: int, address: str, *, interface: str = "lo", prefix: Sequence[str] = ()
) -> Iterator[list[Contender]]:
    """Start contenders one after another, and end them.

    Args:
        methods: Their names.
        preset: Whose simulator to use.
        drones: How many drones all actors have together.
        address: Where Ray is.
        interface: The network interface whose bytes are counted.
        prefix: What to put before their commands.
    """
    started: list[Contender] = []
    try:
        for method in methods:
            arguments = [method, preset, ACTORS, drones, STEPS, address, interface]
            worker = [*prefix, sys.executable, str(HERE / "remote_worker.py")]
            started.append(Contender(method, [*worker, *map(str, arguments)]))
            started[-1].answer()
            started[-1].ask(str(WARM_UP))
        yield started
    finally:
        for contender in started:
            contender.stop()


def take_turns(everyone: Sequence[Contender], turns: int, rounds: int) -> None:
    """Let contenders collect, one after another."""
    for _ in range(turns):
        for contender in everyone:
            contender.turns.append({"rounds": rounds, **contender.ask(str(rounds))})


def use_token() -> None:
    """Let all processes that this one starts have a token, without which no other process can use their cluster."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def ray_cluster() -> Iterator[str]:
    """Start Ray on this machine; yields its address, and ends all its processes."""
    use_token()
    options = [*HEAD, "--node-ip-address=127.0.0.1", f"--num-cpus={8 * ACTORS}"]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slray", ignore_cleanup_errors=True))
        stack.enter_context(ray_process([*options, f"--temp-dir={folder}"]))
        yield f"127.0.0.1:{PORT}"


@contextlib.contextmanager
def ray_process(options: Sequence[str], prefix: Sequence[str] = ()) -> Iterator[None]:
    """Run ``ray start --block``, and end it with its processes.

    Args:
        options: For ``ray start``.
        prefix: What to put before the command.
    """
    ray = Path(sys.executable).with_name("ray")
    common = ["--block", "--disable-usage-stats", "--object-store-memory=1000000000"]
    process = subprocess.Popen(
        [*prefix, str(ray), "start", *options, *common], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "--block" in line:
                break
        else:
            raise SystemExit(f"Ray cannot start: {' '.join(said)}")
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()


def sizes_and_rates(preset: str, drones: int, address: str, turns: int, rounds: int) -> tuple[list[str], str]:
    """Measure bytes and throughput; returns the rows of a table, and a sentence about packing."""
    with contenders(("slipstream", "torchrl", "serial"), preset, drones, address) as everyone:
        take_turns(everyone, turns, rounds)
        ours, theirs, serial = everyone
        answers = {"slipstream": ours.median("bytes_received"), "serial": 0.0}
        answers["torchrl"] = float(ACTORS * theirs.ask("size")["answer_bytes"])
        sentence = break_even(preset, ours.ask("packing"))
    # Their actors are on one node, and each has a connection by which it receives all tensors.
    weights = {"slipstream": ours.median("bytes_sent"), "serial": 0.0}
    weights["torchrl"] = float(ACTORS * theirs.turns[0]["weights"])
    totals = {method: answers[method] + weights[method] for method in answers}
    base = np.array(serial.frames_per_s())
    lines = []
    for contender in everyone:
        method = contender.method
        rates = np.array(contender.frames_per_s())
        cells = [preset, TITLES[method]]
        if totals[method]:
            cells += [f"{answers[method] / 1e6:.2f}", f"{weights[method] / 1e6:.2f}"]
            cells += [f"{totals['torchrl'] / totals[method]:.1f}"]
        else:
            cells += ["", "", ""]
        cells += [f"{np.median(rates):,.0f}", f"{np.median(rates / base):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines, sentence


def break_even(preset: str, spent: dict[str, float]) -> str:
    """Return up to which rate of a network packing saves time."""
    seconds = spent["pack_s"] + spent["unpack_s"]
    gigabits = 8e-9 * spent["saved_bytes"] / seconds
    return (
        f"{preset}: one thread packs the rollout of an actor in {1e3 * spent['pack_s']:.0f} ms and unpacks it in "
        f"{1e3 * spent['unpack_s']:.0f} ms, which saves {spent['saved_bytes'] / 1e6:.0f} MB. That saves time if an "
        f"actor's share of the network is less than {gigabits:.1f} Gbit/s."
    )


def losses(address: str, drones: int) -> list[str]:
    """Kill actors; returns the rows of a table that says what happened."""
    lines = []
    for method in ("slipstream", "torchrl"):
        with contenders([method], "navrl", drones, address) as [contender]:
            expected = contender.ask("never")["digests"]
        for moment in ("during", "between"):
            with contenders([method], "navrl", drones, address) as [contender]:
                try:
                    found = contender.ask(moment, PATIENCE_S)
                except NoAnswerError:
                    found = {"hangs": True}
            name = {"during": "in the middle of a rollout", "between": "between two rounds"}[moment]
            lines.append(f"| {TITLES[method]} | {name} | {outcome(found, expected)} |")
    return lines


def outcome(found: dict[str, Any], expected: list[str]) -> str:
    """Return what happened in words."""
    if "hangs" in found:
        return f"still waits after {PATIENCE_S:.0f} s"
    if "raised" in found:
        return f"raises `{found['raised']}` and drops the round; iterated again, it {found['again']}"
    same = "other rollouts than without the kill"
    if found["digests"] == expected:
        same = "the same bits as without the kill"
    return (
        f"continues: the round takes {found['after_s']:.1f} s instead of {found['usual_s']:.1f} s, "
        f"{found['redone']:.0f} rollout is collected again, {found['duplicates']:.0f} arrive twice; {same}"
    )


def run(turns: int, rounds: int, drones: int) -> str:
    """Measure everything and return the report."""
    with ray_cluster() as address:
        rows = []
        sentences = []
        for preset in ("navrl", "quick"):
            measured, sentence = sizes_and_rates(preset, drones, address, turns, rounds)
            rows += measured
            sentences.append(sentence)
        killed = losses(address, drones // 4)
    lines = [
        machine(("torch", "torchrl", "ray")),
        "",
        f"{drones} drones on {ACTORS} actors, {STEPS} steps a rollout, weights sent before each round; {turns} turns "
        f"of {rounds} rounds. Bytes are those of one round.",
        "",
        "| simulator | collector | rollouts and states MB | weights MB | times fewer bytes | frames/s | of no Ray |",
        "|---|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
        *sentences,
        "",
        f"**One actor is killed** (SIGKILL; {drones // 4} drones)",
        "",
        "| collector | when | what happens |",
        "|---|---|---|",
        *killed,
    ]
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few turns; about three minutes")
    parser.add_argument("--drones", type=int, default=1024, help="drones of all actors together; 1024 by default")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the report into a page, between its markers")
    arguments = parser.parse_args()
    turns, rounds = (3, 3) if arguments.quick else (11, 4)
    report = run(turns, rounds, arguments.drones)
    print(report)
    if arguments.write:
        write_section(arguments.write, "remote", report)


if __name__ == "__main__":
    main()
