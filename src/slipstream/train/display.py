"""What a person sees of a training: a live panel on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from slipstream.text import plural

LINE_EVERY_S = 10.0

_ROWS = (
    ("success rate", "train/stats.reach_goal", "{:.3f}"),
    ("collision rate", "train/stats.collision", "{:.3f}"),
    ("success on unseen maps", "eval/through/success", "{:.3f}"),
    ("return", "train/stats.return", "{:.1f}"),
    ("actor loss", "actor_loss", "{:.4f}"),
    ("critic loss", "critic_loss", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("frames", "env_frames", "{:,.0f}"),
    ("frames/s", "rollout_fps", "{:,.0f}"),
    ("actors", "ray/actors", "{:.0f}"),
    ("orders in flight", "ray/orders", "{:.0f}"),
    ("received MB/s", "ray/mb_per_s", "{:.1f}"),
    ("orders redone", "ray/redone", "{:.0f}"),
    ("checkpoints saved", "ckpt/save_count", "{:.0f}"),
    ("checkpoints queued", "ckpt/queue_size", "{:.0f}"),
)


class Display:
    """Shows how training goes, while it goes. Use it as a context.

    Args:
        console: Where.
        num_iterations: How many there will be.
    """

    def __init__(self, console: Console, num_iterations: int) -> None:
        self._console = console
        self._num_iterations = num_iterations
        self._known: dict[str, float] = {}
        self._last_line_s = 0.0
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=num_iterations)
        self._live = Live(self._panel(), console=console, refresh_per_second=4) if console.is_terminal else None

    def begin_after(self, iteration: int) -> None:
        """Show the iterations up to this one as done; for a run that is resumed."""
        self._progress.update(self._task, completed=iteration)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of an iteration; what it does not have stays as it was."""
        self._known.update(metrics)
        iteration = int(metrics["iteration"])
        self._progress.update(self._task, completed=iteration)
        if self._live is not None:
            self._live.update(self._panel())
        elif time.monotonic() - self._last_line_s > LINE_EVERY_S or iteration == self._num_iterations:
            self._last_line_s = time.monotonic()
            self._console.print(self._line(iteration))

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _panel(self) -> Group:
        table = Table.grid(padding=(0, 2))
        shown = [(title, form.format(self._known[key])) for title, key, form in _ROWS if key in self._known]
        for left, right in zip(shown[::2], [*shown[1::2], ("", "")], strict=False):
            table.add_row(*left, *right)
        return Group(self._progress, table)

    def _line(self, iteration: int) -> str:
        short = {"success": "train/stats.reach_goal", "return": "train/stats.return", "frames/s": "rollout_fps"}
        forms = {key: form for _, key, form in _ROWS}
        parts = [f"{name} {forms[key].format(self._known[key])}" for name, key in short.items() if key in self._known]
        frames = f"{self._known['env_frames']:,.0f} frames"
        parts.append(f"{self._known.get('ckpt/queue_size', 0):.0f} checkpoints queued")
        if "ckpt/upload_pending" in self._known:
            parts.append(f"{self._known['ckpt/upload_pending']:.0f} to upload")
        if "ray/actors" in self._known:
            parts.append(plural(int(self._known["ray/actors"]), "actor"))
            parts.append(f"{self._known['ray/mb_per_s']:.1f} MB/s")
            parts.append(f"{self._known['ray/redone']:.0f} orders redone")
        return f"iteration {iteration}/{self._num_iterations}, {frames}, {', '.join(parts)}"
