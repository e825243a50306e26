"""Copies of training state, taken off the hot path.

`save_async` must return at once, and training must be free to go on, yet what is saved must be the state at the moment
of the call. Three things make that so:

* Tensors that a guard covers are copied by a thread of their own while training goes on with whatever does not change
  them (the next rollout). A barrier, in the step pre-hook of each guarded optimizer, waits for the copy, not the write.
* Everything else is copied before the call returns.
* Copies go into memory that is kept and reused: a fresh allocation costs more than the copy.

A guard is a promise: this state changes only in guarded places. Torch counts in-place changes of every tensor, so a
broken promise is found: the snapshot is given up with `TornStateError` instead of being written.
"""

from __future__ import annotations

import _thread
import contextlib
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

from slipstream.errors import TornStateError
from slipstream.schema.flatten import Leaf, Path, Slot, encode, map_leaves
from slipstream.tensors import Region, View, check_storable, copy_memory, plan, settled, storage_of, view_storage

_ALIGNMENT = 64
_PIECE_BYTES = 4 << 20


class BufferPool:
    """Host memory for snapshots, kept for the next one; pinned if there is a CUDA device."""

    def __init__(self, max_free: int) -> None:
        self._max_free = max_free
        self._free: list[NDArray[np.uint8]] = []
        self._coming: list[int] = []
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.RLock())

    def warm(self, nbytes: int, count: int) -> None:
        """Have `count` free buffers for `nbytes`, whose pages the machine has really given; returns at once.

        The first write to fresh memory costs several times what a copy does. Here a thread of its own pays for it.
        """
        with self._changed:
            self._free = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
            self._coming = [nbytes] * (count - len(self._free))  # in place of smaller ones still to come
        threading.Thread(target=self._fetch, name="slipstream-warm", daemon=True).start()

    def _fetch(self) -> None:
        while True:
            with self._changed:
                if not self._coming:
                    return
                nbytes = self._coming[0]
            buffer: NDArray[np.uint8] | None = None
            with contextlib.suppress(MemoryError, RuntimeError):  # whoever needs it will hear of it
                buffer = _new_buffer(nbytes)
                for start in range(0, nbytes, _PIECE_BYTES):
                    buffer[start : start + _PIECE_BYTES] = 0
            with self._changed:
                if nbytes in self._coming:
                    self._coming.remove(nbytes)
                    self._free += [buffer] if buffer is not None else []
                self._changed.notify_all()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return at least `nbytes` of memory, uninitialised: the smallest free one that fits, or a new one.

        Waits for a fitting one that is being made ready: making another would take as long.
        """
        most = 4 * nbytes + (1 << 20)
        with self._changed:
            while True:
                fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= most]
                if fitting:
                    best = min(fitting, key=lambda buffer: buffer.nbytes)
                    self._free = [buffer for buffer in self._free if buffer is not best]
                    return best
                coming = self._coming if os.getpid() == self._pid else []  # a fork leaves the thread behind
                if not any(nbytes <= size <= most for size in coming):
                    break
                self._changed.wait()
        return _new_buffer(nbytes)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Keep a buffer for the next snapshot; the smallest go when there are more than needed."""
        with self._changed:
            self._free = sorted([*self._free, buffer], key=lambda kept: kept.nbytes)[-self._max_free :]


def _new_buffer(nbytes: int) -> NDArray[np.uint8]:
    if torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return np.empty(nbytes, np.uint8)


@dataclass(eq=False)
class _Part:
    """Some tensors of a snapshot, and the memory that they were, or will be, copied to."""

    indices: list[int]
    tensors: list[torch.Tensor]
    buffer: NDArray[np.uint8] | None = None
    regions: list[Region] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    views: list[View] = field(default_factory=list)

    def plan(self, pool: BufferPool) -> None:
        """Find the memory behind the tensors, and take as much."""
        self.regions, self.views = plan([settled(tensor) for tensor in self.tensors])
        self.sizes = [region.nbytes for region in self.regions]
        total = 0
        for size in self.sizes:
            self.offsets.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.buffer = pool.take(total)

    def copy(self) -> None:
        """Copy from the memory of this machine."""
        base = self._taken().ctypes.data
        for region, offset in zip(self.regions, self.offsets, strict=True):
            for start in range(0, region.nbytes, _PIECE_BYTES):
                size = min(_PIECE_BYTES, region.nbytes - start)
                copy_memory(base + offset + start, region.address + start, size)

    def copy_from_device(self, stream: Any) -> None:
        """Copy from an accelerator; on CUDA asynchronously, so that only work on the GPU has to wait."""
        for number, region in enumerate(self.regions):
            first = region.tensors[0]
            content = torch.empty(0, dtype=torch.uint8, device=first.device)
            start = region.address - first.untyped_storage().data_ptr()
            content.set_(first.untyped_storage(), start, (region.nbytes,), (1,))
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                torch.from_numpy(self.memory(number)).copy_(content, non_blocking=stream is not None)
                if stream is not None:
                    content.record_stream(stream)

    def forget_sources(self) -> None:
        """Let go of the tensors."""
        self.tensors, self.regions = [], []

    def memory(self, region: int) -> NDArray[np.uint8]:
        """Return the copy of a region."""
        if region < 0:
            return np.empty(0, np.uint8)
        return self._taken()[self.offsets[region] : self.offsets[region] + self.sizes[region]]

    def revived(self) -> dict[int, torch.Tensor]:
        """Return tensors that see the copy, tied as their originals are, by their number in the snapshot."""
        by_region: dict[int, list[int]] = {}
        for position, view in enumerate(self.views):
            by_region.setdefault(view.region, []).append(position)
        found: dict[int, torch.Tensor] = {}
        for region, positions in by_region.items():
            storage = storage_of(self.memory(region))
            for position in positions:
                found[self.indices[position]] = view_storage(storage, self.views[position])
        return found

    def _taken(self) -> NDArray[np.uint8]:
        if self.buffer is None:
            raise RuntimeError("the memory of this snapshot was given back")
        return self.buffer


@dataclass(eq=False)
class Snapshot:
    """A private copy of a nested state; complete once `state` returns."""

    _structure: Any
    _pool: BufferPool
    _paths: list[Path]
    _flags: list[tuple[bool, bool]]
    _parts: list[_Part] = field(default_factory=list)
    _later: _Part | None = None
    _versions: list[int] = field(default_factory=list)
    _events: list[tuple[torch.device, Any]] = field(default_factory=list)
    _error: BaseException | None = None
    _copied: threading.Event = field(default_factory=threading.Event)
    _done: threading.Event = field(default_factory=threading.Event)
    _pid: int = field(default_factory=os.getpid)

    def copy_later(self) -> None:
        """Copy what was left for later; runs on a thread of its own."""
        try:
            if self._later is not None:
                self._later.plan(self._pool)
                self._later.copy()
                changed = [
                    "/".join(self._paths[index])
                    for index, tensor, version in zip(
                        self._later.indices, self._later.tensors, self._versions, strict=True
                    )
                    if tensor._version != version
                ]
                if changed:
                    self._error = TornStateError(
                        f"{', '.join(changed[:3])} changed while being copied: guarded state may change only in a "
                        "guarded optimizer's step or under saver.mutating(); nothing was written"
                    )
            self._copied.set()
            for _, event in self._events:
                event.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._error = error
        finally:
            for part in self._parts:
                part.forget_sources()
            self._copied.set()
            self._done.set()

    @property
    def copied(self) -> bool:
        """Whether training may change its state."""
        return self._done.is_set() or os.getpid() != self._pid

    def wait_copied(self) -> None:
        """Block until the state has been copied and may change."""
        if os.getpid() != self._pid:  # a forked child has memory of its own, and no copying thread
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
        return sum(sum(part.sizes) for part in self._parts)

    def state(self) -> Any:
        """Wait for the copy and return the state, whose tensors see the snapshot's memory."""
        self.wait()
        tensors: dict[int, torch.Tensor] = {}
        for part in self._parts:
            tensors.update(part.revived())

        def revive(leaf: Leaf, _: Path) -> Leaf:
            if not isinstance(leaf, Slot):
                return leaf
            is_parameter, requires_grad = self._flags[leaf.index]
            tensor = tensors[leaf.index]
            if is_parameter:
                return torch.nn.Parameter(tensor, requires_grad=requires_grad)
            return tensor.requires_grad_() if requires_grad else tensor

        return map_leaves(self._structure, revive, lambda value, _: value)

    def release(self) -> None:
        """Give the memory back to the pool; nothing may refer to it after that. May be repeated."""
        if not self._done.is_set():  # a thread is still writing to it: it goes when that thread goes
            return
        for part in self._parts:
            buffer, part.buffer = part.buffer, None
            if buffer is not None:
                self._pool.give_back(buffer)


class Guard:
    """Knows which state is guarded, and makes whoever changes it wait for copies under way."""

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
        """Block until every snapshot under way has been copied; a few microseconds if none is."""
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


def take_snapshot(state: Any, guard: Guard, pool: BufferPool, *, opaque: bool) -> Snapshot:
    """Copy a nested state: what is not guarded now, the rest in the background.

    Args:
        state: Nested dicts, lists and tuples of tensors, arrays and plain values.
        guard: Says what is guarded; its barriers will wait for the rest.
        pool: Where the memory comes from.
        opaque: Whether other objects are allowed; they are deep-copied now.

    Raises:
        UnsupportedStateError: If a tensor cannot be stored.
    """
    tensors: list[torch.Tensor] = []
    paths: list[Path] = []
    flags: list[tuple[bool, bool]] = []

    def collect(leaf: Leaf, path: Path) -> Any:
        if isinstance(leaf, np.ndarray):
            return np.array(leaf)
        check_storable(leaf, path)
        flags.append((isinstance(leaf, torch.nn.Parameter), leaf.requires_grad))
        tensors.append(leaf)
        paths.append(path)
        return Slot(len(tensors) - 1)

    snapshot = Snapshot(map_leaves(state, collect, _copied if opaque else _plain), pool, paths, flags)
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
        part.plan(pool)
        part.copy()
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


def _copied(value: Any, _: Path) -> Any:
    return copy.deepcopy(value)


def _plain(value: Any, path: Path) -> Any:
    encode(value, lambda *_: None, path)  # refuses here and now what cannot be written later
    return copy.deepcopy(value) if isinstance(value, (bytearray, set)) else value


def _start_copying(snapshot: Snapshot, part: _Part, device: torch.device) -> None:
    """Copy tensors from an accelerator: on CUDA on a stream of its own, after the work that is queued already."""
    snapshot._parts.append(part)
    part.plan(snapshot._pool)
    stream: Any = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
    part.copy_from_device(stream)
    if stream is not None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        snapshot._events.append((device, event))
