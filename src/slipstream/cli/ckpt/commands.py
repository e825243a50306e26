"""The commands of ``slipstream ckpt``: parse arguments, call one function of the library, print its result."""
# ruff: noqa: PLC0415 - importing inside the commands keeps --help fast

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from slipstream.cli.options import JsonOption
from slipstream.errors import ConfigurationError, FormatVersionError

if TYPE_CHECKING:
    from slipstream.checkpoint.verify import Verification


def inspect(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A checkpoint, a folder of *.slip, a run, or a URL.", show_default=False),
    ],
    *,
    json: JsonOption = False,
) -> None:
    """List the tensors of a checkpoint and what was saved along with them, or the checkpoints of a folder.

    Of native files only the index is read. Exits with 1 if a file of a folder cannot be read; the others are listed.
    """
    from slipstream.checkpoint.finding import is_run
    from slipstream.checkpoint.inspect import inspect_checkpoint, inspect_folder
    from slipstream.cli.ckpt.tables import show_checkpoint, show_folder
    from slipstream.cli.output import print_json
    from slipstream.store.urls import as_path

    path = _locate(as_path(path))
    if not path.is_dir() and not is_run(path):
        listing = inspect_checkpoint(path)
        if json:
            print_json(listing.to_json())
        else:
            show_checkpoint(listing)
        return
    folder = inspect_folder(path)
    if json:
        print_json(folder.to_json())
    else:
        show_folder(folder)
    # A script that looks at a run should notice, although the others were listed.
    if folder.unreadable:
        raise typer.Exit(1)


def verify(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A checkpoint, a folder of *.slip, a run, or a URL.", show_default=False),
    ],
    *,
    json: JsonOption = False,
) -> None:
    """Verify every byte and every decoded tensor, of parents too; exits with 1 if any is damaged."""
    from slipstream.checkpoint.finding import is_run
    from slipstream.checkpoint.verify import verify_checkpoint, verify_folder
    from slipstream.cli.ckpt.tables import describe_verification, showing_progress
    from slipstream.cli.output import print_json, print_lines
    from slipstream.store.urls import as_path

    path = _locate(as_path(path))
    # Print when the progress bar is gone: it redraws the line that it is on.
    with showing_progress() as progress:
        results: list[Verification] = []
        if path.is_dir() or is_run(path):
            results += verify_folder(path, progress)
        else:
            results.append(verify_checkpoint(path, progress))
    is_sound = all(result.is_sound for result in results)
    if json:
        print_json({"path": str(path), "sound": is_sound, "files": [result.to_json() for result in results]})
    else:
        for result in results:
            print_lines(*result.problems, describe_verification(result))
    if not is_sound:
        raise typer.Exit(1)


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint of any format.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    *,
    format: Annotated[  # noqa: A002 - the word users expect
        str | None,
        typer.Option(
            "--format",
            metavar="native|pt|lz4|safetensors",
            help="By default what TARGET's suffix says: .slip, .pt, .pt.lz4 or .safetensors.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace TARGET if it exists.")] = False,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out what safetensors cannot hold: all but tensors.")
    ] = False,
) -> None:
    """Write a checkpoint in another format, complete in itself; it is read back before it gets its name."""
    from slipstream.checkpoint.convert import convert_checkpoint
    from slipstream.cli.output import print_lines

    # The library checks the name, which is any text here.
    chosen: Any = format
    print_lines(convert_checkpoint(source, target, chosen, overwrite=force, tensors_only=tensors_only).describe())


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any format.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    *,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints bit for bit, whatever their formats; exits with 1 if they differ."""
    from slipstream.checkpoint.diff import compare_checkpoints
    from slipstream.cli.output import print_json, print_lines

    changes = compare_checkpoints(a, b)
    if json:
        print_json({"a": str(a), "b": str(b), **changes.to_json()})
    else:
        print_lines(*changes.describe(), f"{a} and {b}: {changes.summary()}")
    if not changes.are_equal:
        raise typer.Exit(1)


def prune(
    folder: Annotated[Path, typer.Argument(help="A folder of checkpoint_iter_*.slip.", show_default=False)],
    *,
    keep_last: Annotated[int, typer.Option(min=1, help="Keep the N newest.", show_default=False)],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep multiples of this step, too.")] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC:max|min", help="Keep the best by this metric, too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete the checkpoints that no rule keeps; damaged and renamed ones are neither counted nor deleted."""
    from slipstream.checkpoint.manager import CheckpointManager
    from slipstream.cli.output import print_json, print_lines
    from slipstream.text import plural

    best = None
    if keep_best is not None:
        best = _parse_best(keep_best)
    _require_prunable(folder)
    with CheckpointManager(folder, keep_last, keep_every, best) as manager:
        plan = manager.plan()
        # A misspelt metric would delete the best checkpoint.
        if best is not None and plan.keep and manager.best() is None:
            raise ConfigurationError(f"{folder}: no checkpoint has a metric {best[0]!r} to find the best by")
        deleted = [file.step for file in plan.delete]
        # What was really deleted: another process may have saved or pruned in the meantime.
        if not dry_run:
            deleted = manager.prune()
    # Files that a user renamed are kept, and do not count.
    num_checkpoints = sum(file.is_managed for file in (*plan.keep, *plan.delete))
    if json:
        print_json({"folder": str(folder), "checkpoints": num_checkpoints, "deleted": deleted, "dry_run": dry_run})
        return
    verb = "deleted"
    if dry_run:
        verb = "would delete"
        print_lines(*plan.describe())
    if not deleted:
        print_lines(f"{folder}: nothing to delete, {plural(num_checkpoints, 'checkpoint')}")
        return
    steps = ", ".join(map(str, deleted))
    print_lines(f"{folder}: {verb} {len(deleted)} of {plural(num_checkpoints, 'checkpoint')}: {steps}")


def _locate(path: Path) -> Path:
    """Return what is meant by a path: the checkpoints of a run, or the file that was saved under a name."""
    from slipstream.store.urls import ObjectPath

    if isinstance(path, ObjectPath):
        return path
    # A run of `slipstream train`.
    inside = path / "checkpoints"
    if inside.is_dir() and not any(path.glob("*.slip")):
        return inside
    # Compressed files have the name that they were saved under, and a suffix.
    packed = path.with_name(f"{path.name}.lz4")
    if not path.exists() and packed.is_file():
        return packed
    return path


def _parse_best(text: str) -> tuple[str, Literal["min", "max"]]:
    # The name of a metric may contain colons.
    metric, _, mode = text.rpartition(":")
    if metric and mode == "max":
        return metric, "max"
    if metric and mode == "min":
        return metric, "min"
    raise ConfigurationError(f"--keep-best is {text!r}, expected a metric and max or min, such as reward:max")


def _require_prunable(folder: Path) -> None:
    """Raise unless this is a folder, and every checkpoint in it can be judged or is damaged."""
    from slipstream.checkpoint.folder import CheckpointFolder

    if not folder.is_dir():
        # Raises if there is nothing.
        folder.stat()
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    for path, problem in CheckpointFolder(folder).unreadable().items():
        # These may be deltas, and pruning would delete the files that they need.
        if isinstance(problem, FormatVersionError):
            raise FormatVersionError(f"{problem}; nothing was deleted, because {path.name} may need other checkpoints")
        if isinstance(problem, PermissionError):
            raise problem
