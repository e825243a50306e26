"""``slipstream doctor``: what this machine gives to Slipstream, what is missing, and how to get it.

`software` looks at packages, `machine` at cores, memory and limits, `backend` at torch, `disk` at the folder that files
go to, `codecs` at their speeds. Each yields findings; this module prints them.
"""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

import errno
import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import JsonOption

if TYPE_CHECKING:
    from slipstream.cli.doctor.findings import Finding

EXAMPLE = "slipstream doctor --folder runs"

_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    *,
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Where files would go: its disk is measured, and nothing stays there.")
    ] = Path(),
    json: JsonOption = False,
) -> None:
    """Say what this machine gives to Slipstream, measured, what is missing, and how to get it; takes some seconds.

    Each line is ok, a note (something could be better) or a problem (Slipstream does not work). Exits with 1 if there
    is a problem.
    """
    from slipstream.cli.output import print_json

    if not folder.is_dir():
        folder.stat()  # raises if there is nothing
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    findings = []
    for finding in _examine(folder):
        findings.append(finding)
        if not json:
            _show(finding)
    counts: Counter[str] = Counter(finding.status for finding in findings)
    if json:
        print_json(_document(folder, findings, counts))
    else:
        _conclude(counts)
    if counts["problem"]:
        raise typer.Exit(1)


def _examine(folder: Path) -> Iterator[Finding]:
    """Yield all findings, as they are made; a check that fails is a finding, and does not keep others from running."""
    from slipstream.cli.doctor.findings import problem

    for name, arguments in {"software": (), "machine": (), "backend": (), "disk": (folder,), "codecs": ()}.items():
        try:
            yield from importlib.import_module(f"{__name__}.{name}").examine(*arguments)
        except Exception as error:  # noqa: BLE001 - what is broken may fail in any way, and that is to be told
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            yield problem(name, f"cannot be checked ({reason})", "mend that first, then run this again")


def _show(finding: Finding) -> None:
    from rich.text import Text

    from slipstream.cli.output import console, plain

    status = Text(f"{finding.status:<8} ", style=_COLOURS[finding.status])
    console().print(status + plain(f"{finding.name:<18} {finding.sentence}"))


def _conclude(counts: Counter[str]) -> None:
    from slipstream.cli.output import print_lines
    from slipstream.text import plural

    found = [plural(counts[status], status) for status in ("problem", "note") if counts[status]]
    if counts["problem"]:
        print_lines("", f"{' and '.join(found)}: Slipstream does not work here until the problems are solved")
    else:
        print_lines("", f"Slipstream works here{f'; {found[0]}' if found else ''}")


def _document(folder: Path, findings: list[Finding], counts: Counter[str]) -> dict[str, Any]:
    from slipstream import __version__

    return {
        "slipstream": __version__,
        "folder": str(folder.absolute()),
        "works": not counts["problem"],
        "problems": counts["problem"],
        "notes": counts["note"],
        "findings": [finding.to_json() for finding in findings],
    }
