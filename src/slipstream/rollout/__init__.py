"""Rollouts packed many times smaller: on disk (`RolloutStorage`), in memory (`CompressedTensorDict`), or one by one."""

from __future__ import annotations

from slipstream.rollout.compressed import CompressedTensorDict
from slipstream.rollout.files import RolloutFile, load_rollout, save_rollout_compressed
from slipstream.rollout.storage import RolloutStorage

__all__ = [
    "CompressedTensorDict",
    "RolloutFile",
    "RolloutStorage",
    "load_rollout",
    "save_rollout_compressed",
]
