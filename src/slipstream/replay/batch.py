"""Split a batch of steps into tensors by key, Python objects by key, and a layout; and build it again.

A batch is a TensorDict, a tensorclass, a tensor, or a pytree of tensors. Its tensors are packed. Non-tensor data, and
tensors that have another shape in each step, become one Python object per step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)
from torch.utils import _pytree as pytree

from slipstream.batches import build, flatten
from slipstream.errors import ReplayError, StateMismatchError, UnsupportedStateError
from slipstream.replay.objects import RAGGED, Cells, as_non_tensor, cells_of
from slipstream.replay.roles import Key
from slipstream.replay.trees import Tree, split_tree

_BARE: Key = ("_",)


class UnequalStepsError(ReplayError, RuntimeError):
    """The items of a list cannot be stacked; TorchRL's storages raise a `RuntimeError` then."""


@dataclass(frozen=True)
class Layout:
    """What a batch has besides its tensors and objects.

    Attributes:
        extra: The axes of its batch size after those that count as steps.
        extra_names: The names of these axes.
        inner: For each nested TensorDict, the axes of its batch size after those that count as steps.
        required: The keys of the tensors in the first batch.
        is_bare: Whether it is a tensor, not a TensorDict.
        kinds: For the root and each nested TensorDict that is a tensorclass, its class.
        tree: The structure of a pytree.
    """

    extra: tuple[int, ...] = ()
    extra_names: tuple[str | None, ...] = ()
    inner: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)
    required: frozenset[Key] = frozenset()
    is_bare: bool = False
    kinds: Mapping[Key, Any] = field(default_factory=dict)
    tree: Tree | None = None

    @classmethod
    def of_keys(cls, keys: Iterable[Key]) -> Layout:
        """Return the layout of tensors whose TensorDicts have no more axes."""
        inner: dict[Key, tuple[int, ...]] = {}
        for key in keys:
            for depth in range(1, len(key)):
                inner[key[:depth]] = ()
        return cls(inner=inner)

    @property
    def is_tensordict(self) -> bool:
        """Whether a batch is a TensorDict or a tensorclass."""
        return not self.is_bare and self.tree is None

    def merged(self, other: Layout) -> Layout:
        """Return this layout with the nested TensorDicts and classes of another one; those known already stay."""
        merged = replace(self, inner={**other.inner, **self.inner}, kinds={**other.kinds, **self.kinds})
        # A folder names no classes: a named tuple comes back as a tuple until a batch shows what it is.
        if self.tree is not None and other.tree is not None and self.tree.keys == other.tree.keys:
            merged = replace(merged, tree=other.tree)
        return merged

    def without(self, keys: Iterable[Key]) -> Layout:
        """Return this layout, with some keys not required any more."""
        return replace(self, required=self.required.difference(keys))

    def nodes(self, batch: torch.Size) -> dict[Key, Any]:
        """Return the batch sizes of nested TensorDicts of some steps."""
        return {key: batch + torch.Size(axes) for key, axes in self.inner.items()}

    def names(self, num_axes: int) -> tuple[str | None, ...]:
        """Return the names of all axes of steps that have `num_axes` axes."""
        return (*[None] * num_axes, *self.extra_names)

    def non_tensor(self, key: Key, cells: Cells) -> Any:
        """Return objects as tensordict holds them."""
        return as_non_tensor(cells, len(self.inner.get(key[:-1], self.extra)))

    def build(
        self, batch: torch.Size, tensors: Mapping[Key, torch.Tensor], objects: Mapping[Key, Cells], device: Any
    ) -> Any:
        """Return a batch of steps.

        Args:
            batch: The axes that count as steps.
            tensors: All tensors, by key.
            objects: All objects, by key.
            device: The device of a TensorDict.
        """
        if self.is_bare:
            return tensors[_BARE]
        if self.tree is not None:
            return self.tree.build(tensors)
        members: dict[Key, Any] = {**self.nodes(batch), **tensors}
        for key, cells in objects.items():
            if key != RAGGED:
                members[key] = self.non_tensor(key, cells)
        names = self.names(len(batch))
        dense = build(members, (*batch, *self.extra), names=names, device=device)
        for key in sorted(self.kinds, key=len, reverse=True):
            if key:
                dense.set(key, self.kinds[key].from_tensordict(dense.get(key)))
        if RAGGED in objects and objects[RAGGED].size:
            dense = _with_ragged(dense, objects[RAGGED], device)
        return self.wrap(dense)

    def wrap(self, batch: Any) -> Any:
        """Return a TensorDict as the tensorclass that was stored, if it was one."""
        if () not in self.kinds:
            return batch
        return self.kinds[()].from_tensordict(batch)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; classes are not part of it, because no file may name a class.

        Raises:
            UnsupportedStateError: If it is of a pytree that JSON cannot describe.
        """
        document: dict[str, Any] = {
            "extra": list(self.extra),
            "extra_names": list(self.extra_names),
            "inner": [[list(key), list(axes)] for key, axes in self.inner.items()],
            "required": sorted(list(key) for key in self.required),
            "bare": self.is_bare,
        }
        if self.tree is not None:
            document["tree"] = self.tree.to_json()
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Layout:
        """Read what `to_json` wrote."""
        inner = {tuple(map(str, key)): tuple(map(int, axes)) for key, axes in document["inner"]}
        required = frozenset(tuple(map(str, key)) for key in document["required"])
        extra = tuple(map(int, document["extra"]))
        tree = None
        if "tree" in document:
            tree = Tree.from_json(document["tree"])
        names = tuple(document["extra_names"])
        return cls(extra, names, inner, required, bool(document["bare"]), tree=tree)

    def check(self, keys: Collection[Key]) -> None:
        """Raise `StateMismatchError` unless steps of these keys can be built."""
        if self.is_bare and _BARE not in keys:
            raise StateMismatchError("the state is that of a storage of tensors, and has none")


@dataclass(frozen=True)
class Batch:
    """The parts of a batch.

    Attributes:
        shape: The axes that count as steps.
        tensors: Its tensors ``[steps..., ...]``, by key.
        objects: Its objects ``[steps...]``, by key.
        layout: What else it has.
    """

    shape: tuple[int, ...]
    tensors: dict[Key, torch.Tensor]
    objects: dict[Key, Cells]
    layout: Layout

    def newest(self, count: int) -> Batch:
        """Return its last `count` steps along time."""
        tensors = {key: tensor[-count:] for key, tensor in self.tensors.items()}
        objects = {key: cells[-count:] for key, cells in self.objects.items()}
        return replace(self, shape=(count, *self.shape[1:]), tensors=tensors, objects=objects)


def split(data: Any, dims: int) -> Batch:
    """Take a batch apart.

    Args:
        data: A TensorDict, a tensorclass, a tensor, or a pytree of tensors.
        dims: How many axes count as steps.

    Raises:
        ReplayError: If it has no tensors and no objects, or fewer axes.
        UnsupportedStateError: If it has sparse or quantized tensors, or a pytree has something other than tensors.
    """
    if isinstance(data, torch.Tensor):
        layout = Layout(required=frozenset([_BARE]), is_bare=True)
        return Batch(_shape(data.shape, dims), {_BARE: _dense(_BARE, data)}, {}, layout)
    if not is_tensor_collection(data):
        return _split_tree(data, dims)
    shape = _shape(data.batch_size, dims)
    kinds = _kinds_of(data)
    if is_tensorclass(data):
        data = data.to_tensordict(retain_none=False)
    objects: dict[Key, Cells] = {}
    try:
        members = flatten(data)
    except ValueError:
        # A lazy stack whose parts have different shapes or keys.
        ragged = _ragged_keys(data)
        objects[RAGGED] = _steps_of(data.select(*ragged, strict=False), shape)
        data = data.exclude(*ragged)
        members = flatten(data)
    tensors: dict[Key, torch.Tensor] = {}
    inner: dict[Key, tuple[int, ...]] = {}
    for key, value in members.items():
        if isinstance(value, torch.Size):
            inner[key] = tuple(value[dims:])
        elif is_non_tensor(value):
            objects[key] = cells_of(value.tolist(), shape)
        else:
            tensors[key] = _dense(key, value)
    if not tensors and not objects:
        raise ReplayError("a batch has no tensors")
    names = tuple(data.names[dims:])
    layout = Layout(tuple(data.batch_size[dims:]), names, inner, frozenset(tensors), kinds=kinds)
    return Batch(shape, tensors, objects, layout)


def _split_tree(data: Any, dims: int) -> Batch:
    tensors, tree = split_tree(data)
    shapes = {_shape(tensor.shape, dims) for tensor in tensors.values()}
    if len(shapes) > 1:
        raise ReplayError(f"the tensors of a batch have {sorted(shapes)} steps, expected the same for all of them")
    tensors = {key: _dense(key, tensor) for key, tensor in tensors.items()}
    return Batch(shapes.pop(), tensors, {}, Layout(required=frozenset(tensors), tree=tree))


def stack_steps(steps: list[Any]) -> Any:
    """Stack a list of steps, as TorchRL does with the items of a list.

    Raises:
        UnequalStepsError: If they have different structures.
    """
    try:
        if not all(map(is_tensor_collection, steps)):
            return pytree.tree_map(_stack_tensors, *steps)
        try:
            return torch.stack(steps, 0)
        except RuntimeError:
            return lazy_stack(steps, 0)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UnequalStepsError(
            f"Stacking the elements of the list resulted in an error: they need the same structure and shapes ({error})"
        ) from error


def with_time(data: Any) -> Any:
    """Return one step as a batch of one."""
    if is_tensor_collection(data):
        return data[None]
    return pytree.tree_map(_unsqueezed, data)


def _unsqueezed(value: Any) -> Any:
    # Anything but a tensor is refused by name later.
    return value.unsqueeze(0) if isinstance(value, torch.Tensor) else value


def _stack_tensors(*tensors: Any) -> torch.Tensor:
    return torch.stack(list(map(torch.as_tensor, tensors)), 0)


def _shape(axes: Iterable[int], dims: int) -> tuple[int, ...]:
    shape = tuple(axes)
    if len(shape) < dims:
        raise ReplayError(
            f"a batch of shape {list(shape)} was given to a storage with ndim={dims}, expected at least {dims} axes, "
            "such as [environments, time]: add the missing axes, or use ndim=1"
        )
    return shape[:dims]


def _dense(key: Key, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedStateError(f"{'/'.join(key)} is a {type(tensor).__qualname__}, expected a tensor")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedStateError(f"{'/'.join(key)} has layout {tensor.layout}, expected a dense tensor")
    return tensor


def _kinds_of(data: Any, above: Key = ()) -> dict[Key, Any]:
    """Return the tensorclasses in a batch by key."""
    kinds: dict[Key, Any] = {}
    if is_tensorclass(data):
        kinds[above] = type(data)
    if isinstance(data, LazyStackedTensorDict):
        return kinds
    for name in data.keys():  # noqa: SIM118 - a TensorDict iterates over its first axis
        try:
            value = data.get(name)
        except RuntimeError:
            # Ragged, so it is no tensorclass.
            continue
        if is_tensor_collection(value) and not is_non_tensor(value):
            kinds |= _kinds_of(value, (*above, name))
    return kinds


def _ragged_keys(data: Any) -> list[Key]:
    """Return the keys that are not one dense tensor: missing in some parts of a lazy stack, or of different shapes."""
    ragged = []
    for key in _leaf_keys(data, ()):
        try:
            value = data.get(key, None)
        except RuntimeError:
            value = None
        if value is None:
            ragged.append(key)
    return ragged


def _leaf_keys(data: Any, above: Key) -> dict[Key, None]:
    """Return the nested keys of all leaves, in order, those included that only some parts of a lazy stack have."""
    keys: dict[Key, None] = {}
    if isinstance(data, LazyStackedTensorDict) and not is_non_tensor(data):
        for part in data.tensordicts:
            keys |= _leaf_keys(part, above)
        return keys
    for name in data.keys():  # noqa: SIM118 - a TensorDict iterates over its first axis
        value = data.get(name)
        if is_tensor_collection(value) and not is_non_tensor(value):
            keys |= _leaf_keys(value, (*above, name))
        else:
            keys[(*above, name)] = None
    return keys


def _steps_of(data: Any, shape: tuple[int, ...]) -> Cells:
    """Return the TensorDict of each step, in new memory."""
    cells: Cells = np.empty(shape, np.object_)
    for place in np.ndindex(shape):
        cells[place] = data[place].clone()
    return cells


def _with_ragged(dense: Any, cells: Cells, device: Any) -> Any:
    """Return steps with the ragged tensors of each."""
    if cells.ndim:
        steps = range(len(cells))
        return lazy_stack([_with_ragged(dense[number], cells[number, ...], device) for number in steps], 0)
    ragged = cells.item()
    if ragged is None:
        return dense
    return ragged.to(device).clone().update(dense)
