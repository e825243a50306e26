"""What is on the stack of the pickle machine in place of classes and functions, and never in its result.

These objects have slots instead of attributes, and no method that a pickle could reach.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from slipstream.checkpoint.allowance import Allowance


class RefusedNameError(pickle.UnpicklingError):
    """A pickle needs a class or function that is not in the closed table."""


class Constructor:
    """What is on the stack in place of a class or function: it builds a value from arguments.

    Args:
        build: Takes the `Allowance` and the arguments, which it must check. Returns a value, or an `Unfinished` one.
    """

    __slots__ = ("build",)

    def __init__(self, build: Callable[..., Any]) -> None:
        self.build = build


class Symbol:
    """What is on the stack in place of a class that is only an argument, such as ``numpy.ndarray``."""

    __slots__ = ("meaning",)

    def __init__(self, meaning: Any) -> None:
        self.meaning = meaning


IGNORED = Symbol(None)
"""In place of a class whose objects are read as None: they are not part of a value."""


class Storage:
    """Memory from the file, and the dtype that its elements have."""

    __slots__ = ("dtype", "memory")

    def __init__(self, memory: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.memory = memory
        self.dtype = dtype


class Unfinished:
    """A value that ``BUILD`` completes.

    Args:
        finish: Takes the `Allowance` and the state, which it must check. Returns the value.
    """

    __slots__ = ("finish", "places")

    def __init__(self, finish: Callable[[Allowance, Any], Any]) -> None:
        self.finish = finish
        # Where it is in the memo, so that the finished value can replace it there.
        self.places: list[int] = []


class Arguments(tuple[Any, ...]):
    """A tuple that contains inert objects. It can be an argument, but not a value."""

    __slots__ = ()


INERT: frozenset[type] = frozenset({Constructor, Symbol, Storage, Unfinished, Arguments})
"""The types of objects that must not become part of the result."""


def require_values(items: list[Any]) -> None:
    """Raise if any of these is inert: a class, a bare storage, or an array that was not finished."""
    if INERT.isdisjoint(map(type, items)):
        return
    for item in items:
        if type(item) is Storage:
            raise RefusedNameError("torch.UntypedStorage")
    raise RefusedNameError("a class or function")
