"""What a recorded file holds: which datasets are what, how they are stored, and where episodes begin and end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.chunks import FrameKind
from slipstream.datasets.identity import Identity

Final = Literal["own", "stream", "next", "none"]
"""Where the observation after an episode's last step is: ``own``, a row more in the episode; ``stream``, only after the
last of several episodes; ``next``, in datasets of next observations; ``none``, nowhere."""


@dataclass(frozen=True)
class Fields:
    """Which datasets are what, for a file whose layout is not recognised or recognised otherwise than it is meant.

    Paths begin at the group of an episode, or at the root of a file without such groups. What is left out is looked for
    by the names that people use.

    Args:
        cameras: Paths of images by the name that the camera shall have: ``{"left": "obs/left_cam"}``.
        joint: Path of joint positions, or several paths whose values are put side by side.
        action: Path of actions.
        reward: Path of rewards; zeros if there are none.
        terminal: Path of the flags of steps that reached a terminal state; none did if there are none.
        timeout: Path of the flags of steps after which an episode was cut off.
        next_cameras: Paths of the images after each step, where they are apart.
        next_joint: Paths of the joint positions after each step, where they are apart.
        episodes: The group whose groups are the episodes, such as ``data``.
    """

    cameras: Mapping[str, str] = field(default_factory=dict)
    joint: str | tuple[str, ...] | None = None
    action: str | None = None
    reward: str | None = None
    terminal: str | None = None
    timeout: str | None = None
    next_cameras: Mapping[str, str] = field(default_factory=dict)
    next_joint: str | tuple[str, ...] | None = None
    episodes: str | None = None


@dataclass(frozen=True)
class Roles:
    """Which datasets below a group are what."""

    cameras: dict[str, str]
    next_cameras: dict[str, str]
    joint: tuple[str, ...]
    next_joint: tuple[str, ...]
    action: str
    reward: str | None = None
    terminal: str | None = None
    timeout: str | None = None


@dataclass(frozen=True)
class Images:
    """The frames of one camera in one group: how they are stored, how many there are, and where they begin."""

    kind: FrameKind
    num_rows: int
    offset: int


@dataclass(frozen=True)
class Stretch:
    """Datasets of one group, whose rows belong together: one episode, or several one after another.

    Attributes:
        group: Path of the group.
        lengths: Steps of each episode.
        final: Where the observation after the last step of each is.
        cut: Whether the last step of each episode ended it without a terminal state.
        cameras: Frames of each camera.
        next_cameras: Frames after each step, where they are apart.
    """

    group: str
    lengths: NDArray[np.int64]
    final: Final
    cut: NDArray[np.bool_]
    cameras: dict[str, Images]
    next_cameras: dict[str, Images]

    @property
    def num_steps(self) -> int:
        """Steps of all its episodes."""
        return int(self.lengths.sum())

    def has_final(self) -> NDArray[np.bool_]:
        """Tell of each episode whether the observation after its last step is there."""
        there = np.full(len(self.lengths), self.final in ("own", "next"))
        if self.final == "stream":
            there[-1] = True
        return there

    def transitions(self) -> NDArray[np.int64]:
        """Return how many transitions each episode has.

        The last step of an episode that was cut off has no transition if what it led to was not recorded: there is
        nothing to bootstrap from.
        """
        return self.lengths - (~self.has_final() & self.cut)


@dataclass(frozen=True)
class Row:
    """A line of the table that says what was found."""

    role: str
    path: str
    dtype: str
    shape: str
    storage: str
    reading: str


@dataclass(frozen=True)
class Description:
    """What a file holds.

    Attributes:
        path: The file.
        layout: Name of the layout that was recognised.
        roles: Which datasets are what, below each group.
        stretches: The groups, in order.
        joint_dim: Values of a joint position, 0 if there is none.
        action_dim: Values of an action.
        rows: The same, as a table.
        notes: Sentences about what is unusual.
        identity: The file as it was when it was looked at.
    """

    path: Path
    layout: str
    roles: Roles
    stretches: tuple[Stretch, ...]
    joint_dim: int
    action_dim: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    identity: Identity

    @property
    def num_episodes(self) -> int:
        """Episodes in the file."""
        return sum(len(stretch.lengths) for stretch in self.stretches)

    @property
    def num_steps(self) -> int:
        """Steps, which are as many as actions."""
        return sum(stretch.num_steps for stretch in self.stretches)

    @property
    def num_transitions(self) -> int:
        """Steps whose outcome was recorded."""
        return sum(int(stretch.transitions().sum()) for stretch in self.stretches)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        lengths = np.concatenate([stretch.lengths for stretch in self.stretches])
        return {
            "file": str(self.path),
            "layout": self.layout,
            "file_bytes": self.identity.size_bytes,
            "episodes": self.num_episodes,
            "steps": self.num_steps,
            "transitions": self.num_transitions,
            "shortest_episode": int(lengths.min()),
            "longest_episode": int(lengths.max()),
            "joint_dim": self.joint_dim,
            "action_dim": self.action_dim,
            "cameras": list(self.roles.cameras),
            "datasets": [vars(row) for row in self.rows],
            "notes": list(self.notes),
        }
