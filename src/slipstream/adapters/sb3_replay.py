"""`SB3ReplayBuffer`: the replay buffer of stable-baselines3's off-policy algorithms, packed."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

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

from slipstream.adapters.sb3_packed import Observation, PackedObservations
from slipstream.adapters.sb3_stored import StoredObservations
from slipstream.replay.roles import Key

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecNormalize


class SB3ReplayBuffer(DictReplayBuffer):  # type: ignore[misc, unused-ignore]
    """A replay buffer for SAC, TD3, DQN and DDPG of stable-baselines3 that keeps observations packed, bit for bit.

    Pass it as ``replay_buffer_class``, with observations that are arrays, images or dictionaries of those. It draws the
    same random numbers as SB3's own buffers and returns the same batches, so training gives the same weights.

    Every observation is stored once, although SB3 adds it twice: as what a step saw and as what the step before led to.
    The two are compared bit for bit; where an episode ends, both are kept. Of stacked frames (``[frames, height,
    width]``, which is what ``VecFrameStack`` gives to an algorithm) each frame is stored once. Actions, rewards and
    flags are ordinary arrays, as in SB3's buffers. Up to 64 of the newest steps stay unpacked.

    ``optimize_memory_usage=True`` saves nothing here. Where SB3 supports it, batches are those of SB3 with that flag,
    in which the ``next`` of a last step is the first observation of another episode. Where SB3 refuses it (with
    dictionaries, or together with ``handle_timeout_termination``) it changes nothing.

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
        cache_bytes: How many bytes of decoded vectors to keep for the next batch; pays only for small buffers.
        threads: How many threads pack and unpack; by default one per core, or one if steps are too small to share.

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

    # SB3 declares them for dictionaries only.
    observation_space: Any
    obs_shape: Any

    # Arrays [buffer_size, n_envs, ...] that are not packed. Of these, only slots in use are pickled.
    PLAIN_ARRAYS: tuple[str, ...] = ("actions", "rewards", "dones", "timeouts")

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
        cache_bytes: int = 0,
        threads: int | None = None,
    ) -> None:
        # Skip the constructors of SB3's buffers, which allocate memory for all observations.
        super(ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.handle_timeout_termination = handle_timeout_termination
        is_dict = isinstance(observation_space, spaces.Dict)
        # SB3's methods read this. It is true only where SB3 supports it.
        self.optimize_memory_usage = optimize_memory_usage and not handle_timeout_termination and not is_dict
        grid = (self.buffer_size, n_envs)
        self.actions = np.zeros((*grid, self.action_dim), self._maybe_cast_dtype(action_space.dtype))
        self.rewards = np.zeros(grid, np.float32)
        self.dones = np.zeros(grid, np.float32)
        self.timeouts = np.zeros(grid, np.float32)
        self._set_packing(pack_images=pack_images, cache_bytes=cache_bytes, threads=threads)

    def _set_packing(self, **options: Any) -> None:
        """Start with no observations, packed with some options."""
        parts = {}
        for key, space, shape in self._parts():
            parts[key] = (shape, space.dtype)
        joined = self.optimize_memory_usage
        self._observations = PackedObservations(self.buffer_size, self.n_envs, parts, joined=joined, **options)

    def _parts(self) -> Iterator[tuple[Key, Any, tuple[int, ...]]]:
        """Yield key, space and shape of each part of an observation; one without a name if it is no dictionary."""
        if not isinstance(self.observation_space, spaces.Dict):
            yield (), self.observation_space, self.obs_shape
            return
        for name, shape in self.obs_shape.items():
            yield (name,), self.observation_space.spaces[name], shape

    def reset(self) -> None:
        """Forget all steps, and free the memory of their observations."""
        super().reset()
        self._observations.reset()

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one step of every environment. Every 64th call, or 16th if steps are large, packs those before it.

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
        # Convert everything first, so that a wrong shape changes nothing.
        shape = (self.n_envs,)
        actions = _converted(action.reshape(self.n_envs, self.action_dim), self.actions.shape[1:], self.actions.dtype)
        rewards = _converted(reward, shape, self.rewards.dtype)
        dones = _converted(done, shape, self.dones.dtype)
        timeouts = np.zeros(shape, self.timeouts.dtype)
        if self.handle_timeout_termination:
            timeouts[:] = [info.get("TimeLimit.truncated", False) for info in infos]

        def publish() -> None:
            self.actions[self.pos] = actions
            self.rewards[self.pos] = rewards
            self.dones[self.pos] = dones
            self.timeouts[self.pos] = timeouts
            self.pos += 1
            if self.pos == self.buffer_size:
                self.full = True
                self.pos = 0

        self._observations.write(self.pos, self._observed(obs), self._observed(next_obs), publish)

    def _observed(self, obs: Any) -> Observation:
        """Copy what all environments observed into arrays of the shapes and dtypes of the space."""
        observed = {}
        for key, space, shape in self._parts():
            values = obs
            if key:
                values = obs[key[0]]
            # NumPy cannot broadcast [n_envs] to [n_envs, 1].
            if isinstance(space, spaces.Discrete):
                values = values.reshape(self.n_envs, *shape)
            observed[key] = _converted(values, (self.n_envs, *shape), space.dtype)
        return observed

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
        env_inds = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        obs, next_obs = self._observations.read(batch_inds * self.n_envs + env_inds)
        dones = self.dones[batch_inds, env_inds] * (1 - self.timeouts[batch_inds, env_inds])
        rewards = self._normalize_reward(self.rewards[batch_inds, env_inds].reshape(-1, 1), env)
        kind: Any = ReplayBufferSamples
        if isinstance(self.observation_space, spaces.Dict):
            kind = DictReplayBufferSamples
        return kind(
            observations=self._to_tensors(obs, env),
            actions=self._to_tensor(self.actions[batch_inds, env_inds]),
            next_observations=self._to_tensors(next_obs, env),
            dones=self._to_tensor(dones.reshape(-1, 1)),
            rewards=self._to_tensor(rewards),
        )

    def _to_tensors(self, obs: Observation, env: VecNormalize | None) -> Any:
        """Return observations as SB3 does: a tensor, or a dictionary of tensors."""
        normalized: Any = self._normalize_obs(self._named(obs), env)
        if not isinstance(self.observation_space, spaces.Dict):
            return self._to_tensor(normalized)
        tensors = {}
        for name, array in normalized.items():
            tensors[name] = self._to_tensor(array)
        return tensors

    def _named(self, parts: Mapping[Key, Any]) -> Any:
        """Return the parts of an observation by name, or the only one if observations are no dictionaries."""
        if not isinstance(self.observation_space, spaces.Dict):
            return parts[()]
        return {key[0]: part for key, part in parts.items()}

    def _to_tensor(self, array: NDArray[Any]) -> torch.Tensor:
        # The arrays of a batch are new memory, so they need not be copied.
        tensor: torch.Tensor = self.to_torch(array, copy=False)
        return tensor

    @property
    def observations(self) -> Any:  # type: ignore[override, unused-ignore]
        """What all steps saw: `StoredObservations`, or a dictionary of them."""
        return self._stored(after=False)

    @property
    def next_observations(self) -> Any:  # type: ignore[override, unused-ignore]
        """What all steps led to: `StoredObservations`, or a dictionary of them."""
        if self.optimize_memory_usage:
            raise AttributeError("there are no next_observations with optimize_memory_usage=True, as in SB3's buffers")
        return self._stored(after=True)

    def _stored(self, *, after: bool) -> Any:
        stored = {}
        for key, space, shape in self._parts():
            read = functools.partial(self._observations.read_part, key, after=after)
            stored[key] = StoredObservations((self.buffer_size, self.n_envs, *shape), space.dtype, read)
        return self._named(stored)

    def get_stats(self) -> dict[str, float]:
        """Return how many transitions there are, and their memory in bytes.

        ``raw_bytes`` is what SB3's own buffer takes for as many steps with the same options. ``held_bytes`` is what
        this one takes: ``packed_bytes``, ``open_bytes`` for the newest steps, ``array_bytes`` for actions, rewards and
        flags, and ``index_bytes`` for tables and objects.
        """
        num_transitions = self.size() * self.n_envs
        packed = self._observations
        # Pages that were never written take no memory.
        array_bytes = 0
        for name in self.PLAIN_ARRAYS:
            array_bytes += getattr(self, name)[: self.size()].nbytes
        raw_bytes = array_bytes + packed.step_bytes * num_transitions
        held_bytes = packed.packed_bytes + packed.open_bytes + array_bytes + packed.index_bytes
        return {
            "num_transitions": num_transitions,
            "raw_bytes": raw_bytes,
            "held_bytes": held_bytes,
            "packed_bytes": packed.packed_bytes,
            "open_bytes": packed.open_bytes,
            "array_bytes": array_bytes,
            "index_bytes": packed.index_bytes,
            "compression_ratio": raw_bytes / held_bytes,
        }

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in self.PLAIN_ARRAYS:
            state[name] = state[name][: self.size()]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in self.PLAIN_ARRAYS:
            used = state[name]
            array = np.zeros((self.buffer_size, *used.shape[1:]), used.dtype)
            array[: len(used)] = used
            setattr(self, name, array)

    def __repr__(self) -> str:
        held = format_bytes(self.get_stats()["held_bytes"])
        return f"{type(self).__name__}({self.size()} of {self.buffer_size} steps, {self.n_envs} envs, holds={held})"


def _converted(values: Any, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Copy values into a new array, cast and broadcast as by an assignment to a slot of SB3's buffers."""
    array = np.empty(shape, dtype)
    array[...] = values
    return array
