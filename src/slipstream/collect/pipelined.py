"""`PipelinedDataCollector`: collect the next batches while this one trains."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

from slipstream.batches import Batch, from_state, move, stamp, tensors_of, to_state
from slipstream.collect.batches import BatchMemory, Leaves
from slipstream.collect.isolation import PrivateRandomness, draw_seed, make_environment
from slipstream.collect.policy import FrozenPolicy, Weights, hook_randomness
from slipstream.collect.producer import Item, Order, Producer
from slipstream.collect.streams import Fence, find_cuda
from slipstream.errors import BackgroundError, ConfigurationError, StateMismatchError, UnsupportedStateError

logger = logging.getLogger(__name__)

Rng = Literal["all", "policy", "shared"]

_FORMAT = "slipstream.pipelined"
_PATIENCE_S = 60.0
_FORWARDED = frozenset(
    {"env", "exploration_type", "frames_per_batch", "init_random_frames", "requested_frames_per_batch", "total_frames"}
)


class PipelinedDataCollector:
    """Collects the next `prefetch_count` batches in a thread while the one handed out trains.

    Guarantees, for ``prefetch_count >= 1``:

    * *Order*: every batch of the base collector arrives once, in order.
    * *Memory*: a batch is the consumer's own and never changes behind its back, with ``return_same_td=True`` too
      (unless `reuse_buffers`). At most ``prefetch_count + 1`` batches exist besides those the consumer keeps.
    * *Weights*: a batch is collected with one set of weights: a copy of the policy's, taken on the consumer's thread
      while it asks for a batch (or calls `update_policy_weights_`), never in the middle of an optimizer step. Batch k
      is collected with the weights as they were when batch ``k - prefetch_count`` was asked for (the first ones,
      before that). It says so: ``batch["collector", "policy_version"]`` counts the copies, from 0, and `staleness`
      tells how many newer ones there are.
    * *Repeatability*: which numbers a batch holds depends on seeds and on the weights, not on how fast threads run,
      provided that the environment draws from generators of its own, or from torch's with ``rng="all"``. If it is
      seen to do otherwise, that is logged.
    * *Errors*: what the base raises reaches the consumer in place of the batch that failed, as the cause of a
      `BackgroundError`, and again whenever a batch is asked for after it.
    * *Stopping*: leaving a loop over the collector ends the thread, as do `shutdown`, ``with``, garbage collection and
      the end of the program. Each waits for the batch under way, and for nothing else. Batches that were collected
      ahead are handed out by the next loop.

    With ``prefetch_count=0`` it is the base collector: same thread, same policy, same objects, nothing stamped.

    To be used from one thread. The base's policy is replaced by a copy, which training does not change; what the
    policy itself changes while collecting (running statistics) stays in that copy, until the next weights come.

    Args:
        base_collector: A TorchRL ``Collector`` (``SyncDataCollector``), or anything iterable that yields TensorDicts or
            nested dicts of tensors. If it has a ``policy`` that is a module, that is what collects.
        device: Where batches go, moved by the collecting thread; None leaves them where they are.
        prefetch_count: How many batches are collected ahead, which is also how many updates old their weights are.
        policy: The policy that is trained, if it is not the base's own.
        auto_update: Whether asking for a batch copies the policy's weights. If not, only `update_policy_weights_` does.
        rng: Which draws come from generators of the collecting thread's own instead of torch's global ones: those of
            the ``policy`` (default, if it is a module), which does for environments that have generators of their own;
            ``all`` of that thread, which makes simulators of many small operators slow; or none (``shared``), and
            nothing can be repeated. Their seed is drawn from the global generator.
        reuse_buffers: Whether the memory of a batch is used again as soon as the next one is asked for.

    Raises:
        ConfigurationError: If an argument makes no sense, or the base cannot be pipelined; says why.

    Example:
        >>> import torch
        >>> rollouts = [{"reward": torch.full((2,), float(step))} for step in range(3)]
        >>> with PipelinedDataCollector(rollouts, "cpu", prefetch_count=1) as collector:
        ...     for batch in collector:
        ...         print(batch["reward"])
        tensor([0., 0.])
        tensor([1., 1.])
        tensor([2., 2.])
    """

    def __init__(
        self,
        base_collector: Iterable[Batch],
        device: torch.device | str | None = None,
        prefetch_count: int = 2,
        *,
        policy: nn.Module | None = None,
        auto_update: bool = True,
        rng: Rng | None = None,
        reuse_buffers: bool = False,
    ) -> None:
        if prefetch_count < 0:
            raise ConfigurationError(f"prefetch_count is {prefetch_count}, expected 0 or more")
        if rng not in (None, *get_args(Rng)):
            raise ConfigurationError(f"rng is {rng!r}, expected one of {', '.join(get_args(Rng))}")
        self.base_collector: Any = base_collector
        self.device = None if device is None else torch.device(device)
        self.prefetch_count = prefetch_count
        self._auto_update = auto_update
        self._is_shut_down = False
        self._plain: Iterator[Batch] | None = None
        self._num_batches = 0
        self._num_copies = self._batch_version = self._staleness = 0
        self._pending: Weights | None = None  # copied, and not given to an order yet
        self._is_updated = False  # since a batch was asked for
        self._lent: Leaves | None = None
        self._wait_s = self._update_s = 0.0
        self._hooks: list[Any] = []
        if prefetch_count:
            self._set_up(policy, rng, reuse_buffers=reuse_buffers)

    def _set_up(self, policy: nn.Module | None, rng: Rng | None, *, reuse_buffers: bool) -> None:
        base = self.base_collector
        rng = rng or ("policy" if isinstance(getattr(base, "policy", None), nn.Module) else "all")
        _check_base(base, rng)
        self._rng = rng
        devices = (getattr(base, name, None) for name in ("policy_device", "env_device", "storing_device"))
        self._cuda = find_cuda((self.device, *devices))
        self._policy = FrozenPolicy(base, policy, self._cuda)
        self._randomness = None if rng == "shared" else PrivateRandomness(draw_seed())
        if rng == "policy" and self._randomness is not None:
            self._hooks = hook_randomness(base, self._randomness)
        keeps_hands_off = getattr(base, "return_same_td", True) is False  # TorchRL copies each batch itself then
        self._memory = BatchMemory(self.device, copy=not keeps_hands_off, reuse=reuse_buffers)
        mode = self._randomness if rng == "all" else None
        self._producer = Producer(base, self._policy, self._memory, make_environment(self._cuda, mode), self._cuda)
        weakref.finalize(self, self._producer.stop, _PATIENCE_S)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until the base has no more; leaving the loop ends the collecting thread."""
        self._check_open()
        if not self.prefetch_count:
            for batch in self.base_collector:
                self._num_batches += 1
                yield move(batch, self.device)
            return
        try:
            while (item := self._next_item()).kind == "batch":
                yield item.batch
                del item  # a batch that the consumer lets go of is gone, also while the next one is waited for
            self._producer.reset()  # as any iterable, it may be iterated again if the base may
        finally:
            self._producer.stop()

    def __next__(self) -> Batch:
        """Return the next batch. The thread goes on collecting until `shutdown`."""
        self._check_open()
        if not self.prefetch_count:
            self._plain = self._plain or iter(self.base_collector)
            batch = next(self._plain)
            self._num_batches += 1
            return move(batch, self.device)
        item = self._next_item()
        if item.kind == "end":
            raise StopIteration
        return item.batch

    def next(self) -> Batch | None:
        """Return the next batch, or None if there are no more, as TorchRL's collectors do."""
        return next(self, None)

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Copy the policy's weights now, to be used for batches that are not ordered yet.

        Comes in place of the copy that asking for the next batch would make. Blocks for the copy, not for collecting.

        Args:
            policy_or_weights: A module, a TensorDict or a state dict to copy from; by default the trained policy.
            **kwargs: For the base, if nothing is prefetched.

        Raises:
            StateMismatchError: If these are weights of another policy.
        """
        if not self.prefetch_count:
            self.base_collector.update_policy_weights_(policy_or_weights, **kwargs)
        elif self._policy.is_module:
            began = time.perf_counter()
            self._num_copies += 1
            self._is_updated = True
            self._pending = self._policy.copy_weights(policy_or_weights, into=self._pending)
            self._update_s += time.perf_counter() - began

    @property
    def policy_version(self) -> int:
        """How many times weights have been copied after the first time."""
        return max(self._num_copies - 1, 0)

    def staleness(self) -> int:
        """Return how many versions older than the newest the weights were that collected the last batch handed out."""
        return self._staleness

    def get_stats(self) -> dict[str, float]:
        """Return counts and seconds so far.

        Returns:
            ``num_batches`` handed out; ``num_ready``, collected and not handed out; ``policy_version``, the newest;
            ``batch_policy_version`` and ``staleness`` of the last batch handed out; ``wait_s``, how long the consumer
            waited for batches; ``collect_s``, how long collecting them took; ``update_s``, copying weights.
        """
        producer = self._producer if self.prefetch_count else None
        return {
            "num_batches": self._num_batches,
            "num_ready": 0 if producer is None else sum(item.kind == "batch" for item in list(producer.items)),
            "policy_version": self.policy_version,
            "batch_policy_version": self._batch_version,
            "staleness": self._staleness,
            "wait_s": self._wait_s,
            "collect_s": 0.0 if producer is None else producer.collect_s,
            "update_s": self._update_s,
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the batch under way, and collect nothing while the block lasts: for reading the environment."""
        if not self.prefetch_count:
            yield
            return
        with self._producer.paused():
            yield

    def set_seed(self, seed: int, static_seed: bool = False) -> Any:
        """Seed the base, and the collecting thread's generators, for batches that are not ordered yet.

        Blocks until those that are ordered have been collected. To seed all batches, call it before the first.

        Returns:
            What the base returns.
        """
        options = {"static_seed": True} if static_seed else {}
        if not self.prefetch_count:
            return self.base_collector.set_seed(seed, **options)
        self._producer.finish_orders()
        with self._producer.paused():
            if self._randomness is not None:
                self._randomness.seed(seed)
            return self.base_collector.set_seed(seed, **options)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch handed out, as copies.

        It holds the base's state, the batches that were collected and not handed out, and the weights that are yet to
        collect: nothing is lost and nothing is counted twice, and if the base continues exactly, so does this. Waits
        for the batch under way. With ``prefetch_count=0`` it is the base's state.

        Raises:
            UnsupportedStateError: If the base has no ``state_dict``, or a batch cannot be stored.
        """
        if not hasattr(self.base_collector, "state_dict"):
            raise UnsupportedStateError(f"{type(self.base_collector).__name__} has no state_dict")
        if not self.prefetch_count:
            return self.base_collector.state_dict()  # type: ignore[no-any-return]
        with self._producer.paused():
            items = [item for item in self._producer.items if item.kind == "batch"]
            return {
                "format": _FORMAT,
                "base": copy.deepcopy(self.base_collector.state_dict()),
                "batches": [{"version": item.version, "batch": to_state(item.batch)} for item in items],
                "orders": [
                    {"version": order.version, "weights": self._weights_to_state(order.weights)}
                    for order in self._producer.orders
                ],
                "collecting": self._weights_to_state(self._policy.collecting_weights()),
                "pending": self._weights_to_state(self._pending),
                "versions": [self._num_copies, self._batch_version, self._staleness],
                "is_updated": self._is_updated,
                "num_batches": self._num_batches,
                "randomness": None if self._randomness is None else self._randomness.state_dict(),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from such a position; batches collected so far and not handed out are dropped.

        The trained policy is not touched: load its weights as you saved them. A state of the base alone, or of another
        `prefetch_count`, is taken too.

        Raises:
            StateMismatchError: If it is of another policy, or holds batches that ``prefetch_count=0`` has no place for.
        """
        is_ours = state_dict.get("format") == _FORMAT
        if not self.prefetch_count:
            if is_ours:
                raise StateMismatchError("the state holds batches collected ahead: prefetch_count is 0, expected more")
            self.base_collector.load_state_dict(state_dict)
            self._plain = None
            return
        with self._producer.paused():
            self.base_collector.load_state_dict(state_dict["base"] if is_ours else state_dict)
            self._producer.reset()
            self._pending = self._lent = None
            self._is_updated = False
            if is_ours:
                self._restore(state_dict)

    def shutdown(self, timeout: float | None = _PATIENCE_S, **kwargs: Any) -> None:
        """End the collecting thread and shut the base down; waits for the batch under way. May be repeated.

        Args:
            timeout: For how many seconds to wait.
            **kwargs: For the base's ``shutdown``.

        Raises:
            TimeoutError: If the batch takes longer; the base, which is in use, is then not shut down.
        """
        if self.prefetch_count:
            if not self._producer.stop(timeout):
                raise TimeoutError(f"the batch under way is not done after {timeout} s; call shutdown again to wait on")
            self._producer.reset()
            for hook in self._hooks:
                hook.remove()
        if not self._is_shut_down and hasattr(self.base_collector, "shutdown"):
            self.base_collector.shutdown(**kwargs)
        self._is_shut_down = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __len__(self) -> int:
        return len(self.base_collector)

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED:
            return getattr(self.base_collector, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; base_collector may have it")

    def _next_item(self) -> Item:
        """Order what is missing, wait for the next batch, and make it the consumer's."""
        self._check_open()
        if self._lent is not None:
            self._memory.give_back(self._lent, self._fence())
            self._lent = None
        self._order()
        began = time.perf_counter()
        with self._watching_the_environment():
            item = self._producer.take()
        self._wait_s += time.perf_counter() - began
        if item.error is not None:
            reason = f"{type(item.error).__name__}: {item.error}"
            raise BackgroundError(f"batch {self._num_batches} could not be collected: {reason}") from item.error
        if item.kind == "batch":
            item.fence.hand_over(tensors_of(item.batch) if self._cuda else ())
            self._lent = item.memory
            self._num_batches += 1
            self._batch_version = item.version
            self._staleness = self.policy_version - item.version
        return item

    @contextlib.contextmanager
    def _watching_the_environment(self) -> Iterator[None]:
        """Log if the environment draws from the global generator, which nobody else uses while we wait at first."""
        if self._rng != "policy" or self._num_batches:
            yield
            return
        before = torch.get_rng_state()
        yield
        if not torch.equal(before, torch.get_rng_state()):
            logger.warning(
                "The environment draws from torch's global generator, as training does: runs cannot be repeated. Give "
                "it a generator of its own, or pass rng='all'."
            )

    def _order(self) -> None:
        """Keep as many batches ordered as are wanted ahead, and one: the one that is asked for."""
        if not self._is_updated and (self._auto_update or not self._num_copies):
            self.update_policy_weights_()
        self._is_updated = False
        for _ in range(0 if self._producer.is_over else self.prefetch_count + 1 - self._producer.num_ahead):
            weights, self._pending = self._pending, None
            self._producer.order(Order(self.policy_version, weights, self._fence()))

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` wrote, while collecting is paused."""
        self._policy.load(self._policy.weights_from_state(state["collecting"]))
        for order in state["orders"]:
            self._producer.order(Order(order["version"], self._weights_from_state(order["weights"]), self._fence()))
        for entry in state["batches"]:
            batch, memory = self._memory.own(from_state(entry["batch"]))
            item = Item("batch", self._fence(), entry["version"], stamp(batch, entry["version"]), memory)
            self._producer.items.append(item)
        self._pending = self._weights_from_state(state["pending"])
        self._num_copies, self._batch_version, self._staleness = state["versions"]
        self._num_batches, self._is_updated = state["num_batches"], state["is_updated"]
        if self._randomness is not None and state["randomness"] is not None:
            self._randomness.load_state_dict(state["randomness"])

    def _weights_to_state(self, weights: Weights | None) -> dict[str, Any] | None:
        return None if weights is None else self._policy.weights_to_state(weights)

    def _weights_from_state(self, state: Mapping[str, Any] | None) -> Weights | None:
        return None if state is None else self._policy.weights_from_state(state)

    def _fence(self) -> Fence:
        return Fence(self._cuda)

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("the collector is shut down and collects no more")


def _check_base(base: Any, rng: Rng) -> None:
    """Refuse what could not be kept apart from training."""
    kind = type(base).__name__
    if getattr(base, "replay_buffer", None) is not None:
        raise ConfigurationError(f"the {kind} fills a replay buffer and yields no batches, so none can be prefetched")
    if hasattr(base, "procs"):
        raise ConfigurationError(f"the {kind} collects in processes of its own, beside training, and needs no prefetch")
    if rng != "shared" and (getattr(base, "compiled_policy", False) or getattr(base, "cudagraphed_policy", False)):
        raise ConfigurationError(
            f"the {kind} compiles its policy, whose random numbers cannot be told from training's: pass rng='shared', "
            "and know that runs cannot be repeated"
        )
