"""``slipstream data inspect``: what a recorded file holds, as it would be loaded."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.data.options import (
    ActionOption,
    CameraOption,
    ColorOption,
    EpisodesOption,
    FilterKeyOption,
    JointOption,
    RewardOption,
    SkipOption,
    TerminalOption,
    fields_of,
)
from slipstream.cli.options import JsonOption

if TYPE_CHECKING:
    from slipstream.datasets.description import Description


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recorded HDF5 file.", show_default=False)],
    *,
    camera: CameraOption = None,
    joint: JointOption = None,
    action: ActionOption = None,
    reward: RewardOption = None,
    terminal: TerminalOption = None,
    episodes: EpisodesOption = None,
    filter_key: FilterKeyOption = None,
    color: ColorOption = None,
    skip_bad_episodes: SkipOption = False,
    json: JsonOption = False,
) -> None:
    """Show the layout of a file, the role of its datasets, and how images are read; lists guesses and unused data.

    Paths begin at the group of an episode, or at the root of a file without such groups.
    """
    from slipstream.cli.output import print_json
    from slipstream.datasets.describe import describe

    fields = fields_of(camera, joint, action, reward, terminal, episodes)
    fields = replace(fields, filter_key=filter_key, color=color)
    if skip_bad_episodes:
        fields = replace(fields, on_bad_episode="skip")
    found = describe(file, fields)
    if json:
        print_json(found.to_json() | {"caches": _caches(file)})
    else:
        _show(found)


def _show(found: Description) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from slipstream.cli.output import plain, print_lines, print_table
    from slipstream.text import format_bytes, plural

    facts = found.to_json()
    shortest, longest = facts["shortest_episode"], facts["longest_episode"]
    lengths = f"of {shortest} steps" if shortest == longest else f"of {shortest} to {longest} steps"
    print_lines(
        f"{found.path}: layout {found.layout}, {format_bytes(found.identity.size_bytes)}",
        f"{plural(found.num_episodes, 'episode')} {lengths}, {plural(found.num_transitions, 'transition')}; "
        f"joint_dim {found.joint_dim}, action_dim {found.action_dim}",
    )
    table = Table(box=SIMPLE_HEAD)
    for column in ("role", "dataset", "dtype", "shape", "stored", "read from"):
        table.add_column(column, no_wrap=True)
    for row in found.rows:
        table.add_row(*map(plain, (row.role, row.path, row.dtype, row.shape, row.storage, row.reading)))
    print_table(table)
    print_lines(*(f"note: {note}" for note in found.notes), *(f"cache: {path}" for path in _caches(found.path)))


def _caches(file: Path) -> list[str]:
    """Say which caches there are beside a file, and whether they would be used."""
    from slipstream.datasets.cache import FrameCache, describe_state
    from slipstream.errors import SlipstreamError

    found = []
    for path in sorted(file.absolute().parent.glob(f"{_escape(file.name)}.*px.frames")):
        try:
            cache = FrameCache(path)
            found.append(f"{path.name}, {cache.header.num_frames} frames, {describe_state(cache, file)}")
        except (SlipstreamError, OSError) as error:
            found.append(f"{path.name}, cannot be used: {error}")
    return found


def _escape(name: str) -> str:
    import glob

    return glob.escape(name)
