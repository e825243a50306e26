"""``slipstream train``: read settings, train, evaluate, write the report, print a summary."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.threads import calm_threads
from slipstream.errors import ConfigurationError
from slipstream.text import plural

if TYPE_CHECKING:
    from slipstream.run.folder import RunFolder
    from slipstream.train.groups import RaySettings
    from slipstream.train.processes import Processes
    from slipstream.train.settings import TrainSettings
    from slipstream.train.trainer import Trainer

EXAMPLE = "slipstream train preset=quick name=first"

_HELP = """Train a navigation policy in the embedded simulator.

Settings are Hydra overrides with NavRL's names, such as env.num_envs=1024 env.num_obstacles=350
env_dyn.num_obstacles=80 wandb.mode=offline compress_checkpoint=True; preset=quick learns in minutes on two cores,
preset=navrl (the default) is the original's training. Everything goes to runs/<name>, and runs/last points to it.

resume=<name>, resume=last or resume=FOLDER continues that run exactly where it was. Ctrl-C and SIGTERM save and stop,
with exit code 130 or 143.

dist.shards=4 devices=2 trains in two processes. One, two or four compute the same run, and each of them can resume it.
Under torchrun, leave devices out: torchrun --nproc-per-node=2 -m slipstream train dist.shards=4
"""


def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.", show_default=False)] = None,
    *,
    cfg: Annotated[
        str | None,
        typer.Option(
            "--cfg", "-c", metavar="job", help="job: print the settings as YAML and exit.", show_default=False
        ),
    ] = None,
    evaluate: Annotated[bool, typer.Option(help="Evaluate and report at the end.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help="Hydra's; refused.", hidden=True)] = False,
    config_source: Annotated[
        str | None,
        typer.Option(
            *("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"),
            help="Hydra's; refused.",
            hidden=True,
        ),
    ] = None,
) -> None:
    """Train; `_HELP` is the text that users see."""
    calm_threads()
    from slipstream.cli.processes import one_voice  # noqa: PLC0415 - keeps --help quick
    from slipstream.train.processes import connect  # noqa: PLC0415

    _refuse_hydra_options(cfg, config_source, multirun=multirun)
    if cfg is not None:
        _print_settings(overrides or [])
        return
    processes = connect()
    with one_voice(processes):
        _train(processes, overrides or [], evaluate=evaluate, json=json)


def _refuse_hydra_options(cfg: str | None, config_source: str | None, *, multirun: bool) -> None:
    """Refuse the options of Hydra's command line that are not supported, with the way to get the same."""
    if multirun:
        raise ConfigurationError("--multirun is not supported: start slipstream train once for each set of values")
    if config_source is not None:
        raise ConfigurationError(
            f"another configuration ({config_source}) is not supported: choose a preset= and override single settings"
        )
    if cfg not in (None, "job"):
        raise ConfigurationError(f"--cfg is {cfg!r}, expected job, as in: slipstream train --cfg job preset=quick")


def _print_settings(overrides: Sequence[str]) -> None:
    """Print the settings that a command line results in: those of the run, if it resumes one."""
    from slipstream.train.settings import to_yaml  # noqa: PLC0415 - keeps --help quick
    from slipstream.train.startup import resolve_settings  # noqa: PLC0415

    typer.echo(to_yaml(resolve_settings(overrides)), nl=False)


def _train(processes: Processes | None, overrides: Sequence[str], *, evaluate: bool, json: bool) -> None:
    """Train in this process, which may be one of several."""
    from slipstream.train.processes import remember_begin, restarts_left, under_torchrun  # noqa: PLC0415

    is_first = processes is None or processes.rank == 0
    settings, folder, is_resumed = _find_run(processes, overrides)
    if settings.devices > 1 and not under_torchrun():
        _launch(settings, folder, overrides, evaluate=evaluate, json=json)
    from slipstream.cli.output import console, print_json, print_lines  # noqa: PLC0415
    from slipstream.cli.training_output import describe_outcome, describe_start  # noqa: PLC0415
    from slipstream.train.display import Display  # noqa: PLC0415
    from slipstream.train.trainer import Trainer  # noqa: PLC0415

    screen = console(stderr=json)
    screen.quiet = not is_first
    _prepare(processes, settings, screen)
    display = Display(screen, settings.num_iterations)
    trainer = Trainer(settings, folder, display.update)
    try:
        done = 0
        if is_resumed:
            done = trainer.restore()
            display.begin_after(done)
        was_complete = done >= settings.num_iterations
        for line in describe_start(settings, folder.path, done):
            screen.print(line)
        # Not earlier: an attempt that was refused must not make the next one resume another user's run.
        remember_begin(processes)
        with display:
            stopped = trainer.run()
        outcome = _outcome(trainer)
        if stopped is not None:
            outcome["stopped"] = stopped.name
        elif evaluate:
            outcome |= _finish(trainer, settings, screen, processes)
    finally:
        trainer.close()
    if is_first:
        print_json(outcome) if json else print_lines(*describe_outcome(outcome, settings, was_complete=was_complete))
    if stopped is not None:
        # As a shell reports a process that the signal ended, so that `train && export` stops here. But torchrun would
        # take that for a failure, and restart the run that a person has stopped.
        raise typer.Exit(0 if restarts_left() else 128 + stopped)
    if "report" in outcome and not settings.headless:
        typer.launch(Path(outcome["report"]).absolute().as_uri())


train.__doc__ = _HELP


def _find_run(processes: Processes | None, overrides: Sequence[str]) -> tuple[TrainSettings, RunFolder, bool]:
    """Return what `open_run` does, found by the first process."""
    from slipstream.run.folder import RunFolder  # noqa: PLC0415 - keeps --help quick
    from slipstream.train.processes import attempt_overrides, has_begun, settle_devices  # noqa: PLC0415
    from slipstream.train.startup import open_run  # noqa: PLC0415

    def find() -> tuple[TrainSettings, Path, bool]:
        attempt = attempt_overrides(overrides, has_begun=functools.partial(has_begun, processes))
        settings, folder, is_resumed = open_run(attempt)
        return settle_devices(settings, overrides), folder.path, is_resumed

    settings, path, is_resumed = find() if processes is None else processes.first(find)
    return settings, RunFolder(path), is_resumed


def _prepare(processes: Processes | None, settings: TrainSettings, screen: Any) -> None:
    """Prepare this process for training, and connect it with the others."""
    from slipstream.train.startup import prepare_process  # noqa: PLC0415 - keeps --help quick

    _show_log(screen, 0 if processes is None else processes.rank)
    threads = settings.num_threads
    if settings.dist.shards:
        # So that results do not depend on the number of cores.
        threads = 1
        processes_text = "1 process" if settings.devices == 1 else f"{settings.devices} processes"
        screen.print(f"{plural(settings.dist.shards, 'shard')} in {processes_text}")
    # The other lines are about floating-point modes and memory, which a person who trains need not know.
    screen.print(f"computing with {prepare_process(threads)[0]}")
    if processes is not None:
        processes.form_group(settings)


def _launch(
    settings: TrainSettings, folder: RunFolder, overrides: Sequence[str], *, evaluate: bool, json: bool
) -> None:
    """Replace this process by torchrun, which starts as many as the settings ask for."""
    from slipstream.cli.processes import relaunch  # noqa: PLC0415 - keeps --help quick

    arguments = list(overrides)
    if not any(override.startswith(("name=", "resume=")) for override in overrides):
        # The name that comes from the clock is chosen once.
        arguments.append(f"name={folder.name}")
    if not evaluate:
        arguments.append("--no-evaluate")
    if json:
        arguments.append("--json")
    relaunch(settings.devices, ["train", *arguments])


def _outcome(trainer: Trainer) -> dict[str, Any]:
    """Return what every run reports, stopped or not."""
    return {
        "run": str(trainer.folder.path),
        "stopped": None,
        "iterations": trainer.iteration,
        "env_frames": trainer.counters["env_frames"],
    }


def _finish(trainer: Trainer, settings: TrainSettings, screen: Any, processes: Processes | None) -> dict[str, Any]:
    """Evaluate in all processes, write the report in the first one, and return the results there.

    A run that was complete and evaluated before is not flown again: the result would be the same.
    """
    from slipstream.cli.evaluation_output import fly_jobs  # noqa: PLC0415 - keeps --help quick
    from slipstream.dist.threads import share_of_cores  # noqa: PLC0415
    from slipstream.report.page import write_report  # noqa: PLC0415
    from slipstream.run.evaluation import recorded_evaluation  # noqa: PLC0415
    from slipstream.run.folder import FINAL  # noqa: PLC0415
    from slipstream.train.evaluation.flights import SEED  # noqa: PLC0415
    from slipstream.train.evaluation.jobs import describe_conditions, final_jobs  # noqa: PLC0415
    from slipstream.train.evaluation.results import save_evaluation  # noqa: PLC0415
    from slipstream.train.startup import prepare_process  # noqa: PLC0415

    jobs = final_jobs(trainer.ppo.policy, settings)
    conditions = describe_conditions(jobs, settings, episodes=settings.eval_episodes)
    about = {**trainer.about(), "conditions": conditions}

    def find() -> dict[str, Any] | None:
        return recorded_evaluation(trainer.folder.evaluations, FINAL, about)

    document = trainer.ranks.first(find)
    if document is None:
        if settings.dist.shards:
            # Shards are computed on one thread, but flights are the same on any number of them.
            prepare_process(settings.num_threads or share_of_cores())
        ray = _cluster(trainer, processes)
        results = fly_jobs(jobs, settings, screen, settings.eval_episodes, SEED, processes, ray)
        if not trainer.ranks.is_first:
            return {}
        _, document = save_evaluation(results, trainer.folder.evaluations, FINAL, about)
    elif not trainer.ranks.is_first:
        return {}
    else:
        path = trainer.folder.path
        screen.print(f"using the evaluation from before (slipstream eval {path} evaluates again)")
    screen.print("writing the report")
    report = write_report(trainer.folder.path)
    timing = trainer.monitor.get_stats(window=1000)
    seconds = sum(timing[name]["mean"] for name in ("rollout", "update") if name in timing)
    saving = trainer.checkpoint_stats()
    outcome = {
        "report": str(report),
        "frames_per_s": settings.frames_per_iteration / seconds if seconds else None,
        "checkpoints_saved": int(saving["save_count"]),
        "checkpoint_stall_ms": None,
        "checkpoint_ratio": None,
        "rollout_ratio": _rollout_ratio(trainer),
        "evaluation": document["results"],
    }
    # A run that was complete already saved nothing this time, so there is nothing to average.
    if outcome["checkpoints_saved"]:
        outcome["checkpoint_stall_ms"] = trainer.checkpoint_stall_ms()
        outcome["checkpoint_ratio"] = saving["compression_ratio"]
    return outcome


def _cluster(trainer: Trainer, processes: Processes | None) -> RaySettings | None:
    """Return the Ray cluster that flies the evaluation at the end of a training, if it is of use for that."""
    settings = trainer.settings
    # A Ray on this machine has no other cores than this process. A GPU, or torchrun's processes, fly by themselves.
    if settings.rollouts != "ray" or settings.ray.address is None:
        return None
    if processes is not None or settings.torch_device().type != "cpu":
        return None
    # Its actors would keep their CPUs from the simulations.
    trainer.shards.shutdown()
    return settings.ray


def _rollout_ratio(trainer: Trainer) -> float | None:
    for storage in trainer.storages():
        storage.flush()
    stats = [storage.get_stats() for storage in trainer.storages()]
    stored = sum(one["stored_bytes"] for one in stats)
    return sum(one["raw_bytes"] for one in stats) / stored if stored else None


def _show_log(screen: Any, rank: int) -> None:
    """Print the log of the library above the live panel; of processes other than the first, only what is wrong."""
    import logging  # noqa: PLC0415 - keeps --help quick

    from rich.logging import RichHandler  # noqa: PLC0415

    log = logging.getLogger("slipstream")
    # An earlier command in the same process may have printed to another stream.
    for handler in log.handlers.copy():
        if isinstance(handler, RichHandler):
            log.removeHandler(handler)
    if rank:
        warnings = logging.StreamHandler()
        warnings.setLevel(logging.WARNING)
        warnings.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
        log.addHandler(warnings)
    else:
        log.addHandler(RichHandler(console=screen, show_path=False, show_level=False))
    log.setLevel(logging.INFO)
