"""The checkpoints of a run in an object store: immutable data, and a small commit for each checkpoint.

::

    data/<digest>              a piece of a checkpoint file, named by its content
    commits/<sequence>.json    a checkpoint: which pieces it consists of, and what it says about itself

A checkpoint exists once its commit does. Its data is there by then, and the commit is created by a conditional put, so
readers see whole checkpoints only, and of two writers that use the same number one fails. Nothing is ever renamed or
replaced. Deleting goes the other way: first the commit, then the data that no commit refers to.

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from slipstream.checkpoint.folder import SUFFIX, CheckpointFile, describe, managed_name
from slipstream.checkpoint.reader import NativeReader
from slipstream.checkpoint.retention import RetentionPolicy, plan
from slipstream.errors import CorruptFileError, FormatVersionError, WriterConflictError, naming
from slipstream.schema.unflatten import unflatten
from slipstream.store.base import FileInfo, Store
from slipstream.store.container import Container
from slipstream.store.index import load_json
from slipstream.store.local import open_descriptor
from slipstream.store.opened import OpenFile
from slipstream.store.urls import open_store
from slipstream.threads import parallel_map

VERSION = 1
COMMITS = "commits/"
DATA = "data/"
PIECE_BYTES = 32 << 20
"""Size of a piece. An upload that was interrupted repeats at most this much."""
MIN_AGE_S = 24 * 3600.0
"""Data that no commit refers to is deleted when it is older: an upload in progress has no commit yet."""

_MAX_COMMIT_BYTES = 16 << 20
_MAX_NUMBER = (1 << 63) - 1
_COMMIT_NAME = re.compile(r"commits/([0-9]{20})\.json")
_PIECE_NAME = re.compile(r"data/[0-9a-f]{32}")
_PARALLEL_REQUESTS = 8


class CommittedRun:
    """The checkpoints of one run in a store. Only committed ones are visible.

    Args:
        url: The URL of the run. It need not exist.
        store: The store at this URL; opened by default.
    """

    def __init__(self, url: Path, store: Store | None = None) -> None:
        self.url = url
        self.store = store or open_store(url)
        # Commits never change. The time tells one that was deleted and created again.
        self._known: dict[tuple[str, int, float], CheckpointFile | Exception] = {}
        # What the last scan found.
        self._infos: list[FileInfo] = []
        self._unreadable: dict[Path, Exception] = {}
        # Data that an upload reuses must not be deleted before its commit.
        self._writing = threading.RLock()

    def exists(self) -> bool:
        """Return whether there is any commit, readable or not."""
        return bool(self._commits())

    def scan(self) -> list[CheckpointFile]:
        """Return the committed checkpoints, in the order in which they were saved.

        Raises:
            StoreError: If the store cannot be read.
        """
        found = []
        unreadable = {}
        for name, commit in self._read().items():
            if isinstance(commit, CheckpointFile):
                found.append(commit)
            else:
                unreadable[self.url / name] = commit
        self._unreadable = unreadable
        return _with_unique_names(found)

    def unreadable(self) -> dict[Path, Exception]:
        """Return the commits that could not be read by the last `scan`, and why."""
        return self._unreadable

    def newest_first(self) -> Iterator[CheckpointFile | Exception]:
        """Yield the committed checkpoints, newest first, and why others cannot be read. Reads one commit at a time."""
        for info in reversed(self._commits()):
            found = self._parse(info)
            if found is not None:
                yield found

    def find(self, name: str) -> CheckpointFile | None:
        """Return the newest checkpoint that has a file name such as ``checkpoint_iter_100.slip``."""
        for found in self.newest_first():
            if isinstance(found, CheckpointFile) and found.path.name == name:
                return found
        # A step that was saved again: its older checkpoints have other names.
        for file in self.scan():
            if file.path.name == name:
                return file
        return None

    def identities(self) -> dict[int, str | None]:
        """Return the identities of the checkpoints that the last `scan` saw, by number; None if one is not readable."""
        identities: dict[int, str | None] = {}
        known = self._known
        for info in self._infos:
            found = known.get(_key(info))
            identities[_number_of(info)] = None
            if isinstance(found, CheckpointFile):
                identities[_number_of(info)] = found.identity
        return identities

    def upload(self, path: Path) -> tuple[CheckpointFile, int]:
        """Upload a checkpoint file and commit it. Safe to repeat, and to continue in another process.

        Returns:
            What was committed, and the size of the file.

        Raises:
            WriterConflictError: If another process has committed a checkpoint under the same number.
            CorruptFileError: If the file is damaged, was not saved by a manager, or is a delta.
            WriteError: If the store cannot be written.
        """
        # The same open file throughout: a save may replace the file, and retention may delete it.
        source = OpenFile(open_descriptor(path))
        with NativeReader(Container(path, source=source)) as reader, naming(path):
            found = describe(reader)
            if found is None:
                raise CorruptFileError("was not saved by a CheckpointManager")
            if found.parents:
                raise CorruptFileError("is stored against other checkpoints, which object stores do not support")
            metadata = reader.container.values["metadata"]
        with self._writing:
            pieces = self._upload_pieces(source)
            committed = dataclasses.replace(found, path=self.url / managed_name(found.step), pieces=pieces)
            self._commit(committed, metadata)
        return committed, source.size_bytes()

    def prune(self, policy: RetentionPolicy) -> list[int]:
        """Delete the commits that the policy does not keep, then data that nothing refers to; returns the steps."""
        deleted: list[int] = []
        with self._writing:
            self._prune(policy, deleted)
        return deleted

    def _prune(self, policy: RetentionPolicy, deleted: list[int]) -> None:
        # Thinning rewrites files. What is in a store never changes.
        todo = plan(self.scan(), dataclasses.replace(policy, keep_full=None))
        for file in todo.delete:
            self.store.delete(_commit_name(file.sequence))
            deleted.append(file.step)
        self._collect_garbage()

    def _collect_garbage(self) -> None:
        """Delete data that no commit refers to, unless an upload may be about to commit it."""
        # List the data first: what is committed after that is not in this list, or is referred to below.
        data = self.store.list(DATA)
        # Its result and not what this object remembers: other threads scan as well.
        commits = self._read().values()
        needed: set[str] = set()
        for found in commits:
            # Nobody knows what a commit refers to that cannot be read.
            if not isinstance(found, CheckpointFile):
                return
            needed.update(_names_of(found.pieces))
        # By the clock of the store: what was created last is at most as old as now.
        newest_s = 0.0
        for info in (*data, *self._infos):
            newest_s = max(newest_s, info.modified_s)
        for info in data:
            if info.name not in needed and newest_s - info.modified_s > MIN_AGE_S:
                self.store.delete(info.name)

    def _upload_pieces(self, source: OpenFile) -> tuple[FileInfo, ...]:
        """Upload the content of a file; returns where it is."""
        size = source.size_bytes()
        shared = self._referenced()
        pieces = []
        for offset in range(0, size, PIECE_BYTES):
            content = bytearray(min(PIECE_BYTES, size - offset))
            if source.read_into(memoryview(content), offset) != len(content):
                raise CorruptFileError("was truncated while it was uploaded")
            piece = FileInfo(f"{DATA}{xxhash.xxh3_128_hexdigest(content)}", len(content))
            # An earlier checkpoint has the same bytes in the same place, such as those of a frozen encoder.
            if piece.name not in shared or not self._has(piece):
                self._put_piece(piece, content)
            pieces.append(piece)
        return tuple(pieces)

    def _put_piece(self, piece: FileInfo, content: bytearray) -> None:
        try:
            self.store.put_new(piece.name, content)
        except FileExistsError:
            # An interrupted upload has got this far, unless something else has damaged it.
            if self.store.get(piece.name) == bytes(content):
                return
            self.store.delete(piece.name)
            self.store.put_new(piece.name, content)

    def _has(self, piece: FileInfo) -> bool:
        """Return whether the store has a piece in its full size."""
        try:
            return self.store.size_bytes(piece.name) == piece.size_bytes
        except FileNotFoundError:
            return False

    def _referenced(self) -> set[str]:
        """Return the names of the data that the commits of the last `scan` refer to."""
        needed: set[str] = set()
        for found in self._known.values():
            if isinstance(found, CheckpointFile):
                needed.update(_names_of(found.pieces))
        return needed

    def _commit(self, file: CheckpointFile, metadata: Any) -> None:
        name = _commit_name(file.sequence)
        document = {
            "version": VERSION,
            "sequence": file.sequence,
            "identity": file.identity,
            "thinned": list(file.thinned),
            "pieces": [[piece.name, piece.size_bytes] for piece in file.pieces],
            "metadata": metadata,
        }
        text = json.dumps(document, separators=(",", ":")).encode()
        if len(text) > _MAX_COMMIT_BYTES:
            raise CorruptFileError(
                f"{file.path}: has {len(text)} bytes of metadata, expected at most {_MAX_COMMIT_BYTES}"
            )
        try:
            self.store.put_new(name, text)
        except FileExistsError:
            # The reply to an earlier attempt may have been lost, or the process that sent it was killed.
            if self.store.get(name) != text:
                raise WriterConflictError(
                    f"{self.url}: another process is writing to this run, it has committed checkpoint {file.sequence}; "
                    "give each run another URL"
                ) from None

    def _commits(self) -> list[FileInfo]:
        """Return the objects that are commits, in order."""
        found = []
        for info in self.store.list(COMMITS):
            # Others may have put something there.
            if _COMMIT_NAME.fullmatch(info.name) and _number_of(info) <= _MAX_NUMBER:
                found.append(info)  # noqa: PERF401 - a loop is easier to read
        return found

    def _read(self) -> dict[str, CheckpointFile | Exception]:
        """Read the commits that are not known yet; returns what all of them say, by name."""
        infos = self._commits()
        missing = [info for info in infos if _key(info) not in self._known]
        known = dict(self._known)
        for info, found in zip(missing, parallel_map(self._parse, missing, _PARALLEL_REQUESTS), strict=True):
            if found is not None:
                known[_key(info)] = found
        # Deleted commits are forgotten.
        remaining = {}
        by_name = {}
        for info in infos:
            if _key(info) in known:
                remaining[_key(info)] = known[_key(info)]
                by_name[info.name] = known[_key(info)]
        # Each at once, because other threads may read them.
        self._known = remaining
        self._infos = infos
        return by_name

    def _parse(self, info: FileInfo) -> CheckpointFile | Exception | None:
        """Return what a commit says, or what is wrong with it; None if it was deleted meanwhile."""
        path = self.url / info.name
        try:
            with naming(path):
                return self._parse_text(self._get_commit(info), info.name)
        except FileNotFoundError:
            return None
        except (CorruptFileError, FormatVersionError) as error:
            return error.with_traceback(None)

    def _get_commit(self, info: FileInfo) -> bytes:
        if info.size_bytes > _MAX_COMMIT_BYTES:
            raise CorruptFileError(f"has {info.size_bytes} bytes, expected at most {_MAX_COMMIT_BYTES}")
        return self.store.get(info.name)

    def _parse_text(self, text: bytes, name: str) -> CheckpointFile:
        try:
            document = load_json(text)
        except CorruptFileError as error:
            raise CorruptFileError(f"is not a commit ({error})") from None
        version = document.get("version")
        if version != VERSION or isinstance(version, bool):
            raise FormatVersionError(f"has commit version {repr(version)[:40]}, this release reads {VERSION}")
        sequence = document.get("sequence")
        if type(sequence) is not int or name != _commit_name(sequence):
            raise CorruptFileError(f"says that its number is {repr(sequence)[:40]}")
        metadata = unflatten(document.get("metadata"), [])
        if not isinstance(metadata, dict):
            raise CorruptFileError("has no metadata")
        step = metadata.get("step")
        metrics = metadata.get("metrics")
        time = metadata.get("time")
        if type(step) is not int or not 0 <= step <= _MAX_NUMBER:
            raise CorruptFileError("has metadata without a step")
        if not isinstance(metrics, dict) or not isinstance(time, float):
            raise CorruptFileError("has metadata without metrics and a time")
        identity = document.get("identity")
        if not isinstance(identity, str):
            raise CorruptFileError("has no identity")
        return CheckpointFile(
            path=self.url / managed_name(step),
            step=step,
            sequence=sequence,
            metrics=metrics,
            identity=identity,
            thinned=_parse_thinned(document.get("thinned")),
            time=time,
            pieces=_parse_pieces(document.get("pieces")),
        )


def _names_of(pieces: Sequence[FileInfo]) -> Iterator[str]:
    return map(operator.attrgetter("name"), pieces)


def _commit_name(sequence: int) -> str:
    return f"{COMMITS}{sequence:020}.json"


def _number_of(info: FileInfo) -> int:
    """Return the number in the name of a commit."""
    return int(info.name.removeprefix(COMMITS).removesuffix(".json"))


def _key(info: FileInfo) -> tuple[str, int, float]:
    return info.name, info.size_bytes, info.modified_s


def _with_unique_names(files: Sequence[CheckpointFile]) -> list[CheckpointFile]:
    """Return checkpoints in the order of their saves; of one step, only the newest has the plain name."""
    newest: dict[int, int] = {}
    for file in files:
        newest[file.step] = max(file.sequence, newest.get(file.step, 0))
    named = []
    for file in sorted(files, key=operator.attrgetter("sequence")):
        if file.sequence == newest[file.step]:
            named.append(file)
            continue
        # As in a folder, where the older file is renamed.
        name = f"{file.path.stem}.replaced-{file.sequence}{SUFFIX}"
        named.append(dataclasses.replace(file, path=file.path.with_name(name)))
    return named


def _parse_thinned(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CorruptFileError("does not say what was thinned")
    return tuple(value)


def _parse_pieces(value: Any) -> tuple[FileInfo, ...]:
    if not isinstance(value, list) or not value:
        raise CorruptFileError("names no data")
    return tuple(map(_parse_piece, value))


def _parse_piece(item: Any) -> FileInfo:
    if isinstance(item, list) and len(item) == 2:
        name, size = item
        if isinstance(name, str) and _PIECE_NAME.fullmatch(name) and type(size) is int and 0 < size <= PIECE_BYTES:
            return FileInfo(name, size)
    raise CorruptFileError(f"names the invalid data {str(item)[:80]}")
