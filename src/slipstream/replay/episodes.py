"""`EpisodeStore`: episodes packed in memory, every frame once, read step by step or in slices."""

from __future__ import annotations

import copy
import operator
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.errors import OutOfRangeError, ReplayError
from slipstream.replay.episode_state import (
    RestoredEpisodes,
    episode_state,
    load_episode_state,
    restore_episodes,
    save_episodes,
)
from slipstream.replay.fields import VECTORS, Field, Packing, RowLayout, Spec
from slipstream.replay.folder import Part
from slipstream.replay.frames import FrameLog, Located
from slipstream.replay.prefix_sum import PrefixSum
from slipstream.replay.tail import Tail

Batch = dict[str, NDArray[Any]]

_TRIES = 8


@dataclass(frozen=True)
class _Found:
    """Steps that were found, with all that reading them takes, whatever becomes of the store meanwhile."""

    layout: RowLayout
    log: FrameLog
    packed: NDArray[np.bool_]
    located: list[Located]  # by column: the frames of packed steps, then those after them
    raw: Batch  # steps that are not packed


class EpisodeStore:
    """Episodes of steps, packed as they end, sampled while others are still being written.

    An episode of ``T`` steps has ``T + 1`` frames: arrays with one row more than the others are *of frames* (an
    observation, and what the last step led to), the others *of steps* (actions, rewards, flags). Each frame is kept
    once; ``next_<name>`` is the frame after. Vectors of four frames are packed together, images one by one, stacks of
    camera frames (``[frames, height, width]``) frame by frame, each once; without loss unless JPEG is asked for.

    The oldest episodes go, whole, when there are more frames or bytes than allowed. Unfinished episodes (`append`) stay
    raw until they end, count towards the limits, and are sampled like others.

    Any number of threads may read while others write: a batch is located under a lock and decoded outside of it. What
    reading returns is memory of its own. `save` and `state_dict` keep everything, the random generator included.

    Args:
        max_frames: Evict the oldest episodes when there are more frames than this.
        max_bytes: ... or more bytes, packed ones and those of unfinished episodes together.
        jpeg: JPEG quality for all images, or by name; without loss by default.
        pack_images: Whether to pack images at all; frames of stacks are kept once all the same.
        cache_bytes: How many bytes of decoded vectors to keep for the next batch.
        threads: How many threads pack and unpack; by default one per core.
        seed: Of the generator that `sample` draws from; by chance by default.

    Raises:
        ConfigurationError: If a limit or a quality makes no sense.

    Example:
        >>> import numpy as np
        >>> store = EpisodeStore(max_frames=1000, seed=0)
        >>> store.add({"lidar": np.zeros((11, 144), np.float32), "action": np.ones((10, 3), np.float32)})
        0
        >>> batch = store.sample(4)
        >>> batch["next_lidar"].shape, batch["action"].shape, len(store)
        ((4, 144), (4, 3), 10)
    """

    def __init__(
        self,
        max_frames: int | None = None,
        max_bytes: int | None = None,
        *,
        jpeg: int | Mapping[str, int] | None = None,
        pack_images: bool = True,
        cache_bytes: int = 1 << 20,
        threads: int | None = None,
        seed: int | None = None,
    ) -> None:
        for name, value in (("max_frames", max_frames), ("max_bytes", max_bytes)):
            if value is not None:
                require_count(name, value)
        require_count("cache_bytes", cache_bytes, 0)
        self.max_frames, self.max_bytes = max_frames, max_bytes
        self.generator = np.random.default_rng(seed)
        self._packing = Packing(jpeg, images=pack_images)
        self._options: dict[str, Any] = {"cache_bytes": cache_bytes, "threads": threads}
        self._lock, self._saving = threading.RLock(), threading.Lock()
        self._layout: RowLayout | None = None
        self._log = FrameLog([], **self._options)
        self._steps = PrefixSum()
        self._frames = PrefixSum()
        self._tails: dict[int, Tail] = {}
        self._counts = {"episodes_added": 0, "frames_added": 0, "episodes_evicted": 0, "frames_evicted": 0}
        self._saved: dict[str, list[Part]] = {}  # what each folder holds of this store

    # Writing

    def add(self, episode: Mapping[str, Any]) -> int:
        """Pack a whole episode and add it; returns its number. Blocks while it is packed.

        Args:
            episode: Arrays or tensors by name. Those of frames have one row more than those of steps; if all have as
                many rows, all are of frames, and the last of them is where the episode ends.

        Raises:
            ReplayError: If the episode is empty, ragged, of another dtype or shape than those before it, or larger
                than the limits allow; nothing has changed then.
        """
        arrays = {_name(name): _rows(name, values) for name, values in episode.items()}
        with self._lock:
            layout = self._layout or self._plan(arrays)
            steps = _count_steps(arrays, layout)
            return self._add(arrays, steps, layout)

    def append(self, rows: Mapping[str, Any], stream: int = 0) -> None:
        """Add rows to the unfinished episode of a stream: frames, and the steps taken from them.

        Args:
            rows: Arrays by name, all with as many rows. Which of them are of frames is told by an earlier episode, or
                by `finish` of the first.
            stream: Which of several environments it is.

        Raises:
            ReplayError: If rows do not fit those before them, or the limits; nothing has changed then.
        """
        arrays = {_name(name): _rows(name, values) for name, values in rows.items()}
        if len({len(array) for array in arrays.values()}) != 1 or not len(next(iter(arrays.values()))):
            raise ReplayError(f"rows of {_lengths(arrays)} were appended, expected as many of each, one at least")
        with self._lock:
            stream = operator.index(stream)
            tail = self._tails.get(stream) or Tail()
            self._check_rows(arrays, next(iter(self._tails.values()), tail))
            count = len(next(iter(arrays.values())))
            others = [other for other in self._tails.values() if other is not tail]
            open_frames = sum(other.length for other in others) + tail.length + count + 1
            open_bytes = sum(other.nbytes for other in others) + tail.nbytes_with(arrays)
            for limit, value, unit in (("max_frames", open_frames, "frames"), ("max_bytes", open_bytes, "bytes")):
                most = getattr(self, limit)
                if most is not None and value > most:
                    raise ReplayError(f"unfinished episodes of {value} {unit} do not fit {limit}={most}")
            tail.append(arrays)
            self._tails[stream] = tail
            self._evict()

    def finish(self, last: Mapping[str, Any], stream: int = 0) -> int:
        """End the unfinished episode of a stream and pack it; returns its number.

        Args:
            last: The frame that its last step led to: one row (without a leading axis) by name, of frames only.
            stream: Which of several environments it is.

        Raises:
            ReplayError: If nothing was appended, or `last` does not fit; the episode stays unfinished then.
        """
        with self._lock:
            tail = self._tails.get(stream)
            if tail is None or not tail.length:
                raise ReplayError(f"stream {stream} has no unfinished episode")
            arrays = tail.values()
            unknown = [name for name in last if name not in arrays]
            if unknown or not last:
                raise ReplayError(f"the last frame has {sorted(map(str, last))}, expected some of {sorted(arrays)}")
            for name, value in last.items():
                row = _array(name, value)[None]
                if row.dtype != arrays[name].dtype or row.shape[1:] != arrays[name].shape[1:]:
                    raise ReplayError(
                        f"{name!r} is {row.dtype}{list(row.shape[1:])} in the last frame, before it was "
                        f"{arrays[name].dtype}{list(arrays[name].shape[1:])}"
                    )
                arrays[name] = np.concatenate([arrays[name], row])
            layout = self._layout or self._plan(arrays)
            steps = _count_steps(arrays, layout)
            del self._tails[stream]
            try:
                return self._add(arrays, steps, layout)
            except BaseException:
                self._tails[stream] = tail
                raise

    def discard(self, stream: int = 0) -> int:
        """Forget the unfinished episode of a stream; returns how many rows it had."""
        with self._lock:
            tail = self._tails.pop(stream, None)
            return tail.length if tail else 0

    def clear(self) -> None:
        """Forget every episode, finished or not; what the fields are stays known."""
        with self._lock:
            self._counts["episodes_evicted"] += len(self._steps)
            self._counts["frames_evicted"] += self._frames.total
            self._steps.clear()
            self._frames.clear()
            self._log.drop_before(self._log.end)
            self._tails.clear()

    # Reading

    def __len__(self) -> int:
        """Return how many steps can be sampled."""
        with self._lock:
            return self._steps.total + sum(_open_steps(tail) for tail in self._tails.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays of an episode; none before there is one."""
        with self._lock:
            tail = next(iter(self._tails.values()), None)
            return tuple(self._layout.fields if self._layout else tail.values() if tail else ())

    @property
    def num_episodes(self) -> int:
        """How many finished episodes there are."""
        return len(self._steps)

    @property
    def num_frames(self) -> int:
        """How many frames there are, those of unfinished episodes included."""
        with self._lock:
            return self._frames.total + sum(tail.length for tail in self._tails.values())

    @property
    def nbytes(self) -> int:
        """Packed bytes, and raw ones of unfinished episodes."""
        with self._lock:
            return self._log.packed_bytes + sum(tail.nbytes for tail in self._tails.values())

    @property
    def fields(self) -> list[Field]:
        """What an episode is made of; empty before the first."""
        return list(self._layout.fields.values()) if self._layout else []

    def sample(
        self, batch_size: int, *, generator: np.random.Generator | None = None, out: Batch | None = None
    ) -> Batch:
        """Draw steps at random, all with the same chance, with replacement.

        Args:
            batch_size: How many.
            generator: What to draw from; the store's own by default.
            out: A batch of the same size to read into, whose arrays are overwritten and returned: no memory is
                allocated for images then.

        Returns:
            Arrays ``[batch, ...]`` by name; those of frames also as ``next_<name>``.

        Raises:
            ConfigurationError: If `batch_size` is not a whole number of at least 1.
            ReplayError: If there is nothing to sample, or `out` does not fit.
        """
        require_count("batch_size", batch_size)
        with self._lock:
            total = len(self)
            if not total:
                raise ReplayError("there is nothing to sample: the store has no step yet")
            index = (generator or self.generator).integers(0, total, operator.index(batch_size))
            found = self._locate(index)
        return self._fetch(found, out)

    def get(self, index: Sequence[int] | NDArray[Any], *, out: Batch | None = None) -> Batch:
        """Return the steps at some positions, the oldest first; those of unfinished episodes come last.

        Args:
            index: Whole numbers from 0 to ``len(store) - 1``. Positions shift when an episode is evicted.
            out: As for `sample`.

        Raises:
            OutOfRangeError: If an index is negative or too large.
        """
        index = np.asarray(index)
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise OutOfRangeError(f"index is {index.dtype}{list(index.shape)}, expected a list of whole numbers")
        with self._lock:
            found = self._locate(index.astype(np.int64))
        return self._fetch(found, out)

    def sample_slices(self, num_slices: int, length: int, *, generator: np.random.Generator | None = None) -> Batch:
        """Draw slices of consecutive steps at random; none crosses the end of an episode.

        All slices that there are have the same chance. Finding one costs O(log n) in the number of episodes unless
        hardly any episode is long enough. Slices are of finished episodes.

        Args:
            num_slices: How many.
            length: How many steps each has.
            generator: What to draw from; the store's own by default.

        Returns:
            ``[slices, length, ...]`` for what is of steps, ``[slices, length + 1, ...]`` for what is of frames.

        Raises:
            ReplayError: If no episode is as long.
        """
        if num_slices < 1 or length < 1:
            raise ReplayError(f"{num_slices} slices of {length} steps were asked for, expected one or more of each")
        with self._lock:
            episode, start = self._draw_slices(num_slices, length, generator or self.generator)
            first = self._first_frames(episode) + start
            frames = (first[:, None] + np.arange(length + 1)).reshape(-1)
            layout, log, located = self._layout, self._log, self._locate_frames(frames)
        assert layout is not None  # noqa: S101 - there are episodes, so there are fields
        rows = [log.fetch(part) for part in located]
        batch = {}
        for field in layout.fields.values():
            values = field.read(rows[field.column]).reshape(num_slices, length + 1, *field.shape)
            batch[field.name] = values if field.of_frames else np.ascontiguousarray(values[:, :-1])
        return batch

    def episode(self, position: int) -> Batch:
        """Return a whole finished episode as it was added; 0 is the oldest, -1 the newest.

        Raises:
            OutOfRangeError: If there is none at that position.
        """
        with self._lock:
            count = len(self._steps)
            place = operator.index(position) + (count if position < 0 else 0)
            if not 0 <= place < count:
                raise OutOfRangeError(f"episode {position} is out of range, there are {count}")
            layout, log = self._layout, self._log
            here = np.array([place])
            first, length = int(self._first_frames(here)[0]), int(self._frames.lengths_of(here)[0])
            located = self._locate_frames(np.arange(first, first + length))
        assert layout is not None  # noqa: S101 - there are episodes, so there are fields
        rows = [log.fetch(part) for part in located]
        values = {field.name: field.read(rows[field.column]) for field in layout.fields.values()}
        return {name: array if layout.fields[name].of_frames else array[:-1] for name, array in values.items()}

    def get_stats(self) -> dict[str, float]:
        """Return counts, bytes, ratio and the hits of the cache, all exact.

        ``raw_bytes`` is what the frames would take unpacked, each once; ``compression_ratio`` compares that with
        ``packed_bytes``.
        """
        with self._lock:
            row = self._layout.row_bytes if self._layout else 0
            raw, packed = self._frames.total * row, self._log.packed_bytes
            cache = self._log.cache
            asked = cache.hits + cache.misses
            return {
                **self._counts,
                "num_steps": len(self),
                "num_frames": self.num_frames,
                "num_episodes": len(self._steps),
                "raw_bytes": raw,
                "packed_bytes": packed,
                "tail_bytes": sum(tail.nbytes for tail in self._tails.values()),
                "cache_bytes": cache.nbytes,
                "compression_ratio": raw / packed if packed else 1.0,
                "cache_hits": cache.hits,
                "cache_misses": cache.misses,
                "hit_rate": cache.hits / asked if asked else 0.0,
            }

    # Keeping

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write what is new since the last save into a folder; blocks until it is durable.

        Other threads may add and sample meanwhile; what is saved is the store at the moment of the call. Episodes that
        were saved before are not written again; those evicted since are deleted. A crash at any point
        leaves what was saved before. One store writes into a folder, others may read it.

        Raises:
            WriteError: If the folder cannot be written; what was saved before is untouched.
        """
        save_episodes(self, Path(folder))

    def restore(self, folder: str | os.PathLike[str]) -> RestoredEpisodes:
        """Become what was saved in a folder, bit for bit, generator and unfinished episodes included.

        If files are damaged, the sound episodes are kept, and the others named: in what this returns, and in the log.

        Raises:
            FileNotFoundError: If nothing was saved there.
            CorruptFileError: If nothing in it is sound; the store is unchanged then.
        """
        with self._lock:
            return restore_episodes(self, Path(folder))

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values, packed, in memory of their own."""
        with self._lock:
            return episode_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Become what `state_dict` was taken of, bit for bit; nothing is changed unless all of it fits.

        Raises:
            StateMismatchError: If it is not a state of an episode store.
        """
        with self._lock:
            load_episode_state(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = dict(self.__dict__)
            state["_log"] = copy.copy(self._log)
            state["_steps"], state["_frames"] = copy.deepcopy(self._steps), copy.deepcopy(self._frames)
            state["_counts"], state["_saved"] = dict(self._counts), {}
            state["_tails"] = {stream: _copy_of(tail) for stream, tail in self._tails.items()}
            del state["_lock"], state["_saving"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock, self._saving = threading.RLock(), threading.Lock()

    # Inside

    def _plan(self, arrays: Mapping[str, NDArray[Any]]) -> RowLayout:
        lengths = {len(array) for array in arrays.values()}
        if not arrays or len(lengths) > 2 or (len(lengths) == 2 and max(lengths) - min(lengths) != 1):
            raise ReplayError(
                f"an episode has rows of {_lengths(arrays)}, expected as many for all steps and one more for frames"
            )
        specs = [
            Spec(name, array.dtype.str, array.shape[1:], len(array) == max(lengths)) for name, array in arrays.items()
        ]
        taken = {f"next_{spec.name}" for spec in specs if spec.of_frames} & set(arrays)
        if taken:
            raise ReplayError(f"the name {sorted(taken)[0]!r} is what the next frame would be called: leave it out")
        return RowLayout.plan(specs, self._packing)

    def _add(self, arrays: Mapping[str, NDArray[Any]], steps: int, layout: RowLayout) -> int:
        self._check_room(steps + 1, 0)
        rows = layout.empty_rows(steps + 1)
        for name, array in arrays.items():
            field = layout.fields[name]
            field.write(rows[field.column], array, slice(0, len(array)))
        log = self._log if self._layout else FrameLog(layout.packers, **self._options)
        packed = log.pack(rows, np.array([steps + 1]))
        self._check_room(steps + 1, sum(len(payload) for _, payloads in packed for payload in payloads))
        self._layout, self._log = layout, log
        log.append_packed(packed, steps + 1)
        self._steps.add(steps)
        self._frames.add(steps + 1)
        self._counts["episodes_added"] += 1
        self._counts["frames_added"] += steps + 1
        self._evict()
        return self._counts["episodes_added"] - 1

    def _check_room(self, frames: int, nbytes: int) -> None:
        if self.max_frames is not None and frames > self.max_frames:
            raise ReplayError(f"an episode of {frames} frames does not fit max_frames={self.max_frames}")
        if self.max_bytes is not None and nbytes > self.max_bytes:
            raise ReplayError(f"an episode of {nbytes} packed bytes does not fit max_bytes={self.max_bytes}")

    def _check_rows(self, arrays: Mapping[str, NDArray[Any]], tail: Tail) -> None:
        known = {name: (array.dtype.str, array.shape[1:]) for name, array in tail.values().items()}
        if self._layout:
            known = {field.name: (field.dtype, field.shape) for field in self._layout.fields.values()}
        if not known:
            return
        if set(arrays) != set(known):
            raise ReplayError(f"rows have {sorted(arrays)}, before they had {sorted(known)}")
        for name, array in arrays.items():
            if (array.dtype.str, array.shape[1:]) != known[name]:
                dtype, shape = known[name]
                raise ReplayError(
                    f"{name!r} is {array.dtype}{list(array.shape[1:])}, before it was {np.dtype(dtype)}{list(shape)}"
                )

    def _evict(self) -> None:
        """Drop the oldest episodes while there are too many frames or bytes."""
        open_frames = sum(tail.length for tail in self._tails.values())
        open_bytes = sum(tail.nbytes for tail in self._tails.values())
        while len(self._steps) and (
            (self.max_frames is not None and self._frames.total + open_frames > self.max_frames)
            or (self.max_bytes is not None and self._log.packed_bytes + open_bytes > self.max_bytes)
        ):
            self._steps.evict()
            self._counts["frames_evicted"] += self._frames.evict()
            self._counts["episodes_evicted"] += 1
            self._log.drop_before(self._log.end - self._frames.total)

    def _first_frames(self, episodes: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._frames.starts_of(episodes) + (self._log.end - self._frames.total)

    def _frames_of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the frames of steps: each finished episode before has one frame more than it has steps."""
        return index + self._steps.get_range_idx(index) + (self._log.end - self._frames.total)

    def _locate(self, index: NDArray[np.int64]) -> _Found:
        total = len(self)
        if index.size and not (int(index.min()) >= 0 and int(index.max()) < total):
            raise OutOfRangeError(f"indices {int(index.min())} to {int(index.max())}, there are {total} steps")
        packed = index < self._steps.total
        frames = self._frames_of(index[packed])
        both = np.concatenate([frames, frames + 1])
        having_next = {field.column for field in self._layout.frame_fields} if self._layout else set()
        columns = range(len(self._log.packers))
        located = [self._log.locate(column, both if column in having_next else frames) for column in columns]
        raw = self._take_open(index[~packed] - self._steps.total) if not packed.all() else {}
        layout = self._layout
        if layout is None:  # there is nothing but first episodes that are not finished, if anything
            layout = self._plan(next(iter(self._tails.values())).values()) if self._tails else RowLayout([], [])
        return _Found(layout, self._log, packed, located, raw)

    def _locate_frames(self, frames: NDArray[np.int64]) -> list[Located]:
        return [self._log.locate(column, frames) for column in range(len(self._log.packers))]

    def _take_open(self, index: NDArray[np.int64]) -> dict[str, Any]:
        """Copy steps out of the unfinished episodes; `index` counts through them, stream after stream."""
        lengths = PrefixSum()
        tails = [tail for tail in self._tails.values() if _open_steps(tail)]
        lengths.extend([_open_steps(tail) for tail in tails])
        which = lengths.get_range_idx(index)
        rows = lengths.get_range_relative_idx(index, which)
        raw: dict[str, Any] = {}
        for name, array in tails[0].values().items():
            frames = self._layout.fields[name].of_frames if self._layout else True
            raw[name] = np.empty((len(index), *array.shape[1:]), array.dtype)
            if frames:
                raw[f"next_{name}"] = np.empty_like(raw[name])
        for number, tail in enumerate(tails):
            mine = which == number
            for name, array in tail.values().items():
                raw[name][mine] = array[rows[mine]]
                if f"next_{name}" in raw:
                    raw[f"next_{name}"][mine] = array[rows[mine] + 1]
        return raw

    def _fetch(self, found: _Found, out: Batch | None) -> Batch:
        layout, log, packed = found.layout, found.log, found.packed
        whole = bool(packed.all())
        batch = _outputs(layout, len(packed), out)
        if not len(packed):
            return batch
        for column, located in enumerate(found.located):
            fields = [field for field in layout.fields.values() if field.column == column]
            if column != VECTORS and whole:
                (field,) = fields
                names = (field.name, f"next_{field.name}") if field.of_frames else (field.name,)
                log.fetch(located, *(batch[name].reshape(len(packed), -1) for name in names))
                continue
            rows, count = log.fetch(located), int(np.count_nonzero(packed))
            for prefix, half in (("", rows[:count]), ("next_", rows[count:])):
                for field in fields:
                    if field.of_frames or not prefix:
                        batch[prefix + field.name][slice(None) if whole else packed] = field.read(half)
        for name, values in found.raw.items():
            batch[name][~packed] = values
        return batch

    def _draw_slices(
        self, count: int, length: int, generator: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw starts of slices: any step will do, and those too close to an end are drawn again."""
        total = self._steps.total
        if not total:
            raise ReplayError("there is nothing to sample: the store has no finished episode yet")
        episodes, starts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        missing = count
        for _ in range(_TRIES):
            index = generator.integers(0, total, 2 * missing)
            episode = self._steps.get_range_idx(index)
            start = self._steps.get_range_relative_idx(index, episode)
            fits = start + length <= self._steps.lengths_of(episode)
            episodes.append(episode[fits][:missing])
            starts.append(start[fits][:missing])
            missing -= len(starts[-1])
            if not missing:
                return np.concatenate(episodes), np.concatenate(starts)
        windows = np.maximum(0, self._steps.lengths - length + 1)  # exact, and O(n): few episodes are long enough
        if not windows.any():
            raise ReplayError(f"no episode has {length} steps, the longest has {int(self._steps.lengths.max())}")
        choices = PrefixSum()
        choices.extend(windows)
        drawn = generator.integers(0, choices.total, missing)
        chosen = choices.get_range_idx(drawn)
        episodes.append(chosen)
        starts.append(choices.get_range_relative_idx(drawn, chosen))
        return np.concatenate(episodes), np.concatenate(starts)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ReplayError(f"the name of an array is {name!r}, expected a string")
    return name


def _array(name: str, values: Any) -> NDArray[Any]:
    try:
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ReplayError(f"{name!r} cannot be an array of numbers ({str(error).splitlines()[0]})") from error
    if array.dtype.kind not in "biufc":
        raise ReplayError(f"{name!r} is {array.dtype}, expected numbers")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _rows(name: str, values: Any) -> NDArray[Any]:
    array = _array(name, values)
    if not array.ndim:
        raise ReplayError(f"{name!r} is a single number, expected a row for each step")
    return array


def _lengths(arrays: Mapping[str, NDArray[Any]]) -> str:
    return ", ".join(f"{name}: {len(array)}" for name, array in arrays.items()) or "nothing"


def _count_steps(arrays: Mapping[str, NDArray[Any]], layout: RowLayout) -> int:
    """Check an episode against what is known; returns how many steps it has."""
    if set(arrays) != set(layout.fields):
        raise ReplayError(f"an episode has {sorted(arrays)}, in this store they have {sorted(layout.fields)}")
    for name, array in arrays.items():
        layout.check(name, array)
    frames = {len(arrays[field.name]) for field in layout.frame_fields}
    steps = {len(arrays[field.name]) for field in layout.step_fields} or {max(frames) - 1}
    if len(frames) != 1 or steps != {min(frames) - 1}:
        raise ReplayError(f"an episode is ragged ({_lengths(arrays)}): expected one row more for frames than for steps")
    if min(steps) < 1:
        raise ReplayError(f"an episode is empty ({_lengths(arrays)}), expected one step at least")
    return min(steps)


def _open_steps(tail: Tail) -> int:
    return max(0, tail.length - 1)


def _copy_of(tail: Tail) -> Tail:
    twin = Tail()
    if tail.length:
        twin.append(tail.values())
    return twin


def _outputs(layout: RowLayout, count: int, out: Batch | None) -> Batch:
    batch = {}
    for field in layout.fields.values():
        for name in (field.name, f"next_{field.name}") if field.of_frames else (field.name,):
            shape = (count, *field.shape)
            memory = None if out is None else out.get(name)
            if out is None:
                memory = np.empty(shape, field.dtype)
            elif memory is None or memory.shape != shape or memory.dtype.str != field.dtype:
                raise ReplayError(f"out has no {name!r} of {np.dtype(field.dtype)}{list(shape)}")
            elif not memory.flags.c_contiguous or not memory.flags.writeable:
                raise ReplayError(f"{name!r} in out is not contiguous and writable")
            batch[name] = memory
    return batch
