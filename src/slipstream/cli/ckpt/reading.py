"""Read a checkpoint of any format; what goes wrong becomes a sentence."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.cli.ckpt.formats import find_format
from slipstream.errors import CorruptFileError, SlipstreamError


def load(path: Path) -> Any:
    """Return the state of a checkpoint of any format."""
    from slipstream.checkpoint.load import load_checkpoint

    find_format(path)
    with reading(path):
        return load_checkpoint(path)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Take any failure to make sense of a file for damage."""
    try:
        yield
    except (SlipstreamError, OSError, RecursionError, ImportError):  # a package that is missing is no damage
        raise
    except Exception as error:
        raise CorruptFileError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


@contextlib.contextmanager
def one_line(path: Path) -> Iterator[None]:
    """Turn a state nested so deeply that reading it fails into a sentence."""
    try:
        yield
    except RecursionError:
        raise SlipstreamError(f"{path}: its state is nested too deeply") from None


def is_refusal(error: Exception) -> bool:
    """Tell whether a file is sound as far as that can be told, but would have to be trusted to be loaded."""
    return isinstance(error.__cause__, pickle.UnpicklingError) and "which is refused" in str(error)
