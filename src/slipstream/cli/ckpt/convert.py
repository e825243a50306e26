"""``slipstream ckpt convert``: a checkpoint in another format, read back before it gets its name."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.ckpt.formats import Format, format_by_suffix, is_native, require_safetensors
from slipstream.cli.ckpt.reading import is_refusal, load, one_line, reading
from slipstream.errors import CorruptFileError, FormatVersionError, SlipstreamError, UnsupportedStateError


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint of any format.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    *,
    format: Annotated[  # noqa: A002 - what it is
        Format | None,
        typer.Option("--format", help="By default what TARGET's suffix says: .slip, .pt, .pt.lz4 or .safetensors."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite TARGET if it exists.")] = False,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out what safetensors cannot hold: all but tensors.")
    ] = False,
) -> None:
    """Write a checkpoint in another format, complete in itself, and read it back before it gets its name."""
    from slipstream.cli.output import print_lines

    with one_line(source):
        print_lines(
            _convert(source, target, format or format_by_suffix(target), force=force, tensors_only=tensors_only)
        )


def _convert(source: Path, target: Path, kind: Format, *, force: bool, tensors_only: bool) -> str:
    """Write `target` and return a sentence about it; on any error there is none, or the old one."""
    from slipstream.store.local import make_folder, sync_folder
    from slipstream.text import format_bytes

    target = Path(os.path.realpath(target))
    if target.is_dir():
        raise SlipstreamError(f"{target}: is a folder, expected a file")
    if target.exists() and not force:
        raise FileExistsError(errno.EEXIST, "exists already; --force overwrites it", str(target))
    if kind is Format.SAFETENSORS:
        require_safetensors()
    state, metadata = load(source), _metadata(source, decoded=kind is Format.NATIVE)
    content = _only_tensors(state, tensors_only=tensors_only) if kind is Format.SAFETENSORS else state
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".slipstream-", dir=target.parent) as folder:
        written = _write(Path(folder) / "checkpoint", content, kind, metadata)
        needs_trust = _check_equal(written, content, target)
        (Path(folder) / "mode").touch()  # what a new file may do; safetensors makes them private
        shutil.copymode(target if target.exists() else Path(folder) / "mode", written)
        written.replace(target)
    sync_folder(target.parent)
    lost = _left_out(state, content) + (["its metadata"] if metadata and kind is not Format.NATIVE else [])
    without = f"; without {' and '.join(lost)}, which this format cannot hold" if lost else ""
    trust = "; it holds NumPy values or other objects, which load with weights_only=False only" if needs_trust else ""
    return (
        f"{target}: {kind.value} checkpoint, {format_bytes(target.stat().st_size)}, read back and equal{without}{trust}"
    )


def _write(path: Path, content: Any, kind: Format, metadata: Any) -> Path:
    from slipstream.checkpoint.native import write_native
    from slipstream.checkpoint.portable import write_portable

    if kind is Format.NATIVE:
        write_native(path, content, metadata)
        return path
    if kind is Format.SAFETENSORS:
        return _write_safetensors(path, content)
    return write_portable(path, content, compress=kind is Format.LZ4)[0]


def _write_safetensors(path: Path, tensors: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, {"format": "pt"})
    except OSError:
        raise
    except Exception as error:
        raise UnsupportedStateError(f"safetensors cannot hold this checkpoint ({error})") from error
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def _metadata(source: Path, *, decoded: bool) -> Any:
    """Return what a native checkpoint holds besides its state, as it was saved or as it is in the file."""
    from slipstream.checkpoint.native import NativeFile

    if not is_native(source):
        return None
    with reading(source), NativeFile(source) as file:
        return file.metadata if decoded else file.container.values.get("metadata")


def _only_tensors(state: Any, *, tensors_only: bool) -> dict[str, Any]:
    """Return a flat dict of tensors, none of which shares memory with another, as safetensors wants it."""
    from slipstream.schema.flatten import check_storable, flatten, is_tensor
    from slipstream.schema.nodes import name_of
    from slipstream.tensors import TORCH, resolve

    tensors: dict[str, Any] = {}
    storages: set[int] = set()
    for key, value in flatten(state, opaque=True).values(TORCH):
        name = name_of(key)
        if not is_tensor(value):
            if tensors_only:
                continue
            raise UnsupportedStateError(
                f"{name_of(key, 'the state')!r} is of type {type(value).__qualname__}, and safetensors holds "
                "tensors only; --tensors-only leaves out the rest"
            )
        check_storable(value, key)
        if name in tensors:
            raise UnsupportedStateError(f"two tensors would be called {name!r}, and safetensors has no nesting")
        tensor = resolve(value).contiguous()
        # Safetensors refuses tensors that share memory.
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages:
            tensor = tensor.clone()
        tensors[name] = tensor
        storages.add(storage)
    return tensors


def _left_out(state: Any, content: Any) -> list[str]:
    from slipstream.cli.ckpt.leaves import by_name

    if content is state or not (count := len(by_name(state)) - len(content)):
        return []
    return [f"{count} {'value that is no tensor' if count == 1 else 'values that are no tensors'}"]


def _check_equal(written: Path, content: Any, target: Path) -> bool:
    """Read back what was written, and return whether that takes trust in the file, which here is our own."""
    from slipstream.checkpoint.load import load_checkpoint
    from slipstream.cli.ckpt.compare import compare
    from slipstream.cli.ckpt.leaves import by_name

    needs_trust = False
    try:
        try:
            found = load(written)
        except CorruptFileError as error:
            if not is_refusal(error):
                raise
            found, needs_trust = load_checkpoint(written, weights_only=False), True
    except (CorruptFileError, FormatVersionError) as error:
        reason = str(error).removeprefix(f"{written}: ")
        raise SlipstreamError(f"{target}: was not written, for it could not be read back: {reason}") from error
    changes = compare(by_name(content), by_name(found))
    if not changes.equal:
        raise SlipstreamError(f"{target}: was not written, for it read back otherwise: {next(changes.lines())}")
    return needs_trust
