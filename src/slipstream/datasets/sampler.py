"""`AsyncSampler`: the next batches are read while this one trains."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from slipstream.errors import ConfigurationError, DatasetError

Batch_co = TypeVar("Batch_co", covariant=True)


class Samples(Protocol[Batch_co]):
    """Something that batches can be drawn from, such as a `MultimodalReplayBuffer`."""

    def sample(self, batch_size: int) -> Batch_co:
        """Draw a batch."""


class AsyncSampler(Generic[Batch_co]):
    """Draws batches on a thread of its own, up to `queue_size` ahead of what is asked for.

    The batches are those that the buffer would give one after another, in the same order. At most `queue_size` batches
    wait in memory, and one more is being read. An error while reading reaches `get_batch`, after the batches that were
    read before it, and every call from then on. The thread ends with `stop`, with the block, when the sampler is
    dropped, and when the interpreter exits. In a forked process there is no thread: make a new sampler there.

    Args:
        buffer: What to draw from; nobody else should, if batches shall be repeatable.
        batch_size: How many transitions a batch has.
        queue_size: How many batches may wait.

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
        for name, value in (("batch_size", batch_size), ("queue_size", queue_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name} is {value!r}, expected a whole number from 1 up")
        self._queue = _Queue(queue_size)
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=_fill, args=(self._queue, buffer, batch_size), name="slipstream-sampler", daemon=True
        )
        # Tells the thread to end, and does not wait for it: an object may be dropped by any thread, also by one that
        # the batch being read needs.
        weakref.finalize(self, _tell, self._queue, self._process).atexit = False
        _running[self._thread] = self._queue
        self._thread.start()

    def get_batch(self, timeout_s: float | None = None) -> Batch_co:
        """Return the next batch; blocks until there is one.

        Args:
            timeout_s: Give up after so many seconds.

        Raises:
            DatasetError: If the sampler was stopped, or belongs to another process.
            TimeoutError: If there is no batch in time.
            BaseException: Whatever went wrong while reading.
        """
        if os.getpid() != self._process:
            raise DatasetError("the sampler belongs to the parent process; make a new one in this process")
        batch: Batch_co = self._queue.get(timeout_s)
        return batch

    def stop(self) -> None:
        """Stop reading and drop what is queued; waits for the batch that is being read. Twice is no error."""
        if os.getpid() == self._process:
            _tell(self._queue, self._process)
            if self._thread is not threading.current_thread():
                self._thread.join()

    def __iter__(self) -> Iterator[Batch_co]:
        while True:
            yield self.get_batch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class _Queue:
    """Batches that wait, and how it ends."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.size = size
        self.batches: deque[Any] = deque()
        self.error: BaseException | None = None
        self.stopped = False

    def wait_for_room(self) -> bool:
        """Block until another batch may be read; returns False if none shall be."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or len(self.batches) < self.size)
            return not self.stopped

    def put(self, batch: Any) -> None:
        with self.changed:
            if not self.stopped:
                self.batches.append(batch)
                self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def get(self, timeout_s: float | None) -> Any:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self.changed.wait_for(lambda: self.stopped or self.error or self.batches, left)
            if self.stopped:
                raise DatasetError("the sampler was stopped, and gives no more batches")
            if self.batches:
                batch = self.batches.popleft()
                self.changed.notify_all()
                return batch
            if self.error is not None:
                raise self.error
            if not ready:
                raise TimeoutError(f"there was no batch within {timeout_s} s")
            return None  # pragma: no cover - waiting ends for one of these reasons


def _fill(queue: _Queue, buffer: Samples[Any], batch_size: int) -> None:
    """Read batches until told to stop, or until one cannot be read."""
    try:
        while queue.wait_for_room():
            queue.put(buffer.sample(batch_size))
    except BaseException as error:  # noqa: BLE001 - handed to whoever asks for a batch
        queue.fail(error)
    finally:
        _running.pop(threading.current_thread(), None)


def _tell(queue: _Queue, process: int) -> None:
    """Say that no more batches are wanted; in a forked process nobody is there to be told, and locks may be held."""
    if os.getpid() != process:
        return
    with queue.changed:
        queue.stopped = True
        queue.batches.clear()
        queue.changed.notify_all()


_running: dict[threading.Thread, _Queue] = {}


@atexit.register
def _end_all() -> None:
    """Wait for all threads before the interpreter takes away what they work with."""
    for thread, queue in list(_running.items()):
        _tell(queue, os.getpid())
        if thread.ident is not None:
            thread.join()


os.register_at_fork(after_in_child=_running.clear)
