"""Rollouts against what people do with them: ratio, speed, memory, and what plans B and C cost a training loop.

    python bench/rollout.py                              # print the tables
    python bench/rollout.py --quick                      # one rollout, one epoch
    python bench/rollout.py --write docs/benchmarks.md   # and put them into the page, between its markers
    python bench/rollout.py --against ../other           # compare with a checkout of another commit

The rollouts are those of the embedded simulator, 1024 drones for 32 steps after a flight of some seconds, with
everything that TorchRL's collector puts into a batch: in the faithful setting (quadrotor, 16 ms a step) and in the
quick one (first-order lag, 100 ms), with a policy that wanders and with one that flies to its goal and keeps away from
what its LiDAR sees. Ratios are of all tensors, ``next`` included. Times are CPU seconds of the whole process on one
thread, the best of a few repetitions; each contender runs in a process of its own, whose peak memory is that beyond
what the batch takes. Whatever does not give back the same bits is an error. A peer that is not installed is left out.

``--against`` measures both checkouts in turns, in two processes, on one thread and on all of them. It prints how many
times as fast this one is (the median of the rounds and its 95 % confidence interval), and how large its results are.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import io
import multiprocessing
import os
import pickle
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import lz4.frame
import numpy as np
import torch
import zstandard
from checkouts import Checkout, alternate, interval
from numpy.typing import NDArray
from page import machine, write_section
from tensordict import TensorDict

from slipstream import CompressedTensorDict, NavigationConfig, NavigationEnv, RolloutStorage, load_rollout
from slipstream.codecs import Codec
from slipstream.rollout.batch import split_batch
from slipstream.rollout.files import write_rollout
from slipstream.rollout.minibatches import grouped_indices

PEERS = ("lz4", "zstandard", "blosc2", "pcodec", "openzl")
ENVS, STEPS = 1024, 32
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Contender:
    """Something that packs a batch."""

    name: str
    encode: Callable[[TensorDict], Any]
    decode: Callable[[Any], Any]
    size: Callable[[Any], int] = len


def wander(observation: TensorDict) -> torch.Tensor:
    """Draw a velocity from a broad distribution, as an untrained policy does."""
    return 4 * torch.distributions.Beta(2.0, 2.0).sample((observation["state"].shape[0], 3)) - 2


def fly(observation: TensorDict) -> torch.Tensor:
    """Fly to the goal and away from what is near, with the little noise of a trained policy."""
    near = observation["lidar"][:, 0].amax(-1)  # 36 azimuths, counter-clockwise from the heading
    angle = torch.arange(36) * (2 * torch.pi / 36)
    away = torch.stack([-(near**2 * angle.cos()).sum(-1), -(near**2 * angle.sin()).sum(-1)], -1) / 60
    mean = torch.cat([1.8 * observation["state"][:, :2] + away, 0.5 * observation["state"][:, 4:5]], -1).clamp(
        -1.9, 1.9
    )
    sharpness = 60.0
    share = (mean + 2) / 4
    return 4 * torch.distributions.Beta(share * sharpness, (1 - share) * sharpness).sample() - 2


def collect(preset: str, policy: Callable[[TensorDict], torch.Tensor], warm_up: int) -> TensorDict:
    """Return a batch as a collector yields it, after some seconds of flight."""
    torch.manual_seed(0)
    lag: dict[str, Any] = {
        "dynamics": "lag",
        "dt_s": 0.1,
        "max_episode_length": 400,
        "goal_truncates": True,
        "random_clocks": True,
    }
    env = NavigationEnv(NavigationConfig(num_envs=ENVS, compile="false", **(lag if preset == "quick" else {})))

    def act(td: TensorDict) -> TensorDict:
        td["agents", "action"] = policy(td["agents", "observation"])
        td["sample_log_prob"] = -td["agents", "action"].square().sum(-1)
        td["state_value"] = td["agents", "observation", "state"][:, 3:4] * -0.1 + 0.01 * torch.randn(ENVS, 1)
        return td

    with torch.no_grad():
        state = env.reset()
        while warm_up > 0:
            state = env.rollout(min(64, warm_up), act, tensordict=state, auto_reset=False, break_when_any_done=False)
            state = state[:, -1]["next"].exclude("reward")
            state = env.maybe_reset(state)
            warm_up -= 64
        batch = env.rollout(STEPS, act, tensordict=state, auto_reset=False, break_when_any_done=False)
    return batch.contiguous()


SETTINGS = [("faithful", fly, 640), ("faithful", wander, 640), ("quick", fly, 128), ("quick", wander, 128)]
"""The simulator's preset, the policy, and how many steps it flies before the rollout."""
OPERATIONS = ("save", "save_next", "load", "compress", "collect", "decompress")
"""What ``--against`` measures; see ``rollout_worker.py``."""


def arrays_of(batch: TensorDict) -> Arrays:
    """Return a batch as flat NumPy arrays."""
    return {
        "/".join((key,) if isinstance(key, str) else key): v.numpy()
        for key, v in batch.items(include_nested=True, leaves_only=True)
    }


def pickled(name: str, compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes]) -> Contender:
    """Pickle everything, and compress that."""
    return Contender(
        name,
        lambda batch: compress(pickle.dumps(arrays_of(batch), protocol=5)),
        lambda packed: pickle.loads(decompress(packed)),
    )


def each(name: str, encode: Callable[[NDArray[Any]], Any], decode: Callable[[Any, NDArray[Any]], Any]) -> Contender:
    """Compress array by array."""
    known: Arrays = {}

    def pack(batch: TensorDict) -> dict[str, Any]:
        known.update(arrays_of(batch))
        return {key: encode(array) for key, array in known.items()}

    def unpack(packed: dict[str, Any]) -> Arrays:
        return {key: np.asarray(decode(value, known[key])).reshape(known[key].shape) for key, value in packed.items()}

    return Contender(name, pack, unpack, lambda packed: sum(map(len, packed.values())))


def blosc2() -> Contender:
    """Blosc2 with its shuffle filter and zstd, as its documentation recommends for floats."""
    library: Any = importlib.import_module("blosc2")
    library.set_nthreads(1)

    def encode(array: NDArray[Any]) -> bytes:
        flat = np.ascontiguousarray(array).reshape(-1)
        packed: bytes = library.compress2(flat, codec=library.Codec.ZSTD, clevel=5, typesize=array.itemsize)
        return packed

    def decode(packed: bytes, array: NDArray[Any]) -> NDArray[Any]:
        return np.frombuffer(library.decompress2(packed), array.dtype)

    return each("Blosc2 (shuffle, zstd 5)", encode, decode)


def pcodec() -> Contender:
    """Pcodec, at its default level; flags as bytes."""
    library: Any = importlib.import_module("pcodec")
    standalone: Any = importlib.import_module("pcodec.standalone")

    def encode(array: NDArray[Any]) -> bytes:
        flat = np.ascontiguousarray(array).reshape(-1)
        flat = flat.view(np.uint8) if array.dtype == np.bool_ else flat
        config = library.ChunkConfig(enable_8_bit=array.itemsize == 1)
        packed: bytes = standalone.simple_compress(flat, config)
        return packed

    def decode(packed: bytes, array: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(standalone.simple_decompress(packed)).view(array.dtype)

    return each("pcodec", encode, decode)


def openzl() -> Contender:
    """OpenZL: exponents apart from sign and fraction for floats, its generic graph for the rest."""
    library: Any = importlib.import_module("openzl.ext")

    def encode(array: NDArray[Any]) -> bytes:
        flat = np.ascontiguousarray(array).reshape(-1)
        compressor = library.Compressor()
        generic = library.graphs.Compress()
        if array.dtype == np.float32:
            graph = library.nodes.Float32Deconstruct()(compressor, generic(compressor), generic(compressor))
        else:
            graph, flat = generic(compressor), flat.view(f"u{array.itemsize}")
        compressor.select_starting_graph(graph)
        context = library.CCtx()
        context.ref_compressor(compressor)
        context.set_parameter(library.CParam.FormatVersion, library.MAX_FORMAT_VERSION)
        packed: bytes = context.compress([library.Input(library.Type.Numeric, flat)])
        return packed

    def decode(packed: bytes, array: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(library.DCtx().decompress(packed)[0].content.as_nparray()).view(array.dtype)

    return each("OpenZL", encode, decode)


def ours(name: str, path: Path, *, verify: bool) -> Contender:
    """Our rollout file; how to pack each array is found out once, as a storage does."""
    codecs: dict[str, Codec] = {}
    return Contender(
        name,
        lambda batch: write_rollout(split_batch(batch), path, 1, {}, 1, codecs=codecs, verify=verify),
        load_rollout,
        lambda written: written.stat().st_size,
    )


def torch_save() -> Contender:
    """What people do who do not compress."""

    def save(batch: TensorDict) -> bytes:
        content = io.BytesIO()
        torch.save(batch.to_dict(), content)
        return content.getvalue()

    return Contender("torch.save", save, lambda packed: torch.load(io.BytesIO(packed), weights_only=True))


def contenders(path: Path) -> dict[str, Callable[[], Contender]]:
    """Return who takes part, by name; who needs a file writes this one."""
    zstd3 = (zstandard.ZstdCompressor(level=3).compress, zstandard.ZstdDecompressor().decompress)
    lz4_9 = (functools.partial(lz4.frame.compress, compression_level=9), lz4.frame.decompress)
    return {
        "slipstream": lambda: ours("slipstream", path, verify=False),
        "slipstream, checked": lambda: ours("slipstream, each chunk checked (as it is saved)", path, verify=True),
        "lz4": lambda: pickled("pickle + LZ4-9", *lz4_9),
        "zstd": lambda: pickled("pickle + zstd-3", *zstd3),
        "blosc2": blosc2,
        "pcodec": pcodec,
        "openzl": openzl,
        "torch.save": torch_save,
    }


def check_same(batch: TensorDict, decoded: Any) -> None:
    """Raise unless what came back is what went in, bit for bit."""
    if isinstance(decoded, dict) and "agents" in decoded:
        decoded = TensorDict(decoded, batch_size=batch.batch_size)
    found = decoded if isinstance(decoded, dict) else arrays_of(decoded)
    for key, array in arrays_of(batch).items():
        if found[key].tobytes() != array.tobytes():
            raise ValueError(f"{key} did not come back as it was")


def run_alone(name: str, batch: TensorDict, repetitions: int, path: Path, answer: Connection) -> None:
    """Measure one contender; runs in a process of its own."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, so that our threads gain nothing either
    try:
        contender = contenders(path)[name]()
    except ImportError as error:
        answer.send(f"{name} ({error})")
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    encode_s = decode_s = float("inf")
    for _ in range(repetitions):
        start = time.process_time()
        packed = contender.encode(batch)
        encode_s = min(encode_s, time.process_time() - start)
        start = time.process_time()
        decoded = contender.decode(packed)
        decode_s = min(decode_s, time.process_time() - start)
        check_same(batch, decoded)
        size = contender.size(packed)
        del packed, decoded
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    answer.send((contender.name, size, encode_s, decode_s, peak))


def table(title: str, batch: TensorDict, repetitions: int, left_out: list[str]) -> str:
    """Measure everyone on one batch."""
    raw = sum(value.nbytes for value in batch.values(include_nested=True, leaves_only=True))
    rows = []
    fork = multiprocessing.get_context("fork")
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        path = Path(folder) / "rollout.slip"
        for name in contenders(path):
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=run_alone, args=(name, batch, repetitions, path, sender))
            process.start()
            sender.close()
            try:
                result = receiver.recv()
            except EOFError:
                result = f"{name} (failed)"
            process.join()
            if isinstance(result, str):
                left_out.append(result)
            else:
                rows.append(result)
    lines = [
        f"**{title}** ({raw / 1e6:.1f} MB, {int(batch['next', 'done'].sum())} episodes end in it)",
        "",
        "| packed with | ratio | encode MB/s | decode MB/s | peak MB |",
        "|---|---:|---:|---:|---:|",
    ]
    for label, size, encode_s, decode_s, peak in rows:
        speeds = f"{raw / encode_s / 1e6:.0f} | {raw / decode_s / 1e6:.0f}"
        lines.append(f"| {label} | {raw / size:.2f} | {speeds} | {peak / 1e6:.0f} |")
    return "\n".join(lines)


class Learner:
    """A network of NavRL's size on NavRL's observations, trained on minibatches of a rollout."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.eyes = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, (5, 3), padding=(2, 1)),
            torch.nn.ELU(),
            torch.nn.Conv2d(4, 16, (5, 3), (2, 1), padding=(2, 1)),
            torch.nn.ELU(),
            torch.nn.Conv2d(16, 16, (5, 3), (2, 2), padding=(2, 1)),
            torch.nn.ELU(),
            torch.nn.Flatten(),
            torch.nn.Linear(288, 128),
            torch.nn.LayerNorm(128),
        )
        self.body = torch.nn.Sequential(
            torch.nn.Linear(128 + 50 + 8, 256), torch.nn.ELU(), torch.nn.Linear(256, 256), torch.nn.Linear(256, 4)
        )
        parameters = [*self.eyes.parameters(), *self.body.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=5e-4)

    def learn(self, steps: TensorDict) -> float:
        """Take one optimizer step; returns the loss."""
        seen = steps["agents", "observation"]
        features = [self.eyes(seen["lidar"]), seen["dynamic_obstacle"].flatten(1), seen["state"]]
        loss = (self.body(torch.cat(features, -1))[:, :3] - steps["agents", "action"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


def iteration(batch: TensorDict, epochs: int, source: Callable[[TensorDict], Any]) -> tuple[float, list[float]]:
    """Train on a batch; returns the seconds that took, and the losses."""
    learner = Learner()
    start = time.perf_counter()
    flat = source(batch).reshape(-1)
    losses = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        for index in grouped_indices(ENVS, STEPS, 16, 55, 2, generator):
            losses += [learner.learn(flat[index])]
    return time.perf_counter() - start, losses


def plans(batch: TensorDict, *, quick: bool) -> str:
    """Measure what plans B and C cost an iteration of training."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    epochs, rounds = (1, 1) if quick else (4, 2)
    iteration(batch, 1, lambda given: given)
    a_s, b_s, c_s = [], [], []
    with tempfile.TemporaryDirectory() as folder, RolloutStorage(folder) as storage:
        for number in range(rounds):
            seconds, losses = iteration(batch, epochs, lambda given: given)
            a_s.append(seconds)
            start = time.perf_counter()
            storage.save(batch, number)
            call_s = time.perf_counter() - start
            b_s.append(call_s + iteration(batch, epochs, lambda given: given)[0])
            storage.flush()
            seconds, packed_losses = iteration(batch, epochs, CompressedTensorDict)
            c_s.append(seconds)
            if packed_losses != losses:
                raise ValueError("training on packed data gave other losses")
        stats = storage.get_stats()
    packed = CompressedTensorDict(batch)
    held = packed.nbytes + packed._content.cache.max_bytes
    raw = packed.get_stats()["raw_bytes"]
    a, b, c = min(a_s), min(b_s), min(c_s)
    written_s = stats["write_s"] / stats["save_count"]
    return "\n".join(
        [
            f"**What plans cost** (one iteration: {epochs} x 16 minibatches of 2048 on a network of NavRL's size, "
            f"{a:.2f} s with plan A; losses of A and C are equal, bit for bit)",
            "",
            "| plan | iteration s | of plan A | memory of the batch MB |",
            "|---|---:|---:|---:|",
            f"| A, nothing | {a:.2f} | 1.000 | {raw / 1e6:.1f} |",
            f"| B, this rollout saved in the background | {b:.2f} | {b / a:.3f} | {raw / 1e6:.1f} |",
            f"| C, packed in memory | {c:.2f} | {c / a:.3f} | {held / 1e6:.1f} ({held / raw:.3f}), cache included |",
            "",
            "The same iteration takes a tenth longer or shorter from one run to the next on this machine. What plan B "
            f"can cost at most is known better: {1e3 * call_s:.0f} ms are the call, {written_s:.2f} s are spent in the "
            f"background, together {100 * (call_s + written_s) / a:.1f} % of an iteration if every rollout is saved, "
            f"{(call_s + written_s) / a:.2f} % if every hundredth is. On disk it is "
            f"{stats['stored_bytes'] / stats['save_count'] / 1e6:.2f} MB.",
        ]
    )


def run(*, quick: bool) -> str:
    """Measure everything and return the report."""
    left_out: list[str] = []
    parts = [machine(("numpy", "torch", *PEERS))]
    batch = None
    for preset, policy, warm_up in SETTINGS[2:3] if quick else SETTINGS:
        batch = collect(preset, policy, warm_up)
        who = "a policy that flies to its goal" if policy is fly else "a policy that wanders"
        parts.append(table(f"{preset.capitalize()} simulator, {who}", batch, 2 if quick else 8, left_out))
        if preset == "quick" and policy is fly:
            costs = plans(batch, quick=quick)
    parts.append(costs)
    if left_out:
        parts.append(f"Left out: {', '.join(sorted(set(left_out)))}.")
    return "\n\n".join(parts)


def compare(other: Path, *, quick: bool) -> None:
    """Measure this checkout and another one in turns; prints a Markdown table of ratios of CPU time."""
    num_rounds = 9 if quick else 25
    settings = SETTINGS[2:3] if quick else SETTINGS
    worker = Path(__file__).with_name("rollout_worker.py")
    print("| rollout | threads | operation | ms | times as fast as the other | size, of the other's |")
    print("|---|---:|---|---:|---:|---:|")
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=in_memory) as name:
        folder = Path(name)
        for preset, policy, warm_up in settings:
            path = folder / "batch.pt"
            torch.save(collect(preset, policy, warm_up), path)
            for threads in (1, len(os.sched_getaffinity(0))):
                new = Checkout(Path(__file__).parents[1], worker, path, folder, threads)
                old = Checkout(other, worker, path, folder, threads)
                for operation in OPERATIONS:
                    pairs = alternate(new, old, operation, num_rounds)
                    speed, low, high = interval([theirs["seconds"] / ours["seconds"] for ours, theirs in pairs])
                    best_ms = 1e3 * min(ours["seconds"] for ours, _ in pairs)
                    ours, theirs = pairs[-1]
                    size = f"{ours['bytes'] / theirs['bytes']:.4f}" if theirs["bytes"] else ""
                    what = f"| {preset}, {policy.__name__} | {threads} | {operation} | {best_ms:.1f} "
                    print(f"{what}| {speed:.2f} ({low:.2f} to {high:.2f}) | {size} |", flush=True)
                new.close()
                old.close()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one rollout, few repetitions")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the report into a page, between its markers")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with a checkout of another commit")
    arguments = parser.parse_args()
    if arguments.against:
        compare(arguments.against, quick=arguments.quick)
        return
    report = run(quick=arguments.quick)
    print(report)
    if arguments.write:
        write_section(arguments.write, "rollout", report)


if __name__ == "__main__":
    main()
