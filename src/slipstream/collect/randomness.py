"""Random numbers for one thread: generators that other threads do not draw from.

torch has one default generator per device and process. If two threads draw from it, then the scheduler decides which
thread gets which numbers, and no run can be repeated.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)


class PrivateRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, make this thread draw from private generators, one per device.

    Intercepts every operator that this thread runs. An operator that draws random numbers without an explicit generator
    gets a private one. Other threads are not affected. Not intercepted: random numbers inside compiled code, CUDA
    graphs and fused CUDA kernels (dropout, attention), and generators outside torch, such as ``random`` and
    ``numpy.random``.

    Args:
        seed: Seed of the generators.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions stay compiled, including those of other threads."""
        return True

    def seed(self, seed: int) -> None:
        """Restart all generators. Their numbers differ from those after ``torch.manual_seed(seed)``."""
        generator = torch.Generator().manual_seed(seed)
        self._seed = draw_seed(generator)
        self._generators.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the generators, as copies."""
        states = {device: generator.get_state() for device, generator in self._generators.items()}
        return {"seed": self._seed, "generators": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the positions that `state_dict` returned."""
        self._seed = state["seed"]
        self._generators.clear()
        for device, position in state["generators"].items():
            # A checkpoint may have been loaded onto a GPU, but positions are always CPU tensors.
            self._generators[device] = torch.Generator(device).set_state(position.cpu())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        draw = _find_generator_argument(func)
        if draw is None:
            return func(*args, **kwargs)
        operator, index = draw
        device = _device_of(args, kwargs)
        # Meta tensors have no data, and an explicit generator is the caller's decision.
        if device.type == "meta" or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if index < len(args):
            if args[index] is None:
                args = (*args[:index], self._generator(device), *args[index + 1 :])
            return operator(*args, **kwargs)
        return operator(*args, **{**kwargs, "generator": self._generator(device)})

    def _generator(self, device: torch.device) -> torch.Generator:
        if device.type == "cuda":
            # "cuda" and "cuda:0" are one device. Two generators with the same seed would repeat each other's numbers.
            device = with_index(device)
        name = str(device)
        if name not in self._generators:
            self._generators[name] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[name]


@contextlib.contextmanager
def warn_of_global_draws() -> Iterator[None]:
    """Log a warning if any thread draws from torch's global generator inside the block."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        logger.warning(
            "The environment draws from torch's global generator, as training does: runs are not reproducible. "
            "Give it a private generator, or pass rng='all'."
        )


def with_index(cuda: torch.device) -> torch.device:
    """Return a CUDA device with its index: ``cuda`` is the current one."""
    return torch.device("cuda", torch.cuda.current_device() if cuda.index is None else cuda.index)


def seed_global(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, those of all devices included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed as ``DataLoader`` does: from this generator, by default from the global one."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


@functools.cache
def _find_generator_argument(func: Any) -> tuple[Any, int] | None:
    """Return the overload of a random operator that takes a generator, and the argument's position.

    Returns:
        None if the operator draws no random numbers. The position is `sys.maxsize` if the argument is keyword-only.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return None
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func, names.index("generator")
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    # Most random operators have a second overload that differs only in its generator.
    for overload in func.overloadpacket.overloads():
        sibling = getattr(func.overloadpacket, overload)
        arguments = [argument for argument in sibling._schema.arguments if argument.name != "generator"]
        if len(arguments) < len(sibling._schema.arguments) and _signature(arguments) == _signature(
            func._schema.arguments
        ):
            return sibling, sys.maxsize
    return None


def _signature(arguments: Sequence[Any]) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in arguments]


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.get_default_device()
