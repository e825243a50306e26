"""``slipstream rollout inspect``: what a rollout holds, or which rollouts a folder holds."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.errors import one_line
from slipstream.cli.options import JsonOption
from slipstream.cli.rollout.paths import PATTERN, find_rollouts, is_folder
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.rollout.files import RolloutFile


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help=f"A rollout, a folder of {PATTERN}, the folder of a run with a folder rollouts, or a URL of these.",
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
    from slipstream.cli.rollout.listing import FileListing, FolderListing
    from slipstream.cli.rollout.reading import open_rollout
    from slipstream.store.urls import as_path

    path = as_path(path)
    with one_line(path):
        files = find_rollouts(path)
        if not is_folder(path):
            with open_rollout(path) as file:
                listing: FileListing | FolderListing = FileListing(file)
        else:
            listing = FolderListing(path, *_read_all(files))
        print_json(listing.document()) if json else listing.show()
    if listing.unreadable:
        raise typer.Exit(1)


def _read_all(files: list[Path]) -> tuple[list[RolloutFile], list[str]]:
    """Return the rollouts, closed again with their index read, and why others cannot be read."""
    from slipstream.cli.rollout.reading import open_rollout

    readable = []
    unreadable = []
    for file in files:
        try:
            with open_rollout(file) as rollout:
                readable.append(rollout)
        except FileNotFoundError:
            # A storage that limits its size has deleted it in the meantime.
            continue
        except (SlipstreamError, OSError) as error:
            unreadable.append(str(error))
    return readable, unreadable
