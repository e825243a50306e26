"""`slipstream advise`, as a person or a script meets it, and how it reads what people type."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

from slipstream import ConfigurationError, save_rollout_compressed
from slipstream.cli import main
from slipstream.cli.units import parse_bandwidth, parse_shape, parse_size


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", "advise", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "100"})


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    steps = torch.arange(64 * 16 * 30).reshape(64, 16, 30).float()
    batch = TensorDict({"[bold]observation": steps, "action": steps[..., :2].clone()}, batch_size=[64, 16])
    return save_rollout_compressed(batch, tmp_path_factory.mktemp("run") / "rollout.slip")


def test_help_has_an_example_and_imports_neither_torch_nor_numpy():
    script = (
        "import sys, slipstream.cli\n"
        "sys.argv = ['slipstream', 'advise', '--help']\n"
        "try: slipstream.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich.table', 'zstandard'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "Example: slipstream advise runs/a" in result.stdout
    assert "--memory-limit" in result.stdout


def test_it_prints_plans_keys_and_reasons_and_tells_on_stderr_what_it_measures(rollout):
    result = run(rollout, "--iteration-seconds", "1000", "--memory-limit", "80kB", "--bandwidth", "100Mbit/s")
    assert result.returncode == 0, result.stderr
    for words in (
        "no compression in the loop",
        "a rollout kept on disk every 100 iterations",
        "rollouts packed in memory while training",
        "[bold]observation",
        "1. Does a batch fit in memory? No: 131 kB against a limit of 80.0 kB.",
        "At 100 Mbit/s a batch takes",
        "Packed wins below",
        "Why not A:",
        "Advice: take plan C",
    ):
        assert words in result.stdout
    assert result.stderr.splitlines()[0] == "measuring: copying the batch, each observation once"
    assert "measuring" not in result.stdout


def test_json_is_one_object_that_a_script_can_read(rollout):
    result = run(rollout, "--json", "--keep", "--interval", "7", "--memory-limit", "512MiB", "--step-seconds", "0.5")
    document = json.loads(result.stdout)
    assert document["decision"]["plan"] == "B"
    assert document["settings"]["rollout_save_interval"] == 7
    assert document["settings"]["memory_limit_bytes"] == 512 * 2**20
    assert document["settings"]["bandwidth_bytes_s"] == 125e6
    assert [key["key"] for key in document["measured"]["keys"]] == ["[bold]observation", "action"]
    assert not document["made_up"]


def test_shapes_are_made_up_and_said_to_be_a_guess():
    shapes = ["--shape", "lidar=36x4:float32", "--shape", "state=8"]
    result = run(*shapes, "--num-envs", "16", "--num-steps", "8", "--minibatches", "4", "--epochs", "2")
    assert result.returncode == 0, result.stderr
    assert "made up of the shapes given: [16, 8], 77.8 kB" in result.stdout
    assert "ratios and times are a guess" in result.stdout
    assert "36x4" in result.stdout


def test_errors_are_one_line_and_exit_code_2(tmp_path, rollout, monkeypatch, capsys):
    (tmp_path / "text").write_text("hello")
    for arguments, reason in [
        ([tmp_path / "absent"], "absent: No such file or directory"),
        ([tmp_path / "text"], "expected a .slip or a .pt file"),
        ([tmp_path], "there is no rollout_*.slip in it"),
        ([rollout, "--shape", "a=3"], "and --shape were given, expected one of them"),
        ([rollout, "--memory-limit", "4X"], "--memory-limit is '4X', expected a size such as 4GB or 512MiB"),
        ([rollout, "--bandwidth", "fast"], "--bandwidth is 'fast', expected a bandwidth such as 1Gbit"),
        (["--shape", "lidar"], "--shape is 'lidar', expected a key and a shape such as lidar=36x4:float32"),
        (["--shape", "lidar=3:floaty"], "the dtype of lidar is 'floaty'"),
        ([rollout, "--iteration-seconds", "-1"], "iteration_s is -1.0, expected a number above 0"),
    ]:
        monkeypatch.setattr(sys, "argv", ["slipstream", "advise", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        shown = capsys.readouterr()
        assert (stopped.value.code, shown.out) == (2, "")
        assert reason in shown.err
        assert shown.err.startswith("slipstream: ")
        assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("4G", 4 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 kB", 1500),
        ("2tib", 2 * 2**40),
        ("1000", 1000),
        (".5MB", 500_000),
        ("7B", 7),
    ],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_size(text, "--memory-limit") == size


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-4GB", "0", "4 iB", "4GB/s", "1e9", "4Gbit", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigurationError, match="--memory-limit is .*, expected a size"):
        parse_size(text, "--memory-limit")


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [
        ("1Gbit", 125e6),
        ("100Mbit/s", 12.5e6),
        ("1gbit", 125e6),
        ("10Gbps", 1.25e9),
        ("8b/s", 1),
        ("125MB/s", 125e6),
        ("125MB", 125e6),
        ("1MiB/s", 2**20),
        ("2.5 Gbit/s", 312.5e6),
    ],
)
def test_bandwidths_are_read_in_bits_and_in_bytes(text, bytes_s):
    assert parse_bandwidth(text, "--bandwidth") == bytes_s


@pytest.mark.parametrize("text", ["", "1", "1G", "0Gbit", "-1Gbit", "1Gbit/h", "fast", "1Xbit"])
def test_what_is_no_bandwidth_is_refused(text):
    with pytest.raises(ConfigurationError, match="--bandwidth is .*, expected a bandwidth"):
        parse_bandwidth(text, "--bandwidth")


def test_shapes_are_read_with_their_dtype():
    assert parse_shape("lidar=36x4:uint8", "--shape") == ("lidar", ((36, 4), "uint8"))
    assert parse_shape("next/agents/state=8", "--shape") == ("next/agents/state", ((8,), "float32"))


@pytest.mark.parametrize("text", ["", "lidar", "=3", "lidar=", "lidar=3x", "lidar=0", "lidar=3,4", "lidar=3:", "a=-1"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ConfigurationError, match="--shape is .*, expected a key and a shape"):
        parse_shape(text, "--shape")
