"""Checkpoints in an object store against torch's distributed checkpoints (DCP) with fsspec, on the same S3 server.

    python bench/objects.py                              # print the table, about four minutes
    python bench/objects.py --quick                      # one minute, for a look
    python bench/objects.py --write docs/benchmarks.md   # and put it into the page, between its markers

The server is moto, on this machine, so there is no network: times are those of the work and of the requests, and every
megabyte that a real network would carry costs extra. The contenders take turns. Between saves, every tensor changes.
*Returns* is how long the call of the save takes, *committed* when the checkpoint is in the store and complete. A key is
a fiftieth of the state. Bytes and requests are counted in a separate turn by a proxy, so they cost no time.

Each contender reads back what it saved, and the result is compared bit for bit. s3fs is installed into a folder that
only its process uses, because it needs other versions of packages than the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

# The folder of this script is on the path, its parent is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.page import machine, write_section
from tests.proxy import Proxy, serving_proxy
from tests.s3 import BUCKET, environment, serving_s3

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / ".venv" / "s3fs"
WORKER = Path(__file__).with_name("objects_worker.py")
TITLES = {
    "slipstream": "Slipstream",
    "slipstream-raw": "Slipstream, `compress=False`",
    "dcp": "DCP + fsspec, `save`",
    "dcp-async": "DCP + fsspec, `async_save`",
}


@dataclass
class Contender:
    """A process that saves and reads.

    Attributes:
        kind: What the worker calls it.
        seconds: By what was measured, one value per turn.
        moved: By command, the megabytes that were sent and received, and the number of requests.
    """

    kind: str
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    moved: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    def start(self, endpoint: str, place: str, megabytes: int) -> None:
        """Start the process."""
        values = {
            **os.environ,
            **environment(endpoint),
            "AWS_DEFAULT_REGION": "us-east-1",
            "OMP_WAIT_POLICY": "passive",
        }
        if self.kind.startswith("dcp"):
            values["BENCH_PACKAGES"] = str(PACKAGES)
        command = [sys.executable, "-W", "ignore", str(WORKER), self.kind]
        command += [f"s3://{BUCKET}/{place}-{self.kind}", str(megabytes)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=values, cwd=ROOT
        )

    def ask(self, command: str) -> dict[str, float]:
        """Send one command, and wait for its answer."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.kind} failed")
        return dict(json.loads(line))

    def take_turn(self) -> None:
        """Save once, read the key and everything."""
        for name, value in self.ask("save").items():
            self.seconds[name].append(value)
        for command in ("key", "all"):
            self.seconds[command].append(self.ask(command)["seconds"])

    def count(self, proxy: Proxy) -> None:
        """Count what each command moves."""
        self.ask("save")
        for command in ("save", "key", "all"):
            proxy.reset()
            self.ask(command)
            self.moved[command] = (proxy.bytes_sent / 1e6, proxy.bytes_received / 1e6, proxy.num_requests)

    def end(self) -> None:
        """End the process."""
        assert self.process is not None
        self.process.communicate()

    def median(self, name: str) -> float:
        """Return the median of what was measured."""
        return statistics.median(self.seconds[name])


def install_s3fs() -> None:
    """Install s3fs into a separate folder, once."""
    if not (PACKAGES / "s3fs").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*command, "--target", str(PACKAGES), "s3fs"], check=True)


def measure(megabytes: int, turns: int) -> list[Contender]:
    """Let all contenders take turns, and then count what they move."""
    contenders = [Contender(kind) for kind in TITLES]
    with serving_s3() as endpoint:
        for contender in contenders:
            contender.start(endpoint, "timed", megabytes)
        # The first turn imports, connects and allocates.
        for contender in contenders:
            contender.take_turn()
            contender.seconds.clear()
        for _ in range(turns):
            for contender in contenders:
                contender.take_turn()
        for contender in contenders:
            contender.end()
        with serving_proxy(endpoint) as proxy:
            for contender in contenders:
                contender.start(proxy.url, "counted", megabytes)
                contender.count(proxy)
                contender.end()
    return contenders


def table(contenders: list[Contender], megabytes: int, turns: int) -> str:
    """Return the section of the page."""
    peer = next(contender for contender in contenders if contender.kind == "dcp")
    lines = [
        machine(("torch", "obstore")),
        "",
        f"A state of {megabytes * 51 / 50:.0f} MB, {turns} turns, medians. Ratios are to `dcp.save` in the same run.",
        "",
        "| | returns (ms) | committed (s) | ratio | MB sent | requests | one key (ms) | ratio | MB received | requests "
        "| everything (s) | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for contender in contenders:
        sent, _, num_saving = contender.moved["save"]
        _, received, num_reading = contender.moved["key"]
        cells = [
            TITLES[contender.kind],
            f"{1e3 * contender.median('call_s'):.0f}",
            f"{contender.median('commit_s'):.2f}",
            f"{contender.median('commit_s') / peer.median('commit_s'):.2f}",
            f"{sent:.1f}",
            f"{num_saving}",
            f"{1e3 * contender.median('key'):.0f}",
            f"{contender.median('key') / peer.median('key'):.2f}",
            f"{received:.1f}",
            f"{num_reading}",
            f"{contender.median('all'):.2f}",
            f"{contender.median('all') / peer.median('all'):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Slipstream compares every byte it reads with a checksum, and flushes a copy to local disk before it uploads. "
        "DCP does neither.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a smaller state and fewer turns: about a minute")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page, between its markers")
    arguments = parser.parse_args()
    megabytes = 192
    turns = 5
    if arguments.quick:
        megabytes = 48
        turns = 3
    install_s3fs()
    report = table(measure(megabytes, turns), megabytes, turns)
    print(report)
    if arguments.write:
        write_section(arguments.write, "objects", report)


if __name__ == "__main__":
    main()
