"""Tensors of a packed rollout that are decoded when they are read, and views of them.

A view is described by a *placeholder*: a tensor on the meta device, which has a shape, strides and an offset, but no
memory. Whatever makes a view of a tensor makes a view of its placeholder, so torch itself keeps track of what a view
shows. Reading decodes those steps. Writing unpacks the tensor: from then on it is raw memory that all its views share.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.compiling import untraced
from slipstream.rollout.layout import Field
from slipstream.rollout.packed import PackedArrays
from slipstream.schema.structure import contiguous_strides
from slipstream.tensors import TORCH, tensor_of


class PackedTensor:
    """A tensor of a packed rollout: decoded by every read, until it is unpacked. Thread-safe.

    Attributes:
        arrays: The arrays that hold it.
        field: Where it is in them.
        device: Where its values are read to; None means the CPU.
        tensor: All of it in raw memory, once it is unpacked.
    """

    def __init__(self, arrays: PackedArrays, field: Field, device: torch.device | None = None) -> None:
        self.arrays = arrays
        self.field = field
        self.device = device
        self.tensor: torch.Tensor | None = None
        self._lock = threading.Lock()

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape."""
        return self.arrays.layout.shape_of(self.field)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return TORCH.dtype(self.field.dtype.name)

    def unpack(self) -> torch.Tensor:
        """Return the whole tensor; it is kept raw from now on, and all views read and write it. Idempotent."""
        with self._lock:
            if self.tensor is None:
                self.tensor = self.decode()
            return self.tensor

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

    def copy(self, device: torch.device | None) -> PackedTensor:
        """Return a tensor of the same packed data that is written to separately. Only for one that is still packed."""
        return PackedTensor(self.arrays, self.field, device)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_tensor, (self.arrays, self.field, self.device, self.tensor)


def _restore_tensor(
    arrays: PackedArrays, field: Field, device: torch.device | None, tensor: torch.Tensor | None
) -> PackedTensor:
    packed = PackedTensor(arrays, field, device)
    packed.tensor = tensor
    return packed


@dataclass(frozen=True)
class Steps:
    """The steps that a view shows, as shape, strides and offset of their numbers; hashable."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def numbers(self) -> torch.Tensor:
        """Return the numbers of the steps, in the shape of the view."""
        numbers = torch.full(self.shape, self.offset, dtype=torch.int64, device="cpu")
        for axis, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            along = [1] * len(self.shape)
            along[axis] = size
            numbers += (torch.arange(size, device="cpu") * stride).reshape(along)
        return numbers

    def selection(self, num_steps: int) -> NDArray[np.intp] | slice:
        """Return what `PackedArrays.read` should read: whole environments if possible, or else numbers of steps."""
        num_shown = math.prod(self.shape)
        is_whole = num_steps > 0 and self.offset % num_steps == 0 and num_shown % num_steps == 0
        if is_whole and _is_contiguous(self.shape, self.strides):
            first = self.offset // num_steps
            return slice(first, first + num_shown // num_steps)
        return self.numbers().reshape(-1).numpy()


class LazyTensor:
    """A view of a packed tensor.

    Attributes:
        source: The packed tensor.
        placeholder: Which of its elements the view shows: shape, strides and offset, without memory.
    """

    def __init__(self, source: PackedTensor, placeholder: torch.Tensor | None = None) -> None:
        self.source = source
        if placeholder is None:
            placeholder = torch.empty(source.shape, dtype=source.dtype, device="meta")
        self.placeholder = placeholder

    @functools.cached_property
    def steps(self) -> Steps | None:
        """Which steps the view shows, or None if it does not show whole steps."""
        row_shape = self.source.field.shape
        row_size = math.prod(row_shape)
        shape = tuple(self.placeholder.shape)
        strides = self.placeholder.stride()
        offset = int(self.placeholder.storage_offset())
        num_lead = len(shape) - len(row_shape)
        if num_lead < 0 or not self.placeholder.numel() or shape[num_lead:] != row_shape:
            return None
        if not _is_contiguous(row_shape, strides[num_lead:]) or offset % row_size:
            return None
        step_strides = []
        for stride in strides[:num_lead]:
            if stride % row_size:
                return None
            step_strides.append(stride // row_size)
        return Steps(shape[:num_lead], tuple(step_strides), offset // row_size)

    def read(self) -> torch.Tensor:
        """Return the values: in new memory, or as a view of the raw tensor once that is unpacked."""
        return read_together([self])[0]

    def read_alone(self) -> torch.Tensor:
        """Return the values from the raw tensor, or decode all of the packed one."""
        if self.source.tensor is not None:
            return self.see(self.source.tensor)
        if not self.placeholder.numel():
            return torch.empty(self.placeholder.shape, dtype=self.placeholder.dtype, device=self.source.device or "cpu")
        # A small view must not keep all of the decoded tensor in memory.
        return self.see(self.source.decode()).clone()

    def see(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same view of another tensor of the whole shape."""
        flat = whole.reshape(-1)
        # `view(dtype)` of a TensorDict changes the dtype of the placeholder.
        if flat.dtype != self.placeholder.dtype:
            flat = flat.view(self.placeholder.dtype)
        return flat.as_strided(self.placeholder.shape, self.placeholder.stride(), self.placeholder.storage_offset())

    def unpack(self) -> None:
        """Keep the packed tensor raw from now on, for this and all other views of it."""
        self.source.unpack()

    def clone(self) -> LazyTensor | torch.Tensor:
        """Return a copy that is written to separately: still packed if this is."""
        if self.source.tensor is not None:
            return self.read().clone()
        return LazyTensor(self.source.copy(self.source.device), self.placeholder)

    def to(self, device: torch.device) -> LazyTensor | torch.Tensor:
        """Return the view on a device: itself if it is there already, or else a copy that is moved when it is read."""
        here = self.source.device or torch.device("cpu")
        if here == device:
            return self
        if self.source.tensor is not None:
            return self.read().to(device)
        return LazyTensor(self.source.copy(device), self.placeholder)

    def __reduce__(self) -> tuple[Any, ...]:
        view = self.placeholder
        geometry = (tuple(view.shape), view.stride(), view.storage_offset(), view.dtype)
        return _restore_lazy, (self.source, *geometry)


def _restore_lazy(
    source: PackedTensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype
) -> LazyTensor:
    # Pickled tensors on the meta device lose their offset.
    nbytes = math.prod(source.shape) * source.dtype.itemsize
    memory = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="meta")
    return LazyTensor(source, memory.as_strided(shape, strides, offset))


def read_together(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    """Read several views at once: those that share an array decode it once, on all threads."""
    found: dict[int, torch.Tensor] = {}
    joint: dict[tuple[int, Steps], list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        steps = tensor.steps
        is_dtype_kept = tensor.placeholder.dtype == tensor.source.dtype
        if tensor.source.tensor is not None or steps is None or not is_dtype_kept:
            found[position] = tensor.read_alone()
        else:
            joint[id(tensor.source.arrays), steps].append(position)
    for (_, steps), positions in joint.items():
        sources = [tensors[position].source for position in positions]
        arrays = sources[0].arrays
        fields = [source.field for source in sources]
        parts = arrays.read(fields, steps.selection(arrays.layout.num_steps))
        for position, source, values in zip(positions, sources, parts, strict=True):
            found[position] = source.as_tensor(values, tuple(tensors[position].placeholder.shape))
    return [found[position] for position in range(len(tensors))]


class Leaves(MutableMapping[str, Any]):
    """The members of a TensorDict, some of which are lazy: getting one decodes it.

    Attributes:
        members: Lazy tensors, tensors and nested TensorDicts by name.
    """

    def __init__(self, members: dict[str, Any]) -> None:
        self.members = members

    @untraced
    def __getitem__(self, name: str) -> Any:
        member = self.members[name]
        if isinstance(member, LazyTensor):
            return member.read()
        return member

    def __setitem__(self, name: str, value: Any) -> None:
        self.members[name] = value

    def __delitem__(self, name: str) -> None:
        del self.members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, name: object) -> bool:
        # The inherited method would decode the member.
        return name in self.members


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides are those of contiguous memory; those of axes of size 1 do not matter."""
    for size, stride, expected in zip(shape, strides, contiguous_strides(shape), strict=True):
        if size != 1 and stride != expected:
            return False
    return True
