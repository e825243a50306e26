"""How processes of a training are started, and which run an attempt of a job belongs to."""

import subprocess
import sys

import pytest

from slipstream import ConfigurationError
from slipstream.train.processes import attempt_overrides, connect, settle_devices, torchrun_command
from tests.train.conftest import small

# What torchrun does, and what slipstream does as one of its processes.
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-W', 'ignore', '-c', sys.argv[1]])"
LAUNCHED = """
import signal
from slipstream.train.processes import connect
connect()
print("ready", flush=True)
signal.pause()
"""
RESTARTABLE = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "42-a"}


@pytest.fixture
def job(monkeypatch):
    """Set the variables that torchrun would."""

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", *RESTARTABLE):
        monkeypatch.delenv(name, raising=False)
    return set_variables


def test_the_number_of_processes_is_that_of_torchrun_and_a_contradiction_is_refused(job):
    settings = small("dist.shards=4", "devices=2")
    assert settle_devices(settings, ["devices=2"]) == settings
    job(WORLD_SIZE="4")
    # From the settings of the run that is resumed, and not from the command line.
    assert settle_devices(settings, ["resume=runs/x"]).devices == 4
    with pytest.raises(ConfigurationError, match="devices is 2, but torchrun has started 4: leave devices out"):
        settle_devices(settings, ["devices=2"])
    with pytest.raises(ConfigurationError, match="dist.shards is 0, expected 4, 8 or 16 for 4 processes"):
        settle_devices(small(), [])


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set: start slipstream with torchrun, or unset"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "but MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment, expected a number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0' in the environment"),
    ],
)
def test_a_launcher_that_says_only_a_part_of_the_place_is_named_with_a_remedy(job, variables, message):
    job(**variables)
    with pytest.raises(ConfigurationError, match=message):
        connect()


def test_processes_on_cpus_cannot_connect_by_nccl(job):
    with pytest.raises(ConfigurationError, match="dist.backend is nccl, expected auto or gloo with device=cpu"):
        small("dist.shards=4", "devices=2", "dist.backend=nccl", "device=cpu").check()
    small("dist.shards=4", "dist.backend=nccl", "device=cpu").check()


def test_a_job_that_is_never_restarted_has_the_command_line_as_it_is(job):
    assert attempt_overrides(["preset=quick"], has_begun=lambda: True) == ["preset=quick"]
    job(**{**RESTARTABLE, "TORCHELASTIC_MAX_RESTARTS": "0"})
    assert attempt_overrides(["preset=quick"], has_begun=lambda: True) == ["preset=quick"]


def test_every_attempt_of_a_job_has_the_same_run_and_all_but_the_first_resume_it(job):
    job(**RESTARTABLE)
    assert attempt_overrides(["preset=quick"], has_begun=lambda: True) == ["preset=quick", "name='job-42-a'"]
    assert attempt_overrides(["name=x"], has_begun=lambda: True) == ["name=x"]
    job(TORCHELASTIC_RESTART_COUNT="2")
    assert attempt_overrides(["preset=quick"], has_begun=lambda: True) == [
        "preset=quick",
        "name='job-42-a'",
        "resume=auto",
    ]
    assert attempt_overrides(["name=x"], has_begun=lambda: True) == ["name=x", "resume=auto"]
    assert attempt_overrides(["name=x", "resume=auto"], has_begun=lambda: True) == ["name=x", "resume=auto"]
    assert attempt_overrides(["resume=runs/x"], has_begun=lambda: True) == ["resume=runs/x"]


def test_a_restarted_job_does_not_resume_a_run_that_its_first_attempt_was_refused(job):
    job(**{**RESTARTABLE, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert attempt_overrides(["name=x"], has_begun=lambda: False) == ["name=x"]


def test_a_job_that_may_be_restarted_needs_a_name_that_its_attempts_have_in_common(job):
    job(**{**RESTARTABLE, "TORCHELASTIC_RUN_ID": "none"})
    with pytest.raises(ConfigurationError, match=r"finds a run by its name: set name=\.\.\."):
        attempt_overrides(["preset=quick"], has_begun=lambda: True)


def test_several_processes_are_started_by_torchrun_with_the_same_arguments():
    command = torchrun_command(2, ["train", "dist.shards=4", "--json"])
    assert command[1:4] == ["-m", "slipstream.dist.launch", "--standalone"]
    assert command[4:] == ["--nproc-per-node=2", "-m", "slipstream", "train", "dist.shards=4", "--json"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent has ended")
def test_a_process_ends_when_its_launcher_is_killed(job):
    job(TORCHELASTIC_RUN_ID="42-a")
    command = [sys.executable, "-c", LAUNCHER, LAUNCHED]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        # The process has inherited the pipe: it is closed when that ends.
        output, _ = launcher.communicate(timeout=120)
    assert output == ""
