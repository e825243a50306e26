"""One process of one contender of `remote.py`: answers each line of input with a line of JSON.

python remote_worker.py METHOD PRESET ACTORS DRONES STEPS ADDRESS INTERFACE

A line is a number of rounds to collect, ``size`` for the size of an actor's answer, ``packing`` for what packing takes,
or ``during``, ``between`` or ``never`` for when to kill an actor: in the middle of a rollout, between two, or not at
all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import torch

from slipstream import NavigationEnv, NavRLPolicy, RayDataCollector, SerialCollector, pack_rollout, unpack_rollout
from slipstream.nav.frame import velocity_from_unit
from slipstream.train.drones import shard_navigation
from slipstream.train.settings import TrainSettings, compose_settings


def make_env(settings: TrainSettings, shard: int) -> NavigationEnv:
    """Return the drones of one shard, as `slipstream train` has them."""
    return NavigationEnv(shard_navigation(settings, shard))


class Contender:
    """What all contenders share: a policy whose weights change before each round, as by an update.

    Args:
        settings: The settings of a run.
        actors: The number of actors, each with one shard.
        address: Where Ray is.
    """

    def __init__(self, settings: TrainSettings, actors: int, address: str) -> None:
        self.settings = settings
        self.actors = actors
        self.address = address
        self.make_env = functools.partial(make_env, settings)
        torch.manual_seed(0)
        self.policy = NavRLPolicy(action_map=velocity_from_unit)
        self.num_steps = settings.algo.training_frame_num
        self.rounds: Iterator[Any] = self.start()

    def start(self) -> Iterator[Any]:
        """Return what yields rounds."""
        raise NotImplementedError

    def pids(self) -> list[int]:
        """Return the processes of the actors."""
        return []

    def answer_bytes(self) -> int:
        """Return the size of one actor's answer."""
        return 0

    def stats(self) -> dict[str, float]:
        """Return bytes received and sent so far, where they are counted."""
        return {}

    def next(self) -> Any:
        """Change the weights, and return the next round."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(1e-6 * torch.randn_like(parameter))
        return next(self.rounds)


class Serial(Contender):
    """`SerialCollector` in this process, with as many threads as there would be actors."""

    def start(self) -> Iterator[Any]:
        """Return what yields rounds."""
        torch.set_num_threads(self.actors)
        self.settings.dist.shards = 1
        return iter(SerialCollector(self.make_env(0), self.policy, self.num_steps))


class Ours(Contender):
    """`RayDataCollector`."""

    def start(self) -> Iterator[Any]:
        """Return what yields rounds."""
        self.collector = RayDataCollector(
            self.make_env, self.policy, self.num_steps, shards=self.actors, actors=self.actors, address=self.address
        )
        return iter(self.collector)

    def pids(self) -> list[int]:
        """Return the processes of the actors."""
        return [actor["pid"] for actor in self.collector.describe_actors()]

    def answer_bytes(self) -> int:
        """Return the size of one actor's answer."""
        before = self.collector.get_stats()["bytes_received"]
        self.next()
        return int(self.collector.get_stats()["bytes_received"] - before) // self.actors

    def stats(self) -> dict[str, float]:
        """Return bytes received and sent so far, and orders collected again."""
        stats = self.collector.get_stats()
        return {name: stats[name] for name in ("bytes_received", "bytes_sent", "redone", "duplicates")}


class TorchRL(Contender):
    """TorchRL's `RayCollector`, which sends weights after each batch."""

    def start(self) -> Iterator[Any]:
        """Return what yields rounds."""
        from torchrl.collectors.distributed import RayCollector  # noqa: PLC0415 - takes a while

        self.collector = RayCollector(
            [functools.partial(self.make_env, shard) for shard in range(self.actors)],
            self.policy,
            frames_per_batch=self.settings.env.num_envs * self.num_steps,
            total_frames=10**9,
            sync=True,
            update_after_each_batch=True,
            trust_policy=True,
            num_collectors=self.actors,
            remote_configs={"num_cpus": 1},
            ray_init_config={"address": self.address, "log_to_driver": False},
        )
        # Connects what sends weights.
        self.collector.update_policy_weights_()
        return iter(self.collector)

    def pids(self) -> list[int]:
        """Return the processes of the actors."""
        import ray  # noqa: PLC0415 - only some contenders need it

        calls = [remote.__ray_call__.remote(_pid) for remote in self.collector.remote_collectors]
        return [int(pid) for pid in ray.get(calls)]

    def answer_bytes(self) -> int:
        """Return the size of one actor's answer, which is in Ray's object store."""
        import ray  # noqa: PLC0415 - only some contenders need it
        from ray.experimental import get_object_locations  # noqa: PLC0415 - only here

        reference = self.collector.remote_collectors[0].next.remote()
        ray.wait([reference])
        return int(get_object_locations([reference])[reference]["object_size"])


def packing(contender: Contender) -> dict[str, float]:
    """Return what packing one actor's rollout takes on one thread, and how many bytes it saves."""
    batch = contender.next()
    rollout = batch[: len(batch) // contender.actors].clone()
    codecs: dict[str, Any] = {}
    packs = []
    unpacks = []
    packed = b""
    for _ in range(9):
        began = time.perf_counter()
        packed = pack_rollout(rollout, codecs=codecs, threads=1)
        packs.append(time.perf_counter() - began)
        began = time.perf_counter()
        unpack_rollout(packed)
        unpacks.append(time.perf_counter() - began)
    saved = rollout.bytes() - len(packed)
    return {"pack_s": statistics.median(packs), "unpack_s": statistics.median(unpacks), "saved_bytes": saved}


METHODS: dict[str, type[Contender]] = {"serial": Serial, "slipstream": Ours, "torchrl": TorchRL}


def _pid(_: Any) -> int:
    return os.getpid()


def wire_bytes(interface: str) -> tuple[int, int]:
    """Return how many bytes an interface has received and sent; 0 if there is none of that name."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    return 0, 0


def collect(contender: Contender, number: int, interface: str) -> dict[str, Any]:
    """Collect rounds, and return what that took."""
    stats = contender.stats()
    received, sent = wire_bytes(interface)
    began = time.perf_counter()
    frames = 0
    for _ in range(number):
        frames += contender.next().numel()
    seconds = time.perf_counter() - began
    now_received, now_sent = wire_bytes(interface)
    counted = {name: value - stats[name] for name, value in contender.stats().items()}
    weights = sum(tensor.nbytes for tensor in contender.policy.state_dict().values())
    return {
        "seconds": seconds,
        "frames": frames,
        "wire_received": now_received - received,
        "wire_sent": now_sent - sent,
        "weights": weights,
        **counted,
    }


def survive(contender: Contender, moment: str) -> dict[str, Any]:
    """Kill an actor with SIGKILL, and return what happens to the rounds after that."""
    digests = []
    usual_s = 0.0
    for _ in range(3):
        began = time.perf_counter()
        digests.append(digest(contender.next()))
        usual_s = time.perf_counter() - began
    victim = contender.pids()[0]
    if moment == "during":
        threading.Timer(usual_s / 3, os.kill, (victim, signal.SIGKILL)).start()
    elif moment == "between":
        os.kill(victim, signal.SIGKILL)
    answer: dict[str, Any] = {"usual_s": usual_s}
    began = time.perf_counter()
    try:
        digests.append(digest(contender.next()))
    except Exception as error:  # noqa: BLE001 - whatever it is, is what happens
        answer["raised"] = type(error).__name__
        answer["again"] = try_again(contender)
    answer["after_s"] = time.perf_counter() - began
    if "raised" not in answer:
        digests += [digest(contender.next()), digest(contender.next())]
    return {**answer, "digests": digests, **contender.stats()}


def try_again(contender: Contender) -> str:
    """Return what happens when more is asked for after an exception."""
    try:
        contender.rounds = iter(contender.collector)  # type: ignore[attr-defined]
        contender.next()
    except Exception as error:  # noqa: BLE001 - whatever it is, is what happens
        return f"raises `{type(error).__name__}`"
    return "collects"


def digest(batch: Any) -> str:
    """Return a digest of what was observed and done."""
    found = hashlib.sha256()
    for name in ("observation", "action"):
        part = batch["agents"][name]
        tensors = [part] if isinstance(part, torch.Tensor) else [part[key] for key in sorted(part.keys())]
        for tensor in tensors:
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def say(answer: dict[str, Any]) -> None:
    """Print a line."""
    print(json.dumps(answer), flush=True)


def main(method: str, preset: str, numbers: Sequence[int], address: str, interface: str) -> None:
    """Serve."""
    warnings.filterwarnings("ignore")
    actors, drones, steps = numbers
    overrides = [
        f"preset={preset}",
        f"env.num_envs={drones}",
        f"algo.training_frame_num={steps}",
        f"dist.shards={actors}",
        "env.compile=false",
    ]
    contender = METHODS[method](compose_settings(overrides), actors, address)
    say({"pid": os.getpid()})
    commands: dict[str, Callable[[], dict[str, Any]]] = {
        "size": lambda: {"answer_bytes": contender.answer_bytes()},
        "packing": lambda: packing(contender),
        "during": lambda: survive(contender, "during"),
        "between": lambda: survive(contender, "between"),
        "never": lambda: survive(contender, "never"),
    }
    for line in sys.stdin:
        command = line.strip()
        if command in commands:
            say(commands[command]())
        else:
            say(collect(contender, int(command), interface))
    # Ray's own clean-up at exit waits for actors that may be gone.
    os._exit(0)


if __name__ == "__main__":
    _, chosen, flown, *rest = sys.argv
    main(chosen, flown, [int(number) for number in rest[:3]], rest[3], rest[4])
