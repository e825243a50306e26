"""``slipstream ckpt prune``: delete the checkpoints of a folder that no rule keeps."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from slipstream.cli.ckpt.formats import PATTERN
from slipstream.cli.ckpt.options import JsonOption
from slipstream.cli.ckpt.reading import one_line, reading
from slipstream.errors import CorruptFileError, SlipstreamError
from slipstream.text import plural


def prune(
    folder: Annotated[Path, typer.Argument(help=f"A folder of {PATTERN}.", show_default=False)],
    *,
    keep_last: Annotated[int, typer.Option(min=1, help="Keep the N newest.", show_default=False)],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep multiples of this step, too.")] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC:max|min", help="Keep the best by this metric, too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete the checkpoints that no rule keeps; damaged ones are neither counted nor deleted."""
    from slipstream.cli.output import print_json, print_lines

    with one_line(folder):
        best = None if keep_best is None else _parse_best(keep_best)
        before, deleted = _prune(folder, keep_last, keep_every, best, dry_run=dry_run)
    if json:
        print_json({"folder": str(folder), "checkpoints": before, "deleted": deleted, "dry_run": dry_run})
    else:
        print_lines(_in_words(folder, before, deleted, dry_run=dry_run))


def _parse_best(text: str) -> tuple[str, Literal["min", "max"]]:
    metric, _, mode = text.rpartition(":")
    if metric and mode == "max":
        return metric, "max"
    if metric and mode == "min":
        return metric, "min"
    raise SlipstreamError(f"--keep-best is {text!r}, expected a metric and max or min, such as reward:max")


def _prune(
    folder: Path,
    keep_last: int,
    keep_every: int | None,
    best: tuple[str, Literal["min", "max"]] | None,
    *,
    dry_run: bool,
) -> tuple[int, list[int]]:
    """Delete what the rules do not keep, or find out what that would be; returns how many there were, and which go."""
    from slipstream.checkpoint.manager import CheckpointManager

    if not folder.is_dir():
        folder.stat()  # raises if there is nothing
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    _check_prunable(folder)
    with (
        _mirror(folder) if dry_run else contextlib.nullcontext(folder) as place,
        CheckpointManager(place, keep_last, keep_every, best) as manager,
    ):
        before = len(manager.steps())
        if best and before and manager.best() is None:
            raise SlipstreamError(f"{folder}: no checkpoint has a metric {best[0]!r} to tell the best by")
        with reading(folder):
            return before, manager.prune()


def _in_words(folder: Path, before: int, deleted: list[int], *, dry_run: bool) -> str:

    if not deleted:
        return f"{folder}: nothing to delete, {plural(before, 'checkpoint')}"
    verb = "would delete" if dry_run else "deleted"
    return f"{folder}: {verb} {len(deleted)} of {plural(before, 'checkpoint')}: {', '.join(map(str, deleted))}"


def _check_prunable(folder: Path) -> None:
    """Raise unless every checkpoint is readable or damaged: pruning deletes what the ones it cannot read rest on."""
    from slipstream.checkpoint.native import NativeFile

    for path in folder.glob(PATTERN):
        with reading(path), contextlib.ExitStack() as stack:
            try:
                file = member = stack.enter_context(NativeFile(path))
                while member.parent:
                    member = member.open_parent()
            except CorruptFileError:
                continue
            try:
                _ = file.metadata
            except CorruptFileError as error:
                raise SlipstreamError(f"{error}; its tensors may be whole, so nothing was deleted") from error


@contextlib.contextmanager
def _mirror(folder: Path) -> Iterator[Path]:
    """Yield a folder of links to the checkpoints of another one: what is deleted there shows what would be here."""
    from slipstream.checkpoint.manager import BASES

    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        mirror = Path(name)
        (mirror / BASES).mkdir()
        for file in (*folder.glob(PATTERN), *(folder / BASES).glob("*.slip")):
            (mirror / file.relative_to(folder)).symlink_to(file.absolute())
        yield mirror
