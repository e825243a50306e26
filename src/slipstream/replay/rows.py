"""`PackedRows`: a TensorDict whose tensors are decoded when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict


class _LateDict(dict[str, Any]):
    """A dict of functions that reads like one of what they return."""

    def _now(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if isinstance(value, _Late):
            value = value.make()
            dict.__setitem__(self, key, value)
        return value

    def __getitem__(self, key: str) -> Any:
        return self._now(key)

    def __iter__(self) -> Iterator[str]:  # without it, copying would take the functions along
        return dict.__iter__(self)

    def get(self, key: str, default: Any = None) -> Any:
        return self._now(key) if key in self else default

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self._now(key)
        return dict.pop(self, key, *default)

    def values(self) -> Any:
        return [self._now(key) for key in self]

    def items(self) -> Any:
        return [(key, self._now(key)) for key in self]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)


class _Late:
    """What will make a tensor."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self.make = make


class PackedRows(TensorDict):  # type: ignore[misc, unused-ignore]
    """Rows of a packed storage, whose tensors are decoded when they are asked for, each once.

    An ordinary TensorDict otherwise, in memory of its own. `set_`, `set_at_` and `update_`, which TorchRL's buffers use
    to change what they hold, write through to the storage.
    """

    _write: Callable[[Any, TensorDict], None] | None = None

    def set_at_(self, key: Any, value: Any, index: Any, *, non_blocking: bool = False) -> Any:
        """Change some rows of one tensor, here and in the storage."""
        result = super().set_at_(key, value, index, non_blocking=non_blocking)
        if self._write is not None:
            self._write(index, self[index])
        return result

    def set_(self, key: Any, item: Any, *, non_blocking: bool = False) -> Any:
        """Change one tensor, here and in the storage."""
        result = super().set_(key, item, non_blocking=non_blocking)
        if self._write is not None:
            self._write(slice(None), self)
        return result

    def update_(self, *args: Any, **kwargs: Any) -> Any:
        """Change several tensors, here and in the storage."""
        write, self._write = self._write, None
        try:
            result = super().update_(*args, **kwargs)
        finally:
            self._write = write
        if write is not None:
            write(slice(None), self)
        return result


def late_tensordict(
    makers: Mapping[tuple[str, ...], Callable[[], torch.Tensor]],
    batch_sizes: dict[tuple[str, ...], torch.Size],
    device: Any,
) -> PackedRows:
    """Build nested rows whose leaves are made by functions.

    Args:
        makers: By nested key.
        batch_sizes: Of the root, under ``()``, and of every node by its nested key.
        device: Where the tensors will be.
    """
    root = PackedRows({}, batch_size=batch_sizes[()], device=device)
    root._tensordict = _LateDict()
    nodes: dict[tuple[str, ...], Any] = {(): root}
    for key in sorted((key for key in batch_sizes if key), key=len):
        node = TensorDict({}, batch_size=batch_sizes[key], device=device)
        node._tensordict = _LateDict()
        nodes[key] = node
        dict.__setitem__(nodes[key[:-1]]._tensordict, key[-1], node)
    for key, make in makers.items():
        dict.__setitem__(nodes[key[:-1]]._tensordict, key[-1], _Late(make))
    return root
