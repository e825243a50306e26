"""The methods of TensorDict that a lazy TensorDict has to call differently: views, and operations in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# Methods whose results are views, or that only move members to other keys.
_VIEWS = (
    "chunk",
    "contiguous",
    "detach",
    "exclude",
    "expand",
    "expand_as",
    "flatten",
    "flatten_keys",
    "permute",
    "rename_key_",
    "reshape",
    "select",
    "split",
    "split_keys",
    "squeeze",
    "tensor_split",
    "transpose",
    "unbind",
    "unflatten",
    "unflatten_keys",
    "unsqueeze",
    "view",
)
# Methods that list all tensors for an operation on this TensorDict. If it is in place, everything is unpacked already.
_LISTS = ("_items_list", "_values_list")
# Methods with which an outer TensorDict lists the tensors of those that it contains.
_LISTS_FOR_OUTER = ("items", "values")
# Methods that change in which memory tensors are, and not their values.
_MEMORY = (
    "detach_",
    "memmap_",
    "memmap_refresh_",
    "pin_memory_",
    "requires_grad_",
    "share_memory_",
)
# Methods that end with an underscore, but do not write to tensors, or call other methods that do.
_NOT_IN_PLACE = (
    "_memmap_",
    "apply_",
    "auto_batch_size_",
    "auto_device_",
    "clear_device_",
    "clear_refs_for_compile_",
    "copy_",
    "copy_at_",
    "del_",
    "fill_",
    "filter_empty_",
    "lock_",
    "rename_",
    "rename_key_",
    "set_",
    "set_at_",
    "unlock_",
    "update_",
    "update_at_",
)


def replace_methods(lazy: type, plain: type) -> None:
    """Replace methods that the class of lazy TensorDicts inherits from TensorDict.

    In-place methods are found by their names, so that those of later versions of tensordict are included: a write to
    decoded tensors would be lost.

    Args:
        lazy: The class, whose methods ``call_...`` take a method of TensorDict and its arguments.
        plain: TensorDict.
    """
    for name in dir(plain):
        method = getattr(plain, name)
        is_in_place = name.endswith("_") and not name.endswith("__")
        if name in _VIEWS:
            setattr(lazy, name, _through("call_on_placeholders", method))
        elif name in _LISTS:
            setattr(lazy, name, _through("call_decoded", method))
        elif name in _LISTS_FOR_OUTER:
            setattr(lazy, name, _outer_list_method(method))
        elif name in _MEMORY:
            setattr(lazy, name, _through("call_unpacked", method))
        elif is_in_place and name not in _NOT_IN_PLACE:
            setattr(lazy, name, _through("call_in_place", method))


def _through(caller: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, caller)(method, args, kwargs)

    return call


def _outer_list_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def on_leaves(
        self: Any, include_nested: bool = False, leaves_only: bool = False, is_leaf: Any = None, **kwargs: Any
    ) -> Any:
        if _may_write_to_leaves(is_leaf):
            self.expose(method.__name__)
        return method(self, include_nested, leaves_only, is_leaf, **kwargs)

    return on_leaves


def _may_write_to_leaves(is_leaf: Any) -> bool:
    """Return whether an outer TensorDict lists tensors for arithmetic, which may be in place.

    An outer TensorDict or a lazy stack passes this special `is_leaf` to those that it contains. Reading and writing
    cannot be distinguished there.
    """
    return type(is_leaf).__name__.startswith("_NestedTensorsAsLists")


def may_write(function: Any) -> bool:
    """Return whether a function for `apply` was made by an in-place method, such as the ``zero_`` of a lazy stack."""
    return "_.<locals>." in getattr(function, "__qualname__", "")
