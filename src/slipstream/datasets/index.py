"""Which transitions there are, in which episodes, and the numbers of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.recordings import Recordings
from slipstream.datasets.statistics import Statistics

COLUMNS = ("joint", "action", "next_joint", "reward", "not_done")


class Places(NamedTuple):
    """Where some transitions are: which of the loaded recordings, which episode in it, and which step of that."""

    part: NDArray[np.int64]
    episode: NDArray[np.int64]
    step: NDArray[np.int64]


@dataclass(frozen=True)
class EpisodeIndex:
    """The episodes that transitions are taken from, in order.

    Attributes:
        part: Which of the loaded recordings each episode is in.
        episode: Number of each episode in its recordings.
        ends: Number of transitions up to the end of each episode.
    """

    part: NDArray[np.int64]
    episode: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, recordings: Recordings) -> EpisodeIndex:
        """Index all episodes of one set of recordings."""
        count = recordings.num_episodes
        return cls(np.zeros(count, np.int64), np.arange(count), np.cumsum(recordings.transitions))

    @property
    def num_transitions(self) -> int:
        """Transitions of all episodes."""
        return int(self.ends[-1])

    def take(self, numbers: NDArray[np.int64]) -> EpisodeIndex:
        """Return the index of some of the episodes."""
        lengths = np.diff(self.ends, prepend=0)
        return EpisodeIndex(self.part[numbers], self.episode[numbers], np.cumsum(lengths[numbers]))

    def joined(self, other: EpisodeIndex, num_parts: int) -> EpisodeIndex:
        """Return the index of both, where the parts of the other follow `num_parts` of this one."""
        return EpisodeIndex(
            np.concatenate([self.part, other.part + num_parts]),
            np.concatenate([self.episode, other.episode]),
            np.concatenate([self.ends, other.ends + self.num_transitions]),
        )

    def locate(self, indices: NDArray[np.int64]) -> Places:
        """Return where transitions are."""
        number = np.searchsorted(self.ends, indices, "right")
        before = np.where(number > 0, self.ends[number - 1], 0)
        return Places(self.part[number], self.episode[number], indices - before)

    def locate_all(self) -> Places:
        """Return where all transitions are."""
        return self.locate(np.arange(self.num_transitions))


def gather(parts: Sequence[Recordings], places: Places, name: str) -> NDArray[np.float32]:
    """Return one of the `COLUMNS` of some transitions, ``[transitions, values]``."""
    empty = np.zeros(0, np.int64)
    width = _column(parts[0], name, empty, empty).shape[1]
    out = np.empty((len(places.part), width), np.float32)
    for number in np.unique(places.part).tolist():
        where = np.flatnonzero(places.part == number)
        out[where] = _column(parts[number], name, places.episode[where], places.step[where])
    return out


def _column(part: Recordings, name: str, episode: NDArray[np.int64], step: NDArray[np.int64]) -> NDArray[Any]:
    rows = part.starts[episode] + step
    values: NDArray[Any]
    if name == "action":
        values = part.action[rows]
    elif name == "reward":
        values = part.reward[rows, None]
    elif name == "not_done":
        values = ~part.terminal[rows, None]
    elif name == "joint":
        # An episode has one observation more than steps.
        values = part.joint[rows + episode]
    else:
        values = part.next_joint(rows, episode)
    return values


def measure(
    parts: Sequence[Recordings], index: EpisodeIndex, before: Mapping[str, Statistics] | None = None
) -> dict[str, Statistics]:
    """Return the statistics of the actions and joints of the episodes in an index.

    Args:
        parts: The recordings.
        index: Which episodes of them.
        before: Statistics of other values, to be included.
    """
    found = dict(before or {})
    for number, part in enumerate(parts):
        chosen = np.zeros(part.num_episodes, bool)
        chosen[index.episode[index.part == number]] = True
        lengths = np.diff(part.starts)
        of_actions = np.repeat(chosen, lengths)
        # Only observations that were recorded there: one that stands in for another is counted once.
        of_joints = np.repeat(chosen, lengths + 1) & part.recorded
        for name, values, counts in (("action", part.action, of_actions), ("joint", part.joint, of_joints)):
            statistics = found.get(name, Statistics.none(values.shape[1]))
            found[name] = statistics.update(values, counts)
    return found
