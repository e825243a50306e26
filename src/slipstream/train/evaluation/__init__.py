"""Evaluation: fly scenarios with a pilot, count outcomes, and estimate intervals over maps."""
