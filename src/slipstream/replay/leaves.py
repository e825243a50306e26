"""What a TorchRL storage holds, leaf by leaf: which tensors repeat as `next`, and how rows become frames.

TorchRL stores an observation twice: as that of step ``t``, and under ``next`` as what step ``t - 1`` led to. Leaves
that repeat so are kept once, as the fields of frames: slot ``t`` is frame ``f``, its ``next`` is frame ``f + 1``. Where
the two differ (an episode ended, or a stream of steps did) one more frame lies between, so that this holds for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, ReplayError
from slipstream.replay.fields import Packing, RowLayout, Spec, bytes_of
from slipstream.replay.packing import Rows
from slipstream.tensors import carrier

Key = tuple[str, ...]
Block = dict[Key, NDArray[Any]]
"""Arrays ``[streams, steps, ...]`` by leaf."""

NEXT = "next"
_FOLLOWS = 0.5


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
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

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
        leaves.append(Leaf(key, str(tensor.dtype).removeprefix("torch."), shape, "column" if scalar else "step", name))
    return leaves


_COLUMN_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64)


def find_twins(leaves: Sequence[Leaf], block: Block) -> list[Leaf]:
    """Find the leaves under ``next`` that mostly repeat the root one step later, in a first block of data."""
    by_key = {leaf.key: leaf for leaf in leaves}
    twins: dict[Key, str] = {}
    for leaf in leaves:
        root = by_key.get(leaf.key[1:])
        if leaf.key[0] != NEXT or leaf.kind == "column" or root is None or root.kind == "column":
            continue
        if (root.dtype, root.shape) == (leaf.dtype, leaf.shape) and _follows(block[root.key], block[leaf.key]):
            twins[leaf.key] = root.field
            twins[root.key] = root.field
    return [
        leaf
        if leaf.key not in twins
        else Leaf(leaf.key, leaf.dtype, leaf.shape, NEXT if leaf.key[0] == NEXT else "frame", twins[leaf.key])
        for leaf in leaves
    ]


def _follows(root: NDArray[Any], after: NDArray[Any]) -> bool:
    if root.shape[1] < 2:
        return True  # nothing to tell it by: most likely it does
    same = _equal(root[:, 1:], after[:, :-1])
    return bool(same.mean() >= _FOLLOWS)


def _equal(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.bool_]:
    """Compare ``[streams, steps, ...]`` bit for bit, step by step."""
    count = one.shape[0] * one.shape[1]
    mine, theirs = bytes_of(one.reshape(count, -1)), bytes_of(other.reshape(count, -1))
    for width in (8, 4, 2):
        if mine.shape[1] % width == 0 and mine.shape[1]:
            mine, theirs = mine.view(f"u{width}"), theirs.view(f"u{width}")
            break
    same: NDArray[np.bool_] = (mine == theirs).all(axis=1).reshape(one.shape[:2])
    return same


def plan_rows(leaves: Sequence[Leaf], packing: Packing) -> RowLayout:
    """Give every leaf that is packed a place in the rows of frames."""
    specs = [
        Spec(leaf.field, carrier(leaf.torch_dtype)[0].str, leaf.shape, leaf.kind == "frame")
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
    if afters:
        breaks[:, -1] = True
        for field, key in afters.items():
            if steps > 1:
                breaks[:, :-1] |= ~_equal(block[roots[field]][:, 1:], block[key][:, :-1])
    flat = breaks.reshape(-1)
    position = np.arange(flat.size) + np.cumsum(flat) - flat
    between = position[flat] + 1
    rows = [np.empty((flat.size + len(between), packer.row_bytes), np.uint8) for packer in layout.packers]
    for leaf in leaves:
        if leaf.kind not in ("frame", "step"):
            continue
        place = layout.fields[leaf.field]
        values = block[leaf.key].reshape(flat.size, *leaf.shape)
        place.write(rows[place.column], values, position)
        if leaf.kind == "frame":
            extra = block[afters[leaf.field]].reshape(flat.size, *leaf.shape)[flat]
        else:
            extra = values[flat]  # never read; the same again packs best
        place.write(rows[place.column], extra, between)
    return rows, steps + breaks.sum(axis=1), position.reshape(streams, steps)


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
            Leaf(tuple(map(str, key)), str(dtype), tuple(map(int, shape)), str(kind), str(field))
            for key, dtype, shape, kind, field in documents
        ]
        known = all(
            isinstance(leaf.torch_dtype, torch.dtype) and leaf.kind in ("column", "step", "frame", NEXT) and leaf.key
            for leaf in leaves
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(f"the tensors of a storage are not as a writer writes them ({error})") from error
    if not known:
        raise CorruptFileError("the tensors of a storage are not as a writer writes them")
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


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as the array that carries it; copied only if it is not on the CPU or not contiguous."""
    tensor = tensor.detach().cpu().contiguous()
    kind, _ = carrier(tensor.dtype)
    if tensor.dtype in _CARRIED:
        return tensor.view(torch.uint8).numpy().view(kind).reshape(tensor.shape)
    return tensor.numpy()


_CARRIED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32)
