"""Which tensors of a rollout are the observations, actions, rewards and ends of episodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from slipstream.cli.rollout.reading import fields_under, find_keys
from slipstream.errors import SlipstreamError
from slipstream.rollout.files import RolloutFile
from slipstream.rollout.layout import Key
from slipstream.trajectory import NEXT

MASK = ("collector", "mask")  # where TorchRL says which steps are padding
_DEFAULTS = {
    "observation": ("agents/observation", "observation"),
    "action": ("agents/action", "action"),
    "reward": ("next/agents/reward", "next/reward"),
    "terminated": ("next/terminated",),
    "truncated": ("next/truncated",),
    "done": ("next/done",),
}


@dataclass(frozen=True)
class Roles:
    """Which tensors of a rollout are what, by their place in an episode.

    Attributes:
        observation: Name within an episode, and key, of each observation.
        action: The same of each action.
        flags: Keys of the reward and, as far as there are any, of ``terminated``, ``truncated`` and ``done``.
        mask: Key of what tells steps from padding, if there is any.
        time_axis: Which axis is time, if the environments are not chosen.
    """

    observation: dict[Key, Key]
    action: dict[Key, Key]
    flags: dict[str, Key]
    mask: Key | None
    time_axis: int

    @property
    def keys(self) -> list[Key]:
        """Everything that has to be read."""
        after = [(NEXT, *key) for key in self.observation.values()]
        mask = [self.mask] if self.mask else []
        return list(
            dict.fromkeys(
                [*self.observation.values(), *after, *self.action.values(), *self.flags.values(), *mask],
            )
        )


def find_roles(rollout: RolloutFile, **said: Any) -> Roles:
    """Return which tensors are observations, actions, rewards and ends, as `said` or by the names that TorchRL uses.

    Raises:
        SlipstreamError: If there is none for one of them.
    """
    flags = {}
    for role in ("reward", "terminated", "truncated", "done"):
        found = _find(rollout, role, said[role] and [said[role]])
        if found:
            flags[role] = _single(rollout, role, found)
    missing = {"reward": "reward" not in flags, "done": not flags.keys() & {"terminated", "truncated", "done"}}
    observation, action = (_find(rollout, role, said[role]) for role in ("observation", "action"))
    missing |= {"observation": not observation, "action": not action}
    for role in (role for role, absent in missing.items() if absent):
        raise SlipstreamError(
            f"{rollout.path}: has no {' or '.join(_DEFAULTS[role])} for the {role} of an episode; "
            f"name another key with --{role}"
        )
    known = {field.key for field in rollout.layout.fields}
    for key in observation.values():
        if (NEXT, *key) not in known:
            raise SlipstreamError(
                f"{rollout.path}: has no {'/'.join((NEXT, *key))}, and an episode needs what its last step led to"
            )
    mask = _single(rollout, "mask", {(): MASK}) if MASK in known else None
    return Roles(observation, action, flags, mask, rollout.layout.time_dim)


def _find(rollout: RolloutFile, role: str, said: list[str] | None) -> dict[Key, Key]:
    """Return the keys of a role, by their names within an episode: the only tensor has none, ``()``."""
    if said:
        keys = find_keys(rollout, said)
        above = tuple(said[0].split("/")) if len(said) == 1 else ()
    else:
        text = next((text for text in _DEFAULTS[role] if fields_under(rollout.layout, text)), None)
        if text is None:
            return {}
        keys = [field.key for field in fields_under(rollout.layout, text)]
        above = tuple(text.split("/"))
    if any(key[: len(above)] != above for key in keys):  # several, with commas
        above = ()
    return {key[len(above) :]: key for key in keys}


def _single(rollout: RolloutFile, role: str, found: dict[Key, Key]) -> Key:
    """Return the only key of a role that takes one value per step."""
    keys = list(found.values())
    shapes = {field.key: field.shape for field in rollout.layout.fields}
    if len(keys) > 1:
        raise SlipstreamError(f"{rollout.path}: {len(keys)} keys for the {role}, expected one: --{role} names it")
    if math.prod(shapes[keys[0]]) != 1:
        raise SlipstreamError(
            f"{rollout.path}: {'/'.join(keys[0])} is of shape {list(shapes[keys[0]])} per step, "
            f"and the {role} of an episode is one value"
        )
    return keys[0]
