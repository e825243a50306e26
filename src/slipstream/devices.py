"""Check that a device exists on this machine."""

from __future__ import annotations

from typing import overload

import torch

from slipstream.errors import ConfigurationError


@overload
def resolve_device(device: torch.device | str) -> torch.device: ...
@overload
def resolve_device(device: torch.device | str | None) -> torch.device | None: ...
def resolve_device(device: torch.device | str | None) -> torch.device | None:
    """Return a device after checking that tensors can be put on it.

    Constructors call this: otherwise the first batch would fail, perhaps in another thread.

    Args:
        device: A device; ``auto`` is the current CUDA device if there is one, else the CPU. None stays None.

    Raises:
        ConfigurationError: If there is no such device on this machine.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    if device is None:
        return None
    if device == "auto":
        device = "cpu"
        if torch.cuda.is_available():
            device = "cuda"
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    # Torch without CUDA raises an AssertionError, and an unknown name a RuntimeError.
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"device {str(device)!r} is not available: {reason}") from error
    return resolved
