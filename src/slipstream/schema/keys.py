"""Find the keys that a user asks for: by name, by pattern, or by exact path."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from slipstream.errors import ConfigurationError, MissingEntryError
from slipstream.schema.nodes import Key, name_of
from slipstream.schema.values import Json
from slipstream.schema.walk import all_keys, members_of
from slipstream.text import list_first

Keys = str | Collection[str | tuple[Any, ...]]
"""One name or pattern, or a collection of names, patterns and exact paths. See `resolve_keys`."""

# Comparing a misspelt key with all names of a huge state would take minutes.
_MAX_COMPARED = 20_000
_MAX_LISTED = 10


@dataclass(frozen=True)
class Selection:
    """Which keys of one structure were requested.

    Attributes:
        names: Names that keys of the structure have literally.
        patterns: Patterns, for names that no key has literally.
        paths: Exact paths, each as `_exact` returns it.
        missing: What was requested, but matches no key.
    """

    names: frozenset[str]
    patterns: tuple[str, ...]
    paths: frozenset[Hashable]
    missing: tuple[str | Key, ...]

    def matches(self, key: Key) -> bool:
        """Return whether a key itself was requested; what is below it counts only if it matches too."""
        if self.paths and _exact(key) in self.paths:
            return True
        name = name_of(key)
        return name in self.names or any(_fits(name, pattern) for pattern in self.patterns)


def resolve_keys(structure: Json, keys: Keys, objects: Sequence[Any] = ()) -> Selection:
    """Find which keys of a structure a user means.

    A string is a name such as ``"policy/actor.weight"``. It is matched literally, so that names with ``[``, ``*`` or
    ``?`` can be selected. Only if no key has that name, it is a pattern, in which ``*`` stands for any text (``/``
    included) and ``?`` for one character. A tuple is the exact path of one key, such as ``("optimizer", "state", 0)``,
    whose parts must be equal in value and type: 1, 1.0 and True differ.

    Args:
        structure: As it was read from a file, or as `slipstream.schema.flatten.flatten` returns it.
        keys: A string, which is one key, or a collection of strings and tuples.
        objects: The objects of the same `slipstream.schema.flatten.Tree`; a file has none.

    Raises:
        ConfigurationError: If `keys` is empty.
        TypeError: If it contains anything but strings and tuples.
        CorruptFileError: If the structure is invalid.
    """
    requested = _as_list(keys)
    names: set[str] = set()
    paths: set[Hashable] = set()
    for wanted in requested:
        if isinstance(wanted, str):
            names.add(wanted)
        else:
            paths.add(_exact(wanted))

    found_names: set[str] = set()
    found_paths: set[Hashable] = set()
    for key in all_keys(structure, objects):
        name = name_of(key)
        if name in names:
            found_names.add(name)
        # Most selections have no paths, and there `_exact` would be wasted time.
        if paths:
            found_paths.update(paths & {_exact(key)})

    patterns = _find_patterns(structure, names - found_names, objects)
    missing = []
    for wanted in requested:
        if isinstance(wanted, str):
            is_found = wanted in found_names or wanted in patterns
        else:
            is_found = _exact(wanted) in found_paths
        if not is_found:
            missing.append(wanted)
    return Selection(frozenset(found_names), tuple(sorted(patterns)), frozenset(found_paths), tuple(missing))


def missing_error(structure: Json, missing: Iterable[str | Key], objects: Sequence[Any] = ()) -> MissingEntryError:
    """Return the error for keys that match nothing: names all of them, and similar keys that exist."""
    names = [name_of(key) for key in itertools.islice(all_keys(structure, objects), _MAX_COMPARED)]
    problems = []
    for wanted in missing:
        name = wanted
        if isinstance(wanted, tuple):
            name = name_of(wanted)
        problem = repr(wanted)[:200]
        similar = difflib.get_close_matches(str(name)[:200], names)
        if similar:
            problem += f" (similar: {_listed(similar)})"
        problems.append(problem)
    top = [name_of((part,)) for part, _ in members_of(structure, (), objects) or ()]
    if not top:
        return MissingEntryError(f"the state has no keys, so nothing matches {', '.join(problems)}")
    return MissingEntryError(f"the state has no key {', '.join(problems)}; its top-level keys are {_listed(top)}")


def _as_list(keys: Keys) -> list[str | Key]:
    """Return the keys that a user asks for as a list."""
    # A string is a collection of letters, which is never meant.
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, Iterable):
        raise TypeError(f"keys is {keys!r}, expected a string or a collection of strings and tuples")
    requested = list(keys)
    if not requested:
        raise ConfigurationError("keys is empty, expected at least one key; pass None for everything")
    for key in requested:
        if not isinstance(key, (str, tuple)):
            raise TypeError(f"keys contains {key!r}, expected strings and tuples; write it as the tuple ({key!r},)")
    return requested


def _find_patterns(structure: Json, names: set[str], objects: Sequence[Any]) -> set[str]:
    """Return those of the names that are patterns and match a key."""
    wanted = set(filter(_is_pattern, names))
    found: set[str] = set()
    # Walking over the structure takes time, which a selection without patterns need not spend.
    if not wanted:
        return found
    for key in all_keys(structure, objects):
        name = name_of(key)
        for pattern in wanted - found:
            if _fits(name, pattern):
                found.add(pattern)
    return found


def _is_pattern(name: str) -> bool:
    return "*" in name or "?" in name


def _fits(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern in which only ``*`` and ``?`` are special."""
    # In the patterns of fnmatch, "[" begins a set of characters: "[[]" is the set that contains only "[".
    return fnmatchcase(name, pattern.replace("[", "[[]"))


def _exact(part: Any) -> Hashable:
    """Return something that is equal for keys of equal value and type only. Raises `TypeError` if it is no key."""
    if type(part) is tuple:
        return tuple(map(_exact, part))
    # A NaN differs from itself, yet it can be a key. The comparison of other objects need not be a truth value.
    if isinstance(part, (float, complex, np.generic)) and part != part:  # noqa: PLR0124
        return (type(part), "NaN")
    return (type(part), part)


def _listed(names: list[str]) -> str:
    """Return the first of some names as text."""
    return list_first([repr(name)[:80] for name in names], _MAX_LISTED)
