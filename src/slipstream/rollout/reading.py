"""Read tensors of a rollout from the arrays in its container. No torch.

An observation and its ``next`` are stored as one array. Every chunk of it is decoded into reused memory and copied from
there to both, while it is still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, RolloutError
from slipstream.memory import fresh, machine_bytes
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
    is_whole = envs is None
    envs = resolve_slice(envs, layout.num_envs, "environments")
    steps = resolve_slice(steps, layout.num_steps, "steps")
    fields = layout.select(keys)
    _check_size(layout, fields, envs, steps)
    shared: dict[str, list[_Target]] = {}
    found: dict[Key, NDArray[Any]] = {}
    plain: dict[str, None] = {}
    for field in fields:
        if not field.extra:
            plain[field.array] = None
            continue
        target = _Target.of(field, envs, steps)
        found[field.key] = target.out
        shared.setdefault(field.array, []).append(target)
    # The masks are read whole: which exceptions belong to some environments depends on those before them.
    masks = dict.fromkeys(field.mask for field in fields if field.mask is not None)
    small = container.read_many(masks)
    if is_whole:
        rows = dict.fromkeys(field.rows for field in fields if field.rows is not None)
        # Decode all small arrays at once, so that they share the threads.
        small |= container.read_many(plain | rows)
    else:
        for name in plain:
            small[name] = container.read(name, envs)

    def receive(name: str, part: NDArray[Any], index: tuple[slice, ...]) -> None:
        for target in shared[name]:
            target.put(part, index)

    container.visit(shared, receive, envs)
    for field in fields:
        if not field.extra:
            # Already contiguous if these are all steps.
            found[field.key] = np.ascontiguousarray(small[field.array][:, steps])
        if field.mask is None or field.rows is None:
            continue
        breaks = small[field.mask]
        num_breaks = int(np.count_nonzero(breaks))
        num_rows = container.entries[field.rows].shape[0]
        if num_rows != num_breaks:
            raise CorruptFileError(f"{field.name}: the mask marks {num_breaks} exceptions, but {num_rows} are stored")
        if is_whole:
            exceptions = small[field.rows]
        else:
            exceptions = container.read(field.rows, exception_rows(breaks, envs))
        put_exceptions(found[field.key], breaks[envs], exceptions, steps)
    # In the order of the layout.
    return {field.key: found[field.key] for field in fields}


def _check_size(layout: Layout, fields: Sequence[Field], envs: slice, steps: slice) -> None:
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
        dtype = field.dtype.carrier
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        out = fresh(num_bytes).view(dtype).reshape(shape)
        return cls(out, envs, slice(steps.start + field.lead, steps.stop + field.lead))

    def put(self, part: NDArray[Any], index: tuple[slice, ...]) -> None:
        """Copy what it shows of a chunk of the array."""
        of_envs = _overlap(index[0], self.envs)
        of_steps = _overlap(index[1], self.steps)
        target = self.out[_shift(of_envs, self.envs), _shift(of_steps, self.steps)]
        target[(slice(None), slice(None), *index[2:])] = part[_shift(of_envs, index[0]), _shift(of_steps, index[1])]


def _overlap(one: slice, other: slice) -> slice:
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))


def _shift(part: slice, whole: slice) -> slice:
    """Return a part of an axis as an index into another part that contains it."""
    return slice(part.start - whole.start, part.stop - whole.start)
