"""What TorchRL asks of a storage besides `set` and `get`: sizes, random places, patches, copies for processes."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree
from torchrl.data import TensorStorage
from torchrl.data.replay_buffers.storages import Storage

from slipstream.compiling import untraced
from slipstream.errors import ReplayError
from slipstream.replay.batch import Layout
from slipstream.replay.checkpointer import PackedCheckpointer
from slipstream.replay.indexing import RingShape
from slipstream.replay.moments import WriterState, state_of_writer
from slipstream.replay.objects import Objects
from slipstream.replay.ring import RingOrder
from slipstream.replay.roles import Key, Roles, as_key
from slipstream.replay.runs import Runs
from slipstream.replay.saving import Saved
from slipstream.replay.schema import Leaf
from slipstream.replay.steps import Steps
from slipstream.replay.storage_state import load_packed, load_state, packed_snapshot, storage_state
from slipstream.replay.view import make_view
from slipstream.text import format_bytes


class TorchRLContract(TensorStorage):  # type: ignore[misc, unused-ignore]
    """The parts of `PackedEpisodeStorage` that TorchRL's buffers, samplers and writers call."""

    _default_checkpointer = PackedCheckpointer
    supports_conditional_update = True

    steps: Steps
    roles: Roles
    capacity: int
    layout: Layout
    objects: Objects
    saved: dict[str, Saved]
    _last_cursor: Any
    _num_steps: int
    _order: RingOrder
    _owner: int | None

    @property
    def _len(self) -> int:
        # TorchRL keeps it in memory that forked processes share: a child would have the length of its parent.
        return self._num_steps

    @_len.setter
    def _len(self, value: int) -> None:
        self._num_steps = value

    def _forget(self) -> None:
        """Become as after `__init__`."""
        self.max_size = self.capacity
        self.initialized = False
        self._len = 0
        self.steps.reset(0)
        self.layout = Layout()
        self.objects = Objects(0)
        self._order = RingOrder(RingShape(0, ()), self.steps, self.roles)
        self.saved.clear()

    def take_over(
        self, steps: Steps, layout: Layout, objects: Objects, shape: RingShape, table: Runs, newest: int, length: int
    ) -> None:
        """Become a storage that was loaded; `steps` must not be used any more."""
        # A folder names no classes, but this storage may know them.
        layout = layout.merged(self.layout) if layout.required == self.layout.required else layout
        self._forget()
        self.steps.become(steps)
        self.layout = layout
        self.objects = objects
        self._order = RingOrder(shape, self.steps, self.roles, table, newest)
        self.max_size = shape.num_slots
        self.initialized = True
        self._len = length
        self.note_mutation()

    # Order

    @property
    def ring(self) -> RingShape:
        """The ring of slots."""
        return self._order.shape

    @property
    def newest(self) -> int:
        """The slot along time that was written last."""
        return self._order.newest

    @property
    def oldest(self) -> int:
        """The slot along time that will be overwritten next."""
        return (self.newest + 1) % self.ring.num_times if self.initialized and self._is_full else 0

    @property
    def num_times(self) -> int:
        """How many slots along time are in use."""
        return -(-self._len // max(1, self.ring.width))

    @property
    def runs(self) -> NDArray[np.int64]:
        """Numbers ``[time, streams]`` that are equal for slots which follow each other in an episode."""
        return self._order.runs()

    @property
    def run_table(self) -> Runs:
        """The object that keeps track of runs."""
        return self._order.table

    def flags(self, key: Key, index: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Return a raw leaf of some steps, by their places along time and streams; None if there is none."""
        return self._order.flags(key, index)

    def require_roles(self) -> None:
        """Raise `ReplayError` unless steps tell where their episodes end."""
        self.roles.require(self.steps.raw_keys)

    @property
    def writer_state(self) -> WriterState | None:
        """The state of the writer that fills it, if it is known."""
        return state_of_writer(self._attached_entities)

    # Content

    @property
    def _storage(self) -> Any:
        """All slots, as TorchRL's storages have them: those that were not written yet are zero."""
        if not self.initialized:
            return None
        slots = self.ring.table()
        if not self.layout.is_tensordict:
            return self._read(slots)
        return make_view(self, slots, is_linked=True, is_live=True)

    @property
    def _storage_keys(self) -> None:
        # Nothing is locked, so every batch may have all its keys.
        return None

    @property
    def _total_shape(self) -> torch.Size | None:
        return torch.Size(self.ring.shape) if self.initialized else None

    @untraced
    def _empty(self) -> None:
        self.check_process()
        with self.steps.writing, self.steps.changing:
            self._forget()
        self.note_mutation()

    def note_mutation(self) -> None:
        """Count a change of the content, so that samplers drop what they derived from it."""
        super()._bump_mutation_revision()

    def _bump_mutation_revision(self) -> None:
        """Do nothing: TorchRL calls this after a change through a view, which was counted when it was made."""

    @untraced
    def _rand_given_ndim(self, batch_size: int) -> Any:
        """Draw steps at random, all with the same chance; those that were lost are never drawn."""
        return self._rand_given_ndim_impl(batch_size)

    @untraced
    def _rand_given_ndim_impl(self, batch_size: int) -> Any:
        if not self.run_table.has_holes:
            return super()._rand_given_ndim_impl(batch_size)
        sound = torch.from_numpy(self._order.sound(self.num_times))
        if not len(sound):
            raise ReplayError(f"there is nothing to sample: none of the first {self.num_times} slots has a step")
        drawn = sound[torch.randint(0, len(sound), (batch_size,), generator=self._rng)]
        places = np.unravel_index(drawn.numpy(), self.ring.shape)
        index = tuple(torch.from_numpy(np.ascontiguousarray(part)).to(self.device) for part in places)
        return index if self.ndim > 1 else index[0]

    def _conditional_patch_leaf(self, key: Any) -> torch.Tensor:
        """Return a tensor of all slots, decoded."""
        leaf: torch.Tensor = self.make_leaf(self.ring.table(), self._leaf_to_patch(key).key)
        return leaf

    def _leaf_to_patch(self, key: Any) -> Leaf:
        if not self.initialized:
            raise RuntimeError("there is nothing to update: nothing was stored yet")
        nested = as_key(key)
        if not self.layout.is_tensordict or nested not in self.steps.schema.leaves:
            raise KeyError(f"key {key!r} does not exist in the storage")
        return self.steps.schema.leaves[nested]

    def _validate_conditional_patch(
        self, index: torch.Tensor, patch: Mapping[Any, torch.Tensor]
    ) -> dict[Any, torch.Tensor]:
        """Check dtypes and shapes as TorchRL does, without decoding what is stored."""
        count = len(index)
        checked = {}
        for key, value in patch.items():
            leaf = self._leaf_to_patch(key)
            tensor = torch.as_tensor(value)
            if tensor.dtype != leaf.torch_dtype:
                raise ValueError(f"dtype mismatch for patch key {key}: {tensor.dtype}, expected {leaf.torch_dtype}")
            try:
                tensor = tensor.reshape(count, *leaf.shape)
            except RuntimeError:
                raise ValueError(
                    f"shape mismatch for patch key {key}: {list(tensor.shape)}, expected {[count, *leaf.shape]}"
                ) from None
            checked[key] = tensor.to(self.device)
        return checked

    @untraced
    def _apply_conditional_patch(self, index: torch.Tensor, patch: Mapping[Any, torch.Tensor]) -> None:
        coordinates = tuple(index.unbind(-1)) if index.ndim > 1 else (index,)
        slots = self.slots_at(coordinates)
        self.write_leaves(slots, {as_key(key) or (): value for key, value in patch.items()})

    def flatten(self) -> Any:
        """Return the steps as an ordinary storage with one axis, decoded."""
        if self.ndim == 1:
            return self
        merge = functools.partial(torch.Tensor.flatten, start_dim=0, end_dim=self.ndim - 1)
        content = self.get(slice(None))
        if self.layout.tree is None:
            return TensorStorage(content.flatten(0, self.ndim - 1))
        return TensorStorage(pytree.tree_map(merge, content))

    def contains(self, item: Any) -> Any:
        """Return whether a slot along time holds steps."""
        return super().contains(item)

    def get_stats(self) -> dict[str, float]:
        """Return counts, bytes, ratio and the hits of the cache, all exact.

        ``raw_bytes`` is what a ``LazyTensorStorage`` would take for as many steps, `next` included. Python objects,
        such as text, are not counted.

        ``held_bytes`` is all memory of the storage. It has two parts: ``stored_bytes`` grows with the steps, and
        ``preallocated_bytes`` is allocated with the first batch for `max_size` steps: tables, and leaves that are not
        packed. ``compression_ratio`` counts the preallocated memory of the slots that are in use, so that a storage
        that is almost empty has the ratio of a full one.
        """
        with self.steps.lock:
            steps = self.steps
            raw = steps.schema.step_bytes * len(self)
            tables = steps.table_bytes + self.run_table.nbytes
            preallocated = steps.raw_bytes + tables
            stored = steps.held_bytes + steps.open_bytes + self.objects.nbytes
            in_use = stored + preallocated * len(self) / self.max_size
            asked = steps.cache.hits + steps.cache.misses
            return {
                "num_steps": len(self),
                "num_frames": steps.num_rows,
                "raw_bytes": raw,
                "packed_bytes": steps.packed_bytes,
                "tail_bytes": steps.open_bytes,
                "column_bytes": steps.raw_bytes,
                "index_bytes": tables + self.objects.nbytes,
                "stored_bytes": stored,
                "preallocated_bytes": preallocated,
                "held_bytes": stored + preallocated,
                "compression_ratio": raw / in_use if in_use else 1.0,
                "cache_hits": steps.cache.hits,
                "cache_misses": steps.cache.misses,
                "hit_rate": steps.cache.hits / asked if asked else 0.0,
            }

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values, in new memory; packed, as it is held.

        Raises:
            UnsupportedStateError: If there are objects other than text, numbers, and lists and dicts of those.
        """
        return storage_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Become what `state_dict` was taken of, bit for bit; nothing is changed unless all of it fits.

        A state of TorchRL's own storages is packed.

        Raises:
            StateMismatchError: If it is of another size or number of axes, or not a state of a storage.
            ReplayError: If this is a copy in another process.
        """
        self.check_process()
        load_state(self, state_dict)

    def check_process(self) -> None:
        """Raise in a process that got a copy from `multiprocessing`: what it writes would be lost without a word."""
        if self._owner != os.getpid() and multiprocessing.parent_process() is not None:
            raise ReplayError(
                "this storage is a copy in another process, and what is written to it would be lost: write in the "
                "process that created it, for instance by extending the buffer with the batches that a collector yields"
            )

    def __getstate__(self) -> dict[str, Any]:
        with self.steps.writing, self.steps.lock:
            state: dict[str, Any] = Storage.__getstate__(self)
            state["len__context"] = self._len
            state["content"] = packed_snapshot(self) if self.initialized else None
            state["objects"] = self.objects.copy()
        for name in ("steps", "_order", "_num_steps"):
            state.pop(name, None)
        state["packing"] = self.steps.settings()
        state["saved"] = {}
        if get_spawning_popen() is None:
            # An ordinary copy, which belongs to the process that loads it.
            state["_owner"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        content = state.pop("content")
        settings = state.pop("packing")
        layout = state.pop("layout")
        objects = state.pop("objects")
        state.pop("len__context")
        if state["_owner"] is None:
            state["_owner"] = os.getpid()
        Storage.__setstate__(self, state)
        self.steps = Steps(0, **settings)
        cursor = self._last_cursor
        self._forget()
        if content is not None:
            load_packed(self, content, layout, objects)
        self._last_cursor = cursor

    def __repr__(self) -> str:
        stats = self.get_stats()
        held = f"{format_bytes(stats['stored_bytes'])} + {format_bytes(stats['preallocated_bytes'])} preallocated"
        return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, len={len(self)}, holds={held})"
