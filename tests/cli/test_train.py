"""``slipstream train``, ``eval`` and ``export``, from the first command to the last file."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from slipstream import NavRLPolicy
from slipstream.cli.training_output import describe_outcome, describe_start
from slipstream.train.settings import compose_settings
from tests.train.conftest import SMALL, small


@pytest.fixture(scope="module")
def run(slipstream, tmp_path_factory):
    """A finished run, which tests may read, and copy to change."""
    folder = tmp_path_factory.mktemp("trained")
    done = slipstream("train", *SMALL, "name=first", f"run_dir={folder}", "compress_lidar=true", "tensorboard=true")
    assert done.code == 0, done.err
    (folder / "out.txt").write_text(done.out)
    return folder / "first"


def test_a_training_ends_with_an_evaluation_a_report_and_what_came_of_it(run):
    out = (run.parent / "out.txt").read_text()
    assert f"starting {run}: 6 iterations of 128 frames, on cpu\n" in out
    # A newcomer does not know what these are.
    assert "denormal" not in out
    for words in (
        "success ",
        "success with shield ",
        "success of planner ",
        "static collision ",
        "dynamic collision ",
        "out of bounds ",
        "timeout ",
        "frames/s",
        "of stall each",
    ):
        assert words in out
    assert f"report                 {run / 'report.html'}" in out
    assert (run / "report.html").stat().st_size > 100_000
    assert {path.name for path in (run / "eval").glob("final*")} >= {
        "final.json",
        "final_through.slip",
        "final_through_planner.slip",
        "final_through_policy_shield.slip",
    }
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_run_that_is_complete_says_so_and_goes_on_if_asked_to(run, slipstream, tmp_path):
    copy = shutil.copytree(run, tmp_path / "first", symlinks=True)
    again = slipstream("train", f"resume={copy}", "--no-evaluate")
    assert again.code == 0
    assert f"{copy} was already finished after iteration 6; nothing was trained.\n" in again.out
    assert len((copy / "metrics.jsonl").read_text().splitlines()) == 6
    more = slipstream("train", f"resume={copy}", f"max_frame_num={16 * 8 * 7}", "--no-evaluate", "--json")
    assert json.loads(more.out) == {"run": str(copy), "stopped": None, "iterations": 7, "env_frames": 16 * 8 * 7}
    assert len((copy / "metrics.jsonl").read_text().splitlines()) == 7


def test_a_complete_run_is_not_flown_again_and_claims_no_savings(run, slipstream, tmp_path):
    copy = shutil.copytree(run, tmp_path / "first", symlinks=True)
    # The evaluation in the copy is of a checkpoint in another folder.
    first = slipstream("train", f"resume={copy}")
    assert "flying: " in first.out
    recorded = (copy / "eval/final.json").read_text()
    again = slipstream("train", f"resume={copy}")
    assert again.code == 0, again.err
    assert "nothing is trained" in " ".join(again.out.split())
    assert "was already finished after iteration 6" in again.out
    assert f"(slipstream eval {copy} evaluates again)" in again.out
    assert "flying: " not in again.out
    assert "success with shield" in again.out
    assert "times smaller" not in again.out
    assert "frames/s" not in again.out
    assert (copy / "eval/final.json").read_text() == recorded
    document = slipstream.json("train", f"resume={copy}", "--json")
    assert document["evaluation"] == json.loads(recorded)["results"]
    for name in ("frames_per_s", "checkpoint_stall_ms", "checkpoint_ratio", "rollout_ratio"):
        assert document[name] is None
    # Other conditions are another evaluation.
    fewer = slipstream.json("train", f"resume={copy}", "eval_episodes=4", "--json")
    assert fewer["evaluation"][0]["episodes"] == 4


def test_settings_are_printed_as_hydra_prints_them_without_training(run, slipstream, tmp_path):
    shown = slipstream("train", "--cfg", "job", "preset=quick", f"run_dir={tmp_path}", "env.num_envs=72")
    assert "num_envs: 72" in shown.out
    assert "dynamics: lag" in shown.out
    assert not list(tmp_path.iterdir())
    # A name that is taken is no obstacle: nothing is written.
    again = slipstream("train", "preset=quick", f"run_dir={run.parent}", "name=first", "-c", "job")
    assert OmegaConf.create(again.out)["name"] == "first"
    resumed = slipstream("train", f"resume={run}", "--cfg", "job")
    assert OmegaConf.create(resumed.out)["env"]["num_envs"] == 16


def test_the_outcomes_of_a_summary_sum_to_all_flights_and_are_rounded_as_in_the_report():
    rates = {"success": 0.8271, "static_collision": 0.1, "dynamic_collision": 0.05, "out_of_bounds": 0.0154}
    result: dict[str, Any] = {name: {"mean": mean, "low": mean / 2, "high": mean} for name, mean in rates.items()}
    result["timeout"] = {"mean": 0.0075, "low": 0.0, "high": 0.02}
    result |= {"candidate": "policy", "map_seeds": [1, 2], "episodes": 400}
    result |= {"num_static_obstacles": 350, "num_dynamic_obstacles": 80}
    outcome = {"stopped": None, "run": "runs/a", "iterations": 6, "env_frames": 1000, "evaluation": [result]}
    outcome |= {"frames_per_s": None, "checkpoints_saved": 0, "rollout_ratio": None, "report": "runs/a/report.html"}
    lines = describe_outcome(outcome, small(), was_complete=False)
    assert lines[0] == "400 flights on 2 maps that it has never seen, with 350 static and 80 moving obstacles:"
    assert lines[1] == "  success              82.7 % (95 % interval: 41.4 to 82.7 %)"
    shares = [float(line[23:].partition(" %")[0]) for line in lines[1:6]]
    assert sum(shares) == pytest.approx(100, abs=0.1)
    assert max(map(len, lines[1:])) <= 80


def test_a_training_of_days_is_announced_with_a_preset_that_takes_minutes():
    lines = describe_start(compose_settings(["device=cpu"]), Path("runs/a"), 0)
    assert lines[0] == "starting runs/a: 36,622 iterations of 32,768 frames, on cpu"
    assert re.search(r"takes about \d+ (hours|days?)\. preset=quick learns", lines[1])
    assert lines[2].strip() == "slipstream train preset=quick"
    # A run that is nearly finished takes no days, and one that is finished no time.
    assert len(describe_start(compose_settings(["device=cpu"]), Path("runs/a"), 36_620)) == 1
    assert not describe_start(compose_settings(["device=cpu"]), Path("runs/a"), 36_622)
    assert len(describe_start(compose_settings(["preset=quick"]), Path("runs/a"), 0)) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["env.num_env=4"], "there is no setting 'env.num_env'; did you mean env.num_envs"),
        (["resume=nowhere"], "resume=nowhere: there is no such run, expected a folder nowhere or "),
        (["seed=1,2"], "'seed=1,2' is a sweep, which is not supported"),
        (["--multirun", "seed=1,2"], "--multirun is not supported: start slipstream train once"),
        (["-m", "seed=1"], "--multirun is not supported"),
        (["--config-dir", "conf"], "another configuration (conf) is not supported"),
        (["-cd", "conf"], "another configuration (conf) is not supported"),
        (["--config-name=mine"], "another configuration (mine) is not supported"),
        (["--cfg", "all"], "--cfg is 'all', expected job"),
        (["env.num_envs=1000000000"], "GB of memory are free"),
        (["preset=quick", "env.num_obstacles=100000"], "expected at most 5000 boxes"),
        (["device=cuda:99"], "device 'cuda:99' is not available"),
        (["device=meta"], "device 'meta' is not available"),
        (["name=.."], "name is '..', expected the name of a folder"),
        ([f"seed={2**64}"], f"seed is {2**64}, expected a whole number"),
    ],
)
def test_bad_input_is_one_sentence_exit_code_2_and_nothing_written(arguments, sentence, slipstream, tmp_path):
    failed = slipstream("train", f"run_dir={tmp_path / 'runs'}", *arguments)
    assert failed.code == 2
    assert sentence in failed.err
    assert failed.err.count("\n") == 1
    assert "Traceback" not in failed.err
    assert not list(tmp_path.iterdir())


def test_a_run_of_the_same_name_is_not_overwritten(run, slipstream):
    before = (run / "config.yaml").read_text()
    failed = slipstream("train", *SMALL, "name=first", f"run_dir={run.parent}")
    assert failed.code == 2
    assert f"resume it with resume={run}" in failed.err
    assert (run / "config.yaml").read_text() == before


def test_weights_and_biases_without_a_key_is_one_sentence_and_leaves_nothing(tmp_path):
    pytest.importorskip("wandb")
    command = [sys.executable, "-m", "slipstream", "train", *SMALL, "name=x", "wandb.mode=online"]
    known = ("WANDB_API_KEY", "WANDB_MODE", "NETRC")
    environment = {name: value for name, value in os.environ.items() if name not in known}
    environment["HOME"] = str(tmp_path)
    failed = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert "wandb.mode=online failed: No API key configured" in failed.stderr
    assert "wandb.mode=offline needs no account" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "runs/x").exists()


def test_a_mode_that_weights_and_biases_does_not_know_is_one_sentence_and_leaves_nothing(tmp_path):
    pytest.importorskip("wandb")
    command = [sys.executable, "-m", "slipstream", "train", *SMALL, "name=x", "wandb.mode=offline"]
    environment = {**os.environ, "WANDB_MODE": "of", "HOME": str(tmp_path)}
    failed = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert "wandb.mode=offline failed: " in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "runs/x").exists()


def test_a_run_is_resumed_by_the_link_to_the_last_one(run, slipstream, tmp_path):
    copy = shutil.copytree(run, tmp_path / "first", symlinks=True)
    (tmp_path / "last").symlink_to("first")
    for _ in range(2):
        again = slipstream("train", f"resume={tmp_path / 'last'}", "--no-evaluate")
        assert again.code == 0, again.err
        assert f"{copy} was already finished" in again.out
        assert (tmp_path / "last").resolve() == copy


def test_a_refused_resume_is_one_sentence_and_keeps_the_settings(run, slipstream):
    before = (run / "config.yaml").read_text()
    for override in ("env.num_envs=32", "env.map_seed=3", "sim.dt=0.05", "seed=1", "name=other"):
        failed = slipstream("train", f"resume={run}", override)
        assert failed.code == 2
        assert override in failed.err
        assert failed.err.count("\n") == 1
        assert (run / "config.yaml").read_text() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_to_write_is_one_sentence(slipstream, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    failed = slipstream("train", *SMALL, f"run_dir={tmp_path / 'closed'}")
    assert failed.code == 2
    assert "Permission denied" in failed.err


def test_a_place_that_cannot_be_a_folder_is_one_sentence(slipstream, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    failed = slipstream("train", *SMALL, "name=x", f"run_dir={tmp_path / 'file'}")
    assert failed.code == 2
    assert "file" in failed.err
    assert failed.err.count("\n") == 1


def test_an_original_navrl_file_is_exported(slipstream, tmp_path):
    torch.save(NavRLPolicy().state_dict(), tmp_path / "navrl_checkpoint.pt")
    exported = slipstream.json("export", tmp_path / "navrl_checkpoint.pt", "--format", "torchscript")
    assert exported["files"][0]["path"] == str(tmp_path / "policy.ts")
    assert exported["files"][0]["max_error_m_s"] < 1e-4


@pytest.mark.parametrize("command", ["eval", "export"])
def test_a_checkpoint_that_is_none_is_one_sentence(command, slipstream, tmp_path):
    state = NavRLPolicy().state_dict()
    torch.save({name: tensor for name, tensor in state.items() if "critic" not in name}, tmp_path / "part.pt")
    torch.save({"weight": torch.ones(3)}, tmp_path / "other.pt")
    (tmp_path / "garbage.pt").write_bytes(b"garbage" * 100)
    (tmp_path / "empty.pt").touch()
    (tmp_path / "folder").mkdir()
    for name, sentence in {
        "part.pt": "not a checkpoint of NavRL's network: missing policy/critic.module.weight",
        "other.pt": "holds no policy",
        "garbage.pt": "garbage.pt",
        "empty.pt": "is empty",
        "folder": "holds no checkpoint",
        "missing": "missing",
    }.items():
        failed = slipstream(command, tmp_path / name)
        assert failed.code == 2, name
        assert sentence in failed.err
        assert failed.err.count("\n") == 1, failed.err
    assert not list(tmp_path.glob("policy*"))


@pytest.mark.parametrize("command", ["eval", "export"])
def test_a_policy_whose_weights_are_no_numbers_is_refused(command, slipstream, tmp_path):
    state = NavRLPolicy().state_dict()
    state["actor.module.0.module.alpha_layer.bias"][1] = float("nan")
    torch.save(state, tmp_path / "diverged.pt")
    failed = slipstream(command, tmp_path / "diverged.pt")
    assert failed.code == 2
    assert "diverged.pt contains NaN or infinity in actor.module.0.module.alpha_layer.bias" in failed.err
    assert failed.err.count("\n") == 1


def test_unknown_choices_are_one_sentence(run, slipstream):
    assert "--format is 'tflite', expected one of 'onnx" in slipstream("export", run, "--format", "tflite").err


def test_a_policy_that_was_exported_lies_in_its_run(run, slipstream, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run", symlinks=True)
    done = slipstream("export", copy)
    assert done.code == 0, done.err
    assert (copy / "policy.onnx").exists()
    assert (copy / "policy.ts").exists()
    assert "within" in done.out


def test_a_policy_is_exported_into_a_folder_or_under_a_name(run, slipstream, tmp_path):
    (tmp_path / "robot").mkdir()
    for output, path in {
        tmp_path / "robot": "robot/policy.ts",
        f"{tmp_path}/robot/.": "robot/policy.ts",
        f"{tmp_path}/another/robot/": "another/robot/policy.ts",
        tmp_path / "new/pilot": "new/pilot.ts",
        tmp_path / "pilot.ts": "pilot.ts",
        tmp_path / "pilot.onnx": "pilot.ts",
    }.items():
        exported = slipstream.json("export", run, "--format", "torchscript", "--output", output)
        assert exported["files"][0]["path"] == str(tmp_path / path)
        (tmp_path / path).unlink()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_policy_is_exported_into_the_current_folder(run, tmp_path):
    command = [sys.executable, "-m", "slipstream", "export", str(run), "--format", "torchscript", "--output", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["policy.ts"]
