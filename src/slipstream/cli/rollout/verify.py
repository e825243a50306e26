"""``slipstream rollout verify``: every byte of rollouts against its checksum, and their layout against their arrays."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.errors import one_line, reading
from slipstream.cli.options import JsonOption
from slipstream.cli.rollout.paths import PATTERN, find_rollouts, is_folder
from slipstream.errors import CorruptFileError, FormatVersionError, SlipstreamError
from slipstream.text import plural

if TYPE_CHECKING:
    from slipstream.rollout.layout import Layout
    from slipstream.store.container import Container


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help=f"Rollouts, folders of {PATTERN} or of runs, or URLs.", show_default=False
        ),
    ],
    *,
    json: JsonOption = False,
) -> None:
    """Compare every byte with its checksum, and the layout with the arrays; exits with 1 if anything is damaged."""
    from slipstream.cli.output import print_json, print_lines

    verdicts: list[_Verdict] = []
    for verdict in _verify_all(paths):
        verdicts.append(verdict)
        if not json:
            print_lines(*verdict.problems, verdict.sentence())
    damaged = sum(bool(verdict.problems) for verdict in verdicts)
    if json:
        print_json({"sound": not damaged, "files": [verdict.document() for verdict in verdicts]})
    elif len(verdicts) > 1:
        print_lines(f"{damaged} of {plural(len(verdicts), 'rollout')} damaged")
    if damaged:
        raise typer.Exit(1)


@dataclass
class _Verdict:
    """The result of checking one file."""

    file: Path
    chunks: int = 0
    keys: int = 0
    problems: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {"file": str(self.file), "keys": self.keys, "chunks": self.chunks, "problems": self.problems}

    def sentence(self) -> str:
        if self.problems:
            return f"{self.file}: damaged"
        return f"{self.file}: sound, all {self.chunks} chunks match, and the {self.keys} keys fit them"


def _verify_all(paths: list[Path]) -> Iterator[_Verdict]:
    """Check every rollout; what cannot be one is said before the work begins."""
    from slipstream.store.urls import as_path

    files: list[Path] = []
    for path in map(as_path, paths):
        found = find_rollouts(path)
        if not is_folder(path):
            _check_kind(path)
        files += [file for file in found if file not in files]
    for number, file in enumerate(files, 1):
        with one_line(file):
            yield _verify(file, f"checking {number} of {len(files)}")


def _check_kind(file: Path) -> None:
    """Raise if a file is something else that Slipstream wrote; a damaged one may be a rollout."""
    from slipstream.cli.rollout.reading import check_kind
    from slipstream.store.container import Container

    try:
        with Container(file) as container:
            check_kind(container)
    except (CorruptFileError, FormatVersionError):
        return


def _verify(file: Path, label: str) -> _Verdict:
    from slipstream.cli.rollout.reading import NotARolloutError, check_kind
    from slipstream.rollout.files import read_layout
    from slipstream.store.container import Container

    verdict = _Verdict(file)
    try:
        with reading(file), Container(file) as container:
            damaged = dict(_damage(container, label))
            verdict.chunks = sum(len(entry.chunks) for entry in container.entries.values())
            try:
                check_kind(container)
                layout = read_layout(container)
            except SlipstreamError:
                for problems in damaged.values():
                    verdict.problems += problems
                raise
            verdict.keys = len(layout.fields)
            verdict.problems += _named(layout, damaged)
            verdict.problems += _miscounts(container, layout, set(damaged))
    except (CorruptFileError, FormatVersionError, NotARolloutError) as error:
        verdict.problems.append(str(error))
    except FileNotFoundError:
        verdict.problems.append(f"{file}: was deleted meanwhile")
    return verdict


def _damage(container: Container, label: str) -> Iterator[tuple[str, list[str]]]:
    """Read every chunk; yield the arrays that are damaged, and how."""
    from rich.progress import track

    from slipstream.cli.output import console

    names = [entry.name for entry in container.entries.values() for _ in entry.chunks]
    found: dict[str, list[str]] = {}
    progress = console(stderr=True)
    outcomes = track(
        container.find_damage(),
        label,
        len(names),
        console=progress,
        transient=True,
        disable=not progress.is_terminal,
    )
    for name, error in zip(names, outcomes, strict=True):
        if error is not None:
            found.setdefault(name, []).append(str(error))
    yield from found.items()


def _named(layout: Layout, damaged: dict[str, list[str]]) -> Iterator[str]:
    """Yield each problem together with the keys that cannot be read because of it."""
    for name, problems in damaged.items():
        keys = [item.name for item in layout.fields if name in item.arrays]
        lost = ""
        if keys:
            lost = f"; lost with it: {', '.join(keys)}"
        for problem in problems:
            yield f"{problem}{lost}"


def _miscounts(container: Container, layout: Layout, damaged: set[str]) -> Iterator[str]:
    """Yield where a mask marks another number of exceptions than there are values for."""
    counts: dict[str, int] = {}
    for item in layout.fields:
        if item.mask is None or item.rows is None or item.mask in damaged:
            continue
        if item.mask not in counts:
            counts[item.mask] = int(container.read(item.mask).sum())
        num_values = container.entries[item.rows].shape[0]
        if counts[item.mask] != num_values:
            yield f"{container.path}: {item.name} has {counts[item.mask]} exceptions, and values for {num_values}"
