"""Keep `torch.compile` out of functions that it cannot trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Make a function that `torch.compile` calls instead of tracing into it: codecs and locks cannot be traced.

    Like ``torch.compiler.disable``, which takes seconds to import the compiler even if nothing is compiled.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        # Nothing is compiled in a process that has not imported the compiler.
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return call  # type: ignore[return-value]
