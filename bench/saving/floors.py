"""What nothing can be faster than: copying, entropy coding, checksums, writing and reading, each alone."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from bench.saving.training import THREADS, flat
from bench.saving.turns import forget_memory
from slipstream.codecs.entropy import HUFFMAN_LEVEL, compress_zstd, decompress_zstd

FLOORS = "floors"

# Planes of this size are what a block of 1 MiB of fp32 has, in our format.
_PLANE_BYTES = 256 << 10
# Share of the state that a packed file takes.
_PACKED_SHARE = 0.79


@dataclass(frozen=True)
class Cost:
    """What an operation took, in seconds."""

    wall_s: float
    cpu_s: float


class Floors:
    """Measures the floors for one state, on one thread.

    Args:
        start: A checkpoint of `torch.save`, whose state is used.
        folder: Where to write.
    """

    def __init__(self, start: Path, folder: Path) -> None:
        torch.set_num_threads(THREADS)
        folder.mkdir(parents=True)
        self._path = folder / "floor"
        tensors = flat(torch.load(start, weights_only=True)).values()
        arrays = [tensor.detach().numpy().reshape(-1).view(np.uint8) for tensor in tensors]
        self._state: NDArray[np.uint8] = np.concatenate(arrays)
        self._copy = np.empty_like(self._state)
        self._copy.fill(1)
        self._planes = _top_planes(self._state)
        self._frames = [compress_zstd(plane, HUFFMAN_LEVEL) for plane in self._planes]

    def take_turn(self) -> dict[str, Cost]:
        """Measure each operation once."""
        costs = {
            "copy": _measure(lambda: np.copyto(self._copy, self._state)),
            "checksum": _measure(lambda: xxhash.xxh3_128_digest(self._state.data)),
            "Huffman encode": _measure(self._encode),
            "Huffman decode": _measure(self._decode),
        }
        packed = self._state[: int(_PACKED_SHARE * self._state.size)]
        for name, content in (("packed", packed), ("not packed", self._state)):
            costs[f"write + fsync, {name}"] = _measure(functools.partial(self._write, content))
            costs[f"read, {name}"] = _measure(self._read)
            self._path.unlink()
        return costs

    def close(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)

    def _encode(self) -> None:
        for plane in self._planes:
            compress_zstd(plane, HUFFMAN_LEVEL)

    def _decode(self) -> None:
        for plane, frame in zip(self._planes, self._frames, strict=True):
            decompress_zstd(memoryview(frame), plane.size)

    def _write(self, content: NDArray[np.uint8]) -> None:
        with self._path.open("wb", buffering=0) as file:
            file.write(content.data)
            os.fsync(file.fileno())

    def _read(self) -> None:
        # Not NumPy's memory: it asks for huge pages, and finding those can take longer than everything else.
        memory = torch.empty(self._path.stat().st_size, dtype=torch.uint8).numpy()
        with self._path.open("rb", buffering=0) as file:
            file.readinto(memory.data)


def _measure(operation: Callable[[], Any]) -> Cost:
    forget_memory()
    wall_s = time.perf_counter()
    cpu_s = time.process_time()
    operation()
    return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def _top_planes(state: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Return the bytes with the exponents: the only part of fp32 weights that compresses."""
    words = state[: state.size // 4 * 4].view(np.uint32)
    # Without the sign, the exponent is the top byte.
    top = ((words << 1) >> 24).astype(np.uint8)
    return [top[start : start + _PLANE_BYTES] for start in range(0, top.size, _PLANE_BYTES)]
