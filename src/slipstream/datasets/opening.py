"""Open HDF5 files that others wrote, without trusting them: every failure becomes a sentence that names the file.

Links that lead out of a file are refused, not followed: a dataset from the internet must not read other files of the
person who opens it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.identity import Identity
from slipstream.datasets.names import decoded, encoded, name_of, shown
from slipstream.datasets.stored import Stored, creation_of, read_all
from slipstream.errors import (
    ConfigurationError,
    CorruptFileError,
    DatasetError,
    MissingEntryError,
    SlipstreamError,
)
from slipstream.store.local import open_regular

with contextlib.suppress(ImportError):
    import hdf5plugin  # noqa: F401 - registers more filters with HDF5

SUFFIXES = (".hdf5", ".h5", ".hdf")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LFS_POINTER = b"version https://git-lfs"
_MAX_LISTED = 12
_BLOCK_BYTES = 4 << 20
# How HDF5 says that a writer has the file open, or was killed before it could clear its mark.
_IN_USE = re.compile(r"already open for|unable to lock|not already open for SWMR")


class DanglingLinkError(DatasetError):
    """A soft link leads nowhere."""


def find_files(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the HDF5 files of a path: a file, several, or a folder with everything below it.

    Files of a folder are in the order of the numbers in their names. A Minari dataset is such a folder: its recording
    is ``data/main_data.hdf5``.

    Raises:
        FileNotFoundError: If there is no such file.
        DatasetError: If a folder has no HDF5 file.
        ConfigurationError: If `path` is an empty list.
    """
    if isinstance(path, (str, os.PathLike)):
        folder = Path(path)
        return _files_below(folder) if folder.is_dir() else [folder]
    files: list[Path] = []
    for one in path:
        files += find_files(one)
    if not files:
        raise ConfigurationError("path is an empty list, expected at least one file")
    return files


def _files_below(folder: Path) -> list[Path]:
    """Return the HDF5 files in a folder and its folders; skips hidden ones and follows no links to folders."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        recorded = [name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")]
        found += [Path(parent, name) for name in recorded]
    if not found:
        raise DatasetError(f"{folder}: is a folder without a file that ends in {' or '.join(SUFFIXES)}")
    return sorted(found, key=lambda file: [natural(part) for part in file.relative_to(folder).parts])


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``demo_10`` after ``demo_9``."""
    key = []
    for part in re.split(r"([0-9]+)", name):
        number = int(part) if part.isdigit() and part.isascii() and len(part) < 100 else -1
        key.append((number, "" if number >= 0 else part))
    return key


@contextlib.contextmanager
def opened(path: Path, known: Identity | None = None) -> Iterator[tuple[h5py.File, Identity]]:
    """Open a file for reading, and raise at the end if it changed in the meantime.

    Args:
        path: The file.
        known: What it was when it was opened before; computing it again would read a sample of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is not an HDF5 file, is truncated, or is damaged where it is read.
        DatasetError: If a writer has it open or was killed, if it changed in the meantime, or needs too much memory.
    """
    identity = Identity.of(path) if known is None else known.check(path)
    file = open_hdf5(path)
    try:
        with file, _naming(path):
            yield file, identity
    finally:
        file.close()
    identity.check(path)


def open_hdf5(path: Path) -> h5py.File:
    """Open a file with HDF5 for reading, alongside a writer in SWMR mode if there is one.

    Raises:
        CorruptFileError: If HDF5 cannot open it.
        DatasetError: If a writer has it open, or did not close it.
    """
    try:
        return h5py.File(path, "r", locking="best-effort")
    except (OSError, RuntimeError) as error:
        reason = error
    _check_signature(path)
    if not is_in_use(reason):
        what = "its superblock or root group is damaged"
        if "truncated" in str(reason):
            what = "it is cut off, or its writer was killed"
        raise CorruptFileError(f"{path}: cannot be opened as HDF5: {what} ({_inner(str(reason))})") from reason
    # A writer in SWMR mode ("single writer, multiple readers") allows others to read, even after it was killed.
    try:
        return h5py.File(path, "r", swmr=True)
    except (OSError, RuntimeError) as error:
        raise DatasetError(
            f"{path}: is in use or not closed: another process is writing it, or its writer was killed "
            f"({_inner(str(reason))}); close the writer, or if there is none run `h5clear -s {path}`"
        ) from error


def is_in_use(error: BaseException) -> bool:
    """Tell whether HDF5 refused to open a file because of a writer."""
    locked = isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK)
    return (locked and "lock" in str(error)) or _IN_USE.search(str(error)) is not None


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Report what HDF5 cannot read as damage; an error of this package's own code passes as it is."""
    try:
        yield
    except SlipstreamError:
        raise
    except MemoryError as error:
        raise DatasetError(f"{path}: reading it needs more memory than this process may use") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if not _is_from_hdf5(error):
            raise
        raise CorruptFileError(f"{path}: HDF5 cannot read it ({_inner(str(error)) or type(error).__name__})") from error


def _is_from_hdf5(error: BaseException) -> bool:
    """Tell whether an exception was raised inside h5py: by HDF5, or by what h5py made of bytes in the file."""
    if isinstance(error, UnicodeDecodeError):
        return True
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return "h5py" in Path(traceback.tb_frame.f_code.co_filename).parts


def _check_signature(path: Path) -> None:
    """Look for HDF5's signature where it may be: at 0, 512, 1024, 2048 and so on."""
    with open_regular(path) as raw:
        size = os.fstat(raw.fileno()).st_size
        start = raw.read(len(_LFS_POINTER))
        offset = 0
        while offset < max(size, 1):
            raw.seek(offset)
            if raw.read(8) == _SIGNATURE:
                return
            offset = max(512, 2 * offset)
    if size == 0:
        raise CorruptFileError(f"{path}: is empty")
    if start == _LFS_POINTER:
        raise CorruptFileError(f"{path}: is not an HDF5 file but a pointer of Git LFS; run `git lfs pull`")
    raise CorruptFileError(f"{path}: is not an HDF5 file")


def _inner(reason: str) -> str:
    """Return the reason that HDF5 gives in parentheses, or all of a message, on one line."""
    reason = reason.strip("'\"")
    match = re.search(r"\((.*)\)", reason)
    if match is not None:
        reason = match[1]
    return " ".join(reason.split())


def member(group: h5py.Group, path: str) -> h5py.Group | h5py.Dataset | None:
    """Return what a path below a group stands for, or None.

    Raises:
        DatasetError: If a link on the way leads out of the file, or nowhere.
    """
    found = follow(group, path)
    if isinstance(found, h5py.h5d.DatasetID):
        return Stored(found)
    if isinstance(found, h5py.h5g.GroupID):
        return h5py.Group(found)
    return None


def dataset(group: h5py.Group, path: str) -> h5py.Dataset:
    """Return a dataset by its path below a group.

    Raises:
        MissingEntryError: If there is none; lists those that exist.
        DatasetError: If it leads out of the file.
    """
    found = _open_hard(group, path)
    if found is None:
        found = follow(group, path)
    if isinstance(found, h5py.h5d.DatasetID):
        data = Stored(found)
        check_inside(data)
        return data
    what = "is not there"
    if found is not None:
        what = "is a group, expected a dataset"
    where = f"{name_of(group).rstrip('/')}/{shown(path.strip('/'))}"
    raise MissingEntryError(f"{group.file.filename}: {where} {what}; {listing(group)}")


def known_dataset(group: h5py.Group, path: str) -> h5py.Dataset:
    """Return a dataset of a file that `describe` has looked at and that did not change: nothing is checked again."""
    found = _open_hard(group, path)
    if isinstance(found, h5py.h5d.DatasetID):
        return Stored(found)
    return dataset(group, path)


def _open_hard(group: h5py.Group, path: str) -> Any:
    """Return the identifier under a path without any soft or external link; else None. Much faster than `follow`."""
    name = encoded(path.strip("/"))
    links = group.id.links
    end = name.find(b"/")
    try:
        while end >= 0:
            if links.get_info(name[:end]).type != h5py.h5l.TYPE_HARD:
                return None
            end = name.find(b"/", end + 1)
        if links.get_info(name).type != h5py.h5l.TYPE_HARD:
            return None
        return h5py.h5o.open(group.id, name)
    except (KeyError, ValueError, RuntimeError, OSError):
        return None


def follow(group: h5py.Group, path: str) -> Any:
    """Return the identifier of what a path below a group leads to, or None.

    Raises:
        DatasetError: If a link on the way leads out of the file, or nowhere.
    """
    node = group.id
    for part in path.strip("/").split("/"):
        if not part:
            continue
        if not isinstance(node, h5py.h5g.GroupID):
            return None
        name = _link_name(node, part)
        if name is None:
            return None
        if node.links.get_info(name).type == h5py.h5l.TYPE_HARD:
            # A hard link cannot lead out of the file, nor nowhere.
            node = h5py.h5o.open(node, name)
        else:
            node = _follow_link(group, node, name)
    return node


def _link_name(node: Any, part: str) -> bytes | None:
    """Return the bytes of a link's name, which may be UTF-8 or Latin-1."""
    name = encoded(part)
    if node.links.exists(name):
        return name
    if part.isascii():
        return None
    with contextlib.suppress(UnicodeEncodeError):
        name = part.encode("latin-1")
        if node.links.exists(name):
            return name
    return None


def _follow_link(group: h5py.Group, node: Any, name: bytes) -> Any:
    """Return where a soft link leads; raise if that is not in the same file."""
    above = decoded(h5py.h5i.get_name(node) or b"")
    place = f"{group.file.filename}: {shown(above).rstrip('/')}/{shown(decoded(name))}"
    kind = node.links.get_info(name).type
    if kind == h5py.h5l.TYPE_EXTERNAL:
        other, target = node.links.get_val(name)
        raise DatasetError(
            f"{place} is an external link to {shown(decoded(target))} in {shown(decoded(other))}, and only what is in "
            "the file itself is read; copy it there"
        )
    if kind != h5py.h5l.TYPE_SOFT:
        raise DatasetError(f"{place} is a link of a kind that is not known")
    target = shown(decoded(node.links.get_val(name)))
    try:
        found = h5py.h5o.open(node, name)
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        raise DanglingLinkError(f"{place} is a link to {target}, which is not there") from error
    # The way of a soft link may lead through an external one.
    if h5py.h5o.get_info(found).fileno != h5py.h5o.get_info(group.id).fileno:
        other = decoded(h5py.h5f.get_name(found))
        raise DatasetError(
            f"{place} is a link to {target}, which leads to another file, {shown(other)}, and only what is in the file "
            "itself is read; copy it there"
        )
    return found


def check_inside(data: h5py.Dataset, depth: int = 4) -> None:
    """Raise if the values of a dataset are in other files; virtual datasets may be nested `depth` times."""
    plist = creation_of(data)
    others = [str(plist.get_external(number)[0]) for number in range(plist.get_external_count())]
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        others += [source.file_name for source in data.virtual_sources() if not _is_own(data, source, depth)]
    if others:
        raise DatasetError(
            f"{data.file.filename}: the values of {name_of(data)} are in another file, {others[0]}, and only what is "
            "in the file itself is read; copy them there"
        )


def _is_own(data: h5py.Dataset, source: Any, depth: int) -> bool:
    """Tell whether a part of a virtual dataset is in its own file, under a name that can be looked up."""
    if source.file_name != "." or "%" in source.dset_name or not depth:
        return False
    found = follow(data.file["/"], source.dset_name)
    if isinstance(found, h5py.h5d.DatasetID):
        check_inside(Stored(found), depth - 1)
    return True


def listing(group: h5py.Group) -> str:
    """Say which datasets are below a group."""
    # The tree of a file is built on the helpers of this module.
    from slipstream.datasets.tree import Tree  # noqa: PLC0415

    tree = Tree(group)
    paths = tree.leaves("")
    if not paths:
        where = name_of(group)
        return "there is no dataset in it" if where == "/" else f"there is no dataset in {where}"
    found = [f"{shown(path)} {tree.shape(path)}" for path in paths[:_MAX_LISTED]]
    more = f" and {len(paths) - _MAX_LISTED} more" if len(paths) > _MAX_LISTED else ""
    return f"it has {', '.join(found)}{more}"


def check_numbers(data: h5py.Dataset) -> None:
    """Raise unless a dataset holds real numbers or flags.

    Raises:
        DatasetError: If it holds strings, records or complex numbers.
    """
    dtype = data.dtype
    if dtype.kind in "biuf" and data.shape is not None:
        return
    kind = str(dtype)
    if data.shape is None:
        kind = "no values"
    elif dtype.kind in "SU" or h5py.check_string_dtype(dtype) is not None:
        kind = "strings"
    raise DatasetError(f"{data.file.filename}: {name_of(data)} holds {kind}, expected numbers")


def read_rows(data: h5py.Dataset, start: int, out: NDArray[Any]) -> None:
    """Read rows from `start` on into `out`, converted to its dtype, in blocks of a few megabytes."""
    row_bytes = data.dtype.itemsize * math.prod(data.shape[1:])
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    if start == 0 and data.shape[0] == len(out) <= step:
        with np.errstate(over="ignore"):
            out[...] = read_all(data).reshape(out.shape)
        return
    for first in range(0, len(out), step):
        last = min(first + step, len(out))
        part = data[start + first : start + last]
        # A value that is too large becomes infinite, which is reported with its row.
        with np.errstate(over="ignore"):
            out[first:last] = part.reshape(out[first:last].shape)
