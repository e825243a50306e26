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

from slipstream.compiling import untraced
from slipstream.errors import ConfigurationError, ReplayError
from slipstream.replay.draws import Starts, draw_from, draw_starts
from slipstream.replay.runs import UNUSED
from slipstream.replay.storage import PackedEpisodeStorage


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

    @untraced
    def sample(self, storage: PackedEpisodeStorage, batch_size: int) -> tuple[tuple[torch.Tensor, ...], dict[Any, Any]]:
        """Draw indices for a batch; see the class.

        Raises:
            ReplayError: If the batch size is no multiple, the storage is of another kind, no episode is as long, or
                steps do not tell where their episodes end.
        """
        if not isinstance(storage, PackedEpisodeStorage):
            raise ReplayError(f"the storage is a {type(storage).__qualname__}, expected a PackedEpisodeStorage")
        length, count = self._shape(operator.index(batch_size))
        with storage.steps.lock:
            stream, time = self._draw(storage, length, count)
            times = ((time[:, None] + np.arange(length)) % max(1, storage.ring.num_times)).reshape(-1)
            places: tuple[NDArray[np.int64], ...] = ()
            if storage.ring.streams:
                places = np.unravel_index(np.repeat(stream, length), storage.ring.streams)
            index = tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in (times, *places))
            return index, self._marks(storage, index, count, length)

    def _shape(self, batch_size: int) -> tuple[int, int]:
        whole = self.slice_len or self.num_slices or 1
        if batch_size < 1 or batch_size % whole:
            name = "slice_len" if self.slice_len else "num_slices"
            raise ReplayError(f"batch_size is {batch_size}, expected a multiple of {name}={whole}")
        return (whole, batch_size // whole) if self.slice_len else (batch_size // whole, whole)

    def _draw(self, storage: PackedEpisodeStorage, length: int, count: int) -> Starts:
        """Return the stream and the time of the first step of each slice."""
        num_times = storage.num_times if storage.initialized else 0
        if not num_times:
            raise ReplayError("there is nothing to sample: nothing was stored yet")
        storage.require_roles()
        # In the order of time, so that no slice joins the newest step to the oldest.
        runs = storage.runs
        oldest = storage.oldest
        num_starts = num_times - length + 1

        def draw(high: int, count: int) -> NDArray[np.int64]:
            return torch.randint(0, high, (count,), generator=self._rng).numpy()

        def propose(missing: int) -> Starts:
            if num_starts < 1:
                return _nothing()
            age = draw(num_starts, 2 * missing)
            stream = draw(runs.shape[1], 2 * missing)
            first = runs[(age + oldest) % num_times, stream]
            last = runs[(age + oldest + length - 1) % num_times, stream]
            fits = (first == last) & (first != UNUSED)
            return stream[fits][:missing], age[fits][:missing]

        def enumerate_rest(missing: int) -> Starts:
            ordered = runs[(np.arange(num_times) + oldest) % num_times]
            fits = np.zeros((0, runs.shape[1]), np.bool_)
            if num_starts > 0:
                fits = (ordered[:num_starts] == ordered[length - 1 :]) & (ordered[:num_starts] != UNUSED)
            counts = fits.sum(axis=0)
            if not counts.any():
                raise ReplayError(f"no episode in the storage has {length} steps one after another")
            stream, rank = draw_from(counts, missing, draw)
            age = np.array([np.flatnonzero(fits[:, s])[r] for s, r in zip(stream, rank, strict=True)], np.int64)
            return stream, age

        stream, age = draw_starts(count, propose, enumerate_rest)
        return stream, (age + oldest) % num_times

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
        for name in list(marks):
            flags = storage.flags((*parent, name), index)
            if flags is not None:
                # One flag per step: with several agents, any of them.
                marks[name] = marks[name] | (flags != 0).reshape(len(truncated), -1).any(1, keepdim=True)
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


def _nothing() -> Starts:
    return np.empty(0, np.int64), np.empty(0, np.int64)
