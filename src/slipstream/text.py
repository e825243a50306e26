"""How values are written in messages, tables and reports."""

from __future__ import annotations

import tomllib
from pathlib import Path

DISTRIBUTION = "slipstream-rl"
"""The name to install, and to look up in `importlib.metadata`. The import name and the command are ``slipstream``."""


def install_hint(extra: str) -> str:
    """Return the command that installs one of Slipstream's extras.

    In a checkout of the repository the command installs from the checkout; run it in the repository's root folder.

    Args:
        extra: A name from ``[project.optional-dependencies]`` in ``pyproject.toml``.

    Returns:
        A shell command, such as ``pip install 'slipstream-rl[train]'``.
    """
    if _runs_from_checkout():
        return f"pip install -e '.[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _runs_from_checkout() -> bool:
    """Return whether this package lies in ``src/`` of its own repository, as it does after an editable install."""
    project_file = Path(__file__).parents[2] / "pyproject.toml"
    try:
        project = tomllib.loads(project_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False
    # A package that was copied into somebody else's src/ finds their pyproject.toml.
    name = project.get("project", {}).get("name")
    return bool(name == DISTRIBUTION)
