"""Priority trees for TorchRL where its compiled ones do not load."""

from typing import Any

import numpy as np
import pytest
import torch


class SumTree:
    """What TorchRL asks of its compiled trees, in NumPy: sums, or minima, over ranges of leaves."""

    combine: Any = np.add
    neutral = 0.0

    def __init__(self, size):
        self.size = 1 << max(0, size - 1).bit_length()
        self.nodes = np.full(2 * self.size, self.neutral, np.float32)

    def __getitem__(self, index):
        found = self.nodes[self.size + _plain(index)]
        return torch.from_numpy(found) if found.ndim else float(found)

    def __setitem__(self, index, value):
        places = self.size + np.atleast_1d(_plain(index)).reshape(-1)
        self.nodes[places] = _plain(value).astype(np.float32).reshape(-1)
        while places[0] > 1:
            places = np.unique(places // 2)
            self.nodes[places] = self.combine(self.nodes[2 * places], self.nodes[2 * places + 1])

    def query(self, start, stop):
        return float(self.combine.reduce(self.nodes[self.size + start : self.size + stop], initial=self.neutral))

    def scan_lower_bound(self, value):
        sums = np.cumsum(self.nodes[self.size :])
        return torch.from_numpy(np.searchsorted(sums, _plain(value), side="left"))


def _plain(value):
    return np.array(torch.as_tensor(value).tolist())


class MinTree(SumTree):
    combine = np.minimum
    neutral = np.inf


@pytest.fixture
def priority_trees(monkeypatch):
    """Let TorchRL's prioritized sampler find trees, whether or not its extension fits this torch."""
    from torchrl.data.replay_buffers.samplers import prioritized

    if prioritized.SumSegmentTreeFp32 is None:
        for bits in (32, 64):
            monkeypatch.setattr(prioritized, f"SumSegmentTreeFp{bits}", SumTree)
            monkeypatch.setattr(prioritized, f"MinSegmentTreeFp{bits}", MinTree)
