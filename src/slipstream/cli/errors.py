"""Turn what goes wrong while a file is read into one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import CorruptFileError, SlipstreamError


def sentence_of(error: BaseException) -> str:
    """Return what users see of an error that we foresee."""
    if isinstance(error, OSError) and not isinstance(error, SlipstreamError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Treat any unexpected failure to read a file as damage."""
    try:
        yield
    except (SlipstreamError, OSError, RecursionError, ImportError):
        # These have a message for the user. A package that is missing is not damage.
        raise
    except Exception as error:
        raise CorruptFileError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


@contextlib.contextmanager
def one_line(path: Path) -> Iterator[None]:
    """Turn the error for a state that is nested too deeply into a sentence."""
    try:
        yield
    except RecursionError:
        raise SlipstreamError(f"{path}: its state is nested too deeply") from None
