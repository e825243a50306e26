"""``slipstream ckpt verify``: every byte of a checkpoint, or of a folder of them, against its checksum."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.ckpt.formats import PATTERN, Format, find_format
from slipstream.cli.ckpt.options import JsonOption
from slipstream.cli.ckpt.reading import is_refusal, load, one_line, reading
from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.store.local import check_regular, open_regular
from slipstream.text import plural

if TYPE_CHECKING:
    from slipstream.checkpoint.chain import NativeReader


def verify(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help=f"A checkpoint, or a folder of {PATTERN}.", show_default=False)
    ],
    *,
    json: JsonOption = False,
) -> None:
    """Compare every byte with its checksum, in the parents of a delta too; exits with 1 if any is damaged."""
    from slipstream.cli.output import print_json, print_lines

    with one_line(path):
        verdicts = _verify_all(path)
        sound = not any(verdict.problems for verdict in verdicts)
        if json:
            print_json({"path": str(path), "sound": sound, "files": [verdict.document() for verdict in verdicts]})
        else:
            for verdict in verdicts:
                print_lines(*verdict.problems, verdict.sentence())
    if not sound:
        raise typer.Exit(1)


@dataclass
class _Verdict:
    """The result of checking one file."""

    file: Path
    format: str = "unknown"
    chunks: int = 0
    parents: int = 0
    checked: bool = True
    problems: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "format": self.format,
            "chunks": self.chunks,
            "parents": self.parents,
            "has_checksums": self.checked,
            "problems": self.problems,
        }

    def sentence(self) -> str:

        if self.problems:
            return f"{self.file}: damaged"
        if not self.checked:
            return f"{self.file}: can be read, but has no checksums to compare it with"
        parents = f", its {plural(self.parents, 'parent')} included," if self.parents else ""
        return f"{self.file}: sound" + (f", all {self.chunks} chunks{parents} match" if self.chunks else "")


def _verify_all(path: Path) -> list[_Verdict]:
    if not path.is_dir():
        return [_verify(path, "checking", {})]
    files = sorted(path.glob(PATTERN), key=lambda file: (len(file.name), file.name))
    if not files:
        raise FileNotFoundError(errno.ENOENT, f"holds no {PATTERN}", str(path))
    known: dict[tuple[int, int], list[str]] = {}
    return [_verify(file, f"checking {number} of {len(files)}", known) for number, file in enumerate(files, 1)]


def _verify(file: Path, label: str, known: dict[tuple[int, int], list[str]]) -> _Verdict:
    """Check one file; `known` holds the problems of the containers that were checked before, by inode."""
    verdict = _Verdict(file)
    check_regular(file)
    try:
        kind = find_format(file)
        verdict.format = kind.value
        verdict.checked = kind in (Format.NATIVE, Format.LZ4) or _is_zip(file)
        if kind is Format.NATIVE:
            with reading(file):
                _verify_native(verdict, label, known)
        else:
            with _busy(label):
                load(file)
    except (CorruptFileError, FormatVersionError) as error:
        if is_refusal(error):
            raise
        verdict.problems.append(str(error))
    return verdict


def _verify_native(verdict: _Verdict, label: str, known: dict[tuple[int, int], list[str]]) -> None:
    from slipstream.checkpoint.chain import NativeReader

    with NativeReader(verdict.file) as file:
        member = file
        while True:
            verdict.problems += _damage(member, label, known)
            verdict.chunks += sum(len(entry.chunks) for entry in member.container.entries.values())
            member.check()
            if not member.parent:
                break
            member = member.open_parent()
            verdict.parents += 1


def _damage(file: NativeReader, label: str, known: dict[tuple[int, int], list[str]]) -> list[str]:
    from rich.progress import track

    from slipstream.cli.output import console

    status = file.container.path.stat()
    key = (status.st_dev, status.st_ino)
    if key not in known:
        progress = console(stderr=True)
        outcomes = track(
            file.container.find_damage(),
            label,
            sum(len(entry.chunks) for entry in file.container.entries.values()),
            console=progress,
            transient=True,
            disable=not progress.is_terminal,
        )
        known[key] = [str(error) for error in outcomes if error is not None]
    return known[key]


def _is_zip(file: Path) -> bool:
    with open_regular(file) as opened:
        return opened.read(2) == b"PK"


@contextlib.contextmanager
def _busy(label: str) -> Iterator[None]:
    """Show on a terminal that something is going on."""
    from slipstream.cli.output import console

    progress = console(stderr=True)
    with progress.status(label) if progress.is_terminal else contextlib.nullcontext():
        yield
