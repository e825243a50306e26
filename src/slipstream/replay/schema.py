"""What a step is made of: leaves with a dtype, a shape and a role, and where each of them lies in packed rows.

A leaf is one of these kinds:

- ``raw``: kept as it is, one value per slot. Flags and ids, which samplers read without decoding.
- ``step``: packed, and belongs to one step. Actions and rewards.
- ``frame``: packed, and what the step before led to: its ``next`` is the row after.
- ``next``: not stored at all. It is read from the row after that of its ``frame``.

Images have a column for each, all other packed leaves share one. Images of numbers are those whose pixels are found to
be scaled bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.codecs.base import word_dtype
from slipstream.errors import CorruptFileError, ReplayError
from slipstream.replay.images import line_bytes_of
from slipstream.replay.jpeg import channel_axis, check_quality
from slipstream.replay.packing import ImageRows, RowPacker, Rows, VectorRows
from slipstream.replay.roles import Key, Roles
from slipstream.replay.scaled import BYTES, is_scaled
from slipstream.replay.scaled import DTYPES as DTYPES_OF_IMAGES
from slipstream.schema.dtypes import DTYPES, dtype_name, parse_torch_dtype
from slipstream.tensors import TORCH, array_of
from slipstream.trajectory import NEXT, find_breaks

Block = Mapping[Key, NDArray[Any]]
"""Arrays ``[streams, steps, ...]`` by key."""

RAW, STEP, FRAME = "raw", "step", "frame"

_NO_COLUMN = -1
_IMAGE_BYTES = 1024
_MAX_BREAK_SHARE = 0.5
"""Sharing ``next`` pays up to this share of breaks: a break costs a packed row here, not a raw one as in a rollout."""
_RAW_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64)
_NUMPY_NAMES = {dtype.carrier.str: name for name, dtype in reversed(DTYPES.items())}


@dataclass(frozen=True)
class Leaf:
    """One tensor or array of a step.

    Attributes:
        key: Its nested key.
        dtype: torch's name of its dtype.
        shape: The shape of one element.
        kind: See the module.
        column: Which column holds it; -1 for raw leaves.
        start: Its first byte in a row of that column.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    kind: str = STEP
    column: int = _NO_COLUMN
    start: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype in torch."""
        return TORCH.dtype(self.dtype)

    @property
    def carrier(self) -> np.dtype[Any]:
        """Its dtype in NumPy."""
        return DTYPES[self.dtype].carrier

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return math.prod(self.shape) * self.carrier.itemsize

    @property
    def is_packed(self) -> bool:
        """Whether it is in the rows of a column."""
        return self.kind != RAW

    @property
    def is_image(self) -> bool:
        """Whether it is packed as an image."""
        return self.carrier == np.uint8 and len(self.shape) > 1 and self.nbytes >= _IMAGE_BYTES

    @property
    def name(self) -> str:
        """Its key, joined by slashes."""
        return "/".join(self.key)

    def read(self, rows: Rows) -> NDArray[Any]:
        """Return the array in rows of its column; a view if it is all there is in them."""
        stop = self.start + self.nbytes
        part = rows[:, self.start : stop]
        # NumPy calls a part of a single row contiguous, whatever address it starts at. torch needs aligned numbers.
        if part.shape[1] != rows.shape[1] or not part.flags.c_contiguous:
            part = part.copy()
        return part.view(self.carrier).reshape(len(rows), *self.shape)

    def write(self, rows: Rows, values: NDArray[Any], where: Any = slice(None)) -> None:
        """Put an array into rows of its column."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        rows[where, self.start : self.start + self.nbytes] = flat.reshape(len(values), self.nbytes)

    def tensor(self, array: NDArray[Any]) -> torch.Tensor:
        """View the array that carries it as a tensor."""
        return torch.from_numpy(array).view(self.torch_dtype)


@dataclass(frozen=True)
class Packing:
    """How a buffer packs.

    Args:
        jpeg: Quality for all images, or for those named; without loss by default.
        images: Whether to pack images as such; if not, they are kept as they are.
    """

    jpeg: int | Mapping[str, int] | None = None
    images: bool = True

    def __post_init__(self) -> None:
        qualities: Iterable[int | None] = (self.jpeg,) if not isinstance(self.jpeg, Mapping) else self.jpeg.values()
        for quality in qualities:
            check_quality(quality)

    def check_names(self, images: Iterable[str]) -> None:
        """Raise `ReplayError` if a quality is given for something that is not among the images."""
        if not isinstance(self.jpeg, Mapping):
            return
        unknown = sorted(set(self.jpeg) - set(images))
        if unknown:
            raise ReplayError(f"jpeg names {unknown[0]!r}, which is not an image here; images are {sorted(images)}")

    def packer(self, leaf: Leaf) -> ImageRows:
        """Return how an image is packed."""
        quality = self.jpeg
        if isinstance(quality, Mapping):
            quality = quality.get(leaf.name)
        if not self.images:
            quality = None
        # Only bytes can be a JPEG.
        if leaf.carrier.str != BYTES:
            quality = None
        if quality is not None:
            channel_axis(leaf.shape)
        line_bytes = line_bytes_of(leaf.shape)
        return ImageRows(leaf.nbytes, line_bytes, quality, leaf.shape, not self.images, leaf.carrier.str)


class Schema:
    """The leaves of a step, and the columns that hold them.

    A schema does not change. `with_leaves` returns one with more leaves, in columns after those that exist.
    """

    def __init__(self, leaves: Sequence[Leaf] = (), packers: Sequence[RowPacker] = ()) -> None:
        self.leaves = {leaf.key: leaf for leaf in leaves}
        self.packers = tuple(packers)

    def of_column(self, column: int) -> list[Leaf]:
        """Return the leaves of a column, those of ``next`` included."""
        return [leaf for leaf in self.leaves.values() if leaf.column == column]

    @property
    def step_bytes(self) -> int:
        """The size of a step with its ``next``, not packed."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @property
    def row_bytes(self) -> int:
        """The size of a row in all columns together, not packed."""
        return sum(packer.row_bytes for packer in self.packers)

    def with_leaves(self, new: Sequence[Leaf], packing: Packing, scaled: Collection[Key] = ()) -> Schema:
        """Return a schema with more leaves; images get a column each, all other packed ones share a new one.

        Args:
            new: The leaves.
            packing: How images are packed.
            scaled: The keys of images whose pixels are numbers.

        Raises:
            UnsupportedDtypeError: If elements are not plain numbers.
            ReplayError: If an image cannot be a JPEG though that is asked for, or if a quality names no image.
        """
        packers = list(self.packers)
        placed: dict[Key, Leaf] = {}
        vectors = _NO_COLUMN
        used = 0
        for leaf in new:
            word_dtype(leaf.carrier)
            if leaf.kind not in (STEP, FRAME):
                placed[leaf.key] = leaf
            elif leaf.is_image or leaf.key in scaled:
                placed[leaf.key] = replace(leaf, column=len(packers), start=0)
                packers.append(packing.packer(leaf))
            else:
                if vectors == _NO_COLUMN:
                    vectors = len(packers)
                    packers.append(VectorRows(0))
                placed[leaf.key] = replace(leaf, column=vectors, start=used)
                used += leaf.nbytes
        if vectors != _NO_COLUMN:
            packers[vectors] = VectorRows(used)
        for leaf in new:
            if leaf.kind == NEXT:
                frame = placed[frame_key(leaf.key)]
                placed[leaf.key] = replace(leaf, column=frame.column, start=frame.start)
        schema = Schema([*self.leaves.values(), *placed.values()], packers)
        packing.check_names([leaf.name for leaf in schema.leaves.values() if leaf.is_image and leaf.kind != NEXT])
        return schema

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON."""
        leaves = [{**asdict(leaf), "key": list(leaf.key), "shape": list(leaf.shape)} for leaf in self.leaves.values()]
        packers: list[dict[str, Any]] = []
        for packer in self.packers:
            if isinstance(packer, VectorRows):
                packers.append({"kind": packer.kind, "row_bytes": packer.row_bytes})
            else:
                packers.append({**asdict(packer), "kind": packer.kind, "shape": list(packer.shape)})
        return {"leaves": leaves, "columns": packers}

    @classmethod
    def from_json(cls, document: Any) -> Schema:
        """Read what `to_json` wrote.

        Raises:
            CorruptFileError: If it is not something that `to_json` writes.
        """
        try:
            leaves = [_leaf_from_json(item) for item in document["leaves"]]
            packers = [_packer_from_json(item) for item in document["columns"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(f"invalid schema of a replay buffer ({error})") from error
        for leaf in leaves:
            known = leaf.kind in (RAW, STEP, FRAME, NEXT) and bool(leaf.key) and min(leaf.shape, default=0) >= 0
            if known and leaf.is_packed:
                known = 0 <= leaf.column < len(packers) and leaf.start >= 0
                known = known and leaf.start + leaf.nbytes <= packers[leaf.column].row_bytes
            if not known:
                raise CorruptFileError(f"invalid schema of a replay buffer ({leaf.name!r} has no place in its rows)")
        schema = cls(leaves, packers)
        schema.check()
        return schema

    def check(self) -> None:
        """Raise `CorruptFileError` unless columns are as large as their leaves, and frames have what they led to."""
        for number, packer in enumerate(self.packers):
            leaves = [leaf for leaf in self.of_column(number) if leaf.kind != NEXT]
            end = 0
            for start, nbytes in sorted((leaf.start, leaf.nbytes) for leaf in leaves):
                # Neither gaps nor leaves that lie over each other.
                if start == end:
                    end += nbytes
            if not leaves or end != packer.row_bytes or sum(leaf.nbytes for leaf in leaves) != end:
                raise CorruptFileError(f"invalid schema of a replay buffer (rows of {packer.row_bytes} bytes)")
        nexts = []
        for leaf in self.leaves.values():
            if leaf.kind != NEXT:
                continue
            frame = self.leaves.get(frame_key(leaf.key))
            if frame is None or replace(leaf, key=frame.key, kind=FRAME) != frame:
                raise CorruptFileError(f"invalid schema of a replay buffer ({leaf.name!r} has no frame)")
            nexts.append(frame.key)
        frames = [leaf.key for leaf in self.leaves.values() if leaf.kind == FRAME]
        if sorted(nexts) != sorted(frames):
            raise CorruptFileError(f"invalid schema of a replay buffer ({frames} are frames, {nexts} have a next)")


def _leaf_from_json(item: Mapping[str, Any]) -> Leaf:
    return Leaf(
        tuple(map(str, item["key"])),
        parse_torch_dtype(item["dtype"]).name,
        _shape_from_json(item["shape"]),
        str(item["kind"]),
        int(item["column"]),
        int(item["start"]),
    )


def _packer_from_json(item: Mapping[str, Any]) -> RowPacker:
    if item["kind"] == VectorRows.kind:
        return VectorRows(int(item["row_bytes"]))
    if item["kind"] != ImageRows.kind:
        raise ValueError(f"a column is of kind {str(item['kind'])[:40]!r}")
    jpeg = item["jpeg"]
    if jpeg is not None:
        jpeg = int(jpeg)
        check_quality(jpeg)
    shape = _shape_from_json(item["shape"])
    line_bytes = int(item["line_bytes"])
    row_bytes = int(item["row_bytes"])
    dtype = str(item.get("dtype", BYTES))
    if dtype not in (BYTES, *DTYPES_OF_IMAGES) or (dtype != BYTES and jpeg is not None):
        raise ValueError(f"the pixels of an image are {dtype[:40]!r}")
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if row_bytes < 1 or expected != row_bytes or line_bytes != line_bytes_of(shape):
        raise ValueError(f"an image of {row_bytes} bytes has shape {list(shape)}")
    return ImageRows(row_bytes, line_bytes, jpeg, shape, bool(item["stored"]), dtype)


def _shape_from_json(document: Any) -> tuple[int, ...]:
    shape = tuple(map(int, document))
    if min(shape, default=0) < 0:
        raise ValueError(f"a shape is {list(shape)}")
    return shape


def frame_key(key: Key) -> Key:
    """Return the key of the frame that a ``next`` is read from: ``("next", "x")`` or ``("next_x",)`` for ``("x",)``."""
    if key[0] == NEXT:
        return key[1:]
    return (key[0].removeprefix(f"{NEXT}_"), *key[1:])


def describe(tensors: Mapping[Key, torch.Tensor], batch_dims: int, roles: Roles) -> list[Leaf]:
    """Describe tensors ``[batch, ...]``; which of them ``next`` repeats is found later, by `find_twins`."""
    leaves = []
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape[batch_dims:])
        is_scalar = tensor.dtype in _RAW_DTYPES and shape in ((), (1,))
        kind = STEP
        # What has a role is read to find the ends of episodes, so it is not packed either.
        if is_scalar or roles.are_played_by(key):
            kind = RAW
        leaves.append(Leaf(key, dtype_name(tensor.dtype), shape, kind))
    return leaves


def find_twins(leaves: Sequence[Leaf], block: Block) -> list[Leaf]:
    """Find the leaves under ``next`` that mostly repeat the root one step later, in a first block of data."""
    twins = {leaf.key: leaf for leaf in leaves}
    # From the root down: a leaf that is the `next` of another stores no rows, so it cannot be the frame of a third.
    for leaf in sorted(leaves, key=_depth):
        root = twins.get(leaf.key[1:])
        if leaf.key[0] != NEXT or root is None or RAW in (leaf.kind, root.kind) or root.kind == NEXT:
            continue
        if (root.dtype, root.shape) == (leaf.dtype, leaf.shape) and _follows(block[root.key], block[leaf.key]):
            twins[root.key] = replace(root, kind=FRAME)
            twins[leaf.key] = replace(leaf, kind=NEXT)
    return list(twins.values())


def _depth(leaf: Leaf) -> int:
    return len(leaf.key)


def find_scaled(leaves: Iterable[Leaf], block: Block) -> set[Key]:
    """Return the keys of packed leaves that are images of numbers whose pixels are those of bytes."""
    found = set()
    for leaf in leaves:
        if leaf.kind in (STEP, FRAME) and is_scaled(block[leaf.key]):
            found.add(leaf.key)
    return found


def _follows(root: NDArray[Any], after: NDArray[Any]) -> bool:
    if root.shape[1] < 2:
        # A single step has nothing to compare with. Most observations follow.
        return True
    return bool(find_breaks(root, after).mean() <= _MAX_BREAK_SHARE)


def leaf_of_array(key: Key, array: NDArray[Any], kind: str) -> Leaf:
    """Describe an array ``[rows, ...]``.

    Raises:
        ReplayError: If its elements are not plain numbers.
    """
    name = _NUMPY_NAMES.get(array.dtype.str)
    if name is None:
        raise ReplayError(f"{'/'.join(key)!r} is {array.dtype}, expected numbers")
    return Leaf(key, name, array.shape[1:], kind)


def check_leaf(leaf: Leaf, tensor: torch.Tensor, batch_dims: int) -> None:
    """Raise `ReplayError` unless a tensor ``[batch, ...]`` has the dtype and shape of those before it."""
    shape = tuple(tensor.shape[batch_dims:])
    if tensor.dtype != leaf.torch_dtype or shape != leaf.shape:
        raise ReplayError(
            f"{leaf.name!r} is {tensor.dtype}{list(shape)}, before it was {leaf.torch_dtype}{list(leaf.shape)}"
        )


def host_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as the array that carries it; copied only if it is not on the CPU or not contiguous."""
    if tensor.is_meta:
        raise ReplayError("a tensor is on device 'meta' and has no values: move the batch to a real device first")
    # A view that conjugates or negates shares the bytes of another tensor.
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return array_of(plain.contiguous())
