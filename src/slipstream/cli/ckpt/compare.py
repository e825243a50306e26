"""Compare two states bit for bit, leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.cli.ckpt.leaves import kind_of, leaves
from slipstream.schema.flatten import check_storable
from slipstream.tensors import copy_memory, resolve
from slipstream.text import plural

_ABSENT = object()


@dataclass
class Changes:
    """How two checkpoints differ, by name."""

    same: list[str] = field(default_factory=list)
    only_in_a: dict[str, str] = field(default_factory=dict)
    only_in_b: dict[str, str] = field(default_factory=dict)
    differ: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.only_in_a or self.only_in_b or self.differ or self.values)

    def document(self) -> dict[str, Any]:
        """Return them as JSON."""
        return {
            "equal": self.equal,
            "same": self.same,
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "differ": self.differ,
            "values": {name: {"a": a, "b": b} for name, (a, b) in self.values.items()},
        }

    def lines(self) -> Iterator[str]:
        """Yield a line for every difference."""
        yield from (f"only in A: {name} {kind}" for name, kind in self.only_in_a.items())
        yield from (f"only in B: {name} {kind}" for name, kind in self.only_in_b.items())
        yield from map(_difference_line, self.differ)
        for name, (a, b) in self.values.items():
            yield f"value differs: {name} {'is absent' if a is None else a} -> {'is absent' if b is None else b}"

    def summary(self) -> str:
        """Count what is equal and what differs."""
        if self.equal:
            return f"equal, {plural(len(self.same), 'tensor')}"
        counts = {
            "equal": len(self.same),
            "differ": len(self.differ),
            "only in A": len(self.only_in_a),
            "only in B": len(self.only_in_b),
        }
        tensors = ", ".join(f"{number} {what}" for what, number in counts.items())
        return f"of the tensors {tensors}; and {plural(len(self.values), 'difference')} in other values"


def _difference_line(change: Mapping[str, Any]) -> str:
    a, b, name = change["a"], change["b"], change["name"]
    kinds = a if a == b else f"{a} -> {b}"
    if change["elements_differing"] is None:
        return f"differs: {name} {kinds}"
    largest = change["max_abs_difference"]
    by = (
        ""
        if largest is None
        else f", by up to {largest if isinstance(largest, (int, str)) else format(largest, '.6g')}"
    )
    return f"differs: {name} {kinds}: {change['elements_differing']} of {change['elements']} elements{by}"


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Changes:
    """Return how two flat states differ."""
    changes = Changes()
    mine, theirs = leaves(a), leaves(b)
    changes.only_in_a = {name: kind_of(leaf) for name, leaf in mine.items() if name not in theirs}
    changes.only_in_b = {name: kind_of(leaf) for name, leaf in theirs.items() if name not in mine}
    for name in (name for name in mine if name in theirs):
        change = _difference(name, mine[name], theirs[name])
        changes.same.append(name) if change is None else changes.differ.append(change)
    for name in dict.fromkeys([*a, *b]):
        first = a[name] if name in a and name not in mine else _ABSENT
        second = b[name] if name in b and name not in theirs else _ABSENT
        if not _same_value(first, second):
            changes.values[name] = (_brief(first), _brief(second))
    return changes


def _same_value(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and (repr(a) == repr(b) or bool(a == b)))  # repr: a NaN equals itself


def _brief(value: Any) -> str | None:
    if value is _ABSENT:
        return None
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _difference(name: str, a: Any, b: Any) -> dict[str, Any] | None:
    """Describe how two leaves differ, or return None if they are equal bit for bit."""
    change = {"name": name, "a": kind_of(a), "b": kind_of(b), "elements": math.prod(a.shape)}
    nothing = {"elements_differing": None, "max_abs_difference": None}
    if tuple(a.shape) != tuple(b.shape):
        return {**change, **nothing}
    if change["a"] == change["b"]:
        first, second = _words(a, name), _words(b, name)
        unequal = (first != second).reshape(math.prod(a.shape), -1).any(axis=1) if first.size else first != second
        if not unequal.any():
            return None
    else:
        unequal = np.ones(math.prod(a.shape), np.bool_)
    x, y = _numbers(a, name), _numbers(b, name)
    if x is None or y is None:
        return {**change, "elements_differing": int(unequal.sum()), "max_abs_difference": None}
    x, y = x[unequal], y[unequal]
    number = len(x) if change["a"] == change["b"] else int(((x != y) & ~((x != x) & (y != y))).sum())  # noqa: PLR0124
    return {**change, "elements_differing": number, "max_abs_difference": _largest(x, y)}


def _dense(leaf: Any, name: str) -> Any:
    check_storable(leaf, (name,))
    return resolve(leaf).cpu().contiguous()


def _words(leaf: Any, name: str) -> NDArray[Any]:
    """Return a copy of the bits of a leaf as whole numbers, one or two per element."""
    if isinstance(leaf, np.ndarray):
        memory, itemsize = np.frombuffer(leaf.tobytes(), np.uint8), leaf.dtype.itemsize
    else:
        tensor, itemsize = _dense(leaf, name), leaf.dtype.itemsize
        memory = np.empty(tensor.numel() * itemsize, np.uint8)
        copy_memory(memory.ctypes.data, tensor.data_ptr(), memory.nbytes)
    width = next((width for width in (8, 4, 2) if itemsize % width == 0 and itemsize), 1)
    return memory.view(f"u{width}")


def _numbers(leaf: Any, name: str) -> NDArray[Any] | None:
    """Return the elements of a leaf as NumPy can subtract them, flat; None if they are no numbers."""
    if not isinstance(leaf, np.ndarray):
        tensor = _dense(leaf, name)
        try:
            if tensor.is_complex():
                tensor = tensor.cdouble()
            elif tensor.is_floating_point():
                tensor = tensor.double()
            leaf = tensor.numpy()
        except (RuntimeError, TypeError):  # a dtype that torch can store and not convert
            return None
    if leaf.dtype.kind not in "biufc":
        return None
    return np.ascontiguousarray(leaf.astype(np.uint8) if leaf.dtype.kind == "b" else leaf).reshape(-1)


def _largest(x: NDArray[Any], y: NDArray[Any]) -> int | float | str | None:
    """Return the largest distance between two arrays of numbers; exact for integers of one type."""
    if not x.size:
        return None
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        distance = np.maximum(x, y) - np.minimum(x, y)  # wraps around, to the right unsigned number
        return int(distance.view(f"u{x.dtype.itemsize}").max())
    with np.errstate(all="ignore"):
        wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
        x, y = x.astype(wide), y.astype(wide)
        distance = np.abs(np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, x - y))
    largest = float(distance.max())
    return largest if math.isfinite(largest) else str(largest)  # JSON has no such numbers
