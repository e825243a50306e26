"""Open the folder of a run and look at all that is in it: settings, metrics, a checkpoint, a rollout, evaluations.

To run it: python examples/inspect_everything.py runs/last. Without a folder it trains a moment first, to have one.
"""

import argparse
import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream import CheckpointManager, Container, Trainer, compose_settings, inspect_checkpoint, load_rollout
from slipstream.run.folder import RunFolder
from slipstream.run.metrics import read_rows
from slipstream.train.settings import settings_of

SMALL = "preset=quick env.num_envs=16 env.num_obstacles=40 max_frame_num=1024 algo.num_minibatches=2 save_interval=2"
QUICK = "rollout_save_interval=2 eval_interval=4 eval_episodes=8 env.max_episode_length=40 wandb=disabled"
METRICS = ("iteration", "env_frames", "actor_loss", "train/stats.reach_goal", "perf/iteration_mean")
screen = Console(markup=False, highlight=False, width=120)


def show(title: str, columns: tuple[str, ...], rows: list[list[object]]) -> None:
    """Print a table."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    screen.print(table)


def show_rollout(path: Path) -> None:
    """Print the largest arrays of a rollout; reads the index of the file only."""
    with Container(path) as container:
        entries = sorted(container.entries.items(), key=lambda item: -item[1].nbytes)[:4]
    rows: list[list[object]] = [[name, one.dtype, one.shape, one.nbytes, one.stored_bytes] for name, one in entries]
    show(f"rollout: {path.name}", ("array", "dtype", "shape", "bytes", "stored"), rows)


def inspect(run: RunFolder) -> None:
    """Print what a run holds."""
    settings, lines = settings_of(run), read_rows(run.metrics)
    screen.print(f"{run.path}: seed {settings.seed}, {settings.env.num_envs} environments, {settings.sim.dt} s a step")
    rows: list[list[object]] = [[line.get(name) for name in METRICS] for line in lines[-3:]]
    show(f"metrics: the last of {len(lines)} lines", METRICS, rows)
    if run.has_checkpoint():
        with CheckpointManager(run.checkpoints, keep_last=None) as manager:
            newest = manager.restore(keys="counters")  # only these values, of the newest that is intact
        screen.print(f"restored {newest.state['counters']}")
        tensors = sorted(inspect_checkpoint(manager.path(newest.step)).tensors, key=lambda tensor: -tensor.nbytes)
        rows = [[one.name, one.dtype, one.shape, one.nbytes, one.codec] for one in tensors[:4]]
        show(f"checkpoint of iteration {newest.step}", ("tensor", "dtype", "shape", "bytes", "codec"), rows)
    for path in sorted(run.rollouts.glob("rollout_*.slip"))[-1:]:
        reward = load_rollout(path, keys=[("next", "agents", "reward")], envs=slice(0, 4))["next", "agents", "reward"]
        screen.print(f"mean rewards of its first 4 drones: {reward.mean((1, 2)).tolist()}")
        show_rollout(path)
    for path in sorted(run.evaluations.glob("*.json")):
        found = json.loads(path.read_text())["results"]
        rows = [[one["scenario"], one["episodes"], one["success"]["mean"], one["timeout"]["mean"]] for one in found]
        show(f"evaluation: {path.name}", ("scenario", "episodes", "success", "timeout"), rows)


def main() -> None:
    """Inspect the run that is named, or one that is made for it."""
    parser = argparse.ArgumentParser(description="Look at all that is in the folder of a run.")
    parser.add_argument("run", type=Path, nargs="?")
    given: Path | None = parser.parse_args().run
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(given or Path(folder) / "tiny")
        if given is None:
            trainer = Trainer(compose_settings([*SMALL.split(), *QUICK.split()]), run)
            trainer.run()
            trainer.close()
        inspect(run)


if __name__ == "__main__":
    main()
