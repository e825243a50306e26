"""`PackedRows`: steps of a packed storage as a TensorDict. Tensors are decoded once; writing reaches the storage.

A tensor that was taken out of a view is an ordinary one: changing it in place does not change the storage.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDict, is_non_tensor, is_tensor_collection

from slipstream.errors import ReplayError
from slipstream.lazy.tensor import LazyTensor, Source, elements_of
from slipstream.lazy.tensordict import LazyTensorDict
from slipstream.lazy.views import as_key, lazy_members, new_unchecked, nodes
from slipstream.replay.indexing import plain_index
from slipstream.replay.objects import RAGGED, as_non_tensor, cells_of
from slipstream.replay.roles import Key
from slipstream.replay.schema import Leaf

if TYPE_CHECKING:
    from slipstream.replay.storage import PackedEpisodeStorage

Slots = NDArray[np.int64]


class Writer:
    """Passes the writes of a view, and of views of it, on to the storage.

    Attributes:
        counts: How often each key was written to: what was decoded before is outdated.
    """

    def __init__(self, storage: PackedEpisodeStorage) -> None:
        self.counts: dict[Key, int] = {}
        self._storage = storage
        self._pending: list[tuple[Slots, Key, Any]] = []
        self._is_open = False

    def write(self, slots: Slots, key: Key, value: Any) -> None:
        """Change a leaf in the storage; inside of `together`, at its end."""
        with self.together():
            self._pending.append((slots, key, value))

    def outdate(self, key: Key) -> None:
        """Note that what was decoded of a key is outdated."""
        self.counts[key] = self.counts.get(key, 0) + 1

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Pass on all writes of a block at once: leaves that are packed together are decoded once.

        Nobody else writes to the storage meanwhile, so that what a block reads may be changed and written back.
        """
        with self._storage.steps.writing:
            if self._is_open:
                yield
                return
            self._is_open = True
            try:
                yield
                pending = self._pending
            finally:
                self._pending = []
                self._is_open = False
            # Leaves of the same steps together; those are next to each other.
            while pending:
                slots = pending[0][0]
                values: dict[Key, Any] = {}
                while pending and (pending[0][0] is slots or np.array_equal(pending[0][0], slots)):
                    _, key, value = pending.pop(0)
                    values[key] = value
                self._storage.write_leaves(slots, values)
                for key in values:
                    self.outdate(key)


@dataclass(eq=False)
class StoredTensor(Source):
    """One tensor, or the non-tensor data, of some steps of a storage: decoded once, by the first read. Thread-safe.

    Args:
        storage: The storage.
        writer: How writes reach the storage; None if this is a copy that is written to instead.
        slots: The slots of the steps.
        key: The key in the storage.
        leaf: What the tensor is like; None for non-tensor data.
        row_shape: The shape of a step; of non-tensor data, the batch axes after those of steps.
        make: Decodes the steps that were located; None for those that are in the slots when they are read.
    """

    storage: PackedEpisodeStorage
    writer: Writer | None
    slots: Slots
    key: Key
    leaf: Leaf | None
    row_shape: tuple[int, ...]
    make: Callable[[], Any] | None

    def __post_init__(self) -> None:
        self.shape = self.slots.shape + self.row_shape
        # Non-tensor data has none, but its placeholder needs one.
        self.dtype = torch.uint8
        if self.leaf is not None:
            self.dtype = self.leaf.torch_dtype
        self.group = id(self.slots)
        # What was decoded, and after how many writes.
        self._kept: tuple[int, Any] = (self._count_writes(), None)

    def _count_writes(self) -> int:
        if self.writer is None:
            return 0
        return self.writer.counts.get(self.key, 0)

    @property
    def tensor(self) -> Any:
        """All of it, once it was read and unless it was written to since."""
        num_writes, tensor = self._kept
        if num_writes != self._count_writes():
            return None
        return tensor

    def unpack(self) -> Any:
        """Return all of it; keep it until there is a write to the storage through this view or a view of it."""
        # Before the look at what is kept, which replaces it. Nothing is locked: threads may both decode the same.
        make = self.make
        tensor = self.tensor
        if tensor is None:
            num_writes = self._count_writes()
            if make is None or num_writes != self._kept[0]:
                make = functools.partial(self.storage.make_leaf, self.slots, self.key)
            tensor = make()
            self._kept = (num_writes, tensor)
            # It holds on to packed steps, which may have been overwritten.
            self.make = None
        return tensor

    def read(self, view: LazyTensor) -> Any:
        """Return what a view shows of it."""
        whole = self.unpack()
        if view.is_all:
            return whole
        return self.see(whole, view.placeholder)

    def see(self, whole: Any, placeholder: torch.Tensor) -> Any:
        """Return what a placeholder shows of all steps."""
        if self.leaf is not None:
            return super().see(whole, placeholder)
        cells = cells_of(whole.tolist(), self.shape).reshape(-1)
        return as_non_tensor(cells[elements_of(placeholder)], 0)

    def stand_in(self, placeholder: torch.Tensor) -> Any:
        """Return something of the type and shape of what a placeholder shows, without memory."""
        if self.leaf is None:
            return NonTensorData(None, placeholder.shape)
        return placeholder

    def write(self, view: LazyTensor, value: Any, index: Any = ...) -> None:
        """Change what a view shows at an index: in the storage, or here if this is a copy.

        Raises:
            ReplayError: If text or other non-tensor data of a copy is changed in place.
        """
        if self.writer is None:
            if self.leaf is None:
                raise ReplayError(f"{'/'.join(self.key)!r} is no tensor and part of a copy: replace it with `set`")
            super().write(view, value, index)
            return
        steps = view.steps
        if steps is not None:
            slots = _slots_at(steps.of(self.slots), index)
            if slots is not None:
                self.writer.write(slots, self.key, value)
                return
        self._write_elements(view.placeholder, value, index)

    def _write_elements(self, placeholder: torch.Tensor, value: Any, index: Any) -> None:
        """Change some elements of steps: decode these steps, change the elements, and write the steps."""
        if not placeholder.numel() or self.writer is None:
            return
        if self.leaf is None:
            raise ReplayError(f"{'/'.join(self.key)!r} is no tensor: write whole steps of it with storage.write")
        elements = elements_of(placeholder)
        row_size = max(1, math.prod(self.row_shape) * self.dtype.itemsize // placeholder.dtype.itemsize)
        slots, rows = np.unique(self.slots.ravel()[elements // row_size], return_inverse=True)
        with self.writer.together():
            whole = self.storage.make_leaf(slots, self.key)
            flat = whole.reshape(-1).view(placeholder.dtype)
            places = torch.from_numpy(rows.reshape(elements.shape) * row_size + elements % row_size).to(flat.device)
            shown = flat[places]
            shown[index] = value
            flat[places] = shown
            self.writer.write(slots, self.key, whole)


class PackedRows(LazyTensorDict):
    """Steps of a packed storage, decoded when they are asked for, each tensor once.

    If it was made with a number or a slice, operations in place and assignments of steps write to the storage, as they
    do with a ``LazyTensorStorage``, and so they do through views of it. ``set`` replaces a tensor here and not in the
    storage, and so does ``view[key] = tensor`` unless the view is of all steps: transforms use both. Made with other
    indices it is a copy, which writes change and not the storage.
    """

    writer: Writer | None = None
    # The slots of a view of all steps of the storage, and its nested key there.
    whole: tuple[Slots, Key] | None = None

    def _make(self, like: Any, members: dict[str, Any], device: torch.device | None = None) -> PackedRows:
        other = super()._make(like, members, device)
        other.writer = self.writer
        return other

    def read_steps(self, tensors: Sequence[LazyTensor], numbers: torch.Tensor) -> list[Any]:
        """Read some steps of several lazy tensors by their numbers."""
        first = _source(tensors[0])
        found = first.storage.tensors(first.slots.ravel()[numbers.numpy()])
        return [found[_source(tensor).key].unpack() for tensor in tensors]

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a block whose writes are passed on at its end, all at once."""
        if self.writer is None:
            return contextlib.nullcontext()
        return self.writer.together()

    def call_in_place(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of TensorDict that writes to tensors: on a copy, which is then written to the storage."""
        if self.writer is None:
            return super().call_in_place(method, args, kwargs)
        with self.together():
            for tensor in lazy_members(self):
                # What was read before may be outdated, and must not be written back.
                self.writer.outdate(_source(tensor).key)
            copy = self.decode(copy=True)
            method(copy, *args, **kwargs)
            return self.update_(copy)

    def expose(self, name: str) -> None:
        """Prepare for arithmetic of an outer TensorDict that lists the tensors with a method.

        Raises:
            ReplayError: If it is in place: the storage would not see it.
        """
        # Arithmetic that makes new tensors lists items.
        if self.writer is not None and name == "values":
            raise ReplayError(
                "steps of a storage are in another TensorDict, whose arithmetic in place would not reach the storage: "
                "put a clone of them there"
            )
        super().expose(name)

    def call_on_placeholders(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of TensorDict that returns views on placeholders, and return lazy views."""
        view = super().call_on_placeholders(method, args, kwargs)
        # Parts of a split take what they show from here: decoding each of them alone would take much longer.
        if isinstance(view, PackedRows) and view is not self and self.writer is not None:
            _locate(view)
            if self.whole is not None and method is TensorDict.transpose:
                slots, above = self.whole
                _mark_whole(view, slots.swapaxes(*args), above)
        return view

    def __setitem__(self, index: Any, value: Any) -> None:
        """Change a tensor, or some steps, here and in the storage."""
        key = as_key(index)
        if self.writer is None or (key is not None and self.whole is None):
            super().__setitem__(index, value)
        elif key is None or self.whole is None:
            with self.together():
                self._set_steps(index, value)
        elif key in self.keys(include_nested=True):
            self._set_tuple(key, value, inplace=True, validated=False, non_blocking=False)
        elif isinstance(value, dict) or (is_tensor_collection(value) and not is_non_tensor(value)):
            raise ReplayError(f"{'/'.join(key)!r} is not in the storage; add its tensors one by one")
        else:
            super().__setitem__(index, value)
            slots, above = self.whole
            self.writer.write(slots, (*above, *key), value)

    def _set_steps(self, index: Any, value: Any) -> None:
        """Change all tensors of some steps."""
        if not isinstance(value, dict) and not is_tensor_collection(value):
            super().__setitem__(index, value)
            return
        for name, item in value.items():
            if name not in self.leaves:
                raise ReplayError(f"{name!r} is not in the storage; write it with storage.write(key, value, index)")
            self._set_at_str(name, item, index, validated=True, non_blocking=False)

    def _memmap_(self, *, inplace: bool, **options: Any) -> Any:
        if inplace:
            return super()._memmap_(inplace=True, **options)
        # Files name the class of a TensorDict, and tensordict reads only its own.
        return self.to_tensordict()._memmap_(inplace=False, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy elsewhere is one of these steps, not of the whole storage.
        return _unchanged, (self.to_tensordict(),)


def make_view(storage: PackedEpisodeStorage, slots: Slots, *, is_linked: bool, is_live: bool = False) -> Any:
    """Return some steps, whose tensors are decoded when they are read.

    Args:
        storage: The storage.
        slots: The slots of the steps.
        is_linked: Whether writes reach the storage.
        is_live: Whether it shows what is in the slots when it is read, not what is there now.
    """
    writer = None
    if is_linked:
        writer = Writer(storage)
    layout = storage.layout
    batch = torch.Size(slots.shape)
    found: dict[Key, PackedRows] = {}
    sizes = {(): batch + torch.Size(layout.extra), **layout.nodes(batch)}
    for key in sorted(sizes, key=len):
        node = new_unchecked(PackedRows, batch_size=sizes[key], device=storage.device)
        node.writer = writer
        found[key] = node
        if key:
            member: Any = node
            if key in layout.kinds:
                member = layout.kinds[key].from_tensordict(node)
            found[key[:-1]].leaves.members[key[-1]] = member
    for key, source in storage.tensors(slots, writer, is_live=is_live).items():
        if key != RAGGED:
            found[key[:-1]].leaves.members[key[-1]] = LazyTensor(source)
    root = found[()]
    if is_linked and slots.size >= len(storage):
        _mark_whole(root, slots, ())
    if any(layout.extra_names):
        root.names = layout.names(len(batch))
    return layout.wrap(root)


def _locate(view: PackedRows) -> None:
    """Locate the steps that a view shows, now and all at once, unless it shows all steps of what it is a view of."""
    located: dict[Any, dict[Key, StoredTensor]] = {}
    for _, node in nodes(view):
        for name, tensor in node.leaves.members.items():
            if not isinstance(tensor, LazyTensor):
                continue
            source = _source(tensor)
            is_part = source.tensor is None and tensor.placeholder.numel() < math.prod(source.shape)
            if not is_part or tensor.steps is None:
                continue
            place = (source.group, tensor.steps)
            if place not in located:
                located[place] = source.storage.tensors(tensor.steps.of(source.slots), source.writer)
            node.leaves.members[name] = LazyTensor(located[place][source.key])


def _source(tensor: LazyTensor) -> StoredTensor:
    source: Any = tensor.source
    return source  # type: ignore[no-any-return]


def _mark_whole(view: PackedRows, slots: Slots, above: Key) -> None:
    """Note that a view and the TensorDicts in it show all steps of the storage."""
    for key, node in nodes(view, above):
        node.whole = (slots, key)


def _unchanged(steps: TensorDict) -> TensorDict:
    return steps


def _slots_at(slots: Slots, index: Any) -> Slots | None:
    """Return the slots that an index of steps means, or None if it is not one of them alone."""
    if index is ...:
        return slots
    parts = index if isinstance(index, tuple) else (index,)
    is_mask = any(getattr(part, "dtype", None) in (torch.bool, np.bool_) for part in parts)
    if len(parts) > slots.ndim or (is_mask and len(parts) > 1) or any(part is None or part is True for part in parts):
        return None
    try:
        return np.asarray(slots[plain_index(index)])
    except IndexError:
        return None
