"""The training whose state is saved: a network that learns to follow another one, with Adam."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

THREADS = 2

Lock = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Size:
    """How large the network is, and how often to measure.

    Attributes:
        name: What tables call it.
        widths: Of the layers.
        passes: Forward passes per rollout.
        batch: Rows per forward pass of a rollout.
        rounds: How many rounds to measure. Every saver has one turn per round.
        saves: Saves per turn, while training continues.
        quiet: Iterations without a save, before and after each save.
        cpu_saves: Saves and loads per turn without training, to measure their CPU time.
        probes_gil: Whether to measure for how long a save keeps other Python threads from running.
    """

    name: str
    widths: tuple[int, ...]
    passes: int
    batch: int
    rounds: int
    saves: int
    quiet: int
    cpu_saves: int
    probes_gil: bool = False


class Training:
    """Rollouts and optimizer steps, with saves in between.

    Args:
        widths: Of the layers.
        passes: Forward passes per rollout.
        batch: Rows per forward pass of a rollout.
        num_frozen: How many layers, from the first, do not learn.
    """

    def __init__(self, widths: tuple[int, ...], passes: int = 1, batch: int = 64, num_frozen: int = 0) -> None:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            linear = torch.nn.Linear(inputs, outputs)
            linear.requires_grad_(len(layers) // 2 >= num_frozen)
            layers += [linear, torch.nn.ELU()]
        self.network = torch.nn.Sequential(*layers[:-1])
        self.teacher = torch.nn.Sequential(
            torch.nn.Linear(widths[0], 128), torch.nn.Tanh(), torch.nn.Linear(128, widths[-1])
        )
        learning = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(learning, lr=3e-4)
        self.num_inputs = widths[0]
        self.passes = passes
        self.batch = batch
        self.iteration = 0

    @classmethod
    def of(cls, size: Size) -> Training:
        """Make the training of a size."""
        return cls(size.widths, size.passes, size.batch)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint contains: the tensors that are in use, not copies."""
        return {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self, lock: Lock = contextlib.nullcontext) -> None:
        """Learn from one batch; the lock is held while the state changes."""
        batch = torch.randn(64, self.num_inputs)
        with torch.no_grad():
            target = self.teacher(batch)
        loss = (self.network(batch) - target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        with lock():
            self.optimizer.step()

    def iterate(self, lock: Lock = contextlib.nullcontext) -> float:
        """Roll out, then take two optimizer steps; returns the seconds that took."""
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(self.passes):
                self.network(torch.randn(self.batch, self.num_inputs))
        for _ in range(2):
            self.step(lock)
        self.iteration += 1
        return time.perf_counter() - start


def flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a nested state by path."""
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    if isinstance(state, np.ndarray):
        return {prefix: torch.from_numpy(state)}
    found: dict[str, torch.Tensor] = {}
    if isinstance(state, Mapping):
        for key, value in state.items():
            path = str(key)
            if prefix:
                path = f"{prefix}/{key}"
            found |= flat(value, path)
    return found


def raw_bytes(state: Any) -> int:
    """Return how many bytes the tensors of a state take."""
    return sum(tensor.nbytes for tensor in flat(state).values())


def touch_pages(state: Any) -> None:
    """Read one number from every page of a state: a file that is only mapped has not been loaded yet."""
    for tensor in flat(state).values():
        tensor.detach().reshape(-1)[:: max(1, 4096 // tensor.itemsize)].sum()


def empty_like(state: Any) -> Any:
    """Return a nested state with the same structure and tensors of new memory, for peers that load in place."""
    if isinstance(state, torch.Tensor):
        return torch.empty_like(state)
    if isinstance(state, Mapping):
        return {key: empty_like(value) for key, value in state.items()}
    return copy.deepcopy(state)
