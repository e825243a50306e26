"""The `slipstream` command, as a person or a script meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import slipstream
from slipstream import write_container


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "100"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state [1].slip"
    with write_container(path, kind="example") as writer:
        writer.add("policy/[bold]weight", np.ones((300, 500), np.float32))
        writer.add("noise", np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8))
        writer.set("step", 12)
    return path


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)


def test_help_lists_the_commands_with_an_example():
    result = run("--help")
    assert result.returncode == 0
    for word in ("inspect", "verify", "Example: slipstream"):
        assert word in result.stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_every_command_has_help_with_an_example(command):
    result = run(command, "--help")
    assert result.returncode == 0
    assert f"Example: slipstream {command}" in result.stdout


def test_version_is_the_package_version():
    assert run("--version").stdout == f"slipstream {slipstream.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["inspect", "--help"]])
def test_help_imports_neither_torch_nor_numpy(arguments):
    script = (
        "import sys, slipstream.cli\n"
        f"sys.argv = ['slipstream', *{arguments!r}]\n"
        "try: slipstream.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich.table', 'zstandard'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_inspect_shows_every_array_with_its_size_and_ratio(file):
    result = run("inspect", file)
    assert result.returncode == 0
    for word in ("policy/[bold]weight", "300x500", "float32", "600 kB", "noise", "uint8", "example"):
        assert word in result.stdout
    assert "2 arrays, 605 kB packed into" in result.stdout


def test_inspect_prints_json_that_a_script_can_read(file):
    document = json.loads(run("inspect", "--json", file).stdout)
    assert document["values"] == {"step": 12}
    assert [entry["name"] for entry in document["entries"]] == ["policy/[bold]weight", "noise"]
    assert document["entries"][1]["bytes"] == 5000
    assert document["file_bytes"] == file.stat().st_size


def test_verify_tells_a_sound_file_from_a_damaged_one(file):
    sound = run("verify", file)
    assert (sound.returncode, sound.stdout) == (0, f"{file}: all 2 chunks are sound\n")
    damage(file)
    damaged = run("verify", file)
    assert damaged.returncode == 1
    assert "entry 'noise' is damaged in chunk 1 of 1" in damaged.stdout
    assert f"{file}: 1 of 2 chunks are damaged" in damaged.stdout
    assert len(json.loads(run("verify", "--json", file).stdout)["damage"]) == 1


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_errors_are_one_line_without_a_traceback(command, tmp_path):
    (tmp_path / "text").write_text("hello")
    for path, reason in [
        (tmp_path / "absent", f"slipstream: {tmp_path / 'absent'}: No such file or directory\n"),
        (tmp_path, f"slipstream: {tmp_path}: is a folder, expected a file\n"),
        (tmp_path / "text", f"slipstream: {tmp_path / 'text'}: is not a Slipstream container\n"),
    ]:
        result = run(command, path)
        assert (result.returncode, result.stdout, result.stderr) == (2, "", reason)


def test_names_in_a_file_cannot_steer_the_terminal(tmp_path):
    path = tmp_path / "hostile.slip"
    with write_container(path, kind="\x1b[2Jkind") as writer:
        writer.add("\x1b]0;title\x07 :heart: [red]x\r\nfake line", np.zeros(3))
    for arguments in (["inspect", path], ["inspect", "--json", path], ["verify", path]):
        result = run(*arguments)
        assert result.returncode == 0
        assert "\x1b" not in result.stdout
        assert "\r" not in result.stdout
    shown = run("inspect", path).stdout
    assert "\\x1b]0;title\\x07 :heart: [red]x\\r\\nfake line" in shown


def test_a_narrow_terminal_or_a_poor_encoding_loses_nothing(tmp_path):
    path = tmp_path / "wide.slip"
    with write_container(path) as writer:
        writer.add("a_rather_long_name_of_an_entry_é✓", np.zeros((3, 4)))
    poor = {**os.environ, "COLUMNS": "20", "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        [sys.executable, "-m", "slipstream", "inspect", path], capture_output=True, text=True, check=False, env=poor
    )
    assert result.returncode == 0, result.stderr
    assert "a_rather_long_name_of_an_entry_\\xe9\\u2713" in result.stdout
    assert "3x4" in result.stdout


def test_a_pipe_that_closes_early_is_no_traceback(file):
    command = f"{sys.executable} -m slipstream inspect '{file}' | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "Traceback" not in result.stderr


def test_an_unknown_command_is_refused():
    result = run("fly")
    assert result.returncode == 2
    assert "No such command 'fly'" in result.stderr
