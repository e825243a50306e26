"""``slipstream ckpt diff``: how two checkpoints differ."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.ckpt.options import JsonOption
from slipstream.cli.ckpt.reading import load, one_line


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any format.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    *,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints bit for bit, whatever their formats; exits with 1 if they differ."""
    from slipstream.cli.ckpt.compare import compare
    from slipstream.cli.ckpt.leaves import by_name
    from slipstream.cli.output import print_json, print_lines

    with one_line(a):
        changes = compare(by_name(load(a)), by_name(load(b)))
        if json:
            print_json({"a": str(a), "b": str(b), **changes.document()})
        else:
            print_lines(*changes.lines(), f"{a} and {b}: {changes.summary()}")
    if not changes.equal:
        raise typer.Exit(1)
