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

import contextlib
import copy
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import TornStateError
from slipstream.tensors import Region, View, check_storable, copy_memory, plan, settled, view_memory
from slipstream.tree import Leaf, Path, encode, map_leaves

_ALIGNMENT = 64
_PIECE_BYTES = 4 << 20


class BufferPool:
    """Host memory for snapshots, kept for the next one; pinned if there is a CUDA device."""

    def __init__(self, max_free: int) -> None:
        self._max_free = max_free
        self._free: list[NDArray[np.uint8]] = []
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return at least `nbytes` of memory, uninitialised: the smallest free one that fits, or a new one."""
        with self._lock:
            fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= 2 * nbytes + (1 << 20)]
            if fitting:
                best = min(fitting, key=lambda buffer: buffer.nbytes)
                self._free = [buffer for buffer in self._free if buffer is not best]
                return best
        if torch.cuda.is_available():
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return np.empty(nbytes, np.uint8)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Keep a buffer for the next snapshot; the smallest go when there are more than needed."""
        with self._lock:
            self._free = sorted([*self._free, buffer], key=lambda kept: kept.nbytes)[-self._max_free :]


@dataclass
class _Piece:
    """A guarded region still to be copied, and what its tensors' version counters said at the call."""

    region: Region
    target: int
    names: list[str]
    versions: list[tuple[torch.Tensor, int]]


@dataclass(eq=False)
class Snapshot:
    """A private copy of a nested state; complete once `wait` returns.

    Attributes:
        raw_bytes: Size of the tensors, each piece of memory counted once.
    """

    raw_bytes: int
    _structure: Any
    _pool: BufferPool
    _buffer: NDArray[np.uint8]
    _offsets: list[int]
    _sizes: list[int]
    _views: list[View]
    _flags: list[tuple[bool, bool]]
    _names: list[str]
    _pieces: list[_Piece] = field(default_factory=list)
    _events: list[tuple[torch.device, Any]] = field(default_factory=list)
    _error: BaseException | None = None
    _copied: threading.Event = field(default_factory=threading.Event)
    _done: threading.Event = field(default_factory=threading.Event)
    _pid: int = field(default_factory=os.getpid)

    def copy_guarded(self) -> None:
        """Copy what was left for later; runs on a thread of its own."""
        try:
            for piece in self._pieces:
                for start in range(0, piece.region.nbytes, _PIECE_BYTES):
                    size = min(_PIECE_BYTES, piece.region.nbytes - start)
                    copy_memory(piece.target + start, piece.region.address + start, size)
            changed = [
                name
                for piece in self._pieces
                for name, (tensor, version) in zip(piece.names, piece.versions, strict=True)
                if tensor._version != version
            ]
            if changed:
                self._error = TornStateError(
                    f"{', '.join(changed[:3])} changed while being copied: guarded state may change only in a guarded "
                    "optimizer's step or under saver.mutating(); nothing was written"
                )
            self._copied.set()
            for _, event in self._events:
                event.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._error = error
        finally:
            self._pieces.clear()  # lets go of the tensors
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

    def state(self) -> Any:
        """Wait for the copy and return the state, whose tensors see the snapshot's memory.

        Raises:
            TornStateError: If guarded state changed while it was being copied.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        by_region: dict[int, list[int]] = {}
        for index, view in enumerate(self._views):
            by_region.setdefault(view.region, []).append(index)
        tensors: dict[int, torch.Tensor] = {}
        for region, indices in by_region.items():
            memory = self._memory(region)
            tensors.update(zip(indices, view_memory(memory, [self._views[i] for i in indices]), strict=True))
        return map_leaves(self._structure, lambda leaf, _: self._revive(leaf, tensors), lambda value, _: value)

    def release(self) -> None:
        """Give the memory back to the pool; nothing may refer to it after that. May be repeated."""
        if self._done.is_set():  # else a thread is still writing to it, and it goes when that thread goes
            buffer, self._buffer = self._buffer, np.empty(0, np.uint8)
            if buffer.size:
                self._pool.give_back(buffer)

    def _memory(self, region: int) -> NDArray[np.uint8]:
        if region < 0:
            return np.empty(0, np.uint8)
        return self._buffer[self._offsets[region] : self._offsets[region] + self._sizes[region]]

    def _revive(self, leaf: Leaf, tensors: dict[int, torch.Tensor]) -> Leaf:
        if not isinstance(leaf, _Slot):
            return leaf
        tensor = tensors[leaf.index]
        is_parameter, requires_grad = self._flags[leaf.index]
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return tensor.requires_grad_(requires_grad) if requires_grad else tensor


class _Slot(np.ndarray[Any, Any]):
    """Stands for a tensor in the structure of a snapshot: an empty array that knows its number."""

    index: int


def _slot(index: int) -> _Slot:
    slot = np.empty(0, np.uint8).view(_Slot)
    slot.index = index
    return slot


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
        found: set[int] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found.update(parameter.untyped_storage().data_ptr() for parameter in group["params"])
            for state in optimizer.state.values():
                found.update(v.untyped_storage().data_ptr() for v in state.values() if isinstance(v, torch.Tensor))
        for module in self._modules:
            for tensors in (module.parameters(), module.buffers()):
                found.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
        return found - {0}

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
    names: list[str] = []
    flags: list[tuple[bool, bool]] = []

    def collect(leaf: Leaf, path: Path) -> Any:
        if isinstance(leaf, np.ndarray):
            return np.array(leaf)
        name = "/".join(path)
        check_storable(leaf, name or "the state")
        flags.append((isinstance(leaf, torch.nn.Parameter), leaf.requires_grad))
        tensors.append(settled(leaf))
        names.append(name)
        return _slot(len(tensors) - 1)

    structure = map_leaves(state, collect, _copied if opaque else _plain)
    regions, views = plan_devices(tensors)
    offsets, total = [], 0
    for region in regions:
        offsets.append(total)
        total += -(-region.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = pool.take(total)
    raw_bytes = sum(region.nbytes for region in regions)
    sizes = [region.nbytes for region in regions]
    snapshot = Snapshot(raw_bytes, structure, pool, buffer, offsets, sizes, views, flags, names)
    _copy_or_defer(snapshot, regions, views, tensors, guard.storages())
    if snapshot._pieces or snapshot._events:
        guard.watch(snapshot)
        threading.Thread(target=snapshot.copy_guarded, name="slipstream-copy", daemon=True).start()
    else:
        snapshot._copied.set()
        snapshot._done.set()
    return snapshot


def plan_devices(tensors: list[torch.Tensor]) -> tuple[list[Region], list[View]]:
    """Plan tensors of several devices: addresses of one say nothing about another's."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    regions: list[Region] = []
    views: dict[int, View] = {}
    for indices in by_device.values():
        found, seen = plan([tensors[i] for i in indices])
        for index, view in zip(indices, seen, strict=True):
            home = view.region + len(regions) if view.region >= 0 else -1
            views[index] = View(home, view.offset, view.dtype, view.shape, view.stride)
        regions += found
    return regions, [views[index] for index in range(len(tensors))]


def _copied(value: Any, _: Path) -> Any:
    return copy.deepcopy(value)


def _plain(value: Any, path: Path) -> Any:
    encode(value, lambda *_: None, path)  # refuses here and now what cannot be written later
    return copy.deepcopy(value)


def _copy_or_defer(
    snapshot: Snapshot, regions: list[Region], views: list[View], tensors: list[torch.Tensor], guarded: set[int]
) -> None:
    base = snapshot._buffer.ctypes.data
    seen_by: dict[int, list[int]] = {}
    for index, view in enumerate(views):
        seen_by.setdefault(view.region, []).append(index)
    streams: dict[torch.device, Any] = {}
    for number, region in enumerate(regions):
        source, target = region.tensors[0], base + snapshot._offsets[number]
        if source.device.type != "cpu":
            if source.device not in streams:
                streams[source.device] = _side_stream(source)
            _copy_from_device(snapshot, region, number, streams[source.device])
        elif source.untyped_storage().data_ptr() in guarded:
            users = seen_by[number]
            versions = [(tensors[i], tensors[i]._version) for i in users]
            snapshot._pieces.append(_Piece(region, target, [snapshot._names[i] for i in users], versions))
        else:
            copy_memory(target, region.address, region.nbytes)
    for device, stream in streams.items():
        if stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            snapshot._events.append((device, event))


def _side_stream(tensor: torch.Tensor) -> Any:
    """Return a CUDA stream that starts after the work queued so far; None for devices without one."""
    if tensor.device.type != "cuda":
        return None
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    return stream


def _copy_from_device(snapshot: Snapshot, region: Region, number: int, stream: Any) -> None:
    """Copy a region from an accelerator; on CUDA asynchronously, so that only work on the GPU has to wait."""
    first = region.tensors[0]
    start = region.address - first.untyped_storage().data_ptr()
    content = torch.empty(0, dtype=torch.uint8, device=first.device)
    content.set_(first.untyped_storage(), start, (region.nbytes,), (1,))
    target = torch.from_numpy(snapshot._memory(number))
    with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
        target.copy_(content, non_blocking=stream is not None)
        if stream is not None:
            content.record_stream(stream)
