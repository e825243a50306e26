"""`AsyncSampler`: read the next batches while this one trains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from slipstream.checks import require_count
from slipstream.errors import DatasetError
from slipstream.store.prefetch import NothingOrderedError, Prefetcher

Batch_co = TypeVar("Batch_co", covariant=True)


class Samples(Protocol[Batch_co]):
    """A source of batches, such as a `MultimodalReplayBuffer`."""

    def sample(self, batch_size: int) -> Batch_co:
        """Draw a batch."""


class AsyncSampler(Generic[Batch_co]):
    """Draw batches on a background thread, up to `queue_size` ahead of the consumer.

    * *Order*: the batches are those that the buffer would return one after another, in the same order.
    * *Memory*: at most `queue_size` batches are ready or in progress, and one more while `get_batch` waits.
    * *Errors*: an exception of ``buffer.sample`` reaches `get_batch` after the batches before it, and every later call.
    * *Threads*: all methods are thread-safe. The thread ends with `stop`, at the end of a ``with`` block, when the
      sampler is garbage-collected (which does not wait for the batch in progress), and at interpreter exit.
    * *Ranks*: the buffer decides what a rank draws; `MultimodalReplayBuffer` draws other batches in every rank.
    * *Fork*: a sampler does not work in a forked child process. Create another one there.

    Args:
        buffer: Where to draw from. Batches are reproducible only if nothing else draws from it.
        batch_size: Number of transitions in a batch.
        queue_size: Maximum number of batches to read ahead.

    Attributes:
        buffer: The buffer.

    Raises:
        ConfigurationError: If a size is not a positive integer.

    Example:
        >>> class Numbers:
        ...     last = 0
        ...
        ...     def sample(self, batch_size):
        ...         self.last += 1
        ...         return [self.last] * batch_size
        >>> with AsyncSampler(Numbers(), batch_size=2) as sampler:
        ...     sampler.get_batch(), sampler.get_batch()
        ([1, 1], [2, 2])
    """

    def __init__(self, buffer: Samples[Batch_co], batch_size: int, queue_size: int = 4) -> None:
        self.buffer = buffer
        self._batch_size = require_count("batch_size", batch_size)
        self._queue_size = require_count("queue_size", queue_size)
        self._process = os.getpid()
        # Garbage collection does not wait for the batch in progress: it may run on a thread which that batch needs.
        self._prefetcher = Prefetcher(buffer.sample, owner=self, name="slipstream-sampler", drop_wait_s=0.0)
        self._order_up_to(self._queue_size)

    @property
    def running(self) -> bool:
        """Whether batches are still drawn: False after `stop`, after an exception of the buffer, and after a fork."""
        return not self._prefetcher.has_ended and os.getpid() == self._process

    def get_batch(self, timeout_s: float | None = None) -> Batch_co:
        """Return the next batch; blocks until it is ready.

        Args:
            timeout_s: How long to wait at most.

        Raises:
            DatasetError: If the sampler is stopped, or was created in another process.
            TimeoutError: If the batch is not ready in time.
            BaseException: The exception of ``buffer.sample``.
        """
        if os.getpid() != self._process:
            raise DatasetError("the sampler belongs to the parent process; make a new one in this process")
        while True:
            # Order before taking: after the batch is taken, an interrupt must not get a chance to lose it.
            self._order_up_to(self._queue_size + 1)
            try:
                return self._prefetcher.take(timeout_s)
            except NothingOrderedError:
                # More threads wait than batches were ordered, and the other threads took all of them.
                continue

    def stop(self) -> None:
        """Stop reading and drop the batches that are ready; blocks until the batch in progress is done. Idempotent."""
        if os.getpid() == self._process:
            self._prefetcher.abandon(DatasetError("the sampler was stopped and returns no more batches"))
            self._prefetcher.stop()

    def __iter__(self) -> Iterator[Batch_co]:
        while True:
            yield self.get_batch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _order_up_to(self, num_ahead: int) -> None:
        """Order batches until this many are ready, in progress or ordered."""
        while self._prefetcher.num_ahead < num_ahead and not self._prefetcher.has_ended:
            self._prefetcher.order(self._batch_size)
