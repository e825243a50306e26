"""Replay buffers in a folder, and as a state of tensors.

Packed segments go into *parts*, files that never change. A *head*, which is replaced atomically and last, holds
everything else and says which parts count. So a crash at any point leaves what was saved before. Parts without a use
are deleted after that, and by the next save if a crash came between. If other files belong to the same moment, the head
before is kept with its parts until these files are known to be written. The layout is in ``docs/formats/replay.md``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.codecs import Raw
from slipstream.errors import (
    CodecError,
    CorruptFileError,
    FormatVersionError,
    MissingEntryError,
    SlipstreamError,
    StateMismatchError,
    naming,
)
from slipstream.replay.log import Segment
from slipstream.replay.steps import Snapshot
from slipstream.store.container import Container
from slipstream.store.local import RESERVED_PREFIX, make_folder, sweep
from slipstream.store.writer import ContainerWriter, write_container

logger = logging.getLogger(__name__)

HEAD = "head.slip"
PREVIOUS = "previous.slip"
"""The head before, if its moment is the last one that is complete."""
VERSION = 2
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError, MemoryError)
"""What reading a file may raise whose checksums are right but whose content is not what was written."""
_PART = re.compile(r"rows-(\d+)-[0-9a-f]{8}\.slip")
_SMALL_BYTES = 1 << 20
_MAX_SMALL = 64
Belongs = Callable[[Mapping[str, Any]], bool]
"""Returns whether a head, told by its plain values, is of the same moment as the files beside the folder."""
_PARTS_OF_COLUMN = ("first", "units", "rows", "lengths", "bytes")


@dataclass(frozen=True)
class Episodes:
    """Whole episodes, so that a folder can be read without its head.

    Attributes:
        numbers: The number of each.
        steps: How many steps each has.
        rows: For each column, the rows of all steps.
    """

    numbers: NDArray[np.int64]
    steps: NDArray[np.int64]
    rows: Sequence[NDArray[np.int64]]

    def without(self, covered: set[int]) -> Episodes:
        """Return those whose numbers are not in `covered`."""
        is_new = np.array([number not in covered for number in self.numbers.tolist()], np.bool_)
        of_steps = np.repeat(is_new, self.steps)
        return Episodes(self.numbers[is_new], self.steps[is_new], [rows[of_steps] for rows in self.rows])


@dataclass(frozen=True)
class Part:
    """A file with packed segments: the first row of each by column, and the numbers of the episodes in it."""

    name: str
    identity: str
    nbytes: int
    firsts: Sequence[frozenset[int]]
    packed_bytes: int
    episodes: frozenset[int] = frozenset()


@dataclass
class Saved:
    """What a folder holds of one buffer, as far as that buffer knows."""

    identity: str = ""
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """What was read: values and arrays of the head, the segments of each column, and the parts."""

    plain: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    segments: list[list[Segment]]
    saved: Saved


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what invalid content may raise into an error that names the folder."""
    try:
        with naming(folder):
            yield
    except CodecError as error:
        # A codec does not know that its input is from a file.
        raise CorruptFileError(str(error)) from error
    except MALFORMED as error:
        if isinstance(error, SlipstreamError):
            raise
        raise CorruptFileError(f"{folder}: invalid replay folder ({error})") from error


# Folders


def save(
    folder: Path,
    kind: str,
    snapshot: Snapshot,
    saved: Saved,
    episodes: Episodes | None = None,
    belongs: Belongs | None = None,
) -> Saved:
    """Write what is new into a folder, then the head; returns what the folder holds now.

    Args:
        folder: Where to.
        kind: The kind of the head.
        snapshot: What to save.
        saved: What the last call returned for this folder.
        episodes: All episodes, if the folder should be readable without its head.
        belongs: Tells which head is of the same moment as the files beside the folder, if there are such files.
    """
    make_folder(folder)
    kept: list[str] = []
    if belongs is not None:
        kept = _keep_head(folder, belongs)
    parts: list[Part] = []
    if _is_unchanged(folder, saved):
        parts = _choose_parts(saved.parts, snapshot.segments)
    new = _without_parts(snapshot.segments, parts)
    if episodes is not None:
        covered: set[int] = set()
        covered.update(*(part.episodes for part in parts))
        episodes = episodes.without(covered)
    has_episodes = episodes is not None and len(episodes.numbers) > 0
    if any(new) or has_episodes:
        parts.append(_write_part(folder, len(parts), new, snapshot.plain, episodes))
    with write_container(folder / HEAD, kind=kind) as writer:
        writer.set("version", VERSION)
        writer.set("plain", snapshot.plain)
        writer.set("parts", [{"name": part.name, "identity": part.identity} for part in parts])
        for name, array in snapshot.arrays.items():
            writer.add(name, array)
    _delete_others(folder, {*kept, *(part.name for part in parts)})
    return Saved(writer.identity, parts)


def load(folder: Path, kind: str, belongs: Belongs | None = None) -> Loaded:
    """Read a folder. Units that are damaged have no bytes, parts that cannot be read are left out with a warning.

    Args:
        folder: Where from.
        kind: The kind of the head.
        belongs: Tells which head is of the same moment as the files beside the folder, if there are such files.

    Raises:
        FileNotFoundError: If nothing was saved there.
        CorruptFileError: If the head is damaged.
        FormatVersionError: If it was written by another version.
    """
    head = folder / HEAD
    if belongs is not None and not _is_head_of(head, belongs) and _is_head_of(folder / PREVIOUS, belongs):
        head = folder / PREVIOUS
        logger.warning("%s: saving was interrupted; the moment before it is restored, which is complete", folder)
    with Container(head) as container:
        if container.kind != kind:
            raise CorruptFileError(f"{head} is a {container.kind!r}, expected {kind!r}")
        _check_version(container)
        plain = dict(container.values["plain"])
        named = [(str(part["name"]), str(part["identity"])) for part in container.values["parts"]]
        arrays = {name: container.read(name) for name in container.entries}
        identity = container.identity
    for name, _ in named:
        if not _PART.fullmatch(name):
            raise CorruptFileError(f"the head names {name[:60]!r}, which is not the name of a part")
    num_columns = len(plain["schema"]["columns"])
    segments: list[list[Segment]] = [[] for _ in range(num_columns)]
    parts: list[Part] = []
    for name, part_identity in named:
        part = _read_part(folder / name, part_identity, segments)
        if part is not None:
            parts.append(part)
    saved = Saved()
    # A folder with damage, or whose newest head was not read, is written again as a whole.
    if head.name == HEAD and len(parts) == len(named) and not _has_gaps(segments):
        saved = Saved(identity, parts)
    return Loaded(plain, arrays, segments, saved)


def find_episodes(folder: Path) -> tuple[dict[str, Any], Episodes, list[list[Segment]]]:
    """Read the parts of a folder without its head: a plain schema, all episodes, and the segments of each column.

    Raises:
        CorruptFileError: If no part can be read.
    """
    schema: dict[str, Any] = {}
    tables: list[Episodes] = []
    segments: list[list[Segment]] = []
    for path in sorted(folder.iterdir()):
        if not _PART.fullmatch(path.name):
            continue
        try:
            with Container(path) as container:
                found = container.values["schema"]
                num_columns = len(found["columns"])
                table = _read_episodes(container, num_columns)
        except (SlipstreamError, OSError, *MALFORMED) as error:
            logger.warning("%s: cannot be read (%s)", path, error)
            continue
        while len(segments) < num_columns:
            segments.append([])
        if _read_part(path, "", segments) is not None:
            schema = found
            tables.append(table)
    if not schema:
        raise CorruptFileError(f"{folder} has no part that can be read")
    numbers = np.concatenate([table.numbers for table in tables])
    steps = np.concatenate([table.steps for table in tables])
    rows = []
    for number in range(len(segments)):
        rows.append(np.concatenate([table.rows[number] for table in tables]))  # noqa: PERF401 - one thing per line
    order = np.argsort(numbers, kind="stable")
    starts = np.cumsum(steps) - steps
    picked = [np.arange(starts[place], starts[place] + steps[place]) for place in order.tolist()]
    every = np.concatenate([np.empty(0, np.int64), *picked])
    return schema, Episodes(numbers[order], steps[order], [values[every] for values in rows]), segments


def has_parts(folder: Path) -> bool:
    """Return whether a folder has parts."""
    return any(_PART.fullmatch(path.name) for path in folder.iterdir())


def _check_version(container: Container) -> None:
    version = container.values.get("version")
    if version != VERSION:
        raise FormatVersionError(f"{container.path} has version {version!r}, this release reads {VERSION}")


def _is_head_of(head: Path, belongs: Belongs) -> bool:
    """Return whether there is such a head, and it is of the same moment as the files beside the folder."""
    try:
        with Container(head) as container:
            return belongs(container.values["plain"])
    except (OSError, SlipstreamError, *MALFORMED):
        return False


def _keep_head(folder: Path, belongs: Belongs) -> list[str]:
    """Keep the head of the last complete moment under another name; returns the names that must not be deleted."""
    previous = folder / PREVIOUS
    if _is_head_of(folder / HEAD, belongs):
        _link(folder / HEAD, previous)
    if not _is_head_of(previous, belongs):
        return []
    with Container(previous) as container:
        return [PREVIOUS, *(str(part["name"]) for part in container.values["parts"])]


def _link(head: Path, previous: Path) -> None:
    """Give a head, which is going to be replaced, a second name; at no time there is half a file."""
    temporary = head.with_name(f"{RESERVED_PREFIX}{secrets.token_hex(8)}.tmp")
    try:
        os.link(head, temporary)
    except OSError:
        # Not every file system has links.
        shutil.copyfile(head, temporary)
    temporary.replace(previous)
    # Renaming does nothing if both names are of the same file already.
    temporary.unlink(missing_ok=True)


def _is_unchanged(folder: Path, saved: Saved) -> bool:
    """Return whether the folder is as this buffer left it."""
    if not saved.identity:
        return False
    try:
        with Container(folder / HEAD) as container:
            if container.identity != saved.identity:
                return False
    except (OSError, SlipstreamError):
        return False
    return all((folder / part.name).exists() for part in saved.parts)


def _choose_parts(parts: Sequence[Part], segments: Sequence[Sequence[Segment]]) -> list[Part]:
    """Return the parts that stay: those that are at least half in use. Many small ones are given up, to be joined."""
    in_use: list[Part] = []
    for part in parts:
        used = 0
        num_used = 0
        for firsts, column in zip(part.firsts, segments, strict=False):
            for segment in column:
                if segment.first in firsts:
                    used += segment.nbytes
                    num_used += 1
        if num_used and 2 * used >= part.packed_bytes:
            in_use.append(part)
    large = [part for part in in_use if part.nbytes >= _SMALL_BYTES]
    if len(in_use) - len(large) >= _MAX_SMALL:
        return large
    return in_use


def _without_parts(segments: Sequence[Sequence[Segment]], parts: Sequence[Part]) -> list[list[Segment]]:
    """Return the segments that are in none of the parts."""
    new: list[list[Segment]] = []
    for number, column in enumerate(segments):
        known: set[int] = set()
        for part in parts:
            if number < len(part.firsts):
                known |= part.firsts[number]
        new.append([segment for segment in column if segment.first not in known])
    return new


def _write_part(
    folder: Path,
    number: int,
    segments: Sequence[Sequence[Segment]],
    plain: Mapping[str, Any],
    episodes: Episodes | None,
) -> Part:
    """Write segments into a new file, durably."""
    path = folder / f"rows-{number:06d}-{secrets.token_hex(4)}.slip"
    with write_container(path, kind="replay rows") as writer:
        writer.set("version", VERSION)
        writer.set("schema", plain["schema"])
        for column, some in enumerate(segments):
            for name, array in _column_arrays(some).items():
                _add(writer, f"{column}/{name}", array)
        if episodes is not None:
            writer.add("episodes/numbers", episodes.numbers)
            writer.add("episodes/steps", episodes.steps)
            for column, rows in enumerate(episodes.rows):
                writer.add(f"episodes/rows/{column}", rows)
    covered: frozenset[int] = frozenset()
    if episodes is not None:
        covered = frozenset(episodes.numbers.tolist())
    firsts: list[frozenset[int]] = []
    packed_bytes = 0
    for some in segments:
        firsts.append(frozenset(segment.first for segment in some))
        packed_bytes += sum(segment.nbytes for segment in some)
    return Part(path.name, writer.identity, writer.file_bytes, firsts, packed_bytes, covered)


def _add(writer: ContainerWriter, name: str, array: NDArray[Any]) -> None:
    # Packed bytes do not compress any further.
    if array.dtype == np.uint8:
        writer.add(name, array, codec=Raw())
    else:
        writer.add(name, array)


def _read_part(path: Path, identity: str, segments: list[list[Segment]]) -> Part | None:
    """Append the segments of a part to those of each column; returns None, with a warning, if it cannot be read."""
    found: list[list[Segment]] = []
    try:
        with Container(path) as container:
            num_columns = _check_part(container, identity, len(segments))
            found += [_read_column(container, number) for number in range(num_columns)]
            covered: frozenset[int] = frozenset()
            if "episodes/numbers" in container.entries:
                covered = frozenset(container.read("episodes/numbers").tolist())
            identity = container.identity
            nbytes = path.stat().st_size
    except (OSError, FormatVersionError, MissingEntryError, CorruptFileError, KeyError, TypeError) as error:
        logger.warning("%s: its rows are lost (%s)", path, error)
        return None
    firsts = []
    packed_bytes = 0
    for column, some in zip(segments, found, strict=False):
        column.extend(some)
        firsts.append(frozenset(segment.first for segment in some))
        packed_bytes += sum(segment.nbytes for segment in some)
    return Part(path.name, identity, nbytes, firsts, packed_bytes, covered)


def _check_part(container: Container, identity: str, most: int) -> int:
    """Check a part against what the head says of it; returns how many columns it has."""
    _check_version(container)
    if identity and container.identity != identity:
        raise CorruptFileError("it is not the file that the head names")
    num_columns = len(container.values["schema"]["columns"])
    if num_columns > most:
        raise CorruptFileError(f"it has {num_columns} columns, expected at most {most}")
    return num_columns


def _read_column(container: Container, number: int) -> list[Segment]:
    arrays = {name: container.read(f"{number}/{name}") for name in _PARTS_OF_COLUMN if name != "bytes"}
    payloads = _read_payloads(container, f"{number}/bytes", arrays["lengths"])
    return _segments_of(arrays, payloads)


def _read_payloads(container: Container, name: str, lengths: NDArray[np.int64]) -> list[bytes | None]:
    """Read all units; if some chunk is damaged, all but those that lie in it, which are None then."""
    try:
        return list(split_units(lengths, container.read(name)))
    except CorruptFileError as error:
        logger.warning("%s: %s; what is sound of it is kept", container.path, error)
    entry = container.entries[name]
    content = np.zeros(entry.shape, np.uint8)
    is_sound = np.zeros(entry.shape, np.bool_)
    step = entry.grid.chunk_shape[0]
    for start in range(0, len(content), step):
        rows = slice(start, min(start + step, len(content)))
        try:
            content[rows] = container.read(name, rows)
        except CorruptFileError:
            continue
        is_sound[rows] = True
    payloads: list[bytes | None] = list(split_units(lengths, content))
    ends = np.cumsum(lengths)
    for place, (start, end) in enumerate(zip((ends - lengths).tolist(), ends.tolist(), strict=True)):
        if not is_sound[start:end].all():
            payloads[place] = None
    return payloads


def _read_episodes(container: Container, num_columns: int) -> Episodes:
    rows = [container.read(f"episodes/rows/{number}") for number in range(num_columns)]
    return Episodes(container.read("episodes/numbers"), container.read("episodes/steps"), rows)


def _has_gaps(segments: Sequence[Sequence[Segment]]) -> bool:
    for column in segments:
        for segment in column:
            if None in segment.payloads:
                return True
    return False


def _delete_others(folder: Path, names: set[str]) -> None:
    """Delete the parts that no head names, and what dead writers left."""
    sweep(folder)
    for path in folder.iterdir():
        # Parts of version 1 were called frames.
        is_part = _PART.fullmatch(path.name) or path.name.startswith("frames-") or path.name == PREVIOUS
        if is_part and path.name not in names:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s: cannot be deleted (%s)", path, error)


# Segments as arrays


def _column_arrays(segments: Sequence[Segment]) -> dict[str, NDArray[Any]]:
    """Return segments as five arrays: first row and units of each; rows and bytes of each unit; all bytes."""
    payloads: list[bytes] = []
    for segment in segments:
        payloads += [payload or b"" for payload in segment.payloads]
    return {
        "first": np.array([segment.first for segment in segments], np.int64),
        "units": np.array([len(segment.sizes) for segment in segments], np.int64),
        "rows": np.concatenate([np.empty(0, np.int64), *(segment.sizes for segment in segments)]),
        "lengths": np.array([len(payload) for payload in payloads], np.int64),
        "bytes": np.frombuffer(bytearray().join(payloads), np.uint8),
    }


def _segments_of(arrays: Mapping[str, NDArray[Any]], payloads: Sequence[bytes | None]) -> list[Segment]:
    """Undo `_column_arrays`.

    Raises:
        CorruptFileError: If the arrays do not fit together.
    """
    sizes = np.array(arrays["rows"], np.int64)
    units = np.array(arrays["units"], np.int64)
    firsts = np.array(arrays["first"], np.int64)
    fits = len(firsts) == len(units) and int(units.sum()) == len(sizes) == len(payloads)
    if not fits or (units < 1).any() or (sizes < 1).any() or (firsts < 0).any():
        raise CorruptFileError("the segments of a column do not fit together")
    found = []
    stop = 0
    for first, count in zip(firsts.tolist(), units.tolist(), strict=True):
        found.append(Segment.join(first, sizes[stop : stop + count], payloads[stop : stop + count]))
        stop += count
    return found


def split_units(lengths: NDArray[np.int64], content: NDArray[np.uint8]) -> list[bytes]:
    """Undo the joining of units.

    Raises:
        CorruptFileError: If the lengths do not add up.
    """
    if (lengths < 0).any() or int(lengths.sum()) != len(content):
        raise CorruptFileError(f"units of {int(lengths.sum())} bytes in {len(content)}")
    view = memoryview(content.data)
    ends = np.cumsum(lengths).tolist()
    return [bytes(view[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]


# States


def to_state(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as tensors and plain values, in new memory."""
    columns = []
    for segments in snapshot.segments:
        parts = _column_arrays(segments)
        columns.append({name: torch.from_numpy(array) for name, array in parts.items()})
    arrays = {name: torch.from_numpy(np.array(array)) for name, array in snapshot.arrays.items()}
    return {"version": VERSION, "plain": snapshot.plain, "arrays": arrays, "columns": columns}


def from_state(state: Mapping[str, Any]) -> Snapshot:
    """Return the snapshot that `to_state` was given.

    Raises:
        StateMismatchError: If it is not such a state.
    """
    try:
        if state["version"] != VERSION:
            raise StateMismatchError(f"the state has version {state['version']!r}, this release reads {VERSION}")
        plain = dict(state["plain"])
        arrays = {name: tensor.cpu().numpy() for name, tensor in state["arrays"].items()}
        segments = []
        for column in state["columns"]:
            parts = {name: column[name].cpu().numpy() for name in _PARTS_OF_COLUMN}
            segments.append(_segments_of(parts, split_units(parts["lengths"], parts["bytes"])))
    except (KeyError, TypeError, AttributeError, CorruptFileError) as error:
        raise StateMismatchError(f"the state is not that of a replay buffer ({error})") from error
    return Snapshot(plain, arrays, segments)
