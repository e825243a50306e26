"""``slipstream ckpt``: look into checkpoints, check, convert and compare them, and tidy a folder of them.

Each command is in the module of its name. Commands import what they need when they run; what is imported here imports
neither torch nor NumPy.
"""

from __future__ import annotations

from slipstream.cli.ckpt import convert, diff, inspect, prune, verify
from slipstream.cli.groups import command_group

app = command_group(
    "ckpt",
    "Look into checkpoints, check, convert and compare them, and tidy a folder of them.",
    {
        inspect.inspect: "inspect checkpoint_iter_100.slip",
        verify.verify: "verify runs/walker && echo sound",
        convert.convert: "convert checkpoint_iter_100.slip policy.pt",
        diff.diff: "diff before.slip after.pt",
        prune.prune: "prune runs/walker --keep-last 3 --keep-best reward:max --dry-run",
    },
)
