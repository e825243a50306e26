"""`PackedObservations`: what the steps of a stable-baselines3 buffer saw and led to, packed.

Slots are numbered ``step * num_envs + environment``. Keys are ``()`` for observations that are arrays, and ``(name,)``
for the parts of dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from slipstream.checks import require_count
from slipstream.errors import StateMismatchError
from slipstream.replay.roles import Key
from slipstream.replay.saving import from_state, to_state
from slipstream.replay.schema import FRAME, STEP, Leaf, Packing, leaf_of_array
from slipstream.replay.steps import FoundSteps, Steps
from slipstream.trajectory import NEXT

Slots = NDArray[np.int64]
Observation = Mapping[Key, NDArray[Any]]
"""Arrays ``[environments, ...]`` or ``[slots, ...]`` by key."""

# Leaves need a key that is not empty, and must not start with NEXT if they are not one.
_ROOT = "observation"
_STEPS_AT_ONCE = 64
_PARALLEL_BYTES = 1 << 20


class PackedObservations:
    """Observations of a ring of steps, each stored once; see the module. Not thread-safe.

    Args:
        num_steps: The length of the ring.
        num_envs: How many environments step side by side.
        parts: Shape and dtype of each part of an observation, by key.
        joined: Whether the ``next`` of a step is always read from the step after it, as in SB3's buffers with
            ``optimize_memory_usage``. By default it is what was written, and stored separately where it differs.
        pack_images: Whether to pack images; frames of stacks are stored once in any case.
        cache_bytes: How many bytes of decoded vectors to keep.
        threads: How many threads pack and unpack; by default one per core, or one if steps are small.

    Raises:
        ConfigurationError: If an option is invalid.
        ReplayError: If elements are not plain numbers.
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        parts: Mapping[Key, tuple[tuple[int, ...], DTypeLike]],
        *,
        joined: bool,
        pack_images: bool,
        cache_bytes: int,
        threads: int | None,
    ) -> None:
        require_count("cache_bytes", cache_bytes, 0)
        if threads is not None:
            require_count("threads", threads)
        self._num_steps = num_steps
        self._num_envs = num_envs
        self._parts = dict(parts)
        self._joined = joined
        self._pack_images = pack_images
        self._cache_bytes = cache_bytes
        self._threads = threads
        self._steps = self._new_steps()
        self.reset()

    def _new_steps(self) -> Steps:
        threads = self._threads
        nbytes = 0
        for shape, dtype in self._parts.values():
            nbytes += self._num_envs * math.prod(shape) * np.dtype(dtype).itemsize
        # Starting threads takes longer than packing a few small steps.
        if threads is None and nbytes * _STEPS_AT_ONCE < _PARALLEL_BYTES:
            threads = 1
        return Steps(0, Packing(images=self._pack_images), cache_bytes=self._cache_bytes, threads=threads)

    def reset(self) -> None:
        """Forget all steps."""
        leaves: list[Leaf] = []
        for key, (shape, dtype) in self._parts.items():
            example = np.empty((0, *shape), dtype)
            if self._joined:
                leaves.append(leaf_of_array((_ROOT, *key), example, STEP))
            else:
                leaves.append(leaf_of_array((_ROOT, *key), example, FRAME))
                leaves.append(leaf_of_array((NEXT, _ROOT, *key), example, NEXT))
        self._steps.reset(self._num_steps * self._num_envs, self._num_envs)
        self._steps.settle(leaves)
        # If joined: what the newest step led to, and the step whose slots SB3 would overwrite with it.
        self._newest_next: Observation = {}
        self._after_newest = 0
        self._recent: tuple[Slots, FoundSteps] | None = None

    def write(self, step: int, obs: Observation, next_obs: Observation, publish: Callable[[], None]) -> None:
        """Write one step of all environments. Packs the newest steps if there are enough of them.

        Args:
            step: Which step of the ring.
            obs: What it saw. Kept, not copied.
            next_obs: What it led to. Kept, not copied.
            publish: Called when the step can be read.
        """
        # The engine takes [environments, steps, ...], here with one step.
        block: dict[Key, NDArray[Any]] = {}
        for key in self._parts:
            block[_ROOT, *key] = obs[key][:, None]
            if not self._joined:
                block[NEXT, _ROOT, *key] = next_obs[key][:, None]

        def written() -> None:
            self._recent = None
            if self._joined:
                self._newest_next = next_obs
                self._after_newest = (step + 1) % self._num_steps
            publish()

        slots = step * self._num_envs + np.arange(self._num_envs)
        self._steps.write(slots[None], block, written)

    def read(self, slots: Slots) -> tuple[Observation, Observation]:
        """Return what some steps saw and what they led to, in new memory. Whatever is packed is decoded once."""
        obs = {}
        next_obs = {}
        if not self._joined:
            found = self._steps.find(slots)
            leaves = found.schema.leaves
            for key in self._parts:
                obs[key] = found.array(leaves[_ROOT, *key])
                next_obs[key] = found.array(leaves[NEXT, _ROOT, *key])
            return obs, next_obs
        # Locate the steps and those after them at once: most of them are packed together.
        after = (slots + self._num_envs) % (self._num_steps * self._num_envs)
        both = np.concatenate([slots, after])
        found = self._steps.find(both)
        for key in self._parts:
            values = self._with_newest(found.array(found.schema.leaves[_ROOT, *key]), key, both)
            obs[key] = values[: len(slots)]
            next_obs[key] = values[len(slots) :]
        return obs, next_obs

    def read_part(self, key: Key, slots: Slots, *, after: bool) -> NDArray[Any]:
        """Return one part of what some steps saw or led to, in new memory."""
        leaf = (_ROOT, *key)
        if after:
            leaf = (NEXT, *leaf)
        # All parts of the same steps are read one after another, and those that are packed together are decoded once.
        recent = self._recent
        if recent is None or not np.array_equal(recent[0], slots):
            recent = (slots.copy(), self._steps.find(slots))
            self._recent = recent
        found = recent[1]
        return self._with_newest(found.array(found.schema.leaves[leaf]).copy(), key, slots)

    def _with_newest(self, values: NDArray[Any], key: Key, slots: Slots) -> NDArray[Any]:
        """Put what the newest step led to where SB3 has it: in the slots that are written next."""
        if self._newest_next:
            is_next = slots // self._num_envs == self._after_newest
            values[is_next] = self._newest_next[key][slots[is_next] % self._num_envs]
        return values

    # Saving

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_recent"]
        packed = to_state(self._steps.snapshot())
        # Pickling a tensor copies it in memory, pickling an array does not.
        for tensors in (packed["arrays"], *packed["columns"]):
            for name, tensor in tensors.items():
                tensors[name] = tensor.numpy()
        state["_steps"] = packed
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state.pop("_steps")
        self.__dict__.update(state)
        self._recent = None
        for arrays in (packed["arrays"], *packed["columns"]):
            for name, array in arrays.items():
                arrays[name] = torch.from_numpy(array)
        self._steps, lost, _ = self._new_steps().rebuild(from_state(packed))
        if len(lost):
            raise StateMismatchError(f"the pickled replay buffer lacks the observations of {len(lost)} steps")

    # Sizes

    @property
    def step_bytes(self) -> int:
        """What the observations of one step of one environment take in SB3's own buffer."""
        return self._steps.schema.step_bytes

    @property
    def packed_bytes(self) -> int:
        """The bytes of everything that is packed."""
        return self._steps.packed_bytes

    @property
    def open_bytes(self) -> int:
        """The memory of the newest steps, which are not packed yet."""
        nbytes = self._steps.open_bytes
        for values in self._newest_next.values():
            nbytes += values.nbytes
        return nbytes

    @property
    def index_bytes(self) -> int:
        """The memory of the table of slots, and what objects take besides their content."""
        return self._steps.table_bytes + self._steps.held_bytes - self._steps.packed_bytes
