"""Where time went and what storage saved, in words and numbers, as data that the templates render."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.report.charts import time_parts
from slipstream.report.counters import Stalls, find_stalls, total
from slipstream.report.run import Files, Run
from slipstream.report.tables import NOTHING, Cell, Table
from slipstream.run.metrics import Metrics
from slipstream.text import format_bytes, format_count, format_percent, format_ratio, format_seconds, plural

MAX_LISTED = 30


def time_table(metrics: Metrics) -> Table | None:
    """Return the parts of an iteration; None if they were not measured."""
    parts = time_parts(metrics)
    if not parts:
        return None
    whole = metrics.last("perf/iteration_mean")
    rows = []
    for name, mean, std in parts:
        share = NOTHING
        if whole:
            share = format_percent(mean / whole)
        rows.append([Cell(name), *_timing(mean, std), Cell(share)])
    if whole is not None:
        rows.append([Cell("iteration"), *_timing(whole, metrics.last("perf/iteration_std")), Cell("")])
    return Table("Parts of an iteration", ("Part", "Mean", "± std", "Share"), rows)


def time_note(metrics: Metrics) -> str:
    """Return what the times of an iteration's parts are."""
    note = "Means and standard deviations at the end of the run, over the last 100 times that each part ran."
    whole = metrics.last("perf/iteration_mean")
    together = sum(mean for _, mean, _ in time_parts(metrics))
    if whole is not None and together > 1.02 * whole:
        note += " These are not the same iterations for all parts, so that their sum is longer than an iteration."
    return note


def _timing(mean: float, std: float | None) -> list[Cell]:
    spread = NOTHING
    if std is not None:
        spread = format_seconds(std)
    return [Cell(format_seconds(mean)), Cell(spread)]


@dataclass(frozen=True)
class _Packed:
    """What was packed: keys of its counters, and the files that it is in."""

    title: str
    count: str
    raw: str
    stored: str
    waits: tuple[str, ...]
    background: str
    folder: str = ""
    prefix: str = ""


_PACKED = (
    _Packed(
        "Checkpoints",
        "ckpt/save_count",
        "ckpt/total_saved_bytes",
        "ckpt/total_compressed_bytes",
        ("ckpt/total_call_s", "ckpt/total_barrier_s"),
        "ckpt/total_write_s",
        "checkpoints",
        "checkpoint_",
    ),
    _Packed(
        "Rollouts on disk",
        "rollouts/save_count",
        "rollouts/raw_bytes",
        "rollouts/stored_bytes",
        ("rollouts/call_s",),
        "rollouts/write_s",
        "rollouts",
        "rollout_",
    ),
    _Packed(
        "Batches in memory (plan C)",
        "memory/batch_count",
        "memory/raw_bytes",
        "memory/packed_bytes",
        ("memory/pack_s",),
        "",
    ),
)


def storage_table(run: Run) -> Table | None:
    """Return what was packed, and what that cost; None if nothing was."""
    rows = []
    for packed in _PACKED:
        count = total(run.metrics, packed.count)
        if count:
            rows.append(_packed_row(run, packed, count))
    if not rows:
        return None
    header = ("", "Count", "Raw", "Stored", "Ratio", "On disk now", "Loop waited, each", "Background, each")
    return Table("What was packed", header, rows)


def _packed_row(run: Run, packed: _Packed, count: float) -> list[Cell]:
    raw = total(run.metrics, packed.raw)
    stored = total(run.metrics, packed.stored)
    row = [Cell(packed.title), Cell(format_count(count))]
    row += [_size(raw), _size(stored)]
    ratio = NOTHING
    if raw is not None and stored is not None:
        ratio = format_ratio(raw, stored)
    row.append(Cell(ratio))
    on_disk = Cell(NOTHING)
    if packed.folder and packed.folder in run.files:
        num_files, num_bytes = _on_disk(run.files[packed.folder], packed.prefix)
        on_disk = Cell(format_bytes(num_bytes), plural(num_files, "file"))
    row.append(on_disk)
    waited = None
    for key in packed.waits:
        seconds = total(run.metrics, key)
        if seconds is not None:
            waited = (waited or 0.0) + seconds
    row += [_each(waited, count), _each(total(run.metrics, packed.background), count)]
    return row


def _size(num_bytes: float | None) -> Cell:
    if num_bytes is None:
        return Cell(NOTHING)
    return Cell(format_bytes(num_bytes))


def _each(seconds: float | None, count: float) -> Cell:
    if seconds is None:
        return Cell(NOTHING)
    return Cell(format_seconds(seconds / count))


def _on_disk(files: Files, prefix: str) -> tuple[int, int]:
    """Return how many files of a kind there are, and their size; a file with two names counts once."""
    num_files = 0
    num_bytes = 0
    for name, size in files.sizes.items():
        if name.startswith(prefix):
            num_files += 1
            num_bytes += size
    return num_files, num_bytes


def storage_notes(run: Run) -> list[str]:
    """Return why what was stored is not what is on disk, and what saving costs the loop."""
    notes = []
    for packed in _PACKED:
        count = total(run.metrics, packed.count)
        if not count or packed.folder not in run.files:
            continue
        num_files, _ = _on_disk(run.files[packed.folder], packed.prefix)
        if num_files < count:
            notes.append(
                f"{packed.title}: {plural(round(count), 'save')} in total, and {plural(num_files, 'file')} on disk. "
                "'Stored' is the size of all saves; older files were deleted, or replaced by repeated iterations."
            )
        elif num_files > count:
            notes.append(
                f"{packed.title}: {plural(num_files, 'file')} on disk and {plural(round(count), 'save')} in the "
                "metrics. The metrics of an iteration are written before its save, so the last saves are not counted."
            )
    stalls = find_stalls(run.metrics)
    if stalls is not None:
        notes.append(about_stalls(stalls, run.metrics))
    return notes


def about_stalls(stalls: Stalls, metrics: Metrics) -> str:
    """Return for how long saves hold training up."""
    call_s = stalls.call_s / stalls.num_saves
    barrier_s = stalls.barrier_s / stalls.num_saves
    words = (
        f"A checkpoint holds training up for {format_seconds(stalls.per_save_ms / 1000)} on average: "
        f"{format_seconds(call_s)} in the call of save, and {format_seconds(barrier_s)} in which an optimizer waits "
        "for the rest of the snapshot."
    )
    num_resumes = int(metrics.starts.sum()) - 1
    if num_resumes > 0:
        words += f" Counters begin again with each of the {num_resumes + 1} processes of this run; all are counted."
    failed = total(metrics, "ckpt/failed_count")
    if failed:
        words += f" {format_count(failed)} saves failed."
    return words


@dataclass(frozen=True)
class Listing:
    """Files in a folder of the run, to open."""

    summary: str
    table: Table


def file_listings(run: Run) -> list[Listing]:
    """Return the files of each folder that has any; the last ones by name if there are many."""
    listings = []
    for part, files in run.files.items():
        if not files.sizes:
            continue
        summary = f"{part}: {format_count(len(files.sizes))} files, {format_bytes(files.disk_bytes)} on disk"
        if len(files.sizes) > MAX_LISTED:
            summary += f"; the last {MAX_LISTED} by name"
        newest = list(files.sizes.items())[-MAX_LISTED:]
        rows = [[Cell(name), Cell(format_bytes(size))] for name, size in newest]
        listings.append(Listing(summary, Table(f"Files in {part}", ("File", "Size"), rows)))
    return listings
