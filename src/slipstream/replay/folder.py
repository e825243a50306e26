"""Frames in a folder: only new ones are written, a crash at any point leaves what was there before.

Frames go into *parts*, files that are never changed; a *head* that is replaced atomically, last, says which parts
count. Parts that no head names any more are deleted after that, and by the next save if a crash came between. The
layout is in ``docs/formats/replay.md``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs import Raw
from slipstream.errors import (
    CodecError,
    CorruptFileError,
    FormatVersionError,
    MissingEntryError,
    SlipstreamError,
    naming,
)
from slipstream.replay.frames import FrameLog
from slipstream.replay.packing import PackedColumn
from slipstream.store.container import Container
from slipstream.store.local import make_folder, sweep
from slipstream.store.writer import ContainerWriter, write_container

logger = logging.getLogger(__name__)

HEAD = "head.slip"
VERSION = 1
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError, MemoryError)
"""What reading a file may raise whose checksums are right and whose content no writer writes."""
_PART = re.compile(r"frames-(\d+)-(\d+)-[0-9a-f]{8}\.slip")
_SMALL_BYTES = 1 << 20
_MAX_SMALL = 64


@dataclass(frozen=True)
class Part:
    """A file with the frames from `start` to `stop`."""

    start: int
    stop: int
    name: str
    identity: str
    nbytes: int


@dataclass
class Loaded:
    """Frames that were read: segments by column, and which frames are lost."""

    columns: list[PackedColumn]
    lost: NDArray[np.bool_]


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what content that no writer writes may raise into an error that names the folder."""
    try:
        with naming(folder):
            yield
    except CodecError as error:
        # A codec does not know that its input is from a file: a difference, for one, which only a checkpoint can hold.
        raise CorruptFileError(str(error)) from error
    except MALFORMED as error:
        if isinstance(error, SlipstreamError):
            raise
        raise CorruptFileError(f"{folder} is not as a writer writes it ({error})") from error


def write_part(folder: Path, log: FrameLog, start: int, stop: int, values: dict[str, Any]) -> Part:
    """Write frames into a file of their own, durably."""
    make_folder(folder)
    path = folder / f"frames-{start:012d}-{stop:012d}-{secrets.token_hex(4)}.slip"
    with write_container(path, kind="replay frames") as writer:
        writer.set("version", VERSION)
        writer.set("frames", [start, stop])
        for name, value in values.items():
            writer.set(name, value)
        for number, (sizes, payloads) in enumerate(log.segments(start, stop)):
            add_segments(writer, f"{number}", sizes, payloads)
    return Part(start, stop, path.name, writer.identity, writer.file_bytes)


def add_segments(writer: ContainerWriter, name: str, sizes: NDArray[np.int64], payloads: Sequence[bytes]) -> None:
    """Write segments as three arrays: rows of each, bytes of each, and all bytes."""
    writer.add(f"{name}/rows", np.asarray(sizes, np.int64))
    writer.add(f"{name}/lengths", np.array([len(payload) for payload in payloads], np.int64))
    writer.add(f"{name}/bytes", np.frombuffer(b"".join(payloads), np.uint8), codec=Raw())


def split_segments(lengths: NDArray[np.int64], content: NDArray[np.uint8]) -> list[bytes]:
    """Undo the joining of segments.

    Raises:
        CorruptFileError: If the lengths do not add up.
    """
    if (lengths < 0).any() or int(lengths.sum()) != len(content):
        raise CorruptFileError(f"segments of {int(lengths.sum())} bytes in {len(content)}")
    view, ends = memoryview(content.data), np.cumsum(lengths).tolist()
    return [bytes(view[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]


def choose_parts(saved: Sequence[Part], log: FrameLog) -> list[Part]:
    """Return which of the saved parts are still of use; many small ones at the end are given up, to be joined."""
    parts = [part for part in saved if part.stop > log.first]
    small = 0
    while small < len(parts) and parts[-1 - small].nbytes < _SMALL_BYTES:
        small += 1
    return parts if small < _MAX_SMALL else parts[: len(parts) - small]


def still_there(folder: Path, parts: list[Part]) -> bool:
    """Tell whether nobody else has written into the folder since these parts were."""
    try:
        with Container(folder / HEAD) as container:
            return bool(container.values.get("parts") == parts_to_json(parts)) and all(
                (folder / part.name).exists() for part in parts
            )
    except (OSError, SlipstreamError):
        return False


def delete_others(folder: Path, parts: Sequence[Part]) -> None:
    """Delete the parts that the head does not name, and what dead writers left."""
    names = {part.name for part in parts}
    sweep(folder)
    for path in folder.iterdir():
        if _PART.fullmatch(path.name) and path.name not in names:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s: cannot be deleted (%s)", path, error)


def parts_to_json(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return parts as JSON."""
    return [asdict(part) for part in parts]


def parts_from_json(documents: Any) -> list[Part]:
    """Read what `parts_to_json` wrote.

    Raises:
        CorruptFileError: If it is not something that it writes.
    """
    try:
        parts = [Part(**document) for document in documents]
        sound = all(_PART.fullmatch(part.name) and 0 <= part.start < part.stop for part in parts)
        sound &= all(one.stop == other.start for one, other in itertools.pairwise(parts))
    except TypeError as error:
        raise CorruptFileError(f"the list of parts is not as a writer writes it ({error})") from error
    if not sound:
        raise CorruptFileError("the list of parts has gaps, or names that no writer uses")
    return parts


def find_parts(folder: Path) -> list[Part]:
    """Find the parts in a folder without its head: those that follow each other, up to the newest."""
    matches = (_PART.fullmatch(path.name) for path in sorted(folder.iterdir()))
    parts = [Part(int(match[1]), int(match[2]), match[0], "", 0) for match in matches if match]
    chain: list[Part] = []
    for part in reversed(parts):
        if not chain or part.stop == chain[0].start:
            chain.insert(0, part)
    return chain


def read_parts(folder: Path, parts: Sequence[Part], num_columns: int) -> Loaded:
    """Read the segments of consecutive parts; what is damaged is left out and marked."""
    first, end = parts[0].start, parts[-1].stop
    loaded = Loaded([(np.empty(0, np.int64), []) for _ in range(num_columns)], np.zeros(end - first, np.bool_))
    for part in parts:
        try:
            columns = _read_part(folder / part.name, part, num_columns)
        except (OSError, CorruptFileError, FormatVersionError, MissingEntryError) as error:
            logger.warning("%s: frames %d to %d are lost (%s)", folder / part.name, part.start, part.stop - 1, error)
            columns = [(np.array([part.stop - part.start]), [b""], np.ones(1, np.bool_))] * num_columns
        for number, (sizes, payloads, missing) in enumerate(columns):
            _mark_lost(sizes, missing, part.stop - first, loaded.lost)
            known = loaded.columns[number]
            loaded.columns[number] = (np.concatenate([known[0], sizes]), known[1] + payloads)
    return loaded


_ReadColumn = tuple[NDArray[np.int64], list[bytes], NDArray[np.bool_]]


def _read_part(path: Path, part: Part, num_columns: int) -> list[_ReadColumn]:
    with Container(path) as container:
        if container.values.get("version") != VERSION:
            raise FormatVersionError(
                f"it has version {container.values.get('version')!r}, this release reads {VERSION}"
            )
        if part.identity and container.identity != part.identity:
            raise CorruptFileError("it is not the file that the head names")
        columns = []
        for number in range(num_columns):
            sizes, lengths = container.read(f"{number}/rows"), container.read(f"{number}/lengths")
            short = int(sizes.sum()) < part.stop - part.start
            if sizes.shape != lengths.shape or sizes.dtype != np.int64 or (sizes < 1).any() or short:
                raise CorruptFileError(f"column {number} has segments that no writer writes")
            payloads = _read_payloads(container, f"{number}/bytes", lengths)
            missing = np.array([not payload for payload in payloads]) & (lengths > 0)
            columns.append((sizes, payloads, missing))
        return columns


def _read_payloads(container: Container, name: str, lengths: NDArray[np.int64]) -> list[bytes]:
    """Read all segments; if some chunk is damaged, all but those that lie in it, which are empty then."""
    try:
        return split_segments(lengths, container.read(name))
    except CorruptFileError as error:
        logger.warning("%s: %s; what is sound of it is kept", container.path, error)
    entry = container.entries[name]
    content = np.zeros(entry.shape, np.uint8)
    sound = np.zeros(entry.shape, np.bool_)
    step = entry.grid.chunk_shape[0]
    for start in range(0, len(content), step):
        rows = slice(start, min(start + step, len(content)))
        try:
            content[rows] = container.read(name, rows)
        except CorruptFileError:
            continue
        sound[rows] = True
    payloads = split_segments(lengths, content)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    return [
        payload if bool(sound[start:end].all()) else b""
        for payload, start, end in zip(payloads, starts.tolist(), ends.tolist(), strict=True)
    ]


def _mark_lost(sizes: NDArray[np.int64], missing: NDArray[np.bool_], stop: int, lost: NDArray[np.bool_]) -> None:
    """Mark the frames of missing segments; the segments end at frame `stop`, and may begin before the first."""
    ends = stop - int(sizes.sum()) + np.cumsum(sizes)
    for end, size in zip(ends[missing].tolist(), sizes[missing].tolist(), strict=True):
        lost[max(0, end - size) : max(0, end)] = True
