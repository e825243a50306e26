"""Runs whose checkpoints are uploaded: resumed on another machine, by any number of processes."""

from pathlib import Path

import pytest

from slipstream import ConfigurationError, load_checkpoint
from slipstream.checkpoint import commits
from slipstream.errors import StoreError
from slipstream.run.folder import RunFolder
from slipstream.store.urls import open_store
from slipstream.train.settings import compose_settings, to_yaml
from slipstream.train.startup import open_run
from slipstream.train.trainer import Trainer
from tests.train.conftest import SMALL
from tests.train.ranks import SHARDED, content, finish, start, train

# Stops as by a signal after the third iteration.
STOPPED = """
import signal
from slipstream.cli import main
from slipstream.train.trainer import Trainer
log = Trainer._log

def stop(trainer, values):
    log(trainer, values)
    if trainer.iteration == 3:
        trainer.stop(signal.SIGTERM)

Trainer._log = stop
main()
"""


def test_a_run_is_resumed_from_its_url_in_another_number_of_processes_as_if_nothing_had_happened(tmp_path):
    url = f"file://{tmp_path}/store/x"
    for name in ("straight", "first", "second"):
        (tmp_path / name).mkdir()
    train(tmp_path / "straight", 1, *SHARDED, "name=x")
    [(code, text)] = finish(
        start(tmp_path / "first", 1, *SHARDED, "name=x", f"checkpoint_url={url}", scripts={0: STOPPED})
    )
    assert code == 143, text
    # Another machine, which has nothing but the URL.
    printed = train(tmp_path / "second", 2, f"resume={url}")
    assert "resuming runs/x from iteration 3" in printed[0], printed[0]
    expected = content(tmp_path / "straight/runs/x")
    found = content(tmp_path / "second/runs/x")
    for name in ("checkpoint_iter_6.slip", "metrics 6", "rollouts/rollout_000006.slip"):
        assert found[name] == expected[name]
    assert set(load_checkpoint(url)) == set(
        load_checkpoint(tmp_path / "second/runs/x/checkpoints/checkpoint_iter_6.slip")
    )
    assert f"checkpoint_url: {url}" in (tmp_path / "second/runs/x/config.yaml").read_text()
    # The first machine has an older state on its disk, and finds the newer one in the store.
    assert "is already finished, after iteration 6" in train(tmp_path / "first", 1, "resume=runs/x")[0]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a run of two iterations, which another machine trained."""
    found = f"file://{tmp_path}/store/x"
    settings = compose_settings([*SMALL, "name=x", f"run_dir={tmp_path}/elsewhere", f"checkpoint_url={found}"])
    trainer = Trainer(settings, RunFolder(tmp_path / "elsewhere/x"))
    try:
        trainer._on_iteration = lambda metrics: trainer.stop(15) if metrics["iteration"] == 2 else None
        trainer.run()
    finally:
        trainer.close()
    return found


def test_auto_resumes_the_run_of_a_url_and_a_new_run_does_not_start_over_it(url, tmp_path, monkeypatch):
    here = [*SMALL, "name=x", f"run_dir={tmp_path}/here", f"checkpoint_url={url}"]
    settings, folder, is_resumed = open_run([*here, "resume=auto"])
    assert is_resumed
    trainer = Trainer(settings, folder)
    try:
        assert trainer.restore() == 2
    finally:
        trainer.close()
    with pytest.raises(ConfigurationError, match=f"{url} already contains a run: resume it with resume={url}"):
        open_run(here)
    # A URL without a run.
    assert not open_run([*here, "resume=auto", f"checkpoint_url={url}-new"])[2]

    def unavailable(url: Path) -> object:
        raise StoreError(f"{url}: cannot be read")

    # Whether there is a run to resume cannot be told, and a new one must not take its place.
    monkeypatch.setattr(commits, "open_store", unavailable)
    with pytest.raises(StoreError):
        open_run([*here, "resume=auto"])
    assert not open_run(here)[2]


def test_settings_come_from_the_checkpoint_and_single_ones_can_be_overridden(url, tmp_path):
    settings, folder, is_resumed = open_run([f"resume={url}", f"run_dir={tmp_path}/here", "keep_checkpoints=3"])
    assert is_resumed
    assert folder.path == tmp_path / "here/x"
    assert (settings.keep_checkpoints, settings.env.num_envs, settings.checkpoint_url) == (3, 16, url)
    trainer = Trainer(settings, folder)
    try:
        assert trainer.restore() == 2
    finally:
        trainer.close()


def test_a_resumed_run_keeps_its_url_and_does_not_mix_with_another_run(url, tmp_path):
    with pytest.raises(ConfigurationError, match=f"contradicts resume={url}"):
        open_run([f"resume={url}", f"run_dir={tmp_path}/here", "checkpoint_url=memory://other"])
    folder = RunFolder(tmp_path / "here/x")
    folder.claim()
    folder.begin(to_yaml(compose_settings([*SMALL, "name=x"])), 0)
    folder.release()
    with pytest.raises(ConfigurationError, match="contains another run than"):
        open_run([f"resume={url}", f"run_dir={tmp_path}/here"])


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("resume=file:///nowhere/run", "file:///nowhere/run has no checkpoint to resume from"),
        ("resume=s3://key:very-secret@bucket/run", "contains a user name or a password"),
        ("checkpoint_url=s3://key:very-secret@bucket/run", "contains a user name or a password"),
        ("checkpoint_url=runs/x", "checkpoint_url is 'runs/x', expected a URL"),
    ],
)
def test_a_wrong_url_is_refused_and_nothing_is_written(override, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        open_run([override])
    assert "very-secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_of_another_program_are_refused_in_one_sentence(tmp_path):
    from slipstream import CheckpointManager

    url = f"file://{tmp_path}/store"
    with CheckpointManager(tmp_path / "run", checkpoint_url=url) as manager:
        manager.save(1, {"step": 1})
    with pytest.raises(ConfigurationError, match="were not saved by `slipstream train`"):
        open_run([f"resume={url}"])
    assert open_store(url).list("commits/")
