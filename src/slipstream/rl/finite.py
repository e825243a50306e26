"""A check for infinities and NaNs, before they reach parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slipstream.errors import NonFiniteError


def require_finite(where: str, quantities: Mapping[str, torch.Tensor], outcome: str) -> None:
    """Raise unless all quantities are finite. Waits for the device they are on, once.

    Args:
        where: Which part of which update, for the message.
        quantities: Numbers by name, with any shape.
        outcome: What was left as it was, for the message.

    Raises:
        NonFiniteError: Names those that are not finite, and gives the others for comparison.
    """
    sound = torch.stack([tensor.detach().isfinite().all() for tensor in quantities.values()])
    if bool(sound.all()):
        return
    bad = [name for name, fine in zip(quantities, sound.tolist(), strict=True) if not fine]
    shown = ", ".join(f"{name} {_summary(tensor)}" for name, tensor in quantities.items())
    verb = "is" if len(bad) == 1 else "are"
    raise NonFiniteError(f"{where}: {', '.join(bad)} {verb} not finite ({shown}); {outcome}")


def _summary(tensor: torch.Tensor) -> str:
    if tensor.numel() == 1:
        return f"{float(tensor):.4g}"
    return f"has {int((~tensor.isfinite()).sum())} of {tensor.numel()} not finite"
