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
    from slipstream.collect.serial import SerialCollector as SerialCollector
    from slipstream.datasets.buffer import MultimodalReplayBuffer as MultimodalReplayBuffer
    from slipstream.datasets.description import Fields as Fields
    from slipstream.datasets.ingest import ingest as ingest
    from slipstream.datasets.repack import repack as repack
    from slipstream.datasets.sampler import AsyncSampler as AsyncSampler
    from slipstream.datasets.schema import describe as describe
    from slipstream.datasets.sequences import SequenceDataset as SequenceDataset
    from slipstream.datasets.sequences import SequenceStream as SequenceStream
    from slipstream.errors import BackgroundError as BackgroundError
    from slipstream.errors import CodecError as CodecError
    from slipstream.errors import ConfigurationError as ConfigurationError
    from slipstream.errors import CorruptFileError as CorruptFileError
    from slipstream.errors import DatasetError as DatasetError
    from slipstream.errors import DiskFullError as DiskFullError
    from slipstream.errors import FormatVersionError as FormatVersionError
    from slipstream.errors import JobSkippedError as JobSkippedError
    from slipstream.errors import LockedError as LockedError
    from slipstream.errors import MissingEntryError as MissingEntryError
    from slipstream.errors import NonFiniteError as NonFiniteError
    from slipstream.errors import OutOfRangeError as OutOfRangeError
    from slipstream.errors import QueueFullError as QueueFullError
    from slipstream.errors import ReplayError as ReplayError
    from slipstream.errors import RolloutError as RolloutError
    from slipstream.errors import SlipstreamError as SlipstreamError
    from slipstream.errors import StateMismatchError as StateMismatchError
    from slipstream.errors import TornStateError as TornStateError
    from slipstream.errors import UnsupportedDtypeError as UnsupportedDtypeError
    from slipstream.errors import UnsupportedStateError as UnsupportedStateError
    from slipstream.errors import WriteError as WriteError
    from slipstream.nav.config import NavigationConfig as NavigationConfig
    from slipstream.nav.env import NavigationEnv as NavigationEnv
    from slipstream.replay.dict_buffer import DictReplayBuffer as DictReplayBuffer
    from slipstream.replay.episode_state import RestoredEpisodes as RestoredEpisodes
    from slipstream.replay.episodes import EpisodeStore as EpisodeStore
    from slipstream.replay.images import compress_image as compress_image
    from slipstream.replay.images import compress_image_seq as compress_image_seq
    from slipstream.replay.images import decompress_image as decompress_image
    from slipstream.replay.images import decompress_image_seq as decompress_image_seq
    from slipstream.replay.prefix_sum import PrefixSum as PrefixSum
    from slipstream.replay.resume import ReplayBufferState as ReplayBufferState
    from slipstream.replay.slices import EpisodeSliceSampler as EpisodeSliceSampler
    from slipstream.replay.storage import PackedEpisodeStorage as PackedEpisodeStorage
    from slipstream.report.page import write_report as write_report
    from slipstream.rl.config import PPOConfig as PPOConfig
    from slipstream.rl.encoder import ImageJointEncoder as ImageJointEncoder
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
    from slipstream.train.evaluate import evaluate as evaluate
    from slipstream.train.export import export_policy as export_policy
    from slipstream.train.performance import PerformanceMonitor as PerformanceMonitor
    from slipstream.train.policy import load_policy as load_policy
    from slipstream.train.settings import compose_settings as compose_settings
    from slipstream.train.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "slipstream.checkpoint.load": ("load_checkpoint",),
    "slipstream.checkpoint.manager": ("CheckpointManager", "Restored", "Thin"),
    "slipstream.checkpoint.model": ("format_checkpoint_name", "get_model_size", "print_model_info"),
    "slipstream.checkpoint.saver": ("AsyncCheckpointSaver", "SaveResult"),
    "slipstream.checkpoint.state": ("TrainingState",),
    "slipstream.collect.compressed": ("CompressedDataCollector",),
    "slipstream.collect.pipelined": ("PipelinedDataCollector",),
    "slipstream.collect.serial": ("SerialCollector",),
    "slipstream.datasets.buffer": ("MultimodalReplayBuffer",),
    "slipstream.datasets.description": ("Fields",),
    "slipstream.datasets.ingest": ("ingest",),
    "slipstream.datasets.repack": ("repack",),
    "slipstream.datasets.sampler": ("AsyncSampler",),
    "slipstream.datasets.schema": ("describe",),
    "slipstream.datasets.sequences": ("SequenceDataset", "SequenceStream"),
    "slipstream.errors": (
        "BackgroundError",
        "CodecError",
        "ConfigurationError",
        "CorruptFileError",
        "DatasetError",
        "DiskFullError",
        "FormatVersionError",
        "JobSkippedError",
        "LockedError",
        "MissingEntryError",
        "NonFiniteError",
        "OutOfRangeError",
        "QueueFullError",
        "ReplayError",
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
    "slipstream.report.page": ("write_report",),
    "slipstream.replay.dict_buffer": ("DictReplayBuffer",),
    "slipstream.replay.episode_state": ("RestoredEpisodes",),
    "slipstream.replay.episodes": ("EpisodeStore",),
    "slipstream.replay.images": (
        "compress_image",
        "compress_image_seq",
        "decompress_image",
        "decompress_image_seq",
    ),
    "slipstream.replay.prefix_sum": ("PrefixSum",),
    "slipstream.replay.resume": ("ReplayBufferState",),
    "slipstream.replay.slices": ("EpisodeSliceSampler",),
    "slipstream.replay.storage": ("PackedEpisodeStorage",),
    "slipstream.rl.config": ("PPOConfig",),
    "slipstream.rl.encoder": ("ImageJointEncoder",),
    "slipstream.rl.network": ("NavRLPolicy",),
    "slipstream.rl.ppo": ("PPO",),
    "slipstream.rollout.advice": ("Advice", "advise"),
    "slipstream.rollout.compressed": ("CompressedTensorDict",),
    "slipstream.rollout.files": ("load_rollout", "save_rollout_compressed"),
    "slipstream.rollout.storage": ("RolloutStorage",),
    "slipstream.store.container": ("Container", "write_container"),
    "slipstream.train.evaluate": ("evaluate",),
    "slipstream.train.export": ("export_policy",),
    "slipstream.train.performance": ("PerformanceMonitor",),
    "slipstream.train.policy": ("load_policy",),
    "slipstream.train.settings": ("compose_settings",),
    "slipstream.train.trainer": ("Trainer",),
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
