"""When collecting beside training pays: four kinds of simulator, one after the other and pipelined.

    python bench/pipelined.py                                               # print the tables
    python bench/pipelined.py --write docs/guides/pipelined-collection.md   # and put them into the page

Each case is calibrated so that collecting a batch and training on it take about as long, which is where pipelining can
gain most: at best half of the time. Torch runs with one thread, so that collecting and training have a core each, if
the machine has one to spare: on a shared one the ratios scatter, so each is shown with its range over the rounds. The
kinds differ in who holds Python's lock while a step is computed:

* elsewhere: the step is computed in another process or on a GPU; this one waits (here: sleeps).
* large tensors: a few operators on large tensors, which release the lock.
* small tensors: many operators on small tensors, which are Python for the most part.
* Python: no operators at all; the lock is held throughout.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from page import write_section
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

from slipstream import PipelinedDataCollector

STEPS = 8
BATCHES = 4
ROUNDS = 3
FEATURES = 16
Simulator = Callable[[torch.Tensor], None]


def elsewhere(_: torch.Tensor) -> None:
    """Wait for somebody else."""
    time.sleep(0.005)


def large_tensors(observation: torch.Tensor) -> None:
    """Do what takes a while and does not need Python."""
    wide = observation.repeat(1, 40)
    for _ in range(2):
        wide = (wide @ wide.T @ wide).tanh()


def small_tensors(observation: torch.Tensor) -> None:
    """Do many small things."""
    row = observation[0]
    for _ in range(300):
        row = (row * 0.5 + 0.1).clamp(0, 1)


def plain_python(_: torch.Tensor) -> None:
    """Hold the lock."""
    total = 0
    for number in range(100_000):
        total += number


class BenchEnv(EnvBase):  # type: ignore[misc, unused-ignore]
    """An environment that does nothing but take its time."""

    def __init__(self, num_envs: int, simulator: Simulator) -> None:
        super().__init__(batch_size=torch.Size([num_envs]))
        self.observation_spec = Composite(observation=Unbounded((num_envs, FEATURES)), shape=(num_envs,))
        self.action_spec = Unbounded((num_envs, 2))
        self.reward_spec = Unbounded((num_envs, 1))
        self.simulator = simulator

    def _reset(self, tensordict: Any = None, **_: Any) -> Any:
        return TensorDict({"observation": torch.zeros(*self.batch_size, FEATURES)}, self.batch_size)

    def _step(self, tensordict: Any) -> Any:
        observation = tensordict["observation"]
        self.simulator(observation)
        reward = torch.zeros(*self.batch_size, 1)
        return TensorDict(
            {"observation": observation.clone(), "reward": reward, "done": reward.bool()}, self.batch_size
        )

    def _set_seed(self, seed: int | None) -> None:
        """Need no seed."""


def make_policy() -> Any:
    """Return a policy that samples, of a size that is usual for robots."""
    split = nn.Sequential(nn.Linear(FEATURES, 256), nn.Tanh(), nn.Linear(256, 4))

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = split

        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean, spread = self.net(observation).chunk(2, -1)
            return mean, spread.exp()

    return ProbabilisticTensorDictSequential(
        TensorDictModule(Head(), in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal),
    )


def make_trainer(policy: Any) -> Any:
    """Return a function that trains for so many seconds or steps, and says how many steps that was."""
    critic = nn.Sequential(nn.Linear(FEATURES, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1))
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=1e-5)
    sample = torch.randn(256, FEATURES)

    def step() -> None:
        optimizer.zero_grad()
        mean, spread = policy[0].module(sample)
        (mean.square().mean() + spread.mean() + critic(sample).square().mean()).backward()
        optimizer.step()

    def train(seconds: float = 0.0, steps: int = 0) -> int:
        done, until = 0, time.perf_counter() + seconds
        while done < steps or time.perf_counter() < until:
            step()
            done += 1
        return done

    return train


class Case:
    """A simulator, a policy, and as much training per batch as collecting one takes."""

    def __init__(self, simulator: Simulator, num_envs: int) -> None:
        self.simulator = simulator
        self.num_envs = num_envs
        self.policy = make_policy()
        self.train = make_trainer(self.policy)
        self.train(steps=5)
        self.num_steps = 0
        self.num_steps = self.train(seconds=self.time_loop(0, "shared"))

    def make(self, prefetch_count: int, rng: Any) -> PipelinedDataCollector:
        """Return a collector that never ends."""
        base = Collector(
            BenchEnv(self.num_envs, self.simulator),
            self.policy,
            frames_per_batch=self.num_envs * STEPS,
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
        return PipelinedDataCollector(base, "cpu", prefetch_count, rng=rng)

    def time_loop(self, prefetch_count: int, rng: str, *, train: bool = False) -> float:
        """Return seconds per batch, with or without training on it."""
        num_steps = self.num_steps if train else 0
        iterator = iter(self.make(prefetch_count, rng))
        for _ in range(2 + prefetch_count):  # until it runs evenly
            next(iterator)
            self.train(steps=num_steps)
        began = time.perf_counter()
        for _ in range(BATCHES):
            next(iterator)
            self.train(steps=num_steps)
        return (time.perf_counter() - began) / BATCHES

    def time_training(self) -> float:
        """Return seconds per batch of training alone."""
        began = time.perf_counter()
        self.train(steps=BATCHES * self.num_steps)
        return (time.perf_counter() - began) / BATCHES

    def measure(self) -> dict[str, float]:
        """Return seconds per batch: collecting alone, training alone, one after the other, and pipelined."""
        seconds = {"collect": self.time_loop(0, "shared"), "train": self.time_training()}
        seconds["serial"] = self.time_loop(0, "shared", train=True)
        for rng in ("shared", "policy", "all"):
            seconds[f"collect, {rng}"] = self.time_loop(1, rng)
            seconds[f"pipelined, {rng}"] = self.time_loop(1, rng, train=True)
        return seconds


def ratios_of(seconds: dict[str, float]) -> list[float]:
    """Return one round's columns."""
    serial, alone = seconds["serial"], seconds["collect, shared"]
    return [
        seconds["collect"] / seconds["train"],
        max(seconds["collect"], seconds["train"]) / serial,
        *(seconds[f"pipelined, {rng}"] / serial for rng in ("shared", "policy", "all")),
        *(seconds[f"collect, {rng}"] / alone for rng in ("policy", "all")),
    ]


def report() -> str:
    """Measure all cases, and return a table."""
    torch.set_num_threads(1)
    lines = [
        "| the simulator computes | collect : train | at best | pipelined, `rng=shared` | `policy` | `all` | "
        "collecting alone with `policy` | with `all` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, simulator, num_envs in (
        ("elsewhere", elsewhere, 64),
        ("with large tensors", large_tensors, 256),
        ("with small tensors", small_tensors, 16),
        ("in Python", plain_python, 16),
    ):
        case = Case(simulator, num_envs)
        columns = zip(*(ratios_of(case.measure()) for _ in range(ROUNDS)), strict=True)
        cells = [f"{statistics.median(column):.2f} ({min(column):.2f}-{max(column):.2f})" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, one torch thread"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg()[:2])
    note = (
        f"Time per batch on {machine}: median and range of {ROUNDS} rounds of {BATCHES} batches; load of the machine "
        f"{load}. Columns 3 to 6 are ratios to one after the other in the same round (less is better, 1 is no gain), "
        "columns 7 and 8 to `rng=shared`."
    )
    return "\n".join([note, "", *lines, ""])


def main() -> None:
    """Print the table; write it into a page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the page whose section `pipelined` is replaced")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    text = report()
    print(text)
    if arguments.write:
        write_section(arguments.write, "pipelined", text)


if __name__ == "__main__":
    main()
