"""Write a copy of a recorded file whose images can be read fast: in one piece, or one chunk per frame."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.checks import require_choice
from slipstream.datasets.describe import describe
from slipstream.datasets.description import Description, Fields, Images
from slipstream.datasets.files import Files
from slipstream.datasets.frames import DatasetSource, FrameReader, Request
from slipstream.datasets.opening import opened
from slipstream.errors import ConfigurationError, DatasetError, SlipstreamError, WriteError
from slipstream.store.local import atomic_write
from slipstream.text import install_hint

Compression = Literal["none", "lz4", "zstd", "gzip"]
_BATCH_BYTES = 32 << 20
_PICTURES_AT_ONCE = 256


@dataclass(frozen=True)
class Repacked:
    """What became of a file: frames that were rewritten, and sizes before and after."""

    path: Path
    num_frames: int
    source_bytes: int
    stored_bytes: int


def repack(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    compression: Compression = "none",
    fields: Fields | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Repacked:
    """Copy a file so that its images are read in parallel, without HDF5's lock; everything else stays as it is.

    Pixels stay as they are, of the same size and order, in one piece or packed losslessly frame by frame. Pictures
    (JPEG) stay pictures, in rows of one length. Groups, attributes and all other datasets are copied by HDF5. The
    target appears whole or not at all. Memory holds some megabytes.

    Args:
        source: The recorded file.
        target: The file to write.
        compression: Of pixels: ``none``, ``lz4`` (fast), ``zstd`` (small), ``gzip`` (what any HDF5 reads).
        fields: Which datasets are what; see `Fields`.
        overwrite: Whether a file that is there may be replaced.
        progress: Told how many frames are done, and how many there are.

    Raises:
        ConfigurationError: If the compression is not known.
        DatasetError: If the source has no images, contradicts itself, or changes meanwhile; or if the target is there
            and may not be replaced.
        WriteError: If it cannot be written; nothing is left behind then.
    """
    source, target = Path(source), Path(target)
    require_choice("compression", compression, get_args(Compression))
    if target.exists() and (not overwrite or target.samefile(source)):
        what = "is the source itself" if target.samefile(source) else "is there already, and was not to be replaced"
        raise DatasetError(f"{target}: {what}")
    description = describe(source, fields)
    images = _images(description)
    if not images:
        raise DatasetError(f"{source}: has no images, so there is nothing to repack")
    options = _options(compression)
    done = 0
    reader = FrameReader(Files())
    file = reader.files.add(description.path, description.identity)
    try:
        with (
            opened(source) as (root, _),
            atomic_write(target) as raw,
            os.fdopen(os.dup(raw.fileno()), "r+b") as both,  # HDF5 reads what it wrote
            h5py.File(both, "w", libver="v110") as copy,
        ):
            objects = {root[path].id: one for path, one in images.items()}
            total = sum(one.num_rows for one in objects.values())
            places: dict[Any, str] = {}
            more_names = list(_copy(root, copy, places, set(objects)))
            for data, one in objects.items():
                for count in _write_images(copy, places[data], one, reader, file, options, root[places[data]]):
                    done += count
                    if progress is not None:
                        progress(done, total)
            for name, place in more_names:
                copy[name] = copy[place]
            description.identity.check(source)
    except SlipstreamError:
        raise
    except (OSError, RuntimeError) as error:  # HDF5 raises either, and knows no name of the file
        reason = getattr(error, "strerror", None) or str(error)
        raise WriteError(getattr(error, "errno", None) or 0, f"cannot write {target}: {reason}") from error
    finally:
        reader.files.close()
    return Repacked(target, total, description.identity.size_bytes, target.stat().st_size)


def _images(description: Description) -> dict[str, Images]:
    """Return the image datasets of a file by their path."""
    found = {}
    for stretch in description.stretches:
        both = [(description.roles.cameras, stretch.cameras), (description.roles.next_cameras, stretch.next_cameras)]
        for paths, images in both:
            for name, one in images.items():
                found[f"{stretch.group.strip('/')}/{paths[name]}".lstrip("/")] = one
    return found


def _options(compression: Compression) -> dict[str, Any]:
    if compression == "none":
        return {}
    if compression == "gzip":
        return {"compression": "gzip", "compression_opts": 4}
    try:
        import hdf5plugin  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigurationError(f"compression {compression} needs hdf5plugin: {install_hint('datasets')}") from error
    return dict(hdf5plugin.LZ4() if compression == "lz4" else hdf5plugin.Zstd(clevel=3))


def _copy(
    source: h5py.Group, target: h5py.Group, places: dict[Any, str], leave_out: set[Any]
) -> Iterator[tuple[str, str]]:
    """Copy groups, attributes and datasets, but for some; symbolic links, and those out of the file, stay links.

    Yields the further names of objects that have several, and what each is a name of: they may lead in circles.

    Args:
        source: What to copy.
        target: Where to.
        places: Filled with the name of each object of the source, those that are left out too.
        leave_out: Datasets that are not copied.
    """
    places[source.id] = target.name
    for name, value in source.attrs.items():
        target.attrs[name] = value
    for name in source:
        link = source.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            target[name] = link
            continue
        node = source[name]
        here = f"{target.name.rstrip('/')}/{name}"
        if node.id in places:
            yield here, places[node.id]
            continue
        places[node.id] = here
        if isinstance(node, h5py.Group):
            yield from _copy(node, target.create_group(name, track_order=None), places, leave_out)
        elif node.id not in leave_out:
            source.copy(node, target, name)


def _write_images(
    copy: h5py.File,
    path: str,
    images: Images,
    reader: FrameReader,
    file: int,
    options: dict[str, Any],
    old: h5py.Dataset,
) -> Iterator[int]:
    """Write the images of a dataset, some at a time; yields how many."""
    kind = images.kind
    shape = (kind.channels, kind.height, kind.width)
    if kind.encoding != "raw":
        yield from _write_pictures(copy, path, old)
        return
    order = shape if kind.channels_first else (kind.height, kind.width, kind.channels)
    chunks = (1, *order) if options else None
    data = copy.create_dataset(path, (images.num_rows, *order), np.uint8, chunks=chunks, **options)
    data.attrs.update(old.attrs)
    source = reader.add(DatasetSource(file, path.strip("/"), kind, images.offset))
    step = max(1, _BATCH_BYTES // int(np.prod(shape)))
    for first in range(0, images.num_rows, step):
        rows = np.arange(first, min(first + step, images.num_rows))
        frames: NDArray[np.uint8] = np.empty((len(rows), *shape), np.uint8)
        reader.read([Request(np.full(len(rows), source), rows, frames)])
        data[first : first + len(rows)] = frames if kind.channels_first else frames.transpose(0, 2, 3, 1)
        yield len(rows)


def _write_pictures(copy: h5py.File, path: str, old: h5py.Dataset) -> Iterator[int]:
    """Write compressed pictures in rows of one length, zeros after each, as ALOHA does."""
    longest = max(len(old[row]) for row in range(len(old)))
    data = copy.create_dataset(path, (len(old), longest), np.uint8)
    data.attrs.update(old.attrs)
    for first in range(0, len(old), _PICTURES_AT_ONCE):
        part = old[first : first + _PICTURES_AT_ONCE]
        rows = np.zeros((len(part), longest), np.uint8)
        for row, picture in zip(rows, part, strict=True):
            row[: len(picture)] = picture
        data[first : first + len(part)] = rows
        yield len(part)
