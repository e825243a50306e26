"""`EpisodeStats`: how the episodes that ended lately went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.nav.env import STATS


class EpisodeStats:
    """Means over the episodes that ended last, of all environments together.

    Args:
        window: Over how many episodes.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._rows = torch.zeros(0, len(STATS))

    def add(self, rollout: Any) -> int:
        """Take the episodes that ended in a rollout, in the order of time; returns how many there were."""
        ended = rollout["next", "done"].squeeze(-1).transpose(0, 1)
        columns = [rollout["next", "stats", name].squeeze(-1).transpose(0, 1)[ended] for name in STATS]
        rows = torch.stack(columns, 1).cpu()
        self._rows = torch.cat([self._rows, rows])[-self._window :]
        return len(rows)

    def means(self) -> dict[str, float]:
        """Return ``train/stats.<name>``, NavRL's names; nothing before the first episode has ended."""
        if not len(self._rows):
            return {}
        return named_means(self._rows.double().mean(0).tolist())

    def sums(self) -> list[float]:
        """Return the number of episodes, and the sum of each statistic over them."""
        return [float(len(self._rows)), *self._rows.double().sum(0).tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes that are counted."""
        return {"rows": self._rows.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count other episodes instead."""
        self._rows = state["rows"].clone()


def named_means(values: Sequence[float]) -> dict[str, float]:
    """Return the means of all statistics by the names that metrics have."""
    return {f"train/stats.{name}": value for name, value in zip(STATS, values, strict=True)}
