"""Checkpoints that never stall training, never tear, and never lie."""
