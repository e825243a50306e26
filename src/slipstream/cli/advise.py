"""``slipstream advise``: which plan for rollouts suits a batch, measured on this machine."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.units import parse_bandwidth, parse_shape, parse_size
from slipstream.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.rollout.advice import Advice

EXAMPLE = "slipstream advise runs/a --iteration-seconds 2.5 --memory-limit 4GB"


def advise(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A saved batch, .slip or .pt, or a run folder; without it and --shape, NavRL's shapes are made up.",
            show_default=False,
        ),
    ] = None,
    *,
    iteration_seconds: Annotated[
        float | None, typer.Option(help="How long an iteration of your training takes: turns costs into percent.")
    ] = None,
    step_seconds: Annotated[float | None, typer.Option(help="How long the update of one minibatch takes.")] = None,
    epochs: Annotated[int, typer.Option(help="How often an iteration reads a batch.")] = 4,
    minibatches: Annotated[int, typer.Option(help="In how many parts each time.")] = 16,
    memory_limit: Annotated[
        str | None, typer.Option(help="How much memory rollouts may take: 4GB, 512MiB.", show_default=False)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="You want to keep rollouts.")] = False,
    interval: Annotated[int, typer.Option(help="Every how many iterations one would be kept.")] = 100,
    bandwidth: Annotated[str, typer.Option(help="Of a network: 1Gbit, 100Mbit/s, 125MB/s.")] = "1Gbit",
    device: Annotated[str, typer.Option(help="Where training is.")] = "cpu",
    folder: Annotated[
        Path | None, typer.Option(help="Where rollouts would be kept, to measure that disk.", show_default=False)
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="A tensor of a batch to make up: lidar=36x4:float32. May be repeated.", show_default=False),
    ] = None,
    num_envs: Annotated[int, typer.Option(help="How many environments a batch made up has.")] = 1024,
    num_steps: Annotated[int, typer.Option(help="How many steps of each.")] = 32,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say which plan suits a batch: A no compression, B rollouts kept on disk, C rollouts packed in memory.

    Measures packing, saving and reading on this machine, and explains the choice.
    """
    if path is not None and shape:
        raise ConfigurationError(f"both {path} and --shape were given, expected one of them")
    shapes = dict(parse_shape(text, "--shape") for text in shape or ())
    limit = None if memory_limit is None else parse_size(memory_limit, "--memory-limit")
    bandwidth_bytes_s = parse_bandwidth(bandwidth, "--bandwidth")

    from slipstream.cli.output import print_json
    from slipstream.rollout.advice import advise as measure_and_decide

    advice = measure_and_decide(
        path or shapes or None,
        iteration_s=iteration_seconds,
        step_s=step_seconds,
        epochs=epochs,
        minibatches=minibatches,
        memory_limit_bytes=limit,
        keep_rollouts=keep,
        rollout_save_interval=interval,
        bandwidth_bytes_s=bandwidth_bytes_s,
        device=device,
        folder=folder,
        num_envs=num_envs,
        num_steps=num_steps,
        progress=_report_progress,
    )
    print_json(advice.to_json()) if json else _show(advice)


def _report_progress(sentence: str) -> None:
    typer.echo(f"measuring: {sentence}", err=True)


def _show(advice: Advice) -> None:
    from slipstream.cli.output import print_lines, print_table
    from slipstream.rollout.advice import KEY_COLUMNS, PLAN_COLUMNS, key_cells, plan_cells

    print_lines(*advice.introduction())
    print_table(_table(PLAN_COLUMNS, [plan_cells(plan) for plan in advice.plans], left=2))
    print_table(_table(KEY_COLUMNS, [key_cells(key) for key in advice.measured.keys], left=3))
    print_lines(*advice.speeds(), *advice.transfer(), *advice.caveats(), "", *advice.reasons())


def _table(header: tuple[str, ...], rows: list[list[str]], left: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from slipstream.cli.output import plain

    table = Table(box=SIMPLE_HEAD)
    for number, column in enumerate(header):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(plain, row))
    return table
