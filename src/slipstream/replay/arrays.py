"""The arrays of an episode: from what users pass to checked NumPy arrays, and to blocks of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import ReplayError
from slipstream.replay.roles import Key
from slipstream.replay.schema import FRAME, Block, Leaf
from slipstream.trajectory import NEXT

Arrays = dict[str, NDArray[Any]]


def next_name(name: str) -> str:
    """Return what the frame after is called in a batch."""
    return f"{NEXT}_{name}"


def as_rows(values: Mapping[str, Any]) -> Arrays:
    """Return arrays or tensors ``[rows, ...]`` as NumPy arrays.

    Raises:
        ReplayError: If one is not an array of numbers, or its name is not a string.
    """
    arrays = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise ReplayError(f"the name of an array is {name!r}, expected a string")
        arrays[name] = _as_array(name, value)
        if not arrays[name].ndim:
            raise ReplayError(f"{name!r} is a single number, expected a row for each step")
    return arrays


def _as_array(name: str, value: Any) -> NDArray[Any]:
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ReplayError(f"{name!r} cannot be an array of numbers ({str(error).splitlines()[0]})") from error
    if array.dtype.kind not in "biufc":
        raise ReplayError(f"{name!r} is {array.dtype}, expected numbers")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def lengths_text(arrays: Arrays) -> str:
    """Return how many rows each array has, for messages."""
    return ", ".join(f"{name}: {len(array)}" for name, array in arrays.items()) or "nothing"


def check_rows(arrays: Arrays, known: Mapping[str, Leaf]) -> None:
    """Raise `ReplayError` unless appended rows have the names, dtypes and shapes of those before."""
    if not known:
        return
    if set(arrays) != set(known):
        raise ReplayError(f"rows have {sorted(arrays)}, before they had {sorted(known)}")
    _check_kinds(arrays, known, "before it was")


def _check_kinds(arrays: Arrays, known: Mapping[str, Leaf], expected: str) -> None:
    """Raise `ReplayError` unless arrays have the dtypes and shapes of known leaves; `expected` introduces these."""
    for name, array in arrays.items():
        leaf = known[name]
        if array.dtype != leaf.carrier or array.shape[1:] != leaf.shape:
            found = f"{array.dtype}{list(array.shape[1:])}"
            raise ReplayError(f"{name!r} is {found}, {expected} {leaf.carrier}{list(leaf.shape)}")


def frames_of(arrays: Arrays) -> frozenset[str]:
    """Return the names of the arrays that are of frames: those with the most rows.

    Raises:
        ReplayError: If lengths differ by more than one, or a name is taken.
    """
    lengths = {len(array) for array in arrays.values()}
    if not arrays or len(lengths) > 2 or max(lengths) - min(lengths) > 1:
        raise ReplayError(
            f"an episode has rows of {lengths_text(arrays)}, expected as many for all steps and one more for frames"
        )
    frames = frozenset(name for name, array in arrays.items() if len(array) == max(lengths))
    taken = {next_name(name) for name in frames} & set(arrays)
    if taken:
        raise ReplayError(f"the name {min(taken)!r} is what the next frame would be called: leave it out")
    return frames


def check_episode(arrays: Arrays, frames: frozenset[str], known: Mapping[str, Leaf]) -> int:
    """Check a whole episode; returns how many steps it has.

    Raises:
        ReplayError: If it is empty or ragged, or has other arrays than those before it.
    """
    if set(arrays) != set(known):
        raise ReplayError(f"an episode has {sorted(arrays)}, in this store they have {sorted(known)}")
    _check_kinds(arrays, known, "in this store it is")
    num_frames = {len(array) for name, array in arrays.items() if name in frames}
    num_steps = {len(array) for name, array in arrays.items() if name not in frames}
    num_steps |= {count - 1 for count in num_frames}
    if len(num_frames) > 1 or len(num_steps) != 1:
        raise ReplayError(
            f"an episode is ragged ({lengths_text(arrays)}): expected one row more for frames than for steps"
        )
    if min(num_steps) < 1:
        raise ReplayError(f"an episode is empty ({lengths_text(arrays)}), expected one step at least")
    return min(num_steps)


def check_last(last: Mapping[str, Any], arrays: Arrays) -> Arrays:
    """Return the rows of an episode with the last frame appended.

    Raises:
        ReplayError: If the last frame has other names, dtypes or shapes.
    """
    unknown = [name for name in last if name not in arrays]
    if unknown or not last:
        raise ReplayError(f"the last frame has {sorted(map(str, last))}, expected some of {sorted(arrays)}")
    whole = dict(arrays)
    for name, value in last.items():
        row = _as_array(name, value)[None]
        rows = arrays[name]
        if row.dtype != rows.dtype or row.shape[1:] != rows.shape[1:]:
            raise ReplayError(
                f"{name!r} is {row.dtype}{list(row.shape[1:])} in the last frame, before it was "
                f"{rows.dtype}{list(rows.shape[1:])}"
            )
        whole[name] = np.concatenate([rows, row])
    return whole


def with_nexts(leaves: Sequence[Leaf], frames: frozenset[str]) -> list[Leaf]:
    """Return leaves with those of frames marked, each followed by its ``next``."""
    marked = []
    for leaf in leaves:
        name = leaf.key[0]
        if name in frames:
            marked.append(replace(leaf, kind=FRAME))
            marked.append(replace(leaf, key=(next_name(name),), kind=NEXT))
        else:
            marked.append(leaf)
    return marked


def step_block(arrays: Arrays, frames: frozenset[str], num_steps: int) -> Block:
    """Return consecutive steps as a block of one stream, with the ``next`` of frames. Nothing is copied."""
    block: dict[Key, NDArray[Any]] = {}
    for name, array in arrays.items():
        block[(name,)] = array[None, :num_steps]
        if name in frames:
            block[(next_name(name),)] = array[None, 1 : num_steps + 1]
    return block
