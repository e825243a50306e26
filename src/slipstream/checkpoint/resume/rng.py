"""Random states: read, check and set the global generators and generators that a training loop owns.

Checks load a state into a scratch generator first. So a state that does not fit is found before anything changes.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

# What a generator raises for a state that is not its own.
_REFUSALS = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError)

# NumPy takes these positions unchecked and later reads that far behind its buffer.
_LARGEST_POSITION = {"pos": 624, "buffer_pos": 4}


def get_generator_state(generator: torch.Generator | np.random.Generator) -> Any:
    """Return the state of one generator; it does not change with the generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state


def set_generator_state(generator: torch.Generator | np.random.Generator, state: Any) -> None:
    """Set the state of one generator; `compare_generator` says beforehand whether it fits."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    else:
        generator.bit_generator.state = state


def compare_generator(generator: torch.Generator | np.random.Generator, state: Any, name: str) -> list[str]:
    """List why a state does not fit a generator; empty if it does. The generator does not change."""
    if isinstance(generator, torch.Generator):
        scratch = torch.Generator(device=generator.device)
        return _compare_torch(scratch, state, f"{name} is a torch.Generator on {generator.device}")
    mine = type(generator.bit_generator).__name__
    theirs = _bit_generator_name(state)
    if mine != theirs:
        return [f"{name} is a {mine} generator, the checkpoint has the state of {theirs}"]
    return _compare_numpy(np.random.Generator(copy.deepcopy(generator.bit_generator)), state, name)


def get_global_rng() -> dict[str, Any]:
    """Return the global random states of Python, NumPy, torch and, if there is a GPU, CUDA."""
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


def set_global_rng(state: Mapping[str, Any]) -> None:
    """Set the global random states; those of CUDA are ignored on a machine without a GPU."""
    random.setstate(_python_state(state["python"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([tensor.cpu() for tensor in state["cuda"]])


def compare_global_rng(state: Any, name: str = "rng") -> list[str]:
    """List why a state does not fit the global generators; empty if it does. They do not change."""
    if not isinstance(state, Mapping):
        return [f"{name} is a {type(state).__qualname__}, expected a dict of random states"]
    missing = [f"missing {name}/{key}" for key in ("python", "numpy", "torch") if key not in state]
    if missing:
        return missing
    problems = _compare_python(state["python"], f"{name}/python")
    problems += _compare_global_numpy(state["numpy"], f"{name}/numpy")
    problems += _compare_torch(torch.Generator(), state["torch"], f"{name}/torch is the state of the CPU")
    if "cuda" in state and torch.cuda.is_available():
        problems += _compare_cuda(state["cuda"], f"{name}/cuda")
    return problems


def _python_state(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a saved state as `random.setstate` takes it."""
    return (state["version"], tuple(state["words"].tolist()), state["gauss"])


def _compare_python(state: Any, name: str) -> list[str]:
    scratch = random.Random()  # noqa: S311 - not used to draw numbers
    try:
        scratch.setstate(_python_state(state))
        # Python takes any object as the next Gaussian number, and cuts words to 32 bits.
        fits = scratch.getstate() == _python_state(state) and isinstance(state["gauss"], float | None)
    except _REFUSALS as error:
        return [f"{name} is not a random state of Python ({_reason(error)})"]
    if not fits:
        return [f"{name} is not a random state of Python"]
    return []


def _compare_global_numpy(state: Any, name: str) -> list[str]:
    mine = get_bit_generator()
    theirs = _bit_generator_name(state)
    if type(mine).__name__ != theirs:
        return [f"{name} is a {type(mine).__name__} generator, the checkpoint has the state of {theirs}"]
    return _compare_numpy(np.random.RandomState(copy.deepcopy(mine)), state, name)


def _compare_numpy(scratch: np.random.Generator | np.random.RandomState, state: Any, name: str) -> list[str]:
    try:
        if isinstance(scratch, np.random.RandomState):
            scratch.set_state(state)
            accepted: Any = scratch.get_state(legacy=False)
        else:
            scratch.bit_generator.state = state
            accepted = scratch.bit_generator.state
    except _REFUSALS as error:
        return [f"{name} is not a random state of NumPy ({_reason(error)})"]
    # NumPy ignores what it does not expect, such as words beyond the last one.
    if not _equal(accepted, state) or not _positions_fit(state):
        return [f"{name} is not a random state of NumPy"]
    return []


def _compare_torch(scratch: torch.Generator, state: Any, what: str) -> list[str]:
    if not isinstance(state, torch.Tensor):
        return [f"{what}, the checkpoint has a {type(state).__qualname__}"]
    try:
        scratch.set_state(state.cpu())
        accepted = scratch.get_state()
    except _REFUSALS as error:
        return [f"{what}, the checkpoint has a state that it does not take ({_reason(error)})"]
    if not torch.equal(accepted, state.cpu()):
        return [f"{what}, the checkpoint has a state that it does not take"]
    return []


def _compare_cuda(states: Any, name: str) -> list[str]:
    num_devices = torch.cuda.device_count()
    if not isinstance(states, list | tuple) or len(states) != num_devices:
        return [f"{name} is not a list of {num_devices} states, one for each GPU of this machine"]
    problems: list[str] = []
    for number, state in enumerate(states):
        problems += _compare_torch(torch.Generator(f"cuda:{number}"), state, f"{name}/{number} is the state of a GPU")
    return problems


def _bit_generator_name(state: Any) -> str:
    """Return which bit generator of NumPy a state is of."""
    if not isinstance(state, Mapping):
        return f"a {type(state).__qualname__}"
    return str(state.get("bit_generator"))


def _positions_fit(state: Mapping[str, Any]) -> bool:
    """Return whether the positions in a state of NumPy are inside its buffers."""
    for values in (state, state.get("state")):
        if not isinstance(values, Mapping):
            continue
        for key, largest in _LARGEST_POSITION.items():
            if not 0 <= values.get(key, 0) <= largest:
                return False
    return True


def _equal(one: Any, other: Any) -> bool:
    """Compare two states of NumPy: nested dicts of arrays and numbers."""
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping) or one.keys() != other.keys():
            return False
        return all(_equal(value, other[key]) for key, value in one.items())
    return bool(np.array_equal(one, other))


def _reason(error: Exception) -> str:
    """Return an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
