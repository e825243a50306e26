"""`EpisodeStore`: episodes packed in memory, each observation once, read step by step or in slices."""

from __future__ import annotations

import copy
import logging
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.errors import CorruptFileError, OutOfRangeError, ReplayError, StateMismatchError
from slipstream.replay.arrays import (
    Arrays,
    as_rows,
    check_episode,
    check_last,
    check_rows,
    frames_of,
    lengths_text,
    step_block,
    with_nexts,
)
from slipstream.replay.columns import PackedSteps
from slipstream.replay.draws import draw_slices
from slipstream.replay.episode_state import Content, RestoredEpisodes, from_snapshot, restore_episodes, save_episodes
from slipstream.replay.open_episodes import (
    OPEN_BYTES,
    STEP_BYTES,
    FoundBatch,
    Growth,
    OpenEpisode,
    find_open,
    held_bytes,
)
from slipstream.replay.prefix_sum import PrefixSum
from slipstream.replay.saving import MALFORMED, Saved, from_state, reading, to_state
from slipstream.replay.schema import FRAME, STEP, Leaf, Packing, leaf_of_array
from slipstream.replay.steps import Steps
from slipstream.trajectory import NEXT

logger = logging.getLogger(__name__)

Batch = dict[str, NDArray[Any]]

_EPISODE_BYTES = 96
"""What a finished episode takes in the tables of lengths and of segments."""


class EpisodeStore:
    """Episodes of steps, packed as they come, sampled while others are still being written.

    An episode of ``T`` steps has ``T + 1`` frames: arrays with one row more than the others are *of frames* (an
    observation, and what the last step led to), the others *of steps* (actions, rewards, flags). Each frame is stored
    once; ``next_<name>`` is the frame after. Vectors of four frames are packed together, images one by one, stacks of
    camera frames (``[frames, height, width]``) frame by frame, each once; lossless unless JPEG is asked for.

    The oldest episodes are evicted, whole, when there are more frames or bytes than allowed. Unfinished episodes
    (`append`) are packed block by block, count towards the limits, and are sampled like others; without `frames` only
    after the first episode has ended, so that all batches have the same arrays.

    Thread-safe: any number of threads may read while others write. Readers do not wait while an episode is packed.
    Reading returns new memory. `save` and `state_dict` keep everything, the random generator included.

    Args:
        max_frames: Evict the oldest episodes when there are more frames than this.
        max_bytes: ... or more bytes: everything packed, unfinished episodes, and the objects and tables for them.
        jpeg: JPEG quality for all images, or by name; lossless by default.
        pack_images: Whether to pack images at all; frames of stacks are stored once in any case.
        cache_bytes: How many bytes of decoded vectors to keep for the next batch.
        threads: How many threads pack and unpack; by default one per core.
        seed: Seed of the sampling generator. Random by default.
        frames: The names of arrays that are of frames. By default the first finished episode tells. Until then
            unfinished episodes are neither packed nor sampled.

    Raises:
        ConfigurationError: If a limit or a quality is invalid.

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
        frames: Sequence[str] | None = None,
    ) -> None:
        for name, value in (("max_frames", max_frames), ("max_bytes", max_bytes)):
            if value is not None:
                require_count(name, value)
        require_count("cache_bytes", cache_bytes, 0)
        self.max_frames = max_frames
        self.max_bytes = max_bytes
        self.generator = np.random.default_rng(seed)
        self._frame_names = None
        if frames is not None:
            self._frame_names = frozenset(frames)
        self._steps = Steps(0, Packing(jpeg, images=pack_images), cache_bytes=cache_bytes, threads=threads)
        self._lengths = PrefixSum()
        self._first_slot = 0
        self._open: dict[int, OpenEpisode] = {}
        self._counts = {"episodes_added": 0, "frames_added": 0, "episodes_evicted": 0, "frames_evicted": 0}
        # What each folder holds of this store.
        self._saved: dict[str, Saved] = {}

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
        arrays = as_rows(episode)
        with self._steps.writing:
            return self._finish(OpenEpisode(), arrays)

    def append(self, rows: Mapping[str, Any], stream: int = 0) -> None:
        """Add rows to the unfinished episode of a stream: frames, and the steps taken from them.

        Args:
            rows: Arrays by name, all with as many rows.
            stream: Which of several environments it is.

        Raises:
            ReplayError: If rows do not fit those before them, or the limits; nothing has changed then.
        """
        arrays = as_rows(rows)
        if len({len(array) for array in arrays.values()}) != 1 or not len(next(iter(arrays.values()))):
            raise ReplayError(f"rows of {lengths_text(arrays)} were appended, expected as many of each, one at least")
        stream = operator.index(stream)
        with self._steps.writing:
            check_rows(arrays, self._known_arrays())
            episode = self._open.get(stream) or OpenEpisode()
            with self._steps.unchanged_on_error():
                if self._frame_names is not None and not self._steps.leaves:
                    self._settle(arrays, self._frame_names)
                growth = episode.plan(arrays, self._frames_of_schema(), self._steps)
                self._check_open(episode, growth)
            with self._steps.changing:
                episode.commit(growth, self._steps)
                self._open[stream] = episode
                self._evict()

    def finish(self, last: Mapping[str, Any], stream: int = 0) -> int:
        """End the unfinished episode of a stream and pack it; returns its number.

        Args:
            last: The frame that its last step led to: one row (without a leading axis) by name, of frames only.
            stream: Which of several environments it is.

        Raises:
            ReplayError: If nothing was appended, or `last` does not fit; the episode stays unfinished then.
        """
        with self._steps.writing:
            episode = self._open.get(stream)
            if episode is None:
                raise ReplayError(f"stream {stream} has no unfinished episode")
            arrays = check_last(last, episode.tail.values())
            return self._finish(episode, arrays, stream)

    def _finish(self, episode: OpenEpisode, arrays: Arrays, stream: int | None = None) -> int:
        """Pack the rest of an episode, and give slots to all of it."""
        frames = self._frames_of_schema()
        if not self._steps.leaves:
            frames = self._frame_names or frames_of(arrays)
        known = self._known_arrays()
        if not known:
            known = {name: leaf_of_array((name,), array, STEP) for name, array in arrays.items()}
        num_steps = check_episode(arrays, frames, known)
        self._check_frames(episode.num_packed + num_steps + 1)
        # A first episode that is refused, or cannot be packed, does not decide what the others are made of.
        with self._steps.unchanged_on_error():
            if not self._steps.leaves:
                self._settle(arrays, frames)
            packed = self._steps.pack_run(step_block(arrays, frames, num_steps), num_steps)
            self._check_bytes(episode, packed)
        total = episode.num_packed + num_steps
        with self._steps.changing:
            rows = [np.concatenate(parts) for parts in zip(*episode.rows, self._steps.append_run(packed), strict=True)]
            first = self._first_slot + self._lengths.total
            self._steps.make_room(self._first_slot, first + total)
            self._steps.show(np.arange(first, first + total), rows)
            self._lengths.add(total)
            if stream is not None:
                del self._open[stream]
            self._counts["episodes_added"] += 1
            self._counts["frames_added"] += total + 1
            self._evict()
            return self._counts["episodes_added"] - 1

    def discard(self, stream: int = 0) -> int:
        """Forget the unfinished episode of a stream; returns how many rows it had."""
        with self._steps.writing, self._steps.changing:
            episode = self._open.pop(stream, None)
            if episode is None:
                return 0
            episode.release(self._steps)
            return episode.length

    def clear(self) -> None:
        """Forget every episode, finished or not; what the fields are stays known."""
        with self._steps.writing, self._steps.changing:
            while len(self._lengths):
                self._evict_oldest()
            for stream in list(self._open):
                self.discard(stream)

    # Reading

    def __len__(self) -> int:
        """Return how many steps can be sampled. Unfinished ones count as soon as it is known what is of frames."""
        with self._steps.lock:
            return self._lengths.total + sum(episode.num_steps for episode in self._readable())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays of an episode; none before there is one."""
        with self._steps.lock:
            return tuple(self._known_arrays())

    @property
    def num_episodes(self) -> int:
        """How many finished episodes there are."""
        return len(self._lengths)

    @property
    def num_frames(self) -> int:
        """How many frames there are, those of unfinished episodes included."""
        with self._steps.lock:
            return self._num_finished_frames + sum(episode.length for episode in self._open.values())

    @property
    def nbytes(self) -> int:
        """The memory of everything packed and of unfinished episodes, with the objects and tables for them."""
        with self._steps.lock:
            nbytes = self._steps.held_bytes + _EPISODE_BYTES * len(self._lengths)
            num_packed = self._lengths.total
            for episode in self._open.values():
                nbytes += OPEN_BYTES + episode.tail.nbytes
                num_packed += episode.num_packed
            return nbytes + STEP_BYTES * self._steps.num_columns * num_packed

    @property
    def fields(self) -> list[Leaf]:
        """What an episode is made of; empty before the first."""
        return [leaf for leaf in self._steps.leaves if leaf.kind != NEXT]

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
        with self._steps.lock:
            total = len(self)
            if not total and self._open and not self._steps.leaves:
                raise ReplayError(
                    "there is nothing to sample: before the first episode has ended, the store does not know which "
                    "arrays have a next frame; pass their names, for instance EpisodeStore(frames=['observation'])"
                )
            if not total:
                raise ReplayError("there is nothing to sample: the store has no step yet")
            index = (generator or self.generator).integers(0, total, operator.index(batch_size))
            found = self._find(index)
        return found.read(out)

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
        with self._steps.lock:
            found = self._find(index.astype(np.int64))
        return found.read(out)

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
        with self._steps.lock:
            episode, start = draw_slices(self._lengths, num_slices, length, generator or self.generator)
            first = self._first_slot + self._lengths.starts_of(episode) + start
            found = self._steps.find_runs(first[:, None] + np.arange(length))
        batch = {}
        for leaf in self.fields:
            values = found.array(leaf).reshape(num_slices, length + 1, *leaf.shape)
            if leaf.key[0] not in self._frames_of_schema():
                values = np.ascontiguousarray(values[:, :-1])
            batch[leaf.key[0]] = values
        return batch

    def episode(self, position: int) -> Batch:
        """Return a whole finished episode as it was added; 0 is the oldest, -1 the newest.

        Raises:
            OutOfRangeError: If there is none at that position.
        """
        with self._steps.lock:
            count = len(self._lengths)
            place = operator.index(position)
            if place < 0:
                place += count
            if not 0 <= place < count:
                raise OutOfRangeError(f"episode {position} is out of range, there are {count}")
            here = np.array([place])
            first = self._first_slot + int(self._lengths.starts_of(here)[0])
            found = self._steps.find_runs(np.arange(first, first + int(self._lengths.lengths_of(here)[0]))[None])
            frames = self._frames_of_schema()
            fields = self.fields
        batch = {}
        for leaf in fields:
            values = found.array(leaf)
            if leaf.key[0] not in frames:
                values = values[:-1]
            batch[leaf.key[0]] = values
        return batch

    def get_stats(self) -> dict[str, float]:
        """Return counts, bytes, ratio and the hits of the cache, all exact.

        ``raw_bytes`` is what the frames would take unpacked, each once; ``compression_ratio`` compares that with
        ``packed_bytes``. ``nbytes`` is what ``max_bytes`` limits.
        """
        with self._steps.lock:
            raw = self._num_finished_frames * self._steps.schema.row_bytes
            packed = self._steps.packed_bytes
            cache = self._steps.cache
            asked = cache.hits + cache.misses
            return {
                **self._counts,
                "num_steps": len(self),
                "num_frames": self.num_frames,
                "num_episodes": len(self._lengths),
                "raw_bytes": raw,
                "packed_bytes": packed,
                "tail_bytes": sum(episode.tail.nbytes for episode in self._open.values()),
                "nbytes": self.nbytes,
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
        were saved before are not written again; those evicted since are deleted. A crash at any point leaves what was
        saved before. One store writes into a folder, others may read it.

        Raises:
            WriteError: If the folder cannot be written; what was saved before is untouched.
        """
        path = Path(folder)
        key = str(path.absolute())
        with self._steps.saving:
            with self._steps.writing, self._steps.lock:
                content = self._content()
                saved = self._saved
            saved[key] = save_episodes(path, content, saved.get(key, Saved()))

    def restore(self, folder: str | os.PathLike[str]) -> RestoredEpisodes:
        """Become what was saved in a folder, bit for bit, generator and unfinished episodes included.

        If files are damaged, the sound episodes are kept, and the others named: in what this returns, and in the log.

        Raises:
            FileNotFoundError: If nothing was saved there.
            CorruptFileError: If nothing in it is sound; the store is unchanged then.
        """
        path = Path(folder)
        with self._steps.writing:
            with reading(path):
                content, saved = restore_episodes(path, self._content())
                restored = self._become(content)
            self._saved = {}
            if not restored.lost:
                self._saved[str(path.absolute())] = saved
            return restored

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values, packed, in new memory."""
        with self._steps.writing, self._steps.lock:
            return to_state(self._content().snapshot())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Become what `state_dict` was taken of, bit for bit; nothing is changed unless all of it fits.

        Raises:
            StateMismatchError: If it is not a state of an episode store.
        """
        with self._steps.writing:
            try:
                self._become(from_snapshot(from_state(state_dict)))
            except (CorruptFileError, *MALFORMED) as error:
                if isinstance(error, StateMismatchError):
                    raise
                raise StateMismatchError(f"the state is not that of an episode store ({error})") from error
            self._saved = {}

    def __getstate__(self) -> dict[str, Any]:
        with self._steps.writing, self._steps.lock:
            state = dict(self.__dict__)
            state["_saved"] = {}
            state["_steps"] = self._steps.settings()
            state["content"] = self._content()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        content = state.pop("content")
        self.__dict__.update(state)
        self._steps = Steps(0, **state["_steps"])
        self._become(content)

    # Inside

    def _content(self) -> Content:
        return Content(
            steps=self._steps.snapshot(),
            lengths=self._lengths.lengths,
            first_slot=self._first_slot,
            open={stream: episode.copy() for stream, episode in self._open.items()},
            counts=dict(self._counts),
            generator=self.generator.bit_generator.state,
        )

    def _become(self, content: Content) -> RestoredEpisodes:
        """Take over a content; episodes that are not complete are left out."""
        content.check()
        generator = copy.deepcopy(self.generator)
        generator.bit_generator.state = content.generator
        held = [episode.all_rows() for episode in content.open.values()]
        steps, lost_slots, complete = self._steps.rebuild(content.steps, held)
        lengths = PrefixSum()
        lengths.extend(content.lengths)
        mine = (lost_slots >= content.first_slot) & (lost_slots < content.first_slot + lengths.total)
        is_lost = np.zeros(len(lengths), np.bool_)
        is_lost[lengths.get_range_idx(lost_slots[mine] - content.first_slot)] = True
        kept = np.flatnonzero(np.repeat(~is_lost, content.lengths)) + content.first_slot
        first_number = content.counts["episodes_added"] - len(lengths)
        lost = tuple((first_number + np.flatnonzero(is_lost)).tolist())
        steps.keep_only(kept)
        left = PrefixSum()
        left.extend(content.lengths[~is_lost])
        with self._steps.changing:
            self._steps.become(steps)
            self.generator = generator
            self._lengths = left
            self._first_slot = 0
            self._open = {}
            for (stream, episode), is_complete in zip(content.open.items(), complete, strict=True):
                if is_complete:
                    self._open[stream] = episode
                else:
                    logger.warning("the unfinished episode of stream %d is lost", stream)
            self._counts = dict(content.counts)
            self._evict()
        if lost:
            logger.warning("episodes %s are lost", ", ".join(map(str, lost)))
        return RestoredEpisodes(len(left), lost)

    @property
    def _num_finished_frames(self) -> int:
        return self._lengths.total + len(self._lengths)

    def _readable(self) -> list[OpenEpisode]:
        """Return the unfinished episodes that can be sampled: all, once it is known which arrays are of frames."""
        if not self._steps.leaves:
            return []
        return list(self._open.values())

    def _known_arrays(self) -> dict[str, Leaf]:
        """Return what arrays an episode has, by name: from the schema, or from an unfinished first episode."""
        known = {leaf.key[0]: leaf for leaf in self.fields}
        if not known and self._open:
            tail = next(iter(self._open.values())).tail
            known = {name: leaf_of_array((name,), array, STEP) for name, array in tail.values().items()}
        return known

    def _frames_of_schema(self) -> frozenset[str]:
        return frozenset(leaf.key[0] for leaf in self._steps.leaves if leaf.kind == FRAME)

    def _settle(self, arrays: Arrays, frames: frozenset[str]) -> None:
        """Declare the arrays of an episode."""
        leaves = [leaf_of_array((name,), array, STEP) for name, array in arrays.items()]
        self._steps.settle(with_nexts(leaves, frames), {(name,): array[None] for name, array in arrays.items()})

    def _check_frames(self, frames: int) -> None:
        if self.max_frames is not None and frames > self.max_frames:
            raise ReplayError(f"an episode of {frames} frames does not fit max_frames={self.max_frames}")

    def _check_bytes(self, episode: OpenEpisode, packed: Sequence[PackedSteps]) -> None:
        nbytes = _EPISODE_BYTES + episode.packed_bytes + held_bytes(packed)
        if self.max_bytes is not None and nbytes > self.max_bytes:
            raise ReplayError(f"an episode of {nbytes} packed bytes does not fit max_bytes={self.max_bytes}")

    def _check_open(self, episode: OpenEpisode, growth: Growth) -> None:
        """Raise unless all unfinished episodes fit the limits once one of them has grown."""
        frames = growth.length + 1
        nbytes = growth.nbytes
        for other in self._open.values():
            if other is not episode:
                frames += other.length
                nbytes += other.nbytes
        for name, value, most in (("frames", frames, self.max_frames), ("bytes", nbytes, self.max_bytes)):
            if most is not None and value > most:
                raise ReplayError(f"unfinished episodes of {value} {name} do not fit max_{name}={most}")

    def _evict(self) -> None:
        """Evict the oldest episodes while there are too many frames or bytes."""
        while len(self._lengths):
            too_many = self.max_frames is not None and self.num_frames > self.max_frames
            too_large = self.max_bytes is not None and self.nbytes > self.max_bytes
            if not too_many and not too_large:
                return
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        length = self._lengths.evict()
        self._steps.forget(self._first_slot, self._first_slot + length)
        self._first_slot += length
        self._counts["episodes_evicted"] += 1
        self._counts["frames_evicted"] += length + 1

    def _find(self, index: NDArray[np.int64]) -> FoundBatch:
        """Locate steps, to be read without the lock."""
        total = len(self)
        if index.size and not (int(index.min()) >= 0 and int(index.max()) < total):
            raise OutOfRangeError(f"indices {int(index.min())} to {int(index.max())}, there are {total} steps")
        leaves = self._steps.leaves
        is_finished = index < self._lengths.total
        slots = self._first_slot + index[is_finished]
        if is_finished.all():
            return FoundBatch(leaves, np.ones(len(index), np.bool_), self._steps.find(slots), {})
        return find_open(
            leaves,
            self._steps,
            self._readable(),
            self._steps.rows_of(slots),
            is_finished,
            index - self._lengths.total,
        )
