"""What a rollout is: a TensorDict as named arrays, each observation once, and back.

An observation and its ``next`` are one array of ``T + 1`` steps, a mask of the steps where they differ, and the rows of
``next`` there; see `slipstream.trajectory`. A pair that differs in more than a quarter of its steps stays two arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, FormatVersionError, RolloutError
from slipstream.tensors import View, carrier, check_storable, settled, storage_of, view_storage
from slipstream.trajectory import NEXT, SharedNext, exception_rows, is_transposed
from slipstream.tree import import_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDictBase

VERSION = 1
Key = tuple[str, ...]
Reader = Callable[[str, slice | None], NDArray[Any]]
"""Reads the array of a name, or some rows (environments) of it."""

_MAX_DEPTH = 64
_MAX_SIZE = 1 << 40


@dataclass(frozen=True)
class Field:
    """A tensor of a rollout.

    Attributes:
        key: Its nested key.
        dtype: Its dtype.
        shape: Its shape after environment and time.
        array: The name of the array that holds it.
        lead: 0 for the steps as they are; 1 for those one later, of an array with a step more.
        mask: For ``lead`` 1: the name of the array that tells where it differs from what comes one step later.
        rows: For ``lead`` 1: the name of the array with its values there.
        extra: How many steps the array has more than the rollout.
    """

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    array: str
    lead: int = 0
    mask: str | None = None
    rows: str | None = None
    extra: int = 0


@dataclass(frozen=True)
class Layout:
    """How a rollout lies in its arrays.

    Attributes:
        batch_size: Of the TensorDict.
        time_dim: Which of its axes is time; those before it are environments.
        names: The names of its axes, if they have any.
        fields: Its tensors.
        nodes: The nested TensorDicts, their batch sizes, and how many of the tensors come before each.
    """

    batch_size: tuple[int, ...]
    time_dim: int
    names: tuple[str | None, ...]
    fields: tuple[Field, ...]
    nodes: tuple[tuple[Key, tuple[int, ...], int], ...] = ()

    @property
    def num_envs(self) -> int:
        """How many environments there are."""
        return math.prod(self.batch_size[: self.time_dim])

    @property
    def num_steps(self) -> int:
        """How many steps each made."""
        return self.batch_size[self.time_dim]

    @property
    def row_arrays(self) -> set[str]:
        """The arrays of exceptions, whose first axis is not that of the environments."""
        return {field.rows for field in self.fields if field.rows is not None}

    @property
    def raw_bytes(self) -> int:
        """Size of all tensors, ``next`` included."""
        steps = self.num_envs * self.num_steps
        return sum(steps * math.prod(field.shape) * field.dtype.itemsize for field in self.fields)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        fields = []
        for item in self.fields:
            node: dict[str, Any] = {
                "key": list(item.key),
                "dtype": str(item.dtype).removeprefix("torch."),
                "shape": list(item.shape),
                "array": item.array,
            }
            if item.extra:
                node["extra"] = item.extra
            if item.lead:
                node |= {"lead": item.lead, "mask": item.mask, "rows": item.rows}
            fields.append(node)
        return {
            "version": VERSION,
            "batch_size": list(self.batch_size),
            "time_dim": self.time_dim,
            "names": list(self.names),
            "fields": fields,
            "nodes": [[list(key), list(size), position] for key, size, position in self.nodes],
        }

    @classmethod
    def from_json(cls, node: Any) -> Layout:
        """Read what `to_json` wrote.

        Raises:
            CorruptFileError: If it is something else.
            FormatVersionError: If a newer release wrote it.
        """
        if not isinstance(node, dict) or type(node.get("version")) is not int:
            raise CorruptFileError("does not say how its rollout is laid out")
        if node["version"] != VERSION:
            raise FormatVersionError(
                f"holds a rollout of layout version {node['version']}, this release reads version {VERSION}"
            )
        try:
            sizes, (time_dim,) = _sizes(node["batch_size"]), _sizes([node["time_dim"]])
            sizes[time_dim]  # raises if there is no such axis
            layout = cls(
                sizes,
                time_dim,
                tuple(name if name is None else str(name) for name in _list(node["names"])),
                tuple(_read_field(item) for item in node["fields"]),
                tuple((tuple(map(str, _list(key))), _sizes(size), int(at)) for key, size, at in node["nodes"]),
            )
            _check_keys(layout)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CorruptFileError(f"says of its rollout what no writer writes ({error})") from error
        return layout


def _check_keys(layout: Layout) -> None:
    """Raise `ValueError` unless the keys of a layout make a tree, and its nested ones and names fit the batch."""
    tensors, nodes = [item.key for item in layout.fields], [key for key, _, _ in layout.nodes]
    above = {key[:depth] for key in (*tensors, *nodes) for depth in range(1, len(key))}
    if len({*tensors, *nodes}) < len(tensors) + len(nodes) or above & set(tensors) or () in nodes:
        raise ValueError("two of its keys are one, or one is below a tensor")
    if any(size[: len(layout.batch_size)] != layout.batch_size for _, size, _ in layout.nodes):
        raise ValueError("a nested batch size does not begin with that of the batch")
    names = [name for name in layout.names if name is not None]
    if len(layout.names) not in (0, len(layout.batch_size)) or len(set(names)) < len(names):
        raise ValueError(f"{len(layout.names)} names for {len(layout.batch_size)} axes, or one twice")
    if any(len(key) > _MAX_DEPTH for key in (*tensors, *nodes)):
        raise ValueError("a key has too many parts")
    if len({(item.array, item.lead) for item in layout.fields}) < len(layout.fields):
        raise ValueError("two tensors are in one place")
    for key, _, position in layout.nodes:
        if any(name[: len(key)] == key for name in tensors[:position]) or not 0 <= position <= len(tensors):
            raise ValueError(f"{'/'.join(key)} comes after what is in it")


def _list(node: Any) -> list[Any]:
    if not isinstance(node, list):
        raise TypeError(f"{str(node)[:60]} is not a list")
    return node


def _sizes(node: Any) -> tuple[int, ...]:
    if any(type(size) is not int or not 0 <= size <= _MAX_SIZE for size in _list(node)):
        raise ValueError(f"{str(node)[:60]} is not a list of sizes")
    return tuple(node)


def _read_field(node: Any) -> Field:
    dtype = getattr(torch, str(node["dtype"]))
    lead, extra = node.get("lead", 0), node.get("extra", 0)
    if not isinstance(dtype, torch.dtype) or lead not in (0, 1) or extra not in (0, 1) or lead > extra:
        raise ValueError(f"the tensor {str(node)[:80]} makes no sense")
    names = (str(node["array"]), str(node["mask"]) if lead else None, str(node["rows"]) if lead else None)
    if not _list(node["key"]) or not all(isinstance(part, str) for part in node["key"]):
        raise ValueError(f"{str(node['key'])[:60]} is not a key")
    return Field(tuple(node["key"]), dtype, _sizes(node["shape"]), names[0], lead, names[1], names[2], extra)


@dataclass
class Rollout:
    """A batch taken apart: its layout, and the arrays, which are memory of their own."""

    layout: Layout
    arrays: dict[str, NDArray[Any]]
    floats: dict[str, bool] = field(default_factory=dict)


def take_apart(batch: TensorDictBase) -> Rollout:
    """Copy a batch ``[environment, time, ...]`` into arrays, observations that ``next`` repeats once.

    The batch may be reused as soon as this returns. Tensors on other devices are copied to the host.

    Raises:
        RolloutError: If it is not a rollout: no time axis, time first, keys that differ between environments.
        UnsupportedStateError: If it holds something other than dense tensors; it says where and what.
    """
    time_dim = _time_dim(batch)
    batch_size = tuple(batch.batch_size)
    rollout = Rollout(Layout(batch_size, time_dim, tuple(batch.names or ()), ()), {})
    leaves: dict[Key, torch.Tensor] = {}
    nodes: list[tuple[Key, tuple[int, ...], int]] = []
    for key, value in _walk(batch, ()):
        if isinstance(value, torch.Tensor):
            steps = (rollout.layout.num_envs, rollout.layout.num_steps, *value.shape[time_dim + 1 :])
            leaves[key] = settled(value).cpu().reshape(steps)
        else:
            nodes.append((key, tuple(value.batch_size), len(leaves)))
    fields: dict[Key, Field] = {}
    for key, tensor in leaves.items():
        twin = leaves.get((NEXT, *key))
        if key[0] != NEXT and twin is not None:
            fields.update({item.key: item for item in _share(rollout, key, tensor, twin)})
    left = {key: tensor for key, tensor in leaves.items() if key not in fields}
    _check_axes(left)
    fields.update({key: _keep(rollout, key, tensor) for key, tensor in left.items()})
    ordered = tuple(fields[key] for key in leaves)
    rollout.layout = Layout(batch_size, time_dim, rollout.layout.names, ordered, tuple(nodes))
    return rollout


def _time_dim(batch: TensorDictBase) -> int:
    if not import_tensordict().is_tensor_collection(batch):
        raise RolloutError(f"a rollout is a TensorDict of shape [environment, time, ...], not a {type(batch).__name__}")
    names = list(batch.names or ())
    if not batch.batch_size:
        raise RolloutError("the batch has no batch size: a rollout has the shape [environment, time, ...]")
    if "time" not in names:
        return min(1, len(batch.batch_size) - 1)
    if names.index("time") == 0 and len(names) > 1:
        raise RolloutError(
            f"the first axis of the batch {list(batch.batch_size)} is named 'time': a rollout has the shape "
            "[environment, time, ...]; give batch.transpose(0, 1)"
        )
    return names.index("time")


def _walk(node: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """Yield the nested TensorDicts and the tensors of a batch, by key."""
    from tensordict import LazyStackedTensorDict, MemoryMappedTensor, is_tensor_collection  # noqa: PLC0415
    from tensordict.tensorclass import NonTensorData, NonTensorStack  # noqa: PLC0415

    if isinstance(node, LazyStackedTensorDict):
        first, *others = [set(part.keys(include_nested=True, leaves_only=True)) for part in node.tensordicts]
        ragged = sorted({str(name) for other in others for name in first ^ other})
        if ragged:
            raise RolloutError(
                f"{'/'.join(key) or 'the batch'} is a stack whose parts have different keys: {', '.join(ragged[:3])} "
                "are not in all of them"
            )
    for name in node.keys():  # noqa: SIM118 - a TensorDict iterates over its first axis
        path = (*key, str(name))
        try:
            value = node.get(name)
        except RuntimeError as error:  # a stack of different shapes
            raise RolloutError(f"{'/'.join(path)} has different shapes in different environments ({error})") from error
        if isinstance(value, (NonTensorData, NonTensorStack)):
            raise RolloutError(f"{'/'.join(path)} is not a tensor, and cannot be stored; exclude it from the batch")
        if isinstance(value, MemoryMappedTensor):
            value = value.as_subclass(torch.Tensor)
        if is_tensor_collection(value):
            yield path, value
            yield from _walk(value, path)
        else:
            check_storable(value, path)
            yield path, value


def _keep(rollout: Rollout, key: Key, tensor: torch.Tensor) -> Field:
    """Store a tensor as a separate array."""
    content = _view_as_array(tensor.clone(memory_format=torch.contiguous_format))
    name = _add(rollout, "/".join(key), content, carrier(tensor.dtype)[1])
    return Field(key, tensor.dtype, tuple(tensor.shape[2:]), name)


def _add(rollout: Rollout, name: str, array: NDArray[Any], is_float: bool) -> str:
    """Store an array under a name that is not taken, and return that name."""
    unique = name
    number = 2
    while unique in rollout.arrays:
        unique = f"{name}#{number}"
        number += 1
    rollout.arrays[unique] = array
    rollout.floats[unique] = is_float
    return unique


def _check_axes(leaves: dict[Key, torch.Tensor]) -> None:
    """Raise if ``next`` follows along the first axis of the batch, for pairs that are not shared along the second."""
    for key, root in leaves.items():
        after = leaves.get((NEXT, *key))
        if after is None or (root.dtype, root.shape) != (after.dtype, after.shape):
            continue
        if is_transposed(_view_as_array(root), _view_as_array(after)):
            raise RolloutError(
                f"{'/'.join(key)}: 'next' follows along the first axis of the batch and not along the second; "
                "a rollout has the shape [environment, time, ...]: pass batch.transpose(0, 1)"
            )


def _share(rollout: Rollout, key: Key, root: torch.Tensor, after: torch.Tensor) -> tuple[Field, ...]:
    """Store an observation and its ``next`` as one array with one more step; returns nothing if that does not pay."""
    if root.dtype != after.dtype:
        return ()
    shared = SharedNext.of(_view_as_array(root), _view_as_array(after))
    if shared is None:
        return ()
    is_float = carrier(root.dtype)[1]
    name = _add(rollout, "/".join(key), shared.whole, is_float)
    mask = _mask(rollout, shared.breaks)
    rows = _add(rollout, f"{NEXT}/{'/'.join(key)}", shared.exceptions, is_float)
    shape = tuple(root.shape[2:])
    return (
        Field(key, root.dtype, shape, name, extra=1),
        Field((NEXT, *key), root.dtype, shape, name, 1, mask, rows, extra=1),
    )


def _view_as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """View a tensor on the CPU as the array that carries it; strides are kept."""
    kind = carrier(tensor.dtype)[0]
    # Integers of the same size hold the bits of dtypes that NumPy lacks.
    if kind.kind == "u" and tensor.dtype != torch.uint8:
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        return tensor.view(words).numpy().view(kind)
    return tensor.numpy()


def _mask(rollout: Rollout, breaks: NDArray[np.bool_]) -> str:
    """Store a mask of breaks. Most observations have the same breaks, whose mask is stored once."""
    for name, array in rollout.arrays.items():
        if name.startswith("exceptions") and np.array_equal(array, breaks):
            return name
    return _add(rollout, "exceptions", breaks, is_float=False)


def put_together(
    layout: Layout,
    read: Reader,
    keys: Sequence[str | Key] | None = None,
    envs: slice | None = None,
    steps: slice | None = None,
) -> TensorDictBase:
    """Make the TensorDict of a rollout, or of a part of it; only the arrays that takes are read.

    Args:
        layout: How it lies in its arrays.
        read: Reads them.
        keys: Nested keys, or the first parts of some; all by default.
        envs: Which environments; all by default. More than one axis of them becomes one.
        steps: Which steps; all by default.

    Raises:
        KeyError: If there is nothing of a key.
    """
    wanted = _select(layout, keys)
    if envs is not None and not layout.time_dim:
        raise RolloutError(f"the rollout has the shape {list(layout.batch_size)}, without an axis for environments")
    first, last = _bounds(envs, layout.num_envs, "environments")
    begin, end = _bounds(steps, layout.num_steps, "steps")
    rows = None if (first, last) == (0, layout.num_envs) else slice(first, last)
    lead = (*(layout.batch_size[: layout.time_dim] if envs is None else (last - first,)), end - begin)
    known: dict[str, NDArray[Any]] = {}

    def fetch(name: str, part: slice | None = rows) -> NDArray[Any]:
        if name not in known:
            known[name] = read(name, part)
        return known[name]

    members: dict[Key, Any] = {}
    for item in wanted:
        array = fetch(item.array)
        expected = (last - first, layout.num_steps + item.extra, *item.shape)
        if array.shape != expected or array.dtype != carrier(item.dtype)[0]:
            raise CorruptFileError(f"{'/'.join(item.key)} is {array.dtype}{list(array.shape)}, not {list(expected)}")
        if item.mask is not None and item.rows is not None:
            breaks = fetch(item.mask, None)
            exceptions = read(item.rows, exception_rows(breaks, slice(first, last)))
            part = _next_of(item, array, breaks[first:last], exceptions, slice(begin, end))
        else:
            part = array[:, begin:end]
            if item.extra or part.shape != array.shape:
                part = np.array(part, order="C")
        members[item.key] = tensor_of(part, item.dtype, (*lead, *item.shape))
    batch_size = (*lead, *layout.batch_size[layout.time_dim + 1 :])
    try:
        batch = assemble(layout, members, batch_size, complete=keys is None)
        if envs is None and any(layout.names):
            batch.names = list(layout.names)
    except (RuntimeError, ValueError) as error:
        raise CorruptFileError(f"its tensors make no TensorDict of size {list(batch_size)} ({error})") from error
    return batch


def _next_of(
    item: Field, whole: NDArray[Any], breaks: NDArray[Any], exceptions: NDArray[Any], steps: slice
) -> NDArray[Any]:
    try:
        return SharedNext(whole, breaks, exceptions).next(steps)
    except ValueError as error:
        raise CorruptFileError(f"{'/'.join(item.key)}: {error}") from error


def assemble(
    layout: Layout, members: dict[Key, torch.Tensor], batch_size: tuple[int, ...], *, complete: bool
) -> TensorDictBase:
    """Make a TensorDict of tensors by nested key, in the order that they had, nested batch sizes included."""
    make = import_tensordict().TensorDict
    batch: TensorDictBase = make({}, batch_size=batch_size)
    order = [(position, 0, key, size) for key, size, position in layout.nodes]
    order += [(position, 1, item.key, ()) for position, item in enumerate(layout.fields)]
    for _, is_tensor, key, size in sorted(order, key=lambda entry: entry[:2]):
        if is_tensor and key in members:
            batch.set(key, members[key])
        elif not is_tensor and (complete or any(name[: len(key)] == key for name in members)):
            inner = size[len(layout.batch_size) :]
            batch.set(key, make({}, batch_size=(*batch_size, *inner)))
    return batch


def arrays_of(layout: Layout, keys: Sequence[str | Key] | None = None) -> list[str]:
    """Return the names of the arrays that hold some keys, or all; raises `KeyError` as `put_together` does."""
    names = [name for item in _select(layout, keys) for name in (item.array, item.mask, item.rows)]
    return [name for name in dict.fromkeys(names) if name is not None]


def _select(layout: Layout, keys: Sequence[str | Key] | None) -> list[Field]:
    if keys is None:
        return list(layout.fields)
    wanted: list[Field] = []
    for key in [(key,) if isinstance(key, str) else tuple(key) for key in ([keys] if isinstance(keys, str) else keys)]:
        found = [item for item in layout.fields if item.key[: len(key)] == key]
        if not found:
            known = ", ".join("/".join(item.key) for item in layout.fields[:8])
            raise KeyError(f"the rollout has nothing under {'/'.join(key)!r}; it has {known}")
        wanted += [item for item in found if item not in wanted]
    return wanted


def _bounds(part: slice | None, size: int, what: str) -> tuple[int, int]:
    if part is None:
        return 0, size
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise ValueError(f"{what} are chosen by a slice with step 1, not by {part!r}")
    start, stop, _ = part.indices(size)
    return start, max(start, stop)


def tensor_of(array: NDArray[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of a contiguous array's memory."""
    memory = array.reshape(-1).view(np.uint8)
    stride = torch.empty(shape, device="meta").stride()
    return view_storage(storage_of(memory), View(0, 0, dtype, shape, stride))
