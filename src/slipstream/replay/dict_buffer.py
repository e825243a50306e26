"""`DictReplayBuffer`: whole episodes in, batches of tensors out."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.devices import resolve_device
from slipstream.errors import ConfigurationError, ReplayError, StateMismatchError
from slipstream.replay.episode_state import RestoredEpisodes
from slipstream.replay.episodes import Batch, EpisodeStore


class DictReplayBuffer:
    """A replay buffer of dictionaries: add whole episodes, sample steps or sequences as tensors.

    The engine is an `EpisodeStore`: frames are kept once, packed, and the oldest episodes go, whole, when there are
    more frames than `max_size`. Threads may sample while one adds. Batches are new memory.

    Args:
        max_size: How many frames; an episode of T steps has T + 1.
        keys: What an episode has.
        device: Where batches go; ``"auto"`` for CUDA if there is a GPU, else the CPU.
        img_compressed: Whether to pack images (byte arrays of two axes or more, a kilobyte or larger).
        max_bytes: Evict the oldest episodes when there are more packed bytes than this, too.
        jpeg: JPEG quality for all images, or by name; without loss by default.
        seed: Seed of `sample`; random by default.

    Raises:
        ConfigurationError: If a setting is invalid.

    Example:
        >>> import numpy as np
        >>> buffer = DictReplayBuffer(10_000, ["image", "action", "reward"], "cpu", img_compressed=True, seed=0)
        >>> episode = {"image": np.zeros((21, 3, 64, 64), np.uint8), "action": np.zeros((20, 2), np.float32)}
        >>> buffer.add(episode | {"reward": np.zeros(20, np.float32)})
        0
        >>> batch = buffer.sample(8)
        >>> batch["next_image"].shape, len(buffer)
        (torch.Size([8, 3, 64, 64]), 20)
    """

    def __init__(
        self,
        max_size: int,
        keys: Sequence[str],
        device: str | torch.device = "cpu",
        img_compressed: bool = True,
        *,
        max_bytes: int | None = None,
        jpeg: int | Mapping[str, int] | None = None,
        seed: int | None = None,
    ) -> None:
        if isinstance(keys, str) or not keys or len(set(keys)) != len(keys):
            raise ConfigurationError(f"keys are {keys!r}, expected different names, one at least")
        self.keys = tuple(keys)
        self.device = resolve_device(device)
        self._new_store = functools.partial(
            EpisodeStore, max_size, max_bytes, jpeg=jpeg, pack_images=img_compressed, seed=seed
        )
        self.store = self._new_store()

    def add(self, episode_data: Mapping[str, Any]) -> int:
        """Add a whole episode; returns its number. Blocks while it is packed.

        Args:
            episode_data: Arrays or tensors ``[T, ...]`` for each key; those of observations may have a row more, for
                what the last step led to. If all have as many, the last row is where the episode ends.

        Raises:
            ReplayError: If keys are missing or unexpected, or the episode is empty, ragged, of other dtypes or shapes
                than before, or too long; nothing has changed then.
        """
        if set(episode_data) != set(self.keys):
            raise ReplayError(f"an episode has {sorted(map(str, episode_data))}, expected {sorted(self.keys)}")
        return self.store.add(episode_data)

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Draw steps at random: ``[batch, ...]`` by key, and ``next_<key>`` for observations.

        Raises:
            ReplayError: If the buffer is empty.
        """
        return self._tensors(self.store.sample(batch_size))

    def sample_sequences(self, batch_size: int, length: int) -> dict[str, torch.Tensor]:
        """Draw sequences of steps within episodes: ``[batch, length, ...]``, observations with one more.

        Raises:
            ReplayError: If no episode is as long.
        """
        return self._tensors(self.store.sample_slices(batch_size, length))

    def __len__(self) -> int:
        """Return how many steps can be sampled."""
        return len(self.store)

    @property
    def num_episodes(self) -> int:
        """How many episodes there are."""
        return self.store.num_episodes

    def get_stats(self) -> dict[str, float]:
        """Return counts, bytes, ratio and the hits of the cache; see `EpisodeStore.get_stats`."""
        return self.store.get_stats()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write what is new into a folder; see `EpisodeStore.save`."""
        self.store.save(folder)

    def restore(self, folder: str | os.PathLike[str]) -> RestoredEpisodes:
        """Become what was saved in a folder; see `EpisodeStore.restore`.

        Raises:
            StateMismatchError: If its episodes have other keys; the buffer stays as it was.
        """
        store = self._new_store()
        restored = store.restore(folder)
        self._become(store, str(folder))
        return restored

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values; see `EpisodeStore.state_dict`."""
        return self.store.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Become what `state_dict` was taken of; see `EpisodeStore.load_state_dict`.

        Raises:
            StateMismatchError: If its episodes have other keys; the buffer stays as it was.
        """
        store = self._new_store()
        store.load_state_dict(state_dict)
        self._become(store, "the state")

    def _become(self, store: EpisodeStore, source: str) -> None:
        if store.names and set(store.names) != set(self.keys):
            raise StateMismatchError(f"{source} has episodes of {sorted(store.names)}, expected {sorted(self.keys)}")
        self.store = store

    def _tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.ascontiguousarray(array)).to(self.device) for name, array in batch.items()}
