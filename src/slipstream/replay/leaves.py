"""The tensors of a TorchRL storage: which of them repeat as `next`, and how steps become frames.

Observations that ``next`` repeats are stored once, as the fields of frames: the ``next`` of frame ``f`` is frame
``f + 1``. `slipstream.trajectory` finds where they differ and where one more frame is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, ReplayError
from slipstream.replay.fields import Packing, RowLayout, Spec
from slipstream.replay.packing import Rows
from slipstream.schema.dtypes import DTYPES, dtype_name, parse_torch_dtype
from slipstream.tensors import TORCH, array_of
from slipstream.trajectory import NEXT, find_breaks, frame_positions

Key = tuple[str, ...]
Block = dict[Key, NDArray[Any]]
"""Arrays ``[streams, steps, ...]`` by leaf."""

_MAX_BREAK_SHARE = 0.5
"""Twins pay up to this share of breaks: a break costs a packed frame here, not a raw row as in a rollout."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of a stored TensorDict.

    Attributes:
        key: Its nested key.
        dtype: torch's name of its dtype.
        shape: Of one element.
        kind: ``column`` (kept raw, slot by slot: flags and ids), ``step``, ``frame``, or ``next`` (read from the
            frame after).
        field: The name of the field that holds it; that of its root twin for ``next``.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    kind: str
    field: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype in torch."""
        return TORCH.dtype(self.dtype)

    def tensor(self, array: NDArray[Any]) -> torch.Tensor:
        """View the array that carries it as a tensor."""
        return torch.from_numpy(array).view(self.torch_dtype)


def describe(tensors: Mapping[Key, torch.Tensor], batch_dims: int) -> list[Leaf]:
    """Describe tensors ``[batch, ...]``; nothing is known yet of which repeat."""
    leaves = []
    for number, (key, tensor) in enumerate(tensors.items()):
        shape = tuple(tensor.shape[batch_dims:])
        scalar = tensor.dtype in _COLUMN_DTYPES and shape in ((), (1,))
        name = f"{number}:{'/'.join(key)}"
        leaves.append(Leaf(key, dtype_name(tensor.dtype), shape, "column" if scalar else "step", name))
    return leaves


_COLUMN_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64)


def find_twins(leaves: Sequence[Leaf], block: Block) -> list[Leaf]:
    """Find the leaves under ``next`` that mostly repeat the root one step later, in a first block of data."""
    by_key = {leaf.key: leaf for leaf in leaves}
    twins = dict(by_key)
    for leaf in leaves:
        root = by_key.get(leaf.key[1:])
        if leaf.key[0] != NEXT or root is None or "column" in (leaf.kind, root.kind):
            continue
        if (root.dtype, root.shape) == (leaf.dtype, leaf.shape) and _follows(block[root.key], block[leaf.key]):
            twins[root.key] = replace(root, kind="frame")
            twins[leaf.key] = replace(leaf, kind=NEXT, field=root.field)
    return list(twins.values())


def _follows(root: NDArray[Any], after: NDArray[Any]) -> bool:
    if root.shape[1] < 2:
        # A single step has nothing to compare with. Most observations follow.
        return True
    return bool(find_breaks(root, after).mean() <= _MAX_BREAK_SHARE)


def plan_rows(leaves: Sequence[Leaf], packing: Packing) -> RowLayout:
    """Give every leaf that is packed a place in the rows of frames."""
    specs = [
        Spec(leaf.field, DTYPES[leaf.dtype].carrier.str, leaf.shape, leaf.kind == "frame")
        for leaf in leaves
        if leaf.kind in ("frame", "step")
    ]
    if isinstance(packing.jpeg, Mapping):  # it names keys, a layout has fields
        fields = {"/".join(leaf.key): leaf.field for leaf in leaves if leaf.kind in ("frame", "step")}
        packing.check_names(list(fields))
        packing = Packing({fields[key]: quality for key, quality in packing.jpeg.items()}, images=packing.images)
    return RowLayout.plan(specs, packing)


def to_frames(leaves: Sequence[Leaf], layout: RowLayout, block: Block) -> tuple[list[Rows], NDArray[np.int64], Any]:
    """Turn steps into frames, each observation once.

    Args:
        leaves: What there is.
        layout: Where it goes.
        block: The arrays.

    Returns:
        The rows of each column; how many frames each stream has; and ``[streams, steps]``, which frame each step is.
    """
    streams, steps = next(iter(block.values())).shape[:2]
    roots = {leaf.field: leaf.key for leaf in leaves if leaf.kind == "frame"}
    afters = {leaf.field: leaf.key for leaf in leaves if leaf.kind == NEXT}
    breaks = np.zeros((streams, steps), np.bool_)
    for field, key in afters.items():
        breaks[:, :-1] |= find_breaks(block[roots[field]], block[key])
        # No step of this block follows the last one, so an extra frame holds what it led to.
        breaks[:, -1] = True
    positions = frame_positions(breaks)
    num_frames = breaks.size + len(positions.extras)
    position = positions.steps.reshape(-1)
    is_break = breaks.reshape(-1)
    rows = [np.empty((num_frames, packer.row_bytes), np.uint8) for packer in layout.packers]
    for leaf in leaves:
        if leaf.kind not in ("frame", "step"):
            continue
        place = layout.fields[leaf.field]
        values = block[leaf.key].reshape(breaks.size, *leaf.shape)
        place.write(rows[place.column], values, position)
        if leaf.kind == "frame":
            extra = block[afters[leaf.field]].reshape(breaks.size, *leaf.shape)[is_break]
        else:
            # Never read. Repeating the step compresses best.
            extra = values[is_break]
        place.write(rows[place.column], extra, positions.extras)
    return rows, positions.counts, positions.steps


def leaves_to_json(leaves: Sequence[Leaf]) -> list[list[Any]]:
    """Return leaves as JSON."""
    return [[list(leaf.key), leaf.dtype, list(leaf.shape), leaf.kind, leaf.field] for leaf in leaves]


def leaves_from_json(documents: Any) -> list[Leaf]:
    """Read what `leaves_to_json` wrote.

    Raises:
        CorruptFileError: If it is not something that it writes.
    """
    try:
        leaves = [
            Leaf(tuple(map(str, key)), parse_torch_dtype(dtype).name, tuple(map(int, shape)), str(kind), str(field))
            for key, dtype, shape, kind, field in documents
        ]
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"invalid tensors of a replay storage ({error})") from error
    for leaf in leaves:
        if leaf.kind not in ("column", "step", "frame", NEXT) or not leaf.key:
            raise CorruptFileError(f"invalid tensors of a replay storage ({leaf.key!r} is of kind {leaf.kind[:40]!r})")
    return leaves


def check_leaves(leaves: Sequence[Leaf], tensors: Mapping[Key, torch.Tensor], batch_dims: int) -> None:
    """Raise `ReplayError` unless tensors are those that a storage has held before: names, dtypes and shapes."""
    known = {leaf.key: leaf for leaf in leaves}
    if set(tensors) != set(known):
        missing, new = sorted(set(known) - set(tensors)), sorted(set(tensors) - set(known))
        raise ReplayError(f"the batch has other keys than those before it: missing {missing}, new {new}")
    for key, tensor in tensors.items():
        leaf = known[key]
        if tensor.dtype != leaf.torch_dtype or tuple(tensor.shape[batch_dims:]) != leaf.shape:
            raise ReplayError(
                f"{'/'.join(key)!r} is {tensor.dtype}{list(tensor.shape[batch_dims:])}, before it was "
                f"{leaf.torch_dtype}{list(leaf.shape)}"
            )


def host_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as the array that carries it; copied only if it is not on the CPU or not contiguous."""
    return array_of(tensor.detach().cpu().contiguous())
