"""Codecs against their peers: ratio, and megabytes of input per CPU second, encoding and decoding, on one core.

    python bench/codecs.py                              # print the tables
    python bench/codecs.py --write docs/benchmarks.md   # and put them into the page, between its markers
    python bench/codecs.py --against ../other           # compare with a checkout of another commit

Every number of a table comes from one run. Times are CPU seconds of the whole process (so that a peer which uses
several threads gains nothing by it), the best of a few repetitions. A codec that does not give back the same bytes is
an error. A peer that is not installed is left out, and named.

``--against`` measures both checkouts in turns, in two processes, so that a busy machine slows both alike. It prints the
ratio of CPU times (this checkout / the other one, so below 1 is faster) with a 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lz4.frame
import numpy as np
import torch
import zstandard
from checkouts import Checkout, alternate, interval
from numpy.typing import NDArray
from page import machine, write_section

from slipstream.codecs import Codec, Lz4, Planes, Timewise, choose_codec

Array = NDArray[Any]
PEERS = ("lz4", "zstandard", "blosc2", "pcodec", "zipnn", "openzl")


@dataclass(frozen=True)
class Contender:
    """Something that packs an array."""

    name: str
    encode: Callable[[Array], Any]
    decode: Callable[[Any, Array], Any]


def ours(codec: Codec) -> Contender:
    """Measure one of our codecs, decoding into memory that is there, as the container does."""
    out: dict[str, Array] = {}

    def decode(payload: bytes, array: Array) -> Array:
        target = out.setdefault("out", np.empty_like(array))
        codec.decode(payload, target)
        return target

    return Contender(f"slipstream {codec.name}", codec.encode, decode)


def byte_peers() -> list[Contender]:
    """Return the peers that see bytes only."""
    zstd_in, zstd_out = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    return [
        *(
            Contender(
                f"lz4-{level}",
                functools.partial(lz4.frame.compress, compression_level=level),
                lambda payload, _: lz4.frame.decompress(payload),
            )
            for level in (0, 9)
        ),
        Contender(
            "zstd-3", lambda array: zstd_in.compress(array.data), lambda payload, _: zstd_out.decompress(payload)
        ),
    ]


def blosc2() -> Contender:
    """Blosc2: byte shuffle and zstd, on one thread."""
    import blosc2 as library  # noqa: PLC0415

    library.set_nthreads(1)
    options = {"codec": library.Codec.ZSTD, "clevel": 5, "nthreads": 1}
    return Contender(
        "blosc2 shuffle+zstd",
        lambda array: library.compress2(
            array, typesize=array.itemsize, filters=[library.Filter.SHUFFLE], filters_meta=[0], **options
        ),
        lambda payload, _: library.decompress2(payload, nthreads=1),
    )


def pcodec() -> Contender:
    """Pcodec, at its default level."""
    from pcodec import ChunkConfig, standalone  # noqa: PLC0415

    def numbers(array: Array) -> Array:
        return array.reshape(-1)

    return Contender(
        "pcodec",
        lambda array: standalone.simple_compress(numbers(array), ChunkConfig(enable_8_bit=array.itemsize == 1)),
        lambda payload, _: standalone.simple_decompress(payload),
    )


def zipnn() -> Contender:
    """ZipNN, on one thread."""
    from zipnn import ZipNN  # noqa: PLC0415

    library = ZipNN(input_format="byte", bytearray_dtype="float32", threads=1)
    return Contender(
        "zipnn", lambda array: library.compress(array.tobytes()), lambda payload, _: library.decompress(payload)
    )


def openzl() -> Contender:
    """OpenZL: exponents apart from sign and fraction for floats, its generic graph for the rest."""
    import openzl.ext as library  # noqa: PLC0415

    def encode(array: Array) -> bytes:
        compressor = library.Compressor()
        generic = library.graphs.Compress()
        if array.dtype == np.float32:
            graph = library.nodes.Float32Deconstruct()(compressor, generic(compressor), generic(compressor))
        else:
            graph = generic(compressor)
        compressor.select_starting_graph(graph)
        context = library.CCtx()
        context.ref_compressor(compressor)
        context.set_parameter(library.CParam.FormatVersion, library.MAX_FORMAT_VERSION)
        payload: bytes = context.compress([library.Input(library.Type.Numeric, array.reshape(-1))])
        return payload

    def decode(payload: bytes, _: Array) -> Array:
        return np.asarray(library.DCtx().decompress(payload)[0].content.as_nparray())

    return Contender("openzl", encode, decode)


def trained_state(steps: int) -> dict[str, Array]:
    """Train a network of the size of a locomotion policy for a moment; returns weights and Adam's moments."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    widths = (256, 1024, 1024, 1024, 64)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ELU(), torch.nn.LayerNorm(outputs)]
    network = torch.nn.Sequential(*layers[:-2])
    teacher = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)
    for _ in range(steps):
        batch = torch.randn(128, 256)
        loss = (network(batch) - teacher(batch).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def flat(tensors: Sequence[torch.Tensor]) -> Array:
        return np.concatenate([tensor.detach().numpy().reshape(-1) for tensor in tensors])

    parameters = list(network.parameters())
    return {
        "fp32 weights": flat(parameters),
        "Adam exp_avg": flat([optimizer.state[p]["exp_avg"] for p in parameters]),
        "Adam exp_avg_sq": flat([optimizer.state[p]["exp_avg_sq"] for p in parameters]),
    }


def lidar_rollout(environments: int, steps: int = 32) -> Array:
    """Cast 36 x 4 rays to 4 m from drones that fly among boxes; most rays see nothing, the others change smoothly."""
    rng = np.random.default_rng(0)
    boxes = rng.uniform(-20, 20, (350, 2))
    half = rng.choice([0.15, 0.35], (350, 2))
    position = rng.uniform(-18, 18, (environments, 1, 2))
    velocity = rng.normal(0, 1, (environments, 1, 2)) + 0.1 * np.cumsum(rng.normal(0, 1, (environments, steps, 2)), 1)
    path = position + np.cumsum(0.016 * velocity, axis=1)
    angle = np.linspace(0, 2 * np.pi, 36, endpoint=False)
    direction = np.stack([np.cos(angle), np.sin(angle)], -1) + 1e-9
    nearest = np.full((environments, steps, 36), 4.0)
    for box, extent in zip(boxes, half, strict=True):
        close = np.abs(path - box).max(axis=(1, 2)) < 6
        edges = (box - path[close, :, None, :])[..., None, :] + np.stack([-extent, extent])
        entry_exit = edges / direction[:, None, :]
        entry, leave = entry_exit.min(-2).max(-1), entry_exit.max(-2).min(-1)
        distance = np.where((entry <= leave) & (leave > 0), np.maximum(entry, 0), 4.0)
        nearest[close] = np.minimum(nearest[close], distance)
    pitch = 1 / np.cos(np.radians([-10, 0, 10, 20]))
    return (4 - np.minimum(nearest[..., None] * pitch, 4)).astype(np.float32)


def camera_frames(count: int) -> Array:
    """Render a textured scene that pans slowly, with the noise of a sensor."""
    rng = np.random.default_rng(0)
    texture = rng.normal(0, 1, (64, 64, 3))
    scene = np.kron(texture, np.ones((8, 8, 1)))
    for axis in (0, 1):
        scene = (np.roll(scene, 3, axis) + np.roll(scene, -3, axis) + scene) / 3
    frames = np.stack([np.roll(scene, (2 * i, 3 * i), (0, 1))[:128, :128] for i in range(count)])
    return np.clip(128 + 40 * frames + rng.normal(0, 1.5, frames.shape), 0, 255).astype(np.uint8)


def measure(contender: Contender, array: Array, repetitions: int) -> tuple[float, float, float]:
    """Return ratio, and MB per CPU second of encoding and of decoding; checks that the bytes come back."""
    encode_s, decode_s = [], []
    contender.decode(contender.encode(array), array)  # warms caches and memory that is kept
    for _ in range(repetitions):
        start = time.process_time()
        payload = contender.encode(array)
        middle = time.process_time()
        decoded = contender.decode(payload, array)
        encode_s.append(middle - start)
        decode_s.append(time.process_time() - middle)
    if np.asarray(memoryview(decoded).cast("B")).tobytes() != array.tobytes():
        raise RuntimeError(f"{contender.name} did not give back the same bytes")
    megabytes = array.nbytes / 1e6
    return array.nbytes / len(payload), megabytes / min(encode_s), megabytes / min(decode_s)


def available(*makers: Callable[[], Contender]) -> list[Contender]:
    """Return the peers that are installed."""
    found = []
    for maker in makers:
        try:
            found.append(maker())
        except ImportError:
            print(f"{maker.__name__} is not installed and left out: make bench installs it")
    return found


def table(title: str, array: Array, contenders: list[Contender], repetitions: int) -> str:
    """Measure all contenders on one array and return a Markdown table; ours first, then by ratio."""
    rows = [(contender.name, *measure(contender, array, repetitions)) for contender in contenders]
    rows.sort(key=lambda row: (not row[0].startswith("slipstream"), -row[1]))
    lines = [f"**{title}** ({array.dtype}{list(array.shape)}, {array.nbytes / 1e6:.1f} MB)", ""]
    lines += ["| codec | ratio | packed / raw | encode MB/s | decode MB/s |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {name} | {ratio:.3f} | {1 / ratio:.4f} | {enc:,.0f} | {dec:,.0f} |" for name, ratio, enc, dec in rows]
    return "\n".join(lines) + "\n"


def run(*, quick: bool) -> str:
    """Measure everything and return the section of the page."""
    repetitions = 3 if quick else 7
    floats = available(blosc2, pcodec, zipnn, openzl)
    sections = [machine(("numpy", *PEERS)), ""]
    for title, array in trained_state(100 if quick else 400).items():
        sections.append(table(title, array, [ours(Planes()), *byte_peers(), *floats], repetitions))
    lidar = lidar_rollout(128 if quick else 512)
    contenders = [ours(Timewise()), ours(Planes()), *byte_peers(), *floats]
    sections.append(table("LiDAR rollout [env, time, 36, 4]", lidar, contenders, repetitions))
    frames = camera_frames(64 if quick else 200)
    contenders = [ours(choose_codec(frames)), ours(Lz4()), *byte_peers(), *available(blosc2, pcodec, openzl)]
    sections.append(table("uint8 camera frames with sensor noise", frames, contenders, repetitions))
    return "\n".join(sections)


def comparison_arrays(*, quick: bool) -> dict[str, tuple[Array, Array | None]]:
    """Return arrays by name, and the reference of those that have one."""
    state = trained_state(20 if quick else 100)
    weights = state["fp32 weights"]
    step = np.random.default_rng(0).normal(0, 1e-4, weights.size).astype(np.float32)
    sparse = np.where(np.random.default_rng(1).random(weights.size) < 0.2, weights, 0).astype(np.float32)
    return {
        "weights": (weights, weights + step),
        "exp_avg_sq": (state["Adam exp_avg_sq"], None),
        "sparse": (sparse, None),
        "small": (weights[:4096], weights[:4096] + step[:4096]),
        "lidar": (lidar_rollout(64), None),
        "counts": (np.arange(1 << 18, dtype=np.int64).reshape(64, 128, 32) // 7, None),
        "camera": (camera_frames(48), None),
    }


COMPARED = {
    "planes": ("weights", "exp_avg_sq", "sparse", "small", "lidar", "counts"),
    "difference": ("weights", "small"),
    "timewise": ("lidar", "counts", "small"),
    "zstd": ("camera", "small"),
    "lz4": ("camera", "small"),
    "raw": ("camera", "small"),
}
"""Which codecs are compared on which arrays."""


def compare(other: Path, *, quick: bool) -> str:
    """Measure this checkout and another one in turns; returns a Markdown table of ratios of CPU time."""
    num_rounds = 15 if quick else 40
    lines = ["| codec | array | same bytes | encode, new / old | decode, new / old |", "|---|---|---|---:|---:|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for array_name, (array, reference) in comparison_arrays(quick=quick).items():
            np.save(folder / f"{array_name}.npy", array)
            if reference is not None:
                np.save(folder / f"{array_name}.reference.npy", reference)
        worker = Path(__file__).with_name("codec_worker.py")
        new = Checkout(Path(__file__).parents[1], worker, folder)
        old = Checkout(other, worker, folder)
        for codec_name, array_names in COMPARED.items():
            for array_name in array_names:
                lines.append(compare_case(new, old, codec_name, array_name, num_rounds))
                print(lines[-1], flush=True)
        new.close()
        old.close()
    return "\n".join(lines)


def compare_case(new: Checkout, old: Checkout, codec_name: str, array_name: str, num_rounds: int) -> str:
    """Measure one codec on one array and return a row of the table."""
    pairs = alternate(new, old, f"{codec_name} {array_name}", num_rounds)
    cells = []
    for direction in ("encode", "decode"):
        ratios = [ours[direction] / theirs[direction] for ours, theirs in pairs]
        median, low, high = interval(ratios)
        cells.append(f"{median:.3f} ({low:.3f} to {high:.3f})")
    ours, theirs = pairs[-1]
    same = "yes" if ours["digest"] == theirs["digest"] else "**no**"
    return f"| {codec_name} | {array_name} | {same} | {cells[0]} | {cells[1]} |"


def main() -> None:
    """Parse the command line, measure, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="less data and fewer repetitions: about half a minute")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page, between its markers")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with a checkout of another commit")
    arguments = parser.parse_args()
    if arguments.against:
        compare(arguments.against, quick=arguments.quick)
        return
    report = run(quick=arguments.quick)
    print(report)
    if arguments.write:
        write_section(arguments.write, "codecs", report)


if __name__ == "__main__":
    main()
