"""Adapters: checkpoints of ours in the training loops of others.

Importing them imports none of those libraries: that happens when an adapter is made, which raises `ImportError` with
what to install if the library is not there.
"""

from __future__ import annotations

from slipstream.adapters.lightning import LightningCheckpointIO
from slipstream.adapters.stable_baselines3 import SB3CheckpointCallback, restore_into
from slipstream.adapters.torchrl import TorchRLCheckpointHook

__all__ = ["LightningCheckpointIO", "SB3CheckpointCallback", "TorchRLCheckpointHook", "restore_into"]
