"""Pytrees of tensors: dicts, lists, tuples and named tuples, as tensors by nested key and a structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from slipstream.errors import CorruptFileError, ReplayError, UnsupportedStateError
from slipstream.replay.roles import Key

_LEAF = "leaf"


@dataclass(frozen=True)
class Tree:
    """The structure of a pytree.

    Attributes:
        numbers: Its containers around the numbers 0, 1, ... instead of tensors.
        keys: The nested keys of its tensors, by number.
    """

    numbers: Any
    keys: tuple[Key, ...]

    def build(self, tensors: Mapping[Key, Any]) -> Any:
        """Return the containers around tensors."""

        def tensor_of(number: int) -> Any:
            return tensors[self.keys[number]]

        return pytree.tree_map(tensor_of, self.numbers)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON. A named tuple becomes a plain tuple, because no file may name a class.

        Raises:
            UnsupportedStateError: If it has containers that JSON cannot describe.
        """
        return {"shape": _to_json(self.numbers), "keys": [list(key) for key in self.keys]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Tree:
        """Read what `to_json` wrote.

        Raises:
            CorruptFileError: If it is not something that `to_json` writes.
        """
        spec = pytree.tree_structure(_from_json(document["shape"]))
        keys = tuple(tuple(map(str, key)) for key in document["keys"])
        if spec.num_leaves != len(keys):
            raise CorruptFileError(f"a tree of {spec.num_leaves} tensors has {len(keys)} keys")
        return cls(_numbered(spec), keys)


def split_tree(data: Any) -> tuple[dict[Key, torch.Tensor], Tree]:
    """Return the tensors of a pytree by nested key, and its structure.

    Raises:
        ReplayError: If it has no tensors.
        UnsupportedStateError: If it has something other than tensors.
    """
    pairs, spec = pytree.tree_flatten_with_path(data)
    if not pairs:
        raise ReplayError(f"a batch is an empty {type(data).__qualname__}, expected tensors")
    keys = [_key_of(path) for path, _ in pairs]
    if len(set(keys)) < len(keys):
        # Two keys of a dict, such as 3 and "3", have the same name.
        keys = [(str(number),) for number in range(len(pairs))]
    for key, (_, value) in zip(keys, pairs, strict=True):
        if not isinstance(value, torch.Tensor):
            where = "/".join(key) or "a batch"
            raise UnsupportedStateError(
                f"{where} is a {type(value).__qualname__}, expected a TensorDict, a tensor, or dicts, lists and tuples "
                "of tensors"
            )
    tensors = {key: value for key, (_, value) in zip(keys, pairs, strict=True)}
    return tensors, Tree(_numbered(spec), tuple(keys))


def _numbered(spec: Any) -> Any:
    return pytree.tree_unflatten(range(spec.num_leaves), spec)


def _key_of(path: Any) -> Key:
    return tuple(map(_name, path))


def _name(part: Any) -> str:
    """Return the name of one part of torch's path: a key of a dict, a position, or an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)


def _to_json(node: Any) -> Any:
    if isinstance(node, int):
        return _LEAF
    if type(node) is dict:
        pairs = []
        for key, value in node.items():
            if type(key) not in (str, int):
                raise UnsupportedStateError(f"a dict has the key {key!r}, which a folder cannot hold: use text")
            pairs.append([key, _to_json(value)])
        return {"dict": pairs}
    if type(node) is list:
        return {"list": [_to_json(value) for value in node]}
    if isinstance(node, tuple):
        return {"tuple": [_to_json(value) for value in node]}
    raise UnsupportedStateError(
        f"the batches are of type {type(node).__qualname__}, which a folder cannot hold: use dicts, lists and tuples"
    )


def _from_json(node: Any) -> Any:
    if node == _LEAF:
        return 0
    try:
        ((kind, content),) = node.items()
        if kind == "dict":
            return {key: _from_json(value) for key, value in content}
        children = [_from_json(value) for value in content]
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptFileError(f"invalid structure of a batch ({error})") from error
    if kind == "tuple":
        return tuple(children)
    return children
