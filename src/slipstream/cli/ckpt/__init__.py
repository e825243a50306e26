"""``slipstream checkpoint``, or ``ckpt`` for short: inspect, verify, convert, compare and prune checkpoints.

Commands import what they need when they run. What is imported here imports neither torch nor NumPy.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.cli.ckpt import commands
from slipstream.cli.groups import command_group

_HELP = "Inspect, verify, convert and compare checkpoints, and prune a folder of them."
_EXAMPLES: dict[Callable[..., None], str] = {
    commands.inspect: "inspect checkpoint_iter_100.slip",
    commands.verify: "verify runs/walker && echo sound",
    commands.convert: "convert checkpoint_iter_100.slip policy.pt",
    commands.diff: "diff before.slip after.pt",
    commands.prune: "prune runs/walker --keep-last 3 --keep-best reward:max --dry-run",
}

app = command_group("checkpoint", _HELP, _EXAMPLES)
short_app = command_group("ckpt", "Short for `slipstream checkpoint`.", _EXAMPLES)
