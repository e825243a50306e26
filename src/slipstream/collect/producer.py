"""The collecting thread: one batch per order, in order, until it is told to pause or to stop."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from slipstream.batches import Batch, stamp
from slipstream.collect.batches import BatchMemory, Leaves
from slipstream.collect.policy import FrozenPolicy, Weights
from slipstream.collect.streams import Fence

Outcome = Literal["batch", "end", "error"]


@dataclass
class Order:
    """Leave to collect one batch.

    Attributes:
        version: Of the weights to collect it with.
        weights: These weights, if they differ from those of the order before.
        fence: Where the one who orders is, in its stream.
    """

    version: int
    weights: Weights | None
    fence: Fence


@dataclass
class Item:
    """What became of an order: a batch, or the end of the base collector, or an error of it."""

    kind: Outcome
    fence: Fence
    version: int = 0
    batch: Batch = None
    memory: Leaves = field(default_factory=dict)
    error: BaseException | None = None


class Producer:
    """Collects a batch per order in a thread of its own, which ends with `stop` and never waits for room.

    Orders are what bounds it: there are at most as many batches as were ordered, so that putting one down needs no
    waiting, and stopping waits for the batch under way and for nothing else. Nothing is lost by stopping: orders and
    batches stay, and `take` starts a thread that goes on with them.

    Args:
        base: What is iterated.
        policy: What new weights are loaded into.
        memory: What makes batches own their memory.
        environment: Makes the context in which the thread runs.
        cuda: The CUDA device that it works on, if any.
    """

    def __init__(
        self,
        base: Any,
        policy: FrozenPolicy,
        memory: BatchMemory,
        environment: Callable[[], contextlib.AbstractContextManager[Any]],
        cuda: torch.device | None,
    ) -> None:
        self.orders: deque[Order] = deque()
        self.items: deque[Item] = deque()
        self.collect_s = 0.0
        self._base = base
        self._iterator: Iterator[Batch] | None = None
        self._policy = policy
        self._memory = memory
        self._environment = environment
        self._cuda = cuda
        self._lock = threading.RLock()  # reentrant, because the garbage collector may call `stop` while it is held
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._busy = False
        self._stopping = False
        self._num_pauses = 0
        self._last_fence: Fence | None = None

    @property
    def num_ahead(self) -> int:
        """How many batches are ordered, under way, or waiting to be taken."""
        with self._changed:
            return len(self.orders) + self._busy + len(self.items)

    @property
    def is_over(self) -> bool:
        """Whether the base collector has ended or failed, so that orders make no difference."""
        with self._changed:
            return any(item.kind != "batch" for item in self.items)

    def order(self, order: Order) -> None:
        """Ask for one more batch; does not block."""
        with self._changed:
            self.orders.append(order)
            self._changed.notify_all()

    def take(self) -> Item:
        """Return the next batch, blocking until it is there; the end and an error stay, and are returned again.

        Raises:
            RuntimeError: If there is none yet and collecting is paused, so that there would never be one.
        """
        with self._changed:
            while not self.items:
                if self._num_pauses:
                    raise RuntimeError("collecting is paused, and no batch is left: ask for it after the pause")
                self._start()
                self._changed.wait()
            return self.items.popleft() if self.items[0].kind == "batch" else self.items[0]

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread, blocking until the batch under way is done; returns False if that takes too long.

        May be called in any state and by any thread, and again. Whoever still waits for a batch has it started anew.
        """
        if os.getpid() != self._process:
            return True  # a forked process has this object, but not the thread
        # The garbage collector may call this in the middle of another method, or in the thread itself; waiting for
        # the thread would then be waiting for ever.
        may_wait = not self._lock._is_owned()  # type: ignore[attr-defined]
        with self._changed:
            thread = self._thread
            self._stopping = thread is not None
            self._changed.notify_all()
        if thread is None or thread is threading.current_thread() or not may_wait:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the batch under way, and collect nothing while the block lasts. May be nested."""
        with self._changed:
            self._num_pauses += 1
            try:
                self._changed.wait_for(lambda: not self._busy)
            except BaseException:
                self._num_pauses -= 1
                raise
            if self._last_fence is not None:
                self._last_fence.wait()
        try:
            yield
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._changed.notify_all()

    def finish_orders(self) -> None:
        """Block until every batch that is ordered has been collected."""
        with self._changed:
            while (self.orders or self._busy) and not self.is_over:
                self._start()
                self._changed.wait()

    def reset(self) -> None:
        """Forget orders and batches, and iterate the base anew; only while stopped or paused."""
        with self._changed:
            self.orders.clear()
            self.items.clear()
            self._iterator = None

    def _start(self) -> None:
        """Start the thread, unless one runs; one that is about to end says so when it has."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="slipstream-collect", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            with self._environment():
                while (order := self._next_order()) is not None:
                    item = self._collect(order)
                    with self._changed:
                        self.items.append(item)
                        self._last_fence = item.fence
                        self._busy = False
                        self._changed.notify_all()
                    if item.kind != "batch":
                        return
                    del item, order  # so that a thread that waits keeps no batch alive
        except BaseException as error:  # noqa: BLE001 - whoever waits for a batch has to hear of it
            with self._changed:
                self.items.append(Item("error", Fence(self._cuda), error=error))
        finally:
            with self._changed:
                self._thread = None
                self._busy = self._stopping = False
                self._changed.notify_all()

    def _next_order(self) -> Order | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or (self.orders and not self._num_pauses))
            if self._stopping:
                return None
            self._busy = True
            return self.orders.popleft()

    def _collect(self, order: Order) -> Item:
        try:
            order.fence.wait()
            if order.weights is not None:
                self._policy.load(order.weights)
            if self._iterator is None:
                self._iterator = iter(self._base)
            began = time.perf_counter()
            batch, memory = self._memory.own(next(self._iterator))
            self.collect_s += time.perf_counter() - began
            return Item("batch", Fence(self._cuda), order.version, stamp(batch, order.version), memory)
        except StopIteration:
            return Item("end", Fence(self._cuda))
        except BaseException as error:  # noqa: BLE001 - it is raised where the batch is asked for
            return Item("error", Fence(self._cuda), error=error)
