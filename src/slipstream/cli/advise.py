"""``slipstream advise``: which plan for rollouts suits a batch, measured on this machine."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.checks import require_positive
from slipstream.cli.options import JsonOption
from slipstream.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.rollout.advise import Advice

EXAMPLE = "slipstream advise runs/a --iteration-seconds 2.5 --memory-limit-gb 4"


def advise(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="A batch (.slip or .pt file), or a run folder.", show_default=False),
    ] = None,
    *,
    iteration_seconds: Annotated[
        float | None, typer.Option(help="How long a training iteration takes. By default from the run folder.")
    ] = None,
    step_seconds: Annotated[float | None, typer.Option(help="How long the update of one minibatch takes.")] = None,
    epochs: Annotated[int, typer.Option(help="How often an iteration reads the batch.")] = 4,
    minibatches: Annotated[int, typer.Option(help="Number of minibatches per epoch.")] = 16,
    memory_limit_gb: Annotated[
        float | None, typer.Option(help="Memory that rollouts may take on the device, in GB (10^9 bytes).")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="You want to keep rollouts.")] = False,
    interval: Annotated[int, typer.Option(help="Number of iterations between saved rollouts.")] = 100,
    bandwidth_mb_s: Annotated[float, typer.Option(help="Bandwidth of a network in MB/s; 125 is 1 Gbit/s.")] = 125.0,
    device: Annotated[str, typer.Option(help="The device that trains.")] = "cpu",
    folder: Annotated[
        Path | None, typer.Option(help="A folder on the disk for rollouts, to measure it.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Recommend a plan for rollouts: A no compression, B rollouts saved to disk, C rollouts packed in memory.

    Measures packing, saving and reading your batch on this machine, and explains the choice. For rollouts to keep:
    slipstream advise batch.pt --keep --interval 50. For a network of 100 Mbit/s: slipstream advise
    rollout_000100.slip --bandwidth-mb-s 12.5.
    """
    if path is None:
        raise ConfigurationError(
            f"no batch was given; give a .slip or .pt file of one, or a run folder, for example: {EXAMPLE}"
        )
    options = {
        "--iteration-seconds": iteration_seconds,
        "--step-seconds": step_seconds,
        "--memory-limit-gb": memory_limit_gb,
        "--bandwidth-mb-s": bandwidth_mb_s,
    }
    for name, value in options.items():
        if value is not None:
            require_positive(name, value)
    memory_limit_bytes = None
    if memory_limit_gb is not None:
        memory_limit_bytes = memory_limit_gb * 1e9

    from slipstream.cli.output import print_json
    from slipstream.rollout.advise import advise as measure_and_decide

    advice = measure_and_decide(
        path,
        iteration_s=iteration_seconds,
        step_s=step_seconds,
        epochs=epochs,
        minibatches=minibatches,
        memory_limit_bytes=memory_limit_bytes,
        keep_rollouts=keep,
        rollout_save_interval=interval,
        bandwidth_bytes_s=bandwidth_mb_s * 1e6,
        device=device,
        folder=folder,
        progress=_report_progress,
    )
    if json:
        print_json(advice.to_json())
    else:
        _print(advice)


def _report_progress(phrase: str) -> None:
    typer.echo(f"measuring: {phrase}", err=True)


def _print(advice: Advice) -> None:
    from slipstream.cli import advice_text as text
    from slipstream.cli.output import print_lines, print_table

    print_lines(*text.introduction(advice))
    plan_rows = [text.plan_row(advice, plan) for plan in advice.plans]
    print_table(_table(text.PLAN_COLUMNS, plan_rows, num_left=2))
    key_rows = [text.key_row(key) for key in advice.measured.keys]
    print_table(_table(text.KEY_COLUMNS, key_rows, num_left=3))
    print_lines(*text.speeds(advice), text.network(advice), *text.caveats(advice), "")
    print_lines(*text.questions(advice), *text.reasons(advice), text.headline(advice))


def _table(header: tuple[str, ...], rows: list[list[str]], num_left: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from slipstream.cli.output import plain

    table = Table(box=SIMPLE_HEAD)
    for column in header[:num_left]:
        table.add_column(column, no_wrap=True)
    for column in header[num_left:]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(plain, row))
    return table
