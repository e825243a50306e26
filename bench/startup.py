"""CPU time that starting takes: ``python bench/startup.py``.

Each command runs several times in a new process; the table shows user and system time of the process, so that other
programs on the machine change it little. The aim for ``import slipstream`` and ``slipstream --help`` is 0.4 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

COMMANDS = {
    "python": ["-c", "pass"],
    "import slipstream": ["-c", "import slipstream"],
    "slipstream --version": ["-m", "slipstream", "--version"],
    "slipstream --help": ["-m", "slipstream", "--help"],
    "slipstream train --help": ["-m", "slipstream", "train", "--help"],
}


def cpu_seconds(arguments: list[str]) -> float:
    """Return the user and system time of one Python process."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    return user + system


def main() -> None:
    """Print the median and the slowest of each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    print("| command | median CPU s | slowest |\n|---|---:|---:|")
    for name, arguments in COMMANDS.items():
        cpu_seconds(arguments)  # the first run also reads the files from disk and compiles them
        times = [cpu_seconds(arguments) for _ in range(repeats)]
        print(f"| `{name}` | {statistics.median(times):.2f} | {max(times):.2f} |")


if __name__ == "__main__":
    main()
