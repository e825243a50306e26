"""Copies of training state, taken while training continues.

A save must return quickly, and training must be free to continue. But the saved state must be the state at the moment
of the call. `take_snapshot` therefore

* copies everything that no `Guard` covers before it returns,
* captures at the call which memory each guarded tensor has, and copies that memory on another thread while training
  does work that does not change it (the next rollout). The guard's barrier, a hook in ``optimizer.step`` and
  ``load_state_dict``, waits for the copy, but not for the write,
* copies into memory that is reused: a fresh allocation takes longer than the copy.

On CUDA, copies run on a separate stream after the work that is queued on the current one. The current stream waits for
the copy of unguarded tensors during the call, and for that of guarded tensors in the barrier. Other streams that change
the state must be synchronized with the current one by the caller.

**What is guaranteed.** If guarded tensors change only behind the barrier, a snapshot is exactly the state of the call.
``x.data = y`` after the call does not affect it either, because the snapshot keeps the old memory.

**What is best effort.** A change that bypasses the barrier is a bug in the caller, and detected if torch counts it.
Torch increments the version counter of a tensor at the end of an in-place operation. The snapshot compares the counters
of each storage right after it has copied that storage; if one differs, it fails with `TornStateError`. These changes
are *not* detected, and can leave a tensor half old and half new:

* an in-place operation, on this or another thread, that is still running at that moment: its result is not counted yet,
* changes that torch does not count: through ``x.data``, through NumPy arrays that share the memory, by other processes,
  in inference mode, and by the replay of a CUDA graph, which calls no hooks either.

**What crashes.** Torch frees the memory of a storage, though others read it, if the storage is resized or moved to
shared memory: ``x.untyped_storage().resize_(0)``, ``module.share_memory()``, and the first time that a tensor is sent
to another process. While guarded tensors are copied, do this only under ``saver.mutating()``.

A change after its storage was copied does no harm, though it breaks the promise. Tensors that changed without the
barrier, torn or not, are not guarded any longer: later snapshots copy them during the call. An ``x.data = y`` that is
followed by in-place changes counts as a change, because torch keeps the counter of ``x``: the snapshot may fail, but is
never wrong.
"""

from __future__ import annotations

import _thread
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checkpoint.entries import Flat
from slipstream.checkpoint.guard import Guard
from slipstream.checkpoint.objects import PickledObjects
from slipstream.checkpoint.parts import Part, StreamCopy, split_tensors
from slipstream.errors import TornStateError
from slipstream.memory import Pool, aligned
from slipstream.schema.flatten import Tree, flatten
from slipstream.schema.nodes import TAG, name_of
from slipstream.schema.unflatten import unflatten
from slipstream.tensors import TORCH, Regions, with_flags
from slipstream.text import list_first
from slipstream.threads import Notifier

logger = logging.getLogger(__name__)


def snapshot_pool(max_free: int) -> Pool:
    """Return a pool of host memory for snapshots, which reuses buffers up to four times as large as needed.

    Args:
        max_free: How many free buffers to retain. A snapshot takes up to two, and two more per CUDA device.
    """
    return Pool(max_free, slack=4, allocate=allocate_host)


def allocate_host(nbytes: int) -> NDArray[np.uint8]:
    """Allocate host memory; pinned if there is a CUDA device, so that copies to it are asynchronous."""
    if torch.cuda.is_available():
        # Name the device: users may have set another default.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    return aligned(nbytes)


class Snapshot:
    """A private copy of a nested state.

    Its memory comes from a pool and goes back there when `release` was called as often as `retain`, and once more. Do
    not use what `flat` and `state` returned after that.
    """

    def __init__(self, tree: Tree, objects: PickledObjects, pool: Pool) -> None:
        self._tree = tree
        self._objects = objects
        self._pool = pool
        self._parts: list[Part] = []
        self._deferred: Part | None = None
        self._stream_copies: list[StreamCopy] = []
        self._error: BaseException | None = None
        self._may_change = False
        self._is_finished = False
        self._changed = Notifier()
        # One item per user of the memory. Adding and removing an item is atomic, unlike counting.
        self._users: deque[None] = deque([None])
        self._pid = os.getpid()

    @property
    def nbytes(self) -> int:
        """Size of the copied memory; blocks until the copy is complete."""
        self.wait()
        return sum(part.copied().nbytes for part in self._parts)

    def wait(self) -> None:
        """Block until the copy is complete.

        Raises:
            TornStateError: If guarded tensors changed before they were copied.
            RuntimeError: In a forked child, if its parent was still copying.
        """
        if not self._is_finished and os.getpid() != self._pid:
            raise RuntimeError("this snapshot belongs to the parent process, which was copying it during the fork")
        self._changed.wait_until(self._has_finished)
        if self._error is not None:
            raise self._error

    def flat(self) -> Flat:
        """Wait for the copy and return its structure and memory, ready to be written in the native format."""
        self.wait()
        num_tensors = sum(len(part.positions) for part in self._parts)
        regions = Regions.join([(part.positions, part.copied()) for part in self._parts], num_tensors)
        return Flat(self._tree, regions)

    def state(self) -> Any:
        """Wait for the copy and return the nested state. Its tensors use the memory of the snapshot."""
        tensors = iter(self.flat().regions.tensors())
        leaves = []
        for (_, node), leaf in zip(self._tree.nodes, self._tree.leaves, strict=True):
            if node[TAG] == "tensor":
                leaves.append(with_flags(next(tensors), node))
            else:
                leaves.append(leaf)
        return unflatten(self._tree.structure, leaves, self._objects.restore(), TORCH)

    def retain(self) -> None:
        """Keep the memory until `release` is called once more."""
        self._users.append(None)

    def release(self) -> None:
        """Stop using the memory. Never blocks: if a copy is still running, the memory is returned after it."""
        if self._users:
            self._users.pop()
        if not self._users and self._is_finished:
            self._return_memory()

    @property
    def is_complete(self) -> bool:
        """Whether nothing has to wait for this snapshot any more; see `slipstream.checkpoint.guard.Pending`."""
        return self._is_finished or os.getpid() != self._pid

    def wait_copied(self) -> None:
        """Block until the guarded tensors may change."""
        # A forked child has separate memory, and no thread that copies.
        if self.is_complete:
            return
        for copy in self._stream_copies:
            copy.pass_barrier()
        self._changed.wait_until(self._has_copied)

    def copy_now(self, part: Part) -> None:
        """Copy tensors before the call returns."""
        if part.tensors:
            self._parts.append(part)
            part.copy(self._pool)

    def copy_later(self, part: Part) -> None:
        """Copy tensors in the background, once `start` is called."""
        if part.tensors:
            self._parts.append(part)
            self._deferred = part

    def copy_on_stream(self, device: torch.device, part: Part) -> None:
        """Copy tensors of a CUDA device. The current stream waits for the copy: now, or in the barrier."""
        if not part.tensors:
            return
        self._parts.append(part)
        copy = StreamCopy.start(device, part, self._pool)
        self._stream_copies.append(copy)
        # Nothing else keeps unguarded tensors from changing before they are copied.
        if part.promises is None:
            copy.block_current_stream()

    def start(self, guard: Guard) -> None:
        """Copy the guarded tensors: on another thread, or here if the system has no more threads."""
        if self._deferred is None and not self._stream_copies:
            self._finish()
            return
        try:
            # In this order: a thread that steps an optimizer must not miss a copy that has started.
            guard.watch(self)
            # Not `threading.Thread`: its `start` waits until the new thread has released the GIL again.
            _thread.start_new_thread(self._copy_deferred, (guard,))
        except (RuntimeError, MemoryError):
            self._copy_deferred(guard)
            if self._error is not None:
                raise self._error from None
        except BaseException:
            # Ctrl-C, perhaps before the thread was started: a barrier would wait forever.
            guard.forget(self)
            raise

    def _copy_deferred(self, guard: Guard) -> None:
        """Copy the guarded tensors, and wait for copies on CUDA streams."""
        try:
            if self._deferred is not None:
                self._deferred.copy(self._pool)
                self._check_torn([self._deferred], guard)
            # Barriers open here. Streams wait for what is still being copied.
            self._may_change = True
            self._changed.notify_all()
            for copy in self._stream_copies:
                copy.event.synchronize()
                copy.compare()
            self._check_torn([copy.part for copy in self._stream_copies], guard)
        except BaseException as error:  # noqa: BLE001 - raised in `wait`
            self._error = error
        finally:
            self._finish()
            guard.forget(self)

    def _finish(self) -> None:
        """Mark the snapshot as complete, whether it failed or not."""
        for part in self._parts:
            part.tensors = []
            part.promises = None
        self._may_change = True
        self._is_finished = True
        # Look for users only after this mark: `release` looks at the mark only after it removed a user. So at least one
        # of the two returns the memory.
        if not self._users:
            self._return_memory()
        self._changed.notify_all()

    def _check_torn(self, parts: Iterable[Part], guard: Guard) -> None:
        """Stop guarding tensors that changed without a barrier, and raise if that may have torn the copy."""
        torn: list[int] = []
        changed: list[int] = []
        for part in parts:
            if part.promises is None:
                continue
            numbers = part.promises.broken.copy()
            torn += [part.positions[number] for number in sorted(numbers)]
            # Before barriers open, nothing may change, not even what has been copied.
            if not self._may_change:
                numbers.update(part.promises.changed())
            changed += [part.positions[number] for number in sorted(numbers)]
            guard.exclude(part.promises.guarded(numbers))
        if changed:
            logger.warning(
                "%s changed outside of a guarded optimizer's step, load_state_dict and saver.mutating(); later saves "
                "copy it during the call, which takes longer",
                self._names(changed),
            )
        if torn:
            raise TornStateError(
                f"{self._names(torn)} changed while being copied, so the state of the call is lost and nothing was "
                "written; change guarded tensors only in a guarded optimizer's step, in load_state_dict, or under "
                "saver.mutating()"
            )

    def _names(self, positions: Sequence[int]) -> str:
        """Return the names of tensors of the state, at most three."""
        keys = [key for key, node in self._tree.nodes if node[TAG] == "tensor"]
        return list_first([name_of(keys[position]) for position in positions])

    def _return_memory(self) -> None:
        """Return the memory to the pool. Idempotent, because two threads may get here."""
        for part in self._parts:
            buffer = part.buffer
            part.buffer = None
            part.regions = None
            if buffer is not None:
                self._pool.release(buffer)

    def _has_finished(self) -> bool:
        return self._is_finished

    def _has_copied(self) -> bool:
        return self._may_change


def take_snapshot(
    state: Any, guard: Guard, pool: Pool, *, opaque: bool, check: Callable[[Tree], None] | None = None
) -> Snapshot:
    """Copy a nested state: what is not guarded now, the rest in the background.

    Guarded tensors are copied now, too, if they are few and small: starting a thread would take as long.

    Args:
        state: Nested dicts, lists and tuples of tensors, arrays and plain values.
        guard: Which tensors are guarded. Its barriers wait for the copy.
        pool: Where the memory comes from.
        opaque: Whether other objects are allowed. They are copied as ``torch.save`` would store them.
        check: Called with the flattened state before anything is copied. It raises if the state cannot be stored.

    Returns:
        The snapshot. Call `Snapshot.release` when it is not needed any more.

    Raises:
        UnsupportedStateError: If something in the state cannot be stored.
    """
    tree = flatten(state, opaque=opaque)
    if check is not None:
        check(tree)
    tensors = [leaf for leaf in tree.leaves if isinstance(leaf, torch.Tensor)]
    snapshot = Snapshot(_without_tensors(tree), PickledObjects.of(tree), pool)
    parts = split_tensors(tensors, guard.covered())
    try:
        # Copies on streams first: they continue while this thread copies the rest.
        for device, on_device in parts.items():
            if device.type == "cuda":
                snapshot.copy_on_stream(device, on_device.now)
                snapshot.copy_on_stream(device, on_device.later)
        for device, on_device in parts.items():
            if device.type != "cuda":
                snapshot.copy_now(on_device.now)
                snapshot.copy_later(on_device.later)
        snapshot.start(guard)
    except BaseException:
        # The pool may hand out the buffers again as soon as nobody refers to this snapshot.
        for device in parts:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        raise
    return snapshot


def _without_tensors(tree: Tree) -> Tree:
    """Return a tree with copies of the arrays, and None in place of the tensors."""
    leaves: list[Any] = []
    for leaf in tree.leaves:
        if isinstance(leaf, np.ndarray):
            leaves.append(np.array(leaf))
        else:
            leaves.append(None)
    return Tree(tree.structure, leaves, tree.nodes, [])
