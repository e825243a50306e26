"""The layouts that people record in: which groups are episodes, and by which names things go."""

from __future__ import annotations

import re
from dataclasses import dataclass

import h5py

from slipstream.datasets.chunks import is_camera
from slipstream.datasets.description import Fields, Roles
from slipstream.datasets.opening import leaves, listing, member, natural
from slipstream.errors import DatasetError, MissingEntryError

ACTIONS = ("actions", "action")
REWARDS = ("rewards", "reward")
TERMINALS = ("terminals", "terminations", "terminated", "dones", "done")
TIMEOUTS = ("timeouts", "truncations", "truncated")
JOINTS = (
    "joint", "joints", "joint_position", "joint_positions", "joint_pos", "qpos", "agent/qpos", "state", "states",
    "proprio", "robot_state", "env_states",
)  # fmt: skip
OBSERVATIONS = ("observations", "obs")
NEXT_OBSERVATIONS = ("next_observations", "next_obs")

# What the three cameras of a `MultimodalReplayBuffer` are called elsewhere, the likeliest first.
_VIEWS = {
    "left": ("left_image", "left_wrist_image", "left", "left_wrist", "cam_left_wrist", "left_cam", "left_camera"),
    "right": (
        "right_image", "right_wrist_image", "right", "right_wrist", "cam_right_wrist", "right_cam", "right_camera",
    ),
    "global": (
        "global_image", "global", "cam_high", "agentview_image", "agentview", "base_camera", "front_image", "front",
        "top_image", "top", "overhead_image", "overhead",
    ),
}  # fmt: skip
_ROBOT = re.compile(r"robot(\d+)_(joint_pos|gripper_qpos)")


@dataclass(frozen=True)
class Layout:
    """A layout that was recognised.

    Attributes:
        name: What people call it.
        groups: Paths of the groups to read, in order.
        flags_split: Whether the flags of ends tell episodes apart, because a group holds several.
        bgr: Whether compressed pictures have red and blue exchanged.
    """

    name: str
    groups: tuple[str, ...]
    flags_split: bool
    bgr: bool = False


def find_layout(root: h5py.File, fields: Fields) -> Layout:
    """Recognise the layout of a file by what is in it.

    Raises:
        DatasetError: If it is none of those that are known; lists what was found, and says how to name it.
    """
    if fields.episodes is not None:
        return Layout("explicit", _children(root, fields.episodes.strip("/"), ""), flags_split=False)
    for name, prefix, above in (("robomimic", "demo_", "data"), ("ManiSkill", "traj_", ""), ("Minari", "episode_", "")):
        groups = _children(root, above, prefix, required=False)
        if groups:
            return Layout(name, groups, flags_split=False)
    observations, actions = (_first(root, names) for names in (OBSERVATIONS, ACTIONS))
    if isinstance(observations, h5py.Group) and isinstance(member(observations, "images"), h5py.Group):
        return Layout("ALOHA", ("/",), flags_split=False, bgr=True)
    if actions is not None or fields.action is not None:
        flat = isinstance(observations, h5py.Dataset) or _first(root, NEXT_OBSERVATIONS) is not None
        if flat:
            return Layout("D4RL", ("/",), flags_split=True)
        if actions is None or fields.action is not None:
            return Layout("explicit", ("/",), flags_split=True)
        name = "A (/observations)" if isinstance(observations, h5py.Group) else "B (at the root)"
        return Layout(name, ("/",), flags_split=True)
    nested = [name for name in sorted(root, key=natural) if _holds_actions(root, name)]
    if nested:
        return Layout("a group per episode", tuple(nested), flags_split=False)
    raise DatasetError(
        f"{root.filename}: none of the layouts that are known (no {' or '.join(ACTIONS)} at its root, in "
        f"data/demo_*, traj_* or episode_*); {listing(root)}; name them, as in action='path/of/actions'"
    )


def find_roles(group: h5py.Group, fields: Fields) -> Roles:
    """Find which datasets of a group are what: as told, or else by the names that people use.

    Raises:
        MissingEntryError: If something that was named is not there, or there are no actions.
        DatasetError: If the group is empty.
    """
    if not len(group):
        raise DatasetError(f"{group.file.filename}: the group {group.name} is empty, expected actions in it")
    action = fields.action or _name_of(group, ACTIONS)
    if action is None:
        where = group.name.rstrip("/")
        raise MissingEntryError(f"{group.file.filename}: {where}/{ACTIONS[0]} is not there; {listing(group)}")
    base = _name_of(group, OBSERVATIONS, h5py.Group)
    after = _name_of(group, NEXT_OBSERVATIONS, h5py.Group)
    cameras = dict(fields.cameras) or _cameras(group, base)
    joint = _told(fields.joint) or _joint(group, base)
    next_cameras, next_joint = dict(fields.next_cameras), _told(fields.next_joint)
    if after is not None and base is not None:
        shared = {n: f"{after}/{p.removeprefix(f'{base}/')}" for n, p in cameras.items() if p.startswith(f"{base}/")}
        next_cameras = next_cameras or {n: p for n, p in shared.items() if member(group, p) is not None}
        moved = tuple(f"{after}/{path.removeprefix(f'{base}/')}" for path in joint if path.startswith(f"{base}/"))
        next_joint = next_joint or (moved if all(member(group, path) is not None for path in moved) else ())
    elif not next_joint and joint in {(name,) for name in OBSERVATIONS}:
        flat = _name_of(group, NEXT_OBSERVATIONS, h5py.Dataset)
        next_joint = (flat,) if flat else ()
    return Roles(
        cameras,
        next_cameras,
        joint,
        next_joint,
        action,
        fields.reward or _name_of(group, REWARDS),
        fields.terminal or _name_of(group, TERMINALS),
        fields.timeout or _name_of(group, TIMEOUTS),
    )


def _told(paths: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths or ())


def _children(root: h5py.Group, above: str, prefix: str, *, required: bool = True) -> tuple[str, ...]:
    """Return the groups below a group whose names begin with a prefix, in the order of their numbers."""
    node = member(root, above) if above else root
    names = [name for name in node if name.startswith(prefix)] if isinstance(node, h5py.Group) else []
    found = [f"{above}/{name}".lstrip("/") for name in sorted(names, key=natural)]
    groups = tuple(path for path in found if isinstance(member(root, path), h5py.Group))
    if required and not groups:
        raise MissingEntryError(f"{root.file.filename}: there is no group of episodes below {above}; {listing(root)}")
    return groups


def _holds_actions(root: h5py.File, name: str) -> bool:
    if isinstance(root.get(name, getlink=True), h5py.ExternalLink) or root.get(name) is None:
        return False
    group = member(root, name)
    return isinstance(group, h5py.Group) and _first(group, ACTIONS) is not None


def _first(group: h5py.Group, names: tuple[str, ...]) -> h5py.Group | h5py.Dataset | None:
    return next((found for name in names if (found := member(group, name)) is not None), None)


def _name_of(group: h5py.Group, names: tuple[str, ...], kind: type = h5py.Dataset) -> str | None:
    return next((name for name in names if isinstance(member(group, name), kind)), None)


def _joint(group: h5py.Group, base: str | None) -> tuple[str, ...]:
    """Find joint positions: by name among the observations, those of each robot, or the observations themselves."""
    if base is None:
        found = _name_of(group, (*OBSERVATIONS, *JOINTS))
        data = member(group, found) if found else None
        return (found,) if found and isinstance(data, h5py.Dataset) and not is_camera(data) else ()
    inside = member(group, base)
    assert isinstance(inside, h5py.Group)  # noqa: S101 - found as one
    name = _name_of(inside, JOINTS)
    if name is not None:
        return (f"{base}/{name}",)
    robots = sorted(
        (match for match in map(_ROBOT.fullmatch, inside) if match), key=lambda m: (int(m[1]), m[2] != "joint_pos")
    )
    if robots:
        return tuple(f"{base}/{match[0]}" for match in robots)
    outside = _name_of(group, JOINTS)
    return (outside,) if outside is not None else ()


def _cameras(group: h5py.Group, base: str | None) -> dict[str, str]:
    """Find images among the observations, and name them: left, right and global where that is clear."""
    inside = member(group, base) if base else group
    assert isinstance(inside, h5py.Group)  # noqa: S101 - found as one
    prefix = f"{base}/" if base else ""
    skip = () if base else NEXT_OBSERVATIONS
    found = [path for path, data in leaves(inside).items() if not path.startswith(skip) and is_camera(data)]
    _check_links(inside)
    names: dict[str, str] = {}
    for view, known in _VIEWS.items():
        shorts = {_short(path): path for path in reversed(found)}
        match = next((shorts[name] for name in map(_short, known) if name in shorts), None)
        if match is not None:
            names[view] = match
    for path in found:
        if path not in names.values():
            short = _short(path)
            names[short if short not in names else path] = path
    return {name: prefix + path for name, path in names.items()}


def _check_links(group: h5py.Group) -> None:
    """Raise if a member is a link out of the file: what it may be, nobody knows."""
    for name in group:
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink) or (isinstance(link, h5py.SoftLink) and group.get(name) is not None):
            member(group, name)


def _short(path: str) -> str:
    """Return the name of a camera without what all cameras have in theirs."""
    parts = [part for part in path.split("/") if part not in ("images", "sensor_data", "rgb", "image", "rgb_image")]
    return re.sub(r"_(image|rgb|images)$", "", "/".join(parts) or path)
