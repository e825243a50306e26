"""How ``slipstream ckpt`` shows listings and progress on a terminal."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from slipstream.checkpoint.inspect import CheckpointListing, FolderListing
from slipstream.checkpoint.layout import MAX_LINKS
from slipstream.checkpoint.verify import Progress, Verification
from slipstream.cli.output import console, plain, print_folding, print_lines
from slipstream.text import format_bytes, format_ratio, plural

# Longer ones are cut off, so that tables fit into 80 columns. JSON has all of them.
_MAX_METRICS = 23
_MAX_PARENTS = 3


def show_checkpoint(listing: CheckpointListing) -> None:
    """Print the tensors of a checkpoint as a table, below what else is known about it."""
    title = f"{listing.path}: {listing.format} checkpoint, {format_bytes(listing.file_bytes)}"
    if listing.written_by:
        title += f", written by {listing.written_by}"
    print_lines(title, *_context(listing))
    table = _make_table(folding="name", left=("dtype", "shape", "codec"), right=("size", "stored"))
    for tensor in listing.tensors:
        stored = "-"
        if tensor.stored_bytes is not None:
            stored = format_bytes(tensor.stored_bytes)
        # The sizes of tensors that are packed together are estimates.
        if tensor.is_packed_with_others:
            stored = f"~{stored}"
        table.add_row(
            plain(tensor.name),
            plain(tensor.dtype),
            "x".join(map(str, tensor.shape)),
            tensor.codec,
            format_bytes(tensor.nbytes),
            stored,
        )
    print_folding(table)
    sizes = f"{format_bytes(listing.raw_bytes)} in a file of {format_bytes(listing.file_bytes)}"
    ratio = format_ratio(listing.raw_bytes, listing.file_bytes)
    print_lines(f"{plural(len(listing.tensors), 'tensor')}, {sizes} ({ratio})")


def show_folder(listing: FolderListing) -> None:
    """Print the checkpoints of a folder as a table, then the files that cannot be read."""
    table = _make_table(folding="file", left=(), right=("step", "seq", "size"))
    # Text after the numbers, because its length varies most.
    table.add_column("stored", no_wrap=True)
    table.add_column("metrics", no_wrap=True)
    by_identity = {checkpoint.identity: checkpoint for checkpoint in listing.checkpoints}
    for checkpoint in listing.checkpoints:
        table.add_row(
            plain(checkpoint.path.name),
            plain(_optional(checkpoint.step)),
            _optional(checkpoint.sequence),
            format_bytes(checkpoint.file_bytes),
            _how_stored(checkpoint, by_identity),
            plain(_shown_metrics(checkpoint.metrics)),
        )
    # A table without rows is only a heading.
    if listing.checkpoints:
        print_folding(table)
    for path, problem in listing.unreadable.items():
        print_lines(f"{path.name}: unreadable: {problem}")
    num_bytes = sum(checkpoint.file_bytes for checkpoint in listing.checkpoints)
    summary = f"{listing.path}: {plural(len(listing.checkpoints), 'checkpoint')}, {format_bytes(num_bytes)}"
    if listing.unreadable:
        summary += f"; {plural(len(listing.unreadable), 'file')} unreadable"
    print_lines(summary)


def describe_verification(result: Verification) -> str:
    """Return the result of verifying a checkpoint as a sentence."""
    if not result.is_sound:
        return f"{result.path}: damaged"
    if not result.has_checksums:
        return f"{result.path}: can be read, but has no checksums to compare it with"
    # Other formats do not say how many checksums they have.
    if result.format != "native":
        return f"{result.path}: sound"
    parents = ""
    if result.num_parents:
        parents = f", its {plural(result.num_parents, 'parent')} included,"
    return f"{result.path}: sound, all {result.num_chunks} chunks and {result.num_regions} digests{parents} match"


@contextlib.contextmanager
def showing_progress() -> Iterator[Progress]:
    """Yield a function that shows the progress of `verify_checkpoint` on stderr, if that is a terminal."""
    screen = console(stderr=True)
    # The name of a file is text, not markup.
    name = TextColumn("{task.description}", markup=False)
    with ProgressBar(
        name, BarColumn(), TimeRemainingColumn(), console=screen, transient=True, disable=not screen.is_terminal
    ) as bar:
        task = bar.add_task("checking", total=None)

        def show(path: Path, num_done: int, num_total: int) -> None:
            bar.update(task, description=f"checking {plain(path.name)}", completed=num_done, total=num_total)

        yield show


def _make_table(folding: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    """Return an empty table. Its first column is folded if the terminal is too narrow."""
    # Without edges and with narrow gaps: every column counts.
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(folding, overflow="fold", min_width=16)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def _context(listing: CheckpointListing) -> Iterator[str]:
    """Yield a line for each thing that is known about a checkpoint besides its tensors."""
    if isinstance(listing.metadata, dict):
        for key, value in listing.metadata.items():
            yield f"{key}: {_inline(value)}"
    elif listing.metadata is not None:
        yield f"metadata: {_inline(listing.metadata)}"
    if listing.thinned:
        yield f"thinned: {', '.join(listing.thinned)}"
    if listing.parents:
        yield f"delta of {listing.parents[0].file}"
    # Parents that have been made whole since then do not need theirs any longer, which only they know.
    if len(listing.parents) > 1:
        names = ", ".join(parent.file for parent in listing.parents)
        yield f"parents when it was saved: {names}"


def _inline(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _optional(value: Any) -> str:
    if value is None:
        return "-"
    return str(value)


def _how_stored(checkpoint: CheckpointListing, by_identity: Mapping[str | None, CheckpointListing]) -> str:
    """Say whether a checkpoint is whole, and which saves it is stored against, such as ``delta of 4, 3``."""
    words = "whole"
    if checkpoint.parents:
        words = f"delta of {_describe_parents(checkpoint, by_identity)}"
    if checkpoint.thinned:
        words += ", thinned"
    return words


def _describe_parents(checkpoint: CheckpointListing, by_identity: Mapping[str | None, CheckpointListing]) -> str:
    """Return the sequence numbers of the nearest parents, as they are stored now."""
    numbers: list[str] = []
    child = checkpoint
    # Forged files could refer to each other in a circle.
    while child.parents and len(numbers) <= MAX_LINKS:
        parent = by_identity.get(child.parents[0].identity)
        if parent is None:
            numbers.append("a missing file")
            break
        numbers.append(_optional(parent.sequence))
        child = parent
    if len(numbers) > _MAX_PARENTS:
        numbers = [*numbers[:_MAX_PARENTS], "..."]
    return ", ".join(numbers)


def _shown_metrics(metrics: Any) -> str:
    """Return metrics as short text, such as ``reward 9.5, loss 0.21``."""
    if not isinstance(metrics, dict):
        return ""
    words = []
    for key, value in metrics.items():
        # What is long, such as the settings of a training, is in the JSON.
        if isinstance(value, dict | list):
            continue
        # The last part of train/stats.reach_goal says what it is.
        name = re.split(r"[/.]", key)[-1]
        # Four digits tell checkpoints apart, and leave room for another metric.
        if isinstance(value, float):
            words.append(f"{name} {value:.4g}")
        else:
            words.append(f"{name} {_inline(value)}")
    text = ", ".join(words)
    if len(text) > _MAX_METRICS:
        return f"{text[: _MAX_METRICS - 3]}..."
    return text
