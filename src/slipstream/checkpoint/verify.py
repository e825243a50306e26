"""Verify checkpoints: every stored byte against its checksum, and every tensor after decoding against its digest.

Checksums show that a file is as it was written. Digests show that decoding yields what was saved, through all parents
of a delta. Native files are verified without torch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.checkpoint.finding import Opener, find_sources, open_checkpoint
from slipstream.checkpoint.formats import ZIP_MAGIC, FormatName, find_format
from slipstream.checkpoint.portable.archive import Archive
from slipstream.checkpoint.reader import NativeReader
from slipstream.errors import CorruptFileError, FormatVersionError, StoreError, naming
from slipstream.store.container import Container
from slipstream.store.local import check_regular, open_regular
from slipstream.store.urls import ObjectPath, as_path

Progress = Callable[[Path, int, int], object]
"""Called with the file that is being verified, the number of bytes that are done, and their total."""

# By device and inode: what was found in each file. Checkpoints of a folder may have the same parents.
_Known = dict[object, list[str]]


@dataclass(frozen=True)
class Verification:
    """The result of verifying one checkpoint.

    Attributes:
        path: The file.
        format: Its format; None if it has none of the known ones.
        num_chunks: How many chunks of a native file and its parents were compared with their checksums.
        num_regions: How many pieces of memory of a native file and its parents were compared with their digests.
        num_parents: How many parents were verified along with it.
        has_checksums: Whether the file has checksums. If not, all that is known is that it can be read.
        problems: What is wrong with it, a sentence each; empty if it is intact.
    """

    path: Path
    format: FormatName | None
    num_chunks: int = 0
    num_regions: int = 0
    num_parents: int = 0
    has_checksums: bool = True
    problems: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "file": str(self.path),
            "format": self.format or "unknown",
            "chunks": self.num_chunks,
            "regions": self.num_regions,
            "parents": self.num_parents,
            "has_checksums": self.has_checksums,
            "problems": list(self.problems),
        }


def verify_checkpoint(path: str | os.PathLike[str], progress: Progress | None = None) -> Verification:
    """Verify every byte of a checkpoint of any format, and of the parents of a delta.

    Never runs code from the file. Of native files one entry at a time is in memory; other formats are loaded.

    Args:
        path: The file, or its URL in an object store.
        progress: Called after each entry of a native file.

    Returns:
        What was verified, and all problems that were found. A missing parent is a problem, too.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is not a regular file, or a ``.pt`` file that cannot be read without running its code
            or is older than torch 1.6.
        ImportError: If it is a safetensors file, and that package is not installed.

    Example:
        >>> import torch
        >>> from slipstream import AsyncCheckpointSaver
        >>> with AsyncCheckpointSaver() as saver:
        ...     _ = saver.save_async({"w": torch.ones(3)}, "/tmp/slipstream-doc/verify.slip", format="native")
        >>> verify_checkpoint("/tmp/slipstream-doc/verify.slip").is_sound
        True
    """
    path = as_path(path)
    if isinstance(path, ObjectPath):
        return _verify_stored(path, functools.partial(open_checkpoint, path), progress or _ignore, {})
    return _verify(path, progress or _ignore, {})


def verify_folder(folder: str | os.PathLike[str], progress: Progress | None = None) -> Iterator[Verification]:
    """Verify the native checkpoints of a folder, one after another. Parents that several have are verified once.

    Args:
        folder: The folder, or the URL of a run in an object store. All files ``*.slip`` are verified, except containers
            of another kind.
        progress: Called after each entry.

    Yields:
        The result for each file.

    Raises:
        FileNotFoundError: If there is no such folder, or no such file in it.
    """
    known: _Known = {}
    folder = as_path(folder)
    sources, unreadable = find_sources(folder)
    for path, error in unreadable.items():
        yield Verification(path, None, problems=(str(error),))
    for path, open_source in sources.items():
        try:
            if isinstance(path, ObjectPath):
                yield _verify_stored(path, open_source, progress or _ignore, known)
            else:
                yield _verify(path, progress or _ignore, known)
        except StoreError:
            raise
        except OSError as error:
            # Deleted in the meantime, a dangling link, or not readable: the other files are verified nevertheless.
            problem = f"{path}: cannot be read ({error.strerror or error})"
            yield Verification(path, None, problems=(problem,))
        except CorruptFileError as error:
            # A FIFO, or another format that cannot be judged: not a native checkpoint in any case.
            yield Verification(path, None, problems=(str(error),))


def _ignore(path: Path, num_done: int, num_total: int) -> None:
    """Report no progress."""


def _verify(path: Path, progress: Progress, known: _Known) -> Verification:
    # A FIFO or a folder is not a damaged checkpoint but a mistake.
    check_regular(path)
    found: FormatName | None = None
    # Any other error is damage, whatever the reader stumbled over first.
    try:
        found = find_format(path)
        if found == "native":
            return _verify_native(path, progress, known)
        return _verify_loaded(path, found)
    except (CorruptFileError, FormatVersionError) as error:
        # The file may be intact, so it must not be called damaged.
        if _is_refusal(error) or (found == "pt" and not _is_archive(path)):
            raise
        return Verification(path, found, problems=(str(error),))


def _verify_stored(path: ObjectPath, open_source: Opener, progress: Progress, known: _Known) -> Verification:
    """Verify a checkpoint of an object store."""
    try:
        return _verify_native(open_source(), progress, known)
    except (CorruptFileError, FormatVersionError) as error:
        return Verification(path, None, problems=(str(error),))


def _verify_native(source: Path | Container, progress: Progress, known: _Known) -> Verification:
    with NativeReader(source) as reader:
        path = reader.container.path
        files, missing = _open_lineage(reader)
        problems = list(missing)
        num_chunks = 0
        num_regions = 0
        # Parents first: a child of a damaged parent cannot be decoded, which need not be reported again.
        for file in reversed(files):
            key = _key_of(file)
            if missing:
                # Without all parents nothing can be decoded, but the bytes that are there have checksums.
                damage = _find_damaged_chunks(file)
            elif key in known:
                damage = known[key]
            else:
                damage = _find_damage(file, problems, progress)
                known[key] = damage
            problems += damage
            # Counted for every file, also for those that were verified as the parent of another one.
            num_chunks += sum(len(entry.chunks) for entry in file.container.entries.values())
            if not problems:
                num_regions += len(file.table)
    distinct = tuple(dict.fromkeys(problems))
    return Verification(path, "native", num_chunks, num_regions, len(files) - 1, problems=distinct)


def _key_of(file: NativeReader) -> object:
    """Return the same for the same file."""
    path = file.container.path
    if isinstance(path, ObjectPath):
        return path
    status = path.stat()
    return status.st_dev, status.st_ino


def _open_lineage(reader: NativeReader) -> tuple[list[NativeReader], list[str]]:
    """Return a file and its parents as far as they can be opened, and what keeps others from being opened."""
    files: list[NativeReader] = []
    try:
        for file in reader.lineage():
            files.append(file)  # noqa: PERF402 - a list of all would lose those before the error
    except CorruptFileError as error:
        return files, [str(error)]
    return files, []


def _find_damage(file: NativeReader, before: list[str], progress: Progress) -> list[str]:
    """Decode everything in one file, and return what does not match.

    Args:
        file: The file.
        before: The problems of its parents, which are not repeated.
        progress: Called after each entry.
    """
    path = file.container.path
    try:
        file.check()
    except (CorruptFileError, FormatVersionError) as error:
        # The table of regions may be the problem, so decoded content cannot be verified.
        return [str(error), *_find_damaged_chunks(file)]
    problems: list[str] = []
    sizes = {name: file.entry(name).nbytes for name in file.header.entries}
    num_total = sum(sizes.values())
    num_done = 0
    for name, nbytes in sizes.items():
        try:
            file.read_entry(name)
        except CorruptFileError as error:
            problem = str(error)
            # Reading a child reports the damage of its parent with the name of the child in front.
            if problem.removeprefix(f"{path}: ") not in before:
                problems.append(problem)
        num_done += nbytes
        progress(path, num_done, num_total)
    # Entries that no tensor refers to have been skipped so far. This reads the file again, but decodes nothing.
    try:
        file.container.check_chunks()
    except CorruptFileError as error:
        problems.append(str(error))
    return list(dict.fromkeys(problems))


def _find_damaged_chunks(file: NativeReader) -> list[str]:
    """Compare every chunk of one file with its checksum."""
    return [str(error) for error in filter(None, file.container.find_damage())]


def _verify_loaded(path: Path, found: FormatName) -> Verification:
    """Verify a checkpoint of another format: loading compares all checksums that it has."""
    # Imported here, because it imports torch.
    from slipstream.checkpoint.load import load_file  # noqa: PLC0415

    load_file(path)
    return Verification(path, found, has_checksums=_has_checksums(path, found))


def _has_checksums(path: Path, found: FormatName) -> bool:
    # The frames have checksums, and so does the archive inside.
    if found == "lz4":
        return True
    if found == "safetensors":
        return False
    with naming(path), open_regular(path) as file:
        return Archive(file).has_checksums


def _is_archive(path: Path) -> bool:
    """Return whether a ``.pt`` file is an archive. Before torch 1.6 it was a bare pickle, which has no checksums."""
    with open_regular(path) as file:
        return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC


def _is_refusal(error: Exception) -> bool:
    """Return whether a file cannot be read without running code from it."""
    # Recognized by name, because the module of the class imports torch.
    return type(error.__cause__).__name__ == "RefusedNameError"
