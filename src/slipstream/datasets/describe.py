"""Look into a recorded file: recognise its layout, and check that what belongs together fits together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.chunks import REPACK, FrameKind, frame_kind
from slipstream.datasets.description import Description, Fields, Final, Images, Roles, Row, Stretch
from slipstream.datasets.filters import Filter
from slipstream.datasets.layouts import Layout, find_layout, find_roles
from slipstream.datasets.opening import check_numbers, dataset, member, opened
from slipstream.errors import DatasetError, NonFiniteError
from slipstream.memory import machine_bytes

_BLOCK_ROWS = 1 << 16


def describe(path: str | os.PathLike[str], fields: Fields | None = None) -> Description:
    """Say what a recorded file holds, by its content; reads flags and headers, and no image but the first.

    Args:
        path: An HDF5 file: of layout A or B, robomimic, ALOHA, Minari, D4RL, ManiSkill, or any other with `fields`.
        fields: Which datasets are what, where that should not be found out.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is no HDF5 file, or damaged.
        MissingEntryError: If something is not in it; lists what is.
        DatasetError: If its parts contradict each other, lie in other files, or have no values.
        NonFiniteError: If a flag is NaN or infinite.

    Example:
        >>> import h5py, numpy
        >>> with h5py.File("/tmp/slipstream-doc-demo.hdf5", "w") as file:
        ...     file["observations/joint"] = numpy.zeros((11, 16))
        ...     file["observations/left_image"] = numpy.zeros((11, 64, 64, 3), "uint8")
        ...     file["actions"] = numpy.zeros((10, 7))
        >>> found = describe("/tmp/slipstream-doc-demo.hdf5")
        >>> found.layout, found.num_episodes, found.num_transitions, found.roles.cameras
        ('A (/observations)', 1, 10, {'left': 'observations/left_image'})
    """
    fields, path = fields or Fields(), Path(path)
    with opened(path) as (root, identity):
        layout = find_layout(root, fields)
        roles = find_roles(_group(root, layout.groups[0]), fields)
        reader = _Reader(root, layout, roles)
        stretches = tuple(reader.stretch(name) for name in layout.groups)
        return Description(
            path, layout.name, roles, stretches, reader.joint_dim, reader.action_dim, tuple(reader.rows(stretches)),
            tuple(reader.notes(stretches)), identity,
        )  # fmt: skip


def _group(root: h5py.File, name: str) -> h5py.Group:
    found = root if name == "/" else member(root, name)
    assert isinstance(found, h5py.Group)  # noqa: S101 - that is how it was found
    return found


class _Reader:
    """Checks group after group against the first one."""

    def __init__(self, root: h5py.File, layout: Layout, roles: Roles) -> None:
        self.root, self.layout, self.roles = root, layout, roles
        self.file = root.filename
        self.joint_dim = self.action_dim = 0
        self.unflagged = self.mid_flags = 0
        self._first: dict[str, h5py.Dataset] = {}
        self._num_rows: dict[str, tuple[int, int]] = {}  # least and most rows of all groups, by path
        self._opened: dict[str, h5py.Dataset] = {}  # of the group that is looked at: finding one is slow

    def stretch(self, name: str) -> Stretch:
        """Check one group."""
        group = _group(self.root, name)
        self._opened = {}
        if not len(group):
            raise DatasetError(f"{self.file}: the group {group.name} is empty, expected {self.roles.action} in it")
        roles = self.roles
        action = self._numbers(group, roles.action)
        steps = action.shape[0]
        if steps == 0:
            raise DatasetError(f"{self.file}: {action.name} has no rows, expected at least one step")
        if 8 * steps > machine_bytes():
            raise DatasetError(f"{self.file}: {action.name} claims {steps} steps, more than this machine could index")
        self.action_dim = self._width("action", self.action_dim, [action])
        joints = [self._numbers(group, path) for path in roles.joint]
        self.joint_dim = self._width("joint", self.joint_dim, joints) if joints else 0
        for path in (roles.reward, roles.terminal, roles.timeout):
            if path is not None:
                self._check_column(self._numbers(group, path), steps)
        for data, path in zip(joints, roles.next_joint, strict=False):
            self._check_after(data, self._numbers(group, path), steps)
        cameras = {camera: self._images(group, path) for camera, path in roles.cameras.items()}
        after = {camera: self._images(group, path) for camera, path in roles.next_cameras.items()}
        observed = {data.name: data.shape[0] for data in joints}
        observed |= {f"{group.name.rstrip('/')}/{roles.cameras[name]}": one.num_rows for name, one in cameras.items()}
        lengths, cut = self._episodes(group, steps, joints)
        final = self._final(observed, steps, len(lengths), self._is_apart())
        for camera, images in after.items():
            if images.num_rows != steps:
                raise self._wrong_rows(roles.next_cameras[camera], images.num_rows, steps)
        return Stretch(name, lengths, final, cut, cameras, after)

    def _is_apart(self) -> bool:
        """Tell whether all that is observed has datasets of its own for what follows each step."""
        roles = self.roles
        joint = len(roles.next_joint) == len(roles.joint)
        return joint and roles.cameras.keys() == roles.next_cameras.keys() and bool(roles.joint or roles.cameras)

    def _dataset(self, group: h5py.Group, path: str) -> h5py.Dataset:
        found = self._opened.get(path)
        if found is None:
            found = self._opened[path] = dataset(group, path)
        return found

    def _note(self, path: str, data: h5py.Dataset) -> None:
        """Remember what `rows` tells of a dataset."""
        self._first.setdefault(path, data)
        rows = data.shape[0]
        least, most = self._num_rows.get(path, (rows, rows))
        self._num_rows[path] = min(least, rows), max(most, rows)

    def _numbers(self, group: h5py.Group, path: str) -> h5py.Dataset:
        data = self._dataset(group, path)
        check_numbers(data)
        if data.ndim == 0:
            raise DatasetError(f"{self.file}: {data.name} is a single value, expected one row per step")
        self._note(path, data)
        return data

    def _width(self, what: str, known: int, parts: Sequence[h5py.Dataset]) -> int:
        """Return how many values a row has, which is the same in all groups."""
        for data in parts:
            if data.ndim > 2:
                raise DatasetError(f"{self.file}: {data.name} has shape {list(data.shape)}, expected [rows, values]")
            if data.ndim == 2 and data.shape[1] == 0:
                raise DatasetError(f"{self.file}: {data.name} has shape {list(data.shape)}: its rows have no values")
        width = sum(data.shape[1] if data.ndim == 2 else 1 for data in parts)
        if known not in (0, width):
            raise DatasetError(f"{self.file}: {parts[0].name} makes the {what} {width} values wide, {known} before it")
        return width

    def _check_column(self, data: h5py.Dataset, steps: int) -> None:
        if data.shape not in ((steps,), (steps, 1)):
            raise DatasetError(
                f"{self.file}: {data.name} has shape {list(data.shape)}, expected [{steps}] or [{steps}, 1] "
                f"as there are {steps} actions"
            )

    def _check_after(self, data: h5py.Dataset, after: h5py.Dataset, steps: int) -> None:
        if after.shape != (steps, *data.shape[1:]):
            raise DatasetError(
                f"{self.file}: {after.name} has shape {list(after.shape)}, expected {[steps, *data.shape[1:]]}"
            )

    def _flags(self, group: h5py.Group, path: str | None, steps: int) -> NDArray[np.bool_]:
        if path is None:
            return np.zeros(steps, bool)
        data = self._dataset(group, path)
        values = np.asarray(data[()]).reshape(-1)
        wrong = np.flatnonzero(~np.isfinite(values))
        if wrong.size:
            raise NonFiniteError(f"{self.file}: {data.name} is not finite in row {wrong[0]}: {values[wrong[0]]}")
        return np.asarray(values != 0)

    def _images(self, group: h5py.Group, path: str) -> Images:
        data = self._dataset(group, path)
        kind, offset = frame_kind(data, bgr=self.layout.bgr)
        self._note(path, data)
        return Images(kind, data.shape[0], offset)

    def _episodes(
        self, group: h5py.Group, steps: int, joints: Sequence[h5py.Dataset]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the lengths of the episodes of a group, and which of them were cut off."""
        terminal, timeout = (self._flags(group, path, steps) for path in (self.roles.terminal, self.roles.timeout))
        last = np.array([steps - 1])
        if self.layout.flags_split:
            breaks = self._broken_links(group, joints, steps)
            self.unflagged += int((breaks & ~(terminal | timeout)[:-1]).sum())
            flagged = terminal | timeout
            flagged[:-1] |= breaks
            last = np.union1d(np.flatnonzero(flagged), last)
        else:
            self.mid_flags += int(np.count_nonzero(terminal[:-1]) + np.count_nonzero(timeout[:-1]))
        return np.diff(last, prepend=-1).astype(np.int64), ~terminal[last]

    def _broken_links(self, group: h5py.Group, joints: Sequence[h5py.Dataset], steps: int) -> NDArray[np.bool_]:
        """Tell after which steps the next observation is not the observation of the step that follows."""
        broken = np.zeros(steps - 1, bool)
        for data, path in zip(joints, self.roles.next_joint, strict=False):
            after = self._dataset(group, path)
            if data.shape[0] < steps:
                continue  # reported with the lengths of all
            for start in range(0, steps - 1, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, steps - 1)
                differ = data[start + 1 : stop + 1] != after[start:stop]
                broken[start:stop] |= differ.reshape(stop - start, -1).any(1)
        return broken

    def _final(self, observed: dict[str, int], steps: int, episodes: int, apart: bool) -> Final:
        """Tell where last observations are, from how many rows there are."""
        if len(set(observed.values())) > 1:
            found = ", ".join(f"{name} {count}" for name, count in observed.items())
            raise DatasetError(f"{self.file}: observations have different numbers of rows: {found}")
        rows = next(iter(observed.values()), steps)
        kinds: dict[int, Final] = {steps: "none", steps + 1: "stream", steps + episodes: "own"}
        if rows not in kinds:
            name = next(iter(observed))
            raise self._wrong_rows(name, rows, steps)
        return "next" if apart else kinds[rows]

    def _wrong_rows(self, name: str, rows: int, steps: int) -> DatasetError:
        return DatasetError(
            f"{self.file}: {name} has {rows} rows, expected {steps + 1} (one more than the {steps} actions) or {steps}"
        )

    def rows(self, stretches: Sequence[Stretch]) -> list[Row]:
        """Return what was found, line by line."""
        found = []
        roles = self.roles
        images = {roles.cameras[name]: name for name in roles.cameras}
        images |= {roles.next_cameras[name]: f"next {name}" for name in roles.next_cameras}
        columns = dict.fromkeys(roles.joint, "joint") | dict.fromkeys(roles.next_joint, "next joint")
        named = (
            (roles.action, "action"),
            (roles.reward, "reward"),
            (roles.terminal, "terminal"),
            (roles.timeout, "timeout"),
        )
        columns |= {path: role for path, role in named if path is not None}
        for path, role in (images | columns).items():
            data = self._first.get(path)
            if data is None:
                continue
            name = role.removeprefix("next ")
            camera = path in images
            source = [s.next_cameras if role.startswith("next ") else s.cameras for s in stretches] if camera else []
            reading = "memory" if not camera else ", ".join(sorted({one[name].kind.reading for one in source}))
            least, most = self._num_rows[path]
            shape = [str(least) if least == most else f"{least}..{most}", *map(str, data.shape[1:])]
            found.append(Row(role, path, _dtype(data), "x".join(shape), _storage(data), reading))
        return found

    def notes(self, stretches: Sequence[Stretch]) -> list[str]:
        """Return sentences about what a user should know."""
        notes = []
        roles = self.roles
        if roles.reward is None:
            notes.append("there are no rewards: they are taken to be 0")
        if roles.terminal is None:
            notes.append("there are no flags of terminal states: no step counts as terminal")
        if not roles.joint:
            notes.append("no dataset was recognised as joint positions")
        if self.unflagged:
            notes.append(f"{self.unflagged} episodes end without a flag: the next observation is not what follows")
        if self.mid_flags:
            notes.append(f"{self.mid_flags} flags of ends are set before the last step of an episode, and end nothing")
        lost = sum(int((stretch.lengths - stretch.transitions()).sum()) for stretch in stretches)
        if lost:
            notes.append(f"{lost} last steps were cut off without an observation after them: they are no transitions")
        notes += _kind_notes({name: {s.cameras[name].kind for s in stretches} for name in roles.cameras})
        return notes


def _kind_notes(kinds: dict[str, set[FrameKind]]) -> list[str]:
    notes = []
    for name, found in kinds.items():
        locked = next((kind for kind in found if kind.reading == "locked"), None)
        wide = max((kind.amplification for kind in found), default=1.0)
        if locked is not None:
            notes.append(
                f"the camera {name} can be read by HDF5 only, one frame at a time ({locked.because}); {REPACK}"
            )
        elif wide > 2:
            notes.append(f"reading a frame of the camera {name} decodes {wide:.0f} times its size; {REPACK}")
    return notes


def _dtype(data: h5py.Dataset) -> str:
    return "bytes" if h5py.check_vlen_dtype(data.dtype) is not None else str(data.dtype)


def _storage(data: h5py.Dataset) -> str:
    if data.chunks is None:
        return "contiguous"
    plist = data.id.get_create_plist()
    names = [Filter(plist.get_filter(number)[0]).name for number in range(plist.get_nfilters())]
    return " ".join(["chunks", "x".join(map(str, data.chunks)), *names])
