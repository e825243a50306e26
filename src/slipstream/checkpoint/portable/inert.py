"""What the pickle machine counts, and what is on its stack in place of classes and functions.

The inert objects have slots instead of attributes, and no method that a pickle could reach. They never become part of
the result.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from slipstream.schema.nodes import MAX_DEPTH

BASE_ALLOWANCE_BYTES = 7 << 28
"""Memory for Python objects that any file may take. An array of dates takes 3,800 bytes of it, a number of NumPy 850, a
parameter 1,700 and a Python number 50. So it is enough for 262,144 of the first and 786,432 of the second, which is the
most that a save accepts."""
CONTENT_FACTOR = 3
"""Memory for text, bytes and arrays, as a multiple of the size of the file: each is decoded, converted and copied."""

# What a visit of a part of a key counts as. It takes no memory, but time.
_KEY_BYTES = 64
_SEQUENCES = frozenset({tuple, frozenset, torch.Size})
# Types that can be keys by themselves. Tensors are not among them: their equality is not a truth value.
_KEY_TYPES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.layout}
)


class Allowance:
    """Counts the memory that the objects of a pickle take.

    Args:
        nbytes: How much they may take. Tensors are not counted.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._allowance = nbytes

    def charge(self, nbytes: int) -> None:
        """Count memory that is about to be taken. Raises `pickle.UnpicklingError` if it exceeds the allowance."""
        self._left -= nbytes
        if self._left < 0:
            raise pickle.UnpicklingError(f"its objects take more than {self._allowance} bytes, which is the limit")

    def check_key(self, key: Any, depth: int = 0) -> None:
        """Raise unless a value may be a key of a dict or a member of a set.

        The hash of a tuple visits every member, however deep, each time it is computed: limit depth and number.
        """
        kind = type(key)
        # Python computes the hash of an integer again every time, and compares all of a text with one that is equal.
        if kind is int:
            self.charge(key.bit_length() // 8)
        elif isinstance(key, (str, bytes)):
            self.charge(len(key))
        elif isinstance(key, PurePath):
            self.charge(len(str(key)))
            return
        elif kind is range:
            self.check_key((key.start, key.stop, key.step), depth)
        if kind in _KEY_TYPES or isinstance(key, np.generic):
            return
        if kind not in _SEQUENCES:
            raise pickle.UnpicklingError(f"a {kind.__qualname__} is used as a key or in a set")
        if depth > MAX_DEPTH:
            raise pickle.UnpicklingError(f"a key is nested more than {MAX_DEPTH} levels deep")
        self.charge(_KEY_BYTES * (1 + len(key)))
        for part in key:
            self.check_key(part, depth + 1)


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
