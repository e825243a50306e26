"""How commands print: text from files is shown as it is, and never obeyed."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text


def console(*, stderr: bool = False) -> Console:
    """Return a console that takes no text for markup and breaks no line that a script might read."""
    return Console(stderr=stderr, soft_wrap=True, markup=False, emoji=False, highlight=False)


def plain(text: str) -> Text:
    """Return text with control characters made visible, so that a file cannot steer the terminal it is shown on."""
    return Text("".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text))


def print_lines(*lines: str) -> None:
    """Print lines of text."""
    for line in lines:
        console().print(plain(line))


def print_error(sentence: str) -> None:
    """Print one line on stderr that says what went wrong."""
    typer.echo(f"slipstream: {plain(sentence).plain}", err=True)


def print_table(table: Table) -> None:
    """Print a table in full, though the terminal may be narrower."""
    screen = console()
    needed = screen.measure(table, options=screen.options.update(width=10_000)).maximum
    screen.width = max(screen.width, needed)
    screen.print(table, soft_wrap=False, crop=False)


def print_folding(table: Table) -> None:
    """Print a table as wide as the terminal, in which columns may fold; in full where a script may read it."""
    screen = console()
    if screen.is_terminal:
        screen.print(table, soft_wrap=False, crop=False)
    else:
        print_table(table)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object, in colour on a terminal."""
    screen = console()
    text = json.dumps(document, indent=2)
    screen.print_json(text) if screen.is_terminal else screen.out(text, highlight=False)
