"""``slipstream ckpt``: look into checkpoints, check, convert and compare them, and tidy a folder of them.

Commands import what they need when they run; this module imports neither torch nor NumPy.
"""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

import contextlib
import errno
import json as json_text
import math
import os
import pickle
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from slipstream.errors import CorruptFileError, FormatVersionError, SlipstreamError, UnsupportedStateError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.checkpoint import NativeFile
    from slipstream.store import Container

app = typer.Typer(
    help="Look into checkpoints, check, convert and compare them, and tidy a folder of them.",
    epilog="Example: slipstream ckpt inspect checkpoint_iter_100.slip",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Format(StrEnum):
    """What a checkpoint can be converted to."""

    NATIVE = "native"
    PT = "pt"
    LZ4 = "lz4"
    SAFETENSORS = "safetensors"


_SUFFIXES = {
    ".slip": Format.NATIVE,
    ".pt": Format.PT,
    ".pth": Format.PT,
    ".lz4": Format.LZ4,
    ".safetensors": Format.SAFETENSORS,
}
_PATTERN = "checkpoint_iter_*.slip"
_TAG = "$"  # as in slipstream.tree, which would import torch
_MAX_BYTES = 1 << 48

FileArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command(epilog="Example: slipstream ckpt inspect checkpoint_iter_100.slip")
def inspect(file: FileArgument, *, json: JsonOption = False) -> None:
    """Show the tensors of a checkpoint, and what was saved along; of a native one it reads the index only."""
    with _one_line(file):
        _check_regular(file)
        report = _inspect_native(file) if _is_native(file) else _inspect_loaded(file)
        _print_json(report.document()) if json else report.show()


@app.command(epilog="Example: slipstream ckpt verify runs/walker && echo sound")
def verify(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help=f"A checkpoint, or a folder of {_PATTERN}.", show_default=False)
    ],
    *,
    json: JsonOption = False,
) -> None:
    """Compare every byte with its checksum, in the parents of a delta too; exits with 1 if any is damaged."""
    with _one_line(path):
        verdicts = _verify_all(path)
        sound = not any(verdict.problems for verdict in verdicts)
        if json:
            _print_json({"path": str(path), "sound": sound, "files": [verdict.document() for verdict in verdicts]})
        else:
            for verdict in verdicts:
                _print(*verdict.problems, verdict.sentence())
    if not sound:
        raise typer.Exit(1)


@app.command(epilog="Example: slipstream ckpt convert checkpoint_iter_100.slip policy.pt")
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
    with _one_line(source):
        _print(_convert(source, target, format or _format_of(target), force=force, tensors_only=tensors_only))


@app.command(epilog="Example: slipstream ckpt diff before.slip after.pt")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any format.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    *,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints bit for bit, whatever their formats; exits with 1 if they differ."""
    with _one_line(a):
        changes = _compare(_flatten(_load(a)), _flatten(_load(b)))
        if json:
            _print_json({"a": str(a), "b": str(b), **changes.document()})
        else:
            _print(*changes.lines(), f"{a} and {b}: {changes.summary()}")
    if not changes.equal:
        raise typer.Exit(1)


@app.command(epilog="Example: slipstream ckpt prune runs/walker --keep-last 3 --keep-best reward:max --dry-run")
def prune(
    folder: Annotated[Path, typer.Argument(help=f"A folder of {_PATTERN}.", show_default=False)],
    *,
    keep_last: Annotated[int, typer.Option(min=1, help="Keep the newest so many.", show_default=False)],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep multiples of this step, too.")] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC:max|min", help="Keep the best by this metric, too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
) -> None:
    """Delete the checkpoints that no rule keeps; damaged ones are neither counted nor deleted."""
    with _one_line(folder):
        best = None if keep_best is None else _parse_best(keep_best)
        _print(_prune(folder, keep_last, keep_every, best, dry_run=dry_run))


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turn a state nested so deeply that reading it fails into a sentence."""
    try:
        yield
    except RecursionError:
        raise SlipstreamError(f"{path}: its state is nested too deeply") from None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Take any failure to make sense of a file for damage."""
    try:
        yield
    except (SlipstreamError, OSError, RecursionError):
        raise
    except Exception as error:
        raise CorruptFileError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


def _print(*lines: str) -> None:
    from slipstream.cli.output import console, plain

    for line in lines:
        console().print(plain(line))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _print_json(document: dict[str, Any]) -> None:
    from slipstream.cli.output import print_json

    print_json(document)


def _check_regular(path: Path) -> None:
    if path.is_dir():
        raise CorruptFileError(f"{path}: is a folder, expected a file")
    path.stat()  # raises if there is none
    if not path.is_file():
        raise CorruptFileError(f"{path}: is not a regular file")


def _is_native(path: Path) -> bool:
    from slipstream.store.container import MAGIC

    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _find_format(path: Path) -> Format:
    from slipstream.checkpoint import find_format

    _check_regular(path)
    kind = Format(find_format(path))
    if kind is Format.SAFETENSORS:
        _require_safetensors()
    return kind


def _require_safetensors() -> None:
    try:
        import safetensors.torch  # noqa: F401 - an extra
    except ImportError as error:
        raise SlipstreamError("safetensors files need a package that is missing: pip install safetensors") from error


def _load(path: Path) -> Any:
    from slipstream.checkpoint import load_checkpoint

    _find_format(path)
    with _reading(path):
        return load_checkpoint(path)


# --- a state as names and leaves ---


def _flatten(state: Any) -> dict[str, Any]:
    """Return every tensor, array and plain value of a state under the names on its path, joined by slashes."""
    from slipstream.tree import map_leaves

    flat: dict[str, Any] = {}

    def add(value: Any, path: tuple[str, ...]) -> None:
        flat[_unique("/".join(path) or "state", flat)] = value

    map_leaves(state, add, add)
    return flat


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    unique, number = name, 2
    while unique in taken:
        unique, number = f"{name}#{number}", number + 1
    return unique


def _leaves(flat: Mapping[str, Any]) -> dict[str, Any]:
    from slipstream.tree import is_leaf

    return {name: value for name, value in flat.items() if is_leaf(value)}


def _is_tensor(value: Any) -> bool:
    import numpy as np

    from slipstream.tree import is_leaf

    return is_leaf(value) and not isinstance(value, np.ndarray)


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype).removeprefix("torch.") if _is_tensor(leaf) else f"numpy {leaf.dtype.name}"


def _kind(leaf: Any) -> str:
    return f"{_dtype(leaf)}{list(leaf.shape)}"


# --- inspect ---


@dataclass
class _Row:
    """One tensor: how large it is, and how much of the file it takes, if that can be told."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    codec: str = "-"
    memory_bytes: int = 0
    stored_bytes: int | None = None

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": self.shape,
            "codec": self.codec,
            "bytes": self.nbytes,
            "stored_bytes": self.stored_bytes,
        }


@dataclass
class _Report:
    """What there is to say about a checkpoint."""

    file: Path
    format: str
    rows: list[_Row]
    metadata: Any = None
    written_by: str | None = None
    parent: dict[str, Any] | None = None
    file_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.file_bytes = self.file.stat().st_size

    @property
    def raw_bytes(self) -> int:
        """The memory of all tensors; what is tied counts once."""
        return sum(row.memory_bytes for row in self.rows)

    def document(self) -> dict[str, Any]:
        known = self.metadata if isinstance(self.metadata, dict) else {}
        return {
            "file": str(self.file),
            "format": self.format,
            "file_bytes": self.file_bytes,
            "written_by": self.written_by,
            "step": known.get("step"),
            "metrics": known.get("metrics"),
            "metadata": self.metadata,
            "parent": self.parent,
            "tensors": [row.document() for row in self.rows],
            "bytes": self.raw_bytes,
        }

    def show(self) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.filesize import decimal
        from rich.table import Table

        from slipstream.cli.files import ratio
        from slipstream.cli.output import plain, print_table

        author = f", written by {self.written_by}" if self.written_by else ""
        _print(f"{self.file}: {self.format} checkpoint, {decimal(self.file_bytes)}{author}", *self._context())
        table = Table(box=SIMPLE_HEAD)
        for column in ("name", "dtype", "shape", "codec"):
            table.add_column(column, no_wrap=True)
        for column in ("size", "stored", "ratio"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            stored = row.stored_bytes
            table.add_row(
                plain(row.name),
                plain(row.dtype),
                "x".join(map(str, row.shape)),
                row.codec,
                decimal(row.nbytes),
                "-" if stored is None else decimal(stored),
                "-" if stored is None else ratio(row.memory_bytes, stored),
            )
        print_table(table)
        packed = f"{decimal(self.raw_bytes)} in a file of {decimal(self.file_bytes)}"
        _print(f"{_count(len(self.rows), 'tensor')}, {packed} ({ratio(self.raw_bytes, self.file_bytes)})")

    def _context(self) -> Iterator[str]:
        if isinstance(self.metadata, dict):
            yield from (f"{key}: {_inline_json(value)}" for key, value in self.metadata.items())
        elif self.metadata is not None:
            yield f"metadata: {_inline_json(self.metadata)}"
        if self.parent:
            same = len(self.parent["same"])
            yield (
                f"delta of {self.parent['file']}, depth {self.parent['depth']}: "
                f"{same} {'entry is' if same == 1 else 'entries are'} the same there"
            )


def _inline_json(value: Any) -> str:
    return value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False)


def _inspect_native(file: Path) -> _Report:
    """Read the index, without torch: importing it would take longer than everything else."""
    from slipstream.store import Container

    with Container(file) as container, _reading(file):
        values = container.values
        if container.kind != "checkpoint" or "state" not in values:
            raise CorruptFileError(f"{file}: is a container of kind {container.kind!r}, expected a checkpoint")
        parent = _read_parent(file, values.get("parent"))
        rows = _native_rows(container, set(parent["same"]) if parent else set())
        return _Report(file, "native", rows, _shown(values.get("metadata")), container.written_by, parent)


def _read_parent(file: Path, parent: Any) -> dict[str, Any] | None:
    if not parent:
        return None
    kinds = {"file": str, "identity": str, "depth": int, "same": list}
    sound = isinstance(parent, dict) and all(isinstance(parent.get(key), kind) for key, kind in kinds.items())
    if not sound or not all(isinstance(name, str) for name in parent["same"]):
        raise CorruptFileError(f"{file}: what it says of its parent is not as a writer writes it")
    return {key: parent[key] for key in kinds}


def _native_rows(container: Container, same: set[str]) -> list[_Row]:
    entries, seen = container.entries, set()
    rows = []
    for name, node in _leaf_nodes(container.values["state"]):
        row = _row(container.path, name, node)
        home = node.get("entry")
        if "hex" in node:
            row.codec, row.memory_bytes = "inline", row.nbytes
        elif home in seen:
            row.codec = "tied"
        elif home in entries:
            entry = entries[home]
            row.codec, row.memory_bytes, row.stored_bytes = entry.codec.name, entry.nbytes, entry.stored_bytes
        elif home in same:
            row.codec, row.memory_bytes = "same", row.nbytes
        else:
            raise CorruptFileError(f"{container.path}: {name!r} is in an entry {home!r}, which it does not have")
        seen.add(home)
        rows.append(row)
    return rows


def _row(file: Path, name: str, node: Mapping[str, Any]) -> _Row:
    dtype, shape = node.get("dtype"), node.get("shape")
    sizes = shape if isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) else None
    if not isinstance(dtype, str) or sizes is None or math.prod(sizes) > _MAX_BYTES:
        raise CorruptFileError(f"{file}: {name!r} has a dtype or shape that no writer writes")
    if node[_TAG] == "array":
        import numpy as np

        array = np.dtype(dtype)
        return _Row(name, f"numpy {array.name}", sizes, math.prod(sizes) * array.itemsize)
    return _Row(name, dtype, sizes, math.prod(sizes) * _itemsize(dtype))


def _itemsize(dtype: str) -> int:
    """Return the bytes of an element from the name of its torch dtype, such as ``bfloat16`` or ``float8_e5m2``."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _leaf_nodes(structure: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Walk a state as `slipstream.tree` writes it, and yield its tensors and arrays with their names."""
    stack: list[tuple[tuple[str, ...], Any]] = [((), structure)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, dict) and node.get(_TAG) in ("tensor", "array"):
            yield "/".join(path) or "state", node
        else:
            stack += [((*path, key), value) for key, value in reversed(_members(node))]


def _members(node: Any) -> list[tuple[str, Any]]:
    inner = node.get("v") if isinstance(node, dict) and _TAG in node else node
    if isinstance(node, dict) and node.get(_TAG) in ("dict", "OrderedDict") and isinstance(inner, list):
        return [(str(_shown(key)), value) for key, value in inner]
    if isinstance(inner, dict):
        return list(inner.items())
    return [(str(i), value) for i, value in enumerate(inner)] if isinstance(inner, list) else []


def _shown(node: Any) -> Any:
    """Return plain values as `slipstream.tree` writes them in the form that JSON would give them."""
    if isinstance(node, list):
        return [_shown(value) for value in node]
    if not isinstance(node, dict):
        return node
    kind, inner = node.get(_TAG), node.get("v")
    if kind is None:
        return {key: _shown(value) for key, value in node.items()}
    if kind in ("dict", "OrderedDict") and isinstance(inner, list):
        return {str(_shown(key)): _shown(value) for key, value in inner}
    if kind == "float":
        return str(struct.unpack("<d", bytes.fromhex(inner))[0]) if isinstance(inner, str) else inner
    if kind == "numpy" and isinstance(inner, list):
        return _shown_scalar(inner)
    if kind in ("tensor", "array"):
        return f"{kind} {node.get('dtype')}{node.get('shape')}"
    return _shown(inner)


def _shown_scalar(inner: list[str]) -> Any:
    import numpy as np

    value = np.frombuffer(bytes.fromhex(inner[1]), np.dtype(inner[0]))[0].item()
    plain = isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)


def _inspect_loaded(file: Path) -> _Report:
    """Load a checkpoint of another format: these have no index that says it all."""
    kind = _find_format(file)
    rows, seen = [], set()
    for name, leaf in _leaves(_flatten(_load(file))).items():
        row = _Row(name, _dtype(leaf), list(leaf.shape), math.prod(leaf.shape) * leaf.dtype.itemsize)
        memory = _memory_of(leaf)
        if memory is not None and memory in seen:
            row.codec = "tied"
        else:
            row.memory_bytes = row.nbytes
        seen.add(memory)
        rows.append(row)
    return _Report(file, kind.value, rows)


def _memory_of(leaf: Any) -> tuple[Any, ...] | None:
    """Return what tells the memory of a tensor from that of others, or None if there is no telling."""
    strided = _is_tensor(leaf) and str(leaf.layout) == "torch.strided" and leaf.numel()
    return (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()) if strided else None


# --- verify ---


@dataclass
class _Verdict:
    """What became of checking one file."""

    file: Path
    format: str = "unknown"
    chunks: int = 0
    parents: int = 0
    checked: bool = True
    problems: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "format": self.format,
            "chunks": self.chunks,
            "parents": self.parents,
            "has_checksums": self.checked,
            "problems": self.problems,
        }

    def sentence(self) -> str:
        if self.problems:
            return f"{self.file}: damaged"
        if not self.checked:
            return f"{self.file}: can be read, but has no checksums to compare it with"
        parents = f", its {_count(self.parents, 'parent')} included," if self.parents else ""
        return f"{self.file}: sound" + (f", all {self.chunks} chunks{parents} match" if self.chunks else "")


def _verify_all(path: Path) -> list[_Verdict]:
    if not path.is_dir():
        return [_verify(path, "checking", {})]
    files = sorted(path.glob(_PATTERN), key=lambda file: (len(file.name), file.name))
    if not files:
        raise FileNotFoundError(errno.ENOENT, f"holds no {_PATTERN}", str(path))
    known: dict[tuple[int, int], list[str]] = {}
    return [_verify(file, f"checking {number} of {len(files)}", known) for number, file in enumerate(files, 1)]


def _verify(file: Path, label: str, known: dict[tuple[int, int], list[str]]) -> _Verdict:
    """Check one file; `known` holds the problems of the containers that were checked before, by inode."""
    verdict = _Verdict(file)
    _check_regular(file)
    try:
        kind = _find_format(file)
        verdict.format = kind.value
        verdict.checked = kind in (Format.NATIVE, Format.LZ4) or _is_zip(file)
        if kind is Format.NATIVE:
            with _reading(file):
                _verify_native(verdict, label, known)
        else:
            with _busy(label):
                _load(file)
    except (CorruptFileError, FormatVersionError) as error:
        if _is_refusal(error):
            raise
        verdict.problems.append(str(error))
    return verdict


def _verify_native(verdict: _Verdict, label: str, known: dict[tuple[int, int], list[str]]) -> None:
    from slipstream.checkpoint import NativeFile

    with NativeFile(verdict.file) as file:
        member = file
        while True:
            verdict.problems += _damage(member, label, known)
            verdict.chunks += sum(len(entry.chunks) for entry in member.container.entries.values())
            _ = member.metadata  # raises if it cannot be read
            if not member.parent:
                break
            member = member.open_parent()
            verdict.parents += 1


def _damage(file: NativeFile, label: str, known: dict[tuple[int, int], list[str]]) -> list[str]:
    from rich.progress import track

    from slipstream.cli.output import console

    status = file.container.path.stat()
    key = (status.st_dev, status.st_ino)
    if key not in known:
        progress = console(stderr=True)
        outcomes = track(
            file.container.find_damage(),
            label,
            sum(len(entry.chunks) for entry in file.container.entries.values()),
            console=progress,
            transient=True,
            disable=not progress.is_terminal,
        )
        known[key] = [str(error) for error in outcomes if error is not None]
    return known[key]


def _is_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"


def _is_refusal(error: Exception) -> bool:
    """Tell whether a file is sound as far as that can be told, but would have to be trusted to be loaded."""
    return isinstance(error.__cause__, pickle.UnpicklingError) and "which is refused" in str(error)


@contextlib.contextmanager
def _busy(label: str) -> Iterator[None]:
    """Show on a terminal that something is going on."""
    from slipstream.cli.output import console

    progress = console(stderr=True)
    with progress.status(label) if progress.is_terminal else contextlib.nullcontext():
        yield


# --- convert ---


def _format_of(target: Path) -> Format:
    try:
        return _SUFFIXES[target.suffix]
    except KeyError:
        raise SlipstreamError(
            f"{target}: its suffix names no format, expected .slip, .pt, .pt.lz4, .safetensors, or --format"
        ) from None


def _convert(source: Path, target: Path, kind: Format, *, force: bool, tensors_only: bool) -> str:
    """Write `target` and return a sentence about it; on any error there is none, or the old one."""
    from rich.filesize import decimal

    from slipstream.store.atomic import make_folder, sync_folder

    target = Path(os.path.realpath(target))
    if target.is_dir():
        raise SlipstreamError(f"{target}: is a folder, expected a file")
    if target.exists() and not force:
        raise FileExistsError(errno.EEXIST, "exists already; --force overwrites it", str(target))
    if kind is Format.SAFETENSORS:
        _require_safetensors()
    state, metadata = _load(source), _metadata(source, decoded=kind is Format.NATIVE)
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
    trust = "; it holds NumPy values or the like, which load with weights_only=False only" if needs_trust else ""
    return f"{target}: {kind.value} checkpoint, {decimal(target.stat().st_size)}, read back and equal{without}{trust}"


def _write(path: Path, content: Any, kind: Format, metadata: Any) -> Path:
    from slipstream.checkpoint import write_native, write_portable

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
    from slipstream.checkpoint import NativeFile

    if not _is_native(source):
        return None
    with _reading(source), NativeFile(source) as file:
        return file.metadata if decoded else file.container.values.get("metadata")


def _only_tensors(state: Any, *, tensors_only: bool) -> dict[str, Any]:
    """Return a flat dict of tensors, none of which shares memory with another, as safetensors wants it."""
    from slipstream.tensors import check_storable, settled
    from slipstream.tree import map_leaves

    tensors: dict[str, Any] = {}
    storages: set[int] = set()

    def add(leaf: Any, path: tuple[str, ...]) -> None:
        name = "/".join(path) or "state"
        if not _is_tensor(leaf):
            refuse(leaf, path)
            return
        check_storable(leaf, (name,))
        if name in tensors:
            raise UnsupportedStateError(f"two tensors would be called {name!r}, and safetensors has no nesting")
        tensor = settled(leaf).contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)

    def refuse(value: Any, path: tuple[str, ...]) -> None:
        if not tensors_only:
            raise UnsupportedStateError(
                f"{'/'.join(path) or 'the state'!r} is of type {type(value).__qualname__}, and safetensors holds "
                "tensors only; --tensors-only leaves out the rest"
            )

    map_leaves(state, add, refuse)
    return tensors


def _left_out(state: Any, content: Any) -> list[str]:
    if content is state or not (count := len(_flatten(state)) - len(content)):
        return []
    return [f"{count} {'value that is no tensor' if count == 1 else 'values that are no tensors'}"]


def _check_equal(written: Path, content: Any, target: Path) -> bool:
    """Read back what was written, and return whether that takes trust in the file, which here is our own."""
    from slipstream.checkpoint import load_checkpoint

    needs_trust = False
    try:
        try:
            found = _load(written)
        except CorruptFileError as error:
            if not _is_refusal(error):
                raise
            found, needs_trust = load_checkpoint(written, weights_only=False), True
    except (CorruptFileError, FormatVersionError) as error:
        reason = str(error).removeprefix(f"{written}: ")
        raise SlipstreamError(f"{target}: was not written, for it could not be read back: {reason}") from error
    changes = _compare(_flatten(content), _flatten(found))
    if not changes.equal:
        raise SlipstreamError(f"{target}: was not written, for it read back otherwise: {next(changes.lines())}")
    return needs_trust


# --- diff ---


@dataclass
class _Changes:
    """How two checkpoints differ, by name."""

    same: list[str] = field(default_factory=list)
    only_in_a: dict[str, str] = field(default_factory=dict)
    only_in_b: dict[str, str] = field(default_factory=dict)
    differ: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not (self.only_in_a or self.only_in_b or self.differ or self.values)

    def document(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "same": self.same,
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "differ": self.differ,
            "values": {name: {"a": a, "b": b} for name, (a, b) in self.values.items()},
        }

    def lines(self) -> Iterator[str]:
        yield from (f"only in A: {name} {kind}" for name, kind in self.only_in_a.items())
        yield from (f"only in B: {name} {kind}" for name, kind in self.only_in_b.items())
        yield from map(_difference_line, self.differ)
        for name, (a, b) in self.values.items():
            yield f"value differs: {name} {'is absent' if a is None else a} -> {'is absent' if b is None else b}"

    def summary(self) -> str:
        if self.equal:
            return f"equal, {_count(len(self.same), 'tensor')}"
        counts = {
            "equal": len(self.same),
            "differ": len(self.differ),
            "only in A": len(self.only_in_a),
            "only in B": len(self.only_in_b),
        }
        tensors = ", ".join(f"{count} {what}" for what, count in counts.items())
        return f"of the tensors {tensors}; and {_count(len(self.values), 'difference')} in other values"


def _difference_line(change: Mapping[str, Any]) -> str:
    a, b, name = change["a"], change["b"], change["name"]
    kinds = a if a == b else f"{a} -> {b}"
    if change["elements_differing"] is None:
        return f"differs: {name} {kinds}"
    largest = change["max_abs_difference"]
    by = (
        ""
        if largest is None
        else f", by up to {largest if isinstance(largest, (int, str)) else format(largest, '.6g')}"
    )
    return f"differs: {name} {kinds}: {change['elements_differing']} of {change['elements']} elements{by}"


def _compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> _Changes:
    changes = _Changes()
    mine, theirs = _leaves(a), _leaves(b)
    changes.only_in_a = {name: _kind(leaf) for name, leaf in mine.items() if name not in theirs}
    changes.only_in_b = {name: _kind(leaf) for name, leaf in theirs.items() if name not in mine}
    for name in (name for name in mine if name in theirs):
        change = _difference(name, mine[name], theirs[name])
        changes.same.append(name) if change is None else changes.differ.append(change)
    for name in dict.fromkeys([*a, *b]):
        first = a[name] if name in a and name not in mine else _ABSENT
        second = b[name] if name in b and name not in theirs else _ABSENT
        if not _same_value(first, second):
            changes.values[name] = (_brief(first), _brief(second))
    return changes


_ABSENT = object()


def _same_value(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and (repr(a) == repr(b) or bool(a == b)))  # repr: a NaN equals itself


def _brief(value: Any) -> str | None:
    if value is _ABSENT:
        return None
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _difference(name: str, a: Any, b: Any) -> dict[str, Any] | None:
    """Describe how two leaves differ, or return None if they are equal bit for bit."""
    import numpy as np

    change = {"name": name, "a": _kind(a), "b": _kind(b), "elements": math.prod(a.shape)}
    nothing = {"elements_differing": None, "max_abs_difference": None}
    if tuple(a.shape) != tuple(b.shape):
        return {**change, **nothing}
    if change["a"] == change["b"]:
        first, second = _words(a, name), _words(b, name)
        unequal = (first != second).reshape(math.prod(a.shape), -1).any(axis=1) if first.size else first != second
        if not unequal.any():
            return None
    else:
        unequal = np.ones(math.prod(a.shape), np.bool_)
    x, y = _numbers(a, name), _numbers(b, name)
    if x is None or y is None:
        return {**change, "elements_differing": int(unequal.sum()), "max_abs_difference": None}
    x, y = x[unequal], y[unequal]
    count = len(x) if change["a"] == change["b"] else int(((x != y) & ~((x != x) & (y != y))).sum())  # noqa: PLR0124
    return {**change, "elements_differing": count, "max_abs_difference": _largest(x, y)}


def _dense(leaf: Any, name: str) -> Any:
    from slipstream.tensors import check_storable, settled

    check_storable(leaf, (name,))
    return settled(leaf).cpu().contiguous()


def _words(leaf: Any, name: str) -> NDArray[Any]:
    """Return a copy of the bits of a leaf as whole numbers, one or two per element."""
    import numpy as np

    from slipstream.tensors import copy_memory

    if isinstance(leaf, np.ndarray):
        memory, itemsize = np.frombuffer(leaf.tobytes(), np.uint8), leaf.dtype.itemsize
    else:
        tensor, itemsize = _dense(leaf, name), leaf.dtype.itemsize
        memory = np.empty(tensor.numel() * itemsize, np.uint8)
        copy_memory(memory.ctypes.data, tensor.data_ptr(), memory.nbytes)
    width = next((width for width in (8, 4, 2) if itemsize % width == 0 and itemsize), 1)
    return memory.view(f"u{width}")


def _numbers(leaf: Any, name: str) -> NDArray[Any] | None:
    """Return the elements of a leaf as NumPy can subtract them, flat; None if they are no numbers."""
    import numpy as np

    if not isinstance(leaf, np.ndarray):
        tensor = _dense(leaf, name)
        try:
            if tensor.is_complex():
                tensor = tensor.cdouble()
            elif tensor.is_floating_point():
                tensor = tensor.double()
            leaf = tensor.numpy()
        except (RuntimeError, TypeError):  # a dtype that torch can store and not convert
            return None
    if leaf.dtype.kind not in "biufc":
        return None
    return np.ascontiguousarray(leaf.astype(np.uint8) if leaf.dtype.kind == "b" else leaf).reshape(-1)


def _largest(x: NDArray[Any], y: NDArray[Any]) -> int | float | str | None:
    """Return the largest distance between two arrays of numbers; exact for integers of one type."""
    import numpy as np

    if not x.size:
        return None
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        distance = np.maximum(x, y) - np.minimum(x, y)  # wraps around, to the right unsigned number
        return int(distance.view(f"u{x.dtype.itemsize}").max())
    with np.errstate(all="ignore"):
        wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
        x, y = x.astype(wide), y.astype(wide)
        distance = np.abs(np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, x - y))
    largest = float(distance.max())
    return largest if math.isfinite(largest) else str(largest)  # JSON has no such numbers


# --- prune ---


def _parse_best(text: str) -> tuple[str, Literal["min", "max"]]:
    metric, _, mode = text.rpartition(":")
    if metric and mode == "max":
        return metric, "max"
    if metric and mode == "min":
        return metric, "min"
    raise SlipstreamError(f"--keep-best is {text!r}, expected a metric and max or min, such as reward:max")


def _prune(
    folder: Path,
    keep_last: int,
    keep_every: int | None,
    best: tuple[str, Literal["min", "max"]] | None,
    *,
    dry_run: bool,
) -> str:
    """Delete what the rules do not keep, or say what that would be, and return a sentence about it."""
    from slipstream.checkpoint import CheckpointManager

    if not folder.is_dir():
        folder.stat()  # raises if there is nothing
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    _check_prunable(folder)
    with (
        _mirror(folder) if dry_run else contextlib.nullcontext(folder) as place,
        CheckpointManager(place, keep_last, keep_every, best) as manager,
    ):
        before = len(manager.steps())
        if best and before and manager.best() is None:
            raise SlipstreamError(f"{folder}: no checkpoint has a metric {best[0]!r} to tell the best by")
        with _reading(folder):
            deleted = manager.prune()
    if not deleted:
        return f"{folder}: nothing to delete, {_count(before, 'checkpoint')}"
    verb = "would delete" if dry_run else "deleted"
    return f"{folder}: {verb} {len(deleted)} of {_count(before, 'checkpoint')}: {', '.join(map(str, deleted))}"


def _check_prunable(folder: Path) -> None:
    """Raise unless every checkpoint is readable or damaged: pruning deletes what the ones it cannot read rest on."""
    from slipstream.checkpoint import NativeFile

    for path in folder.glob(_PATTERN):
        with _reading(path), contextlib.ExitStack() as stack:
            try:
                file = member = stack.enter_context(NativeFile(path))
                while member.parent:
                    member = member.open_parent()
            except CorruptFileError:
                continue
            try:
                _ = file.metadata
            except CorruptFileError as error:
                raise SlipstreamError(f"{error}; its tensors may be whole, so nothing was deleted") from error


@contextlib.contextmanager
def _mirror(folder: Path) -> Iterator[Path]:
    """Yield a folder of links to the checkpoints of another one: what is deleted there shows what would be here."""
    from slipstream.checkpoint.manager import BASES

    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        mirror = Path(name)
        (mirror / BASES).mkdir()
        for file in (*folder.glob(_PATTERN), *(folder / BASES).glob("*.slip")):
            (mirror / file.relative_to(folder)).symlink_to(file.absolute())
        yield mirror
