"""Checkpoints that never stall training, never tear, and never lie."""

from __future__ import annotations

from slipstream.checkpoint.load import find_format, load_checkpoint
from slipstream.checkpoint.manager import CheckpointManager, Restored, Thin
from slipstream.checkpoint.model import format_checkpoint_name, get_model_size, print_model_info
from slipstream.checkpoint.native import NativeFile, write_native
from slipstream.checkpoint.portable import write_portable
from slipstream.checkpoint.saver import AsyncCheckpointSaver, SaveResult
from slipstream.checkpoint.state import TrainingState, compare_states

__all__ = [
    "AsyncCheckpointSaver",
    "CheckpointManager",
    "NativeFile",
    "Restored",
    "SaveResult",
    "Thin",
    "TrainingState",
    "compare_states",
    "find_format",
    "format_checkpoint_name",
    "get_model_size",
    "load_checkpoint",
    "print_model_info",
    "write_native",
    "write_portable",
]
