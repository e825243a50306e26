"""Convert checkpoints between formats. A result is read back and compared before it gets its name."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from slipstream.checkpoint.diff import diff_states
from slipstream.checkpoint.formats import FormatName, find_format
from slipstream.checkpoint.leaves import named_values
from slipstream.checkpoint.load import load_file
from slipstream.checkpoint.native import NativeFile, write_native
from slipstream.checkpoint.portable.format import PortableFormat, write_portable
from slipstream.checks import require_choice
from slipstream.errors import ConfigurationError, CorruptFileError, FormatVersionError, UnsupportedStateError, naming
from slipstream.schema.flatten import check_storable, flatten
from slipstream.schema.nodes import name_of
from slipstream.schema.values import Json
from slipstream.store.local import (
    RESERVED_PREFIX,
    atomic_write,
    link_new,
    make_folder,
    require_replaceable,
    sync_folder,
    translate_errors,
)
from slipstream.tensors import TORCH, resolve
from slipstream.text import format_bytes, install_hint

_SUFFIXES: dict[str, FormatName] = {
    ".slip": "native",
    ".pt": "pt",
    ".pth": "pt",
    ".lz4": "lz4",
    ".safetensors": "safetensors",
}


@dataclass(frozen=True)
class Converted:
    """A checkpoint that was written in another format.

    Attributes:
        path: The file.
        format: Its format.
        file_bytes: The size of the file.
        left_out: What the format cannot hold and the file therefore lacks, in words.
    """

    path: Path
    format: FormatName
    file_bytes: int
    left_out: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return it as a sentence."""
        size = format_bytes(self.file_bytes)
        sentence = f"{self.path}: {self.format} checkpoint, {size}, read back and equal"
        if self.left_out:
            sentence += f"; without {' and '.join(self.left_out)}, which this format cannot hold"
        return sentence


@dataclass(frozen=True)
class _Source:
    """A checkpoint to convert, with what native files have besides the state."""

    state: Any
    metadata: Json = None
    sequence: int | None = None
    thinned: tuple[str, ...] = ()


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: FormatName | None = None,  # noqa: A002 - the word users expect
    *,
    overwrite: bool = False,
    tensors_only: bool = False,
) -> Converted:
    """Write a checkpoint in another format. The result is complete in itself, even if the source is a delta.

    The target is written under another name, flushed to the disk, read back and compared bit for bit; only then it gets
    its name. After an error, or if the process is killed, there is no target, or the old one. Never runs code from the
    source. `slipstream.load_checkpoint` reads every target by default, without ``weights_only=False``. Takes the memory
    of the state twice.

    Args:
        source: A checkpoint of any format.
        target: The file to write. Missing folders are created.
        format: ``native``, ``pt``, ``lz4`` (``.pt.lz4``) or ``safetensors``; by default what the suffix of `target`
            says. Metadata is kept from native to native only, because other formats have no place for it.
        overwrite: Whether to replace a target that exists.
        tensors_only: Whether to leave out what safetensors cannot hold: everything but tensors.

    Returns:
        What was written, and what was left out.

    Raises:
        FileExistsError: If the target exists and `overwrite` is False.
        FileNotFoundError: If there is no source.
        ConfigurationError: If the format is unknown, or cannot be told from the suffix of the target.
        CorruptFileError: If the source is damaged or not a checkpoint, or the target could not be read back.
        UnsupportedStateError: If the format cannot hold the state. Names the key.
        WriteError: If the target cannot be written.
        ImportError: If safetensors is needed, and that package is not installed.

    Example:
        >>> import torch
        >>> torch.save({"w": torch.ones(3)}, "/tmp/slipstream-doc/convert.pt")
        >>> done = convert_checkpoint("/tmp/slipstream-doc/convert.pt", "/tmp/slipstream-doc/c.slip", overwrite=True)
        >>> done.format
        'native'
    """
    # A link is followed, as when any other file is written.
    path = Path(os.path.realpath(target))
    chosen = format or format_by_suffix(Path(target))
    require_choice("format", chosen, get_args(FormatName))
    # Before the work, so that mistakes are reported at once.
    _require_free(path, overwrite=overwrite)
    if chosen == "safetensors":
        _require_safetensors()
    loaded = _read(Path(source))
    content = loaded.state
    left_out = []
    # Safetensors holds a flat dict of tensors; all other formats hold the state as it is.
    if chosen == "safetensors":
        with naming(source):
            content = _only_tensors(loaded.state, tensors_only=tensors_only)
        left_out += _describe_rest(len(named_values(loaded.state)) - len(content))
    if loaded.metadata is not None and chosen != "native":
        left_out.append("its metadata")
    with translate_errors(path):
        make_folder(path.parent)
        # In the same folder, so that the result can be renamed.
        temporary = tempfile.TemporaryDirectory(prefix=RESERVED_PREFIX, dir=path.parent)
    with temporary as folder:
        with naming(source):
            written = _write(Path(folder) / "checkpoint", content, chosen, loaded)
        _require_equal(written, content, path)
        _publish(written, path, overwrite=overwrite)
    return Converted(path, chosen, path.stat().st_size, tuple(left_out))


def format_by_suffix(path: Path) -> FormatName:
    """Return the format that the suffix of a file stands for.

    Raises:
        ConfigurationError: If it stands for none.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigurationError(
            f"{path}: its suffix {path.suffix!r} stands for no format; "
            "expected .slip, .pt, .pt.lz4 or .safetensors, or the option --format"
        )
    return _SUFFIXES[path.suffix]


def _require_free(path: Path, *, overwrite: bool) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, expected a file", str(path))
    with translate_errors(path):
        require_replaceable(path)
    if path.exists() and not overwrite:
        raise FileExistsError(errno.EEXIST, "exists already; --force (overwrite=True) replaces it", str(path))


def _require_safetensors() -> None:
    try:
        import safetensors.torch  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            f"safetensors files need a package that is not installed: {install_hint('safetensors')}"
        ) from error


def _read(path: Path) -> _Source:
    # Other formats have no metadata besides the state.
    if find_format(path) != "native":
        return _Source(load_file(path))
    with NativeFile(path) as file:
        header = file.header
        return _Source(file.load(), file.container.values.get("metadata"), header.sequence, header.thinned)


def _write(path: Path, content: Any, chosen: FormatName, source: _Source) -> Path:
    """Write a state, and return the file."""
    if chosen == "native":
        return write_native(path, content, source.metadata, sequence=source.sequence, thinned=source.thinned).path
    if chosen == "safetensors":
        _write_safetensors(path, content)
        return path
    compress = chosen == "lz4"
    # Names the key of what the default load would refuse.
    PortableFormat(compress, level=9).check(flatten(content, opaque=True))
    return write_portable(path, content, compress=compress).path


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save  # noqa: PLC0415 - an extra

    # In memory first: then an error of the disk is one of ours, with a message that says so.
    try:
        encoded = save(tensors, {"format": "pt"})
    except Exception as error:
        raise UnsupportedStateError(f"safetensors cannot hold this checkpoint ({error})") from error
    with atomic_write(path) as file:
        file.write(encoded)


def _only_tensors(state: Any, *, tensors_only: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a state in a flat dict. None of them shares memory with another.

    Raises:
        UnsupportedStateError: If there is anything else and `tensors_only` is False, or a tensor cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for key, value in flatten(state, opaque=True).values(TORCH):
        name = name_of(key)
        if not isinstance(value, torch.Tensor):
            if tensors_only:
                continue
            raise UnsupportedStateError(
                f"{name!r} is of type {type(value).__qualname__}, and safetensors holds tensors only; "
                "--tensors-only (tensors_only=True) leaves out the rest"
            )
        check_storable(value, key)
        if name in tensors:
            raise UnsupportedStateError(
                f"two tensors would be called {name!r}, and safetensors has no nesting; rename one of them"
            )
        tensor = resolve(value).contiguous()
        # Safetensors refuses tensors that share memory.
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages:
            tensor = tensor.clone()
        tensors[name] = tensor
        storages.add(storage)
    return tensors


def _describe_rest(count: int) -> list[str]:
    """Say how many values were left out."""
    if not count:
        return []
    if count == 1:
        return ["1 value that is not a tensor"]
    return [f"{count} values that are not tensors"]


def _require_equal(written: Path, content: Any, target: Path) -> None:
    """Read back what was written, as any reader would, and compare it."""
    try:
        found = load_file(written)
    except (CorruptFileError, FormatVersionError) as error:
        # The temporary name means nothing to the user.
        reason = str(error).removeprefix(f"{written}: ")
        raise CorruptFileError(f"{target}: was not written, because it cannot be read back: it {reason}") from error
    differences = diff_states(content, found).describe()
    if differences:
        raise CorruptFileError(f"{target}: was not written, because it reads back differently: {differences[0]}")


def _publish(written: Path, target: Path, *, overwrite: bool) -> None:
    """Give a complete file its name."""
    with translate_errors(target):
        # A file that is replaced keeps its permissions.
        if target.exists():
            shutil.copymode(target, written)
    # A link never replaces a file that another process has written in the meantime. Not every file system has links.
    is_linked = not overwrite and link_new(written, target)
    with translate_errors(target):
        if not is_linked:
            written.replace(target)
        sync_folder(target.parent)
