"""Measure the codecs of one checkout on request; ``codecs.py --against`` runs one of these per checkout.

    PYTHONPATH=<checkout>/src python bench/codec_worker.py FOLDER

Loads every array ``<name>.npy`` in FOLDER (``<name>.reference.npy`` is the reference of a difference). For every line
``codec array`` on standard input, encodes and decodes once and prints CPU seconds and a digest of the payload as
JSON. All timing happens here, so that the pipe to the parent does not count.

The process stays on one core, the same one for every checkout. The cores of a virtual machine differ in speed for
seconds at a time, and a checkout that happens to run on the slower one would look slower.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs import CODECS

Array = NDArray[Any]
# Small arrays are coded repeatedly, so that the resolution of the clock does not matter.
MIN_S = 0.01


class Case:
    """One codec on one array, in terms of whichever interface the checkout has."""

    def __init__(self, codec_name: str, array: Array, reference: Array | None) -> None:
        self._codec: Any = CODECS[codec_name]()
        self._array = array
        self._reference = reference
        self._out = np.empty_like(array)
        # Commits before `Codec.against` pass the reference, dtype and shape to every call.
        self._is_old = not hasattr(self._codec, "against")
        if codec_name == "difference" and not self._is_old:
            self._codec = self._codec.against(np.asarray(reference))
        self._payload = self.encode()

    def encode(self) -> bytes:
        """Encode the array."""
        arguments = [self._array]
        if self._is_old and self._reference is not None:
            arguments.append(self._reference)
        payload: bytes = self._codec.encode(*arguments)
        return payload

    def decode(self) -> None:
        """Decode the payload into the same memory every time."""
        if self._is_old:
            self._codec.decode(self._payload, self._array.dtype, self._array.shape, self._reference, self._out)
        else:
            self._codec.decode(self._payload, self._out)

    def measure(self) -> dict[str, Any]:
        """Encode and decode; returns CPU seconds of each and a digest of the payload."""
        self._out.fill(0)
        encode_s = _cpu_seconds(self.encode)
        decode_s = _cpu_seconds(self.decode)
        if self._out.tobytes() != self._array.tobytes():
            raise RuntimeError(f"{self._codec!r} did not restore the same bytes")
        digest = hashlib.blake2b(self._payload, digest_size=8).hexdigest()
        return {"encode": encode_s, "decode": decode_s, "digest": digest}


def _cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds of one call, all threads together."""
    num_calls = 0
    start = time.process_time()
    while True:
        call()
        num_calls += 1
        elapsed = time.process_time() - start
        if elapsed >= MIN_S:
            return elapsed / num_calls


def main() -> None:
    """Answer requests until standard input ends."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    folder = Path(sys.argv[1])
    cases: dict[tuple[str, str], Case] = {}
    for line in sys.stdin:
        codec_name, array_name = line.split()
        if (codec_name, array_name) not in cases:
            array = np.load(folder / f"{array_name}.npy")
            reference_path = folder / f"{array_name}.reference.npy"
            reference = np.load(reference_path) if reference_path.exists() else None
            cases[codec_name, array_name] = Case(codec_name, array, reference)
        print(json.dumps(cases[codec_name, array_name].measure()), flush=True)


if __name__ == "__main__":
    main()
