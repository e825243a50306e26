"""Slipstream: the data plane of a robot-learning training loop.

Public names are importable from here and load on first use, so that ``import slipstream`` stays instant and needs
neither torch nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.checkpoint.load import load_checkpoint as load_checkpoint
    from slipstream.checkpoint.manager import CheckpointManager as CheckpointManager
    from slipstream.checkpoint.manager import Restored as Restored
    from slipstream.checkpoint.manager import Thin as Thin
    from slipstream.checkpoint.model import format_checkpoint_name as format_checkpoint_name
    from slipstream.checkpoint.model import get_model_size as get_model_size
    from slipstream.checkpoint.model import print_model_info as print_model_info
    from slipstream.checkpoint.saver import AsyncCheckpointSaver as AsyncCheckpointSaver
    from slipstream.checkpoint.saver import SaveResult as SaveResult
    from slipstream.checkpoint.state import TrainingState as TrainingState
    from slipstream.collect.compressed import CompressedDataCollector as CompressedDataCollector
    from slipstream.collect.pipelined import PipelinedDataCollector as PipelinedDataCollector
    from slipstream.errors import BackgroundError as BackgroundError
    from slipstream.errors import CodecError as CodecError
    from slipstream.errors import ConfigurationError as ConfigurationError
    from slipstream.errors import CorruptFileError as CorruptFileError
    from slipstream.errors import DiskFullError as DiskFullError
    from slipstream.errors import FormatVersionError as FormatVersionError
    from slipstream.errors import JobSkippedError as JobSkippedError
    from slipstream.errors import MissingEntryError as MissingEntryError
    from slipstream.errors import NonFiniteError as NonFiniteError
    from slipstream.errors import QueueFullError as QueueFullError
    from slipstream.errors import RolloutError as RolloutError
    from slipstream.errors import SlipstreamError as SlipstreamError
    from slipstream.errors import StateMismatchError as StateMismatchError
    from slipstream.errors import TornStateError as TornStateError
    from slipstream.errors import UnsupportedDtypeError as UnsupportedDtypeError
    from slipstream.errors import UnsupportedStateError as UnsupportedStateError
    from slipstream.errors import WriteError as WriteError
    from slipstream.nav.config import NavigationConfig as NavigationConfig
    from slipstream.nav.env import NavigationEnv as NavigationEnv
    from slipstream.rl.config import PPOConfig as PPOConfig
    from slipstream.rl.network import NavRLPolicy as NavRLPolicy
    from slipstream.rl.ppo import PPO as PPO
    from slipstream.rollout.advice import Advice as Advice
    from slipstream.rollout.advice import advise as advise
    from slipstream.rollout.compressed import CompressedTensorDict as CompressedTensorDict
    from slipstream.rollout.files import load_rollout as load_rollout
    from slipstream.rollout.files import save_rollout_compressed as save_rollout_compressed
    from slipstream.rollout.storage import RolloutStorage as RolloutStorage
    from slipstream.store.container import Container as Container
    from slipstream.store.container import write_container as write_container
    from slipstream.train.performance import PerformanceMonitor as PerformanceMonitor

__version__ = "0.1.0"

_HOMES = {
    "slipstream.checkpoint.load": ("load_checkpoint",),
    "slipstream.checkpoint.manager": ("CheckpointManager", "Restored", "Thin"),
    "slipstream.checkpoint.model": ("format_checkpoint_name", "get_model_size", "print_model_info"),
    "slipstream.checkpoint.saver": ("AsyncCheckpointSaver", "SaveResult"),
    "slipstream.checkpoint.state": ("TrainingState",),
    "slipstream.collect.compressed": ("CompressedDataCollector",),
    "slipstream.collect.pipelined": ("PipelinedDataCollector",),
    "slipstream.errors": (
        "BackgroundError",
        "CodecError",
        "ConfigurationError",
        "CorruptFileError",
        "DiskFullError",
        "FormatVersionError",
        "JobSkippedError",
        "MissingEntryError",
        "NonFiniteError",
        "QueueFullError",
        "RolloutError",
        "SlipstreamError",
        "StateMismatchError",
        "TornStateError",
        "UnsupportedDtypeError",
        "UnsupportedStateError",
        "WriteError",
    ),
    "slipstream.nav.config": ("NavigationConfig",),
    "slipstream.nav.env": ("NavigationEnv",),
    "slipstream.rl.config": ("PPOConfig",),
    "slipstream.rl.network": ("NavRLPolicy",),
    "slipstream.rl.ppo": ("PPO",),
    "slipstream.rollout.advice": ("Advice", "advise"),
    "slipstream.rollout.compressed": ("CompressedTensorDict",),
    "slipstream.rollout.files": ("load_rollout", "save_rollout_compressed"),
    "slipstream.rollout.storage": ("RolloutStorage",),
    "slipstream.store.container": ("Container", "write_container"),
    "slipstream.train.performance": ("PerformanceMonitor",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 - a test compares it with the imports above


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
