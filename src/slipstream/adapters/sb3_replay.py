"""`SB3ReplayBuffer`: the replay buffer of stable-baselines3's off-policy algorithms, packed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.text import format_bytes, install_hint

try:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
except ImportError as error:
    raise ImportError(
        f"SB3ReplayBuffer needs stable-baselines3, which is not installed: {install_hint('adapters')}, or "
        "stable-baselines3 by itself"
    ) from error

from slipstream.adapters.sb3_stored import Slots, StoredObservations
from slipstream.checks import require_count
from slipstream.errors import ReplayError, StateMismatchError
from slipstream.replay.roles import Key
from slipstream.replay.saving import from_state, to_state
from slipstream.replay.schema import FRAME, STEP, Leaf, Packing, leaf_of_array
from slipstream.replay.steps import FoundSteps, Steps
from slipstream.trajectory import NEXT

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecNormalize

OBSERVATION = "observation"


class SB3ReplayBuffer(DictReplayBuffer):  # type: ignore[misc, unused-ignore]
    """A replay buffer for SAC, TD3, DQN and DDPG of stable-baselines3 that keeps observations packed, bit for bit.

    Pass it as ``replay_buffer_class``, with observations that are arrays, images or dictionaries of those. It draws the
    same random numbers as SB3's own buffers and returns the same batches, so training gives the same weights.

    Every observation is stored once, although SB3 adds it twice: as what a step saw and as what the step before led to.
    The two are compared bit for bit; where an episode ends, both are kept. Of stacked frames (``[frames, height,
    width]``, which is what ``VecFrameStack`` gives to an algorithm) each frame is stored once. Actions, rewards and
    flags are ordinary arrays, as in SB3's buffers. The newest 64 steps stay unpacked.

    ``optimize_memory_usage=True`` saves nothing here. Where SB3 supports it, batches are those of SB3 with that flag,
    in which the ``next`` of a last step is the first observation of another episode. Where SB3 refuses it (dictionaries,
    or together with ``handle_timeout_termination``) it changes nothing.

    ``model.save_replay_buffer`` pickles it as small as it is in memory, without the slots that are not in use.

    Args:
        buffer_size: How many transitions, of all environments together.
        observation_space: A space that SB3 supports.
        action_space: A space that SB3 supports.
        device: Where batches go.
        n_envs: How many environments are added to it side by side.
        optimize_memory_usage: See above.
        handle_timeout_termination: Whether an episode that was cut off by a time limit counts as not ended.
        pack_images: Whether to pack images; frames of stacks are stored once in any case.
        cache_bytes: How many bytes of decoded vectors to keep for the next batch.
        threads: How many threads pack and unpack; by default one per core.

    Raises:
        ImportError: If stable-baselines3 is not installed. Raised when the class is imported.
        ConfigurationError: If an option is invalid.
        ReplayError: If the elements of an observation are not plain numbers.

    Example:
        >>> from stable_baselines3 import SAC
        >>> from slipstream import SB3ReplayBuffer
        >>> model = SAC("MlpPolicy", "Pendulum-v1", replay_buffer_class=SB3ReplayBuffer, device="cpu")
        >>> model = model.learn(120)
        >>> model.replay_buffer.size()
        120
    """

    # Arrays [buffer_size, n_envs, ...] that are not packed. Of these, only slots in use are pickled.
    _plain_arrays: tuple[str, ...] = ("actions", "rewards", "dones", "timeouts")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        pack_images: bool = True,
        cache_bytes: int = 1 << 20,
        threads: int | None = None,
    ) -> None:
        # Skip the constructors of SB3's buffers, which allocate memory for all observations.
        super(ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.handle_timeout_termination = handle_timeout_termination
        is_dict = isinstance(observation_space, spaces.Dict)
        # SB3's methods read this. It is true only where SB3 supports it.
        self.optimize_memory_usage = optimize_memory_usage and not handle_timeout_termination and not is_dict
        self._spaces: dict[Key, spaces.Space[Any]] = {(OBSERVATION,): observation_space}
        self._shapes: dict[Key, tuple[int, ...]] = {(OBSERVATION,): self.obs_shape}
        if is_dict:
            self._spaces = {(OBSERVATION, name): space for name, space in observation_space.spaces.items()}
            self._shapes = {(OBSERVATION, name): shape for name, shape in self.obs_shape.items()}
        self._allocate()
        self._set_packing(pack_images=pack_images, cache_bytes=cache_bytes, threads=threads)

    def _allocate(self) -> None:
        grid = (self.buffer_size, self.n_envs)
        self.actions = np.zeros((*grid, self.action_dim), self._maybe_cast_dtype(self.action_space.dtype))
        self.rewards = np.zeros(grid, np.float32)
        self.dones = np.zeros(grid, np.float32)
        self.timeouts = np.zeros(grid, np.float32)

    def _set_packing(self, *, pack_images: bool, cache_bytes: int, threads: int | None) -> None:
        require_count("cache_bytes", cache_bytes, 0)
        if threads is not None:
            require_count("threads", threads)
        self._packing = {"pack_images": pack_images, "cache_bytes": cache_bytes, "threads": threads}
        self._steps = self._new_steps()
        self._forget()

    def _new_steps(self) -> Steps:
        options = dict(self._packing)
        return Steps(0, Packing(images=bool(options.pop("pack_images"))), **options)

    def _forget(self) -> None:
        """Forget all observations, and declare what one step consists of."""
        leaves: list[Leaf] = []
        for key, space in self._spaces.items():
            example = np.empty((0, *self._shapes[key]), space.dtype)
            if self.optimize_memory_usage:
                leaves.append(leaf_of_array(key, example, STEP))
            else:
                leaves.append(leaf_of_array(key, example, FRAME))
                leaves.append(leaf_of_array((NEXT, *key), example, NEXT))
        self._steps.reset(self.buffer_size * self.n_envs, self.n_envs)
        self._steps.settle(leaves)
        # With `optimize_memory_usage`, what the newest step led to. SB3 stores it in the slot of the oldest one.
        self._newest_next: dict[Key, NDArray[Any]] = {}
        self._recent: tuple[Slots, FoundSteps] | None = None

    def reset(self) -> None:
        """Forget all steps, and free the memory of their observations."""
        super().reset()
        self._forget()

    # Adding

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one step of every environment. Every 64th call packs the steps since the last time.

        Args:
            obs: What the step saw, ``[n_envs, ...]``, or a dictionary of such arrays.
            next_obs: What it led to; where an episode ended, the last observation of that episode.
            action: ``[n_envs, ...]``.
            reward: ``[n_envs]``.
            done: ``[n_envs]``, whether the episode ended.
            infos: One dictionary per environment; ``TimeLimit.truncated`` says that a time limit ended the episode.

        Raises:
            ValueError: If an array has another shape than its space; nothing has changed then.
        """
        block = self._observed(obs)
        after = self._observed(next_obs)
        if not self.optimize_memory_usage:
            block |= {(NEXT, *key): values for key, values in after.items()}
        row = {
            "actions": action.reshape(self.n_envs, self.action_dim),
            "rewards": np.broadcast_to(reward, self.n_envs),
            "dones": np.broadcast_to(done, self.n_envs),
        }
        if self.handle_timeout_termination:
            row["timeouts"] = np.array([info.get("TimeLimit.truncated", False) for info in infos])

        def publish() -> None:
            for name, values in row.items():
                getattr(self, name)[self.pos] = values
            if self.optimize_memory_usage:
                self._newest_next = after
            self._recent = None
            self.pos += 1
            if self.pos == self.buffer_size:
                self.full = True
                self.pos = 0

        slots = self.pos * self.n_envs + np.arange(self.n_envs)
        self._steps.write(slots[None], block, publish)

    def _observed(self, obs: Any) -> dict[Key, NDArray[Any]]:
        """Copy an observation into arrays ``[n_envs, 1, ...]`` of the dtypes of the spaces, by key."""
        block = {}
        for key, space in self._spaces.items():
            values = obs
            if len(key) > 1:
                values = obs[key[1]]
            shape = (self.n_envs, *self._shapes[key])
            # NumPy cannot broadcast [n_envs] to [n_envs, 1].
            if isinstance(space, spaces.Discrete):
                values = values.reshape(shape)
            array = np.empty(shape, space.dtype)
            array[...] = values
            block[key] = array[:, None]
        return block

    # Sampling

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw transitions at random, with replacement, as SB3's own buffers draw them.

        Args:
            batch_size: How many.
            env: Normalizes observations and rewards, if given.

        Returns:
            ``ReplayBufferSamples``, or ``DictReplayBufferSamples`` if observations are dictionaries. In new memory.
        """
        return ReplayBuffer.sample(self, batch_size, env)

    def _get_samples(self, batch_inds: NDArray[Any], env: VecNormalize | None = None) -> Any:
        env_inds = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))  # noqa: NPY002 - as SB3 draws
        obs, next_obs = self._read_both(batch_inds * self.n_envs + env_inds)
        dones = self.dones[batch_inds, env_inds] * (1 - self.timeouts[batch_inds, env_inds])
        rewards = self._normalize_reward(self.rewards[batch_inds, env_inds].reshape(-1, 1), env)
        is_dict = isinstance(self.observation_space, spaces.Dict)
        kind = DictReplayBufferSamples if is_dict else ReplayBufferSamples
        return kind(
            observations=self._to_tensors(obs, env),
            actions=self._to_tensor(self.actions[batch_inds, env_inds]),
            next_observations=self._to_tensors(next_obs, env),
            dones=self._to_tensor(dones.reshape(-1, 1)),
            rewards=self._to_tensor(rewards),
        )

    def _read_both(self, slots: Slots) -> tuple[dict[Key, NDArray[Any]], dict[Key, NDArray[Any]]]:
        """Return what some steps saw and what they led to, by key, in new memory; each packed unit is decoded once."""
        obs = {}
        next_obs = {}
        if not self.optimize_memory_usage:
            found = self._steps.find(slots)
            leaves = found.schema.leaves
            for key in self._spaces:
                obs[key] = found.array(leaves[key])
                next_obs[key] = found.array(leaves[NEXT, *key])
            return obs, next_obs
        after = (slots + self.n_envs) % (self.buffer_size * self.n_envs)
        both = np.concatenate([slots, after])
        found = self._steps.find(both)
        for key in self._spaces:
            values = self._with_newest(found.array(found.schema.leaves[key]), key, both)
            obs[key] = values[: len(slots)]
            next_obs[key] = values[len(slots) :]
        return obs, next_obs

    def _with_newest(self, values: NDArray[Any], key: Key, slots: Slots) -> NDArray[Any]:
        """Put what the newest step led to where SB3 has it: in the slot that is written next."""
        if self._newest_next:
            is_next = slots // self.n_envs == self.pos
            values[is_next] = self._newest_next[key][slots[is_next] % self.n_envs, 0]
        return values

    def _to_tensors(self, values: Mapping[Key, NDArray[Any]], env: VecNormalize | None) -> Any:
        """Return observations as SB3 does: a tensor, or a dictionary of tensors."""
        if not isinstance(self.observation_space, spaces.Dict):
            return self._to_tensor(self._normalize_obs(values[OBSERVATION,], env))
        named = self._normalize_obs({key[1]: array for key, array in values.items()}, env)
        return {name: self._to_tensor(array) for name, array in named.items()}

    def _to_tensor(self, array: NDArray[Any]) -> torch.Tensor:
        # Arrays of a batch are new memory, so they need not be copied.
        tensor: torch.Tensor = self.to_torch(array, copy=False)
        return tensor

    # What subclasses of SB3's buffers read

    @property
    def observations(self) -> Any:
        """What all steps saw: `StoredObservations`, or a dictionary of them."""
        return self._stored(())

    @property
    def next_observations(self) -> Any:
        """What all steps led to: `StoredObservations`, or a dictionary of them."""
        if self.optimize_memory_usage:
            raise AttributeError("there are no next_observations with optimize_memory_usage=True, as in SB3's buffers")
        return self._stored((NEXT,))

    def _stored(self, prefix: Key) -> Any:
        stored = {}
        for key, space in self._spaces.items():
            read = functools.partial(self._read_one, (*prefix, *key))
            stored[key[-1]] = StoredObservations(self.buffer_size, self.n_envs, self._shapes[key], space.dtype, read)
        if isinstance(self.observation_space, spaces.Dict):
            return stored
        return stored[OBSERVATION]

    def _read_one(self, key: Key, slots: Slots) -> NDArray[Any]:
        # All observations of the same steps are read one after another, and vectors are decoded together.
        recent = self._recent
        if recent is None or not np.array_equal(recent[0], slots):
            recent = (slots.copy(), self._steps.find(slots))
            self._recent = recent
        values = recent[1].array(recent[1].schema.leaves[key]).copy()
        return self._with_newest(values, key, slots)

    # Saving

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_steps", "_recent"):
            del state[name]
        for name in self._plain_arrays:
            state[name] = state[name][: self.size()]
        packed = to_state(self._steps.snapshot())
        # Tensors would be pickled by way of a copy in memory, arrays are not.
        packed["arrays"] = _to_arrays(packed["arrays"])
        packed["columns"] = [_to_arrays(column) for column in packed["columns"]]
        state["packed"] = packed
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = dict(state.pop("packed"))
        self.__dict__.update(state)
        for name in self._plain_arrays:
            used = state[name]
            array = np.zeros((self.buffer_size, *used.shape[1:]), used.dtype)
            array[: len(used)] = used
            setattr(self, name, array)
        packed["arrays"] = _from_arrays(packed["arrays"])
        packed["columns"] = [_from_arrays(column) for column in packed["columns"]]
        steps, lost, _ = self._new_steps().rebuild(from_state(packed))
        if len(lost):
            raise StateMismatchError(f"the pickled replay buffer lacks the observations of {len(lost)} steps")
        self._steps = steps
        self._recent = None

    # Statistics

    def get_stats(self) -> dict[str, float]:
        """Return how many transitions there are, and their memory in bytes.

        ``raw_bytes`` is what SB3's own buffer takes for as many steps with the same options, ``held_bytes`` what this
        one takes: ``packed_bytes``, ``open_bytes`` for the newest steps, ``array_bytes`` for actions, rewards and
        flags, ``index_bytes``, and what objects take besides their content.
        """
        num_transitions = self.size() * self.n_envs
        arrays = sum(getattr(self, name)[: self.size()].nbytes for name in self._plain_arrays)
        steps = self._steps
        with steps.lock:
            raw = arrays + steps.schema.step_bytes * num_transitions
            held = arrays + steps.held_bytes + steps.open_bytes + steps.table_bytes
            return {
                "num_transitions": num_transitions,
                "raw_bytes": raw,
                "held_bytes": held,
                "packed_bytes": steps.packed_bytes,
                "open_bytes": steps.open_bytes,
                "array_bytes": arrays,
                "index_bytes": steps.table_bytes,
                "compression_ratio": raw / held,
            }

    def __repr__(self) -> str:
        held = format_bytes(self.get_stats()["held_bytes"])
        return f"{type(self).__name__}({self.size()} of {self.buffer_size} steps, {self.n_envs} envs, holds={held})"


def _to_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _from_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
