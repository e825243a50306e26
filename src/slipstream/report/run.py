"""Read a run folder. Nothing in it is trusted; damaged files become problems that the page lists."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slipstream.errors import ConfigurationError, SlipstreamError
from slipstream.report.flights import read_crashes, read_flights
from slipstream.run.evaluation import Evaluation, read_evaluation
from slipstream.run.metrics import Metrics, read_metrics
from slipstream.store.local import open_regular

MAX_CONFIG_BYTES = 256 << 10
MAX_EVALUATIONS = 200
MAX_FILES = 100_000
MAX_FLIGHTS = 12  # scenarios, of about a megabyte each
MAX_CRASH_SCENES = 3
MAX_CRASHES_TRIED = 6  # rollouts that are read; those of a good policy may have no crash
ROLLOUT_NAME = re.compile(r"rollout_(\d{1,9})\.slip")
MARKS = ("metrics.jsonl", "config.yaml", "checkpoints", "eval")

T = TypeVar("T")


@dataclass(frozen=True)
class Files:
    """Files under a folder.

    Attributes:
        sizes: In bytes, by their paths in the folder.
        disk_bytes: Of all of them together; a file that has two names, as a base of checkpoints has, counts once.
    """

    sizes: dict[str, int]
    disk_bytes: int


@dataclass(frozen=True)
class Scene:
    """Flights that can be played.

    Attributes:
        name: Of the scenario, or of the file of the rollout.
        title: For people.
        source: In a sentence, where the flights are from.
        packed: For the page; see `slipstream.report.flights`.
        is_main: Whether it is shown first.
    """

    name: str
    title: str
    source: str
    packed: dict[str, Any]
    is_main: bool = False


@dataclass(frozen=True)
class Run:
    """A run folder that was read.

    Attributes:
        folder: Where it is.
        name: What it is called.
        metrics: What it measured while training.
        evaluations: In the order of their iterations, then of their times; `final`, if there is one, is the last.
        flights: What can be played: recorded flights of the last evaluation under standard conditions that has any,
            and crashes in the newest rollouts.
        config: The text of its configuration.
        files: What is under ``checkpoints`` and ``rollouts``.
        problems: What could not be read, in sentences.
    """

    folder: Path
    name: str
    metrics: Metrics = field(default_factory=Metrics)
    evaluations: tuple[Evaluation, ...] = ()
    flights: tuple[Scene, ...] = ()
    config: str | None = None
    files: dict[str, Files] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def evaluation(self) -> Evaluation | None:
        """The evaluation that counts: the last one through the field under standard conditions, if any."""
        return _last_standard(self.evaluations)


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run folder; changes nothing in it, and may be called while the run is training.

    Args:
        folder: The run folder, or a link to it such as ``runs/last``.

    Returns:
        What there is; what is damaged is not in it, but in its ``problems``.

    Raises:
        FileNotFoundError: If there is no such folder.
        ConfigurationError: If it is not a run folder.
        OSError: If it may not be read.
    """
    path = Path(folder)
    _check_folder(path)
    problems: list[str] = []
    metrics = _try(read_metrics, path / "metrics.jsonl", problems) or Metrics()
    torn = int(metrics.cut_off)
    if metrics.num_skipped > torn:
        lines = metrics.num_skipped - torn
        problems.append(f"{path / 'metrics.jsonl'}: {lines} lines are not JSON objects and were left out")
    evaluations = _read_evaluations(path / "eval", problems)
    flights = [*_read_flights(path / "eval", evaluations, problems), *_read_crashes(path, problems)]
    return Run(
        folder=path,
        name=path.resolve().name or str(path),
        metrics=metrics,
        evaluations=evaluations,
        flights=tuple(flights),
        config=_try(_read_config, path / "config.yaml", problems),
        files={part: _files(path / part) for part in ("checkpoints", "rollouts")},
        problems=tuple(problems),
    )


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        if path.exists():
            raise ConfigurationError(f"{path}: is a file, expected a run folder")
        raise FileNotFoundError(errno.ENOENT, "there is no such run folder", str(path))
    present = {entry.name for entry in path.iterdir()}
    if not present & set(MARKS):
        raise ConfigurationError(f"{path}: is not a run folder, expected at least one of {', '.join(MARKS)} in it")


def _try(read: Callable[[Path], T], path: Path, problems: list[str]) -> T | None:
    """Return what could be read; if there is nothing, None; if it is damaged, None and a sentence."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except SlipstreamError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror or error})")
    return None


def _read_config(path: Path) -> str:
    with open_regular(path) as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    end = ""
    if len(content) > MAX_CONFIG_BYTES:
        end = "\n(cut off here)"
    return content[:MAX_CONFIG_BYTES].decode("utf-8", "replace") + end


def _read_evaluations(folder: Path, problems: list[str]) -> tuple[Evaluation, ...]:
    """Return the newest evaluations, oldest first."""
    paths = sorted(folder.glob("*.json"), key=_order_of_file)
    if len(paths) > MAX_EVALUATIONS:
        problems.append(f"{folder}: only the last {MAX_EVALUATIONS} of {len(paths)} evaluations are shown")
    found = [_try(read_evaluation, path, problems) for path in paths[-MAX_EVALUATIONS:]]
    return tuple(sorted(filter(None, found), key=_order_of_evaluation))


def _order_of_file(path: Path) -> tuple[bool, str]:
    return path.stem == "final", path.name


def _order_of_evaluation(one: Evaluation) -> tuple[bool, float, float, str]:
    """Return what evaluations are ordered by: the one at the end of a training is the last."""
    return one.name == "final", one.iteration or 0, one.time or 0, one.name


def _last_standard(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the last of the evaluations that say most about the policy; None if there is none."""
    found = None
    for evaluation in evaluations:
        # Flights through an empty world must not replace those through the field at the top of the page.
        if found is None or evaluation.rank >= found.rank:
            found = evaluation
    return found


def _read_flights(folder: Path, evaluations: Sequence[Evaluation], problems: list[str]) -> list[Scene]:
    """Return the recorded flights of the last evaluation that has any."""
    recorded = filter(_has_flights, evaluations)
    flown = _last_standard(list(recorded))
    if flown is None:
        return []
    scenarios = [(scenario, scenario.flights) for scenario in flown.scenarios if scenario.flights]
    if len(scenarios) > MAX_FLIGHTS:
        problems.append(
            f"{folder}: only the flights of the first {MAX_FLIGHTS} of {len(scenarios)} scenarios are shown"
        )
    scenes = []
    for scenario, name in scenarios[:MAX_FLIGHTS]:
        # The name is from a file that anyone may have written, and must not lead out of the folder.
        if name != Path(name).name:
            problems.append(f"{name!r} is named as the flights of {scenario.name}, expected a file in eval")
            continue
        path = folder / name
        if not path.is_file():
            problems.append(f"{path}: is missing, the flights of {scenario.name} were in it")
            continue
        packed = _try(read_flights, path, problems)
        if packed is not None:
            source = f"Recorded in the evaluation {flown.name}, on map {packed['map']}."
            scenes.append(Scene(scenario.name, scenario.title, source, packed, is_main=scenario == flown.main))
    return scenes


def _has_flights(evaluation: Evaluation) -> bool:
    return any(scenario.flights for scenario in evaluation.scenarios)


def _read_crashes(run: Path, problems: list[str]) -> list[Scene]:
    """Return the crashes in the newest rollouts that a training saved with their world."""
    found = {}
    for folder in ("rollouts", "checkpoints"):
        for path in (run / folder).glob("rollout_*.slip"):
            match = ROLLOUT_NAME.fullmatch(path.name)
            if match is not None:
                found[int(match[1])] = path
    scenes: list[Scene] = []
    for iteration in sorted(found, reverse=True)[:MAX_CRASHES_TRIED]:
        packed = _try(read_crashes, found[iteration], problems)
        if packed is None:
            continue
        source = (
            f"Flights of the training that ended in a collision while the rollout of iteration {iteration:,} was "
            f"collected, on map {packed['map']}; they begin where their episode or the rollout began."
        )
        scenes.append(Scene(found[iteration].stem, f"crashes of iteration {iteration:,}", source, packed))
        if len(scenes) == MAX_CRASH_SCENES:
            break
    return scenes


def _files(folder: Path) -> Files:
    """Return the files under a folder, but hidden ones such as locks; links are not followed."""
    sizes = {}
    seen = set()
    total = 0
    found = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names if not name.startswith("."))
    for path in itertools.islice(found, MAX_FILES):
        try:
            status = path.lstat()
        except OSError:
            # The trainer has deleted it since.
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        sizes[str(path.relative_to(folder))] = status.st_size
        # A file with two names takes its space once.
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            total += status.st_size
    return Files(dict(sorted(sizes.items())), total)
