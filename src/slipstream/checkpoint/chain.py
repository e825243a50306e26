"""Read the entries of a native checkpoint and of its parents, without torch.

A *delta* holds only what changed since its parent: entries that are equal are only in the parent, others may be stored
as a difference to it, or to a prediction from it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from slipstream.checkpoint.predict import Recipe, prediction
from slipstream.errors import CorruptFileError, naming
from slipstream.schema.structure import check_fits, leaves_of
from slipstream.schema.unflatten import unflatten
from slipstream.store.container import Container
from slipstream.store.index import Entry
from slipstream.store.reference import Reference

KIND = "checkpoint"


class NativeReader:
    """Reads the structure and the entries of a native checkpoint; opens its parents as it needs them.

    Args:
        path: The file.

    Raises:
        CorruptFileError: If it is not a sound native checkpoint.

    Attributes:
        container: The file.
        structure: The state as JSON.
        parent: What the file says of its parent; empty if it has none.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.container = Container(path)
        self._parent: Self | None = None
        self._entries = self.container.entries
        try:
            with naming(path):
                self.structure = self._read_structure()
                self.parent = _read_parent(self.container.values.get("parent"))
        except CorruptFileError:
            self.container.close()
            raise
        self._same = frozenset(self.parent.get("same", ()))

    @property
    def depth(self) -> int:
        """How many parents have to be read as well."""
        return int(self.parent.get("depth", 0))

    def close(self) -> None:
        """Close the file and its parents."""
        self.container.close()
        if self._parent is not None:
            self._parent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_parent(self) -> Self:
        """Return the checkpoint that this one is stored against.

        Raises:
            CorruptFileError: If it is missing, or another file has its name.
        """
        if self._parent is None:
            path = self._find_parent()
            try:
                parent = type(self)(path)
            except FileNotFoundError as error:
                raise CorruptFileError(
                    f"{self.container.path}: holds only what changed since {path}, which is missing"
                ) from error
            # The depth decreases from file to file, so that no chain of parents is a circle.
            if parent.container.identity != self.parent.get("identity") or parent.depth >= self.depth:
                parent.close()
                raise CorruptFileError(f"{self.container.path}: {path} is not the file that it was saved against")
            self._parent = parent
        return self._parent

    def _find_parent(self) -> Path:
        file = self.parent.get("file")
        if file is None:
            raise CorruptFileError(f"{self.container.path}: needs a parent and names none")
        folder = self.container.path.parent
        path: Path = folder / file
        # This file may be a base itself: then its parents are in the same folder.
        if not path.exists():
            path = folder / path.name
        return path

    def check(self) -> None:
        """Check what state and metadata refer to, down to the parents, without reading any content.

        Raises:
            CorruptFileError: If they cannot be built from what is stored.
            FormatVersionError: If they hold a kind of value that this release does not know.
        """
        with naming(self.container.path):
            for structure in (self.structure, self.container.values.get("metadata")):
                num_leaves = 0
                for leaf, node in leaves_of(structure):
                    num_leaves += 1
                    if "entry" in node:
                        check_fits(leaf, node, self.entry(node["entry"]).nbytes)
                unflatten(structure, [None] * num_leaves)

    def entry(self, name: str) -> Entry:
        """Return an entry of this file, or that of a parent if it has not changed since.

        Raises:
            CorruptFileError: If there is none.
        """
        if name in self._entries:
            return self._entries[name]
        if name in self._same:
            return self.open_parent().entry(name)
        raise CorruptFileError(f"{self.container.path}: the state needs entry {name!r}, which is missing")

    def read_many(self, names: Collection[str], threads: int | None = None) -> dict[str, NDArray[Any]]:
        """Read the memory of entries, from this file, and from its parents what they are stored against.

        Every array of every file is read at most once. Besides what is returned, memory holds what the parent gave.
        """
        needs = self._needs(names)
        old: set[str] = set()
        for name, recipe in needs.items():
            if recipe is not None:
                old.update(recipe.old)
            elif name not in self._entries or self._entries[name].codec.needs_reference:
                old.add(name)
        before = self.open_parent().read_many(old, threads) if old else {}
        memory = {name: before[name] for name in needs if name not in self._entries}
        left = [name for name in needs if name in self._entries]
        while left:
            ready = [name for name in left if (recipe := needs[name]) is None or memory.keys() >= set(recipe.new)]
            if not ready:
                raise CorruptFileError(f"{self.container.path}: entry {left[0]!r} is predicted from itself")
            references = {name: self._reference(name, needs[name], before, memory) for name in ready}
            known = {name: reference for name, reference in references.items() if reference is not None}
            memory.update(self.container.read_many(ready, known, threads))
            left = [name for name in left if name not in memory]
        return {name: memory[name] for name in names}

    def _needs(self, names: Collection[str]) -> dict[str, Recipe | None]:
        """Return the entries to read for these, which include what some are predicted from, with their recipes."""
        predicted = self.parent.get("predicted", {})
        needs: dict[str, Recipe | None] = {}
        left = list(names)
        while left:
            name = left.pop()
            if name in needs:
                continue
            entry = self._entries.get(name)
            if entry is None and name not in self._same:
                raise CorruptFileError(f"{self.container.path}: the state needs entry {name!r}, which is missing")
            recipe = None
            if entry is not None and entry.codec.needs_reference and name in predicted:
                try:
                    recipe = Recipe.from_json(predicted[name])
                except ValueError as error:
                    raise CorruptFileError(f"{self.container.path}: entry {name!r}: {error}") from error
                left += recipe.new
            needs[name] = recipe
        return needs

    def _reference(
        self,
        name: str,
        recipe: Recipe | None,
        before: Mapping[str, NDArray[Any]],
        memory: Mapping[str, NDArray[Any]],
    ) -> Reference | None:
        """Return what an entry is stored against: an array of the parent, or a prediction."""
        entry = self._entries[name]
        if not entry.codec.needs_reference:
            return None
        arrays = [before[name]] if recipe is None else recipe_inputs(recipe, before, memory)
        if any((array.dtype, array.shape) != (entry.dtype, entry.shape) for array in arrays):
            raise CorruptFileError(f"{self.container.path}: entry {name!r} is stored against arrays of other shapes")
        return arrays[0] if recipe is None else prediction(recipe, arrays)

    def _read_structure(self) -> Any:
        if self.container.kind != KIND or "state" not in self.container.values:
            raise CorruptFileError(f"is a container of kind {self.container.kind!r}, expected a checkpoint")
        return self.container.values["state"]


def _read_parent(parent: Any) -> dict[str, Any]:
    """Return what a file says of its parent, after checking the types."""
    if not parent:
        return {}
    if not isinstance(parent, dict):
        raise CorruptFileError(f"its parent is {str(parent)[:40]!r}, expected an object")
    kinds = {"file": str, "identity": str, "depth": int, "same": list, "predicted": dict}
    for key, kind in kinds.items():
        if key in parent and not isinstance(parent[key], kind):
            raise CorruptFileError(f"the {key!r} of its parent is {str(parent[key])[:40]!r}")
    for name in parent.get("same", ()):
        if not isinstance(name, str):
            raise CorruptFileError(f"its parent has the entry {str(name)[:40]!r}, expected a name")
    return parent


def recipe_inputs(
    recipe: Recipe, old: Mapping[str, NDArray[Any]], new: Mapping[str, NDArray[Any]]
) -> list[NDArray[Any]]:
    """Return the arrays that a prediction takes: those of the parent, then those of the checkpoint itself."""
    return [*(old[name] for name in recipe.old), *(new[name] for name in recipe.new)]
