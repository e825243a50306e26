"""Put the most telling numbers of docs/benchmarks.md into the tables of README.md and README.zh-CN.md.

    python bench/readme.py    # after the benchmarks; `make bench` does it

A row of the front page is made of cells of the page's tables, so the two cannot disagree; a test compares them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PAGES = ("README.md", "README.zh-CN.md")


class Tables:
    """The tables of a page, whose cells are found by section, row and column.

    Args:
        text: The page.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def cell(self, section: str, row: str, column: str, under: str = "") -> str:
        """Return a cell.

        Args:
            section: The name between the page's markers.
            row: How the first cell of the row begins.
            column: The head of its column; if there are several of that name, the first.
            under: Text after which the table comes, if the section has several.

        Raises:
            LookupError: If there is none.
        """
        part = self._text.partition(f"<!-- {section} -->")[2].partition(f"<!-- /{section} -->")[0]
        part = part.partition(under)[2] if under else part
        head: list[str] = []
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("|") and column in cells and not head:
                head = cells
            elif head and line.startswith("|") and cells[0].startswith(row):
                return cells[head.index(column)]
        raise LookupError(f"docs/benchmarks.md: section {section} has no row {row!r} with a column {column!r}")


def peers(read: Callable[[str], str], rows: dict[str, str], unit: str = "") -> str:
    """List the cells of peers; those that were not installed, and so not measured, are left out.

    Args:
        read: What gives the cell of a row.
        rows: For each peer's name, how the first cell of its row begins.
        unit: What to put after the last.
    """
    found = []
    for name, row in rows.items():
        with contextlib.suppress(LookupError):
            found.append(f"{name} {read(row)}")
    return ", ".join(found) + unit if found else "not measured"


def rows(tables: Tables) -> list[tuple[str, str, str, str]]:
    """Return for each row: what it is about, our number, those of others, and the script."""

    def flights(name: str) -> str:
        return tables.cell("flights", name, "`through`").strip("*").partition(" [")[0]

    def saver(name: str, column: str) -> str:
        return tables.cell("checkpoint", name, column)

    def packed(name: str) -> str:
        return tables.cell("checkpoint", name, "of raw", under="**One full checkpoint**")

    def disk(name: str) -> str:
        return tables.cell("checkpoint", name, "1 step apart, half of the layers frozen", under="**Disk**")

    def rollout(name: str) -> str:
        return tables.cell("rollout", name, "ratio")

    def replay(name: str, column: str) -> str:
        return tables.cell("replay", name, column)

    def stacks(name: str) -> str:
        return tables.cell("replay", name, "of Lazy", under="stacks of four")

    def images(name: str, stored: str = "CPU ms") -> str:
        return tables.cell("datasets", name, stored)

    spent = "ms an iteration"
    ours, plain, lost = "slipstream native, guarded", "slipstream native, not packed", "training time lost ms"

    def same(*names: str) -> dict[str, str]:
        return {name: name for name in names}

    stable = {"stable-baselines3": "stable-baselines3, opt"}
    memory_peers = {"cpprb": "cpprb", **stable}
    batch_peers = {"stable-baselines3": "stable-baselines3", "cpprb": "cpprb", "sb3-extra-buffers": "sb3-extra"}
    return [
        (
            "Flights through unseen obstacles that reach the goal, `preset=quick` and `strong`",
            f"{flights('quick, mean')} and {flights('strong, mean')}",
            peers(
                flights,
                {
                    "without a teacher": "untaught, mean",
                    "NavRL's released policy (other dynamics)": "NavRL",
                    "planner without learning": "planner",
                },
            ),
            "flights",
        ),
        (
            "A checkpoint, the caller's stall",
            f"{saver(ours, 'stall ms')} ms",
            peers(lambda row: saver(row, "stall ms"), same("torch_checkpointing", "Lightning", "torch.save"), " ms"),
            "checkpoint",
        ),
        (
            "Training time it costs, packed and not packed",
            f"{saver(ours, lost)} and {saver(plain, lost)} ms",
            peers(
                lambda row: saver(row, lost),
                same("safetensors", "torch_checkpointing", "Lightning", "torch.save"),
                " ms",
            ),
            "checkpoint",
        ),
        ("Its size, of raw", packed("slipstream"), peers(packed, same("pcodec", "ZipNN", "zstd-3")), "checkpoint"),
        (
            "The five newest of 50 on disk, half of the layers frozen",
            f"{disk('slipstream CheckpointManager')}, differential {disk('slipstream CheckpointManager(d')} MB",
            peers(disk, same("torch.save", "Orbax"), " MB"),
            "checkpoint",
        ),
        (
            "Loading it, packed and not packed",
            f"{saver(ours, 'load ms')} and {saver(plain, 'load ms')} ms",
            peers(
                lambda row: saver(row, "load ms"),
                {"safetensors (mapped, not verified)": "safetensors", "torch.load": "torch.save", "Orbax": "Orbax"},
                " ms",
            ),
            "checkpoint",
        ),
        (
            "A LiDAR rollout, times smaller",
            rollout("slipstream"),
            peers(rollout, {"Blosc2": "Blosc2", "OpenZL": "OpenZL", "pickle + LZ4-9": "pickle + LZ4"}),
            "rollout",
        ),
        (
            "LiDAR replay, memory of LazyTensorStorage's",
            replay("slipstream", "of Lazy"),
            peers(lambda row: replay(row, "of Lazy"), {"sb3-extra-buffers": "sb3-extra", **memory_peers}),
            "replay",
        ),
        (
            "Its batch of 256, CPU time",
            f"{replay('slipstream', 'CPU ms')} ms",
            peers(lambda row: replay(row, "CPU ms"), {"LazyTensorStorage": "LazyTensor", **batch_peers}, " ms"),
            "replay",
        ),
        (
            "Stacked camera frames, memory of LazyTensorStorage's",
            stacks("slipstream"),
            peers(stacks, {"cpprb": "cpprb, next and frames", **stable}),
            "replay",
        ),
        (
            "An iteration of training in two processes, and the same run as in one",
            f"{tables.cell('processes', '2 shards, 2', spent)} ms, yes",
            peers(
                lambda row: tables.cell("processes", row, spent),
                {"all_reduce as in rsl_rl": "all_reduce", "DDP": "DDP"},
                " ms, no",
            ),
            "processes",
        ),
        (
            "A batch of HDF5 images, CPU time",
            f"{images('slipstream')} ms",
            peers(images, same("naive loop", "robomimic", "Minari"), " ms"),
            "datasets",
        ),
    ]


def main() -> None:
    """Replace all but the first column, which is in the page's language, row by row."""
    try:
        found = rows(Tables((ROOT / "docs/benchmarks.md").read_text()))
    except LookupError as error:
        raise SystemExit(str(error)) from None
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        table = re.search(r"(?m)^\|.*(?:\n\|.*)+", text)
        lines = table[0].splitlines() if table else []
        if table is None or len(lines) != len(found) + 2:
            raise SystemExit(f"{page}: has no table of {len(found)} rows, in this order: {[row[0] for row in found]}")
        titles = [line.strip("|").split("|")[0].strip() for line in lines[2:]]
        cells = zip(titles, found, strict=True)
        lines[2:] = [f"| {title} | {row[1]} | {row[2]} | `bench/{row[3]}.py` |" for title, row in cells]
        page.write_text(text.replace(table[0], "\n".join(lines)))


if __name__ == "__main__":
    main()
