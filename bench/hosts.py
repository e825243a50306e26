"""Two hosts on one machine, connected by a slow link: network namespaces of Linux.

No process in them can reach another network, and their addresses exist nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "slipstream"
_ETC = Path("/etc/netns")


@dataclass(frozen=True)
class Host:
    """One end of the link.

    Attributes:
        namespace: The name of the network namespace.
        interface: The name of its only network interface besides loopback.
        address: The address of that interface, of a range that is reserved for documentation.
    """

    namespace: str
    interface: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", self.namespace]


def missing() -> str | None:
    """Return why there cannot be two hosts here; None if there can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed; it is part of iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


@contextlib.contextmanager
def two_hosts(megabits: float) -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a link between them; both are removed at the end, with all processes in them.

    Args:
        megabits: Rate of the link in each direction, in Mbit/s.
    """
    remove_abandoned()
    hosts = []
    for number in (1, 2):
        name = f"{_PREFIX}-{os.getpid()}-{number}"
        hosts.append(Host(name, "wire", f"198.51.100.{number}"))
    # A plain kill has to clean up too.
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        first, second = hosts
        ends = ["type", "veth", "peer", "name", second.interface, "netns", second.namespace]
        _ip("link", "add", "name", first.interface, "netns", first.namespace, *ends)
        for host in hosts:
            _connect(host, megabits)
        yield first, second
    finally:
        for host in hosts:
            _remove(host.namespace)
        signal.signal(signal.SIGTERM, before)


def remove_abandoned() -> None:
    """Remove the hosts of processes that were killed before they could do so."""
    for line in _ip("netns", "list").splitlines():
        found = re.match(rf"{_PREFIX}-(\d+)-\w+", line)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(found[0])


def _connect(host: Host, megabits: float) -> None:
    """Give a host its address, and limit what it sends."""
    inside = ["-n", host.namespace]
    # `ip netns exec` puts this file in the place of /etc/hosts. A machine's name leads to its address, as with a DNS.
    folder = _ETC / host.namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n")
    _ip(*inside, "address", "add", f"{host.address}/24", "dev", host.interface)
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "link", "set", host.interface, "up")
    limit = ["tbf", "rate", f"{megabits:g}mbit", "burst", "64kb", "latency", "50ms"]
    subprocess.run([*host.prefix, "tc", "qdisc", "add", "dev", host.interface, "root", *limit], check=True)


def _remove(namespace: str) -> None:
    """End the processes of a namespace, and delete it; does nothing if it does not exist."""
    for _ in range(50):
        listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        pids = [int(pid) for pid in listed.stdout.split()]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
    shutil.rmtree(_ETC / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):
        # If there are no others.
        _ETC.rmdir()


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)
