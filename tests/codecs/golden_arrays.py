"""Arrays whose payloads are frozen. They are made of integer arithmetic, which gives the same bits everywhere."""

import json
from pathlib import Path

import numpy as np

from tests.codecs.roundtrip import Array

DATA = Path(__file__).parents[1] / "data"


def noise(count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return noise: counters mixed by a hash."""
    words = np.arange(count, dtype=np.uint32) + np.uint32(seed)
    for factor in (0x7FEB352D, 0x846CA68B):
        words ^= words >> np.uint32(16)
        words *= np.uint32(factor)
    words ^= words >> np.uint32(15)
    return words


def floats(count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return floats like weights: noise as mantissa and sign, a few exponents with skewed frequencies."""
    words = noise(count, seed)
    exponent = np.uint32(120) - np.minimum(words & 7, (words >> 3) & 7)
    bits = (words & np.uint32(0x807FFFFF)) | (exponent << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


def golden_arrays() -> dict[str, tuple[Array, Array]]:
    """Return arrays by name, each with a reference for differences."""
    weights = floats(40_000, 1)
    steps = (noise(48_000, 2).reshape(8, 100, 60) % 5).astype(np.int64)
    walk = np.cumsum(steps - 2, axis=1)
    found: dict[str, Array] = {
        "weights": weights,
        "doubles": floats(20_000, 3).astype(np.float64),
        "sparse": np.where(noise(40_000, 4) % 5 == 0, weights, np.float32(0)),
        "half": (weights.view(np.uint32) >> 16).astype(np.uint16),
        "walk": walk.astype(np.float32) / np.float32(64),
        "counts": walk.astype(np.int16),
        # Differences of 20 and 21 bits: one too few and just enough to store their low halves verbatim.
        "20 bits": np.cumsum((noise(20_000, 8) >> 12) - np.uint32(1 << 19), dtype=np.uint32).reshape(2, -1),
        "21 bits": np.cumsum((noise(20_000, 9) >> 11) - np.uint32(1 << 20), dtype=np.uint32).reshape(2, -1),
        "flags": (noise(9000, 5) % 50 == 0).reshape(30, 300),
        "bits": (noise(9001, 6) & np.uint32(0b111000)).astype(np.uint8),
        "image": (noise(64 * 64 * 3, 7) % 9 + np.arange(64 * 64 * 3, dtype=np.uint32) // 64).astype(np.uint8),
        "constant": np.full((3, 500), 1.5, np.float32),
        "complex": weights[:6000].view(np.complex64),
    }
    # The small arrays of the golden container, with NaN, infinities and denormals.
    for name, entry in json.loads((DATA / "container_v1_all.json").read_text())["entries"].items():
        flat = np.frombuffer(bytes.fromhex(entry["bytes"]), entry["dtype"])
        found[f"container {name}"] = flat.reshape(entry["shape"])
    return {name: (array, near(array)) for name, array in found.items()}


def near(array: Array) -> Array:
    """Return an array that differs in the lowest byte of every third element."""
    content = np.frombuffer(array.tobytes(), np.uint8).reshape(-1, array.dtype.itemsize).copy()
    content[::3, 0] ^= 1
    return content.reshape(-1).view(array.dtype).reshape(array.shape)
