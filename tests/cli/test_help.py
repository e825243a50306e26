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
    ("checkpoint", "convert"): "writes the file named on the command line and prints one sentence",
    ("ckpt", "convert"): "writes the file named on the command line and prints one sentence",
    ("rollout", "export"): "writes the file named on the command line and prints one sentence",
    ("data", "ingest"): "writes files named after the files it is given",
}

WRONG = [
    (["trian"], "No such command 'trian'"),
    (["ckpt", "melt"], "No such command 'melt' (see "),
    (["train", "--bogus"], "--bogus"),
    (["ckpt", "prune", "."], "'--keep-last'"),
    (["ckpt", "prune", ".", "--keep-last", "0"], "'--keep-last'"),
    (["verify"], "Missing argument"),
]


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


USAGE_ERROR: Any = typer.BadParameter.__base__
COMMANDS = dict(walk(typer.main.get_command(app)))
LEAVES = {path: command for path, command in COMMANDS.items() if not hasattr(command, "commands")}


def words(path: tuple[str, ...]) -> str:
    return " ".join(("slipstream", *path))


def test_every_command_has_help_with_an_example_of_itself():
    offenders = []
    for path, command in COMMANDS.items():
        result = CliRunner().invoke(app, [*path, "--help"])
        if result.exit_code != 0:
            offenders.append(f"{words(path)} --help: exit code {result.exit_code}, {result.output}")
        if len((command.help or "").split()) < 4:
            offenders.append(f"{words(path)}: says no more than {command.help!r}")
        shown = " ".join(result.output.split())
        if f"Example: {words(path)} " not in shown or command.epilog not in shown:
            offenders.append(f"{words(path)}: shows no example of itself")
    assert not offenders, "\n".join(offenders)


def test_examples_have_only_arguments_that_their_commands_take():
    offenders = []
    for path, command in COMMANDS.items():
        example = command.epilog.removeprefix("Example: ").partition(" && ")[0]
        arguments = shlex.split(example)[1:]
        leaf = max((other for other in LEAVES if tuple(arguments[: len(other)]) == other), key=len)
        try:
            LEAVES[leaf].make_context(words(leaf), arguments[len(leaf) :]).close()
        except USAGE_ERROR as error:
            offenders.append(f"{words(path)}: {example!r} fails with {error!r}")
    assert not offenders, "\n".join(offenders)


def test_every_option_of_every_command_is_explained():
    offenders = [
        f"{words(path)}: {parameter.name}"
        for path, command in LEAVES.items()
        for parameter in command.params
        if not getattr(parameter, "help", None)
    ]
    assert not offenders, "\n".join(offenders)


def test_commands_that_print_data_print_json():
    without = {
        path for path, command in LEAVES.items() if not any("--json" in option.opts for option in command.params)
    }
    assert without == WITHOUT_JSON.keys()


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


def test_a_group_without_a_command_shows_its_help(slipstream):
    for group in COMMANDS.keys() - LEAVES.keys():
        result = slipstream(*group)
        assert f"Example: {words(group)} " in result.out + result.err
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
