"""What some tensors of a step mean: the flag that ends an episode, and the id of the episode.

Environments write them with any dtype and with additional axes, for agents for instance. Here they become one bool and
one integer per step, so that nothing else has to know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import ReplayError
from slipstream.tensors import array_of

Key = tuple[str, ...]

END: Key = ("next", "done")
"""Where TorchRL keeps the flag that ends an episode."""
IDS: tuple[Key, ...] = (("collector", "traj_ids"), ("episode",))
"""Where TorchRL keeps the id of an episode, best first."""

# An odd constant whose multiples spread over all 64 bits; that of Fibonacci hashing.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Roles:
    """The keys that were declared, or None for those that TorchRL uses.

    Args:
        end: The flag that is true at the last step of an episode.
        id: What is equal for all steps of an episode.
    """

    end: Key | None = None
    id: Key | None = None

    def are_played_by(self, key: Key) -> bool:
        """Return whether a tensor of this key has a role."""
        ends = self.end or END
        ids = IDS
        if self.id is not None:
            ids = (self.id,)
        return key == ends or key in ids

    def find(self, keys: Collection[Key]) -> tuple[Key | None, Key | None]:
        """Return the keys of the end flag and of the id among those that a step has."""
        end = self.end or END
        ids = IDS
        if self.id is not None:
            ids = (self.id,)
        found_id = next((key for key in ids if key in keys), None)
        if end not in keys:
            return None, found_id
        return end, found_id

    def require(self, keys: Collection[Key]) -> None:
        """Raise `ReplayError` unless a step tells where its episode ends.

        Every key that was declared has to exist. Without a declaration one of TorchRL's keys is enough.
        """
        for name, key in (("end_key", self.end), ("id_key", self.id)):
            if key is not None and key not in keys:
                raise ReplayError(f"{name} is {_shown(key)}, which no step has; its keys are {_listed(keys)}")
        if self.find(keys) == (None, None):
            raise ReplayError(
                f"slices need to know where episodes end, but steps have neither {_shown(END)} nor an id of the "
                f"episode: pass end_key or id_key to the storage; the keys are {_listed(keys)}"
            )

    def ends(self, tensors: Mapping[Key, torch.Tensor], batch_dims: int) -> NDArray[np.bool_] | None:
        """Return the end flags ``[batch...]`` of some steps, or None if they have none.

        A step with one flag per agent ends an episode if any of them is set.
        """
        key, _ = self.find(tensors)
        if key is None:
            return None
        flags = tensors[key].detach().cpu() != 0
        return np.asarray(_per_step(flags.numpy(), batch_dims).any(axis=-1))

    def ids(self, tensors: Mapping[Key, torch.Tensor], batch_dims: int) -> NDArray[np.int64] | None:
        """Return integers ``[batch...]`` that differ where the ids of some steps differ, or None if they have none.

        Ids of one element are compared by their bits, ids of several elements by a hash of 64 bits.
        """
        _, key = self.find(tensors)
        if key is None:
            return None
        values = _per_step(array_of(tensors[key].detach().cpu().contiguous()), batch_dims)
        if values.dtype.kind != "f":
            words = values.astype(np.int64).view(np.uint64)
        else:
            words = values.astype(np.float64).view(np.uint64)
        mixed = words[..., 0].copy()
        for number in range(1, words.shape[-1]):
            mixed = (mixed ^ (mixed >> np.uint64(29))) * _SPREAD + words[..., number]
        return mixed.view(np.int64)


def as_key(key: str | Key | None) -> Key | None:
    """Return a nested key as a tuple."""
    if isinstance(key, str):
        return (key,)
    if key is None:
        return None
    return tuple(key)


def _per_step(values: NDArray[Any], batch_dims: int) -> NDArray[Any]:
    """View ``[batch..., ...]`` as ``[batch..., elements]``."""
    return values.reshape(*values.shape[:batch_dims], -1)


def _shown(key: Key) -> str:
    return repr(key[0] if len(key) == 1 else key)


def _listed(keys: Collection[Key]) -> str:
    shown = ", ".join(sorted("/".join(key) for key in keys)[:12])
    return shown if len(keys) <= 12 else f"{shown}, ..."
