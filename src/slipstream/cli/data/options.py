"""Options that say which datasets of a file are what, and how commands show how far they are."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slipstream.errors import ConfigurationError

if TYPE_CHECKING:
    from slipstream.datasets.description import Fields

CameraOption = Annotated[
    list[str] | None,
    typer.Option("--camera", help="A camera and its images: left=obs/left_cam. May be repeated.", show_default=False),
]
JointOption = Annotated[
    list[str] | None,
    typer.Option("--joint", help="Joint positions; repeated, they are put side by side.", show_default=False),
]
ActionOption = Annotated[str | None, typer.Option("--action", help="Actions.", show_default=False)]
RewardOption = Annotated[str | None, typer.Option("--reward", help="Rewards.", show_default=False)]
TerminalOption = Annotated[str | None, typer.Option("--terminal", help="Flags of terminal states.", show_default=False)]
FilterKeyOption = Annotated[
    str | None, typer.Option("--filter-key", help="Only the episodes in robomimic's mask/NAME.", show_default=False)
]
ColorOption = Annotated[
    Literal["rgb", "bgr"] | None,
    typer.Option("--color", help="Order of the channels of compressed images.", show_default=False),
]
SkipOption = Annotated[bool, typer.Option("--skip-bad-episodes", help="Skip and count episodes that cannot be used.")]
EpisodesOption = Annotated[
    str | None, typer.Option("--episodes", help="The group whose groups are the episodes.", show_default=False)
]


def fields_of(
    camera: list[str] | None = None,
    joint: list[str] | None = None,
    action: str | None = None,
    reward: str | None = None,
    terminal: str | None = None,
    episodes: str | None = None,
) -> Fields:
    """Return what the options say."""
    from slipstream.datasets.description import Fields

    cameras = {}
    for text in camera or ():
        name, equals, path = text.partition("=")
        if not name or not equals or not path:
            raise ConfigurationError(f"--camera is {text!r}, expected a name and a path such as left=obs/left_cam")
        cameras[name] = path
    return Fields(cameras or None, tuple(joint or ()) or None, action, reward, terminal, episodes=episodes)


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many frames are done, on a terminal; yields a function to be told so."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from slipstream.cli.output import console

    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
