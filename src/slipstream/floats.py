"""Floating-point arithmetic that gives the same bits in every process.

``torch.set_flush_denormal(True)`` makes a thread, and the threads that it starts, replace denormal numbers by zero.
Training often runs that way, evaluation often does not. Whatever is stored must not depend on it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

# Half of the smallest normal number is denormal.
_SMALLEST = np.finfo(np.float32).smallest_normal
_HALF = np.float32(0.5)

# More than the floating-point environment takes on any platform.
_ENVIRONMENT_BYTES = 512
# `FE_DFL_ENV` of the C libraries on Linux.
_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)


@contextlib.contextmanager
def ieee_arithmetic() -> Iterator[None]:
    """Compute with denormal numbers inside the block, on this thread, even if the thread flushes them to zero.

    Costs a few microseconds where nothing has to be changed.

    Raises:
        RuntimeError: If the thread flushes denormal numbers, and this platform cannot change that.

    Example:
        >>> with ieee_arithmetic():
        ...     print(float("5e-324"))
        5e-324
    """
    if not _flushes_denormals():
        yield
        return
    environment = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    library: Any = ctypes.CDLL(None)
    try:
        library.fegetenv(environment)
        library.fesetenv(_DEFAULT_ENVIRONMENT)
    except AttributeError:
        # A C library without these functions: the check below raises.
        pass
    else:
        try:
            if not _flushes_denormals():
                yield
                return
        finally:
            library.fesetenv(environment)
    raise RuntimeError("denormal numbers are flushed to zero here; call torch.set_flush_denormal(False) first")


def _flushes_denormals() -> bool:
    """Return whether this thread takes denormal numbers, as operands or as results, for zero."""
    return bool(_SMALLEST * _HALF == 0)
