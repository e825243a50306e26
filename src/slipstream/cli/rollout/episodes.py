"""Rollouts as episodes, in the HDF5 layout of Minari: https://minari.farama.org/content/dataset_standards."""
# ruff: noqa: PLC0415 - h5py is imported when there is something to write

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.cli.rollout.roles import Roles
from slipstream.cli.rollout.tensors import array_of, leaves
from slipstream.errors import SlipstreamError, WriteError
from slipstream.rollout.layout import Key
from slipstream.store.local import atomic_write
from slipstream.text import plural
from slipstream.trajectory import NEXT, find_breaks

Nested = dict[str, Any]
"""Arrays by name, and dicts of them."""


@dataclass
class Episodes:
    """The episodes of a rollout.

    Attributes:
        observations: Arrays ``[environment, step, ...]`` by name.
        after: What each step led to, under the same names.
        actions: Arrays ``[environment, step, ...]`` by name.
        rewards: One number per environment and step.
        terminated: One flag per environment and step.
        truncated: One flag per environment and step; an episode that just stops is truncated.
        stretches: Environment, first step, and the step after the last, of each episode.
        origin: Number of the first environment and of the first step in the rollout.
        notes: What a user should know of it.
    """

    observations: dict[Key, NDArray[Any]]
    after: dict[Key, NDArray[Any]]
    actions: dict[Key, NDArray[Any]]
    rewards: NDArray[Any]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    stretches: list[tuple[int, int, int]]
    origin: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """How many steps they have together."""
        return sum(end - begin for _, begin, end in self.stretches)

    def sentence(self) -> str:
        """Say how many there are."""
        return f"{plural(len(self.stretches), 'episode')} of {plural(self.num_steps, 'step')} together"

    def __iter__(self) -> Iterator[Nested]:
        """Yield each as Minari lays it out: observations have a step more, the one that the last step led to."""
        for env, begin, end in self.stretches:
            steps = slice(begin, end)
            observations = {
                name: np.concatenate((array[env, steps], self.after[name][env, end - 1 : end]))
                for name, array in self.observations.items()
            }
            yield {
                "observations": _tree(observations),
                "actions": _tree({name: array[env, steps] for name, array in self.actions.items()}),
                "rewards": self.rewards[env, steps],
                "terminations": self.terminated[env, steps],
                "truncations": self.truncated[env, steps],
                "infos": {},
            }


def split(batch: Any, roles: Roles, envs: slice | None, steps: slice | None) -> Episodes:
    """Cut a batch into episodes: each environment's steps up to where it is done, and what is left at the end."""
    lead = roles.time_axis if envs is None else 1
    arrays: dict[Key, NDArray[Any]] = {}
    notes: list[str] = []
    for key, tensor in leaves(batch):
        array, note = array_of("/".join(key), tensor)
        arrays[key] = array.reshape(int(np.prod(array.shape[:lead])), *array.shape[lead:])
        notes += note

    def flag(role: str) -> NDArray[np.bool_] | None:
        return _per_step(arrays[roles.flags[role]]).astype(np.bool_) if role in roles.flags else None

    terminated, truncated, done = _ends(flag("terminated"), flag("truncated"), flag("done"))
    valid = _per_step(arrays[roles.mask]).astype(np.bool_) if roles.mask else None
    stretches = list(_stretches(done, valid))
    if not stretches:
        raise SlipstreamError("there is no step to make an episode of")
    for env, _, end in stretches:
        truncated[env, end - 1] |= not terminated[env, end - 1]
    episodes = Episodes(
        {name: arrays[key] for name, key in roles.observation.items()},
        {name: arrays[NEXT, *key] for name, key in roles.observation.items()},
        {name: arrays[key] for name, key in roles.action.items()},
        _per_step(arrays[roles.flags["reward"]]),
        terminated,
        truncated,
        stretches,
        (envs.start if envs else 0, steps.start if steps else 0),
        notes,
    )
    episodes.notes += _breaks(episodes)
    return episodes


def _per_step(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(array.shape[:2])


def _ends(
    terminated: NDArray[np.bool_] | None, truncated: NDArray[np.bool_] | None, done: NDArray[np.bool_] | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return all three, those that are absent from the others; ``done`` alone means terminated."""
    if done is None:
        given = [flags for flags in (terminated, truncated) if flags is not None]
        done = np.logical_or.reduce(given)
    if terminated is None:
        terminated = done if truncated is None else done & ~truncated
    if truncated is None:
        truncated = done & ~terminated
    return terminated.copy(), truncated.copy(), done.copy()


def _stretches(done: NDArray[np.bool_], valid: NDArray[np.bool_] | None) -> Iterator[tuple[int, int, int]]:
    """Yield environment, begin and end of each episode; steps that are not valid are padding, in none."""
    closing = done.copy()
    closing[:, -1:] = True
    if valid is not None:
        closing[:, :-1] |= ~valid[:, :-1] | ~valid[:, 1:]
    for env, row in enumerate(closing):
        begin = 0
        for end in (np.flatnonzero(row) + 1).tolist():
            if valid is None or valid[env, begin]:
                yield env, begin, end
            begin = end


def _breaks(episodes: Episodes) -> Iterator[str]:
    """Yield a note on every observation whose ``next`` is not what follows within an episode.

    Minari's layout has no place for such a step: it stores what follows, and of ``next`` only the end of the episode.
    """
    inside = np.zeros(episodes.rewards.shape, np.bool_)
    for env, begin, end in episodes.stretches:
        inside[env, begin : end - 1] = True
    for name, array in episodes.observations.items():
        breaks = find_breaks(array, episodes.after[name])
        number = int(np.count_nonzero(breaks & inside[:, :-1]))
        if number:
            label = "/".join(name) or "the observation"
            yield f"{label}: {plural(number, 'step')} within episodes led to another one than follows, which is kept"


def _tree(arrays: Mapping[Key, NDArray[Any]]) -> Nested | NDArray[Any]:
    """Nest arrays by name; the only one without a name is itself."""
    if () in arrays:
        return arrays[()]
    tree: Nested = {}
    for (*above, last), array in arrays.items():
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = array
    return tree


def write_hdf5(target: Path, episodes: Episodes) -> None:
    """Write episodes to a file as Minari's HDF5 storage does, durably and atomically."""
    import h5py

    try:
        with (
            atomic_write(target) as file,
            os.fdopen(os.dup(file.fileno()), "r+b") as both,  # HDF5 reads what it wrote
            h5py.File(both, "w", track_order=True) as root,
        ):
            root.attrs.update({"total_episodes": len(episodes.stretches), "total_steps": episodes.num_steps})
            for number, (place, episode) in enumerate(zip(episodes.stretches, episodes, strict=True)):
                group = root.create_group(f"episode_{number}")
                group.attrs.update({"id": number, "total_steps": len(episode["rewards"])})
                env, step = (start + origin for start, origin in zip(place[:2], episodes.origin, strict=True))
                group.attrs.update({"environment": env, "first_step": step})
                _add(group, episode)
    except WriteError:
        raise
    except (TypeError, ValueError) as error:
        raise SlipstreamError(f"{target}: HDF5 cannot hold this rollout ({error})") from error
    except (OSError, RuntimeError) as error:  # HDF5 raises either, and knows no name of the file
        reason = getattr(error, "strerror", None) or str(error)
        raise WriteError(getattr(error, "errno", None) or 0, f"cannot write {target}: {reason}") from error


def _add(group: Any, members: Nested) -> None:
    for name, value in members.items():
        if isinstance(value, dict):
            _add(group.create_group(name, track_order=True), value)
        else:  # in one piece: chunks that could grow would cost more than short episodes themselves
            group.create_dataset(name, data=value)
