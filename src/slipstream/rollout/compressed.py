"""`CompressedTensorDict`: a rollout that stays packed in memory and is decoded where it is read.

Operations fall into four kinds:

- Views (an index, `reshape`, `unbind`, `select` and so on) are computed by tensordict on a TensorDict of placeholders,
  see `slipstream.rollout.lazy`. The result is a view of the packed data, and nothing is decoded.
- An index with tensors decodes the groups of environments that it touches, and returns a plain TensorDict.
- In-place operations unpack the tensors they write to, in the rollout and in all views of it, and then run.
- All other operations are those of TensorDict, which gets decoded tensors from `Leaves`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slipstream.batches import build
from slipstream.checks import require_count
from slipstream.compiling import untraced
from slipstream.errors import RolloutError
from slipstream.rollout.batch import add_nodes, split_batch
from slipstream.rollout.files import zstd_level
from slipstream.rollout.layout import Key
from slipstream.rollout.lazy import LazyTensor, Leaves, PackedTensor, read_together
from slipstream.rollout.minibatches import grouped_indices
from slipstream.rollout.packed import Codecs, PackedArrays
from slipstream.tensors import import_tensordict

# Before the import below, so that the error names the extra if it is not installed.
import_tensordict()
from tensordict import TensorDict  # noqa: E402

from slipstream.rollout.methods import may_write, replace_methods  # noqa: E402
from slipstream.rollout.views import (  # noqa: E402
    Placeholders,
    as_view_index,
    clone_member,
    flat_members,
    is_packed,
    lazy_members,
    makes_view,
    names_of,
    new_plain,
    rebuild,
    share_member,
    take,
)

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class CompressedTensorDict(TensorDict):  # type: ignore[misc]
    """A rollout packed in memory that is a TensorDict.

    Use it wherever a TensorDict is expected: ``TensorDictModule``, TorchRL's ``GAE``, ``torch.stack``, pickle. Values
    are those of the original batch, bit for bit. Reading decodes the environments that are read, keeps recent ones in
    a bounded cache, and returns tensors in new memory. Threads may read concurrently.

    Views (``td[2:5]``, ``td[0, 3]``, ``reshape``, ``unbind``, ``select``, ``clone`` and so on) share the packed data
    and are packed as well. An index with tensors returns a plain TensorDict, as do operations that compute new values.

    ``set`` and ``update`` keep tensors raw, as on a TensorDict. In-place operations (``set_``, ``update_``, ``zero_``,
    ``td[index] = other``) unpack the tensors they write to; the rollout and all views of it see the new values. Only
    writes to a tensor that was read are lost: use ``td.set_("action", value)`` instead of ``td["action"].zero_()``.
    Arithmetic on a TensorDict that contains this one unpacks it, because it could be in place.

    Args:
        tensordict: A TensorDict of shape ``[environment, time, ...]``; it is copied and may be reused.
        compress_keys: Nested keys to pack, and everything below them. By default keys that take at least 1/32 of the
            batch and shrink by at least a tenth. Other keys stay raw.
        compression_level: 0 to 12; up to 9 is fast.
        cache_bytes: Bytes of decoded data to keep for the next minibatch; by default 1/16 of the batch.
        group_envs: Number of environments that are packed, and later decoded, together.
        verify: Whether to decode everything once and compare, so that a codec fault is an error, not wrong data.
        codecs: How an earlier, similar batch was packed. Choices made here are added, so pass the same dict, empty at
            first, for every batch to save the time of choosing.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"observation": torch.zeros(64, 32, 30)}, batch_size=[64, 32])
        >>> packed = CompressedTensorDict(batch)
        >>> packed.reshape(-1)[torch.tensor([5, 2000])]["observation"].shape, packed.nbytes < 4000
        (torch.Size([2, 30]), True)
    """

    def __init__(
        self,
        tensordict: TensorDictBase,
        compress_keys: Sequence[str | Key] | None = None,
        *,
        compression_level: int = 1,
        cache_bytes: int | None = None,
        group_envs: int | None = None,
        verify: bool = True,
        codecs: Codecs | None = None,
    ) -> None:
        level = zstd_level(compression_level)
        if group_envs is not None:
            require_count("group_envs", group_envs)
        rollout = split_batch(tensordict)
        layout = rollout.layout
        if layout.time_dim != len(layout.batch_size) - 1:
            raise RolloutError(
                f"the batch has the shape {list(layout.batch_size)}: time has to be its last axis; "
                f"set its batch_size to {list(layout.batch_size[: layout.time_dim + 1])}"
            )
        arrays = PackedArrays.pack(
            rollout,
            level,
            compress_keys=compress_keys,
            cache_bytes=cache_bytes,
            group_envs=group_envs,
            verify=verify,
            codecs=codecs,
        )
        self._content = arrays
        placeholders = Placeholders(self._make)
        tensors: dict[Key, torch.Tensor] = {}
        for field in layout.fields:
            tensors[field.key] = placeholders.add(LazyTensor(PackedTensor(arrays, field)))
        members = add_nodes(layout, tensors, layout.batch_size, complete=True)
        tree = build(members, layout.batch_size, names=layout.names)
        super().__init__({}, batch_size=tree.batch_size, names=names_of(tree))
        self._tensordict = placeholders.adopt_members(tree)

    def _make(self, like: Any, members: dict[str, Any], device: torch.device | None = None) -> CompressedTensorDict:
        """Return a packed TensorDict of other members, with the batch size and names of another TensorDict."""
        other = CompressedTensorDict.__new__(CompressedTensorDict)
        TensorDict.__init__(other, {}, batch_size=like.batch_size, names=names_of(like), device=device)
        other._content = self._content
        other._tensordict = members
        return other

    @property
    def content(self) -> PackedArrays:
        """The packed arrays, which all views share."""
        return self._content

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
    def nbytes(self) -> int:
        """Size in memory, packed, raw and unpacked, without the cache."""
        total = self._content.nbytes
        counted: set[int] = set()
        for member in flat_members(self):
            tensor = member
            if isinstance(member, LazyTensor):
                tensor = member.source.tensor
            if tensor is not None and id(tensor) not in counted:
                counted.add(id(tensor))
                total += tensor.nbytes
        return total

    def get_stats(self) -> dict[str, float]:
        """Return ``raw_bytes, packed_bytes, cache_bytes, compression_ratio, cache_hits, cache_misses``."""
        content = self._content
        return {
            "raw_bytes": content.layout.raw_bytes,
            "packed_bytes": self.nbytes,
            "cache_bytes": content.cache.nbytes,
            "compression_ratio": content.layout.raw_bytes / max(1, self.nbytes),
            "cache_hits": content.cache.hits,
            "cache_misses": content.cache.misses,
        }

    def minibatches(
        self, num_minibatches: int, *, window: int | None = None, generator: torch.Generator | None = None
    ) -> Iterator[TensorDictBase]:
        """Yield every step once, shuffled, in minibatches that together decode the rollout about once.

        Args:
            num_minibatches: Number of minibatches.
            window: Number of groups of environments whose steps are mixed; see `grouped_indices`. By default as many as
                the cache holds, and at least two groups and four environments.
            generator: Draws the order; torch's default generator if None.
        """
        flat = self.reshape(-1)
        num_steps = self._content.layout.num_steps
        # A view of some steps may cut environments short.
        if self.numel() != self._content.layout.num_envs * num_steps:
            num_steps = self.batch_size[-1]
        num_envs = self.numel() // max(1, num_steps)
        group = self._content.group
        window = window or self._content.window
        for index in grouped_indices(num_envs, num_steps, num_minibatches, group, window, generator):
            yield flat[index]

    def to_tensordict(self, **kwargs: Any) -> TensorDictBase:
        """Decode everything into a plain TensorDict in new memory."""
        return self.decode(copy=True)

    def to(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Return a view whose values are moved to a device when they are read; packed data stays on the host.

        With other arguments than a device, everything is decoded first.
        """
        device = kwargs.get("device")
        if len(args) == 1 and not kwargs:
            (device,) = args
        is_lazy = len(args) + len(kwargs) == 1 and isinstance(device, (str, int, torch.device))
        if not is_lazy:
            return self.decode().to(*args, **kwargs)
        target = torch.device(device)  # type: ignore[arg-type]
        if target == self.device:
            return self

        def move(member: Any) -> Any:
            return member.to(target)

        return self._replaced(move, target)

    @property
    def data(self) -> TensorDictBase:
        """A view without gradient history."""
        return self.detach()

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
        return Placeholders(self._make).add_tree(self).keys(include_nested, leaves_only, is_leaf, sort=sort)

    def entry_class(self, key: Any) -> type:
        """Return the type of what is under a key. Decodes nothing."""
        tree = Placeholders(self._make).add_tree(self)
        found: type = tree.entry_class(key)
        return found

    def is_empty(self) -> bool:
        """Return whether there are no tensors. Decodes nothing."""
        return not any(True for _ in flat_members(self))

    def __repr__(self) -> str:
        """Return keys, shapes and size. Decodes nothing."""
        fields = []
        tree = Placeholders(self._make).add_tree(self)
        for key, value in tree.items(include_nested=True, leaves_only=True):
            name = key
            if isinstance(key, tuple):
                name = "/".join(key)
            fields.append(f"    {name}: {str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        listed = ",\n".join(fields)
        return f"{type(self).__name__}(\n{listed},\n    batch_size={list(self.batch_size)}, nbytes={self.nbytes})"

    @untraced
    def unpack(self) -> None:
        """Keep all tensors that this TensorDict shows raw from now on, for it and for all views of the rollout.

        In-place operations call it. Unpack before you write to tensors through ``td[key]``.
        """
        for member in flat_members(self):
            if isinstance(member, LazyTensor):
                member.unpack()

    @untraced
    def _unpack_key(self, key: str) -> None:
        member = self._leaves.members.get(key)
        if isinstance(member, LazyTensor):
            member.unpack()

    def _clone(self, recurse: bool = True) -> CompressedTensorDict:
        if recurse:
            return self._replaced(clone_member, self.device)
        return self._replaced(share_member, self.device)

    @untraced
    def _replaced(self, replace: Callable[[Any], Any], device: torch.device | None) -> CompressedTensorDict:
        """Return a packed TensorDict of the same structure, each tensor replaced."""

        def copy(node: CompressedTensorDict) -> CompressedTensorDict:
            members: dict[str, Any] = {}
            for name, member in node.leaves.members.items():
                if is_packed(member):
                    members[name] = copy(member)
                else:
                    members[name] = replace(member)
            return self._make(node, members, device)

        return copy(self)

    @untraced
    def decode(self, *, copy: bool = False) -> TensorDictBase:
        """Return a plain TensorDict with everything decoded; tensors that are raw are shared unless `copy` is set."""
        lazy = lazy_members(self)
        values = dict(zip(map(id, lazy), read_together(lazy), strict=True))

        def replace(member: Any) -> Any:
            if isinstance(member, LazyTensor):
                value = values[id(member)]
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
        """Call a method of TensorDict that returns views on placeholders, and return views of the packed data."""
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

    def _set_str(self, key: str, value: Any, *, inplace: Any, **kwargs: Any) -> Any:
        if inplace is not False:
            self._unpack_key(key)
        return super()._set_str(key, value, inplace=inplace, **kwargs)

    def _set_at_str(self, key: str, value: Any, idx: Any, **kwargs: Any) -> Any:
        self._unpack_key(key)
        return super()._set_at_str(key, value, idx, **kwargs)

    def _apply_nest(self, fn: Any, *others: Any, inplace: bool = False, out: Any = None, **kwargs: Any) -> Any:
        if inplace or may_write(fn):
            self.unpack()
        if isinstance(out, CompressedTensorDict):
            out.unpack()
        return super()._apply_nest(fn, *others, inplace=inplace, out=out, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set what is under a key, or write to the steps of an index in place."""
        is_key = isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(part, str) for part in index))
        if not is_key:
            self.unpack()
        super().__setitem__(index, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Functions such as `torch.cat(..., out=td)` write to the tensors of `out`.
        out = (kwargs or {}).get("out")
        if isinstance(out, CompressedTensorDict):
            out.unpack()
        return super().__torch_function__(func, types, args, kwargs)


replace_methods(CompressedTensorDict, TensorDict)
