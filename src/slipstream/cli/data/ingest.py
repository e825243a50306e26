"""``slipstream data ingest``: resize the frames of a file once, for every program that loads it."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.data.options import ActionOption, CameraOption, EpisodesOption, fields_of, progress_bar


def ingest(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Recorded HDF5 files, or folders.", show_default=False)
    ],
    *,
    image_size: Annotated[int, typer.Option(help="Height and width of the stored frames.")] = 224,
    folder: Annotated[
        Path | None, typer.Option(help="Where caches go; by default beside the files.", show_default=False)
    ] = None,
    compress: Annotated[bool, typer.Option("--compress", help="Pack frames with zstd, losslessly.")] = False,
    camera: CameraOption = None,
    action: ActionOption = None,
    episodes: EpisodesOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace caches that are still fresh.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare contents and checksums, whatever the times of files say.")
    ] = False,
) -> None:
    """Store the frames of files resized, once, so that training reads them at the speed of a copy.

    Run it again after an interruption, and it continues. A cache is used automatically until its file changes; it keeps
    the cameras that it has when others are added.
    """
    from slipstream.cli.output import print_lines
    from slipstream.datasets.ingest import ingest as store
    from slipstream.datasets.opening import find_files
    from slipstream.text import format_bytes

    fields = fields_of(camera, action=action, episodes=episodes)
    for file in find_files([str(path) for path in files]):
        with progress_bar(f"ingesting {file.name}") as progress:
            done = store(
                file,
                image_size,
                fields=fields,
                cameras=list(fields.cameras) if fields.cameras else None,
                folder=folder,
                compress=compress,
                overwrite=overwrite,
                verify=verify,
                progress=progress,
            )
        what = f"{done.new_frames} of {done.num_frames} frames are new" if done.new_frames else "was fresh already"
        print_lines(
            f"{done.path}: {what}; {format_bytes(done.stored_bytes)} for {format_bytes(done.raw_bytes)} of pixels"
        )
