"""The loop: what it writes, and that a run that was ended and resumed equals one that was not."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import ConfigurationError, DiskFullError, load_checkpoint, load_rollout
from slipstream.rollout.files import RolloutFile
from slipstream.run.folder import RunFolder
from slipstream.run.metrics import read_rows
from slipstream.train.settings import settings_of
from slipstream.train.trainer import Trainer
from tests.train.conftest import SMALL, small

EACH_TIME_ANEW = ("time", "rollout_fps", "perf/", "ckpt/", "rollouts/", "memory/")
PLANS = {
    "plain": (),
    "packed and pipelined": ("gpu_memory_limited=true", "use_pipelined_collector=true", "compress_lidar=true"),
    "two rollouts ahead": ("use_pipelined_collector=true", "prefetch_count=2"),
    "falling rates, unpacked": ("algo.learning_rate_schedule=linear", "compress_checkpoint=false"),
}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run that do not depend on the clock."""
    rows = read_rows(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(EACH_TIME_ANEW)} for row in rows]


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Compare two states bit for bit."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{path}/{number}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), path
    elif isinstance(one, np.ndarray):
        assert one.tobytes() == other.tobytes(), path
    else:
        assert one == other, path


def assert_same_runs(one: Path, other: Path, iterations: int = 6) -> None:
    """Compare the last checkpoints, the metrics and the rollouts of two runs."""
    assert metrics_of(one) == metrics_of(other)
    assert [row["iteration"] for row in metrics_of(one)] == list(range(1, iterations + 1))
    name = f"checkpoints/checkpoint_iter_{iterations}.slip"
    states = [load_checkpoint(run / name) for run in (one, other)]
    if "orders" in states[0]["collector"]:  # how far ahead rollouts had been collected by then is a matter of luck
        states = [{key: value for key, value in state.items() if key != "collector"} for state in states]
    assert_same(*states)
    files = sorted(path.relative_to(one) for path in one.glob("*/rollout_*.slip"))
    assert files == sorted(path.relative_to(other) for path in other.glob("*/rollout_*.slip"))
    assert len(files) >= iterations
    for file in files:
        assert_same(load_rollout(one / file).to_dict(), load_rollout(other / file).to_dict())


Process = subprocess.Popen[str]


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Process]]:
    """A function that starts ``slipstream train``; what still runs at the end of the test is killed."""
    with contextlib.ExitStack() as started:

        def call(*arguments: str) -> Process:
            command = [sys.executable, "-m", "slipstream", "train", *arguments]
            process = started.enter_context(
                subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
            started.callback(process.kill)
            return process

        yield call


def wait_for(path: Path, process: Process) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not(plan, tmp_path, train):
    train("straight", *PLANS[plan])
    train("stopped", *PLANS[plan], until=3)
    assert len(metrics_of(tmp_path / "stopped")) == 3
    train("stopped", *PLANS[plan], resume=True)
    assert_same_runs(tmp_path / "straight", tmp_path / "stopped")


def test_a_run_that_is_killed_in_its_fourth_iteration_and_resumed_equals_one_that_is_not(tmp_path, train):
    train("straight", "name=killed", f"run_dir={tmp_path}")
    overrides = [*SMALL, "name=killed", f"run_dir={tmp_path}"]
    settings = small("name=killed", f"run_dir={tmp_path}")
    script = f"""
import os, signal
from pathlib import Path
from slipstream.train.settings import compose_settings
from slipstream.run.folder import RunFolder
from slipstream.train.trainer import Trainer
trainer = Trainer(compose_settings({overrides!r}), RunFolder({str(tmp_path / "killed")!r}))
step = trainer.shards.env._step
steps = 0
def count(tensordict):
    global steps
    steps += 1
    if steps == 8 * 3 + 5:  # in the middle of the fourth rollout
        trainer.checkpoints.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(tensordict)
trainer.shards.env._step = count
trainer.run()
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    assert len(metrics_of(tmp_path / "killed")) == 3
    trainer = Trainer(settings, RunFolder(tmp_path / "killed"))
    assert trainer.restore() == 3
    trainer.run()
    trainer.close()
    assert_same_runs(tmp_path / "straight", tmp_path / "killed")


def test_a_complete_run_is_left_as_it_is(tmp_path, train, caplog):
    train("run")
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    trainer = train("run", "algo.teacher_coefficient=7", "max_frame_num=256", resume=True)
    assert trainer.iteration == 6
    assert "is already finished, after iteration 6: nothing is trained" in caplog.text
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize("overrides", [(), PLANS["packed and pipelined"], ("dist.shards=2",)])
def test_saved_rollouts_carry_the_obstacles_that_their_drones_observed(overrides, tmp_path, train):
    train("x", *overrides, "rollout_save_interval=2", "env.num_maps=2")
    paths = list((tmp_path / "x/rollouts").glob("rollout_*.slip"))
    assert len(paths) == 3
    for path in paths:
        rollout = load_rollout(path)
        with RolloutFile(path) as file:
            obstacles = torch.from_numpy(file.read_extra("obstacles"))
            assert file.metadata["map_seeds"] == [0, 1]
            assert file.read_extra("boxes").shape[::2] == (2, 5)
        num_envs, num_steps = rollout.batch_size
        assert obstacles.shape[:2] == (2, num_steps + 1)
        by_env = obstacles.repeat_interleave(num_envs // 2, 0)
        for seen, moments in ((rollout, by_env[:, :-1]), (rollout["next"], by_env[:, 1:])):
            offset = moments[..., :2] - seen["info", "position"][:, :, None, :2]
            nearest = offset.norm(dim=3).min(2).values
            observed = seen["agents", "observation", "dynamic_obstacle"][:, :, 0, 0, 3]
            assert (observed > 0).any()
            torch.testing.assert_close(observed[observed > 0], nearest[observed > 0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("plan", ["plain", "packed and pipelined"])
def test_saved_rollouts_are_as_they_were_collected(plan, tmp_path, train):
    train("run", *PLANS[plan])
    paths = list((tmp_path / "run").glob("*/rollout_*.slip"))
    assert paths
    collected = {"agents", "done", "info", "next", "sample_log_prob", "state_value", "stats", "terminated", "truncated"}
    for path in paths:
        # A pipelined collector adds the version of the policy.
        assert set(load_rollout(path).keys()) - {"collector"} == collected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_iteration_saves_and_says_how_to_resume(number, tmp_path, start):
    endless = [*SMALL, "name=x", "max_frame_num=1e9", "save_interval=1000", "rollout_save_interval=3"]
    process = start(*endless)
    wait_for(tmp_path / "runs/x/rollouts/rollout_000003.slip", process)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert "To resume: slipstream train resume=runs/x" in " ".join(out.split())
    done = read_rows(tmp_path / "runs/x/metrics.jsonl")[-1]["iteration"]
    assert (tmp_path / f"runs/x/checkpoints/checkpoint_iter_{done}.slip").exists()
    resumed = start("resume=runs/x", f"max_frame_num={16 * 8 * (done + 2)}", "--no-evaluate")
    out, err = resumed.communicate()
    assert resumed.returncode == 0, err
    assert f"resuming runs/x from iteration {done}" in " ".join(out.split())
    rows = read_rows(tmp_path / "runs/x/metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, done + 3))


def test_a_stopped_run_prints_json_and_an_exit_code_that_ends_a_chain_of_commands(tmp_path, start):
    process = start(*SMALL, "name=x", "max_frame_num=1e9", "--json")
    wait_for(tmp_path / "runs/x/checkpoints/checkpoint_iter_1.slip", process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 143, err
    document = json.loads(out)
    done = read_rows(tmp_path / "runs/x/metrics.jsonl")[-1]["iteration"]
    assert document == {"run": "runs/x", "stopped": "SIGTERM", "iterations": done, "env_frames": 16 * 8 * done}


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path, train):
    train("straight")
    run = tmp_path / "killed"
    train("killed", until=2)
    for path in (run / "checkpoints").glob("checkpoint_*"):
        path.unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "env_fra')
    train("killed")
    assert_same_runs(tmp_path / "straight", run)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, train, caplog):
    train("straight")
    train("damaged", until=4)
    path = tmp_path / "damaged/checkpoints/checkpoint_iter_4.slip"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    train("damaged", resume=True)
    assert "skipping a checkpoint" in caplog.text
    assert_same_runs(tmp_path / "straight", tmp_path / "damaged")


def test_the_run_folder_holds_what_it_should(tmp_path, train):
    trainer = train("x", "eval_interval=3", "tensorboard=true", "compress_lidar=true")
    assert {path.name for path in (tmp_path / "x").iterdir()} >= {
        "config.yaml", "metrics.jsonl", "checkpoints", "rollouts", "tb", "eval",
    }  # fmt: skip
    assert (tmp_path / "last").readlink() == Path("x")
    assert (tmp_path / "x/checkpoints/rollout_000006.slip").exists()
    assert list((tmp_path / "x/tb").iterdir())
    evaluation = json.loads((tmp_path / "x/eval/iter_000003.json").read_text())
    assert evaluation["iteration"] == 3
    assert settings_of(RunFolder(tmp_path / "x")) == trainer.settings
    row = read_rows(tmp_path / "x/metrics.jsonl")[-1]
    expected = {"env_frames", "rollout_fps", "actor_loss", "critic_loss", "entropy", "perf/update_mean"}
    assert row.keys() >= expected | {"ckpt/save_count", "rollouts/compression_ratio", "train/stats.reach_goal"}
    assert row["env_frames"] == 6 * 16 * 8


def test_evaluating_on_the_way_does_not_change_what_is_learned(tmp_path, train):
    train("without")
    train("with", "eval_interval=2")
    rows = metrics_of(tmp_path / "with")
    assert "eval/through/success" in rows[1]
    assert metrics_of(tmp_path / "without") == [
        {key: value for key, value in row.items() if not key.startswith("eval/")} for row in rows
    ]


def test_packed_rollouts_train_as_plain_ones_do_when_the_minibatches_are_the_same(tmp_path, train):
    one_minibatch = ("algo.num_minibatches=1", "save_interval=6")
    train("plain", *one_minibatch)
    train("packed", *one_minibatch, "gpu_memory_limited=true")
    keys = ("actor_loss", "critic_loss", "train/stats.return")
    plain, packed = (
        [[row.get(key) for key in keys] for row in metrics_of(tmp_path / name)] for name in ("plain", "packed")
    )
    assert plain == [pytest.approx(row, rel=1e-4) for row in packed]


def test_a_logger_of_ones_own_is_told_every_iteration_and_closed(tmp_path):
    class Mine:
        def __init__(self):
            self.told, self.is_closed = [], False

        def log(self, values, iteration):
            assert values["env_frames"] == 128 * iteration
            self.told.append(iteration)

        def close(self):
            self.is_closed = True

    mine = Mine()
    trainer = Trainer(small(), RunFolder(tmp_path / "x"), loggers=[mine])
    trainer.run()
    trainer.close()
    assert mine.told == [1, 2, 3, 4, 5, 6]
    assert mine.is_closed


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    first = Trainer(small(), RunFolder(tmp_path / "x"))
    with pytest.raises(ConfigurationError, match="another process trains there"):
        Trainer(small(), RunFolder(tmp_path / "x"))
    first.close()
    Trainer(small(), RunFolder(tmp_path / "x")).close()


def test_a_checkpoint_of_another_number_of_environments_is_refused_in_one_sentence(tmp_path, train):
    train("x", until=1)
    trainer = Trainer(small("env.num_envs=8"), RunFolder(tmp_path / "x"))
    with pytest.raises(
        ConfigurationError, match=r"x cannot be resumed with env\.num_envs=8 \(the run has 16\)"
    ) as caught:
        trainer.restore()
    assert "\n" not in str(caught.value)
    trainer.close()


def test_a_training_that_does_not_fit_into_memory_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigurationError, match="GB of memory are free"):
        Trainer(small("env.num_envs=100000000"), RunFolder(tmp_path / "x"))
    with pytest.raises(ConfigurationError, match="expected at most 5000 boxes"):
        Trainer(small("env.num_obstacles=100000"), RunFolder(tmp_path / "y"))
    assert not list(tmp_path.iterdir())


def test_learning_rates_fall_to_nothing_if_asked_to(tmp_path, train):
    train("x", "algo.learning_rate_schedule=linear", "algo.actor.learning_rate=6e-3")
    rates = [row["schedule/learning_rate"] for row in metrics_of(tmp_path / "x")]
    assert rates == pytest.approx([6e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3])


def test_a_folder_whose_settings_cannot_be_written_is_not_left_behind(tmp_path, monkeypatch):
    def fail(path):
        raise DiskFullError(28, f"cannot write {path}: No space left on device")

    monkeypatch.setattr("slipstream.run.folder.atomic_write", fail)
    trainer = Trainer(small(), RunFolder(tmp_path / "x"))
    with contextlib.closing(trainer), pytest.raises(DiskFullError, match="No space left"):
        trainer.run()
    assert not list(tmp_path.iterdir())
