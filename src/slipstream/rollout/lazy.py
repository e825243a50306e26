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
    joint: dict[tuple[int, Steps], list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        source: Any = tensor.source
        if source.tensor is not None or tensor.steps is None:
            found[position] = source.read_alone(tensor)
        else:
            joint[id(source.arrays), tensor.steps].append(position)
    for (_, steps), positions in joint.items():
        sources: list[Any] = [tensors[position].source for position in positions]
        arrays = sources[0].arrays
        fields = [source.field for source in sources]
        parts = arrays.read(fields, steps.selection(arrays.layout.num_steps))
        for position, source, values in zip(positions, sources, parts, strict=True):
            found[position] = source.as_tensor(values, tuple(tensors[position].placeholder.shape))
    return [found[position] for position in range(len(tensors))]


def read_steps(tensors: Sequence[LazyTensor], numbers: torch.Tensor) -> list[torch.Tensor]:
    """Read some steps of tensors by their numbers; those that share an array decode it once."""
    flat = numbers.reshape(-1).numpy()
    found: dict[int, torch.Tensor] = {}
    by_arrays: dict[int, list[int]] = defaultdict(list)
    sources: list[Any] = [tensor.source for tensor in tensors]
    for position, source in enumerate(sources):
        by_arrays[id(source.arrays)].append(position)
    for positions in by_arrays.values():
        fields = [sources[position].field for position in positions]
        parts = sources[positions[0]].arrays.read(fields, flat)
        for position, part in zip(positions, parts, strict=True):
            source = sources[position]
            found[position] = source.as_tensor(part, (*numbers.shape, *source.row_shape))
    return [found[position] for position in range(len(tensors))]


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
