"""Build tensors from what a file claims about them. Every argument is checked, because anybody can write a file.

Sizes and strides stay inside the storage, quantized tensors have as many scales as channels, and the indices of sparse
tensors are validated. The signatures are those of the functions that ``torch.save`` names, after the allowance. Hooks
and Python attributes are ignored.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from slipstream.checkpoint.portable.inert import Allowance, Constructor, Storage, Symbol
from slipstream.schema.nodes import MAX_DEPTH
from slipstream.schema.structure import MAX_AXES
from slipstream.schema.values import MAX_INDEX
from slipstream.tensors import TORCH, dtype_info, import_tensordict

SPARSE_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""The layouts of sparse tensors besides COO."""

# Quantized tensors whose elements take whole bytes.
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32)
# What looking at a nested TensorDict counts as. Building one takes a hundred times as long as a list.
_TENSORDICT_BYTES = 1 << 13
_TENSORDICT_FIELDS = frozenset({"_tensordict", "_batch_size", "_device", "_td_dim_names"})
# Whether it is locked, and what it caches: neither is part of its value.
_TENSORDICT_FLAGS = frozenset({"_is_locked", "_is_shared", "_is_memmap", "_locked_schema", "_has_mps_val"})


def require_type(value: Any, *kinds: type) -> Any:
    """Return a value whose type is exactly one of these. Raises `TypeError` otherwise."""
    if type(value) not in kinds:
        raise TypeError(f"got a {type(value).__qualname__}, expected a {kinds[0].__qualname__}")
    return value


def check_sizes(values: Any) -> tuple[int, ...]:
    """Check a tuple of sizes, strides or an offset."""
    require_type(values, tuple, torch.Size)
    if len(values) > MAX_AXES:
        raise ValueError(f"a tensor has {len(values)} axes, at most {MAX_AXES} are allowed")
    for value in values:
        if not 0 <= require_type(value, int) <= MAX_INDEX:
            raise ValueError(f"{value} is not a size")
    return tuple(values)


def check_shape(values: Any) -> tuple[int, ...]:
    """Check a shape. The number of elements must be one that torch can count; empty axes must not hide the others."""
    shape = check_sizes(values)
    if math.prod(max(size, 1) for size in shape) > MAX_INDEX:
        raise ValueError(f"a tensor of shape {str(shape)[:80]} is too large")
    return shape


def _see(storage: Any, dtype: torch.dtype, offset: Any, shape: Any, strides: Any) -> torch.Tensor:
    """Return a tensor that sees a part of a storage, after checking that it stays inside."""
    memory = require_type(storage, Storage).memory
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    return tensor.set_(memory, *_check_view(storage, dtype, offset, shape, strides))


def _check_view(
    storage: Any, dtype: torch.dtype, offset: Any, shape: Any, strides: Any
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    (start,) = check_sizes((offset,))
    sizes = check_shape(shape)
    steps = check_sizes(strides)
    # The offset of the last element, in elements.
    last = start
    for size, step in zip(sizes, steps, strict=True):
        last += (size - 1) * step
    memory_bytes = require_type(storage, Storage).memory.nbytes()
    # A tensor without elements needs no memory, and may claim to begin anywhere.
    if 0 in sizes:
        return 0, sizes, steps
    # Torch would enlarge a storage that is too small.
    if (last + 1) * dtype.itemsize > memory_bytes:
        raise ValueError(f"a tensor of shape {sizes} reaches beyond the {memory_bytes} bytes of its storage")
    return start, sizes, steps


def _with_flags(tensor: torch.Tensor, requires_grad: Any, bits: Any = None) -> torch.Tensor:
    """Set what a tensor has besides its elements. Hooks are never loaded."""
    for name in require_type(bits or {}, dict):
        if name == "conj" and tensor.is_complex():
            tensor = tensor.conj()
        elif name == "neg":
            tensor = torch._neg_view(tensor)
        else:
            raise ValueError(f"a tensor has the flag {str(name)[:40]!r}")
    return tensor.requires_grad_(require_type(requires_grad, bool))


def _plain_dtype(dtype: Any) -> torch.dtype:
    """Check a dtype of a tensor that is not quantized: without scale and zero point it would fail at its first use."""
    if dtype_info(require_type(dtype, torch.dtype)).is_quantized:
        raise ValueError(f"a plain tensor has dtype {dtype}")
    plain: torch.dtype = dtype
    return plain


def build_tensor(_: Allowance, storage: Any, offset: Any, shape: Any, strides: Any) -> torch.Tensor:
    """Build a dense tensor, as torch wrote it before 2018."""
    return _see(storage, _plain_dtype(require_type(storage, Storage).dtype), offset, shape, strides)


def build_tensor_v2(
    allowance: Allowance,
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    _hooks: Any,
    bits: Any = None,
) -> torch.Tensor:
    """Build a dense tensor whose storage has a dtype."""
    return _with_flags(build_tensor(allowance, storage, offset, shape, strides), requires_grad, bits)


def build_tensor_v3(
    _: Allowance,
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    _hooks: Any,
    dtype: Any,
    bits: Any = None,
) -> torch.Tensor:
    """Build a dense tensor of a dtype that storages do not have, such as ``torch.uint16``."""
    return _with_flags(_see(storage, _plain_dtype(dtype), offset, shape, strides), requires_grad, bits)


def build_parameter(_: Allowance, data: Any, requires_grad: Any, _hooks: Any) -> torch.nn.Parameter:
    """Build a parameter."""
    return torch.nn.Parameter(require_type(data, torch.Tensor), require_type(requires_grad, bool))


def build_parameter_with_attributes(
    allowance: Allowance, data: Any, requires_grad: Any, hooks: Any, _attributes: Any
) -> torch.nn.Parameter:
    """Build a parameter that had Python attributes, which are not part of its value."""
    return build_parameter(allowance, data, requires_grad, hooks)


def build_tensor_with_attributes(
    allowance: Allowance, build: Any, kind: Any, arguments: Any, _attributes: Any
) -> torch.Tensor:
    """Build a tensor that had Python attributes, such as a ``torch.nn.Buffer``. Subclasses are not in the table."""
    # It must not build itself: a file could nest that to any depth.
    build_plain = require_type(build, Constructor).build
    if require_type(kind, Symbol).meaning is not torch.Tensor or build_plain is build_tensor_with_attributes:
        raise ValueError("attributes are set on something else than a tensor")
    tensor: torch.Tensor = require_type(build_plain(allowance, *arguments), torch.Tensor)
    return tensor


def build_meta_tensor(_: Allowance, dtype: Any, shape: Any, strides: Any, requires_grad: Any) -> torch.Tensor:
    """Build a tensor without memory."""
    # No memory is allocated, so that any size is harmless.
    tensor = torch.empty_strided(check_shape(shape), check_sizes(strides), dtype=_plain_dtype(dtype), device="meta")
    return _with_flags(tensor, requires_grad)


def build_quantized_tensor(
    allowance: Allowance,
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    quantizer: Any,
    requires_grad: Any,
    _hooks: Any,
) -> torch.Tensor:
    """Build a tensor that is quantized as a whole or per channel."""
    dtype = require_type(storage, Storage).dtype
    if dtype not in _QUANTIZED:
        raise ValueError(f"a quantized tensor has dtype {dtype}")
    view = _check_view(storage, dtype, offset, shape, strides)
    sizes = view[1]
    # The tensor gets memory before it sees the storage, and elements may repeat, so count all of them.
    allowance.charge(math.prod(sizes) * dtype.itemsize)
    # Torch has two schemes: one scale for all elements, or one for every index along an axis.
    scheme, *parameters = require_type(quantizer, tuple)
    device = storage.memory.device
    if scheme is torch.per_tensor_affine:
        scale, zero_point = parameters
        tensor = torch._empty_affine_quantized(
            sizes,
            scale=require_type(scale, float),
            zero_point=require_type(zero_point, int),
            dtype=dtype,
            device=device,
        )
    elif scheme is torch.per_channel_affine:
        scales, zero_points, axis = parameters
        _check_channels(scales, torch.float64, sizes, axis)
        _check_channels(zero_points, torch.int64, sizes, axis)
        tensor = torch._empty_per_channel_affine_quantized(
            sizes, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=device
        )
    else:
        raise ValueError(f"a tensor is quantized with {str(scheme)[:40]}")
    return _with_flags(tensor.set_(storage.memory, *view), requires_grad)


def _check_channels(values: Any, dtype: torch.dtype, shape: tuple[int, ...], axis: Any) -> None:
    """Check the scales or zero points of a tensor: torch does not compare their number with the shape."""
    if not 0 <= require_type(axis, int) < len(shape):
        raise ValueError(f"a tensor of shape {shape} is quantized along axis {axis}")
    if require_type(values, torch.Tensor).shape != (shape[axis],) or values.dtype != dtype:
        raise ValueError(f"a quantized tensor of shape {shape} has parameters of shape {tuple(values.shape)}")


def build_sparse_tensor(allowance: Allowance, layout: Any, parts: Any) -> torch.Tensor:
    """Build a sparse tensor of any layout."""
    tensors = require_type(parts, tuple)
    # The validators compute with the indices.
    for tensor in tensors[:2]:
        allowance.charge(require_type(tensor, torch.Tensor).nbytes)
    # Validate and build separately: `check_invariants=True` changes a setting of all threads while it constructs.
    if layout is torch.sparse_coo:
        indices, values, size, is_coalesced = tensors
        shape = check_shape(size)
        options = {"dtype": require_type(values, torch.Tensor).dtype, "device": values.device}
        torch._validate_sparse_coo_tensor_args(indices, values, shape, require_type(is_coalesced, bool))
        make_coo = torch.ops.aten._sparse_coo_tensor_unsafe
        return cast("torch.Tensor", make_coo(indices, values, shape, is_coalesced=is_coalesced, **options))
    if layout not in SPARSE_COMPRESSED:
        raise ValueError(f"a sparse tensor has layout {str(layout)[:40]}")
    compressed, plain, values, size = tensors
    shape = check_shape(size)
    options = {"dtype": require_type(values, torch.Tensor).dtype, "device": values.device}
    torch._validate_sparse_compressed_tensor_args(compressed, plain, values, shape, layout)
    make_compressed = torch.ops.aten._sparse_compressed_tensor_unsafe
    return cast("torch.Tensor", make_compressed(compressed, plain, values, shape, layout=layout, **options))


def build_tensordict(allowance: Allowance, kind: Any, state: Any) -> Any:
    """Build a TensorDict. If it had a device, it gets the device that its tensors were loaded to."""
    # An attribute of another version may change the meaning of the others.
    unknown = require_type(state, dict).keys() - _TENSORDICT_FIELDS - _TENSORDICT_FLAGS
    if require_type(kind, Symbol).meaning != "TensorDict" or unknown:
        raise ValueError(f"a TensorDict has the attributes {sorted(map(str, unknown))}")
    members = require_type(state["_tensordict"], dict)
    _check_members(allowance, members, 0)
    names = require_type(state["_td_dim_names"], type(None), list)
    for name in names or ():
        require_type(name, str, type(None))
    device = require_type(state["_device"], type(None), torch.device)
    if device is not None:
        device = str(device)
    return TORCH.tensordict(dict(members), list(check_shape(state["_batch_size"])), names, device)


def _check_members(allowance: Allowance, members: Any, depth: int) -> None:
    """Check the members of a TensorDict, nested ones included.

    A TensorDict looks at all that is inside it when it is built. If a nested one occurs twice at every level, that
    takes exponential time: charging every visit bounds it.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"TensorDicts are nested more than {MAX_DEPTH} levels deep")
    kind = import_tensordict().TensorDict
    for name, member in members.items():
        require_type(name, str)
        require_type(member, torch.Tensor, torch.nn.Parameter, kind)
        if type(member) is kind:
            allowance.charge(_TENSORDICT_BYTES)
            _check_members(allowance, member, depth + 1)
