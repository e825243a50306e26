"""Checks of settings. Each raises `ConfigurationError` with the name, the value and what was expected.

Example:
    >>> require_count("num_envs", 0)
    Traceback (most recent call last):
    ...
    slipstream.errors.ConfigurationError: num_envs is 0, expected a whole number of at least 1
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from typing import Any

from slipstream.errors import ConfigurationError


def require_count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Require a whole number: an int or a NumPy integer, but not a bool.

    Args:
        name: Name of the setting, for the message.
        value: What the user gave.
        least: The smallest number allowed.
        most: The largest number allowed. Unlimited by default.

    Returns:
        The number as an int.

    Raises:
        ConfigurationError: If the value is anything else.
    """
    # A bool is an int to Python, but num_envs=True is a mistake.
    if not isinstance(value, bool):
        # Every type of integer has __index__; floats, strings and arrays have none, or raise.
        with contextlib.suppress(TypeError):
            number = operator.index(value)
            if number >= least and (most is None or number <= most):
                return number
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ConfigurationError(f"{name} is {value!r}, expected a whole number {allowed}")


def require_positive(name: str, value: Any) -> None:
    """Require a finite int or float above 0, but not a bool.

    Args:
        name: Name of the setting, for the message.
        value: What the user gave.

    Raises:
        ConfigurationError: If the value is anything else.
    """
    if not _is_finite_number(value) or value <= 0:
        raise ConfigurationError(f"{name} is {value!r}, expected a number above 0")


def require_number(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Require a finite int or float, but not a bool, within a range that includes both ends.

    Args:
        name: Name of the setting, for the message.
        value: What the user gave.
        least: The smallest number allowed.
        most: The largest number allowed. Unlimited by default.

    Raises:
        ConfigurationError: If the value is anything else.
    """
    if not _is_finite_number(value) or not least <= value <= most:
        allowed = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ConfigurationError(f"{name} is {value!r}, expected a number {allowed}")


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Require one of a few strings.

    Args:
        name: Name of the setting, for the message.
        value: What the user gave.
        choices: What is allowed, in the order of the message.

    Raises:
        ConfigurationError: If the value is anything else.
    """
    if value not in choices:
        raise ConfigurationError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}")


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
