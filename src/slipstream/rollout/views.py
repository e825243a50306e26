"""Views of a packed TensorDict: tensordict operates on placeholders, and the result is taken for a packed one again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from slipstream.rollout.lazy import LazyTensor, Leaves, PackedTensor, Steps

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Make = Callable[[Any, dict[str, Any]], Any]
"""Makes a packed TensorDict from one with its batch size and names, and its members."""

# Not the constructor: it checks every member, and erases names of nested TensorDicts if the outer one has none.
new_plain = TensorDict._new_unsafe


class Placeholders:
    """Turns packed TensorDicts into plain ones of placeholders, and views of those into packed TensorDicts.

    Args:
        make: Makes the packed TensorDicts that views become.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        # What a placeholder stands for, by its storage: views of it have the same.
        self._sources: dict[int, PackedTensor] = {}
        self._known: set[int] = set()
        # The packed TensorDict that each node of the tree stands for.
        self._originals: dict[int, Any] = {}

    def add(self, tensor: LazyTensor) -> torch.Tensor:
        """Return the placeholder of a tensor, from now on known."""
        storage = _storage_of(tensor.placeholder)
        self._sources[storage] = tensor.source
        self._known.add(storage)
        return tensor.placeholder

    def add_tree(self, packed: Any) -> TensorDictBase:
        """Return a plain TensorDict that stands for a packed one; tensors that are not lazy are in it themselves."""
        members: dict[str, Any] = {}
        for name, member in packed.leaves.members.items():
            if isinstance(member, LazyTensor):
                members[name] = self.add(member)
            elif is_packed(member):
                members[name] = self.add_tree(member)
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
            if type(value) is TensorDict:
                members[name] = self.adopt(value)
            elif isinstance(value, torch.Tensor) and value.is_meta and _storage_of(value) in self._sources:
                members[name] = LazyTensor(self._sources[_storage_of(value)], value)
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
    """Return whether a member is a nested TensorDict with lazy members."""
    return isinstance(getattr(member, "leaves", None), Leaves)


def flat_members(packed: Any) -> Iterator[Any]:
    """Yield the lazy and other tensors of a packed TensorDict, nested ones as well."""
    for member in packed.leaves.members.values():
        if is_packed(member):
            yield from flat_members(member)
        elif isinstance(member, TensorDict):
            yield from member.values(include_nested=True, leaves_only=True)
        else:
            yield member


def lazy_members(packed: Any) -> list[LazyTensor]:
    """Return the lazy tensors of a packed TensorDict, nested ones as well."""
    return [member for member in flat_members(packed) if isinstance(member, LazyTensor)]


def rebuild(packed: Any, replace: Callable[[Any], Any], like: Any) -> TensorDictBase:
    """Return a plain TensorDict with the structure of a packed one, each tensor replaced.

    Args:
        packed: The packed TensorDict.
        replace: Returns the replacement of a lazy tensor, a tensor or a plain nested TensorDict.
        like: Has the batch size and names of the result; nested ones keep their additional axes.
    """
    members: dict[str, Any] = {}
    for name, member in packed.leaves.members.items():
        if is_packed(member):
            members[name] = rebuild(member, replace, Axes.nested(packed, member, like))
        else:
            members[name] = replace(member)
    return plain(members, like, packed.device)


def plain(members: dict[str, Any], like: Any, device: torch.device | None) -> TensorDictBase:
    """Return a plain TensorDict of members that fit, with the batch size and names of another one."""
    return new_plain(members, batch_size=like.batch_size, names=names_of(like), device=device)


def take(packed: Any, index: Any) -> TensorDictBase:
    """Return what an index with tensors selects; decodes only the groups that it touches."""
    # Most tensors show the same steps: compute their numbers once.
    steps_of: dict[int, Steps] = {}
    lazy = lazy_members(packed)
    for tensor in lazy:
        steps = tensor.steps
        is_indexable = steps is not None and len(steps.shape) >= packed.batch_dims
        if steps is not None and is_indexable and tensor.source.tensor is None:
            steps_of[id(tensor)] = steps
    distinct = list(dict.fromkeys(steps_of.values()))
    # TensorDict knows the rules for indices, batch sizes and names, so let it index the numbers of the steps.
    numbers = {str(position): steps.numbers() for position, steps in enumerate(distinct)}
    indexed = TensorDict(numbers, batch_size=packed.batch_size, names=names_of(packed))[on_host(index)]
    chosen = dict(zip(distinct, indexed.values(), strict=True))
    values: dict[int, torch.Tensor] = {}
    for steps, numbers_chosen in chosen.items():
        members = [tensor for tensor in lazy if steps_of.get(id(tensor)) == steps]
        values.update(_read_steps(members, numbers_chosen))

    def replace(member: Any) -> Any:
        if id(member) in values:
            return values[id(member)]
        if isinstance(member, LazyTensor):
            member = member.read()
        return TensorDict({"value": member}, batch_size=packed.batch_size)[index].get("value")

    return rebuild(packed, replace, indexed)


def _read_steps(tensors: Sequence[LazyTensor], numbers: torch.Tensor) -> dict[int, torch.Tensor]:
    """Read some steps of tensors by their numbers; returns the values by the `id` of the tensor."""
    flat = numbers.reshape(-1).numpy()
    found: dict[int, torch.Tensor] = {}
    by_arrays: dict[int, list[LazyTensor]] = {}
    for tensor in tensors:
        by_arrays.setdefault(id(tensor.source.arrays), []).append(tensor)
    for group in by_arrays.values():
        fields = [tensor.source.field for tensor in group]
        parts = group[0].source.arrays.read(fields, flat)
        for tensor, part in zip(group, parts, strict=True):
            shape = (*numbers.shape, *tensor.source.field.shape)
            found[id(tensor)] = tensor.source.as_tensor(part, shape)
    return found


def clone_member(member: Any) -> Any:
    """Return a copy of a member that is written to separately."""
    return member.clone()


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
