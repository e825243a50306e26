"""Which checkpoints of a folder stay: one pure function that plans, and one that carries the plan out.

Files are ordered by the time of their save, not by step: a run that was rolled back saves lower steps again, and its
new checkpoints must not be the first to go. Nothing here decides by file name, and nothing here fails a save.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slipstream.checkpoint.folder import CheckpointFile
from slipstream.errors import CorruptFileError

logger = logging.getLogger(__name__)

BestBy = tuple[str, Literal["min", "max"]]


@dataclass(frozen=True)
class RetentionPolicy:
    """What to keep.

    Attributes:
        keep_last: Keep the N newest checkpoints; None keeps all.
        keep_every: Keep those whose step is a multiple of this, too.
        keep_best: Keep the best by a metric, too.
        keep_full: How many of the newest are never thinned; None thins none.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: BestBy | None = None
    keep_full: int | None = None


@dataclass(frozen=True)
class Plan:
    """What happens to the checkpoints of a folder.

    Attributes:
        keep: Stay, oldest first; includes those in `thin` and `complete`.
        thin: Lose what the thinning policy says.
        delete: Are deleted.
        complete: Are deltas that are rewritten as whole checkpoints first: because a file that they are stored against
            changes or goes, or because they are the best.
    """

    keep: tuple[CheckpointFile, ...]
    thin: tuple[CheckpointFile, ...] = ()
    delete: tuple[CheckpointFile, ...] = ()
    complete: tuple[CheckpointFile, ...] = ()

    def describe(self) -> list[str]:
        """Return a line per file that changes, in the order in which they are changed."""
        lines = [f"make whole {file.path.name}" for file in self.complete]
        lines += [f"thin {file.path.name}" for file in self.thin]
        lines += [f"delete {file.path.name}" for file in self.delete]
        return lines


def plan(files: Sequence[CheckpointFile], policy: RetentionPolicy, just_written: Path | None = None) -> Plan:
    """Decide which checkpoints are kept, thinned and deleted. Pure: looks at nothing but its arguments.

    The newest checkpoint is always kept. Files that a user renamed are kept, and do not count; nor do copies of a
    checkpoint that is kept.

    Args:
        files: The checkpoints of a folder, in any order.
        policy: What to keep.
        just_written: A file to keep whatever the policy says.
    """
    ordered = sorted(files, key=lambda file: file.order)
    managed = [file for file in ordered if file.is_managed]
    kept = _kept(managed, policy)
    if just_written is not None:
        kept.add(just_written)
    keep = [file for file in ordered if not file.is_managed or file.path in kept]
    thin = _thinned([file for file in keep if file.is_managed], policy)
    # What a delta needs stays, if the delta cannot be completed now because something else is missing. It may be back
    # at the next save: an unreadable disk, or a file that is being copied.
    needed = _needed_by_broken(keep, ordered)
    delete = []
    for file in managed:
        if file.path not in kept and file.identity not in needed:
            delete.append(file)  # noqa: PERF401 - a loop is easier to read
    thin = [file for file in thin if file.identity not in needed]
    complete = _completed(keep, [*thin, *delete], policy)
    return Plan(tuple(keep), tuple(thin), tuple(delete), tuple(complete))


def _needed_by_broken(keep: Sequence[CheckpointFile], files: Sequence[CheckpointFile]) -> set[str]:
    """Return the identities of what is left of the parents of deltas that miss one of them."""
    known = by_identity(files)
    needed: set[str] = set()
    for file in keep:
        if file.parents and find_root(file, known) is None:
            needed.update(file.parents)
    return needed


def _kept(managed: Sequence[CheckpointFile], policy: RetentionPolicy) -> set[Path]:
    """Return the files that some rule keeps; `managed` is in the order of saves."""
    # Several copies of a checkpoint count as one, thinned or not: they have the same number.
    newest = list(dict.fromkeys(file.sequence for file in reversed(managed)))
    if policy.keep_last is not None:
        newest = newest[: policy.keep_last]
    sequences = set(newest)
    best = find_best(managed, policy.keep_best)
    if best is not None:
        sequences.add(best.sequence)
    kept = set()
    for file in managed:
        is_multiple = policy.keep_every is not None and file.step % policy.keep_every == 0
        if file.sequence in sequences or is_multiple:
            kept.add(file.path)
    return kept


def _thinned(kept: Sequence[CheckpointFile], policy: RetentionPolicy) -> list[CheckpointFile]:
    if policy.keep_full is None:
        return []
    older = kept[: max(0, len(kept) - policy.keep_full)]
    return [file for file in older if not file.thinned]


def _completed(
    keep: Sequence[CheckpointFile], changing: Sequence[CheckpointFile], policy: RetentionPolicy
) -> list[CheckpointFile]:
    """Return the deltas that must not depend on their parents any longer."""
    changing_paths = {file.path for file in changing}
    # Even if a copy of it stays: the copy may be damaged.
    changing_identities = {file.identity for file in changing}
    everything = by_identity([*keep, *changing])
    best = find_best([file for file in keep if file.is_managed], policy.keep_best)
    completed = []
    for file in keep:
        if not file.parents or file.path in changing_paths:
            continue
        # If a parent is missing already, there is nothing to complete it from.
        if find_root(file, everything) is None:
            continue
        if file.parents[0] in changing_identities or file is best:
            completed.append(file)
    return completed


def find_best(files: Sequence[CheckpointFile], keep_best: BestBy | None) -> CheckpointFile | None:
    """Return the file with the best value of a metric, the newest of equal ones; None if none has a finite value."""
    if keep_best is None:
        return None
    metric, mode = keep_best
    sign = 1 if mode == "max" else -1
    best = None
    best_value = -math.inf
    for file in sorted(files, key=lambda file: file.order):
        value = as_number(file.metrics.get(metric))
        if value is None or not math.isfinite(value):
            continue
        if sign * value >= best_value:
            best = file
            best_value = sign * value
    return best


def as_number(value: object) -> float | None:
    """Return a metric as a float; None if it is not a number, or too large to be one."""
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def by_identity(files: Sequence[CheckpointFile]) -> dict[str, CheckpointFile]:
    """Return files by their identity; of copies, one."""
    return {file.identity: file for file in files}


def find_root(file: CheckpointFile, known: Mapping[str, CheckpointFile]) -> str | None:
    """Return the identity of the whole checkpoint that a delta depends on in the end; None if a parent is missing.

    Args:
        file: The delta, or a whole checkpoint.
        known: The files of the folder; see `by_identity`.
    """
    while file.parents:
        parent = known.get(file.parents[0])
        # Parents are older than their children. Forged files could refer to each other in a circle.
        if parent is None or parent.sequence >= file.sequence:
            return None
        file = parent
    return file.identity


@dataclass
class Tidied:
    """The result of carrying out a plan.

    Attributes:
        deleted: Steps whose files were deleted.
        failures: What could not be done, by file.
    """

    deleted: list[int] = field(default_factory=list)
    failures: dict[Path, Exception] = field(default_factory=dict)


def apply(todo: Plan, complete: Callable[[CheckpointFile], None], thin: Callable[[CheckpointFile], None]) -> Tidied:
    """Carry out a plan. What fails is logged and skipped; planning again later tries it again.

    At every instant, every checkpoint that is kept can be read: deltas are completed before their parents change.

    Args:
        todo: The plan.
        complete: Rewrites a delta as a whole checkpoint.
        thin: Thins a checkpoint, and leaves it whole.
    """
    tidied = Tidied()
    # From the newest to the oldest: a child must be read before its parent changes.
    changes = [(file, complete) for file in todo.complete]
    changes += [(file, thin) for file in todo.thin]
    for file, change in sorted(changes, key=lambda pair: pair[0].order, reverse=True):
        if change is complete or not _has_dependants(file, todo, tidied):
            _attempt(change, file, tidied)
    for file in todo.delete:
        if not _has_dependants(file, todo, tidied) and _attempt(_delete, file, tidied):
            tidied.deleted.append(file.step)
    return tidied


def _attempt(change: Callable[[CheckpointFile], None], file: CheckpointFile, tidied: Tidied) -> bool:
    """Change one file; returns whether that worked."""
    try:
        change(file)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong with an old checkpoint, the new one is saved
        tidied.failures[file.path] = error
        logger.warning("cannot tidy up %s, will try again at the next save: %s", file.path, error)
        return False
    return True


def _has_dependants(file: CheckpointFile, todo: Plan, tidied: Tidied) -> bool:
    """Return whether a delta still needs a file, because it could not be completed yet."""
    for child in (*todo.complete, *todo.thin):
        error = tidied.failures.get(child.path)
        # A child that is damaged itself cannot be saved by keeping its parent.
        is_stuck = error is not None and not isinstance(error, CorruptFileError)
        if is_stuck and file.identity in child.parents:
            return True
    return False


def _delete(file: CheckpointFile) -> None:
    file.path.unlink(missing_ok=True)
