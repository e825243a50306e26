"""``slipstream ckpt inspect``: the tensors of a checkpoint, and what was saved along."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.ckpt.formats import find_format, is_native
from slipstream.cli.ckpt.options import JsonOption
from slipstream.cli.ckpt.reading import load, one_line
from slipstream.store.local import check_regular

if TYPE_CHECKING:
    from slipstream.cli.ckpt.listing import Listing


def inspect(
    file: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint.", show_default=False)],
    *,
    json: JsonOption = False,
) -> None:
    """Show the tensors of a checkpoint, and what was saved along; of a native one it reads the index only."""
    from slipstream.cli.output import print_json

    with one_line(file):
        check_regular(file)
        listing = _list(file)
        print_json(listing.document()) if json else listing.show()


def _list(file: Path) -> Listing:
    from slipstream.cli.ckpt.native import list_native

    return list_native(file) if is_native(file) else _list_loaded(file)


def _list_loaded(file: Path) -> Listing:
    """Load a checkpoint of another format: these have no index that says it all."""
    from slipstream.cli.ckpt.leaves import by_name, leaves, shown_dtype
    from slipstream.cli.ckpt.listing import Listing, Row

    kind = find_format(file)
    rows, seen = [], set()
    for name, leaf in leaves(by_name(load(file))).items():
        row = Row(name, shown_dtype(leaf), list(leaf.shape), math.prod(leaf.shape) * leaf.dtype.itemsize)
        memory = _memory_of(leaf)
        if memory is not None and memory in seen:
            row.codec = "tied"
        else:
            row.memory_bytes = row.nbytes
        seen.add(memory)
        rows.append(row)
    return Listing(file, kind.value, rows)


def _memory_of(leaf: Any) -> tuple[Any, ...] | None:
    """Return what tells the memory of a tensor from that of others, or None if there is no telling."""
    from slipstream.schema.flatten import is_tensor

    strided = is_tensor(leaf) and str(leaf.layout) == "torch.strided" and leaf.numel()
    return (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()) if strided else None
