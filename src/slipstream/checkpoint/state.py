"""`TrainingState`: everything an exact resume needs, from any loop."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slipstream.errors import StateMismatchError

_LISTED = 8


class TrainingState:
    """Collects and restores the whole state of a training loop, random numbers included.

    A run that was killed and resumed from it equals, bit for bit on a CPU, the run that was not.

    Args:
        rng: Whether to include the global random numbers of Python, NumPy, torch and CUDA.
        **parts: Modules, optimizers, schedulers, anything with ``state_dict`` and ``load_state_dict``,
            ``torch.Generator`` and ``numpy.random.Generator``; and dicts of plain values, which are updated in place.

    Example:
        >>> import torch
        >>> model, counters = torch.nn.Linear(2, 2), {"frames": 0}
        >>> training = TrainingState(model=model, optimizer=torch.optim.Adam(model.parameters()), counters=counters)
        >>> saved = training.state_dict()
        >>> counters["frames"] = 99
        >>> training.load_state_dict(saved)
        >>> counters
        {'frames': 0}
    """

    def __init__(self, *, rng: bool = True, **parts: Any) -> None:
        for name, part in parts.items():
            if not _is_part(part):
                raise TypeError(
                    f"{name} is a {type(part).__qualname__}: expected something with state_dict and load_state_dict, "
                    "a random generator, or a dict of plain values"
                )
        self._parts = parts
        self._rng = rng

    def state_dict(self) -> dict[str, Any]:
        """Return the state; tensors in it are those of the parts, not copies: hand it to a saver at once."""
        state = {name: _get(part) for name, part in self._parts.items()}
        if self._rng:
            state["rng"] = _global_rng()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every part; nothing is changed unless all of it fits.

        Raises:
            StateMismatchError: If entries are missing, unexpected, or of another shape; lists them.
        """
        expected = {*self._parts, *(["rng"] if self._rng else [])}
        problems = [f"missing {name}" for name in sorted(expected - set(state))]
        problems += [f"unexpected {name}" for name in sorted(set(state) - expected)]
        for name in sorted(set(self._parts) & set(state)):
            problems += _differences(self._parts[name], state[name], name)
        if problems:
            more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
            raise StateMismatchError(f"the checkpoint does not fit: {'; '.join(problems[:_LISTED])}{more}")
        for name, part in self._parts.items():
            _set(part, state[name])
        if self._rng:
            _set_global_rng(state["rng"])


def _is_part(part: Any) -> bool:
    generators = (torch.Generator, np.random.Generator, dict)
    return isinstance(part, generators) or (hasattr(part, "state_dict") and hasattr(part, "load_state_dict"))


def _get(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    return copy.deepcopy(part) if isinstance(part, dict) else part.state_dict()


def _set(part: Any, state: Any) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(state.cpu())
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    elif isinstance(part, dict):
        part.clear()
        part.update(state)
    else:
        part.load_state_dict(state)


def _global_rng() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        # As an array: a snapshot looks at every leaf, and 625 numbers would take longer than all the rest.
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_global_rng(state: Mapping[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([tensor.cpu() for tensor in state["cuda"]])


def _differences(part: Any, state: Any, name: str) -> list[str]:
    """List what of a state does not fit a module or an optimizer; others judge for themselves when they load."""
    if isinstance(part, torch.nn.Module):
        return compare_states(part.state_dict(), state, name)
    if isinstance(part, torch.optim.Optimizer) and isinstance(state, Mapping):
        mine = [len(group["params"]) for group in part.param_groups]
        theirs = [len(group["params"]) for group in state.get("param_groups", [])]
        if mine != theirs:
            return [f"{name} has parameter groups of {mine}, the checkpoint of {theirs}"]
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        return [
            f"{name}/{number} has shape {list(parameters[number].shape)}, the checkpoint {list(moment.shape)}"
            for number, moments in state.get("state", {}).items()
            for moment in moments.values()
            if isinstance(moment, torch.Tensor) and moment.dim() and moment.shape != parameters[number].shape
        ]
    return []


def compare_states(mine: Mapping[str, Any], theirs: Any, name: str) -> list[str]:
    """List missing, unexpected and differing tensors between two state dicts."""
    if not isinstance(theirs, Mapping):
        return [f"{name} is a {type(theirs).__qualname__}, expected a state dict"]
    problems = [f"missing {name}/{key}" for key in mine if key not in theirs]
    problems += [f"unexpected {name}/{key}" for key in theirs if key not in mine]
    for key, tensor in mine.items():
        other = theirs.get(key)
        if isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor) and tensor.shape != other.shape:
            problems.append(f"{name}/{key} has shape {list(tensor.shape)}, the checkpoint {list(other.shape)}")
    return problems
