"""Open rollouts, and find their keys by the names that are typed on a command line."""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import CorruptFileError, SlipstreamError
from slipstream.rollout.files import KIND, RolloutFile
from slipstream.rollout.layout import Field, Key, Layout
from slipstream.store.container import Container


class NotARolloutError(SlipstreamError):
    """A sound container that holds something other than a rollout."""


def open_rollout(path: Path) -> RolloutFile:
    """Open a rollout; reads its index only.

    Raises:
        NotARolloutError: If Slipstream wrote the file, but as something else.
        CorruptFileError: If it is damaged, or its layout does not fit its arrays.
        FormatVersionError: If a newer release wrote it.
    """
    try:
        return RolloutFile(path)
    except CorruptFileError:
        # Name the command that reads it, if the file is sound and of another kind.
        with Container(path) as container:
            check_kind(container)
        raise


def check_kind(container: Container) -> None:
    """Raise `NotARolloutError` if a container is of another kind."""
    if container.kind == "checkpoint":
        raise NotARolloutError(f"{container.path}: is a checkpoint, not a rollout; use slipstream ckpt")
    if container.kind != KIND:
        raise NotARolloutError(f"{container.path}: is a container of kind {container.kind!r}, expected a rollout")


def fields_under(layout: Layout, text: str) -> list[Field]:
    """Return the tensors whose name is `text`, or begins with `text` and a slash."""
    return [field for field in layout.fields if f"{field.name}/".startswith(f"{text}/")]


def find_keys(file: RolloutFile, texts: list[str]) -> list[Key]:
    """Return the keys that texts such as ``agents/observation`` name; a text may list several with commas.

    Raises:
        SlipstreamError: If the rollout has no such key.
    """
    found: dict[Key, None] = {}
    for text in texts:
        parts = [text]
        # A key may contain a comma itself.
        if not fields_under(file.layout, text):
            parts = text.split(",")
        for part in parts:
            fields = fields_under(file.layout, part)
            if not fields:
                raise SlipstreamError(f"{file.path}: has no key {part!r}; it has {_known_names(file.layout)}")
            for field in fields:
                found[field.key] = None
    return list(found)


def _known_names(layout: Layout) -> str:
    names = ", ".join(field.name for field in layout.fields[:8])
    if len(layout.fields) > 8:
        return f"{names}, ..."
    return names
