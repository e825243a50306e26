"""Parts of a training loop for tests, and what is to be known of them before and after a load."""

import collections
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import StateMismatchError, TrainingState


def content(value: Any) -> Any:
    """Return the bits of a nested value, comparable with ``==``; unlike numbers, NaN equals NaN."""
    if isinstance(value, torch.Tensor):
        if torch.nn.parameter.is_lazy(value):
            return "uninitialized"
        dense = value.detach().to_dense()
        memory = dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (str(value.dtype), str(value.layout), tuple(value.shape), value.requires_grad, memory)
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return [(key, content(member)) for key, member in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return [type(value).__name__, *map(content, value)]
    return value


def identities(part: Any) -> list[Any]:
    """Return the ids of everything in a part that others may refer to."""
    if isinstance(part, torch.nn.Module):
        return [id(tensor) for tensor in [*part.parameters(), *part.buffers()]]
    if isinstance(part, torch.optim.Optimizer):
        return [id(parameter) for group in part.param_groups for parameter in group["params"]]
    if isinstance(part, dict):
        return [id(part), *map(id, part.values())]
    if isinstance(part, Agent):
        return [id(part.table), id(part.history), *identities(part.net)]
    return []


def everything(parts: dict[str, Any]) -> Any:
    """Return the bits and identities of all parts and of the global random states."""
    found = []
    for name, part in parts.items():
        attributes: Any = None
        if isinstance(part, torch.nn.Module):
            # More than the state dict: also buffers that are not persistent.
            attributes = content({**dict(part.named_parameters()), **dict(part.named_buffers())})
        found.append((name, content(TrainingState(rng=False, part=part).state_dict()), identities(part), attributes))
    found.append(("rng", content(TrainingState().state_dict()), [], None))
    return found


def assert_nothing_changes(
    parts: dict[str, Any], state: Any, match: str = "does not fit", **options: Any
) -> StateMismatchError:
    """Load a state that does not fit, and return the error."""
    before = everything(parts)
    with pytest.raises(StateMismatchError, match=match) as caught:
        TrainingState(**options, **parts).load_state_dict(state)
    assert everything(parts) == before
    assert "\n" not in str(caught.value)
    return caught.value


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    width = next(model.parameters()).shape[-1]
    for _ in range(num_steps):
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Agent:
    """A part of a user's own, which assigns some attributes and writes into others."""

    fails_at = -1

    def __init__(self) -> None:
        self.net = torch.nn.Linear(2, 2)
        self.table = torch.randn(3)
        self.array = np.random.rand(4)
        self.history = [random.random()]
        self.recent = collections.deque([1.0, random.random()], maxlen=2)
        self.settings = {"rate": {"now": random.random()}}
        self.count = random.randrange(1000)

    def state_dict(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "fails_at"}
        return {**state, "net": self.net.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steps: list[Callable[[], Any]] = [
            functools.partial(self.net.requires_grad_, False),
            functools.partial(self.net.load_state_dict, state["net"], assign=True),
            functools.partial(self.net.requires_grad_, True),
            functools.partial(self.table.copy_, state["table"]),
            functools.partial(setattr, self, "table", state["table"]),
            functools.partial(np.copyto, self.array, state["array"]),
            functools.partial(self.history.append, 1.0),
            functools.partial(setattr, self, "history", state["history"]),
            functools.partial(self.recent.extend, state["recent"]),
            functools.partial(self.settings["rate"].update, state["settings"]["rate"]),
            functools.partial(setattr, self, "count", state["count"]),
            functools.partial(setattr, self, "added", 1),
            functools.partial(delattr, self, "added"),
            # Loading code that builds something may draw random numbers.
            functools.partial(torch.rand, 3),
            functools.partial(np.random.rand, 3),
            random.random,
        ]
        for number, step in enumerate(steps):
            if number == self.fails_at:
                raise KeyError("weights")
            step()


class Locked:
    """A part that cannot be copied attribute by attribute, because it holds a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.first = torch.randn(2)
        self.second = random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.lock:
            self.first.copy_(state["first"])
            if not isinstance(state["second"], float):
                raise TypeError("second is not a float")
            self.second = state["second"]


class Extra(torch.nn.Module):
    """A module with state besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.note = str(random.random())
        self.last = torch.nn.BatchNorm1d(2)
        self.scratch = torch.nn.Buffer(torch.randn(2), persistent=False)
        self.first.bias.requires_grad_(False)

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state
        self.scratch.add_(1)
        self.first.bias.requires_grad_(True)
        if state == "broken":
            raise ValueError("broken")


class HalfWay(torch.optim.Adam):
    """An optimizer whose loading code is not torch's and fails in the middle."""

    fails = False

    def load_state_dict(self, state_dict: Any) -> None:
        for moments in self.state.values():
            moments["exp_avg"].zero_()
        if self.fails:
            self.param_groups[0]["lr"] = 7.0
            self.state.clear()
            raise RuntimeError("half way")
        super().load_state_dict(state_dict)


def make_part(kind: str) -> Any:
    """Return a part with random content."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    adam = torch.optim.Adam(model.parameters(), lr=0.1 * random.random())
    half_way = HalfWay(model.parameters())
    if kind in ("trained", "schedule"):
        train(model, adam)
    elif kind == "optimizer":
        train(model, half_way)
    makers: dict[str, Callable[[], Any]] = {
        "module": lambda: model,
        "fresh": lambda: adam,
        "trained": lambda: adam,
        "schedule": lambda: torch.optim.lr_scheduler.StepLR(adam, random.randrange(1, 9)),
        "counters": lambda: {"step": random.random(), "alpha": torch.nn.Parameter(torch.randn(1)), "runs": [[1, 2]]},
        "noise": lambda: torch.Generator().manual_seed(random.randrange(1000)),
        "arena": lambda: np.random.default_rng(random.randrange(1000)),
        "agent": Agent,
        "locked": Locked,
        "extra": Extra,
        "optimizer": lambda: half_way,
        "nested": lambda: TrainingState(agent=Agent(), model=model, optimizer=adam, counters={"n": random.random()}),
    }
    return makers[kind]()


def fail_at(agent: Any, state: Any, point: int) -> Any:
    agent.fails_at = point
    return state


def fail_always(optimizer: Any, state: Any, point: int) -> Any:
    optimizer.fails = True
    return state


def lose(key: str, part: Any, state: Any, point: int) -> Any:
    return {name: value for name, value in state.items() if name != key}


def replace(key: str, value: Any, part: Any, state: Any, point: int) -> Any:
    return {**state, key: value}


def shorten(part: Any, state: Any, point: int) -> Any:
    return state[:point]


def exchange(state: Any, part: Any, old: Any, point: int) -> Any:
    return state


# How to make each kind of part fail: by its code, or by its state.
FAILURES: dict[str, Callable[[Any, Any, int], Any]] = {
    "module": functools.partial(replace, "2.bias", torch.zeros(2, dtype=torch.float64)),
    "fresh": functools.partial(replace, "param_groups", []),
    "trained": functools.partial(replace, "state", {9: {}}),
    "schedule": functools.partial(lose, "last_epoch"),
    "counters": functools.partial(exchange, [1, 2]),
    "noise": shorten,
    "arena": functools.partial(exchange, np.random.MT19937(1).state),
    "agent": fail_at,
    "locked": functools.partial(replace, "second", "text"),
    "extra": functools.partial(replace, "_extra_state", "broken"),
    "optimizer": fail_always,
    "nested": functools.partial(lose, "counters"),
}
