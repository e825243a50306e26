"""A group of commands, such as ``slipstream data``, each with an example below its help."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import typer


def command_group(name: str, says: str, commands: Mapping[Callable[..., None], str]) -> typer.Typer:
    """Make a group of commands; the example of the first is that of the group.

    Args:
        name: What comes after ``slipstream``.
        says: What the group is for.
        commands: For each command an example, without ``slipstream`` and the name.
    """
    examples = {command: f"Example: slipstream {name} {example}" for command, example in commands.items()}
    app = typer.Typer(help=says, epilog=next(iter(examples.values())), no_args_is_help=True, rich_markup_mode=None)
    for command, example in examples.items():
        app.command(epilog=example)(command)
    return app
