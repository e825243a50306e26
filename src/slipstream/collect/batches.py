"""`BatchMemory`: the memory into which a pipelined collector copies its batches."""

from __future__ import annotations

from collections import deque

import torch

from slipstream.batches import Batch, Path, map_tensors
from slipstream.collect.policy import Fence

Leaves = dict[Path, torch.Tensor]
"""The memory of a batch: its tensors by path."""


class BatchMemory:
    """Copies each batch into separate memory, on the device where it is wanted.

    Not `slipstream.memory.Pool`: memory may be on a GPU, and is free once a CUDA stream has passed a fence, not once
    Python has dropped the last reference.

    Args:
        device: Where batches go; None leaves them where they are.
        copy: Whether to copy tensors that are on that device already. Not needed if their producer never reuses them.
        reuse: Whether to use memory again after `give_back`.
    """

    def __init__(self, device: torch.device | None, *, copy: bool, reuse: bool) -> None:
        self.device = device
        self.copy = copy
        self.reuse = reuse
        self._free: deque[tuple[Leaves, Fence]] = deque()

    def own(self, batch: Batch) -> tuple[Batch, Leaves]:
        """Return the batch in separate memory, and that memory, which the consumer may give back."""
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
        """Allow a later batch to use this memory, once its consumer has passed the fence."""
        if self.reuse:
            self._free.append((memory, fence))

    def _put(self, tensor: torch.Tensor, spare: torch.Tensor | None) -> torch.Tensor:
        device = self.device or tensor.device
        # Without pinned memory a non-blocking copy is at best a blocking one. From a device to the host it would be
        # read before it is complete.
        non_blocking = device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
        if spare is not None and (spare.shape, spare.dtype, spare.device) == (tensor.shape, tensor.dtype, device):
            return spare.copy_(tensor, non_blocking=non_blocking)
        return tensor.to(device, copy=self.copy or self.reuse, non_blocking=non_blocking)
