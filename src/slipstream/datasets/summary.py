"""What a description tells people: a table of datasets, and sentences about what they should know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import h5py

from slipstream.datasets.chunks import INGEST_HINT, FrameKind, filters_of
from slipstream.datasets.description import Roles, Row, Skipped, Stretch
from slipstream.datasets.layouts import Layout
from slipstream.datasets.names import shown
from slipstream.datasets.roles import Search
from slipstream.datasets.stored import creation_of
from slipstream.text import plural

_MAX_LISTED = 40
_MAX_SKIPPED = 3


@dataclass
class Counts:
    """What was counted while episodes were checked.

    Attributes:
        num_unflagged: Episodes that end without a flag.
        num_broken: Steps without a flag whose next observation is not what follows.
        num_mid_flags: Flags before the last step of an episode that has its own group.
        skipped: Episodes that cannot be used.
    """

    num_unflagged: int = 0
    num_broken: int = 0
    num_mid_flags: int = 0
    skipped: list[Skipped] = field(default_factory=list)


def make_rows(
    roles: Roles,
    stretches: Sequence[Stretch],
    first: Mapping[str, h5py.Dataset],
    num_rows: Mapping[str, tuple[int, int]],
) -> tuple[Row, ...]:
    """Return a line for each dataset that plays a role.

    Args:
        roles: The role of each dataset.
        stretches: All groups.
        first: The dataset of each path in the first group.
        num_rows: Least and most rows of each path, of all groups.
    """
    found = []
    for path, role in _role_names(roles).items():
        data = first.get(path)
        if data is None:
            continue
        least, most = num_rows[path]
        rows = str(least)
        if most != least:
            rows = f"{least}..{most}"
        shape = "x".join([rows, *map(str, data.shape[1:])])
        found.append(
            Row(role, shown(path), _dtype(data), shape, _storage(data), _reading(role, path, roles, stretches))
        )
    return tuple(found)


def _role_names(roles: Roles) -> dict[str, str]:
    """Return the role of each path."""
    names = {path: name for name, path in roles.cameras.items()}
    names |= {path: f"next {name}" for name, path in roles.next_cameras.items()}
    names |= dict.fromkeys(roles.joint, "joint")
    names |= dict.fromkeys(roles.next_joint, "next joint")
    names[roles.action] = "action"
    for role, path in (("reward", roles.reward), ("terminal", roles.terminal), ("timeout", roles.timeout)):
        if path is not None:
            names[path] = role
    return names


def _reading(role: str, path: str, roles: Roles, stretches: Sequence[Stretch]) -> str:
    """Say how a dataset is read: numbers are in memory, images are read when they are needed."""
    readings = set()
    if roles.cameras.get(role) == path:
        readings = {stretch.cameras[role].kind.reading for stretch in stretches}
    name = role.removeprefix("next ")
    if roles.next_cameras.get(name) == path:
        readings = {stretch.next_cameras[name].kind.reading for stretch in stretches}
    return ", ".join(sorted(readings)) or "memory"


def _dtype(data: h5py.Dataset) -> str:
    if h5py.check_vlen_dtype(data.dtype) is not None:
        return "bytes"
    return str(data.dtype)


def _storage(data: h5py.Dataset) -> str:
    if data.chunks is None:
        return "contiguous"
    names = [filter_.name for filter_ in filters_of(creation_of(data))]
    return " ".join(["chunks", "x".join(map(str, data.chunks)), *names])


def make_notes(layout: Layout, search: Search, stretches: Sequence[Stretch], counts: Counts) -> tuple[str, ...]:
    """Return sentences about what a user should know."""
    roles = search.roles
    notes = []
    if roles.reward is None:
        notes.append("there are no rewards: they are taken to be 0")
    if roles.terminal is None:
        notes.append("there are no flags of terminal states: no step counts as terminal")
    if not roles.joint:
        notes.append("no dataset was recognised as joint positions")
    notes += [f"guessed: {guess}" for guess in search.guesses]
    notes += _episode_notes(stretches, counts)
    if layout.missing:
        notes.append(f"the filter key names {plural(layout.missing, 'episode')} that the file does not have")
    for name in roles.cameras:
        notes += _kind_notes(name, [stretch.cameras[name].kind for stretch in stretches])
    notes += [f"not used: {shown(path)}: {reason}" for path, reason in search.rejected.items()]
    notes += [f"not used: {what}" for what in search.unused[:_MAX_LISTED]]
    if len(search.unused) > _MAX_LISTED:
        notes.append(f"not used: {len(search.unused) - _MAX_LISTED} more datasets")
    return tuple(notes)


def _episode_notes(stretches: Sequence[Stretch], counts: Counts) -> list[str]:
    notes = []
    if counts.num_unflagged:
        notes.append(f"{counts.num_unflagged} episodes end without a flag: the next observation is not what follows")
    elif counts.num_broken:
        notes.append(
            f"the next observation of {plural(counts.num_broken, 'step')} differs from the following row without a "
            "flag; timeouts are recorded, so the flags are trusted"
        )
    if counts.num_mid_flags:
        notes.append(
            f"{counts.num_mid_flags} flags of ends are set before the last step of an episode, and end nothing"
        )
    lost = 0
    for stretch in stretches:
        lost += int((stretch.lengths - stretch.transitions()).sum())
    if lost:
        notes.append(f"{lost} final steps have no next observation and are skipped")
    if counts.skipped:
        some = "; ".join(one.reason for one in counts.skipped[:_MAX_SKIPPED])
        notes.append(f"skipped {plural(len(counts.skipped), 'episode')} that cannot be used: {some}")
    return notes


def _kind_notes(name: str, kinds: Sequence[FrameKind]) -> list[str]:
    notes = []
    kind = kinds[0]
    if kind.color_assumed and kind.channels > 1:
        notes.append(
            f"{kind.format} images of the camera {name} are assumed to be {kind.encoding.upper()}; "
            "color= says otherwise"
        )
    if kind.scale != 1:
        notes.append(f"the camera {name} has values from 0 to 1, which become 0 to 255")
    if len({(one.height, one.width) for one in kinds}) > 1:
        notes.append(f"the camera {name} has images of several sizes")
    locked = [one for one in kinds if one.reading == "locked"]
    wide = max(one.amplification for one in kinds)
    if locked:
        notes.append(
            f"the camera {name} can be read by HDF5 only, one frame at a time ({locked[0].because}); {INGEST_HINT}"
        )
    elif wide > 2:
        notes.append(f"reading a frame of the camera {name} decodes {wide:.0f} times its size; {INGEST_HINT}")
    return notes
