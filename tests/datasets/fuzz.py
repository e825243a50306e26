"""Damage files at random, and look at what becomes of those who read them.

``python -m tests.datasets.fuzz FOLDER COUNT [FILE ...]`` writes `COUNT` damaged copies of generated and of given files
into a folder, one after another, reads each within limited memory, and prints a line of JSON for each: the class of the
error, or "loaded". It runs in its own process, because HDF5 could crash.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream import SequenceDataset, SlipstreamError
from slipstream.datasets.describe import describe
from tests.datasets.layouts import LAYOUTS

SEED = 20
MEMORY_BYTES = 1 << 30
_MAX_SOURCE_BYTES = 1 << 20
_FORGED = [0, 1, 255, 1 << 16, 1 << 31, 1 << 40, (1 << 64) - 1]


def damage(content: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """Return a file with one kind of damage."""
    content = content.copy()
    size = len(content)
    # Headers are where a file lies about itself; half of the damage goes to the first kilobytes.
    limit = int(random.choice([min(size, 4096), size]))
    kind = random.choice(["bits", "bytes", "numbers", "zeros", "cut", "swap"])
    places = random.integers(0, limit, random.integers(1, 9))
    if kind == "bits":
        content[places] ^= (1 << random.integers(0, 8, len(places))).astype(np.uint8)
    elif kind == "bytes":
        content[places] = random.integers(0, 256, len(places))
    elif kind == "numbers":
        # Sizes, offsets and counts are little-endian numbers.
        for place in (places // 8 * 8).tolist():
            number = _FORGED[random.integers(0, len(_FORGED))]
            raw = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
            content[place : place + 8] = raw[: size - place]
    elif kind == "zeros":
        content[places[0] : places[0] + 512] = 0
    elif kind == "cut":
        content = content[: random.integers(0, size)]
    else:
        first, second = random.integers(0, max(1, size - 64), 2).tolist()
        content[first : first + 64], content[second : second + 64] = (
            content[second : second + 64].copy(), content[first : first + 64].copy(),
        )  # fmt: skip
    return content


def read(path: Path) -> str:
    """Describe a file, load it, and read some of its images."""
    try:
        describe(path)
        with SequenceDataset(path, 2, image_size=8, threads=1) as data:
            data[list(range(min(12, len(data))))]
    except (SlipstreamError, OSError) as error:
        # Every error names the file, on one line.
        if str(path) not in str(error) or "\n" in str(error):
            return f"unnamed {type(error).__name__}: {error}"
        return type(error).__name__
    except Exception as error:  # noqa: BLE001 - any other class of error is what this looks for
        return f"unexpected {type(error).__name__}: {error}"
    return "loaded"


def sources(folder: Path, given: list[Path]) -> list[Path]:
    """Write a file of every layout, and add those given files that are small."""
    found = []
    for name, layout in LAYOUTS.items():
        path = folder / f"{name.replace(' ', '_')}.hdf5"
        layout["write"](path)
        found.append(path)
    return found + [path for path in given if path.stat().st_size <= _MAX_SOURCE_BYTES]


def main() -> None:
    """Damage and read files."""
    folder = Path(sys.argv[1])
    whole = sources(folder, [Path(name) for name in sys.argv[3:]])
    random = np.random.default_rng(SEED)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    for number in range(int(sys.argv[2])):
        source = whole[number % len(whole)]
        path = folder / f"damaged_{number}.hdf5"
        content = damage(np.fromfile(source, np.uint8), random)
        path.write_bytes(content.tobytes())
        print(json.dumps({"file": source.name, "number": number, "result": read(path)}), flush=True)  # noqa: T201
        path.unlink()


if __name__ == "__main__":
    main()
