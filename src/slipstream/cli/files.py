"""``slipstream inspect`` and ``slipstream verify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from slipstream.store import Container, Entry


def inspect(file: Path, *, as_json: bool) -> None:
    """Print the entries of a container."""
    with Container(file) as container:
        entries = list(container.entries.values())
        raw, stored = (sum(getattr(entry, size) for entry in entries) for size in ("nbytes", "stored_bytes"))
        if as_json:
            _print_json(
                {
                    "file": str(file),
                    "kind": container.kind,
                    "written_by": container.written_by,
                    "file_bytes": container.file_bytes,
                    "entries": [_describe(entry) for entry in entries],
                    "values": container.values,
                }
            )
            return
        table = Table(title=escape(f"{file}: {container.kind}"), box=SIMPLE_HEAD)
        table.add_column("name", overflow="fold")
        for column in ("dtype", "shape", "codec"):
            table.add_column(column, no_wrap=True)
        for column in ("size", "stored", "ratio"):
            table.add_column(column, justify="right", no_wrap=True)
        for entry in entries:
            table.add_row(
                escape(entry.name),
                entry.dtype.name,
                "x".join(map(str, entry.shape)),
                entry.codec.name,
                decimal(entry.nbytes),
                decimal(entry.stored_bytes),
                _ratio(entry.nbytes, entry.stored_bytes),
            )
        console = Console()
        console.print(table)
        console.print(
            f"{len(entries)} arrays, {decimal(raw)} packed into {decimal(stored)} ({_ratio(raw, stored)}); "
            f"{len(container.values)} values; written by {escape(container.written_by)}"
        )


def verify(file: Path, *, as_json: bool) -> bool:
    """Check every chunk of a container, print the damage, and return whether there is none."""
    with Container(file) as container:
        chunks = sum(len(entry.chunks) for entry in container.entries.values())
        progress = Console(stderr=True)
        outcomes = track(
            container.find_damage(),
            "checking",
            chunks,
            console=progress,
            transient=True,
            disable=not progress.is_terminal,
        )
        damage = [str(error) for error in outcomes if error is not None]
    if as_json:
        _print_json({"file": str(file), "chunks": chunks, "damage": damage})
    else:
        verdict = f"{len(damage)} of {chunks} chunks are damaged" if damage else f"all {chunks} chunks are sound"
        for line in (*damage, f"{file}: {verdict}"):
            Console(soft_wrap=True).print(escape(line))
    return not damage


def _describe(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "dtype": entry.dtype.name,
        "shape": entry.shape,
        "codec": entry.codec.to_header(),
        "chunks": len(entry.chunks),
        "bytes": entry.nbytes,
        "stored_bytes": entry.stored_bytes,
    }


def _ratio(raw: int, stored: int) -> str:
    return f"{raw / stored:.2f}x" if stored else "-"


def _print_json(document: dict[str, Any]) -> None:
    Console(soft_wrap=True).print_json(json.dumps(document))
