"""Resuming: what is refused, what is recorded, and that a refusal changes nothing."""

import contextlib
from pathlib import Path

import pytest
import torch

from slipstream import ConfigurationError
from slipstream.run.folder import RunFolder
from slipstream.run.metrics import read_rows
from slipstream.train.settings import compose_settings, settings_of, to_yaml
from slipstream.train.startup import open_run
from slipstream.train.trainer import Trainer
from tests.train.conftest import SMALL, small


def resume(*overrides: str) -> Trainer:
    """Resume a run as the command line does, to its end."""
    settings, folder, is_resumed = open_run(overrides)
    trainer = Trainer(settings, folder)
    with contextlib.closing(trainer):
        if is_resumed:
            trainer.restore()
        trainer.run()
    return trainer


def iterations(run: Path) -> list[int]:
    return [row["iteration"] for row in read_rows(run / "metrics.jsonl")]


def test_a_run_is_resumed_through_the_link_to_the_last_one(tmp_path, train):
    train("x", "name=x", f"run_dir={tmp_path}", until=2)
    for _ in range(2):
        trainer = resume(f"resume={tmp_path / 'last'}")
        assert trainer.folder.path == tmp_path / "x"
        assert (tmp_path / "last").readlink() == Path("x")
    assert iterations(tmp_path / "x") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("override", ["env.num_envs=32", "env.map_seed=5", "sim.dt=0.05", "seed=9"])
def test_a_refused_resume_changes_no_file_and_the_run_still_resumes(override, tmp_path, train):
    train("x", "name=x", f"run_dir={tmp_path}", until=2)
    before = {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, match=f"cannot be resumed with {override}"):
        resume(f"resume={tmp_path / 'x'}", override)
    assert {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()} == before
    resume(f"resume={tmp_path / 'x'}")
    assert iterations(tmp_path / "x") == [1, 2, 3, 4, 5, 6]


def test_a_config_file_that_was_edited_into_another_experiment_is_refused(tmp_path, train):
    train("x", "name=x", f"run_dir={tmp_path}", until=2)
    config = tmp_path / "x/config.yaml"
    config.write_text(config.read_text().replace("map_seed: 0", "map_seed: 7"))
    with pytest.raises(ConfigurationError, match=r"cannot be resumed with env\.map_seed=7 \(the run has 0\)"):
        resume(f"resume={tmp_path / 'x'}")
    resume(f"resume={tmp_path / 'x'}", "env.map_seed=0")
    assert compose_settings(SMALL).env.map_seed == settings_of(RunFolder(tmp_path / "x")).env.map_seed


def test_a_change_of_the_discount_is_logged_and_recorded_with_its_iteration(tmp_path, train, caplog):
    train("x", "name=x", f"run_dir={tmp_path}", "algo.gamma=0.97", until=2)
    trainer = resume(f"resume={tmp_path / 'x'}", "algo.gamma=0.9", "save_interval=2")
    assert "changed since iteration 2: algo.gamma: 0.97 -> 0.9" in caplog.text
    assert "save_interval" not in caplog.text
    row = {"iteration": 2, "changes": {"algo.gamma": {"from": 0.97, "to": 0.9}}}
    assert read_rows(tmp_path / "x/changes.jsonl") == [row]
    assert settings_of(RunFolder(tmp_path / "x")) == trainer.settings
    assert trainer.settings.algo.gamma == 0.9
    caplog.clear()
    resume(f"resume={tmp_path / 'x'}")
    assert "changed since" not in caplog.text
    assert read_rows(tmp_path / "x/changes.jsonl") == [row]


def test_a_finished_run_that_is_extended_says_what_happens_to_its_learning_rate(tmp_path, train, caplog):
    train("x", "name=x", f"run_dir={tmp_path}", "env.collision_penalty_ramp=0")
    resume(f"resume={tmp_path / 'x'}", f"max_frame_num={16 * 8 * 8}")
    assert "the learning rate continues at 0.250 of its initial value instead of 0.000" in caplog.text
    rates = [row["schedule/learning_rate"] for row in read_rows(tmp_path / "x/metrics.jsonl")]
    assert rates[6:] == pytest.approx([0.25 * rates[0], 0.125 * rates[0]])
    assert read_rows(tmp_path / "x/changes.jsonl")[0]["changes"].keys() == {"max_frame_num"}


@pytest.mark.parametrize("how", ["resume=auto", "resume={folder}"])
def test_a_folder_that_was_moved_and_renamed_is_resumed_where_it_is(how, tmp_path, train):
    train("x", "name=x", f"run_dir={tmp_path}", until=2)
    moved = tmp_path / "elsewhere/y"
    moved.parent.mkdir()
    (tmp_path / "x").rename(moved)
    place = [f"run_dir={moved.parent}", "name=y"]
    trainer = resume(*SMALL, *place, how) if how == "resume=auto" else resume(how.format(folder=moved))
    assert trainer.settings.name == "y"
    assert trainer.settings.run_dir == str(moved.parent)
    assert iterations(moved) == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("override", ["name=other", "run_dir=/elsewhere"])
def test_a_run_is_not_renamed_or_moved_by_resuming_it(override, tmp_path, train):
    train("x", "name=x", f"run_dir={tmp_path}", until=1)
    with pytest.raises(ConfigurationError, match=f"{override} contradicts resume=.*x"):
        open_run([f"resume={tmp_path / 'x'}", override])
    settings, _, _ = open_run([f"resume={tmp_path / 'x'}", "name=x", f"run_dir={tmp_path}"])
    assert settings.name == "x"


def test_resuming_by_name_refuses_another_experiment_and_accepts_another_log(tmp_path, train):
    place = [f"run_dir={tmp_path}", "name=x", "resume=auto"]
    train("x", *place[:2], until=2)
    with pytest.raises(ConfigurationError, match=r"cannot be resumed with env\.num_obstacles=30 \(the run has 40\)"):
        resume(*SMALL, *place, "env.num_obstacles=30")
    resume(*SMALL, *place, "keep_checkpoints=3")
    assert iterations(tmp_path / "x") == [1, 2, 3, 4, 5, 6]


def test_the_number_by_which_weights_and_biases_knows_a_run_is_kept(tmp_path):
    place = [f"run_dir={tmp_path}", "name=x", "wandb=offline"]
    settings, folder, _ = open_run([*SMALL, *place])
    folder.claim()
    folder.begin(to_yaml(settings), 0)
    folder.release()
    again, _, _ = open_run([*SMALL, *place, "resume=auto"])
    assert again.wandb.run_id == settings.wandb.run_id is not None


def test_a_trainer_does_not_start_over_beside_the_checkpoints_of_another_run(tmp_path, train):
    train("x", until=2)
    trainer = Trainer(small(), RunFolder(tmp_path / "x"))
    with contextlib.closing(trainer), pytest.raises(ConfigurationError, match="contains the checkpoints of a run"):
        trainer.run()
    assert iterations(tmp_path / "x") == [1, 2]


def test_a_run_without_a_checkpoint_starts_over_with_any_settings(tmp_path, train):
    train("x", "name=x", f"run_dir={tmp_path}", until=2)
    for path in (tmp_path / "x/checkpoints").iterdir():
        path.unlink()
    trainer = resume(f"resume={tmp_path / 'x'}", "env.num_envs=8")
    assert iterations(tmp_path / "x") == list(range(1, 13))
    assert settings_of(RunFolder(tmp_path / "x")) == trainer.settings
    assert not (tmp_path / "x/changes.jsonl").exists()


def test_evaluations_of_iterations_after_the_checkpoint_are_deleted_and_repeated(tmp_path, train):
    train("x", "eval_interval=1", "eval_episodes=2", "env.num_maps=1", until=4)
    for iteration in (3, 4):
        (tmp_path / f"x/checkpoints/checkpoint_iter_{iteration}.slip").unlink()
    trainer = Trainer(small("eval_interval=0", "env.num_maps=1"), RunFolder(tmp_path / "x"))
    with contextlib.closing(trainer):
        assert trainer.restore() == 2
        trainer.run()
    names = [path.name for path in (tmp_path / "x/eval").glob("*.json")]
    assert sorted(names) == ["iter_000001.json", "iter_000002.json"]


def test_the_precision_that_auto_chose_is_in_the_settings_and_the_checkpoint(tmp_path, train):
    trainer = train("x", "algo.precision=auto", until=1)
    chosen = trainer.settings.algo.precision
    assert chosen == small("algo.precision=auto").precision()
    assert settings_of(RunFolder(tmp_path / "x")).algo.precision == chosen
    assert trainer.checkpoints.restore().metrics["config"]["algo"]["precision"] == chosen


def test_a_resume_with_other_arithmetic_is_logged_with_what_differs(tmp_path, train, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("slipstream.train.trainer.numerics", lambda: {"torch": "1.0", "cpu": "none"})
        train("x", until=1)
    train("x", resume=True, until=2)
    [line] = [record.message for record in caplog.records if "arithmetic" in record.message]
    assert line.startswith(
        f"resumed with other arithmetic (torch 1.0 -> {torch.__version__}, CPU instructions none -> "
    )
    caplog.clear()
    train("x", resume=True)
    assert "arithmetic" not in caplog.text
