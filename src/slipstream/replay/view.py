"""`PackedRows`: a TensorDict of packed steps. Tensors are decoded when they are asked for; writing reaches the storage.

tensordict's operations end in a few methods: ``_set_str`` for a whole tensor and ``_set_at_str`` for a part of one.
They are overridden here, so that every operation in place writes through. A tensor that was taken out of a view is an
ordinary one: changing it in place changes neither the view's storage nor is it noticed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection, is_tensorclass

from slipstream.errors import ReplayError
from slipstream.replay.batch import Layout
from slipstream.replay.indexing import is_view, plain_index
from slipstream.replay.late import Late, LateDict, Link, Slots, Source
from slipstream.replay.roles import Key

# Methods whose results are views, or that only move tensors to other keys.
_ARRANGE = (
    "chunk",
    "exclude",
    "expand",
    "flatten",
    "flatten_keys",
    "permute",
    "reshape",
    "select",
    "split",
    "squeeze",
    "transpose",
    "unbind",
    "unflatten",
    "unflatten_keys",
    "unsqueeze",
    "view",
)


class PackedRows(TensorDict):  # type: ignore[misc, unused-ignore]
    """Steps of a packed storage, decoded when they are asked for, each tensor once.

    An ordinary TensorDict otherwise. If it was made with a number or a slice, operations in place and assignments of
    steps write to the storage, as they do with a ``LazyTensorStorage``, and so they do through views of it. ``set``
    replaces a tensor here and not in the storage, and so does ``view[key] = tensor`` unless the view is of all steps:
    transforms use both.
    """

    link: Link | None = None
    above: Key = ()
    # The key in the storage of each tensor that has not been replaced here.
    paths: dict[str, Key] = {}  # noqa: RUF012 - each node has its own

    def _set_str(self, key: Any, value: Any, *, inplace: Any, validated: bool, **options: Any) -> Any:
        link = self.link
        inner: Any = dict.get(self._tensordict, key)
        is_node = _is_node(inner)
        if inplace is False:
            self.paths.pop(key, None)
        if link is None or inplace is False or not (is_node or key in self.paths):
            return super()._set_str(key, value, inplace=inplace, validated=validated, **options)
        if not validated:
            value = self._validate_value(value, check_shape=True, non_blocking=False)
        if is_node:
            inner.update_(value)
            return self
        link.write(self.paths[key], link.slots, value)
        self._refresh(key, link)
        return self

    def _set_at_str(self, key: Any, value: Any, idx: Any, *, validated: bool, non_blocking: bool) -> Any:
        link = self.link
        inner: Any = dict.get(self._tensordict, key)
        if link is not None and _is_node(inner):
            with link.together():
                inner[idx] = value
            return self
        if link is None or key not in self.paths:
            return super()._set_at_str(key, value, idx, validated=validated, non_blocking=non_blocking)
        slots = _slots_at(link.slots, idx)
        path = self.paths[key]
        if slots is not None:
            link.write(path, slots, value)
        else:
            # The index goes beyond the axes of steps: change a copy, and write all of it.
            whole = link.source.make_leaf(link.slots, path)
            whole[idx] = value
            link.write(path, link.slots, whole)
        self._refresh(key, link)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy elsewhere is one of these steps, not of the whole storage.
        return _unchanged, (self.to_tensordict(),)

    def _memmap_(self, *, inplace: bool, **options: Any) -> Any:
        written: TensorDict = self
        if not inplace:
            # Files name the class of a TensorDict, and tensordict reads only its own.
            written = self.to_tensordict()
        return TensorDict._memmap_(written, inplace=inplace, **options)

    def start(self, above: Key, link: Link | None) -> None:
        """Become empty, with a place in the storage."""
        self._tensordict = LateDict()
        self.__dict__.update(above=above, link=link, paths={})

    def show(self, name: str, path: Key, make: Callable[[], Any]) -> None:
        """Show a tensor of the storage, which `make` decodes."""
        self.paths[name] = path
        self.put(name, Late(make))

    def put(self, name: str, value: Any) -> None:
        """Hold a value as it is."""
        dict.__setitem__(self._tensordict, name, value)

    def _refresh(self, key: str, link: Link) -> None:
        """Decode a leaf again when it is asked for the next time."""
        make = functools.partial(link.source.make_leaf, link.slots, self.paths[key])
        self.put(key, Late(make))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Change a tensor, or some steps, here and in the storage."""
        link = self.link
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
            link.write((*self.above, *key), link.slots, value)

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
        if self.link is None or _as_key(index) is not None:
            return super().__getitem__(index)
        return self.arranged(TensorDict.__getitem__, index, is_linked=is_view(index))

    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None, **options: Any) -> Any:
        """Change several tensors, here and in the storage."""
        link = self.link
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

    def arranged(self, method: Callable[..., Any], *args: Any, is_linked: bool = True, **options: Any) -> Any:
        """Call a method of TensorDict that arranges steps or keys in another way; returns views of the storage.

        Tensors that were replaced here are arranged, too. If the method goes beyond the axes of steps, its result is
        one of tensors that were decoded, and does not write to the storage.
        """
        link = self.link
        if link is None or options.get("inplace"):
            return method(self, *args, **options)
        tensors: list[_Original] = []
        result = method(_stand_in(self, link.slots.shape, tensors), *args, **options)
        if not isinstance(result, (tuple, list)):
            is_whole = link.is_whole and method is TensorDict.transpose
            rows = _arranged(result, self, tensors, is_linked=is_linked, is_whole=is_whole)
            if rows is not None:
                return rows
            return method(self, *args, **options)
        # Parts take what they show from here: decoding each of them alone would take much longer.
        parts = [_arranged(part, self, tensors, is_part=True) for part in result]
        if any(part is None for part in parts):
            return method(self, *args, **options)
        return type(result)(parts)


def _arranging(name: str) -> Callable[..., Any]:
    method = getattr(TensorDict, name)

    @functools.wraps(method)
    def arranged(self: PackedRows, *args: Any, **options: Any) -> Any:
        return self.arranged(method, *args, **options)

    return arranged


def _in_place(name: str) -> Callable[..., Any]:
    method = getattr(TensorDict, name)

    @functools.wraps(method)
    def written_back(self: PackedRows, *args: Any, **options: Any) -> Any:
        if self.link is None:
            return method(self, *args, **options)
        copy = self.to_tensordict()
        method(copy, *args, **options)
        return self.update_(copy)

    return written_back


for _name in _ARRANGE:
    setattr(PackedRows, _name, _arranging(_name))
# Arithmetic in place, whatever this version of tensordict has. The others end in methods of the class.
for _name in dir(TensorDict):
    is_arithmetic = _name.endswith("_") and _name != "copy_" and hasattr(torch, f"_foreach_{_name}")
    if is_arithmetic or _name in ("masked_fill_", "zero_"):
        setattr(PackedRows, _name, _in_place(_name))


def _unchanged(steps: TensorDict) -> TensorDict:
    return steps


class _Original(NamedTuple):
    """A tensor of some steps: its key in the storage, unless it was replaced, and where it is."""

    path: Key | None
    node: Any
    name: str

    def take(self, places: torch.Tensor, num_axes: int) -> Any:
        """Return what it holds at some places, counted through the axes of steps."""
        return _member(self.node, self.name).unsqueeze(0).flatten(0, num_axes)[places]


def _stand_in(node: Any, shape: tuple[int, ...], tensors: list[_Original]) -> TensorDict:
    """Return a TensorDict of the same structure whose tensors hold the places of steps.

    The last axis of each tells which of `tensors` it stands for: it is as long as they are many when it is added.
    """
    places = torch.arange(math.prod(shape)).reshape(shape)
    paths: Mapping[str, Key] = getattr(node, "paths", {})
    members: dict[str, Any] = {}
    for name in list(node.keys()):
        member: Any = None
        if name not in paths:
            member = _member(node, name)
        if _is_node(member):
            stand_in = functools.partial(_stand_in, shape=shape, tensors=tensors)
            members[name] = _on_tensordict(member, stand_in)
            continue
        tensors.append(_Original(paths.get(name), node, name))
        size = (*node.batch_size, len(tensors))
        members[name] = places.reshape(*shape, *[1] * (len(size) - len(shape))).expand(size)
    return TensorDict(members, batch_size=node.batch_size, names=node.names)


def _member(node: Any, name: str) -> Any:
    """Return a member as it is; `get` would turn non-tensor data into what it holds."""
    return node._get_str(name, None)


def _on_tensordict(node: Any, function: Callable[[Any], Any]) -> Any:
    """Return what a function makes of a TensorDict, or of the one in a tensorclass, which stays one."""
    if is_tensorclass(node):
        return type(node).from_tensordict(function(node._tensordict))
    return function(node)


def _places_of_steps(stand_in: Any, more: torch.Size) -> torch.Tensor | None:
    """Return which steps a `_stand_in` shows after it was arranged, whose axes after those of steps were `more`.

    Returns:
        Their places; None if it shows no tensor, or if those axes were touched.
    """
    num_axes = stand_in.batch_dims
    tensors = stand_in.values(include_nested=True, leaves_only=True)
    shown = [tensor for tensor in tensors if 0 not in tensor.shape[num_axes:]]
    if not shown or stand_in.batch_size[max(0, num_axes - len(more)) :] != more or 0 in more:
        return None
    size = stand_in.batch_size[: num_axes - len(more)]
    places = shown[0].reshape(*size, math.prod(more), -1)[..., 0]
    first: torch.Tensor = places[..., 0]
    if not torch.equal(places, first[..., None].expand_as(places)):
        return None
    return first


def _arranged(
    stand_in: Any,
    rows: PackedRows,
    tensors: Sequence[_Original],
    *,
    is_linked: bool = True,
    is_whole: bool = False,
    is_part: bool = False,
) -> PackedRows | None:
    """Return the steps that a `_stand_in` shows after it was arranged; None if it shows no tensor.

    Args:
        stand_in: What it has become.
        rows: What it stood for.
        tensors: What its tensors stood for.
        is_linked: Whether changes of the result change the storage.
        is_whole: Whether it has all steps of the storage.
        is_part: Whether it takes tensors from `rows` instead of decoding its own.
    """
    link = rows.link
    if link is None:
        return None
    places = _places_of_steps(stand_in, rows.batch_size[link.slots.ndim :])
    if places is None:
        return None
    slots = link.slots.reshape(-1)[places.numpy()]
    makers: Mapping[Key, Callable[[], Any]] = {}
    if not is_part:
        makers = link.source.makers(slots)
    part = None
    if is_linked:
        part = Link(link.source, slots, is_whole=is_whole)

    def fill(node: Any, above: Key) -> PackedRows:
        made = _node(above, node.batch_size, link.source.device, part)
        made.names = node.names
        for name in node.keys():  # noqa: SIM118 - a TensorDict iterates over its first axis
            member = _member(node, name)
            if _is_node(member):
                made.put(name, _on_tensordict(member, functools.partial(fill, above=(*above, name))))
                continue
            original = tensors[member.shape[-1] - 1]
            take = functools.partial(original.take, places, link.slots.ndim)
            if original.path is None:
                made.put(name, take())
            else:
                made.show(name, original.path, makers.get(original.path, take))
        return made

    return fill(stand_in, rows.above)


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
        nodes[key[:-1]].put(key[-1], member)
    for key, make in makers.items():
        nodes[key[:-1]].show(key[-1], key, make)
    if any(layout.extra_names):
        root.names = layout.names(len(batch))
    return layout.wrap(root)


def _depth(item: tuple[Key, Any]) -> int:
    return len(item[0])


def _node(key: Key, batch_size: torch.Size, device: Any, link: Link | None) -> PackedRows:
    node = PackedRows({}, batch_size=batch_size, device=device)
    node.start(key, link)
    return node


def _is_node(value: Any) -> bool:
    """Return whether a value is a nested TensorDict; to tensordict, non-tensor data is one, too."""
    # First, because tensordict takes a microsecond for each of many tensors.
    if isinstance(value, (Late, torch.Tensor)):
        return False
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
