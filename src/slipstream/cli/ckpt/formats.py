"""Which format a checkpoint is of, or is to be of."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.store.local import check_regular, open_regular
from slipstream.text import install_hint

PATTERN = "checkpoint_iter_*.slip"  # what a CheckpointManager calls them


class Format(StrEnum):
    """What a checkpoint can be converted to."""

    NATIVE = "native"
    PT = "pt"
    LZ4 = "lz4"
    SAFETENSORS = "safetensors"


_SUFFIXES = {
    ".slip": Format.NATIVE,
    ".pt": Format.PT,
    ".pth": Format.PT,
    ".lz4": Format.LZ4,
    ".safetensors": Format.SAFETENSORS,
}


def format_by_suffix(target: Path) -> Format:
    """Return the format that the suffix of a file names; raises `SlipstreamError` if it names none."""
    try:
        return _SUFFIXES[target.suffix]
    except KeyError:
        raise SlipstreamError(
            f"{target}: its suffix names no format, expected .slip, .pt, .pt.lz4, .safetensors, or --format"
        ) from None


def find_format(path: Path) -> Format:
    """Return the format of a file, by its content, if it can be read here; raises a sentence if not."""
    check_regular(path)
    # Before the others, which need torch.
    if is_native(path):
        return Format.NATIVE
    from slipstream.checkpoint import load

    kind = Format(load.find_format(path))
    if kind is Format.SAFETENSORS:
        require_safetensors()
    return kind


def is_native(path: Path) -> bool:
    """Tell a native checkpoint from those of other formats, without torch."""
    from slipstream.store.header import MAGIC

    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def require_safetensors() -> None:
    """Raise a sentence if the package that reads and writes safetensors is missing."""
    try:
        import safetensors.torch  # noqa: F401 - an extra
    except ImportError as error:
        raise SlipstreamError(
            f"safetensors files need a package that is not installed: {install_hint('safetensors')}"
        ) from error
