"""Compare two checkpoints bit for bit, tensor by tensor, whatever their formats."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checkpoint.leaves import is_leaf, is_storable, kind_of, named_values
from slipstream.checkpoint.load import load_file
from slipstream.errors import UnsupportedStateError
from slipstream.schema.flatten import flatten
from slipstream.tensors import array_of, resolve
from slipstream.text import plural

# How much of a plain value is shown.
_MAX_SHOWN = 60


@dataclass(frozen=True)
class TensorChange:
    """How one tensor or array differs.

    Attributes:
        name: Its key as text.
        a: Dtype and shape in the first checkpoint, such as ``float32[60, 50]``.
        b: The same in the second one.
        num_elements: How many elements it has in the first checkpoint.
        num_differing: How many elements differ; None if the shapes do, or if elements cannot be compared one by one.
        largest: The largest difference between two elements: exact for integers, text for NaN and infinity, None if
            there are no numbers to subtract.
    """

    name: str
    a: str
    b: str
    num_elements: int
    num_differing: int | None = None
    largest: int | float | str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "name": self.name,
            "a": self.a,
            "b": self.b,
            "elements": self.num_elements,
            "elements_differing": self.num_differing,
            "max_abs_difference": self.largest,
        }

    def describe(self) -> str:
        """Return it as a line of text."""
        # Most differ in content only.
        kinds = self.a
        if self.a != self.b:
            kinds = f"{self.a} -> {self.b}"
        line = f"differs: {self.name} {kinds}"
        if self.num_differing is None:
            return line
        line += f": {self.num_differing} of {self.num_elements} elements"
        if isinstance(self.largest, float):
            return f"{line}, by up to {self.largest:.6g}"
        if self.largest is not None:
            return f"{line}, by up to {self.largest}"
        return line


@dataclass(frozen=True)
class Changes:
    """How two checkpoints differ.

    Attributes:
        same: Names of the tensors and arrays that are equal.
        only_in_a: Dtype and shape of those that only the first one has, by name.
        only_in_b: The same for the second one.
        differ: Those that both have, with different content.
        values: Plain values that differ, by name, as text; None for one that is missing.
    """

    same: tuple[str, ...]
    only_in_a: Mapping[str, str]
    only_in_b: Mapping[str, str]
    differ: tuple[TensorChange, ...]
    values: Mapping[str, tuple[str | None, str | None]]

    @property
    def are_equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.only_in_a or self.only_in_b or self.differ or self.values)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "equal": self.are_equal,
            "same": list(self.same),
            "only_in_a": dict(self.only_in_a),
            "only_in_b": dict(self.only_in_b),
            "differ": [change.to_json() for change in self.differ],
            "values": {name: {"a": a, "b": b} for name, (a, b) in self.values.items()},
        }

    def describe(self) -> list[str]:
        """Return a line of text for every difference."""
        lines = [f"only in A: {name} {kind}" for name, kind in self.only_in_a.items()]
        lines += [f"only in B: {name} {kind}" for name, kind in self.only_in_b.items()]
        lines += [change.describe() for change in self.differ]
        for name, (a, b) in self.values.items():
            lines.append(f"value differs: {name} {a or 'is absent'} -> {b or 'is absent'}")
        return lines

    def summary(self) -> str:
        """Return the numbers of equal and of different tensors and values as text."""
        if self.are_equal:
            return f"equal, {plural(len(self.same), 'tensor')}"
        return (
            f"of the tensors {len(self.same)} equal, {len(self.differ)} differ, {len(self.only_in_a)} only in A, "
            f"{len(self.only_in_b)} only in B; and {plural(len(self.values), 'difference')} in other values"
        )


def compare_checkpoints(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Changes:
    """Compare two checkpoints of any format bit for bit.

    A NaN equals itself, and 0 differs from -0. Values that are not tensors are compared, too; metadata is not. Loads
    both checkpoints into memory, without running code from them.

    Args:
        a: A checkpoint.
        b: Another one.

    Raises:
        FileNotFoundError: If one of them does not exist.
        CorruptFileError: If one of them is damaged, not a checkpoint, or needs to run code to be loaded.
        FormatVersionError: If a newer release wrote one of them.
        ImportError: If one of them is a safetensors file, and that package is not installed.

    Example:
        >>> import torch
        >>> torch.save({"w": torch.tensor([1.0, 2.0])}, "/tmp/slipstream-doc/a.pt")
        >>> torch.save({"w": torch.tensor([1.0, 2.5])}, "/tmp/slipstream-doc/b.pt")
        >>> compare_checkpoints("/tmp/slipstream-doc/a.pt", "/tmp/slipstream-doc/b.pt").describe()
        ['differs: w float32[2]: 1 of 2 elements, by up to 0.5']
    """
    return diff_states(load_file(Path(a)), load_file(Path(b)))


def diff_states(a: Any, b: Any) -> Changes:
    """Compare two nested states bit for bit; see `compare_checkpoints`."""
    values_a = named_values(a)
    values_b = named_values(b)
    same = []
    differ = []
    only_in_a = {}
    only_in_b = {}
    values = {}
    # Each name once, in the order of the first state.
    for name in dict.fromkeys([*values_a, *values_b]):
        # A name may be that of a tensor in one state, and of a plain value in the other.
        leaf_a = _leaf_or_none(values_a, name)
        leaf_b = _leaf_or_none(values_b, name)
        if leaf_a is not None and leaf_b is not None:
            change = _compare_leaves(name, leaf_a, leaf_b)
            if change is None:
                same.append(name)
            else:
                differ.append(change)
            continue
        # Removed, so that what is left of this name is a plain value or nothing.
        if leaf_a is not None:
            only_in_a[name] = kind_of(leaf_a)
            values_a.pop(name)
        if leaf_b is not None:
            only_in_b[name] = kind_of(leaf_b)
            values_b.pop(name)
        if not _is_same_value(values_a, values_b, name):
            values[name] = (_shown(values_a, name), _shown(values_b, name))
    return Changes(tuple(same), only_in_a, only_in_b, tuple(differ), values)


def _leaf_or_none(values: Mapping[str, Any], name: str) -> Any:
    value = values.get(name)
    if is_leaf(value):
        return value
    return None


def _is_same_value(values_a: Mapping[str, Any], values_b: Mapping[str, Any], name: str) -> bool:
    """Return whether both states have an equal plain value of a name, or neither has one."""
    if name not in values_a or name not in values_b:
        return name not in values_a and name not in values_b
    a = values_a[name]
    b = values_b[name]
    # 1, 1.0 and True are equal to Python, but not the same state.
    if type(a) is not type(b):
        return False
    # Two equal sets may list their members in different order.
    if isinstance(a, (set, frozenset)):
        return bool(a == b)
    return _content_of(a) == _content_of(b)


def _content_of(value: Any) -> str | bytes:
    """Return something that is equal for equal values only, down to the bits of NaN and the sign of zero."""
    # Native files store the structure, so it contains every bit. Its text tells 0.0 from -0.0.
    try:
        return repr(flatten(value).structure)
    except UnsupportedStateError:
        return _saved_bytes(value)


def _saved_bytes(value: Any) -> bytes:
    """Return what ``torch.save`` writes for something that has no other form that could be compared."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        # Not in a file either, then: this value can be equal only to itself.
        return str(id(value)).encode()
    return file.getvalue()


def _shown(values: Mapping[str, Any], name: str) -> str | None:
    if name not in values:
        return None
    text = repr(values[name])
    if len(text) > _MAX_SHOWN:
        return f"{text[: _MAX_SHOWN - 3]}..."
    return text


def _compare_leaves(name: str, a: Any, b: Any) -> TensorChange | None:
    """Return how two tensors or arrays differ, or None if they are equal bit for bit."""
    kind_a = kind_of(a)
    kind_b = kind_of(b)
    num_elements = math.prod(a.shape)
    if tuple(a.shape) != tuple(b.shape):
        return TensorChange(name, kind_a, kind_b, num_elements)
    words_a = _words(a)
    words_b = _words(b)
    # Sparse and quantized tensors have no plain memory.
    if words_a is None or words_b is None:
        if kind_a == kind_b and _saved_bytes(a) == _saved_bytes(b):
            return None
        return TensorChange(name, kind_a, kind_b, num_elements)
    unequal = np.ones(num_elements, np.bool_)
    if kind_a == kind_b:
        unequal = _find_unequal(words_a, words_b, num_elements)
        if not unequal.any():
            return None
    numbers_a = _numbers(a)
    numbers_b = _numbers(b)
    if numbers_a is None or numbers_b is None:
        return TensorChange(name, kind_a, kind_b, num_elements, int(unequal.sum()))
    # Only these: the others may be NaN, or cost time.
    numbers_a = numbers_a[unequal]
    numbers_b = numbers_b[unequal]
    num_differing = len(numbers_a)
    if kind_a != kind_b:
        # Bits of different dtypes cannot be compared, but numbers can. A NaN equals a NaN.
        both_nan = np.isnan(numbers_a) & np.isnan(numbers_b)
        num_differing = int(((numbers_a != numbers_b) & ~both_nan).sum())
    return TensorChange(name, kind_a, kind_b, num_elements, num_differing, _largest(numbers_a, numbers_b))


def _find_unequal(a: NDArray[Any], b: NDArray[Any], num_elements: int) -> NDArray[np.bool_]:
    """Return which elements differ in at least one of their words."""
    if not num_elements:
        return np.zeros(0, np.bool_)
    unequal: NDArray[np.bool_] = (a != b).reshape(num_elements, -1).any(axis=1)
    return unequal


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host, in C order."""
    tensor = resolve(tensor).cpu()
    # Torch cannot copy integers of fewer than eight bits, but it can copy the bytes that hold them.
    if tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)
    return tensor.contiguous()


def _words(leaf: Any) -> NDArray[Any] | None:
    """Return the bits of a tensor or an array as integers, one or more per element; None if it has no plain memory."""
    if isinstance(leaf, torch.Tensor):
        if not is_storable(leaf):
            return None
        array = array_of(_dense(leaf))
    else:
        array = np.ascontiguousarray(leaf)
    content = array.reshape(-1).view(np.uint8)
    # Wider words are compared faster.
    for width in (8, 4, 2):
        if array.itemsize % width == 0:
            return content.view(f"u{width}")
    return content


def _numbers(leaf: Any) -> NDArray[Any] | None:
    """Return elements as a flat array that NumPy can subtract; None if they are not numbers."""
    array = leaf
    if isinstance(leaf, torch.Tensor):
        try:
            array = _as_wide(resolve(leaf).cpu()).numpy()
        except (RuntimeError, TypeError, NotImplementedError):
            # A dtype that torch can store but not convert.
            return None
    if array.dtype.kind not in "biufc":
        return None
    # NumPy refuses to subtract booleans.
    if array.dtype.kind == "b":
        array = array.astype(np.uint8)
    flat: NDArray[Any] = np.ascontiguousarray(array).reshape(-1)
    return flat


def _as_wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return floats as float64 or complex128, which have room for all others. Integers stay."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if tensor.is_floating_point():
        return tensor.double()
    return tensor


def _largest(a: NDArray[Any], b: NDArray[Any]) -> int | float | str | None:
    """Return the largest distance between two arrays of numbers; exact for integers of the same dtype."""
    if not a.size:
        return None
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        # The difference may overflow, but its bits are those of the right unsigned integer.
        distance = np.maximum(a, b) - np.minimum(a, b)
        return int(distance.view(f"u{a.itemsize}").max())
    wide: type[Any] = np.float64
    if "c" in (a.dtype.kind, b.dtype.kind):
        wide = np.complex128
    with np.errstate(all="ignore"):
        wide_a = a.astype(wide)
        wide_b = b.astype(wide)
        # The difference of two infinities is NaN, although they are equal.
        are_equal = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
        largest = float(np.abs(np.where(are_equal, 0, wide_a - wide_b)).max())
    # JSON has neither NaN nor infinity.
    if not math.isfinite(largest):
        return str(largest)
    return largest
