"""How well policies fly: three recipes with three seeds each, next to the planner, on maps that none has seen.

    python bench/flights.py                                 # train 9 policies, fly and print; an hour on two idle cores
    python bench/flights.py --runs DIR                      # take runs that are there, and train the others into it
    python bench/flights.py --recipes quick                 # that recipe only
    python bench/flights.py --write docs/benchmarks.md      # and put the tables into the page
    python bench/flights.py --navrl navrl_checkpoint.pt     # the original's policy too, if you have it

Each number is the share of 512 flights (8 on each of 64 unseen maps, 350 boxes and 80 moving obstacles) that reach the
goal. *Quick* is the first-order lag at 10 Hz that the presets train in, *faithful* NavRL's quadrotor at 62.5 Hz. The
seeds 0, 1 and 2 were fixed beforehand, and nothing was tuned on these maps; the recipe was chosen by results with the
seeds 0 and 3 on other maps. *Untaught* is ``preset=quick`` without the
planner as a teacher: what PPO learns by itself in the same number of frames.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `slipstream train` does, before torch is there

from page import machine, write_section

from slipstream.train.changes import compare_settings, rule_of
from slipstream.train.evaluation.entrants import choose_scenarios, load_entrant
from slipstream.train.evaluation.jobs import evaluate
from slipstream.train.evaluation.results import ScenarioResult
from slipstream.train.policy import load_policy
from slipstream.train.settings import compose_settings
from slipstream.train.startup import prepare_process

SEEDS = (0, 1, 2)
RECIPES = {
    "quick": ("preset=quick",),
    "strong": ("preset=strong",),
    "untaught": ("preset=quick", "algo.teacher_coefficient=0"),
}
NUM_EPISODES = 512


@dataclass(frozen=True)
class Column:
    """Conditions to fly under: a scenario and options of ``slipstream eval``."""

    title: str
    scenario: str
    faithful: bool = False
    shield: bool = False
    overrides: tuple[str, ...] = ()


COLUMNS = (
    Column("`through`", "through"),
    Column("`line`", "line"),
    Column("`line`, nothing moving", "line", overrides=("env_dyn.num_obstacles=0",)),
    Column("`line`, faithful", "line", faithful=True),
    Column("`through`, shield", "through", shield=True),
    Column("`line`, shield", "line", shield=True),
    Column("`line`, faithful, shield", "line", faithful=True, shield=True),
)

# Least mean over seeds of each column.
TARGETS = {
    "quick": {"`through`": 0.64, "`line`": 0.68, "`line`, nothing moving": 0.95, "`line`, faithful": 0.65}
    | {"`line`, shield": 0.95, "`line`, faithful, shield": 0.92},
    "strong": {"`through`": 0.75, "`line`": 0.84, "`line`, faithful": 0.73}
    | {"`line`, shield": 0.97, "`line`, faithful, shield": 0.95},
}


def train(recipe: str, seed: int, folder: Path) -> Path:
    """Return the folder of a finished run, trained if need be."""
    run = folder / f"{recipe}{seed}"
    _require_recipe(run, [*RECIPES[recipe], f"seed={seed}"])
    command = [sys.executable, "-m", "slipstream", "train", *RECIPES[recipe], f"seed={seed}"]
    command += [f"name={run.name}", f"run_dir={folder}", "resume=auto", "eval_interval=0", "wandb=disabled"]
    subprocess.run([*command, "--no-evaluate"], check=True)
    return run


def _require_recipe(run: Path, overrides: list[str]) -> None:
    """Stop if a run was trained with another recipe: a finished run is taken as it is."""
    if not run.exists():
        return
    before = load_policy(run).metrics["config"]
    changes = [change for change in compare_settings(before, compose_settings(overrides)) if is_of_recipe(change.name)]
    if changes:
        raise SystemExit(f"{run} was trained with other settings ({changes[0]}); delete it, or choose another --runs")


def is_of_recipe(name: str) -> bool:
    """Tell whether a setting belongs to the experiment; precision and name are resolved by the run."""
    return rule_of(name) != "free" and name not in ("name", "algo.precision")


def fly(policy: str | None, column: Column) -> ScenarioResult | None:
    """Fly a policy, or the planner if there is none; returns None where a shield has nothing to do."""
    if policy is None and column.shield:
        return None
    overrides = list(column.overrides)
    if policy is None or policy.endswith(".pt"):
        overrides.insert(0, "preset=quick")
    entrant = load_entrant(policy, overrides, planner=policy is None, faithful=column.faithful, shield=column.shield)
    scenario = choose_scenarios([entrant], [column.scenario])[0]
    return evaluate(entrant.candidate, entrant.settings, scenario, episodes=NUM_EPISODES)


def table(rows: dict[str, str | None]) -> tuple[list[str], dict[str, list[float | None]]]:
    """Fly everything; returns the lines of a table, and success by row and column."""
    lines = ["| policy | " + " | ".join(column.title for column in COLUMNS) + " |"]
    lines.append("|---|" + "---|" * len(COLUMNS))
    found: dict[str, list[float | None]] = {}
    for title, policy in rows.items():
        cells = []
        found[title] = []
        for column in COLUMNS:
            result = fly(policy, column)
            if result is None:
                cells.append("")
                found[title].append(None)
                continue
            success = result.rates["success"]
            cells.append(f"{success.mean:.3f} [{success.low:.2f}, {success.high:.2f}]")
            found[title].append(success.mean)
            print(f"{title}, {column.title}: {cells[-1]}", file=sys.stderr, flush=True)
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines, found


def summarise(recipe: str, found: dict[str, list[float | None]]) -> list[str]:
    """Return rows with the mean, the worst seed and, if it has one, the target of a recipe."""
    names = [title for title in found if title.startswith(f"{recipe}, seed")]
    means = []
    worst = []
    targets = []
    for number, column in enumerate(COLUMNS):
        values = [value for name in names if (value := found[name][number]) is not None]
        means.append(f"**{sum(values) / len(values):.3f}**")
        worst.append(f"{min(values):.3f}")
        target = TARGETS.get(recipe, {}).get(column.title)
        targets.append("" if target is None else f"{target:.2f}")
    lines = [
        f"| {recipe}, mean of seeds | " + " | ".join(means) + " |",
        f"| {recipe}, worst seed | " + " | ".join(worst) + " |",
    ]
    if recipe in TARGETS:
        lines.append(f"| {recipe}, target for the mean | " + " | ".join(targets) + " |")
    return lines


def main() -> None:
    """Train, fly, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where runs are kept; a temporary folder by default")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--navrl", help="a policy file of the original NavRL")
    parser.add_argument("--write", type=Path, help="the page to put the tables into")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.runs or Path(temporary)
        rows: dict[str, str | None] = {"planner, no learning": None}
        if args.navrl is not None:
            rows["NavRL's released policy"] = args.navrl
        for recipe in args.recipes:
            for seed in SEEDS:
                rows[f"{recipe}, seed {seed}"] = str(train(recipe, seed, folder))
        prepare_process()
        lines, found = table(rows)
    for recipe in args.recipes:
        lines += summarise(recipe, found)
    report = "\n".join([machine(["torch", "slipstream"]), "", *lines])
    print(report)
    if args.write is not None:
        write_section(args.write, "flights", report)


if __name__ == "__main__":
    main()
