"""The composer: what a training run is made of. So far: where its time goes."""

from __future__ import annotations

from slipstream.train.performance import PerformanceMonitor

__all__ = ["PerformanceMonitor"]
