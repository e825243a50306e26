"""Where torch meets bytes: the memory behind tensors, and values of torch.

A state dict is a set of *views*. Tied weights are two views of the same memory; a slice is a small view of a large one;
a channels-last weight is a permuted view. `Regions` finds the distinct pieces of memory that a set of tensors covers,
each once and none larger than needed, and how every tensor sees its piece. So tensors come back tied, small and strided
as they were.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import FormatVersionError, UnsupportedStateError
from slipstream.schema.dtypes import DTYPES, DType
from slipstream.schema.structure import contiguous_strides
from slipstream.schema.values import TorchValues
from slipstream.store.index import MAX_AXES
from slipstream.text import install_hint

_ALIGNMENT = 64
# Large copies are cut into pieces, between which other threads can run.
_PIECE_BYTES = 4 << 20

# The dtypes that this version of torch has. Never `getattr` with a name from a file: it can import modules.
_TORCH_DTYPES: dict[str, torch.dtype] = {}
_INFO: dict[torch.dtype, DType] = {}
for _name, _info in DTYPES.items():
    if hasattr(torch, _name):
        _TORCH_DTYPES[_name] = getattr(torch, _name)
        _INFO[_TORCH_DTYPES[_name]] = _info


def import_tensordict() -> Any:
    """Return the package tensordict, which only states with TensorDicts need.

    Raises:
        ImportError: If it is not installed. Names the extra that contains it.
    """
    try:
        import tensordict  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            f"TensorDicts need tensordict, which is not installed: {install_hint('train')}, or tensordict by itself"
        ) from error
    return tensordict


def dtype_info(dtype: torch.dtype) -> DType:
    """Return the name of a dtype and how NumPy carries it."""
    return _INFO[dtype]


class _RealValues(TorchValues):
    """Builds real values of torch."""

    def dtype(self, name: str) -> torch.dtype:
        if name not in _TORCH_DTYPES:
            raise FormatVersionError(f"torch {torch.__version__} has no dtype {name!r}; install a newer torch")
        return _TORCH_DTYPES[name]

    def device(self, name: str) -> torch.device:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"torch has no device {name!r}") from error
        # Torch keeps eight bits of the index.
        if str(device) != name:
            raise ValueError(f"torch takes the device {name!r} for {str(device)!r}")
        return device

    def size(self, sizes: list[int]) -> torch.Size:
        return torch.Size(sizes)

    def tensordict(self, members: dict[str, Any], batch_size: list[int]) -> Any:
        make = import_tensordict().TensorDict
        try:
            return make(members, batch_size=batch_size)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"its members do not make a TensorDict of {batch_size} ({error})") from error


TORCH = _RealValues()
"""Makes `slipstream.schema.unflatten` build real values of torch."""


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor sees a region: which, from which byte on, and its dtype, shape and strides (in elements)."""

    region: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of memory that tensors cover.

    Attributes:
        holder: What keeps the memory alive: a tensor whose storage it is part of, or a buffer on the host.
        start: Where it begins, in bytes from the start of the storage or buffer.
        nbytes: Its size.
        dtype: The dtype of its content, or uint8 if views of several dtypes share it.
        shape: The shape to store it in: that of its first tensor if that covers it in order, else flat.
        num_views: How many tensors see it.
    """

    holder: torch.Tensor | NDArray[np.uint8]
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_views: int

    def memory(self) -> torch.Tensor:
        """Return its bytes as a flat tensor on their device. Part of a buffer gets a separate storage."""
        if isinstance(self.holder, torch.Tensor):
            memory = torch.empty(0, dtype=torch.uint8, device=self.holder.device)
            return memory.set_(self.holder.untyped_storage(), self.start, (self.nbytes,), (1,))
        # Torch makes no tensor from a buffer of no bytes.
        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self.holder[self.start : self.start + self.nbytes], dtype=torch.uint8)

    def content(self) -> NDArray[np.uint8]:
        """Return its bytes as an array. They must be on the host."""
        if isinstance(self.holder, torch.Tensor):
            return self.memory().numpy()
        return self.holder[self.start : self.start + self.nbytes]

    def array(self) -> NDArray[Any]:
        """Return it as the NumPy array that carries its dtype. It must be on the host."""
        return self.content().view(dtype_info(self.dtype).carrier).reshape(self.shape)


@dataclass(frozen=True)
class Regions:
    """The distinct memory behind tensors, each piece once, and how every tensor sees it.

    Attributes:
        pieces: The memory.
        views: One view per tensor, in their order. The view of an empty tensor has region -1.
    """

    pieces: list[Region]
    views: list[View]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Regions:
        """Find the memory that tensors cover; takes time linear in their number, but for a sort.

        Copies nothing but tensors with holes that are alone in their memory: these are gathered, so that a small view
        of a large storage stays small. Lazy conjugation and negation are resolved, which copies as well.

        Args:
            tensors: Strided tensors on one device.
        """
        resolved = list(map(resolve, tensors))
        pieces: list[Region] = []
        region_of_tensor = [-1] * len(tensors)
        for group in _overlapping(resolved):
            # A tensor alone in its memory may have holes: they are not worth storing.
            if len(group) == 1:
                resolved[group[0]] = _gather(resolved[group[0]])
            for position in group:
                region_of_tensor[position] = len(pieces)
            pieces.append(_cover([resolved[position] for position in group]))
        views = []
        for tensor, region in zip(resolved, region_of_tensor, strict=True):
            offset = 0
            # In most regions there is one tensor, which begins where the region begins.
            if region >= 0 and pieces[region].num_views > 1:
                offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr() - pieces[region].start
            views.append(View(region, offset, tensor.dtype, tuple(tensor.shape), tensor.stride()))
        return cls(pieces, views)

    @classmethod
    def join(cls, parts: Iterable[tuple[Sequence[int], Regions]], num_tensors: int) -> Regions:
        """Combine the regions of several groups of tensors that share no memory.

        Args:
            parts: For every group, the positions of its tensors among all tensors, and its regions.
            num_tensors: How many tensors there are in all groups.
        """
        pieces: list[Region] = []
        views: list[Any] = [None] * num_tensors
        for positions, part in parts:
            for position, view in zip(positions, part.views, strict=True):
                region = view.region
                if region >= 0:
                    region += len(pieces)
                views[position] = View(region, view.offset, view.dtype, view.shape, view.stride)
            pieces += part.pieces
        return cls(pieces, views)

    @property
    def nbytes(self) -> int:
        """Size of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def buffer_bytes(self) -> int:
        """How large a buffer `copy_into` needs: every piece begins at a multiple of 64 bytes."""
        return sum(_aligned(piece.nbytes) for piece in self.pieces)

    def copy_into(self, buffer: NDArray[np.uint8], stream: Any = None) -> Regions:
        """Copy the memory into a buffer on the host, and return regions that refer to the copy.

        Copies on the calling thread alone, and releases the GIL while it copies.

        Args:
            buffer: At least `buffer_bytes` bytes.
            stream: A CUDA stream to copy on, asynchronously; the buffer should be pinned. None blocks.
        """
        copies = []
        start = 0
        address = buffer.ctypes.data
        for piece in self.pieces:
            copy = Region(buffer, start, piece.nbytes, piece.dtype, piece.shape, piece.num_views)
            if isinstance(piece.holder, torch.Tensor) and piece.holder.is_cpu:
                source = piece.holder.untyped_storage().data_ptr() + piece.start
                _copy_on_host(address + start, source, piece.nbytes)
            else:
                _copy_from_device(copy.memory(), piece.memory(), stream)
            copies.append(copy)
            start += _aligned(piece.nbytes)
        return Regions(copies, self.views)

    def tensors(self) -> list[torch.Tensor]:
        """Return tensors that see the memory, tied and strided as the originals."""
        memories = [piece.memory() for piece in self.pieces]
        found = []
        for view in self.views:
            memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            # An empty tensor has no region.
            if view.region >= 0:
                memory = memories[view.region]
            found.append(_see(memory, view))
        return found

    def scalar(self, position: int) -> torch.Tensor:
        """Return one tensor, such as a step counter, without building the others. It must have elements."""
        view = self.views[position]
        return _see(self.pieces[view.region].memory(), view)


def region_of(array: NDArray[Any]) -> Region:
    """Return the memory of a contiguous array as a region, which keeps it alive."""
    return Region(array.reshape(-1).view(np.uint8), 0, array.nbytes, torch.uint8, (array.nbytes,), num_views=1)


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses on this thread alone, without the GIL; torch would use several threads."""
    ctypes.memmove(target, source, nbytes)


def tensor_of(array: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor that shares the memory of a contiguous array, which carries the dtype of that name."""
    view = View(0, 0, TORCH.dtype(dtype), shape, contiguous_strides(shape))
    return _see(region_of(array).memory(), view)


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the array that shares the memory of a tensor on the CPU, with the same strides and its carrier's dtype."""
    carrier = dtype_info(tensor.dtype).carrier
    # Torch hands dtypes that NumPy lacks to NumPy only as integers of the same size.
    if carrier.kind == "u" and tensor.dtype != torch.uint8:
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        return tensor.view(words).numpy().view(carrier)
    return tensor.numpy()


def with_flags(tensor: torch.Tensor, node: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor as the node in its structure says: as a parameter, or requiring gradients."""
    requires_grad = bool(node.get("requires_grad"))
    if node.get("parameter"):
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def resolve(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gradient history and lazy conjugation, so that its memory is its content."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the tensors that overlap in memory, by position; tensors without elements are in no group."""
    spans = []
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            start = tensor.data_ptr()
            stop = start + _extent(tensor)
            # Sharded training frees the memory of weights that way. Reading on would read foreign memory.
            if stop > address + storage.nbytes():
                raise UnsupportedStateError(
                    f"a {tensor.dtype} tensor of shape {list(tensor.shape)} needs {stop - start} bytes, but its "
                    f"storage was resized to {storage.nbytes()}; gather the state before saving it"
                )
            spans.append((address, start, position, stop))
    # In the order of addresses, a tensor overlaps with the last group so far, or begins a new one.
    spans.sort()
    groups: list[list[int]] = []
    group_address = 0
    group_stop = 0
    for address, start, position, stop in spans:
        if address == group_address and start < group_stop:
            groups[-1].append(position)
            group_stop = max(group_stop, stop)
        else:
            groups.append([position])
            group_address = address
            group_stop = stop
    return groups


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor that is not empty, inclusive."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without holes. One that repeats its elements stays as it is: it is smaller that way."""
    if _extent(tensor) <= tensor.nbytes:
        return tensor
    if tensor.itemsize == 1:
        # Torch cannot copy integers of fewer than eight bits, but it can copy the bytes that hold them.
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor.contiguous()


def _cover(tensors: Sequence[torch.Tensor]) -> Region:
    """Return the region that overlapping tensors cover; they are in the order of their addresses."""
    first = tensors[0]
    address = first.untyped_storage().data_ptr()
    start = first.data_ptr() - address
    stop = start
    is_mixed = False
    for tensor in tensors:
        stop = max(stop, tensor.data_ptr() - address + _extent(tensor))
        is_mixed |= tensor.dtype != first.dtype
    dtype = first.dtype
    if is_mixed:
        # Offsets are counted in elements of each view's dtype: 16 is a multiple of all element sizes.
        start -= start % 16
        dtype = torch.uint8
    shape: tuple[int, ...] = ((stop - start) // dtype.itemsize,)
    # Containers allow no more than `MAX_AXES`: arrays of more axes are stored flat.
    if dtype == first.dtype and first.is_contiguous() and first.nbytes == stop - start and first.ndim <= MAX_AXES:
        shape = tuple(first.shape)
    return Region(first, start, stop - start, dtype, shape, len(tensors))


def _see(memory: torch.Tensor, view: View) -> torch.Tensor:
    """Return a tensor that sees the memory of a region."""
    offset = (memory.storage_offset() + view.offset) // view.dtype.itemsize
    tensor = torch.empty(0, dtype=view.dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), offset, view.shape, view.stride)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _copy_on_host(target: int, source: int, nbytes: int) -> None:
    for start in range(0, nbytes, _PIECE_BYTES):
        copy_memory(target + start, source + start, min(_PIECE_BYTES, nbytes - start))


def _copy_from_device(target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
    if stream is None:
        target.copy_(source)
        return
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        # Keeps the allocator from reusing the memory before the copy is done.
        source.record_stream(stream)
