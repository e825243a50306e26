"""`Objects`: what cannot be packed, one Python object per slot and key. Text, other non-tensor data, ragged tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack

from slipstream.errors import CorruptFileError, UnsupportedStateError
from slipstream.replay.roles import Key

Cells = NDArray[np.object_]
"""Python objects, one per step."""

RAGGED: Key = ()
"""The key of the TensorDicts that hold the ragged tensors of a step."""

_NOTHING = -1


class Objects:
    """A table of Python objects: a row per slot, a column per key. Slots that were not written hold None.

    Args:
        num_slots: The number of rows.
        columns: An object per slot for each key, if there are any yet.
    """

    def __init__(self, num_slots: int, columns: Mapping[Key, Cells] | None = None) -> None:
        self._num_slots = num_slots
        self._columns: dict[Key, Cells] = dict(columns or {})

    @property
    def keys(self) -> list[Key]:
        """The keys, in the order in which they were first written."""
        return list(self._columns)

    @property
    def nbytes(self) -> int:
        """The memory of the table, without the objects."""
        return sum(cells.nbytes for cells in self._columns.values())

    def write(self, slots: NDArray[np.int64], values: Mapping[Key, Cells]) -> None:
        """Put objects into slots; of several objects for one slot, the last counts."""
        for key, cells in values.items():
            if key not in self._columns:
                self._columns[key] = np.full(self._num_slots, None, np.object_)
            self._columns[key][slots.reshape(-1)] = cells.reshape(-1)

    def clear(self, slots: NDArray[np.int64], kept: Mapping[Key, Any]) -> None:
        """Empty slots in the columns that are not in `kept`."""
        for key, cells in self._columns.items():
            if key not in kept:
                cells[slots.reshape(-1)] = None

    def read(self, slots: NDArray[np.int64]) -> dict[Key, Cells]:
        """Return the objects in slots, by key; the objects themselves are not copied."""
        flat = slots.reshape(-1)
        return {key: cells[flat].reshape(slots.shape) for key, cells in self._columns.items()}

    def copy(self) -> Objects:
        """Return another table with the same objects."""
        return Objects(self._num_slots, {key: cells.copy() for key, cells in self._columns.items()})

    def to_json(self) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
        """Return the table as JSON, equal objects once, and arrays that say which slot holds which.

        Raises:
            UnsupportedStateError: If an object is not plain text, a number, or lists and dicts of those.
        """
        columns = []
        arrays = {}
        for number, (key, cells) in enumerate(self._columns.items()):
            if key == RAGGED:
                raise UnsupportedStateError(_ragged_message(cells))
            values: list[Any] = []
            places: dict[str, int] = {}
            index = np.full(self._num_slots, _NOTHING, np.int64)
            for slot, value in enumerate(cells):
                if value is None:
                    continue
                if not _is_plain(value):
                    raise UnsupportedStateError(
                        f"{'/'.join(key)!r} holds a {type(value).__qualname__}, which a saved storage cannot hold: "
                        "store text, finite numbers, or lists and dicts of those"
                    )
                text = json.dumps(value)
                if text not in places:
                    places[text] = len(values)
                    values.append(value)
                index[slot] = places[text]
            columns.append({"key": list(key), "values": values})
            arrays[f"objects/{number}"] = index
        return columns, arrays

    @classmethod
    def from_json(cls, num_slots: int, columns: Any, arrays: Mapping[str, NDArray[Any]]) -> Objects:
        """Read what `to_json` wrote.

        Raises:
            CorruptFileError: If it is not something that `to_json` writes.
        """
        table: dict[Key, Cells] = {}
        for number, column in enumerate(columns):
            values = [*column["values"], None]
            index = np.asarray(arrays[f"objects/{number}"], np.int64)
            is_sound = index.shape == (num_slots,) and int(index.min(initial=0)) >= _NOTHING
            if not is_sound or int(index.max(initial=0)) >= len(values):
                raise CorruptFileError(f"invalid objects of {'/'.join(column['key'])!r} in a replay storage")
            table[tuple(map(str, column["key"]))] = cells_of(values, (len(values),))[index]
        return cls(num_slots, table)


def cells_of(nested: Any, shape: tuple[int, ...]) -> Cells:
    """Return the items of nested lists as an array of a shape; lists below its last axis stay objects."""
    cells: Cells = np.empty(shape, np.object_)
    for place in np.ndindex(shape):
        item = nested
        for number in place:
            item = item[number]
        cells[place] = item
    return cells


def as_non_tensor(cells: Cells, num_inner: int) -> Any:
    """Return objects as tensordict holds them.

    Args:
        cells: One object per step; with inner axes, nested lists.
        num_inner: How many axes a step has.
    """
    return _stacked(cells.tolist(), cells.ndim + num_inner, cells.shape)


def _stacked(value: Any, depth: int, shape: tuple[int, ...]) -> Any:
    if not depth or value is None:
        return NonTensorData(value, batch_size=[])
    if not value:
        return NonTensorData(None, batch_size=[*shape[: len(shape) - depth + 1], 0][-depth:])
    return NonTensorStack(*[_stacked(item, depth - 1, shape) for item in value])


def _is_plain(value: Any) -> bool:
    """Return whether JSON gives back the same value."""
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is list:
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (str, int, bool)


def _ragged_message(cells: Cells) -> str:
    first = next(step for step in cells if step is not None)
    flat = first.flatten_keys("/")
    names = ", ".join(sorted(flat.keys()))
    return (
        f"{names} have another shape in each step, which a saved storage cannot hold: pad them "
        "to one shape before they are stored"
    )
