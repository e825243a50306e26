"""A TensorDict as tensors by key, and what else it takes to build it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import is_tensorclass

from slipstream.batches import flatten
from slipstream.errors import ReplayError, UnsupportedStateError
from slipstream.replay.roles import Key

_BARE: Key = ("_",)


@dataclass(frozen=True)
class Layout:
    """What a TensorDict has besides its tensors.

    Attributes:
        extra: The axes of its batch size after those that count as steps.
        extra_names: The names of these axes.
        inner: For each nested TensorDict, the axes of its batch size after those that count as steps.
        required: The keys that every batch has.
        is_bare: Whether it is a tensor, not a TensorDict.
        kind: The tensorclass that it is, if it is one.
    """

    extra: tuple[int, ...] = ()
    extra_names: tuple[str | None, ...] = ()
    inner: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)
    required: frozenset[Key] = frozenset()
    is_bare: bool = False
    kind: Any = None

    @classmethod
    def of_keys(cls, keys: Iterable[Key]) -> Layout:
        """Return the layout of tensors whose TensorDicts have no more axes."""
        inner: dict[Key, tuple[int, ...]] = {}
        for key in keys:
            for depth in range(1, len(key)):
                inner[key[:depth]] = ()
        return cls(inner=inner)

    def merged(self, other: Layout) -> Layout:
        """Return this layout with the nested TensorDicts of another one; those known already stay."""
        return replace(self, inner={**other.inner, **self.inner})

    def nodes(self, batch: torch.Size) -> dict[Key, Any]:
        """Return the batch sizes of nested TensorDicts of some steps."""
        return {key: batch + torch.Size(axes) for key, axes in self.inner.items()}

    def names(self, num_axes: int) -> tuple[str | None, ...]:
        """Return the names of all axes of steps that have `num_axes` axes."""
        return (*[None] * num_axes, *self.extra_names)

    def wrap(self, batch: Any) -> Any:
        """Return a TensorDict as the tensorclass that was stored, if it was one."""
        if self.kind is None:
            return batch
        return self.kind.from_tensordict(batch)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; the tensorclass is not part of it, because no file may name a class."""
        return {
            "extra": list(self.extra),
            "extra_names": list(self.extra_names),
            "inner": [[list(key), list(axes)] for key, axes in self.inner.items()],
            "required": sorted(list(key) for key in self.required),
            "bare": self.is_bare,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Layout:
        """Read what `to_json` wrote."""
        inner = {tuple(map(str, key)): tuple(map(int, axes)) for key, axes in document["inner"]}
        required = frozenset(tuple(map(str, key)) for key in document["required"])
        extra = tuple(map(int, document["extra"]))
        return cls(extra, tuple(document["extra_names"]), inner, required, bool(document["bare"]))


def split(data: Any, dims: int) -> tuple[dict[Key, torch.Tensor], Layout]:
    """Return the tensors of a batch by nested key, and what else it has.

    Args:
        data: A TensorDict, a tensorclass or a tensor.
        dims: How many axes count as steps.

    Raises:
        ReplayError: If it has no tensors, or different ones in different environments.
        UnsupportedStateError: If it has something other than dense tensors.
    """
    if isinstance(data, torch.Tensor):
        return {_BARE: data}, Layout(required=frozenset([_BARE]), is_bare=True)
    kind = None
    if is_tensorclass(data):
        kind = type(data)
        data = data.to_tensordict(retain_none=False)
    try:
        members = flatten(data)
    except ValueError as error:
        raise ReplayError(str(error)) from error
    tensors: dict[Key, torch.Tensor] = {}
    inner: dict[Key, tuple[int, ...]] = {}
    for key, value in members.items():
        if isinstance(value, torch.Size):
            inner[key] = tuple(value[dims:])
        elif not isinstance(value, torch.Tensor):
            raise UnsupportedStateError(f"{'/'.join(key)} is a {type(value).__qualname__}, expected a tensor")
        elif value.layout != torch.strided or value.is_quantized:
            raise UnsupportedStateError(f"{'/'.join(key)} has layout {value.layout}, expected a dense tensor")
        else:
            tensors[key] = value
    if not tensors:
        raise ReplayError("a batch has no tensors")
    names = tuple(data.names[dims:])
    return tensors, Layout(tuple(data.batch_size[dims:]), names, inner, frozenset(tensors), kind=kind)
