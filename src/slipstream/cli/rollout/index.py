"""What the index of a rollout says, read without torch: importing it would take longer than all the rest."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.cli.ckpt.reading import reading
from slipstream.errors import CorruptFileError, FormatVersionError, SlipstreamError
from slipstream.store.container import Container
from slipstream.store.index import Entry

Key = tuple[str, ...]

_KIND = "rollout"  # this and the layout as in slipstream.rollout, which would import torch
_VERSION = 1
_DTYPE = re.compile(r"bool|(?:bfloat|float|complex|uint|int)(\d+)(?:_\w+)?")
_NUMPY = ("bool", "float16", "float32", "float64", "complex64", "complex128")


class NotARolloutError(SlipstreamError):
    """A container that is sound and something else."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a rollout, and the arrays that hold it.

    Attributes:
        key: Its nested key.
        dtype: The name of its torch dtype.
        shape: Its shape after environment and time.
        array: What holds it; for `lead` 1, from the second step on.
        lead: 1 if it is ``next`` of another tensor, whose array it shares.
        extra: How many steps the array has more than the rollout.
        mask: For `lead` 1: what tells where it differs from the step after.
        rows: For `lead` 1: what holds its values there.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    array: Entry
    lead: int = 0
    extra: int = 0
    mask: Entry | None = None
    rows: Entry | None = None

    @property
    def name(self) -> str:
        """Its key, as one writes it on a command line."""
        return "/".join(self.key)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return item_bytes(self.dtype)

    @property
    def exceptions(self) -> int:
        """In how many steps it differs from the step after, if that is where it is stored."""
        return self.rows.shape[0] if self.rows else 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every array that it takes to read it."""
        return tuple(entry for entry in (self.array, self.mask, self.rows) if entry is not None)


@dataclass(frozen=True)
class RolloutIndex:
    """What a file says of its rollout; checked to fit the arrays that the file has."""

    file: Path
    batch_size: tuple[int, ...]
    time_dim: int
    tensors: tuple[Tensor, ...]
    values: Mapping[str, Any]
    written_by: str
    file_bytes: int

    @property
    def num_envs(self) -> int:
        """How many environments there are."""
        return math.prod(self.batch_size[: self.time_dim])

    @property
    def num_steps(self) -> int:
        """How many steps each made."""
        return self.batch_size[self.time_dim]

    @property
    def raw_bytes(self) -> int:
        """Size of all tensors, ``next`` included."""
        return sum(map(self.bytes_of, self.tensors))

    @property
    def exceptions(self) -> int:
        """How many steps of ``next`` are not the step after; observations that have the same ones count once."""
        return sum({tensor.mask.name: tensor.exceptions for tensor in self.tensors if tensor.mask}.values())

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the size of a tensor."""
        return self.num_envs * self.num_steps * math.prod(tensor.shape) * tensor.itemsize

    def shape_of(self, tensor: Tensor) -> list[int]:
        """Return the whole shape of a tensor."""
        return [*self.batch_size[: self.time_dim + 1], *tensor.shape]

    def under(self, text: str) -> list[Tensor]:
        """Return the tensors of a key, or of all keys that begin with it."""
        return [tensor for tensor in self.tensors if f"{tensor.name}/".startswith(f"{text}/")]


def read_index(file: Path) -> RolloutIndex:
    """Return what a file says of its rollout; reads its index only.

    Raises:
        NotARolloutError: If it is something else that Slipstream wrote.
        CorruptFileError: If it is damaged, or its layout does not fit its arrays.
        FormatVersionError: If a newer release wrote it.
    """
    with Container(file) as container:
        return index_of(container)


def index_of(container: Container) -> RolloutIndex:
    """Return what an open file says of its rollout; see `read_index`."""
    file = container.path
    if container.kind == "checkpoint":
        raise NotARolloutError(f"{file}: is a checkpoint, not a rollout: use slipstream ckpt")
    if container.kind != _KIND:
        raise NotARolloutError(f"{file}: is a container of kind {container.kind!r}, expected a rollout")
    with reading(file):
        values = container.values
        layout = values.pop("rollout", None)
        if not isinstance(layout, dict) or type(layout.get("version")) is not int:
            raise CorruptFileError(f"{file}: does not say how its rollout is laid out")
        if layout["version"] != _VERSION:
            raise FormatVersionError(
                f"{file}: holds a rollout of layout version {layout['version']}, this release reads version {_VERSION}"
            )
        sizes, (time_dim,) = _sizes(layout["batch_size"]), _sizes([layout["time_dim"]])
        _ = sizes[time_dim]  # raises if there is no such axis
        entries = container.entries
        tensors = tuple(_tensor(node, entries) for node in layout["fields"])
        index = RolloutIndex(file, sizes, time_dim, tensors, values, container.written_by, container.file_bytes)
        for problem in _misfits(index):
            raise CorruptFileError(f"{file}: {problem}")
        return index


def find_keys(index: RolloutIndex, texts: list[str]) -> list[Key]:
    """Return the keys that texts such as ``agents/observation`` name, each one or several with commas."""
    found: dict[Key, None] = {}
    for text in texts:
        for part in [text] if index.under(text) else text.split(","):
            below = index.under(part)
            if not below:
                known = ", ".join(tensor.name for tensor in index.tensors[:8])
                more = ", ..." if len(index.tensors) > 8 else ""
                raise SlipstreamError(f"{index.file}: has no key {part!r}; it has {known}{more}")
            found |= dict.fromkeys(tensor.key for tensor in below)
    return list(found)


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element from the name of its torch dtype, such as ``bfloat16`` or ``float8_e5m2``."""
    match = _DTYPE.fullmatch(dtype)
    if not match:
        raise ValueError(f"there is no dtype {dtype[:40]!r}")
    return max(1, int(match[1]) // 8) if match[1] else 1


def _sizes(node: Any) -> tuple[int, ...]:
    if not isinstance(node, list) or any(type(size) is not int or size < 0 for size in node):
        raise ValueError(f"{str(node)[:60]} is not a list of sizes")
    return tuple(node)


def _tensor(node: Any, entries: Mapping[str, Entry]) -> Tensor:
    key, dtype, lead, extra = node["key"], node["dtype"], node.get("lead", 0), node.get("extra", 0)
    if not isinstance(key, list) or not key or not all(isinstance(part, str) for part in key):
        raise ValueError(f"{str(key)[:60]} is not a key")
    if lead not in (0, 1) or extra not in (0, 1) or lead > extra:
        raise ValueError(f"the tensor {str(node)[:80]} makes no sense")
    homes = [entries[node[part]] for part in (("array", "mask", "rows") if lead else ("array",))]
    tensor = Tensor(tuple(key), str(dtype), _sizes(node["shape"]), homes[0], int(lead), int(extra), *homes[1:])
    _ = tensor.itemsize  # raises if there is no such dtype
    return tensor


def _carrier(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of the arrays that hold a torch dtype, as `slipstream.tensors.carrier` does."""
    if dtype in _NUMPY or re.fullmatch(r"u?int\d+", dtype):
        return np.dtype(dtype)
    return np.dtype(f"u{item_bytes(dtype)}")


def _misfits(index: RolloutIndex) -> Iterator[str]:
    """Say which arrays are not as the layout has them."""
    for tensor in index.tensors:
        dtype = _carrier(tensor.dtype)
        lead = (index.num_envs, index.num_steps + tensor.extra)
        expected: list[tuple[Entry | None, np.dtype[Any], tuple[int, ...]]] = [
            (tensor.array, dtype, (*lead, *tensor.shape)),
            (tensor.mask, np.dtype(np.bool_), (index.num_envs, index.num_steps - 1)),
            (tensor.rows, dtype, (tensor.exceptions, *tensor.shape)),
        ]
        for entry, kind, shape in expected:
            if entry is not None and (entry.dtype, entry.shape) != (kind, shape):
                yield (
                    f"{tensor.name} is in the array {entry.name!r} of {entry.dtype}{list(entry.shape)}, "
                    f"expected {kind}{list(shape)}"
                )
    times = Counter(tensor.key for tensor in index.tensors)
    yield from (f"says more than once where {'/'.join(key)} is" for key, number in times.items() if number > 1)
    above = {key[:depth] for key in times for depth in range(1, len(key))}
    yield from (f"has {'/'.join(key)} both as a tensor and as keys below it" for key in times if key in above)
