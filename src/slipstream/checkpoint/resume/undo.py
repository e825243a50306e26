"""`Backup`: what objects were before a load, so that a load that fails can be undone.

An object of plain Python, with nothing but attributes, is put back attribute by attribute: every container gets its old
members, every tensor its old memory, shape and bits. No code of the object runs, and everything keeps its identity. An
object that holds something else, such as a thread, a file or a lock, can only be asked to load its earlier state.
"""

from __future__ import annotations

import copy
import datetime as dt
import enum
import functools
import logging
import operator
import pathlib
import random
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from slipstream.checkpoint.resume.compare import judges_for_itself
from slipstream.checkpoint.resume.rng import get_generator_state, get_global_rng, set_generator_state, set_global_rng

# Values that do not change, and code, which is not state.
_NUMBERS = (types.NoneType, bool, int, float, complex, np.generic)
_VALUES = (str, bytes, range, slice, enum.Enum, pathlib.PurePath, dt.date, dt.time, dt.timedelta)
_DESCRIPTIONS = (np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial)
_CONSTANTS = (*_NUMBERS, *_VALUES, *_DESCRIPTIONS, *_CODE, np.ufunc, weakref.ref, logging.Logger)

# Subclasses may do anything when they are filled: they count as unknown.
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_COLLECTIONS = (list, set, deque)

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class _Plain:
    """An object of this size has attributes, and no memory besides."""


class Backup:
    """Keeps what parts of a training loop are now.

    Takes as much memory as the tensors of the parts; memory that parts share is copied once.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._reloads: list[tuple[str, Any, Any]] = []
        self._without_state: dict[str, Exception] = {}
        # By identity. Holding the objects keeps their ids from being reused.
        self._saved: dict[int, Any] = {}

    def add(self, name: str, part: Any) -> None:
        """Save what a part is now."""
        if isinstance(part, torch.nn.Module) and not judges_for_itself(part):
            self._save(_members(part))
            return
        objects, is_known = _reachable(part)
        if isinstance(part, torch.optim.Optimizer | LRScheduler) and not judges_for_itself(part):
            # Torch replaces moments and never writes into them, so references are enough.
            self._save(item for item in objects if not isinstance(item, torch.Tensor))
        elif is_known:
            self._save(objects)
        elif isinstance(part, dict):
            self._save(_updatable(part))
        else:
            # Putting single attributes back could leave a thread or a file in a state that it never had.
            self._keep_state(name, part)
            if isinstance(part, torch.nn.Module):
                self._save(_members(part))

    def add_global_rng(self) -> None:
        """Save the global random states."""
        self._undo.append(functools.partial(set_global_rng, get_global_rng()))

    def restore(self, touched: Collection[str]) -> list[str]:
        """Put every part back, bit for bit.

        Args:
            touched: Names of the parts whose loading has begun. The code of other parts does not run.

        Returns:
            Which parts may not be as they were, and why.
        """
        lost = []
        # Code of the parts comes first: what it does to others is undone below.
        for name, part, state in self._reloads:
            if name not in touched:
                continue
            try:
                part.load_state_dict(state)
            except Exception as error:  # noqa: BLE001 - the other parts can still be put back; the caller reports it
                lost.append(f"{name} refused its earlier state ({type(error).__name__}: {error})")
        for name, reason in self._without_state.items():
            if name in touched:
                lost.append(f"{name} gave no earlier state ({type(reason).__name__}: {reason})")
        for undo in self._undo:
            try:
                undo()
            except Exception as error:  # noqa: BLE001 - one tensor that cannot be written to must not cost the others
                lost.append(f"a member could not be written to ({type(error).__name__}: {error})")
        return lost

    def _keep_state(self, name: str, part: Any) -> None:
        try:
            self._reloads.append((name, part, copy.deepcopy(part.state_dict())))
        except Exception as error:  # noqa: BLE001 - a part may have no state before its first load, which may succeed
            self._without_state[name] = error

    def _save(self, objects: Iterable[Any]) -> None:
        for item in objects:
            if id(item) in self._saved:
                continue
            self._saved[id(item)] = item
            if isinstance(item, torch.Tensor):
                self._save_tensor(item)
            elif isinstance(item, np.ndarray):
                # An array that cannot be written to cannot change.
                if item.flags.writeable:
                    self._undo.append(functools.partial(np.copyto, item, item.copy()))
            elif isinstance(item, _GENERATORS):
                self._undo.append(_keep_generator(item))
            elif isinstance(item, dict):
                self._undo.append(functools.partial(_refill_dict, item, dict(item)))
            else:
                self._undo.append(functools.partial(_refill_collection, item, list(item)))

    def _save_tensor(self, tensor: torch.Tensor) -> None:
        self._undo.append(functools.partial(_reattach, tensor, type(tensor), tensor.data, tensor.requires_grad))
        if is_lazy(tensor) or tensor.is_meta:
            return
        if not _has_storage(tensor):
            self._undo.append(functools.partial(_copy_values, tensor, tensor.detach().clone()))
            return
        # By storage: tied weights and views are copied once, whatever their strides.
        storage = tensor.untyped_storage()
        if id(storage) not in self._saved:
            self._saved[id(storage)] = storage
            self._undo.append(functools.partial(_copy_bytes, storage, _bytes_of(storage).clone()))


def _members(module: torch.nn.Module) -> list[Any]:
    """Return the attributes, parameters and buffers of a module and its children."""
    found: list[Any] = []
    for child in module.modules():
        attributes = vars(child)
        found.append(attributes)
        # A scripted module has no such dicts, and loading only writes into its tensors.
        if not isinstance(child, torch.jit.ScriptModule):
            found += [attributes["_parameters"], attributes["_buffers"], attributes["_modules"]]
        found += child.parameters(recurse=False)
        found += child.buffers(recurse=False)
    return found


def _updatable(part: dict[Any, Any]) -> list[Any]:
    """Return what loading changes in a dict: the dict, those in it, and their parameters."""
    found: list[Any] = [part]
    for value in part.values():
        if isinstance(value, dict):
            found += _updatable(value)
        elif isinstance(value, torch.nn.Parameter):
            found.append(value)
    return found


def _reachable(part: Any) -> tuple[list[Any], bool]:
    """Return all containers, tensors, arrays and generators that a part consists of, and whether that is all of it.

    The attributes of an object are a container: ``vars(object)``.
    """
    found: list[Any] = []
    is_known = True
    seen: dict[int, Any] = {}
    # The moments of its optimizer are not the state of a scheduler.
    if isinstance(part, LRScheduler):
        seen[id(part.optimizer.state)] = part.optimizer.state
    pending = [part]
    while pending:
        item = pending.pop()
        if isinstance(item, _CONSTANTS) or id(item) in seen:
            continue
        seen[id(item)] = item
        if _is_leaf(item):
            found.append(item)
        elif type(item) in _DICTS:
            found.append(item)
            pending += item.values()
        elif type(item) in _COLLECTIONS:
            found.append(item)
            pending += item
        elif isinstance(item, tuple | frozenset):
            pending += item
        elif _is_plain(item):
            for foreign in _foreign(item):
                seen[id(foreign)] = foreign
            pending.append(vars(item))
        else:
            is_known = False
    return found, is_known


def _is_leaf(item: Any) -> bool:
    if isinstance(item, np.ndarray):
        # Arrays of objects hold anything, masked arrays have a second array, and a file may be larger than memory.
        return type(item) is np.ndarray and not item.dtype.hasobject
    if isinstance(item, torch.Tensor):
        return is_lazy(item) or not _has_storage(item) or item.untyped_storage().filename is None
    # The operating system has no state that could be set.
    return isinstance(item, _GENERATORS) and not isinstance(item, random.SystemRandom)


def _is_plain(item: Any) -> bool:
    """Return whether an object is nothing but its attributes: no slots, and no memory of a C extension."""
    has_size = type(item).__basicsize__ == _Plain.__basicsize__ and type(item).__itemsize__ == 0
    return has_size and hasattr(item, "__dict__")


def _foreign(item: Any) -> list[Any]:
    """Return what an object refers to but loading does not change: hooks, and the parameters of an optimizer."""
    found: list[Any] = []
    if isinstance(item, torch.nn.Module | torch.optim.Optimizer):
        for name, value in vars(item).items():
            if "_hooks" in name:
                found.append(value)
    if isinstance(item, torch.optim.Optimizer):
        found += [group["params"] for group in item.param_groups]
    return found


def _keep_generator(generator: Any) -> Callable[[], None]:
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state(legacy=False))
    return functools.partial(set_generator_state, generator, get_generator_state(generator))


def _refill_dict(target: dict[Any, Any], members: dict[Any, Any]) -> None:
    """Give a dict its members back, in their order."""
    # By identity: keys may be tensors, which have no plain equality.
    before = [*members.keys(), *members.values()]
    now = [*target.keys(), *target.values()]
    if len(before) != len(now) or not all(map(operator.is_, before, now)):
        target.clear()
        target.update(members)


def _refill_collection(target: Any, members: list[Any]) -> None:
    """Give a list, a set or a deque its members back."""
    target.clear()
    if isinstance(target, set):
        target.update(members)
    else:
        target.extend(members)


def _reattach(tensor: torch.Tensor, kind: type[torch.Tensor], memory: torch.Tensor, requires_grad: bool) -> None:
    """Let a tensor see the memory that it saw before, with the same shape and strides."""
    # Without one piece of memory, the values are copied instead.
    if _has_storage(memory):
        tensor.data = memory
    # Loading turns the parameters of lazy modules into usual ones.
    if type(tensor) is not kind:
        tensor.__class__ = kind
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _has_storage(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is one piece, unlike that of sparse and distributed tensors."""
    return tensor.layout == torch.strided and not hasattr(tensor, "to_local")


@torch.no_grad()
def _copy_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.copy_(values)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all memory of a storage as a flat tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_bytes(storage: torch.UntypedStorage, content: torch.Tensor) -> None:
    if storage.nbytes() != content.nbytes:
        storage.resize_(content.nbytes)
    _bytes_of(storage).copy_(content)
