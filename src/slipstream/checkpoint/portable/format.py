"""Portable checkpoints: what ``torch.save`` writes, plain (``.pt``) or as standard LZ4 frames (``.pt.lz4``).

Both can be read without Slipstream: by ``torch.load``, after ``lz4 -d`` if necessary. Reading here does not use
``torch.load`` unless the caller trusts the file: see `slipstream.checkpoint.portable.unpickle`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import torch

from slipstream.checkpoint.formats import LZ4_MAGIC, ZIP_MAGIC, Written
from slipstream.checkpoint.portable.lz4_file import FrameWriter, decompress
from slipstream.checkpoint.portable.torch_file import (
    first_line,
    is_trusted,
    load_trusted,
    load_untrusted,
    require_device,
    save_torch,
)
from slipstream.errors import CorruptFileError, UnsupportedStateError, naming
from slipstream.schema.nodes import MAX_DEPTH, Key, name_of
from slipstream.schema.refusals import advice_for
from slipstream.schema.writer import LONG_KINDS
from slipstream.store.header import MAGIC
from slipstream.store.local import atomic_write, open_regular, require_replaceable, translate_errors
from slipstream.tensors import TORCH
from slipstream.threads import background_threads

if TYPE_CHECKING:
    from slipstream.checkpoint.snapshot import Snapshot
    from slipstream.schema.flatten import Tree

logger = logging.getLogger(__name__)

PACKED_SUFFIX = ".lz4"
MAX_TENSORS = 1 << 18
"""How many tensors, arrays, and NumPy scalars of text, bytes or dates a portable checkpoint may have.

More than that could exceed the allowance of the default load."""

# Besides the state, the stack of the thread that saves has frames of the caller, of the worker and of torch.
_SPARE_DEPTH = 100


@dataclass(frozen=True)
class PortableFormat:
    """Writes what ``torch.load`` reads. A `slipstream.checkpoint.formats.CheckpointFormat`.

    Args:
        compress: Whether to put it into LZ4 frames; ``.lz4`` is then added to the name of the file.
        level: LZ4 level, 0 to 12.
        weights_only: Whether to accept only what `slipstream.load_checkpoint` reads by default, without running code
            from the file. If False, anything that can be pickled is accepted.
    """

    compress: bool
    level: int
    weights_only: bool = True

    @property
    def opaque(self) -> bool:
        """True: objects are accepted if they can be loaded again."""
        return True

    def check(self, tree: Tree) -> None:
        """Raise `UnsupportedStateError` if the state could not be loaded again; name the key and the workaround.

        Plain data and dense tensors are always accepted and cost nothing. Other objects are saved to memory and loaded
        again by the code that `load_checkpoint` runs. Without `weights_only` nothing is checked here: a snapshot
        pickles all objects anyway, and raises if that is impossible.
        """
        _check_tensors(tree)
        if not self.weights_only:
            return
        _check_size(tree)
        # Copying these would take as much time and memory as saving them, and they are known to load.
        objects = [value for value in tree.objects if not _is_known_tensor(value)]
        # One attempt for all, because most are accepted. Only a failure needs to find out which one is to blame.
        if not objects or not _find_problem(objects):
            return
        value = _find_culprit(objects)
        problem = _find_problem([value])
        if problem:
            raise UnsupportedStateError(
                f"{_name_in(tree, value)} is a {_name_of_type(value)}, {problem}; {advice_for(value)}, or "
                "pass weights_only=False to save_async and load_checkpoint"
            )
        raise UnsupportedStateError(
            f"the state has {len(objects):,} objects, {_find_problem(objects)}; store fewer of them"
        )

    def write(self, path: Path, snapshot: Snapshot, metadata: Any) -> Written:
        """Write a snapshot, durably and atomically, and delete the file with the other suffix that it replaces.

        Blocks until the file is durable. Only then the old file is deleted; after a crash in between,
        `slipstream.load_checkpoint` reads the newer of the two.
        """
        state = snapshot.state()
        written = write_portable(path, state, compress=self.compress, level=self.level, threads=background_threads())
        _delete_twin(path, written.path)
        return written


def write_portable(
    path: str | os.PathLike[str], state: Any, *, compress: bool, level: int = 9, threads: int | None = None
) -> Written:
    """Write a state with ``torch.save``, durably and atomically; blocks until it is done.

    Args:
        path: The file; ``.lz4`` is added if `compress`, unless the name already ends with it.
        state: Anything that can be pickled.
        compress: Whether to put it into LZ4 frames.
        level: LZ4 level, 0 to 12; blocks that do not shrink are stored whatever the level.
        threads: How many threads compress; by default one per core.

    Raises:
        ValueError: If the path has no name.
        WriteError: If the file cannot be written.
    """
    target = Path(path)
    if not target.name:
        raise ValueError(f"path is {os.fspath(path)!r}, expected the name of a file")
    # With ".lz4" added there would be a file, but it could not be loaded under the path that was given.
    with translate_errors(target):
        require_replaceable(target)
    if compress:
        target = packed_path(target)
    with atomic_write(target) as file:
        if compress:
            writer = FrameWriter(file, level, threads)
            save_torch(state, cast("BinaryIO", writer))
            writer.finish()
            raw_bytes = writer.raw_bytes
        else:
            save_torch(state, file)
            raw_bytes = file.tell()
        _make_newest(target, file)
    return Written(target, raw_bytes, target.stat().st_size)


def packed_path(path: Path) -> Path:
    """Return the name of the compressed file for a path: with ``.lz4``, once."""
    if path.suffix == PACKED_SUFFIX:
        return path
    return path.with_name(path.name + PACKED_SUFFIX)


def read_portable(path: Path, *, compressed: bool, device: Any, weights_only: bool | None) -> Any:
    """Read what ``torch.save`` wrote; compares every byte of tensors with its checksum.

    Takes the memory of the tensors, and for a compressed file that of its content besides. What a small file may expand
    to is bounded by `content_limit`. The memory of Python objects is bounded by 1.75 GiB and three times the size of
    the content.

    Args:
        path: The file.
        compressed: Whether it consists of LZ4 frames.
        device: Where tensors go: anything that ``torch.load`` takes as ``map_location``.
        weights_only: Whether to refuse objects that only running code from the file could load. None is the default of
            ``torch.load``, which the environment may change.

    Raises:
        CorruptFileError: If the file is damaged or cut off, expands beyond the limit, or is refused.
        ConfigurationError: If the device is not available.
    """
    if isinstance(device, (str, torch.device)):
        require_device(device)
    with naming(path), open_regular(path) as file:
        content: BinaryIO = file
        if compressed:
            content = decompress(file.read())
        if is_trusted(weights_only):
            return load_trusted(content, device)
        return load_untrusted(content, device)


def _check_size(tree: Tree) -> None:
    """Raise if the state has too many values for the default load.

    The allowance of a load is enough for `MAX_TENSORS` of the values that take most besides as many others as a state
    may have, see `slipstream.checkpoint.portable.inert`.
    """
    num_tensors = len(tree.leaves) + tree.num_long_scalars
    if num_tensors <= MAX_TENSORS:
        return
    if not tree.num_long_scalars:
        raise UnsupportedStateError(
            f"the state has {num_tensors:,} tensors, a .pt file takes at most {MAX_TENSORS:,}; stack small tensors, or "
            'save with format="native"'
        )
    for key, value in tree.values(TORCH):
        if isinstance(value, np.generic) and value.dtype.kind in LONG_KINDS:
            raise UnsupportedStateError(
                f"{name_of(key, 'the state')[:200]} is one of {num_tensors:,} tensors and NumPy scalars of text, bytes "
                f"or dates, a .pt file takes at most {MAX_TENSORS:,}; store an array instead of a list of scalars, or "
                'save with format="native"'
            )


def _check_tensors(tree: Tree) -> None:
    """Raise if ``torch.save`` cannot store the dense tensors: for a dtype, or for the way they share memory."""
    seen: dict[int, tuple[Key, torch.dtype]] = {}
    for (key, _), leaf in zip(tree.nodes, tree.leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        if not _can_save(leaf.dtype):
            raise UnsupportedStateError(
                f"{name_of(key)[:200]} has dtype {leaf.dtype}, which torch.save cannot store; "
                'store value.view(torch.uint8), or save with format="native"'
            )
        address = leaf.untyped_storage().data_ptr()
        other, dtype = seen.setdefault(address, (key, leaf.dtype))
        # Storages without memory have the address 0.
        if dtype != leaf.dtype and address:
            raise UnsupportedStateError(
                f"{name_of(key)[:200]} and {name_of(other)[:200]} view the same memory as {leaf.dtype} and {dtype}, "
                'which torch.save cannot store; store one of them, or save with format="native"'
            )


@functools.cache
def _can_save(dtype: torch.dtype) -> bool:
    """Return whether ``torch.save`` stores tensors of a dtype. It has no storages for integers of a few bits."""
    try:
        torch.save(torch.empty(0, dtype=dtype, device="cpu"), io.BytesIO())
    except (KeyError, RuntimeError, NotImplementedError):
        return False
    return True


def _find_problem(values: list[Any]) -> str:
    """Return why some objects cannot be saved and loaded again; empty if they can."""
    nested: Any = values
    # The pickler recurses, and in the state the objects are deeper than here.
    for _ in range(MAX_DEPTH + _SPARE_DEPTH):
        nested = [nested]
    file = io.BytesIO()
    try:
        torch.save(nested, file)
    except MemoryError:
        raise
    # Pickling runs methods of the objects, which may raise anything.
    except Exception as error:  # noqa: BLE001 - the caller raises, and says which object it was
        return f"which cannot be pickled ({first_line(error)})"
    try:
        loaded = load_untrusted(file, "cpu")
    except CorruptFileError as error:
        return f"which load_checkpoint refuses by default ({error.__cause__ or error})"
    for _ in range(MAX_DEPTH + _SPARE_DEPTH):
        (loaded,) = loaded
    # An object may pickle itself as something else, and `numpy.longlong` comes back as `numpy.int64`.
    for value, found in zip(values, loaded, strict=True):
        if type(value) is not type(found):
            return f"which would be loaded as a {_name_of_type(found)}"
    return ""


def _find_culprit(objects: list[Any]) -> Any:
    """Return one of some objects that cannot be loaded again, if there is one by itself."""
    # Halve them each time: there may be hundreds of thousands.
    while len(objects) > 1:
        middle = len(objects) // 2
        half = objects[:middle]
        if not _find_problem(half):
            half = objects[middle:]
        objects = half
    return objects[0]


def _name_of_type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_known_tensor(value: Any) -> bool:
    """Return whether a tensor that is not dense memory is of a kind that can be loaded again."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested:
        return False
    if value.is_quantized:
        return value.qscheme() in (torch.per_tensor_affine, torch.per_channel_affine)
    return bool(value.is_meta or value.layout != torch.strided)


def _name_in(tree: Tree, value: Any) -> str:
    """Return the key of an object as text."""
    for key, found in tree.values(TORCH):
        if found is value:
            return name_of(key, "the state")[:200]
    return "a key in the state"


def _make_newest(target: Path, file: BinaryIO) -> None:
    """Date a file after the one with the other suffix, so that `load_checkpoint` prefers it even if clocks changed."""
    with contextlib.suppress(FileNotFoundError):
        newest = max(time.time_ns(), _twin(target).stat().st_mtime_ns + 1)
        os.utime(file.fileno(), ns=(newest, newest))


def _twin(path: Path) -> Path:
    """Return the file that `load_checkpoint` takes for the same checkpoint: with ``.lz4``, or without."""
    if path.suffix == PACKED_SUFFIX:
        return path.with_suffix("")
    return packed_path(path)


def _delete_twin(path: Path, written: Path) -> None:
    """Delete an older checkpoint that was saved under the same path with another suffix.

    A path that ends with ``.lz4`` names one file, so nothing else is deleted.
    """
    if path.suffix == PACKED_SUFFIX:
        return
    twin = _twin(written)
    try:
        # Another saver may have replaced it in the meantime. Links and files of other kinds are not ours.
        if twin.is_symlink() or twin.stat().st_mtime_ns >= written.stat().st_mtime_ns:
            return
        with open_regular(twin) as file:
            head = file.read(len(MAGIC))
        if head.startswith((ZIP_MAGIC, LZ4_MAGIC, MAGIC)):
            twin.unlink()
    except FileNotFoundError:
        return
    except (OSError, CorruptFileError) as error:
        # The new file is durable, and it is the one that is loaded.
        logger.warning("cannot delete %s, which %s replaces: %s", twin, written.name, error)
