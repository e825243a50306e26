"""TensorDicts as rollouts: split into arrays, saved, loaded and built again, bit for bit."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.batches import build, flatten
from slipstream.errors import CorruptFileError, RolloutError, naming
from slipstream.rollout.files import RolloutFile, add_extra, write_rollout, zstd_level
from slipstream.rollout.layout import Field, Key, Layout, Node, Rollout, resolve_slice
from slipstream.schema.flatten import check_storable
from slipstream.tensors import array_of, dtype_info, import_tensordict, resolve, tensor_of
from slipstream.trajectory import NEXT, SharedNext, is_transposed

if TYPE_CHECKING:
    from tensordict import TensorDictBase

_EXCEPTIONS = "exceptions"
"""The array of breaks; other observations with other breaks have ``exceptions#2`` and so on."""


def save_rollout_compressed(
    data: TensorDictBase,
    path: str | os.PathLike[str],
    compression_level: int = 9,
    *,
    metadata: Any = None,
    extra: Mapping[str, NDArray[Any]] | None = None,
    threads: int | None = None,
) -> Path:
    """Save a rollout to a file.

    Blocks until the file is complete and durable. Every chunk is decoded and compared, bit for bit, before it is
    written. The file appears under its name only when it is complete; a crash leaves the previous file.

    Args:
        data: A TensorDict of shape ``[environment, time, ...]``.
        path: The file to create or replace.
        compression_level: 0 to 12; up to 9 is fast.
        metadata: A JSON value to store with it.
        extra: Arrays to store beside it, such as what all environments have in common; see `RolloutFile.read_extra`.
        threads: Number of threads that encode; one per core by default.

    Returns:
        The path of the file.

    Raises:
        RolloutError: If `data` is not a rollout.
        WriteError: If the file cannot be written; nothing is left behind.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"observation": torch.zeros(8, 32, 3)}, batch_size=[8, 32])
        >>> path = save_rollout_compressed(batch, "/tmp/slipstream-doc/rollout.slip")
        >>> load_rollout(path).batch_size
        torch.Size([8, 32])
    """
    level = zstd_level(compression_level)
    rollout = split_batch(data)
    add_extra(rollout, extra)
    return write_rollout(rollout, path, level, {"metadata": metadata}, threads)


def load_rollout(
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    *,
    keys: Sequence[str | Key] | None = None,
    envs: slice | None = None,
    steps: slice | None = None,
) -> TensorDictBase:
    """Load a rollout, or a part of it, as it was saved, bit for bit. Every checksum on the way is verified.

    Args:
        path: The file.
        device: Where the tensors go; by default the CPU, and the TensorDict has no device.
        keys: Only these nested keys, and everything below them.
        envs: Only these environments. Several axes of environments become one.
        steps: Only these steps.

    Returns:
        A TensorDict in new memory.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is damaged, or not a rollout.
        FormatVersionError: If a newer release wrote it.
        KeyError: If it has nothing under one of `keys`.
    """
    with BatchFile(path) as file:
        return file.load(device, keys=keys, envs=envs, steps=steps)


class BatchFile(RolloutFile):
    """A rollout file that also loads TensorDicts."""

    def load(
        self,
        device: str | torch.device | None = None,
        *,
        keys: Sequence[str | Key] | None = None,
        envs: slice | None = None,
        steps: slice | None = None,
    ) -> TensorDictBase:
        """Load the rollout, or a part of it; see `load_rollout`."""
        import_tensordict()  # fails before anything is decoded
        arrays = self.read(keys, envs=envs, steps=steps)
        with naming(self.path):
            batch = build_batch(self.layout, arrays, envs=envs, steps=steps, complete=keys is None)
        if device is None:
            return batch
        return batch.to(device)


def split_batch(batch: TensorDictBase) -> Rollout:
    """Copy a batch ``[environment, time, ...]`` into arrays, with observations that ``next`` repeats stored once.

    The batch may be reused as soon as this returns. Tensors on other devices are copied to the host.

    Raises:
        RolloutError: If it is not a rollout: no time axis, time first, keys that differ between environments.
        UnsupportedStateError: If it holds something other than dense tensors; the message says where and what.
    """
    splitter = _Splitter(batch)
    # Pairs first: what they do not share is stored tensor by tensor, in the order of the batch.
    for key, root in splitter.tensors.items():
        after = splitter.tensors.get((NEXT, *key))
        if key[0] != NEXT and after is not None:
            splitter.share(key, root, after)
    splitter.check_axes()
    for key, tensor in splitter.tensors.items():
        if key not in splitter.fields:
            splitter.keep(key, tensor)
    return splitter.finish()


class _Splitter:
    """Collects the arrays and fields of one batch."""

    def __init__(self, batch: TensorDictBase) -> None:
        self.time_dim = _find_time_dim(batch)
        self.batch_size = tuple(batch.batch_size)
        self.names = tuple(batch.names or ())
        self.arrays: dict[str, NDArray[Any]] = {}
        self.fields: dict[Key, Field] = {}
        self.nodes: list[Node] = []
        self.tensors: dict[Key, torch.Tensor] = {}
        num_envs = int(np.prod(self.batch_size[: self.time_dim]))
        for key, value in _members_of(batch).items():
            if isinstance(value, torch.Size):
                self.nodes.append(Node(key, tuple(value), len(self.tensors)))
            elif isinstance(value, torch.Tensor):
                check_storable(value, key)
                shape = (num_envs, self.batch_size[self.time_dim], *value.shape[self.time_dim + 1 :])
                self.tensors[key] = resolve(value).cpu().reshape(shape)
            else:
                raise RolloutError(f"{'/'.join(key)} is not a tensor and cannot be stored; exclude it from the batch")

    def share(self, key: Key, root: torch.Tensor, after: torch.Tensor) -> None:
        """Store an observation and its ``next`` in one array, if that pays."""
        if root.dtype != after.dtype:
            return
        shared = SharedNext.of(array_of(root), array_of(after))
        if shared is None:
            return
        array = self._add("/".join(key), shared.whole)
        mask = self._add_mask(shared.breaks)
        rows = self._add("/".join((NEXT, *key)), shared.exceptions)
        dtype = dtype_info(root.dtype)
        shape = tuple(root.shape[2:])
        self.fields[key] = Field(key, dtype, shape, array, extra=1)
        self.fields[NEXT, *key] = Field((NEXT, *key), dtype, shape, array, lead=1, mask=mask, rows=rows, extra=1)

    def keep(self, key: Key, tensor: torch.Tensor) -> None:
        """Store a tensor as a separate array."""
        copy = tensor.clone(memory_format=torch.contiguous_format)
        array = self._add("/".join(key), array_of(copy))
        self.fields[key] = Field(key, dtype_info(tensor.dtype), tuple(tensor.shape[2:]), array)

    def check_axes(self) -> None:
        """Raise `RolloutError` if ``next`` follows along the first axis, for pairs that are not shared."""
        for key, root in self.tensors.items():
            after = self.tensors.get((NEXT, *key))
            if after is None or key in self.fields or (root.dtype, root.shape) != (after.dtype, after.shape):
                continue
            if is_transposed(array_of(root), array_of(after)):
                raise RolloutError(
                    f"{'/'.join(key)}: 'next' follows along the first axis of the batch and not along the second; "
                    "a rollout has the shape [environment, time, ...]: pass batch.transpose(0, 1)"
                )

    def finish(self) -> Rollout:
        """Return the rollout, with fields in the order of the batch."""
        fields = tuple(self.fields[key] for key in self.tensors)
        layout = Layout(self.batch_size, self.time_dim, self.names, fields, tuple(self.nodes))
        return Rollout(layout, self.arrays)

    def _add(self, name: str, array: NDArray[Any]) -> str:
        """Store an array under a name that is not taken, and return that name."""
        unique = name
        number = 2
        while unique in self.arrays:
            unique = f"{name}#{number}"
            number += 1
        self.arrays[unique] = array
        return unique

    def _add_mask(self, breaks: NDArray[np.bool_]) -> str:
        # Episodes end for all observations at once, so most masks are equal: store each once.
        for name, array in self.arrays.items():
            if name.startswith(_EXCEPTIONS) and np.array_equal(array, breaks):
                return name
        return self._add(_EXCEPTIONS, breaks)


def _find_time_dim(batch: TensorDictBase) -> int:
    """Return the axis named ``time``, or else the second one."""
    if not import_tensordict().is_tensor_collection(batch):
        raise RolloutError(f"a rollout is a TensorDict of shape [environment, time, ...], not a {type(batch).__name__}")
    if not batch.batch_size:
        raise RolloutError("the batch has no batch size: a rollout has the shape [environment, time, ...]")
    names = list(batch.names or ())
    if "time" not in names:
        return min(1, len(batch.batch_size) - 1)
    time_dim = names.index("time")
    if time_dim == 0 and len(names) > 1:
        raise RolloutError(
            f"the first axis of the batch {list(batch.batch_size)} is named 'time': a rollout has the shape "
            "[environment, time, ...]; pass batch.transpose(0, 1)"
        )
    return time_dim


def _members_of(batch: TensorDictBase) -> dict[Key, Any]:
    try:
        return flatten(batch)
    except ValueError as error:
        raise RolloutError(str(error)) from error


def build_batch(
    layout: Layout,
    arrays: Mapping[Key, NDArray[Any]],
    *,
    envs: slice | None = None,
    steps: slice | None = None,
    complete: bool = True,
) -> TensorDictBase:
    """Build the TensorDict of a rollout, or of a part of it. Its tensors share the memory of `arrays`.

    Args:
        layout: The layout of the whole rollout.
        arrays: What `RolloutFile.read` returned for `envs` and `steps`.
        envs: Which environments were read; None keeps the axes of the rollout.
        steps: Which steps were read.
        complete: Whether to include nested TensorDicts that hold no tensors.

    Raises:
        CorruptFileError: If the tensors do not form a TensorDict.
    """
    env_sizes = layout.batch_size[: layout.time_dim]
    if envs is not None:
        chosen = resolve_slice(envs, layout.num_envs, "environments")
        env_sizes = (chosen.stop - chosen.start,)
    chosen = resolve_slice(steps, layout.num_steps, "steps")
    lead = (*env_sizes, chosen.stop - chosen.start)
    batch_size = (*lead, *layout.batch_size[layout.time_dim + 1 :])
    tensors: dict[Key, torch.Tensor] = {}
    for field in layout.fields:
        if field.key in arrays:
            tensors[field.key] = tensor_of(arrays[field.key], field.dtype.name, (*lead, *field.shape))
    members = add_nodes(layout, tensors, batch_size, complete=complete)
    names: tuple[str | None, ...] = ()
    if envs is None:
        names = layout.names
    try:
        return build(members, batch_size, names=names)
    except (RuntimeError, ValueError) as error:
        raise CorruptFileError(f"its tensors do not form a TensorDict of size {list(batch_size)} ({error})") from error


def add_nodes(
    layout: Layout, tensors: Mapping[Key, torch.Tensor], batch_size: tuple[int, ...], *, complete: bool
) -> dict[Key, Any]:
    """Return tensors and nested TensorDicts in the order of the layout, ready for `slipstream.batches.build`.

    Args:
        layout: The layout of the whole rollout.
        tensors: Tensors of the rollout, and others, which come last.
        batch_size: The batch size of the TensorDict to build; those of nested ones follow from it.
        complete: Whether to include nested TensorDicts that hold none of `tensors`.
    """
    parents: set[Key] = set()
    for key in tensors:
        for depth in range(1, len(key)):
            parents.add(key[:depth])
    nodes_at: dict[int, list[Node]] = defaultdict(list)
    for node in layout.nodes:
        nodes_at[node.position].append(node)
    members: dict[Key, Any] = {}
    for position in range(len(layout.fields) + 1):
        for node in nodes_at[position]:
            if complete or node.key in parents:
                inner = node.batch_size[len(layout.batch_size) :]
                members[node.key] = torch.Size((*batch_size, *inner))
        if position < len(layout.fields):
            key = layout.fields[position].key
            if key in tensors:
                members[key] = tensors[key]
    # Tensors that the layout does not know are added at the end; the others keep their place.
    members.update(tensors)
    return members
