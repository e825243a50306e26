"""What `MultimodalReplayBuffer` shows of a `TransitionDataset`: batches as tuples, columns, and where images are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.datasets.index import COLUMNS, EpisodeIndex, gather
from slipstream.datasets.recordings import Recordings
from slipstream.datasets.transitions import Transition


class Transitions(NamedTuple):
    """A batch of transitions, in the order that training code unpacks it."""

    left: torch.Tensor
    right: torch.Tensor
    global_: torch.Tensor
    joint: torch.Tensor
    action: torch.Tensor
    next_left: torch.Tensor
    next_right: torch.Tensor
    next_global: torch.Tensor
    next_joint: torch.Tensor
    reward: torch.Tensor
    not_done: torch.Tensor


def as_tuple(batch: Transition) -> Transitions:
    """Return the values of a batch of the three cameras in the order of training code."""
    now = batch["images"]
    after = batch["next_images"]
    return Transitions(
        now["left"], now["right"], now["global"], batch["joint"], batch["action"],
        after["left"], after["right"], after["global"], batch["next_joint"], batch["reward"], batch["not_done"],
    )  # fmt: skip


class Storage(Mapping[str, NDArray[np.float32]]):
    """The numbers of all transitions by column; each array is made when it is looked up, and read-only."""

    def __init__(self, parts: Sequence[Recordings], index: EpisodeIndex | None) -> None:
        self._parts = parts
        self._index = index

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        if self._index is None or name not in COLUMNS:
            raise KeyError(name)
        values = gather(self._parts, self._index.locate_all(), name)
        values.flags.writeable = False
        return values

    def __iter__(self) -> Iterator[str]:
        if self._index is not None:
            yield from COLUMNS

    def __len__(self) -> int:
        return 0 if self._index is None else len(COLUMNS)


def rows_in_files(parts: Sequence[Recordings], index: EpisodeIndex) -> NDArray[np.int64]:
    """Return the row of each transition among the actions of its file, episode after episode."""
    places = index.locate_all()
    rows = np.empty(len(places.part), np.int64)
    for number, part in enumerate(parts):
        where = np.flatnonzero(places.part == number)
        steps = part.starts[places.episode[where]] + places.step[where]
        file = np.searchsorted(part.file_starts, steps, "right") - 1
        rows[where] = steps - np.asarray(part.file_starts)[file]
    return rows


def describe_images(parts: Sequence[Recordings], index: EpisodeIndex) -> dict[str, Any]:
    """Return where the images of transitions are, and per camera how they are stored and read."""
    files: list[str] = []
    for part in parts:
        files.extend(map(str, part.descriptions))
    found: dict[str, Any] = {"hdf5_path": files[0] if len(files) == 1 else files}
    found["indices"] = rows_in_files(parts, index)
    for name in parts[0].camera_names:
        datasets: set[str] = set()
        sizes: set[tuple[int, int]] = set()
        readings: set[str] = set()
        for part in parts:
            datasets |= part.paths[name]
            sizes |= part.sizes[name]
            readings |= part.readings[name]
        found[name] = {
            "datasets": sorted(datasets),
            "files": files,
            "stored_sizes": sorted(sizes),
            "channels": parts[0].channels[name],
            "reading": sorted(readings),
        }
    return found
