"""Training: settings, the loop, evaluation, loggers, and where time goes."""

from __future__ import annotations

from slipstream.train.performance import PerformanceMonitor

__all__ = ["PerformanceMonitor"]
