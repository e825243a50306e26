"""Memory that is reused instead of allocated: scratch buffers of a thread, and pools of buffers for results.

Fresh memory is expensive. The kernel zeroes every page on first touch, which takes longer than filling it, so code that
runs per chunk or per batch reuses what it had before:

* `scratch` returns per-thread memory for intermediate results that nobody sees.
* `Pool` hands out memory for results that callers keep as long as they like.

All of it starts at a page boundary: reading a file into memory that straddles cache lines takes up to three times as
long.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
SCRATCH_LIMIT_BYTES = 8 << 20

_MIN_SCRATCH_BYTES = 64 << 10
# A buffer may exceed a request by this much whatever the pool's slack, so that small requests share buffers.
_ACCEPTED_EXCESS_BYTES = 1 << 20
# Buffers that no request took for this many calls of `take` are freed.
_MAX_AGE = 64
# Touching pages in pieces lets other threads run in between.
_TOUCH_BYTES = 4 << 20
# How long `take` waits before it checks again whether a warming thread is done.
_RECHECK_S = 0.05


def machine_bytes() -> int:
    """Return the physical memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def aligned(nbytes: int, *, skew: int = 0) -> Bytes:
    """Allocate `nbytes` of uninitialized memory that starts `skew` bytes after a page boundary."""
    memory = np.empty(nbytes + skew + PAGE_BYTES, np.uint8)
    start = -address_of(memory) % PAGE_BYTES + skew
    return memory[start : start + nbytes]


def fresh(nbytes: int) -> Bytes:
    """Allocate `nbytes` of uninitialized memory that is about to be filled, in huge pages if the system has them.

    The kernel prepares a page of 4 KiB at its first touch, which takes about as long as copying its content; one of
    2 MiB takes little longer. The memory returns to the system when the last array that views it is gone.
    """
    if nbytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(nbytes, np.uint8)
    try:
        # Huge pages start at multiples of their size, so reserve one more. What is never touched takes no memory.
        pages = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        # A process may have a limited number of mappings. NumPy has other ways to get memory, or raises MemoryError.
        return np.empty(nbytes, np.uint8)
    memory = np.frombuffer(pages, np.uint8)
    start = -address_of(memory) % HUGE_PAGE_BYTES
    # The last huge page would waste memory unless most of it is used.
    num_huge = round(nbytes / HUGE_PAGE_BYTES - 0.25)
    # A kernel without huge pages refuses the advice.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE, start, num_huge * HUGE_PAGE_BYTES)
    return memory[start : start + nbytes]


def address_of(array: NDArray[Any]) -> int:
    """Return the address of the first element. Unlike ``array.ctypes``, works while the interpreter shuts down."""
    address: int = array.__array_interface__["data"][0]
    return address


class _Scratch(threading.local):
    """Scratch buffers of one thread: one dict of named buffers per nesting depth."""

    def __init__(self) -> None:
        self.depth = 0
        self.levels: list[dict[str, Bytes]] = []


_scratch = _Scratch()


@contextlib.contextmanager
def scratch_scope() -> Iterator[None]:
    """Open a scope in which `scratch` returns reused memory.

    A signal handler or a finalizer may run a codec while this thread is inside another one. Scopes therefore nest:
    every depth has separate buffers, which the next scope at the same depth on this thread reuses.

    Example:
        >>> with scratch_scope():
        ...     work = scratch("work", 1000, np.dtype(np.uint32))
        >>> work.shape
        (1000,)
    """
    depth = _scratch.depth
    if len(_scratch.levels) == depth:
        _scratch.levels.append({})
    _scratch.depth = depth + 1
    try:
        yield
    finally:
        _scratch.depth = depth


def scratch(
    name: str, count: int, dtype: np.dtype[Any], *, skew: int = 0, limit_bytes: int = SCRATCH_LIMIT_BYTES
) -> NDArray[Any]:
    """Return uninitialized memory for `count` items, valid until this scope asks for the same name again.

    Outside a `scratch_scope`, and above `limit_bytes`, the memory is freshly allocated: a thread never retains more
    than `limit_bytes` per name and depth.

    Args:
        name: Identifies the buffer within the scope.
        count: Number of items.
        dtype: Type of the items.
        skew: Distance in bytes from a page boundary. A CPU that reads and writes at equal offsets within two pages
            mistakes one for the other and stalls; different skews avoid that.
        limit_bytes: Largest buffer to retain.
    """
    nbytes = count * dtype.itemsize
    depth = _scratch.depth
    if nbytes > limit_bytes or not depth:
        return aligned(nbytes, skew=skew).view(dtype)
    buffers = _scratch.levels[depth - 1]
    buffer = buffers.get(name)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = aligned(max(nbytes, _MIN_SCRATCH_BYTES), skew=skew)
        buffers[name] = buffer
    return buffer[:nbytes].view(dtype)


class _Lease:
    """The base object of an array that a pool handed out; it lives as long as any view of that array.

    NumPy keeps the object behind ``__array_interface__`` alive as the base of the array and of all views of it, tensors
    included. When the last of them is gone, this object is too, and its finalizer returns the memory to the pool.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_memory", "release")
    release: Callable[[], object]

    def __init__(self, memory: Bytes, shape: tuple[int, ...]) -> None:
        # Keeps the memory valid for arrays that are used, by mistake, after an explicit release.
        self._memory = memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": shape,
            "data": (address_of(memory), False),
        }


class _Buffer:
    """Memory of a pool, and when it was last in use, counted in calls of `Pool.take`."""

    __slots__ = ("memory", "used_at")

    def __init__(self, memory: Bytes, used_at: int) -> None:
        self.memory = memory
        self.used_at = used_at


class Pool:
    """Hands out memory and reuses it once every array and tensor that views it is gone.

    Memory in use never changes under its owner. Thread-safe, and safe to call from signal handlers and finalizers:
    there is no lock, every step is a single atomic operation of a dict or deque. After a fork the child has a usable
    copy. Pickling a pool creates an empty one.

    Args:
        max_free: Retain at most this many free buffers. The smallest are freed first.
        slack: Largest accepted ratio of a buffer to the request that it serves (1 MiB more is always accepted).
        allocate: Returns at least the given number of bytes; page-aligned memory by default.

    Example:
        >>> pool = Pool()
        >>> image = pool.take((4, 32, 32))
        >>> address = image.ctypes.data
        >>> del image
        >>> pool.take((4, 32, 32)).ctypes.data == address
        True
    """

    def __init__(self, max_free: int = 64, *, slack: float = 1.0, allocate: Callable[[int], Bytes] = aligned) -> None:
        self._max_free = max_free
        self._slack = slack
        self._allocate = allocate
        self._numbers = itertools.count()
        self._free: dict[int, _Buffer] = {}
        self._generation = 0
        self._num_taken = 0
        # Sizes that a warming thread is still allocating. After each of them it adds an item to `_finished`, so that a
        # waiting `take` looks again. Items that nobody waited for do no harm: they cause one more look.
        self._pending: deque[int] = deque()
        self._finished: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._warming_pid = os.getpid()

    @property
    def free_bytes(self) -> int:
        """Total size of the buffers that are retained and not in use."""
        return sum(buffer.memory.nbytes for buffer in list(self._free.values()))

    def take(self, shape: int | tuple[int, ...]) -> Bytes:
        """Return an uninitialized array: the smallest free buffer that fits, or else new memory.

        Blocks while `warm` prepares a buffer that fits: allocating another one would take as long.
        """
        if isinstance(shape, int):
            shape = (shape,)
        nbytes = math.prod(shape)
        self._num_taken += 1
        self._drop_unused()
        while True:
            # In this order: the thread adds a buffer before its size stops being pending, so no buffer is missed.
            is_warming = self._is_warming(nbytes)
            memory = self._pop_fitting(nbytes)
            if memory is not None or not is_warming:
                break
            with contextlib.suppress(queue.Empty):
                self._finished.get(timeout=_RECHECK_S)
        if memory is None:
            memory = self._allocate(nbytes)
        return self._lease(memory, shape)

    def release(self, array: Bytes) -> None:
        """Return the memory of an array from `take` now; nothing may use it or its views afterwards. Idempotent.

        Raises:
            TypeError: If the array did not come from `take`.
        """
        lease: object = array.base
        if not isinstance(lease, _Lease):
            raise TypeError("array does not come from Pool.take; pass that array itself, not a view of it")
        lease.release()

    def warm(self, nbytes: int, count: int) -> None:
        """Prepare `count` free buffers of `nbytes` on a background thread; returns immediately.

        Their pages are touched, so that the first use is as fast as any other. Smaller free buffers are freed, and
        buffers of an earlier call that are not finished are given up.
        """
        for number, buffer in list(self._free.items()):
            if buffer.memory.nbytes < nbytes:
                self._free.pop(number, None)
        pending = deque([nbytes] * (count - len(self._free)))
        self._pending = pending
        self._warming_pid = os.getpid()
        thread = threading.Thread(target=self._fill, args=(pending,), name="slipstream-warm", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No more threads: warming is optional, and `take` must not wait for it.
            pending.clear()

    def clear(self) -> None:
        """Free all buffers that are not in use. Those in use are freed, not retained, when their arrays are gone."""
        self._generation += 1
        self._pending = deque()
        self._free.clear()

    def __reduce__(self) -> tuple[Callable[..., Pool], tuple[Any, ...]]:
        return _make_pool, (self._max_free, self._slack, self._allocate)

    def _lease(self, memory: Bytes, shape: tuple[int, ...]) -> Bytes:
        """Return an array over `memory` that gives it back when the last view is gone."""
        lease = _Lease(memory, shape)
        finalizer = weakref.finalize(lease, _give_back, weakref.ref(self), self._generation, memory)
        finalizer.atexit = False
        lease.release = finalizer
        return np.asarray(lease)

    def _retain(self, memory: Bytes, generation: int) -> None:
        """Add free memory, unless the pool was cleared since that generation; drop the smallest beyond the limit."""
        number = next(self._numbers)
        self._free[number] = _Buffer(memory, self._num_taken)
        # Look only after adding it: `clear` on another thread may have missed it.
        if generation != self._generation:
            self._free.pop(number, None)
        while len(self._free) > self._max_free:
            sizes = {number: buffer.memory.nbytes for number, buffer in list(self._free.items())}
            self._free.pop(min(sizes, key=sizes.__getitem__), None)

    def _pop_fitting(self, nbytes: int) -> Bytes | None:
        """Remove and return the smallest free buffer that fits; of equal ones the oldest, so that all stay in use."""
        largest = self._largest_accepted(nbytes)
        fitting = []
        for number, buffer in list(self._free.items()):
            if nbytes <= buffer.memory.nbytes <= largest:
                fitting.append((buffer.memory.nbytes, number))
        for _, number in sorted(fitting):
            taken = self._free.pop(number, None)
            # Another thread may have taken it in the meantime.
            if taken is not None:
                return taken.memory
        return None

    def _drop_unused(self) -> None:
        """Free buffers whose size nobody has asked for in a while."""
        for number, buffer in list(self._free.items()):
            if self._num_taken - buffer.used_at > _MAX_AGE:
                self._free.pop(number, None)

    def _largest_accepted(self, nbytes: int) -> int:
        """Return the size of the largest buffer that may serve a request: a larger one would waste too much."""
        return int(self._slack * nbytes) + _ACCEPTED_EXCESS_BYTES

    def _is_warming(self, nbytes: int) -> bool:
        """Return whether a running thread is about to add a buffer that fits."""
        # A forked child has no warming thread, and daemon threads stop when the interpreter shuts down.
        if os.getpid() != self._warming_pid or sys.is_finalizing():
            return False
        largest = self._largest_accepted(nbytes)
        return any(nbytes <= size <= largest for size in list(self._pending))

    def _fill(self, pending: deque[int]) -> None:
        """Allocate and touch the pending buffers, one after another; runs on the warming thread."""
        generation = self._generation
        while pending:
            try:
                memory = self._allocate(pending[0])
            except (MemoryError, RuntimeError):
                # `take` will raise the same error to the caller who needs the memory.
                pending.clear()
                self._finished.put(None)
                return
            for start in range(0, memory.nbytes, _TOUCH_BYTES):
                memory[start : start + _TOUCH_BYTES] = 0
            # A later `warm` or `clear` has replaced this list, and nobody waits for the rest of it.
            if pending is not self._pending:
                return
            # Retain it before it stops being pending: a waiting `take` must see one or the other.
            self._retain(memory, generation)
            pending.popleft()
            self._finished.put(None)


def _make_pool(max_free: int, slack: float, allocate: Callable[[int], Bytes]) -> Pool:
    return Pool(max_free, slack=slack, allocate=allocate)


def _give_back(pool_reference: weakref.ref[Pool], generation: int, memory: Bytes) -> None:
    """Return memory to its pool, unless the pool is gone or was cleared in the meantime."""
    pool = pool_reference()
    if pool is not None:
        pool._retain(memory, generation)
