"""``slipstream data``: look into recorded datasets, and make them fast to read.

Each command is in the module of its name. Commands import what they need when they run; what is imported here imports
neither torch nor NumPy.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from slipstream.cli.data.ingest import ingest
from slipstream.cli.data.inspect import inspect
from slipstream.cli.data.repack import repack

_EXAMPLES: dict[Callable[..., None], str] = {
    inspect: "inspect demos.hdf5",
    repack: "repack demos.hdf5 fast.hdf5 --compression lz4",
    ingest: "ingest demos.hdf5 --image-size 224",
}

app = typer.Typer(
    help="Look into recorded datasets (HDF5), and make them fast to read.",
    epilog="Example: slipstream data inspect demos.hdf5",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _command, _example in _EXAMPLES.items():
    app.command(epilog=f"Example: slipstream data {_example}")(_command)
