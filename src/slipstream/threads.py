"""Run a function over many items on a few short-lived threads.

Threads are made for one call and gone after it. That costs about 0.1 ms and buys three things a shared pool cannot
give: they inherit the low scheduling priority of the background thread that starts them, a fork never meets a dead
pool, and they work while the interpreter is shutting down, when ``concurrent.futures`` refuses new work.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def usable_cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Return how many threads to use: one per core this process may run on, at most 8."""
    return min(8, usable_cores())


def background_threads() -> int:
    """Return how many threads may pack beside training: a quarter of the cores, one at least.

    More would not be done sooner where training keeps the cores busy, and slow it down by more than they work.
    """
    return max(1, default_threads() // 4)


def parallel_map(function: Callable[[T], R], items: Sequence[T], threads: int | None = None) -> Iterator[R]:
    """Yield ``function(item)`` for every item, in order, computed on up to `threads` threads.

    At most two results per thread are computed ahead of the consumer, which bounds memory. The first failure, in the
    order of the items, is raised where its result would have been yielded; no further item is started then, and no
    thread outlives the iterator.

    Args:
        function: What to run; it should release the GIL for most of its time.
        items: What to run it on.
        threads: How many threads; by default one per core.
    """
    count = min(threads or default_threads(), len(items))
    crew = _Crew(function, items, count) if count > 1 else None
    if crew is None or not crew.threads:
        yield from map(function, items)
        return
    try:
        for index in range(len(items)):
            yield crew.result(index)
    finally:
        crew.dismiss()


class _Crew(Generic[T, R]):
    """Threads that take items in order, never more than two per thread ahead of what was asked for."""

    def __init__(self, function: Callable[[T], R], items: Sequence[T], count: int) -> None:
        self._function = function
        self._items = items
        self._ahead = 2 * count
        self._changed = threading.Condition()
        self._results: dict[int, tuple[R | None, BaseException | None]] = {}
        self._taken = self._given = 0
        self._dismissed = False
        self.threads = []
        for _ in range(count):
            thread = threading.Thread(target=self._work, daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads to be had: those there are do the work
                thread.start()
                self.threads.append(thread)

    def result(self, index: int) -> R:
        """Wait for one result; they must be asked for in order."""
        with self._changed:
            while index not in self._results:
                self._changed.wait()
            result, error = self._results.pop(index)
            self._given += 1
            self._changed.notify_all()
        if error is not None:
            try:
                raise error
            finally:
                del error  # else the frame and the traceback keep each other, and the item, alive
        return result  # type: ignore[return-value]

    def dismiss(self) -> None:
        """Start nothing more, and wait for what is under way."""
        with self._changed:
            self._dismissed = True
            self._changed.notify_all()
        for thread in self.threads:
            thread.join()

    def _work(self) -> None:
        while (index := self._next()) is not None:
            try:
                outcome: tuple[R | None, BaseException | None] = self._function(self._items[index]), None
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
                outcome = None, error
            with self._changed:
                self._results[index] = outcome
                self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            while not self._dismissed and self._taken - self._given >= self._ahead:
                self._changed.wait()
            if self._dismissed or self._taken == len(self._items):
                return None
            self._taken += 1
            return self._taken - 1
