"""What ``slipstream ckpt inspect`` shows of a checkpoint, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from slipstream.cli.output import plain, print_lines, print_table
from slipstream.text import format_bytes, format_ratio, plural


@dataclass
class Row:
    """One tensor: how large it is, and how much of the file it takes, if that can be told."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    codec: str = "-"
    memory_bytes: int = 0
    stored_bytes: int | None = None

    def document(self) -> dict[str, Any]:
        """Return what JSON says of it."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": self.shape,
            "codec": self.codec,
            "bytes": self.nbytes,
            "stored_bytes": self.stored_bytes,
        }


@dataclass
class Listing:
    """What there is to say about a checkpoint."""

    file: Path
    format: str
    rows: list[Row]
    metadata: Any = None
    written_by: str | None = None
    parent: dict[str, Any] | None = None
    file_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.file_bytes = self.file.stat().st_size

    @property
    def raw_bytes(self) -> int:
        """The memory of all tensors; what is tied counts once."""
        return sum(row.memory_bytes for row in self.rows)

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        known = self.metadata if isinstance(self.metadata, dict) else {}
        return {
            "file": str(self.file),
            "format": self.format,
            "file_bytes": self.file_bytes,
            "written_by": self.written_by,
            "step": known.get("step"),
            "metrics": known.get("metrics"),
            "metadata": self.metadata,
            "parent": self.parent,
            "tensors": [row.document() for row in self.rows],
            "bytes": self.raw_bytes,
        }

    def show(self) -> None:
        """Print it as text and a table."""
        author = f", written by {self.written_by}" if self.written_by else ""
        print_lines(f"{self.file}: {self.format} checkpoint, {format_bytes(self.file_bytes)}{author}", *self._context())
        table = Table(box=SIMPLE_HEAD)
        for column in ("name", "dtype", "shape", "codec"):
            table.add_column(column, no_wrap=True)
        for column in ("size", "stored", "ratio"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            stored = row.stored_bytes
            table.add_row(
                plain(row.name),
                plain(row.dtype),
                "x".join(map(str, row.shape)),
                row.codec,
                format_bytes(row.nbytes),
                "-" if stored is None else format_bytes(stored),
                "-" if stored is None else format_ratio(row.memory_bytes, stored),
            )
        print_table(table)
        packed = f"{format_bytes(self.raw_bytes)} in a file of {format_bytes(self.file_bytes)}"
        print_lines(f"{plural(len(self.rows), 'tensor')}, {packed} ({format_ratio(self.raw_bytes, self.file_bytes)})")

    def _context(self) -> Iterator[str]:
        if isinstance(self.metadata, dict):
            yield from (f"{key}: {_inline_json(value)}" for key, value in self.metadata.items())
        elif self.metadata is not None:
            yield f"metadata: {_inline_json(self.metadata)}"
        if self.parent:
            same = len(self.parent["same"])
            yield (
                f"delta of {self.parent['file']}, depth {self.parent['depth']}: "
                f"{same} {'entry is' if same == 1 else 'entries are'} the same there"
            )


def _inline_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
