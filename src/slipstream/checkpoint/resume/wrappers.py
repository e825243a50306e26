"""Names of state dicts without what wrappers of modules put into them.

``torch.compile`` inserts ``_orig_mod.`` and DataParallel or DDP insert ``module.``, at any level of a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_WRAPPERS = ("_orig_mod", "module")


def unwrap_names(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state dict under the names of a module, which one of them has through wrappers.

    If the names already fit, or are not unique without wrappers, the result is `theirs` itself.

    Args:
        mine: State dict of the module to load into.
        theirs: The saved state dict.
    """
    if mine.keys() == theirs.keys():
        return theirs
    names = plain_names(mine)
    saved = plain_names(theirs)
    # Two names that become one name could be exchanged.
    if len(names) < len(mine) or len(saved) < len(theirs):
        return theirs
    # A name that the module does not have stays as it is: the list of differences is shorter that way.
    renamed = {names.get(plain, key): theirs[key] for plain, key in saved.items()}
    if len(renamed) < len(theirs) or len(renamed.keys() & mine.keys()) <= len(theirs.keys() & mine.keys()):
        return theirs
    return _with_metadata(renamed, mine, theirs)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return the full names by the names without wrappers; of two that become one, the last."""
    return {_plain(name): name for name in names}


def _plain(name: str) -> str:
    return ".".join(component for component in str(name).split(".") if component not in _WRAPPERS)


def _with_metadata(renamed: dict[str, Any], mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the versions of modules, by which torch adapts states of older releases, under the new names."""
    versions = getattr(theirs, "_metadata", None)
    paths = getattr(mine, "_metadata", None)
    if not versions or not paths:
        return renamed
    # A wrapper and what it wraps become one name: the inner module comes last and its version counts.
    saved = plain_names(versions)
    metadata = {}
    for path in paths:
        if _plain(path) in saved:
            metadata[path] = versions[saved[_plain(path)]]
    state = _StateDict(renamed)
    state._metadata = metadata
    return state


class _StateDict(dict[str, Any]):
    """A state dict with the attribute in which torch keeps the versions of modules."""

    _metadata: dict[str, Any]
