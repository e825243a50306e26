"""``slipstream export``: write a policy as ONNX or TorchScript, for a robot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.checks import require_choice

EXAMPLE = "slipstream export runs/last --format onnx"


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A run's folder, a checkpoint of one, or an original NavRL .pt.", show_default=False)
    ],
    *,
    format: Annotated[  # noqa: A002 - the option's name
        list[str] | None, typer.Option("--format", help="onnx or torchscript; may be repeated. Both by default.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(help="A file name without suffix, or a folder; the run's folder by default."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export a policy to a file that does not need Slipstream: lidar, dynamic_obstacle and state to velocities in m/s.

    Each file is compared with the policy before it is kept. The velocity is the mean action, in goal coordinates.
    """
    from slipstream.cli.output import print_json, print_lines  # noqa: PLC0415 - keeps --help quick
    from slipstream.store.local import make_folder  # noqa: PLC0415
    from slipstream.train.export import SUFFIXES, export_policy, output_path  # noqa: PLC0415
    from slipstream.train.policy import load_policy  # noqa: PLC0415

    chosen = format or list(SUFFIXES)
    for kind in chosen:
        require_choice("--format", kind, list(SUFFIXES))
    loaded = load_policy(checkpoint)
    base = loaded.run or loaded.path.parent
    if output is not None:
        base = Path(output)
        if output.endswith("/"):
            # A folder that need not exist. A Path does not know how its text ended.
            make_folder(base)
    kinds = [kind for kind in SUFFIXES if kind in chosen]
    written = [export_policy(loaded.policy, output_path(base, kind), kind) for kind in kinds]
    if json:
        files = [{**vars(one), "path": str(one.path)} for one in written]
        print_json({"checkpoint": str(loaded.path), "files": files})
        return
    for one in written:
        print_lines(f"{one.path}  {one.num_bytes:,} bytes, within {one.max_error_m_s:.1g} m/s of the policy")
