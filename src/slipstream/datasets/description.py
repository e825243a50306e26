"""What a recorded file holds: the role of each dataset, how it is stored, and where episodes begin and end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from slipstream.checks import require_choice
from slipstream.datasets.chunks import FrameKind
from slipstream.datasets.identity import Identity

Final = Literal["own", "stream", "next", "none"]
"""Where the observation after an episode's last step is: ``own``, one more row in the episode; ``stream``, only after
the last of several episodes; ``next``, in datasets of next observations; ``none``, nowhere."""
Color = Literal["rgb", "bgr"]
OnBadEpisode = Literal["raise", "skip"]


@dataclass(frozen=True)
class Fields:
    """Which datasets of a file play which role, and how to read them.

    Paths begin at the group of an episode, or at the root of a file without such groups. `None` searches by the names
    that people use; an empty tuple or dict means that there are none.

    Args:
        cameras: Paths of images by the name that the camera gets, as in ``{"left": "obs/left_cam"}``. Other cameras
            that are recognised keep their names. An empty dict means no cameras.
        joint: Path of joint positions, or several paths whose values are concatenated. May be any numbers with a row
            per step, such as ``"states"``.
        action: Path of actions.
        reward: Path of rewards; they are 0 where a file has none.
        terminal: Path of the flags of steps that reached a terminal state.
        timeout: Path of the flags of steps after which an episode was truncated.
        next_cameras: Paths of the images after each step, if they are stored separately.
        next_joint: Paths of the joint positions after each step, if they are stored separately.
        episodes: The group whose groups are the episodes, such as ``"data"``; or a list of the episodes to read, by
            name or number: ``["demo_3", 7]``.
        filter_key: Read the episodes that robomimic lists under ``mask/<filter_key>``, such as ``"train"``.
        color: Order of the channels of compressed images when they were encoded. By default BGR in ALOHA files, which
            give RGB images to OpenCV, and RGB in all others; the log says so.
        on_bad_episode: ``"raise"`` an error for the first episode that cannot be used, or ``"skip"`` such episodes
            and count them.
    """

    cameras: Mapping[str, str] | None = None
    joint: str | tuple[str, ...] | None = None
    action: str | None = None
    reward: str | None = None
    terminal: str | None = None
    timeout: str | None = None
    next_cameras: Mapping[str, str] | None = None
    next_joint: str | tuple[str, ...] | None = None
    episodes: str | Sequence[str | int] | None = None
    filter_key: str | None = None
    color: Color | None = None
    on_bad_episode: OnBadEpisode = "raise"

    def __post_init__(self) -> None:
        """Check the settings that have few values.

        Raises:
            ConfigurationError: If one has another value.
        """
        require_choice("on_bad_episode", self.on_bad_episode, get_args(OnBadEpisode))
        if self.color is not None:
            require_choice("color", self.color, get_args(Color))


@dataclass(frozen=True)
class Roles:
    """Which datasets below a group play which role."""

    cameras: dict[str, str]
    next_cameras: dict[str, str]
    joint: tuple[str, ...]
    next_joint: tuple[str, ...]
    action: str
    reward: str | None = None
    terminal: str | None = None
    timeout: str | None = None


@dataclass(frozen=True)
class Observation:
    """A dataset of numbers with a row per observation, as the first episode has it.

    Attributes:
        path: Below the group of an episode.
        shape: Of all its rows.
        dtype: Of its values.
        next_path: Path of the same values after each step, if the file has them; else empty.
        is_joint: Whether it is part of the joint positions.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    next_path: str = ""
    is_joint: bool = False

    @property
    def width(self) -> int:
        """Values of a row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Skipped:
    """An episode that was left out because it cannot be used."""

    group: str
    reason: str


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
        next_cameras: Frames after each step, if they are stored separately.
        terminal: Whether each step reached a terminal state.
    """

    group: str
    lengths: NDArray[np.int64]
    final: Final
    cut: NDArray[np.bool_]
    cameras: dict[str, Images]
    next_cameras: dict[str, Images]
    terminal: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))

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

        The last step of an episode that was truncated is no transition if the next observation was not recorded: there
        is nothing to bootstrap from.
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
        roles: The role of each dataset, below each group.
        stretches: The groups, in order.
        joint_dim: Values of a joint position, 0 if there is none.
        action_dim: Values of an action.
        rows: The same, as a table.
        notes: Sentences about guesses, datasets that are not used, and anything unusual.
        identity: The file when it was described.
        observations: Datasets of numbers with a row per observation, used or not.
        rejected: Datasets that look like images and cannot be used as those of a camera, with the reason.
        skipped: Episodes that were left out because they cannot be used.
        search: What `describe` needs to recognise a file with the same names without a search.
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
    observations: tuple[Observation, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
    search: Any = field(default=None, repr=False, compare=False)

    @property
    def num_episodes(self) -> int:
        """Episodes in the file."""
        return sum(len(stretch.lengths) for stretch in self.stretches)

    @property
    def num_steps(self) -> int:
        """Steps, one per action."""
        return sum(stretch.num_steps for stretch in self.stretches)

    @property
    def num_transitions(self) -> int:
        """Steps whose next observation was recorded, or that were terminal."""
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
            "observations": [vars(one) for one in self.observations],
            "rejected": dict(self.rejected),
            "skipped": [vars(one) for one in self.skipped],
            "notes": list(self.notes),
        }
