"""Extra keys of a dataset: object state, success flags, language; per step or per episode, numbers or text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.datasets.opening import dataset, follow, listing, opened
from slipstream.datasets.plans import Plan
from slipstream.errors import ConfigurationError, DatasetError, MissingEntryError, NonFiniteError
from slipstream.memory import machine_bytes

# Everything else is stored as it is.
_STORED_DTYPES = {"f": np.float32, "u": np.int64, "i": np.int64}


@dataclass(frozen=True)
class Extra:
    """The values of one key.

    Attributes:
        per_step: Whether there is a value per step, and not per episode.
        values: ``[steps, ...]`` or ``[episodes, ...]``; objects of type str for text.
    """

    per_step: bool
    values: NDArray[Any]

    def take(self, places: NDArray[np.int64]) -> Any:
        """Return values as a tensor, or text as (nested) lists of str."""
        chosen = self.values[places]
        if chosen.dtype == object:
            return chosen.tolist()
        return torch.from_numpy(chosen)


def load_extras(plans: Sequence[Plan], paths: Mapping[str, str]) -> dict[str, Extra]:
    """Load extra keys of episodes into memory.

    Args:
        plans: The episodes.
        paths: Where each key is. ``obs/object`` is a dataset below the group of the episode, and ``/language`` one
            below the root of the file. ``@lang`` is an attribute of the group of the episode, and ``/data@info/task``
            the member ``task`` of the JSON object in the attribute ``info`` of ``/data``.

    Raises:
        MissingEntryError: If a path does not exist.
        DatasetError: If values fit neither the steps nor the episode, or differ in shape between episodes.
        NonFiniteError: If a number is NaN or infinite.
    """
    if not paths:
        return {}
    parts: dict[str, list[Extra]] = {name: [] for name in paths}
    for path, of_file in _by_file(plans).items():
        with opened(path) as (root, _):
            for plan in of_file:
                group = root["/"]
                if plan.stretch.group != "/":
                    group = root[plan.stretch.group]
                for name, where in paths.items():
                    parts[name].append(_Reader(root, group, plan, name, where).read())
    return {name: _joined(name, found) for name, found in parts.items()}


def _by_file(plans: Sequence[Plan]) -> dict[Any, list[Plan]]:
    found: dict[Any, list[Plan]] = {}
    for plan in plans:
        found.setdefault(plan.description.path, []).append(plan)
    return found


def _joined(name: str, parts: Sequence[Extra]) -> Extra:
    """Put the values of all files together."""
    first = parts[0]
    for part in parts:
        if part.per_step != first.per_step or part.values.shape[1:] != first.values.shape[1:]:
            raise DatasetError(
                f"the extra key {name} is {_kind(first)} in one episode and {_kind(part)} in another, expected the same"
            )
        if (part.values.dtype == object) != (first.values.dtype == object):
            raise DatasetError(f"the extra key {name} is text in one episode and numbers in another")
    return Extra(first.per_step, np.concatenate([part.values for part in parts]))


def _kind(part: Extra) -> str:
    unit = "a value per episode"
    if part.per_step:
        unit = "a value per step"
    return f"{unit} of shape {list(part.values.shape[1:])}"


class _Reader:
    """Reads one key of one group."""

    def __init__(self, root: h5py.File, group: h5py.Group, plan: Plan, name: str, path: str) -> None:
        self.root = root
        self.group = group
        self.plan = plan
        self.name = name
        self.path = path
        self.file = root.filename

    def read(self) -> Extra:
        where, at, attribute = self.path.partition("@")
        start = self.group
        if where.startswith("/"):
            start = self.root["/"]
            where = where.strip("/")
        if at:
            return self._per_episode(self._attribute(start, where, attribute))
        data = dataset(start, where)
        if data.shape is None:
            raise DatasetError(f"{self.file}: {data.name} is empty")
        self._check_room(data)
        rows = self._rows(data)
        if rows is None:
            value = data[()]
            if data.ndim:
                value = value[0]
            return self._per_episode(value)
        return Extra(per_step=True, values=self._numbers_or_text(data[: int(rows[-1]) + 1][rows]))

    def _rows(self, data: h5py.Dataset) -> NDArray[np.int64] | None:
        """Return the row of each loaded step; None if there is one value for the whole episode."""
        stretch = self.plan.stretch
        lengths = self.plan.lengths
        starts = np.cumsum(stretch.lengths) - stretch.lengths
        episodes = np.repeat(np.arange(len(lengths)), lengths)
        within = np.arange(len(episodes)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        steps = starts[episodes] + within
        if data.ndim and data.shape[0] in (stretch.num_steps, stretch.num_steps + 1):
            return steps
        # Every episode has one more observation than steps.
        if data.ndim and data.shape[0] == stretch.num_steps + len(stretch.lengths):
            return steps + episodes
        if data.ndim == 0 or data.shape[0] == 1:
            return None
        raise DatasetError(
            f"{self.file}: {data.name} (the extra key {self.name}) has {data.shape[0]} rows, expected "
            f"{stretch.num_steps} (one per step), {stretch.num_steps + 1}, or a single one"
        )

    def _attribute(self, start: h5py.Group, where: str, attribute: str) -> Any:
        """Return an attribute, or a member of the JSON object in it."""
        found = follow(start, where)
        node: h5py.Group | h5py.Dataset
        if isinstance(found, h5py.h5g.GroupID):
            node = h5py.Group(found)
        elif isinstance(found, h5py.h5d.DatasetID):
            node = h5py.Dataset(found)
        else:
            raise MissingEntryError(f"{self.file}: {start.name.rstrip('/')}/{where} is not there; {listing(start)}")
        name, *keys = attribute.split("/")
        if name not in node.attrs:
            there = ", ".join(node.attrs) or "none"
            raise MissingEntryError(f"{self.file}: {node.name} has no attribute {name}; it has {there}")
        value = node.attrs[name]
        if not keys:
            return value
        return self._member(_text(value), keys)

    def _member(self, text: Any, keys: Sequence[str]) -> Any:
        """Return a member of nested JSON objects."""
        try:
            value = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise DatasetError(f"{self.file}: the attribute in {self.path} is not JSON ({error})") from error
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise MissingEntryError(f"{self.file}: the JSON of {self.path} has no member {key}")
            value = value[key]
        return value

    def _per_episode(self, value: Any) -> Extra:
        """Return a value for each loaded episode of the group."""
        one = self._numbers_or_text(np.asarray(_text(value))[None])
        return Extra(per_step=False, values=np.repeat(one, len(self.plan.lengths), axis=0))

    def _numbers_or_text(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values in the dtype of a batch."""
        if values.dtype.kind in "OSU":
            return self._as_text(values)
        if values.dtype.kind not in "biuf":
            raise DatasetError(f"{self.file}: {self.path} holds {values.dtype}, expected numbers or text")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row = np.argwhere(~np.isfinite(values))[0][0]
            raise NonFiniteError(f"{self.file}: {self.path} is not finite in row {row} of {self.group.name}")
        # PyTorch has fewer dtypes than HDF5. Bytes and flags stay what they are.
        if values.dtype in (np.dtype(bool), np.dtype(np.uint8)):
            return values
        return values.astype(_STORED_DTYPES[values.dtype.kind])

    def _as_text(self, values: NDArray[Any]) -> NDArray[Any]:
        found = np.empty(values.shape, object)
        for place, value in np.ndenumerate(values):
            text = _text(value)
            if not isinstance(text, str):
                raise DatasetError(f"{self.file}: {self.path} holds {type(value).__name__}, expected numbers or text")
            found[place] = text
        return found

    def _check_room(self, data: h5py.Dataset) -> None:
        nbytes = data.dtype.itemsize * math.prod(data.shape)
        if nbytes > machine_bytes() // 2:
            raise DatasetError(f"{self.file}: {data.name} has {nbytes} bytes, too much to keep in memory")


def _text(value: Any) -> Any:
    """Decode bytes; everything else is returned as it is."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def require_extras(extra_keys: Mapping[str, str] | None, taken: Sequence[str]) -> dict[str, str]:
    """Return the paths of extra keys.

    Raises:
        ConfigurationError: If a key has the name of another one, or a path is not a string.
    """
    if extra_keys is not None and not isinstance(extra_keys, Mapping):
        raise ConfigurationError(f"extra_keys is a {type(extra_keys).__qualname__}, expected a dict of paths by name")
    paths = dict(extra_keys or {})
    reserved = set(taken)
    for name, path in paths.items():
        if not isinstance(name, str) or not isinstance(path, str) or not path:
            raise ConfigurationError(f"extra_keys has {name!r}: {path!r}, expected a path by name")
        masked = name.removesuffix("_is_pad")
        if name in reserved or (masked != name and masked in reserved.union(paths)):
            raise ConfigurationError(f"the extra key {name!r} would replace a key of the window; choose another name")
    return paths
