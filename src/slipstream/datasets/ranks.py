"""Which part of a distributed run this process is."""

from __future__ import annotations

import os

import torch.distributed

from slipstream.checks import require_count
from slipstream.errors import ConfigurationError


def find_ranks(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return the rank of this process and the number of processes.

    A value that is not given comes from ``torch.distributed`` if that is initialized, and otherwise from the
    environment variables ``RANK`` and ``WORLD_SIZE``, which torchrun sets. Without either the process is alone.

    Args:
        rank: Number of this process, counted from 0.
        world_size: Number of processes.

    Raises:
        ConfigurationError: If the rank is not one of the world, or only one of the two variables is set.

    Example:
        >>> find_ranks(1, 4)
        (1, 4)
    """
    if rank is None or world_size is None:
        found_rank, found_size = _from_surroundings()
        rank = found_rank if rank is None else rank
        world_size = found_size if world_size is None else world_size
    world_size = require_count("world_size", world_size)
    return require_count("rank", rank, 0, world_size - 1), world_size


def _from_surroundings() -> tuple[int, int]:
    """Return what the process group or the environment says."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank = _variable("RANK")
    world_size = _variable("WORLD_SIZE")
    if rank is None and world_size in (None, 1):
        return 0, 1
    # One without the other would silently give every process the same batches.
    if rank is None or world_size is None:
        raise ConfigurationError(
            "only one of the environment variables RANK and WORLD_SIZE is set; set both, as torchrun does, or pass "
            "rank= and world_size="
        )
    return rank, world_size


def _variable(name: str) -> int | None:
    if name not in os.environ:
        return None
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise ConfigurationError(
            f"the environment variable {name} is {os.environ[name]!r}, expected a whole number"
        ) from error
