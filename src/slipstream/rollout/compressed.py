"""`CompressedTensorDict`: a rollout that stays packed in memory and is decoded where it is read.

It is a `slipstream.lazy.tensordict.LazyTensorDict` whose tensors stay packed: every read decodes the groups of
environments that it touches. A write unpacks the tensor, in the rollout and in all views of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slipstream.batches import build
from slipstream.checks import require_count
from slipstream.errors import RolloutError
from slipstream.lazy.tensor import LazyTensor
from slipstream.rollout.batch import add_nodes, split_batch
from slipstream.rollout.files import zstd_level
from slipstream.rollout.layout import Key
from slipstream.rollout.lazy import PackedTensor, clone_member, move_member, read_steps, read_together
from slipstream.rollout.minibatches import grouped_indices
from slipstream.rollout.packed import Codecs, PackedArrays
from slipstream.tensors import import_tensordict

# Before the import below, so that the error names the extra if it is not installed.
import_tensordict()
from slipstream.lazy.tensordict import LazyTensorDict  # noqa: E402
from slipstream.lazy.views import Placeholders, flat_members, names_of  # noqa: E402

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class CompressedTensorDict(LazyTensorDict):
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
        other = super()._make(like, members, device)
        other._content = self._content
        return other

    def read_all(self, tensors: Sequence[LazyTensor]) -> list[Any]:
        """Read several lazy tensors at once, on all threads."""
        return read_together(tensors)

    def read_steps(self, tensors: Sequence[LazyTensor], numbers: torch.Tensor) -> list[Any]:
        """Read some steps of several lazy tensors; decodes only the groups that they touch."""
        return read_steps(tensors, numbers.reshape(-1).numpy(), tuple(numbers.shape))

    @property
    def content(self) -> PackedArrays:
        """The packed arrays, which all views share."""
        return self._content

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

        return self._replaced(functools.partial(move_member, device=target), target)

    def __repr__(self) -> str:
        """Return keys, shapes and size. Decodes nothing."""
        fields = []
        for key, value in self.structure().items(include_nested=True, leaves_only=True):
            name = key
            if isinstance(key, tuple):
                name = "/".join(key)
            fields.append(f"    {name}: {str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        listed = ",\n".join(fields)
        return f"{type(self).__name__}(\n{listed},\n    batch_size={list(self.batch_size)}, nbytes={self.nbytes})"

    def _clone(self, recurse: bool = True) -> Any:
        if recurse:
            return self._replaced(clone_member, self.device)
        return super()._clone(recurse)
