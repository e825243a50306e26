"""``slipstream data repack``: a copy of a recorded file whose images are read in parallel."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from slipstream.cli.data.options import CameraOption, EpisodesOption, fields_of, progress_bar


def repack(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A recorded HDF5 file.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The file to write.", show_default=False)],
    *,
    compression: Annotated[
        Literal["none", "lz4", "zstd", "gzip"], typer.Option(help="How pixels are packed, losslessly.")
    ] = "none",
    camera: CameraOption = None,
    action: Annotated[str | None, typer.Option("--action", help="Actions.", show_default=False)] = None,
    episodes: EpisodesOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it is there.")] = False,
) -> None:
    """Copy a file so that each image lies in one piece; everything else in it stays as it is.

    Files whose images HDF5 must read itself, or whose chunks hold parts of many, are read several times faster then.
    """
    from slipstream.cli.output import print_lines
    from slipstream.datasets.repack import repack as rewrite
    from slipstream.text import format_bytes

    fields = fields_of(camera, action=action, episodes=episodes)
    with progress_bar("repacking") as progress:
        done = rewrite(source, target, compression=compression, fields=fields, overwrite=overwrite, progress=progress)
    print_lines(
        f"{done.path}: {done.num_frames} frames, {format_bytes(done.stored_bytes)}; "
        f"{source} is {format_bytes(done.source_bytes)}"
    )
