"""A batch, whatever its type: in memory of its own, stamped, and as plain data for a checkpoint."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from slipstream.collect.streams import Fence
from slipstream.errors import UnsupportedStateError
from slipstream.tree import import_tensordict

Batch = Any
"""A TensorDict; or nested dicts, lists and tuples of tensors."""
Path = tuple[Any, ...]
Leaves = dict[Path, torch.Tensor]

STAMP = ("collector", "policy_version")
"""Where a batch tells which version of the weights collected it."""


def is_tensordict(batch: Batch) -> bool:
    """Tell whether `batch` is a TensorDict of any kind, without importing tensordict."""
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(batch, tensordict.TensorDictBase)


def map_tensors(
    batch: Batch,
    function: Callable[[Path, torch.Tensor], torch.Tensor],
    device: torch.device | None = None,
    path: Path = (),
) -> Batch:
    """Return a new batch of the same structure, each tensor replaced; other values are deep copies.

    Args:
        batch: Any.
        function: What becomes of a tensor, given its path.
        device: Where all tensors are then, for TensorDicts to know; None if they stay where they were.
        path: Where `batch` is.
    """
    if isinstance(batch, torch.Tensor):
        return function(path, batch)
    if is_tensordict(batch):

        def at(name: Any, tensor: torch.Tensor) -> torch.Tensor:
            return function((*path, name), tensor)

        return batch.named_apply(at, nested_keys=True, device=batch.device if device is None else device)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function, device, (*path, key)) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map_tensors(value, function, device, (*path, index)) for index, value in enumerate(batch))
    return copy.deepcopy(batch)


def tensors_of(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield every tensor of a batch."""
    found: list[torch.Tensor] = []

    def note(_: Path, tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    yield from found


def clone(batch: Batch) -> Batch:
    """Return a deep copy."""
    return map_tensors(batch, lambda _, tensor: tensor.clone())


def move(batch: Batch, device: torch.device | None) -> Batch:
    """Return the batch on a device: itself if it is there already; memory is shared where nothing has to move."""
    if device is None:
        return batch
    if is_tensordict(batch):
        return batch if batch.device == device else batch.to(device)
    if all(tensor.device == device for tensor in tensors_of(batch)):
        return batch
    return map_tensors(batch, lambda _, tensor: tensor.to(device))


class BatchMemory:
    """Puts each batch into memory of its own, on the device where it is wanted.

    Args:
        device: Where batches go; None leaves them where they are.
        copy: Whether to copy what is on that device already. Not needed if its maker never touches it again.
        reuse: Whether memory that was given back is used again.
    """

    def __init__(self, device: torch.device | None, *, copy: bool, reuse: bool) -> None:
        self.device = device
        self.copy = copy
        self.reuse = reuse
        self._free: deque[tuple[Leaves, Fence]] = deque()

    def own(self, batch: Batch) -> tuple[Batch, Leaves]:
        """Return the batch in memory of its own, and that memory, to be given back by those who want it reused."""
        spare: Leaves = {}
        if self._free:
            spare, fence = self._free.popleft()
            fence.wait()
        memory: Leaves = {}

        def put(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            memory[path] = self._put(tensor, spare.get(path))
            return memory[path]

        return map_tensors(batch, put, self.device), memory

    def give_back(self, memory: Leaves, fence: Fence) -> None:
        """Let a later batch have this memory, once whoever used it has come past the fence."""
        if self.reuse:
            self._free.append((memory, fence))

    def _put(self, tensor: torch.Tensor, spare: torch.Tensor | None) -> torch.Tensor:
        device = tensor.device if self.device is None else self.device
        # Without pinned memory a non-blocking copy is at best a blocking one; from a device to the host it would be
        # read before it is there.
        non_blocking = device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
        if spare is not None and (spare.shape, spare.dtype, spare.device) == (tensor.shape, tensor.dtype, device):
            return spare.copy_(tensor, non_blocking=non_blocking)
        return tensor.to(device, copy=self.copy or self.reuse, non_blocking=non_blocking)


def stamp(batch: Batch, version: int) -> Batch:
    """Write down which weights collected a batch, in place: an int64 per element of a TensorDict, one in a dict."""
    if is_tensordict(batch):
        device = batch.device or next((tensor.device for tensor in tensors_of(batch)), None)
        batch.set(STAMP, torch.full(batch.batch_size, version, dtype=torch.int64, device=device))
    elif isinstance(batch, dict):
        group, name = STAMP
        batch[group] = {**batch.get(group, {}), name: torch.tensor(version)}
    return batch


def to_state(batch: Batch) -> Any:
    """Return a batch as plain data that any checkpoint format takes, copied.

    Raises:
        UnsupportedStateError: If it is a TensorDict that is not a plain one, nor can be made one.
    """
    if not is_tensordict(batch):
        return {"tree": clone(batch)}
    try:
        return _tensordict_to_state(batch.contiguous())
    except RuntimeError as error:
        raise UnsupportedStateError(f"a batch that waits to be handed out cannot be stored: {error}") from error


def from_state(state: Mapping[str, Any]) -> Batch:
    """Return the batch that `to_state` was given, in memory of its own."""
    return clone(state["tree"] if "tree" in state else _tensordict_from_state(state))


def _tensordict_to_state(batch: Any) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            members[key] = value.clone()
        elif is_tensordict(value):
            members[key] = _tensordict_to_state(value)
        else:
            members[key] = {"value": copy.deepcopy(value)}
    device = None if batch.device is None else str(batch.device)
    return {"members": members, "batch_size": list(batch.batch_size), "names": list(batch.names), "device": device}


def _tensordict_from_state(state: Mapping[str, Any]) -> Any:
    batch = import_tensordict().TensorDict(
        {}, batch_size=state["batch_size"], names=state["names"], device=state["device"]
    )
    for key, value in state["members"].items():
        if isinstance(value, torch.Tensor):
            batch.set(key, value)
        elif "value" in value:
            batch.set_non_tensor(key, value["value"])
        else:
            batch.set(key, _tensordict_from_state(value))
    return batch
