"""`PackedEpisodeStorage`: a storage for TorchRL's replay buffers whose content stays packed."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.text import format_bytes, install_hint

try:
    from tensordict import is_tensor_collection
    from torchrl.data import TensorStorage
    from torchrl.data.replay_buffers.storages import Storage
except ImportError as error:
    raise ImportError(f"PackedEpisodeStorage needs torchrl: {install_hint('train')}") from error

from slipstream.batches import build
from slipstream.errors import OutOfRangeError, ReplayError, UnsupportedStateError
from slipstream.replay.batch import Layout, split
from slipstream.replay.checkpointer import PackedCheckpointer
from slipstream.replay.indexing import RingShape
from slipstream.replay.moments import WriterState, state_of_writer
from slipstream.replay.roles import Key, Roles, as_key
from slipstream.replay.runs import UNUSED, Runs
from slipstream.replay.saving import Saved
from slipstream.replay.schema import Leaf, Packing, check_leaf, describe, host_array
from slipstream.replay.steps import FoundSteps, Steps
from slipstream.replay.storage_state import load_snapshot, load_state, storage_snapshot, storage_state
from slipstream.replay.view import PackedRows, make_view

Tensors = Mapping[Key, torch.Tensor]


class PackedEpisodeStorage(TensorStorage):  # type: ignore[misc, unused-ignore]
    """A TorchRL storage that keeps steps packed, each observation once, bit for bit.

    Pass it to ``ReplayBuffer(storage=...)`` instead of a ``LazyTensorStorage``, with any of TorchRL's samplers and
    writers. Observations under ``next`` that repeat the root one step later are not stored a second time; this is
    checked bit for bit for every step. Vectors of four steps are packed together, images one by one, and of stacks of
    frames (``[frames, height, width]``) each frame once. The newest steps stay raw until there are enough of them to
    pack. Flags and ids (one bool or integer per step) stay raw, so that samplers that look for the ends of episodes
    find them without decoding.

    Steps should come in the order of time: whole trajectories, or with ``ndim=2`` batches ``[environments, time]``.
    Interleaved steps of several environments compress poorly with ``ndim=1``.

    Keys of the first batch are required in every later one. Keys that come later are added; steps without them read as
    zeros.

    Thread-safe: threads may read while one writes, and readers do not wait while steps are packed. ``storage.get``
    decodes at once and returns new memory. ``storage[index]`` decodes each tensor when it is asked for; for a slice or
    a number it is a view: ``set_``, ``fill_``, ``update_`` and assignments to it change the storage. Changing one of
    its tensors in place does not, because a plain tensor does not know where it came from: use `write`.

    Pickled to another process it is a copy, and as small as it is here. A process that ``multiprocessing`` started can
    read its copy; writing to it raises, because nobody else would see it.

    Args:
        max_size: How many steps; as for ``LazyTensorStorage``, rounded up to whole steps of all environments.
        device: Where what is read goes; ``"auto"`` for the device of the first batch.
        ndim: How many axes of a batch count as steps; 2 for ``[environments, time]``.
        jpeg: JPEG quality for all images, or by ``/``-joined key; lossless by default.
        pack_images: Whether to pack images at all; frames of stacks are stored once in any case.
        cache_bytes: How many bytes of decoded vectors to keep for the next batch.
        threads: How many threads pack and unpack; by default one per core.
        end_key: The flag that is true at the last step of an episode, of any dtype; with one flag per agent, any of
            them ends it. By default ``("next", "done")``.
        id_key: What is equal for all steps of an episode, of any dtype. By default ``("collector", "traj_ids")`` or
            ``"episode"``, if steps have one of them.

    Raises:
        ConfigurationError: If a setting is invalid.

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
    supports_conditional_update = True

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
        end_key: str | Key | None = None,
        id_key: str | Key | None = None,
    ) -> None:
        Storage.__init__(self, require_count("max_size", max_size))
        self.ndim = require_count("ndim", ndim)
        self._follows_device = device == "auto"
        self.device = torch.device("cpu" if self._follows_device else device)
        self.roles = Roles(as_key(end_key), as_key(id_key))
        self.steps = Steps(0, Packing(jpeg, images=pack_images), cache_bytes=cache_bytes, threads=threads)
        self.capacity = max_size
        self._owner = os.getpid()
        self._last_cursor = None
        # What each folder holds of this storage.
        self.saved: dict[str, Saved] = {}
        self._forget()

    def _forget(self) -> None:
        self.max_size = self.capacity
        self.initialized = False
        self._len = 0
        self.steps.reset(0)
        self.layout = Layout()
        self.ring = RingShape(0, ())
        self._runs = Runs(0, 1)
        self.newest = -1
        """The slot along time that was written last."""
        self.saved.clear()

    # Writing

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Put steps into slots. Blocks while they are packed, which readers do not.

        Args:
            cursor: One slot along time, or several: a tensor, a range, a slice; a tuple of tensors for single steps
                of a storage with ``ndim=2``.
            data: The steps, a TensorDict or a tensor; for several slots with time first.
            set_cursor: Whether these are new steps, or changes of old ones. A change may lack keys.

        Raises:
            ReplayError: If required keys are missing, dtypes or shapes are not those of the steps before, or this is
                a copy in another process; nothing has changed then.
            OutOfRangeError: If there is no such slot.
            UnsupportedStateError: If it holds something other than dense tensors.
        """
        self._check_process()
        if isinstance(data, list) and data:
            data = torch.stack(data, 0)
        if not isinstance(data, torch.Tensor) and not is_tensor_collection(data):
            raise UnsupportedStateError(f"a batch is a {type(data).__qualname__}, expected a TensorDict or a tensor")
        if isinstance(cursor, int) or (isinstance(cursor, torch.Tensor) and cursor.ndim == 0):
            data = data.unsqueeze(0) if isinstance(data, torch.Tensor) else data[None]
        is_pointwise = isinstance(cursor, tuple)
        dims = 1 if is_pointwise else self.ndim
        with self.steps.writing:
            tensors, layout = split(data, dims)
            batch = tuple(next(iter(tensors.values())).shape[:dims])
            if len(batch) < dims:
                raise ReplayError(f"a batch of shape {list(batch)} was given to a storage with ndim={self.ndim}")
            if not math.prod(batch):
                return
            ring = self.ring
            if not self.initialized:
                ring = RingShape.of(self.capacity, batch[1:])
            self._check(tensors, dims, is_new=set_cursor)
            if not is_pointwise and batch[1:] != ring.streams:
                raise ReplayError(f"a batch of {list(batch)} steps, before it was [time, {list(ring.streams)}]")
            slots = ring.slots(cursor, batch[0], self._num_times)
            if slots.shape != batch:
                raise ReplayError(f"{list(slots.shape)} slots for {list(batch)} steps")
            with self._unchanged_on_error():
                self._begin(tensors, dims, layout, ring)
                self._write(tensors, slots, cursor, is_new=set_cursor, is_pointwise=is_pointwise)
        self._bump_mutation_revision()

    @contextlib.contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """Forget what was declared in the block if it raises: there may be no memory to pack, for instance."""
        layout = self.layout
        schema = self.steps.schema
        was_initialized = self.initialized
        try:
            with self.steps.unchanged_on_error():
                yield
        except BaseException:
            if not was_initialized:
                self._forget()
            elif self.steps.schema is schema:
                self.layout = layout
            raise

    def _check_process(self) -> None:
        """Raise in a process that got a copy from `multiprocessing`: what it writes would be lost without a word."""
        if self._owner != os.getpid() and multiprocessing.parent_process() is not None:
            raise ReplayError(
                "this storage is a copy in another process, and what is written to it would be lost: write in the "
                "process that created it, for instance by extending the buffer with the batches that a collector yields"
            )

    def _check(self, tensors: Tensors, dims: int, *, is_new: bool) -> None:
        """Check a batch against what is stored."""
        known = self.steps.schema.leaves
        missing = sorted(self.layout.required - set(tensors))
        if missing and is_new:
            raise ReplayError(f"the batch lacks {missing}, which the steps before it have")
        for key, tensor in tensors.items():
            if key in known:
                check_leaf(known[key], tensor, dims)

    def _begin(self, tensors: Tensors, dims: int, layout: Layout, ring: RingShape) -> None:
        """Declare the leaves that are not known yet."""
        new = {key: tensor for key, tensor in tensors.items() if key not in self.steps.schema.leaves}
        if self.initialized and not new:
            return
        leaves = describe(new, dims, self.roles)
        if self.initialized:
            self.steps.declare(leaves)
            self.layout = self.layout.merged(layout)
            return
        self.steps.reset(ring.num_slots, ring.width)
        try:
            self.steps.declare(leaves)
        except Exception:
            self._forget()
            raise
        if self._follows_device:
            self.device = next(iter(tensors.values())).device
        self.ring = ring
        self.layout = layout
        self._runs = Runs(ring.num_times, ring.width)
        self.max_size = ring.num_slots
        self.initialized = True

    def _write(
        self, tensors: Tensors, slots: NDArray[np.int64], cursor: Any, *, is_new: bool, is_pointwise: bool
    ) -> None:
        dims = slots.ndim
        total = slots.size
        slots = slots.reshape(len(slots), -1)
        # Of a batch longer than the storage, the end stays.
        if is_new and len(slots) > self.ring.num_times:
            slots = slots[-self.ring.num_times :]
            tensors = {key: tensor[-self.ring.num_times :] for key, tensor in tensors.items()}
        block = {key: host_array(_streams_first(tensor, dims)) for key, tensor in tensors.items()}
        if is_new:
            block |= self._zeros(slots, block)

        def publish() -> None:
            if not is_new:
                if self.layout.required <= set(tensors):
                    self._runs.fill(slots.reshape(-1))
                self._runs.is_stale = True
                return
            is_first = self.newest < 0
            if is_pointwise:
                self._runs.write_scattered(slots.reshape(-1))
            else:
                times = slots[:, 0] // self.ring.width
                if self._runs.write(times, self.newest):
                    self._number(times)
                self.newest = int(times[-1])
            self._set_last_cursor(cursor)
            before = self._len
            self._len = min(before + total, self.max_size)
            is_longer = self._len > before
            # Other writes continue where the last one ended, or find all slots in use, so they leave none out.
            if is_first or self._runs.has_holes or (self._runs.is_stale and is_longer):
                self._runs.find_holes(self._num_times)

        self.steps.write(slots, block, publish)

    def _zeros(self, slots: NDArray[np.int64], block: Mapping[Key, Any]) -> dict[Key, NDArray[Any]]:
        """Return zeros for the keys that new steps lack, so that they do not show what was in their slots before."""
        missing = [leaf for leaf in self.steps.leaves if leaf.key not in block]
        return {leaf.key: np.zeros((*slots.T.shape, *leaf.shape), leaf.carrier) for leaf in missing}

    def write(self, key: str | Key, value: Any, index: Any = slice(None)) -> None:
        """Change one tensor of some steps, or add it; steps elsewhere get zeros then.

        Only the tensors that are packed together with it are decoded. This is the explicit way to change what
        ``storage[index][key]`` returned.

        Args:
            key: Its key.
            value: A tensor or number, broadcast to the steps.
            index: Which steps, as for `get`.

        Raises:
            ReplayError: If the dtype or shape does not fit.
            OutOfRangeError: If there is no such slot.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> storage = PackedEpisodeStorage(10)
            >>> storage.set(range(4), TensorDict({"reward": torch.ones(4, 1)}, batch_size=[4]))
            >>> storage.write("reward", 5.0, slice(1, 3))
            >>> storage.get(slice(None))["reward"].flatten().tolist()
            [1.0, 5.0, 5.0, 1.0]
        """
        nested = as_key(key)
        if nested is None:
            raise ReplayError("key is None, expected the key of a tensor")
        slots = self._slots_at(index)
        self.write_leaves(slots, {nested: value})

    def write_leaves(self, slots: NDArray[np.int64], values: Mapping[Key, Any]) -> None:
        """Change some leaves of the steps in slots ``[...]`` to values that broadcast to ``[..., leaf]``."""
        self._check_process()
        with self.steps.writing:
            known = self.steps.schema.leaves
            tensors = {}
            for key, value in values.items():
                tensor = torch.as_tensor(value)
                if key in known:
                    leaf = known[key]
                    tensor = tensor.to(leaf.torch_dtype).expand(*slots.shape, *leaf.shape)
                check = tuple(tensor.shape[: slots.ndim])
                if check != slots.shape:
                    raise ReplayError(f"{'/'.join(key)!r} has shape {list(tensor.shape)} for {list(slots.shape)} steps")
                tensors[key] = tensor
            if not slots.size:
                return
            new = {key: tensor for key, tensor in tensors.items() if key not in known}
            table, order = self.ring.ordered(slots)
            block = {}
            for key, tensor in tensors.items():
                array = host_array(tensor)
                flat = array.reshape(slots.size, *array.shape[slots.ndim :])[order.reshape(-1)]
                block[key] = flat.reshape(*order.shape, *flat.shape[1:]).swapaxes(0, 1)

            def publish() -> None:
                self._runs.is_stale = True

            with self._unchanged_on_error():
                if new:
                    self.steps.declare(describe(new, slots.ndim, self.roles))
                    self.layout = self.layout.merged(Layout.of_keys(new))
                self.steps.write(table, block, publish)
        self._bump_mutation_revision()

    # Runs

    def _number(self, times: NDArray[np.int64]) -> None:
        """Number the runs of slots that were just written in order, without looking at the others."""
        looked_at = np.concatenate([times[:1] - 1, times]) % self.ring.num_times
        slots = (looked_at[:, None] * self.ring.width + np.arange(self.ring.width)).reshape(-1)
        ended, ids = self._ends_and_ids(torch.from_numpy(slots))
        self._runs.extend(times, ended, ids)

    def _ends_and_ids(self, slots: Any) -> tuple[NDArray[np.bool_] | None, NDArray[np.int64] | None]:
        """Return end flags and ids ``[time, streams]`` of whole slots along time."""
        flags = {key: self._raw(key)[slots] for key in self.steps.raw_keys if self.roles.are_played_by(key)}
        ended = self.roles.ends(flags, 1)
        if ended is not None:
            ended = ended.reshape(-1, self.ring.width)
        ids = self.roles.ids(flags, 1)
        if ids is not None:
            ids = ids.reshape(-1, self.ring.width)
        return ended, ids

    @property
    def runs(self) -> NDArray[np.int64]:
        """Numbers ``[time, streams]`` that are equal for slots which follow each other in an episode."""
        with self.steps.lock:
            if self._runs.is_stale:
                self._runs.number(*self._ends_and_ids(slice(None)))
            return self._runs.of

    @property
    def run_table(self) -> Runs:
        """The object that keeps track of runs."""
        return self._runs

    def restore_runs(self, runs: Runs) -> None:
        """Replace the object that keeps track of runs."""
        self._runs = runs

    def _raw(self, key: Key) -> torch.Tensor:
        """Return a raw leaf of all slots, not copied."""
        return self.steps.schema.leaves[key].tensor(self.steps.raw(key))

    def flags(self, key: Key, index: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Return a raw leaf of some steps, by their places along time and streams; None if there is none."""
        if key not in self.steps.raw_keys:
            return None
        flat = np.ravel_multi_index([part.numpy() for part in index], self.ring.shape)
        return self._raw(key)[torch.from_numpy(flat)]

    def require_roles(self) -> None:
        """Raise `ReplayError` unless steps tell where their episodes end."""
        self.roles.require(self.steps.raw_keys)

    @property
    def writer_state(self) -> WriterState | None:
        """The state of the writer that fills it, if it is known."""
        return state_of_writer(self._attached_entities)

    @property
    def oldest(self) -> int:
        """The slot along time that will be overwritten next."""
        return (self.newest + 1) % self.ring.num_times if self.initialized and self._is_full else 0

    @property
    def _num_times(self) -> int:
        """How many slots along time are in use."""
        return -(-self._len // self.ring.width)

    @property
    def num_times(self) -> int:
        """How many slots along time are in use."""
        return self._num_times

    # Reading

    def get(self, index: Any) -> Any:
        """Return steps, decoded, in new memory; or one tensor of all steps, by its key.

        Args:
            index: One slot, or several: a tensor, a mask, a slice, a list; a tuple of those for ``ndim=2``; or a key.

        Raises:
            OutOfRangeError: If there is no such slot, or its step was lost with a damaged file.
            ReplayError: If nothing was stored yet.
        """
        if _is_key(index):
            return self[:][index]
        slots = self._slots_at(index)
        found = self.steps.find(slots.reshape(-1))
        batch = torch.Size(slots.shape)
        if self.layout.is_bare:
            (leaf,) = found.schema.leaves.values()
            return self._tensor(found, leaf, batch)
        members: dict[Key, Any] = self.layout.nodes(batch)
        for leaf in found.schema.leaves.values():
            members[leaf.key] = self._tensor(found, leaf, batch)
        names = self.layout.names(len(batch))
        return self.layout.wrap(build(members, (*batch, *self.layout.extra), names=names, device=self.device))

    def __getitem__(self, index: Any) -> Any:
        """Return steps whose tensors are decoded when they are asked for; or one tensor of all steps, by its key."""
        if _is_key(index):
            return self[:][index]
        if self.layout.is_bare:
            return self.get(index)
        return self.view(self._slots_at(index), is_linked=_is_view(index))

    def view(self, slots: NDArray[np.int64], *, is_linked: bool) -> Any:
        """Return the steps in slots ``[...]``, decoded when they are asked for.

        Args:
            slots: Which.
            is_linked: Whether changes of what it returns change the storage.
        """
        found = self.steps.find(slots.reshape(-1))
        batch = torch.Size(slots.shape)
        makers = {}
        for leaf in found.schema.leaves.values():
            makers[leaf.key] = functools.partial(self._tensor, found, leaf, batch)
        rows = make_view(self, slots, makers, self.layout, is_linked=is_linked)
        return self.layout.wrap(rows)

    def make_leaf(self, slots: NDArray[np.int64], key: Key) -> torch.Tensor:
        """Return one tensor of the steps in slots ``[...]``, decoded."""
        found = self.steps.find(slots.reshape(-1))
        return self._tensor(found, found.schema.leaves[key], torch.Size(slots.shape))

    def _tensor(self, found: FoundSteps, leaf: Leaf, batch: torch.Size) -> torch.Tensor:
        return leaf.tensor(found.array(leaf)).reshape((*batch, *leaf.shape)).to(self.device)

    def _slots_at(self, index: Any) -> NDArray[np.int64]:
        """Return the slots that an index means, all of which show steps."""
        with self.steps.lock:
            if not self.initialized:
                raise ReplayError("there is nothing to read: nothing was stored yet")
            try:
                slots = self.ring.at(index, self._num_times)
            except IndexError as error:
                raise OutOfRangeError(f"index {str(index)[:60]} is out of range: {error}") from None
            # A slice is read whole, with zeros for steps that were lost. Steps that are named have to exist.
            if not _is_slice(index) and (self._runs.of.reshape(-1)[slots] == UNUSED).any():
                raise OutOfRangeError(
                    f"index {str(index)[:60]} has slots without a step: never written, or lost with a damaged file"
                )
            return slots

    # What TorchRL asks of a storage

    @property
    def _storage(self) -> PackedRows | None:
        return self[:] if self.initialized and not self.layout.is_bare else None

    @property
    def _total_shape(self) -> torch.Size | None:
        return torch.Size(self.ring.shape) if self.initialized else None

    def _empty(self) -> None:
        with self.steps.writing, self.steps.lock:
            self._forget()
        self._bump_mutation_revision()

    def _rand_given_ndim(self, batch_size: int) -> Any:
        """Draw steps at random, all with the same chance; those that were lost are never drawn."""
        if not self._runs.has_holes:
            return super()._rand_given_ndim(batch_size)
        sound = torch.from_numpy(np.flatnonzero(self._runs.of[: self._num_times].reshape(-1) != UNUSED))
        if not len(sound):
            raise ReplayError(f"there is nothing to sample: none of the first {self._num_times} slots has a step")
        drawn = sound[torch.randint(0, len(sound), (batch_size,), generator=self._rng)]
        places = np.unravel_index(drawn.numpy(), self.ring.shape)
        index = tuple(torch.from_numpy(np.ascontiguousarray(part)).to(self.device) for part in places)
        return index if self.ndim > 1 else index[0]

    def _conditional_patch_leaf(self, key: Any) -> torch.Tensor:
        nested = as_key(key)
        if not self.initialized or nested not in self.steps.schema.leaves:
            raise KeyError(f"key {key!r} does not exist in the storage")
        return self.make_leaf(self.ring.table()[: self._num_times], nested)

    def _apply_conditional_patch(self, index: torch.Tensor, patch: Mapping[Any, torch.Tensor]) -> None:
        coordinates = index.unbind(-1) if index.ndim > 1 else (index,)
        slots = self._slots_at(tuple(coordinates))
        self.write_leaves(slots, {as_key(key) or (): value for key, value in patch.items()})

    def flatten(self) -> Any:
        """Return the steps as an ordinary storage with one axis, decoded."""
        return self if self.ndim == 1 else TensorStorage(self.get(slice(None)).flatten(0, self.ndim - 1))

    def contains(self, item: Any) -> Any:
        """Return whether a slot along time holds steps."""
        return super().contains(item)

    def get_stats(self) -> dict[str, float]:
        """Return counts, bytes, ratio and the hits of the cache, all exact.

        ``raw_bytes`` is what a ``LazyTensorStorage`` would take for as many steps, `next` included.
        """
        with self.steps.lock:
            steps = self.steps
            raw = steps.schema.step_bytes * len(self)
            index = steps.table_bytes + self._runs.nbytes
            held = steps.held_bytes + steps.open_bytes + steps.raw_bytes + index
            asked = steps.cache.hits + steps.cache.misses
            return {
                "num_steps": len(self),
                "num_frames": steps.num_rows,
                "raw_bytes": raw,
                "packed_bytes": steps.packed_bytes,
                "tail_bytes": steps.open_bytes,
                "column_bytes": steps.raw_bytes,
                "index_bytes": index,
                "held_bytes": held,
                "compression_ratio": raw / held if held else 1.0,
                "cache_hits": steps.cache.hits,
                "cache_misses": steps.cache.misses,
                "hit_rate": steps.cache.hits / asked if asked else 0.0,
            }

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values, in new memory; packed, as it is held."""
        return storage_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Become what `state_dict` was taken of, bit for bit; nothing is changed unless all of it fits.

        A state of TorchRL's own storages is packed.

        Raises:
            StateMismatchError: If it is of another size or number of axes, or not a state of a storage.
        """
        load_state(self, state_dict)
        self._bump_mutation_revision()

    def __getstate__(self) -> dict[str, Any]:
        with self.steps.writing, self.steps.lock:
            state: dict[str, Any] = Storage.__getstate__(self)
            state["len__context"] = self._len
            state["content"] = storage_snapshot(self) if self.initialized else None
        for name in ("steps", "_runs", "_len_value"):
            state.pop(name, None)
        state["packing"] = self.steps.settings()
        state["saved"] = {}
        if get_spawning_popen() is None:
            # An ordinary copy, which belongs to whoever loads it.
            state["_owner"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        content = state.pop("content")
        settings = state.pop("packing")
        state.pop("len__context")
        if state["_owner"] is None:
            state["_owner"] = os.getpid()
        Storage.__setstate__(self, state)
        self.steps = Steps(0, **settings)
        cursor = self._last_cursor
        self._forget()
        if content is not None:
            load_snapshot(self, content)
        self._last_cursor = cursor

    def __repr__(self) -> str:
        held = format_bytes(self.get_stats()["held_bytes"])
        return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, len={len(self)}, holds={held})"


def _streams_first(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Turn ``[time, streams..., ...]`` into ``[streams, time, ...]``, which is how batches often lie in memory."""
    return tensor.unsqueeze(0) if dims == 1 else tensor.flatten(1, dims - 1).transpose(0, 1)


def _is_key(index: Any) -> bool:
    return isinstance(index, str) or (
        isinstance(index, tuple) and bool(index) and all(isinstance(part, str) for part in index)
    )


def _is_slice(index: Any) -> bool:
    return isinstance(index, slice)


def _is_view(index: Any) -> bool:
    """Return whether indexing a tensor with this returns a view of it, not a copy."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, (int, slice)) or part is Ellipsis for part in parts)
