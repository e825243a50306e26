"""Every command explains itself, with an example that would run, and answers scripts."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from slipstream.cli import app

WITHOUT_JSON = {
    ("ckpt", "convert"): "writes the file that it is told to, and says so in a sentence",
    ("rollout", "export"): "writes the file that it is told to, and says so in a sentence",
    ("data", "repack"): "writes the file that it is told to, and says so in a sentence",
    ("data", "ingest"): "writes files whose names follow from those of the files it is given",
}

WRONG = [
    (["trian"], "No such command 'trian'"),
    (["ckpt", "melt"], "No such command 'melt' (see "),
    (["train", "--bogus"], "--bogus"),
    (["ckpt", "prune", "."], "'--keep-last'"),
    (["ckpt", "prune", ".", "--keep-last", "0"], "'--keep-last'"),
    (["data", "repack", "a", "b", "--compression", "best"], "'none', 'lz4', 'zstd', 'gzip'"),
    (["verify"], "Missing argument"),
]


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


COMMANDS = dict(walk(typer.main.get_command(app)))
LEAVES = {path: command for path, command in COMMANDS.items() if not hasattr(command, "commands")}


def words(path: tuple[str, ...]) -> str:
    return " ".join(("slipstream", *path))


@pytest.mark.parametrize("path", COMMANDS, ids=words)
def test_a_command_has_help_with_an_example_of_itself(path):
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0, result.output
    assert len((COMMANDS[path].help or "").split()) >= 4
    assert f"Example: {words(path)} " in result.output
    assert COMMANDS[path].epilog in " ".join(result.output.split())


@pytest.mark.parametrize("path", COMMANDS, ids=words)
def test_the_example_has_only_arguments_that_its_command_takes(path):
    example = COMMANDS[path].epilog.removeprefix("Example: ").partition(" && ")[0]
    arguments = shlex.split(example)[1:]
    leaf = max((other for other in LEAVES if tuple(arguments[: len(other)]) == other), key=len)
    LEAVES[leaf].make_context(words(leaf), arguments[len(leaf) :]).close()  # raises if it takes them not


@pytest.mark.parametrize("path", LEAVES, ids=words)
def test_every_option_of_a_command_is_explained(path):
    for parameter in LEAVES[path].params:
        assert getattr(parameter, "help", None), f"{words(path)}: {parameter.name}"


@pytest.mark.parametrize("path", LEAVES, ids=words)
def test_a_command_that_prints_data_prints_json(path):
    has_json = any("--json" in parameter.opts for parameter in LEAVES[path].params)
    assert has_json != (path in WITHOUT_JSON), WITHOUT_JSON.get(path, "it has no --json")


def test_the_commands_without_json_are_commands():
    assert WITHOUT_JSON.keys() <= LEAVES.keys()


def test_no_help_imports_torch_or_numpy():
    script = f"""
import contextlib, io, sys
from slipstream.cli import main
for path in {list(COMMANDS)!r}:
    sys.argv = ["slipstream", *path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    heavy = {{"torch", "numpy", "rich.table", "zstandard"}} & set(sys.modules)
    assert not heavy, (path, heavy)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(("arguments", "reason"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_a_wrong_command_line_is_one_line_that_says_where_to_look(slipstream, arguments, reason):
    result = slipstream(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("slipstream: ")
    assert result.err.count("\n") == 1, result.err
    assert reason in result.err
    assert result.err.endswith(" --help)\n")


@pytest.mark.parametrize("group", [path for path in COMMANDS if path not in LEAVES], ids=words)
def test_a_group_without_a_command_shows_its_help(slipstream, group):
    result = slipstream(*group)
    assert "Example: slipstream" in result.out + result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(("typed", "expected"), [("slipstream do", "doctor"), ("slipstream ckpt pr", "prune")])
def test_a_shell_completes_commands(typed, expected):
    script = "import sys; sys.argv = ['slipstream']; from slipstream.cli import main; main()"
    asked = {
        "_SLIPSTREAM_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **asked}
    )
    assert done.stdout.split() == [expected], done.stderr
