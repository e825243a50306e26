"""``slipstream rollout``: look into rollouts, check them, and take them to other tools.

Each command is in the module of its name. Commands import what they need when they run; what is imported here imports
neither torch nor NumPy.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from slipstream.cli.rollout.export import export
from slipstream.cli.rollout.inspect import inspect
from slipstream.cli.rollout.verify import verify

_EXAMPLES: dict[Callable[..., None], str] = {
    inspect: "inspect runs/walker/rollouts/rollout_000100.slip",
    verify: "verify runs/walker && echo sound",
    export: "export rollout_000100.slip walker.npz --keys agents/observation --envs 0:8",
}

app = typer.Typer(
    help="Look into rollouts, check them, and take them to other tools.",
    epilog="Example: slipstream rollout inspect runs/walker/rollouts",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _command, _example in _EXAMPLES.items():
    app.command(epilog=f"Example: slipstream rollout {_example}")(_command)
