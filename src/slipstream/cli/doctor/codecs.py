"""How fast codecs pack and unpack on one core of this machine, and that they give back what they were given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.cli.doctor.findings import Finding, ok, problem
from slipstream.codecs import Codec, Planes, Timewise
from slipstream.text import format_bytes

_MEASURE_S = 0.2  # of each direction of each codec


def examine() -> Iterator[Finding]:
    """Measure the codec of weights and that of rollouts."""
    yield speed("codec planes", Planes(), weights(), "weights")
    yield speed("codec timewise", Timewise(), readings(), "sensor readings")


def weights() -> NDArray[np.float32]:
    """Return what a layer's weights look like to a codec: noise of one scale."""
    return np.random.default_rng(0).standard_normal((1024, 1024), dtype=np.float32) * np.float32(0.02)


def readings() -> NDArray[np.float32]:
    """Return what a range sensor reads: 128 environments, 64 steps, 144 rays that change slowly or reach nothing."""
    steps = np.random.default_rng(0).normal(0, 0.02, (128, 64, 144))
    distances = 2.5 + np.cumsum(steps, axis=1) + np.linspace(-2, 2, 144)
    return np.clip(distances, 0, 4).astype(np.float32)


def speed(name: str, codec: Codec, array: NDArray[Any], what: str) -> Finding:
    """Measure a codec on an array, in bytes of the array per second of one core."""
    payload = codec.encode(array)
    out = np.empty_like(array)
    codec.decode(payload, out)
    if out.tobytes() != array.tobytes():
        advice = "pip install --force-reinstall zstandard numpy, and do not trust files written here"
        return problem(name, "does not give back what it was given", advice)
    pack = array.nbytes / _best_s(lambda: codec.encode(array))
    unpack = array.nbytes / _best_s(lambda: codec.decode(payload, out))
    ratio = array.nbytes / len(payload)
    return ok(
        name,
        f"packs {format_bytes(pack)}/s, unpacks {format_bytes(unpack)}/s on one core; {what} get {ratio:.2f}x smaller",
        pack_bytes_per_s=pack,
        unpack_bytes_per_s=unpack,
        ratio=ratio,
    )


def _best_s(work: Callable[[], Any]) -> float:
    """Return the seconds of this thread that some work takes at best, so that a busy machine is not judged slow."""
    best, spent = float("inf"), 0.0
    while spent < _MEASURE_S:
        start = time.thread_time()
        work()
        took = max(time.thread_time() - start, 1e-9)
        best, spent = min(best, took), spent + took
    return best
