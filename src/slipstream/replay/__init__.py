"""Replay buffers that stay packed in memory: episodes, TorchRL storages, images."""
