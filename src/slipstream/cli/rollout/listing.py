"""What ``slipstream rollout inspect`` shows, as text and as JSON."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from slipstream.cli.output import plain, print_lines, print_table
from slipstream.cli.rollout.paths import iteration_of
from slipstream.rollout.files import RolloutFile
from slipstream.rollout.layout import Field
from slipstream.text import format_bytes, format_ratio, plural

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


@dataclass
class FileListing:
    """One rollout, as text and as JSON."""

    file: RolloutFile
    unreadable: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        keys = []
        for item, stored in self._rows():
            keys.append(self._describe(item, stored))
        return {
            **_summary(self.file),
            "batch_size": self.file.layout.batch_size,
            "written_by": self.file.container.written_by,
            "exceptions": self._num_exceptions(),
            "metadata": self.file.metadata,
            "keys": keys,
        }

    def show(self) -> None:
        """Print it as text and a table."""
        file = self.file
        layout = file.layout
        print_lines(
            f"{file.path}: rollout, {format_bytes(file.stored_bytes)}, written by {file.container.written_by}",
            f"{plural(layout.num_envs, 'environment')} x {plural(layout.num_steps, 'step')}, "
            f"batch size {list(layout.batch_size)}",
            *self._context(),
        )
        table = _table(("key", "dtype", "shape", "codec"), ("size", "stored", "ratio"), ("shares with",))
        for item, stored in self._rows():
            nbytes = layout.bytes_of(item)
            table.add_row(
                plain(item.name),
                item.dtype.name,
                "x".join(map(str, layout.shape_of(item))),
                self._codec(item),
                format_bytes(nbytes),
                format_bytes(stored),
                format_ratio(nbytes, stored),
                plain(self._sharing(item)),
            )
        print_table(table)
        print_lines(
            f"{plural(len(layout.fields), 'key')}, {format_bytes(layout.raw_bytes)} in a file of "
            f"{format_bytes(file.stored_bytes)} ({format_ratio(layout.raw_bytes, file.stored_bytes)}); "
            f"{plural(self._num_exceptions(), 'step')} where next differs from the following step (episode ends)"
        )

    def _context(self) -> Iterator[str]:
        iteration = self.file.container.values.get("iteration")
        if iteration is not None:
            yield f"iteration: {_inline(iteration)}"
        saved = _time(self.file)
        if saved is not None:
            yield f"time: {_date(saved)}"
        metadata = self.file.metadata
        if isinstance(metadata, dict):
            for key, value in metadata.items():
                yield f"{key}: {_inline(value)}"
        elif metadata is not None:
            yield f"metadata: {_inline(metadata)}"

    def _num_exceptions(self) -> int:
        """Return how many steps of ``next`` differ from the following step. Keys that share a mask count once."""
        counts: dict[str, int] = {}
        for item in self.file.layout.fields:
            if item.mask is not None:
                counts[item.mask] = self.file.num_exceptions(item)
        return sum(counts.values())

    def _rows(self) -> Iterator[tuple[Field, int]]:
        """Yield each tensor and the bytes that the file stores for it. Bytes that several share count for the first."""
        entries = self.file.container.entries
        counted: set[str] = set()
        for item in self.file.layout.fields:
            stored = 0
            for name in item.arrays:
                # The array of a shared observation counts for the observation, not for its `next`.
                if name not in counted and not (item.lead and name == item.array):
                    counted.add(name)
                    stored += entries[name].stored_bytes
            yield item, stored

    def _twin(self, item: Field) -> str | None:
        """Return the key whose array a tensor shares, if it is the ``next`` of one."""
        if not item.lead:
            return None
        for other in self.file.layout.fields:
            if other.array == item.array and not other.lead:
                return other.name
        return "?"

    def _sharing(self, item: Field) -> str:
        """Return what a tensor shares, for people."""
        twin = self._twin(item)
        if twin is None:
            return ""
        num_exceptions = self.file.num_exceptions(item)
        if num_exceptions:
            return f"{twin}, but {plural(num_exceptions, 'step')}"
        return twin

    def _codec(self, item: Field) -> str:
        """Return the codec of a tensor's array; for a ``next``, the codec of its exceptions."""
        entries = self.file.container.entries
        if not item.lead:
            return entries[item.array].codec.name
        if item.rows is not None and self.file.num_exceptions(item):
            return entries[item.rows].codec.name
        return "-"

    def _describe(self, item: Field, stored: int) -> dict[str, Any]:
        layout = self.file.layout
        return {
            "key": item.key,
            "dtype": item.dtype.name,
            "shape": layout.shape_of(item),
            "codec": self._codec(item),
            "bytes": layout.bytes_of(item),
            "stored_bytes": stored,
            "shares_with": self._twin(item),
            "exceptions": self.file.num_exceptions(item),
        }


@dataclass
class FolderListing:
    """The rollouts of a folder, as text and as JSON."""

    folder: Path
    rollouts: list[RolloutFile]
    unreadable: list[str]

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        raw, stored = self._totals()
        return {
            "folder": str(self.folder),
            "rollouts": [_summary(file) for file in self.rollouts],
            "unreadable": self.unreadable,
            "bytes": raw,
            "file_bytes": stored,
        }

    def show(self) -> None:
        """Print it as a table, and what cannot be read below."""
        table = _table(("file",), ("iteration", "envs x steps", "size", "stored", "ratio", "age"))
        for file in self.rollouts:
            iteration = _iteration(file)
            saved = _time(file)
            raw_bytes = file.layout.raw_bytes
            table.add_row(
                plain(file.path.name),
                "-" if iteration is None else str(iteration),
                f"{file.layout.num_envs} x {file.layout.num_steps}",
                format_bytes(raw_bytes),
                format_bytes(file.stored_bytes),
                format_ratio(raw_bytes, file.stored_bytes),
                "-" if saved is None else _age(time.time() - saved),
            )
        print_lines(f"{self.folder}:")
        print_table(table)
        raw, stored = self._totals()
        print_lines(*self.unreadable)
        print_lines(
            f"{plural(len(self.rollouts), 'rollout')}, {format_bytes(raw)} in files of {format_bytes(stored)} "
            f"({format_ratio(raw, stored)})" + (f"; {len(self.unreadable)} cannot be read" if self.unreadable else "")
        )

    def _totals(self) -> tuple[int, int]:
        raw = sum(file.layout.raw_bytes for file in self.rollouts)
        stored = sum(file.stored_bytes for file in self.rollouts)
        return raw, stored


def _summary(file: RolloutFile) -> dict[str, Any]:
    return {
        "file": str(file.path),
        "iteration": _iteration(file),
        "time": _time(file),
        "num_envs": file.layout.num_envs,
        "num_steps": file.layout.num_steps,
        "bytes": file.layout.raw_bytes,
        "file_bytes": file.stored_bytes,
    }


def _table(names: tuple[str, ...], numbers: tuple[str, ...], notes: tuple[str, ...] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for column in notes:
        table.add_column(column, no_wrap=True)
    return table


def _iteration(file: RolloutFile) -> int | None:
    saved = file.container.values.get("iteration")
    if type(saved) is int:
        return saved
    return iteration_of(file.path)


def _time(file: RolloutFile) -> float | None:
    """Return when a rollout was saved, in seconds since 1970; without a note of it, the file's modification time."""
    saved = file.container.values.get("time")
    if isinstance(saved, (int, float)) and 0 <= saved < 1e11:
        return float(saved)
    if file.path.exists():
        return file.path.stat().st_mtime
    return None


def _date(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def _inline(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
