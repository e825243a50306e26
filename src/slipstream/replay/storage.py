"""`PackedEpisodeStorage`: a storage for TorchRL's replay buffers whose content stays packed."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.text import install_hint

try:
    from tensordict import is_non_tensor
    from torchrl.data.replay_buffers.storages import Storage
except ImportError as error:
    raise ImportError(f"PackedEpisodeStorage needs torchrl: {install_hint('train')}") from error

from slipstream.compiling import untraced
from slipstream.devices import resolve_device
from slipstream.errors import OutOfRangeError, ReplayError
from slipstream.lazy.views import makes_view
from slipstream.replay.batch import Batch, Layout, split, stack_steps, with_time
from slipstream.replay.contract import TorchRLContract
from slipstream.replay.indexing import RingShape, is_block, is_single, is_sliced
from slipstream.replay.objects import RAGGED, Objects, cells_of
from slipstream.replay.ring import RingOrder
from slipstream.replay.roles import Key, Roles, as_key
from slipstream.replay.saving import Saved
from slipstream.replay.schema import Leaf, Packing, check_leaf, describe, host_array
from slipstream.replay.steps import FoundSteps, Steps
from slipstream.replay.view import StoredTensor, Writer, make_view

logger = logging.getLogger(__name__)

Slots = NDArray[np.int64]


class PackedEpisodeStorage(TorchRLContract):
    """A TorchRL storage that keeps steps packed, each observation once, bit for bit.

    Pass it to ``ReplayBuffer(storage=...)`` instead of a ``LazyTensorStorage``, with any of TorchRL's samplers and
    writers. Observations under ``next`` that repeat the root one step later are not stored a second time; this is
    checked bit for bit for every step. Vectors of four steps are packed together, images one by one, and of stacks of
    frames (``[frames, height, width]``) each frame once. The newest steps stay raw until there are enough of them to
    pack. Flags and ids (one bool or integer per step) stay raw, so that samplers that look for the ends of episodes
    find them without decoding.

    Steps should come in the order of time: whole trajectories, or with ``ndim=2`` batches ``[environments, time]``.
    Interleaved steps of several environments compress poorly with ``ndim=1``.

    A batch is a TensorDict, a tensorclass, a tensor, or dicts, lists and tuples of tensors. The keys of batches may
    differ: steps that lack one read as zeros. Keys that tell where episodes end are required if the first batch has
    them. Text and other non-tensor data, and tensors that have another shape in each step, are kept as Python objects.

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
        self.device = torch.device("cpu")
        if not self._follows_device:
            self.device = resolve_device(device)
        self.roles = Roles(as_key(end_key), as_key(id_key))
        self.steps = Steps(0, Packing(jpeg, images=pack_images), cache_bytes=cache_bytes, threads=threads)
        self.capacity = max_size
        self._owner = os.getpid()
        self._last_cursor = None
        # What each folder holds of this storage.
        self.saved: dict[str, Saved] = {}
        self._forget()

    # Writing

    @untraced
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Put steps into slots. Blocks while they are packed, which readers do not.

        Args:
            cursor: One slot along time, or several: a tensor, a range, a slice; a tuple of tensors for single steps
                of a storage with ``ndim=2``.
            data: The steps; for several slots with time first. A list is a list of steps.
            set_cursor: Whether these are new steps, or changes of old ones. A change may lack keys.

        Raises:
            ReplayError: If dtypes or shapes are not those of the steps before, keys that tell where episodes end are
                missing, or this is a copy in another process; nothing has changed then.
            OutOfRangeError: If there is no such slot.
            UnsupportedStateError: If it holds sparse tensors, or a pytree something other than tensors.
        """
        self.check_process()
        if isinstance(data, list) and data:
            data = stack_steps(data)
        if is_block(cursor):
            self._set_block(cursor, data)
            return
        if is_single(cursor):
            data = with_time(data)
        is_pointwise = isinstance(cursor, tuple)
        dims = 1 if is_pointwise else self.ndim
        with self.steps.writing:
            batch = split(data, dims)
            if not math.prod(batch.shape):
                return
            ring = self.ring
            if not self.initialized:
                ring = RingShape.of(self.capacity, batch.shape[1:])
            self._check(batch, is_new=set_cursor)
            if not is_pointwise and batch.shape[1:] != ring.streams:
                raise ReplayError(f"a batch of {list(batch.shape)} steps, before it was [time, {list(ring.streams)}]")
            slots = ring.slots(cursor, batch.shape[0], self.num_times)
            if slots.shape != batch.shape:
                raise ReplayError(f"{list(slots.shape)} slots for {list(batch.shape)} steps")
            with self._unchanged_on_error():
                self._begin(batch, ring)
                self._write(batch, slots, cursor, is_new=set_cursor, is_pointwise=is_pointwise)
        self.note_mutation()

    @contextlib.contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """Forget what was declared in the block if it raises, for instance for lack of memory."""
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

    def _set_block(self, cursor: Any, data: Any) -> None:
        """Change the steps that an index of several axes means, with slices among its parts."""
        with self.steps.writing:
            slots = self.slots_at(cursor)
            if data.shape[: slots.ndim] != slots.shape:
                data = data.expand(*slots.shape, *data.shape[slots.ndim :])
            batch = split(data, slots.ndim)
            self.layout = self.layout.merged(batch.layout)
            self.write_leaves(slots, {**batch.tensors, **batch.objects})

    def _check(self, batch: Batch, *, is_new: bool) -> None:
        """Check a batch against what is stored."""
        known = self.steps.schema.leaves
        for key, tensor in batch.tensors.items():
            if key in known:
                check_leaf(known[key], tensor, len(batch.shape))
        if not self.initialized:
            return
        if (batch.layout.tree is None) != (self.layout.tree is None) or batch.layout.is_bare != self.layout.is_bare:
            raise ReplayError("a batch is of another type than those before it: TensorDict, tensor or pytree")
        missing = sorted(self.layout.required - set(batch.tensors))
        if not missing or not is_new:
            return
        needed = [key for key in missing if self.roles.are_played_by(key)]
        if needed or self.layout.tree is not None:
            raise ReplayError(f"the batch lacks {needed or missing}, which the steps before it have")
        # Once for each key: a writer may add keys to some batches only.
        logger.warning("a batch lacks %s, which steps before it have: they read as zeros", missing)
        self.layout = self.layout.without(missing)

    def _begin(self, batch: Batch, ring: RingShape) -> None:
        """Declare the leaves that are not known yet."""
        known = self.steps.schema.leaves
        new = {key: tensor for key, tensor in batch.tensors.items() if key not in known}
        leaves = describe(new, len(batch.shape), self.roles)
        if self.initialized:
            if leaves:
                self.steps.declare(leaves)
            self.layout = self.layout.merged(batch.layout)
            return
        self.steps.reset(ring.num_slots, ring.width)
        try:
            self.steps.declare(leaves)
        except Exception:
            self._forget()
            raise
        if self._follows_device and batch.tensors:
            self.device = next(iter(batch.tensors.values())).device
        if self.device.type == "meta":
            warnings.warn("device 'meta' holds no numbers and cannot be honored; it is reset to 'cpu'", stacklevel=2)
            self.device = torch.device("cpu")
        self.layout = batch.layout
        self.objects = Objects(ring.num_slots)
        self._order = RingOrder(ring, self.steps, self.roles)
        self.max_size = ring.num_slots
        self.initialized = True

    def _init(self, data: Any) -> None:
        """Declare what a step is made of, by an example; TorchRL's storages have this method, too."""
        with self.steps.writing:
            batch = split(with_time(data), self.ndim)
            self._begin(batch, RingShape.of(self.capacity, batch.shape[1:]))

    def _write(self, batch: Batch, slots: Slots, cursor: Any, *, is_new: bool, is_pointwise: bool) -> None:
        dims = slots.ndim
        total = slots.size
        slots = slots.reshape(len(slots), -1)
        # Of a batch longer than the storage, the end stays.
        if is_new and len(slots) > self.ring.num_times:
            slots = slots[-self.ring.num_times :]
            batch = batch.newest(self.ring.num_times)
        block = {key: host_array(_streams_first(tensor, dims)) for key, tensor in batch.tensors.items()}
        if is_new:
            block |= self._zeros(slots, block)

        def publish() -> None:
            self.objects.write(slots, batch.objects)
            if not is_new:
                self._order.note_change(slots, is_whole=self.layout.required <= set(batch.tensors))
                return
            self.objects.clear(slots, batch.objects)
            is_first = self.newest < 0
            if is_pointwise:
                self._order.note_scattered(slots)
            else:
                self._order.note_times(slots[:, 0] // self.ring.width)
            self._set_last_cursor(cursor)
            before = self._len
            self._len = min(before + total, self.max_size)
            is_longer = self._len > before
            # Other writes continue where the last one ended, or find all slots in use, so they leave none out.
            if is_first or self.run_table.has_holes or (self.run_table.is_stale and is_longer):
                self.run_table.find_holes(self.num_times)

        self.steps.write(slots, block, publish)

    def _zeros(self, slots: Slots, block: Mapping[Key, Any]) -> dict[Key, NDArray[Any]]:
        """Return zeros for the keys that new steps lack, so that they do not show what was in their slots before."""
        missing = [leaf for leaf in self.steps.leaves if leaf.key not in block]
        return {leaf.key: np.zeros((*slots.T.shape, *leaf.shape), leaf.carrier) for leaf in missing}

    @untraced
    def write(self, key: str | Key, value: Any, index: Any = slice(None)) -> None:
        """Change one tensor of some steps, or add it; steps elsewhere get zeros then.

        Only the tensors that are packed together with it are decoded. This is the explicit way to change what
        ``storage[index][key]`` returned.

        Args:
            key: Its key.
            value: A tensor or number, broadcast to the steps; or non-tensor data of tensordict.
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
        self.write_leaves(self.slots_at(index), {nested: value})

    @untraced
    def write_leaves(self, slots: Slots, values: Mapping[Key, Any]) -> None:
        """Change some leaves of the steps in slots ``[...]`` to values that broadcast to ``[..., leaf]``.

        Values are tensors, numbers, non-tensor data of tensordict, or arrays of Python objects.
        """
        self.check_process()
        with self.steps.writing:
            known = self.steps.schema.leaves
            tensors = {}
            objects = {}
            for key, value in values.items():
                if key in self.objects.keys or is_non_tensor(value) or getattr(value, "dtype", None) == np.object_:
                    objects[key] = _cells(value, slots.shape)
                    continue
                tensor = torch.as_tensor(value)
                if key in known:
                    leaf = known[key]
                    tensor = tensor.to(leaf.torch_dtype).expand((*slots.shape, *leaf.shape))
                if tuple(tensor.shape[: slots.ndim]) != slots.shape:
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
                self.objects.write(slots, objects)
                self._order.note_change(slots, is_whole=self.layout.required <= set(tensors))

            with self._unchanged_on_error():
                if new:
                    self.steps.declare(describe(new, slots.ndim, self.roles))
                self.layout = self.layout.merged(Layout.of_keys([*new, *objects]))
                self.steps.write(table, block, publish)
        self.note_mutation()

    # Reading

    @untraced
    def get(self, index: Any) -> Any:
        """Return steps, decoded, in new memory; or one tensor of all steps, by its key.

        Args:
            index: One slot, or several: a tensor, a mask, a slice, a list; a tuple of those for ``ndim=2``; or a key.

        Raises:
            OutOfRangeError: If there is no such slot, or its step was lost with a damaged file.
            ReplayError: If nothing was stored yet.
        """
        if _is_key(index):
            return self._member(index)
        return self._read(self.slots_at(index))

    @untraced
    def __getitem__(self, index: Any) -> Any:
        """Return steps whose tensors are decoded when they are asked for; or one tensor of all steps, by its key.

        Steps of a pytree, bare tensors and steps with ragged tensors are decoded at once and are copies.
        """
        if _is_key(index):
            return self._member(index)
        slots = self.slots_at(index)
        if not self.layout.is_tensordict or RAGGED in self.objects.keys:
            return self._read(slots)
        return make_view(self, slots, is_linked=makes_view(index))

    def _member(self, key: Any) -> Any:
        nested = as_key(key) or ()
        slots = self.slots_at(slice(None))
        if nested in self.steps.schema.leaves and self.layout.is_tensordict:
            return self.make_leaf(slots, nested)
        return self[:][key]

    def _read(self, slots: Slots) -> Any:
        """Return the steps in slots ``[...]``, decoded."""
        with self.steps.lock:
            found = self.steps.find(slots.reshape(-1))
            objects = self.objects.read(slots)
        batch = torch.Size(slots.shape)
        tensors = {leaf.key: self._tensor(found, leaf, batch) for leaf in found.schema.leaves.values()}
        return self.layout.build(batch, tensors, objects, self.device)

    def tensors(self, slots: Slots, writer: Writer | None = None, *, is_live: bool = False) -> dict[Key, StoredTensor]:
        """Return the tensors and non-tensor data of the steps in slots ``[...]``, by key.

        Args:
            slots: Which.
            writer: How changes of them reach the storage; None if they do not.
            is_live: Whether they are those that are in the slots when they are read, not those that are there now.
        """
        batch = torch.Size(slots.shape)
        make: Callable[[], Any] | None = None
        tensors = {}
        with self.steps.lock:
            objects = self.objects.read(slots)
            if not is_live:
                found = self.steps.find(slots.reshape(-1))
            leaves = self.steps.schema.leaves
        for key, leaf in leaves.items():
            if not is_live:
                make = functools.partial(self._tensor, found, leaf, batch)
            tensors[key] = StoredTensor(self, writer, slots, key, leaf, leaf.shape, make)
        for key, cells in objects.items():
            if not is_live:
                make = functools.partial(self.layout.non_tensor, key, cells)
            inner = self.layout.inner.get(key[:-1], self.layout.extra)
            tensors[key] = StoredTensor(self, writer, slots, key, None, inner, make)
        return tensors

    def make_leaf(self, slots: Slots, key: Key) -> Any:
        """Return one tensor of the steps in slots ``[...]``, decoded, or their non-tensor data."""
        with self.steps.lock:
            if key in self.objects.keys:
                return self.layout.non_tensor(key, self.objects.read(slots)[key])
            if key in self.steps.raw_keys:
                return self._order.raw(key)[torch.from_numpy(slots)].to(self.device)
            found = self.steps.find(slots.reshape(-1))
        return self._tensor(found, found.schema.leaves[key], torch.Size(slots.shape))

    def _tensor(self, found: FoundSteps, leaf: Leaf, batch: torch.Size) -> torch.Tensor:
        return leaf.tensor(found.array(leaf)).reshape((*batch, *leaf.shape)).to(self.device)

    def slots_at(self, index: Any) -> Slots:
        """Return the slots that an index means, all of which show steps.

        Raises:
            OutOfRangeError: If there is no such slot, or its step was lost with a damaged file.
            ReplayError: If nothing was stored yet.
        """
        with self.steps.lock:
            if not self.initialized:
                raise ReplayError("there is nothing to read: nothing was stored yet")
            try:
                slots = self.ring.at(index, self.num_times)
            except IndexError as error:
                raise OutOfRangeError(f"index {str(index)[:60]} is out of range: {error}") from None
            # A slice is read whole, with zeros for steps that were lost. Steps that are named have to exist.
            if not is_sliced(index) and self._order.is_unused(slots).any():
                raise OutOfRangeError(
                    f"index {str(index)[:60]} has slots without a step: never written, or lost with a damaged file"
                )
            return slots


def _streams_first(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Turn ``[time, streams..., ...]`` into ``[streams, time, ...]``, which is how batches often lie in memory."""
    return tensor.unsqueeze(0) if dims == 1 else tensor.flatten(1, dims - 1).transpose(0, 1)


def _cells(value: Any, shape: tuple[int, ...]) -> NDArray[np.object_]:
    """Return an object for each step."""
    if isinstance(value, np.ndarray):
        return value
    if is_non_tensor(value) and tuple(value.batch_size[: len(shape)]) == shape:
        return cells_of(value.tolist(), shape)
    cells = np.empty(shape, np.object_)
    single = value.data if is_non_tensor(value) else value
    for place in np.ndindex(shape):
        cells[place] = single
    return cells


def _is_key(index: Any) -> bool:
    return isinstance(index, str) or (
        isinstance(index, tuple) and bool(index) and all(isinstance(part, str) for part in index)
    )
