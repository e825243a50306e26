"""The native checkpoint format: a container whose entries are the distinct memory of a state's tensors.

The value ``state`` is the structure, as `slipstream.schema.flatten` writes it. A tensor there names the entry that holds its
memory and how it sees it; tensors of up to 128 bytes (step counters, scalars) are written into the structure. A *delta*
holds only what changed since its parent: entries that are equal are not there, others may be stored as a difference.
See ``docs/formats/checkpoint.md``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checkpoint.predict import Moments, Recipe, apply, find_moments, prediction, recipes, sample
from slipstream.codecs import Codec, Difference, Planes, Raw, choose_codec
from slipstream.errors import CorruptFileError, FormatVersionError, UnsupportedStateError
from slipstream.schema.flatten import TAG, Leaf, decode, encode
from slipstream.schema.flatten import Path as TreePath
from slipstream.store.container import Container, ContainerWriter, Reference, write_container
from slipstream.tensors import View, array_of, carrier, check_storable, plan, settled, storage_of, view_storage

KIND = "checkpoint"
_INLINE_BYTES = 128
_SMALL_BYTES = 2048  # packing less than this takes longer than it is worth


@dataclass(frozen=True)
class Content:
    """The memory of a state by entry name: what a child of this checkpoint may refer to."""

    arrays: Mapping[str, NDArray[Any]]
    moments: Mapping[str, Moments] = field(default_factory=dict)


@dataclass(frozen=True)
class Parent:
    """A checkpoint that another one is stored against.

    Attributes:
        path: Its file.
        identity: Its fingerprint, so that another file in its place is noticed.
        parents: Identities of its own parents, from the nearest on.
        content: Its memory.
    """

    path: Path
    identity: str
    parents: tuple[str, ...]
    content: Content


@dataclass
class Written:
    """What became of a state: sizes, and its memory for a child to refer to."""

    raw_bytes: int
    stored_bytes: int
    identity: str
    parents: tuple[str, ...]
    content: Content


@dataclass
class _Collector:
    """Gathers the leaves of a state while its structure is written, then finds the memory behind them."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    paths: list[TreePath] = field(default_factory=list)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    codecs: dict[str, Codec | None] = field(default_factory=dict)  # None: choose when it is written
    entry_of: dict[TreePath, str] = field(default_factory=dict)
    raw_bytes: int = 0

    def leaf(self, leaf: Leaf, path: TreePath) -> dict[str, Any]:
        name = "/".join(path) or "state"
        if isinstance(leaf, np.ndarray):
            return self._array(np.asarray(leaf), name)
        check_storable(leaf, path)
        node: dict[str, Any] = {
            TAG: "tensor",
            "dtype": str(leaf.dtype).removeprefix("torch."),
            "shape": list(leaf.shape),
        }
        if isinstance(leaf, torch.nn.Parameter):
            node["parameter"] = True
        if leaf.requires_grad:
            node["requires_grad"] = True
        self.tensors.append(settled(leaf).cpu())
        self.nodes.append(node)
        self.names.append(name)
        self.paths.append(path)
        return node

    def _array(self, array: NDArray[Any], name: str) -> dict[str, Any]:
        node: dict[str, Any] = {TAG: "array", "dtype": array.dtype.str, "shape": list(array.shape)}
        self.raw_bytes += array.nbytes
        if array.nbytes <= _INLINE_BYTES:
            return {**node, "hex": array.tobytes().hex()}
        return {**node, "entry": self._add(name, array, None if array.nbytes >= _SMALL_BYTES else Raw())}

    def _add(self, name: str, array: NDArray[Any], codec: Codec | None) -> str:
        unique, number = name, 2
        while unique in self.arrays:
            unique, number = f"{name}#{number}", number + 1
        self.arrays[unique], self.codecs[unique] = array, codec
        return unique

    def find_memory(self) -> None:
        """Turn the tensors into entries, each piece of memory once."""
        regions, views = plan(self.tensors)
        homes: list[str | None]
        first_name = {view.region: name for view, name in zip(reversed(views), reversed(self.names), strict=True)}
        homes = [None] * len(regions)
        for number in dict.fromkeys(view.region for view in views if view.region >= 0):  # in the order of the state
            region = regions[number]
            start = region.address - region.tensors[0].untyped_storage().data_ptr()
            content = torch.empty(0, dtype=torch.uint8, device="cpu")
            content.set_(region.tensors[0].untyped_storage(), start, (region.nbytes,), (1,))
            self.raw_bytes += region.nbytes
            array = array_of(content.numpy(), region.dtype, region.shape)
            inline = region.nbytes <= _INLINE_BYTES and len(region.tensors) == 1
            if not inline:
                homes[number] = self._add(first_name[number], array, _codec_for(region.dtype, region.nbytes))
            else:
                node = self.nodes[next(i for i, view in enumerate(views) if view.region == number)]
                node["hex"] = content.numpy().tobytes().hex()
        for node, view, path in zip(self.nodes, views, self.paths, strict=True):
            entry = homes[view.region] if view.region >= 0 else None
            _describe(node, view, entry)
            if entry is not None:
                self.entry_of[path] = entry


def _describe(node: dict[str, Any], view: View, entry: str | None) -> None:
    if view.region < 0:
        node["hex"] = ""
    if entry is not None:
        node["entry"] = entry
    if view.offset:
        node["offset"] = view.offset
    if view.stride != torch.empty(view.shape, device="meta").stride():
        node["stride"] = list(view.stride)


def _codec_for(dtype: torch.dtype, nbytes: int) -> Codec | None:
    if nbytes < _SMALL_BYTES:
        return Raw()
    if dtype.is_floating_point and dtype.itemsize > 1:
        return Planes(floating=carrier(dtype)[1] or None)
    return Planes() if dtype.is_complex else None


def write_native(
    path: str | os.PathLike[str],
    state: Any,
    metadata: Any = None,
    parent: Parent | None = None,
    threads: int | None = None,
    *,
    compress: bool = True,
) -> Written:
    """Write a state to a file, durably and atomically; blocks until it is done.

    Args:
        path: The file to create or replace.
        state: Nested dicts, lists, tuples and TensorDicts of tensors, arrays and plain values.
        metadata: Anything of plain values that should be readable without the tensors.
        parent: Store only what changed since this checkpoint.
        threads: How many threads encode; by default one per core.
        compress: Whether to pack what is not stored against the parent; checksums are there in any case.

    Raises:
        UnsupportedStateError: If the state holds anything that cannot be stored as data.
        WriteError: If the file cannot be written.
    """
    collector = _Collector()
    try:
        structure = encode(state, collector.leaf)
        described = encode(metadata, collector.leaf, ("metadata",))
    except RecursionError:
        raise UnsupportedStateError("the state is nested too deeply to be stored") from None
    collector.find_memory()
    if not compress:
        collector.codecs = dict.fromkeys(collector.codecs, Raw())
    content = Content(collector.arrays, find_moments(state, collector.entry_of))
    parents: tuple[str, ...] = ()
    with write_container(path, kind=KIND, threads=threads) as writer:
        if parent:
            same, predicted = _add_changes(writer, content, collector.codecs, parent.content)
        else:
            for name, array in content.arrays.items():
                writer.add(name, array, collector.codecs[name])
        writer.set("state", structure)
        writer.set("metadata", described)
        if parent:
            parents = (parent.identity, *parent.parents)
            relative = os.path.relpath(parent.path, Path(path).parent)
            writer.set(
                "parent",
                {
                    "file": relative,
                    "identity": parent.identity,
                    "depth": len(parents),
                    "same": same,
                    "predicted": {name: recipe.to_json() for name, recipe in predicted.items()},
                },
            )
    return Written(collector.raw_bytes, writer.file_bytes, writer.identity, parents, content)


def _add_changes(
    writer: ContainerWriter, content: Content, codecs: Mapping[str, Codec | None], old: Content
) -> tuple[list[str], dict[str, Recipe]]:
    """Add what differs from the parent; returns what is the same, and what was stored against a prediction."""
    same: list[str] = []
    predicted: dict[str, Recipe] = {}
    moments = {key: one for key, one in content.moments.items() if content.arrays[one.first].nbytes >= _SMALL_BYTES}
    candidates = recipes(content.arrays, moments, old.arrays, old.moments)
    for name, array in content.arrays.items():
        before = old.arrays.get(name)
        if before is None or (before.dtype, before.shape) != (array.dtype, array.shape):
            writer.add(name, array, codecs[name])
        elif _equal(array, before):
            same.append(name)
        elif array.nbytes < _SMALL_BYTES:
            writer.add(name, array, codecs[name])
        else:
            plain = codecs[name] or choose_codec(array)
            codec, recipe = _best(name, content, old, plain, candidates.get(name, []))
            reference: Reference | None = before if codec.needs_reference else None
            if recipe is not None:
                predicted[name] = recipe
                reference = prediction(recipe, _inputs(recipe, old.arrays, content.arrays))
            writer.add(name, array, codec, reference)
    return same, predicted


def _inputs(recipe: Recipe, old: Mapping[str, NDArray[Any]], new: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    return [*(old[name] for name in recipe.old), *(new[name] for name in recipe.new)]


def _best(
    name: str, content: Content, old: Content, plain: Codec, candidates: list[Recipe]
) -> tuple[Codec, Recipe | None]:
    """Choose on a sample: the codec for the array as it is, its difference to the parent, or to a prediction."""
    array = content.arrays[name]
    part = sample(array)
    codec = Difference(floating=plain.floating if isinstance(plain, Planes) else None)
    options: list[tuple[int, Codec, Recipe | None]] = [
        (len(plain.encode(part)), plain, None),
        (len(codec.against(sample(old.arrays[name])).encode(part)), codec, None),
    ]
    for recipe in candidates:
        arrays = _inputs(recipe, old.arrays, content.arrays)
        if all((item.dtype, item.shape) == (np.dtype(np.float32), array.shape) for item in arrays):
            guess = apply(recipe, [sample(item) for item in arrays])
            options.append((len(codec.against(guess).encode(part)), codec, recipe))
    _, chosen, recipe_or_none = min(options, key=lambda option: option[0])
    return chosen, recipe_or_none


def _equal(first: NDArray[Any], second: NDArray[Any]) -> bool:
    return bool(np.array_equal(first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8)))


class NativeFile:
    """Reads a native checkpoint; a delta opens its parents as it needs them.

    Args:
        path: The file.

    Raises:
        CorruptFileError: If it is not a sound native checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.container = Container(path)
        self._parent: NativeFile | None = None
        values = self.container.values
        if self.container.kind != KIND or "state" not in values:
            self.container.close()
            raise CorruptFileError(f"{path}: is a container of kind {self.container.kind!r}, expected a checkpoint")
        self.structure = values["state"]
        self.parent = values.get("parent") or {}
        if not _is_parent(self.parent):
            self.container.close()
            raise CorruptFileError(f"{path}: says of its parent what no writer writes")

    @property
    def metadata(self) -> Any:
        """What was saved as metadata."""
        return self._decode(self.container.values.get("metadata"))

    @property
    def depth(self) -> int:
        """How many parents have to be read as well."""
        return int(self.parent.get("depth", 0))

    def close(self) -> None:
        """Close the file and its parents."""
        self.container.close()
        if self._parent:
            self._parent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_many(self, names: Collection[str], threads: int | None = None) -> dict[str, NDArray[Any]]:
        """Read the memory of entries, from this file, and from its parents what they are stored against.

        Every array of every file is read at most once. Besides what is returned, memory holds what the parent gave.
        """
        needs = self._needs(names)
        old: set[str] = set()
        for name, recipe in needs.items():
            if recipe is not None:
                old.update(recipe.old)
            elif name not in self.container.entries or self.container.entries[name].codec.needs_reference:
                old.add(name)
        before = self.open_parent().read_many(old, threads) if old else {}
        memory = {name: before[name] for name in needs if name not in self.container.entries}
        left = [name for name in needs if name in self.container.entries]
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
        same = set(self.parent.get("same", ()))
        predicted = self.parent.get("predicted", {})
        needs: dict[str, Recipe | None] = {}
        left = list(names)
        while left:
            name = left.pop()
            if name in needs:
                continue
            entry = self.container.entries.get(name)
            if entry is None and name not in same:
                self.container.read(name)  # raises, and names what there is
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
        entry = self.container.entries[name]
        if not entry.codec.needs_reference:
            return None
        arrays = [before[name]] if recipe is None else _inputs(recipe, before, memory)
        if any((array.dtype, array.shape) != (entry.dtype, entry.shape) for array in arrays):
            raise CorruptFileError(f"{self.container.path}: entry {name!r} is stored against arrays of other shapes")
        return arrays[0] if recipe is None else prediction(recipe, arrays)

    def load(self, keys: Collection[str] | None = None) -> Any:
        """Read the state, or the part of it whose paths match `keys`; only the tensors in it are read."""
        structure = self.structure if keys is None else _prune(self.structure, tuple(keys), ())
        if structure is _NOTHING:
            raise KeyError(f"{self.container.path}: nothing in it matches {', '.join(map(repr, keys or ()))}")
        return self._decode(structure)

    def _decode(self, structure: Any) -> Any:
        """Read the memory that a structure refers to, and put it together."""
        names: set[str] = set()

        def read() -> Any:
            _visit(structure, lambda node: names.add(node["entry"]) if isinstance(node.get("entry"), str) else None)
            return decode(structure, self._leaf_reader(self.read_many(sorted(names))))

        return self.guarded(read)

    def guarded(self, read: Callable[[], Any]) -> Any:
        """Run `read`, and name the file in what it raises."""
        try:
            return read()
        except (CorruptFileError, FormatVersionError) as error:
            if str(error).startswith(str(self.container.path)):
                raise
            raise type(error)(f"{self.container.path}: {error}") from error
        except RecursionError:
            raise CorruptFileError(f"{self.container.path}: its state is nested too deeply") from None

    def open_parent(self) -> NativeFile:
        """Return the checkpoint that this one is stored against."""
        if self._parent is None:
            file, identity = self.parent.get("file"), self.parent.get("identity")
            if not isinstance(file, str):
                raise CorruptFileError(f"{self.container.path}: needs a parent and names none")
            folder = self.container.path.parent
            path = folder / file
            if not path.exists():  # this file is a base itself: its parents lie beside it
                path = folder / Path(file).name
            try:
                parent = NativeFile(path)
            except FileNotFoundError as error:
                raise CorruptFileError(
                    f"{self.container.path}: holds only what changed since {path}, which is missing"
                ) from error
            if parent.container.identity != identity or parent.depth >= self.depth:
                parent.close()
                raise CorruptFileError(f"{self.container.path}: {path} is not the file that it was saved against")
            self._parent = parent
        return self._parent

    def _leaf_reader(self, memory: Mapping[str, NDArray[Any]]) -> Callable[[Mapping[str, Any]], Leaf]:
        shared: dict[str, torch.UntypedStorage] = {}

        def read(node: Mapping[str, Any]) -> Leaf:
            name = node.get("entry")
            if "hex" in node:
                content = np.frombuffer(bytearray(bytes.fromhex(node["hex"])), np.uint8)
            else:
                content = memory[node["entry"]].reshape(-1).view(np.uint8)
            if node[TAG] == "array":
                array: NDArray[Any] = content.view(np.dtype(node["dtype"])).reshape(node["shape"])
                return array
            storage = storage_of(content) if "hex" in node else shared.setdefault(str(name), storage_of(content))
            return _tensor(node, storage)

        return read


def _is_parent(node: Any) -> bool:
    """Tell whether this is what `write_native` says of a parent, as far as its types go."""
    if not isinstance(node, dict) or not isinstance(node.get("predicted", {}), dict):
        return False
    same = node.get("same", [])
    return isinstance(same, list) and all(isinstance(name, str) for name in same)


def _tensor(node: Mapping[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
    dtype = getattr(torch, node["dtype"])
    shape = tuple(node["shape"])
    stride = tuple(node.get("stride") or torch.empty(shape, device="meta").stride())
    view = View(0, node.get("offset", 0), dtype, shape, stride)
    numbers = [view.offset, *shape, *stride]
    if not isinstance(dtype, torch.dtype) or any(type(number) is not int or number < 0 for number in numbers):
        raise CorruptFileError("a tensor of the state has a dtype or shape that no writer writes")
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if 0 not in shape else 0
    if view.offset % dtype.itemsize or view.offset + last * dtype.itemsize > storage.nbytes():
        raise CorruptFileError("a tensor of the state reaches beyond the memory that was stored for it")
    tensor = view_storage(storage, view)
    if node.get("parameter"):
        return torch.nn.Parameter(tensor, requires_grad=bool(node.get("requires_grad")))
    return tensor.requires_grad_() if node.get("requires_grad") else tensor


_NOTHING = object()


def path_matches(path: TreePath, keys: tuple[str, ...]) -> bool:
    """Tell whether a path, or a part of it from the top, is one of `keys`; keys may hold * and ?."""
    return any(fnmatchcase("/".join(path[: i + 1]), key) for i in range(len(path)) for key in keys)


def _prune(node: Any, keys: tuple[str, ...], path: TreePath) -> Any:
    """Return the part of a structure whose paths match, or `_NOTHING`."""
    if path and path_matches(path, keys):
        return node
    if isinstance(node, dict) and TAG not in node:
        kept = {key: _prune(value, keys, (*path, key)) for key, value in node.items()}
        kept = {key: value for key, value in kept.items() if value is not _NOTHING}
        return kept or _NOTHING
    if isinstance(node, dict) and node.get(TAG) in ("dict", "OrderedDict"):
        pairs = [[key, _prune(value, keys, (*path, str(key)))] for key, value in node["v"]]
        pairs = [pair for pair in pairs if pair[1] is not _NOTHING]
        return {**node, "v": pairs} if pairs else _NOTHING
    if isinstance(node, dict) and node.get(TAG) == "TensorDict":
        inner = _prune(node["v"], keys, path)
        return {**node, "v": inner} if inner is not _NOTHING else _NOTHING
    if isinstance(node, list):
        items = [_prune(value, keys, (*path, str(i))) for i, value in enumerate(node)]
        items = [value for value in items if value is not _NOTHING]
        return items or _NOTHING
    return _NOTHING


def _visit(node: Any, function: Callable[[Mapping[str, Any]], Any]) -> None:
    """Call `function` with every tagged node of a structure."""
    if isinstance(node, list):
        for value in node:
            _visit(value, function)
    elif isinstance(node, dict):
        if TAG in node:
            function(node)
        for value in node.values():
            if isinstance(value, (dict, list)):
                _visit(value, function)
