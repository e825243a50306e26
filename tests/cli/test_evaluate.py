"""``slipstream eval``: what flies, where, what is written, and what is refused."""

import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from slipstream import NavRLPolicy, load_checkpoint
from slipstream.cli.evaluation_output import comparison_table, results_table, robustness_table
from slipstream.run.evaluation import Interval
from slipstream.train.evaluation.pilots import Sensors
from tests.train.conftest import SMALL

FEW = ("--episodes", 8, "--maps", 4)
RATES = ("success", "static_collision", "dynamic_collision", "out_of_bounds", "timeout")


@pytest.fixture(scope="module")
def run(slipstream, tmp_path_factory):
    """A run of a few iterations, which tests may read, and copy to change."""
    folder = tmp_path_factory.mktemp("trained")
    done = slipstream("train", *SMALL, "name=first", f"run_dir={folder}", "--no-evaluate")
    assert done.code == 0, done.err
    return folder / "first"


@pytest.fixture
def navrl(tmp_path):
    """A policy file with the keys of the original NavRL."""
    torch.manual_seed(3)
    torch.save(NavRLPolicy().state_dict(), tmp_path / "navrl_checkpoint.pt")
    return tmp_path / "navrl_checkpoint.pt"


def test_all_scenarios_are_flown_in_their_order_and_recorded_completely(run, slipstream, tmp_path):
    document = slipstream.json("eval", run, *FEW, "--output", tmp_path)
    results = document["results"]
    assert [one["scenario"] for one in results] == ["through", "line", "training", "static", "empty", "border"]
    assert document["iteration"] == 6
    assert document["checkpoint"].endswith("checkpoint_iter_6.slip")
    assert document == json.loads((tmp_path / "evaluation.json").read_text())
    assert [path.name for path in tmp_path.glob("*.slip")] == ["evaluation_through.slip"]
    for one in results:
        assert math.fsum(one[name]["mean"] for name in RATES) == pytest.approx(1.0)
        assert one["candidate"] == "policy"
    through = results[0]
    assert through["map_seeds"] == [10000, 10001, 10002, 10003]
    assert through["clusters"] == 4
    assert through["simulation"]["obstacle_warmup_s"] > 0
    assert 0 <= through["inside_share"]["mean"] <= 1


def test_an_evaluation_says_what_defined_it(run, slipstream, tmp_path):
    options = ("--scenario", "through", "--output", tmp_path, "--seed", 7, "--sample")
    noise = ("--lidar-noise", 0.05, "--dropout", 0.1, "--latency", 0.2)
    document = slipstream.json("eval", run, "env.num_obstacles=12", "env.max_episode_length=5", *FEW, *options, *noise)
    conditions = document["conditions"]
    assert conditions["overrides"] == ["env.num_obstacles=12", "env.max_episode_length=5"]
    assert (conditions["seed"], conditions["action"], conditions["episodes"]) == (7, "sample", 8)
    assert (conditions["dynamics"], conditions["dt_s"], conditions["max_episode_length"]) == ("lag", 0.1, 5)
    faults = {"lidar_noise_m": 0.05, "dropout": 0.1, "latency_s": 0.2}
    assert conditions["flown"][0]["sensors"] == faults
    assert document["results"][0]["sensors"] == faults
    assert document["results"][0]["num_static_obstacles"] == 12
    assert (tmp_path / "evaluation_sample_noise_dropout_latency.json").exists()


def test_faithful_flights_have_navrls_dynamics_whatever_the_settings_say(run, slipstream, tmp_path):
    state = NavRLPolicy().state_dict()
    # It dives to the ground, so that no flight takes all of its 2,200 steps.
    state["actor.module.0.module.beta_layer.bias"][2] = 50.0
    torch.save(state, tmp_path / "diving.pt")
    options = ("--scenario", "empty", *FEW, "--output", tmp_path)
    document = slipstream.json("eval", tmp_path / "diving.pt", "preset=quick", "--faithful", *options)
    [result] = document["results"]
    assert result["out_of_bounds"]["mean"] == 1.0
    simulation = result["simulation"]
    assert (simulation["dynamics"], simulation["dt_s"]) == ("hummingbird", 0.016)
    assert simulation["max_episode_length"] == 2200
    assert document["conditions"]["faithful"]
    assert (tmp_path / "evaluation_faithful.json").exists()
    failed = slipstream("eval", run, "sim.dt=0.01", "--faithful", *options)
    assert "sim.dt cannot be overridden with --faithful" in failed.err


def test_another_evaluation_does_not_replace_the_first_and_the_same_one_does(run, slipstream, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run", symlinks=True)
    options = ("--scenario", "empty", *FEW)
    for _ in range(2):
        slipstream.json("eval", copy, *options)
    assert [path.name for path in (copy / "eval").glob("*.json")] == ["evaluation.json"]
    slipstream.json("eval", copy, *options, "--seed", 5)
    slipstream.json("eval", copy, "env.max_episode_length=6", *options)
    slipstream.json("eval", copy / "checkpoints/checkpoint_iter_3.slip", *options)
    assert len(list((copy / "eval").glob("evaluation*.json"))) == 4
    slipstream.json("eval", copy, *options, "--name", "mine")
    failed = slipstream("eval", copy, *options, "--name", "mine", "--seed", 5)
    assert failed.code == 2
    assert "mine.json exists and is another evaluation, expected another --name" in failed.err
    assert json.loads((copy / "eval/mine.json").read_text())["conditions"]["seed"] == 1


def test_a_changed_map_is_never_called_the_training_map(run, slipstream, tmp_path):
    document = slipstream.json("eval", run, "env.num_obstacles=12", *FEW, "--output", tmp_path)
    assert "training" not in [one["scenario"] for one in document["results"]]
    assert not any("training map" in one["title"] for one in document["results"])
    failed = slipstream("eval", run, "env.num_obstacles=12", "--scenario", "training", *FEW)
    assert "the training map is unknown, differs between policies, or is changed by env.num_obstacles" in failed.err
    failed = slipstream("eval", run, "env.map_seed=3", *FEW)
    assert "env.map_seed cannot be overridden in an evaluation" in failed.err
    failed = slipstream("eval", run, "env.start=line", *FEW)
    assert "env.start cannot be overridden in an evaluation: --scenario chooses the starts" in failed.err


def test_a_bad_output_is_refused_before_anything_flies(run, slipstream, tmp_path):
    (tmp_path / "file").write_text("x")
    failed = slipstream("eval", run, "--episodes", 100_000, "--output", tmp_path / "file" / "inside")
    assert failed.code == 2
    assert "cannot write evaluations there" in failed.err
    assert failed.err.count("\n") == 1
    assert "flying" not in failed.err


def test_an_original_navrl_file_flies_and_has_no_training_map(navrl, slipstream, tmp_path):
    options = (*FEW, "--output", tmp_path)
    document = slipstream.json("eval", navrl, "env.max_episode_length=5", "env.num_obstacles=20", *options)
    assert [one["scenario"] for one in document["results"]] == ["through", "line", "static", "empty", "border"]
    assert document["conditions"]["dt_s"] == 0.016
    assert document["results"][0]["timeout"]["mean"] == 1.0
    quick = slipstream.json("eval", navrl, "preset=quick", "--scenario", "empty", *options)
    assert quick["conditions"]["dt_s"] == 0.1


def test_two_policies_are_compared_on_the_same_flights(run, navrl, slipstream, tmp_path):
    options = ("--scenario", "through", "--scenario", "empty", *FEW)
    shown = slipstream("eval", "--compare", run, navrl, *options)
    assert shown.code == 0, shown.err
    assert "no significant difference" in shown.out
    assert f"Both fly with the settings of {run}." in shown.out
    document = slipstream.json("eval", "--compare", run, run, *options, "--output", tmp_path)
    assert document == json.loads((tmp_path / "comparison.json").read_text())
    assert [one["scenario"] for one in document["scenarios"]] == ["through", "empty"]
    for one in document["scenarios"]:
        assert one["success_difference"]["mean"] == 0
        assert one["first"]["simulation"] == one["second"]["simulation"]
    assert document["conditions"]["dt_s"] == 0.1


def test_a_policy_that_was_trained_with_another_sensor_is_pointed_out(run, slipstream, tmp_path):
    wide = slipstream("train", *SMALL, "name=wide", f"run_dir={tmp_path}", "sensor.lidar_range=8", "--no-evaluate")
    assert wide.code == 0, wide.err
    shown = slipstream("eval", "--compare", run, tmp_path / "wide", "--scenario", "empty", *FEW)
    assert f"{tmp_path / 'wide'} was trained with sensor.lidar_range=8.0, which counts against it." in shown.out
    alike = slipstream("eval", "--compare", run, run, "--faithful", "--scenario", "empty", "--episodes", 2)
    assert "counts against" not in alike.out


def test_a_comparison_needs_a_folder_to_have_a_name(run, slipstream):
    failed = slipstream("eval", "--compare", run, run, "--name", "mine", *FEW)
    assert failed.code == 2
    assert "--name needs --output here" in failed.err


def test_overrides_may_follow_a_comparison(run, slipstream):
    document = slipstream.json("eval", "--compare", run, run, "env.max_episode_length=3", "--scenario", "empty", *FEW)
    assert document["conditions"]["max_episode_length"] == 3


def test_the_table_has_a_row_for_each_scenario_and_says_what_intervals_mean(run, slipstream, tmp_path):
    options = ("--scenario", "static", "--scenario", "training", "--output", tmp_path)
    shown = slipstream("eval", run / "checkpoints/checkpoint_iter_3.slip", "--episodes", 4, "--maps", 1, *options)
    assert "Through, training map" in shown.out
    assert "Through, unseen maps, nothing moving" in shown.out
    rows = [line.split()[:2] for line in shown.out.splitlines()]
    assert ["static", "4"] in rows
    assert ["training", "4"] in rows
    assert "one map does not show how maps differ" in shown.out
    assert f"written to {tmp_path / 'evaluation.json'}" in shown.out


@pytest.mark.parametrize("share", [0.0, 0.8271, 0.998, 1.0])
def test_the_tables_fit_into_80_columns(share):
    rate = Interval(share, max(share - 0.0391, 0.0), min(share + 0.0391, 1.0))
    rates = dict.fromkeys(RATES, rate)
    means = {"inside_share": rate, "time_to_goal_s": Interval(123.4, 100.0, 200.0), "path_length_m": None}
    scenario = SimpleNamespace(name="training", map_seeds=(1, 2))
    faults = Sensors(lidar_noise_m=0.05, dropout=0.3, latency_s=0.2)
    results: list[Any] = []
    for candidate in ("policy", "policy_shield"):
        flown = SimpleNamespace(candidate=candidate, sensors=faults, title="Through")
        results.append(SimpleNamespace(scenario=scenario, flown=flown, episodes=65_536, rates=rates, means=means))
    pair: Any = SimpleNamespace(first=results[0], second=results[1])
    for table in (results_table(results), robustness_table(results), comparison_table([pair])):
        written = io.StringIO()
        Console(width=80, file=written).print(table)
        printed = written.getvalue()
        assert max(map(len, printed.splitlines())) <= 80
        assert "\N{HORIZONTAL ELLIPSIS}" not in printed
        assert f"{100 * share:.1f}".removesuffix(".0") in printed


def test_the_planner_flies_without_a_checkpoint_or_in_the_world_of_a_run(run, slipstream, tmp_path):
    options = ("--scenario", "empty", *FEW, "--output", tmp_path)
    document = slipstream.json("eval", "--policy", "planner", "preset=quick", "env.max_episode_length=400", *options)
    assert document["checkpoint"] is None
    [result] = document["results"]
    assert (result["candidate"], result["success"]["mean"]) == ("planner", 1.0)
    assert (tmp_path / "evaluation_planner.json").exists()
    in_run = slipstream.json("eval", run, "--policy", "planner", *options)
    assert in_run["conditions"]["max_episode_length"] == 20
    assert in_run["results"][0]["timeout"]["mean"] == 1.0


def test_a_shielded_policy_is_named_as_one(run, slipstream, tmp_path):
    document = slipstream.json("eval", run, "--shield", "--scenario", "through", *FEW, "--output", tmp_path)
    [result] = document["results"]
    assert result["candidate"] == "policy_shield"
    assert result["title"] == "Through the field, unseen maps: policy with shield"
    assert result["flights"] == "evaluation_shield_through_policy_shield.slip"


def test_a_policy_can_be_compared_with_the_planner(run, slipstream):
    options = ("env.max_episode_length=400", "--scenario", "empty", "--episodes", 12)
    shown = slipstream("eval", "--compare", run, "planner", *options)
    assert "planner is better by" in shown.out
    assert "which is significant" in shown.out


def test_the_robustness_table_has_a_row_for_each_fault_with_and_without_shield(run, slipstream, tmp_path):
    shown = slipstream("eval", run, "--robustness", "--episodes", 2, "--maps", 2, "--output", tmp_path)
    assert shown.code == 0, shown.err
    for words in ("policy with shield", "perfect", "30 % of returns missing"):
        assert words in shown.out
    assert max(map(len, shown.out.split("\nthrough: ")[0].splitlines())) <= 80
    document = json.loads((tmp_path / "evaluation_robustness.json").read_text())
    assert len(document["results"]) == 16
    assert {one["candidate"] for one in document["results"]} == {"policy", "policy_shield"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scenario", "moon"], "--scenario is 'moon', expected one of 'through', 'line'"),
        (["--name", "../x"], "--name is '../x'"),
        (["--name", "x" * 201], "--name has 201 bytes, expected at most 200"),
        (["--seed", str(2**64)], "Invalid value for '--seed'"),
        (["--policy", "magic"], "--policy is 'magic', expected one of 'learned', 'planner'"),
        (["--dropout", "2"], "--dropout is 2.0, expected a number from 0 to 1"),
        (["--lidar-noise", "-1"], "--lidar-noise is -1.0, expected a number of at least 0"),
        (["--latency", "0.01", "--scenario", "empty"], "latency_s is 0.01, expected 0 or at least a step of 0.1 s"),
        (["--robustness", "sim.dt=0.25"], "latency_s is 0.1, expected 0 or at least a step of 0.25 s"),
        (["--robustness", "--shield"], "--robustness cannot be combined with --shield"),
        (["--compare", "a", "b"], "--compare takes two policies, expected no other policy"),
        (["env.num_env=4"], "there is no setting 'env.num_env'"),
    ],
)
def test_bad_options_are_one_sentence(arguments, sentence, run, slipstream, tmp_path):
    failed = slipstream("eval", run, *arguments, *FEW, "--output", tmp_path)
    assert failed.code == 2
    assert sentence in failed.err
    assert not list(tmp_path.iterdir())


def test_no_policy_is_one_sentence(slipstream):
    failed = slipstream("eval")
    assert failed.code == 2
    assert "no policy is given, expected a run, a checkpoint, or --policy planner" in failed.err


def test_a_checkpoint_of_a_run_holds_its_settings_so_it_can_be_evaluated_anywhere(run, slipstream, tmp_path):
    steps = load_checkpoint(run / "checkpoints/checkpoint_iter_1.slip", keys=["counters"])
    assert steps["counters"]["iteration"] == 1
    alone = Path(shutil.copy(run / "checkpoints/checkpoint_iter_1.slip", tmp_path))
    document = slipstream.json("eval", alone, *FEW, "--scenario", "empty", "--output", tmp_path)
    assert document["conditions"]["dt_s"] == 0.1
    assert document["iteration"] == 1


def test_help_has_examples(slipstream):
    shown = slipstream("eval", "--help")
    for example in ("--faithful --shield", "--policy planner", "--compare runs/a runs/b", "--robustness"):
        assert example in shown.out


def test_the_planner_flies_in_the_world_of_the_policy_whichever_comes_first(run, slipstream):
    for policies in ((run, "planner"), ("planner", run)):
        document = slipstream.json("eval", "--compare", *policies, "--scenario", "empty", *FEW)
        assert document["conditions"]["dt_s"] == 0.1


def test_a_comparison_replaces_only_the_same_comparison(run, slipstream, tmp_path):
    options = ("--compare", run, "planner", "--scenario", "empty", "--episodes", 2, "--output", tmp_path)
    for seed in (1, 1, 2):
        slipstream.json("eval", *options, "--seed", seed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comparison.json", "comparison_2.json"]
    (tmp_path / "mine.json").write_text("{}")
    failed = slipstream("eval", *options, "--name", "mine")
    assert failed.code != 0
    assert "mine.json exists and is another evaluation, expected another --name" in failed.err
    assert (tmp_path / "mine.json").read_text() == "{}"


def test_several_processes_give_the_same_result_as_one(run, slipstream, tmp_path):
    arguments = ("eval", run, "--episodes", 520, "--maps", 40, "--scenario", "through", "--scenario", "line")
    alone = slipstream.json(*arguments, "--output", tmp_path / "alone")
    command = [sys.executable, "-m", "slipstream", *map(str, arguments), "devices=2", "--json"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "shared")], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "flying: Through the field, unseen maps, NavRL's line, unseen maps, in 2 processes"
    ]
    shared = json.loads(done.stdout)
    for document in (alone, shared):
        document.pop("time")
        for result in document["results"]:
            result.pop("steps_per_s")
    assert shared == alone
    recorded = [tmp_path / folder / "evaluation_through.slip" for folder in ("alone", "shared")]
    assert recorded[0].read_bytes() == recorded[1].read_bytes()


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--latency=0.001", "latency_s is 0.001, expected 0 or at least a step of 0.1 s"),
        ("--dropout=2", "--dropout is 2.0, expected a number from 0 to 1"),
    ],
)
def test_what_is_wrong_is_said_once_and_is_the_last_line(run, tmp_path, option, sentence):
    # The processes are those of this package, as the command is, and not of a script that happens to be here.
    (tmp_path / "slipstream.py").write_text("raise SystemExit('another program')")
    command = [sys.executable, "-P", "-m", "slipstream", "eval", str(run), "devices=2", option]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"slipstream: {sentence}\n"


@pytest.mark.parametrize("devices", ["0", "-1", "two", "1.5"])
def test_the_number_of_processes_is_a_whole_number(run, slipstream, devices):
    failed = slipstream("eval", run, f"devices={devices}")
    assert failed.code == 2
    assert f"devices is {devices}, expected a whole number of at least 1" in failed.err
