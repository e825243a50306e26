"""Portable checkpoints: what ``torch.save`` writes, plain or as LZ4 frames, read without running code from the file."""
