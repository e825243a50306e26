"""Split nested data into its structure and its leaves, without importing torch: its types are recognized by name.

The list of what can be stored is closed, and everything on it comes back with the same type and the same bits:

* None, bool, int, float, complex, str, bytes, bytearray, range, slice, and `pathlib.Path`;
* list, tuple, set, frozenset, dict, `collections.Counter`, `collections.OrderedDict` (with the ``_metadata`` of a
  module's state dict);
* `numpy.ndarray` and NumPy's scalars: bools, integers, floats up to 64 bits, complex numbers up to 128 bits, text,
  bytes, void without fields, dates and durations; arrays in either byte order;
* ``torch.Tensor`` and ``torch.nn.Parameter`` with strided memory, ``torch.dtype``, ``torch.device``, ``torch.Size``;
* ``tensordict.TensorDict`` of these tensors, with its batch size, names and device.

Subclasses are not on the list: what a subclass adds would be lost. Some properties are not part of a value: the memory
order of an array and whether it is writable; the gradient, history, hooks and Python attributes of a tensor; whether a
TensorDict is locked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.schema.keys import Keys
from slipstream.schema.nodes import LEAF_TAGS, Key, tag_of
from slipstream.schema.refusals import tensor_problem, unsupported
from slipstream.schema.structure import select_keys
from slipstream.schema.unflatten import read_plain
from slipstream.schema.values import Json, TorchValues
from slipstream.schema.walk import end_nodes, leaf_nodes
from slipstream.schema.writer import Writer


@dataclass(frozen=True)
class Tree:
    """Nested data as `flatten` returns it.

    Attributes:
        structure: The data as JSON, with a node for every leaf.
        leaves: The tensors and arrays, in the order of the structure.
        nodes: The key and the node of every leaf.
        objects: Other objects, if `flatten` accepts them. Their nodes say which is where.
        num_long_scalars: How many NumPy scalars are text, bytes or dates. A pickle has the whole dtype of each.
    """

    structure: Json
    leaves: list[Any]
    nodes: list[tuple[Key, Json]]
    objects: list[Any]
    num_long_scalars: int = 0

    def select_keys(self, keys: Keys) -> Tree:
        """Return the branches whose keys were requested. See `slipstream.schema.structure.select_keys`."""
        structure = select_keys(self.structure, keys, self.objects)
        # The nodes themselves are kept, so their identity tells which leaves are left.
        leaf_of_node = {id(node): leaf for (_, node), leaf in zip(self.nodes, self.leaves, strict=True)}
        nodes = list(leaf_nodes(structure, (), self.objects))
        leaves = [leaf_of_node[id(node)] for _, node in nodes]
        return Tree(structure, leaves, nodes, self.objects)

    def values(self, torch: TorchValues | None = None) -> Iterator[tuple[Key, Any]]:
        """Yield every leaf and every plain value with its key, in order. See `unflatten` for `torch`."""
        leaves = iter(self.leaves)
        for key, node in end_nodes(self.structure, self.objects):
            if tag_of(node) in LEAF_TAGS:
                yield key, next(leaves)
            else:
                yield key, read_plain(node, key, self.objects, torch)


def flatten(value: Any, *, opaque: bool = False, key: Key = ()) -> Tree:
    """Split nested data into its structure and its leaves.

    Copies plain values; the leaves are the tensors and arrays themselves. Keys and sets may hold plain values only.
    Whatever this accepts comes back with the same type and the same bits; the docstring of the module has the list.

    Args:
        value: Nested dicts, lists, tuples and TensorDicts of tensors, arrays and plain values.
        opaque: Whether to accept anything else, as an object that is passed through. The structure is then for
            `unflatten` in the same process, not for a file.
        key: Where `value` itself is, for error messages.

    Raises:
        UnsupportedStateError: If something cannot be stored as data. Names its key, and what to store instead.

    Example:
        >>> import numpy as np
        >>> tree = flatten({"weights": np.zeros(2), "betas": (0.9, 0.999)})
        >>> tree.structure["weights"], len(tree.leaves)
        ({'$': 'array', 'dtype': '<f8', 'shape': [2]}, 1)
    """
    writer = Writer(opaque=opaque)
    structure = writer.write(value, key)
    return Tree(structure, writer.leaves, writer.nodes, writer.objects, writer.num_long_scalars)


def check_storable(tensor: Any, key: Key) -> None:
    """Raise `UnsupportedStateError` unless a tensor is a plain strided piece of memory."""
    problem = tensor_problem(tensor)
    if problem:
        raise unsupported(key, problem)
