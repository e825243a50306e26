"""Open HDF5 files that others wrote, trusting nothing: what goes wrong becomes a sentence with the file in it.

Links that lead out of a file are refused, not followed: a dataset from the internet must not read the files of whoever
opens it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from slipstream.datasets.identity import Identity
from slipstream.errors import ConfigurationError, CorruptFileError, DatasetError, MissingEntryError, SlipstreamError
from slipstream.store.local import open_regular

with contextlib.suppress(ImportError):
    import hdf5plugin  # noqa: F401 - tells HDF5 of more filters

SUFFIXES = (".hdf5", ".h5", ".hdf")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MAX_LISTED = 12


def find_files(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files that are meant: one, several, or those of a folder in the order of the numbers in their names.

    Raises:
        FileNotFoundError: If there is no such file.
        DatasetError: If a folder holds none.
    """
    if isinstance(path, (str, os.PathLike)):
        folder = Path(path)
        if not folder.is_dir():
            return [folder]
        found = sorted((file for file in folder.iterdir() if file.suffix in SUFFIXES), key=lambda f: natural(f.name))
        if not found:
            raise DatasetError(f"{folder}: is a folder without a file that ends in {' or '.join(SUFFIXES)}")
        return found
    files = [file for one in path for file in find_files(one)]
    if not files:
        raise ConfigurationError("path is an empty list, expected at least one file")
    return files


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``demo_10`` after ``demo_9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[h5py.File, Identity]]:
    """Open a file for reading, and raise at the end if it changed meanwhile.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is no HDF5 file, or cut off, or damaged where it is read.
        DatasetError: If it changed in the meantime.
    """
    identity = Identity.of(path)
    with open_regular(path) as raw:
        _check_signature(path, raw, identity.size_bytes)
    try:
        file = h5py.File(path, "r", locking="best-effort")
    except (OSError, RuntimeError) as error:
        reason = str(error)
        cut = "it is cut off" if "truncated" in reason else "its superblock or root group is damaged"
        raise CorruptFileError(f"{path}: cannot be opened as HDF5: {cut} ({_inner(reason)})") from error
    try:
        with file, _naming(path):
            yield file, identity
    finally:
        file.close()
    identity.check(path)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Take any failure to make sense of a file for damage: h5py raises whatever it happens to stumble over."""
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptFileError(f"{path}: HDF5 cannot read it ({_inner(str(error)) or type(error).__name__})") from error


def _check_signature(path: Path, raw: Any, size: int) -> None:
    """Look for HDF5's signature where it may be: at 0, 512, 1024, 2048 and so on."""
    offset = 0
    while offset < max(size, 1):
        raw.seek(offset)
        if raw.read(8) == _SIGNATURE:
            return
        offset = 512 if offset == 0 else 2 * offset
    raise CorruptFileError(f"{path}: is {'empty' if size == 0 else 'not an HDF5 file'}")


def _inner(reason: str) -> str:
    match = re.search(r"\((.*)\)", reason.strip("'\""))
    return " ".join((match[1] if match else reason.strip("'\"")).split())


def member(group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset | None:
    """Return what a name stands for in a group, or None; the name may be a path.

    Raises:
        DatasetError: If there is a link on the way that leads out of the file, or nowhere.
    """
    node: Any = group
    for part in name.strip("/").split("/"):
        if not isinstance(node, h5py.Group):
            return None
        if not part:
            continue
        kind = _link_type(node, part)
        if kind is None:
            return None
        if kind == h5py.h5l.TYPE_HARD:  # which cannot lead out of the file, nor nowhere
            node = node[part]
            continue
        link = node.get(part, getlink=True)
        place = f"{node.file.filename}: {node.name.rstrip('/')}/{part}"
        if isinstance(link, h5py.ExternalLink):
            raise DatasetError(
                f"{place} is an external link to {link.path} in {link.filename}, and only what is in the file itself "
                "is read; copy it there"
            )
        node = node.get(part)
        if node is None:
            raise DatasetError(f"{place} is a link to {link.path}, which is not there")
        if not _is_inside(node, group):
            raise DatasetError(
                f"{place} is a link to {link.path}, which leads to another file, {node.file.filename}, and only what "
                "is in the file itself is read; copy it there"
            )
    return node


def _link_type(group: h5py.Group, name: str) -> int | None:
    """Return what kind of link a name is, or None; `h5py.Group.get` takes three times as long to say so."""
    links, encoded = group.id.links, name.encode()
    return int(links.get_info(encoded).type) if links.exists(encoded) else None


def _is_inside(node: Any, group: h5py.Group) -> bool:
    """Tell whether an object is in the same file as a group: a soft link may lead to an external one."""
    return bool(h5py.h5o.get_info(node.id).fileno == h5py.h5o.get_info(group.id).fileno)


def dataset(group: h5py.Group, name: str) -> h5py.Dataset:
    """Return a dataset by its path.

    Raises:
        MissingEntryError: If there is none; lists those there are.
        DatasetError: If it leads out of the file.
    """
    found = member(group, name)
    if isinstance(found, h5py.Dataset):
        check_inside(found)
        return found
    what = "is a group, expected a dataset" if found is not None else "is not there"
    where = group.name.rstrip("/")
    raise MissingEntryError(f"{group.file.filename}: {where}/{name.strip('/')} {what}; {listing(group)}")


def _is_own(data: h5py.Dataset, source: Any, depth: int) -> bool:
    """Tell whether a part of a virtual dataset is in its own file, by a name that can be looked at."""
    if source.file_name != "." or "%" in source.dset_name or not depth:
        return False
    found = member(data.file["/"], source.dset_name)
    if isinstance(found, h5py.Dataset):
        check_inside(found, depth - 1)
    return True


def check_inside(data: h5py.Dataset, depth: int = 4) -> None:
    """Raise if the values of a dataset are in other files than its own; virtual ones may be nested `depth` times."""
    plist = data.id.get_create_plist()
    others = [str(plist.get_external(number)[0]) for number in range(plist.get_external_count())]
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        others += [source.file_name for source in data.virtual_sources() if not _is_own(data, source, depth)]
    if others:
        raise DatasetError(
            f"{data.file.filename}: the values of {data.name} are in another file, {others[0]}, and only what is in "
            "the file itself is read; copy them there"
        )


def leaves(group: h5py.Group, depth: int = 6) -> dict[str, h5py.Dataset]:
    """Return the datasets below a group by their path in it, in its order; does not follow links out of the file."""
    found: dict[str, h5py.Dataset] = {}
    seen = set()

    def walk(node: h5py.Group, above: str, left: int) -> None:
        for name in node:
            if isinstance(node.get(name, getlink=True), h5py.ExternalLink):
                continue
            child = node.get(name)
            if child is not None and not _is_inside(child, group):
                continue
            if isinstance(child, h5py.Dataset):
                found[above + name] = child
            elif isinstance(child, h5py.Group) and left and child.id.__hash__() not in seen:
                seen.add(child.id.__hash__())
                walk(child, f"{above}{name}/", left - 1)

    walk(group, "", depth)
    return found


def listing(group: h5py.Group) -> str:
    """Say which datasets there are below a group."""
    found = [f"{name} {list(data.shape or ())}" for name, data in leaves(group).items()]
    if not found:
        return "there is no dataset in it" if group.name == "/" else f"there is no dataset in {group.name}"
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return f"it has {', '.join(found[:_MAX_LISTED])}{more}"


def check_numbers(data: h5py.Dataset) -> None:
    """Raise unless a dataset holds real numbers or flags.

    Raises:
        DatasetError: If it holds strings, records or complex numbers.
    """
    if data.dtype.kind not in "biuf" or data.shape is None:
        kind = "strings" if h5py.check_string_dtype(data.dtype) or data.dtype.kind in "SU" else f"{data.dtype}"
        raise DatasetError(f"{data.file.filename}: {data.name} holds {kind}, expected numbers")


def read_rows(data: h5py.Dataset, start: int, out: np.ndarray[Any, Any]) -> None:
    """Read rows from `start` on into `out`, converted to its dtype; blocks of a few megabytes, not all at once."""
    step = max(1, (4 << 20) // max(1, data.dtype.itemsize * int(np.prod(data.shape[1:], dtype=np.int64))))
    for first in range(0, len(out), step):
        part = data[start + first : start + min(first + step, len(out))]
        with np.errstate(over="ignore"):  # what is too large becomes infinite, which is reported with its row
            out[first : first + step] = part.reshape(out[first : first + step].shape)
