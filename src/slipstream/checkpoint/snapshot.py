"""Copies of training state, taken off the hot path.

`save_async` must return at once, and training must be free to go on, yet what is saved must be the state at the moment
of the call. Three things make that so:

* Tensors that a guard covers are copied by a separate thread while training continues with work that does not change
  them (the next rollout). A barrier, in the step pre-hook of each guarded optimizer, waits for the copy, not the write.
* Everything else is copied before the call returns.
* Copies go into memory that is kept and reused: a fresh allocation costs more than the copy.

A guard is a promise: this state changes only in guarded places. Torch counts in-place changes of every tensor, so a
broken promise is found: the snapshot is given up with `TornStateError` instead of being written.
"""

from __future__ import annotations

import _thread
import copy
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checkpoint.native import Flat
from slipstream.errors import TornStateError, UnsupportedStateError
from slipstream.memory import Pool, aligned
from slipstream.schema.flatten import Tree, flatten
from slipstream.schema.nodes import TAG, name_of
from slipstream.schema.unflatten import unflatten
from slipstream.tensors import TORCH, Regions, with_flags

_ALIGNMENT = 64


def snapshot_pool(max_free: int) -> Pool:
    """Return a pool of host memory for snapshots, which reuses buffers up to four times as large as needed."""
    return Pool(max_free, slack=4, allocate=allocate_host)


def allocate_host(nbytes: int) -> NDArray[np.uint8]:
    """Allocate host memory; pinned if there is a CUDA device, so that copies from it are asynchronous."""
    if torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return aligned(nbytes)


@dataclass(eq=False)
class _Part:
    """Some tensors of a snapshot, by their position among all tensors, and the copy of their memory."""

    positions: list[int]
    tensors: list[torch.Tensor]
    buffer: NDArray[np.uint8] | None = None
    copy: Regions | None = None

    def start(self, pool: Pool, stream: Any = None) -> None:
        """Find the memory behind the tensors and start to copy it; without a stream, the copy is then complete."""
        source = Regions.of(self.tensors)
        self.buffer = pool.take(source.buffer_bytes)
        self.copy = source.copy_into(self.buffer, stream)

    def copied(self) -> Regions:
        """Return the copy."""
        if self.copy is None:
            raise RuntimeError("the memory of this snapshot was given back")
        return self.copy


@dataclass(eq=False)
class Snapshot:
    """A private copy of a nested state; complete once `state` returns."""

    _tree: Tree
    _pool: Pool
    _parts: list[_Part] = field(default_factory=list)
    _later: _Part | None = None
    _versions: list[int] = field(default_factory=list)
    _events: list[tuple[torch.device, Any]] = field(default_factory=list)
    _error: BaseException | None = None
    _copied: threading.Event = field(default_factory=threading.Event)
    _done: threading.Event = field(default_factory=threading.Event)
    _pid: int = field(default_factory=os.getpid)

    def copy_later(self) -> None:
        """Copy the guarded tensors; runs on a separate thread."""
        try:
            if self._later is not None:
                self._later.start(self._pool)
                self._check_unchanged(self._later)
            self._copied.set()
            for _, event in self._events:
                event.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised in `wait`
            self._error = error
        finally:
            for part in self._parts:
                part.tensors = []
            self._copied.set()
            self._done.set()

    def _check_unchanged(self, part: _Part) -> None:
        """Raise if a tensor changed since the snapshot was taken: the copy may be half old, half new."""
        changed = []
        for position, tensor, version in zip(part.positions, part.tensors, self._versions, strict=True):
            if tensor._version != version:
                changed.append(position)
        if not changed:
            return
        keys = [key for key, node in self._tree.nodes if node[TAG] == "tensor"]
        names = ", ".join(name_of(keys[position]) for position in changed[:3])
        raise TornStateError(
            f"{names} changed while being copied: guarded state may change only in a guarded optimizer's step or "
            "under saver.mutating(); nothing was written"
        )

    @property
    def copied(self) -> bool:
        """Whether training may change its state."""
        return self._done.is_set() or os.getpid() != self._pid

    def wait_copied(self) -> None:
        """Block until the state has been copied and may change."""
        if os.getpid() != self._pid:  # a forked child has separate memory, and no copying thread
            return
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        self._copied.wait()

    def wait(self) -> int:
        """Block until the copy is complete; returns its size, each piece of memory counted once.

        Raises:
            TornStateError: If guarded state changed while it was being copied.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        return sum(part.copied().nbytes for part in self._parts)

    def flat(self) -> Flat:
        """Wait for the copy and return it, ready to be written in the native format."""
        self.wait()
        num_tensors = sum(len(part.positions) for part in self._parts)
        regions = Regions.join([(part.positions, part.copied()) for part in self._parts], num_tensors)
        return Flat(self._tree, regions)

    def state(self) -> Any:
        """Wait for the copy and return the state, whose tensors see the snapshot's memory."""
        tensors = iter(self.flat().regions.tensors())
        leaves = []
        for (_, node), leaf in zip(self._tree.nodes, self._tree.leaves, strict=True):
            if node[TAG] == "tensor":
                leaves.append(with_flags(next(tensors), node))
            else:
                leaves.append(leaf)
        return unflatten(self._tree.structure, leaves, self._tree.objects, TORCH)

    def release(self) -> None:
        """Give the memory back to the pool; nothing may refer to it after that. May be repeated."""
        if not self._done.is_set():  # a thread is still writing to it: it goes when that thread goes
            return
        for part in self._parts:
            buffer = part.buffer
            part.buffer = None
            part.copy = None
            if buffer is not None:
                self._pool.release(buffer)


class Guard:
    """Knows which state is guarded, and blocks changes to it while it is being copied."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._removers: list[Any] = []
        self._active: list[Snapshot] = []
        self.waited_s = 0.0

    def add(self, *targets: torch.optim.Optimizer | torch.nn.Module) -> None:
        """Register optimizers and modules whose state may be copied later, at the price of the barrier."""
        for target in targets:
            if isinstance(target, torch.optim.Optimizer):
                self._optimizers.add(target)
                self._removers += [
                    target.register_step_pre_hook(self._hook),
                    target.register_load_state_dict_pre_hook(self._hook),
                ]
            elif isinstance(target, torch.nn.Module):
                self._modules.add(target)
                self._removers.append(target.register_load_state_dict_pre_hook(self._hook))  # type: ignore[no-untyped-call]
                # Buffers of modules such as BatchNorm change in a forward pass, though only while training.
                self._removers += [
                    module.register_forward_pre_hook(self._forward_hook)
                    for module in target.modules()
                    if next(module.buffers(recurse=False), None) is not None
                ]
            else:
                raise TypeError(f"guard takes optimizers and modules, not a {type(target).__qualname__}")

    def remove(self) -> None:
        """Take all hooks back."""
        for remover in self._removers:
            remover.remove()
        self._removers.clear()

    def storages(self) -> set[int]:
        """Return the addresses of all guarded storages, as they are now: optimizers make their state as they go."""
        return {tensor.untyped_storage().data_ptr() for tensor in self._tensors()} - {0}

    def expected_bytes(self) -> int:
        """Return how large a snapshot of all that is guarded will be, optimizer state yet to be made included."""
        sizes = {tensor.untyped_storage().data_ptr(): tensor.nbytes + _ALIGNMENT for tensor in self._tensors()}
        unmade = [
            2 * (int(parameter.nbytes) + _ALIGNMENT)  # the moments of Adam and its kind
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if "betas" in group and parameter not in optimizer.state
        ]
        return sum(sizes.values()) + sum(unmade)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        for module in self._modules:
            yield from module.parameters()
            yield from module.buffers()

    def watch(self, snapshot: Snapshot) -> None:
        """Make barriers wait for this snapshot too."""
        self._active = [*(active for active in self._active if not active.copied), snapshot]

    def wait(self) -> None:
        """Block until every pending snapshot has been copied; takes a few microseconds if there is none."""
        active, self._active = self._active, []
        if not active:
            return
        start = time.perf_counter()
        for snapshot in active:
            snapshot.wait_copied()
        self.waited_s += time.perf_counter() - start

    def _hook(self, *_: Any, **__: Any) -> None:
        self.wait()

    def _forward_hook(self, module: torch.nn.Module, *_: Any) -> None:
        if module.training:
            self.wait()


def take_snapshot(state: Any, guard: Guard, pool: Pool, *, opaque: bool) -> Snapshot:
    """Copy a nested state: what is not guarded now, the rest in the background.

    Args:
        state: Nested dicts, lists and tuples of tensors, arrays and plain values.
        guard: Says what is guarded; its barriers will wait for the rest.
        pool: Where the memory comes from.
        opaque: Whether other objects are allowed; they are deep-copied now.

    Raises:
        UnsupportedStateError: If a tensor cannot be stored.
    """
    tree = flatten(state, opaque=opaque)
    tensors = [leaf for leaf in tree.leaves if isinstance(leaf, torch.Tensor)]
    snapshot = Snapshot(_copy_rest(tree), pool)
    now: list[int] = []
    later: list[int] = []
    elsewhere: dict[torch.device, list[int]] = {}
    guarded = guard.storages()
    for index, tensor in enumerate(tensors):
        if not tensor.is_cpu:
            elsewhere.setdefault(tensor.device, []).append(index)
        elif guarded and tensor.untyped_storage().data_ptr() in guarded:
            later.append(index)
            snapshot._versions.append(tensor._version)
        else:
            now.append(index)
    for device, indices in elsewhere.items():
        _start_copying(snapshot, _Part(indices, [tensors[i] for i in indices]), device)
    if now:
        part = _Part(now, [tensors[i] for i in now])
        snapshot._parts.append(part)
        part.start(pool)
    if later:
        snapshot._later = _Part(later, [tensors[i] for i in later])
        snapshot._parts.append(snapshot._later)
    if later or snapshot._events:
        guard.watch(snapshot)
        # Not threading.Thread: its start() waits until the other thread lets go of Python's lock again.
        _thread.start_new_thread(snapshot.copy_later, ())
    else:
        snapshot.copy_later()
    return snapshot


def _copy_rest(tree: Tree) -> Tree:
    """Copy everything but the tensors, in whose place is None."""
    leaves: list[Any] = []
    for leaf in tree.leaves:
        if isinstance(leaf, np.ndarray):
            leaves.append(np.array(leaf))
        else:
            leaves.append(None)
    try:
        objects = [copy.deepcopy(value) for value in tree.objects]
    except RecursionError:
        raise UnsupportedStateError("the state holds an object that is nested too deeply to be copied") from None
    return Tree(tree.structure, leaves, tree.nodes, objects)


def _start_copying(snapshot: Snapshot, part: _Part, device: torch.device) -> None:
    """Copy tensors from an accelerator: on CUDA on a separate stream, after the work that is already queued."""
    snapshot._parts.append(part)
    stream: Any = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
    part.start(snapshot._pool, stream)
    if stream is not None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        snapshot._events.append((device, event))
