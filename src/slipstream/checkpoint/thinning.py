"""`Thin`: what older checkpoints lose to take less space."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.checkpoint.entries import Flat
from slipstream.checkpoint.native import NativeFile, StoredState, write_native
from slipstream.checks import require_count
from slipstream.errors import ConfigurationError
from slipstream.schema.dtypes import dtype_name
from slipstream.schema.nodes import TAG, Key, name_of
from slipstream.schema.structure import drop_keys, leaves_of
from slipstream.schema.unflatten import unflatten
from slipstream.schema.values import Json
from slipstream.tensors import Region, Regions, View, array_of, region_of
from slipstream.text import plural

# Smaller tensors are counters and statistics: rounding them saves nothing and may matter.
_MIN_ELEMENTS = 1024
_OPTIMIZER_KEYS = {"state", "param_groups"}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Thin:
    """What older checkpoints lose.

    Everything else stays as it was: types, ties between tensors, the order of keys, small tensors. `Restored.thinned`
    says what was removed.

    Args:
        keep_full: How many of the newest stay complete, at least 1. With 2 or more, a run can resume exactly even if
            the newest checkpoint is damaged.
        drop: Names of branches to leave out, such as ``"optimizer"`` or ``"*/replay"``. By default the state of every
            optimizer, wherever it is: a dict with the keys ``state`` and ``param_groups``.
        dtype: What larger floating-point tensors are converted to, such as ``torch.bfloat16``; None leaves them.
            Tensors that would overflow stay as they are, and so do those of fewer than 1,024 elements.

    Raises:
        ConfigurationError: If a setting is invalid.
    """

    keep_full: int = 1
    drop: tuple[str, ...] | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        require_count("keep_full", self.keep_full)
        if self.drop is not None and not _are_names(self.drop):
            raise ConfigurationError(f"drop is {self.drop!r}, expected a tuple of names such as ('optimizer',)")
        # Others have too small a range, or no sign.
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ConfigurationError(f"dtype is {self.dtype!r}, expected one of {', '.join(map(str, _DTYPES))}")


def thin_file(
    path: str | os.PathLike[str], thin: Thin, threads: int | None = None, *, compress: bool = True
) -> StoredState:
    """Replace a checkpoint by a thinned one, which is whole. Atomic: the file is either as before or thinned.

    Raises:
        CorruptFileError: If the file or a parent of it is damaged.
        WriteError: If the file cannot be written.
    """
    thinned: list[str] = []
    with NativeFile(path) as file:
        metadata = file.container.values.get("metadata")
        sequence = file.header.sequence
        keys = _branches_to_drop(file.structure, thin)
        matching = [key for key in keys if drop_keys(file.structure, [key]) != file.structure]
        thinned += [f"without {_describe(key)}" for key in matching]
        # All at once: one by one, the positions of the others in a list would change.
        flat = file.flat(drop_keys(file.structure, keys))
    if thin.dtype is not None:
        flat, num_converted = _convert(flat, thin.dtype)
        if num_converted:
            thinned.append(f"{plural(num_converted, 'tensor')} as {dtype_name(thin.dtype)}")
    # Even if there was nothing to remove: otherwise every save would try again.
    if not thinned:
        thinned.append("nothing to remove")
    return write_native(path, flat, metadata, sequence=sequence, thinned=thinned, threads=threads, compress=compress)


def _branches_to_drop(structure: Json, thin: Thin) -> list[str | Key]:
    if thin.drop is not None:
        return list(thin.drop)
    num_leaves = sum(1 for _ in leaves_of(structure))
    # The state without its tensors is enough to recognize optimizers.
    return list(_find_optimizers(unflatten(structure, [None] * num_leaves), ()))


def _find_optimizers(value: Any, key: Key) -> Iterator[Key]:
    """Yield the keys of all optimizer states in nested data, found by their shape and not by their names."""
    if isinstance(value, Mapping):
        if value.keys() >= _OPTIMIZER_KEYS and key:
            yield key
            return
        for name, member in value.items():
            yield from _find_optimizers(member, (*key, name))
    elif isinstance(value, (list, tuple)):
        for position, member in enumerate(value):
            yield from _find_optimizers(member, (*key, position))


def _are_names(drop: Any) -> bool:
    """Return whether `drop` is a tuple or list of strings. A string itself would be read letter by letter."""
    return isinstance(drop, (tuple, list)) and all(isinstance(name, str) for name in drop)


def _describe(key: str | Key) -> str:
    if isinstance(key, str):
        return key
    return name_of(key)


def _convert(flat: Flat, dtype: torch.dtype) -> tuple[Flat, int]:
    """Convert the larger floating-point tensors of a state; returns it, and the number of tensors converted.

    Works on the memory and not on the tensors, so that tied and strided tensors stay tied and strided.
    """
    pieces = list(flat.regions.pieces)
    converted: dict[int, int] = {}
    for number, views in _views_by_region(flat.regions).items():
        piece = pieces[number]
        if not _is_convertible(piece, views, dtype):
            continue
        smaller = _convert_piece(piece, dtype)
        if smaller is not None:
            converted[number] = piece.dtype.itemsize
            pieces[number] = smaller
    views = [_rescale(view, converted.get(view.region), dtype) for view in flat.regions.views]
    nodes = [node for _, node in flat.tree.nodes if node[TAG] == "tensor"]
    num_converted = 0
    for view, node in zip(views, nodes, strict=True):
        if view.region in converted:
            node["dtype"] = dtype_name(dtype)
            num_converted += 1
    return Flat(flat.tree, Regions(pieces, views)), num_converted


def _views_by_region(regions: Regions) -> dict[int, list[View]]:
    found: dict[int, list[View]] = {}
    for view in regions.views:
        if view.region >= 0:
            found.setdefault(view.region, []).append(view)
    return found


def _is_convertible(piece: Region, views: list[View], dtype: torch.dtype) -> bool:
    """Return whether all tensors of a region are wider floats than `dtype`, and one is large enough."""
    if not piece.dtype.is_floating_point or piece.dtype.itemsize <= dtype.itemsize:
        return False
    if any(view.dtype != piece.dtype for view in views):
        return False
    return max(math.prod(view.shape) for view in views) >= _MIN_ELEMENTS


def _convert_piece(piece: Region, dtype: torch.dtype) -> Region | None:
    """Convert the memory of a region; None if a finite number would become infinite."""
    source = piece.memory().view(piece.dtype)
    target = source.to(dtype)
    if not torch.equal(source.isfinite(), target.isfinite()):
        return None
    content = region_of(array_of(target))
    return Region(content.holder, content.start, content.nbytes, dtype)


def _rescale(view: View, old_itemsize: int | None, dtype: torch.dtype) -> View:
    """Return a view of converted memory. Strides count elements and stay; offsets count bytes."""
    if old_itemsize is None:
        return view
    offset = view.offset // old_itemsize * dtype.itemsize
    return View(view.region, offset, dtype, view.shape, view.stride)
