"""The whole of an `EpisodeStore`: in a folder, and as plain values and arrays."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, FormatVersionError, StateMismatchError
from slipstream.replay.open_episodes import OpenEpisode
from slipstream.replay.saving import HEAD, MALFORMED, Episodes, Saved, find_episodes, has_parts, load, save
from slipstream.replay.schema import Schema
from slipstream.replay.steps import Snapshot
from slipstream.schema.dtypes import parse_numpy_dtype
from slipstream.trajectory import NEXT

logger = logging.getLogger(__name__)

KIND = "replay episodes"


@dataclass(frozen=True)
class RestoredEpisodes:
    """The outcome of restoring a folder: how many episodes were read, and the numbers of those that were lost."""

    num_episodes: int
    lost: tuple[int, ...]


@dataclass(frozen=True)
class Content:
    """Everything that an `EpisodeStore` holds.

    Attributes:
        steps: The table of slots and everything packed.
        lengths: The number of steps of each finished episode.
        first_slot: The slot of the first of them; the others follow.
        open: The unfinished episodes by stream.
        counts: What was added and evicted so far.
        generator: The state of the random generator.
    """

    steps: Snapshot
    lengths: NDArray[np.int64]
    first_slot: int
    open: dict[int, OpenEpisode]
    counts: dict[str, int]
    generator: Any

    def check(self) -> None:
        """Raise `StateMismatchError` if its parts do not fit together."""
        table = self.steps.plain
        base = int(table["base"])
        last = self.first_slot + int(self.lengths.sum())
        if (self.lengths < 1).any() or not base <= self.first_slot <= last <= base + int(table["num_slots"]):
            raise StateMismatchError(f"episodes of {int(self.lengths.sum())} steps do not fit their slots")
        if self.counts["episodes_added"] < len(self.lengths):
            raise StateMismatchError(f"{self.counts['episodes_added']} episodes were added, there are more")
        fields = {leaf.key[0]: leaf for leaf in Schema.from_json(table["schema"]).leaves.values() if leaf.kind != NEXT}
        for stream, episode in self.open.items():
            values = episode.tail.values()
            fits = all(len(rows) == episode.num_packed for rows in episode.all_rows())
            if fields:
                fits = fits and set(values) == set(fields)
                fits = fits and all(fields[name].carrier == array.dtype for name, array in values.items())
                fits = fits and all(fields[name].shape == array.shape[1:] for name, array in values.items())
            if not fits:
                raise StateMismatchError(f"the unfinished episode of stream {stream} does not fit the others")

    def snapshot(self) -> Snapshot:
        """Return it as plain values and arrays."""
        plain = dict(self.steps.plain)
        arrays = dict(self.steps.arrays)
        arrays["lengths"] = self.lengths
        documents = []
        for number, (stream, episode) in enumerate(self.open.items()):
            values = episode.tail.values()
            documents.append([stream, list(values), [len(rows[0]) for rows in episode.rows], episode.packed_bytes])
            for place, rows in enumerate(values.values()):
                arrays[f"tail/{number}/{place}"] = rows.copy()
            for column, numbers in enumerate(episode.all_rows()):
                arrays[f"held/{number}/{column}"] = numbers
        plain["store"] = {
            "first_slot": self.first_slot,
            "counts": self.counts,
            "generator": _to_plain(self.generator),
            "open": documents,
        }
        return Snapshot(plain, arrays, self.steps.segments)

    def episodes(self) -> Episodes:
        """Return the finished episodes with the rows of their steps."""
        first = self.counts["episodes_added"] - len(self.lengths)
        start = self.first_slot - int(self.steps.plain["base"])
        slots = slice(start, start + int(self.lengths.sum()))
        rows = [self.steps.arrays[f"rows/{column}"][slots] for column in range(len(self.steps.segments))]
        return Episodes(first + np.arange(len(self.lengths)), self.lengths, rows)


def from_snapshot(snapshot: Snapshot) -> Content:
    """Return the content that `Content.snapshot` was called on.

    Raises:
        StateMismatchError: If it is not one of an episode store.
    """
    try:
        store = snapshot.plain["store"]
        opened = {}
        for number, (stream, names, blocks, packed_bytes) in enumerate(store["open"]):
            episode = OpenEpisode(_split_blocks(snapshot, number, blocks), sum(blocks), int(packed_bytes))
            episode.tail.append(
                {str(name): np.array(snapshot.arrays[f"tail/{number}/{place}"]) for place, name in enumerate(names)}
            )
            opened[int(stream)] = episode
        names = ("episodes_added", "frames_added", "episodes_evicted", "frames_evicted")
        return Content(
            snapshot,
            np.array(snapshot.arrays["lengths"], np.int64),
            int(store["first_slot"]),
            opened,
            {name: int(store["counts"][name]) for name in names},
            _from_plain(store["generator"]),
        )
    except MALFORMED as error:
        raise StateMismatchError(f"the state is not that of an episode store ({error})") from error


def _split_blocks(snapshot: Snapshot, number: int, blocks: list[int]) -> list[Any]:
    """Return the rows of each packed block in each column."""
    ends = np.cumsum(blocks)[:-1]
    columns = []
    for column in range(len(snapshot.segments)):
        rows = np.array(snapshot.arrays.get(f"held/{number}/{column}", np.empty(0)), np.int64)
        columns.append(np.split(rows, ends))
    if not blocks:
        return []
    return [list(rows) for rows in zip(*columns, strict=True)]


def save_episodes(folder: Path, content: Content, saved: Saved) -> Saved:
    """Write what is new into a folder; returns what it holds now."""
    return save(folder, KIND, content.snapshot(), saved, content.episodes())


def restore_episodes(folder: Path, content: Content) -> tuple[Content, Saved]:
    """Read a folder. Without a sound head, what the parts hold is returned; the rest is that of `content`.

    Raises:
        FileNotFoundError: If nothing was saved there.
        CorruptFileError: If nothing in it is sound.
    """
    if not folder.is_dir():
        raise FileNotFoundError(2, "no folder of episodes", str(folder))
    try:
        loaded = load(folder, KIND)
        found = from_snapshot(Snapshot(loaded.plain, loaded.arrays, loaded.segments))
        found.check()
    except FormatVersionError:
        raise
    except FileNotFoundError:
        if not has_parts(folder):
            raise
        logger.warning("%s is missing; what the parts hold is restored", folder / HEAD)
    except (CorruptFileError, StateMismatchError, *MALFORMED) as error:
        logger.warning("%s: %s; what the parts hold is restored", folder / HEAD, error)
    else:
        return found, loaded.saved
    return _without_head(folder, content), Saved()


def _without_head(folder: Path, content: Content) -> Content:
    """Build a content from what the parts say of themselves. Unfinished episodes and the generator are lost."""
    schema, episodes, segments = find_episodes(folder)
    num_slots = int(episodes.steps.sum())
    plain = {"schema": schema, "num_slots": num_slots, "num_streams": 1, "base": 0, "ends": [0] * len(segments)}
    arrays = {f"rows/{column}": rows for column, rows in enumerate(episodes.rows)}
    counts = dict.fromkeys(content.counts, 0)
    counts["episodes_added"] = int(episodes.numbers.max(initial=-1)) + 1
    counts["frames_added"] = num_slots + len(episodes.steps)
    return Content(Snapshot(plain, arrays, segments), episodes.steps, 0, {}, counts, content.generator)


def _to_plain(state: Any) -> Any:
    """Write the large numbers of a generator as text, and its arrays as lists: JSON keeps both."""
    if isinstance(state, Mapping):
        return {key: _to_plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": state.dtype.str}
    if isinstance(state, int) and abs(state) >= 1 << 53:
        return str(state)
    return state


def _from_plain(plain: Any) -> Any:
    if isinstance(plain, Mapping) and set(plain) == {"array", "dtype"}:
        return np.array(plain["array"], parse_numpy_dtype(plain["dtype"]))
    if isinstance(plain, Mapping):
        return {key: _from_plain(value) for key, value in plain.items()}
    if isinstance(plain, str) and plain.lstrip("-").isdigit():
        return int(plain)
    return plain
