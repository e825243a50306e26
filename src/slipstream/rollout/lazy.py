"""`PackedTensor`: a tensor of a packed rollout, decoded by every read until something writes to it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from slipstream.lazy.tensor import LazyTensor, Source, Steps
from slipstream.rollout.layout import Field
from slipstream.rollout.packed import PackedArrays
from slipstream.tensors import TORCH, tensor_of


class PackedTensor(Source):
    """A tensor of a packed rollout: decoded by every read, until it is unpacked. Thread-safe.

    Writing unpacks it: from then on it is raw memory that all its views share.

    Args:
        arrays: The arrays that hold it.
        field: Where it is in them.
        device: Where its values are read to; None means the CPU.
    """

    def __init__(self, arrays: PackedArrays, field: Field, device: torch.device | None = None) -> None:
        self.arrays = arrays
        self.field = field
        self.device = device
        self.shape = arrays.layout.shape_of(field)
        self.row_shape = field.shape
        self.dtype = TORCH.dtype(field.dtype.name)
        self.group = id(arrays)
        self._tensor: torch.Tensor | None = None
        self._lock = threading.Lock()

    @property
    def tensor(self) -> torch.Tensor | None:
        """All of it in raw memory, once it is unpacked."""
        return self._tensor

    def unpack(self) -> torch.Tensor:
        """Return the whole tensor; it is kept raw from now on, and all views read and write it. Idempotent."""
        with self._lock:
            if self._tensor is None:
                self._tensor = self.decode()
            return self._tensor

    def decode(self) -> torch.Tensor:
        """Return the whole tensor in new memory."""
        (values,) = self.arrays.read([self.field], slice(0, self.arrays.layout.num_envs))
        return self.as_tensor(values, self.shape)

    def as_tensor(self, values: NDArray[Any], shape: tuple[int, ...]) -> torch.Tensor:
        """Return decoded values as a tensor on the device, without a copy where possible."""
        tensor = tensor_of(values, self.field.dtype.name, shape)
        if self.device is None:
            return tensor
        return tensor.to(self.device)

    def read(self, view: LazyTensor) -> torch.Tensor:
        """Return the values: in new memory, or as a view of the raw tensor once that is unpacked."""
        return read_together([view])[0]

    def read_alone(self, view: LazyTensor) -> torch.Tensor:
        """Return the values from the raw tensor, or decode all of the packed one."""
        shown = view.placeholder
        if self._tensor is not None:
            return self.see(self._tensor, shown)  # type: ignore[no-any-return]
        if not shown.numel():
            return torch.empty(shown.shape, dtype=shown.dtype, device=self.device or "cpu")
        # A small view must not keep all of the decoded tensor in memory.
        return self.see(self.decode(), shown).clone()  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_tensor, (self.arrays, self.field, self.device, self._tensor)


def _restore_tensor(
    arrays: PackedArrays, field: Field, device: torch.device | None, tensor: torch.Tensor | None
) -> PackedTensor:
    packed = PackedTensor(arrays, field, device)
    packed._tensor = tensor
    return packed


def read_together(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    """Read several views at once: those that share an array decode it once, on all threads."""
    found: dict[int, torch.Tensor] = {}
    joint: dict[tuple[int, Steps], list[LazyTensor]] = defaultdict(list)
    for tensor in tensors:
        source: Any = tensor.source
        if source.tensor is not None or tensor.steps is None:
            found[id(tensor)] = source.read_alone(tensor)
        else:
            joint[source.group, tensor.steps].append(tensor)
    for (_, steps), views in joint.items():
        source = views[0].source
        parts = read_steps(views, steps.selection(source.arrays.layout.num_steps), steps.shape)
        found.update(zip(map(id, views), parts, strict=True))
    return [found[id(tensor)] for tensor in tensors]


def read_steps(views: Sequence[LazyTensor], chosen: Any, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Read some steps of views of one array; `chosen` is as for `PackedArrays.read`, `shape` is theirs."""
    sources: list[Any] = []
    fields = []
    for view in views:
        sources.append(view.source)
        fields.append(sources[-1].field)
    found = []
    for source, values in zip(sources, sources[0].arrays.read(fields, chosen), strict=True):
        found.append(source.as_tensor(values, (*shape, *source.row_shape)))
    return found


def clone_member(member: Any) -> Any:
    """Return a copy of a member that is written to separately: still packed if this is."""
    if not isinstance(member, LazyTensor):
        return member.clone()
    source: Any = member.source
    if source.tensor is not None:
        return member.read().clone()
    return LazyTensor(PackedTensor(source.arrays, source.field, source.device), member.placeholder)


def move_member(member: Any, device: torch.device) -> Any:
    """Return a member on a device: itself if it is there already, or else a copy that is moved when it is read."""
    if not isinstance(member, LazyTensor):
        return member.to(device)
    source: Any = member.source
    here = source.device or torch.device("cpu")
    if here == device:
        return member
    if source.tensor is not None:
        return member.read().to(device)
    return LazyTensor(PackedTensor(source.arrays, source.field, device), member.placeholder)
