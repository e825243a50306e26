"""What a process is set to before it trains."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import ConfigurationError
from slipstream.train.settings import to_yaml
from slipstream.train.startup import open_run, resolve_settings
from tests.train.conftest import small

TAKE_AND_FREE = """
import resource
import torch
from slipstream.train.startup import prepare_process

said = prepare_process({threads}) if {prepared} else []

def iteration():
    blocks = [torch.ones(12 << 20) for _ in range(2)]

for _ in range(3):
    iteration()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    iteration()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, torch.get_num_threads(), "; ".join(said), sep="|")
"""


def run(*, prepared: bool, threads: int = 0) -> tuple[int, int, str]:
    program = TAKE_AND_FREE.format(prepared=prepared, threads=threads)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    faults, num_threads, said = done.stdout.strip().split("|")
    return int(faults), int(num_threads), said


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_memory_that_an_iteration_frees_is_there_for_the_next_one_without_asking_linux_again():
    prepared, _, said = run(prepared=True)
    untouched, _, _ = run(prepared=False)
    assert "freed memory is kept" in said
    assert prepared < untouched / 10


def test_torch_computes_with_as_many_threads_as_were_asked_for():
    _, threads, said = run(prepared=True, threads=1)
    assert threads == 1
    assert said.startswith("1 thread on ")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs in ``runs``, of which ``last`` is the second, and a folder of the name of the first that is no run."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("tiny", "large")):
        folder = Path("runs", name)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(to_yaml(small(f"name={name}", f"seed={number}")))
    Path("runs/last").symlink_to("large")
    Path("tiny").mkdir()
    return Path("runs")


def test_a_run_is_resumed_by_its_folder_by_its_name_or_as_the_last_one(runs, tmp_path):
    for resume, name in {"tiny": "tiny", "runs/tiny": "tiny", tmp_path / "runs/tiny": "tiny", "last": "large"}.items():
        settings, folder, _ = open_run([f"resume={resume}"])
        assert folder.path.resolve() == (runs / name).resolve()
        assert (settings.name, settings.seed) == (name, int(name == "large"))
    runs.rename("elsewhere")
    assert open_run(["resume=tiny", "run_dir=elsewhere"])[1].path == Path("elsewhere/tiny")


def test_a_run_that_does_not_exist_is_refused_with_the_places_that_were_looked_at(runs):
    with pytest.raises(ConfigurationError, match="resume=small: .* expected a folder small or runs/small"):
        open_run(["resume=small"])
    with pytest.raises(ConfigurationError, match="resume=x/small: .* expected a folder x/small$"):
        open_run(["resume=x/small"])
    # A folder without settings is not a run.
    Path("runs/empty").mkdir()
    with pytest.raises(ConfigurationError, match="runs/empty has no config.yaml"):
        open_run(["resume=empty"])


def test_the_settings_of_a_command_line_are_those_of_the_run_that_it_resumes(runs):
    assert resolve_settings(["resume=last", "save_interval=7"]).seed == 1
    assert resolve_settings(["resume=last", "save_interval=7"]).save_interval == 7
    assert resolve_settings(["preset=quick"]).env.num_envs == 512
