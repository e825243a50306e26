"""What the collecting thread does for each order: load weights, collect a batch, copy it, record where CUDA is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.batches import Batch, stamp
from slipstream.collect.batches import BatchMemory, Leaves
from slipstream.collect.policy import FrozenPolicy, Weights
from slipstream.collect.streams import Fence
from slipstream.errors import BackgroundError, ConfigurationError


@dataclass
class Order:
    """Permission to collect one batch.

    Attributes:
        index: Number of the batch, from 0, for messages.
        version: Version of the weights to collect it with.
        weights: These weights, or None if they are those of the order before.
        fence: The position of the consumer in its CUDA stream.
    """

    index: int
    version: int
    weights: Weights | None
    fence: Fence


@dataclass
class Item:
    """A collected batch.

    Attributes:
        batch: The batch, stamped with the version of its weights.
        version: That version.
        fence: The position of the collecting thread in its CUDA stream; the batch can be read after it.
        memory: The tensors of the batch, to be reused when the consumer no longer needs it.
    """

    batch: Batch
    version: int
    fence: Fence
    memory: Leaves = field(default_factory=dict)


class BatchProducer:
    """Collects one batch per order from a base collector. Called by one thread at a time.

    Args:
        base: The base collector, an iterable of batches.
        policy: Loads the weights of an order into the policy of the base.
        memory: Copies batches into memory that the base does not reuse.
        cuda: The CUDA device of the base, if any.

    Attributes:
        collect_s: Seconds spent in the base so far.
        last_fence: The position of the collecting thread in its CUDA stream after its last batch.
    """

    def __init__(self, base: Any, policy: FrozenPolicy, memory: BatchMemory, cuda: torch.device | None) -> None:
        self.collect_s = 0.0
        self.last_fence: Fence | None = None
        self._base = base
        self._policy = policy
        self._memory = memory
        self._cuda = cuda
        self._iterator: Iterator[Batch] | None = None

    def restart(self) -> None:
        """Iterate over the base from its beginning at the next order."""
        self._iterator = None

    def collect(self, order: Order) -> Item:
        """Collect the batch of an order.

        Raises:
            StopIteration: If the base has no more batches.
            BackgroundError: If the base raised; `__cause__` is its exception.
        """
        try:
            return self._collect(order)
        except (StopIteration, KeyboardInterrupt):
            # Only the main thread receives KeyboardInterrupt. It collects if no thread can be started.
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise BackgroundError(f"batch {order.index} could not be collected: {reason}") from error
        finally:
            # Also after an error: the consumer may read the environment, which the stream may still be changing.
            self.last_fence = Fence(self._cuda)

    def _collect(self, order: Order) -> Item:
        order.fence.wait()
        if order.weights is not None:
            self._policy.load(order.weights)
            # The policy has them now, and reuses their memory. An interrupted order must not load them again.
            order.weights = None
        if self._iterator is None:
            self._iterator = iter(self._base)
        began = time.perf_counter()
        batch, memory = self._memory.own(next(self._iterator))
        self.collect_s += time.perf_counter() - began
        return Item(stamp(batch, order.version), order.version, Fence(self._cuda), memory)


def check_base(base: Any, *, separate_random_numbers: bool) -> None:
    """Refuse a base collector that cannot run beside training.

    Args:
        base: The base collector.
        separate_random_numbers: Whether its random numbers have to be separate from those of training.

    Raises:
        ConfigurationError: If it cannot; says why.
    """
    kind = type(base).__name__
    if getattr(base, "replay_buffer", None) is not None:
        raise ConfigurationError(f"the {kind} fills a replay buffer and yields no batches, so none can be prefetched")
    if hasattr(base, "procs"):
        raise ConfigurationError(f"the {kind} collects in separate processes already, and needs no prefetching")
    is_compiled = getattr(base, "compiled_policy", False) or getattr(base, "cudagraphed_policy", False)
    if separate_random_numbers and is_compiled:
        raise ConfigurationError(
            f"the {kind} compiles its policy, whose random numbers cannot be separated from those of training: "
            "pass rng='shared', and runs are not reproducible"
        )
