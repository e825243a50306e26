"""Where torch meets bytes: dtypes, shared storage, and the memory that tensors really occupy.

A state dict is a set of *views*. Tied weights are two views of the same memory; a slice is a small view of a large one;
a channels-last weight is a permuted view. `plan` finds the distinct pieces of memory (*regions*) that a set of tensors
covers, each once and none larger than needed, and how every tensor sees its region, so that they come back tied, small
and strided as they were.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import UnsupportedStateError

_PLAIN = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.complex64: "<c8",
    torch.complex128: "<c16",
}


def carrier(dtype: torch.dtype) -> tuple[np.dtype[Any], bool]:
    """Return the NumPy dtype that carries a torch dtype, and whether its words are floats that NumPy does not know."""
    if dtype in _PLAIN:
        return np.dtype(_PLAIN[dtype]), False
    if dtype == torch.complex32:
        return np.dtype("<u4"), False
    return np.dtype(f"u{dtype.itemsize}"), dtype == torch.bfloat16


_KINDS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class View:
    """How a tensor sees a region: where it starts, in bytes, and its dtype, shape and strides."""

    region: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass
class Region:
    """A piece of memory to be stored: its address, its size, and the tensors that keep it alive."""

    address: int
    nbytes: int
    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its content, or bytes if views of several dtypes share it."""
        dtypes = {tensor.dtype for tensor in self.tensors}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape to store it in: that of its tensor if that is simply laid out, else flat."""
        first = self.tensors[0]
        if first.is_contiguous() and first.numel() * first.itemsize == self.nbytes and self.dtype == first.dtype:
            return tuple(first.shape)
        return (self.nbytes // self.dtype.itemsize,)


def check_storable(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
    """Raise `UnsupportedStateError` for tensors that are not a strided piece of memory."""
    if type(tensor) in _KINDS and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta:
        return
    problem = None
    if tensor.layout != torch.strided:
        problem = f"has layout {tensor.layout}"
    elif tensor.is_quantized:
        problem = "is quantized"
    elif tensor.device.type == "meta":
        problem = "is a meta tensor without data"
    else:
        problem = f"is a {type(tensor).__qualname__}"
    if problem:
        name = "/".join(path) or "the state"
        raise UnsupportedStateError(f"{name} {problem}, which cannot be stored; store a dense tensor, or save as .pt")


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gradient history and lazy conjugation, so that its memory is its content."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def extent(tensor: torch.Tensor) -> int:
    """Return how many bytes lie between the first and the last byte of a tensor, inclusive; 0 if it is empty."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def plan(tensors: Sequence[torch.Tensor]) -> tuple[list[Region], list[View]]:
    """Find the memory that tensors cover and how each sees it.

    The tensors must be settled and on one device. A tensor that is alone in its memory and has holes is gathered
    (copied), so that a small view of a large storage stays small.

    Returns:
        The regions, and one view per tensor; a view of an empty tensor has region -1.
    """
    regions: list[Region] = []
    home = [-1] * len(tensors)
    for index in sorted(range(len(tensors)), key=lambda index: tensors[index].data_ptr()):
        tensor = tensors[index]
        if not tensor.numel():
            continue
        start, last = tensor.data_ptr(), regions[-1] if regions else None
        if last and start < last.address + last.nbytes and _same_storage(last.tensors[0], tensor):
            last.nbytes = max(last.nbytes, start + extent(tensor) - last.address)
            last.tensors.append(tensor)
        else:
            regions.append(Region(start, extent(tensor), [tensor]))
        home[index] = len(regions) - 1
    regions = [_tidy(region) for region in regions]
    views = []
    for tensor, region in zip(tensors, home, strict=True):
        seen = regions[region].tensors[0] if region >= 0 and len(regions[region].tensors) == 1 else tensor
        offset = seen.data_ptr() - regions[region].address if region >= 0 else 0
        views.append(View(region, offset, seen.dtype, tuple(seen.shape), seen.stride()))
    return regions, views


def _tidy(region: Region) -> Region:
    first = region.tensors[0]
    if len(region.tensors) == 1 and region.nbytes > first.numel() * first.itemsize:
        gathered = first.contiguous()
        return Region(gathered.data_ptr(), extent(gathered), [gathered])
    if len({tensor.dtype for tensor in region.tensors}) > 1:
        # Views of several dtypes: start where each of them can count in its own elements.
        slack = (region.address - first.untyped_storage().data_ptr()) % 16
        return Region(region.address - slack, region.nbytes + slack, region.tensors)
    return region


def _same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses on this thread alone, without the GIL; torch would use several threads."""
    ctypes.memmove(target, source, nbytes)


def storage_of(memory: NDArray[np.uint8]) -> torch.UntypedStorage:
    """Return a torch storage of exactly this memory, which it keeps alive."""
    tensor = torch.frombuffer(memory, dtype=torch.uint8) if memory.size else torch.empty(0, device="cpu")
    return tensor.untyped_storage()


def view_storage(storage: torch.UntypedStorage, view: View) -> torch.Tensor:
    """Return a tensor that sees a storage; tensors of one storage are tied."""
    tensor = torch.empty(0, dtype=view.dtype, device="cpu")
    return tensor.set_(storage, view.offset // view.dtype.itemsize, view.shape, view.stride)


def array_of(memory: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> NDArray[Any]:
    """View raw memory as the NumPy array that carries a tensor of this dtype and shape."""
    kind, _ = carrier(dtype)
    return memory.view(kind).reshape(shape if math.prod(shape) * kind.itemsize == memory.nbytes else -1)
