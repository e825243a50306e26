"""Threads that compute with torch, each without further threads of torch's own.

The number of threads of an operation decides how its sums are divided, and so the last bits of its result. A part of
the work that always runs on one thread has the same result on every machine with the same instructions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from slipstream.threads import parallel_each, usable_cores

T = TypeVar("T")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Make torch use one thread for the operations of the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_one_thread_each(function: Callable[[T], None], items: Sequence[T], threads: int) -> None:
    """Call a function for every item on up to `threads` threads at once, in each of which torch uses no other thread.

    Args:
        function: Called once per item. Gradients are recorded in it unless it says otherwise.
        items: The arguments.
        threads: Number of threads.

    Raises:
        Exception: The first exception of `function`, in the order of the items.
    """

    def call(item: T) -> None:
        torch.set_num_threads(1)  # a setting of each thread
        function(item)

    # The calling thread works too, so its setting has to be restored.
    with one_thread():
        parallel_each(call, items, threads)


def share_of_cores() -> int:
    """Return how many cores each process on this machine may use."""
    return max(1, usable_cores() // local_world_size())


def local_world_size() -> int:
    """Return how many processes of this job torchrun has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def numerics() -> dict[str, str]:
    """Return what the last bits of results depend on besides settings: how torch was built, and for which CPU it runs.

    Example:
        >>> sorted(numerics())
        ['cpu', 'torch']
    """
    return {"torch": str(torch.__version__), "cpu": torch.backends.cpu.get_cpu_capability()}
