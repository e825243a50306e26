"""Where torch meets bytes: the memory behind tensors, and values of torch.

A state dict is a set of *views*. Tied weights are two views of the same memory; a slice is a small view of a large one;
a channels-last weight is a permuted view. `Regions` finds the distinct pieces of memory that a set of tensors covers,
each once and none larger than needed, and how every tensor sees its piece. So tensors come back tied, small and strided
as they were.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import FormatVersionError
from slipstream.schema.dtypes import DTYPES, DType
from slipstream.schema.structure import contiguous_strides
from slipstream.schema.values import TorchValues
from slipstream.spans import Span, find_groups, gather, span_of
from slipstream.text import install_hint

_HOST = torch.device("cpu")
_ALIGNMENT = 64
# Large copies are cut into pieces, between which other threads can run.
_PIECE_BYTES = 4 << 20
# Smaller pieces are copied without releasing the GIL. Another thread could take it in between, and this one would wait
# 5 ms to get it back, for each of thousands of small tensors.
_MIN_RELEASE_BYTES = 64 << 10

# Like `ctypes.memmove`, but keeps the GIL.
_copy_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)

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

    def tensordict(
        self, members: dict[str, Any], batch_size: list[int], names: list[str | None] | None, device: str | None
    ) -> Any:
        make = import_tensordict().TensorDict
        target = None
        # A file is read on the CPU, wherever the TensorDict was. If its members are elsewhere, they were moved.
        if device is not None:
            target = torch.device("cpu")
            for member in members.values():
                target = getattr(member, "device", None) or target
        # A TensorDict and those inside it take over each other's names. So they are set at last, from the outside in.
        nested = list(self._take_names(members, ()))
        try:
            tensordict = make(members, batch_size=batch_size, device=target)
            tensordict.names = names
            for path, nested_names in nested:
                tensordict.get(path).names = nested_names
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"its members do not make a TensorDict of {batch_size} ({error})") from error
        return tensordict

    def _take_names(self, members: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str | None]]]:
        """Remove the names of TensorDicts among some members, and yield them with their paths, from the outside in."""
        kind = import_tensordict().TensorDict
        for key, member in members.items():
            if type(member) is kind:
                yield (*path, key), list(member.names)
                yield from self._take_names(member, (*path, key))
                member.names = None


TORCH = _RealValues()
"""Makes `slipstream.schema.unflatten` build real values of torch."""


class View(NamedTuple):
    """How a tensor sees a region: which, from which byte on, and its dtype, shape and strides (in elements)."""

    region: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Region(NamedTuple):
    """A piece of memory that tensors cover.

    Attributes:
        holder: What keeps the memory alive: the storage that it is part of, or a buffer on the host.
        start: Where it begins, in bytes from the start of the storage or buffer.
        nbytes: Its size.
        dtype: The dtype of its content, or uint8 if views of several dtypes share it.
    """

    holder: torch.UntypedStorage | NDArray[np.uint8]
    start: int
    nbytes: int
    dtype: torch.dtype

    def memory(self) -> torch.Tensor:
        """Return its bytes as a flat tensor on their device. Part of a buffer gets a separate storage."""
        if isinstance(self.holder, torch.UntypedStorage):
            memory = torch.empty(0, dtype=torch.uint8, device=self.holder.device)
            return memory.set_(self.holder, self.start, (self.nbytes,), (1,))
        # Torch makes no tensor from a buffer of no bytes.
        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self.holder[self.start : self.start + self.nbytes], dtype=torch.uint8)

    def content(self) -> NDArray[np.uint8]:
        """Return its bytes as an array. They must be on the host."""
        if isinstance(self.holder, torch.UntypedStorage):
            return self.memory().numpy()
        return self.holder[self.start : self.start + self.nbytes]


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
        """Find the memory that tensors cover; takes about 3 us per tensor.

        Copies nothing but tensors with holes that share no element with others: these are gathered, so that a small
        view of a large storage stays small. Lazy conjugation and negation are resolved, which copies as well. The
        regions keep the memory that the tensors have now, even if a tensor is given other memory later
        (``x.data = y``).

        Args:
            tensors: Strided tensors on one device.

        Raises:
            UnsupportedStateError: If the storage of a tensor was resized to less than the tensor needs.
        """
        resolved: list[torch.Tensor] = []
        spans: list[Span] = []
        for position, tensor in enumerate(tensors):
            # Not `resolve` for all: detaching takes as long as everything else here.
            if tensor.is_neg() or tensor.is_conj():
                tensor = resolve(tensor)  # noqa: PLW2901 - the tensor that is stored
            resolved.append(tensor)
            if tensor.numel():
                spans.append(span_of(tensor, position))
        pieces: list[Region] = []
        region_of_tensor = [-1] * len(resolved)
        offsets = [0] * len(resolved)
        for group in find_groups(spans, resolved):
            address, start, position, stop, is_dense = group[0]
            if len(group) > 1:
                piece = _cover(group, resolved)
                for _, member_start, member, _, _ in group:
                    offsets[member] = member_start - address - piece.start
                    region_of_tensor[member] = len(pieces)
            else:
                tensor = resolved[position]
                # A tensor alone in its memory may have holes: they are not worth storing.
                if not is_dense and stop - start > tensor.nbytes:
                    tensor = gather(tensor)
                    resolved[position] = tensor
                    address, start, _, stop, _ = span_of(tensor, position)
                piece = Region(tensor.untyped_storage(), start - address, stop - start, tensor.dtype)
                region_of_tensor[position] = len(pieces)
            pieces.append(piece)
        views = []
        for position, tensor in enumerate(resolved):
            region = region_of_tensor[position]
            views.append(View(region, offsets[position], tensor.dtype, tensor.shape, tensor.stride()))
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

    def copy_into(
        self, buffer: NDArray[np.uint8], stream: Any = None, on_copied: Callable[[int], object] | None = None
    ) -> Regions:
        """Copy the memory into a buffer on the host, and return regions that refer to the copy.

        Copies on the calling thread alone, and releases the GIL while it copies large pieces.

        Args:
            buffer: At least `buffer_bytes` bytes.
            stream: A CUDA stream to copy on, asynchronously; the buffer should be pinned. None blocks.
            on_copied: Called with the number of each piece as soon as it is copied, or queued on the stream.
        """
        copies = []
        start = 0
        address = buffer.ctypes.data
        for number, piece in enumerate(self.pieces):
            holder, piece_start, nbytes, dtype = piece
            copy = Region(buffer, start, nbytes, dtype)
            if isinstance(holder, torch.UntypedStorage) and holder.device == _HOST:
                _copy_on_host(address + start, holder.data_ptr() + piece_start, nbytes)
            else:
                _copy_from_device(copy.memory(), piece.memory(), stream)
            if on_copied is not None:
                on_copied(number)
            copies.append(copy)
            start += _aligned(nbytes)
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


def region_of(array: NDArray[Any]) -> Region:
    """Return the memory of a contiguous array as a region, which keeps it alive."""
    return Region(array.reshape(-1).view(np.uint8), 0, array.nbytes, torch.uint8)


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses on this thread alone, large pieces without the GIL; torch would use more threads."""
    if nbytes < _MIN_RELEASE_BYTES:
        _copy_small(target, source, nbytes)
    else:
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


def _cover(group: Sequence[Span], tensors: Sequence[torch.Tensor]) -> Region:
    """Return the region that several overlapping tensors cover."""
    address, first_start, position, _, _ = group[0]
    first = tensors[position]
    start = first_start - address
    stop = start
    dtype = first.dtype
    is_mixed = False
    for _, _, member, member_stop, _ in group:
        stop = max(stop, member_stop - address)
        is_mixed |= tensors[member].dtype != dtype
    if is_mixed:
        # Offsets are counted in elements of each view's dtype: 16 is a multiple of all element sizes.
        start -= start % 16
        dtype = torch.uint8
    return Region(first.untyped_storage(), start, stop - start, dtype)


def _see(memory: torch.Tensor, view: View) -> torch.Tensor:
    """Return a tensor that sees the memory of a region."""
    offset = (memory.storage_offset() + view.offset) // view.dtype.itemsize
    tensor = torch.empty(0, dtype=view.dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), offset, view.shape, view.stride)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _copy_on_host(target: int, source: int, nbytes: int) -> None:
    if nbytes <= _PIECE_BYTES:
        copy_memory(target, source, nbytes)
        return
    for offset in range(0, nbytes, _PIECE_BYTES):
        copy_memory(target + offset, source + offset, min(_PIECE_BYTES, nbytes - offset))


def _copy_from_device(target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
    if stream is None:
        target.copy_(source)
        return
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        # Keeps the allocator from reusing the memory before the copy is done.
        source.record_stream(stream)
