"""``slipstream data``: look into recorded datasets, and make them fast to read.

Each command is in the module of its name. Commands import what they need when they run; what is imported here imports
neither torch nor NumPy.
"""

from __future__ import annotations

from slipstream.cli.data.ingest import ingest
from slipstream.cli.data.inspect import inspect
from slipstream.cli.groups import command_group

app = command_group(
    "data",
    "Look into recorded datasets (HDF5), and make them fast to read.",
    {
        inspect: "inspect demos.hdf5",
        ingest: "ingest demos.hdf5 --image-size 224",
    },
)
