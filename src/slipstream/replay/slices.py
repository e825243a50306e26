"""`EpisodeSliceSampler`: slices of consecutive steps, found in O(log n) and never across the end of an episode."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.text import install_hint

try:
    from torchrl.data.replay_buffers.samplers import Sampler
except ImportError as error:
    raise ImportError(f"EpisodeSliceSampler needs torchrl: {install_hint('train')}") from error

from slipstream.errors import ConfigurationError, ReplayError
from slipstream.replay.prefix_sum import PrefixSum
from slipstream.replay.storage import PackedEpisodeStorage

_TRIES = 8


class EpisodeSliceSampler(Sampler):  # type: ignore[misc, unused-ignore]
    """Draws slices of consecutive steps from a `PackedEpisodeStorage`; all that there are have the same chance.

    What TorchRL's ``SliceSampler`` does, without looking through the whole storage after every write: a start is drawn
    and checked against the run that its slot belongs to, which the storage knows. Only where hardly any episode is long
    enough are they counted, which takes one pass. Like ``SliceSampler`` it marks the last step of each slice as
    truncated, so that returns are not carried across.

    Args:
        slice_len: How many steps a slice has; the batch size is a multiple of it.
        num_slices: Or how many slices make a batch.
        truncated_key: Where to mark the end of slices; None leaves them unmarked.

    Raises:
        ConfigurationError: If not exactly one of `slice_len` and `num_slices` is given.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import ReplayBuffer
        >>> buffer = ReplayBuffer(
        ...     storage=PackedEpisodeStorage(100), sampler=EpisodeSliceSampler(slice_len=4), batch_size=8
        ... )
        >>> done = (torch.arange(30) % 10 == 9)[:, None]
        >>> _ = buffer.extend(TensorDict({"step": torch.arange(30), "next": {"done": done}}, batch_size=[30]))
        >>> steps = buffer.sample()["step"].reshape(2, 4) % 10
        >>> bool((steps.diff() == 1).all())
        True
    """

    def __init__(
        self,
        *,
        slice_len: int | None = None,
        num_slices: int | None = None,
        truncated_key: str | tuple[str, ...] | None = ("next", "truncated"),
    ) -> None:
        if (slice_len is None) == (num_slices is None):
            raise ConfigurationError(
                f"slice_len is {slice_len!r} and num_slices {num_slices!r}, expected a whole number for one of them"
            )
        if slice_len is not None:
            require_count("slice_len", slice_len)
        if num_slices is not None:
            require_count("num_slices", num_slices)
        self.slice_len, self.num_slices = slice_len, num_slices
        self.truncated_key = (truncated_key,) if isinstance(truncated_key, str) else truncated_key

    def sample(self, storage: PackedEpisodeStorage, batch_size: int) -> tuple[tuple[torch.Tensor, ...], dict[Any, Any]]:
        """Draw indices for a batch; see the class.

        Raises:
            ReplayError: If the batch size is no multiple, the storage is of another kind, or no episode is as long.
        """
        if not isinstance(storage, PackedEpisodeStorage):
            raise ReplayError(f"the storage is a {type(storage).__qualname__}, expected a PackedEpisodeStorage")
        length, count = self._shape(operator.index(batch_size))
        with storage._lock:
            time, stream = self._draw(storage, length, count)
            times = ((time[:, None] + np.arange(length)) % max(1, len(storage._frame_of))).reshape(-1)
            places = np.unravel_index(np.repeat(stream, length), storage._streams) if storage._streams else ()
            index = tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in (times, *places))
            return index, self._marks(storage, index, count, length)

    def _shape(self, batch_size: int) -> tuple[int, int]:
        whole = self.slice_len or self.num_slices or 1
        if batch_size < 1 or batch_size % whole:
            name = "slice_len" if self.slice_len else "num_slices"
            raise ReplayError(f"batch_size is {batch_size}, expected a multiple of {name}={whole}")
        return (whole, batch_size // whole) if self.slice_len else (batch_size // whole, whole)

    def _draw(
        self, storage: PackedEpisodeStorage, length: int, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        num_times = storage._len_along_dim0 if storage.initialized else 0
        if not num_times:
            raise ReplayError("there is nothing to sample: nothing was stored yet")
        runs, oldest = storage.runs, storage.oldest
        width = runs.of.shape[1]
        ages, streams = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        missing = count
        last_start = num_times - length
        for _ in range(_TRIES if last_start >= 0 else 0):
            age = torch.randint(0, last_start + 1, (2 * missing,), generator=self._rng).numpy()
            stream = torch.randint(0, width, (2 * missing,), generator=self._rng).numpy()
            fits = runs.valid((age + oldest) % num_times, stream, length, num_times)
            ages.append(age[fits][:missing])
            streams.append(stream[fits][:missing])
            missing -= len(ages[-1])
            if not missing:
                break
        if missing:
            age, stream = self._count(runs.of[(np.arange(num_times) + oldest) % num_times], length, missing)
            ages.append(age)
            streams.append(stream)
        return (np.concatenate(ages) + oldest) % num_times, np.concatenate(streams)

    def _count(self, runs: NDArray[np.int64], length: int, missing: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find all slices there are and draw from them: exact, and O(n)."""
        starts = len(runs) - length + 1
        valid = runs[:starts] == runs[length - 1 :] if starts > 0 else np.zeros((0, runs.shape[1]), np.bool_)
        choices = PrefixSum()
        choices.extend(valid.sum(axis=0))
        if not choices.total:
            raise ReplayError(f"no episode in the storage has {length} steps one after another")
        drawn = torch.randint(0, choices.total, (missing,), generator=self._rng).numpy()
        stream = choices.get_range_idx(drawn)
        rank = choices.get_range_relative_idx(drawn, stream)
        age = np.array([np.flatnonzero(valid[:, s])[r] for s, r in zip(stream, rank, strict=True)], np.int64)
        return age, stream

    def _marks(
        self, storage: PackedEpisodeStorage, index: tuple[torch.Tensor, ...], count: int, length: int
    ) -> dict[Any, Any]:
        if self.truncated_key is None:
            return {}
        truncated = torch.zeros(count, length, 1, dtype=torch.bool)
        truncated[:, -1] = True
        truncated = truncated.reshape(-1, 1)
        parent = self.truncated_key[:-1]
        marks = {"done": truncated, "terminated": torch.zeros_like(truncated)}
        known = {name: storage._columns.get((*parent, name)) for name in marks}
        marks |= {
            name: marks[name] | column[index].reshape(-1, 1) for name, column in known.items() if column is not None
        }
        named = {(*parent, name) if parent else name: flags.to(storage.device) for name, flags in marks.items()}
        key = self.truncated_key if len(self.truncated_key) > 1 else self.truncated_key[0]
        return {key: truncated.to(storage.device), **named}

    def _empty(self) -> None: ...

    def dumps(self, path: str | Path) -> None:
        """Write nothing: what it draws from is the storage's, and the generator the buffer's."""

    def loads(self, path: str | Path) -> None:
        """Read nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: what it draws from is the storage's, and the generator the buffer's."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take nothing."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(slice_len={self.slice_len}, num_slices={self.num_slices})"
