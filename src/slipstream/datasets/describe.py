"""Look into a recorded file: recognise its layout, and check that its parts fit together."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.cameras import look_at
from slipstream.datasets.chunks import check_images, kind_of
from slipstream.datasets.description import Description, Fields, Final, Images, Skipped, Stretch
from slipstream.datasets.flags import read_flags
from slipstream.datasets.layouts import Layout, find_layout
from slipstream.datasets.links import differ
from slipstream.datasets.names import name_of
from slipstream.datasets.opening import check_numbers, dataset, opened
from slipstream.datasets.roles import Search, find_roles
from slipstream.datasets.summary import Counts, make_notes, make_rows
from slipstream.datasets.tree import Tree, join
from slipstream.errors import CorruptFileError, DatasetError, MissingEntryError, NonFiniteError
from slipstream.memory import machine_bytes

logger = logging.getLogger(__name__)

_BLOCK_ROWS = 1 << 16
# Numbers that claim more than this many times their stored bytes were never written; compression does not reach it.
_MAX_CLAIM = 5000
_LARGE_CLAIM_BYTES = 1 << 28
_BAD_EPISODE = (DatasetError, MissingEntryError, NonFiniteError, CorruptFileError)


def describe(
    path: str | os.PathLike[str],
    fields: Fields | None = None,
    *,
    cameras: Sequence[str] | None = None,
    like: Description | None = None,
) -> Description:
    """Say what a recorded file holds, by its content.

    Reads flags and headers, the first bytes of compressed images, and a few rows of images that are floats.

    Args:
        path: An HDF5 file of layout A or B, robomimic, robosuite, LIBERO, ALOHA, Minari, D4RL, ManiSkill, RoboNet, or
            any other with `fields`.
        fields: Which datasets play which role, and which episodes to read.
        cameras: The cameras that are needed; others are not checked. All that are found by default, none if empty.
        like: A description of another file that was made with the same `fields` and `cameras`. If this file has the
            same names, they play the same roles, and the result has no table and no notes about names. Everything is
            checked as usual; a folder of files opens twice as fast.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is not an HDF5 file, or damaged.
        MissingEntryError: If something is not in it; lists what is.
        DatasetError: If its parts contradict each other, lie in other files, or have no values; or if a writer has the
            file open.
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
    fields = fields or Fields()
    path = Path(path)
    with opened(path) as (root, identity):
        tree = Tree(root)
        layout = find_layout(tree, fields)
        first_skipped: list[Skipped] = []
        known = _known_search(tree, layout, like)
        if known is not None:
            search = known
        else:
            search, first_skipped = _search(tree, layout, fields, cameras)
        checker = _Checker(tree, layout, search, fields)
        checker.counts.skipped += first_skipped
        stretches = checker.stretches(layout.groups[len(first_skipped) :])
        notes = make_notes(layout, search, stretches, checker.counts)
        for note in notes:
            logger.info("%s: %s", path, note)
        return Description(
            path=path,
            layout=layout.name,
            roles=search.roles,
            stretches=stretches,
            joint_dim=checker.joint_dim,
            action_dim=checker.action_dim,
            rows=make_rows(search.roles, stretches, checker.first, checker.num_rows) if known is None else (),
            notes=notes,
            identity=identity,
            observations=tuple(search.observations),
            rejected=search.rejected,
            skipped=tuple(checker.counts.skipped),
            search=(layout, hash(tree.names()), search),
        )


def _known_search(tree: Tree, layout: Layout, like: Description | None) -> Search | None:
    """Return the roles of a file with the same names, if there is one."""
    if like is None or like.search is None:
        return None
    known_layout, names, search = like.search
    if known_layout != layout or names != hash(tree.names()):
        return None
    return Search(search.group, search.roles, rejected=search.rejected, observations=search.observations)


def _search(tree: Tree, layout: Layout, fields: Fields, cameras: Sequence[str] | None) -> tuple[Search, list[Skipped]]:
    """Find roles in the first episode that has them; episodes before it are skipped, or an error."""
    skipped: list[Skipped] = []
    for group in layout.groups:
        try:
            search = find_roles(tree, group.strip("/"), fields, layout, cameras)
        except _BAD_EPISODE as error:
            if fields.on_bad_episode == "raise" or group == layout.groups[-1]:
                raise
            skipped.append(Skipped(group, str(error)))
            continue
        if layout.name == "Minari" and not (search.roles.joint or search.pixels or search.rejected):
            where = tree.name(group.strip("/"))
            raise DatasetError(f"{tree.root.file.filename}: the observations of {where} are empty, expected values")
        return search, skipped
    raise AssertionError("a layout has at least one group")


class _Checker:
    """Checks each episode against itself and against the first one."""

    def __init__(self, tree: Tree, layout: Layout, search: Search, fields: Fields) -> None:
        self.tree = tree
        self.layout = layout
        self.roles = search.roles
        self.fields = fields
        self._pixels = {(search.group, path): pixels for path, pixels in search.pixels.items()}
        self.file = str(tree.root.file.filename)
        self.joint_dim = 0
        self.action_dim = 0
        self.counts = Counts()
        self.first: dict[str, h5py.Dataset] = {}
        # Least and most rows of all groups, by path.
        self.num_rows: dict[str, tuple[int, int]] = {}
        self._group = ""
        self._opened: dict[str, h5py.Dataset] = {}

    def stretches(self, groups: Sequence[str]) -> tuple[Stretch, ...]:
        """Check groups in order; leaves out those that cannot be used, if that is allowed."""
        found = []
        for group in groups:
            try:
                found.append(self._stretch(group))
            except _BAD_EPISODE as error:
                if self.fields.on_bad_episode == "raise":
                    raise
                self.counts.skipped.append(Skipped(group, str(error)))
                logger.warning("%s; the episode is skipped", error)
        if not found:
            reason = self.counts.skipped[0].reason
            raise DatasetError(f"{self.file}: none of its {len(self.counts.skipped)} episodes can be used; {reason}")
        return tuple(found)

    def _stretch(self, name: str) -> Stretch:
        """Check one group."""
        if self._group != name.strip("/"):
            self.tree.forget(self._group)
        self._group = name.strip("/")
        self._opened = {}
        roles = self.roles
        if not self.tree.children.get(self._group):
            where = self.tree.name(self._group)
            raise DatasetError(f"{self.file}: the group {where} is empty, expected {roles.action} in it")
        action = self._numbers(roles.action)
        steps = action.shape[0]
        if steps == 0:
            raise DatasetError(f"{self.file}: {name_of(action)} has no rows, expected at least one step")
        action_dim = self._width("action", self.action_dim, [action])
        joints = [self._numbers(path) for path in roles.joint]
        joint_dim = self._width("joint", self.joint_dim, joints)
        for path in (roles.reward, roles.terminal, roles.timeout):
            if path is not None:
                self._check_column(self._numbers(path), steps)
        for data, path in zip(joints, roles.next_joint, strict=False):
            self._check_after(data, self._numbers(path), steps)
        cameras = {camera: self._images(path) for camera, path in roles.cameras.items()}
        after = {camera: self._images(path) for camera, path in roles.next_cameras.items()}
        terminal = self._flags(roles.terminal, steps)
        lengths, cut = self._episodes(terminal, joints)
        final = self._final(self._observed(joints, cameras), steps, len(lengths))
        for camera, images in after.items():
            if images.num_rows != steps:
                raise self._wrong_rows(self._shown(roles.next_cameras[camera]), images.num_rows, steps)
        if self.fields.on_bad_episode == "skip":
            self._check_finite()
        # Only an episode that is sound says how wide others are.
        self.action_dim = action_dim
        self.joint_dim = joint_dim
        return Stretch(name, lengths, final, cut, cameras, after, terminal)

    def _check_finite(self) -> None:
        """Read all numbers of a group, so that an episode with NaN can be skipped before anything is loaded."""
        for path, data in self._opened.items():
            if self._is_camera(path) or data.dtype.kind != "f":
                continue
            for first in range(0, data.shape[0], _BLOCK_ROWS):
                values = data[first : first + _BLOCK_ROWS]
                if not np.isfinite(values).all():
                    raise NonFiniteError(f"{self.file}: {name_of(data)} is not finite")

    def _is_camera(self, path: str) -> bool:
        return path in self.roles.cameras.values() or path in self.roles.next_cameras.values()

    def _whole(self, path: str) -> str:
        return join(self._group, path)

    def _shown(self, path: str) -> str:
        return self.tree.name(self._whole(path))

    def _dataset(self, path: str) -> h5py.Dataset:
        """Return a dataset of the group; remembers what the table of a description tells of it."""
        found = self._opened.get(path)
        if found is not None:
            return found
        whole = self._whole(path)
        if not self.tree.is_dataset(whole):
            # The name is not there, or in another encoding than UTF-8; this raises with what is there.
            return dataset(self.tree.group(self._group), path)
        found = self._opened[path] = self.tree.open(whole)
        return found

    def _remember(self, path: str, data: h5py.Dataset) -> None:
        """Note what the table of a description tells of a dataset."""
        self.first.setdefault(path, data)
        rows = data.shape[0]
        least, most = self.num_rows.get(path, (rows, rows))
        self.num_rows[path] = (min(least, rows), max(most, rows))

    def _numbers(self, path: str) -> h5py.Dataset:
        data = self._dataset(path)
        check_numbers(data)
        if data.shape == ():
            raise DatasetError(f"{self.file}: {name_of(data)} is a single value, expected one row per step")
        self._check_claim(data)
        self._remember(path, data)
        return data

    def _check_claim(self, data: h5py.Dataset) -> None:
        """Raise if a dataset claims far more rows than are stored: a few bytes can claim billions."""
        nbytes = math.prod(data.shape) * data.dtype.itemsize
        if nbytes < _LARGE_CLAIM_BYTES:
            return
        stored = data.id.get_storage_size()
        if nbytes > _MAX_CLAIM * stored or nbytes > machine_bytes():
            raise DatasetError(
                f"{self.file}: {name_of(data)} claims {data.shape[0]} rows of {nbytes} bytes in total, and {stored} "
                "bytes are stored"
            )

    def _width(self, what: str, known: int, parts: Sequence[h5py.Dataset]) -> int:
        """Return how many values a row has, which is the same in all groups."""
        width = 0
        for data in parts:
            shape = data.shape
            if len(shape) > 2:
                raise DatasetError(f"{self.file}: {name_of(data)} has shape {list(shape)}, expected [rows, values]")
            if len(shape) == 2 and shape[1] == 0:
                raise DatasetError(f"{self.file}: {name_of(data)} has shape {list(shape)}: its rows have no values")
            width += math.prod(shape[1:])
        if known not in (0, width):
            raise DatasetError(
                f"{self.file}: {name_of(parts[0])} makes the {what} {width} values wide, {known} before it"
            )
        return width

    def _check_column(self, data: h5py.Dataset, steps: int) -> None:
        if data.shape not in ((steps,), (steps, 1)):
            raise DatasetError(
                f"{self.file}: {name_of(data)} has shape {list(data.shape)}, expected [{steps}] or [{steps}, 1] "
                f"as there are {steps} actions"
            )

    def _check_after(self, data: h5py.Dataset, after: h5py.Dataset, steps: int) -> None:
        expected = (steps, *data.shape[1:])
        if after.shape != expected:
            raise DatasetError(
                f"{self.file}: {name_of(after)} has shape {list(after.shape)}, expected {list(expected)}"
            )

    def _images(self, path: str) -> Images:
        data = self._dataset(path)
        # The images of the first episode were looked at already.
        pixels = self._pixels.pop((self._group, path), None)
        if pixels is None:
            pixels = check_images(data, look_at(data, path, named=True))
        kind, offset = kind_of(data, pixels, color=self.fields.color, bgr=self.layout.bgr)
        self._remember(path, data)
        return Images(kind, data.shape[0], offset)

    def _episodes(
        self, terminal: NDArray[np.bool_], joints: Sequence[h5py.Dataset]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the lengths of the episodes of a group, and which of them were truncated."""
        steps = len(terminal)
        timeout = self._flags(self.roles.timeout, steps)
        if not self.layout.flags_split:
            self.counts.num_mid_flags += int(np.count_nonzero(terminal[:-1]) + np.count_nonzero(timeout[:-1]))
            return np.array([steps], np.int64), ~terminal[-1:]
        flagged = terminal | timeout
        broken = self._broken_links(joints, flagged)
        self.counts.num_broken += int(broken.sum())
        # Where timeouts are recorded, flags are complete; a link may differ for other reasons.
        if self.roles.timeout is None:
            flagged[:-1] |= broken
            self.counts.num_unflagged += int(broken.sum())
        last = np.union1d(np.flatnonzero(flagged), [steps - 1])
        lengths = np.diff(last, prepend=-1).astype(np.int64)
        return lengths, ~terminal[last]

    def _flags(self, path: str | None, steps: int) -> NDArray[np.bool_]:
        if path is None:
            return np.zeros(steps, bool)
        return read_flags(self._dataset(path), steps)

    def _broken_links(self, joints: Sequence[h5py.Dataset], flagged: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Tell after which steps without a flag the next observation is not the observation of the following step.

        Raises:
            DatasetError: If that is so for most steps: such rows are not in the order of time.
        """
        num_links = len(flagged) - 1
        broken = np.zeros(num_links, bool)
        for data, path in zip(joints, self.roles.next_joint, strict=False):
            # A wrong number of rows is reported later, together with all others.
            if data.shape[0] > num_links:
                broken |= differ(data, self._dataset(path), num_links)
        broken &= ~flagged[:-1]
        num_compared = num_links - int(np.count_nonzero(flagged[:-1]))
        num_broken = int(broken.sum())
        if num_broken > num_compared // 2 and num_compared > 1:
            paths = ", ".join(self.tree.name(path) for path in self.roles.next_joint)
            raise DatasetError(
                f"{self.file}: {paths} does not continue with the next row after {num_broken} of {num_compared} steps: "
                "the rows are not in the order of time, so episodes cannot be told apart"
            )
        return broken

    def _observed(self, joints: Sequence[h5py.Dataset], cameras: dict[str, Images]) -> dict[str, int]:
        """Return how many rows each observation has."""
        observed = {}
        for path, data in zip(self.roles.joint, joints, strict=True):
            observed[path] = data.shape[0]
        for name, images in cameras.items():
            observed[self.roles.cameras[name]] = images.num_rows
        return observed

    def _is_apart(self) -> bool:
        """Tell whether everything that is observed has datasets for the observation after each step."""
        roles = self.roles
        joint = len(roles.next_joint) == len(roles.joint)
        return joint and roles.cameras.keys() == roles.next_cameras.keys() and bool(roles.joint or roles.cameras)

    def _final(self, observed: dict[str, int], steps: int, episodes: int) -> Final:
        """Tell where last observations are, from how many rows there are."""
        if len(set(observed.values())) > 1:
            found = ", ".join(f"{self._shown(path)} {count}" for path, count in observed.items())
            raise DatasetError(f"{self.file}: observations have different numbers of rows: {found}")
        rows = next(iter(observed.values()), steps)
        kinds: dict[int, Final] = {steps: "none", steps + 1: "stream", steps + episodes: "own"}
        if rows not in kinds:
            raise self._wrong_rows(self._shown(next(iter(observed))), rows, steps)
        if self._is_apart():
            return "next"
        return kinds[rows]

    def _wrong_rows(self, name: str, rows: int, steps: int) -> DatasetError:
        return DatasetError(
            f"{self.file}: {name} has {rows} rows, expected {steps + 1} (one more than the {steps} actions) or {steps}"
        )
