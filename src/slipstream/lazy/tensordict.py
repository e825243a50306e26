"""`LazyTensorDict`: a TensorDict whose tensors are decoded when they are read. Writes reach their sources.

Operations fall into four kinds:

- Views (an index, `reshape`, `unbind`, `select` and so on) are computed by tensordict on a TensorDict of placeholders,
  see `slipstream.lazy`. The result is lazy too, and nothing is decoded.
- An index with tensors decodes the steps that it selects, and returns a plain TensorDict.
- In-place operations end in ``_set_str`` for a whole tensor and ``_set_at_str`` for a part of one, which write to the
  source. Arithmetic in place goes through `LazyTensorDict.call_in_place`.
- All other operations are those of TensorDict, which gets decoded tensors from `Leaves`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import TensorDict

from slipstream.compiling import untraced
from slipstream.lazy.methods import may_write, replace_methods
from slipstream.lazy.tensor import LazyTensor, Leaves
from slipstream.lazy.views import (
    Placeholders,
    as_key,
    as_view_index,
    flat_members,
    is_packed,
    lazy_members,
    makes_view,
    names_of,
    new_plain,
    new_unchecked,
    on_tensordict,
    rebuild,
    share_member,
    take,
)

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class LazyTensorDict(TensorDict):  # type: ignore[misc]
    """A TensorDict with lazy tensors among its members, for subclasses that know what they are read from."""

    def _make(self, like: Any, members: dict[str, Any], device: torch.device | None = None) -> Self:
        """Return a lazy TensorDict of other members, with the batch size and names of another TensorDict."""
        other: Self = new_unchecked(type(self), batch_size=like.batch_size, names=names_of(like), device=device)
        other._tensordict = members
        return other

    def read_all(self, tensors: Sequence[LazyTensor]) -> list[Any]:
        """Read several lazy tensors at once."""
        return [tensor.read() for tensor in tensors]

    def read_steps(self, tensors: Sequence[LazyTensor], numbers: torch.Tensor) -> list[Any]:
        """Read some steps of lazy tensors of one group, by their numbers."""
        raise NotImplementedError

    @property
    def leaves(self) -> Leaves:
        """Its members. Getting one decodes it; ``leaves.members`` has them as they are."""
        return self._leaves

    @property
    def _tensordict(self) -> Leaves:
        # TensorDict keeps its members under this name, and assigns plain dicts to it.
        return self._leaves

    @_tensordict.setter
    def _tensordict(self, members: Mapping[str, Any]) -> None:
        if not isinstance(members, Leaves):
            members = Leaves(dict(members))
        self._leaves = members

    @property
    def _cache(self) -> None:
        # TensorDict caches lists of tensors while it is locked. Here they would be decoded, and outdated after a write.
        return None

    @_cache.setter
    def _cache(self, value: Any) -> None:
        pass

    @classmethod
    def _new_unsafe(cls, *args: Any, **kwargs: Any) -> Any:
        # TensorDict makes results with this method. Results that are not views are plain TensorDicts.
        return new_plain(*args, **kwargs)

    @property
    def data(self) -> TensorDictBase:
        """A view without gradient history."""
        return self.detach()

    def structure(self) -> TensorDictBase:
        """Return a TensorDict with the same keys, whose tensors have no memory. Decodes nothing."""

        def stand_in(member: Any) -> Any:
            if isinstance(member, LazyTensor):
                return member.source.stand_in(member.placeholder)
            return member

        return rebuild(self, stand_in, self)

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """Return its keys, as a TensorDict does. Decodes nothing."""
        if not include_nested and not leaves_only:
            return super().keys(is_leaf=is_leaf, sort=sort)
        return self.structure().keys(include_nested, leaves_only, is_leaf, sort=sort)

    def entry_class(self, key: Any) -> type:
        """Return the type of what is under a key. Decodes nothing."""
        found: type = self.structure().entry_class(key)
        return found

    def is_empty(self) -> bool:
        """Return whether there are no tensors. Decodes nothing."""
        return not any(True for _ in flat_members(self))

    @untraced
    def unpack(self) -> None:
        """Keep all tensors that this TensorDict shows raw from now on, for it and for all views of them."""
        for tensor in lazy_members(self):
            tensor.source.unpack()

    def _clone(self, recurse: bool = True) -> Any:
        if recurse:
            return self.decode(copy=True)
        return self._replaced(share_member, self.device)

    @untraced
    def _replaced(self, replace: Callable[[Any], Any], device: torch.device | None) -> Self:
        """Return a lazy TensorDict of the same structure, each tensor replaced."""

        def copy(node: Any) -> Any:
            members: dict[str, Any] = {}
            for name, member in node.leaves.members.items():
                if is_packed(member):
                    members[name] = on_tensordict(member, copy)
                else:
                    members[name] = replace(member)
            return self._make(node, members, device)

        return copy(self)  # type: ignore[no-any-return]

    @untraced
    def decode(self, *, copy: bool = False) -> TensorDictBase:
        """Return a plain TensorDict with everything decoded; tensors that are raw are shared unless `copy` is set."""
        lazy = lazy_members(self)
        values = dict(zip(map(id, lazy), self.read_all(lazy), strict=True))

        def replace(member: Any) -> Any:
            if isinstance(member, LazyTensor):
                value = values[id(member)]
                # Reading made new memory, unless the source keeps it.
                is_new = member.source.tensor is None
            else:
                value = member
                is_new = False
            if copy and not is_new:
                return value.clone()
            return value

        return rebuild(self, replace, self)

    @untraced
    def _index_tensordict(self, index: Any, *_: Any, **__: Any) -> Any:
        index = as_view_index(index)
        if makes_view(index):
            return self.call_on_placeholders(TensorDict.__getitem__, (index,), {})
        return take(self, index)

    @untraced
    def call_on_placeholders(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of TensorDict that returns views on placeholders, and return lazy views."""
        placeholders = Placeholders(functools.partial(self._make, device=self.device))
        result = method(placeholders.add_tree(self), *args, **kwargs)
        is_single = not isinstance(result, (tuple, list))
        parts = result
        if is_single:
            parts = [result]
        if not all(map(placeholders.is_view, parts)):
            # Torch had to copy, as `reshape` after `transpose` does: do the same with values.
            return method(self.decode(), *args, **kwargs)
        views = [placeholders.adopt(part) for part in parts]
        if is_single:
            return views[0]
        return type(result)(views)

    def expose(self, name: str) -> None:
        """Prepare for arithmetic, maybe in place, of an outer TensorDict that lists the tensors with a method."""
        self.unpack()

    def call_decoded(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of TensorDict on decoded tensors."""
        return method(self.decode(), *args, **kwargs)

    @untraced
    def call_unpacked(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of TensorDict that changes tensors, or the memory that they are in."""
        self.unpack()
        return method(self, *args, **kwargs)

    call_in_place = call_unpacked

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a block whose writes may be passed on at its end, all at once."""
        return contextlib.nullcontext()

    @untraced
    def _set_str(self, key: str, value: Any, *, inplace: Any, validated: bool, **options: Any) -> Any:
        member = self._leaves.members.get(key)
        if inplace is False or not isinstance(member, LazyTensor):
            return super()._set_str(key, value, inplace=inplace, validated=validated, **options)
        if not validated:
            value = self._validate_value(value, check_shape=True, non_blocking=False)
        # The inherited method would write to a decoded tensor, and nobody would see it.
        member.write(value)
        return self

    @untraced
    def _set_at_str(self, key: str, value: Any, idx: Any, *, validated: bool, non_blocking: bool) -> Any:
        member = self._leaves.members.get(key)
        if not isinstance(member, LazyTensor):
            return super()._set_at_str(key, value, idx, validated=validated, non_blocking=non_blocking)
        if not validated:
            value = self._validate_value(value, check_shape=False, non_blocking=False)
        member.write(value, idx)
        return self

    def update_(
        self, input_dict_or_td: Any = None, clone: bool = False, *, keys_to_update: Any = None, **values: Any
    ) -> Self:
        """Write several tensors in place."""
        values.pop("non_blocking", None)
        items: dict[Any, Any] = {}
        if keys_to_update is not None:
            for key in keys_to_update:
                items[key] = input_dict_or_td[key]
        elif input_dict_or_td is not None:
            items.update(input_dict_or_td.items())
        # Not as TensorDict does, which lists all tensors, and would decode those that are overwritten.
        with self.together():
            for key, value in {**items, **values}.items():
                self._set_tuple(as_key(key), value, inplace=True, validated=False, non_blocking=False)
        return self

    def _apply_nest(self, fn: Any, *others: Any, inplace: bool = False, out: Any = None, **kwargs: Any) -> Any:
        if isinstance(out, LazyTensorDict):
            out.unpack()
        options = {"inplace": inplace, "out": out, **kwargs}
        # Whatever `fn` returns or changes has to reach the sources.
        if inplace or may_write(fn):
            return self.call_in_place(TensorDict._apply_nest, (fn, *others), options)
        return super()._apply_nest(fn, *others, **options)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Functions such as `torch.cat(..., out=td)` write to the tensors of `out`.
        out = (kwargs or {}).get("out")
        if isinstance(out, LazyTensorDict):
            out.unpack()
        return super().__torch_function__(func, types, args, kwargs)


replace_methods(LazyTensorDict, TensorDict)
