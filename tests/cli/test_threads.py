"""How threads are told to wait for each other."""

import os
import subprocess
import sys

from slipstream.cli.threads import busy_share, cpu_times

SHOW = """
import os
from slipstream.cli.threads import calm_threads
calm_threads()
print(os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"])
"""


def shown(**environment: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_beside_programs_that_keep_the_cores_busy_threads_sleep_at_once():
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        assert shown() == ["PASSIVE", "0"]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_what_the_user_has_set_stays():
    assert shown(OMP_WAIT_POLICY="ACTIVE", GOMP_SPINCOUNT="7") == ["ACTIVE", "7"]


def test_waiting_for_a_disk_is_not_being_busy_and_being_kept_from_the_cores_is():
    before = [[100, 0, 50, 1000, 10, 0, 0, 0], [0] * 8]
    idle = [[100, 0, 50, 1060, 50, 0, 0, 0], [0, 0, 0, 100, 0, 0, 0, 0]]
    stolen = [[100, 0, 50, 1050, 10, 0, 0, 50], [0, 0, 0, 100, 0, 0, 0, 0]]
    assert busy_share(before, idle) == 0
    assert busy_share(before, stolen) == 0.25


def test_a_system_that_does_not_tell_counts_as_idle(monkeypatch, tmp_path):
    monkeypatch.setattr("slipstream.cli.threads._STAT", tmp_path / "none")
    assert busy_share(cpu_times(), cpu_times()) == 0
