"""How much of each stretch of a file is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.description import Description, Stretch


@dataclass(frozen=True)
class Plan:
    """Which episodes of a stretch are loaded.

    Attributes:
        description: The file.
        stretch: One of its stretches.
        num_episodes: How many episodes are loaded, from the first.
        last_steps: Load only this many steps of the last of them, fewer than it has; None loads all.
    """

    description: Description
    stretch: Stretch
    num_episodes: int
    last_steps: int | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Steps of each episode."""
        lengths = self.stretch.lengths[: self.num_episodes].copy()
        if self.last_steps is not None:
            lengths[-1] = self.last_steps
        return lengths

    @property
    def has_final(self) -> NDArray[np.bool_]:
        """Whether the observation after the last step of each episode belongs to that episode."""
        found = self.stretch.has_final()[: self.num_episodes].copy()
        # After a step in the middle of an episode comes the observation of the next one.
        if self.last_steps is not None:
            found[-1] = True
        return found

    @property
    def transitions(self) -> NDArray[np.int64]:
        """Transitions of each episode."""
        found = self.stretch.transitions()[: self.num_episodes].copy()
        if self.last_steps is not None:
            found[-1] = self.last_steps
        return found


class Room:
    """How much may still be loaded.

    Attributes:
        left_out: Whether anything did not fit.
    """

    def __init__(self, num_episodes: int | None, num_transitions: int | None) -> None:
        self._episodes: float = math.inf if num_episodes is None else num_episodes
        self._transitions: float = math.inf if num_transitions is None else num_transitions
        self.left_out = False
        self.file_starts: list[int] = []

    def is_used_up(self) -> bool:
        """Return whether nothing more fits."""
        return self._episodes <= 0 or self._transitions <= 0

    def plan(self, description: Description, stretch: Stretch) -> Plan | None:
        """Take as much of a stretch as fits; returns None if that is nothing."""
        ends = np.cumsum(stretch.transitions())
        count = int(min(len(ends), self._episodes))
        # All episodes that begin within the limit; the last of them may reach beyond it.
        count = min(count, int(np.searchsorted(ends, self._transitions)) + 1)
        self.left_out = self.left_out or count < len(ends)
        if self.is_used_up():
            return None
        taken = int(ends[count - 1])
        last_steps = None
        if taken >= self._transitions:
            self.left_out = self.left_out or taken > self._transitions
            taken = int(self._transitions)
            before = int(ends[count - 1]) - int(stretch.transitions()[count - 1])
            # Also a last step without a transition is left out.
            if taken - before < stretch.lengths[count - 1]:
                last_steps = taken - before
        self._episodes -= count
        self._transitions -= taken
        return Plan(description, stretch, count, last_steps)
