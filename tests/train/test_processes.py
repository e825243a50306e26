"""How processes of a training are started, and which run an attempt of a job belongs to."""

import pytest

from slipstream import ConfigurationError
from slipstream.train.processes import attempt_overrides, settle_devices, torchrun_command
from tests.train.conftest import small

RESTARTABLE = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "42-a"}


@pytest.fixture
def job(monkeypatch):
    """Set the variables that torchrun would."""

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    for name in ("WORLD_SIZE", *RESTARTABLE):
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


def test_a_job_that_is_never_restarted_has_the_command_line_as_it_is(job):
    assert attempt_overrides(["preset=quick"]) == ["preset=quick"]
    job(**{**RESTARTABLE, "TORCHELASTIC_MAX_RESTARTS": "0"})
    assert attempt_overrides(["preset=quick"]) == ["preset=quick"]


def test_every_attempt_of_a_job_has_the_same_run_and_all_but_the_first_resume_it(job):
    job(**RESTARTABLE)
    assert attempt_overrides(["preset=quick"]) == ["preset=quick", "name='job-42-a'"]
    assert attempt_overrides(["name=x"]) == ["name=x"]
    job(TORCHELASTIC_RESTART_COUNT="2")
    assert attempt_overrides(["preset=quick"]) == ["preset=quick", "name='job-42-a'", "resume=auto"]
    assert attempt_overrides(["name=x"]) == ["name=x", "resume=auto"]
    assert attempt_overrides(["name=x", "resume=auto"]) == ["name=x", "resume=auto"]
    assert attempt_overrides(["resume=runs/x"]) == ["resume=runs/x"]


def test_a_job_that_may_be_restarted_needs_a_name_that_its_attempts_have_in_common(job):
    job(**{**RESTARTABLE, "TORCHELASTIC_RUN_ID": "none"})
    with pytest.raises(ConfigurationError, match=r"finds a run by its name: set name=\.\.\."):
        attempt_overrides(["preset=quick"])


def test_several_processes_are_started_by_torchrun_with_the_same_arguments():
    command = torchrun_command(2, ["train", "dist.shards=4", "--json"])
    assert command[1:4] == ["-m", "slipstream.dist.launch", "--standalone"]
    assert command[4:] == ["--nproc-per-node=2", "-m", "slipstream", "train", "dist.shards=4", "--json"]
