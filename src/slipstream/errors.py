"""Every exception that Slipstream raises, in one tree, and `naming`, which adds a file's name to them.

::

    SlipstreamError
    ├── CorruptFileError      (ValueError)    a file is damaged, truncated, or in another format
    ├── FormatVersionError    (ValueError)    a file needs a newer Slipstream
    ├── MissingEntryError     (KeyError)      a file has no entry of that name
    ├── CodecError            (ValueError)    a payload cannot be decoded, or a codec is misconfigured
    ├── ConfigurationError    (ValueError)    an invalid setting, or two that contradict each other
    ├── UnsupportedDtypeError (TypeError)     an array whose elements are not plain numbers
    ├── UnsupportedStateError (TypeError)     state that cannot be stored as data, such as an arbitrary object
    ├── StateMismatchError    (ValueError)    a checkpoint of another model; lists the differences
    ├── NonFiniteError        (FloatingPointError) a loss, gradient, target or recorded value is not finite
    ├── DatasetError          (ValueError)    a recording is inconsistent, was closed, or changed on disk
    ├── ReplayError           (ValueError)    an episode or a batch that a replay buffer cannot hold or return
    ├── OutOfRangeError       (IndexError)    an index beyond the last element
    ├── RolloutError          (ValueError)    a batch that is not a rollout: no time axis, time first, ragged
    ├── TornStateError        (RuntimeError)  guarded state changed while it was copied; nothing was written
    ├── RankLostError         (RuntimeError)  another process of a distributed run exited or cannot be reached
    ├── OrderError            (RuntimeError)  a rollout or a flight that another process should compute failed
    ├── LockedError           (TimeoutError)  another process holds a lock; the message says which
    ├── StoreError            (ConnectionError) an object store cannot be reached, or refuses a request
    ├── WriterConflictError   (RuntimeError)  another process writes checkpoints to the same URL
    ├── WriteError            (OSError)       a write failed; the previous file is untouched
    │   └── DiskFullError                     ... because there was no space left
    ├── QueueFullError        (RuntimeError)  the background queue is full and its policy is ``raise``
    ├── JobSkippedError       (RuntimeError)  a queued job was dropped for a newer one (``skip_oldest``)
    └── BackgroundError       (RuntimeError)  an earlier background job failed; see ``__cause__``

Each also derives from the matching builtin, so ``except ValueError`` or ``except OSError`` work too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = [
    "BackgroundError",
    "CodecError",
    "ConfigurationError",
    "CorruptFileError",
    "DatasetError",
    "DiskFullError",
    "FormatVersionError",
    "JobSkippedError",
    "LockedError",
    "MissingEntryError",
    "NonFiniteError",
    "OrderError",
    "OutOfRangeError",
    "QueueFullError",
    "RankLostError",
    "ReplayError",
    "RolloutError",
    "SlipstreamError",
    "StateMismatchError",
    "StoreError",
    "TornStateError",
    "UnsupportedDtypeError",
    "UnsupportedStateError",
    "WriteError",
    "WriterConflictError",
]


class SlipstreamError(Exception):
    """Base of every error that Slipstream raises on purpose."""


class CorruptFileError(SlipstreamError, ValueError):
    """A file is damaged, truncated, malicious, or not a Slipstream file.

    Attributes:
        entry: The name of the damaged entry of a container, if that is known.
    """

    entry: str | None = None


class FormatVersionError(SlipstreamError, ValueError):
    """A file uses a format version or a codec that this release does not support."""


class MissingEntryError(SlipstreamError, KeyError):
    """A file is intact but has no entry of the requested name."""

    # KeyError shows the repr of its argument; a sentence should be shown as a sentence.
    __str__ = Exception.__str__


class CodecError(SlipstreamError, ValueError):
    """A payload cannot be decoded, or a codec has invalid settings."""


class ConfigurationError(SlipstreamError, ValueError):
    """A setting is invalid or contradicts another; the message names it and says what was expected."""


class UnsupportedDtypeError(SlipstreamError, TypeError):
    """An array holds something other than bools, integers, floats or complex numbers."""


class UnsupportedStateError(SlipstreamError, TypeError):
    """State contains something that cannot be stored as data; the message names it and its key."""


class StateMismatchError(SlipstreamError, ValueError):
    """A checkpoint does not fit what it is loaded into; lists missing, unexpected and differing entries."""


class NonFiniteError(SlipstreamError, FloatingPointError):
    """A loss, a gradient, a target or a recorded value is NaN or infinite; no state was changed."""


class DatasetError(SlipstreamError, ValueError):
    """A recorded dataset is inconsistent, does not contain what was requested, was closed, or changed on disk."""


class RolloutError(SlipstreamError, ValueError):
    """A batch is not a rollout: no time axis, time before environments, keys that differ between environments."""


class ReplayError(SlipstreamError, ValueError):
    """An episode or a batch does not fit a replay buffer, or the buffer does not contain what was requested."""


class OutOfRangeError(SlipstreamError, IndexError):
    """An index is negative or beyond the last element; the message gives the valid range."""


class TornStateError(SlipstreamError, RuntimeError):
    """Guarded state changed while it was being copied; the snapshot was discarded and not written."""


class RankLostError(SlipstreamError, RuntimeError):
    """Another process of a distributed run exited or cannot be reached; the run resumes from its last checkpoint.

    Attributes:
        rank: The number of that process, if that is known.
    """

    rank: int | None = None


class OrderError(SlipstreamError, RuntimeError):
    """Work for another process failed, was lost too often, or was not ordered; the message names it."""


class LockedError(SlipstreamError, TimeoutError):
    """Another process, or another part of this one, holds a lock; the message says who, if that is known."""


class StoreError(SlipstreamError, ConnectionError):
    """An object store cannot be reached, or refuses to be read; the message names the URL, without credentials."""


class WriterConflictError(SlipstreamError, RuntimeError):
    """Another process writes checkpoints to the same URL; nothing of it was replaced, and local files stay."""


class WriteError(SlipstreamError, OSError):
    """A write failed; no partial file is left behind, and the previous file, if any, is untouched."""

    def __str__(self) -> str:
        return str(self.strerror or super().__str__())  # OSError would put "[Errno 28] " before the sentence


class DiskFullError(WriteError):
    """A write failed because the disk, a quota or a file-size limit was exhausted."""


class QueueFullError(SlipstreamError, RuntimeError):
    """The background queue is full and its policy is to raise."""


class JobSkippedError(SlipstreamError, RuntimeError):
    """A queued job was dropped to make room for a newer one."""


class BackgroundError(SlipstreamError, RuntimeError):
    """An earlier background job failed and its error was not retrieved; ``__cause__`` is that error."""


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the name of a file to every Slipstream error raised inside the block.

    The error object, its type, ``__cause__`` and traceback stay the same; only the message changes. A message that
    already begins with `path`, or with a file inside the folder `path`, is not changed, so blocks may be nested. Errors
    of the operating system already name their file and are not changed either.

    Args:
        path: The file or folder that the code inside the block is about.

    Example:
        >>> with naming("model.slip"):
        ...     raise CorruptFileError("the index does not match its checksum")
        Traceback (most recent call last):
        ...
        slipstream.errors.CorruptFileError: model.slip: the index does not match its checksum
    """
    try:
        yield
    except SlipstreamError as error:
        if not isinstance(error, OSError) and not _begins_with(str(error), os.fspath(path)):
            # Raising a new error instead would lose its traceback and attributes, or turn the old one into a cause.
            error.args = (f"{os.fspath(path)}: {error}", *error.args[1:])
        raise


def _begins_with(message: str, path: str) -> bool:
    """Return whether a message already names a file, or a file in that folder; ``a.slip2`` does not name ``a.slip``."""
    if not message.startswith(path):
        return False
    following = message[len(path) : len(path) + 1]
    return following in ("", ":", "/", " ")
