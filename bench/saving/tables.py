"""The tables of the page, made of what was measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.saving.contenders import CONTENDERS
from bench.saving.floors import FLOORS, Cost
from bench.saving.stats import Interval
from bench.saving.tiny import COUNT
from bench.saving.training import THREADS, Size
from bench.saving.turns import Alone, Gaps, Saved, Turn

NOTHING = "Nothing"
_MS = 1000


@dataclass(frozen=True)
class Measured:
    """What was measured at one size.

    Attributes:
        size: The size.
        raw_bytes: Size of its state.
        turns: By contender, its turn in each round, or None where it took no part.
        floors: What was measured of each floor.
    """

    size: Size
    raw_bytes: int
    turns: Mapping[str, Sequence[Turn | None]]
    floors: Mapping[str, Sequence[Cost]]

    @classmethod
    def of(cls, size: Size, raw_bytes: int, turns: Mapping[str, list[Any]]) -> Measured:
        """Separate the floors from the contenders."""
        contenders = {name: found for name, found in turns.items() if name != FLOORS}
        floors: dict[str, list[Cost]] = {}
        for costs in turns.get(FLOORS, []):
            for name, cost in costs.items():
                floors.setdefault(name, []).append(cost)
        return cls(size, raw_bytes, contenders, floors)

    def saves(self, name: str) -> list[Saved]:
        """Return all saves of a contender that training continued during."""
        return list(itertools.chain.from_iterable(turn.saves for turn in self._taken(name)))

    def alone(self, name: str) -> list[Alone]:
        """Return all saves and loads of a contender without training."""
        return list(itertools.chain.from_iterable(turn.alone for turn in self._taken(name)))

    def gaps(self, name: str) -> list[Gaps]:
        """Return for how long a contender kept other threads from running."""
        return list(itertools.chain.from_iterable(turn.gaps for turn in self._taken(name)))

    def stall(self, name: str) -> Interval:
        """Return the stall of a save."""
        return Interval.of([save.stall_s for save in self.saves(name)])

    def lost(self, name: str) -> Interval:
        """Return the training time that a save costs."""
        return Interval.of([save.lost_s for save in self.saves(name)])

    def load(self, name: str) -> Interval:
        """Return how long a load takes."""
        return Interval.of([alone.load_s for alone in self.alone(name)])

    def save_cpu(self, name: str) -> Interval:
        """Return the CPU time of a save."""
        return Interval.of([alone.save_cpu_s for alone in self.alone(name)])

    def longest_gap(self, name: str) -> Interval:
        """Return the longest wait for the GIL during a save."""
        return Interval.of([gap.longest_s for gap in self.gaps(name)])

    def by_round(self, name: str, values: Callable[[Turn], Iterable[float]]) -> list[float]:
        """Return the median of something in every round, NaN where the contender took no part."""
        medians = []
        for turn in self.turns.get(name, ()):
            if turn is None:
                medians.append(float("nan"))
            else:
                medians.append(statistics.median(values(turn)))
        return medians

    def floor(self, name: str) -> Cost:
        """Return the median of a floor."""
        costs = self.floors[name]
        return Cost(
            statistics.median(cost.wall_s for cost in costs),
            statistics.median(cost.cpu_s for cost in costs),
        )

    def iteration_s(self) -> float:
        """Return how long an iteration without a save takes."""
        times = [turn.iteration_s for name in self.turns for turn in self._taken(name)]
        return statistics.median(itertools.chain.from_iterable(times))

    def _taken(self, name: str) -> list[Turn]:
        return [turn for turn in self.turns.get(name, ()) if turn is not None]


def savers_table(measured: Measured) -> str:
    """Return a Markdown table of all savers; ours first, then by training time lost."""
    size = measured.size
    rows = []
    for name in measured.turns:
        if name == NOTHING or not measured.saves(name):
            continue
        is_peer = not CONTENDERS[name].name.startswith("slipstream")
        order = (is_peer, measured.lost(name).median)
        rows.append((order, _saver_row(measured, name)))
    rows.sort()
    lines = [
        f"**Savers, {size.name}** ({measured.raw_bytes / 1e6:.1f} MB of fp32 weights and Adam's moments, on the CPU, "
        f"{THREADS} threads; an iteration without a save takes {_MS * measured.iteration_s():.0f} ms; medians over "
        f"{size.rounds * size.saves} saves and {size.rounds * size.cpu_saves} loads in {size.rounds} rounds, a "
        "quarter of that for slow savers; in brackets: 95 % intervals)",
        "",
        "| saver | stall ms | | training time lost ms | | complete s | durable s | MB | of raw | load ms | |",
        "|---|---:|---|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [row for _, row in rows]
    noise = measured.lost(NOTHING).text(_MS)
    lines += ["", f"Measured in the same way, saving nothing at all loses {noise} ms: the noise."]
    return "\n".join(lines) + "\n"


def _saver_row(measured: Measured, name: str) -> str:
    saves = measured.saves(name)
    stall = measured.stall(name)
    lost = measured.lost(name)
    load = measured.load(name)
    complete_s = statistics.median(save.complete_s for save in saves)
    durable_s = statistics.median(save.durable_s for save in saves)
    stored = statistics.median(save.stored_bytes for save in saves)
    # Loads of the small state take a millisecond or two.
    digits = 0
    if load.median < 0.01:
        digits = 1
    return (
        f"| {CONTENDERS[name].name} | {_MS * stall.median:.1f} | {stall.ends(_MS, 1)} | {_MS * lost.median:.0f} | "
        f"{lost.ends(_MS)} | {complete_s:.2f} | {durable_s:.2f} | {stored / 1e6:.1f} | "
        f"{stored / measured.raw_bytes:.3f} | {_MS * load.median:.{digits}f} | {load.ends(_MS, digits)} |"
    )


def growth_table(sizes: Sequence[Measured], tiny: Mapping[str, Sequence[Alone]]) -> str:
    """Return a Markdown table of how costs grow with the size of the state, and with the number of tensors."""
    lines = [
        "**How costs grow** (a save and a load without training; CPU time: user and system; in brackets: 95 % "
        "intervals)",
        "",
        "| state | saver | call ms | CPU ms of a save | per MB | CPU ms of a load | per MB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for measured in sorted(sizes, key=lambda measured: measured.raw_bytes):
        for name in ("Native", "NativeRaw", "TorchSave"):
            row = _growth_row(measured.size.name, name, measured.alone(name), measured.raw_bytes)
            lines.append(row)
    for name, alone in tiny.items():
        row = _growth_row(f"{COUNT:,} tiny tensors", name, alone, None)
        lines.append(row)
    return "\n".join(lines) + "\n"


def _growth_row(state: str, name: str, alone: Sequence[Alone], raw_bytes: int | None) -> str:
    call = Interval.of([each.call_s for each in alone])
    save = Interval.of([each.save_cpu_s for each in alone])
    load = Interval.of([each.load_cpu_s for each in alone])
    save_per_mb = ""
    load_per_mb = ""
    if raw_bytes is not None:
        save_per_mb = f"{_MS * save.median / (raw_bytes / 1e6):.2f}"
        load_per_mb = f"{_MS * load.median / (raw_bytes / 1e6):.2f}"
    return (
        f"| {state} | {CONTENDERS[name].name} | {call.text(_MS, 1)} | {save.text(_MS, 1)} | {save_per_mb} | "
        f"{load.text(_MS, 1)} | {load_per_mb} |"
    )


def gil_table(measured: Measured) -> str:
    """Return a Markdown table of how long a save keeps other Python threads from running."""
    lines = [
        f"**Other threads, {measured.size.name}** (a Python thread that never sleeps runs during a save; the longest "
        "and all waits for the GIL per save, after the call; preemption is not the saver's but the operating system's; "
        "the interpreter itself switches threads every 5 ms)",
        "",
        "| saver | longest wait ms | worst of all saves | all waits ms | longest preemption ms | durable s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in measured.turns:
        gaps = measured.gaps(name)
        if not gaps:
            continue
        longest = measured.longest_gap(name)
        total = Interval.of([gap.total_s for gap in gaps])
        preempted = Interval.of([gap.preempted_s for gap in gaps])
        durable_s = statistics.median(gap.durable_s for gap in gaps)
        worst_s = max(gap.longest_s for gap in gaps)
        lines.append(
            f"| {CONTENDERS[name].name} | {longest.text(_MS, 2)} | {_MS * worst_s:.2f} | {total.text(_MS, 1)} | "
            f"{preempted.text(_MS, 2)} | {durable_s:.2f} |"
        )
    return "\n".join(lines) + "\n"


def floors_table(sizes: Sequence[Measured]) -> str:
    """Return a Markdown table of the floors at all sizes."""
    ordered = sorted(sizes, key=lambda measured: measured.raw_bytes)
    heads = [f"{measured.size.name}: ms | CPU ms" for measured in ordered]
    lines = [
        "**Floors** (each alone, on one thread, in turns with the savers; Huffman: zstd without matches, on the bytes "
        "with the exponents)",
        "",
        f"| operation | {' | '.join(heads)} |",
        "|---|" + "---:|---:|" * len(ordered),
    ]
    for name in ordered[0].floors:
        cells = []
        for measured in ordered:
            cost = measured.floor(name)
            cells.append(f"{_MS * cost.wall_s:.1f} | {_MS * cost.cpu_s:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
