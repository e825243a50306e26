"""The overrides of a command line, such as ``env.num_envs=256``, and the names of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import ConfigurationError
from slipstream.text import install_hint

try:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.errors import HydraException
except ImportError as missing:
    raise ImportError(f"training needs hydra-core: {install_hint('train')}") from missing


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse the overrides of a command line.

    Raises:
        ConfigurationError: If one is not of the form ``key=value``.
    """
    try:
        parsed: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        culprit = next((text for text in overrides if "=" not in text), None)
        problem = f"{culprit!r} is not an override" if culprit else first_line(error)
        raise ConfigurationError(f"{problem}, expected key=value such as env.num_envs=256") from error
    for override in parsed:
        _require_supported(override)
    return parsed


def _require_supported(override: Override) -> None:
    """Refuse what Hydra's command line can do besides setting a value."""
    text = override.input_line
    if override.is_sweep_override():
        raise ConfigurationError(
            f"{text!r} is a sweep, which is not supported: start one training for each value, expected key=value"
        )
    if override.is_add() or override.is_delete():
        raise ConfigurationError(f"{text!r} adds or deletes a setting, expected key=value")
    if override.key_or_group.split(".")[0].split("/")[0] == "hydra":
        raise ConfigurationError(
            f"{text!r} configures Hydra itself, which is not supported: run_dir= and name= choose the folder of a run"
        )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their full names, such as ``env.num_envs``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def first_line(error: Exception) -> str:
    """Return what an error says, without the lines that Hydra and OmegaConf add."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
