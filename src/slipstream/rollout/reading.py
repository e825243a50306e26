"""Read tensors of a rollout from the arrays in its container. No torch.

An observation and its ``next`` are stored as one array. Every chunk of it is decoded into reused memory and copied from
there to both, while it is still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, RolloutError
from slipstream.memory import machine_bytes
from slipstream.rollout.layout import Field, Key, Layout, resolve_slice
from slipstream.store.container import Container
from slipstream.trajectory import exception_rows, put_exceptions


def read_fields(
    layout: Layout,
    container: Container,
    keys: Sequence[str | Key] | None = None,
    envs: slice | None = None,
    steps: slice | None = None,
) -> dict[Key, NDArray[Any]]:
    """Read tensors of a rollout from its arrays; see `RolloutFile.read`. Only the arrays needed are read.

    Args:
        layout: How the rollout lies in its arrays; it has been compared with those of the container.
        container: The arrays.
        keys: Only these nested keys, and everything below them.
        envs: Only these environments.
        steps: Only these steps.
    """
    if envs is not None and not layout.time_dim:
        raise RolloutError(f"the rollout has the shape {list(layout.batch_size)}, without an axis for environments")
    chosen_envs = resolve_slice(envs, layout.num_envs, "environments")
    chosen_steps = resolve_slice(steps, layout.num_steps, "steps")
    fields = layout.select(keys)
    _check_size(layout, fields, chosen_envs, chosen_steps)
    reading = _Reading(layout, container, chosen_envs, chosen_steps)
    found = reading.plain(fields)
    found |= reading.shared(fields)
    # In the order of the layout.
    return {field.key: found[field.key] for field in fields}


class _Reading:
    """Reads some environments and steps of fields."""

    def __init__(self, layout: Layout, container: Container, envs: slice, steps: slice) -> None:
        self._container = container
        self._is_whole = envs == slice(0, layout.num_envs)
        self._envs = envs
        self._steps = steps

    def plain(self, fields: Sequence[Field]) -> dict[Key, NDArray[Any]]:
        """Read fields that share no array."""
        chosen: dict[str, slice] = {}
        for field in fields:
            if not field.extra:
                chosen[field.array] = self._envs
        arrays = self._read_all(chosen)
        found: dict[Key, NDArray[Any]] = {}
        for field in fields:
            if not field.extra:
                # Whole steps are contiguous already, and not copied.
                found[field.key] = np.ascontiguousarray(arrays[field.array][:, self._steps])
        return found

    def shared(self, fields: Sequence[Field]) -> dict[Key, NDArray[Any]]:
        """Read fields whose arrays have one more step: observations that share an array with their ``next``."""
        targets: dict[str, list[_Target]] = {}
        found: dict[Key, NDArray[Any]] = {}
        for field in fields:
            if field.extra:
                target = _Target.of(field, self._envs, self._steps)
                targets.setdefault(field.array, []).append(target)
                found[field.key] = target.out

        def receive(name: str, part: NDArray[Any], index: tuple[slice, ...]) -> None:
            for target in targets[name]:
                target.put(part, index)

        self._container.visit(targets, receive, self._envs)
        self._correct(fields, found)
        return found

    def _correct(self, fields: Sequence[Field], found: dict[Key, NDArray[Any]]) -> None:
        """Replace what steps led to where it is an exception."""
        # The masks are read whole: which exceptions belong to some environments depends on those before them.
        masks: dict[str, NDArray[Any]] = {}
        chosen: dict[str, slice] = {}
        for field in fields:
            if field.mask is None or field.rows is None:
                continue
            # Episodes end for all observations at once, so most share a mask.
            if field.mask not in masks:
                masks[field.mask] = self._container.read(field.mask)
            breaks = masks[field.mask]
            num_breaks = int(np.count_nonzero(breaks))
            num_rows = self._container.entries[field.rows].shape[0]
            if num_rows != num_breaks:
                raise CorruptFileError(
                    f"{field.name}: the mask marks {num_breaks} exceptions, but {num_rows} are stored"
                )
            chosen[field.rows] = exception_rows(breaks, self._envs)
        rows = self._read_all(chosen)
        for field in fields:
            if field.mask is not None and field.rows is not None:
                breaks = masks[field.mask][self._envs]
                put_exceptions(found[field.key], breaks, rows[field.rows], self._steps)

    def _read_all(self, chosen: dict[str, slice]) -> dict[str, NDArray[Any]]:
        """Read some rows of arrays; if these are all, decode the arrays together, so that they share the threads."""
        if self._is_whole:
            return self._container.read_many(chosen)
        return {name: self._container.read(name, rows) for name, rows in chosen.items()}


def _check_size(layout: Layout, fields: Iterable[Field], envs: slice, steps: slice) -> None:
    """Raise `CorruptFileError` if the tensors do not fit into this machine: a forged file may claim anything."""
    num_bytes = 0
    for field in fields:
        num_bytes += layout.bytes_of(field, envs.stop - envs.start, steps.stop - steps.start)
    if num_bytes > machine_bytes():
        raise CorruptFileError(
            f"the tensors take {num_bytes} bytes, more than the memory of this machine ({machine_bytes()}); "
            "read some keys, environments or steps"
        )


@dataclass(frozen=True)
class _Target:
    """Memory for some environments and steps of a tensor.

    Attributes:
        out: ``[environment, step, ...]``.
        envs: Which environments of the array it shows.
        steps: Which steps of the array it shows.
    """

    out: NDArray[Any]
    envs: slice
    steps: slice

    @classmethod
    def of(cls, field: Field, envs: slice, steps: slice) -> _Target:
        """Allocate memory for some environments and steps of a field."""
        shape = (envs.stop - envs.start, steps.stop - steps.start, *field.shape)
        # What a step led to is one step later in the array.
        shown = slice(steps.start + field.lead, steps.stop + field.lead)
        return cls(np.empty(shape, field.dtype.carrier), envs, shown)

    def put(self, part: NDArray[Any], index: tuple[slice, ...]) -> None:
        """Copy what it shows of a chunk of the array; `index` says where in the array the chunk is."""
        source = []
        target = []
        for place, shown in zip(index, (self.envs, self.steps), strict=False):
            start = max(place.start, shown.start)
            stop = max(start, min(place.stop, shown.stop))
            source.append(slice(start - place.start, stop - place.start))
            target.append(slice(start - shown.start, stop - shown.start))
        # A chunk may hold only a part of a step.
        self.out[(*target, *index[2:])] = part[tuple(source)]
