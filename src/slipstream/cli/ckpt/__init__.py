"""``slipstream ckpt``: inspect, verify, convert and compare checkpoints, and prune a folder of them.

Commands import what they need when they run. What is imported here imports neither torch nor NumPy.
"""

from __future__ import annotations

from slipstream.cli.ckpt import commands
from slipstream.cli.groups import command_group

app = command_group(
    "ckpt",
    "Inspect, verify, convert and compare checkpoints, and prune a folder of them.",
    {
        commands.inspect: "inspect checkpoint_iter_100.slip",
        commands.verify: "verify runs/walker && echo sound",
        commands.convert: "convert checkpoint_iter_100.slip policy.pt",
        commands.diff: "diff before.slip after.pt",
        commands.prune: "prune runs/walker --keep-last 3 --keep-best reward:max --dry-run",
    },
)
