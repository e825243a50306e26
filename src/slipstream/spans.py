"""Find out which tensors share memory, by the addresses that they span."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from slipstream.errors import UnsupportedStateError

# Tensors that overlap are stored with what lies between them, up to this multiple of their size.
_MAX_WASTE = 2

# The memory that a tensor spans: the address of its storage, the addresses of its first byte and of the byte after its
# last one (second and fourth item), its position among all tensors, and whether it is contiguous. Sorted by address.
Span = tuple[int, int, int, int, bool]


def span_of(tensor: torch.Tensor, position: int) -> Span:
    """Return the memory that a tensor with elements spans."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    start = tensor.data_ptr()
    is_dense = tensor.is_contiguous()
    if is_dense:
        stop = start + tensor.nbytes
    else:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + (last + 1) * tensor.itemsize
    # Sharded training frees the memory of weights that way. Reading on would read foreign memory.
    if stop > address + storage.nbytes():
        raise UnsupportedStateError(
            f"a {tensor.dtype} tensor of shape {list(tensor.shape)} needs {stop - start} bytes, but its "
            f"storage was resized to {storage.nbytes()}; gather the state before saving it"
        )
    return address, start, position, stop, is_dense


def _overlapping(spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
    """Yield the groups of spans that overlap. The spans are sorted, so that each group is a slice of them."""
    first = 0
    group_stop = 0
    for number, span in enumerate(spans):
        # In the order of addresses, a span overlaps with the last group so far, or begins a new one.
        if number > first and (span[0] != spans[first][0] or span[1] >= group_stop):
            yield spans[first:number]
            first = number
            group_stop = 0
        group_stop = max(group_stop, span[3])
    if spans:
        yield spans[first:]


def find_groups(spans: list[Span], tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[Span]]:
    """Yield the tensors that have to be stored together, as groups of spans in the order of addresses.

    Tensors that overlap are a group, unless they have no element in common and much lies between them, such as two
    columns of a table: storing the table could take a thousand times as much.

    Args:
        spans: The spans of the tensors that have elements, in any order.
        tensors: All tensors.
    """
    spans.sort()
    for group in _overlapping(spans):
        if len(group) == 1 or _is_tied(group, tensors):
            yield group
            continue
        for span in group:
            yield [span]


def _is_tied(group: Sequence[Span], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors that overlap share elements, or waste little between them."""
    members = []
    stop = 0
    used_bytes = 0
    for _, _, position, member_stop, _ in group:
        members.append(tensors[position])
        stop = max(stop, member_stop)
        used_bytes += tensors[position].nbytes
    start = group[0][1]
    if stop - start <= _MAX_WASTE * used_bytes:
        return True
    return _share_elements(members, start, stop)


def _share_elements(tensors: Sequence[torch.Tensor], start: int, stop: int) -> bool:
    """Return whether any two tensors between two addresses share an element; True if that is hard to tell."""
    itemsize = tensors[0].itemsize
    taken = np.zeros((stop - start) // itemsize, np.bool_)
    for tensor in tensors:
        # An expanded tensor shares elements with itself.
        if tensor.itemsize != itemsize or 0 in tensor.stride():
            return True
        first = (tensor.data_ptr() - start) // itemsize
        strides = np.array(tensor.stride()) * taken.itemsize
        elements = np.lib.stride_tricks.as_strided(taken[first:], tensor.shape, strides.tolist())
        if elements.any():
            return True
        elements[...] = True
    return False


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy without holes."""
    tensor = tensor.detach()
    if tensor.itemsize == 1:
        # Torch cannot copy integers of fewer than eight bits, but it can copy the bytes that hold them.
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor.contiguous()
