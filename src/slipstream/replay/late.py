"""What views of a packed storage are made of: tensors that are decoded late, and where changes of them go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.replay.roles import Key

Slots = NDArray[np.int64]


class Source(Protocol):
    """What a view needs of its storage."""

    device: Any

    def write_leaves(self, slots: Slots, values: Mapping[Key, Any]) -> None:
        """Change some leaves of the steps in slots."""

    def make_leaf(self, slots: Slots, key: Key) -> Any:
        """Decode one tensor of the steps in slots, or return their non-tensor data."""

    def makers(self, slots: Slots) -> Mapping[Key, Callable[[], Any]]:
        """Return functions that decode the tensors and non-tensor data of the steps in slots, by key."""


class LateDict(dict[str, Any]):
    """A dict of functions that reads like one of what they return."""

    def _now(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if isinstance(value, Late):
            value = value.make()
            dict.__setitem__(self, key, value)
        return value

    def __getitem__(self, key: str) -> Any:
        return self._now(key)

    def __iter__(self) -> Iterator[str]:
        # Without this method, copying a dict would copy the functions.
        return dict.__iter__(self)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default`."""
        return self._now(key) if key in self else default

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a value and return it."""
        if key in self:
            self._now(key)
        return dict.pop(self, key, *default)

    def values(self) -> Any:
        """Return all values."""
        return [self._now(key) for key in self]

    def items(self) -> Any:
        """Return all keys and values."""
        return [(key, self._now(key)) for key in self]

    def copy(self) -> dict[str, Any]:
        """Return an ordinary dict of the values."""
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)


class Late:
    """A function that will make a tensor or non-tensor data."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


class Link:
    """Where a view comes from, and what it has written but not passed on yet.

    Args:
        source: The storage.
        slots: The slots of the steps.
        is_whole: Whether these are all steps of the storage.
    """

    def __init__(self, source: Source, slots: Slots, *, is_whole: bool) -> None:
        self.source = source
        self.slots = slots
        self.is_whole = is_whole
        self._pending: list[tuple[Slots, Key, Any]] | None = None

    def write(self, key: Key, slots: Slots, value: Any) -> None:
        """Change a leaf in the storage; inside of `together`, at its end."""
        if self._pending is None:
            self.source.write_leaves(slots, {key: value})
        else:
            self._pending.append((slots, key, value))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Pass on all writes of a block at once: leaves that are packed together are decoded once."""
        if self._pending is not None:
            yield
            return
        self._pending = []
        try:
            yield
            pending = self._pending
        finally:
            self._pending = None
        # Leaves of the same steps together; those are next to each other.
        while pending:
            slots = pending[0][0]
            values: dict[Key, Any] = {}
            while pending and np.array_equal(pending[0][0], slots):
                _, key, value = pending.pop(0)
                values[key] = value
            self.source.write_leaves(slots, values)
