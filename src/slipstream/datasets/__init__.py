"""Recorded datasets that do not fit into memory: cameras, joints and actions from HDF5 files, read while training.

`schema` recognises a file by its content, `recordings` loads its numbers and notes where its frames are, `frames` reads
them, and `buffer` and `sequences` are what training code meets. `cache` and `ingest` keep frames that are resized
already; `repack` rewrites files that cannot be read in parallel.
"""

from __future__ import annotations

from slipstream.datasets.buffer import MultimodalReplayBuffer, Transitions
from slipstream.datasets.description import Description, Fields
from slipstream.datasets.ingest import Ingested, ingest
from slipstream.datasets.repack import Repacked, repack
from slipstream.datasets.sampler import AsyncSampler
from slipstream.datasets.schema import describe
from slipstream.datasets.sequences import SequenceDataset, SequenceStream
from slipstream.datasets.statistics import Statistics

__all__ = [
    "AsyncSampler",
    "Description",
    "Fields",
    "Ingested",
    "MultimodalReplayBuffer",
    "Repacked",
    "SequenceDataset",
    "SequenceStream",
    "Statistics",
    "Transitions",
    "describe",
    "ingest",
    "repack",
]
