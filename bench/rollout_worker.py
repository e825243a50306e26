"""Measure rollouts of one checkout on request; ``rollout.py --against`` runs one of these per checkout.

    PYTHONPATH=<checkout>/src python bench/rollout_worker.py BATCH.pt FOLDER THREADS

For every name of an operation on standard input, runs it once and prints its CPU seconds, those of all threads together
and of the kernel included, and the size of what it made, as JSON. All timing happens here, so that the pipe to the
parent does not count. With one thread the process stays on one core, the same one for every checkout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from tensordict import TensorDict

import slipstream
from slipstream.codecs import Codec
from slipstream.rollout.batch import split_batch
from slipstream.rollout.files import write_rollout


class Operations:
    """What a checkout can do with a rollout, in functions that it has had for long."""

    def __init__(self, batch: TensorDict, folder: Path) -> None:
        self._batch = batch
        self._path = folder / f"rollout-{os.getpid()}.slip"
        self._codecs: dict[str, Codec] = {}
        self._packed = slipstream.CompressedTensorDict(batch)
        slipstream.save_rollout_compressed(batch, self._path)

    def save(self) -> int:
        """Save a file, every codec chosen again."""
        return slipstream.save_rollout_compressed(self._batch, self._path).stat().st_size

    def save_next(self) -> int:
        """Save a file with the codecs of an earlier one, as a storage does."""
        rollout = split_batch(self._batch)
        path = write_rollout(rollout, self._path, 1, {}, codecs=self._codecs)
        return path.stat().st_size

    def load(self) -> TensorDict:
        """Load a file."""
        return slipstream.load_rollout(self._path)

    def compress(self) -> int:
        """Pack a batch in memory."""
        return slipstream.CompressedTensorDict(self._batch).nbytes

    def collect(self) -> int:
        """Pack two batches with a collector, which may use what it learned from the first one."""
        total = 0
        for packed in slipstream.CompressedDataCollector([self._batch, self._batch]):
            total += packed.nbytes
        return total

    def decompress(self) -> TensorDict:
        """Unpack a batch that was packed in memory."""
        return self._packed.to_tensordict()


def check(result: Any, batch: TensorDict) -> int:
    """Return a size; raises unless a batch is the original one, bit for bit."""
    if isinstance(result, int):
        return result
    for key, value in batch.items(include_nested=True, leaves_only=True):
        if result[key].numpy().tobytes() != value.numpy().tobytes():
            raise ValueError(f"{key} is not what it was")
    return 0


def main() -> None:
    """Answer requests until standard input ends."""
    batch_path, folder, threads = sys.argv[1:]
    if threads == "1":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    batch = torch.load(batch_path, weights_only=False)
    operations = Operations(batch, Path(folder))
    for line in sys.stdin:
        operation: Callable[[], Any] = getattr(operations, line.strip())
        start = time.process_time()
        result = operation()
        seconds = time.process_time() - start
        print(json.dumps({"seconds": seconds, "bytes": check(result, batch)}), flush=True)
        # Its memory is given back before the next operation.
        del result


if __name__ == "__main__":
    main()
