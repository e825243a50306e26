"""Targets, and whether this run meets them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.saving.contenders import CONTENDERS
from bench.saving.disk import DIFFERENTIAL, TORCH_SAVE, WHOLE, DiskRun
from bench.saving.stats import Interval
from bench.saving.tables import NOTHING, Measured
from bench.saving.turns import Turn

_MS = 1000
_TITLES = {"Native": "packed", "NativeRaw": "not packed"}


@dataclass(frozen=True)
class Target:
    """One row of the table."""

    target: str
    measured: str
    met: str
    floor: str = ""


def targets_table(small: Measured, medium: Measured, large: Measured | None, disk: Sequence[DiskRun]) -> str:
    """Return a Markdown table of targets, what this run measured, and whether they are met.

    Args:
        small: About 3 MB.
        medium: About 42 MB.
        large: About 190 MB; None if it was not measured.
        disk: What checkpoints take on disk.
    """
    sizes = [small, medium]
    if large is not None:
        sizes.append(large)
    targets = [_stall(measured, name) for measured in sizes for name in _TITLES]
    targets += [_cpu(small, name) for name in _TITLES]
    targets.append(_lost(medium, "NativeRaw", 1.0))
    targets.append(_lost(medium, "Native", 1.5))
    if large is not None:
        targets.append(_least_lost(large))
        targets.append(_load(large, "Native", 1.25))
        targets.append(_load(large, "NativeRaw", 1.0))
    targets += [_gil(medium, name) for name in _TITLES]
    targets += [_disk(run) for run in disk]
    lines = [
        "**Targets** (compared round by round; *within noise*: the 95 % interval of the comparison includes the limit; "
        "floor: what the operations that cannot be avoided take alone, where a target is missed)",
        "",
        "| target | measured | met | floor |",
        "|---|---|---|---|",
    ]
    for row in targets:
        floor = ""
        if not row.met.startswith("yes"):
            floor = row.floor
        lines.append(f"| {row.target} | {row.measured} | {row.met} | {floor} |")
    return "\n".join(lines) + "\n"


def _stall(measured: Measured, name: str) -> Target:
    stall = measured.stall(name)
    return Target(
        f"{measured.size.name}, {_TITLES[name]}: stall at most 1 ms",
        f"{stall.text(_MS, 2)} ms",
        _verdict(stall.minus(1e-3)),
    )


def _cpu(measured: Measured, name: str) -> Target:
    ratios = Interval.of(_ratios(measured, name, _save_cpu))
    ours = measured.save_cpu(name)
    theirs = measured.save_cpu("TorchSave")
    return Target(
        f"{measured.size.name}, {_TITLES[name]}: CPU of a save at most 2x torch.save's",
        f"{ratios.text(digits=2)}x ({_MS * ours.median:.1f} against {_MS * theirs.median:.1f} ms)",
        _verdict(ratios.minus(2)),
        _save_floor(measured, name),
    )


def _lost(measured: Measured, name: str, limit: float) -> Target:
    ours = measured.lost(name)
    theirs = measured.lost("TorchSave")
    wanted = "not above torch.save's"
    if limit != 1:
        wanted = f"at most {limit:g}x torch.save's"
    return Target(
        f"{measured.size.name}, {_TITLES[name]}: training time lost {wanted}",
        f"{ours.text(_MS)} against {theirs.text(_MS)} ms",
        _lost_verdict(measured, name, "TorchSave", limit),
        _save_floor(measured, name),
    )


def _least_lost(measured: Measured) -> Target:
    lost = {}
    for name in measured.turns:
        if name != NOTHING and not CONTENDERS[name].name.startswith("slipstream"):
            lost[name] = measured.lost(name).median
    best = min(lost, key=lost.__getitem__)
    ours = measured.lost("NativeRaw")
    theirs = measured.lost(best)
    return Target(
        f"{measured.size.name}, not packed: least training time lost of all",
        f"{ours.text(_MS)} against {theirs.text(_MS)} ms ({CONTENDERS[best].name})",
        _lost_verdict(measured, "NativeRaw", best, 1.0),
        _save_floor(measured, "NativeRaw"),
    )


def _load(measured: Measured, name: str, limit: float) -> Target:
    ratios = Interval.of(_ratios(measured, name, _load_times))
    ours = measured.load(name)
    theirs = measured.load("TorchSave")
    wanted = "faster than torch.load"
    if limit != 1:
        wanted = f"at most {limit:g}x torch.load"
    return Target(
        f"{measured.size.name}, {_TITLES[name]}: load {wanted}",
        f"{ratios.text(digits=2)}x ({_MS * ours.median:.0f} against {_MS * theirs.median:.0f} ms)",
        _verdict(ratios.minus(limit)),
        _load_floor(measured, name),
    )


def _gil(measured: Measured, name: str) -> Target:
    longest = measured.longest_gap(name)
    control = measured.longest_gap(NOTHING)
    return Target(
        f"{measured.size.name}, {_TITLES[name]}: other threads wait for the GIL at most about 1 ms",
        f"{longest.text(_MS, 2)} ms ({_MS * control.median:.2f} ms if nothing is saved)",
        _verdict(longest.minus(1e-3)),
    )


def _disk(run: DiskRun) -> Target:
    limit = run.most_bytes[TORCH_SAVE]
    met = "yes"
    if run.exceeds():
        met = "no"
    return Target(
        f"disk, {run.title}: never more than torch.save's five files",
        f"at most {run.most_bytes[WHOLE] / 1e6:.1f} MB whole, {run.most_bytes[DIFFERENTIAL] / 1e6:.1f} MB "
        f"differential, {limit / 1e6:.1f} MB torch.save",
        met,
    )


def _lost_verdict(measured: Measured, name: str, other: str, limit: float) -> str:
    """Compare the medians that the table shows; the rounds, in which both ran, tell how far to trust that."""
    by_round = Interval.of(_excesses(measured, name, other, limit, _lost_times))
    excess_s = measured.lost(name).median - limit * measured.lost(other).median
    return _verdict(Interval(excess_s, by_round.low, by_round.high))


def _verdict(excess: Interval) -> str:
    """Say whether a target is met, by how much it is exceeded."""
    met = "no"
    if excess.median <= 0:
        met = "yes"
    if excess.low <= 0 < excess.high:
        met += ", within noise"
    return met


def _save_cpu(turn: Turn) -> Iterable[float]:
    return [alone.save_cpu_s for alone in turn.alone]


def _load_times(turn: Turn) -> Iterable[float]:
    return [alone.load_s for alone in turn.alone]


def _lost_times(turn: Turn) -> Iterable[float]:
    return [save.lost_s for save in turn.saves]


def _ratios(measured: Measured, name: str, values: Callable[[Turn], Iterable[float]]) -> list[float]:
    """Return what a contender takes of torch.save's, round by round."""
    pairs = zip(measured.by_round(name, values), measured.by_round("TorchSave", values), strict=True)
    return [ours / theirs for ours, theirs in pairs]


def _excesses(
    measured: Measured, name: str, other: str, limit: float, values: Callable[[Turn], Iterable[float]]
) -> list[float]:
    """Return by how much a contender exceeds a multiple of another, round by round."""
    excesses = []
    for ours, theirs in zip(measured.by_round(name, values), measured.by_round(other, values), strict=True):
        excess = ours - limit * theirs
        # A slow contender does not take part in every round.
        if not math.isnan(excess):
            excesses.append(excess)
    return excesses


def _save_floor(measured: Measured, name: str) -> str:
    """Say what copying, packing, checksums and writing take alone."""
    parts = ["copy", "checksum", f"write + fsync, {_TITLES[name]}"]
    if name == "Native":
        parts.insert(1, "Huffman encode")
    return _sum_of(measured, parts)


def _load_floor(measured: Measured, name: str) -> str:
    """Say what reading, checksums and unpacking take alone."""
    parts = [f"read, {_TITLES[name]}", "checksum"]
    if name == "Native":
        parts.append("Huffman decode")
    return _sum_of(measured, parts)


def _sum_of(measured: Measured, parts: Sequence[str]) -> str:
    costs = [measured.floor(part) for part in parts]
    terms = [f"{part} {_MS * cost.wall_s:.1f}" for part, cost in zip(parts, costs, strict=True)]
    cpu_ms = _MS * sum(cost.cpu_s for cost in costs)
    return f"{', '.join(terms)} ms on one thread; {cpu_ms:.1f} ms of CPU together"
