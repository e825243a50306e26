"""Which role the datasets of an episode play: as the user says, or by the names that people use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.datasets.cameras import VIEWS, Pixels, look_at, name_cameras
from slipstream.datasets.description import Fields, Observation, Roles
from slipstream.datasets.layouts import (
    ACTIONS,
    NEXT_OBSERVATIONS,
    OBSERVATIONS,
    REWARDS,
    TERMINALS,
    TIMEOUTS,
    Layout,
)
from slipstream.datasets.names import shown
from slipstream.datasets.opening import listing, natural
from slipstream.datasets.tree import Tree, join
from slipstream.errors import DatasetError, MissingEntryError

# Names of joint positions among the observations, the likeliest first. Simulator states (`states`, `env_states`) are
# never among them: they hold object poses and velocities, which no robot observes.
_JOINTS = (
    "joint", "joints", "joint_position", "joint_positions", "joint_pos", "joint_states", "qpos", "agent_pos",
    "agent/qpos", "observation.state", "state", "proprio", "robot_state",
)  # fmt: skip
# Names that say what they are without a list of alternatives, so they are not reported as guesses.
_CERTAIN_JOINTS = {"joint", "joints"}
_GRIPPERS = {"joint_states": "gripper_states", "joint_positions": "gripper_position"}
_SIMULATOR = {"states", "env_states"}
_ROBOT = re.compile(r"robot(\d+)_(joint_pos|gripper_qpos)")
# Groups at the root that hold no observations.
_NOT_OBSERVED = {"infos", "info", "metadata", "mask", "success", "fail"}


@dataclass
class Search:
    """What was found in the first episode.

    Attributes:
        group: Path of the episode.
        roles: The role of each dataset.
        pixels: How the images of each camera are read, by path.
        rejected: Why datasets that look like images are not used, by path.
        observations: Datasets of numbers with a row per observation.
        guesses: Roles that were recognised by a name that may mean something else.
        unused: Datasets with a row per step that play no role, with their shapes.
    """

    group: str
    roles: Roles
    pixels: dict[str, Pixels] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def find_roles(tree: Tree, group: str, fields: Fields, layout: Layout, wanted: Sequence[str] | None = None) -> Search:
    """Find the role of the datasets of an episode. Names in `fields` win over the names that people use.

    Args:
        tree: The file.
        group: Path of the episode; empty for the root.
        fields: What the user says.
        layout: The layout of the file.
        wanted: Cameras that are needed; all that are found by default.

    Raises:
        MissingEntryError: If there are no actions, or a camera that is needed is missing.
        DatasetError: If the group is empty, or a link leads out of the file.
    """
    return _Searcher(tree, group, fields, layout).search(wanted)


class _Searcher:
    """Looks through one episode."""

    def __init__(self, tree: Tree, group: str, fields: Fields, layout: Layout) -> None:
        self.tree = tree
        self.group = group
        self.fields = fields
        self.layout = layout
        self.file = str(tree.root.file.filename)
        # The group of observations, relative to the episode; empty if observations lie beside the actions.
        self.base = layout.observations or self._name_of_group(OBSERVATIONS) or ""
        self.after = self._name_of_group(NEXT_OBSERVATIONS) or ""
        self.leaves = dict.fromkeys(self._observed())
        self.pixels: dict[str, Pixels] = {}
        self.rejected: dict[str, str] = {}

    def search(self, wanted: Sequence[str] | None) -> Search:
        action = self._action()
        self._look_for_images()
        cameras = self._cameras(wanted)
        joint = self._joint(set(cameras.values()))
        roles = Roles(
            cameras=cameras,
            next_cameras=self._next_cameras(cameras),
            joint=joint,
            next_joint=_paths(self.fields.next_joint) or self._next_joint(joint),
            action=action,
            reward=self.fields.reward or self._name_of(REWARDS),
            terminal=self.fields.terminal or self._name_of(TERMINALS),
            timeout=self.fields.timeout or self._name_of(TIMEOUTS),
        )
        found = Search(self.group, roles, self.pixels, self.rejected)
        found.guesses = self._guesses(roles)
        found.observations = self._observations(roles)
        found.unused = self._unused(roles, found.observations)
        return found

    def _has(self, path: str) -> bool:
        return self.tree.is_dataset(join(self.group, path))

    def _name_of(self, names: Iterable[str]) -> str | None:
        """Return the first of some names that is a dataset."""
        for name in names:
            if self._has(name):
                return name
        return None

    def _name_of_group(self, names: Iterable[str]) -> str | None:
        for name in names:
            if self.tree.is_group(join(self.group, name)):
                return name
        return None

    def _action(self) -> str:
        named = self.fields.action or self.layout.action
        if named is not None:
            return named
        found = self._name_of(ACTIONS)
        if found is not None:
            return found
        where = self.tree.name(self.group).rstrip("/")
        group = self.tree.group(self.group)
        if not len(group):
            raise DatasetError(f"{self.file}: the group {where} is empty, expected actions in it")
        raise MissingEntryError(f"{self.file}: {where}/{ACTIONS[0]} is not there; {listing(group)}")

    def _observed(self) -> list[str]:
        """Return the datasets that may be observations, relative to the episode."""
        self.tree.check_links(join(self.group, self.base))
        paths = [join(self.base, path) for path in self.tree.leaves(join(self.group, self.base))]
        if self.base:
            return paths
        skipped = {*NEXT_OBSERVATIONS, *_NOT_OBSERVED}
        return [path for path in paths if path.partition("/")[0] not in skipped]

    # Cameras.

    def _look_for_images(self) -> None:
        """Look at the type and shape of all that is observed, and at the first bytes of compressed images."""
        if self.fields.cameras is not None and not self.fields.cameras:
            return
        for path in self.leaves:
            found = look_at(self.tree.open(join(self.group, path)), path)
            if isinstance(found, Pixels):
                self.pixels[path] = found
            elif found is not None:
                self.rejected[path] = found

    def _cameras(self, wanted: Sequence[str] | None) -> dict[str, str]:
        """Return the images of each camera; those that the user named replace those that were recognised."""
        named = dict(self.fields.cameras or {})
        cameras = dict(named)
        for name, path in name_cameras(self.pixels, self.base).items():
            if name not in cameras and path not in named.values():
                cameras[name] = path
        if wanted is None:
            return cameras
        missing = [name for name in wanted if name not in cameras]
        if missing:
            raise MissingEntryError(self._missing(missing, cameras))
        return {name: cameras[name] for name in wanted}

    def _missing(self, missing: Sequence[str], cameras: Mapping[str, str]) -> str:
        """Say which cameras are missing, which there are, and why other images are not used."""
        found = ", ".join(f"{name} ({shown(path)})" for name, path in cameras.items()) or "none"
        names = ", ".join(missing)
        example = ", ".join(f"{name!r}: 'path/of/images'" for name in missing)
        reasons = ""
        if self.rejected:
            reasons = "; not usable: " + ", ".join(f"{shown(path)} ({why})" for path, why in self.rejected.items())
        absent = f"there is no camera {names}"
        if len(missing) > 1:
            absent = f"there are no cameras {names}"
        return f"{self.file}: {absent}; those found are {found}{reasons}; name them, as in cameras={{{example}}}"

    def _next_cameras(self, cameras: Mapping[str, str]) -> dict[str, str]:
        if self.fields.next_cameras is not None:
            return dict(self.fields.next_cameras)
        found = {}
        for name, path in cameras.items():
            after = self._next_path(path)
            if after:
                found[name] = after
        return found

    # Numbers.

    def _joint(self, taken: set[str]) -> tuple[str, ...]:
        """Return joint positions: as named, all of a nested observation, or by the names that people use."""
        if self.fields.joint is not None:
            return _paths(self.fields.joint)
        if not self.base:
            whole = self._name_of(OBSERVATIONS)
            if whole is not None and whole not in self.pixels:
                return (whole,)
        elif self.layout.flatten:
            return self._flattened(taken)
        for name in _JOINTS:
            path = join(self.base, name)
            if path in self.leaves and path not in self.pixels and (self.base or name != "state"):
                return self._with_gripper(path)
        robots = self._robots()
        if robots:
            return robots
        return self._nested_joint()

    def _flattened(self, taken: set[str]) -> tuple[str, ...]:
        """Return all numbers of a nested observation, in the order of their names."""
        found = []
        for path in self.leaves:
            data = self.tree.open(join(self.group, path))
            is_vector = data.dtype.kind in "biuf" and data.ndim in (1, 2)
            if is_vector and path not in taken and path not in self.pixels and path not in self.rejected:
                found.append(path)
        return tuple(sorted(found, key=_member_order))

    def _with_gripper(self, path: str) -> tuple[str, ...]:
        above, slash, name = path.rpartition("/")
        gripper = f"{above}{slash}{_GRIPPERS.get(name, '')}"
        if name in _GRIPPERS and gripper in self.leaves:
            return (path, gripper)
        return (path,)

    def _robots(self) -> tuple[str, ...]:
        """Return joints and gripper of each robot, as robosuite names them."""
        found = []
        for path in self.leaves:
            match = _ROBOT.fullmatch(path.removeprefix(f"{self.base}/"))
            if match is not None:
                found.append((int(match[1]), match[2] != "joint_pos", path))
        return tuple(path for _, _, path in sorted(found))

    def _nested_joint(self) -> tuple[str, ...]:
        """Return joint positions from a group among the observations, if only one dataset has such a name."""
        for name in _JOINTS[:8]:
            found = [path for path in self.leaves if path.rpartition("/")[2] == name and path not in self.pixels]
            if len(found) == 1:
                return self._with_gripper(found[0])
        # Some recordings have them beside the group of observations.
        if self.base:
            outside = self._name_of(_JOINTS[:8])
            if outside is not None:
                return (outside,)
        return ()

    def _next_joint(self, joint: Sequence[str]) -> tuple[str, ...]:
        """Return where the same values are stored as they were after each step; empty unless all of them are."""
        found = [self._next_path(path) for path in joint]
        return tuple(found) if all(found) else ()

    def _next_path(self, path: str) -> str:
        """Return the path of an observation's next value, such as next_obs/joint of obs/joint, or nothing."""
        head, _, rest = path.partition("/")
        if head not in OBSERVATIONS:
            return ""
        if not rest:
            return self._name_of(NEXT_OBSERVATIONS) or ""
        twin = f"{self.after}/{rest}"
        if self.after and self._has(twin):
            return twin
        return ""

    # What to tell the user.

    def _guesses(self, roles: Roles) -> list[str]:
        found = []
        for name, path in roles.cameras.items():
            is_certain = _last(path) in (name, f"{name}_image") or name not in VIEWS
            if not self._is_named_camera(name) and not is_certain:
                found.append(f"the camera {name} is {shown(path)}")
        is_whole = roles.joint in {(name,) for name in OBSERVATIONS} or self.layout.flatten
        if self.fields.joint is None and not is_whole:
            uncertain = [path for path in roles.joint if _last(path) not in _CERTAIN_JOINTS]
            if uncertain:
                found.append(f"joint is {', '.join(self._with_shape(path) for path in roles.joint)}")
        return found

    def _is_named_camera(self, name: str) -> bool:
        return self.fields.cameras is not None and name in self.fields.cameras

    def _with_shape(self, path: str) -> str:
        return f"{shown(path)} {self.tree.shape(join(self.group, path))}"

    def _observations(self, roles: Roles) -> list[Observation]:
        """Return the numbers among the observations, and the simulator's states."""
        found = []
        for path in dict.fromkeys([*roles.joint, *self.leaves, *self._simulator()]):
            if not self._has(path) or path in self.pixels or path in self.rejected or path in _not_joint(roles):
                continue
            data = self.tree.open(join(self.group, path))
            if data.dtype.kind not in "biuf" or not data.shape:
                continue
            is_joint = path in roles.joint
            found.append(Observation(path, data.shape, str(data.dtype), self._next_path(path), is_joint))
        return found

    def _simulator(self) -> list[str]:
        return [name for name in sorted(_SIMULATOR) if self._has(name)]

    def _unused(self, roles: Roles, observations: Sequence[Observation]) -> list[str]:
        """Return what is observed and not used."""
        found = []
        for one in observations:
            if one.is_joint:
                continue
            what = f"{self._with_shape(one.path)}; select with joint={one.path!r}"
            if _last(one.path) in _SIMULATOR:
                what = f"{self._with_shape(one.path)} (simulator state); select with joint={one.path!r}"
            found.append(what)
        listed = {one.path for one in observations} | set(roles.cameras.values()) | set(self.rejected)
        for path in self.leaves:
            data = self.tree.open(join(self.group, path))
            if path in listed or path in _not_joint(roles) or not data.shape:
                continue
            if path in self.pixels:
                found.append(f"{self._with_shape(path)}; select with cameras={{'name': {path!r}}}")
            else:
                found.append(f"{self._with_shape(path)} ({data.dtype})")
        return found


def _not_joint(roles: Roles) -> set[str | None]:
    return {roles.action, roles.reward, roles.terminal, roles.timeout, *roles.next_joint}


def _paths(paths: str | Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(paths, str):
        return (paths,)
    return tuple(paths or ())


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _member_order(path: str) -> list[list[tuple[int, str]]]:
    """Sort by name; the members of a tuple, which Minari calls ``_index_0`` and so on, by number."""
    key = []
    for part in path.split("/"):
        if part.startswith("_index_"):
            key.append(natural(part))
        else:
            key.append([(-1, part)])
    return key
