"""Which steps of an episode a window consists of: offsets per key, in steps or in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checks import require_count, require_number, require_positive
from slipstream.errors import ConfigurationError

MAX_OFFSET = 1 << 31


def offsets_of_timestamps(
    delta_timestamps: Mapping[str, Sequence[float]], fps: float | None, tolerance_s: float
) -> dict[str, list[int]]:
    """Convert LeRobot's ``delta_timestamps`` to offsets in steps.

    Args:
        delta_timestamps: Seconds relative to the current step, by key.
        fps: Steps per second of the recording.
        tolerance_s: How far a time may be from the nearest step, in seconds.

    Raises:
        ConfigurationError: If there is no frequency, or a time is further from all steps than the tolerance.

    Example:
        >>> offsets_of_timestamps({"image": [-0.1, 0.0]}, fps=20, tolerance_s=1e-4)
        {'image': [-2, 0]}
    """
    if fps is None:
        raise ConfigurationError("delta_timestamps are in seconds: pass the steps per second as fps=")
    fps = _plain(fps)
    require_positive("fps", fps)
    require_number("tolerance_s", tolerance_s, 0)
    offsets = {}
    for key, times in _items("delta_timestamps", delta_timestamps):
        offsets[key] = [_step_at(key, time, fps, tolerance_s) for time in _listed(key, times)]
    return offsets


def _step_at(key: str, time: Any, fps: float, tolerance_s: float) -> int:
    """Return the step at a time."""
    require_number(f"the time in delta_timestamps of {key!r}", _plain(time), -MAX_OFFSET / fps, MAX_OFFSET / fps)
    step = round(float(time) * fps)
    if abs(float(time) * fps - step) / fps > tolerance_s:
        raise ConfigurationError(
            f"delta_timestamps of {key!r} contain {float(time):g} s, which is no multiple of 1/{fps:g} s (to within "
            f"{tolerance_s:g} s); the nearest step is at {step / fps:g} s"
        )
    return step


def require_offsets(offsets: Mapping[str, Sequence[int]], keys: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Return offsets per key as arrays.

    Args:
        offsets: Offsets in steps relative to the current one, by key: a range, a list, an array.
        keys: Keys that exist.

    Raises:
        ConfigurationError: If there is no such key, or offsets are empty, not whole numbers, or too large.
    """
    found = {}
    for key, steps in _items("offsets", offsets):
        if key not in keys:
            raise ConfigurationError(f"offsets are given for {key!r}, but the keys are {', '.join(keys)}")
        numbers = [
            require_count(f"an offset of {key!r}", _plain(step), -MAX_OFFSET, MAX_OFFSET)
            for step in _listed(key, steps)
        ]
        if not numbers:
            raise ConfigurationError(f"offsets of {key!r} are empty, expected at least one, such as [0]")
        found[key] = np.array(numbers, np.int64)
    return found


def _items(name: str, values: Any) -> list[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{name} is a {type(values).__qualname__}, expected a dict by key")
    return list(values.items())


def _listed(key: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping):
        raise ConfigurationError(f"the window of {key!r} is {values!r}, expected a list of numbers")
    try:
        return list(values)
    except TypeError as error:
        raise ConfigurationError(f"the window of {key!r} is {values!r}, expected a list of numbers") from error


def _plain(value: Any) -> Any:
    """Return a scalar of an array or a tensor as a Python number, and everything else as it is."""
    if isinstance(value, np.generic | torch.Tensor):
        return value.item()
    return value


@dataclass(frozen=True)
class Steps:
    """Steps of a batch of windows.

    Attributes:
        numbers: Of each window the steps in its episode, ``[batch, steps]``; repeats the first or the last step where
            the window extends beyond the episode.
        is_pad: Where it does.
    """

    numbers: NDArray[np.int64]
    is_pad: NDArray[np.bool_]

    @classmethod
    def of(cls, current: NDArray[np.int64], lengths: NDArray[np.int64], offsets: NDArray[np.int64]) -> Steps:
        """Return the steps at some offsets.

        Args:
            current: Current step of each window.
            lengths: Length of the episode of each window.
            offsets: The offsets.
        """
        wanted = current[:, None] + offsets
        numbers = np.clip(wanted, 0, lengths[:, None] - 1)
        return cls(numbers, wanted != numbers)
