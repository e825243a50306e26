"""Several runs side by side: their results, the settings that differ, and their curves in one chart each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigurationError, CorruptFileError
from slipstream.report.charts import COLORS, Chart, compare_curves
from slipstream.report.run import Run
from slipstream.report.tables import NOTHING, RATE_TITLES, Cell, Table, rate_cell, tiles
from slipstream.text import install_hint

MAX_SETTINGS = 2000
MAX_VALUE = 200
# These differ between any two runs, and change nothing.
_IDENTITY = ("name", "run_dir", "resume", "wandb.run_id", "wandb.name")


@dataclass(frozen=True)
class Comparison:
    """Runs that were compared.

    Attributes:
        folder: The folder of the first run's folder.
        names: Of the runs; the paths of those that have the same name.
        colors: In which colour each is drawn.
        results: A row for each measure and a column for each run.
        differing: The values of each setting that differs, by the name of the run; None where it is unknown.
        charts: Curves of all runs.
        problems: What could not be read, in sentences.
    """

    folder: Path
    names: Sequence[str]
    colors: Sequence[str]
    results: Table
    differing: Mapping[str, Mapping[str, str | None]]
    charts: Sequence[Chart]
    problems: Sequence[str]

    @property
    def settings(self) -> Table | None:
        """A row for each setting that differs; None if none does."""
        rows = []
        for key, values in self.differing.items():
            rows.append([Cell(key), *(Cell(value or NOTHING) for value in values.values())])
        if not rows:
            return None
        return Table("Settings that differ", ("Setting", *self.names), rows)


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare runs that were read.

    Raises:
        ConfigurationError: If there are fewer than two or more than eight runs, or one of them twice.
    """
    if not 2 <= len(runs) <= len(COLORS):
        raise ConfigurationError(f"{len(runs)} runs were given, expected 2 to {len(COLORS)} to compare")
    folders = [run.folder.resolve() for run in runs]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise ConfigurationError(f"{runs[number].folder}: was given twice, expected different runs to compare")
    names = _names_of(runs)
    problems: list[str] = []
    for run in runs:
        problems += run.problems
    return Comparison(
        folder=folders[0].parent,
        names=names,
        colors=COLORS[: len(runs)],
        results=_results(runs, names),
        differing=_differing(runs, names, problems),
        charts=compare_curves({name: (run.metrics, run.evaluations) for name, run in zip(names, runs, strict=True)}),
        problems=problems,
    )


def _names_of(runs: Sequence[Run]) -> list[str]:
    """Return what to call each run."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [str(run.folder) for run in runs]


def _results(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """Return the results of the last evaluation and the numbers at the top of each run's page."""
    rows: dict[str, list[Cell]] = {}
    for column, run in enumerate(runs):
        cells = {}
        evaluation = run.evaluation
        if evaluation is not None and evaluation.main is not None:
            cells["Evaluation"] = Cell(evaluation.main.title, evaluation.name)
            for key, title in RATE_TITLES.items():
                cells[title] = rate_cell(evaluation.main, key)
        for tile in tiles(run):
            cells[tile.label] = Cell(tile.value, tile.note)
        for title, cell in cells.items():
            rows.setdefault(title, [Cell(NOTHING)] * len(runs))[column] = cell
    return Table("Results", ("", *names), [[Cell(title), *cells] for title, cells in rows.items()])


def _differing(runs: Sequence[Run], names: Sequence[str], problems: list[str]) -> dict[str, dict[str, str | None]]:
    """Return the settings that are not the same in all runs that have settings."""
    settings: list[dict[str, str] | None] = []
    for run in runs:
        try:
            settings.append(read_settings(run))
        except CorruptFileError as error:
            problems.append(str(error))
            settings.append(None)
    known = [values for values in settings if values is not None]
    keys: dict[str, None] = {}
    for values in known:
        keys |= dict.fromkeys(values)
    differing = {}
    for key in sorted(keys):
        distinct = {values.get(key) for values in known}
        if len(distinct) > 1 and key not in _IDENTITY:
            differing[key] = {name: (values or {}).get(key) for name, values in zip(names, settings, strict=True)}
    return differing


def read_settings(run: Run) -> dict[str, str] | None:
    """Return the settings of a run as text, by names such as ``algo.gamma``; None if it has none.

    Raises:
        CorruptFileError: If they are not YAML, or too many.
        ConfigurationError: If PyYAML is not installed.
    """
    if run.config is None:
        return None
    try:
        import yaml  # type: ignore[import-untyped] # noqa: PLC0415 - only comparisons need it
    except ImportError as error:
        raise ConfigurationError(
            f"comparing settings needs PyYAML, which is not installed: {install_hint('train')}, or pyyaml by itself"
        ) from error
    path = run.folder / "config.yaml"
    try:
        document = yaml.safe_load(run.config)
        if not isinstance(document, Mapping):
            raise CorruptFileError(f"{path}: contains no settings")
        return _flatten(document, path)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, CorruptFileError):
            raise
        raise CorruptFileError(f"{path}: is not YAML ({type(error).__name__})") from error


def _flatten(document: Mapping[Any, Any], path: Path) -> dict[str, str]:
    """Return nested settings by name."""
    found: dict[str, str] = {}
    # Aliases can make a short file stand for a huge or endless tree, so what is visited is counted.
    pending: list[tuple[str, Any]] = [("", document)]
    num_visited = 0
    while pending:
        prefix, value = pending.pop()
        num_visited += 1
        if num_visited > MAX_SETTINGS:
            raise CorruptFileError(f"{path}: has more than {MAX_SETTINGS} settings")
        if isinstance(value, Mapping) and value:
            for key, member in list(value.items())[:MAX_SETTINGS]:
                pending.append((f"{prefix}{_short(key)}.", member))
        else:
            found[prefix.removesuffix(".")] = _short(value)
    return found


def _short(value: Any) -> str:
    """Return a value of a YAML file as text of limited length."""
    if isinstance(value, list | dict | set | tuple):
        # A list may hold aliases of itself, and of long lists: only its own, plain members are shown.
        members = [str(one) for one in list(value)[:20] if isinstance(one, str | int | float)]
        return f"[{', '.join(members)}]"[:MAX_VALUE]
    return str(value)[:MAX_VALUE]
