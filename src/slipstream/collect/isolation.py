"""What a collecting thread must have to itself: its random numbers, and the modes of tensordict.

Both are global to a process. torch draws from one default generator per device, so that two threads take turns at it as
the scheduler pleases, and neither sees the same numbers twice. tensordict keeps its modes (how to sample, whether to
skip what exists) in module variables, so that an evaluation in one thread would make a rollout in another
deterministic halfway through.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.collect.streams import side_stream

logger = logging.getLogger(__name__)


class PrivateRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, lets this thread draw from generators of its own, one per device.

    Sees every operator that this thread runs, and gives those that draw random numbers, and were not given a generator,
    one of these. Other threads are not concerned. Not seen: what compiled code, CUDA graphs and fused CUDA kernels
    (dropout, attention) draw inside, and what does not come from torch, such as ``random`` and ``numpy.random``.

    Args:
        seed: Of the generators.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions stay compiled, those of other threads too."""
        return True

    def seed(self, seed: int) -> None:
        """Start anew, with numbers that are not those of ``torch.manual_seed(seed)``."""
        generator = torch.Generator().manual_seed(seed)
        self._seed = draw_seed(generator)
        self._generators.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return where the generators are."""
        states = {device: generator.get_state() for device, generator in self._generators.items()}
        return {"seed": self._seed, "generators": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the generators were."""
        self._seed = state["seed"]
        self._generators = {
            device: torch.Generator(device).set_state(position) for device, position in state["generators"].items()
        }

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        draw = _that_takes_a_generator(func)
        if draw is None:
            return func(*args, **kwargs)
        operator, index = draw
        device = _device_of(args, kwargs)
        if device.type == "meta" or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if index < len(args):
            if args[index] is None:
                args = (*args[:index], self._generator(device), *args[index + 1 :])
            return operator(*args, **kwargs)
        return operator(*args, **{**kwargs, "generator": self._generator(device)})

    def _generator(self, device: torch.device) -> torch.Generator:
        name = str(device)
        if name not in self._generators:
            self._generators[name] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[name]


def make_environment(
    cuda: torch.device | None, randomness: PrivateRandomness | None
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what makes the context a collecting thread runs in: a stream, modes and maybe randomness of its own."""
    modes: dict[int, Any] = {}  # kept for a thread that goes on where another ended

    @contextlib.contextmanager
    def environment() -> Iterator[None]:
        with side_stream(cuda), own_modes(modes), randomness or contextlib.nullcontext():
            yield

    return environment


@contextlib.contextmanager
def warn_of_global_draws() -> Iterator[None]:
    """Log a warning if torch's global generator is used inside the block, by any thread."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        logger.warning(
            "The environment draws from torch's global generator, as training does: runs are not reproducible. "
            "Give it a private generator, or pass rng='all'."
        )


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Return a seed, drawn as ``DataLoader`` does: from this generator, by default the global one."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


@functools.cache
def _that_takes_a_generator(func: Any) -> tuple[Any, int] | None:
    """Return the form of a random operator that takes a generator, and at which place; None for all others."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func, names.index("generator")
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
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
    tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    return torch.get_default_device() if tensor is None else tensor.device


_thread = threading.local()
_installing = threading.Lock()


@contextlib.contextmanager
def own_modes(modes: dict[int, Any]) -> Iterator[None]:
    """Let tensordict's modes be this thread's own while the block lasts.

    A mode starts as what it was when this thread first looked at it.

    Args:
        modes: Where they are kept, for a thread that goes on where another ended.
    """
    _install()
    _thread.modes = modes
    try:
        yield
    finally:
        del _thread.modes


def _install() -> None:
    """Teach tensordict, once, that a thread may have modes of its own; without tensordict there is nothing to teach.

    tensordict offers no way to say so. All its modes are objects of one class. Besides, the decorator on its modules
    remembers the mode to go back to in itself, where another thread in the same method would find it.
    """
    kind: Any = getattr(sys.modules.get("tensordict.utils"), "_ContextManager", None)
    decorator: Any = getattr(sys.modules.get("tensordict.nn.utils"), "_set_skip_existing_None", None)
    with _installing:
        if kind is None or hasattr(kind, "shared_get_mode"):
            return
        get_mode, set_mode = kind.get_mode, kind.set_mode

        def get_own_mode(self: Any) -> Any:
            if torch.compiler.is_compiling() or not hasattr(_thread, "modes"):
                return get_mode(self)
            return _thread.modes.setdefault(id(self), get_mode(self))

        def set_own_mode(self: Any, value: Any) -> None:
            if torch.compiler.is_compiling() or not hasattr(_thread, "modes"):
                set_mode(self, value)
            else:
                _thread.modes[id(self)] = value

        previous = threading.local()
        if decorator is not None:
            decorator.prev = property(
                lambda self: previous.__dict__.get(str(id(self))),
                lambda self, value: previous.__dict__.__setitem__(str(id(self)), value),
            )
        kind.shared_get_mode = get_mode
        kind.get_mode, kind.set_mode = get_own_mode, set_own_mode
