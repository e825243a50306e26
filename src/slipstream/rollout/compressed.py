"""`CompressedTensorDict`: a rollout that stays packed in memory and is decoded where a minibatch touches it.

Each array is packed in groups of environments. Reading some steps decodes their groups, keeps recent ones in a bounded
cache, and gathers the steps from there. Values are those of the original batch, bit for bit.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.batches import build
from slipstream.checks import require_count
from slipstream.codecs import Codec
from slipstream.errors import RolloutError
from slipstream.rollout.batch import add_nodes, split_batch
from slipstream.rollout.files import codec_for, zstd_level
from slipstream.rollout.layout import Field, Key, Layout
from slipstream.rollout.minibatches import grouped_indices
from slipstream.store.writer import check_payload
from slipstream.tensors import tensor_of
from slipstream.threads import parallel_map
from slipstream.trajectory import exception_numbers, gather_next

if TYPE_CHECKING:
    from tensordict import TensorDictBase

# Size of a group of the largest array: reading a single step decodes that much.
_GROUP_BYTES = 512 << 10
# An array that does not shrink below this share stays raw: decoding it would cost more than its memory.
_WORTHWHILE = 0.9
# Arrays below this share of the batch stay raw.
_SMALL = 1 / 32


@dataclass(frozen=True)
class _Packed:
    """An array ``[environment, step, ...]``, encoded in groups of environments."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    group: int
    codec: Codec
    payloads: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.payloads))

    def decode(self, number: int) -> NDArray[Any]:
        rows = min(self.group, self.shape[0] - number * self.group)
        array = np.empty((rows, *self.shape[1:]), self.dtype)
        self.codec.decode(self.payloads[number], array)
        return array


class _Cache:
    """An LRU cache of decoded groups, bounded in bytes. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self._groups: OrderedDict[tuple[str, int], NDArray[Any]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, name: str, packed: _Packed, number: int) -> NDArray[Any]:
        with self._lock:
            found = self._groups.get((name, number))
            if found is not None:
                self._groups.move_to_end((name, number))
                self.hits += 1
                return found
            self.misses += 1
        # Decode without the lock. Two threads may decode the same group; the first result is kept.
        array = packed.decode(number)
        with self._lock:
            if array.nbytes <= self.max_bytes and (name, number) not in self._groups:
                self._groups[name, number] = array
                self._bytes += array.nbytes
                while self._bytes > self.max_bytes:
                    self._bytes -= self._groups.popitem(last=False)[1].nbytes
        return array

    @property
    def nbytes(self) -> int:
        return self._bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _Cache, (self.max_bytes,)


@dataclass
class _Content:
    """The data that all views of a compressed rollout share."""

    layout: Layout
    packed: dict[str, _Packed]
    raw: dict[str, NDArray[Any]]
    cache: _Cache
    group: int
    exceptions: dict[str, NDArray[np.int32]]


class CompressedTensorDict:
    """A rollout packed in memory that reads like a TensorDict.

    ``td[key]``, ``td[index]``, ``reshape(-1)``, ``keys(True, True)``, ``select``, ``to(device)`` and ``set`` work as
    on a TensorDict and return ordinary tensors and TensorDicts in new memory. Tensors set after packing (advantages,
    returns) stay raw. For everything else that a TensorDict can do, use `to_tensordict`. Threads may read concurrently.

    Args:
        tensordict: A TensorDict of shape ``[environment, time, ...]``; it is copied and may be reused.
        compress_keys: Nested keys to pack, and everything below them. By default keys that take at least 1/32 of the
            batch and shrink by at least a tenth. Other keys stay raw.
        compression_level: 0 to 12; up to 9 is fast.
        cache_bytes: Bytes of decoded data to keep for the next minibatch; by default 1/16 of the batch.
        group_envs: Number of environments that are packed, and later decoded, together.
        verify: Whether to decode everything once and compare, so that a codec fault is an error, not wrong data.

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
    ) -> None:
        level = zstd_level(compression_level)
        rollout = split_batch(tensordict)
        layout = rollout.layout
        if layout.time_dim != len(layout.batch_size) - 1:
            raise RolloutError(
                f"the batch has the shape {list(layout.batch_size)}: time has to be its last axis; "
                f"set its batch_size to {list(layout.batch_size[: layout.time_dim + 1])}"
            )
        if group_envs is not None:
            require_count("group_envs", group_envs)
        largest = max((array[:1].nbytes for array in rollout.arrays.values()), default=1)
        group = group_envs or max(1, min(layout.num_envs, _GROUP_BYTES // max(1, largest)))
        chosen = _chosen(layout, compress_keys)
        packed: dict[str, _Packed] = {}
        raw: dict[str, NDArray[Any]] = {}
        for name, array in rollout.arrays.items():
            small = compress_keys is None and array.nbytes < _SMALL * layout.raw_bytes
            if name not in chosen or small:
                raw[name] = array
                continue
            candidate = _pack(name, array, codec_for(rollout, name, level), group, verify)
            if compress_keys is None and candidate.nbytes > _WORTHWHILE * array.nbytes:
                raw[name] = array
            else:
                packed[name] = candidate
        if cache_bytes is None:
            cache_bytes = layout.raw_bytes // 16
        # Minibatches look exceptions up by step, so keep row numbers instead of masks.
        exceptions: dict[str, NDArray[np.int32]] = {}
        for field in layout.fields:
            if field.mask is not None and field.mask not in exceptions:
                exceptions[field.mask] = exception_numbers(raw.pop(field.mask))
        self._content = _Content(layout, packed, raw, _Cache(cache_bytes), group, exceptions)
        self._batch_size = torch.Size(layout.batch_size)
        self._fields: dict[Key, Field | torch.Tensor] = {item.key: item for item in layout.fields}
        self._device: torch.device | None = None

    @property
    def batch_size(self) -> torch.Size:
        """Its shape."""
        return self._batch_size

    shape = batch_size

    @property
    def device(self) -> torch.device | None:
        """The device of what is read; None means the CPU, and TensorDicts without a device."""
        return self._device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._batch_size)

    @property
    def nbytes(self) -> int:
        """Size in memory, packed and raw, without the cache."""
        content = self._content
        added = sum(field.nbytes for field in self._fields.values() if isinstance(field, torch.Tensor))
        raw = sum(array.nbytes for array in content.raw.values())
        return sum(packed.nbytes for packed in content.packed.values()) + raw + added

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

    def numel(self) -> int:
        """Return the number of steps."""
        return math.prod(self._batch_size)

    def __len__(self) -> int:
        """Return the size of the first axis."""
        return self._batch_size[0] if self._batch_size else 0

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:
        """Return its keys, as a TensorDict does; nested ones as tuples."""
        found: dict[Any, None] = {}
        for key in self._fields:
            for depth in range(1, len(key) + 1) if include_nested else (1,):
                if leaves_only and depth < len(key):
                    continue
                found[key[0] if depth == 1 else key[:depth]] = None
        return list(found)

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> Iterator[tuple[Any, Any]]:
        """Yield keys and their decoded values, one by one."""
        for key in self.keys(include_nested, leaves_only):
            yield key, self[key]

    def get(self, key: str | Key, default: Any = KeyError) -> Any:
        """Return a tensor, or a TensorDict of the tensors below a key, decoded."""
        path = _path(key)
        below = [name for name in self._fields if name[: len(path)] == path]
        if not below:
            if default is not KeyError:
                return default
            known = ", ".join("/".join(name) for name in list(self._fields)[:8])
            raise KeyError(f"nothing under {'/'.join(path)!r}; there is {known}")
        if below == [path]:
            tensor = self._read([path], None)[path]
            return self._out(tensor.reshape(*self._batch_size, *tensor.shape[1:]))
        return self.select(path).to_tensordict().get(path)

    def __getitem__(self, index: Any) -> Any:
        """Return what is under a key, or the steps of an index as a TensorDict."""
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(i, str) for i in index)):
            return self.get(index)
        if isinstance(index, torch.Tensor):
            index = index.cpu()
        numbers = torch.arange(self.numel(), device="cpu").reshape(self._batch_size)[index]
        return self._steps(numbers)

    def __contains__(self, key: str | Key) -> bool:
        """Return whether there is anything under a key."""
        path = _path(key)
        return any(name[: len(path)] == path for name in self._fields)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield what is at each index of the first axis, decoded."""
        return (self[index] for index in range(len(self)))

    def set(self, key: str | Key, value: torch.Tensor) -> Self:
        """Set a tensor, which stays raw and is not copied. Other views of the rollout do not see it."""
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{key} is a {type(value).__name__}, expected a tensor")
        if value.shape[: self.ndim] != self._batch_size:
            raise ValueError(f"{key} has shape {list(value.shape)}, expected it to begin with {list(self._batch_size)}")
        path = _path(key)
        above = next((name for name in self._fields if name == path[: len(name)] and name != path), None)
        if above is not None:
            raise KeyError(f"{'/'.join(path)!r} cannot be set: {'/'.join(above)!r} is a tensor")
        self._fields = {name: field for name, field in self._fields.items() if name[: len(path)] != path}
        self._fields[path] = value.reshape(self.numel(), *value.shape[self.ndim :])
        return self

    def __setitem__(self, key: str | Key, value: torch.Tensor) -> None:
        """Set a tensor; see `set`."""
        self.set(key, value)

    def select(self, *keys: str | Key) -> CompressedTensorDict:
        """Return a view with only some of the keys; it shares the packed data."""
        paths = [_path(key) for key in keys]
        for path in paths:
            if path not in self:
                raise KeyError(f"nothing under {'/'.join(path)!r} to select")
        return self._with({k: v for k, v in self._fields.items() if any(k[: len(path)] == path for path in paths)})

    def exclude(self, *keys: str | Key) -> CompressedTensorDict:
        """Return a view without some of the keys; it shares the packed data."""
        paths = [_path(key) for key in keys]
        return self._with({k: v for k, v in self._fields.items() if all(k[: len(path)] != path for path in paths)})

    def reshape(self, *shape: Any) -> CompressedTensorDict:
        """Return a view of another shape; it shares the packed data."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        other = self._with(self._fields)
        other._batch_size = torch.empty(self._batch_size, device="meta").reshape(sizes).shape
        return other

    view = reshape

    def to(self, device: str | torch.device) -> CompressedTensorDict:
        """Return a view whose steps are moved to a device when they are read. Packed data stays on the host."""
        other = self._with(self._fields)
        other._device = torch.device(device)
        return other

    def to_tensordict(self) -> TensorDictBase:
        """Decode everything."""
        return self._steps(None)

    def minibatches(
        self, num_minibatches: int, *, window: int = 4, generator: torch.Generator | None = None
    ) -> Iterator[TensorDictBase]:
        """Yield every step once, shuffled, in minibatches that together decode the rollout about once.

        Args:
            num_minibatches: Number of minibatches.
            window: Number of groups of environments whose steps are mixed; see `grouped_indices`.
            generator: Draws the order; torch's default generator if None.
        """
        layout = self._content.layout
        flat = self.reshape(-1)
        group = self._content.group
        for index in grouped_indices(layout.num_envs, layout.num_steps, num_minibatches, group, window, generator):
            yield flat[index]

    def _with(self, fields: dict[Key, Field | torch.Tensor]) -> CompressedTensorDict:
        other = object.__new__(CompressedTensorDict)
        other._content = self._content
        other._fields = dict(fields)
        other._batch_size = self._batch_size
        other._device = self._device
        return other

    def _out(self, value: Any) -> Any:
        return value if self._device is None else value.to(self._device)

    def _steps(self, numbers: torch.Tensor | None) -> TensorDictBase:
        """Return steps by their numbers, environment by environment; all of them if None."""
        shape = self._batch_size if numbers is None else numbers.shape
        tensors = self._read(list(self._fields), numbers)
        for path, tensor in tensors.items():
            tensors[path] = tensor.reshape(*shape, *tensor.shape[1:])
        layout = self._content.layout
        # Axes keep their names only while they are the axes of the batch that was packed.
        names: tuple[str | None, ...] = ()
        if numbers is None and tuple(shape) == layout.batch_size:
            names = layout.names
        members = add_nodes(layout, tensors, tuple(shape), complete=False)
        return self._out(build(members, tuple(shape), names=names))

    def _read(self, paths: list[Key], numbers: torch.Tensor | None) -> dict[Key, torch.Tensor]:
        """Read steps; at most one group of each array per thread is decoded at a time, besides what is in the cache."""
        content = self._content
        chosen = None if numbers is None else numbers.reshape(-1).numpy()
        picks = _picks(chosen, content.layout.num_envs, content.layout.num_steps, content.group)
        total = self.numel() if chosen is None else len(chosen)
        found = [(path, field) for path in paths if isinstance(field := self._fields[path], Field)]
        outs = {path: np.empty((total, *field.shape), field.dtype.carrier) for path, field in found}

        def fill(pick: _Pick) -> None:
            groups: dict[str, NDArray[Any]] = {}
            for path, field in found:
                if field.array in content.packed and field.array not in groups:
                    groups[field.array] = content.cache.get(field.array, content.packed[field.array], pick.group)
                outs[path][pick.position] = self._gather(field, pick, groups.get(field.array))

        for _ in parallel_map(fill, picks):
            pass
        tensors: dict[Key, torch.Tensor] = {}
        for path in paths:
            field = self._fields[path]
            if isinstance(field, torch.Tensor):
                tensors[path] = field.clone() if numbers is None else field[numbers.reshape(-1)]
            else:
                tensors[path] = tensor_of(outs[path], field.dtype.name, outs[path].shape)
        return tensors

    def _gather(self, field: Field, pick: _Pick, group: NDArray[Any] | None) -> NDArray[Any]:
        content = self._content
        # The environments of this group, whether they were decoded or are stored raw.
        envs = slice(pick.group * content.group, (pick.group + 1) * content.group)
        if group is None:
            group = content.raw[field.array][envs]
        if field.mask is None or field.rows is None:
            values: NDArray[Any] = group[pick.env, pick.step]
            return values
        numbers = content.exceptions[field.mask][envs]
        return gather_next(group, numbers, content.raw[field.rows], pick.env, pick.step)


@dataclass(frozen=True)
class _Pick:
    """The steps of a minibatch that are in one group: where they are there, and where they go."""

    group: int
    env: NDArray[np.intp]
    step: NDArray[np.intp]
    position: NDArray[np.intp] | slice


def _picks(numbers: NDArray[Any] | None, num_envs: int, num_steps: int, group: int) -> list[_Pick]:
    """Sort the numbers of steps by the group of environments they are in."""
    if numbers is None:
        numbers = np.arange(num_envs * num_steps)
    env, step = np.divmod(numbers, max(1, num_steps))
    number, inside = np.divmod(env, group)
    order = np.argsort(number, kind="stable")
    ends = (np.flatnonzero(np.diff(number[order], append=-1)) + 1).tolist() if order.size else []
    picks = []
    start = 0
    for end in ends:
        position = order[start:end]
        picks.append(_Pick(int(number[position[0]]), inside[position], step[position], position))
        start = end
    return picks


def _chosen(layout: Layout, compress_keys: Sequence[str | Key] | None) -> set[str]:
    """Return the arrays to pack: those of the keys that were asked for, with or without their ``next``."""
    if compress_keys is None:
        return {field.array for field in layout.fields}
    chosen: set[str] = set()
    for path in map(_path, [compress_keys] if isinstance(compress_keys, str) else compress_keys):
        found = [f.array for f in layout.fields if path in (f.key[: len(path)], f.key[1 : len(path) + 1])]
        if not found:
            known = ", ".join("/".join(field.key) for field in layout.fields[:8])
            raise KeyError(f"compress_keys has {'/'.join(path)!r}, which the batch has not; it has {known}")
        chosen.update(found)
    return chosen


def _pack(name: str, array: NDArray[Any], codec: Codec, group: int, verify: bool) -> _Packed:
    def encode(start: int) -> bytes:
        part = array[start : start + group]
        payload = codec.encode(part)
        if verify:
            check_payload(name, codec, payload, part)
        return payload

    starts = range(0, len(array), group)
    return _Packed(array.dtype, array.shape, group, codec, tuple(parallel_map(encode, starts)))


def _path(key: str | Key) -> Key:
    path = (key,) if isinstance(key, str) else tuple(key)
    if not path or not all(isinstance(part, str) for part in path):
        raise TypeError(f"{key!r} is not a key: expected a string, or a tuple of strings")
    return path
