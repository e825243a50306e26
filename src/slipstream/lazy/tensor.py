"""`LazyTensor`: a view of a tensor that is decoded when it is read, and the `Source` that it is a view of."""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.compiling import untraced
from slipstream.schema.structure import contiguous_strides


class Source:
    """A whole tensor, stored in another form: steps ``[steps..., row...]``.

    Attributes:
        shape: The whole shape.
        row_shape: The shape of one step.
        dtype: The dtype.
        group: What is equal for tensors whose steps have the same numbers, and can be read together.
    """

    shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    group: int

    @property
    def tensor(self) -> Any:
        """All of it in raw memory that views share, or None if it has to be decoded."""
        raise NotImplementedError

    def unpack(self) -> Any:
        """Return all of it in raw memory, which is kept. Idempotent."""
        raise NotImplementedError

    def read(self, view: LazyTensor) -> Any:
        """Return what a view shows."""
        raise NotImplementedError

    def see(self, whole: Any, placeholder: torch.Tensor) -> Any:
        """Return what a placeholder shows of a tensor of the whole shape."""
        flat = whole.reshape(-1)
        # `view(dtype)` of a TensorDict changes the dtype of the placeholder.
        if flat.dtype != placeholder.dtype:
            flat = flat.view(placeholder.dtype)
        return flat.as_strided(placeholder.shape, placeholder.stride(), placeholder.storage_offset())

    def stand_in(self, placeholder: torch.Tensor) -> Any:
        """Return something of the type and shape of what a placeholder shows, without memory."""
        return placeholder

    def write(self, view: LazyTensor, value: Any, index: Any = ...) -> None:
        """Change what a view shows at an index; every view of the source sees it."""
        self.see(self.unpack(), view.placeholder)[index] = value


@dataclass(frozen=True)
class Steps:
    """The steps that a view shows, as shape, strides and offset of their numbers; hashable."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, items: NDArray[Any]) -> NDArray[Any]:
        """Return those of some items, one per step, in the shape of the view; not to be written to."""
        # Most views show all steps in order, and making another array takes some microseconds.
        if self.shape == items.shape and _is_contiguous(self.shape, self.strides):
            return items
        flat = items.ravel()
        strides = [stride * flat.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, strides)

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


def elements_of(placeholder: torch.Tensor) -> NDArray[np.int64]:
    """Return the numbers of the elements that a placeholder shows, in its shape."""
    geometry = Steps(tuple(placeholder.shape), placeholder.stride(), int(placeholder.storage_offset()))
    return geometry.numbers().numpy()


class LazyTensor:
    """A view of a tensor that is decoded when it is read.

    Args:
        source: The tensor.
        placeholder: Which of its elements the view shows: shape, strides and offset, without memory; by default all.
    """

    def __init__(self, source: Source, placeholder: torch.Tensor | None = None) -> None:
        self.source = source
        self.is_all = placeholder is None
        """Whether it was made to show all."""
        self._placeholder = placeholder
        self._steps: Steps | None = None

    @property
    def placeholder(self) -> torch.Tensor:
        """Which elements the view shows."""
        if self._placeholder is None:
            self._placeholder = torch.empty(self.source.shape, dtype=self.source.dtype, device="meta")
        return self._placeholder

    @property
    def steps(self) -> Steps | None:
        """Which steps the view shows, or None if it does not show whole steps of the source's dtype."""
        if self._steps is None:
            self._steps = self._find_steps()
        return self._steps

    def _find_steps(self) -> Steps | None:
        row_shape = self.source.row_shape
        shape = self.source.shape
        # The placeholder is made only if it is needed: that takes longer than all the rest of a lazy tensor.
        if self.is_all and 0 not in shape:
            steps = shape[: len(shape) - len(row_shape)]
            return Steps(steps, contiguous_strides(steps), 0)
        row_size = math.prod(row_shape)
        shape = tuple(self.placeholder.shape)
        strides = self.placeholder.stride()
        offset = int(self.placeholder.storage_offset())
        num_lead = len(shape) - len(row_shape)
        if num_lead < 0 or not self.placeholder.numel() or shape[num_lead:] != row_shape:
            return None
        if not _is_contiguous(row_shape, strides[num_lead:]) or offset % row_size:
            return None
        if self.placeholder.dtype != self.source.dtype:
            return None
        step_strides = []
        for stride in strides[:num_lead]:
            if stride % row_size:
                return None
            step_strides.append(stride // row_size)
        return Steps(shape[:num_lead], tuple(step_strides), offset // row_size)

    def read(self) -> Any:
        """Return the values: in new memory, or as a view of the raw tensor if there is one."""
        return self.source.read(self)

    def write(self, value: Any, index: Any = ...) -> None:
        """Change the values at an index, here and in all other views."""
        self.source.write(self, value, index)

    def __reduce__(self) -> tuple[Any, ...]:
        view = self.placeholder
        geometry = (tuple(view.shape), view.stride(), view.storage_offset(), view.dtype)
        return _restore_lazy, (self.source, *geometry)


def _restore_lazy(
    source: Source, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype
) -> LazyTensor:
    # Pickled tensors on the meta device lose their offset.
    nbytes = math.prod(source.shape) * source.dtype.itemsize
    memory = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="meta")
    return LazyTensor(source, memory.as_strided(shape, strides, offset))


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
