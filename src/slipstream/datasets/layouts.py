"""The layouts that people record in: which groups of a file are episodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.datasets.description import Fields
from slipstream.datasets.names import shown
from slipstream.datasets.opening import listing, natural
from slipstream.datasets.tree import Tree, join
from slipstream.errors import ConfigurationError, DatasetError, MissingEntryError

ACTIONS = ("actions", "action")
REWARDS = ("rewards", "reward")
TERMINALS = ("terminals", "terminations", "terminated", "dones", "done")
TIMEOUTS = ("timeouts", "truncations", "truncated")
OBSERVATIONS = ("observations", "obs", "observation")
NEXT_OBSERVATIONS = ("next_observations", "next_obs", "next_observation")

_PREFIXES = (
    ("robomimic", "data", "demo_"),
    ("ManiSkill", "", "traj_"),
    ("Minari", "", "episode_"),
)
_MAX_NAMED = 5
_MAX_EPISODE_DEPTH = 3


@dataclass(frozen=True)
class Layout:
    """A layout that was recognised.

    Attributes:
        name: What people call it.
        groups: Paths of the groups to read, in order; the root is ``/``.
        flags_split: Whether flags separate episodes, because one group holds several.
        bgr: Whether compressed images have red and blue exchanged.
        action: Path of the actions, if they have no usual name.
        observations: Path of the group of observations, if it has no usual name.
        flatten: Whether a group of observations is one nested observation, all of whose numbers are used.
        missing: Episodes that a filter key names and the file does not have.
    """

    name: str
    groups: tuple[str, ...]
    flags_split: bool
    bgr: bool = False
    action: str | None = None
    observations: str | None = None
    flatten: bool = False
    missing: int = 0


def find_layout(tree: Tree, fields: Fields) -> Layout:
    """Recognise the layout of a file by its content, and select the episodes that `fields` asks for.

    Raises:
        MissingEntryError: If something that `fields` names is not in the file.
        DatasetError: If the layout is unknown; lists what was found, and says how to name it.
    """
    if isinstance(fields.episodes, str):
        above = fields.episodes.strip("/")
        groups = _child_groups(tree, above, "")
        if not groups:
            raise MissingEntryError(
                f"{_file(tree)}: there is no group of episodes below {shown(above)}; {listing(tree.root)}"
            )
        layout = Layout("explicit", groups, flags_split=False)
    else:
        layout = _recognise(tree, fields)
    return _select(tree, layout, fields)


def _file(tree: Tree) -> str:
    return str(tree.root.file.filename)


def _recognise(tree: Tree, fields: Fields) -> Layout:
    for name, above, prefix in _PREFIXES:
        groups = _child_groups(tree, above, prefix)
        if groups:
            return Layout(name, groups, flags_split=False, flatten=name == "Minari")
    at_root = _of_root(tree, fields)
    if at_root is not None:
        return at_root
    if tree.is_dataset("policy/actions") and tree.is_group("env"):
        return Layout("RoboNet", ("/",), flags_split=False, action="policy/actions", observations="env")
    episodes = _groups_with_actions(tree)
    if episodes:
        return Layout("a group per episode", episodes, flags_split=False)
    raise DatasetError(
        f"{_file(tree)}: none of the layouts that are known (no {' or '.join(ACTIONS)} at its root, in data/demo_*, "
        "traj_* or episode_*, nor together with observations in any group); "
        f"{listing(tree.root)}; name them, as in action='path/of/actions'"
    )


def _of_root(tree: Tree, fields: Fields) -> Layout | None:
    """Recognise a file whose root holds the actions."""
    base = first_of(tree, "", OBSERVATIONS)
    if base is not None and tree.is_group(f"{base}/images"):
        return Layout("ALOHA", ("/",), flags_split=False, bgr=True)
    action = first_of(tree, "", ACTIONS)
    if action is not None and fields.action is None and not tree.is_dataset(action):
        choices = ", ".join(f"{action}/{shown(path)}" for path in tree.leaves(action))
        raise MissingEntryError(
            f"{_file(tree)}: /{action} is a group with {choices or 'nothing in it'}; choose the actions, "
            f"as in action='{action}/...'"
        )
    if action is None and fields.action is None:
        return None
    is_flat = first_of(tree, "", NEXT_OBSERVATIONS) is not None
    if base is not None and tree.is_dataset(base):
        is_flat = True
    if is_flat:
        return Layout("D4RL", ("/",), flags_split=True)
    if fields.action is not None:
        return Layout("explicit", ("/",), flags_split=True)
    if base is not None:
        return Layout(f"A (/{base})", ("/",), flags_split=True)
    return Layout("B (at the root)", ("/",), flags_split=True)


def first_of(tree: Tree, group: str, names: Sequence[str]) -> str | None:
    """Return the first of some names that a group has."""
    for name in names:
        if tree.has(join(group, name)):
            return name
    return None


def _child_groups(tree: Tree, above: str, prefix: str) -> tuple[str, ...]:
    """Return the groups below a group whose names begin with a prefix, in the order of their numbers."""
    found = []
    for name in sorted(tree.children.get(above, []), key=natural):
        path = join(above, name)
        if name.startswith(prefix) and not tree.is_link_out(path) and tree.is_group(path):
            found.append(path)
    return tuple(found)


def _groups_with_actions(tree: Tree) -> tuple[str, ...]:
    """Return the groups that hold actions and something that is observed: such a group is an episode."""
    found = []
    for group, names in tree.children.items():
        if not group or group.count("/") >= _MAX_EPISODE_DEPTH or not set(names).intersection(ACTIONS):
            continue
        # Groups of settings and actions alone, such as RoboNet's `policy`, are not episodes.
        known = {*ACTIONS, *REWARDS, *TERMINALS, *TIMEOUTS}
        if any(path not in known for path in tree.leaves(group)) and first_of(tree, group, ACTIONS) is not None:
            found.append(group)
    return tuple(sorted(found, key=natural))


def _select(tree: Tree, layout: Layout, fields: Fields) -> Layout:
    """Keep the episodes that were asked for."""
    wanted: list[str | int] = []
    if fields.episodes is not None and not isinstance(fields.episodes, str):
        wanted = list(fields.episodes)
        if not wanted:
            raise ConfigurationError("episodes is an empty list, expected at least one episode")
    if not wanted and fields.filter_key is None:
        return layout
    if layout.groups == ("/",):
        raise DatasetError(
            f"{_file(tree)}: episodes are selected by the names of their groups, and a file of layout {layout.name} "
            "has no such groups"
        )
    groups = list(layout.groups)
    num_missing = 0
    if fields.filter_key is not None:
        names = _filtered(tree, fields.filter_key)
        groups = [group for group in groups if group.rpartition("/")[2] in names]
        num_missing = len(names) - len(groups)
        if not groups:
            raise DatasetError(
                f"{_file(tree)}: filter_key {fields.filter_key!r} names {len(names)} episodes, none of which is in "
                "the file"
            )
    if wanted:
        groups = _by_id(tree, groups, wanted)
    return Layout(
        layout.name, tuple(groups), layout.flags_split, layout.bgr, layout.action, layout.observations, layout.flatten,
        num_missing,
    )  # fmt: skip


def _filtered(tree: Tree, key: str) -> set[str]:
    """Return the names that robomimic lists under a filter key."""
    path = f"mask/{key}"
    if not tree.is_dataset(path):
        keys = ", ".join(shown(name) for name in tree.leaves("mask")) or "none"
        raise MissingEntryError(f"{_file(tree)}: there is no filter key {key!r} (/{path}); those it has are {keys}")
    values = np.atleast_1d(tree.open(path)[()])
    names = set()
    for value in values.tolist():
        text = value
        if isinstance(value, bytes):
            text = value.decode("utf-8", "surrogateescape")
        names.add(str(text).rpartition("/")[2])
    return names


def _by_id(tree: Tree, groups: Sequence[str], wanted: Sequence[str | int]) -> list[str]:
    """Return groups by their path, name or number, in the order asked for."""
    by_name: dict[str | int, str] = {}
    for group in groups:
        name = group.rpartition("/")[2]
        by_name[group] = group
        by_name[name] = group
        number = re.search(r"([0-9]{1,18})$", name)
        if number is not None:
            by_name.setdefault(int(number[1]), group)
    missing = [one for one in wanted if _key(one) not in by_name]
    if missing:
        some = ", ".join(shown(group.rpartition("/")[2]) for group in groups[:_MAX_NAMED])
        more = ""
        if len(groups) > _MAX_NAMED:
            more = f" and {len(groups) - _MAX_NAMED} more"
        raise MissingEntryError(f"{_file(tree)}: there is no episode {missing}; those it has are {some}{more}")
    return list(dict.fromkeys(by_name[_key(one)] for one in wanted))


def _key(wanted: str | int) -> str | int:
    """Return a name without slashes at its ends, or a number as a plain int."""
    if isinstance(wanted, str):
        return wanted.strip("/")
    return int(wanted)
