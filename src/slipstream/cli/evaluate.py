"""``slipstream eval``: fly a policy from a checkpoint and count how its episodes end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.checks import require_choice
from slipstream.cli.threads import calm_threads

if TYPE_CHECKING:
    from slipstream.rl.network import NavRLPolicy
    from slipstream.train.evaluate import Scenario, ScenarioResult
    from slipstream.train.settings import TrainSettings

EXAMPLE = "slipstream eval runs/last --episodes 1024"

SEED = 1
NUM_FLIGHTS = 32


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A run's folder, a checkpoint of one, or an original NavRL .pt.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as key=value, in place of the run's.", show_default=False)
    ] = None,
    *,
    episodes: Annotated[int, typer.Option(help="How many to fly in each scenario.", min=1)] = 512,
    scenario: Annotated[
        list[str] | None, typer.Option(help="unseen, training, static, empty; may be repeated. All by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of starts, goals and obstacles' ways.", min=0)] = SEED,
    sample: Annotated[bool, typer.Option("--sample", help="Draw actions instead of taking their means.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where files go; the run's eval folder by default.")] = None,
    name: Annotated[str, typer.Option(help="Of the files.")] = "evaluation",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Fly a policy on the map it trained on, on unseen ones, without moving obstacles, and in an empty world.

    Each episode is flown once, by a drone of its own, until it reaches the goal, collides, leaves the height band or
    runs out of time. Writes NAME.json, and a rollout file of some flights for the report.
    """
    calm_threads()
    from slipstream.cli.output import console, print_json, print_lines, print_table  # noqa: PLC0415
    from slipstream.errors import ConfigurationError  # noqa: PLC0415
    from slipstream.train.evaluate import save_evaluation, standard_scenarios  # noqa: PLC0415
    from slipstream.train.policy import load_policy  # noqa: PLC0415
    from slipstream.train.startup import prepare_process  # noqa: PLC0415

    if Path(name).name != name or not name:
        raise ConfigurationError(f"--name is {name!r}, expected the name of a file without a folder")
    loaded = load_policy(checkpoint, overrides or [])
    prepare_process(loaded.settings.num_threads)
    known = {one.name: one for one in standard_scenarios(loaded.settings)}
    for one in scenario or ():
        require_choice("--scenario", one, list(known))
    chosen = [known[one] for one in dict.fromkeys(scenario or known)]
    screen = console(stderr=True)
    results = fly(loaded.policy, loaded.settings, chosen, episodes, screen, seed=seed, sample=sample)
    about = {**loaded.about(), "seed": seed, "action": "sample" if sample else "mean"}
    folder = output or (loaded.run / "eval" if loaded.run is not None else Path())
    path, document = save_evaluation(results, folder, name, about)
    if json:
        print_json(document)
        return
    print_table(_table(results))
    print_lines(f"written to {path}")


def fly(
    policy: NavRLPolicy,
    settings: TrainSettings,
    scenarios: Sequence[Scenario],
    episodes: int,
    screen: Any,
    *,
    seed: int = SEED,
    sample: bool = False,
) -> list[ScenarioResult]:
    """Evaluate a policy in some scenarios, with a bar for each; flights of all of them are recorded."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - keeps --help quick

    from slipstream.train.evaluate import evaluate as evaluate_in  # noqa: PLC0415

    columns = (TextColumn("flying: {task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    results = []
    with Progress(*columns, TimeElapsedColumn(), console=screen, disable=not screen.is_terminal) as progress:
        for scenario in scenarios:
            if not screen.is_terminal:
                screen.print(f"flying: {scenario.title}")
            task = progress.add_task(scenario.title, total=episodes)
            results.append(
                evaluate_in(
                    policy,
                    settings,
                    scenario,
                    episodes=episodes,
                    seed=seed,
                    choose="sample" if sample else "mean",
                    num_flights=NUM_FLIGHTS,
                    on_step=lambda ended, _, task=task: progress.update(task, completed=ended),  # type: ignore[misc]
                )
            )
    return results


def _table(results: Sequence[ScenarioResult]) -> Any:
    from rich.table import Table  # noqa: PLC0415 - keeps --help quick

    rates = ("success", "static_collision", "dynamic_collision", "out_of_bounds", "timeout")
    means = ("time_to_goal_s", "path_length_m")
    table = Table("scenario", "episodes")
    for title in (*rates, *means):
        table.add_column(title.replace("_s", " s").replace("_m", " m").replace("_", " "), justify="right")
    for result in results:
        cells = [f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]" for one in (result.rates[name] for name in rates)]
        cells += [
            "-" if one is None else f"{one.mean:.1f} ± {one.high - one.mean:.1f}"
            for one in (result.means[name] for name in means)
        ]
        table.add_row(result.scenario.title, str(result.episodes), *cells)
    return table
