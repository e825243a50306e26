"""`TrainingState`: everything an exact resume needs, from any loop."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from slipstream.checkpoint.resume.compare import find_differences, has_torch_loading, judges_for_itself
from slipstream.checkpoint.resume.rng import (
    compare_global_rng,
    get_generator_state,
    get_global_rng,
    set_generator_state,
    set_global_rng,
)
from slipstream.checkpoint.resume.undo import Backup
from slipstream.checkpoint.resume.wrappers import unwrap_names
from slipstream.errors import StateMismatchError, UnsupportedStateError

# How many differences an error lists.
_LISTED = 8


class TrainingState:
    """Collects and restores the whole state of a training loop, random numbers included.

    A run that was killed and resumed from it equals, bit for bit on a CPU, the run that was not.

    Args:
        rng: Whether to include the global random states of Python, NumPy, torch and CUDA, under the name ``rng``.
        **parts: Modules, optimizers, schedulers, anything with ``state_dict`` and ``load_state_dict``,
            ``torch.Generator`` and ``numpy.random.Generator``; and dicts of plain values, which are updated in place.

    Raises:
        TypeError: If `rng` is not a bool, or a part is something else.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> counters = {"frames": 0}
        >>> training = TrainingState(model=model, optimizer=torch.optim.Adam(model.parameters()), counters=counters)
        >>> saved = training.state_dict()
        >>> counters["frames"] = 99
        >>> training.load_state_dict(saved)
        >>> counters
        {'frames': 0}
    """

    def __init__(self, /, *, rng: bool = True, **parts: Any) -> None:
        # A generator is truthy: it would switch the global states on and be dropped.
        if not isinstance(rng, bool):
            raise TypeError(
                f"rng is a {type(rng).__qualname__}, expected True or False for the global random states; "
                "pass a generator under another name, such as TrainingState(noise=generator)"
            )
        for name, part in parts.items():
            if not _is_part(part):
                raise TypeError(
                    f"{name} is a {type(part).__qualname__}, expected something with state_dict and load_state_dict, "
                    "a torch.Generator or numpy.random.Generator, or a dict of plain values"
                )
        self._parts = parts
        self._rng = rng

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts by name.

        Tensors of modules and optimizers are the live ones, not copies: pass the state to a saver before training
        continues. Dicts are copied.

        Raises:
            UnsupportedStateError: If a part cannot give its state; names the part.
        """
        state = {}
        for name, part in self._parts.items():
            try:
                state[name] = _get(part)
            except Exception as error:
                raise UnsupportedStateError(f"the state of {name} cannot be collected: {_reason(error)}") from error
        if self._rng:
            state["rng"] = get_global_rng()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every part, or none: if anything fails, all parts are as they were, bit for bit.

        Everything that torch loads is checked before the first change: names, shapes, dtypes that would round,
        parameter groups, moments, schedules, random states. Names may differ by ``_orig_mod.`` (``torch.compile``) and
        ``module.`` (DataParallel, DDP).

        Other parts judge for themselves: objects, modules and optimizers with their own loading code or load hooks. If
        there are any, those parts and the modules before them are copied first, which takes the memory of their tensors
        a second time until the call returns. To save memory, name such parts first. A part that owns threads, files
        or locks is undone by loading its earlier state; the error says so if the part refuses that.

        Parameters and dicts keep their identity. An optimizer takes over the tensors of `state`, as in torch. CUDA
        states are ignored on a machine without a GPU. After Ctrl-C during the call, load again.

        Args:
            state: What `state_dict` returned, from memory or from a checkpoint.

        Raises:
            StateMismatchError: If the state does not fit. Lists what differs; ``__cause__`` is the error of the part
                that refused it, if there is one.
        """
        prepared = self._check(state)
        backup, unprotected = self._back_up()
        touched: list[str] = []
        try:
            for name, part in self._parts.items():
                touched.append(name)
                _set(part, prepared[name])
            if self._rng:
                touched.append("rng")
                set_global_rng(prepared["rng"])
        except BaseException as error:
            lost = backup.restore(touched)
            # Torch copies what has been checked: only an interrupt or a full device can end up here.
            lost += [f"{name} may have new weights" for name in unprotected if name in touched]
            if not isinstance(error, Exception):
                raise
            raise StateMismatchError(_describe([f"{touched[-1]} failed with {_reason(error)}"], lost)) from error

    def _check(self, state: Any) -> dict[str, Any]:
        """Return the states of all parts, ready to be loaded.

        Raises:
            StateMismatchError: If any of them does not fit.
        """
        if not isinstance(state, Mapping):
            raise StateMismatchError(f"the state is a {type(state).__qualname__}, expected a dict of parts by name")
        expected = list(self._parts)
        if self._rng:
            expected.append("rng")
        problems = [f"missing {name}" for name in expected if name not in state]
        problems += [f"unexpected {name}" for name in state if name not in expected]
        prepared: dict[str, Any] = {}
        cause: Exception | None = None
        for name, part in self._parts.items():
            if name not in state:
                continue
            try:
                prepared[name] = _prepare(part, state[name])
                problems += find_differences(part, prepared[name], name)
            except Exception as error:  # noqa: BLE001 - any error means that the state cannot be loaded; it is chained below
                cause = error
                problems.append(f"{name} cannot be compared: {_reason(error)}")
        if self._rng and "rng" in state:
            prepared["rng"] = state["rng"]
            problems += compare_global_rng(state["rng"])
        if problems:
            raise StateMismatchError(_describe(problems, [])) from cause
        return prepared

    def _back_up(self) -> tuple[Backup, list[str]]:
        """Save what a failure could change; returns the modules that need no copy, too."""
        backup = Backup()
        unprotected: list[str] = []
        is_needed = False
        # Backwards: what is loaded after the last part that may fail needs no copy.
        for name, part in reversed(self._parts.items()):
            is_needed = is_needed or judges_for_itself(part)
            # Everything but modules takes little memory.
            if is_needed or not isinstance(part, torch.nn.Module):
                backup.add(name, part)
            else:
                unprotected.insert(0, name)
        # Loading code may draw random numbers, whether or not they are part of the state.
        backup.add_global_rng()
        return backup, unprotected


def _is_part(part: Any) -> bool:
    if isinstance(part, type):
        return False
    if isinstance(part, torch.Generator | np.random.Generator | dict):
        return True
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _get(part: Any) -> Any:
    """Return the state of a part."""
    if isinstance(part, torch.Generator | np.random.Generator):
        return get_generator_state(part)
    if isinstance(part, dict):
        return _with_plain_dicts(copy.deepcopy(part))
    return part.state_dict()


def _prepare(part: Any, state: Any) -> Any:
    """Return a saved state as its part takes it, without changing either."""
    if not isinstance(state, Mapping):
        return state
    # These keep what they are given: training would change the caller's state.
    if isinstance(part, dict | LRScheduler):
        return copy.deepcopy(dict(state))
    if isinstance(part, torch.nn.Module) and has_torch_loading(part):
        return unwrap_names(part.state_dict(), state)
    if isinstance(part, torch.optim.Optimizer):
        return dict(state)
    return state


def _with_plain_dicts(value: Any) -> Any:
    """Return nested data without default dicts, which files do not store.

    Nothing is lost: dicts are updated in place.
    """
    if type(value) is list:
        return list(map(_with_plain_dicts, value))
    if type(value) not in (dict, defaultdict):
        return value
    members = {}
    for key, member in value.items():
        members[key] = _with_plain_dicts(member)
    return members


def _set(part: Any, state: Any) -> None:
    """Load a prepared state into a part."""
    if isinstance(part, torch.Generator | np.random.Generator):
        set_generator_state(part, state)
    elif isinstance(part, dict):
        _update(part, state)
    else:
        part.load_state_dict(state)


@torch.no_grad()
def _update(target: dict[Any, Any], state: Mapping[Any, Any]) -> None:
    """Make a dict equal to a saved one. Dicts and parameters in it keep their identity: others may refer to them."""
    members = dict(state)
    for key, value in target.items():
        if isinstance(value, torch.nn.Parameter) and key in state:
            value.copy_(state[key])
            members[key] = value
        elif isinstance(value, dict) and isinstance(state.get(key), Mapping):
            _update(value, state[key])
            members[key] = value
    target.clear()
    target.update(members)


def _describe(problems: list[str], lost: list[str]) -> str:
    """Return one sentence that says what differs."""
    listed = "; ".join(problems[:_LISTED])
    if len(problems) > _LISTED:
        listed += f" and {len(problems) - _LISTED} more"
    if lost:
        text = f"the checkpoint does not fit: {listed}; not everything could be put back: {'; '.join(lost)}"
        return " ".join(text.split())
    return f"the checkpoint does not fit, nothing was changed: {listed}"


def _reason(error: Exception) -> str:
    """Return an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
