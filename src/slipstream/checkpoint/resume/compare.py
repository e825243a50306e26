"""What differs between a saved state and the object it is for, found without changing either.

`find_differences` checks everything that torch's own loading code would refuse or silently accept: names, shapes,
dtypes, parameter groups, moments, schedules. Code of other authors can only be asked by running it: those parts are the
ones for which `judges_for_itself` is true.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from slipstream.checkpoint.guard import GuardHook
from slipstream.checkpoint.resume.rng import compare_generator
from slipstream.checkpoint.resume.wrappers import plain_names

# Attributes with the hooks that run while a module or an optimizer saves or loads. They may change or refuse anything.
_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")

# Methods by which a module takes part in saving and loading the module that contains it.
_METHODS = ("state_dict", "_save_to_state_dict", "_load_from_state_dict")

# State of torch's optimizers that is one number per parameter; everything else has the shape of the parameter,
_SCALAR_MOMENTS = {"step", "mu_product", "eta", "mu"}
# except here: LBFGS keeps flat vectors of all parameters, Adafactor keeps sums of rows and columns.
_FREE_SHAPES = (torch.optim.LBFGS, torch.optim.Adafactor)

# Attributes of schedulers that only some versions of torch have. They do not influence the learning rate.
_VERSION_DEPENDENT = {"verbose", "_is_initial"}


def find_differences(part: Any, state: Any, name: str) -> list[str]:
    """List what keeps a state from being loaded into a part; empty if it fits, or if only the part itself can tell.

    Args:
        part: A module, optimizer, scheduler, gradient scaler, generator, dict, or anything else.
        state: Its saved state, under the names that the part uses; see
            `slipstream.checkpoint.resume.wrappers.unwrap_names`.
        name: Name of the part, for the messages.
    """
    if isinstance(part, torch.Generator | np.random.Generator):
        return compare_generator(part, state, name)
    if not isinstance(state, Mapping):
        # A part with its own loading code may use any type.
        if judges_for_itself(part):
            return []
        return [f"{name} is a {type(state).__qualname__}, expected a state dict"]
    if isinstance(part, dict):
        return _compare_parameters(part, state, name)
    if not has_torch_loading(part):
        return []
    if isinstance(part, torch.nn.Module):
        mine = part.state_dict()
        if any(map(_may_rename, part.modules())):
            # Torch compares the names itself, after they have been changed.
            state = {key: state[key] for key in mine if key in state}
            mine = {key: mine[key] for key in state}
        return compare_states(mine, state, name)
    if isinstance(part, torch.optim.Optimizer):
        return _compare_optimizer(part, state, name)
    return _compare_settings(part.state_dict(), state, name)


def compare_states(mine: Mapping[str, Any], theirs: Any, name: str) -> list[str]:
    """List missing, unexpected and differing tensors between two state dicts.

    A tensor differs if its shape, layout or kind does, or if its values would be rounded: float64 does not fit float32,
    float16 does.

    Args:
        mine: State dict of the module to load into.
        theirs: The saved state dict.
        name: What comes before each key in the messages.
    """
    if not isinstance(theirs, Mapping):
        return [f"{name} is a {type(theirs).__qualname__}, expected a state dict"]
    problems = _compare_names(mine, theirs, name)
    for key, tensor in mine.items():
        # Anything else is the extra state of a module, which only the module understands.
        if key in theirs and isinstance(tensor, torch.Tensor):
            problems += _compare_tensors(tensor, theirs[key], f"{name}/{key}")
    return problems


def judges_for_itself(part: Any) -> bool:
    """Return whether loading a part runs code that may fail although `find_differences` finds nothing."""
    if isinstance(part, dict | torch.Generator | np.random.Generator):
        return False
    if not has_torch_loading(part):
        return True
    if isinstance(part, torch.nn.Module):
        if not all(map(_loads_plainly, part.modules())):
            return True
        return not all(map(_is_plain_tensor, part.state_dict().values()))
    # Schedulers that combine others call their loading code.
    return _has_hooks(part) or any(map(judges_for_itself, vars(part).get("_schedulers", ())))


def has_torch_loading(part: Any) -> bool:
    """Return whether the ``load_state_dict`` of a part is torch's own, so that it is known what it accepts."""
    known = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
    if not isinstance(part, known) or "load_state_dict" in vars(part):
        return False
    functions: list[Any] = [type(part).load_state_dict]
    if isinstance(part, torch.optim.Optimizer):
        functions.append(type(part).__setstate__)
    return all(function.__module__.startswith(("torch.nn.", "torch.optim.", "torch.amp.")) for function in functions)


def _has_hooks(part: Any, names: Iterable[str] = (*_HOOKS, *_OPTIMIZER_HOOKS)) -> bool:
    """Return whether code of others runs while a part saves or loads. A guard only waits, and changes nothing."""
    for name in names:
        for hook in vars(part).get(name, {}).values():
            # Torch wraps some hooks into an object.
            if not isinstance(getattr(hook, "hook", hook), GuardHook):
                return True
    return False


def _may_rename(module: torch.nn.Module) -> bool:
    """Return whether a module may take a state under other names, such as those that an older version of it had."""
    return _has_hooks(module, ["_load_state_dict_pre_hooks"]) or not _is_of_torch(module, "_load_from_state_dict")


def _loads_plainly(module: torch.nn.Module) -> bool:
    """Return whether torch alone saves and loads a module, its children left aside."""
    if _has_hooks(module) or type(module).set_extra_state is not torch.nn.Module.set_extra_state:
        return False
    return all(_is_of_torch(module, name) for name in _METHODS)


def _is_of_torch(module: torch.nn.Module, method: str) -> bool:
    return bool(getattr(type(module), method).__module__.startswith("torch.nn.modules."))


def _is_plain_tensor(tensor: Any) -> bool:
    """Return whether copying into a tensor cannot fail once shape and dtype fit."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_inference():
        return False
    # An expanded tensor has several elements in one place, and torch refuses to write to it.
    return all(stride > 0 or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _compare_names(mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> list[str]:
    problems = [f"missing {name}/{key}" for key in _without(mine, theirs)]
    problems += [f"unexpected {name}/{key}" for key in _without(theirs, mine)]
    return problems


def _without(keys: Iterable[Any], others: Container[Any]) -> list[Any]:
    """Return the keys that are not among others, in their order."""
    return [key for key in keys if key not in others]


def _compare_tensors(mine: torch.Tensor, theirs: Any, name: str) -> list[str]:
    if not isinstance(theirs, torch.Tensor):
        return [f"{name} is a tensor, in the checkpoint a {type(theirs).__qualname__}"]
    # A lazy module takes any shape, but a saved tensor without a shape has no values.
    if is_lazy(mine):
        return _compare_dtypes(mine.dtype, theirs.dtype, name)
    if is_lazy(theirs) or theirs.is_meta:
        return [f"{name} has no values in the checkpoint"]
    if mine.is_meta:
        return [f"{name} is on the meta device and has no memory, call to_empty() on the module first"]
    if mine.layout != theirs.layout:
        return [f"{name} has layout {mine.layout}, the checkpoint {theirs.layout}"]
    if mine.shape != theirs.shape:
        return [f"{name} has shape {list(mine.shape)}, the checkpoint {list(theirs.shape)}"]
    return _compare_dtypes(mine.dtype, theirs.dtype, name)


def _compare_dtypes(mine: torch.dtype, theirs: torch.dtype, name: str) -> list[str]:
    """List a dtype that cannot hold all values of the saved one."""
    if mine == theirs:
        return []
    is_same_kind = mine.is_floating_point == theirs.is_floating_point and mine.is_complex == theirs.is_complex
    if is_same_kind and torch.bool not in (mine, theirs):
        try:
            if torch.promote_types(mine, theirs) == mine:
                return []
        except RuntimeError:
            # Torch has no rule for 8-bit floats and some unsigned integers: only the same dtype is safe.
            pass
    return [f"{name} has dtype {_short(mine)}, the checkpoint {_short(theirs)}"]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare_parameters(part: Mapping[Any, Any], state: Mapping[Any, Any], name: str) -> list[str]:
    """List the parameters in a dict that the saved ones cannot be copied into; other values may be anything."""
    problems: list[str] = []
    for key, value in part.items():
        if isinstance(value, torch.nn.Parameter) and key not in state:
            # Without it, the dict would lose a parameter that an optimizer still updates.
            problems.append(f"missing {name}/{key}")
        elif isinstance(value, torch.nn.Parameter):
            problems += _compare_tensors(value, state[key], f"{name}/{key}")
        elif isinstance(value, dict) and isinstance(state.get(key), Mapping):
            problems += _compare_parameters(value, state[key], f"{name}/{key}")
    return problems


def _compare_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], name: str) -> list[str]:
    groups = state.get("param_groups")
    entries = state.get("state")
    if not isinstance(groups, Sequence) or not isinstance(entries, Mapping) or not all(map(_is_group, groups)):
        return [f"{name} is not the state of an optimizer, expected the entries state and param_groups"]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups]
    if mine != theirs:
        return [f"{name} has parameter groups of {mine}, the checkpoint of {theirs}"]
    problems = _compare_options(optimizer, groups, name)
    known: set[Any] = set()
    for here, saved in zip(optimizer.param_groups, groups, strict=True):
        known.update(saved["params"])
        problems += _compare_entries(optimizer, dict(zip(saved["params"], here["params"], strict=True)), entries, name)
    for key in _without(entries, known):
        # Text keys are for state that belongs to no parameter, which some optimizers have.
        if not isinstance(key, str):
            problems.append(f"unexpected {name}/{key}")
    return problems


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), Sequence)


def _compare_options(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """List options that the saved groups lack, and parameters that are in another order."""
    # Torch adds options that the release which saved the checkpoint did not have. Let it do so on an empty optimizer.
    scratch = type(optimizer).__new__(type(optimizer))
    filled = [{**group, "params": []} for group in groups]
    scratch.__setstate__({"defaults": {}, "state": {}, "param_groups": filled})
    problems = []
    for number, (here, saved) in enumerate(zip(optimizer.param_groups, filled, strict=True)):
        # Torch keeps the names that an optimizer has if the checkpoint has none.
        absent = _without(here, {*saved, "param_names"})
        problems += [f"missing {name}/param_groups/{number}/{option}" for option in absent]
        mine = here.get("param_names")
        theirs = saved.get("param_names")
        if mine and theirs and list(plain_names(mine)) != list(plain_names(theirs)):
            problems.append(f"{name}/param_groups/{number} is of the parameters {mine}, in the checkpoint of {theirs}")
    return problems


def _compare_entries(
    optimizer: torch.optim.Optimizer, parameters: Mapping[Any, torch.Tensor], entries: Mapping[Any, Any], name: str
) -> list[str]:
    """Compare the saved moments of one group with its parameters.

    A parameter without an entry is no difference: it had no gradient when the checkpoint was saved.
    """
    problems = []
    # The optimizers of other authors decide themselves which state they keep for a parameter, and in which shape.
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
    is_known = is_of_torch and not isinstance(optimizer, _FREE_SHAPES)
    # Adafactor keeps other moments for matrices than for vectors: the same is expected only of the same number of axes.
    moments: dict[int, dict[str, None]] = {}
    for key, parameter in parameters.items():
        entry = entries.get(key, {})
        if not isinstance(entry, Mapping):
            problems.append(f"{name}/{key} is a {type(entry).__qualname__}, expected a dict")
            continue
        moments.setdefault(parameter.ndim, {}).update(dict.fromkeys(entry))
        for moment, value in entry.items():
            if isinstance(value, torch.Tensor):
                problems += _compare_moment(parameter, value, moment, f"{name}/{key}/{moment}", is_known=is_known)
    if problems or not is_of_torch:
        return problems
    for key, parameter in parameters.items():
        if entries.get(key):
            absent = _without(moments[parameter.ndim], entries[key])
            problems += [f"missing {name}/{key}/{moment}" for moment in absent]
    return problems


def _compare_moment(
    parameter: torch.Tensor, value: torch.Tensor, moment: str, name: str, *, is_known: bool
) -> list[str]:
    if moment in _SCALAR_MOMENTS:
        if value.ndim and is_known:
            return [f"{name} is one number, the checkpoint has shape {list(value.shape)}"]
        return []
    if is_known and not is_lazy(parameter) and value.shape != parameter.shape:
        return [f"{name} has shape {list(parameter.shape)}, the checkpoint {list(value.shape)}"]
    # Torch converts moments to the dtype of their parameter, unless that is an integer.
    if parameter.is_floating_point():
        return _compare_dtypes(parameter.dtype, value.dtype, name)
    return []


def _compare_settings(mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> list[str]:
    """Compare states that are plain values: of a learning rate scheduler or a gradient scaler."""
    comparable = dict.fromkeys(_without(mine, _VERSION_DEPENDENT))
    problems = _compare_names(comparable, dict.fromkeys(_without(theirs, _VERSION_DEPENDENT)), name)
    for key, value in mine.items():
        if key in theirs:
            problems += _compare_values(value, theirs[key], f"{name}/{key}")
    return problems


def _compare_values(mine: Any, theirs: Any, name: str) -> list[str]:
    if isinstance(mine, list | tuple):
        if not isinstance(theirs, list | tuple):
            return [f"{name} is a list, in the checkpoint a {type(theirs).__qualname__}"]
        # One value per parameter group, or per scheduler of a combined one.
        if len(mine) != len(theirs):
            return [f"{name} has {len(mine)} values, in the checkpoint {len(theirs)}"]
        problems: list[str] = []
        for number, (here, saved) in enumerate(zip(mine, theirs, strict=True)):
            problems += _compare_values(here, saved, f"{name}/{number}")
        return problems
    # The states of the schedulers in a combined one. Milestones are a mapping too, but may change.
    if type(mine) is dict and isinstance(theirs, Mapping):
        return _compare_settings(mine, theirs, name)
    is_number = isinstance(theirs, int | float) or (isinstance(theirs, torch.Tensor) and theirs.numel() == 1)
    if isinstance(mine, int | float) and not is_number:
        return [f"{name} is a number, in the checkpoint a {type(theirs).__qualname__}"]
    return []
