"""``slipstream rollout``: look into rollouts, check them, and take them to other tools.

Each command is in the module of its name. Commands import what they need when they run; what is imported here imports
neither torch nor NumPy.
"""

from __future__ import annotations

from slipstream.cli.groups import command_group
from slipstream.cli.rollout.export import export
from slipstream.cli.rollout.inspect import inspect
from slipstream.cli.rollout.verify import verify

app = command_group(
    "rollout",
    "Look into rollouts, check them, and take them to other tools.",
    {
        inspect: "inspect runs/walker/rollouts/rollout_000100.slip",
        verify: "verify runs/walker && echo sound",
        export: "export rollout_000100.slip walker.npz --keys agents/observation --envs 0:8",
    },
)
