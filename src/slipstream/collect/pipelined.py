"""`PipelinedDataCollector`: collect the next batches while this one trains."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

from slipstream.batches import Batch, move, tensors_of
from slipstream.checks import require_choice, require_count
from slipstream.collect.batches import BatchMemory, Leaves
from slipstream.collect.modes import ModeGuard
from slipstream.collect.policy import Fence, FrozenPolicy, Weights, find_cuda, hook_randomness, weights_to_state
from slipstream.collect.producer import BatchProducer, Item, Order, check_base, devices_of, make_context
from slipstream.collect.randomness import PrivateRandomness, draw_seed, warn_of_global_draws
from slipstream.devices import resolve_device
from slipstream.errors import ConfigurationError, StateMismatchError, UnsupportedStateError
from slipstream.store.prefetch import Prefetcher

Rng = Literal["all", "policy", "shared"]

_FORMAT = "slipstream.pipelined"
_PATIENCE_S = 60.0
_SHUT_DOWN = "the collector is shut down; create another one to collect more"
_FORWARDED = frozenset(
    {"env", "exploration_type", "frames_per_batch", "init_random_frames", "requested_frames_per_batch", "total_frames"}
)


class PipelinedDataCollector:
    """Collect the next `prefetch_count` batches on a background thread while the current one trains.

    Guarantees for ``prefetch_count >= 1``:

    * *Order*: every batch of the base collector arrives once, in order.
    * *Memory*: a batch belongs to the consumer and never changes, also with ``return_same_td=True`` (unless
      `reuse_buffers`). At most ``prefetch_count + 1`` batches exist besides those that the consumer keeps.
    * *Weights*: each batch is collected with one set of weights, which the consumer's thread copies when it asks for a
      batch (or calls `update_policy_weights_`), never in the middle of an optimizer step. Batch k gets the weights at
      the time when batch ``k - prefetch_count`` was requested. ``batch["collector", "policy_version"]`` counts the
      copies from 0, and `staleness` returns the number of newer ones.
    * *Reproducibility*: the contents of a batch depend on the seed and the weights, not on the timing of threads or on
      random numbers that training draws. The seed comes from torch's global generator when the collector is created
      (so ``torch.manual_seed`` before that is enough), or from `set_seed`.
    * *Errors*: an exception of the base is raised in place of the batch that failed, as the cause of a
      `BackgroundError`, and again for every later batch.
    * *Stopping*: leaving a loop over the collector ends the thread, and so do `shutdown`, ``with``, garbage collection
      and interpreter exit. Each waits only for the batch in progress. The next loop returns what was collected ahead.

    With ``prefetch_count=0`` it is the base collector: same thread, same policy, same objects, no stamps.

    Use it from one thread. The policy of the base is replaced by a copy that training does not change. What the policy
    itself changes while collecting (running statistics) stays in that copy, until the next weights replace it.
    All threads share tensordict's modes, such as ``set_exploration_type``. Change them inside `paused`, or the batch
    that is being collected fails.

    Args:
        base_collector: A TorchRL ``Collector`` (``SyncDataCollector``), or any iterable of TensorDicts or nested dicts
            of tensors. If its ``policy`` attribute is a module, then that policy collects.
        device: The device of batches; the collecting thread moves them. None leaves them on their device, ``auto`` is
            CUDA if available, else the CPU.
        prefetch_count: Number of batches to collect ahead, which is also the age of their weights in updates.
        collector: Another name of `base_collector`. Give one of them.
        policy: The policy that is trained, if it is not the policy of the base.
        auto_update: Whether asking for a batch copies the policy's weights. If not, only `update_policy_weights_` does.
        rng: Which random numbers come from private generators of the collecting thread instead of torch's global ones.
            ``all``: everything on that thread, which slows down simulators of many small operators. ``policy``: those
            of the policy, faster, and sufficient if the environment has private generators (if it has none, a warning
            is logged). ``shared``: nothing, and runs are not reproducible.
        reuse_buffers: Whether the memory of a batch is reused as soon as the next one is requested.

    Raises:
        ConfigurationError: If an argument is invalid, or the base cannot be pipelined.

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
        base_collector: Iterable[Batch] | None = None,
        device: torch.device | str | None = None,
        prefetch_count: int = 2,
        *,
        collector: Iterable[Batch] | None = None,
        policy: nn.Module | None = None,
        auto_update: bool = True,
        rng: Rng = "all",
        reuse_buffers: bool = False,
    ) -> None:
        self.prefetch_count = require_count("prefetch_count", prefetch_count, least=0)
        require_choice("rng", rng, get_args(Rng))
        if (base_collector is None) == (collector is None):
            given = "neither" if collector is None else "both"
            raise ConfigurationError(f"give base_collector or collector (two names of one argument), got {given}")
        self.base_collector: Any = collector if base_collector is None else base_collector
        self.device = resolve_device(device)
        self._rng = rng
        self._auto_update = auto_update
        self._is_shut_down = False
        self._plain: Iterator[Batch] | None = None
        self._num_batches = 0
        self._num_copies = 0
        self._batch_version = 0
        self._staleness = 0
        self._pending: Weights | None = None  # copied, and not part of an order yet
        self._is_updated = False  # whether weights were copied since the last batch was requested
        self._lent: Leaves | None = None  # the memory of the last batch handed out
        self._wait_s = 0.0
        self._update_s = 0.0
        self._hooks: list[Any] = []
        if self.prefetch_count:
            self._set_up(policy, reuse_buffers=reuse_buffers)

    def _set_up(self, policy: nn.Module | None, *, reuse_buffers: bool) -> None:
        base = self.base_collector
        check_base(base, separate_random_numbers=self._rng != "shared")
        self._cuda = find_cuda((self.device, *devices_of(base)))
        self._policy = FrozenPolicy(base, policy, self._cuda)
        randomness = PrivateRandomness(draw_seed())
        self._randomness = randomness
        if self._rng == "policy":
            self._hooks = hook_randomness(base, randomness)
        # TorchRL copies each batch itself if `return_same_td` is False.
        must_copy = getattr(base, "return_same_td", True) is not False
        self._memory = BatchMemory(self.device, copy=must_copy, reuse=reuse_buffers)
        self._modes = ModeGuard(base)
        self._hooks += self._modes.hooks
        self._producer = BatchProducer(base, self._policy, self._memory, self._modes, self._cuda)
        self._prefetcher = Prefetcher(
            self._producer.collect,
            owner=self,
            name="slipstream-collect",
            context=make_context(self._cuda, randomness if self._rng == "all" else None),
            drop_wait_s=_PATIENCE_S,
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until the base has no more. Leaving the loop ends the collecting thread."""
        self._check_open()
        if not self.prefetch_count:
            for batch in self.base_collector:
                self._num_batches += 1
                yield move(batch, self.device)
            return
        try:
            while (item := self._next_item()) is not None:
                yield item.batch
                # While waiting for the next batch, don't keep alive one that the consumer has released.
                del item
            # Like any iterable, the collector can be iterated over again if the base can.
            self._prefetcher.stop()
            self._prefetcher.reset()
            self._producer.restart()
        finally:
            self._prefetcher.stop()
            self._modes.forget()

    def __next__(self) -> Batch:
        """Return the next batch. The thread continues to collect until `shutdown`."""
        self._check_open()
        if not self.prefetch_count:
            self._plain = self._plain or iter(self.base_collector)
            batch = next(self._plain)
            self._num_batches += 1
            return move(batch, self.device)
        item = self._next_item()
        if item is None:
            raise StopIteration
        return item.batch

    def next(self) -> Batch | None:
        """Return the next batch, or None if there are no more, as TorchRL's collectors do."""
        return next(self, None)

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Copy the policy's weights now, for batches that are not ordered yet.

        Replaces the copy that the request of the next batch would make. Blocks for the copy, not for collecting.

        Args:
            policy_or_weights: A module, a TensorDict or a state dict to copy from; by default the trained policy.
            **kwargs: Arguments for the base, if nothing is prefetched.

        Raises:
            StateMismatchError: If these are the weights of another policy.
        """
        if not self.prefetch_count:
            self.base_collector.update_policy_weights_(policy_or_weights, **kwargs)
        elif self._policy.is_module:
            began = time.perf_counter()
            source = self._policy.select_weights(policy_or_weights)
            spare = self._pending
            # If the copy is interrupted, then this memory has the weights of two moments.
            self._pending = None
            self._pending = self._policy.copy_weights(source, into=spare)
            self._num_copies += 1
            self._is_updated = True
            self._update_s += time.perf_counter() - began

    @property
    def policy_version(self) -> int:
        """Number of copies of the weights, not counting the first."""
        return max(self._num_copies - 1, 0)

    def staleness(self) -> int:
        """Return how many versions older than the newest the weights of the last batch are."""
        return self._staleness

    def get_stats(self) -> dict[str, float]:
        """Return counts and seconds so far.

        Returns:
            ``num_batches``: batches handed out. ``num_ready``: batches collected and not handed out.
            ``policy_version``: the newest version of the weights. ``batch_policy_version``, ``staleness``: of the last
            batch handed out. ``wait_s``: time the consumer waited for batches. ``collect_s``: time to collect them.
            ``update_s``: time to copy weights.
        """
        return {
            "num_batches": self._num_batches,
            "num_ready": self._prefetcher.num_ready if self.prefetch_count else 0,
            "policy_version": self.policy_version,
            "batch_policy_version": self._batch_version,
            "staleness": self._staleness,
            "wait_s": self._wait_s,
            "collect_s": self._producer.collect_s if self.prefetch_count else 0.0,
            "update_s": self._update_s,
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the batch in progress, then collect nothing inside the block. Can be nested.

        Use it to evaluate, to change tensordict's modes and to read the environment. Inside, batches that are ready
        can be taken; asking for more raises `RuntimeError`.
        """
        if not self.prefetch_count:
            yield
            return
        with self._prefetcher.paused():
            # The thread has finished, but its CUDA stream may not have.
            if self._producer.last_fence is not None:
                self._producer.last_fence.wait()
            yield

    def set_seed(self, seed: int, static_seed: bool = False) -> Any:
        """Seed the base and the collecting thread for batches that are not ordered yet; waits for those that are.

        To seed all batches, call it before the first one. Returns what the base returns, if it has a ``set_seed``.
        """
        options = {"static_seed": True} if static_seed else {}
        if not self.prefetch_count:
            return self.base_collector.set_seed(seed, **options)
        self._prefetcher.finish()
        with self.paused():
            self._randomness.seed(seed)
            if hasattr(self.base_collector, "set_seed"):
                return self.base_collector.set_seed(seed, **options)
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, as copies.

        Contains the state of the base, the batches that were collected and not handed out, and the weights for the
        batches that are ordered. A collector that loads it continues exactly, if the base does. Waits for the batch in
        progress. With ``prefetch_count=0`` it is the state of the base.

        Raises:
            UnsupportedStateError: If the base has no ``state_dict``, or a batch cannot be stored.
        """
        if not hasattr(self.base_collector, "state_dict"):
            raise UnsupportedStateError(f"{type(self.base_collector).__name__} has no state_dict")
        if not self.prefetch_count:
            return self.base_collector.state_dict()  # type: ignore[no-any-return]
        with self.paused():
            return {
                "format": _FORMAT,
                "base": copy.deepcopy(self.base_collector.state_dict()),
                "batches": [item.state_dict() for item in self._prefetcher.results],
                "orders": [order.state_dict() for order in self._prefetcher.orders],
                "collecting": self._policy.collecting_weights().state_dict(),
                "pending": weights_to_state(self._pending),
                "versions": [self._num_copies, self._batch_version, self._staleness],
                "is_updated": self._is_updated,
                "num_batches": self._num_batches,
                "randomness": self._randomness.state_dict(),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a position; drops batches that were collected and not handed out.

        Does not change the trained policy: load its weights separately. Also accepts the state of the base alone, or of
        a collector with another `prefetch_count`.

        Raises:
            StateMismatchError: Before any change, if the policy differs, or it has batches and `prefetch_count` is 0.
        """
        is_ours = state_dict.get("format") == _FORMAT
        if not self.prefetch_count:
            if is_ours:
                raise StateMismatchError("the state holds batches collected ahead: prefetch_count is 0, expected more")
            self.base_collector.load_state_dict(state_dict)
            self._plain = None
            return
        with self.paused():
            # First, because it raises if the state belongs to another policy.
            collecting = self._policy.weights_from_state(state_dict["collecting"]) if is_ours else None
            self.base_collector.load_state_dict(state_dict["base"] if is_ours else state_dict)
            self._producer.restart()
            self._prefetcher.reset()
            self._pending = None
            self._lent = None
            self._is_updated = False
            if collecting is not None:
                self._restore(state_dict, collecting)

    def shutdown(self, timeout: float | None = _PATIENCE_S, **kwargs: Any) -> None:
        """End the thread, drop its batches and shut the base down; waits for the batch in progress. Idempotent.

        Args:
            timeout: How many seconds to wait at most.
            **kwargs: Arguments for the base's ``shutdown``.

        Raises:
            TimeoutError: If the batch takes longer. The base is in use, and is not shut down.
        """
        if self.prefetch_count:
            # First, because a consumer that waits on another thread would restart the thread that `stop` ends.
            self._prefetcher.abandon(RuntimeError(_SHUT_DOWN))
            if not self._prefetcher.stop(timeout):
                raise TimeoutError(
                    f"the batch in progress is not done after {timeout} s; call shutdown again to continue waiting"
                )
            for hook in self._hooks:
                hook.remove()
        if not self._is_shut_down and hasattr(self.base_collector, "shutdown"):
            self.base_collector.shutdown(**kwargs)
        self._is_shut_down = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __len__(self) -> int:
        return len(self.base_collector)

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED:
            return getattr(self.base_collector, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; base_collector may have it")

    def _next_item(self) -> Item | None:
        """Order what is missing, wait for the next batch and hand it to the consumer; None if there are no more."""
        self._check_open()
        if self._lent is not None:
            self._memory.give_back(self._lent, Fence(self._cuda))
            self._lent = None
        self._order()
        began = time.perf_counter()
        # While training waits for the first batch, only the base can draw random numbers.
        is_first = self._rng == "policy" and not self._num_batches
        try:
            with warn_of_global_draws() if is_first else contextlib.nullcontext():
                item = self._prefetcher.take()
        except StopIteration:
            return None
        finally:
            self._wait_s += time.perf_counter() - began
        if self._cuda is not None:
            item.fence.hand_over(tensors_of(item.batch))
        self._lent = item.memory
        self._num_batches += 1
        self._batch_version = item.version
        self._staleness = self.policy_version - item.version
        return item

    def _order(self) -> None:
        """Order the requested batch and `prefetch_count` more, unless they are ordered already."""
        if not self._is_updated and (self._auto_update or not self._num_copies):
            self.update_policy_weights_()
        self._is_updated = False
        self._modes.remember()
        # The base may end at any moment, and then orders are ignored.
        while not self._prefetcher.has_ended and self._prefetcher.num_ahead < self.prefetch_count + 1:
            index = self._num_batches + self._prefetcher.num_ahead
            order = Order(index, self.policy_version, self._pending, Fence(self._cuda))
            # From now on, these weights belong to the collecting thread.
            self._pending = None
            self._prefetcher.order(order)

    def _restore(self, state: Mapping[str, Any], collecting: Weights) -> None:
        """Apply what `state_dict` returned, while collecting is paused."""
        self._policy.load(collecting)
        items = [self._producer.load_item(entry) for entry in state["batches"]]
        orders = []
        for index, entry in enumerate(state["orders"], state["num_batches"] + len(items)):
            orders.append(self._producer.load_order(index, entry))
        self._prefetcher.reset(orders, items)
        self._pending = self._policy.weights_from_state(state["pending"])
        self._num_copies, self._batch_version, self._staleness = state["versions"]
        self._num_batches = state["num_batches"]
        self._is_updated = state["is_updated"]
        if state["randomness"] is not None:  # None in states of earlier versions with rng="shared"
            self._randomness.load_state_dict(state["randomness"])

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise RuntimeError(_SHUT_DOWN)
