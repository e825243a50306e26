"""Batches of any kind: a TensorDict, or nested dicts, lists and tuples of tensors.

`flatten` and `build` take a TensorDict apart by nested key and build it again; everything that stores batches uses
them. `map_tensors` and the functions below it replace, copy, move and stamp the tensors of any batch. `to_state` and
`from_state` turn a batch into plain data for a checkpoint. Importing this module does not import tensordict.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from slipstream.errors import UnsupportedStateError
from slipstream.tensors import import_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Batch = Any
"""A TensorDict; or nested dicts, lists and tuples of tensors."""
Key = tuple[str, ...]
"""The nested key of a tensor in a TensorDict."""
Path = tuple[Any, ...]
"""Where a tensor is in a batch: keys of dicts, positions in lists and tuples."""

STAMP = ("collector", "policy_version")
"""Where a batch holds the version of the weights that collected it."""


def is_tensordict(batch: Batch) -> bool:
    """Return whether `batch` is a TensorDict of any kind, without importing tensordict."""
    # A batch can be a TensorDict only if something has imported the package already.
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(batch, tensordict.TensorDictBase)


def flatten(batch: TensorDictBase) -> dict[Key, Any]:
    """Return the members of a TensorDict by nested key, in order; `build` is the inverse.

    A nested TensorDict becomes its batch size, a `torch.Size`, followed by its members. Tensors are not copied.
    Anything else, such as `NonTensorData`, is returned unchanged: the caller decides what to do with it.

    Raises:
        ValueError: If a lazy stack has parts with different keys or shapes.
    """
    return dict(_members_of(batch, ()))


def _members_of(node: Any, above: Key) -> Iterator[tuple[Key, Any]]:
    tensordict = import_tensordict()
    if isinstance(node, tensordict.LazyStackedTensorDict):
        _check_same_keys(node, above)
    for name in node.keys():  # noqa: SIM118 - a TensorDict iterates over its first axis
        key = (*above, str(name))
        try:
            value = node.get(name)
        except RuntimeError as error:
            # A lazy stack cannot stack tensors of different shapes.
            raise ValueError(f"{'/'.join(key)} has different shapes in different environments ({error})") from error
        # Objects such as strings are tensor collections to tensordict, but have no members.
        is_object = isinstance(value, (tensordict.NonTensorData, tensordict.NonTensorStack))
        if tensordict.is_tensor_collection(value) and not is_object:
            yield key, torch.Size(value.batch_size)
            yield from _members_of(value, key)
        elif isinstance(value, tensordict.MemoryMappedTensor):
            # Functions that check for plain tensors would refuse the subclass.
            yield key, value.as_subclass(torch.Tensor)
        else:
            yield key, value


def _check_same_keys(stack: Any, above: Key) -> None:
    """Raise `ValueError` if the parts of a lazy stack have different keys: the stack would hide some of them."""
    parts = [set(part.keys(include_nested=True, leaves_only=True)) for part in stack.tensordicts]
    ragged = sorted(map(str, set.union(*parts) - set.intersection(*parts)))
    if ragged:
        raise ValueError(
            f"{'/'.join(above) or 'the batch'} is a stack whose parts have different keys: {', '.join(ragged[:3])} "
            "are not in all of them"
        )


def build(
    members: Mapping[Key, Any],
    batch_size: tuple[int, ...],
    *,
    names: tuple[str | None, ...] = (),
    device: torch.device | None = None,
) -> TensorDictBase:
    """Build a TensorDict from tensors by nested key; the inverse of `flatten`. Tensors are not copied.

    Args:
        members: Tensors by nested key, in order. A `torch.Size` stands for a nested TensorDict of that batch size.
            Nested TensorDicts that are not listed are created where their first member is, with `batch_size`.
        batch_size: The batch size of the TensorDict.
        names: The names of its axes, if they have any.
        device: Its device. Tensors that are elsewhere are moved.

    Raises:
        RuntimeError: If the shape of a tensor does not begin with the batch size.
    """
    make = import_tensordict().TensorDict
    contents: dict[Key, dict[str, Any]] = {(): {}}
    sizes: dict[Key, tuple[int, ...]] = {(): batch_size}
    for key, value in members.items():
        # Parents first: dicts keep the order of insertion, and so does the TensorDict.
        for depth in range(1, len(key)):
            _open_node(contents, sizes, key[:depth], batch_size)
        if isinstance(value, torch.Size):
            _open_node(contents, sizes, key, value)
        else:
            contents[key[:-1]][key[-1]] = value
    # Innermost first, so that every TensorDict is made once, from complete members. The root has the shortest key, so
    # it is the last `node`.
    for key in sorted(contents, key=len, reverse=True):
        node = make(contents[key], batch_size=sizes[key], device=device)
        if key:
            contents[key[:-1]][key[-1]] = node
    # Set at the root, because that names the axes of nested TensorDicts too.
    if any(names):
        node.names = list(names)
    batch: TensorDictBase = node
    return batch


def _open_node(
    contents: dict[Key, dict[str, Any]], sizes: dict[Key, tuple[int, ...]], key: Key, batch_size: tuple[int, ...]
) -> None:
    if key in contents:
        return
    contents[key] = {}
    sizes[key] = batch_size
    # Reserves its place in the order of its parent's members. The TensorDict replaces this when it is made.
    contents[key[:-1]][key[-1]] = None


def map_tensors(
    batch: Batch,
    function: Callable[[Path, torch.Tensor], torch.Tensor],
    device: torch.device | None = None,
    path: Path = (),
) -> Batch:
    """Return a new batch of the same structure, each tensor replaced; other values are deep copies.

    Args:
        batch: Any batch.
        function: Returns the replacement of a tensor, given its path.
        device: The device of all replacements, to be set in TensorDicts; None if it does not change.
        path: Where `batch` is in a larger one.
    """
    if isinstance(batch, torch.Tensor):
        return function(path, batch)
    if is_tensordict(batch):

        def replace(name: Any, tensor: torch.Tensor) -> torch.Tensor:
            return function((*path, name), tensor)

        return batch.named_apply(replace, nested_keys=True, device=device or batch.device)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function, device, (*path, key)) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map_tensors(value, function, device, (*path, index)) for index, value in enumerate(batch))
    # Not a tensor: a copy, so that the new batch shares nothing with the old one.
    return copy.deepcopy(batch)


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Return every tensor of a batch."""
    found: list[torch.Tensor] = []

    def note(_: Path, tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found


def clone(batch: Batch) -> Batch:
    """Return a deep copy."""

    def clone_tensor(_: Path, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    return map_tensors(batch, clone_tensor)


def move(batch: Batch, device: torch.device | None) -> Batch:
    """Return a batch on a device: the batch itself if it is there already. Tensors that need not move are shared."""
    if device is None:
        return batch
    if is_tensordict(batch):
        return batch if batch.device == device else batch.to(device)
    if all(tensor.device == device for tensor in tensors_of(batch)):
        return batch

    def move_tensor(_: Path, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    return map_tensors(batch, move_tensor)


def stamp(batch: Batch, version: int) -> Batch:
    """Write into a batch which version of the weights collected it, in place.

    A TensorDict gets one int64 per element, a dict gets one for the whole batch. Other batches have no place for it.
    """
    if is_tensordict(batch):
        device = batch.device
        # Without a device, its tensors can be anywhere: put the stamp next to the first one.
        if device is None:
            device = next((tensor.device for tensor in tensors_of(batch)), None)
        batch.set(STAMP, torch.full(batch.batch_size, version, dtype=torch.int64, device=device))
    elif isinstance(batch, dict):
        group, name = STAMP
        # A new inner dict, because the environment may yield the same one again.
        batch[group] = {**batch.get(group, {}), name: torch.tensor(version)}
    return batch


def to_state(batch: Batch) -> Any:
    """Return a copy of a batch as plain data that any checkpoint format can store.

    Raises:
        UnsupportedStateError: If it is a TensorDict that cannot be converted to a plain one, or that holds an object
            per element which differs between elements.
    """
    if not is_tensordict(batch):
        return {"tree": clone(batch)}
    try:
        # `contiguous` turns lazy stacks into plain TensorDicts, and raises if their parts differ.
        return _tensordict_to_state(batch.contiguous())
    except RuntimeError as error:
        raise UnsupportedStateError(f"a batch that is not consumed yet cannot be stored: {error}") from error


def from_state(state: Mapping[str, Any]) -> Batch:
    """Return the batch that `to_state` was given, in new memory."""
    # A copy, because the state may be loaded more than once.
    if "tree" in state:
        return clone(state["tree"])
    return clone(_tensordict_from_state(state))


def _tensordict_to_state(batch: Any) -> dict[str, Any]:
    tensordict = import_tensordict()
    members: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            members[key] = value.clone()
        elif isinstance(value, tensordict.NonTensorData):
            members[key] = {"value": copy.deepcopy(value.data)}
        elif is_tensordict(value) and not isinstance(value, tensordict.NonTensorStack):
            members[key] = _tensordict_to_state(value)
        else:
            raise UnsupportedStateError(f"{key} is a {type(value).__qualname__}, which cannot be stored as plain data")
    device = None
    if batch.device is not None:
        device = str(batch.device)
    return {"members": members, "batch_size": list(batch.batch_size), "names": list(batch.names), "device": device}


def _tensordict_from_state(state: Mapping[str, Any]) -> Any:
    make = import_tensordict().TensorDict
    batch = make({}, batch_size=state["batch_size"], names=state["names"], device=state["device"])
    for key, value in state["members"].items():
        if isinstance(value, torch.Tensor):
            batch.set(key, value)
        elif "value" in value:
            batch.set_non_tensor(key, value["value"])
        else:
            batch.set(key, _tensordict_from_state(value))
    return batch
