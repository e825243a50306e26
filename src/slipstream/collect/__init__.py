"""Collectors around collectors: batches that are collected while others train, and batches that stay packed."""

from __future__ import annotations

from slipstream.collect.compressed import CompressedDataCollector
from slipstream.collect.pipelined import PipelinedDataCollector

__all__ = ["CompressedDataCollector", "PipelinedDataCollector"]
