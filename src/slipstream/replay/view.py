"""`PackedRows`: a TensorDict of packed steps. Tensors are decoded when they are asked for; writing reaches the storage.

tensordict's operations end in a few methods: ``_set_str`` for a whole tensor and ``_set_at_str`` for a part of one.
They are overridden here, so that every operation in place writes through. A tensor that was taken out of a view is an
ordinary one: changing it in place changes neither the view's storage nor is it noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from slipstream.errors import ReplayError
from slipstream.replay.batch import Layout
from slipstream.replay.indexing import is_view, plain_index
from slipstream.replay.roles import Key

Slots = NDArray[np.int64]


class Source(Protocol):
    """What a view needs of its storage."""

    device: Any

    def write_leaves(self, slots: Slots, values: Mapping[Key, Any]) -> None:
        """Change some leaves of the steps in slots."""

    def make_leaf(self, slots: Slots, key: Key) -> Any:
        """Decode one tensor of the steps in slots, or return their non-tensor data."""

    def view(self, slots: Slots, *, is_linked: bool) -> Any:
        """Return a view of the steps in slots."""


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

    def __iter__(self) -> Iterator[str]:
        # Without this method, copying a dict would copy the functions.
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


class PackedRows(TensorDict):  # type: ignore[misc, unused-ignore]
    """Steps of a packed storage, decoded when they are asked for, each tensor once.

    An ordinary TensorDict otherwise. If it was made with a number or a slice, operations in place and assignments of
    steps write to the storage, as they do with a ``LazyTensorStorage``. ``set`` replaces a tensor here and not in the
    storage, and so does ``view[key] = tensor`` unless the view is of all steps: transforms use both.
    """

    _link: Link | None = None
    _above: Key = ()

    def _set_str(self, key: Any, value: Any, *, inplace: Any, validated: bool, **options: Any) -> Any:
        link = self._link
        if link is None or inplace is False or key not in self._tensordict:
            return super()._set_str(key, value, inplace=inplace, validated=validated, **options)
        if not validated:
            value = self._validate_value(value, check_shape=True, non_blocking=False)
        inner = dict.__getitem__(self._tensordict, key)
        if _is_node(inner):
            inner.update_(value)
            return self
        link.write((*self._above, key), link.slots, value)
        self._refresh(key, link)
        return self

    def _set_at_str(self, key: Any, value: Any, idx: Any, *, validated: bool, non_blocking: bool) -> Any:
        link = self._link
        if link is None or key not in self._tensordict:
            return super()._set_at_str(key, value, idx, validated=validated, non_blocking=non_blocking)
        inner = dict.__getitem__(self._tensordict, key)
        if _is_node(inner):
            with link.together():
                inner[idx] = value
            return self
        slots = _slots_at(link.slots, idx)
        path = (*self._above, key)
        if slots is not None:
            link.write(path, slots, value)
        else:
            # The index goes beyond the axes of steps: change a copy, and write all of it.
            whole = link.source.make_leaf(link.slots, path)
            whole[idx] = value
            link.write(path, link.slots, whole)
        self._refresh(key, link)
        return self

    def _refresh(self, key: str, link: Link) -> None:
        """Decode a leaf again when it is asked for the next time."""
        path = (*self._above, key)

        def make() -> Any:
            return link.source.make_leaf(link.slots, path)

        dict.__setitem__(self._tensordict, key, _Late(make))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Change a tensor, or some steps, here and in the storage."""
        link = self._link
        if link is None:
            super().__setitem__(index, value)
            return
        key = _as_key(index)
        if key is None:
            with link.together():
                self._set_steps(index, value)
        elif not link.is_whole:
            super().__setitem__(index, value)
        elif key in self.keys(include_nested=True):
            self._set_tuple(key, value, inplace=True, validated=False, non_blocking=False)
        elif _is_node(value) or isinstance(value, dict):
            raise ReplayError(f"{'/'.join(key)!r} is not in the storage; add its tensors one by one")
        else:
            super().__setitem__(index, value)
            link.write((*self._above, *key), link.slots, value)

    def _set_steps(self, index: Any, value: Any) -> None:
        """Change all leaves of some steps, and add those that are new."""
        if not isinstance(value, (TensorDictBase, dict)) and not is_tensor_collection(value):
            super().__setitem__(index, value)
            return
        for name, item in value.items():
            if name not in self._tensordict:
                raise ReplayError(f"{name!r} is not in the storage; write it with storage.write(key, value, index)")
            self._set_at_str(name, item, index, validated=True, non_blocking=False)

    def __getitem__(self, index: Any) -> Any:
        """Return a tensor, or some steps: a view of them for numbers and slices."""
        link = self._link
        if link is None or self._above or _as_key(index) is not None:
            return super().__getitem__(index)
        slots = _slots_at(link.slots, index)
        if slots is None:
            return super().__getitem__(index)
        return link.source.view(slots, is_linked=is_view(index))

    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None, **options: Any) -> Any:
        """Change several tensors, here and in the storage."""
        link = self._link
        if link is None:
            return super().update_(input_dict_or_td, clone, keys_to_update=keys_to_update, **options)
        wanted = None
        if keys_to_update is not None:
            wanted = {_as_key(key) for key in keys_to_update}
        with link.together():
            for name, value in input_dict_or_td.items():
                key = _as_key(name) or ()
                if wanted is None or key in wanted:
                    self._set_tuple(key, value, inplace=True, validated=False, non_blocking=False)
        return self

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Exchange two axes; a view of the storage stays one."""
        link = self._link
        is_of_steps = (
            link is not None and not self._above and max(dim0, dim1) < link.slots.ndim and min(dim0, dim1) >= 0
        )
        if link is None or not is_of_steps:
            return super().transpose(dim0, dim1)
        return link.source.view(link.slots.swapaxes(dim0, dim1), is_linked=True)

    def zero_(self) -> Any:
        """Set all tensors to zero, here and in the storage."""
        if self._link is None:
            return super().zero_()
        with self._link.together():
            for key in list(self.keys(include_nested=True, leaves_only=True)):
                self.fill_(key, 0)
        return self

    def masked_fill_(self, mask: torch.Tensor, value: float | bool) -> Any:
        """Fill the steps where `mask` is true, here and in the storage."""
        if self._link is None:
            return super().masked_fill_(mask, value)
        with self._link.together():
            for key in list(self.keys(include_nested=True, leaves_only=True)):
                leaf = self.get(key)
                wide = mask.reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim)).expand_as(leaf)
                self.set_(key, leaf.masked_fill(wide, value))
        return self


def make_view(
    source: Source,
    slots: Slots,
    makers: Mapping[Key, Callable[[], Any]],
    layout: Layout,
    link: Link | None,
) -> Any:
    """Build nested steps whose leaves are made by functions.

    Args:
        source: The storage.
        slots: The slots of the steps.
        makers: Functions by key.
        layout: The structure of a batch.
        link: How changes reach the storage, or None if they do not.
    """
    batch = torch.Size(slots.shape)
    root = _node((), batch + torch.Size(layout.extra), source.device, link)
    nodes: dict[Key, Any] = {(): root}
    for key, size in sorted(layout.nodes(batch).items(), key=_depth):
        nodes[key] = _node(key, size, source.device, link)
        member = nodes[key]
        if key in layout.kinds:
            member = layout.kinds[key].from_tensordict(member)
        dict.__setitem__(nodes[key[:-1]]._tensordict, key[-1], member)
    for key, make in makers.items():
        dict.__setitem__(nodes[key[:-1]]._tensordict, key[-1], _Late(make))
    return layout.wrap(root)


def _depth(item: tuple[Key, Any]) -> int:
    return len(item[0])


def _node(key: Key, batch_size: torch.Size, device: Any, link: Link | None) -> PackedRows:
    node = PackedRows({}, batch_size=batch_size, device=device)
    node._tensordict = _LateDict()
    node.__dict__["_link"] = link
    node.__dict__["_above"] = key
    return node


def _is_node(value: Any) -> bool:
    """Return whether a value is a nested TensorDict; to tensordict, non-tensor data is one, too."""
    return is_tensor_collection(value) and not is_non_tensor(value)


def _as_key(index: Any) -> Key | None:
    """Return an index as a nested key, or None if it is an index of steps."""
    if isinstance(index, str):
        return (index,)
    if isinstance(index, tuple) and index and all(isinstance(part, str) for part in index):
        return index
    return None


def _slots_at(slots: Slots, index: Any) -> Slots | None:
    """Return the slots that an index of steps means, or None if it is not one of them alone."""
    parts = index if isinstance(index, tuple) else (index,)
    is_mask = any(getattr(part, "dtype", None) in (torch.bool, np.bool_) for part in parts)
    if len(parts) > slots.ndim or (is_mask and len(parts) > 1) or any(part is None or part is True for part in parts):
        return None
    try:
        return np.asarray(slots[plain_index(index)])
    except IndexError:
        return None
