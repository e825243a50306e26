"""Send nested data through JSON and bytes, as a file does, and compare it bit for bit."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from slipstream.schema.dtypes import parse_numpy_dtype
from slipstream.schema.flatten import flatten
from slipstream.schema.structure import leaves_of
from slipstream.schema.unflatten import unflatten
from slipstream.tensors import TORCH, with_flags


def bits(value: Any) -> Any:  # noqa: C901 - a case for every type
    """Turn nested data into something that compares bit for bit, types and the order of keys included."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return (kind, value.dtype, tuple(value.shape), value.requires_grad, tensor_bytes(value))
    if isinstance(value, TensorDict):
        members = [(key, bits(member)) for key, member in value.items()]
        return (kind, members, value.batch_size, value.names, value.device)
    if isinstance(value, np.ndarray):
        return (kind, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return (kind, value.dtype.str, value.tobytes())
    if isinstance(value, dict):
        attributes = bits(getattr(value, "__dict__", {})) if kind is not dict else None
        return (kind, [(bits(key), bits(member)) for key, member in value.items()], attributes)
    if isinstance(value, (list, tuple)):
        return (kind, [bits(member) for member in value])
    if isinstance(value, (set, frozenset)):
        return (kind, sorted(repr(bits(member)) for member in value))
    # Python does not print very long integers in decimal digits.
    if isinstance(value, int):
        return (kind, hex(value))
    if isinstance(value, float):
        return (kind, struct.pack("<d", value))
    if isinstance(value, complex):
        return (kind, bits(value.real), bits(value.imag))
    if isinstance(value, slice):
        return (kind, bits([value.start, value.stop, value.step]))
    if isinstance(value, Path):
        return (kind, str(value))
    return (kind, value)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor in C order."""
    if not tensor.numel():
        return b""
    dense = tensor.detach().resolve_conj().resolve_neg()
    # Torch cannot copy elements of fewer than eight bits, but it can copy the bytes that hold them.
    if dense.itemsize == 1:
        dense = dense.view(torch.uint8)
    return bytes(dense.contiguous().reshape(-1).view(torch.uint8).numpy())


def through_json(structure: Any) -> Any:
    """Return a structure as a file would give it back."""
    return json.loads(json.dumps(structure, allow_nan=False))


def read_leaf(node: Any, content: bytes) -> Any:
    """Rebuild a tensor or an array from its node and its bytes."""
    if node["$"] == "array":
        return np.frombuffer(bytearray(content), parse_numpy_dtype(node["dtype"])).reshape(node["shape"])
    dtype = TORCH.dtype(node["dtype"])
    tensor = torch.empty(node["shape"], dtype=dtype)
    if content:
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(node["shape"])
    return with_flags(tensor, node)


def round_trip(value: Any) -> Any:
    """Return nested data as a file would give it back: nothing but JSON and bytes goes through."""
    tree = flatten(value)
    contents = []
    for region, ((_, node), leaf) in enumerate(zip(tree.nodes, tree.leaves, strict=True)):
        contents.append(leaf.tobytes() if isinstance(leaf, np.ndarray) else tensor_bytes(leaf))
        if contents[-1]:
            node["region"] = region
    structure = through_json(tree.structure)
    nodes = [node for _, node in leaves_of(structure)]
    leaves = list(map(read_leaf, nodes, contents))
    return unflatten(structure, leaves, torch=TORCH)
