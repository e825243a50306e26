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
from rich.filesize import decimal
from rich.table import Table

from slipstream.cli.files import ratio
from slipstream.cli.output import count, plain, print_lines, print_table
from slipstream.cli.rollout.index import RolloutIndex, Tensor
from slipstream.cli.rollout.paths import iteration_of

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


@dataclass
class FileListing:
    """What there is to say about a rollout."""

    index: RolloutIndex
    unreadable: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        index = self.index
        return {
            **_summary(index),
            "batch_size": index.batch_size,
            "written_by": index.written_by,
            "exceptions": index.exceptions,
            "metadata": index.values.get("metadata"),
            "keys": [self._describe(tensor, stored) for tensor, stored in self._rows()],
        }

    def show(self) -> None:
        """Print it as text and a table."""
        index = self.index
        print_lines(f"{index.file}: rollout, {decimal(index.file_bytes)}, written by {index.written_by}")
        print_lines(f"{_steps(index)}, batch size {list(index.batch_size)}", *self._context())
        table = _table(("key", "dtype", "shape", "codec"), ("size", "stored", "ratio"), ("shares with",))
        for tensor, stored in self._rows():
            nbytes, twin = index.bytes_of(tensor), self._twin(tensor)
            table.add_row(
                plain(tensor.name),
                tensor.dtype,
                "x".join(map(str, index.shape_of(tensor))),
                _codec(tensor),
                decimal(nbytes),
                decimal(stored),
                ratio(nbytes, stored),
                plain(f"{twin}, but {count(tensor.exceptions, 'step')}" if tensor.exceptions else twin or ""),
            )
        print_table(table)
        packed = f"{decimal(index.raw_bytes)} in a file of {decimal(index.file_bytes)}"
        print_lines(
            f"{count(len(index.tensors), 'key')}, {packed} ({ratio(index.raw_bytes, index.file_bytes)}); "
            f"{count(index.exceptions, 'step')} after which next is not the step that follows"
        )

    def _context(self) -> Iterator[str]:
        values = self.index.values
        if values.get("iteration") is not None:
            yield f"iteration: {_inline(values['iteration'])}"
        if (saved := _time(self.index)) is not None:
            yield f"time: {_date(saved)}"
        metadata = values.get("metadata")
        if isinstance(metadata, dict):
            yield from (f"{key}: {_inline(value)}" for key, value in metadata.items())
        elif metadata is not None:
            yield f"metadata: {_inline(metadata)}"

    def _rows(self) -> Iterator[tuple[Tensor, int]]:
        """Yield each tensor and the bytes of the file that are there for it; a mask that several have counts once."""
        masks: set[str] = set()
        for tensor in self.index.tensors:
            own = [tensor.array] if not tensor.lead else [entry for entry in (tensor.rows,) if entry]
            if tensor.mask and tensor.mask.name not in masks:
                masks.add(tensor.mask.name)
                own.append(tensor.mask)
            yield tensor, sum(entry.stored_bytes for entry in own)

    def _twin(self, tensor: Tensor) -> str | None:
        """Return the key whose array a tensor shares, if it is the ``next`` of one."""
        if not tensor.lead:
            return None
        return next((other.name for other in self.index.tensors if other.array is tensor.array and not other.lead), "?")

    def _describe(self, tensor: Tensor, stored: int) -> dict[str, Any]:
        return {
            "key": tensor.key,
            "dtype": tensor.dtype,
            "shape": self.index.shape_of(tensor),
            "codec": _codec(tensor),
            "bytes": self.index.bytes_of(tensor),
            "stored_bytes": stored,
            "shares_with": self._twin(tensor),
            "exceptions": tensor.exceptions,
        }


@dataclass
class FolderListing:
    """What there is to say about a folder of rollouts."""

    folder: Path
    rollouts: list[RolloutIndex]
    unreadable: list[str]

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        raw, stored = self._totals()
        return {
            "folder": str(self.folder),
            "rollouts": [_summary(index) for index in self.rollouts],
            "unreadable": self.unreadable,
            "bytes": raw,
            "file_bytes": stored,
        }

    def show(self) -> None:
        """Print it as a table, and what cannot be read below."""
        table = _table(("file",), ("iteration", "envs x steps", "size", "stored", "ratio", "age"))
        for index in self.rollouts:
            iteration, saved = _iteration(index), _time(index)
            table.add_row(
                plain(index.file.name),
                "-" if iteration is None else str(iteration),
                f"{index.num_envs} x {index.num_steps}",
                decimal(index.raw_bytes),
                decimal(index.file_bytes),
                ratio(index.raw_bytes, index.file_bytes),
                "-" if saved is None else _age(time.time() - saved),
            )
        print_lines(f"{self.folder}:")
        print_table(table)
        raw, stored = self._totals()
        print_lines(*self.unreadable)
        print_lines(
            f"{count(len(self.rollouts), 'rollout')}, {decimal(raw)} in files of {decimal(stored)} "
            f"({ratio(raw, stored)})" + (f"; {len(self.unreadable)} cannot be read" if self.unreadable else "")
        )

    def _totals(self) -> tuple[int, int]:
        return sum(index.raw_bytes for index in self.rollouts), sum(index.file_bytes for index in self.rollouts)


def _summary(index: RolloutIndex) -> dict[str, Any]:
    return {
        "file": str(index.file),
        "iteration": _iteration(index),
        "time": _time(index),
        "num_envs": index.num_envs,
        "num_steps": index.num_steps,
        "bytes": index.raw_bytes,
        "file_bytes": index.file_bytes,
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


def _codec(tensor: Tensor) -> str:
    """Return what packs the array of a tensor; for a ``next``, what packs the steps that are stored for it."""
    if not tensor.lead:
        return tensor.array.codec.name
    return tensor.rows.codec.name if tensor.rows and tensor.exceptions else "-"


def _steps(index: RolloutIndex) -> str:
    return f"{count(index.num_envs, 'environment')} x {count(index.num_steps, 'step')}"


def _iteration(index: RolloutIndex) -> int | None:
    said = index.values.get("iteration")
    return said if type(said) is int else iteration_of(index.file)


def _time(index: RolloutIndex) -> float | None:
    """Return when a rollout was saved, in seconds since 1970; a file that was saved by itself has the file's time."""
    said = index.values.get("time")
    if isinstance(said, (int, float)) and 0 <= said < 1e11:
        return float(said)
    return index.file.stat().st_mtime if index.file.exists() else None


def _date(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def _inline(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
