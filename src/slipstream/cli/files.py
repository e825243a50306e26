"""``slipstream inspect`` and ``slipstream verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.progress import track
from rich.table import Table

from slipstream.cli.output import console, plain, print_json, print_lines, print_table
from slipstream.store.container import Container
from slipstream.store.index import Entry
from slipstream.text import format_bytes, format_ratio, plural


def inspect(file: Path, *, as_json: bool) -> None:
    """Print the entries of a container."""
    with Container(file) as container:
        entries = list(container.entries.values())
        raw, stored = (sum(getattr(entry, size) for entry in entries) for size in ("nbytes", "stored_bytes"))
        if as_json:
            print_json(
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
        table = Table(title=plain(f"{file}: {container.kind}"), box=SIMPLE_HEAD)
        for column in ("name", "dtype", "shape", "codec"):
            table.add_column(column, no_wrap=True)
        for column in ("size", "stored", "ratio"):
            table.add_column(column, justify="right", no_wrap=True)
        for entry in entries:
            table.add_row(
                plain(entry.name),
                entry.dtype.name,
                "x".join(map(str, entry.shape)),
                entry.codec.name,
                format_bytes(entry.nbytes),
                format_bytes(entry.stored_bytes),
                format_ratio(entry.nbytes, entry.stored_bytes),
            )
        print_table(table)
        print_lines(
            f"{plural(len(entries), 'array')}, {format_bytes(raw)} packed into {format_bytes(stored)} "
            f"({format_ratio(raw, stored)}); {plural(len(container.values), 'value')}; "
            f"written by {container.written_by}"
        )


def verify(file: Path, *, as_json: bool) -> bool:
    """Check every chunk of a container, print the damage, and return whether there is none."""
    with Container(file) as container:
        chunks = sum(len(entry.chunks) for entry in container.entries.values())
        progress = console(stderr=True)
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
        print_json({"file": str(file), "chunks": chunks, "damage": damage})
    else:
        verdict = f"{len(damage)} of {chunks} chunks are damaged" if damage else f"all {chunks} chunks are sound"
        print_lines(*damage, f"{file}: {verdict}")
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
