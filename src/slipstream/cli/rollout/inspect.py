"""``slipstream rollout inspect``: what a rollout holds, or which rollouts a folder holds."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.ckpt.options import JsonOption
from slipstream.cli.ckpt.reading import one_line
from slipstream.cli.rollout.paths import PATTERN, find_rollouts
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.cli.rollout.index import RolloutIndex


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help=f"A rollout, a folder of {PATTERN}, or the folder of a run with a folder rollouts.",
            show_default=False,
        ),
    ],
    *,
    json: JsonOption = False,
) -> None:
    """Show the keys of a rollout, or the rollouts of a folder, and how small they got; reads indexes only.

    Exits with 1 if a rollout of a folder cannot be read; the others are shown.
    """
    from slipstream.cli.output import print_json
    from slipstream.cli.rollout.index import read_index
    from slipstream.cli.rollout.listing import FileListing, FolderListing

    with one_line(path):
        files = find_rollouts(path)
        if not path.is_dir():
            listing: FileListing | FolderListing = FileListing(read_index(path))
        else:
            listing = FolderListing(path, *_read_all(files))
        print_json(listing.document()) if json else listing.show()
    if listing.unreadable:
        raise typer.Exit(1)


def _read_all(files: list[Path]) -> tuple[list[RolloutIndex], list[str]]:
    """Return the indexes of files, and why others cannot be read."""
    from slipstream.cli.rollout.index import read_index

    readable, unreadable = [], []
    for file in files:
        try:
            readable.append(read_index(file))
        except FileNotFoundError:  # deleted meanwhile, as a storage with limits does
            continue
        except (SlipstreamError, OSError) as error:
            unreadable.append(str(error))
    return readable, unreadable
