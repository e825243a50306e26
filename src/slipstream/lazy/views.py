"""Views of a lazy TensorDict: tensordict operates on placeholders, and the result is taken for a lazy one again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, is_tensorclass

from slipstream.batches import Key
from slipstream.lazy.tensor import LazyTensor, Leaves, Source, Steps

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Make = Callable[[Any, dict[str, Any]], Any]
"""Makes a lazy TensorDict from one with its batch size and names, and its members."""

# Not the constructor: it checks every member, and erases names of nested TensorDicts if the outer one has none.
new_plain = TensorDict._new_unsafe
# The same for any class.
new_unchecked = new_plain.__func__


class Placeholders:
    """Turns lazy TensorDicts into plain ones of placeholders, and views of those into lazy TensorDicts.

    Args:
        make: Makes the lazy TensorDicts that views become.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        # What a placeholder stands for, by its storage: views of it have the same.
        self._sources: dict[int, Source] = {}
        self._known: set[int] = set()
        # The lazy TensorDict that each node of the tree stands for.
        self._originals: dict[int, Any] = {}

    def add(self, tensor: LazyTensor) -> torch.Tensor:
        """Return the placeholder of a tensor, from now on known."""
        storage = _storage_of(tensor.placeholder)
        self._sources[storage] = tensor.source
        self._known.add(storage)
        return tensor.placeholder

    def add_tree(self, packed: Any) -> TensorDictBase:
        """Return a plain TensorDict that stands for a lazy one; tensors that are not lazy are in it themselves."""
        members: dict[str, Any] = {}
        for name, member in packed.leaves.members.items():
            if isinstance(member, LazyTensor):
                members[name] = self.add(member)
            elif is_packed(member):
                members[name] = on_tensordict(member, self.add_tree)
            else:
                members[name] = member
                self._know(member)
        tree = plain(members, packed, None)
        if packed.is_locked:
            tree.lock_()
        self._originals[id(tree)] = packed
        return tree

    def is_view(self, result: Any) -> bool:
        """Return whether everything in a result is a view: copies of placeholders have no values."""
        for value in result.values(include_nested=True, leaves_only=True):
            if value.is_meta and _storage_of(value) not in self._known:
                return False
        return True

    def adopt(self, node: Any) -> Any:
        """Return what a result of an operation on the tree stands for, packed where it has placeholders."""
        members = self.adopt_members(node)
        original = self._originals.get(id(node))
        if original is not None:
            # The operation returned a node as it was, or changed its members in place.
            if list(members) != list(original.leaves):
                original.leaves.members = members
            return original
        for member in members.values():
            if isinstance(member, LazyTensor) or is_packed(member):
                return self._make(node, members)
        return node

    def adopt_members(self, node: Any) -> dict[str, Any]:
        """Return the members of a node: lazy tensors instead of placeholders, and packed TensorDicts."""
        members: dict[str, Any] = {}
        for name, value in node.items():
            if isinstance(value, torch.Tensor):
                source = self._sources.get(_storage_of(value)) if value.is_meta else None
                members[name] = value if source is None else LazyTensor(source, value)
            elif type(value) is TensorDict or is_tensorclass(value):
                members[name] = on_tensordict(value, self.adopt)
            else:
                members[name] = value
        return members

    def _know(self, member: Any) -> None:
        """Remember tensors that are on the meta device but not placeholders."""
        tensors = [member]
        if isinstance(member, TensorDict):
            tensors = list(member.values(include_nested=True, leaves_only=True))
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._known.add(_storage_of(tensor))


class Axes(NamedTuple):
    """The batch size and names of a TensorDict."""

    batch_size: torch.Size
    names: list[str | None]

    @classmethod
    def nested(cls, parent: Any, child: Any, like: Any) -> Axes:
        """Return the axes of a nested TensorDict when its parent gets those of `like`."""
        inner_sizes = child.batch_size[parent.batch_dims :]
        inner_names = child.names[parent.batch_dims :]
        return cls(torch.Size((*like.batch_size, *inner_sizes)), [*like.names, *inner_names])


def is_packed(member: Any) -> bool:
    """Return whether a member is a lazy TensorDict, or a tensorclass of one."""
    # First, because tensordict takes a microsecond to tell a tensorclass.
    if isinstance(member, TensorDict):
        return isinstance(getattr(member, "leaves", None), Leaves)
    if isinstance(member, (LazyTensor, torch.Tensor)) or not is_tensorclass(member):
        return False
    return is_packed(member._tensordict)


def on_tensordict(member: Any, function: Callable[[Any], Any]) -> Any:
    """Return what a function makes of a TensorDict, or of the one in a tensorclass, which stays one."""
    if not isinstance(member, TensorDict) and is_tensorclass(member):
        return type(member).from_tensordict(function(member._tensordict))
    return function(member)


def nodes(packed: Any, above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield a lazy TensorDict and those in it, with their nested keys."""
    yield above, packed
    for name, member in packed.leaves.members.items():
        if is_packed(member):
            yield from nodes(member._tensordict if is_tensorclass(member) else member, (*above, name))


def flat_members(packed: Any) -> Iterator[Any]:
    """Yield the lazy and other tensors of a lazy TensorDict, nested ones as well."""
    for _, node in nodes(packed):
        for member in node.leaves.members.values():
            if isinstance(member, TensorDict) and not is_packed(member):
                yield from member.values(include_nested=True, leaves_only=True)
            elif not is_packed(member):
                yield member


def lazy_members(packed: Any) -> list[LazyTensor]:
    """Return the lazy tensors of a lazy TensorDict, nested ones as well."""
    return [member for member in flat_members(packed) if isinstance(member, LazyTensor)]


def rebuild(packed: Any, replace: Callable[[Any], Any], like: Any) -> TensorDictBase:
    """Return a plain TensorDict with the structure of a lazy one, each tensor replaced.

    Args:
        packed: The lazy TensorDict.
        replace: Returns the replacement of a lazy tensor, a tensor or a plain nested TensorDict.
        like: Has the batch size and names of the result; nested ones keep their additional axes.
    """
    members: dict[str, Any] = {}
    for name, member in packed.leaves.members.items():
        if is_packed(member):
            axes = Axes.nested(packed, member, like)
            members[name] = on_tensordict(member, functools.partial(rebuild, replace=replace, like=axes))
        else:
            members[name] = replace(member)
    return plain(members, like, packed.device)


def plain(members: dict[str, Any], like: Any, device: torch.device | None) -> TensorDictBase:
    """Return a plain TensorDict of members that fit, with the batch size and names of another one."""
    return new_plain(members, batch_size=like.batch_size, names=names_of(like), device=device)


def take(packed: Any, index: Any) -> TensorDictBase:
    """Return what an index with tensors selects; decodes only the steps that it touches."""
    # Most tensors show the same steps: compute their numbers once.
    tensors_of: dict[tuple[int, Steps], list[LazyTensor]] = {}
    for tensor in lazy_members(packed):
        steps = tensor.steps
        if steps is not None and len(steps.shape) >= packed.batch_dims and tensor.source.tensor is None:
            tensors_of.setdefault((tensor.source.group, steps), []).append(tensor)
    # TensorDict knows the rules for indices, batch sizes and names, so let it index the numbers of the steps.
    numbers = {str(position): steps.numbers() for position, (_, steps) in enumerate(tensors_of)}
    indexed = TensorDict(numbers, batch_size=packed.batch_size, names=names_of(packed))[on_host(index)]
    values: dict[int, Any] = {}
    for position, tensors in enumerate(tensors_of.values()):
        parts = packed.read_steps(tensors, indexed.get(str(position)))
        values.update(zip(map(id, tensors), parts, strict=True))

    def replace(member: Any) -> Any:
        if id(member) in values:
            return values[id(member)]
        if isinstance(member, LazyTensor):
            member = member.read()
        return TensorDict({"value": member}, batch_size=packed.batch_size)[index]._get_str("value", None)

    return rebuild(packed, replace, indexed)


def share_member(member: Any) -> Any:
    """Return a member for a shallow copy: nested TensorDicts are copied, tensors are shared, as TensorDict does."""
    if isinstance(member, TensorDict):
        return member.copy()
    return member


def names_of(tensordict: Any) -> list[str | None] | None:
    """Return the names of the axes, or None if they have none."""
    names: list[str | None] = list(tensordict.names)
    if any(names):
        return names
    return None


def as_key(index: Any) -> Key | None:
    """Return an index as a nested key, or None if it is an index of steps."""
    if isinstance(index, str):
        return (index,)
    if isinstance(index, tuple) and index and all(isinstance(part, str) for part in index):
        return index
    return None


def on_host(index: Any) -> Any:
    """Return an index with its tensors on the CPU."""
    if isinstance(index, tuple):
        return tuple(map(on_host, index))
    if isinstance(index, torch.Tensor):
        return index.cpu()
    return index


def as_view_index(index: Any) -> Any:
    """Return an index with numbers in place of tensors of a single number, which select a view as numbers do."""
    if isinstance(index, tuple):
        return tuple(map(as_view_index, index))
    if isinstance(index, torch.Tensor) and not index.ndim and index.dtype != torch.bool:
        return int(index)
    return index


def makes_view(index: Any) -> bool:
    """Return whether a tensor with this index is a view; other indices copy."""
    if isinstance(index, tuple):
        return all(map(makes_view, index))
    if isinstance(index, (bool, np.bool_)):
        return False
    return index is None or index is Ellipsis or isinstance(index, (int, np.integer, slice))


def _storage_of(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor on the meta device, whose address is always 0."""
    identity: int = tensor.untyped_storage()._cdata
    return identity
