"""Made the golden file container_v1_all.slip; kept to show what is in it. The file itself must never be made again."""

import json
from pathlib import Path

import numpy as np

from slipstream.codecs import Codec, Difference, Lz4, Planes, Raw, Timewise, Zstd
from slipstream.store.writer import write_container

FOLDER = Path(__file__).parent


def main() -> None:
    """Write the file, and beside it what must be read from it."""
    rng = np.random.default_rng(20261115)
    steps = np.cumsum(rng.normal(scale=0.01, size=(3, 8, 5)), axis=1).astype(np.float32)
    special = np.array([0.0, -0.0, np.nan, -np.inf, 5e-324, 1.5], np.float64)
    weights = rng.normal(scale=0.05, size=(24, 16)).astype(np.float32)
    weights[3] = 0
    entries: dict[str, tuple[np.ndarray[tuple[int, ...], np.dtype[np.generic]], Codec | None, str | None]] = {
        "weights": (weights, Planes(), None),
        "weights bf16": ((weights.view(np.uint32) >> 16).astype(np.uint16), Planes(1, floating=True), None),
        "weights later": (weights + np.float32(1e-4), Difference(), "weights"),
        "lidar": (steps, Timewise(), None),
        "counts": (np.arange(60, dtype=np.int64).reshape(3, 4, 5) % 7, Timewise(2), None),
        "image": (np.tile(np.arange(48, dtype=np.uint8), 4).reshape(8, 8, 3), Zstd(), None),
        "text": (np.frombuffer(b"slipstream " * 20, np.uint8), Lz4(9), None),
        "special": (special, Raw(), None),
        "complex": (special[[0, 5]] + 1j * special[[5, 1]], Planes(), None),
        "half": (np.linspace(-2, 2, 33).astype(np.float16), Planes(), None),
        "flags": (np.array([[True, False], [False, True]]), None, None),
        "big endian": (np.arange(5).astype(">i4"), Planes(), None),
        "scalar": (np.array(7, np.int8), Raw(), None),
        "mostly zero": (np.where(rng.random((20, 9)) < 0.2, 1.5, 0.0), Planes(), None),
        "empty": (np.zeros((0, 4), np.float32), Planes(), None),
    }
    values = {"step": 1000, "metrics": {"reward": -12.5, "note": "日本"}, "list": [1, None, True]}
    path = FOLDER / "container_v1_all.slip"
    with write_container(path, kind="golden", chunk_bytes=200) as writer:
        for name, (array, codec, reference) in entries.items():
            writer.add(name, array, codec, entries[reference][0] if reference else None)
        for name, value in values.items():
            writer.set(name, value)
        codecs = {name: entry.codec.to_header() for name, entry in writer.entries.items()}
    expected = {
        "values": values,
        "entries": {
            name: {
                "dtype": array.dtype.str,
                "shape": array.shape,
                "codec": codecs[name],
                "reference": reference,
                "bytes": array.tobytes().hex(),
            }
            for name, (array, _, reference) in entries.items()
        },
    }
    path.with_suffix(".json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
