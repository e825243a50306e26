"""The objects of an HDF5 file by path, listed in one pass that opens none of them."""

from __future__ import annotations

import contextlib
from typing import Any

import h5py

from slipstream.datasets.names import decoded, encoded, shown
from slipstream.datasets.opening import DanglingLinkError, check_inside, follow
from slipstream.datasets.stored import Stored
from slipstream.errors import DatasetError

_MAX_LINKS = 4_000_000
_MAX_SOFT_ROUNDS = 4


class Tree:
    """Names below a group of a file, which is the root as a rule.

    Hard links are listed once each, so cycles end. Soft links to groups of the same file are followed. External links
    are listed and never followed.

    Args:
        root: The group.

    Raises:
        DatasetError: If the file has more than four million links.
    """

    def __init__(self, root: h5py.Group) -> None:
        self.root = root
        self.children: dict[str, list[str]] = {"": []}
        self._kinds: dict[str, int] = {}
        self._opened: dict[str, Any] = {}
        self._datasets: dict[str, h5py.Dataset] = {}
        # Paths with a soft link on the way, which are followed link by link.
        self._soft: set[str] = set()
        root.id.links.visit(self._note, info=True)
        self._follow_soft_links()

    def _note(self, name: bytes, info: Any) -> None:
        self._add(decoded(name), info.type)

    def _add(self, path: str, kind: int) -> None:
        self._kinds[path] = kind
        above, _, name = path.rpartition("/")
        self.children.setdefault(above, []).append(name)
        if len(self._kinds) > _MAX_LINKS:
            raise DatasetError(f"{self.root.file.filename}: has more than {_MAX_LINKS} links, which is refused")

    def _follow_soft_links(self) -> None:
        """Add what is below groups that soft links lead to."""
        # A link may lead through another link, so a few rounds are needed; a cycle of links never resolves.
        pending = [path for path, kind in self._kinds.items() if kind == h5py.h5l.TYPE_SOFT]
        for _ in range(_MAX_SOFT_ROUNDS):
            unresolved = []
            for path in pending:
                target = self._target(path)
                if f"{path}/".startswith(f"{target}/"):
                    continue
                if target in self.children:
                    self._graft(path, target)
                elif target not in self._kinds:
                    unresolved.append(path)
            pending = unresolved

    def _target(self, path: str) -> str:
        above, _, name = path.rpartition("/")
        node = self.root.id
        if above:
            node = h5py.h5o.open(node, encoded(above))
        target = decoded(node.links.get_val(encoded(name)))
        if target.startswith("/"):
            return target.strip("/")
        return f"{above}/{target}".strip("/")

    def _graft(self, path: str, target: str) -> None:
        names = self.children[target]
        for name in list(names):
            self._add(f"{path}/{name}", self._kinds[f"{target}/{name}"])
            self._soft.add(f"{path}/{name}")
            if f"{target}/{name}" in self.children and len(path) < 1000:
                self._graft(f"{path}/{name}", f"{target}/{name}")

    def has(self, path: str) -> bool:
        """Tell whether there is something under a path."""
        return path in self._kinds or path in self.children

    def is_group(self, path: str) -> bool:
        """Tell whether a path is a group."""
        if path in self.children:
            return True
        return path in self._kinds and isinstance(self._open(path), h5py.h5g.GroupID)

    def is_dataset(self, path: str) -> bool:
        """Tell whether a path is a dataset.

        Raises:
            DatasetError: If it is a link that leads out of the file, or nowhere.
        """
        if path in self.children or path not in self._kinds:
            return False
        return isinstance(self._open(path), h5py.h5d.DatasetID)

    def _open(self, path: str) -> Any:
        found = self._opened.get(path)
        if found is not None:
            return found
        if self._kinds[path] == h5py.h5l.TYPE_HARD and path not in self._soft:
            # Only hard links are on the way, and those cannot lead out of the file. Opening a name in an open group is
            # faster than a path from the root.
            above, _, name = path.rpartition("/")
            parent = self._open(above) if above else self.root.id
            found = h5py.h5o.open(parent, encoded(name))
        else:
            found = follow(self.root, path)
        self._opened[path] = found
        return found

    def names(self) -> tuple[str, ...]:
        """Return all paths, in order."""
        return tuple(self._kinds)

    def open(self, path: str) -> h5py.Dataset:
        """Return the dataset under a path that `is_dataset` confirmed.

        Raises:
            DatasetError: If its values are in another file.
        """
        data = self._datasets.get(path)
        if data is None:
            data = Stored(self._open(path))
            check_inside(data)
            self._datasets[path] = data
        return data

    def forget(self, group: str) -> None:
        """Close what was opened below a group: HDF5 keeps each open object in memory."""
        for opened in (self._opened, self._datasets):
            for path in [path for path in opened if path.startswith(f"{group}/") or path == group]:
                del opened[path]

    def group(self, path: str) -> h5py.Group:
        """Return the group under a path that `is_group` confirmed."""
        if not path:
            return self.root
        return h5py.Group(follow(self.root, path))

    def is_link_out(self, path: str) -> bool:
        """Tell whether a path is an external link, which is never followed."""
        return bool(self._kinds.get(path) == h5py.h5l.TYPE_EXTERNAL)

    def check_links(self, group: str) -> None:
        """Raise if a link below a group leads out of the file: nobody can tell what is there.

        Raises:
            DatasetError: If there is such a link.
        """
        for path in self.below(group):
            whole = join(group, path)
            if self._kinds[whole] != h5py.h5l.TYPE_HARD:
                with contextlib.suppress(DanglingLinkError):
                    self.is_dataset(whole)

    def below(self, group: str) -> list[str]:
        """Return the paths of everything below a group that is not itself a group with members, relative to it."""
        found: list[str] = []
        pending = [(name, 0) for name in reversed(self.children.get(group, []))]
        while pending:
            path, depth = pending.pop()
            names = self.children.get(join(group, path))
            if names is None:
                found.append(path)
            elif depth < 100:
                pending += [(f"{path}/{name}", depth + 1) for name in reversed(names)]
        return found

    def leaves(self, group: str) -> list[str]:
        """Return the paths of the datasets below a group, relative to it; skips links that lead out or nowhere."""
        found = []
        for path in self.below(group):
            whole = join(group, path)
            if self.is_link_out(whole):
                continue
            try:
                is_dataset = self.is_dataset(whole)
            except DatasetError:
                continue
            if is_dataset:
                found.append(path)
        return found

    def shape(self, path: str) -> str:
        """Return the shape of a dataset for a message, as in ``[30, 7]``."""
        # Values in another file matter only to those who read them.
        return str(list(self._open(path).shape or ()))

    def name(self, path: str) -> str:
        """Return a path for a message, with its leading slash."""
        above = decoded(h5py.h5i.get_name(self.root.id) or b"/")
        return shown(f"{above.rstrip('/')}/{path}")


def join(group: str, path: str) -> str:
    """Return the path of something below a group, from the root, without slashes at its ends."""
    return f"{group}/{path}".strip("/")
