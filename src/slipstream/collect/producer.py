"""What the collecting thread does for each order: load weights, collect a batch, copy it, record where CUDA is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.batches import Batch, from_state, stamp, to_state
from slipstream.collect.batches import BatchMemory, Leaves
from slipstream.collect.modes import ModeGuard
from slipstream.collect.policy import Fence, FrozenPolicy, Weights, side_stream, weights_to_state
from slipstream.collect.randomness import PrivateRandomness
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

    def state_dict(self) -> dict[str, Any]:
        """Return the version and the weights as plain data, copied."""
        return {"version": self.version, "weights": weights_to_state(self.weights)}


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

    def state_dict(self) -> dict[str, Any]:
        """Return the batch and its version as plain data, copied."""
        return {"version": self.version, "batch": to_state(self.batch)}


class BatchProducer:
    """Collects one batch per order from a base collector. Called by one thread at a time.

    Args:
        base: The base collector, an iterable of batches.
        policy: Loads the weights of an order into the policy of the base.
        memory: Copies batches into memory that the base does not reuse.
        modes: Raises if tensordict's modes change during collection.
        cuda: The CUDA device of the base, if any.

    Attributes:
        collect_s: Seconds spent in the base so far.
        last_fence: The position of the collecting thread in its CUDA stream after its last batch.
    """

    def __init__(
        self, base: Any, policy: FrozenPolicy, memory: BatchMemory, modes: ModeGuard, cuda: torch.device | None
    ) -> None:
        self.collect_s = 0.0
        self.last_fence: Fence | None = None
        self._base = base
        self._policy = policy
        self._memory = memory
        self._modes = modes
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
            with self._modes.collecting():
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

    def load_item(self, state: Mapping[str, Any]) -> Item:
        """Return a batch from what `Item.state_dict` returned."""
        batch, memory = self._memory.own(from_state(state["batch"]))
        return Item(stamp(batch, state["version"]), state["version"], Fence(self._cuda), memory)

    def load_order(self, index: int, state: Mapping[str, Any]) -> Order:
        """Return an order from what `Order.state_dict` returned.

        Raises:
            StateMismatchError: If it has the weights of another policy.
        """
        weights = self._policy.weights_from_state(state["weights"])
        return Order(index, state["version"], weights, Fence(self._cuda))

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


def make_context(
    cuda: torch.device | None, randomness: PrivateRandomness | None
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that creates the context of a collecting thread.

    Args:
        cuda: The CUDA device to use a separate stream of, if any.
        randomness: Where everything on the thread draws random numbers from, unless None.
    """

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with side_stream(cuda), randomness or contextlib.nullcontext():
            yield

    return context


def devices_of(base: Any) -> list[torch.device | None]:
    """Return the devices that a TorchRL collector uses."""
    return [getattr(base, name, None) for name in ("policy_device", "env_device", "storing_device")]


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
