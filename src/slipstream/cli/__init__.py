"""The ``slipstream`` command: thin, and quick to answer ``--help``.

Commands import what they need when they run; this module imports neither torch nor NumPy.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from slipstream import __version__
from slipstream.cli import advise, ckpt, data, doctor, evaluate, export, report, rollout, train

app = typer.Typer(
    help="The data plane of a robot-learning training loop.",
    epilog="Example: slipstream inspect run.slip",
    no_args_is_help=True,
    rich_markup_mode=None,  # importing rich would double the time that --help takes
    pretty_exceptions_enable=False,
)
app.add_typer(ckpt.app, name="checkpoint")
app.add_typer(ckpt.short_app, name="ckpt")
app.add_typer(rollout.app, name="rollout")
app.add_typer(data.app, name="data")
app.command(epilog=f"Example: {train.EXAMPLE}")(train.train)
app.command("eval", epilog=f"Example: {evaluate.EXAMPLE}")(evaluate.evaluate)
app.command(epilog=f"Example: {report.EXAMPLE}")(report.report)
app.command(epilog=f"Example: {export.EXAMPLE}")(export.export)
app.command(epilog=f"Example: {advise.EXAMPLE}")(advise.advise)
app.command(epilog=f"Example: {doctor.EXAMPLE}")(doctor.doctor)

FileArgument = Annotated[Path, typer.Argument(help="A file that Slipstream wrote.", show_default=False)]
_UsageError: Any = typer.BadParameter.__base__  # by a public name: the module it is in depends on typer's version
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@app.callback(invoke_without_command=True)
def slipstream(
    *, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False
) -> None:
    """Answer the options that come before a command."""
    if version:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.command(epilog="Example: slipstream inspect run.slip")
def inspect(file: FileArgument, *, json: JsonOption = False) -> None:
    """Show what a file holds, reading its index only."""
    from slipstream.cli import files  # noqa: PLC0415 - keeps --help quick

    files.inspect(file, as_json=json)


@app.command(epilog="Example: slipstream verify run.slip && echo sound")
def verify(file: FileArgument, *, json: JsonOption = False) -> None:
    """Read every byte of a file and compare it with its checksum; exits with 1 if any is damaged."""
    from slipstream.cli import files  # noqa: PLC0415 - keeps --help quick

    if not files.verify(file, as_json=json):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; an error that we foresee is one line on stderr and exit code 2."""
    from slipstream.cli.errors import sentence_of  # noqa: PLC0415 - only when there is something to run
    from slipstream.errors import SlipstreamError  # noqa: PLC0415

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to stop
    try:
        code = app(standalone_mode=False)  # or typer would print a wrong command line as four lines
    except _UsageError as error:
        _explain(error)
    except typer.Abort:
        _fail("stopped")
    except (SlipstreamError, ImportError, OSError) as error:  # an extra that is not installed is named, with a remedy
        _fail(sentence_of(error))
    sys.exit(code)


def _explain(error: Any) -> NoReturn:
    """Say in one line what is wrong with a command line; a group without a command is a question, and gets help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    sentence = " ".join(error.format_message().split()).rstrip(".")
    _fail(f"{sentence} (see {error.ctx.command_path} --help)" if error.ctx else sentence)


def _fail(sentence: str) -> NoReturn:
    from slipstream.cli.output import print_error  # noqa: PLC0415 - only when there is something to say

    print_error(sentence)
    sys.exit(2)
