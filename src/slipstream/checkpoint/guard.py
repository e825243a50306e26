"""`Guard`: which tensors may be copied in the background, and the barrier that blocks changes to them until then.

Guarding a target is a promise: its tensors change only where a hook can wait for the copy.

* An optimizer: its parameters and state change only in its ``step`` and ``load_state_dict``.
* A module: its parameters change only in ``load_state_dict`` of the module or a submodule, and in guarded optimizers.

Buffers are never covered. They change where no hook can wait: in a forward pass, compiled or not, in
``reset_running_stats``, in ``spectral_norm``. Nor are weights of embeddings with a ``max_norm``, which a forward pass
scales, parameters of submodules that were added after the call of `add`, and tensors that are not plain strided memory
(sparse, sharded, not initialized). A snapshot copies all of these during the call. So it does with everything while a
guarded optimizer is inside ``step``, where a hook or a closure may save.

The hooks refer to the guard weakly. They do not prevent a module from being copied, pickled or scripted, and copies of
a module are not guarded.
"""

from __future__ import annotations

import bisect
import functools
import operator
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from slipstream.spans import span_of

Target = torch.optim.Optimizer | torch.nn.Module

# Regions of a snapshot begin at multiples of this.
_ALIGNMENT = 64
# Only these exact types are plain memory. A lazy parameter becomes a `Parameter` when it is initialized.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class Pending(Protocol):
    """A snapshot of guarded tensors that may not be complete."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing has to wait for it any more."""

    def wait_copied(self) -> None:
        """Block until the guarded tensors may change."""


class Covered:
    """Guarded tensors by the address of their storage.

    Attributes:
        first: One tensor of each storage. Most storages have no other.
    """

    def __init__(self) -> None:
        self.first: dict[int, torch.Tensor] = {}
        self._others: dict[int, list[torch.Tensor]] = {}
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor. May be repeated: a parameter belongs to a module and to its optimizer."""
        address = tensor.untyped_storage().data_ptr()
        # Empty and meta tensors have no memory.
        if address and self.first.setdefault(address, tensor) is not tensor:
            self._others.setdefault(address, []).append(tensor)

    def tensors(self, address: int) -> list[torch.Tensor]:
        """Return the guarded tensors in a storage."""
        return [self.first[address], *self._others.get(address, ())]

    def contains(self, tensor: torch.Tensor, address: int) -> bool:
        """Return whether all memory of a tensor is guarded, not only a part of the storage at that address."""
        if not tensor.numel():
            return True
        if address not in self._ranges:
            self._ranges[address] = _contiguous_ranges(self.tensors(address))
        _, start, _, stop, _ = span_of(tensor, 0)
        ranges = self._ranges[address]
        # The last one that begins before the tensor, or with it.
        number = bisect.bisect_right(ranges, start, key=operator.itemgetter(0)) - 1
        return number >= 0 and stop <= ranges[number][1]

    def version(self, address: int) -> int:
        """Return the sum of the version counters in a storage. It differs after any in-place operation there."""
        version = self.first[address]._version
        if address in self._others:
            version += sum(map(version_of, self._others[address]))
        return version


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor; -1 for an inference tensor, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


class Guard:
    """Knows which tensors are guarded, and blocks changes to them while they are copied.

    Thread-safe and safe to interrupt with Ctrl-C: there is no lock, and shared state changes in single steps. A forked
    child can use its copy at once; it does not wait for snapshots that its parent was taking.

    Attributes:
        waited_s: How long barriers have blocked, in seconds.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._handles: list[RemovableHandle] = []
        # By identity, because a module or an optimizer may define equality. Weak references show whether an object of
        # this identity is still the same one.
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        # The guarded parameters by the identity of their module and by name. Not weak references: torch refuses to swap
        # tensors that have any, and `Module.to` may swap. Those of a module that is gone, or that has other parameters
        # now, are dropped.
        self._parameters: dict[int, dict[str, torch.Tensor]] = {}
        # By identity. Another tensor may get the identity of one that is gone, and is then copied earlier.
        self._excluded: set[int] = set()
        # What is changing guarded tensors now. An optimizer whose step raised stays here until a step succeeds.
        self._changing: dict[int, weakref.ref[Any]] = {}
        # A dict, because adding and removing one item is atomic.
        self._pending: dict[Pending, None] = {}

    def add(self, *targets: Target) -> None:
        """Register optimizers and modules whose tensors may be copied in the background. Idempotent.

        Registers all of them or, if one cannot be guarded, none.

        Args:
            *targets: Optimizers (their parameters and state are covered) and modules (their parameters are).

        Raises:
            TypeError: If a target is neither an optimizer nor a module.
        """
        for target in targets:
            if not isinstance(target, (torch.optim.Optimizer, torch.nn.Module)):
                raise TypeError(f"guard takes optimizers and modules, not a {type(target).__qualname__}")
        optimizers = list(_unknown(_optimizers_in(targets), self._optimizers))
        modules = list(_unknown(_modules_in(targets), self._modules))
        handles: list[RemovableHandle] = []
        try:
            handles.extend(_register(self, optimizers, modules))
        except BaseException:
            _remove_hooks(handles)
            raise
        self._handles += handles
        # Cover the tensors only now that every change of them meets the barrier.
        for optimizer in optimizers:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        for module in modules:
            forget = functools.partial(_forget_module, self._parameters, id(module))
            self._modules[id(module)] = weakref.ref(module, forget)
        # Of known modules as well: they may have been given other parameters.
        for module in _modules_in(targets):
            if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.max_norm is not None:
                self.exclude(module.parameters())
            self._parameters[id(module)] = dict(module.named_parameters(recurse=False))

    def remove(self) -> None:
        """Remove all hooks and guard nothing any more."""
        # In this order: without hooks nothing may be covered.
        self._optimizers = {}
        self._modules = {}
        self._parameters = {}
        self._excluded = set()
        handles = self._handles
        self._handles = []
        _remove_hooks(handles)

    def wait(self) -> None:
        """Block until the guarded tensors of every snapshot are copied; takes about 0.1 us if there is none."""
        if not self._pending:
            return
        start = time.perf_counter()
        try:
            for pending in list(self._pending):
                pending.wait_copied()
                # Only a complete one: while a copy on a CUDA stream is queued, other streams have to wait for it too.
                # And not before waiting: another thread, or the same one after Ctrl-C, would not wait at all.
                if pending.is_complete:
                    self.forget(pending)
        finally:
            self.waited_s += time.perf_counter() - start

    def begin_change(self, owner: Any) -> None:
        """Wait as `wait` does, and defer no copies until `end_change`: nothing would wait for them."""
        self._changing[id(owner)] = weakref.ref(owner)
        self.wait()

    def end_change(self, owner: Any) -> None:
        """Guard again what `owner` was changing."""
        self._changing.pop(id(owner), None)

    def watch(self, pending: Pending) -> None:
        """Make barriers wait for this snapshot, too."""
        self._pending[pending] = None

    def forget(self, pending: Pending) -> None:
        """Stop waiting for a snapshot."""
        self._pending.pop(pending, None)

    def covered(self) -> Covered:
        """Return the guarded tensors as they are now."""
        covered = Covered()
        # A save in a closure or a hook of the optimizer, which has passed the barrier.
        if any(True for _ in _alive(self._changing)):
            return covered
        for tensor in self._tensors():
            # Torch does not count changes of inference tensors. Nothing could tell that such a copy is torn.
            if tensor.is_inference():
                continue
            if id(tensor) not in self._excluded:
                covered.add(tensor)
        return covered

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Guard these tensors no longer: they changed where no barrier is."""
        self._excluded.update(map(id, tensors))

    def expected_bytes(self) -> int:
        """Return the size of a snapshot of all guarded tensors, including optimizer state that does not exist yet."""
        sizes: dict[int, int] = {}
        for tensor in self._tensors():
            sizes[tensor.untyped_storage().data_ptr()] = tensor.nbytes + _ALIGNMENT
        total = sum(sizes.values())
        for optimizer in _alive(self._optimizers):
            for group in optimizer.param_groups:
                # Adam and its relatives will keep two moments of each parameter that is trained.
                if "betas" not in group:
                    continue
                for parameter in group["params"]:
                    if parameter.requires_grad and _is_plain(parameter) and parameter not in optimizer.state:
                        total += 2 * (parameter.nbytes + _ALIGNMENT)
        return total

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield all plain tensors of the targets, some twice. Optimizers create their state as they go."""
        for module in _alive(self._modules):
            guarded = self._parameters.get(id(module), {})
            for name, parameter in list(guarded.items()):
                # The module may have been given another one, which changes where no hook is, or lost it.
                if module._parameters.get(name) is not parameter:
                    guarded.pop(name, None)
                elif _is_plain(parameter):
                    yield parameter
        for optimizer in _alive(self._optimizers):
            yield from filter(_is_plain, _tensors_of(optimizer))


class GuardHook:
    """Calls a method of a guard. Refers to it weakly, so that a hook that is left behind does nothing."""

    # No attributes but these: torch copies the others into the object that it wraps around a hook.
    __slots__ = ("_guard", "_method")

    def __init__(self, guard: Guard, method: Callable[..., None]) -> None:
        self._guard = weakref.ref(guard)
        self._method = method

    def __call__(self, owner: Any, *_: Any, **__: Any) -> None:
        """Call the method with the owner of the hook."""
        guard = self._guard()
        if guard is not None:
            self._method(guard, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a module is not guarded: its hook takes any arguments, returns None and does nothing. It is made of
        # the standard library alone, so that a pickled module can be loaded where Slipstream is not installed. An audit
        # event without a listener does nothing.
        return functools.partial, (sys.audit, "slipstream.unguarded_copy")


def _contiguous_ranges(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the memory of contiguous tensors as ranges of addresses, in their order and joined where they touch."""
    ranges: list[tuple[int, int]] = []
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        # What lies between the elements of other tensors may not be guarded.
        if not tensor.is_contiguous():
            continue
        start = tensor.data_ptr()
        stop = start + tensor.nbytes
        if ranges and start <= ranges[-1][1]:
            start, previous_stop = ranges.pop()
            stop = max(stop, previous_stop)
        ranges.append((start, stop))
    return ranges


def _forget_module(parameters: dict[int, dict[str, torch.Tensor]], identity: int, _: object) -> None:
    """Drop the parameters of a module that is gone, before another module gets its identity."""
    parameters.pop(identity, None)


def _optimizers_in(targets: Iterable[Target]) -> Iterator[torch.optim.Optimizer]:
    for target in targets:
        if isinstance(target, torch.optim.Optimizer):
            yield target


def _modules_in(targets: Iterable[Target]) -> Iterator[torch.nn.Module]:
    """Yield the modules and their submodules. Each needs a hook, because each has a ``load_state_dict``."""
    for target in targets:
        if not isinstance(target, torch.nn.Module):
            continue
        for module in target.modules():
            # Scripted modules take no hooks, so their parameters are copied during the call.
            if not isinstance(module, torch.jit.ScriptModule):
                yield module


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield the parameters of an optimizer, and everything in its state."""
    for group in optimizer.param_groups:
        yield from group["params"]
    # Lists, because another thread may be creating state.
    for state in list(optimizer.state.values()):
        if isinstance(state, dict):
            yield from list(state.values())


def _unknown(objects: Iterable[Any], known: dict[int, Any]) -> Iterator[Any]:
    """Yield every object once that is not registered yet."""
    seen: set[int] = set()
    for item in objects:
        if id(item) not in seen and not _is_same(known, item):
            seen.add(id(item))
            yield item


def _is_same(known: dict[int, Any], item: object) -> bool:
    """Return whether an object is in a dict of weak references by identity."""
    reference = known.get(id(item))
    return reference is not None and reference() is item


def _alive(references: dict[int, Any]) -> Iterator[Any]:
    """Yield the objects that still exist."""
    for reference in list(references.values()):
        item = reference()
        if item is not None:
            yield item


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that is a strided piece of memory."""
    return type(value) in _PLAIN_TYPES and value.layout is torch.strided


def _register(
    guard: Guard, optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[torch.nn.Module]
) -> Iterator[RemovableHandle]:
    """Register the hooks one after another, and yield a handle of each."""
    begin = GuardHook(guard, Guard.begin_change)
    end = GuardHook(guard, Guard.end_change)
    barrier = GuardHook(guard, _wait)
    for optimizer in optimizers:
        yield optimizer.register_step_pre_hook(begin)
        yield optimizer.register_step_post_hook(end)
        yield optimizer.register_load_state_dict_pre_hook(barrier)
    for module in modules:
        yield module.register_load_state_dict_pre_hook(barrier)  # type: ignore[no-untyped-call]


def _wait(guard: Guard, _: object) -> None:
    guard.wait()


def _remove_hooks(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
