"""Read the entries of a native checkpoint, following a delta to its parents. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from slipstream.checkpoint.layout import KIND, MAX_LINKS, Header
from slipstream.errors import CorruptFileError, FormatVersionError, naming
from slipstream.schema.values import Json
from slipstream.store.container import Container
from slipstream.store.header import MAGIC
from slipstream.store.index import Entry
from slipstream.store.local import open_regular


class EntryReader:
    """Reads entries of a native checkpoint by name. Opens the parents of a delta when it needs them.

    Args:
        path: The file; or an open container, such as one in memory, which `close` closes.

    Raises:
        CorruptFileError: If it is not an intact native checkpoint, or a delta in memory, where it has no parents.
        FormatVersionError: If another version of the format wrote it.

    Attributes:
        container: The file.
        header: What it says about itself.
        structure: The state as JSON.
        own: The entries in this file by name, without those that are only in the parents.
    """

    def __init__(self, path: str | os.PathLike[str] | Container) -> None:
        if not isinstance(path, Container):
            path = Container(path)
        self.container = path
        self._parent: Self | None = None
        self.own = self.container.entries
        try:
            with naming(self.container.path):
                self.header = self._read_header()
                self.structure: Json = self.container.values["state"]
        except BaseException:
            self.container.close()
            raise

    def _read_header(self) -> Header:
        values = self.container.values
        if self.container.kind != KIND or "state" not in values:
            raise CorruptFileError(f"is a container of kind {self.container.kind[:40]!r}, expected a checkpoint")
        header = Header.parse(values.get(KIND))
        for name in header.entries:
            if name not in self.own and name not in header.same:
                raise CorruptFileError(f"the state needs entry {name[:200]!r}, which is missing")
        if header.parents and self.container.is_in_store:
            raise CorruptFileError(
                f"is stored against another checkpoint ({header.parents[0].file[:80]!r}), which object stores do not "
                "support; upload what `slipstream ckpt convert` makes of it"
            )
        # Parents are looked for in the folder of a file. What is in memory may come from anyone and has no folder.
        if header.parents and self.container.is_in_memory:
            raise CorruptFileError(
                f"is stored against another checkpoint ({header.parents[0].file[:80]!r}), which it does not contain; "
                "load the file where its parents are, and pack the state"
            )
        return header

    def close(self) -> None:
        """Close the file and its parents. Idempotent."""
        self.container.close()
        if self._parent is not None:
            self._parent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lineage(self) -> Iterator[Self]:
        """Yield this file and its parents, nearest first.

        Raises:
            CorruptFileError: If a parent is missing, or the chain is longer than any that is written.
        """
        file = self
        yield file
        for _ in range(MAX_LINKS):
            if not file.header.parents:
                return
            file = file.open_parent()
            yield file
        if file.header.parents:
            raise CorruptFileError(f"{self.container.path}: has more than {MAX_LINKS} parents")

    def open_parent(self, *, intact: bool = False) -> Self:
        """Return the checkpoint that this one is stored against, found by its identity whatever its name.

        Args:
            intact: Look for it again, and skip copies whose chunks are damaged.

        Raises:
            CorruptFileError: If it is not in the folder. Names all parents that are needed.
        """
        if self._parent is None or intact:
            self._parent = self._find_parent(intact=intact)
        return self._parent

    def _find_parent(self, *, intact: bool = False) -> Self:
        """Find the parent in the folder. With `intact`, skip copies of it whose chunks are damaged."""
        wanted = self.header.parents[0]
        folder = self.container.path.parent
        hint = folder / wanted.file
        # It nearly always still has the name it had. If not, any file in the folder may be it.
        others = [path for path in sorted(folder.iterdir()) if path != hint]
        failure: OSError | None = None
        for path in [hint, *others]:
            try:
                file = self._open_if(path, wanted.identity, intact=intact)
            except (FileNotFoundError, CorruptFileError, FormatVersionError):
                # Deleted in the meantime, damaged, or no checkpoint. Another file may be the one.
                continue
            except OSError as error:
                # A file that cannot be read now is not known to be missing.
                failure = error
                continue
            if file is not None:
                return file
        if failure is not None:
            raise failure
        names = ", ".join(parent.file for parent in self.header.parents)
        raise CorruptFileError(
            f"{self.container.path}: contains only what changed since {wanted.file}, which is missing or damaged; "
            f"put its parents into the same folder ({names})"
        )

    def _open_if(self, path: Path, identity: str, *, intact: bool) -> Self | None:
        """Open a file if it is the checkpoint with an identity. With `intact`, raise if a chunk of it is damaged."""
        if not looks_native(path):
            return None
        file = type(self)(path)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(file.close)
            if file.header.identity != identity:
                return None
            if intact:
                file.container.check_chunks()
            # The caller closes it.
            cleanup.pop_all()
            return file

    def choose_intact_parents(self, max_links: int = MAX_LINKS) -> bool:
        """Look for an intact copy of every parent, after reading has found damage.

        Args:
            max_links: How many parents to look for at most.

        Returns:
            Whether there are parents, and an intact copy of each.
        """
        if not self.header.parents or not max_links:
            return False
        try:
            found = self.open_parent(intact=True)
        except CorruptFileError:
            return False
        return not found.header.parents or found.choose_intact_parents(max_links - 1)

    def entry(self, name: str) -> Entry:
        """Return an entry of this file, or that of a parent if it has not changed since.

        Raises:
            CorruptFileError: If there is none.
        """
        for file in self.lineage():
            if name in file.own:
                return file.own[name]
            if name not in file.header.same:
                break
        raise CorruptFileError(f"{self.container.path}: the state needs entry {name[:200]!r}, which is missing")

    def read_arrays(self, names: Collection[str], threads: int | None = None) -> dict[str, NDArray[Any]]:
        """Read entries, following references to the parents. Decodes every entry of every file at most once.

        Differences are added to the memory of their reference, so a chain takes no more memory than a whole file.

        Raises:
            CorruptFileError: If a chunk is damaged or a parent is missing.
        """
        # Walk up to the files that contain each entry whole.
        steps: list[tuple[EntryReader, list[str]]] = []
        wanted = list(names)
        lineage = self.lineage()
        while wanted:
            file = next(lineage, None)
            if file is None:
                raise CorruptFileError(f"{self.container.path}: the state needs entry {wanted[0][:200]!r} of a parent")
            steps.append((file, [name for name in wanted if name in file.own]))
            wanted = [name for name in wanted if file.needs_parent(name)]
        # Decode on the way back.
        arrays: dict[str, NDArray[Any]] = {}
        for file, own in reversed(steps):
            arrays |= file.decode(own, arrays, threads)
        return arrays

    def needs_parent(self, name: str) -> bool:
        """Return whether an entry, or what it is stored against, is in the parent."""
        if name in self.own:
            return self.own[name].codec.needs_reference
        if name not in self.header.same:
            raise CorruptFileError(f"{self.container.path}: the state needs entry {name[:200]!r}, which is missing")
        return True

    def decode(
        self, names: Collection[str], before: Mapping[str, NDArray[Any]], threads: int | None
    ) -> dict[str, NDArray[Any]]:
        """Decode entries of this file. `before` has those of the parent, and is overwritten by differences to it."""
        references = {}
        for name in names:
            entry = self.own[name]
            if not entry.codec.needs_reference:
                continue
            references[name] = before[name]
            if (entry.dtype, entry.shape) != (before[name].dtype, before[name].shape):
                raise CorruptFileError(
                    f"{self.container.path}: entry {name[:200]!r} is stored against an entry of another shape"
                )
        return self.container.read_many(names, references, threads, out=references)

    def check_chunks(self, threads: int | None = None) -> None:
        """Compare every byte of this file and its parents with its checksum, without decoding.

        Raises:
            CorruptFileError: If something is damaged or missing.
        """
        for file in self.lineage():
            file.container.check_chunks(threads)


def looks_native(path: Path) -> bool:
    """Return whether a path is a regular file that begins like a container. Never blocks.

    Raises:
        OSError: If it exists and cannot be read.
    """
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (FileNotFoundError, CorruptFileError):
        return False
