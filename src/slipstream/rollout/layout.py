"""How a rollout lies in its arrays: fields, their JSON, and checks of what a file claims. No torch.

A rollout is a TensorDict ``[environment, time, ...]`` stored as named arrays whose first two axes are environment and
time. An observation and its ``next`` share one array of ``T + 1`` steps if they rarely differ; a mask and rows of
exceptions hold the difference (see `slipstream.trajectory`). ``docs/formats/rollout.md`` describes the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.schema.dtypes import DType, parse_torch_dtype

VERSION = 1
Key = tuple[str, ...]

_MAX_DEPTH = 64
_MAX_SIZE = 1 << 40
_SHOWN = 80  # characters of a wrong value in an error message


@dataclass(frozen=True)
class Field:
    """A tensor of a rollout.

    Attributes:
        key: Its nested key.
        dtype: Its torch dtype, and how NumPy carries it.
        shape: Its shape after environment and time.
        array: The name of the array that holds it.
        lead: 1 if it is the ``next`` of another field, whose array it shares; 0 otherwise.
        mask: If `lead` is 1, the name of the array that marks where it differs from the following step.
        rows: If `lead` is 1, the name of the array with its values at those steps.
        extra: How many more steps the array has than the rollout.
    """

    key: Key
    dtype: DType
    shape: tuple[int, ...]
    array: str
    lead: int = 0
    mask: str | None = None
    rows: str | None = None
    extra: int = 0

    @property
    def name(self) -> str:
        """The key as it is shown to users, such as ``agents/observation``."""
        return "/".join(self.key)

    @property
    def arrays(self) -> list[str]:
        """The names of all arrays needed to read it."""
        names = [self.array]
        if self.mask is not None:
            names.append(self.mask)
        if self.rows is not None:
            names.append(self.rows)
        return names


@dataclass(frozen=True)
class Node:
    """A nested TensorDict of a rollout.

    Attributes:
        key: Its nested key.
        batch_size: Its batch size, which begins with that of the rollout.
        position: How many fields come before it.
    """

    key: Key
    batch_size: tuple[int, ...]
    position: int


@dataclass(frozen=True)
class Layout:
    """Which arrays hold which tensors of a rollout.

    Attributes:
        batch_size: The batch size of the TensorDict.
        time_dim: Which of its axes is time; the axes before it are environments.
        names: The names of its axes; empty if none has a name.
        fields: Its tensors, in order.
        nodes: Its nested TensorDicts, in order.
    """

    batch_size: tuple[int, ...]
    time_dim: int
    names: tuple[str | None, ...]
    fields: tuple[Field, ...]
    nodes: tuple[Node, ...] = ()

    @property
    def num_envs(self) -> int:
        """Number of environments; several axes of them count as one."""
        return math.prod(self.batch_size[: self.time_dim])

    @property
    def num_steps(self) -> int:
        """Number of steps of each environment."""
        return self.batch_size[self.time_dim]

    @property
    def raw_bytes(self) -> int:
        """Size of all tensors, ``next`` included."""
        return sum(self.bytes_of(field) for field in self.fields)

    def bytes_of(self, field: Field, num_envs: int | None = None, num_steps: int | None = None) -> int:
        """Return the size of a tensor, or of some environments and steps of it."""
        if num_envs is None:
            num_envs = self.num_envs
        if num_steps is None:
            num_steps = self.num_steps
        return num_envs * num_steps * math.prod(field.shape) * field.dtype.itemsize

    def shape_of(self, field: Field) -> tuple[int, ...]:
        """Return the whole shape of a tensor."""
        return (*self.batch_size[: self.time_dim + 1], *field.shape)

    def under(self, key: Key) -> list[Field]:
        """Return the tensor of a key, or all tensors below it."""
        return [field for field in self.fields if field.key[: len(key)] == key]

    def select(self, keys: Sequence[str | Key] | None) -> list[Field]:
        """Return the tensors of some keys and of everything below them; all if `keys` is None.

        Raises:
            KeyError: If the rollout has nothing under one of `keys`.
        """
        if keys is None:
            return list(self.fields)
        if isinstance(keys, str):
            keys = [keys]
        selected: dict[Key, Field] = {}
        for key in keys:
            found = self.under(as_key(key))
            if not found:
                known = ", ".join(field.name for field in self.fields[:8])
                raise KeyError(f"the rollout has nothing under {'/'.join(as_key(key))!r}; it has {known}")
            for field in found:
                selected[field.key] = field
        return list(selected.values())

    def all_keys(self) -> Iterator[Key]:
        """Yield the keys of all tensors and nested TensorDicts."""
        for field in self.fields:
            yield field.key
        for node in self.nodes:
            yield node.key

    def to_json(self) -> dict[str, Any]:
        """Return the layout as a JSON object."""
        return {
            "version": VERSION,
            "batch_size": list(self.batch_size),
            "time_dim": self.time_dim,
            "names": list(self.names),
            "fields": [_field_to_json(field) for field in self.fields],
            "nodes": [[list(node.key), list(node.batch_size), node.position] for node in self.nodes],
        }

    @classmethod
    def from_json(cls, document: Any) -> Layout:
        """Read what `to_json` wrote. Trusts nothing: a file may claim anything.

        Raises:
            CorruptFileError: If it is not a valid layout.
            FormatVersionError: If a newer release wrote it.
        """
        if not isinstance(document, dict) or type(document.get("version")) is not int:
            raise CorruptFileError("has no rollout layout; the file is damaged or not a Slipstream rollout")
        if document["version"] != VERSION:
            raise FormatVersionError(
                f"holds a rollout of layout version {document['version']}, this release reads version {VERSION}"
            )
        try:
            layout = _parse(document)
            _check_axes(layout)
            _check_tree(layout)
            _check_nodes(layout)
            _check_places(layout)
        except KeyError as error:
            raise _invalid(f"{error} is missing") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise _invalid(str(error)) from error
        return layout


@dataclass
class Rollout:
    """A batch as arrays: its layout, and the arrays by name, which share no memory with the batch."""

    layout: Layout
    arrays: dict[str, NDArray[Any]]


def as_key(key: str | Sequence[str]) -> Key:
    """Return a nested key as a tuple."""
    if isinstance(key, str):
        return (key,)
    return tuple(key)


def resolve_slice(part: slice | None, size: int, what: str) -> slice:
    """Return a slice of an axis with both ends filled in; None stands for the whole axis.

    Raises:
        ValueError: If it is not a slice with step 1.
    """
    if part is None:
        return slice(0, size)
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise ValueError(f"{what} are selected by a slice with step 1, not by {part!r}")
    start, stop, _ = part.indices(size)
    return slice(start, max(start, stop))


def _invalid(reason: str) -> CorruptFileError:
    return CorruptFileError(f"invalid rollout layout ({reason}); the file is damaged or not a Slipstream rollout")


def _field_to_json(field: Field) -> dict[str, Any]:
    document: dict[str, Any] = {
        "key": list(field.key),
        "dtype": field.dtype.name,
        "shape": list(field.shape),
        "array": field.array,
    }
    if field.extra:
        document["extra"] = field.extra
    if field.lead:
        document["lead"] = field.lead
        document["mask"] = field.mask
        document["rows"] = field.rows
    return document


def _parse(document: dict[str, Any]) -> Layout:
    names = []
    for name in _list(document["names"]):
        if name is not None and not isinstance(name, str):
            raise TypeError(f"axis name {_show(name)} is not a string")
        names.append(name)
    (time_dim,) = _sizes([document["time_dim"]])
    return Layout(
        batch_size=_sizes(document["batch_size"]),
        time_dim=time_dim,
        names=tuple(names),
        fields=tuple(map(_parse_field, _list(document["fields"]))),
        nodes=tuple(map(_parse_node, _list(document["nodes"]))),
    )


def _parse_field(document: Any) -> Field:
    if not isinstance(document, dict):
        raise TypeError(f"field {_show(document)} is not an object")
    lead = document.get("lead", 0)
    extra = document.get("extra", 0)
    if lead not in (0, 1) or extra not in (0, 1) or lead > extra:
        raise ValueError(f"field {_show(document)} has lead {_show(lead)} and extra {_show(extra)}")
    mask = None
    rows = None
    if lead:
        mask = _text(document["mask"])
        rows = _text(document["rows"])
    return Field(
        key=_key(document["key"]),
        dtype=parse_torch_dtype(document["dtype"]),
        shape=_sizes(document["shape"]),
        array=_text(document["array"]),
        lead=int(lead),
        mask=mask,
        rows=rows,
        extra=int(extra),
    )


def _parse_node(document: Any) -> Node:
    if len(_list(document)) != 3:
        raise ValueError(f"node {_show(document)} does not consist of key, batch size and position")
    key, batch_size, position = document
    (checked_position,) = _sizes([position])
    return Node(_key(key), _sizes(batch_size), checked_position)


def _check_axes(layout: Layout) -> None:
    """Raise `ValueError` unless the axes exist and their names are distinct."""
    if layout.time_dim >= len(layout.batch_size):
        raise ValueError(f"time is axis {layout.time_dim} of a batch of size {list(layout.batch_size)}")
    if len(layout.names) not in (0, len(layout.batch_size)):
        raise ValueError(f"{len(layout.names)} axis names for {len(layout.batch_size)} axes")
    given = [name for name in layout.names if name is not None]
    if len(set(given)) < len(given):
        raise ValueError(f"two axes have the same name: {_show(given)}")


def _check_tree(layout: Layout) -> None:
    """Raise `ValueError` unless the keys form a tree."""
    seen: set[Key] = set()
    for key in layout.all_keys():
        if not 1 <= len(key) <= _MAX_DEPTH:
            raise ValueError(f"key {_show(key)} has {len(key)} parts, expected 1 to {_MAX_DEPTH}")
        if key in seen:
            raise ValueError(f"key {_show('/'.join(key))} occurs twice")
        seen.add(key)
    tensors = {field.key for field in layout.fields}
    for key in seen:
        for depth in range(1, len(key)):
            if key[:depth] in tensors:
                raise ValueError(f"{_show('/'.join(key))} lies below the tensor {_show('/'.join(key[:depth]))}")


def _check_nodes(layout: Layout) -> None:
    """Raise `ValueError` unless every nested TensorDict fits the batch and comes before its members."""
    # Where the first member of each key comes, so that the check is linear in the number of fields.
    first_member: dict[Key, int] = {}
    for position, field in enumerate(layout.fields):
        for depth in range(1, len(field.key)):
            first_member.setdefault(field.key[:depth], position)
    for node in layout.nodes:
        name = "/".join(node.key)
        if node.batch_size[: len(layout.batch_size)] != layout.batch_size:
            raise ValueError(
                f"the batch size {list(node.batch_size)} of {_show(name)} does not begin with {list(layout.batch_size)}"
            )
        if node.position > len(layout.fields):
            raise ValueError(f"{_show(name)} is at position {node.position} of {len(layout.fields)}")
        if node.position > first_member.get(node.key, node.position):
            raise ValueError(f"{_show(name)} comes after its members")


def _check_places(layout: Layout) -> None:
    """Raise `ValueError` if two tensors are stored in the same place."""
    seen: set[tuple[str, int]] = set()
    for field in layout.fields:
        place = (field.array, field.lead)
        if place in seen:
            raise ValueError(f"two tensors are stored in the array {_show(field.array)}")
        seen.add(place)


def _list(document: Any) -> list[Any]:
    if not isinstance(document, list):
        raise TypeError(f"{_show(document)} is not a list")
    return document


def _sizes(document: Any) -> tuple[int, ...]:
    for size in _list(document):
        # bool is a subclass of int, but no size.
        if type(size) is not int or not 0 <= size <= _MAX_SIZE:
            raise ValueError(f"{_show(document)} is not a list of sizes")
    return tuple(document)


def _key(document: Any) -> Key:
    parts = _list(document)
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{_show(document)} is not a key")
    return tuple(parts)


def _text(document: Any) -> str:
    if not isinstance(document, str):
        raise TypeError(f"{_show(document)} is not a string")
    return document


def _show(value: Any) -> str:
    """Return a value that a file claims, short enough for an error message."""
    return repr(value)[:_SHOWN]
