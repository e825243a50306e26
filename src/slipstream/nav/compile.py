"""``torch.compile`` where it pays and works, and plain execution where it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from slipstream.nav.config import CompileMode

logger = logging.getLogger(__name__)

WORTHWHILE_ENVS = 256  # fewer do not make up for the seconds that compiling takes

P = ParamSpec("P")
R = TypeVar("R")


_broken = False  # one failure in a process is enough to know
_is_announced = False  # one message for all functions of the simulation


def maybe_compiled(
    function: Callable[P, R], mode: CompileMode, num_envs: int, *, dynamic: bool = False
) -> Callable[P, R]:
    """Return a function that does the same, compiled on its first call if the mode says so.

    Args:
        function: A pure function of tensors: it may be called a second time with the same arguments.
        mode: ``true``: compile, and pass errors on. ``false``: do not. ``auto``: compile if there are enough
            environments; if that fails, log one sentence and run the function as it is from then on.
        num_envs: How many environments it works on.
        dynamic: Whether its shapes change from call to call.

    Returns:
        The function itself, or a wrapper around it.
    """
    if mode == "false" or (mode == "auto" and num_envs < WORTHWHILE_ENVS):
        return function
    if mode == "true":
        return _announced(torch.compile(function, dynamic=dynamic))
    return _with_fallback(function, dynamic)


def _announced(compiled: Callable[P, R]) -> Callable[P, R]:
    """Return a compiled function that announces its first call."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _announce()
        return compiled(*args, **kwargs)

    return call


def _announce() -> None:
    """Log that the compiler runs, because it is silent. Compiled code is cached, so later trainings start sooner."""
    global _is_announced  # noqa: PLW0603 - the functions of a process are compiled one after another
    if not _is_announced:
        _is_announced = True
        logger.info("compiling the simulation, about 90 s the first time; env.compile=false trains without")


def _with_fallback(function: Callable[P, R], dynamic: bool) -> Callable[P, R]:
    compiled: Callable[P, R] | None = None

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        global _broken  # noqa: PLW0603 - a compiler is broken for the whole process
        if _broken:
            return function(*args, **kwargs)
        _announce()
        try:
            compiled = compiled or torch.compile(function, dynamic=dynamic)
            return compiled(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - compilers fail in every way
            result = function(*args, **kwargs)  # if the call itself was wrong, it fails here, and that is passed on
            _broken = True
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            logger.warning("torch.compile does not work here, so the simulation runs without it: %s", reason)
            return result

    return call
