"""Collectors: rollouts one after another, collected while others train, and packed while they train."""

from __future__ import annotations

from slipstream.collect.compressed import CompressedDataCollector
from slipstream.collect.pipelined import PipelinedDataCollector
from slipstream.collect.serial import SerialCollector

__all__ = ["CompressedDataCollector", "PipelinedDataCollector", "SerialCollector"]
