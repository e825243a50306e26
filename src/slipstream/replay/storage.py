"""`PackedEpisodeStorage`: a storage for TorchRL's replay buffers whose content stays packed."""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.text import format_bytes, install_hint

try:
    from tensordict import TensorDict, is_tensor_collection
    from torchrl.data import TensorStorage
    from torchrl.data.replay_buffers.storages import Storage
except ImportError as error:
    raise ImportError(f"PackedEpisodeStorage needs torchrl: {install_hint('train')}") from error

from slipstream.batches import build, flatten
from slipstream.errors import OutOfRangeError, ReplayError, SlipstreamError, UnsupportedStateError
from slipstream.replay.checkpointer import PackedCheckpointer
from slipstream.replay.fields import VECTORS, Packing, RowLayout
from slipstream.replay.folder import Part
from slipstream.replay.frames import FrameLog, Located
from slipstream.replay.leaves import (
    Block,
    Key,
    Leaf,
    check_leaves,
    describe,
    find_twins,
    host_array,
    plan_rows,
    to_frames,
)
from slipstream.replay.packing import Rows
from slipstream.replay.rows import PackedRows, late_tensordict
from slipstream.replay.runs import Runs
from slipstream.replay.tail import Tail
from slipstream.trajectory import NEXT

_NONE, _TAIL = -1, -2
_BLOCK_STEPS = 64
_BLOCK_ROWS = 16 << 10
_ENOUGH_STEPS = 16
_TAIL_BYTES = 8 << 20
_FREED_PARTS = 64
_IDS = (("collector", "traj_ids"), ("episode",))


class PackedEpisodeStorage(TensorStorage):  # type: ignore[misc, unused-ignore]
    """A TorchRL storage that keeps steps packed, each observation once, bit for bit.

    Give it to ``ReplayBuffer(storage=...)`` where a ``LazyTensorStorage`` would be, with any of TorchRL's samplers and
    writers. Observations under ``next`` that repeat the root one step later are not kept a second time; this is checked
    bit for bit for every step. Vectors of four steps are packed together, images one by one, and of stacks of frames
    (``[frames, height, width]``) each frame once. The newest steps stay raw until there are enough of them to pack.
    Flags and ids (one bool or integer a step) stay raw, so that samplers that look for the ends of episodes find them
    without decoding.

    Steps should come in the order of time: whole trajectories, or with ``ndim=2`` batches ``[environments, time]``.
    Steps of several environments in turn through ``ndim=1`` are kept correctly, and hardly packed.

    Threads may read while one writes. What reading returns is memory of its own: ``storage.get(index)`` decodes at
    once, ``storage[index]`` each tensor when it is asked for. Changing what it returned does not change the storage,
    but for ``set_``, ``set_at_`` and ``update_`` of a buffer, which write through. Pickled to another process it is a
    copy of its own, and as small as it is here.

    Args:
        max_size: How many steps; as for ``LazyTensorStorage``, rounded up to whole steps of all environments.
        device: Where what is read goes.
        ndim: How many axes of a batch count as steps; 2 for ``[environments, time]``.
        jpeg: JPEG quality for all images, or by ``/``-joined key; without loss by default.
        pack_images: Whether to pack images at all; frames of stacks are kept once all the same.
        cache_bytes: How many bytes of decoded vectors to keep for the next batch.
        threads: How many threads pack and unpack; by default one per core.
        end_key: What tells that an episode ended with a step.

    Raises:
        ConfigurationError: If a setting makes no sense.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import ReplayBuffer
        >>> buffer = ReplayBuffer(storage=PackedEpisodeStorage(1000), batch_size=8)
        >>> steps = torch.arange(101.0)[:, None].expand(101, 24)
        >>> _ = buffer.extend(TensorDict({"o": steps[:-1], "next": {"o": steps[1:]}}, batch_size=[100]))
        >>> batch = buffer.sample()
        >>> bool((batch["next", "o"] == batch["o"] + 1).all())
        True
    """

    _default_checkpointer = PackedCheckpointer
    supports_conditional_update = False

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        jpeg: int | Mapping[str, int] | None = None,
        pack_images: bool = True,
        cache_bytes: int = 1 << 20,
        threads: int | None = None,
        end_key: str | Key = ("next", "done"),
    ) -> None:
        Storage.__init__(self, require_count("max_size", max_size))
        self.ndim = require_count("ndim", ndim)
        self.device = torch.device(device)
        self.end_key = (end_key,) if isinstance(end_key, str) else tuple(end_key)
        self._packing = Packing(jpeg, images=pack_images)
        self._options: dict[str, Any] = {"cache_bytes": cache_bytes, "threads": threads}
        self._capacity = max_size
        self._lock, self._saving = threading.RLock(), threading.Lock()
        self._last_cursor = None
        self._forget()

    def _forget(self) -> None:
        self.max_size = self._capacity
        self.initialized = False
        self._len = 0
        self._leaves: list[Leaf] = []
        self._nodes: dict[Key, tuple[int, ...]] = {}
        self._bare = False
        self._layout: RowLayout | None = None
        self._log = FrameLog([], **self._options)
        self._tail = Tail()
        self._tail_slots: list[NDArray[np.int64]] = []
        self._saved: dict[str, list[Part]] = {}  # what each folder holds of the frames in this log
        self._freed_end = 0  # where the log ended when what it holds in vain was looked for
        self._streams: tuple[int, ...] = ()
        self._newest = -1

    # Writing

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Put steps into slots; packs what there is enough of, on the caller's thread.

        Args:
            cursor: One slot along time, or several: a tensor, a range, a slice; a tuple of tensors for single steps
                of a storage with ``ndim=2``.
            data: The steps, a TensorDict or a tensor; for several slots with time first.
            set_cursor: Whether these are new steps, or others in the place of old ones.

        Raises:
            ReplayError: If keys, dtypes or shapes are not those of the steps before; nothing has changed then.
            OutOfRangeError: If there is no such slot.
            UnsupportedStateError: If it holds something other than dense tensors.
        """
        if isinstance(data, list) and data:
            data = torch.stack(data, 0)
        if not isinstance(data, torch.Tensor) and not is_tensor_collection(data):
            raise UnsupportedStateError(f"a batch is a {type(data).__qualname__}, expected a TensorDict or a tensor")
        single = isinstance(cursor, int) or (isinstance(cursor, torch.Tensor) and cursor.ndim == 0)
        pointwise = isinstance(cursor, tuple)
        if single:
            data = data.unsqueeze(0) if isinstance(data, torch.Tensor) else data[None]
        with self._lock:
            tensors, nodes = _split(data)
            dims = 1 if pointwise else self.ndim
            batch = next(iter(tensors.values())).shape[:dims]
            if len(batch) < dims:
                raise ReplayError(f"a batch of shape {list(batch)} was given to a storage with ndim={self.ndim}")
            if not math.prod(batch):
                return
            known = self.initialized
            if not known:
                self._start(tensors, nodes, batch, bare=isinstance(data, torch.Tensor))
            try:
                slots = self._place(tensors, cursor, tuple(batch))
            except SlipstreamError:
                if not known:
                    self._forget()
                raise
            self._write(tensors, slots, in_order=set_cursor and not pointwise)
            if set_cursor:
                self._set_last_cursor(cursor)
                self._len = min(self._len + math.prod(batch), self.max_size)
            self._free()
        self._bump_mutation_revision()

    def _start(self, tensors: Mapping[Key, torch.Tensor], nodes: Any, batch: Any, *, bare: bool) -> None:
        leaves = describe(tensors, self.ndim)
        plan_rows(leaves, self._packing)  # refuses what cannot be stored before anything has changed
        self._leaves, self._nodes, self._bare = leaves, nodes, bare
        self._streams = tuple(batch[1:])
        width = math.prod(self._streams)
        times = -(-self._capacity // width)
        self.max_size = times * width
        shape = (times, *self._streams)
        self._frame_of = np.full(shape, _NONE, np.int64)
        self._columns = {
            leaf.key: torch.zeros(*shape, *leaf.shape, dtype=leaf.torch_dtype)
            for leaf in self._leaves
            if leaf.kind == "column"
        }
        self._runs = Runs(times, width)
        self.initialized = True

    def _place(self, tensors: Mapping[Key, torch.Tensor], cursor: Any, batch: tuple[int, ...]) -> NDArray[np.int64]:
        """Check a batch against what is held; returns its slots."""
        check_leaves(self._leaves, tensors, len(batch))
        if not isinstance(cursor, tuple) and batch[1:] != self._streams:
            raise ReplayError(f"a batch of {list(batch)} steps, before it was [time, {list(self._streams)}]")
        slots = self._slots(cursor, batch[0])
        if slots.shape != batch:
            raise ReplayError(f"{list(slots.shape)} slots for {list(batch)} steps")
        return slots

    def _slots(self, cursor: Any, count: int) -> NDArray[np.int64]:
        """Return which slots a cursor means, numbered through ``[time, streams]``."""
        width = math.prod(self._streams)
        times = self.max_size // width
        if isinstance(cursor, tuple):
            parts = np.broadcast_arrays(*(np.asarray(_plain(part), np.int64) for part in cursor))
            try:
                flat: NDArray[np.int64] = np.ravel_multi_index(parts, (times, *self._streams))
            except ValueError as error:
                raise OutOfRangeError(f"slots {str(cursor)[:60]}, there are {[times, *self._streams]}") from error
            return flat.reshape(-1)
        if isinstance(cursor, slice):
            stop = times if cursor.stop is None and count == times else cursor.indices(max(count, times))[1]
            time = np.arange(times)[slice(cursor.start, stop, cursor.step)][:count]
        else:
            time = np.asarray(_plain(cursor)).reshape(-1)
            time = np.flatnonzero(time) if time.dtype == np.bool_ else time.astype(np.int64)
        time = np.where(time < 0, time + self._len_along_dim0, time)
        if time.size and not (int(time.min()) >= 0 and int(time.max()) < times):
            raise OutOfRangeError(f"slots {int(time.min())} to {int(time.max())}, there are {times}")
        return (time[:, None] * width + np.arange(width)).reshape(len(time), *self._streams)

    def _write(self, tensors: Mapping[Key, torch.Tensor], slots: NDArray[np.int64], *, in_order: bool) -> None:
        dims, keep = slots.ndim, len(self._frame_of)
        slots = slots.reshape(len(slots), -1)
        if in_order and len(slots) > keep:  # of a batch longer than the storage, the end stays
            slots, tensors = slots[-keep:], {key: tensor[-keep:] for key, tensor in tensors.items()}
        if self._tail.length and self._tail_slots[0].shape[1:] != slots.shape[1:]:
            self._pack_tail()
        block = {
            leaf.key: host_array(_streams_first(tensors[leaf.key], dims))
            for leaf in self._leaves
            if leaf.kind != "column"
        }
        if len(slots) < _ENOUGH_STEPS and block:
            self._keep_raw(block, slots)
        else:
            self._pack_tail()
            step = max(_BLOCK_STEPS, _BLOCK_ROWS // slots.shape[1])
            for first in range(0, len(slots), step):
                part = slice(first, first + step)
                self._pack({key: array[:, part] for key, array in block.items()}, slots[part])
        where = torch.from_numpy(slots.reshape(-1))
        for key, column in self._columns.items():
            column.flatten(0, len(self._streams))[where] = tensors[key].detach().cpu().flatten(0, dims - 1)
        self._number(slots, tensors, in_order=in_order)

    def _keep_raw(self, block: Block, slots: NDArray[np.int64]) -> None:
        start = self._tail.length * slots.shape[1]
        rows = np.arange(start, start + slots.size).reshape(slots.shape)
        self._tail.append({repr(key): array.swapaxes(0, 1) for key, array in block.items()})
        self._tail_slots.append(slots)
        self._frame_of.reshape(-1)[slots] = _TAIL - rows
        enough = self._tail.length >= _ENOUGH_STEPS and self._tail.nbytes >= _TAIL_BYTES
        if self._tail.length >= _BLOCK_STEPS or enough:
            self._pack_tail()

    def _pack_tail(self) -> None:
        if not self._tail.length:
            return
        slots = np.concatenate(self._tail_slots)
        rows = _TAIL - np.arange(slots.size).reshape(slots.shape)
        overwritten = self._frame_of.reshape(-1)[slots] != rows
        values = self._tail.values()
        block = {leaf.key: values[repr(leaf.key)].swapaxes(0, 1) for leaf in self._leaves if leaf.kind != "column"}
        self._pack(block, slots, overwritten)
        self._tail.clear()
        self._tail_slots = []

    def _pack(
        self,
        block: Block,
        slots: NDArray[np.int64],
        overwritten: NDArray[np.bool_] | None = None,
    ) -> None:
        """Pack ``[streams, time, ...]`` and point the slots ``[time, streams]`` at the frames it became."""
        if not block:  # flags and ids only
            self._frame_of.reshape(-1)[slots] = 0
            return
        if self._layout is None:
            self._leaves = find_twins(self._leaves, block)
            self._layout = plan_rows(self._leaves, self._packing)
            self._log = FrameLog(self._layout.packers, **self._options)
        rows, runs, position = to_frames(self._leaves, self._layout, block)
        start = self._log.append(rows, runs)
        frames = (position + start).T
        flat = self._frame_of.reshape(-1)
        if overwritten is None or not overwritten.any():
            flat[slots.reshape(-1)] = frames.reshape(-1)
        else:
            flat[slots[~overwritten]] = frames[~overwritten]

    def _free(self) -> None:
        """Drop frames that no slot needs any more; pack anew if writes out of order have left many of them.

        Looking for them takes a pass over all slots: only when enough frames came to pay for it.
        """
        if self._layout is None or self._len < self.max_size:
            return
        if self._log.end - self._freed_end <= self.max_size // _FREED_PARTS:
            return
        self._freed_end = self._log.end
        live = self._frame_of[self._frame_of >= 0]
        if not len(live):
            return
        self._log.drop_before(int(live.min()))
        if self._log.end - self._log.first > 4 * self.max_size + 4 * _BLOCK_ROWS:
            self._repack()

    def _repack(self) -> None:
        self._pack_tail()
        self._tail_slots = []
        old, layout = self._log, self._layout
        assert layout is not None  # noqa: S101 - there are frames
        log = FrameLog(layout.packers, **self._options)
        flat = self._frame_of.reshape(-1)
        used = np.flatnonzero(flat >= 0)
        width = 2 if any(leaf.kind == NEXT for leaf in self._leaves) else 1  # without `next`, no frame after is read
        step = max(_BLOCK_STEPS, (32 << 20) // max(1, layout.row_bytes))
        new = np.empty(len(used), np.int64)
        for first in range(0, len(used), step):
            frames = flat[used[first : first + step]]
            wanted = (frames[:, None] + np.arange(width)).reshape(-1)
            rows = [old.fetch(old.locate(column, wanted)) for column in range(len(layout.packers))]
            runs = np.full(len(frames), width) if width > 1 else np.array([len(frames)])
            start = log.append(rows, runs)
            new[first : first + step] = start + width * np.arange(len(frames))
        flat[used] = new
        self._log, self._saved, self._freed_end = log, {}, log.end

    def _number(self, slots: NDArray[np.int64], tensors: Mapping[Key, torch.Tensor], *, in_order: bool) -> None:
        """Keep track of which slots follow each other in an episode."""
        width, length = math.prod(self._streams), len(self._frame_of)
        times = slots[:, 0] // width
        follows = self._newest < 0 or int(times[0]) == (self._newest + 1) % length
        consecutive = bool((np.diff(times) % length == (1 if length > 1 else 0)).all())
        if in_order:
            self._newest = int(times[-1])
        if not (in_order and follows and consecutive and slots.shape[1] == width):
            self._runs.stale = True
            return

        def flags(key: Key) -> NDArray[Any]:
            return tensors[key].detach().cpu().numpy().reshape(slots.shape)

        ended = (
            flags(self.end_key).astype(np.bool_) if self.end_key in self._columns else np.zeros(slots.shape, np.bool_)
        )
        ids = next((flags(key) for key in _IDS if key in self._columns), None)
        self._runs.write(times, ended, ids)

    @property
    def runs(self) -> Runs:
        """Which slots follow each other in an episode; found anew if slots were written out of order."""
        with self._lock:
            if self._runs.stale:
                length, width = self._len_along_dim0, math.prod(self._streams)
                order = (np.arange(length) + self.oldest) % length

                def flags(key: Key) -> NDArray[Any]:
                    values: NDArray[Any] = self._columns[key][:length].numpy().reshape(length, width)[order]
                    return values

                self._runs = Runs(len(self._frame_of), width)
                known = self.end_key in self._columns
                ended = flags(self.end_key).astype(np.bool_) if known else np.zeros((length, width), np.bool_)
                self._runs.write(order, ended, next((flags(key) for key in _IDS if key in self._columns), None))
            return self._runs

    @property
    def oldest(self) -> int:
        """The slot along time that will be overwritten next."""
        return (self._newest + 1) % len(self._frame_of) if self.initialized and self._is_full else 0

    # Reading

    def get(self, index: Any) -> Any:
        """Return steps, decoded; a TensorDict or tensor in memory of its own.

        Args:
            index: One slot, or several: a tensor, a mask, a slice, a list; a tuple of those for ``ndim=2``.

        Raises:
            OutOfRangeError: If there is no such slot.
            ReplayError: If nothing was stored yet.
        """
        return self._read(index, late=False)

    def __getitem__(self, index: Any) -> Any:
        """Return steps whose tensors are decoded when they are asked for."""
        return self._read(index, late=True)

    def _read(self, index: Any, *, late: bool) -> Any:
        with self._lock:
            if not self.initialized:
                raise ReplayError("there is nothing to read: nothing was stored yet")
            plain = _plain_index(index)
            length = self._len_along_dim0
            try:
                frames = np.asarray(self._frame_of[:length][plain])
                columns = {key: _copied(column[:length].numpy()[plain]) for key, column in self._columns.items()}
            except IndexError as error:
                raise OutOfRangeError(f"index {str(index)[:60]} is out of range: {error}") from None
            if bool((frames == _NONE).any()):
                raise OutOfRangeError(f"index {str(index)[:60]} holds slots that were never written")
            reading = _Reading(self._leaves, self._layout, self._log, columns, frames, self._tail)
        batch = torch.Size(frames.shape)
        if self._bare:
            (leaf,) = reading.leaves
            return reading.tensor(leaf, self.device)
        sizes = {key: batch + torch.Size(extra) for key, extra in self._nodes.items()}
        makers = {leaf.key: functools.partial(reading.tensor, leaf, self.device) for leaf in reading.leaves}
        if not late:
            members: dict[Key, Any] = {key: size for key, size in sizes.items() if key}
            for key, make in makers.items():
                members[key] = make()
            return build(members, batch, device=self.device)
        rows = late_tensordict(makers, sizes, self.device)
        if isinstance(plain, slice) and plain == slice(None):
            rows.__dict__["_write"] = self._write_rows
        return rows

    def _write_rows(self, index: Any, rows: Any) -> None:
        time = np.arange(self._len_along_dim0)[_plain_index(index)]
        self.set(
            torch.from_numpy(np.atleast_1d(time)), TensorDict(dict(rows.items()), rows.batch_size), set_cursor=False
        )

    # What TorchRL asks of a storage

    @property
    def _storage(self) -> PackedRows | None:
        return self._read(slice(None), late=True) if self.initialized and not self._bare else None

    @property
    def _total_shape(self) -> torch.Size | None:
        return torch.Size(self._frame_of.shape) if self.initialized else None

    def _empty(self) -> None:
        with self._lock:
            self._forget()
        self._bump_mutation_revision()

    def flatten(self) -> Any:
        """Return the steps as an ordinary storage with one axis, decoded."""
        return self if self.ndim == 1 else TensorStorage(self.get(slice(None)).flatten(0, self.ndim - 1))

    def contains(self, item: Any) -> Any:
        """Tell whether a slot along time holds steps."""
        return super().contains(item)

    def get_stats(self) -> dict[str, float]:
        """Return counts, bytes, ratio and the hits of the cache, all exact.

        ``raw_bytes`` is what a ``LazyTensorStorage`` would take for as many steps, `next` included.
        """
        with self._lock:
            per_step = sum(math.prod(leaf.shape) * leaf.torch_dtype.itemsize for leaf in self._leaves)
            columns = sum(column.nbytes for column in self._columns.values()) if self.initialized else 0
            index = self._frame_of.nbytes + self._runs.of.nbytes if self.initialized else 0
            held = self._log.packed_bytes + self._tail.nbytes + columns + index
            cache = self._log.cache
            asked = cache.hits + cache.misses
            return {
                "num_steps": len(self),
                "num_frames": self._log.end - self._log.first,
                "raw_bytes": per_step * len(self),
                "packed_bytes": self._log.packed_bytes,
                "tail_bytes": self._tail.nbytes,
                "column_bytes": columns,
                "index_bytes": index,
                "held_bytes": held,
                "compression_ratio": per_step * len(self) / held if held else 1.0,
                "cache_hits": cache.hits,
                "cache_misses": cache.misses,
                "hit_rate": cache.hits / asked if asked else 0.0,
            }

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values, in memory of their own; packed, as it is held."""
        from slipstream.replay.storage_state import storage_state  # noqa: PLC0415 - imports this module's neighbours

        with self._lock:
            return storage_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Become what `state_dict` was taken of, bit for bit; nothing is changed unless all of it fits.

        Raises:
            StateMismatchError: If it is of another size or number of axes, or not a state of such a storage.
        """
        from slipstream.replay.storage_state import load_storage_state  # noqa: PLC0415

        with self._lock:
            load_storage_state(self, state_dict)
        self._bump_mutation_revision()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state: dict[str, Any] = Storage.__getstate__(self)
            state["len__context"] = self._len
            for name in ("_frame_of", "_runs"):
                if name in state:
                    state[name] = copy.deepcopy(state[name])
            if "_columns" in state:  # as arrays: torch would open a file for each, to share what is not shared
                state["_columns"] = {key: np.array(column.numpy()) for key, column in self._columns.items()}
            state["_tail"], state["_tail_slots"] = copy.deepcopy(self._tail), list(self._tail_slots)
            state["_log"] = copy.copy(self._log)
        for name in ("_lock", "_saving", "_len_value"):
            state.pop(name, None)
        state["_saved"] = {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        length = state.pop("len__context", 0)
        if "_columns" in state:
            state["_columns"] = {key: torch.from_numpy(column) for key, column in state["_columns"].items()}
        Storage.__setstate__(self, state)
        self._lock, self._saving = threading.RLock(), threading.Lock()
        self._len = length

    def __repr__(self) -> str:
        held = format_bytes(self.get_stats()["held_bytes"])
        return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, len={len(self)}, holds={held})"


class _Reading:
    """Some steps that were located, decoded column by column when a tensor of them is asked for."""

    def __init__(
        self,
        leaves: list[Leaf],
        layout: RowLayout | None,
        log: FrameLog,
        columns: dict[Key, NDArray[Any]],
        frames: NDArray[np.int64],
        tail: Tail,
    ) -> None:
        self.leaves, self._layout, self._log, self._columns = leaves, layout, log, columns
        self._shape = frames.shape
        flat = frames.reshape(-1)
        self._packed = flat >= 0
        self._apart: dict[tuple[int, bool], Located] = {}
        self._together: dict[int, Located] = {}
        self._rows: dict[int, list[Rows]] = {}
        if layout is not None and self._packed.any():
            used = flat[self._packed]
            afters = {layout.fields[leaf.field].column for leaf in leaves if leaf.kind == "next"}
            for column in range(len(layout.packers)):
                if column == VECTORS or (column in afters and log.locate(column, used[:1]).stacked):
                    both = np.concatenate([used, used + 1]) if column in afters else used
                    self._together[column] = log.locate(column, both)
                    continue
                self._apart[column, False] = log.locate(column, used)
                if column in afters:
                    self._apart[column, True] = log.locate(column, used + 1)
        self._raw = {}
        if not self._packed.all() and tail.length:
            rows = _TAIL - flat[~self._packed]
            for name, values in tail.values().items():
                self._raw[name] = values.reshape(values.shape[0] * values.shape[1], *values.shape[2:])[rows]
        self._lock = threading.Lock()

    def tensor(self, leaf: Leaf, device: torch.device) -> torch.Tensor:
        """Return one tensor of these steps."""
        if leaf.kind == "column":
            return leaf.tensor(self._columns[leaf.key]).reshape((*self._shape, *leaf.shape)).to(device)
        if not len(self._packed):
            return torch.empty((*self._shape, *leaf.shape), dtype=leaf.torch_dtype, device=device)
        raw = self._raw.get(repr(leaf.key))
        if raw is None:
            values = self._values(leaf)
        elif not self._packed.any():
            values = raw
        else:
            values = np.empty((len(self._packed), *leaf.shape), raw.dtype)
            values[self._packed] = self._values(leaf)
            values[~self._packed] = raw
        return leaf.tensor(values).reshape((*self._shape, *leaf.shape)).to(device)

    def _values(self, leaf: Leaf) -> NDArray[Any]:
        assert self._layout is not None  # noqa: S101 - there are packed frames
        field = self._layout.fields[leaf.field]
        column, after = field.column, leaf.kind == "next"
        if column not in self._together:  # an image is alone in its column, and is not asked for twice
            return field.read(self._log.fetch(self._apart[column, after]))
        with self._lock:
            if column not in self._rows:
                self._rows[column] = self._read_together(column)
        return field.read(self._rows[column][after])

    def _read_together(self, column: int) -> list[Rows]:
        """Decode a column for these steps and for what they led to: both are in the same segments, mostly."""
        assert self._layout is not None  # noqa: S101 - there are packed frames
        located, count = self._together[column], int(np.count_nonzero(self._packed))
        if column == VECTORS:
            rows = self._log.fetch(located)
            return [rows[:count], rows[count:]]
        halves = [np.empty((count, self._layout.packers[column].row_bytes), np.uint8) for _ in range(2)]
        self._log.fetch(located, *halves)
        return halves


def _split(data: Any) -> tuple[dict[Key, torch.Tensor], dict[Key, tuple[int, ...]]]:
    """Return the tensors of a batch by nested key, and the axes that nested TensorDicts add to the batch size."""
    if isinstance(data, torch.Tensor):
        return {("_",): data}, {}
    try:
        members = flatten(data)
    except ValueError as error:
        raise ReplayError(str(error)) from error
    tensors: dict[Key, torch.Tensor] = {}
    nodes: dict[Key, tuple[int, ...]] = {(): ()}
    for key, value in members.items():
        if isinstance(value, torch.Size):
            nodes[key] = tuple(value[len(data.batch_size) :])
        elif not isinstance(value, torch.Tensor):
            raise UnsupportedStateError(f"{'/'.join(key)} is a {type(value).__qualname__}, expected a tensor")
        elif value.layout != torch.strided or value.is_quantized:
            raise UnsupportedStateError(f"{'/'.join(key)} has layout {value.layout}, expected a dense tensor")
        else:
            tensors[key] = value
    if not tensors:
        raise ReplayError("a batch has no tensors")
    return tensors, nodes


def _streams_first(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Turn ``[time, streams..., ...]`` into ``[streams, time, ...]``, which is how batches often lie in memory."""
    return tensor.unsqueeze(0) if dims == 1 else tensor.flatten(1, dims - 1).transpose(0, 1)


def _plain(index: Any) -> Any:
    return index.cpu().numpy() if isinstance(index, torch.Tensor) else index


def _plain_index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_plain_index, index))
    if isinstance(index, range):
        return np.arange(index.start, index.stop, index.step)
    return _plain(index)


def _copied(array: Any) -> NDArray[Any]:
    return np.array(array)
